"""The answers as data: findings, tables and suspicions in frozen records. Standard library only.

A record never computes and never paints: probes and runners fill records with floats, painters
(`to_text`, `to_json`, `to_html`, `to_markdown`) turn them into something to look at. The JSON form is
described by `reports.schema`, which also keeps the schema's version.

A table is declared in one line: its columns as a header, its rows from records by name.

    columns = declare_columns("tap | token:int token (position) | error:float relative L2")
    Table(name="worst", title="Worst tokens", columns=columns, rows=collect_rows(columns, comparison.worst))

    python -m parity show REPORT.json
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

Outcome = Literal["pass", "fail", "warn", "skipped", "error"]
"""pass: compared, and within the limit. fail: compared, and outside. warn: worth a look, does not fail.
skipped: not compared, because something is missing. error: the probe broke, or has no power here."""

ColumnKind = Literal["text", "int", "float", "outcome", "flag"]
"""How a column's cells are to be read."""

Verdict = Literal["ruled out", "found", "not tested"]
"""The three answers to a suspicion."""

Value = str | int | float | bool | None
"""What a cell or a piece of evidence may hold. Non-finite floats are allowed; JSON tags them."""

WORST_FIRST: tuple[Outcome, ...] = ("error", "fail", "warn", "skipped", "pass")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a table: what it is called, and how its numbers are to be read."""

    key: str
    """Stable name, used by charts, policies and readers of the JSON."""
    title: str
    """What a person reads above the column."""
    unit: str = ""
    """Unit or definition in a few words, for example `relative L2` or `s`."""
    kind: ColumnKind = "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """How a table's rows may be drawn. `x`, `y`, `series` and `value` are column keys of that table.

    `profile`: lines of `y` over `x`, one line a `series`. `heatmap`: `value` over `x` and `y`.
    `timeline`: like profile, with `x` a step. `bars`: `y` for each `x`, grouped by `series`.
    """

    kind: Literal["profile", "heatmap", "timeline", "bars"]
    x: str
    y: str
    series: str | None = None
    value: str | None = None
    log: bool = False
    """Whether the value axis is logarithmic. Zeros are shown as such, never dropped silently."""
    caption: str = ""
    hover: tuple[str, ...] = ()
    """Further column keys to show on hover, for example the token's text."""
    limits: tuple[tuple[float, str], ...] = ()
    """Values at which to rule a line across the value axis, with a label: what the rows were judged by."""
    marks: tuple[tuple[Value, str], ...] = ()
    """Places on the x axis worth pointing at, with a label: the step at which the wiring changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of numbers, with what each column means."""

    name: str
    """Stable, unique within a report, for example `layers.fp32`."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""
    chart: Chart | None = None
    detail: bool = False
    """True where the text painter leaves the rows out and only says that the table exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One question, its outcome, and the evidence in numbers."""

    name: str
    """Which check speaks: `dispatch`, `backends.fp32`, `loading`, ... Unique within a report."""
    outcome: Outcome
    sentence: str
    """One sentence a reader understands without the evidence."""
    evidence: tuple[tuple[str, Value], ...] = ()
    """Pairs of name and measured value, in reading order."""
    fault: str | None = None
    """The fault's kind when one is recognised (a name of the deviations table)."""
    next_step: str = ""
    """What to do now. Required of every outcome but pass."""
    tables: tuple[str, ...] = ()
    """Names of the report's tables that hold the detail."""

    def __post_init__(self) -> None:
        if self.outcome != "pass" and not self.next_step:
            raise ValueError(f"finding {self.name!r} ({self.outcome}) does not say what to do next")


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """What one probe measured of the wiring, right or wrong: a part of the conformance statement."""

    probe: str
    sentence: str
    """With the numbers, for people: `hard CE on the teacher's argmax, weights exp with gamma 4.00 over slots 1-7`."""
    facts: tuple[tuple[str, Value], ...] = ()
    """The same for machines, by stable names, to be compared with another statement's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conformance:
    """What a trainer's wiring was measured to be: to be kept beside a checkpoint, and compared later."""

    trainer: str
    """Name and version of the trainer that was asked."""
    recipe: str
    """Hash of the declared wiring."""
    statements: tuple[Statement, ...]
    """One a probe that could answer, in the order of the probes."""
    unanswered: tuple[tuple[str, str], ...] = ()
    """Probe and reason, for those that could not."""

    @property
    def sentences(self) -> tuple[tuple[str, str], ...]:
        """Probe and sentence, those that could not answer with the reason."""
        answered = tuple((statement.probe, statement.sentence) for statement in self.statements)
        return answered + tuple((probe, f"not answered ({reason})") for probe, reason in self.unanswered)

    @property
    def paragraph(self) -> str:
        """All sentences as one paragraph."""
        said = (f"{probe}: {sentence}." for probe, sentence in self.sentences)
        return " ".join([f"{self.trainer}, recipe {self.recipe}.", *said])


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """Something a user may suspect, and the answer."""

    name: str
    """The suspicion in a user's words: `the kernels differ`, `the loader loads something else`."""
    verdict: Verdict
    because: str
    """The evidence in one sentence, or what is missing."""
    findings: tuple[str, ...] = ()
    """The findings that the verdict rests on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything one command found. The order of fields is the order of the file."""

    kind: Literal["check", "compare", "capture", "train", "eval", "env", "gate"]
    title: str
    created: str
    """ISO 8601, UTC."""
    command: str
    """The command line that made it, so that it can be run again."""
    subject: tuple[tuple[str, Value], ...]
    """What was examined: model, revision, prompts, dtypes, ..."""
    findings: tuple[Finding, ...]
    suspicions: tuple[Suspicion, ...] = ()
    tables: tuple[Table, ...] = ()
    environment: tuple[tuple[str, Value], ...] = ()
    """Versions, devices and variables that can change numbers."""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    conformance: Conformance | None = None
    """What the wiring was measured to be, where a trainer was asked."""

    @property
    def outcome(self) -> Outcome:
        """The worst finding's outcome; `skipped` for a report without findings (nothing is no pass).

        `skipped` beside a pass or a warn does not pull the report down: what was skipped is listed.
        """
        outcomes = {finding.outcome for finding in self.findings}
        for outcome in ("error", "fail", "warn", "pass"):
            if outcome in outcomes:
                return outcome
        return "skipped"

    def table(self, name: str) -> Table:
        """The table of that name. Raises `KeyError` where there is none."""
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What the probes saw of one training step: one line of a JSON-lines file (`reports.step_log`)."""

    step: int
    """Which optimizer step, counted from 1. Steps rise within a run; a resumed run may write one again."""
    time: str
    """ISO 8601, UTC."""
    values: tuple[tuple[str, Value], ...] = ()
    """Scalars by dotted name, the quantity last: `loss`, `fc_input.mean`, `layer.16.snr`, `slot.3.weight`.
    A number inside a name (a layer, a slot) is a part of its own, so that readers can group by it."""
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()
    """What is no scalar: the influence matrix, tensors by name. A table keeps its name from step to step."""
    seconds: float = 0.0
    """What the probes added to this step, in seconds of the step's own process."""


