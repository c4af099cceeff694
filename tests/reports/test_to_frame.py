"""Reports and steps as frames: types, nan against nothing, parquet that comes back equal."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import parquet

from parity.errors import ParityError
from parity.reports import step_log, to_frame
from parity.reports.record import Column, Finding, Report, StepReport, Table, Value


def table_of(kind: str, *values: Value) -> Table:
    column = Column(key="v", title="V", unit="u", kind=kind)  # type: ignore[arg-type]
    return Table(
        name="t", title="T", columns=(column,), rows=tuple((value,) for value in values), caption="C"
    )


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        ("int", (1, None, 2**60), "Int64"),
        ("int", (2**70, None), "string"),  # no 64 bits hold it, and no float may round it
        ("float", (1.5, None, 2, math.inf), "Float64"),
        ("float", (1.5, "x"), "string"),
        ("flag", (True, None, False), "boolean"),
        ("text", ("a", None, ""), "string"),
        ("text", ("a", 1), "string"),
        ("outcome", ("pass", "fail"), "string"),
        ("float", (), "Float64"),
    ],
)
def test_types_follow_the_column(kind: str, values: tuple[Value, ...], dtype: str) -> None:
    series = to_frame.table(table_of(kind, *values))["v"]
    assert str(series.dtype) == dtype and list(series.isna()) == [value is None for value in values]
    for got, value in zip(series, values, strict=True):
        if value is not None:
            assert got == (str(value) if dtype == "string" else value)


def test_nan_is_a_value_and_nothing_is_none() -> None:
    values = to_frame.table(table_of("float", math.nan, None, 1.0))["v"].array
    assert list(values._mask) == [False, True, False] and math.isnan(values._data[0])


def test_titles_units_and_caption_are_kept() -> None:
    attrs = to_frame.table(table_of("int", 1)).attrs
    assert attrs["title"] == "T" and attrs["caption"] == "C"
    assert attrs["columns"] == {"v": {"title": "V", "unit": "u"}}


def test_a_report(small: Report) -> None:
    frames = to_frame.tables(small)
    assert list(frames) == ["layers.fp32", "tokens.fp32"]
    assert frames["layers.fp32"].loc[frames["layers.fp32"]["l2"] > 2e-7, "layer"].tolist() == [0]
    found = to_frame.findings(small)
    assert found.loc[found["outcome"] == "fail", "name"].tolist() == ["dispatch"]
    shown = to_frame.evidence(small).set_index(["finding", "name"])
    assert shown.loc[("dispatch", "layers proven"), "number"] == 8
    assert shown.loc[("dispatch", "callee"), "text"] == "transformers.models.x"
    assert shown["number"].isna()[("dispatch", "callee")]


def step(number: int, **values: Value) -> StepReport:
    outcome = "fail" if number > 100 else "pass"
    found = Finding(name="noise", outcome=outcome, sentence="s", next_step="n")  # type: ignore[arg-type]
    pairs = tuple((name.replace("_", "."), value) for name, value in values.items())
    table = table_of("int", number)
    return StepReport(
        step=number,
        time=f"2026-01-02T03:04:{number % 60:02}Z",
        values=pairs,
        findings=(found,),
        tables=(table,),
    )


RUN = (
    step(50, loss=2.0, fc_mean=0.5, n=1, kind="CE", train=True),
    step(100, loss=1.0, n=2, kind="CE", train=True),
    step(150, loss=math.nan, fc_mean=1, n=3, kind="KL", train=False, late=7.0),
)


def test_steps() -> None:
    frame = to_frame.steps_frame(RUN)
    assert frame.index.tolist() == [50, 100, 150] and frame.index.name == "step"
    assert list(frame.columns) == [
        "time",
        "outcome",
        "seconds",
        "loss",
        "fc.mean",
        "n",
        "kind",
        "train",
        "late",
    ]
    assert [str(frame[name].dtype) for name in ("loss", "fc.mean", "n", "kind", "train")] == [
        "Float64",
        "Float64",
        "Int64",
        "string",
        "boolean",
    ]
    assert frame["outcome"].tolist() == ["pass", "pass", "fail"]
    assert frame["fc.mean"].isna().tolist() == [False, True, False]
    assert frame["late"].isna().tolist() == [True, True, False]
    assert str(frame["time"].dtype).startswith("datetime64") and frame["time"].iloc[0].second == 50
    assert to_frame.steps_frame(()).empty
    assert to_frame.steps_frame([replace(RUN[0], time="noon")])["time"].isna().tolist() == [True]


def test_tables_and_findings_of_steps() -> None:
    together = to_frame.step_tables(RUN, "t")
    assert together["step"].tolist() == together["v"].tolist() == [50, 100, 150]
    assert to_frame.step_findings(RUN)["outcome"].tolist() == ["pass", "pass", "fail"]
    with pytest.raises(ParityError, match="tables t"):
        to_frame.step_tables(RUN, "gone")


def test_a_run_that_still_goes_on(tmp_path: Path) -> None:
    """Read while the last line is being written: the whole lines are there."""
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(step_log.line(each) for each in RUN)[:-30])
    assert to_frame.steps_frame(step_log.read_step_log(file)).index.tolist() == [50, 100]


def test_parquet_comes_back_equal(small: Report, tmp_path: Path) -> None:
    written = to_frame.write_frames(small, tmp_path / "r")
    assert sorted(path.name for path in written) == [
        "evidence.parquet",
        "findings.parquet",
        "table.layers.fp32.parquet",
        "table.tokens.fp32.parquet",
    ]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == sorted(path.name for path in written)
    frame = to_frame.tables(small)["layers.fp32"]
    back = pd.read_parquet(tmp_path / "r/table.layers.fp32.parquet")
    pd.testing.assert_frame_equal(back[:3], frame[:3])  # pandas' own reader makes NA of the nan in row 3
    to_frame.write_frames(RUN[:2], tmp_path / "s")
    back = pd.read_parquet(tmp_path / "s/steps.parquet")
    pd.testing.assert_frame_equal(back, to_frame.steps_frame(RUN[:2]))


def test_the_file_tells_nan_from_nothing(tmp_path: Path) -> None:
    to_frame.to_parquet(to_frame.table(table_of("float", math.nan, None, 1.0)), tmp_path / "t.parquet")
    first, second, third = parquet.read_table(tmp_path / "t.parquet")["v"].to_pylist()
    assert math.isnan(first) and (second, third) == (None, 1.0)


def test_files_that_would_be_one_and_folders_that_cannot_be_written(
    report_of: Callable[..., Report], tmp_path: Path
) -> None:
    twins = tuple(replace(table_of("int", 1), name=name) for name in ("a/b", "a:b"))
    with pytest.raises(ParityError, match="two whose names become table.a_b.parquet"):
        to_frame.write_frames(report_of(tables=twins), tmp_path)
    with pytest.raises(ParityError, match="name a file that can be written"):
        to_frame.to_parquet(to_frame.steps_frame(RUN), tmp_path / "none/x.parquet")
    assert not (tmp_path.parent / "b.parquet").exists()
