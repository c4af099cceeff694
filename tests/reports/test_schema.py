"""The JSON form: exact round trip, strict JSON, a schema that fits, clear refusals."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from parity.errors import ParityError
from parity.reports import schema, to_json
from parity.reports.record import Chart, Column, Finding, Report, Table

VALUES = (
    0,
    0.0,
    -0.0,
    1,
    1.0,
    True,
    False,
    None,
    "",
    "nan",
    '{"$float": "nan"}',
    "{",
    2**70,
    0.1,
    5e-324,
    math.inf,
    -math.inf,
)


def _table(*values: Any) -> Table:
    column = Column(key="v", title="v", unit="u", kind="float")
    chart = Chart(
        kind="bars", x="v", y="v", limits=((math.inf, "l"), (1, "k")), marks=((None, "m"),), hover=("v",)
    )
    return Table(
        name="t", title="t", columns=(column,), rows=tuple((value,) for value in values), chart=chart
    )


def test_version_is_a_promise() -> None:
    assert schema.REPORT_SCHEMA == "parity-report/1"
    assert schema.UPGRADES == {}


def test_round_trip_is_exact(small: Report, big: Report) -> None:
    for report in (replace(small, tables=()), big):
        assert schema.read_report(to_json.paint(report)) == report


def test_round_trip_keeps_kind_and_sign(report_of: Callable[..., Report]) -> None:
    report = report_of(tables=(_table(*VALUES),), seconds=3)
    back = schema.read_report(to_json.paint(report))
    assert back == report
    values = [row[0] for row in back.tables[0].rows]
    assert [repr(value) for value in values] == [repr(value) for value in VALUES]
    assert repr(back.seconds) == "3"


def test_nan_survives(report_of: Callable[..., Report]) -> None:
    text = to_json.paint(report_of(tables=(_table(math.nan),)))
    assert '[{"$float": "nan"}]' in text
    value = schema.read_report(text).tables[0].rows[0][0]
    assert isinstance(value, float) and math.isnan(value)


@pytest.mark.parametrize("text", ['{"$row": 0}', '"$row": 0', "{", "\0row", "$row"])
def test_no_text_is_taken_for_a_row(report_of: Callable[..., Report], text: str) -> None:
    report = report_of(title=text, subject=((text, text), ("{", text)), tables=(_table(text),))
    assert schema.read_report(to_json.paint(report)) == report


def test_json_is_strict_ascii_and_a_row_a_line(big: Report, small: Report, hostile: str) -> None:
    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    text = to_json.paint(replace(small, title=hostile + "\ud800\u4e2d"))
    json.loads(text, parse_constant=refuse)
    assert text.isascii() and text.endswith("}\n")
    assert '    [0, "linear", 2.31e-07, 0.99984],\n' in text
    assert len(to_json.paint(big)) < 200_000


def test_what_no_report_can_hold_is_our_fault(report_of: Callable[..., Report]) -> None:
    with pytest.raises(TypeError, match=r"report.tables\[0\].rows\[1\]\[0\] holds a list"):
        schema.to_dict(report_of(tables=(_table(1, [2]),)))


def test_json_schema_fits_what_is_written(
    small: Report, big: Report, report_of: Callable[..., Report]
) -> None:
    described = schema.json_schema()
    jsonschema.Draft202012Validator.check_schema(described)
    validator = jsonschema.Draft202012Validator(described)
    for report in (small, big, report_of(), report_of(tables=(_table(*VALUES, math.nan),))):
        validator.validate(json.loads(to_json.paint(report)))


def test_json_schema_refuses_what_does_not_fit(small: Report) -> None:
    validator = jsonschema.Draft202012Validator(schema.json_schema())
    for change in ({"schema": "parity-report/2"}, {"kind": "x"}, {"extra": 1}, {"seconds": {"$float": "1"}}):
        assert not validator.is_valid(schema.to_dict(small) | change)


def test_fields_with_a_default_may_be_absent(small: Report) -> None:
    data = schema.to_dict(replace(small, tables=(), notes=(), seconds=0.0))
    del data["notes"], data["seconds"], data["tables"]
    assert schema.from_dict(data) == replace(small, tables=(), notes=(), seconds=0.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1]", "No such file"),
        ("{", "no JSON"),
        ('{"a": NaN}', "the literal NaN, which is no JSON"),
        ("{}", "without the key `schema`"),
        ('{"schema": "speculators/3"}', "the schema 'speculators/3'"),
        ('{"schema": "parity-report/0"}', "the schema 'parity-report/0'"),
        ('{"schema": "parity-report/2"}', "the newer schema 'parity-report/2'; this parity reads up to"),
        ('{"schema": "parity-report/1"}', "at report, the field 'kind' is missing"),
        ('{"schema": "parity-report/1", "x": 1}', "at report, the unknown field 'x'"),
    ],
)
def test_foreign_and_damaged_texts_are_refused(text: str, found: str) -> None:
    with pytest.raises(ParityError) as error:
        schema.read_report(text)
    assert found in error.value.found and error.value.do
    assert str(error.value).count("\n") == 1


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        (("kind",), "poem", "at report.kind, 'poem' is none of check"),
        (("title",), 3, "at report.title, a JSON number where a str belongs: 3"),
        (("findings", 0, "outcome"), "ok", "at report.findings[0].outcome, 'ok' is none of pass"),
        (("findings", 1, "next_step"), "", "does not say what to do next"),
        (("tables", 0, "rows", 1), [1], "at report.tables[0].rows[1], 1 cells for 4 columns"),
        (("tables", 0, "rows", 1, 0), {"$float": "1"}, "a JSON object where a value belongs"),
        (("tables", 0, "detail"), 1, "a JSON number where a bool belongs"),
        (("subject",), [["a"]], "1 items where 2 belong"),
        (("notes",), None, "a JSON null where a list belongs"),
        (("seconds",), True, "a JSON boolean where a float belongs"),
    ],
)
def test_damage_is_located(small: Report, path: tuple[Any, ...], value: Any, found: str) -> None:
    data = json.loads(to_json.paint(small))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ParityError) as error:
        schema.from_dict(data)
    assert found in error.value.found


def test_read_a_file(small: Report, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(to_json.paint(replace(small, tables=())))
    assert schema.read_report(file) == schema.read_report(str(file)) == replace(small, tables=())
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParityError, match="bytes that are no text"):
        schema.read_report(file)
    with pytest.raises(ParityError, match="Is a directory"):
        schema.read_report(tmp_path)


def test_an_older_version_is_read_through_the_table(small: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    data = schema.to_dict(replace(small, tables=()))
    data["name"] = data.pop("title")
    monkeypatch.setattr(schema, "NUMBER", 2)
    monkeypatch.setitem(
        schema.UPGRADES,
        1,
        lambda old: {**{k: v for k, v in old.items() if k != "name"}, "title": old["name"]},
    )
    assert schema.from_dict(data) == replace(small, tables=())


def test_a_finding_without_a_next_step_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say what to do next"):
        Finding(name="n", outcome="fail", sentence="s")
