"""What reading other tools' dumps adds to a comparison's report: which format was read, which layers were found.

    report = with_sources(comparison_report(comparison, command), pair)

Findings `NAME.layers.SIDE` and `NAME.norm.SIDE` say what a dump's slices are; `NAME.tokens` says that rows were
paired by order. What a dump cannot answer (backend, weights) becomes `skipped`, with the reason.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from parity.dumps.identify import LAST, NEAR_TIE, Identification, SliceMatch, layer_of_tap
from parity.dumps.pair import ComparablePair, DumpSide
from parity.reports.record import Finding, Report, Suspicion, Table, Value, collect_rows, declare_columns
from parity.reports.words import count_words, format_number, shorten_list
from parity.tracing.trace import NOT_STATED

FOREIGN = "capture that side with `parity capture` where you need the proof"


def with_sources(report: Report, pair: ComparablePair, *, name: str = "compare") -> Report:
    """The report of a comparison of these two sides, with what reading them found. Traces add nothing."""
    foreign = [side for side in pair.sides if side.foreign]
    if not foreign:
        return report
    findings = [_restate_identity(finding, foreign, name) for finding in report.findings]
    added = [finding for side in foreign for finding in _findings(side, name)]
    if pair.by_order:
        added.insert(0, _order(foreign, name))
    suspicions = tuple(
        _qualify_tokens(suspicion, foreign) if pair.by_order else suspicion for suspicion in report.suspicions
    )
    tables = tuple(_table(side, name) for side in foreign if side.found is not None)
    return replace(
        report,
        title=" against ".join(_describe_side(side) for side in pair.sides),
        subject=_subject(report.subject, pair),
        findings=(*added, *findings),
        suspicions=(*suspicions, *(_suspicion(side, name) for side in foreign if side.found is not None)),
        tables=(*tables, *report.tables),
        notes=(*report.notes, *_notes(foreign)),
    )


def source_problems(pair: ComparablePair, *, name: str = "compare") -> tuple[str, ...]:
    """What the slices of a pair's dumps were taken for and are not, in words."""
    findings = [finding for side in pair.sides if side.foreign for finding in _findings(side, name)]
    return tuple(finding.sentence for finding in findings if finding.outcome == "fail")


def _describe_side(side: DumpSide) -> str:
    """A side in two words."""
    return f"{side.format} dump" if side.foreign else "trace"


def _subject(subject: Sequence[tuple[str, Value]], pair: ComparablePair) -> tuple[tuple[str, Value], ...]:
    """The subject with each side's format beside its path."""
    labels = {"a (candidate)": pair.a, "b (reference)": pair.b}
    known = [side for side in pair.sides if not side.foreign]
    target = f"{known[0].trace.manifest.target.name} (says side {known[0].letter})" if known else NOT_STATED
    restated: dict[str, Value] = {"target": target}
    return tuple(
        (key, f"{value} ({_describe_side(labels[key])})" if key in labels else restated.get(key, value))
        for key, value in subject
    )


def _notes(foreign: Sequence[DumpSide]) -> tuple[str, ...]:
    """What was left out, and by what depth layers without names were judged."""
    notes = [f"side {side.letter}: {note}" for side in foreign for note in side.notes]
    if any(layer_of_tap(tap) is None and tap not in LAST for side in foreign for tap in side.trace.taps):
        notes.append(
            "a slice without a layer is judged as one of the first layers, whose rounding is the smallest; "
            "declare layers in --map, or give --floor or --policy"
        )
    return tuple(notes)


def _restate_identity(finding: Finding, foreign: Sequence[DumpSide], name: str) -> Finding:
    """A finding that takes a manifest's word, where a dump gave none."""
    who = " and ".join(f"side {side.letter} ({_describe_side(side)})" for side in foreign)
    says = "say" if len(foreign) > 1 else "says"
    if finding.name == f"{name}.proof" and finding.outcome != "fail":
        sentence = f"{who} {says} nothing about the backend that ran"
    elif finding.name == f"{name}.identity":
        sentence = f"{who} {says} nothing about configuration and weights"
    else:
        return finding
    return Finding(name=finding.name, outcome="skipped", sentence=sentence, next_step=FOREIGN)


