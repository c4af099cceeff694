"""What a probe of traces is, what it is given, and what both kinds of probes answer with.

A probe answers one question. It is given `Evidence` (the traces that workers captured, or the reason why
one is missing) and returns findings and tables. Where something is missing, `skip_answer` makes the finding; a probe
never passes on nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypedDict

from parity.comparison.tolerance import Floor
from parity.comparison.traces import Comparison, compare_traces
from parity.diagnosis.kinds import diagnose_or_why
from parity.diagnosis.report import diagnosed_tables_and_findings
from parity.reports.record import Finding, Statement, Table, Value
from parity.tracing.trace import Trace

CAPTURE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


TargetStructure = TypedDict(
    "TargetStructure",
    {
        # `linear_attention` or `full_attention` for each decoder layer.
        "layer_types": Sequence[str],
        # Names of parameters that are stored in float32, and kept so beside bfloat16 weights.
        "kept_float32": Sequence[str],
        # Why not all weights were compared with the checkpoint; empty where they were.
        "unchecked": str,
        # How many numbers all parameters hold.
        "parameters": int,
        "class": str,
    },
    total=False,
)
"""The target as the torch worker described it."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the workers captured."""

    other: str
    """The backend that is compared with torch."""
    traces: Mapping[str, Trace]
    """By name: `torch.fp32`, `other.bf16.local`, `golden`, `torch.fp32.decode`, ..."""
    absent: Mapping[str, str]
    """Name of a trace that is not there -> why: what is missing, or how its worker ended."""
    crashes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Worker -> (what happened, last lines of its standard error)."""
    operators: Mapping[str, Path] = field(default_factory=dict)
    """Recorded operator calls by name: `torch.fp32`, `golden.fp32`, `other.fp32.local`."""
    self_tests: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The interpreter's error and limit by dtype."""
    target: TargetStructure = field(default_factory=TargetStructure)
    _floors: dict[str, Floor | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def linear(self) -> list[int]:
        """The decoder layers with linear attention."""
        return [index for index, kind in enumerate(self.target["layer_types"]) if kind == "linear_attention"]

    def why_not(self, *names: str) -> str | None:
        """Return why these traces cannot be compared, or None where all are there."""
        for name in names:
            if name not in self.traces:
                return f"{name}: {self.absent.get(name, 'was not captured')}"
        return None

    def floor(self, dtype: str) -> Floor | None:
        """Return what a rerun and another batch size change on torch, by tap; None where neither was captured.

        Args:
            dtype: a key of `CAPTURE_DTYPES`.
        """
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
    """Why it has no finding: another answer's finding reports the reason."""


class TraceProbe(Protocol):
    """One question asked of traces. `name` is also the first part of its findings' names."""

    name: str

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """Answer from the evidence. Raises only where the probe itself is broken."""


def skip_answer(name: str, because: str, next_step: str) -> ProbeAnswer:
    """Make the answer of a probe whose evidence is missing.

    Args:
        name: of the finding.
        because: what is missing, in words.
        next_step: what the reader can do about it.
    """
    return ProbeAnswer(
        findings=(
            Finding(name=name, outcome="skipped", sentence=f"not compared: {because}", next_step=next_step),
        )
    )


@dataclass(frozen=True, kw_only=True)
class PairAnswer:
    """A comparison of two traces in a probe's terms; what differs is diagnosed only when findings are read."""

    comparison: Comparison
    name: str
    """First part of the names of findings and tables."""
    a: Trace
    b: Trace

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As `parity compare` reports it; where it fails, `NAME.diagnosis` and every failing finding name the fault."""
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
    """Compare two traces of the evidence.

    Args:
        evidence: what was captured.
        name: first part of the names of findings and tables.
        a, b: names of the traces; b is the reference.
        golden: name of the fp64 trace that both are judged by, if any.
        floor: the measured noise that the difference is judged by.
        taps: the taps to compare; all that both hold by default.
    """
    one, two = evidence.traces[a], evidence.traces[b]
    reference = evidence.traces[golden] if golden else None
    comparison = compare_traces(one, two, floor=floor, taps=taps, golden=reference)
    return PairAnswer(comparison=comparison, name=name, a=one, b=two)


def evidence_of(**values: Value) -> tuple[tuple[str, Value], ...]:
    """Return pairs for a finding's evidence, names with spaces for underscores."""
    return tuple((name.replace("_", " "), value) for name, value in values.items())
