"""Riding along with a training: step reports, drift of the wiring, a stop where it breaks.

    with parity.watch(drafter, recipe, every=50, out="run") as w:      # any loop: what the modules show
        for batch in data:
            ...backward, optimizer.step()...
            w.step(loss=loss)                                          # before gradients are cleared

    parity.watch(drafter, recipe, adapter=Mine(recipe, drafter))       # and what the wiring probes find
    parity.watch(every=50, out="run").attach(trainer)                  # the built-in trainer
    watch_callback(recipe, every=50)                                   # transformers' Trainer: parity.watching.callback

A probed step is one of `every`, the first of which comes after `warmup` steps. Hooks are there during that step only,
so that the others cost nothing. Losses are the same bits with and without a watch: probes run synthetic rows between
two steps, on the running trainer, and leave everything as it was. Under torch.distributed every rank calls alike; the
first one writes, statistics are those of all ranks, and a finding of any rank is every rank's.

Passive watching reads what is there: shapes, dtypes, finite, mean and std, gradient norms. The report at the end lists
the questions that it cannot answer. With an adapter the wiring probes answer them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from parity.errors import ParityError
from parity.gating.conformance import read_conformance, save_conformance
from parity.model.recipe.config import Recipe, WatchPart
from parity.model.training.step import StepOutput
from parity.model.training.trainer import Trainer
from parity.options import accept_fields
from parity.probes.adapters.base import Adapter
from parity.probes.adapters.builtin import Builtin
from parity.probes.ask import check_names, wiring_probes
from parity.reports import step_log
from parity.reports.record import Conformance, Finding, Report, StepReport, Value
from parity.watching.ranks import is_first, merge_ranks
from parity.watching.recapture import StateRecapture
from parity.watching.sinks import JsonLines, Sink, TensorBoardSink
from parity.watching.slots import read_slots, read_step
from parity.watching.step_report import (
    STEP_TABLE,
    StepFindings,
    compare_wiring,
    finite,
    first_failure,
    merge_statements,
    run_probes,
    whole_run,
)
from parity.watching.values import ModuleTaps, StepValues, gradient_norms, step_facts, unwrap_ddp

CONFORMANCE = "conformance.json"
"""In the folder of a run: what its wiring was at the first probed step."""


class WiringChanged(RuntimeError):
    """A finding failed in a watch that stops the run (`on_fail="stop"`). The message names step and fault."""

    def __init__(self, step: int, finding: Finding) -> None:
        super().__init__(f"step {step}: {finding.fault or finding.name}: {finding.sentence}")
        self.step, self.finding = step, finding


@dataclass(frozen=True, eq=False)
class WatchOptions:
    """What is watched, how often, and where reports go. Checked when it is made: raises ParityError."""

    module: nn.Module | None = None
    """The drafter, for hooks; None where the built-in trainer is attached."""
    recipe: Recipe | None = None
    """What the drafter is trained by; the adapter's where there is one."""
    _: KW_ONLY
    every: int = 50
    """Steps between two reports."""
    warmup: int = 0
    """Steps before the first report."""
    probes: Sequence[str] | None = None
    """Wiring probes of each report; None is those of a training file's `run.watch`."""
    on_fail: str = "warn"
    """stop: the run ends at the first report with a finding that fails."""
    baseline: str | Path | None = None
    """A conformance.json of another run, with which the wiring is compared too. Raises ParityError where it is none."""
    out: str | Path | None = None
    """Folder for steps.jsonl and conformance.json."""
    adapter: Adapter | None = None
    """Connects the wiring probes to the running trainer."""
    sinks: Sequence[Sink] = ()
    """Where else each report goes."""
    recapture: int = 64
    """Tokens of one sample that the built-in trainer's target computes again, at most; 0: none."""
    steps: int = 0
    """Steps done before, by the run that is continued in `out`: drift is then against its first report."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.warmup < 0 or self.steps < 0 or self.on_fail not in ("warn", "stop"):
            raise ParityError(
                f"a watch with every {self.every}, warmup {self.warmup}, steps {self.steps}, on_fail {self.on_fail!r}",
                "values out of range",
                "every >= 1, warmup and steps >= 0, on_fail warn or stop",
            )
        check_names(self.wiring_probes, wiring_probes())

    @property
    def wiring_probes(self) -> tuple[str, ...]:
        """Names of the probes that run at each report."""
        return tuple(WatchPart().probes if self.probes is None else self.probes)


class Watch:
    """Watches one training; see the module. A context manager, and an observer of the built-in trainer."""

    def __init__(self, options: WatchOptions) -> None:
        """Hooks come when it is entered or attached. Raises ParityError for a baseline that is none."""
        self.options, self.probes, self.adapter = options, options.wiring_probes, options.adapter
        self.module = None if options.module is None else unwrap_ddp(options.module)
        self.recipe = options.recipe
        if self.recipe is None and options.adapter is not None:
            self.recipe = options.adapter.recipe
        self.baseline = read_conformance(options.baseline) if options.baseline is not None else None
        self.out = None if options.out is None else Path(options.out)
        self.sinks: list[Sink] = list(options.sinks)
        self.steps, self.reports = options.steps, list[StepReport]()
        """Steps done; this call's reports, with `out` all but the last without their tables: `history` has them."""
        self.failed: tuple[int, Finding] | None = None
        """Step and finding of the first failure."""
        self.stopped = False
        """Whether this watch had the run stop."""
        self.seconds = 0.0
        """Spent by this watch: hooks, probes, writing."""
        self._began, self._spent = time.perf_counter(), 0.0
        self._trainer: Trainer | None = None
        self._recapture: StateRecapture | None = None
        # Of the coming step, where it is probed: its hooks, what they have seen so far, the first forward pass.
        self._armed, self._groups = False, list[str]()
        self._values, self._taps = StepValues(), list[ModuleTaps]()
        self._output: StepOutput | None = None
        self.first: Conformance | None = None
        """The wiring at the run's first probed step."""
        self._read_first_wiring()

    # --- any loop -------------------------------------------------------------------------------------

    def __enter__(self) -> "Watch":
        self._arm()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Whether step `step`, counted from 1, is probed."""
        return step > self.options.warmup and (step - self.options.warmup - 1) % self.options.every == 0

    def step(self, **values: Tensor | Value) -> StepReport | None:
        """Call this once an optimizer step, after it and before gradients are cleared, on every rank.

        Args:
            values: what else to put into the report, by name: tensors are described, one-element tensors and numbers
                kept as they are (`loss=loss`).

        Returns:
            The report of a probed step, None for others.

        Raises:
            WiringChanged: where `on_fail` is stop and a finding fails.
        """
        self.steps += 1
        report = None
        if self._armed:
            with self._count_time():
                for name, value in values.items():
                    if isinstance(value, Tensor) and value.numel() != 1:
                        self._values.describe(name, value)
                    else:
                        self._values.put(name, value)
                self.gradients()
                report = self._report_step(StepFindings())
            if self._has_to_stop() and self.failed is not None:
                self.close()
                raise WiringChanged(*self.failed)
        self._arm()
        return report

    def _has_to_stop(self) -> bool:
        """Whether a finding failed in a watch that stops the run; `stopped` keeps it."""
        self.stopped = self.stopped or (self.failed is not None and self.options.on_fail == "stop")
        return self.stopped

    def gradients(self) -> None:
        """Read the gradients' norms now: for a loop that clears them before it can call `step`."""
        if not self._armed or self._groups:
            return
        named: list[tuple[str, Tensor]] = []
        if self._trainer is not None:
            named = list(self._trainer.parameters.items())
        elif self.module is not None:
            named = list(self.module.named_parameters())
        for group, norm in gradient_norms(named).items():
            self._values.put(f"{group}.gradient", norm)
            self._groups.append(group)

    def _arm(self) -> None:
        """Hooks for the coming step, where it is probed."""
        if self._armed or not self.due(self.steps + 1):
            return
        self._armed, self._groups, self._values = True, [], StepValues()
        module = self.module if self._trainer is None else self._trainer.drafter
        if module is not None:
            self._taps = [ModuleTaps(module, self._values, whole=self._trainer is None)]
        if self._trainer is not None:
            self._trainer.wiring.keep_gradients = True

    def _disarm(self) -> list[str]:
        """Take every hook away; returns the parts that were never called."""
        unseen = [name for taps in self._taps for name in taps.unseen]
        for taps in self._taps:
            taps.remove()
            self.seconds += taps.seconds
            self._spent += taps.seconds
        if self._trainer is not None:
            self._trainer.wiring.keep_gradients = False
        self._armed, self._taps = False, []
        return unseen

    @contextmanager
    def _count_time(self) -> Iterator[None]:
        """Adds a block's time to the watch's own."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - began
            self.seconds += time.perf_counter() - began

    # --- the built-in trainer -------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> "Watch":
        """Watch this trainer: its step, its data, its wiring. Adds itself to the trainer's observers."""
        self._trainer, self.adapter, self.recipe = trainer, Builtin(trainer), trainer.training.recipe
        self._recapture = StateRecapture(trainer, self.options.recapture)
        self.steps = trainer.step_number
        if self.out is not None and not self.steps and is_first():  # as the trainer does with its own log
            for name in (step_log.STEP_LOG_NAME, CONFORMANCE):
                (self.out / name).unlink(missing_ok=True)
        self._read_first_wiring()
        if self not in trainer.observers:
            trainer.observers.append(self)
        self._arm()
        return self

    def on_step(self, step: int, output: StepOutput) -> None:
        """Keep the first forward pass of a probed step that trains something; its backward fills in the gradients."""
        if (
            self._armed
            and self._output is None
            and output.hidden.requires_grad
            and bool(output.supervision_mask.any())
        ):
            with self._count_time():
                self._output = output
                output.hidden.retain_grad()

    def on_update(self, step: int, record: Mapping[str, Any]) -> None:
        """After the optimizer's step: the report of a probed one."""
        if record["event"] != "step":
            return
        self.steps = step
        if self._armed:
            with self._count_time():
                found = StepFindings()
                self._from_log(record)
                if self._output is not None:
                    read_step(self._values, self._output)
                    found.add(*read_slots(self._output))
                self.gradients()
                self._report_step(found)
            if self._trainer is not None and self._has_to_stop():
                self._trainer.ask_to_stop()
        self._arm()

    def _from_log(self, record: Mapping[str, Any]) -> None:
        """Figures of the whole step, over all rows and ranks, as the trainer logs them."""
        names = {"accepted": "tau.estimate", "expected": "tau.expected"}
        for name in ("loss", "accuracy", "gradient_norm", "lr", *names):
            self._values.put(names.get(name, name), record[name])
        for term, value in record["terms"].items():
            self._values.put(f"loss.term.{term}", value)
        for slot, share in enumerate(record["slots"], 1):
            if share is not None:
                self._values.put(f"slot.{slot}.accuracy", share)

    # --- reports --------------------------------------------------------------------------------------

    def _report_step(self, found: StepFindings) -> StepReport:
        """Run the probes, compare the wiring, and deliver the report of this step.

        Args:
            found: what the step itself gave rise to.
        """
        # The step's own facts of the wiring; one that trained nothing has none.
        unseen, output, self._output = self._disarm(), self._output, None
        facts = None
        if self._trainer is None or output is not None:
            module = self.module if self._trainer is None else None
            facts = step_facts(module, self._values, self._groups, unseen)
        # The probes, on synthetic rows; then the states of this step, captured again.
        step = StepFindings()
        now = None
        if self.adapter is not None:
            now = run_probes(self.adapter, self.probes, step, copies=not self.reports)
        step.add(found.numbers, found.findings, found.tables)
        if self._recapture is not None and output is not None:
            step.add(*self._recapture.ask(self.steps, output))
        del output  # its graph, before anything else is allocated
        # The wiring now, against the run's first report and against the baseline.
        now = merge_statements(now, facts, self.recipe)
        if self.first is None:
            self.first = now
            if self.out is not None and is_first():
                self.out.mkdir(parents=True, exist_ok=True)
                save_conformance(now, self.out / CONFORMANCE)
        step.findings += compare_wiring("drift", self.first, now, what="the run's first report")
        if self.baseline is not None:
            names = (*self.probes, STEP_TABLE) if self.adapter is not None else (STEP_TABLE,)
            step.findings += compare_wiring("baseline", self.baseline, now, what="the baseline", only=names)
        # One report for all ranks.
        numbers, findings = merge_ranks(
            [*self._values.read(), *step.numbers], self._values.sizes, step.findings
        )
        if unseen:
            numbers.append(("hooks.unseen", ", ".join(unseen)))
        numbers += [fact for statement in now.statements for fact in statement.facts]
        report = StepReport(
            step=self.steps,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            values=tuple(dict(numbers).items()),
            findings=(*finite(numbers), *findings),
            tables=(self._values.table(dict(numbers)), *step.tables),
        )
        return self._deliver(report)

    def _deliver(self, report: StepReport) -> StepReport:
        """Keep a report, note its first failure, and write it to every sink; returns it with the seconds spent."""
        report = replace(report, seconds=report.seconds + self._spent)
        self._spent = 0.0
        self.reports.append(report)
        if self.out is not None and len(self.reports) > 1:  # they are on disk; a long run has thousands
            self.reports[-2] = replace(self.reports[-2], tables=())
        failure = first_failure(report)
        if failure is not None and self.failed is None:
            self.failed = (report.step, failure)
        if is_first():
            if self.out is not None and not any(isinstance(sink, JsonLines) for sink in self.sinks):
                self.sinks.insert(0, JsonLines(self.out))
            samples = {name: tensor.float().cpu().numpy() for name, tensor in self._values.samples.items()}
            for sink in self.sinks:
                sink.write(report, samples)
        return report

    def _read_first_wiring(self) -> None:
        """Where a run is continued: the wiring of its first report."""
        file = None if self.out is None else self.out / CONFORMANCE
        if self.steps and self.first is None and file is not None and file.is_file():
            self.first = read_conformance(file)

    def close(self) -> None:
        """Take every hook away, wait for a worker's last answer, close the sinks. Called by `with`, and by whoever
        attached it."""
        self._disarm()
        if self._recapture is not None:
            late, self._recapture = self._recapture.close(), None
            if self.reports and (late[0] or late[1]):
                last = self.reports.pop()
                kept = tuple(f for f in last.findings if f.name not in {each.name for each in late[1]})
                values = dict(last.values) | dict(late[0])
                self._deliver(replace(last, values=tuple(values.items()), findings=(*kept, *late[1])))
        for sink in self.sinks if is_first() else ():
            sink.close()
        self.sinks = []

    @property
    def share(self) -> float:
        """Time spent in hooks and probes over the time since the watch was made, 0 to 1."""
        return self.seconds / max(1e-9, time.perf_counter() - self._began)

    @property
    def history(self) -> tuple[StepReport, ...]:
        """All step reports of the run, those of earlier calls included where there is a folder."""
        file = None if self.out is None else self.out / step_log.STEP_LOG_NAME
        if file is not None and file.is_file() and is_first():
            return step_log.read_step_log(file)
        return tuple(self.reports)

    @property
    def report(self) -> Report:
        """The whole run as a report: what failed first and when, what no probe could ask, every value's course."""
        asked_for = self.probes if self.adapter is not None else None
        made = whole_run(self.history, asked_for, self.first, steps_done=self.steps)
        return replace(made, subject=(*made.subject, ("share of the time", self.share)), seconds=self.seconds)

    def joined_to(self, report: Report) -> Report:
        """A run's own report with what this watch found put first."""
        own = self.report
        stopped: tuple[Finding, ...] = ()
        if self.failed is not None and self.stopped:
            step, finding = self.failed
            stopped = (
                Finding(
                    name="watch.stop",
                    outcome="fail",
                    fault=finding.fault,
                    sentence=f"the run saved and stopped at step {step}, at {finding.name}: {finding.sentence}",
                    next_step=finding.next_step,
                ),
            )
        return replace(
            report,
            subject=(*report.subject, *own.subject),
            findings=(*stopped, *own.findings, *report.findings),
            tables=(*report.tables, *own.tables),
            conformance=own.conformance,
        )


