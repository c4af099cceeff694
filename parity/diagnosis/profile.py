"""The profile of a difference: which taps, from which token, how large, and where the tensors are looked at.

Arrays in, numbers out; names no fault. Tensors are read in bounded samples, so that a trace of any size
can be diagnosed.

    case = FailingComparison.of(comparison, a, b)
    case.first.onsets          # first wrong token of each request at the first failing tap
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parity.comparison.align import RequestPair, align
from parity.comparison.records import Comparison, KeptTokens, TapResult
from parity.tracing.trace import Trace

ProfileSide = Literal["a", "b"]
SampledRows = NDArray[np.float64]
TapKind = Literal["embed", "conv", "gdn", "layer", "pre", "post", "logits", "other"]

SAMPLE_CHUNK = 64
"""Tokens a chunk of the delta rule: fla's and transformers' constant, at whose edges tail faults show."""
WINDOW = 3
"""Tokens that a convolution of width 4 looks back, the width of every released hybrid of this family."""
MAX_REQUESTS, MAX_ROWS, MAX_ELEMENTS = 8, 1024, 4 << 20
"""Requests, rows of each and elements of a block that are read again: enough for every signature, and 32 MiB in
float64 whatever the trace."""
SPREAD = 192
"""Rows, evenly spaced over the sampled requests, on which whole taps are held against each other."""
WIDE_FLOOR = 1e-3
"""Floors above this are those of 16 bits (.06) and fewer; float32's are 2e-6."""
CONTRAST = 0.2
"""Share of a difference that a repair may leave. Planted ones leave 1e-6 (float32) to .1 (bfloat16)."""
HEAD = 4
"""Tokens that stand for the beginning of a run of wrong ones."""


