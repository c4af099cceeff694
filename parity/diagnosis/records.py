"""What a diagnosis is: the kind of fault, its evidence, what remains after a repair. Data only.

The kinds and their order are those of sixteen families of public bugs; each is named from the profile of
a difference over layers, tokens and channels. Where two dumps alone cannot tell two kinds apart, both are
named, with the experiment on a live model that separates them (`parity compare --live`).
"""

from dataclasses import dataclass
from typing import Literal

from parity.reports.record import Value

MEANING: dict[str, str] = {
    "DISPATCH": "another implementation ran than was asked for",
    "ROWS": "rows are missing, repeated, empty or in another place",
    "LOAD": "other weights",
    "LAYERIDX": "layers under other numbers, or one missing",
    "NORM": "states before the final norm against states after it",
    "ALIAS": "a later state, or a branch without its residual, in a layer's place",
    "PAD": "padding leaks into real tokens",
    "PACK": "one document leaks into the next",
    "POS": "other positions",
    "STATE": "the state of a cache is lost, stale, or left over",
    "TAIL": "wrong at a chunk's edge, in the last chunk, or from an index on",
    "ATTN": "another attention mask or scale",
    "COMPILE": "an operator returns something else for equal inputs",
    "QUANT": "weights or states of lower precision",
    "NUMERIC": "another numeric policy: an epsilon, a dtype, a rounding",
    "INVAR": "results that depend on the run or the batch",
}
"""The sixteen kinds in the order in which they are asked. A kind is asked after those whose signature it shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairResult:
    """One tap, compared again after a repair."""

    tap: str
    against: str
    """What stands on the other side after the repair."""
    before: float
    """Relative L2 over the rows looked at."""
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """What one kind's test found."""

    kinds: tuple[str, ...]
    """The kind; two where the dumps alone allow both."""
    sentence: str
    next_step: str
    evidence: tuple[tuple[str, Value], ...] = ()
    repairs: tuple[RepairResult, ...] = ()
    live: str = ""
    """The experiment that decides between two kinds."""


KindVerdict = KindResult | str
"""An answer, or why not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTrial:
    """One kind, and why it was or was not named."""

    kind: str
    answer: Literal["named", "possible", "no", "not asked"]
    because: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What a failing comparison is."""

    kinds: tuple[str, ...]
    """One kind; two where a live experiment has to decide; none where the profile is not recognised."""
    sentence: str
    next_step: str
    evidence: tuple[tuple[str, Value], ...]
    asked: tuple[KindTrial, ...]
    """Every kind in order."""
    repairs: tuple[RepairResult, ...] = ()
    live: str = ""

    @property
    def name(self) -> str:
        """`STATE`, `PACK or STATE`, or `not recognised`."""
        return " or ".join(self.kinds) or "not recognised"

    @property
    def fault(self) -> str | None:
        """The name as findings carry it: `state`, `pack-or-state`, or None."""
        return "-or-".join(self.kinds).lower() or None
