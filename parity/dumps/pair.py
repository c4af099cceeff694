"""Dumps of other tools as traces: opened by content, paired with a reference, named by what is found in them.

    pair = open_pair(Path("hidden_states"), Path("reference-trace"))
    pair.a.format, pair.a.trace.taps                      # `speculators`, (`layer.1.out`, ..., `final.prenorm`)
    compare_traces(pair.a.trace, pair.b.trace, taps=pair.taps)

A `DumpTrace` is a `Trace` whose tensors lie in another tool's files, so everything that reads traces reads dumps. What
a dump does not say (target, weights, backend) its manifest does not claim: see `parity.tracing.trace.NOT_STATED`.
"""

from collections.abc import Mapping as Names
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from parity.dumps.files import FILE_LIMITS, FileLimits
from parity.dumps.identify import LAST, Identification, SliceMatch, identify, layer_of_tap
from parity.dumps.mapping import Format, Mapping, RowAlignment, SideMap
from parity.dumps.trace import DumpTrace as DumpTrace
from parity.dumps.trace import dump_of, state_width, unsplit
from parity.errors import NothingComparable, ParityError
from parity.reading import read_json
from parity.reports.words import format_number
from parity.tracing.sketched import open_trace
from parity.tracing.trace import MANIFEST, PARTIAL, SKETCH_SCHEMA, TRACE_SCHEMA, RequestEntry, Trace

