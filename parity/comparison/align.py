"""Which tensors of two traces belong together, and everything that has no partner.

Requests are paired where id and tokens agree, then by equal tokens under other ids, then by equal ids
whose tokens part somewhere: of those the common prefix is compared. What has no partner is listed, never
dropped; a comparison counts it as failure. Traces that share nothing end in `NothingComparable`.

    alignment = align(Trace.open("a"), Trace.open("b"), taps=("layer.*.out",))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from parity.errors import NothingComparable, ParityError
from parity.reports.words import shorten_list
from parity.tracing.trace import NOT_STATED, Manifest, RequestEntry, Trace

UnpairedKind = Literal["request", "tap", "tokens", "width", "dtype"]
UnpairedSide = Literal["a", "b", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPair:
    """One request of each side; rows 0 to `rows` of both were computed from the same tokens."""

    a: RequestEntry
    b: RequestEntry
    rows: int
    """Length of the common prefix of token ids."""
    by: Literal["id", "token ids"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TapPair:
    """One tap that both sides hold with one width."""

    name: str
    layer: int | None
    layer_type: str
    """`linear_attention`, `full_attention`, ... of the tap's layer; empty where the tap has none."""
    dtype_a: str
    dtype_b: str
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpairedItem:
    """Something one side has and the other has not, or has otherwise."""

    kind: UnpairedKind
    side: UnpairedSide
    """The side that holds it; `both` where the two hold it differently."""
    name: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """What is compared (in canonical order: `a`'s prompts, the model's taps) and what cannot be."""

    requests: tuple[RequestPair, ...]
    taps: tuple[TapPair, ...]
    unpaired: tuple[UnpairedItem, ...]
    notes: tuple[str, ...] = ()


def align(a: Trace, b: Trace, taps: Sequence[str] | None = None) -> Alignment:
    """Pair two traces. `taps` are names or globs; without them, every tap.

    Raises ParityError for a pattern that no tap of either side matches, and NothingComparable where no
    request, no tap or no token is shared.
    """
    names = _chosen(a, b, taps)
    pairs, by_tokens, loose = _pair_requests(a, b)
    requests = tuple(pair for pair in pairs if pair.rows)
    tap_pairs, tap_loose = _pair_taps(a, b, names)
    loose += [item for pair in pairs for item in _token_difference(pair)]
    # Nothing in common is an error of its own, named by what is missing: a request, a token, a tap.
    if not pairs:
        raise NothingComparable(
            f"requests common to {a.path} and {b.path}",
            " against ".join(_few([r.id for r in side.requests]) for side in (a, b)),
            "capture both sides from the same prompts",
        )
    if not requests:
        raise NothingComparable(
            f"tokens common to {a.path} and {b.path}",
            f"other token ids from the first on in all {len(pairs)} requests",
            "use one tokenizer and chat template on both sides, or give token_ids",
        )
    if not tap_pairs:
        raise NothingComparable(
            f"taps common to {a.path} and {b.path}",
            f"{_few(list(a.taps))} against {_few(list(b.taps))}",
            "capture both sides with the same --taps",
        )
    note = f"{by_tokens} requests have other ids on the two sides and were paired by equal token ids"
    notes = (note,) if by_tokens else ()
    return Alignment(requests=requests, taps=tuple(tap_pairs), unpaired=tuple(tap_loose + loose), notes=notes)


def _chosen(a: Trace, b: Trace, taps: Sequence[str] | None) -> list[str]:
    """Names of the taps to look at, in the order in which a, then b, computes them."""
    every = list(a.taps) + [name for name in b.taps if name not in a.taps]
    if taps is None:
        return every
    for pattern in taps:
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ParityError(
                f"taps {pattern!r}", f"taps {_few(every)}", "name one of those, or a glob such as layer.*.out"
            )
    return [name for name in every if any(fnmatchcase(name, pattern) for pattern in taps)]


