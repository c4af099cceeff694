"""Tables that are declared: a header as columns, records as rows."""

from types import SimpleNamespace

import pytest

from parity.reports.record import Column, collect_rows, declare_columns


def test_a_header_declares_key_kind_title_and_unit() -> None:
    header = (
        "tap | layer_type layer type | token:int token (position) | error:float rel L2 | times:float (limits)"
    )
    assert declare_columns(header) == (
        Column(key="tap", title="tap"),
        Column(key="layer_type", title="layer type"),
        Column(key="token", title="token", unit="position", kind="int"),
        Column(key="error", title="rel L2", kind="float"),
        Column(key="times", title="times", unit="limits", kind="float"),
    )


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("tap | ", "'' declares no column"),
        ("(unit)", "declares no column"),
        ("tap:number", "kind 'number', which is none of text, int, float, outcome, flag"),
        ("tap | tap:int", "two columns have the key 'tap'"),
    ],
)
def test_a_header_that_declares_no_table_is_refused(header: str, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        declare_columns(header)


def test_rows_come_from_records_by_name() -> None:
    columns = declare_columns("b:int | a | both")
    records = [SimpleNamespace(a="x", b=1), SimpleNamespace(a="y", b=2)]
    rows = collect_rows(columns, records, both=lambda record: f"{record.a}{record.b}")
    assert rows == ((1, "x", "x1"), (2, "y", "y2"))
    assert collect_rows(columns[:2], [{"a": "x", "b": 1, "c": 2}]) == ((1, "x"),)


def test_a_cell_that_nothing_holds_is_refused() -> None:
    columns = declare_columns("a | b")
    with pytest.raises(AttributeError):
        collect_rows(columns, [SimpleNamespace(a="x")])
    with pytest.raises(KeyError):
        collect_rows(columns, [{"a": "x"}])
    with pytest.raises(TypeError, match="no column has the key 'c'"):
        collect_rows(columns, [{"a": "x", "b": "y"}], c=lambda _: None)
