"""`parity train`: trains a drafter by a training file; without one, the `tiny` preset on the embedded target."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from parity.model.config import Training
    from parity.model.trainer import Trainer


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="Training file (YAML); without one, --preset is trained.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints and the log; a run that is there is continued.")
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
) -> None:
    """Train a drafter: resumable at any moment, with every step in log.jsonl. Runs under torchrun too."""
    training = read_training(recipe, preset, steps)
    if not resume:
        _refuse_old(out)

    import torch

    from parity.model import distributed
    from parity.model.opening import open_trainer

    torch.set_num_threads(threads)
    try:
        trainer = open_trainer(training, out=out, say=typer.echo)
        first = trainer.ranks.first
        if first:
            typer.echo(begins(trainer, recipe, preset))
        with progress(trainer) if first else _silence() as show:
            outcome = trainer.run(stop_after=stop_after, show=show)
        trainer.close()
        distributed.leave(together=True)
    finally:
        distributed.leave()
    if first:
        typer.echo(f"step {outcome.step} of {trainer.total}; checkpoints in {out / 'checkpoints'}")
    if outcome.interrupted:
        if first:
            typer.echo("interrupted and saved; run the same command again to go on")
        raise typer.Exit(130)


def read_training(recipe: Path | None, preset: str, steps: int | None) -> "Training":
    """The training file, or the preset where there is none, with --steps put in."""
    from parity.model.config import load
    from parity.model.presets import preset as preset_of

    training = preset_of(preset) if recipe is None else load(recipe)
    if steps is not None:
        training = training.changed({"run.schedule.steps": steps, "run.schedule.epochs": None})
    return training


def _refuse_old(out: Path) -> None:
    from parity.errors import ParityError

    if any((out / "checkpoints").glob("step-*")):
        raise ParityError(
            f"a new run in {out}", "checkpoints of another", "choose another --out, or --resume"
        )


def begins(trainer: "Trainer", recipe: Path | None, preset: str) -> str:
    """One line that says what is about to be trained."""
    source = str(recipe) if recipe else f"preset {preset}"
    parameters = sum(p.numel() for p in trainer.parameters.values())
    start = f", going on at step {trainer.step_number}" if trainer.step_number else ""
    documents = f"{len(trainer.feed.documents):,} documents"
    return (
        f"training {source} (recipe {trainer.training.recipe.hash}): {parameters:,} parameters,"
        f" {trainer.total:,} steps, {documents}{start}"
    )


def words(record: Mapping[str, Any]) -> str:
    """A line of the log as text."""
    text = f"loss {record['loss']:.4f} accepted {record['accepted']:.2f}"
    if record["event"] == "step":
        return f"{text} {record['tokens_per_second']:,.0f} tokens/s"
    return f"validation {text}" + (f" tau {record['tau']:.2f}" if "tau" in record else "")


Show = Callable[[Mapping[str, Any]], None]


@contextmanager
def _silence() -> Iterator[Show]:
    yield lambda record: None


@contextmanager
def progress(trainer: "Trainer") -> Iterator[Show]:
    """A bar with the time left on a terminal; every twentieth step as a line where output is piped."""
    import sys

    total = trainer.total
    if not sys.stdout.isatty():

        def line(record: Mapping[str, Any]) -> None:
            if record["event"] != "step" or record["step"] % max(1, total // 20) == 0:
                print(f"step {record['step']}/{total} {words(record)}", flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        job = bar.add_task("training", total=total, completed=trainer.step_number)

        def show(record: Mapping[str, Any]) -> None:
            if record["event"] == "step":
                bar.update(job, completed=record["step"], description=words(record))
            else:
                bar.console.print(f"step {record['step']}: {words(record)}")

        yield show