def _order(foreign: Sequence[DumpSide], name: str) -> Finding:
    """Rows were paired by order, as asked."""
    lacking = [
        side.letter for side in foreign if side.trace.manifest.backend.requested["delta"] == NOT_STATED
    ]
    return Finding(
        name=f"{name}.tokens",
        outcome="warn",
        sentence="no token ids on one side: requests and rows were paired by their order, as asked",
        evidence=(("sides read from dumps", ", ".join(lacking)),),
        next_step="name the token ids in --map (token_ids:) to have the pairing checked",
    )


def _qualify_tokens(suspicion: Suspicion, foreign: Sequence[DumpSide]) -> Suspicion:
    """Equal tokens were assumed, not seen."""
    if suspicion.name != "the two runs were fed other tokens":
        return suspicion
    return replace(
        suspicion, verdict="not tested", because="rows were paired by order: no token ids on one side"
    )


def _findings(side: DumpSide, name: str) -> list[Finding]:
    """What a side's slices are, and what its last state is."""
    if side.found is None:
        return [
            Finding(
                name=f"{name}.layers.{side.letter}",
                outcome="skipped",
                sentence=f"the layers of side {side.letter} ({_describe_side(side)}) are as declared: the other side "
                "is a dump, too, and names none",
                next_step="compare with a trace of `parity capture` to have layers and norm state found",
            )
        ]
    findings = [_layers(side, side.found, name)]
    last = [match for match in side.found.matches if match.declared in LAST or match.found in LAST]
    return findings + [_norm(side, match, name) for match in last[:1]]


def _evidence(found: Identification) -> tuple[tuple[str, Value], ...]:
    """Numbers behind a match of slices."""
    return (
        ("slices", len(found.matches)),
        ("found", sum(match.found is not None for match in found.matches)),
        ("tokens compared", found.rows),
        ("largest distance", max(match.distance for match in found.matches)),
        ("smallest distance to another tap", min(match.other_distance for match in found.matches)),
        ("a match is below", NEAR_TIE),
    )


def _layers(side: DumpSide, found: Identification, name: str) -> Finding:
    """Is each slice the layer it was said to be?"""
    where = f"side {side.letter} ({_describe_side(side)})"
    full, evidence = f"{name}.layers.{side.letter}", _evidence(found)
    make = partial(Finding, name=full, tables=(f"{name}.slices.{side.letter}",))
    matches = [match for match in found.matches if match.declared not in LAST]
    # Slices that are another layer than declared, or two of them one layer.
    wrong = [match for match in matches if match.found is not None and not match.as_declared]
    twice = _twice(matches)
    if wrong or twice:
        sentence, step = _wrong(found, wrong, twice, where)
        shift = (("shift of all ids", found.shift),)
        return make(
            outcome="fail", fault="LAYERIDX", sentence=sentence, next_step=step, evidence=evidence + shift
        )
    # Slices that the other side holds under their declared name, and that are not that tap.
    lost = [match for match in matches if match.found is None and match.declared in side.held]
    if lost:
        first = lost[0]
        return make(
            outcome="fail",
            sentence=f"{where}: {count_words(len(lost), 'slice')} found in no layer, first {first.slice}"
            f"{' declared ' + first.declared if first.declared else ''}: {first.nearest_in_words}"
            f"{'; ' + first.hint if first.hint else ''}",
            next_step="dump the same tokens and weights again, or capture a reference that holds that layer",
            evidence=evidence,
        )
    # What is left was found, or lies at a layer that the other side does not hold.
    located = [match for match in matches if match.found is not None]
    absent = shorten_list([match.slice for match in matches if match.found is None], 6)
    if not located:
        return Finding(
            name=full,
            outcome="skipped",
            sentence=f"{where}: the other side holds none of {absent}",
            next_step="compare with a reference that holds these layers",
        )
    said = "as declared" if any(match.declared for match in matches) else "which nobody declared"
    said = "in the same order" if side.against_dump else said
    taps = [match.found or "" for match in located]
    sentence = (
        f"{where}: {count_words(len(taps), 'slice')} found as {shorten_list(taps, 6)}, {said}; the worst is "
        f"{format_number(max(match.distance for match in located))} away, the next tap "
        f"{format_number(min(match.other_distance for match in located))}"
        + (f"; {absent} not held by the other side" if absent else "")
    )
    # Nobody declared an order: one that does not ascend may be meant so, or be a mistake.
    numbers = [layer_of_tap(tap) for tap in taps]
    ascending = numbers == sorted(numbers, key=lambda number: -2 if number is None else number)
    if not ascending and said == "which nobody declared":
        return make(
            outcome="warn",
            sentence=sentence + "; they do not ascend",
            next_step="declare layers in --map, in the order in which fc takes them",
            evidence=evidence,
        )
    return make(outcome="pass", sentence=sentence, evidence=evidence)


