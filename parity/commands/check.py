"""`parity check`: plans what the probes need, gathers it, runs the probes, and answers the suspicions.

    report = check()                              # the embedded target and the built-in trainer
    report = check(recipe="recipe.yaml")          # the recipe's target, and the built-in trainer by that recipe
    report = check(recipe="recipe.yaml", adapter="mine.py:Mine")
    report = check(model="path/to/model", prompts=Path("prompts.jsonl"))

The target's side is `plan` (what to capture), `gather` (two workers that capture it) and the probes of traces; the
trainer is examined in this process meanwhile.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from parity.commands.check_target import CheckTarget, TargetOptions, choose_check_target
from parity.commands.gather import CaptureRun
from parity.commands.plan import plan_steps
from parity.commands.suspicions import summarise_suspicions
from parity.environment import environment
from parity.errors import ParityError
from parity.probes import ask
from parity.probes.answers import make_broken_answer
from parity.probes.base import Evidence, ProbeAnswer, TraceProbe
from parity.probes.table import TABLE, ProbeEntry
from parity.reports.record import Report, Value

if TYPE_CHECKING:
    from parity.model.recipe.config import Recipe, TargetPart, TrainingFile

TRACES_MARK = "made-by-parity-check"
"""File by which a folder of traces is known to be an earlier check's."""
StepSink = Callable[[str, str], None]
"""Is given a worker (`torch`, `other`, `trainer`) and what it is doing."""


def check(
    *,
    recipe: "str | Path | TrainingFile | Recipe | None" = None,
    adapter: str | None = None,
    only: Sequence[str] = (),
    traces: Path | None = None,
    threads: int = 1,
    **target: Unpack[TargetOptions],
) -> Report:
    """Check everything before training, and return the report.

    With neither `recipe` nor `model`, the embedded target and the preset `tiny` are checked; `model` alone checks a
    target without a trainer.

    Args:
        recipe: a training file, a preset's name, or the record of either. Its target is checked, and the trainer.
        adapter: the trainer that is examined: `builtin` (the default), `speculators`, `specforge`, or
            `path/to/file.py:Name`.
        only: names of the probes to run; all by default. Only what they need is captured.
        traces: folder that keeps the captured traces, replaced if it is an earlier check's; None keeps none.
        threads: of each worker, and of the trainer.
        model: name or path of the target; the recipe's by default, else the embedded one.
        prompts: prompt file as for `parity capture`; built-in prompts by default.
        backend: what is compared with torch; fla where a GPU is, else fla-interpreted.
        loader: the transformers class that the trainer loads the target with; the recipe's, else
            AutoModelForCausalLM.
        revision: of the target, on the hub.
        device_map: as in transformers: cuda, auto, ...
        max_tokens: tokens of each request that are compared; 160 by default.
        hide: modules that the other backend's worker must not find.

    Raises:
        ParityError: for what the user can put right.
    """
    unknown = target.keys() - TargetOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"check() got an unexpected keyword argument {min(unknown)!r}")
    ask.check_names(only, [entry.name for entry in TABLE])
    session = CheckSession(
        declared=_load_declared(recipe, adapter, target.get("model")),
        adapter=adapter,
        entries=tuple(entry for entry in TABLE if not only or entry.name in only),
    )
    session.choose_target(target, threads)
    if traces is not None:
        _refuse_foreign(traces)  # now, not after a minute of work
    with tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        with _progress(session) as report_step:
            session.run(Path(scratch), report_step, threads)
        report = session.report()
        if traces is not None and session.evidence is not None:
            _keep(Path(scratch), traces)
    return report


