"""A training run's step reports as one report: timelines with the moment of drift marked, findings with their step.

Nothing is judged here: each step's findings were judged when it ran; they are brought together by name.

    python -m parity show parity-train/steps.jsonl --as html > run.html
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from parity.errors import ParityError
from parity.reports import schema, step_log
from parity.reports.record import (
    WORST_FIRST,
    Chart,
    Column,
    Finding,
    Outcome,
    Report,
    StepReport,
    Suspicion,
    Table,
    Value,
    declare_columns,
)

FAILING_OUTCOMES: tuple[Outcome, ...] = ("fail", "error")
LOG_FROM = 100.0
"""Largest over smallest value from which a timeline gets a logarithmic axis; all values must be positive."""
STEP_COLUMN = Column(key="step", title="step", kind="int")


def steps_report(
    steps: Sequence[StepReport],
    *,
    title: str,
    command: str,
    subject: Sequence[tuple[str, Value]] = (),
    environment: Sequence[tuple[str, Value]] = (),
    suspicions: Sequence[Suspicion] = (),
    notes: Sequence[str] = (),
) -> Report:
    """The run as a report of kind `train`.

    Args:
        steps: Its step reports, rising.
        title: The report's title.
        command: The command line that shows it again.
        subject: What was trained, as names and values; the span of the steps is added.
        environment: Versions and devices, as names and values.
        suspicions: Answers to the user's suspicions.
        notes: Sentences for the end of the report.

    Raises:
        ParityError: There is no step.
    """
    if not steps:
        raise ParityError(
            "a report of a training run", "no step report in it", "wait for the first probed step"
        )
    # Which steps were probed, and where something stopped being in order.
    first, last = steps[0], steps[-1]
    marks = drift(steps)
    span: tuple[tuple[str, Value], ...] = (
        ("first probed step", first.step),
        ("last probed step", last.step),
        ("probed steps", len(steps)),
        ("seconds in probes", round(math.fsum(step.seconds for step in steps), 3)),
    )
    return Report(
        kind="train",
        title=title,
        created=last.time,
        command=command,
        subject=(*subject, *span),
        findings=tuple(_findings(steps)),
        suspicions=tuple(suspicions),
        tables=(*_outcomes(steps), *_changes(steps), *_timelines(steps, marks), *_tables(steps, marks)),
        environment=tuple(environment),
        notes=tuple(notes),
    )


def read_steps_report(path: str | Path) -> Report:
    """The report at a path: report.json, a folder that holds one, or a run's steps.jsonl or the folder of it.

    Raises ParityError where there is none of these.
    """
    path = Path(path)
    steps = steps_file(path)
    if steps is not None:
        command = f"parity show {steps}"
        title = f"Training run {steps.resolve().parent.name}"
        return steps_report(step_log.read_step_log(steps), title=title, command=command)
    return schema.read_report(path / "report.json" if path.is_dir() else path)


def steps_file(path: Path) -> Path | None:
    """The file of step reports that a path means; None where it means a report."""
    if path.is_dir() and not (path / "report.json").exists() and (path / step_log.STEP_LOG_NAME).exists():
        return path / step_log.STEP_LOG_NAME
    return path if path.suffix == Path(step_log.STEP_LOG_NAME).suffix else None


def drift(steps: Iterable[StepReport]) -> tuple[tuple[int, str], ...]:
    """Where something that was in order stopped being so: step and names of the findings, in order of steps.

    A finding that never was in order counts at its first step.
    """
    before: dict[str, bool] = {}
    marks: list[tuple[int, str]] = []
    for step in steps:
        broken = []
        for finding in step.findings:
            bad = finding.outcome in FAILING_OUTCOMES
            if bad and not before.get(finding.name, False):
                broken.append(finding.fault or finding.name)
            if finding.outcome != "skipped":
                before[finding.name] = bad
        if broken:
            marks.append((step.step, ", ".join(dict.fromkeys(broken))))
    return tuple(marks)


def _findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """One finding a name: its worst outcome, at the first step that had it."""
    by_name: dict[str, list[tuple[int, Finding]]] = {}
    for step in steps:
        for finding in step.findings:
            by_name.setdefault(finding.name, []).append((step.step, finding))
    for seen in by_name.values():
        outcomes = [finding.outcome for _, finding in seen]
        judged = [outcome for outcome in outcomes if outcome != "skipped"]
        worst: Outcome = min(judged or outcomes, key=WORST_FIRST.index)
        at = outcomes.index(worst) if worst != "pass" else len(outcomes) - 1 - outcomes[::-1].index("pass")
        where, finding = seen[at]
        count = outcomes.count(worst)
        if worst == "pass":
            said = f"at {len(judged)} of {len(seen)} probed steps, last at step {where}: {finding.sentence}"
        else:
            said = f"first at step {where}, at {count} of {len(seen)} probed steps: {finding.sentence}"
        clean = [step for step, each in seen[:at] if each.outcome == "pass"]
        evidence: list[tuple[str, Value]] = [("first step" if worst != "pass" else "last step", where)]
        if clean and worst != "pass":
            evidence.append(("last step in order", clean[-1]))
        tables = tuple(_at(name, where) for name in finding.tables)
        yield replace(finding, sentence=said, evidence=(*evidence, *finding.evidence), tables=tables)


def _at(name: str, step: int) -> str:
    """The name of a step's table in the run's report."""
    return f"{name}@{step}"


def _tables(steps: Sequence[StepReport], marks: Sequence[tuple[int, str]]) -> Iterator[Table]:
    """The steps' own tables: of the first and the last step, and of those at which something broke."""
    wanted = {steps[0].step, steps[-1].step, *(step for step, _ in marks)}
    wanted |= {
        _first(steps, finding.name)
        for step in steps
        for finding in step.findings
        if finding.outcome != "pass"
    }
    for step in steps:
        if step.step in wanted:
            for table in step.tables:
                title = f"{table.title}, step {step.step}"
                yield replace(table, name=_at(table.name, step.step), title=title)