Letter = Literal["a", "b"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpSide:
    """One side of a comparison, and how it was read."""

    letter: Letter
    trace: Trace
    format: Format | Literal["trace"]
    notes: tuple[str, ...] = ()
    found: Identification | None = None
    """What its slices were found to be, where it was held against the other side."""
    held: tuple[str, ...] = ()
    """Taps of the side that it was held against."""
    against_dump: bool = False
    """Whether that side is a dump, too: then order is all that was declared."""
    promises: Names[str, str] = field(default_factory=dict)
    """Slice to who declared it: the mapping, the format's contract, a flag."""

    @property
    def foreign(self) -> bool:
        """Whether another tool wrote it."""
        return self.format != "trace"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparablePair:
    """Two sides that can be compared."""

    a: DumpSide
    b: DumpSide
    taps: tuple[str, ...] | None
    """What to compare: a dump of a few layers against a whole trace asks for those layers only."""
    by_order: bool = False
    """Whether rows were paired by their order, because a side has no token ids."""

    @property
    def sides(self) -> tuple[DumpSide, DumpSide]:
        """Both."""
        return self.a, self.b


def is_trace(path: Path) -> bool:
    """Whether a path is (or was to be) a trace of ours: by its manifest, not by its name."""
    if not path.exists() or path.with_name(path.name + PARTIAL).is_dir():
        return True  # the trace reader says best what is missing
    if path.is_dir() and not any(path.iterdir()):
        return True
    manifest = path / MANIFEST
    if not path.is_dir() or not manifest.is_file():
        return False
    try:
        data = read_json(manifest, "the manifest", "")
    except ParityError:
        return any(path.glob("request-*.safetensors"))
    ours = (TRACE_SCHEMA.partition("/")[0], SKETCH_SCHEMA.partition("/")[0])
    return isinstance(data, dict) and str(data.get("schema")).startswith(ours)


def open_pair(
    a: Path | Trace,
    b: Path | Trace,
    mapping: Mapping | None = None,
    *,
    align: RowAlignment | None = None,
    limits: FileLimits = FILE_LIMITS,
) -> ComparablePair:
    """Open two paths, each a trace or a dump of any known format, and give their taps common names. What was opened
    before is taken as it is.

    A dump's slices are looked for in the other side (`identify`); a name that was declared is kept only where it holds.

    Args:
        a: The candidate: a folder, or a trace that is open already.
        b: The reference.
        mapping: What the mapping file declares of both sides.
        align: How rows without token ids are paired; None: as the mapping says.
        limits: How much a file of a dump may ask of this machine.

    Raises:
        ParityError: Something that cannot be read, or a slice that nothing declares and nothing matches.
        NothingComparable: Token ids are missing on one side and `align` is not `order`.
    """
    mapping = mapping or Mapping()
    parts = {"a": mapping.a, "b": mapping.b}
    opened: dict[str, Trace] = {}
    for letter, given in (("a", a), ("b", b)):
        if isinstance(given, Trace) or is_trace(given):
            opened[letter] = _trace(given, letter, parts[letter])
    for letter, given in (("b", b), ("a", a)):
        if letter not in opened and isinstance(given, Path):
            other = opened.get("b" if letter == "a" else "a")
            opened[letter] = dump_of(given, parts[letter], state_width(other), limits)
    read = opened["b"]
    if (
        isinstance(b, Path) and isinstance(read, DumpTrace) and unsplit(read)
    ):  # side a may know the width of a layer
        opened["b"] = dump_of(b, parts["b"], state_width(opened["a"]), limits)
    first, second, by_order = _with_tokens(opened["a"], opened["b"], align or mapping.align)
    return _name_slices(first, second, mapping, by_order)


def _trace(given: Path | Trace, letter: str, part: SideMap) -> Trace:
    if part != SideMap():
        path = given.path if isinstance(given, Trace) else given
        raise ParityError(
            f"a mapping for side {letter}",
            f"{path}, a trace, which says itself what it holds",
            f"remove `{letter}:` from the mapping",
        )
    return given if isinstance(given, Trace) else open_trace(given)


def _with_tokens(a: Trace, b: Trace, align: RowAlignment) -> tuple[Trace, Trace, bool]:
    """Both sides with token ids: a side without them gets the other's, in order, where that was asked for.

    Raises NothingComparable where it was not, and where the requests' numbers or lengths differ.
    """
    lacking = [side for side in (a, b) if isinstance(side, DumpTrace) and not side.contents.has_token_ids]
    if not lacking:
        return a, b, False
    if align != "order":
        raise NothingComparable(
            f"token ids in {lacking[0].path}",
            "states without token ids, so nobody can say which rows belong together",
            "name them in --map (token_ids:), or say --align order if both sides hold the same tokens in one order",
        )
    left, right = ([entry.rows for entry in side.requests] for side in (a, b))
    if left != right:
        at = next(
            (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
            min(len(left), len(right)),
        )
        found = (
            f"{len(left)} and {len(right)} requests"
            if len(left) != len(right)
            else (f"{left[at]} and {right[at]} rows in request {at}")
        )
        raise NothingComparable(
            f"rows of {a.path} and {b.path} paired by order", found, "dump both sides from the same prompts"
        )
    if a in lacking and b in lacking:  # neither side says: positions stand in for tokens
        b = _with_ids(
            b, [entry.model_copy(update={"token_ids": tuple(range(entry.rows))}) for entry in b.requests]
        )
    if a in lacking:
        return _with_ids(a, b.requests), b, True
    return a, _with_ids(b, a.requests), True


def _with_ids(side: Trace, given: Sequence[RequestEntry]) -> DumpTrace:
    """A dump whose requests are called and tokenised like these, one by one."""
    assert isinstance(side, DumpTrace), "only dumps lack token ids"
    taken = ("id", "token_ids", "token_texts")
    return side.with_requests(
        [
            mine.model_copy(update={name: getattr(theirs, name) for name in taken})
            for mine, theirs in zip(side.requests, given, strict=True)
        ]
    )


def _name_slices(a: Trace, b: Trace, mapping: Mapping, by_order: bool) -> ComparablePair:
    """Find each dump's slices in the other side, and give both sides the found names."""
    declared = {"a": _declare_taps(a, mapping.a), "b": _declare_taps(b, mapping.b)}
    found: dict[Letter, Identification] = {}
    if isinstance(b, DumpTrace):
        if isinstance(a, DumpTrace):
            b = b.rename_taps(declared["b"][0])  # nothing to hold it against: what is declared has to serve
        else:
            b, found["b"] = _apply_names("b", b, a, *declared["b"])
    if isinstance(a, DumpTrace):
        names, _ = declared["a"]
        if isinstance(b, DumpTrace):
            names = _expect_names(a, b, names)
        a, found["a"] = _apply_names("a", a, b, names, declared["a"][1])
    one = _side("a", a, b, found.get("a"), declared["a"][1])
    two = _side("b", b, a, found.get("b"), declared["b"][1])
    foreign = [side for side in (one, two) if side.foreign]
    taps = foreign[0].trace.taps if len(foreign) == 1 else None
    return ComparablePair(a=one, b=two, taps=taps, by_order=by_order)


def _side(
    letter: Letter, trace: Trace, other: Trace, found: Identification | None, promises: Names[str, str]
) -> DumpSide:
    """One side with how it was read."""
    dump = trace.contents if isinstance(trace, DumpTrace) else None
    return DumpSide(
        letter=letter,
        trace=trace,
        format=dump.format if dump is not None else "trace",
        notes=dump.notes if dump is not None else (),
        found=found,
        held=other.taps,
        against_dump=isinstance(other, DumpTrace),
        promises=promises,
    )


Declared = tuple[dict[str, str], dict[str, str]]


def _declare_taps(side: Trace, part: SideMap) -> Declared:
    """What each tap of a dump is said to be, and by whom: the mapping, the format, the name itself."""
    if not isinstance(side, DumpTrace):
        return {}, {}
    names: dict[str, str] = {}
    promises: dict[str, str] = {}
    for tap in side.taps:
        if layer_of_tap(tap) is not None or tap in LAST:
            names[tap], promises[tap] = tap, "the mapping" if part.taps else "its name"
    pieces = {piece.name: piece for piece in side.contents.pieces}
    for tap, sources in side.sources.items():
        norm = pieces[sources[0]].norm
        if norm is not None and tap not in names:
            names[tap], promises[tap] = f"final.{norm}norm", pieces[sources[0]].promise
    if part.layers is not None:
        rest = [tap for tap in side.taps if tap not in names]
        given = part.declared_layers()
        if len(given) == len(side.taps) and len(rest) < len(given):
            rest = list(side.taps)  # the last state was counted, too
        if len(given) != len(rest):
            raise ParityError(
                f"{len(given)} layers for the slices of {side.path}",
                f"{len(rest)} slices: {', '.join(rest) or 'none'}",
                "give one id for each slice, in their order, the last state left out or counted",
            )
        for tap, layer in zip(rest, given, strict=True):
            if names.get(tap) not in LAST:
                names[tap], promises[tap] = layer, "the mapping"
    return names, promises


def _expect_names(a: DumpTrace, b: DumpTrace, names: dict[str, str]) -> dict[str, str]:
    """What two dumps without a reference owe each other: the same name, or else the same place in the order."""
    expected = {tap: name for tap, name in names.items() if name in b.taps}
    expected |= {tap: tap for tap in a.taps if tap in b.taps and tap not in names}
    left = [tap for tap in a.taps if tap not in expected and tap not in names]
    right = [tap for tap in b.taps if tap not in expected.values() and tap not in LAST]
    if len(left) == len(right):
        expected |= dict(zip(left, right, strict=True))
    return names | expected


def _apply_names(
    letter: Letter, dump: DumpTrace, reference: Trace, names: Names[str, str], promises: Names[str, str]
) -> tuple[DumpTrace, Identification]:
    """The dump under the names that were found, and how."""
    last = [tap for tap, name in names.items() if name in LAST]
    found = identify(dump, reference, side=letter, declared=names, last=last)
    for match in found.matches:
        if match.found is None and match.declared is None and not isinstance(reference, DumpTrace):
            raise _not_found(dump, match, reference)
    told = {"the mapping", "its name"} & set(promises.values())  # what only a format promises is no name
    if (
        not told
        and not isinstance(reference, DumpTrace)
        and all(match.found is None for match in found.matches)
    ):
        raise _not_found(dump, found.matches[0], reference)
    chosen: dict[str, str] = {}
    for match in sorted(
        found.matches, key=lambda match: not match.as_declared
    ):  # who keeps a name twice claimed
        name = match.found or match.declared
        if name is not None and name not in chosen.values():
            chosen[match.slice] = name
    if isinstance(reference, DumpTrace):
        return dump.rename_taps(chosen), found
    texts = {entry.token_ids: entry.token_texts for entry in reference.requests}
    shown = [
        entry.model_copy(update={"token_texts": texts.get(entry.token_ids, ())}) for entry in dump.requests
    ]
    return dump.rename_taps(chosen, reference.manifest).with_requests(shown), found


def _not_found(dump: DumpTrace, match: SliceMatch, reference: Trace) -> ParityError:
    """Why nobody can say which layer a slice is."""
    numbers = match.nearest_in_words
    if match.how == "ambiguous":
        numbers += (
            f", then {match.other} at {format_number(match.other_distance)}: too close to tell them apart"
        )
    return ParityError(
        f"the layer of {match.slice} in {dump.path}, found in {reference.path}",
        f"{numbers}{'; ' + match.hint if match.hint else ''}",
        "dump the tokens, layers and weights that the reference holds, or declare layers in --map to compare "
        "all the same",
    )
