"""`parity eval`: accepted tokens of a checkpoint, by the real draft-verify loop."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class CheckpointChoice(StrEnum):
    """Which checkpoint of a run."""

    last = "last"
    best = "best"


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint in it.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts as for capture; held-out ones by default.")
    ] = None,
    which: Annotated[
        CheckpointChoice, typer.Option(help="The run's newest, or that of the lowest loss.")
    ] = CheckpointChoice.last,
    max_prompts: Annotated[int, typer.Option(help="Prompts at most.", min=1)] = 120,
    new_tokens: Annotated[int, typer.Option(help="Tokens that a text may get.", min=2)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    min_tau: Annotated[float | None, typer.Option(help="Exit 1 below this.", min=1)] = None,
    device: Annotated[str | None, typer.Option(help="Instead of the training file's: cpu, cuda.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the report; only an earlier eval's is replaced.")
    ] = Path("parity-eval"),
    threads: Annotated[int, typer.Option(help="Threads.", min=1)] = 1,
) -> None:
    """Measure tau: tokens a draft-verify cycle adds, by the real loop and offline, slot by slot."""
    import torch

    from parity.cli.output import exit_code, print_report, report_folder, save_report
    from parity.commands.evaluate import evaluate as run_evaluate

    torch.set_num_threads(threads)
    report_folder(out, "eval")
    with _progress() as show:
        report = run_evaluate(
            checkpoint,
            prompts=prompts,
            which=which.value,
            max_prompts=max_prompts,
            new_tokens=new_tokens,
            temperature=temperature,
            seed=seed,
            min_tau=min_tau,
            device=device,
            progress=show,
            command=shlex.join(["parity", *sys.argv[1:]]),
        )
    save_report(report, out)
    print_report(report)
    typer.echo(f"\nreport: {out / 'report.html'}")
    raise typer.Exit(int(exit_code(report)))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal; silent where it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        job = bar.add_task("prompts", total=None)
        yield lambda done, total: bar.update(job, completed=done, total=total)
