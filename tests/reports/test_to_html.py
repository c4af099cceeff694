"""The page: self-contained, nothing of a report read as HTML or script, every chart with its table."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import altair as alt
import pytest

from parity.reports import chart_rows, charts
from parity.reports.record import Chart, Column, Finding, Report, Suspicion, Table, Value
from parity.reports.to_html import paint

MAX_BYTES = 3_000_000


class Page(HTMLParser):
    """What a browser would see: tags with attributes, scripts, comments, the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.comments: list[str] = []
        self.text = ""
        self.in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            attributes, before = self.scripts[-1]
            self.scripts[-1] = (attributes, before + data)
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def data(self) -> Any:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "charts"))


def _table(kind: str, rows: tuple[tuple[Value, ...], ...], **chart: Any) -> Table:
    columns = (
        Column(key="x", title="place", kind="text" if rows and isinstance(rows[0][0], str) else "int"),
        Column(key="s", title="side"),
        Column(key="v", title="error", unit="relative L2", kind="float"),
    )
    fields: dict[str, Any] = {"kind": kind, "x": "x", "y": "v", "series": "s"}
    if kind == "heatmap":
        fields |= {"y": "s", "series": None, "value": "v"}
    return Table(name="t", title="t", columns=columns, rows=rows, chart=Chart(**(fields | chart)))


def test_verdict_comes_first_then_suspicions_findings_tables(big: Report) -> None:
    text = paint(big)
    order = ["<h1>", "Nothing failed; 1 finding is worth a look.", 'id="suspicions"', 'id="findings"']
    order += ['id="measurements"', 'id="environment"', 'id="notes"']
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert len(text.encode()) < MAX_BYTES


def test_every_table_has_a_caption_and_headings_with_scope(big: Report) -> None:
    page = Page(paint(big))
    assert len(page.all("table")) == len(page.all("caption")) == len(big.tables) + 2
    assert all(heading.get("scope") in ("col", "row") for heading in page.all("th"))
    rows = sum(len(table.rows) for table in big.tables) + len(big.suspicions) + len(big.environment)
    assert len(page.all("tr")) == rows + len(page.all("table"))


def test_headings_do_not_jump_and_links_have_targets(big: Report) -> None:
    page = Page(paint(big))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [attributes["href"] or "" for attributes in page.all("a")]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    charts_ = [attributes for _, attributes in page.tags if "data-chart" in attributes]
    assert len(charts_) == 4 and all(each["role"] == "img" and each["aria-label"] for each in charts_)