def _pair_requests(a: Trace, b: Trace) -> tuple[list[RequestPair], int, list[UnpairedItem]]:
    """Pairs in a's order, how many of them by token ids only, and the requests without a partner."""
    others = {request.id: request for request in b.requests}
    # First those with equal ids and equal tokens.
    partner: dict[str, tuple[RequestEntry, Literal["id", "token ids"]]] = {}
    for request in a.requests:
        if request.id in others and others[request.id].token_ids == request.token_ids:
            partner[request.id] = (others.pop(request.id), "id")
    # Then those with equal tokens under other ids, each partner once.
    by_tokens: dict[tuple[int, ...], list[RequestEntry]] = {}
    for other in others.values():
        by_tokens.setdefault(other.token_ids, []).append(other)
    for request in a.requests:
        if request.id not in partner and by_tokens.get(request.token_ids):
            other = by_tokens[request.token_ids].pop(0)
            partner[request.id] = (others.pop(other.id), "token ids")
    for request in a.requests:
        # Last, equal ids whose tokens part somewhere: the common prefix is compared.
        if request.id not in partner and request.id in others:
            partner[request.id] = (others.pop(request.id), "id")
    pairs = [
        RequestPair(
            a=request,
            b=partner[request.id][0],
            by=partner[request.id][1],
            rows=_common(request.token_ids, partner[request.id][0].token_ids),
        )
        for request in a.requests
        if request.id in partner
    ]
    loose = [
        UnpairedItem(kind="request", side="a", name=request.id, detail=f"{len(request.token_ids)} tokens")
        for request in a.requests
        if request.id not in partner
    ]
    loose += [
        UnpairedItem(kind="request", side="b", name=request.id, detail=f"{len(request.token_ids)} tokens")
        for request in others.values()
    ]
    return pairs, sum(pair.by == "token ids" for pair in pairs), loose


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


def _token_difference(pair: RequestPair) -> list[UnpairedItem]:
    """Where the two sides' token ids part: the first position, or the tail that one side lacks."""
    left, right, at = pair.a.token_ids, pair.b.token_ids, pair.rows
    if left == right:
        return []
    if at < min(len(left), len(right)):
        return [
            UnpairedItem(
                kind="tokens",
                side="both",
                name=pair.a.id,
                detail=f"token {at} is {left[at]} in a, {right[at]} in b; {at} tokens before it agree",
            )
        ]
    longer: UnpairedSide = "a" if len(left) > len(right) else "b"
    return [
        UnpairedItem(
            kind="tokens",
            side=longer,
            name=pair.a.id,
            detail=f"{len(left)} tokens in a, {len(right)} in b; the first {at} agree",
        )
    ]


def _pair_taps(a: Trace, b: Trace, names: Sequence[str]) -> tuple[list[TapPair], list[UnpairedItem]]:
    """Taps held by both with one width; the others, and those of two dtypes, are listed."""
    pairs, loose = [], []
    types = a.manifest.target.layer_types
    for name in names:
        if name not in a.taps or name not in b.taps:
            # One side only: never dropped, a comparison counts it.
            side: UnpairedSide = "a" if name in a.taps else "b"
            held = (a if side == "a" else b).tap(name)
            loose.append(
                UnpairedItem(kind="tap", side=side, name=name, detail=f"{held.dtype}, width {held.width}")
            )
            continue
        left, right = a.tap(name), b.tap(name)
        # Another width is another tensor; another dtype is compared, and listed.
        if left.width != right.width:
            loose.append(
                UnpairedItem(
                    kind="width",
                    side="both",
                    name=name,
                    detail=f"width {left.width} in a, {right.width} in b; not compared",
                )
            )
            continue
        if left.dtype != right.dtype:
            loose.append(
                UnpairedItem(
                    kind="dtype", side="both", name=name, detail=f"{left.dtype} in a, {right.dtype} in b"
                )
            )
        kind = types[left.layer] if left.layer is not None and left.layer < len(types) else ""
        pairs.append(
            TapPair(
                name=name,
                layer=left.layer,
                layer_type=kind,
                dtype_a=left.dtype,
                dtype_b=right.dtype,
                width=left.width,
            )
        )
    return pairs, loose


def identity_differences(a: Manifest, b: Manifest) -> tuple[str, ...]:
    """What differs between the targets, in words: configuration, and parameters by canonical key.

    Nothing, where a side does not state them (another tool's dump).
    """
    if NOT_STATED in (a.target.config_sha256, b.target.config_sha256):
        return ()
    left, right = a.target.weights, b.target.weights
    found = ["the configurations differ"] if a.target.config_sha256 != b.target.config_sha256 else []
    for what, keys in (
        ("other values in", [key for key in left if key in right and left[key] != right[key]]),
        ("only side a has", [key for key in left if key not in right]),
        ("only side b has", [key for key in right if key not in left]),
    ):
        if keys:
            found.append(f"{what} {_few(keys, 4)}")
    return tuple(found)


def _few(names: Sequence[str], limit: int = 6) -> str:
    """The first names, and how many more there are; `none` where there is none."""
    return shorten_list(names, limit) or "none"
