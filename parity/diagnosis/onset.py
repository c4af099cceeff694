"""Faults with an onset: PAD, PACK, STATE and TAIL in linear layers, POS and ATTN in full-attention layers.

What names them is where a run of wrong tokens begins, how it goes on, which layer it begins in, and
whether the state of a linear layer was empty there.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parity.diagnosis.profile import (
    SAMPLE_CHUNK,
    WIDE_FLOOR,
    WINDOW,
    FailingComparison,
    ProfileSide,
    TapErrors,
)
from parity.diagnosis.records import KindResult, KindVerdict
from parity.diagnosis.weights import other_weights
from parity.reports.record import Value

GROSS = 0.04
"""Smallest error at the onset of a lost, leaked or misread state. Measured .07 and more in layer outputs; a
state that is only rounded gives 1e-3 (bfloat16) and is a numeric policy."""
FALLS = 8.0
"""Head over tail from which an error falls with the distance to its onset, as a state is forgotten: by
thousands over 100 tokens on both targets measured, while an operator that is wrong everywhere gives 1 to 5."""


ALIKE, UNLIKE = 0.3, 0.9
"""Difference of two leaks over the smaller one: pads gave 0 to .8, states of earlier requests 1 and more."""


@dataclass
class OnsetEvidence:
    """What all tests of this file look at, at the first failing tap."""

    case: FailingComparison
    series: TapErrors

    @cached_property
    def wrong(self) -> list[int]:
        """Requests with a wrong token."""
        return [r for r, at in enumerate(self.series.onsets) if at is not None]

    @cached_property
    def right(self) -> list[int]:
        """Requests without."""
        return [r for r, at in enumerate(self.series.onsets) if at is None]

    @cached_property
    def tokens(self) -> set[int]:
        """The different onsets."""
        return {at for at in self.series.onsets if at is not None}

    @cached_property
    def head(self) -> float:
        """Largest error at any onset."""
        return max((self.series.head(r) for r in self.wrong), default=0.0)

    @cached_property
    def falls(self) -> float:
        """Head over tail, the largest of the requests."""
        ratios = [self.series.head(r) / max(self.series.tail(r), self.series.limit / 10) for r in self.wrong]
        return max(ratios, default=0.0)

    @cached_property
    def window_only(self) -> bool:
        """Whether at most WINDOW tokens from the onset on are wrong, in every request."""
        return all(
            self.series.wrong[r].sum() <= WINDOW
            and np.flatnonzero(self.series.wrong[r]).max() < (self.series.onsets[r] or 0) + WINDOW
            for r in self.wrong
        )

    @cached_property
    def operator(self) -> str:
        """What is wrong: the convolution's window, the delta rule's state, or what cannot be told."""
        if self.series.kind == "conv":
            return "the convolution's window"
        if self.series.kind == "gdn":
            return "the delta rule's state"
        return "the window or the state (no operator tap says which)"

    @cached_property
    def layer(self) -> int | None:
        """The first failing layer."""
        return self.series.result.layer

    def length(self, request: int) -> int:
        """Tokens of a request."""
        return int(self.series.errors[request].size)

    def fresh(self, side: ProfileSide, request: int) -> bool | None:
        """Whether a side begins anew at the request's onset."""
        at = self.series.onsets[request]
        if at is None or self.layer is None:
            return None
        told = None if self.series.kind == "conv" else self.case.fresh(side, request, at, self.layer)
        return told if told is not None else self._like_a_beginning(side, request, at)

    def state_empty(self, side: ProfileSide) -> bool | None:
        """Whether the delta rule's state is empty at the onsets of a wrong window: one that is tells of a document."""
        told = {
            self.case.fresh(side, r, self.series.onsets[r] or 0, self.layer)
            for r in self.wrong
            if r in self.case.sample and self.layer is not None
        } - {None}
        return told.pop() if len(told) == 1 else None

    def _like_a_beginning(self, side: ProfileSide, request: int, at: int) -> bool | None:
        """The onset's row against the first row of a request that begins with the same token. Only before the
        first full-attention layer: there no position enters."""
        full = [s.result.layer for s in self.case.series if s.full and s.result.layer is not None]
        if full and self.layer is not None and self.layer > min(full):
            return None
        token = self.case.requests[request].a.token_ids[at]
        for other in self.case.sample:
            if self.case.requests[other].a.token_ids[0] != token:
                continue
            mine, first = (self.case.row(side, r, self.series.tap, t) for r, t in ((request, at), (other, 0)))
            size = float(np.linalg.norm(first))
            return bool(np.linalg.norm(mine - first) <= max(self.case.accept(self.series), 1e-5) * size)
        return None

    def begins_anew(self, side: ProfileSide) -> bool | None:
        """Whether that side begins anew at the onsets: True or False where every request that tells agrees."""
        told = {self.fresh(side, r) for r in self.wrong if r in self.case.sample} - {None}
        return told.pop() if len(told) == 1 else None

    def document_starts(self) -> int:
        """In how many requests the onset's token is one that requests begin with."""
        firsts = {pair.a.token_ids[0] for pair in self.case.requests}
        return sum(
            self.case.requests[r].a.token_ids[self.series.onsets[r] or 0] in firsts
            for r in self.wrong
            if self.series.onsets[r]
        )

    def evidence(self) -> tuple[tuple[str, Value], ...]:
        """The numbers every answer here carries."""
        first = self.wrong[0] if self.wrong else 0
        return (
            ("first tap", self.series.tap),
            ("onsets", ", ".join(str(at) for at in sorted(self.tokens)[:6])),
            ("requests wrong", len(self.wrong)),
            ("requests right", len(self.right)),
            ("error at onset", self.head),
            ("error of the last third", self.series.tail(first)),
        )


