"""A loaded model, one request, and how far two computations of it are apart: what experiments are made of.

lab = Lab(target=target, backend=parse("torch"), ids=ids, taps=taps)
lab.gap(lab.feed(rows=(ids,), left=(5,))[0], lab.alone(ids))
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.diagnosis.profile import WINDOW
from parity.reports.record import Finding, Outcome, Value

REGROUPED = 8.0
"""Times the float32 limit that other shapes may differ: 64 pads or a split move every chunk's edge, and such pairs
were up to 2e-5 apart (embedded target, delta rule's output), where the smallest fault looked for here gives 1e-3."""
LAYERS = 8
"""Layers whose taps are kept: two rounds of three linear layers and a full one. A fault shows where it begins."""

HarnessRows = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorGap:
    """How far two computations of the same tokens are apart."""

    within: bool
    tap: str
    """The first tap outside, or the nearest to its limit."""
    layer_type: str
    onset: int
    """First token outside."""
    rows: int
    """Tokens outside at that tap."""
    error: float
    """Of the worst token there."""
    limit: float

    @property
    def part(self) -> str:
        """Which part of a linear layer is hit first."""
        if self.tap.endswith(".conv.out"):
            return (
                f"the convolution's window ({self.rows} rows)" if self.rows <= WINDOW else "the convolution"
            )
        return "the delta rule's state" if self.tap.endswith(".gdn.out") else self.tap


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentTrial:
    """One computation of an experiment."""

    experiment: str
    what: str
    gap: ErrorGap | None
    """None where it could not be run."""
    because: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentResult:
    """What one experiment found."""

    finding: Finding
    proves: tuple[str, ...] = ()
    """The kinds that its failure proves."""
    trials: tuple[ExperimentTrial, ...] = ()


@dataclass
class Harness:
    """A loaded model, one request, and what they gave."""

    target: Any
    backend: Any
    ids: tuple[int, ...]
    taps: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    _alone: dict[tuple[int, ...], HarnessRows] = field(default_factory=dict)

    def feed(self, **options: Any) -> Sequence[HarnessRows]:
        """Run one feeding; remembers whether the requested backend ran."""
        from parity.model.target.input_layouts import InputLayout, run_layout

        fed = run_layout(self.target, InputLayout(**options), backend=self.backend, taps=self.taps)
        self.problems += [problem for problem in fed.proof.problems if problem not in self.problems]
        return fed.rows

    def alone(self, ids: Sequence[int]) -> HarnessRows:
        """A request by itself, computed once."""
        key = tuple(ids)
        if key not in self._alone:
            self._alone[key] = self.feed(rows=(key,))[0]
        return self._alone[key]

    def gap(self, a: HarnessRows, b: HarnessRows, start: int = 0, stop: int | None = None) -> ErrorGap:
        """Hold `a` against `b`, tap by tap in the model's order, tokens `start` to `stop` of both."""
        nearest: ErrorGap | None = None
        for tap in self.taps:
            if tap not in a:
                continue
            mine, theirs = a[tap][start:stop], b[tap][start:stop]
            errors, limit = row_errors(mine, theirs), self.limit(tap, theirs)
            outside = np.flatnonzero(errors > limit)
            found = ErrorGap(
                within=not outside.size,
                tap=tap,
                layer_type=self._layer_type(tap),
                onset=start + int(outside[0] if outside.size else errors.argmax()),
                rows=int(outside.size),
                error=float(errors.max(initial=0.0)),
                limit=limit,
            )
            if outside.size:
                return found
            if nearest is None or found.error / found.limit > nearest.error / nearest.limit:
                nearest = found
        assert nearest is not None
        return nearest

    def limit(self, tap: str, tensor: Any) -> float:
        """The worst token's limit at a tap, by the same floors as a comparison's."""
        from parity.comparison.tolerance import rules_for

        layer = layer_depth(tap)
        depth = (
            layer + 1 if layer is not None else 0 if tap.startswith("embed") else len(self.target.layers) + 1
        )
        rules = rules_for(tap, str(tensor.dtype).removeprefix("torch."), depth)
        return rules.limit.token * (REGROUPED if rules.gate == "semantic" else 1.0)

    def _layer_type(self, tap: str) -> str:
        layer = layer_depth(tap)
        return "" if layer is None else str(self.target.layer_types[layer])


def layer_depth(tap: str) -> int | None:
    return int(tap.split(".")[1]) if tap.startswith("layer.") else None


def row_errors(a: Any, b: Any) -> NDArray[np.float64]:
    """[tokens] |a - b| / |b| of two tensors; equal rows, not-finite ones at the same places included, give 0."""
    import torch

    x, y = a.double(), b.double()
    same = torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all(1)
    error = (x - y).norm(dim=1) / y.norm(dim=1)
    error = torch.where(same, torch.zeros_like(error), error.nan_to_num(math.inf, math.inf))
    found: NDArray[np.float64] = error.numpy()
    return found


def make_experiment_result(
    name: str,
    trials: Sequence[ExperimentTrial],
    *,
    proves: tuple[str, ...],
    fails: Callable[[ExperimentTrial], str],
    passes: str,
    step: str,
    outcome: Outcome = "fail",
) -> ExperimentResult:
    """One finding for an experiment: the first trial outside, or the nearest to its limit."""
    ran = [trial for trial in trials if trial.gap is not None]
    outside = [trial for trial in ran if trial.gap is not None and not trial.gap.within]
    refused = [trial for trial in trials if trial.gap is None]
    if not ran:
        return ExperimentResult(
            finding=Finding(
                name=f"live.{name}",
                outcome="skipped",
                sentence=f"not run: {refused[0].because if refused else 'no trial'}",
                next_step="see whether the model can compute this at all",
                tables=("live.trials",),
            ),
            trials=tuple(trials),
        )
    shown = outside[0] if outside else max(ran, key=_nearness)
    gap = shown.gap
    assert gap is not None
    evidence: tuple[tuple[str, Value], ...] = (
        ("trials", len(ran)),
        ("outside", len(outside)),
        ("shown", shown.what),
        ("tap", gap.tap),
        ("token", gap.onset),
        ("error", gap.error),
        ("limit", gap.limit),
    )
    more = f"; refused: {refused[0].what} ({refused[0].because})" if refused else ""
    if not outside:
        return ExperimentResult(
            finding=Finding(
                name=f"live.{name}",
                outcome="pass",
                sentence=f"{passes} ({len(ran)} trials, the nearest, {shown.what}, at {gap.error / gap.limit:.2g} of "
                f"its limit){more}",
                evidence=evidence,
                tables=("live.trials",),
            ),
            trials=tuple(trials),
        )
    return ExperimentResult(
        finding=Finding(
            name=f"live.{name}",
            outcome=outcome,
            fault="-or-".join(proves).lower(),
            sentence=f"{len(outside)} of {len(ran)} trials differ, first {shown.what}: {fails(shown)}{more}",
            evidence=evidence,
            next_step=step,
            tables=("live.trials",),
        ),
        proves=proves,
        trials=tuple(trials),
    )


def _nearness(trial: ExperimentTrial) -> float:
    return trial.gap.error / trial.gap.limit if trial.gap is not None else 0.0


def at_words(trial: ExperimentTrial) -> str:
    """Where and by how much."""
    gap = trial.gap
    assert gap is not None
    kind = f", {gap.layer_type}" if gap.layer_type else ""
    return f"from token {gap.onset} on by {gap.error:.2g} at {gap.tap}{kind}"


def trial_of_refusal(experiment: str, what: str, run: Callable[[], ErrorGap]) -> ExperimentTrial:
    """A trial whose refusal by the model is an answer: it is no silent fault."""
    try:
        return ExperimentTrial(experiment=experiment, what=what, gap=run())
    except (ValueError, RuntimeError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ExperimentTrial(experiment=experiment, what=what, gap=None, because=first)
