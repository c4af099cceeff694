"""`parity train`: trains a drafter by a training file; without one, the `tiny` preset on the embedded target."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from parity.model.training.trainer import Trainer
    from parity.watching.sinks import TerminalPanel

INTERRUPTED_TEXT = 130
LINES = 20
"""Lines that a piped run writes about its steps."""


def _keys(wanted: bool) -> None:
    """Print every key of the training file; no torch is needed for that."""
    if wanted:
        from parity.cli.output import width
        from parity.model.recipe.keys import as_text

        typer.echo(as_text(width()), nl=False)
        raise typer.Exit()


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="Training file (YAML); without one, --preset is trained.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints and log; a run that is there is continued.")
    ] = Path("parity-train"),
    preset: Annotated[str, typer.Option(help="Preset to train where no file is given.")] = "tiny",
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps of the whole schedule, instead of the file's.", min=1)
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop at this step; the schedule stays as it is.", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="--no-resume refuses a folder that holds checkpoints already.")
    ] = True,
    threads: Annotated[int, typer.Option(help="Threads of each process.", min=1)] = 1,
    keys: Annotated[
        bool,
        typer.Option("--keys", callback=_keys, is_eager=True, help="List the training file's keys and end."),
    ] = False,
) -> None:
    """Train a drafter. Stop it at any moment; the same command goes on. Runs under torchrun too."""
    import torch
    from rich.console import Console

    from parity.cli.output import exit_code, print_report, report_folder, save_report
    from parity.commands.train import train as run_train
    from parity.watching.sinks import TerminalPanel

    torch.set_num_threads(threads)
    report_folder(out, "train")
    console = Console(stderr=True)
    panel = TerminalPanel(console, alone=False)
    trained = run_train(
        recipe,
        out=out,
        preset=preset,
        steps=steps,
        stop_after=stop_after,
        resume=resume,
        say=lambda line: typer.echo(line, err=True),
        watch=partial(training_progress, console=console, panel=panel),
        sinks=(panel,),
        command=shlex.join(["parity", *sys.argv[1:]]),
    )
    if trained.first:
        save_report(trained.report, out)
        print_report(trained.report)
        typer.echo(f"\ncheckpoint: {trained.checkpoint}")
        if trained.best and trained.best != trained.checkpoint:
            typer.echo(f"lowest validation loss: {trained.best}")
        typer.echo(f"report: {out / 'report.html'}")
    raise typer.Exit(INTERRUPTED_TEXT if trained.interrupted else int(exit_code(trained.report)))


def words(record: Mapping[str, Any]) -> str:
    """A line of the log as text."""
    text = f"loss {record['loss']:.4f} accepted {record['accepted']:.2f}"
    if record["event"] == "step":
        return f"{text} {record['tokens_per_second']:,.0f} tokens/s"
    return f"validation {text}" + (f" tau {record['tau']:.2f}" if "tau" in record else "")


RecordPainter = Callable[[Mapping[str, Any]], None]


@contextmanager
def training_progress(
    trainer: "Trainer", console: "Console", panel: "TerminalPanel"
) -> Iterator[RecordPainter]:
    """On standard error: a bar with the time left and the last step report on a terminal, some lines where it is
    piped."""
    total = trainer.total
    if not console.is_terminal:

        def line(record: Mapping[str, Any]) -> None:
            if record["event"] != "step" or record["step"] % max(1, total // LINES) == 0:
                typer.echo(f"step {record['step']}/{total} {words(record)}", err=True)

        yield line
        return
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    with Live(Group(bar, panel), console=console):
        job = bar.add_task("training", total=total, completed=trainer.step_number)

        def show(record: Mapping[str, Any]) -> None:
            if record["event"] == "step":
                bar.update(job, completed=record["step"], description=words(record))
            else:
                console.print(f"step {record['step']}: {words(record)}", highlight=False)

        yield show
