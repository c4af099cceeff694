"""ROWS: are rows of a dump missing, empty, repeated, written over, or elsewhere?

Counted by token ids first; then every wrong row is looked for among all rows of the other side. The state that
a row holds was computed right and lies in the wrong place, which later kinds would take for a wrong state.
"""

import math

import numpy as np
from numpy.typing import NDArray

from parity.diagnosis.profile import (
    CONTRAST,
    MAX_ELEMENTS,
    FailingComparison,
    ProfileSide,
    SampledRows,
    TapErrors,
    relative,
    without,
)
from parity.diagnosis.records import KindResult, KindVerdict, RepairResult

ROWS_MATCHED, ROWS_TRIED, ROWS_AGAINST = 0.9, 256, 4096
"""Share of wrong rows that must have their place elsewhere; how many are tried; against how many."""
ABRUPT = 0.1
"""Error of a wrong row beside an exact one that no state leaves behind: it falls by a tenth a token, not to nothing."""


def rows(case: FailingComparison) -> KindVerdict:
    """Are rows missing, empty, repeated or elsewhere? Counted by token ids, then each wrong row is looked for."""
    missing = _missing_rows(case)
    if missing is not None:
        return missing
    empty = _empty_rows(case)
    if empty is not None:
        return empty
    series = next((s for s in case.failing if s.kind == "layer"), case.first)
    if series is None:
        return "no tap fails by its numbers"
    found = _find_displaced_rows(case, series)
    return found if isinstance(found, KindResult) else _overwritten(case) or found


def _overwritten(case: FailingComparison) -> KindResult | None:
    """Single rows that hold something else, at a layer where a computed error would not end so: what is wrong in
    a linear layer's state is forgotten slowly, and never between one token and the next."""
    series = case.first
    if series is None or series.kind != "layer" or series.full:
        return None
    places = []
    for request, mask in enumerate(series.wrong):
        at = np.flatnonzero(mask)
        if not at.size:
            continue
        ends = at[np.flatnonzero(np.append(np.diff(at) > 1, at[-1] < mask.size - 1))]
        abrupt = [int(end) for end in ends if series.errors[request][end] > ABRUPT]
        if len(abrupt) < len(ends) or at[-1] == mask.size - 1 or at.size > 0.2 * mask.size:
            return None
        places.append((request, int(at[0]), int(at.size)))
    if not places:
        return None
    request, first, count = places[0]
    return KindResult(
        kinds=("ROWS",),
        sentence=f"{count} rows of request {case.requests[request].a.id!r} hold something else ({series.tap}, the "
        f"first token {first}) between rows that are exact: they were written over, not computed so",
        next_step="look at what writes into the buffer of states (slot mapping, padding rows, races), and dump again",
        evidence=(("requests", len(places)), ("first row", first), ("rows", count), ("tap", series.tap)),
    )


def _missing_rows(case: FailingComparison) -> KindResult | None:
    """A request whose ids on one side are those of the other with a block left out."""
    for pair in case.a.requests:
        other = next((r for r in case.b.requests if r.id == pair.id), None)
        if other is None or other.token_ids == pair.token_ids or len(other.token_ids) == len(pair.token_ids):
            continue
        side: ProfileSide = "a" if len(pair.token_ids) < len(other.token_ids) else "b"
        short, long = sorted((pair.token_ids, other.token_ids), key=len)
        gap = len(long) - len(short)
        start = next((i for i, (x, y) in enumerate(zip(short, long, strict=False)) if x != y), len(short))
        if start == len(short) or long[start + gap :] != short[start:]:
            continue
        block = math.gcd(start, gap) if start else gap
        return KindResult(
            kinds=("ROWS",),
            sentence=f"side {side} lacks {gap} rows of request {pair.id!r}, from token {start} on; a block of "
            f"{block} divides the gap",
            next_step="dump again with the prefix cache off: rows that were taken from a cache are not written",
            evidence=(
                ("side", side),
                ("request", pair.id),
                ("first row", start),
                ("rows", gap),
                ("block", block),
            ),
            repairs=_aligned_again(case, pair.id, start, gap, side),
        )
    return None


def _aligned_again(
    case: FailingComparison, request: str, start: int, gap: int, side: ProfileSide
) -> tuple[RepairResult, ...]:
    """The request's rows, those of the gap left out, compared after all."""
    short, long = (case.a, case.b) if side == "a" else (case.b, case.a)
    repairs = []
    for series in case.layers or case.series[:1]:
        whole = long.tensor(request, series.tap)[: start + gap + 1024].double().numpy()
        kept = np.concatenate([whole[:start], whole[start + gap :]])
        mine = short.tensor(request, series.tap)[: kept.shape[0]].double().numpy()
        n = min(len(mine), len(kept))
        repairs.append(
            RepairResult(
                tap=series.tap,
                against=f"rows without {start} to {start + gap - 1}",
                before=relative(mine[:n], whole[:n]),
                after=relative(mine[:n], kept[:n]),
            )
        )
    return tuple(repairs)


