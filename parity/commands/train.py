"""`parity train`: a drafter by a training file, as a report of what came out.

    trained = train("recipe.yaml", out="run")       # or train(out="run"): the `tiny` preset
    trained.report, trained.checkpoint, trained.interrupted

The same call on the same folder goes on where the run stopped, after a signal and after kill -9 alike. Runs under
torchrun: every rank calls it, the first one writes and speaks.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.environment import environment
from parity.errors import ParityError
from parity.options import accept_fields
from parity.reports.record import Chart, Finding, Report, Table, Value, collect_rows, declare_columns

if TYPE_CHECKING:
    from parity.model.recipe.config import TrainingFile
    from parity.model.training.trainer import Observer, Trainer
    from parity.watching.sinks import Sink

RecordCallback = Callable[[Mapping[str, Any]], None]
WatchFactory = Callable[["Trainer"], AbstractContextManager[RecordCallback]]
MOST_POINTS = 400
"""Rows of the loss table: as many as a chart can show; longer runs are thinned evenly, their log has all steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a call of `train` did."""

    report: Report
    """Of kind `train`, over the whole run, earlier calls included."""
    checkpoint: Path
    """The newest one."""
    best: Path | None
    """The one with the lowest validation loss."""
    step: int
    total: int
    interrupted: bool
    """A signal asked to stop; the same call goes on."""
    stopped: bool
    """The watch did, at a finding that failed (`run.watch.on_fail: stop`)."""
    first: bool
    """Whether this process is the one that writes and speaks."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train by, where, and who follows it."""

    recipe: "str | Path | TrainingFile | None" = None
    """A training file, or what `parity.model.recipe.config.load_training_file` gives; None takes `preset`."""
    _: KW_ONLY
    out: str | Path = "parity-train"
    """Folder of the run. A run that is there goes on."""
    preset: str = "tiny"
    """Name of a preset, where no recipe is given."""
    steps: int | None = None
    """Optimizer steps in all, instead of the file's."""
    stop_after: int | None = None
    """Optimizer step at which this call ends; None: the end of the schedule."""
    resume: bool = True
    """False refuses a folder that holds checkpoints."""
    observers: Sequence["Observer"] = ()
    """Called at every step; they must leave the training as it is."""
    say: Callable[[str], None] = lambda line: None
    """Receives one line about what begins, and about what takes long before it."""
    watch: WatchFactory = lambda trainer: nullcontext(lambda record: None)
    """Opened around the training on the first rank; its value receives every line of the log."""
    sinks: Sequence["Sink"] = ()
    """Receive the step reports of `run.watch`."""
    command: str = "parity.train"
    """What the report names as its command."""


@accept_fields(TrainOptions)
def train(options: TrainOptions) -> TrainResult:
    """Train to the end of the schedule, to step `stop_after`, or until a signal; goes on with the run in `out`.

    Args:
        recipe: a training file, its path, or None for `preset`.
        out: folder of the run.
        preset: name of a preset, where no recipe is given.
        steps: optimizer steps in all, instead of the file's.
        stop_after: optimizer step at which this call ends.
        resume: False refuses a folder that holds checkpoints.
        observers: called at every step.
        say: receives one line about what begins, and about what takes long before it.
        watch: opened around the training on the first rank; its value receives every line of the log.
        sinks: receive the step reports of `run.watch`.
        command: what the report names as its command.

    Raises:
        ParityError: for what the user can put right.
    """
    from parity.model.training import checkpoint, distributed
    from parity.model.training.build import open_trainer

    # The run: opened where it stopped, trained, and every rank let go whatever happens.
    began, folder = time.monotonic(), Path(options.out)
    training = read_training(options.recipe, options.preset, options.steps)
    if not options.resume and any((folder / "checkpoints").glob("step-*")):
        do = "choose another --out, or --resume"
        raise ParityError(f"a new run in {folder}", "checkpoints of another", do)
    try:
        trainer = open_trainer(training, out=folder, observers=options.observers, say=options.say)
        first, source = (
            trainer.ranks.first,
            str(options.recipe) if isinstance(options.recipe, str | Path) else None,
        )
        watched = None
        try:
            if training.run.watch is not None:  # what watches loads every probe
                from parity.watching.watch import watch_training

                watched = watch_training(trainer, folder, options.sinks)
            if first:
                named = f"preset {options.preset}" if options.recipe is None else "a training"
                options.say(begins(trainer, source or named))
            with options.watch(trainer) if first else nullcontext(lambda record: None) as show:
                outcome = trainer.run(stop_after=options.stop_after, show=show)
        finally:
            if watched is not None:
                watched.close()
            trainer.close()
        distributed.leave(together=True)
    finally:
        distributed.leave()
    # What came of it, this call and earlier ones.
    best = checkpoint.best_of(folder)
    stopped = watched is not None and watched.stopped
    report = _report(trainer, folder, outcome.interrupted, options.command, time.monotonic() - began)
    return TrainResult(
        report=report if watched is None else watched.joined_to(report),
        checkpoint=checkpoint.find_checkpoint(folder),
        best=best[0] if best else None,
        step=outcome.step,
        total=trainer.total,
        interrupted=outcome.interrupted and not stopped,
        stopped=stopped,
        first=first,
    )


