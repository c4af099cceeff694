"""Which layer each slice of a dump really is, and whether its last state is from before the final norm.

    found = identify(dump, reference)
    found.matches[0].found, found.matches[0].distance      # `layer.16.out`, .004

A dump's ids are a claim: tools count layers from 0 or from the embedding, and call a state *last* before or
after the final norm. So each slice is compared with every layer's output of a reference capture of the same
tokens. The distance is the median over tokens of |a - b| / |b| without the massive channels (which all layers of
a residual stream share, and which would make any two of them look alike). A slice is found where one tap is near
and every other is clearly further; else nothing is claimed.
"""

import math
import re
from collections.abc import Mapping as Names
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from parity.comparison.error import median_error
from parity.errors import NothingComparable
from parity.kernel.sums import channel_mean_square, pick_outliers
from parity.reports.words import format_number
from parity.tracing.trace import RequestEntry, Trace

NEAR_TIE = 0.3
"""Largest distance of a match. Two unrelated states are 1.4 apart; bfloat16 over 64 layers, fp8 states and a
4-bit target stay below .2."""
APART = 2.0
"""How many times further the next tap has to be. Layers 40 and 41 of a deep target are a few per cent apart and
rounding a few thousandths; under this ratio rounding, or a layer that the reference lacks, could have decided."""
APART_WHOLE = 1.5
"""The same where the reference holds every layer, so that no missing one can be in between."""
FITTED = 0.1
"""Largest distance where one factor a channel was fitted: with the true norm only rounding remains."""
ROWS = 128
"""Tokens compared. The median of so many is steady, and a reference of 64 layers is read in a second."""
REQUESTS = 8
HINT_ROWS = 2048
"""Rows of one request that are read to say what an unmatched slice looks like."""
_STATE = re.compile(r"embed\.out|layer\.\d+\.out|final\.(prenorm|postnorm)")
_INSIDE = re.compile(r"layer\.\d+\..+|logits")
LAST = ("final.prenorm", "final.postnorm")