def test_page_loads_nothing(big: Report) -> None:
    page = Page(paint(big))
    sources = [
        value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(value is not None and value.startswith(("#", "data:")) for value in sources)
    policy = next(each["content"] or "" for each in page.all("meta") if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    hashes = re.findall("'sha256-([^']+)'", policy)
    scripts = [text for attributes, text in page.scripts if attributes.get("type") != "application/json"]
    assert hashes == [
        base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in reversed(scripts)
    ]
    assert "unsafe-eval" not in policy and "@import" not in paint(big) and "url(" not in page.text


def test_a_page_without_charts_is_small(small: Report) -> None:
    text = paint(replace(small, tables=()))
    assert len(text.encode()) < 40_000 and len(Page(text).scripts) == 2


def test_hostile_texts_stay_texts(report_of: Callable[..., Report], hostile: str) -> None:
    column = Column(key=hostile, title=hostile, unit=hostile, kind="float")
    chart = Chart(
        kind="profile", x="x", y=hostile, series="s", hover=("s",), caption=hostile,
        limits=((1.0, hostile),), marks=((1, hostile),),
    )  # fmt: skip
    columns = (Column(key="x", title=hostile, kind="int"), Column(key="s", title=hostile), column)
    table = Table(
        name=hostile, title=hostile, columns=columns, rows=((1, hostile, 1.0),), caption=hostile, chart=chart
    )
    finding = Finding(
        name=hostile, outcome="fail", sentence=hostile, evidence=((hostile, f"a\n{hostile}"), ("b", hostile)),
        fault=hostile, next_step=hostile, tables=(hostile, f"no {hostile}"),
    )  # fmt: skip
    suspicion = Suspicion(name=hostile, verdict="found", because=hostile, findings=(hostile, f"no {hostile}"))
    report = report_of(
        title=hostile, created=hostile, command=hostile, subject=((hostile, hostile),), findings=(finding,),
        suspicions=(suspicion,), tables=(table,), environment=((hostile, hostile),), notes=(hostile,),
    )  # fmt: skip
    text = paint(report)
    page = Page(text)
    assert len(page.scripts) == 3 and not page.all("img") and not page.comments
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not any(character in text for character in "\x1b\x00\u202e")
    assert "@@data@@" in page.text  # a slot's name in a report is a text
    assert "</script><script>alert(1)" in page.data()["table-0"]["rows"]["s"][0]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("kind", ["profile", "timeline", "heatmap", "bars"])
@pytest.mark.parametrize("names", [(0, 1, 2, 3), ("a", "b", "c", "d")])
def test_every_kind_of_chart_is_valid_vega_lite(kind: str, log: bool, names: tuple[Value, ...]) -> None:
    values = (0.0, 2e-7, -1.0, math.nan)
    rows = tuple((name, side, value) for name, value in zip(names, values, strict=True) for side in "pq")
    table = _table(kind, rows, log=log, hover=("v",), limits=((1e-6, "limit"),), marks=((names[1], "here"),))
    drawing = charts.draw(table)
    assert drawing is not None
    alt.LayerChart.from_dict(drawing.spec)  # raises where the specification does not fit Vega-Lite's schema
    assert len({len(column) for column in drawing.rows.values()}) == 1
    assert json.loads(json.dumps(drawing.rows, allow_nan=False))


def test_zeros_on_a_logarithmic_axis_are_shown_and_said() -> None:
    table = _table("profile", ((0, "a", 1e-7), (1, "a", 0.0), (2, "a", 1e-6), (3, "a", math.inf)), log=True)
    drawing = charts.draw(table)
    assert drawing is not None
    assert drawing.rows["k"] == [0, 1, 0, 2]
    assert drawing.rows["r"] == [0, 1, 1, 2]  # the line is broken at the zero
    assert (
        drawing.remarks[0] == "Marks on the line labelled 0 are exactly 0 (1 of 4); the scale is logarithmic."
    )
    assert drawing.remarks[1].startswith("1 value is negative or not finite, marked by a cross")
    layers = [json.dumps(layer) for layer in drawing.spec["layer"]]
    assert any("datum.k === 1" in layer for layer in layers) and any(
        '"text": "0"' in layer for layer in layers
    )


def test_nothing_but_zeros_is_still_a_chart() -> None:
    drawing = charts.draw(_table("profile", ((0, "a", 0.0), (1, "a", 0.0)), log=True))
    assert drawing is not None and drawing.spec["height"] == charts.FLAT
    assert drawing.remarks == [
        "Marks on the line labelled 0 are exactly 0 (2 of 2); the scale is logarithmic."
    ]


@pytest.mark.parametrize(
    ("names", "at", "side"),
    [((0, 1, 2, 3), 0, "left"), ((0, 1, 2, 3), 3, "right"), (("a", "b", "c", "d"), "d", "right")],
)
def test_a_marks_label_stands_where_there_is_room_and_is_never_drawn_outside(
    names: tuple[Value, ...], at: Value, side: str
) -> None:
    """One that hung over the edge would be given room there, and the chart would shrink."""
    rows = tuple((name, "a", 1.0 + index) for index, name in enumerate(names))
    drawing = charts.draw(_table("timeline", rows, marks=((at, "a long name of a fault"),)))
    assert drawing is not None
    (label,) = (layer["mark"] for layer in drawing.spec["layer"] if layer["mark"]["type"] == "text")
    assert label["align"] == side and (label["dx"] < 0) == (side == "right")
    assert label["clip"] and label["limit"] == charts.LABEL


def test_bars_of_no_height_are_no_chart() -> None:
    """Their table says it better; one bar of any height draws them all."""
    assert charts.draw(_table("bars", (("p", "a", 0.0), ("q", "a", 0.0)))) is None
    assert charts.draw(_table("bars", (("p", "a", 0.0), ("q", "a", 0.5)))) is not None


def test_too_many_rows_keep_their_peaks() -> None:
    peak = 1234
    rows = tuple((x, "a", 9.0 if x == peak else 1.0 + x % 7 / 10) for x in range(30_000))
    drawing = charts.draw(_table("timeline", rows))
    assert drawing is not None
    assert len(drawing.rows["x"]) <= chart_rows.MAX_ROWS and peak in drawing.rows["x"]
    assert drawing.remarks == ["Of every 3 neighbours on place the one with the largest value is drawn."]


def test_a_large_report_is_cut_to_size_and_says_so(report_of: Callable[..., Report]) -> None:
    rows = tuple((x // 400, f"token {x % 400}", 1e-3 + x * 1e-9) for x in range(40_000))
    tables = [replace(_table("heatmap", rows, log=True), name=f"t{n}") for n in range(6)]
    page = paint(report_of(tables=tuple(tables)))
    assert len(page.encode()) < MAX_BYTES
    assert page.count("are shown; the JSON report holds all.") == 6


def test_a_chart_that_cannot_be_drawn_leaves_its_table(small: Report) -> None:
    chart = Chart(kind="profile", x="layer", y="gone")
    page = Page(paint(replace(small, tables=(replace(small.tables[0], chart=chart),))))
    assert "chart: not painted (ValueError: the table has no column 'gone')" in page.text
    assert len(page.all("table")) == 3


def test_part_that_breaks_is_named_and_the_rest_painted(small: Report) -> None:
    odd = Finding(
        name="odd",
        outcome="error",
        sentence="s",
        next_step="n",
        evidence=(("value", object()),),  # type: ignore[arg-type]
    )
    page = Page(paint(replace(small, findings=(odd, *small.findings), suspicions=(None,))))  # type: ignore[arg-type]
    assert "suspicions: not painted (AttributeError" in page.text
    assert "The worker broke." in page.text and "Segmentation fault" in page.text and "odd" in page.text