def _first(steps: Sequence[StepReport], name: str) -> int:
    """The first step at which the finding had its worst outcome."""
    seen = [(step.step, each.outcome) for step in steps for each in step.findings if each.name == name]
    worst = min((outcome for _, outcome in seen), key=WORST_FIRST.index)
    return next(step for step, outcome in seen if outcome == worst)


def column_group_of(name: str) -> tuple[str, str]:
    """Which timeline a value belongs to, and which line of it is: `layer.16.snr` is line `16` of `layer.*.snr`.

    Without a number in it, the last part names the timeline (a quantity) and the rest the line:
    `fc_input.mean` is line `fc_input` of `*.mean`. A name of one part has a timeline of its own.
    """
    parts = name.split(".")
    numbers = [part for part in parts if part.isdecimal()]
    if numbers:
        return ".".join("*" if part.isdecimal() else part for part in parts), ".".join(numbers)
    if len(parts) == 1:
        return name, name
    return f"*.{parts[-1]}", ".".join(parts[:-1])


def _timelines(steps: Sequence[StepReport], marks: Sequence[tuple[int, str]]) -> Iterator[Table]:
    """Every number over the steps, related ones in one table; those that never changed in one table of their own."""
    # Points by group of related numbers: step, line, value.
    rows: dict[str, list[tuple[Value, ...]]] = {}
    names: dict[tuple[str, str], str] = {}
    for step in steps:
        for name, value in step.values:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                group, line = column_group_of(name)
                rows.setdefault(group, []).append((step.step, line, float(value)))
                names[group, line] = name
    # A timeline for each group that moved, the rest as one table.
    moving = sorted((group for group in rows if _has_changed(rows[group])), key=_interest)
    for index, group in enumerate(moving):
        lines = [name for (of, _), name in names.items() if of == group]
        yield _timeline(group, rows[group], marks, title=lines[0] if len(lines) == 1 else "", first=not index)
    still = [
        (names[group, line], values[0], len(values))
        for group, points in rows.items()
        if group not in moving
        for line, values in _lines(points).items()
    ]
    if still:
        yield Table(
            name="unchanged",
            title="Numbers that were the same at every probed step"
            if len(steps) > 1
            else "Numbers of the probed step",
            columns=declare_columns("name what | value:float | steps:int probed steps"),
            rows=tuple(still),
            detail=True,
        )


def _lines(points: Sequence[tuple[Value, ...]]) -> dict[str, list[Value]]:
    """A group's lines with their values in the order of the steps."""
    lines: dict[str, list[Value]] = {}
    for _, line, value in points:
        lines.setdefault(str(line), []).append(value)
    return lines


