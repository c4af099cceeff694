"""Reports and step reports as pandas frames, and as parquet files.

Column types follow the record: integers stay integers where a cell is missing, texts and flags have types of
their own, nan and a missing number are told apart (nan is a value, `pd.NA` is none).

    from parity.reports import step_log, to_frame
    to_frame.steps(step_log.read("parity-train/steps.jsonl"))["loss"].plot()
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionArray

from parity.errors import ParityError
from parity.files import replace_atomically
from parity.reports.record import Column, Finding, Report, StepReport, Table, Value

FrameColumn: TypeAlias = "pd.Series[Any]"
"""A column of a frame, whatever it holds."""
ARROW_TYPES = {"int": "Int64", "float": "Float64", "flag": "boolean", "text": "string", "outcome": "string"}
"""pandas' nullable type for each kind of column."""


def table(record: Table) -> pd.DataFrame:
    """One table: a column for each column, named by its key. Titles, units and the caption are in `attrs`.

    A column whose cells do not fit its kind becomes text, so that nothing is lost. Raises ParityError where two
    columns share a key.
    """
    keys = [column.key for column in record.columns]
    if len(set(keys)) != len(keys):
        raise ParityError(f"table {record.name} as a frame", "two columns of one key", "use the JSON report")
    cells = list(zip(*record.rows, strict=True)) or [()] * len(keys)
    series = {
        column.key: _series(column, values) for column, values in zip(record.columns, cells, strict=True)
    }
    frame = pd.DataFrame(series)
    frame.attrs = {
        "name": record.name,
        "title": record.title,
        "caption": record.caption,
        "columns": {column.key: {"title": column.title, "unit": column.unit} for column in record.columns},
    }
    return frame


def tables(report: Report) -> dict[str, pd.DataFrame]:
    """All tables of a report by name."""
    return {each.name: table(each) for each in report.tables}


def findings(report: Report) -> pd.DataFrame:
    """One row a finding: name, outcome, fault, sentence, next step."""
    return _findings((finding, {}) for finding in report.findings)


def evidence(report: Report) -> pd.DataFrame:
    """One row a piece of evidence: finding, name, the number (or NA) and the text that was written."""
    rows = [(finding.name, name, value) for finding in report.findings for name, value in finding.evidence]
    names = ("finding", "name")
    return pd.DataFrame(
        {
            **{name: _array([row[i] for row in rows], dtype="string") for i, name in enumerate(names)},
            "number": _floats([_number(value) for _, _, value in rows]),
            "text": _array([None if value is None else str(value) for _, _, value in rows], dtype="string"),
        }
    )


def steps_frame(reports: Sequence[StepReport]) -> pd.DataFrame:
    """One row a probed step, indexed by step: time, outcome, seconds, then every value by its dotted name.

    A value that a step did not report is NA, and so is a time that is none. Texts and flags keep their type.
    """
    names = list(dict.fromkeys(name for each in reports for name, _ in each.values))
    held = [dict(each.values) for each in reports]
    columns: dict[str, FrameColumn] = {
        "time": pd.Series(
            pd.to_datetime([each.time for each in reports], format="ISO8601", utc=True, errors="coerce")
        ),
        "outcome": pd.Series(_array([_outcome(each) for each in reports], dtype="string")),
        "seconds": _series(Column(key="", title="", kind="float"), [each.seconds for each in reports]),
    }
    for name in names:
        columns[name] = _series(
            Column(key=name, title=name, kind=_kind(held, name)), [v.get(name) for v in held]
        )
    frame = pd.DataFrame(columns)
    frame.index = pd.Index([each.step for each in reports], name="step", dtype="int64")
    return frame


def step_tables(reports: Iterable[StepReport], name: str) -> pd.DataFrame:
    """One table of every step that has it, under each other, with the step in the first column.

    Raises ParityError where no step has a table of that name.
    """
    frames, known = [], set()
    for each in reports:
        for record in each.tables:
            known.add(record.name)
            if record.name == name:
                frame = table(record)
                frame.insert(0, "step", pd.Series(_array([each.step] * len(frame), dtype="Int64")))
                frames.append(frame)
    if not frames:
        found = f"tables {', '.join(sorted(known))}" if known else "steps without tables"
        raise ParityError(f"table {name!r} of the steps", found, "name one of those")
    together = pd.concat(frames, ignore_index=True)
    together.attrs = frames[0].attrs
    return together