def read_training(
    recipe: "str | Path | TrainingFile | None", preset: str, steps: int | None
) -> "TrainingFile":
    """The training file, or the preset where there is none, with `steps` put in."""
    from parity.model.recipe.config import TrainingFile, load_training_file
    from parity.model.recipe.config import preset as preset_of

    if isinstance(recipe, TrainingFile):
        training = recipe
    else:
        training = preset_of(preset) if recipe is None else load_training_file(recipe)
    if steps is not None:
        training = training.with_values({"run.schedule.steps": steps, "run.schedule.epochs": None})
    return training


def begins(trainer: "Trainer", source: str) -> str:
    """One line that says what is about to be trained."""
    parameters = sum(p.numel() for p in trainer.parameters.values())
    done, total = trainer.step_number, trainer.total
    start = f", going on at step {done}" if done else ""
    if done >= total:
        return f"{source}: all {total:,} steps are done already"
    return (
        f"training {source}: {parameters:,} parameters, {total:,} steps,"
        f" {len(trainer.feed.documents):,} documents{start}"
    )


# --- the report ---------------------------------------------------------------------------------------


def _report(trainer: "Trainer", folder: Path, interrupted: bool, command: str, seconds: float) -> Report:
    log = _read_log(folder / "log.jsonl")
    steps = [line for line in log if line["event"] == "step"]
    checks = [line for line in log if line["event"] == "validation"]
    recipe, run = trainer.training.recipe, trainer.training.run
    subject: tuple[tuple[str, Value], ...] = (
        ("out", str(folder)),
        ("recipe", recipe.hash),
        ("target", recipe.target.model),
        ("documents", len(trainer.feed.documents)),
        ("parameters", sum(p.numel() for p in trainer.parameters.values())),
        ("ranks", trainer.ranks.world),
        ("seed", run.seed),
        ("training time", f"{trainer.seconds:,.1f} s"),
    )
    return Report(
        kind="train",
        title=f"step {trainer.step_number:,} of {trainer.total:,}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        subject=subject,
        findings=(_schedule(trainer, interrupted, steps), _validation(checks)),
        tables=tuple(table for table in (_validations(checks), _losses(steps)) if table.rows),
        environment=tuple(environment().items()),
        seconds=seconds,
    )


def _read_log(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _schedule(trainer: "Trainer", interrupted: bool, steps: Sequence[Mapping[str, Any]]) -> Finding:
    done, total = trainer.step_number, trainer.total
    said = ""
    if steps:
        first, last = steps[0], steps[-1]
        said = f"; loss {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at {last['step']}"
    if done >= total:
        sentence = f"the schedule's {total:,} steps are done{said}"
        return Finding(name="train.schedule", outcome="pass", sentence=sentence)
    return Finding(
        name="train.schedule",
        outcome="warn",
        sentence=f"{done:,} of {total:,} steps are done{said}",
        evidence=(("interrupted", interrupted),),
        next_step="run the same command again to go on",
    )


def _validation(checks: Sequence[Mapping[str, Any]]) -> Finding:
    if len(checks) < 2:
        return Finding(
            name="train.validation",
            outcome="skipped",
            sentence=f"{len(checks)} validations: no two to compare",
            next_step="lower run.save.validate_every, or train longer",
        )
    first, last = checks[0]["loss"], checks[-1]["loss"]
    sentence = f"validation loss {first:.4f} at step {checks[0]['step']}, {last:.4f} at {checks[-1]['step']}"
    if last < first:
        return Finding(name="train.validation", outcome="pass", sentence=sentence)
    return Finding(
        name="train.validation",
        outcome="warn",
        sentence=f"{sentence}: it did not fall",
        evidence=(("first", first), ("last", last)),
        next_step="parity check RECIPE asks what the training really does",
        tables=("train.validation",),
    )


def _validations(checks: Sequence[Mapping[str, Any]]) -> Table:
    measured = any("tau" in check for check in checks)
    columns = declare_columns(
        "step:int | loss:float | accuracy:float (share of slots) | accepted:float (tokens a block)"
        + (" | tau:float" if measured else "")
    )
    computed = {"tau": lambda check: check.get("tau")} if measured else {}
    return Table(
        name="train.validation",
        title="Validation",
        columns=columns,
        rows=collect_rows(columns, checks, **computed),
        caption="accepted: in training's own blocks, a label of the recipe counting as right"
        + ("; tau: against the target's own text" if measured else ""),
        chart=Chart(kind="timeline", x="step", y="loss", caption="validation loss"),
    )


def _losses(steps: Sequence[Mapping[str, Any]]) -> Table:
    every = -(-len(steps) // MOST_POINTS) or 1
    kept = [line for number, line in enumerate(steps, 1) if number % every == 0 or number == len(steps)]
    columns = declare_columns(
        "step:int | loss:float | accuracy:float | gradient_norm:float gradient norm | "
        "lr:float learning rate | tokens_per_second:float tokens/s"
    )
    return Table(
        name="train.steps",
        title="Steps",
        columns=columns,
        rows=collect_rows(columns, kept),
        chart=Chart(kind="timeline", x="step", y="loss", caption="training loss"),
        detail=True,
    )