How = Literal["equal", "norm", "nothing", "ambiguous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceMatch:
    """What one slice was found to be."""

    slice: str
    declared: str | None
    """The tap it was said to be, or None where nobody said."""
    found: str | None
    """The reference's tap, or None where nothing was found."""
    distance: float
    """To the nearest tap: median over tokens of relative L2, massive channels left out."""
    nearest: str
    """The nearest tap, found or not."""
    other: str
    """The next one that holds other numbers."""
    other_distance: float
    declared_distance: float | None
    """To the declared tap, where the reference holds it."""
    how: How
    """equal; norm: through the final norm, with one factor a channel fitted; or why nothing was found."""
    hint: str = ""
    """For a slice that nothing matches: what its numbers look like instead."""

    @property
    def as_declared(self) -> bool:
        """Whether the declaration holds, or there was none."""
        return self.declared is None or self.found == self.declared

    @property
    def nearest_in_words(self) -> str:
        """The nearest tap with its distance, for a sentence."""
        return (
            f"nearest is {self.nearest} at {format_number(self.distance)}"
            if self.nearest
            else "no tap of its width"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Identification:
    """What all slices of one side were found to be."""

    side: Literal["a", "b"]
    matches: tuple[SliceMatch, ...]
    rows: int
    """Tokens that were compared."""

    @property
    def shift(self) -> int | None:
        """By how many layers all declared ids are off, 0 where they hold; None where they do not agree."""
        pairs = [(layer_of_tap(match.declared), layer_of_tap(match.found)) for match in self.matches]
        shifts = {found - declared for declared, found in pairs if declared is not None and found is not None}
        return shifts.pop() if len(shifts) == 1 else None

    def match(self, name: str) -> SliceMatch:
        """The match of that slice."""
        return next(match for match in self.matches if match.slice == name)


def layer_of_tap(tap: str | None) -> int | None:
    """0-based decoder layer of `layer.N.out`, -1 for the embedding, None for another tap."""
    if tap == "embed.out":
        return -1
    found = re.fullmatch(r"layer\.(\d+)\.out", tap or "")
    return int(found.group(1)) if found else None


def identify(
    dump: Trace,
    reference: Trace,
    *,
    side: Literal["a", "b"] = "a",
    declared: Names[str, str] | None = None,
    last: Sequence[str] = (),
) -> Identification:
    """Match every slice of a dump with every state of a reference that has its width.

    Args:
        dump: The side whose slices are looked for.
        reference: The side whose taps are known, of the same tokens.
        side: Which side of the comparison the dump is.
        declared: What slices are said to be: slice -> tap.
        last: Slices that are said to be the last state.

    Raises:
        NothingComparable: The two share no token.
    """
    declared = declared or {}
    pairs = _common(dump, reference)
    slices = {name: _rows(dump, name, [(mine, rows) for mine, _, rows in pairs]) for name in dump.taps}
    taps = [name for name in reference.taps if _is_state(name)]
    distances: dict[str, dict[str, float]] = {name: {} for name in slices}
    states: dict[str, torch.Tensor] = {}
    twins: dict[str, str] = {}
    for tap in taps:
        state = _rows(reference, tap, [(theirs, rows) for _, theirs, rows in pairs])
        twin = next((name for name, kept in states.items() if torch.equal(kept, state)), None)
        twins[tap] = twins.get(twin, twin) if twin is not None else tap
        keep = _without_massive(state)
        for name, mine in slices.items():
            if mine.shape == state.shape:
                distances[name][tap] = median_error(mine[:, keep], state[:, keep])
        # only what could be a twin of the next tap, and the ends for the norm, stay in memory
        states = {key: value for key, value in states.items() if key in LAST} | {tap: state}
    rows = next(iter(slices.values())).shape[0]
    matches, apart = [], _apart(reference)
    final = f"layer.{reference.manifest.target.layers - 1}.out"
    for name, mine in slices.items():
        claim = _Claim(name=name, declared=declared.get(name), last=name in last, apart=apart)
        match = _nearest(claim, distances[name], twins)
        if match.found is None and (name in last or declared.get(name) in LAST):
            match = _through_norm(match, mine, states)
        if match.found is None:
            match = replace(match, hint=_hint(dump, reference, name, pairs[0]))
        if (
            match.declared == "final.prenorm"
            and match.found == final
            and "final.prenorm" not in reference.taps
        ):
            match = replace(match, declared=final)  # the last layer's output is what enters the final norm
        matches.append(match)
    return Identification(side=side, matches=tuple(matches), rows=rows)


def _is_state(name: str) -> bool:
    """Whether a tap may be a state of the residual stream: not what our traces record inside a layer."""
    return bool(_STATE.fullmatch(name)) or not _INSIDE.fullmatch(name)


Pairs = list[tuple[RequestEntry, RequestEntry, int]]


def _common(dump: Trace, reference: Trace) -> Pairs:
    """Up to REQUESTS pairs of requests, and how many first tokens they share."""
    by_tokens = {entry.token_ids: entry for entry in reference.requests}
    by_id = {entry.id: entry for entry in reference.requests}
    pairs: Pairs = []
    for mine in dump.requests:
        theirs = by_tokens.get(mine.token_ids) or by_id.get(mine.id)
        shared = 0
        if theirs is not None:
            for one, other in zip(mine.token_ids, theirs.token_ids, strict=False):
                if one != other:
                    break
                shared += 1
        if theirs is not None and shared:
            pairs.append((mine, theirs, shared))
        if len(pairs) == REQUESTS:
            break
    if not pairs:
        raise NothingComparable(
            f"tokens common to {dump.path} and {reference.path}",
            f"{len(dump.requests)} and {len(reference.requests)} requests, and no two begin with the same token id",
            "compare dumps of the same prompts, made with one tokenizer and chat template",
        )
    return pairs


def _rows(trace: Trace, tap: str, requests: Sequence[tuple[RequestEntry, int]]) -> torch.Tensor:
    """[rows, channels] float32: evenly spaced tokens of the requests, at most ROWS in all."""
    each = max(1, ROWS // len(requests))
    parts = []
    for entry, shared in requests:
        step = max(1, shared // each)
        parts.append(trace.tensor(entry.id, tap)[:shared:step][:each].to(torch.float32))
    return torch.cat(parts)


def _without_massive(state: torch.Tensor) -> torch.Tensor:
    """[channels] mask of those that are not massive."""
    keep = torch.ones(state.shape[1], dtype=torch.bool)
    keep[list(pick_outliers(channel_mean_square(state, ROWS)))] = False
    return keep


def _apart(reference: Trace) -> float:
    """How much further the next tap has to be: less where the reference holds every layer's output."""
    held = {layer_of_tap(tap) for tap in reference.taps}
    layers = reference.manifest.target.layers
    return APART_WHOLE if layers > 1 and held >= set(range(layers)) else APART


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """What is said of one slice, and how clearly it has to be found."""

    name: str
    declared: str | None
    last: bool
    apart: float


def _nearest(claim: _Claim, distances: Names[str, float], twins: Names[str, str]) -> SliceMatch:
    """The nearest tap, if it is near and alone; of taps that hold the same numbers, the one that was meant."""
    ordered = sorted(distances, key=distances.__getitem__)
    group = [tap for tap in ordered if twins[tap] == twins[ordered[0]]]
    rest = [tap for tap in ordered if tap not in group]
    best = next((tap for tap in group if tap == claim.declared), None)
    best = best or next((tap for tap in group if (tap in LAST) == claim.last), group[0] if group else "")
    distance = distances[best] if best else math.inf
    other, further = (rest[0], distances[rest[0]]) if rest else ("", math.inf)
    how: How = "equal"
    if distance > NEAR_TIE:
        how = "nothing"
    elif further < claim.apart * distance:
        how = "ambiguous"
    return SliceMatch(
        slice=claim.name,
        declared=claim.declared,
        found=best if how == "equal" else None,
        distance=distance,
        nearest=best,
        other=other,
        other_distance=further,
        declared_distance=distances.get(claim.declared) if claim.declared is not None else None,
        how=how,
    )


def _through_norm(match: SliceMatch, mine: torch.Tensor, states: Names[str, torch.Tensor]) -> SliceMatch:
    """Whether the slice is the final norm of the reference's pre-norm state, or the other way round.

    RMSNorm is x / rms(x) * w. Both sides are divided by their rms a token, one factor a channel is fitted on the even
    tokens, and what remains is measured on the odd ones.
    """
    best = match
    for tap, found in (("final.prenorm", "final.postnorm"), ("final.postnorm", "final.prenorm")):
        state = states.get(tap)
        if state is None or state.shape != mine.shape or mine.shape[0] < 8:
            continue
        before, after = (state, mine) if tap == "final.prenorm" else (mine, state)
        normed = before / before.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
        even, odd = slice(0, None, 2), slice(1, None, 2)
        factors = (normed[even] * after[even]).sum(0) / normed[even].square().sum(0).clamp_min(1e-30)
        distance = median_error(normed[odd] * factors, after[odd])
        if distance <= FITTED and distance < best.distance:
            best = replace(match, found=found, distance=distance, nearest=tap, how="norm")
    return best


def _hint(dump: Trace, reference: Trace, name: str, pair: tuple[RequestEntry, RequestEntry, int]) -> str:
    """What an unmatched slice looks like: zeros, shifted or permuted rows, permuted channels, or nothing known.

    Looks at all rows of one request: a sample of permuted rows would be another sample.
    """
    mine_of, theirs_of, shared = pair
    rows = min(shared, HINT_ROWS)
    mine = dump.tensor(mine_of.id, name)[:rows].to(torch.float32)
    finite = torch.isfinite(mine).all(1)
    if not finite.all():
        return f"{int((~finite).sum())} of {rows} rows are not finite"
    zero = (mine == 0).all(1)
    if zero.any():
        return f"{int(zero.sum())} of {rows} rows are zero"
    for tap in (tap for tap in reference.taps if _is_state(tap)):
        if reference.tap(tap).width != mine.shape[1] or rows < 4:
            continue
        state = reference.tensor(theirs_of.id, tap)[:rows].to(torch.float32)
        keep = _without_massive(state)
        for shift in (1, -1):
            if median_error(mine.roll(shift, 0)[1:-1, keep], state[1:-1, keep]) <= NEAR_TIE:
                return f"it is {tap}, one token {'late' if shift < 0 else 'early'}"
        by_channel = _alike(mine, state, 0)
        if _alike(mine[:, keep], state[:, keep], 1) == "reordered" and by_channel == "equal":
            return f"its rows are those of {tap} in another order"
        if _alike(mine, state, 1) == "equal" and by_channel == "reordered":
            return f"its channels are those of {tap} in another order"
    return "wrong tokens, another model, or a tap that the reference lacks"


def _alike(mine: torch.Tensor, state: torch.Tensor, axis: int) -> Literal["equal", "reordered", "other"]:
    """How the norms along an axis compare: as they stand, or only once both are sorted."""
    left, right = mine.norm(dim=axis), state.norm(dim=axis)
    if _gap(left, right) <= FITTED:
        return "equal"
    return "reordered" if _gap(left.sort().values, right.sort().values) <= FITTED else "other"


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest relative difference."""
    return float(((left - right).abs() / right.clamp_min(1e-30)).max())
