"""Every wiring probe's answers about one adapter, and the care that is taken of the trainer meanwhile.

    answers = query_adapter(adapter)                        # every wiring probe in turn
    answers = query_probes(ExaminedAdapter(adapter), only=["noise"])

What an adapter gets wrong as an adapter (a part that it lacks, a detached graph, a changed random state, an
exception) is a finding that names the part; the other probes go on. After each probe, parameters, their `.grad`, the
optimizer, hooks and random state are compared with what they were: what it changed is put back, and reported.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from parity.probes.adapters.base import Adapter, NotExposed
from parity.probes.answers import make_broken_answer, one
from parity.probes.base import ProbeAnswer
from parity.probes.snapshot import Snapshot
from parity.probes.subject import AdapterError, ExaminedAdapter, WiringProbe
from parity.probes.suppress import suppress_dependent
from parity.probes.table import TABLE, ProbeEntry
from parity.reports.record import Finding

NamedAnswers = list[tuple[str, ProbeAnswer]]
"""Probe -> answer, in the order of the table; `adapter` and `untouched` are not probes' own."""


def query_probes(
    subject: ExaminedAdapter,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda name: None,
    *,
    copies: bool = True,
) -> NamedAnswers:
    """Return every wiring probe's answer by its name.

    Args:
        subject: the adapter under examination.
        only: the probes to run; all by default.
        say: called with the name of each probe before it runs.
        copies: whether copies of the trainer's state are kept while a probe runs, so that what it changes is put back
            at once. Without them one comparison after the last probe reports what was changed, as an answer
            `untouched`; it stays changed.
    """
    made, changed = list[tuple[str, ProbeAnswer | AdapterError]](), dict[str, tuple[Finding, ...]]()
    whole: Snapshot | None = None
    with suppress(AdapterError):  # then the probes report it
        whole = None if copies else subject.take_snapshot(copies=False)
    for entry in TABLE:
        if entry.asks == "trainer" and (only is None or entry.name in only):
            say(entry.name)
            answer, changed[entry.name] = _query(entry, subject, copies)
            made.append((entry.name, answer))
    # One finding for a mistake that stopped several probes, and none for what follows from another fault.
    answers = [
        (name, replace(answer, findings=(*answer.findings, *changed.get(name, ()))))
        for name, answer in suppress_dependent(subject, _merge_mistakes(made))
    ]
    if whole is not None and (left := whole.list_changes()):
        finding = _changed_finding("asking.untouched", left, "not put back: no copy was kept")
        answers.append(("untouched", ProbeAnswer(findings=(finding,))))
    return answers


def query_adapter(
    adapter: Adapter,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda name: None,
    *,
    copies: bool = True,
) -> NamedAnswers:
    """Return `query_probes` of an adapter; where it cannot be examined at all, one answer `adapter` with the reason."""
    try:
        return query_probes(ExaminedAdapter(adapter), only, say, copies=copies)
    except AdapterError as broken:
        return [("adapter", _mistake_answer(broken))]


def _query(
    entry: ProbeEntry, subject: ExaminedAdapter, copies: bool
) -> tuple[ProbeAnswer | AdapterError, tuple[Finding, ...]]:
    """One probe's answer, or the adapter's mistake that it met; and a finding for what it left changed."""
    snapshot: Snapshot | None = None
    made: ProbeAnswer | AdapterError
    try:
        snapshot = subject.take_snapshot() if copies else None
        made = cast(WiringProbe, entry.load()).run(subject)
    except NotExposed as missing:
        part = str(missing.args[0]) if missing.args else "a part"
        step = f"write `{part.split()[0]}` (parity.probes.adapters.base) to have this asked"
        made = one(entry.name, "skipped", f"the adapter does not show {part}", next_step=step)
    except AdapterError as broken:
        made = broken
    except Exception as error:
        made = make_broken_answer(entry.name, error)
    if snapshot is None or not (changed := snapshot.list_changes()):
        return made, ()
    snapshot.restore()
    return made, (_changed_finding(f"{entry.name}.untouched", changed, "put back"),)


def _changed_finding(name: str, changed: Sequence[str], then: str) -> Finding:
    """The finding that a query left the trainer changed. then: what was done about it."""
    do = "let the adapter's methods leave the trainer as they found it"
    if any(each.startswith("random state") for each in changed):
        do += "; wrap what draws at random in `with torch.random.fork_rng():`, seeded in it"
    sentence = f"asking changed {', '.join(changed[:4])}{' and more' if len(changed) > 4 else ''}; {then}"
    return Finding(name=name, outcome="error", sentence=sentence, next_step=do)


def _mistake_answer(broken: AdapterError, name: str = "adapter", probes: Sequence[str] = ()) -> ProbeAnswer:
    """A mistake of the adapter as a finding, with the probes that could not run because of it."""
    because = f"; not asked because of it: {', '.join(probes)}" if probes else ""
    evidence = (("part", broken.part), ("expected", broken.expected), ("found", broken.found))
    return one(name, "error", broken.sentence + because, evidence=evidence, next_step=broken.do)


def _merge_mistakes(made: Sequence[tuple[str, ProbeAnswer | AdapterError]]) -> NamedAnswers:
    """Answers in which a mistake of the adapter that stops several probes is one finding, before the first of them.

    A mistake that stops one probe is that probe's finding. The probes that another finding speaks for have an answer
    without one, with the reason (`ProbeAnswer.unasked`).
    """
    # Mistake -> the probes that it stopped.
    stopped: dict[tuple[str, str, str], list[str]] = {}
    for name, answer in made:
        if isinstance(answer, AdapterError):
            stopped.setdefault(answer.mistake, []).append(name)
    # Mistake -> the finding that reports it; a second mistake of one part gets a number.
    reported: dict[tuple[str, str, str], str] = {}
    answers: NamedAnswers = []
    for name, answer in made:
        if not isinstance(answer, AdapterError):
            answers.append((name, answer))
            continue
        probes = stopped[answer.mistake]
        if len(probes) == 1:
            answers.append((name, _mistake_answer(answer, name)))
            continue
        if answer.mistake not in reported:
            finding = f"adapter.{answer.part}"
            same = sum(other == finding or other.startswith(f"{finding}-") for other in reported.values())
            reported[answer.mistake] = f"{finding}-{same + 1}" if same else finding
            answers.append(("adapter", _mistake_answer(answer, reported[answer.mistake], probes)))
        reason = f"see the finding {reported[answer.mistake]}"
        answers.append((name, ProbeAnswer(findings=(), unasked=reason)))
    return answers