def onsets(case: FailingComparison) -> OnsetEvidence | str:
    """The shared look at the first failing tap, or why there is none."""
    series = case.first
    if series is None:
        return "no tap fails by its numbers"
    if series.kind not in ("conv", "gdn", "layer"):
        return f"the difference begins at {series.tap}, outside the layers"
    found = OnsetEvidence(case, series)
    return found if found.wrong else "no token is wrong by itself"


def linear_onsets(case: FailingComparison) -> OnsetEvidence | str:
    """The same where it begins in a linear layer (or in one whose type is not known)."""
    found = onsets(case)
    if isinstance(found, str):
        return found
    if found.series.full:
        return f"the difference begins at {found.series.tap}, a full-attention layer"
    return found


def _from_the_start(found: OnsetEvidence) -> str | None:
    """Why this is no leak into the first tokens of a request, or None where it is one."""
    if other_weights(found.case):
        return "the weights differ, which may be worst where little has been added up"
    if found.tokens != {0} and not (found.tokens <= set(range(WINDOW)) and 0 in found.tokens):
        return f"wrong from token {min(found.tokens)} on, not from the first"
    if found.series.kind == "conv" and found.window_only:
        return None
    if found.series.kind == "gdn":
        empty = [found.begins_anew(side) for side in ("a", "b")]
        if all(empty):
            return "both sides' states are empty at the first token: the operator differs, not what stood before it"
    if found.right and found.head >= GROSS:
        return None  # an operator that is wrong is so in every request
    if found.head < GROSS or found.falls < FALLS:
        return f"the first tokens are wrong by {found.head:.1e}, {found.falls:.1f} times the last third"
    return None


def pad(case: FailingComparison) -> KindVerdict:
    """Do pads leak into the first real tokens? Worst at the start, then forgotten; linear layers first."""
    found = linear_onsets(case)
    if isinstance(found, str):
        return found
    why = _from_the_start(found)
    if why is not None:
        return why
    kinds = _leak_kinds(found)
    if "PAD" not in kinds:
        return f"the leak is one of {' and '.join(kinds)}: " + _leak_words(found)
    return KindResult(
        kinds=kinds,
        sentence=f"the first tokens of {len(found.wrong)} of {len(case.requests)} requests are wrong ({found.head:.2g} "
        f"at {found.series.tap}), {found.falls:.0f} times the last third: something stood before them. "
        + _leak_words(found),
        next_step="compute these requests without padding (or padded on the right), and fresh: the side that "
        "changes leaks",
        evidence=found.evidence(),
        live="padding: the same request with 0, 1, 3, 5 and 64 pads on its left, and after another request",
    )


