"""`parity import`: another trainer's checkpoint as a run of ours."""

from pathlib import Path
from typing import Annotated

import typer


def import_(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder in z-lab's, SpecForge's or speculators' layout.")
    ],
    out: Annotated[Path, typer.Option(help="Run to make; must not exist, or be empty.")],
    target: Annotated[
        str | None, typer.Option(help="Name or path of the target, where the files do not say.")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Training file for what checkpoints do not say; else a preset.")
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Answer to a question that an import asked, repeatable."),
    ] = None,
) -> None:
    """Read a checkpoint for `parity eval` and `parity train`; what is ambiguous is asked, never guessed."""
    from parity.commands.convert import import_ as run_import
    from parity.errors import ParityError

    answers = {}
    for each in answer or []:
        name, equals, value = each.partition("=")
        if not equals:
            raise ParityError(f"--answer {each}", "no =", "write --answer NAME=VALUE, as the question says")
        answers[name.strip()] = value.strip()
    done = run_import(checkpoint, out=out, target=target, recipe=recipe, answers=answers)
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"then: parity eval {out}, or parity train {out / 'training.yaml'} --out {out}")
