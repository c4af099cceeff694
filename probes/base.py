"""What a probe is, and what a trace probe may ask for.

A probe asks one question. It is given `Evidence` (the traces that workers captured, or the reason why
one is missing) and answers with findings and tables. What is missing is a `skip_answer` finding that says
so; a probe never passes on nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from parity.comparison.tolerance import Floor
from parity.comparison.traces import Comparison, compare_traces
from parity.diagnosis.kinds import diagnose_or_why
from parity.diagnosis.report import diagnosed_tables_and_findings
from parity.kernel.sums import PairStats, pair_stats
from parity.reports.record import Finding, Statement, Table, Value
from parity.tracing.trace import Trace

CAPTURE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the workers brought."""

    other: str
    """The backend that is held against torch."""
    traces: Mapping[str, Trace]
    """By name: `torch.fp32`, `other.bf16.local`, `golden`, `torch.fp32.decode`, ..."""
    absent: Mapping[str, str]
    """Why a trace is not there: what is missing, or how its worker ended."""
    crashes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Worker to (what happened, last lines of its standard error)."""
    operators: Mapping[str, Path] = field(default_factory=dict)
    """Recorded operator calls by name: `torch.fp32`, `golden.fp32`, `other.fp32.local`."""
    self_tests: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The interpreter's error and limit by dtype."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """Structure of the target, as the worker described it."""
    _floors: dict[str, Floor | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def linear(self) -> list[int]:
        """The decoder layers with linear attention."""
        return [index for index, kind in enumerate(self.target["layer_types"]) if kind == "linear_attention"]

    def why_not(self, *names: str) -> str | None:
        """Why these traces cannot be compared, or None where all are there."""
        for name in names:
            if name not in self.traces:
                return f"{name}: {self.absent.get(name, 'was not captured')}"
        return None

    def floor(self, dtype: str) -> Floor | None:
        """What a rerun and another batch size change on torch here, by tap; None where neither was captured."""
        if dtype not in self._floors:
            self._floors[dtype] = self._measured_floor(dtype)
        return self._floors[dtype]

    def _measured_floor(self, dtype: str) -> Floor | None:
        floors = []
        for kind in ("rerun", "batch"):
            pair = (f"torch.{dtype}.{kind}", f"torch.{dtype}")
            if self.why_not(*pair) is None:
                comparison = compare_traces(self.traces[pair[0]], self.traces[pair[1]])
                errors = {tap.tap: tap.token_errors for tap in comparison.taps}
                floors.append(
                    Floor.from_errors(kind, errors, str(self.traces[pair[0]].manifest.environment.get("cpu")))
                )
        if not floors:
            return None
        result = floors[0]
        for more in floors[1:]:
            result = result.or_larger(more)
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeAnswer:
    """What a probe found."""

    findings: tuple[Finding, ...]
    tables: tuple[Table, ...] = ()
    statement: Statement | None = None
    """What a wiring probe measured, whether it is as declared or not."""
    unasked: str = ""
    """Why it has no finding: another answer's finding speaks for it too."""


class TraceProbe(Protocol):
    """One question asked of traces. `name` is also the first part of its findings' names."""

    name: str

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """Answer from the evidence. Raises only where the probe itself is broken."""


def skip_answer(name: str, because: str, next_step: str) -> ProbeAnswer:
    """The answer of a probe that could not ask."""
    return ProbeAnswer(
        findings=(
            Finding(name=name, outcome="skipped", sentence=f"not compared: {because}", next_step=next_step),
        )
    )


@dataclass(frozen=True, kw_only=True)
class PairAnswer:
    """A comparison of two traces in a probe's terms: what differs is named when a probe asks for it in words."""

    comparison: Comparison
    name: str
    """First part of the names of findings and tables."""
    a: Trace
    b: Trace

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As `parity compare` tells it; where it fails, `NAME.diagnosis` and every failing finding name the fault."""
        return self._tables_and_findings[1]

    @property
    def tables(self) -> tuple[Table, ...]:
        """All kept as detail."""
        return tuple(
            replace(t, detail=True, title=f"{t.title} ({self.name})") for t in self._tables_and_findings[0]
        )

    @cached_property
    def _tables_and_findings(self) -> tuple[tuple[Table, ...], tuple[Finding, ...]]:
        # A pair that passes is not diagnosed: that would read samples of it again to say nothing.
        failed = self.comparison.outcome == "fail"
        diagnosis = diagnose_or_why(self.comparison, self.a, self.b) if failed else None
        return diagnosed_tables_and_findings(self.comparison, name=self.name, diagnosis=diagnosis)


def compare_pair(
    evidence: Evidence,
    name: str,
    a: str,
    b: str,
    *,
    golden: str | None = None,
    floor: Floor | None = None,
    taps: Sequence[str] | None = None,
) -> PairAnswer:
    """Compare two traces of the evidence."""
    one, two = evidence.traces[a], evidence.traces[b]
    held = evidence.traces[golden] if golden else None
    comparison = compare_traces(one, two, floor=floor, taps=taps, golden=held)
    return PairAnswer(comparison=comparison, name=name, a=one, b=two)


def token_errors(stats: PairStats) -> NDArray[np.float64]:
    """[tokens] |a - b| / |b|; inf for a token with an element that is not finite on either side."""
    bad = stats.field("bad_a") + stats.field("bad_b") > 0
    return np.where(bad, np.inf, stats.relative_l2())


def relative_l2(a: Trace, b: Trace, tap: str) -> float:
    """|a - b| / |b| of one tap over all requests both hold, as one vector; dtypes may differ."""
    difference = reference = 0.0
    for request in b.requests:
        stats = pair_stats(a.tensor(request.id, tap), b.tensor(request.id, tap), full=False)
        if stats.field("bad_a").any() or stats.field("bad_b").any():
            return float("inf")
        difference += float(stats.field("dd").sum())
        reference += float(stats.field("bb").sum())
    return (difference / reference) ** 0.5 if reference else float("inf") if difference else 0.0


def evidence_of(**values: Value) -> tuple[tuple[str, Value], ...]:
    """Pairs for a finding's evidence, names with spaces for underscores."""
    return tuple((name.replace("_", " "), value) for name, value in values.items())