_KINDS: dict[str, ColumnKind] = {kind: kind for kind in get_args(ColumnKind)}
_COLUMN = re.compile(r"(\w+)(?::(\w+))?(?:\s+(.+?))??(?:\s+\(([^()]*)\))?")
"""`key:kind title (unit)`; all but the key may be absent."""

Record = TypeVar("Record")


def declare_columns(header: str) -> tuple[Column, ...]:
    """The columns that a header declares, in its order.

    Args:
        header: Columns between `|`, each as `key:kind title (unit)`. Without a kind a column is `text`, without a
            title it is called as its key, without a unit it has none: `slot:int | weight:float mean weight`.

    Raises:
        ValueError: A column that is not of that form, with a kind that no column has, or with the key of another.
    """
    columns: list[Column] = []
    for text in header.split("|"):
        match = _COLUMN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text.strip()!r} declares no column: write `key:kind title (unit)`")
        key, kind, title, unit = match.groups()
        if kind is not None and kind not in _KINDS:
            raise ValueError(f"column {key!r} has the kind {kind!r}, which is none of {', '.join(_KINDS)}")
        if any(column.key == key for column in columns):
            raise ValueError(f"two columns have the key {key!r}")
        columns.append(Column(key=key, title=title or key, unit=unit or "", kind=_KINDS[kind or "text"]))
    return tuple(columns)


def collect_rows(
    columns: Iterable[Column], records: Iterable[Record], **computed: Callable[[Record], Value]
) -> tuple[tuple[Value, ...], ...]:
    """One row a record: a cell is what the record holds under the column's key.

    Args:
        columns: The table's columns, in order.
        records: Objects with attributes, or mappings, that are named as the columns' keys are.
        computed: By key, how a cell is made of a record that does not hold it under that name.

    Raises:
        AttributeError, KeyError: A record without something of that name.
        TypeError: Something computed for a key that no column has.
    """
    keys = [column.key for column in columns]
    if unknown := sorted(computed.keys() - set(keys)):
        raise TypeError(f"no column has the key {unknown[0]!r}")
    makers = [computed[key] if key in computed else _reader(key) for key in keys]
    return tuple(tuple(make(record) for make in makers) for record in records)


def _reader(key: str) -> Callable[[object], Value]:
    """What reads the cell of that key from a record."""

    def read(record: object) -> Value:
        value: Value = record[key] if isinstance(record, Mapping) else getattr(record, key)
        return value

    return read