def _has_changed(points: Sequence[tuple[Value, ...]]) -> bool:
    """Whether any line of a group had two different values."""
    return any(len({str(value) for value in values}) > 1 for values in _lines(points).values())


INTEREST = ("loss", "tau", "estimate", "expected", "accuracy", "slot", "snr", "influence", "recapture")
"""What a run is looked at for, first to last; then everything else, and tensors' moments at the end."""
MOMENT_COLUMNS = ("mean", "std", "finite")


def _interest(group: str) -> int:
    """Where a timeline stands on the page."""
    parts = group.split(".")
    if parts[-1] in MOMENT_COLUMNS:
        return len(INTEREST) + 1 + MOMENT_COLUMNS.index(parts[-1])
    return next((place for place, word in enumerate(INTEREST) if word in parts), len(INTEREST))


def _timeline(
    group: str, points: list[tuple[Value, ...]], marks: Sequence[tuple[int, str]], *, title: str, first: bool
) -> Table:
    """One group of numbers over the steps. title: the name of its only line. first: says what the marks are."""
    sizes = [value for _, _, value in points if isinstance(value, float) and math.isfinite(value)]
    positive = bool(sizes) and min(sizes) > 0  # a logarithmic axis has no place for anything else
    points = sorted(points, key=lambda row: [_number(row[1]), row[0]])
    quantity, by = _titles(group)
    about = "; ".join(f"step {step}: {names}" for step, names in marks)
    return Table(
        name=f"timeline.{group}",
        title=f"{title or group.removeprefix('*.')} over steps",
        columns=(
            STEP_COLUMN,
            Column(key="series", title=by),
            Column(key="value", title=quantity, kind="float"),
        ),
        rows=tuple(points),
        detail=True,
        chart=Chart(
            kind="timeline",
            x="step",
            y="value",
            series=None if title else "series",
            log=positive and max(sizes) / min(sizes) >= LOG_FROM,
            marks=tuple((step, _short(names)) for step, names in marks),
            caption=f"A line across marks where something that was in order no longer was ({about})."
            if marks and first
            else "",
        ),
    )


def _short(names: str) -> str:
    """The first of several names, with the number of the others: a chart has no room for more."""
    first, *others = names.split(", ")
    return f"{first} +{len(others)}" if others else first


def _titles(group: str) -> tuple[str, str]:
    """What is measured, and what tells its lines apart: `snr` by `layer` for `layer.*.snr`."""
    parts = group.split(".")
    named = [before for before, part in zip(parts, parts[1:], strict=False) if part == "*" and before != "*"]
    return next((part for part in reversed(parts) if part != "*"), group), ".".join(named) or "of"


def _number(line: Value) -> list[tuple[int, str]]:
    """A line's name as something to sort by: numbers by size, texts by letter."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in str(line).split(".")]


def _changes(steps: Sequence[StepReport]) -> Iterator[Table]:
    """Values that are texts or flags, at the steps at which they changed."""
    held: dict[str, Value] = {}
    rows: list[tuple[Value, ...]] = []
    for step in steps:
        for name, value in step.values:
            if isinstance(value, (str, bool)) and (name not in held or held[name] != value):
                rows.append((step.step, name, held.get(name), value))
                held[name] = value
    if rows:
        yield Table(
            name="changes",
            title="What was said of the step, and where that changed",
            columns=declare_columns("step:int | name what | before | after from this step on"),
            rows=tuple(rows),
        )


def _outcomes(steps: Sequence[StepReport]) -> Iterator[Table]:
    """Every finding at every step at which its outcome was another than before."""
    held: dict[str, Outcome] = {}
    rows: list[tuple[Value, ...]] = []
    for step in steps:
        for finding in step.findings:
            if held.get(finding.name) != finding.outcome:
                rows.append((step.step, finding.name, finding.outcome, finding.fault, finding.sentence))
                held[finding.name] = finding.outcome
    if rows:
        yield Table(
            name="outcomes",
            title="Findings, at the steps at which they changed",
            columns=declare_columns("step:int | finding | outcome:outcome | fault | sentence what was found"),
            rows=tuple(rows),
        )
