"""Step reports: exact round trip, cut last lines, runs that went back, strict reading."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from parity.errors import ParityError
from parity.reports import schema, step_log
from parity.reports.record import Column, Finding, StepReport, Table

STEP = StepReport(
    step=50,
    time="2026-01-02T03:04:05Z",
    values=(("loss", 2.5), ("fc_input.mean", math.inf), ("grad.all", -0.0), ("note", "a\nb"), ("n", 3)),
    findings=(Finding(name="noise", outcome="fail", sentence="s", next_step="n", fault="noise-on-labels"),),
    tables=(Table(name="t", title="t", columns=(Column(key="v", title="v"),), rows=((1.5,), (None,))),),
    seconds=0.03,
)


def plain(step: int) -> StepReport:
    return StepReport(step=step, time="2026-01-02T03:04:05Z", values=(("loss", 1 / step),))


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    for step in (STEP, plain(100)):
        step_log.append(file, step)
    assert step_log.read_step_log(file) == (STEP, plain(100))
    assert file.read_bytes().count(b"\n") == 2 and file.read_bytes().isascii()


def test_nan_survives(tmp_path: Path) -> None:
    step_log.append(tmp_path / "s", replace(STEP, values=(("loss", math.nan),)))
    value = step_log.read_step_log(tmp_path / "s")[0].values[0][1]
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize("cut", [1, 2, 30, len(step_log.line(STEP)) - 1])
def test_a_cut_last_line_is_left_out_and_then_replaced(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "s"
    whole = step_log.line(plain(1)) + step_log.line(STEP)
    file.write_text(whole[:-cut])
    # the newline alone is missing: the line is whole and counts
    assert [step.step for step in step_log.read_step_log(file)] == ([1, 50] if cut == 1 else [1])
    step_log.append(file, plain(60))
    assert [step.step for step in step_log.read_step_log(file)] == ([1, 50, 60] if cut == 1 else [1, 60])
    file.write_text(whole[:20])  # the only line is cut
    assert step_log.read_step_log(file) == ()
    step_log.append(file, plain(2))
    assert step_log.read_step_log(file) == (plain(2),)


def test_a_run_that_went_back_is_read_once(tmp_path: Path) -> None:
    for step in (50, 100, 150, 100, 120):
        step_log.append(tmp_path / "s", plain(step))
    assert [step.step for step in step_log.read_step_log(tmp_path / "s")] == [50, 100, 120]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}\n', "the schema 'None'"),
        ("[1]\n", "the schema 'a JSON list'"),
        ("nonsense\n", "no JSON in line 1"),
        ('{"schema": "parity-step/1", "step": NaN}\n', "no JSON in line 1"),
        ('{"schema": "parity-step/2"}\n', "the schema 'parity-step/2', where 'parity-step/1' is known"),
        ('{"schema": "parity-step/1", "time": "t"}\n', "at step, the field 'step' is missing"),
        ('{"schema": "parity-step/1", "step": "1", "time": "t"}\n', "at step.step, a JSON string"),
        ("cut {\n" + step_log.line(plain(1)), "no JSON in line 1"),
    ],
)
def test_what_is_no_step_report_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(ParityError) as error:
        step_log.read_step_log(tmp_path / "s")
    assert found in error.value.found and error.value.do


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="No such file"):
        step_log.read_step_log(tmp_path / "none")


def test_json_schema_fits_what_is_written() -> None:
    described = schema.step_json_schema()
    jsonschema.Draft202012Validator.check_schema(described)
    validator = jsonschema.Draft202012Validator(described)
    validator.validate(json.loads(step_log.line(STEP)))
    assert not validator.is_valid(json.loads(step_log.line(STEP)) | {"step": 1.5})
    assert not validator.is_valid(json.loads(step_log.line(STEP)) | {"extra": 1})