@dataclass(kw_only=True)
class CheckSession:
    """One check: what was declared, what is run, and what came of it."""

    declared: "TrainingFile | Recipe | None"
    adapter: str | None
    entries: tuple[ProbeEntry, ...]
    """The probes to run."""
    target: CheckTarget | None = None
    """None where no target is examined."""
    evidence: Evidence | None = None
    answers: list[tuple[str, ProbeAnswer]] = field(default_factory=list)
    trainer: "ask.WiringAnswers | None" = None
    began: float = field(default_factory=time.monotonic)

    @property
    def recipe(self) -> "Recipe | None":
        """The declared wiring, without sizes and schedule."""
        from parity.model.recipe.config import TrainingFile

        return self.declared.recipe if isinstance(self.declared, TrainingFile) else self.declared

    @property
    def declared_target(self) -> "TargetPart | None":
        """The recipe's target where it is a model that can be captured; a user's own adapter may name anything."""
        if self.recipe is None or self.recipe.target.model.startswith("synthetic:"):
            return None
        own = self.adapter is not None and self.adapter not in ask.SHIPPED
        return None if own and self.recipe.target.model.endswith(".py") else self.recipe.target

    @property
    def sides(self) -> dict[str, str]:
        """Worker -> the name that a reader knows, for the workers that run."""
        sides = {"trainer": "trainer"}
        if self.target is not None:
            steps = plan_steps(self.entries)
            names = {"torch": "torch", "other": self.target.other}
            sides = {each: names[each] for each in names if any(s.worker == each for s in steps)} | sides
        return sides

    def choose_target(self, options: TargetOptions, threads: int) -> None:
        """Choose the target, where a probe reads traces and there is a target to capture."""
        declared = self.declared_target
        has_target = declared is not None or options.get("model") is not None
        if has_target and any(entry.asks == "traces" for entry in self.entries):
            self.target = choose_check_target(options, declared, threads=threads)

    def run(self, folder: Path, report_step: StepSink, threads: int) -> None:
        """Run every probe: those of the trainer in a thread of this process, those of traces when all is captured."""
        traced = [entry for entry in self.entries if entry.asks == "traces"]
        with ThreadPoolExecutor(1) as pool:
            waiting = self._begin_trainer(pool, report_step, threads)
            if self.target is not None:
                run = CaptureRun(self.target, plan_steps(traced), folder, report_step)
                self.evidence = run.gather()
                self.answers += [(entry.name, _run_probe(entry, self.evidence)) for entry in traced]
            if waiting is not None:
                self.trainer = waiting.result()
                self.answers += self.trainer.answers

    def _begin_trainer(
        self, pool: ThreadPoolExecutor, report_step: StepSink, threads: int
    ) -> "Future[ask.WiringAnswers] | None":
        """Open the adapter and begin its probes; None where no trainer is examined."""
        names = [entry.name for entry in self.entries if entry.asks == "trainer"]
        if self.declared is None or not names:
            return None
        import torch

        torch.set_num_threads(threads)
        opened = ask.open_adapter(self.adapter or "builtin", self.declared)
        return pool.submit(
            ask.ask_trainer,
            self.declared,
            opened,
            only=names,
            say=lambda name: report_step("trainer", name),
        )

    def report(self) -> Report:
        """Return everything that was found."""
        # What was examined: the target and the backends that ran, the trainer and its recipe.
        findings = tuple(finding for _, answer in self.answers for finding in answer.findings)
        machine, facts, title = environment(), list[tuple[str, Value]](), []
        if self.target is not None and self.evidence is not None:
            reference = self.evidence.traces.get("torch.fp32")
            machine |= reference.manifest.environment if reference else {}
            sides = " against ".join(name for name in self.sides.values() if name != "trainer")
            facts += _target_facts(self.target, self.evidence, sides)
            title.append(f"{'embedded target' if self.target.model is None else self.target.model}: {sides}")
        if self.trainer is not None and self.recipe is not None:
            facts += [
                ("trainer", self.trainer.adapter),
                ("recipe", self.recipe.hash),
                ("its target", self.recipe.target.model),
            ]
            title.append(f"{self.trainer.adapter} against its recipe")
        return Report(
            kind="check",
            title="; ".join(title) or "nothing",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=" ".join(["parity", *sys.argv[1:]]),
            subject=tuple(facts),
            findings=findings,
            suspicions=summarise_suspicions(findings, self._explain_untested()),
            tables=tuple(table for _, answer in self.answers for table in answer.tables),
            environment=tuple(sorted(machine.items())),
            seconds=round(time.monotonic() - self.began, 1),
            conformance=None if self.trainer is None else self.trainer.conformance,
        )

    def _explain_untested(self) -> dict[str, str]:
        """Why no probe of a whole side (`target`, `trainer`) ran, or one probe of the trainer's gave no finding."""
        why = {} if self.trainer is None else dict(self.trainer.conformance.unanswered)
        if self.trainer is not None and why.keys() == {"adapter"} and not self.trainer.conformance.statements:
            why["trainer"] = "see the finding adapter"
        if self.target is None:
            why["target"] = "not among the probes that were asked"
            if self.recipe is not None and self.declared_target is None:
                why["target"] = f"the target {self.recipe.target.model} is no model that transformers loads"
        if self.trainer is None:
            why["trainer"] = "not among the probes that were asked"
            if self.recipe is None:
                why["trainer"] = "no trainer was asked: give a recipe, and --adapter for another trainer"
        return why