@accept_fields(WatchOptions)
def watch(options: WatchOptions) -> Watch:
    """A `Watch` on a module: `with parity.watch(drafter, recipe, every=50) as w: ... w.step(loss=loss)`.

    Args:
        module: the drafter, for hooks; none where the built-in trainer is attached.
        recipe: what the drafter is trained by; the adapter's where there is one.
        every, warmup: steps between two reports, and before the first.
        probes: wiring probes of each report; by default those of a training file's `run.watch`.
        on_fail: warn, or stop: the run ends at the first report with a finding that fails.
        baseline: a conformance.json of another run, with which the wiring is compared too.
        out: folder for steps.jsonl and conformance.json.
        adapter: connects the wiring probes to the running trainer.
        sinks: where else each report goes.
        recapture: tokens of one sample that the built-in trainer's target computes again, at most.
        steps: done before, by the run that is continued in `out`; drift is then against its first report.

    Raises:
        ParityError: for a probe or a baseline that does not exist, and for numbers out of range.
    """
    return Watch(options)


def watch_training(trainer: Trainer, out: Path | None, sinks: Sequence[Sink] = ()) -> Watch | None:
    """The watch that a training file requests under `run.watch`, attached.

    Every rank has to call this. `run.save.tensorboard` puts its numbers into OUT/tensorboard as well.

    Args:
        out: folder of the run; None writes nothing.
        sinks: where else each report goes.

    Returns:
        None where the training file requests no watch.
    """
    part, own = trainer.training.run.watch, list(sinks)
    if part is None:
        return None
    if trainer.training.run.save.tensorboard and out is not None and is_first():
        own.append(TensorBoardSink(out))
    # The part of the training file has the options of the same names.
    return Watch(WatchOptions(**dict(part), out=out, sinks=own)).attach(trainer)