def _leak_kinds(found: OnsetEvidence) -> tuple[str, ...]:
    """Which of PAD, PACK and STATE a leak into first tokens may be."""
    lengths = [found.length(r) for r in range(len(found.case.requests))]
    kinds = ["PAD", "STATE"]
    if found.series.kind == "gdn":
        kinds.remove("PAD")  # pads go through the window first
        return tuple(kinds)
    longest_right = bool(found.right) and max(lengths[r] for r in found.right) == max(lengths)
    if longest_right and max(lengths[r] for r in found.wrong) < max(lengths):
        # The unpadded row of a batch is its longest; a state left over spares the first, whatever its length.
        alike = _alike(found)
        return {True: ("PAD",), False: ("STATE",), None: ("PAD", "STATE")}[alike]
    if found.right:
        return ("PAD", "STATE") if _alike(found) else ("STATE",)
    return tuple(kinds)


def _alike(found: OnsetEvidence) -> bool | None:
    """Whether requests that begin with one token are wrong by the same amount: pads are all alike, what an
    earlier request leaves is not. None where there are no two of them, or the answer lies between (pads in
    unequal number leave unequal states)."""
    groups: dict[int, list[int]] = {}
    for request in found.wrong:
        if request in found.case.sample:
            groups.setdefault(found.case.requests[request].a.token_ids[0], []).append(request)
    for group in groups.values():
        if len(group) > 1:
            tap = found.series.tap
            leaks = [found.case.row("a", r, tap, 0) - found.case.row("b", r, tap, 0) for r in group[:2]]
            apart = float(np.linalg.norm(leaks[0] - leaks[1]) / min(np.linalg.norm(leak) for leak in leaks))
            # Behind the state pads in unequal number differ too; in the window three of them fill it.
            return (
                True if apart < ALIKE else False if apart > UNLIKE and found.series.kind == "conv" else None
            )
    return None


def _leak_words(found: OnsetEvidence) -> str:
    """What speaks for which source of a leak into first tokens."""
    if not found.right:
        return "no request is right, so that pads and a state left over look alike"
    lengths = sorted({found.length(r) for r in found.right})
    alike = _alike(found)
    more = (
        ""
        if alike is None
        else f"; requests that begin alike are wrong {'alike' if alike else 'differently'}"
    )
    return f"right are {len(found.right)} of {', '.join(map(str, lengths))} tokens{more}"


def diagnose_packing(case: FailingComparison) -> KindVerdict:
    """Does one document leak into the next? Exact before a boundary, wrong from it on, in linear layers first."""
    found = linear_onsets(case)
    if isinstance(found, str):
        return found
    why = _not_from_a_boundary(found)
    if why is not None:
        return why
    kinds = _boundary_kinds(found)
    if "PACK" not in kinds:
        return _boundary_words(found)
    both = "" if len(kinds) == 1 else "; whether one document ends there or the cache was cut cannot be told"
    return KindResult(
        kinds=kinds,
        sentence=f"exact before token {min(found.tokens)}, wrong from it on ({found.head:.2g} at {found.series.tap}): "
        f"{found.operator} crosses a boundary. {_boundary_words(found)}{both}",
        next_step=_packed_step(found),
        evidence=found.evidence(),
        live="packing: the documents packed and alone, then only the first one changed"
        if len(kinds) > 1
        else "",
    )


def _packed_step(found: OnsetEvidence) -> str:
    """Which argument of a packed call is missing."""
    missing = {"conv": "seq_idx (the convolution)", "gdn": "cu_seq_lens_q (the delta rule)"}.get(
        found.series.kind, "cu_seq_lens_q or seq_idx"
    )
    return f"give the kernels {missing}, beside the positions, or do not pack"


def _not_from_a_boundary(found: OnsetEvidence) -> str | None:
    """Why this is no loss or leak from some token on, or None where it is one."""
    if 0 in found.tokens:
        return "wrong from the first token on"
    if found.head < GROSS:
        return f"from token {min(found.tokens)} on, but by {found.head:.1e} only"
    if at_edges(found):
        return f"wrong from {min(found.tokens)} on, an edge of {SAMPLE_CHUNK}-token chunks"
    return None