@dataclass(frozen=True)
class TapErrors:
    """One tap's errors, request by request."""

    result: TapResult
    kind: TapKind
    errors: tuple[KeptTokens, ...]
    """[tokens] of each request."""

    @property
    def tap(self) -> str:
        """The tap's name."""
        return self.result.tap

    @property
    def linear(self) -> bool:
        """Whether its layer is one of linear attention."""
        return self.result.layer_type == "linear_attention"

    @property
    def full(self) -> bool:
        """Whether its layer has softmax attention."""
        return self.result.layer_type.endswith("_attention") and not self.linear

    @cached_property
    def limit(self) -> float:
        """Above this a token is wrong: the tap's own floor; half of the largest where all stay below it.

        In 16 bits the floor of a single token (.06) would hide the first tokens of a fault that grows; the tap is
        known to fail, so that there the floor of the rms is taken.
        """
        largest = max((float(row.max(initial=0.0)) for row in self.errors), default=0.0)
        floor = self.result.floor_token
        if floor > WIDE_FLOOR:
            floor = 1.5 * self.result.floor_rms
        return floor if largest > floor else largest / 2

    @cached_property
    def wrong(self) -> tuple[NDArray[np.bool_], ...]:
        """[tokens] of each request."""
        return tuple(row > self.limit for row in self.errors)

    @cached_property
    def onsets(self) -> tuple[int | None, ...]:
        """First wrong token of each request."""
        return tuple(int(np.argmax(mask)) if mask.any() else None for mask in self.wrong)

    @property
    def onset(self) -> int:
        """The earliest of them."""
        return min((at for at in self.onsets if at is not None), default=0)

    @property
    def share(self) -> float:
        """Share of all tokens that are wrong."""
        return float(np.mean(np.concatenate(self.wrong))) if self.wrong else 0.0

    def level(self, request: int, start: int, stop: int) -> float:
        """Mean error of a range of tokens; 0 for an empty one."""
        part = self.errors[request][max(0, start) : max(0, stop)]
        return float(np.mean(np.minimum(part, 1e6))) if part.size else 0.0

    def head(self, request: int) -> float:
        """Largest error of the first tokens of the run of wrong ones."""
        at = self.onsets[request]
        return 0.0 if at is None else float(self.errors[request][at : at + HEAD].max(initial=0.0))

    def tail(self, request: int) -> float:
        """Median error of the last third after the onset."""
        at = self.onsets[request]
        if at is None:
            return 0.0
        rest = self.errors[request][at:]
        return float(np.median(rest[-max(1, rest.size // 3) :]))


@dataclass
class FailingComparison:
    """One failing comparison, and the traces behind it."""

    comparison: Comparison
    a: Trace
    b: Trace
    requests: tuple[RequestPair, ...]
    series: tuple[TapErrors, ...]
    """Every compared tap in the model's order."""
    _held: dict[tuple[str, int, str], SampledRows] = field(default_factory=dict, repr=False)
    _spread: dict[tuple[str, str], SampledRows] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, comparison: Comparison, a: Trace, b: Trace) -> "FailingComparison":
        """Split the comparison's token errors by request."""
        names = [tap.tap for tap in comparison.taps]
        requests = align(a, b, names).requests
        cuts = np.cumsum([pair.rows for pair in requests])[:-1]
        series = tuple(
            TapErrors(tap, layer_kind_of(tap.tap), tuple(np.split(tap.token_errors, cuts)))
            for tap in comparison.taps
        )
        return cls(comparison, a, b, requests, series)

    @cached_property
    def failing(self) -> tuple[TapErrors, ...]:
        """Taps whose numbers fail (not those of another dtype alone)."""
        return tuple(
            s
            for s in self.series
            if s.result.outcome == "fail"
            and (s.result.judgement.outcome == "fail" or any(s.result.nonfinite) or s.result.zero_rows[2])
        )

    @property
    def first(self) -> TapErrors | None:
        """The first failing tap in the model's order."""
        return self.failing[0] if self.failing else None

    @cached_property
    def layers(self) -> tuple[TapErrors, ...]:
        """The layer outputs."""
        return tuple(s for s in self.series if s.kind == "layer")

    def get(self, tap: str) -> TapErrors | None:
        """The series of that tap, or None."""
        return next((s for s in self.series if s.tap == tap), None)

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Requests whose tensors are read again: the worst and, beside them, the first."""
        first = self.first
        if first is None:
            return tuple(range(min(MAX_REQUESTS, len(self.requests))))
        worst = sorted(range(len(self.requests)), key=lambda r: -float(first.errors[r].max(initial=0.0)))
        kept = [*worst[: MAX_REQUESTS // 2], *range(len(self.requests))]
        return tuple(sorted(dict.fromkeys(kept[: 2 * MAX_REQUESTS]))[:MAX_REQUESTS])

    def _entry(self, side: ProfileSide, request: int) -> tuple[Trace, str]:
        """The trace of a side, and the request's id there."""
        pair = self.requests[request]
        return (self.a, pair.a.id) if side == "a" else (self.b, pair.b.id)

    def rows(self, side: ProfileSide, request: int, tap: str) -> SampledRows:
        """[rows, width] of one request in float64, the first MAX_ROWS or MAX_ELEMENTS of them."""
        key = (side, request, tap)
        if key not in self._held:
            trace, name = self._entry(side, request)
            most = min(self.requests[request].rows, MAX_ROWS, max(1, MAX_ELEMENTS // trace.tap(tap).width))
            if sum(held.size for held in self._held.values()) > 4 * MAX_ELEMENTS:
                self._held.clear()
            self._held[key] = trace.tensor(name, tap)[:most].double().numpy()
        return self._held[key]

    def row(self, side: ProfileSide, request: int, tap: str, token: int) -> SampledRows:
        """[width] one token, wherever it lies."""
        trace, name = self._entry(side, request)
        found: SampledRows = trace.tensor(name, tap)[token].double().numpy()
        return found

    def sample_rows(self, side: ProfileSide, tap: str) -> SampledRows:
        """[rows, width] of SPREAD tokens over the sampled requests, the same on both sides and at every tap."""
        key = (side, tap)
        if key not in self._spread:
            each = max(2, SPREAD // len(self.sample))
            parts = []
            for request in self.sample:
                trace, name = self._entry(side, request)
                tensor = trace.tensor(name, tap)
                rows = self.requests[request].rows
                chosen = np.unique(np.linspace(0, rows - 1, min(rows, each)).astype(int))
                parts.append(tensor[chosen.tolist()].double().numpy())
            if sum(held.size for held in self._spread.values()) > 8 * MAX_ELEMENTS:
                self._spread.clear()
            self._spread[key] = np.concatenate(parts)
        return self._spread[key]

    def holds(self, side: ProfileSide, tap: str) -> bool:
        """Whether that side has the tap."""
        return tap in (self.a if side == "a" else self.b).taps

    def accept(self, series: TapErrors) -> float:
        """Up to this relative error two rows of a tap count as the same. In 16 bits the floor itself is a twentieth
        of a row, and states of neighbouring layers are a third apart: there the floor is all that is given."""
        return series.result.floor_token * (4 if series.result.floor_token < WIDE_FLOOR else 1)

    def explains(self, series: TapErrors, before: float, after: float, times: float = 1.0) -> bool:
        """Whether a repair leaves little enough to be one: within rounding (`times` of it where a formula adds its
        own), and less than a fifth of what was there. Without the second, half of everything is `explained` in
        16 bits."""
        limit = self.accept(series) * (times if series.result.floor_token < WIDE_FLOOR else 1.5)
        return after <= limit and after <= CONTRAST * before

    def fresh(self, side: ProfileSide, request: int, token: int, layer: int) -> bool | None:
        """Whether the delta rule's state was empty before a token, read off the operators' taps alone.

        With an empty state the output of a head is beta (q . k) v: parallel to v, and v is the last part of
        the convolution's output. None where the taps are missing or their layout is another (row 0 of a
        request decides: there the state is empty).
        """
        conv, gdn = f"layer.{layer}.conv.out", f"layer.{layer}.gdn.out"
        if not all(self.holds(side, tap) for tap in (conv, gdn)) or self.get(gdn) is None:
            return None
        head = self._head_width(conv, gdn)
        if head is None:
            return None
        residual = _across(self.row(side, request, conv, token), self.row(side, request, gdn, token), head)
        return True if residual < FRESH else False if residual > STALE else None

    def _head_width(self, conv: str, gdn: str) -> int | None:
        """The largest width at which the first row of some request is parallel to v, head by head."""
        for head in (256, 128, 64, 32, 16):
            for request in self.sample:
                for side in ("b", "a"):
                    conv_row, gdn_row = (self.row(side, request, tap, 0) for tap in (conv, gdn))
                    if gdn_row.size % head == 0 and _across(conv_row, gdn_row, head) < FRESH:
                        return head
        return None


FRESH, STALE = 0.02, 0.1
"""Share of a head's output across v: measured 1e-7 (float32) to 5e-3 (bfloat16) at the first token of a
request, .3 and more with a state behind it."""


def _across(conv: SampledRows, gdn: SampledRows, head: int) -> float:
    """Share of the output that is not parallel to v, over all heads."""
    value = conv[-gdn.size :].reshape(-1, head)
    out = gdn.reshape(-1, head)
    along = (out * value).sum(1) / np.maximum((value * value).sum(1), 1e-300)
    rest = out - along[:, None] * value
    whole = float(np.linalg.norm(out))
    return float(np.linalg.norm(rest)) / whole if whole else 1.0


def layer_kind_of(tap: str) -> TapKind:
    """What a tap's name says it is."""
    known: dict[str, TapKind] = {
        "embed.out": "embed",
        "final.prenorm": "pre",
        "final.postnorm": "post",
        "logits": "logits",
    }
    parts = tap.split(".")
    if parts[0] == "layer" and len(parts) == 3:
        return "layer"
    if parts[0] == "layer" and len(parts) == 4 and parts[2] in ("conv", "gdn"):
        return "conv" if parts[2] == "conv" else "gdn"
    return known.get(tap, "other")


def relative(a: SampledRows, b: SampledRows) -> float:
    """|a - b| / |b| of two blocks; rows with an element that is not finite are left out."""
    good = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    if not good.any():
        return float("inf")
    bottom = float(np.linalg.norm(b[good]))
    top = float(np.linalg.norm(a[good] - b[good]))
    return top / bottom if bottom else (0.0 if top == 0 else float("inf"))


def without(rows: SampledRows, channels: Sequence[int]) -> SampledRows:
    """The rows without some channels: massive ones make every row look like every other."""
    return np.delete(rows, list(channels), axis=1) if channels else rows


def half_of_error(result: TapResult) -> int:
    """How many channels hold half of the squared error (each relative to its own size)."""
    squares = np.sort(np.square(np.nan_to_num(result.channel_errors, posinf=1e6).astype(np.float64)))[::-1]
    total = squares.sum()
    return int(np.searchsorted(np.cumsum(squares), total / 2) + 1) if total else 0