def _wrong(
    found: Identification, wrong: Sequence[SliceMatch], twice: Sequence[str], where: str
) -> tuple[str, str]:
    """Sentence and next step for layers that are not what they were said to be."""
    shift = found.shift
    # All ids are off by as much: a convention was mistaken for another.
    if wrong and shift:
        first = wrong[0]
        right = ", ".join(
            str(layer_of_tap(m.found)) for m in found.matches if layer_of_tap(m.found) is not None
        )
        convention = {
            -1: ", as where indices of hidden_states (layer + 1) are taken for layers",
            1: ", as where layers are taken for indices of hidden_states (layer + 1)",
        }.get(shift, "")
        way = f"{count_words(abs(shift), 'layer')} {'later' if shift > 0 else 'earlier'} than declared"
        far = (
            f", {first.declared} {format_number(first.declared_distance)}"
            if first.declared_distance is not None
            else ""
        )
        return (
            f"{where}: every slice is {way}{convention}; {first.slice} is {first.found} "
            f"({format_number(first.distance)} away{far})",
            f"the slices are layers {right} (0-based): correct `layers:` or `ids:` in --map, or dump with other ids",
        )
    if wrong:
        pairs = [f"{match.slice}, declared {match.declared}, is {match.found}" for match in wrong]
        order = sorted(m.declared or "" for m in wrong) == sorted(m.found or "" for m in wrong)
        return (
            f"{where}: {'the slices are in another order' if order else 'slices are other layers'}: "
            + shorten_list(pairs, 3, "; "),
            "put the ids in the order of the slices, or dump again",
        )
    return (
        f"{where}: {shorten_list(list(twice), 6)} found in more than one slice",
        "dump again; a layer was recorded twice, and another is missing",
    )


def _twice(matches: Sequence[SliceMatch]) -> list[str]:
    """Taps that more than one slice was found to be."""
    names = [match.found for match in matches if match.found is not None]
    return sorted({tap for tap in names if names.count(tap) > 1})