def _empty_rows(case: FailingComparison) -> KindResult | None:
    """Rows that are zero or not finite at every layer alike: never written, rather than computed so."""
    layers = [s for s in case.layers if s in case.failing]
    if not layers:
        return None
    for request in case.sample:
        for side in ("a", "b"):
            empty = [_empty(case.rows(side, request, s.tap)) for s in layers]
            if not empty or not empty[0].any() or any(not np.array_equal(empty[0], e) for e in empty[1:]):
                continue
            at = np.flatnonzero(empty[0])
            first = case.rows(side, request, layers[0].tap)[at]
            what = "zero" if not np.isnan(first).any() else "not a number"
            early = case.get("embed.out")
            computed = early is not None and not _empty(case.rows(side, request, "embed.out"))[at].all()
            if what != "zero" and computed:
                continue  # the embedding of those tokens is there: something computed the NaN
            block = math.gcd(int(at[0]), int(at.size)) if at[0] else int(at.size)
            name = case.requests[request].a.id
            return KindResult(
                kinds=("ROWS",),
                sentence=f"{at.size} rows of request {name!r} are {what} at all {len(layers)} layers of side "
                f"{side}, from token {at[0]} on (a block of {block}): they were never written",
                next_step="dump again with the prefix cache and chunked prefill off, or with the group's own block "
                "size",
                evidence=(
                    ("side", side),
                    ("request", name),
                    ("rows", int(at.size)),
                    ("first row", int(at[0])),
                    ("block", block),
                ),
            )
    return None


def _empty(rows: SampledRows) -> NDArray[np.bool_]:
    """[rows] whether a row is all zero or holds no finite element."""
    held = np.logical_and(np.isfinite(rows).any(axis=1), rows.any(axis=1))
    found: NDArray[np.bool_] = np.logical_not(held)
    return found


def _find_displaced_rows(case: FailingComparison, series: TapErrors) -> KindVerdict:
    """Look for each wrong row of a among all rows of b."""
    blocks = {r: case.rows("b", r, series.tap) for r in case.sample}
    most = max(1, min(ROWS_AGAINST, 2 * MAX_ELEMENTS // series.result.width))
    places = [(r, t) for r, block in blocks.items() for t in range(block.shape[0])][:most]
    theirs = without(np.concatenate([*blocks.values()])[: len(places)], series.result.outliers)
    wrong = [(r, int(t)) for r in case.sample for t in np.flatnonzero(series.wrong[r])]
    step = max(1, len(wrong) // ROWS_TRIED)
    tried = wrong[::step]
    if len(tried) < 2:
        return "too few wrong rows to look for elsewhere"
    mine = without(np.stack([case.row("a", r, series.tap, t) for r, t in tried]), series.result.outliers)
    distance = np.sqrt(
        np.maximum((mine**2).sum(1)[:, None] + (theirs**2).sum(1)[None] - 2 * mine @ theirs.T, 0)
    ) / np.maximum(np.linalg.norm(mine, axis=1)[:, None], 1e-300)
    best = distance.argmin(1)
    nearest = distance[np.arange(len(tried)), best]
    own = np.array([float(series.errors[r][t]) for r, t in tried])
    found = (nearest <= max(case.accept(series), 1e-6)) & (nearest <= CONTRAST * own)
    share = float(found.mean())
    if share < ROWS_MATCHED:
        return f"{share:.0%} of the wrong rows are found in another place of the other side"
    moved = [(here, places[there]) for here, there, ok in zip(tried, best, found, strict=True) if ok]
    return _describe_moved_rows(case, series, moved, share)


def _describe_moved_rows(
    case: FailingComparison,
    series: TapErrors,
    moved: list[tuple[tuple[int, int], tuple[int, int]]],
    share: float,
) -> KindResult:
    """Say how rows moved: by a constant, to other requests, or in no order."""
    # How far each row moved within its request, and how many went to another.
    shifts = [there[1] - here[1] for here, there in moved if here[0] == there[0]]
    elsewhere = sum(here[0] != there[0] for here, there in moved)
    common = max(set(shifts), key=shifts.count) if shifts else 0
    runs = [here[1] for here, _ in moved]
    steady = shifts and shifts.count(common) >= 0.5 * len(moved)
    blocks = math.gcd(*[abs(s) for s in shifts if s] or [0])
    # In words: another request, one shift, a repeat, or no order.
    if elsewhere > 0.3 * len(moved):
        how = f"{elsewhere} of {len(moved)} are rows of another request"
    elif steady and len(set(there for _, there in moved)) == len(moved):
        how = f"row t of a is row t{common:+d} of b"
    elif steady:
        how = f"rows from {min(runs)} on repeat those {abs(common)} before"
    else:
        how = f"they are a permutation, the first: row {moved[0][0][1]} is row {moved[0][1][1]} of b"
    # The same rows put back, at the first taps, as proof.
    repairs = []
    for tap in [s for s in case.failing if s.kind != "logits"][:12]:
        a = np.stack([case.row("a", r, tap.tap, t) for (r, t), _ in moved])
        own = np.stack([case.row("b", r, tap.tap, t) for (r, t), _ in moved])
        right = np.stack([case.row("b", r, tap.tap, t) for _, (r, t) in moved])
        repairs.append(
            RepairResult(
                tap=tap.tap, against="the rows they are", before=relative(a, own), after=relative(a, right)
            )
        )
    return KindResult(
        kinds=("ROWS",),
        sentence=f"{share:.0%} of the wrong rows of a lie elsewhere in b: {how}; put back, {repairs[0].tap} "
        f"is {repairs[0].after:.1e} from b, {repairs[0].before:.1e} before",
        next_step="repair the dump's order of rows (the split of the packed buffer, the slot mapping), and dump again",
        evidence=(
            ("wrong rows found elsewhere", share),
            ("commonest shift", common),
            ("rows of other requests", elsewhere),
            ("common divisor of shifts", blocks),
            ("looked at", series.tap),
        ),
        repairs=tuple(repairs),
    )
