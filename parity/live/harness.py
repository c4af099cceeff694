"""A loaded model, one request, and how far two computations of it are apart: what experiments are made of.

    lab = Harness(target=target, backend=parse_backend("torch"), ids=ids, taps=taps)
    gap = lab.measure(left=(5,))                     # five pads on the left, compared with the request alone

Shapes: S tokens of the request, D channels of a tap.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from parity.comparison.error import tensor_errors
from parity.comparison.tolerance import rules_for
from parity.diagnosis.profile import WINDOW
from parity.kernel.sums import FloatSums
from parity.model.target.backends import Backend
from parity.model.target.input_layouts import InputLayout, run_layout
from parity.model.target.load import Target
from parity.reports.record import Finding, Outcome, Value
from parity.tracing.trace import layer_of, tap_depth

REGROUPED = 8.0
"""Times the float32 limit that other shapes may differ: 64 pads or a split move every chunk's edge, and such pairs
were up to 2e-5 apart (embedded target, delta rule's output), where the smallest fault looked for here gives 1e-3."""
LAYERS = 8
"""Layers whose taps are kept: two rounds of three linear layers and a full one. A fault shows where it begins."""

HarnessRows = dict[str, Tensor]
"""Tap -> [S, D] of one row of a batch, padding removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorGap:
    """How far two computations of the same tokens are apart."""

    within: bool
    tap: str
    """The first tap outside, or the nearest to its limit."""
    layer_type: str
    onset: int
    """First token outside, or the worst one where none is."""
    rows: int
    """Tokens outside at that tap."""
    error: float
    """Of the worst token there."""
    limit: float

    @classmethod
    def from_errors(
        cls, errors: FloatSums, limit: float, *, tap: str, layer_type: str = "", start: int = 0
    ) -> "ErrorGap":
        """The gap of [S] errors, the first of which is token `start`."""
        outside = np.flatnonzero(errors > limit)
        return cls(
            within=not outside.size,
            tap=tap,
            layer_type=layer_type,
            onset=start + int(outside[0] if outside.size else errors.argmax()),
            rows=int(outside.size),
            error=float(errors.max(initial=0.0)),
            limit=limit,
        )

    @property
    def share(self) -> float:
        """The error as a share of its limit."""
        return self.error / self.limit

    @property
    def part(self) -> str:
        """Which part of a linear layer is hit first."""
        if self.tap.endswith(".conv.out"):
            return (
                f"the convolution's window ({self.rows} rows)" if self.rows <= WINDOW else "the convolution"
            )
        return "the delta rule's state" if self.tap.endswith(".gdn.out") else self.tap

    @property
    def at(self) -> str:
        """Where and by how much, in words."""
        kind = f", {self.layer_type}" if self.layer_type else ""
        return f"from token {self.onset} on by {self.error:.2g} at {self.tap}{kind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentTrial:
    """One computation of an experiment."""

    experiment: str
    what: str
    gap: ErrorGap | None
    """None where the model refused it: an answer, and no silent fault."""
    because: str = ""
    """The first line of the refusal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentResult:
    """What one experiment found."""

    finding: Finding
    proves: tuple[str, ...] = ()
    """The kinds that its failure proves."""
    trials: tuple[ExperimentTrial, ...] = ()


PlannedTrial = tuple[str, Callable[[], ErrorGap]]
"""What a trial is called, and how to run it."""


@dataclass
class Harness:
    """A loaded model, one request, and what they gave."""

    target: Target
    backend: Backend
    ids: tuple[int, ...]
    taps: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    """Where another implementation ran than the requested one, in words."""
    _alone: dict[tuple[int, ...], HarnessRows] = field(default_factory=dict)

    def feed(self, **layout: Any) -> Sequence[HarnessRows]:
        """Compute the request once in some way, and note whether the requested backend ran.

        Args:
            layout: Fields of `InputLayout`; `rows` is the request alone where it is not given.

        Returns:
            The taps of each row of the batch.
        """
        fed = run_layout(
            self.target, InputLayout(**{"rows": (self.ids,)} | layout), backend=self.backend, taps=self.taps
        )
        self.problems += [problem for problem in fed.proof.problems if problem not in self.problems]
        return fed.rows

    def alone(self, ids: Sequence[int]) -> HarnessRows:
        """A request by itself, computed once."""
        key = tuple(ids)
        if key not in self._alone:
            self._alone[key] = self.feed(rows=(key,))[0]
        return self._alone[key]

    def measure(
        self,
        *,
        row: int = 0,
        skip: int = 0,
        alone: Sequence[int] | None = None,
        stop: int | None = None,
        **layout: Any,
    ) -> ErrorGap:
        """Feed a layout, and compare one of its rows with a request computed alone.

        Args:
            row: The row of the batch.
            skip: How many of its first tokens are left out: those of another document.
            alone: Token ids of that request, the harness's own by default.
            stop: How many of that request's tokens are compared; all by default.
            layout: Fields of `InputLayout`.
        """
        base = {tap: x[:stop] for tap, x in self.alone(self.ids if alone is None else alone).items()}
        fed = {tap: tensor[skip:] for tap, tensor in self.feed(**layout)[row].items()}
        return self.gap(fed, base)

    def gap(self, a: HarnessRows, b: HarnessRows) -> ErrorGap:
        """Compare two computations of the same tokens.

        Returns:
            The gap at the first tap, in the model's order, with tokens outside the limit; else the nearest to it.
        """
        gaps: list[ErrorGap] = []
        for tap in (tap for tap in self.taps if tap in a):
            errors, layer = tensor_errors(a[tap], b[tap]), layer_of(tap)
            kind = "" if layer is None else self.target.layer_types[layer]
            gaps.append(ErrorGap.from_errors(errors, self.limit(tap, b[tap]), tap=tap, layer_type=kind))
            if not gaps[-1].within:
                return gaps[-1]
        return max(gaps, key=lambda gap: gap.share)

    def limit(self, tap: str, tensor: Tensor) -> float:
        """The worst token's limit at a tap, by the same floors as a comparison's."""
        depth = tap_depth(tap, len(self.target.layers))
        rules = rules_for(tap, str(tensor.dtype).removeprefix("torch."), depth)
        return rules.limit.token * (REGROUPED if rules.gate == "semantic" else 1.0)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One question put to a loaded model."""

    name: str
    proves: tuple[str, ...]
    """The kinds of fault that its failure can prove."""
    suspicion: str
    """What a user may suspect, in words."""

    def run(self, lab: Harness) -> ExperimentResult:
        """Answer it."""
        raise NotImplementedError

    def report(self, outcome: Outcome, sentence: str, **further: Any) -> Finding:
        """A finding of this experiment; `further` are fields of `Finding`."""
        return Finding(name=f"live.{self.name}", outcome=outcome, sentence=sentence, **further)

    def report_nothing(self, because: str) -> ExperimentResult:
        """The result where the model has no such part."""
        step = "nothing to do, unless the model should have one"
        return ExperimentResult(finding=self.report("skipped", f"not run: {because}", next_step=step))


@dataclass(frozen=True, kw_only=True)
class TrialExperiment(Experiment):
    """An experiment of several computations, each of which must give what the request alone gives."""

    plan: Callable[[Harness], Iterator[PlannedTrial]]
    fails: str
    """The sentence of a failure, with `{at}` and `{part}` of the trial that it names."""
    passes: str
    step: str
    """What to do about a failure."""
    limitation: Callable[[Harness, Sequence[ExperimentTrial]], str | None] = lambda lab, trials: None
    """Whether a failure is a known limit of the library, hence a warning: words to add to the sentence, or None."""

    def run(self, lab: Harness) -> ExperimentResult:
        """One finding: the first trial outside, or the nearest to its limit."""
        trials = tuple(self._run_trials(self.plan(lab)))
        refused = [trial for trial in trials if trial.gap is None]
        ran = [(trial.what, trial.gap) for trial in trials if trial.gap is not None]
        outside = [(what, gap) for what, gap in ran if not gap.within]
        tables = ("live.trials",)
        if not ran:
            because = refused[0].because if refused else "no trial"
            step = "see whether the model can compute this at all"
            finding = self.report("skipped", f"not run: {because}", next_step=step, tables=tables)
            return ExperimentResult(finding=finding, trials=trials)
        what, gap = outside[0] if outside else max(ran, key=lambda each: each[1].share)
        evidence: tuple[tuple[str, Value], ...] = (
            ("trials", len(ran)),
            ("outside", len(outside)),
            ("shown", what),
            ("tap", gap.tap),
            ("token", gap.onset),
            ("error", gap.error),
            ("limit", gap.limit),
        )
        more = f"; refused: {refused[0].what} ({refused[0].because})" if refused else ""
        if not outside:
            nearest = f"({len(ran)} trials, the nearest, {what}, at {gap.share:.2g} of its limit)"
            finding = self.report("pass", f"{self.passes} {nearest}{more}", evidence=evidence, tables=tables)
            return ExperimentResult(finding=finding, trials=trials)
        # A known limit of the library warns; anything else is a fault.
        known = self.limitation(lab, trials)
        words = self.fails.format(at=gap.at, part=gap.part) + (known or "")
        finding = self.report(
            "fail" if known is None else "warn",
            f"{len(outside)} of {len(ran)} trials differ, first {what}: {words}{more}",
            fault="-or-".join(self.proves).lower(),
            evidence=evidence,
            next_step=self.step,
            tables=tables,
        )
        return ExperimentResult(finding=finding, proves=self.proves, trials=trials)

    def _run_trials(self, planned: Iterable[PlannedTrial]) -> Iterator[ExperimentTrial]:
        for what, run in planned:
            try:
                yield ExperimentTrial(experiment=self.name, what=what, gap=run())
            except (ValueError, RuntimeError, NotImplementedError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                yield ExperimentTrial(experiment=self.name, what=what, gap=None, because=first)