def _norm(side: DumpSide, match: SliceMatch, name: str) -> Finding:
    """Is the last state from before or after the final norm, as promised?"""
    where = f"side {side.letter} ({_describe_side(side)})"
    full, by = f"{name}.norm.{side.letter}", side.promises.get(match.slice, "its name")
    # Nothing to look it up in: the other side lacks the tap.
    if match.found is None and match.declared not in side.held:
        return Finding(
            name=full,
            outcome="skipped",
            sentence=f"{where}: the other side holds no {match.declared}, which {match.slice} is by {by}",
            next_step="compare with a trace of `parity capture`, which holds it",
        )
    evidence: tuple[tuple[str, Value], ...] = (
        ("declared", match.declared),
        ("declared by", by),
        ("found", match.found),
        ("distance", match.distance),
        ("distance to the other", match.other_distance),
        ("how", match.how),
    )
    make = partial(Finding, name=full, evidence=evidence, tables=(f"{name}.slices.{side.letter}",))
    claim = f"{where}: the last state, {match.slice}, declared {match.declared} by {by}, is"
    if match.found is None:
        return make(
            outcome="fail",
            sentence=f"{claim} neither: {match.nearest_in_words}{'; ' + match.hint if match.hint else ''}",
            next_step="capture a reference that holds final.prenorm and final.postnorm, or dump again",
        )
    # Two dumps with one last state: known is only that they agree, or contradict each other, about it.
    compare = "compare each with a trace of `parity capture` to see which"
    if side.against_dump and match.how == "equal":
        if match.as_declared:
            return make(
                outcome="skipped",
                sentence=f"{where}: both sides hold one last state ({format_number(match.distance)} apart) and call it "
                f"{match.declared}; no dump proves on which side of the final norm it is",
                next_step="compare with a trace of `parity capture` to have the norm state found",
            )
        if match.found in LAST:
            return make(
                outcome="fail",
                fault="NORM",
                sentence=f"one last state, two claims: {match.slice} of {where} is {match.declared} by {by}, and the "
                f"other side calls the same numbers {match.found} ({format_number(match.distance)} apart)",
                next_step=f"{compare} claim is wrong",
            )
        return make(
            outcome="fail",
            fault="LAYERIDX",
            sentence=f"{where}: the last state, {match.slice}, is {match.found} of the other side",
            next_step=f"{compare} layer it is",
        )
    # Against a reference the match decides.
    fitted = ", through a norm with one factor a channel fitted" if match.how == "norm" else ""
    far = f"({format_number(match.distance)} away{fitted})"
    if match.as_declared:
        sentence = f"{where}: the last state, {match.slice}, is {match.found}, as {by} says {far}"
        return make(outcome="pass", sentence=sentence)
    return make(
        outcome="fail",
        fault="NORM" if match.found in LAST else "LAYERIDX",
        sentence=f"{claim} {match.found} {far}",
        next_step=_norm_step(match),
    )


def _norm_step(match: SliceMatch) -> str:
    """What to do about a last state that is another one."""
    if match.found == "final.prenorm":
        return "its reader has to apply the target's final norm before the head: say so in the dump's flag or config"
    if match.found == "final.postnorm":
        return "its reader must not apply the final norm again: say so in the dump's flag or config"
    return "ask the dump's tool for the state after the last decoder layer"


def _suspicion(side: DumpSide, name: str) -> Suspicion:
    """The answer to the question that brings most people here."""
    findings = [finding for finding in _findings(side, name)]
    bad = [finding for finding in findings if finding.outcome == "fail"]
    return Suspicion(
        name=f"the dump's layers or its last state are not what they are taken for (side {side.letter})",
        verdict="found" if bad else "ruled out" if _all_declared(side) else "not tested",
        because=bad[0].sentence
        if bad
        else findings[0].sentence
        if _all_declared(side)
        else "two dumps can only be held against each other"
        if side.against_dump
        else "nobody declared which layers they should be; found: "
        + shorten_list([match.found or "?" for match in (side.found.matches if side.found else ())], 6),
        findings=tuple(finding.name for finding in findings),
    )


def _all_declared(side: DumpSide) -> bool:
    """Whether every slice was said to be something that the other side can prove or refute."""
    known = side.found is not None and not side.against_dump
    return known and all(match.declared is not None for match in (side.found.matches if side.found else ()))


def _table(side: DumpSide, name: str) -> Table:
    """One row a slice."""
    assert side.found is not None, "a table of what was found needs something found"
    columns = declare_columns(
        "slice | declared | found | distance:float | next | next_distance:float distance"
    )
    return Table(
        name=f"{name}.slices.{side.letter}",
        title=f"Slices of side {side.letter} ({_describe_side(side)})",
        columns=columns,
        rows=collect_rows(
            columns,
            side.found.matches,
            declared=lambda match: match.declared or "",
            found=_describe_match,
            next=lambda match: match.other,
            next_distance=lambda match: match.other_distance,
        ),
        caption=f"Distance: median relative L2 of {count_words(side.found.rows, 'token')}, massive channels left out. "
        f"Found is what is nearer than {NEAR_TIE:g}, with every other tap clearly further.",
    )


def _describe_match(match: SliceMatch) -> str:
    """What was found, or why nothing was."""
    if match.found is not None:
        return match.found + (", by a fitted norm" if match.how == "norm" else "")
    return f"{match.how}: {match.nearest or 'no such width'}"