def step_findings(reports: Iterable[StepReport]) -> pd.DataFrame:
    """One row a finding of every step, with the step in the first column."""
    return _findings((finding, {"step": each.step}) for each in reports for finding in each.findings)


def to_parquet(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a frame as a parquet file, whole or not at all; `pd.read_parquet` brings types and index back.

    The file tells nan and nothing apart; pandas' reader makes NA of both (pyarrow's does not).
    """
    path = Path(path)
    try:
        with replace_atomically(path) as temporary:
            frame.to_parquet(temporary)
    except OSError as error:
        raise ParityError(
            f"write {path}", error.strerror or str(error), "name a file that can be written"
        ) from None


def write_frames(source: Report | Sequence[StepReport], folder: str | Path) -> tuple[Path, ...]:
    """Write all frames of a report, or of a run's steps, as parquet files into a folder; returns what was written.

    `findings.parquet`, and of a report `evidence.parquet` and `table.NAME.parquet`; of steps `steps_frame.parquet` and
    `table.NAME.parquet`. Characters that a file's name should not hold become `_`.
    """
    if isinstance(source, Report):
        frames = {"findings": findings(source), "evidence": evidence(source)}
        frames |= {f"table.{name}": frame for name, frame in tables(source).items()}
    else:
        frames = {"steps": steps_frame(source), "findings": step_findings(source)}
        for name in dict.fromkeys(each.name for step in source for each in step.tables):
            frames[f"table.{name}"] = step_tables(source, name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, frame in frames.items():
        safe = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "_" for c in name)
        path = folder / f"{safe}.parquet"
        if path in written:
            raise ParityError(
                f"tables of {source.title if isinstance(source, Report) else 'the steps'} as files",
                f"two whose names become {path.name}",
                "use the JSON report",
            )
        to_parquet(frame, path)
        written.append(path)
    return tuple(written)


def _findings(rows: Iterable[tuple[Finding, dict[str, int]]]) -> pd.DataFrame:
    """Findings as rows, after the keys that were given."""
    rows = list(rows)
    keys: dict[str, None] = {}
    for _, extra in rows:
        keys |= dict.fromkeys(extra)
    frame = {key: _array([extra[key] for _, extra in rows], dtype="Int64") for key in keys}
    texts = ("name", "outcome", "fault", "sentence", "next_step")
    return pd.DataFrame(
        {**frame, **{t: _array([getattr(each, t) for each, _ in rows], dtype="string") for t in texts}}
    )


def _array(values: Sequence[object], dtype: str) -> ExtensionArray:
    """pandas' nullable array of that type; its own overloads know no dtype that is chosen at run time."""
    array: ExtensionArray = pd.array(list(values), dtype=cast(Any, dtype))
    return array


def _outcome(step: StepReport) -> str:
    """The worst outcome of a step's findings, by the rule of a report."""
    return Report(kind="train", title="", created="", command="", subject=(), findings=step.findings).outcome


def _kind(held: Sequence[dict[str, Value]], name: str) -> Literal["text", "int", "float", "flag"]:
    """The kind of column that holds every value of that name: a flag, an int, a float, or text."""
    values = [values[name] for values in held if values.get(name) is not None]
    if values and all(isinstance(value, bool) for value in values):
        return "flag"
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return "int" if values and all(isinstance(value, int) for value in values) else "float"
    return "text"


def _series(column: Column, values: Sequence[Value]) -> FrameColumn:
    """A column's cells in its kind's type, as text where one does not fit."""
    if column.kind == "float" and all(v is None or _is_number(v) for v in values):
        return pd.Series(_floats([_number(value) for value in values]))
    wanted = {"int": int, "flag": bool}.get(column.kind, str)
    if all(value is None or type(value) is wanted for value in values):
        try:
            return pd.Series(_array(values, dtype=ARROW_TYPES[column.kind]))
        except OverflowError:  # an integer of more than 64 bits: rounded by nobody
            pass
    return pd.Series(_array([None if value is None else str(value) for value in values], dtype="string"))


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _floats(values: Sequence[float | None]) -> ExtensionArray:
    """Nullable floats in which nan stays nan and only None is missing: pandas' own conversion merges the two."""
    missing = np.array([value is None for value in values], dtype=bool)
    numbers = np.array([0.0 if value is None else value for value in values], dtype=np.float64)
    return pd.arrays.FloatingArray(numbers, missing)
