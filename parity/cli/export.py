"""`parity export`: a checkpoint for other readers."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from parity.cli.eval import CheckpointChoice


class ExportLayout(StrEnum):
    """Layouts that other readers know."""

    zlab = "zlab"
    speculators = "speculators"


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint in it.")],
    to: Annotated[ExportLayout, typer.Option(help="zlab (also SpecForge's) or speculators.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    which: Annotated[
        CheckpointChoice, typer.Option(help="The run's newest, or that of the lowest loss.")
    ] = CheckpointChoice.last,
    full_vocabulary: Annotated[
        bool, typer.Option("--full-vocabulary", help="zlab: leave a reduced vocabulary's maps out.")
    ] = False,
    partial_rotary: Annotated[
        bool, typer.Option("--partial-rotary", help="Write a rope that only vLLM reads as we do.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")] = False,
) -> None:
    """Write a checkpoint in z-lab's or speculators' layout, and read it back."""
    from parity.commands.convert import export as run_export

    done = run_export(
        checkpoint,
        to=to.value,
        out=out,
        which=which.value,
        full_vocabulary=full_vocabulary,
        partial_rotary=partial_rotary,
        overwrite=overwrite,
    )
    for line in done.lines():
        typer.echo(line)