def at_edges(found: OnsetEvidence) -> bool:
    """Whether every onset is at a chunk's edge, and no side says that it computed in other steps."""
    modes = set(found.case.comparison.modes)
    # In 16 bits the first token behind an edge may differ by less than the floor.
    slack = 2 if found.series.result.floor_token > WIDE_FLOOR else 0
    near = all(at >= SAMPLE_CHUNK and at % SAMPLE_CHUNK <= slack for at in found.tokens)
    return near and min(found.tokens) % SAMPLE_CHUNK == 0 and modes <= {"prefill", "prefill+local"}


def _steps(found: OnsetEvidence) -> int | None:
    """Tokens of one step where a side was computed with a cache."""
    for mode in found.case.comparison.modes:
        if mode.startswith("decode"):
            return 1
        if mode.startswith("blocks:"):
            return int(mode.removeprefix("blocks:").removesuffix("+local"))
    return None


def _boundary_kinds(found: OnsetEvidence) -> tuple[str, ...]:
    """PACK, STATE, or both, for a difference that begins inside a request."""
    steps = _steps(found)
    if steps is not None and all(at % steps == 0 for at in found.tokens):
        return ("STATE",)
    prompts = [found.case.requests[r].a.prompt_tokens for r in found.wrong]
    if [found.series.onsets[r] for r in found.wrong] == prompts:
        return ("STATE",)  # where the prompt ends and decoding begins
    if found.series.kind == "conv" and (empty := found.state_empty("b")) is not None:
        return ("PACK",) if empty else ("STATE",)
    anew = {side: found.begins_anew(side) for side in ("a", "b")}
    starts = found.document_starts()
    if anew["a"] and anew["b"] is False and not starts:
        return ("STATE",)
    if anew["b"] and anew["a"] is False:
        return ("PACK",) if starts or len(found.tokens) > 1 else ("PACK", "STATE")
    if anew["a"] is False and anew["b"] is False:
        return ("STATE",)  # no side is at a beginning: a state that is stale, not one too many or too few
    return ("PACK", "STATE")


def _boundary_words(found: OnsetEvidence) -> str:
    """What speaks for which."""
    anew = {side: found.begins_anew(side) for side in ("a", "b")}
    words = {True: "begins anew", False: "carries on", None: "cannot be told"}
    said = f"side a {words[anew['a']]} there, side b {words[anew['b']]}"
    if found.series.kind == "conv" and (empty := found.state_empty("b")) is not None:
        said = f"the delta rule's state of side b {'is empty' if empty else 'goes on'} there"
    starts = found.document_starts()
    if starts:
        said += f"; {starts} of {len(found.wrong)} onsets are tokens that requests begin with"
    return said


def state(case: FailingComparison) -> KindVerdict:
    """Is a cache's state lost or stale at a split, or left over from the request before?"""
    found = linear_onsets(case)
    if isinstance(found, str):
        return found
    # A request that begins with a state: left over from the one before.
    steps = _steps(found)
    if _from_the_start(found) is None:
        kinds = _leak_kinds(found)
        if kinds[0] == "STATE":
            return KindResult(
                kinds=kinds,
                sentence=f"{len(found.wrong)} of {len(case.requests)} requests begin with a state that is not empty "
                f"({found.head:.2g} at {found.series.tap}, {found.falls:.0f} times the last third): "
                f"{found.operator} was left over. {_leak_words(found)}",
                next_step="clear the cache between requests, and compute the second request alone",
                evidence=found.evidence(),
            )
    # Otherwise exact up to a split, and wrong from it on.
    why = _not_from_a_boundary(found)
    if why is not None and not (steps and found.head >= GROSS):
        return why
    kinds = _boundary_kinds(found)
    if kinds != ("STATE",):
        return _boundary_words(found)
    at = f"step {min(found.tokens) // steps} of {steps} tokens" if steps else f"token {min(found.tokens)}"
    return KindResult(
        kinds=kinds,
        sentence=f"exact before token {min(found.tokens)}, wrong from it on ({found.head:.2g} at {found.series.tap}): "
        f"at {at} {found.operator} is {'lost' if found.begins_anew('a') else 'not the one that was left'}. "
        + _boundary_words(found),
        next_step="compute the request whole, and split there, from one process: look at what the cache returns "
        "for that layer, and at crop, which some caches do for the window only",
        evidence=found.evidence(),
    )
