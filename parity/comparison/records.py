"""What a comparison found, as frozen numbers. `compare` fills these, `compare_report` words them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parity.comparison.align import UnpairedItem
from parity.comparison.tolerance import Gate, Judgement
from parity.reports.record import Outcome

KeptTokens = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlResult:
    """One negative control at one tap."""

    name: str
    refused: bool | None
    """True: the gate failed the broken copy, as it must. False: it passed it. None: left out."""
    because: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TapResult:
    """One tap, over all tokens of all requests. Side a is the candidate, b the reference."""

    tap: str
    layer: int | None
    layer_type: str
    dtypes: tuple[str, str]
    tokens: int
    width: int
    cosine_mean: float
    cosine_min: float
    cosine_p01: float
    robust_cosine_min: float
    cosine_flat: float
    """Of the whole tap as one vector: shown because others report it, never judged."""
    relative_l2: float
    """Of the whole tap as one vector."""
    robust_relative_l2: float
    """The same without the outlier channels."""
    error_rms: float
    """Judged error (larger of plain and robust relative L2 per token): rms over tokens."""
    error_max: float
    max_abs: float
    mean_abs: float
    mean: tuple[float, float]
    std: tuple[float, float]
    nonfinite: tuple[int, int, int]
    """Elements of a, of b, and of both at once."""
    zero_rows: tuple[int, int, int]
    """Rows of a, of b, and on one side only."""
    ulp: tuple[int, ...] | None
    """Elements at most 0, 1, 4, 16, 64 ULP apart, and further; null where dtypes differ."""
    outliers: tuple[int, ...]
    """Channels left out of the robust numbers."""
    recomputed: bool
    """Whether the outliers chosen on a sample were wrong and the tap was read twice."""
    floor_name: str
    floor_rms: float
    floor_token: float
    judgement: Judgement
    faults: tuple[str, ...]
    """Broken rules that no tolerance softens: non-finite, zero rows, dtypes."""
    controls: tuple[ControlResult, ...]
    outcome: Outcome
    token_errors: KeptTokens = field(repr=False, compare=False)
    """[tokens] judged error, requests one after the other."""
    channel_errors: KeptTokens = field(repr=False, compare=False)
    """[channels] rms of a - b over the rms of b."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlace:
    """One token of one request at one tap."""

    tap: str
    layer: int | None
    request: str
    token: int
    token_id: int
    text: str
    error: float
    """Judged relative error."""
    cosine: float
    times_limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """Largest judged error per tap and range of token positions, over all requests."""

    taps: tuple[str, ...]
    starts: tuple[int, ...]
    """First token position of each column."""
    values: tuple[tuple[float, ...], ...]
    """[tap][column]."""
    texts: tuple[tuple[str, ...], ...] = ()
    """[tap][column], the text of the token with that error; empty where no texts were given."""

    @classmethod
    def of(
        cls,
        errors: Mapping[str, Sequence[KeptTokens]],
        columns: int = 96,
        texts: Sequence[Sequence[str]] = (),
    ) -> "HeatMap":
        """From each tap's [tokens] errors, one array a request; at most `columns` ranges of positions.

        `texts` are the tokens of each request; a request without any shows none.
        """
        longest = max(row.size for rows in errors.values() for row in rows)
        step = -(-longest // columns)
        starts = tuple(range(0, longest, step))
        values, named = [], []
        for rows in errors.values():
            worst, request = np.zeros(len(starts), np.float32), np.zeros(len(starts), np.int64)
            for index, row in enumerate(rows):
                peaks = np.maximum.reduceat(row, np.arange(0, row.size, step))
                request[: peaks.size][~(peaks <= worst[: peaks.size])] = index  # a nan is the worst
                worst[: peaks.size] = np.maximum(worst[: peaks.size], peaks)
            values.append(tuple(worst.tolist()))
            if texts:
                places = [
                    (i, start + int(np.argmax(rows[i][start : start + step])) if start < rows[i].size else -1)
                    for i, start in zip(request.tolist(), starts, strict=True)
                ]
                named.append(tuple(texts[i][at] if 0 <= at < len(texts[i]) else "" for i, at in places))
        return cls(taps=tuple(errors), starts=starts, values=tuple(values), texts=tuple(named))


@dataclass(frozen=True, kw_only=True, slots=True)
class Escalation:
    """What to capture in full, where sketches fail or come too near a limit."""

    taps: tuple[str, ...]
    """Patterns for `parity capture --taps`."""
    request: str
    tokens: tuple[int, int]
    """First and last token of that request that may be beyond the limit."""
    error: float
    """The largest estimated error among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two traces have in common, and what not."""

    sides: tuple[str, str]
    backends: tuple[str, str]
    """Requested `delta` and `conv` of each side, as `delta+conv`."""
    dtypes: tuple[str, str]
    modes: tuple[str, str]
    target: str
    gate: Gate
    golden: str | None
    requests: int
    tokens: int
    taps: tuple[TapResult, ...]
    unpaired: tuple[UnpairedItem, ...]
    """Everything without a partner; each counts as failure."""
    notes: tuple[str, ...]
    proof_problems: tuple[str, ...]
    """Why a side's trace is no evidence for the backend it claims."""
    identity: tuple[str, ...]
    """Differences of configuration and weights between the sides' targets."""
    first_bad: TokenPlace | None
    worst: tuple[TokenPlace, ...]
    heat: HeatMap
    implementation: Literal["numba", "torch", "sketch"]
    """What computed the numbers; `sketch`: a side is a sketch, they are estimates."""
    seconds: float
    escalations: tuple[Escalation, ...] = ()
    """For estimates: what a full capture has to show."""
    source_problems: tuple[str, ...] = ()
    """What a dump's slices were taken for and are not; each counts as failure. Its taps bear the names that were
    found, so that their numbers alone would pass."""

    @property
    def outcome(self) -> Outcome:
        """The worst of structure and taps. A comparison of nothing is `skipped`, never a pass."""
        outcomes = {tap.outcome for tap in self.taps}
        if self.unpaired or self.proof_problems or self.source_problems or "fail" in outcomes:
            return "fail"
        if "error" in outcomes:
            return "error"
        return "skipped" if outcomes <= {"skipped"} else "pass"
