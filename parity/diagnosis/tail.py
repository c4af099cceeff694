"""TAIL: does a difference begin at a chunk's edge, in the last partial chunk, or at an index?"""

from collections.abc import Sequence

import numpy as np

from parity.diagnosis.onset import FALLS, GROSS, OnsetEvidence, at_edges, linear_onsets
from parity.diagnosis.profile import HEAD, SAMPLE_CHUNK, FailingComparison
from parity.diagnosis.records import KindResult, KindVerdict

JUMPS, AGAIN = 4.0, 0.1
"""Growth over the eight tokens before an edge, and size against the first edge, of a jump that repeats."""


def tail(case: FailingComparison) -> KindVerdict:
    """Does it begin at a chunk's edge, in the last partial chunk, or at an index?"""
    found = linear_onsets(case)
    if isinstance(found, str):
        return found
    if 0 in found.tokens or not at_edges(found):
        only = _last_row(found)
        return only or f"wrong from token {min(found.tokens)} on, no edge of {SAMPLE_CHUNK}-token chunks"
    if found.head < GROSS:
        return f"at an edge, but by {found.head:.1e} only"
    how, kinds = _edge_kinds(found)
    return KindResult(
        kinds=kinds,
        sentence=f"wrong from token {min(found.tokens)} on, an edge of {SAMPLE_CHUNK}-token chunks "
        f"({found.head:.2g} at "
        f"{found.series.tap}): {how}",
        next_step="compute lengths around the edge (63, 64, 65, 127, 128, 129): the smallest that fails is the "
        "limit to state",
        evidence=(("edge", min(found.tokens)), *found.evidence()),
        live="" if len(kinds) == 1 else _edge_live(kinds),
    )


def _edge_live(kinds: Sequence[str]) -> str:
    """The experiment that decides."""
    if "STATE" in kinds:
        return (
            "split: whole against split at 63, 64 and 65; the onset moves with a split and stays with a chunk"
        )
    return "operator: the delta rule's recorded inputs on fp64 and on each backend"


def _last_row(found: OnsetEvidence) -> KindResult | None:
    """Only the last token of some requests, each one more than a whole number of chunks."""
    last = [(r, found.length(r)) for r in found.wrong if found.series.onsets[r] == found.length(r) - 1]
    if len(last) != len(found.wrong) or any(length % SAMPLE_CHUNK != 1 for _, length in last):
        return None
    return KindResult(
        kinds=("TAIL",),
        sentence=f"only the last token is wrong, in {len(last)} requests of {SAMPLE_CHUNK}k + 1 tokens",
        next_step="compute these requests one token longer and shorter: a tile of one row fails",
        evidence=found.evidence(),
    )


def _edge_kinds(found: OnsetEvidence) -> tuple[str, tuple[str, ...]]:
    """What happens at the edge, and the kinds it allows."""
    at, series = min(found.tokens), found.series
    if series.kind == "gdn" and _zero_from(found):
        return "a's rows are zero from there to the end", ("TAIL",)
    partial = all(
        series.onsets[r] == found.length(r) // SAMPLE_CHUNK * SAMPLE_CHUNK and found.length(r) % SAMPLE_CHUNK
        for r in found.wrong
    )
    whole_right = all(found.length(r) <= at or found.length(r) % SAMPLE_CHUNK == 0 for r in found.right)
    if partial and len(found.tokens) > 1:
        return "the last partial chunk of each request", ("TAIL",)
    again = _empty_again(found) or _jumps_again(found)
    anew = found.begins_anew("a")
    if again and anew:
        return f"a's state is empty at each edge (again at {again})", ("TAIL",)
    if again:
        # Two implementations: one may be miscompiled from the second chunk on. One implementation: its edges.
        one = len(set(found.case.comparison.backends)) == 1
        return f"it jumps again at {again}", ("TAIL",) if one else ("TAIL", "COMPILE")
    if at > SAMPLE_CHUNK:
        if anew:
            return "a's state is empty there and not at the edges before", ("STATE", "TAIL")
        return f"the edges before {at} are exact: rows from an index on", ("TAIL",)
    if partial and whole_right and anew is not True and not _falls(found):
        return "the last partial chunk", ("TAIL",)
    return "it does not jump at later edges", ("STATE", "TAIL")


def _falls(found: OnsetEvidence) -> bool:
    """Whether the error falls from its onset on, as that of a state does."""
    return found.falls >= FALLS


def _zero_from(found: OnsetEvidence) -> bool:
    """Whether a's rows are zero from the onset to the end, in every request looked at."""
    told = [
        not np.any(rows[found.series.onsets[r] :])
        for r in found.wrong
        if r in found.case.sample
        and (rows := found.case.rows("a", r, found.series.tap)).shape[0] > (found.series.onsets[r] or 0)
    ]
    return bool(told) and all(told)


def _empty_again(found: OnsetEvidence) -> int | None:
    """The first later edge at which a's state is empty too and b's is not."""
    for request in found.wrong:
        start = found.series.onsets[request] or 0
        for edge in range(start + SAMPLE_CHUNK, found.length(request), SAMPLE_CHUNK):
            told = [found.case.fresh(side, request, edge, found.layer or 0) for side in ("a", "b")]
            if told == [True, False]:
                return edge
    return None


def _jumps_again(found: OnsetEvidence) -> int | None:
    """The first later edge at which the error jumps as it did at the first."""
    for request in found.wrong:
        start = found.series.onsets[request] or 0
        first = found.series.level(request, start, start + HEAD)
        for edge in range(start + SAMPLE_CHUNK, found.length(request), SAMPLE_CHUNK):
            now = found.series.level(request, edge, edge + HEAD)
            before = found.series.level(request, edge - 2 * HEAD, edge)
            if now > JUMPS * before and now > AGAIN * first:
                return edge
    return None