def _load_declared(
    recipe: "str | Path | TrainingFile | Recipe | None", adapter: str | None, model: str | None
) -> "TrainingFile | Recipe | None":
    """The declared wiring: a file, a preset, `tiny` where nothing was named, None for a target alone."""
    from parity.model.recipe.config import load_declared
    from parity.model.recipe.presets import PRESETS, preset

    if recipe is None:
        if adapter is not None:
            do = "name the training file that this trainer is declared to follow, or a preset"
            raise ParityError(f"--adapter {adapter} without a recipe", "nothing to hold it against", do)
        return None if model is not None else preset("tiny")
    if not isinstance(recipe, str | Path):
        return recipe
    known = str(recipe) in PRESETS and not Path(recipe).exists()
    return preset(str(recipe)) if known else load_declared(recipe)


def _run_probe(entry: ProbeEntry, evidence: Evidence) -> ProbeAnswer:
    """One probe's answer; a probe that breaks is a finding `error`, and the others go on."""
    try:
        return cast(TraceProbe, entry.load()).run(evidence)
    except Exception as error:
        return make_broken_answer(entry.name, error)


def _target_facts(target: CheckTarget, evidence: Evidence, sides: str) -> list[tuple[str, Value]]:
    """What was captured of the target. sides: the backends that ran, in words."""
    reference = evidence.traces.get("torch.fp32")
    requests = reference.requests if reference else ()
    facts: list[tuple[str, Value]] = [
        ("target", "embedded hybrid target" if target.model is None else target.model),
        ("class", evidence.target["class"]),
        ("parameters", evidence.target["parameters"]),
        ("layers", len(evidence.target["layer_types"])),
        ("linear layers", len(evidence.linear)),
        ("requests", len(requests)),
        ("tokens", sum(len(request.token_ids) for request in requests)),
        ("backends", sides),
    ]
    if target.other in sides.split():
        calls = sum(
            call.calls
            for name, trace in evidence.traces.items()
            if name.startswith("other.")
            for call in trace.manifest.backend.calls
            if call.operator == "delta"
        )
        facts.append((f"delta-rule calls on {target.other}", calls))
    return facts


def _refuse_foreign(traces: Path) -> None:
    """Raise ParityError where the folder for the traces holds something that parity did not put there."""
    if traces.exists() and not (traces / TRACES_MARK).is_file():
        raise ParityError(f"traces in {traces}", "a folder that parity did not make", "choose another --out")


def _keep(folder: Path, traces: Path) -> None:
    """Put the traces where the user asked for them; an earlier run's are replaced, anything else is not."""
    _refuse_foreign(traces)
    if traces.exists():
        shutil.rmtree(traces)
    traces.parent.mkdir(parents=True, exist_ok=True)
    (folder / TRACES_MARK).touch()
    shutil.copytree(folder, traces, ignore=shutil.ignore_patterns("wrapped", "*.operators.safetensors"))


@contextmanager
def _progress(session: CheckSession) -> Iterator[StepSink]:
    """What each worker is doing, on standard error where that is a terminal; silent where it is not."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console, names = Console(stderr=True), session.sides
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        tasks = {name: bar.add_task(f"{shown}: starting") for name, shown in names.items()}
        yield lambda worker, doing: bar.update(tasks[worker], description=f"{names[worker]}: {doing}")
