"""A table's chart as a Vega-Lite specification (made with altair) and the rows it draws.

Used by `to_html` alone, because altair takes .4 s to import. Rules:

- Fields have fixed names (`x`, `y`, `s`, `v`, ...), so that no column key can be read as an expression.
- Colours are the page's CSS variables: the drawn SVG follows dark, light and print without being redrawn.
- A logarithmic axis cannot hold 0. Exact zeros stand on a line of their own, marked `0`; a line is broken
  there. What is negative on such an axis, or not finite, is counted in a remark, never dropped silently.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import altair as alt

from parity.reports import words
from parity.reports.chart_rows import NUMBER, ODD, ZERO, ChartRows, plot_of
from parity.reports.record import Table, Value

HEIGHT, FLAT = 260, 60
"""Pixels, of a chart and of one that has only zeros or odd values to show."""
LEGEND, LABEL = 270, 170
"""Pixels of a legend's width, and of a label inside a chart: what a phone has room for."""
WRITTEN = 120
"""Cells of a heat map up to which each holds its number: an influence matrix is read, not looked at."""
SERIES = [f"var(--s{number})" for number in range(1, 7)]
HEAT = [f"var(--h{number})" for number in range(9)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]


Settings = dict[str, Any]
"""Keyword arguments of altair, whose own types are unions of dozens, and what it makes of them."""
Encoding = alt.X | alt.Y
"""A column on one of the two axes."""
OneChannel = TypeVar("OneChannel", alt.X, alt.Y)
Layers = alt.LayerChart | alt.FacetChart
"""What `alt.layer` makes, as it is typed."""


@dataclass(frozen=True, slots=True)
class ChartDrawing:
    """What the page needs to draw one chart."""

    spec: Settings
    """Vega-Lite; its data set is named `rows`."""
    rows: dict[str, list[Value]]
    """The data set by field, all lists of one length."""
    tips: list[tuple[str, str]]
    """What a pointer shows of a row: title and field."""
    label: str
    """The chart in words, for those who do not see it."""
    remarks: list[str] = field(default_factory=list)
    """What the chart leaves out or shows in a way of its own."""


def draw(table: Table) -> ChartDrawing | None:
    """The table's chart; None where it has none, no rows, or bars of no height. Raises ValueError where a column is
    missing."""
    if table.chart is None or not table.rows:
        return None
    plot = plot_of(table, table.chart)
    numbers = plot.numbers()
    if table.chart.kind == "bars" and numbers and not any(numbers) and set(plot.rows["k"]) == {NUMBER}:
        return None
    if not numbers:
        if ZERO not in plot.rows["k"]:
            plot.remarks.append("No value can be placed on the axis.")
        numbers = [1e-1, 1.0]
    makers = {"heatmap": _heatmap, "bars": _bars}
    drawn = makers.get(table.chart.kind, _lines)(plot, numbers)
    spec = drawn.configure(**_CONFIG).to_dict(validate=False)  # the tests validate; it takes .3 s
    tips = [(words.heading(column), name) for name, column in plot.columns.items()]
    # Vega puts the description where the page's own label was, and removes that one where there is none
    label = spec["description"] = _label(plot, table)
    return ChartDrawing(spec, plot.rows, tips, label, plot.remarks)


_CONFIG: Settings = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "aria": False,  # the page describes the chart in words; thousands of marks are no description
    "axis": {
        "labelColor": "var(--ink-2)",
        "titleColor": "var(--ink-2)",
        "gridColor": "var(--rule)",
        "domainColor": "var(--rule-2)",
        "tickColor": "var(--rule-2)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelLimit": 220,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--ink-2)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelLimit": LEGEND - 32,
        "orient": "top",
    },
    "text": {"fill": "var(--ink-2)", "fontSize": 12},
}


def _label(plot: ChartRows, table: Table) -> str:
    """The chart in one sentence."""
    title = {name: column.title for name, column in plot.columns.items()}
    over = f"{title['x']} and {title['y']}" if plot.chart.kind == "heatmap" else title["x"]
    by = f", by {title['s']}" if "s" in title else ""
    kinds = {"heatmap": "Heat map", "bars": "Bars", "timeline": "Timeline", "profile": "Profile"}
    text = f"{kinds[plot.chart.kind]} of {title[plot.value]} over {over}{by}: {table.title}."
    return words.plain(f"{text} The table below it holds the numbers.")


def _distinct(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _domain(plot: ChartRows, numbers: Sequence[float]) -> list[float]:
    """The value axis from end to end, with room below for the line of zeros."""
    low, high = min(numbers), max(numbers)
    if plot.chart.log:
        room = max(0.6, 0.16 * math.log10(high / low)) if ZERO in plot.rows["k"] else 0.0
        below = 10 ** (math.floor(math.log10(low)) - room) if room else low / 1.5
        return [max(below, 5e-324), high * 1.5]
    if plot.chart.kind == "bars":
        low, high = min(low, 0.0), max(high, 0.0)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return [low - room if low else 0.0, high + room if high else 0.0]


def _ticks(numbers: Sequence[float]) -> list[float]:
    """Places to label on a logarithmic axis: 1, 2, 5 times a power of ten, or the powers alone."""
    low, high = min(numbers), max(numbers) * 1.5
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 2 else (1,)
    powers = range(first, last + 1, max(1, (last - first) // 8))
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    return [tick for tick in ticks if 10.0**first <= tick <= high]


def _axis(plot: ChartRows, numbers: Sequence[float], channel: type[OneChannel]) -> OneChannel:
    """The measured value as an encoding of `channel` (`alt.X` or `alt.Y`)."""
    title = words.heading(plot.columns[plot.value])
    scale: Settings = {"domain": _domain(plot, numbers), "nice": False, "zero": False}
    axis: Settings = {"tickCount": 6}
    if plot.chart.log:
        scale = {"type": "log", "domain": scale["domain"], "nice": False}
        axis = {"values": _ticks(numbers), "labelExpr": "replace(format(datum.value, '.0e'), '+', '')"}
    return channel("y:Q", title=title, scale=alt.Scale(**scale), axis=alt.Axis(**axis))


def _place(plot: ChartRows) -> alt.X:
    """Where on x a row stands: a number on its axis, a text in the table's order."""
    column, places = plot.columns["x"], _distinct(plot.rows["x"])
    title = words.heading(column)
    if not words.is_numeric(column):
        # a dozen names fit beside each other; more of them stand
        angle = 0 if len(places) <= 12 else -60
        return alt.X("x:N", title=title, sort=None, axis=alt.Axis(grid=False, labelAngle=angle))
    axis: Settings = {"labelOverlap": True, "labelSeparation": 8}
    axis |= {"tickMinStep": 1} if column.kind == "int" else {}
    if len(places) <= 3:  # between two or three layers an axis would label halves
        axis["values"] = places
    scale = alt.Scale(nice=False, zero=False, padding=12)
    return alt.X("x:Q", title=title, scale=scale, axis=alt.Axis(grid=False, **axis))


def _colours(plot: ChartRows) -> Settings:
    """Colour and shape by series, in the table's order."""
    if "s" not in plot.rows:
        return {"color": alt.value(SERIES[0])}
    names = [str(name) for name in _distinct(plot.rows["s"])]
    plot.rows["s"] = [str(name) for name in plot.rows["s"]]
    title = words.heading(plot.columns["s"])
    repeat = -(-len(names) // len(SERIES))
    colour = alt.Scale(domain=names, range=(SERIES * repeat)[: len(names)])
    legend = alt.Legend(symbolSize=90, columns=_columns(names))
    return {"color": alt.Color("s:N", title=title, scale=colour, legend=legend)}


def _columns(names: Sequence[str]) -> int:
    """Columns of a legend: as many as fit beside each other on a phone, where a wider one would eat the chart."""
    entry = 24 + 6.4 * max(map(len, names), default=0)  # a symbol, a gap, and letters of 12 pixels
    return int(min(8, max(1, LEGEND // entry)))


def _lines(plot: ChartRows, numbers: Sequence[float]) -> Layers:
    """Lines over x, one a series, broken where a value has no place; zeros and odd values as marks."""
    rows = plot.rows
    rows["r"] = _runs(rows)
    colours = _colours(plot)
    shapes: Settings = {}
    if "s" in rows:
        names = [str(name) for name in _distinct(rows["s"])]
        repeat = -(-len(names) // len(SHAPES))
        scale = alt.Scale(domain=names, range=(SHAPES * repeat)[: len(names)])
        shapes = {"shape": alt.Shape("s:N", title=words.heading(plot.columns["s"]), scale=scale)}
    base = alt.Chart(alt.NamedData(name="rows")).encode(x=_place(plot), **colours)
    y = _axis(plot, numbers, alt.Y)
    # What has a place is a line with points; zeros stand on a line of their own, the rest at the upper edge.
    placed = base.transform_filter(f"datum.k === {NUMBER}")
    size = 55 if len(rows["x"]) <= 400 else 14
    layers: list[alt.Chart] = []
    if NUMBER in rows["k"]:
        layers.append(placed.mark_line(strokeWidth=1.8).encode(y=y, detail="r:N"))
        layers.append(
            placed.mark_point(filled=True, opacity=1, size=size).encode(y=y, tooltip=_TIP, **shapes)
        )
    if ZERO in rows["k"]:
        zeros = base.transform_filter(f"datum.k === {ZERO}").mark_point(filled=False, size=45, yOffset=-12)
        layers += [*_zero_line(), zeros.encode(y=alt.value("height"), tooltip=_TIP, **shapes)]
    if ODD in rows["k"]:
        odd = base.transform_filter(f"datum.k === {ODD}").mark_text(text="✕", fontSize=14, yOffset=8)
        layers.append(odd.encode(y=alt.value(0), color=alt.value("var(--fail)"), tooltip=_TIP))
    layers += _rules(plot, y)
    height = HEIGHT if NUMBER in rows["k"] or plot.chart.limits else FLAT
    return alt.layer(*layers).properties(width="container", height=height)


_TIP = alt.Tooltip("k:Q")
"""Any field makes Vega call the page's own tooltip, which reads the whole row."""


def _runs(rows: dict[str, list[Value]]) -> list[Value]:
    """Numbers the unbroken stretches of each series: a line joins only rows of one number."""
    run: dict[Value, int] = {}
    names = rows.get("s", [None] * len(rows["k"]))
    runs: list[Value] = []
    for name, kind in zip(names, rows["k"], strict=True):
        run[name] = run.get(name, 0) + (kind != NUMBER)
        runs.append(run[name])
    return runs


def _zero_line() -> list[alt.Chart]:
    """The line on which exact zeros stand, with its label beside the axis."""
    data = alt.Chart(alt.InlineData(values=[{}]))
    rule = data.mark_rule(strokeDash=[2, 3], color="var(--rule-2)", yOffset=-12, y2Offset=-12)
    text = data.mark_text(text="0", align="right", dx=-7, yOffset=-12)
    across = {"x": alt.value(0), "x2": alt.value("width"), "y": alt.value("height")}
    return [rule.encode(**across), text.encode(x=alt.value(0), y=alt.value("height"))]


def _rules(plot: ChartRows, y: alt.Y) -> list[alt.Chart]:
    """The limits across the chart and the marked places on x, with their labels."""
    layers: list[alt.Chart] = []
    limits = [{"y": value, "label": words.plain(text)} for value, text in plot.chart.limits]
    if limits:
        data = alt.Chart(alt.InlineData(values=limits)).encode(y=y)
        layers.append(data.mark_rule(strokeDash=[6, 4], color="var(--fail)"))
        names = data.mark_text(align="right", dy=-7, fill="var(--fail)", clip=True)
        layers.append(names.encode(x=alt.value("width"), text="label:N"))
    marks = [
        {"x": value, "label": words.plain(text), "left": _is_right(plot, value)}
        for value, text in plot.chart.marks
    ]
    if marks:
        kind = "Q" if words.is_numeric(plot.columns["x"]) else "N"
        data = alt.Chart(alt.InlineData(values=marks)).encode(x=f"x:{kind}")
        layers.append(data.mark_rule(strokeWidth=1.5, color="var(--fail)"))
        for left in {mark["left"] for mark in marks}:
            # a label that hung over the edge would be given room there, and the chart would shrink
            inside: Settings = {"clip": True, "limit": LABEL, "fill": "var(--fail)"}
            names = data.transform_filter(f"datum.left === {str(left).lower()}")
            names = names.mark_text(align="right" if left else "left", dx=-5 if left else 5, **inside)
            layers.append(names.encode(y=alt.value(8), text="label:N"))
    return layers


def _is_right(plot: ChartRows, value: Value) -> bool:
    """Whether a place lies in the right half of the chart, so that its label stands left of it."""
    places = _distinct(plot.rows["x"])
    if not words.is_numeric(plot.columns["x"]):
        return value in places and 2 * places.index(value) >= len(places)
    numbers = [place for place in (*places, value) if isinstance(place, (int, float))]
    return isinstance(value, (int, float)) and 2 * value >= min(numbers) + max(numbers)


def _bars(plot: ChartRows, numbers: Sequence[float]) -> Layers:
    """Bars, lying where their names are texts, standing where they are numbers."""
    lying = not words.is_numeric(plot.columns["x"])
    names = len(_distinct(plot.rows["x"]))
    # side by side only where a place has several series; else each bar stands in the middle of its place
    series = len(_distinct(plot.rows["s"])) if len(plot.rows["x"]) > names else 1
    where: Encoding = (alt.Y if lying else alt.X)("x:N", title=None, sort=None)
    scale = alt.Scale(domain=_distinct(plot.rows["x"]))
    encoding: Settings = _colours(plot)
    ticks = alt.Axis(grid=False, labelAngle=0, labelOverlap=True)
    where = where.scale(scale).axis(ticks)
    # beside names that lie, a title would run into them
    encoding["y" if lying else "x"] = where if lying else where.title(words.heading(plot.columns["x"]))
    if series > 1:
        encoding["yOffset" if lying else "xOffset"] = alt.YOffset("s:N") if lying else alt.XOffset("s:N")
    measured: Encoding = _axis(plot, numbers, alt.X) if lying else _axis(plot, numbers, alt.Y)
    start = alt.datum(max(0.0, _domain(plot, numbers)[0]) if plot.chart.log else 0)
    base = alt.Chart(alt.NamedData(name="rows")).encode(**encoding)
    span: Settings = {"x": measured, "x2": start} if lying else {"y": measured, "y2": start}
    bars = base.transform_filter(f"datum.k === {NUMBER}").mark_bar().encode(tooltip=_TIP, **span)
    layers: list[alt.Chart] = [bars] if NUMBER in plot.rows["k"] else []
    edge: Settings = {"x": alt.value(0)} if lying else {"y": alt.value("height")}
    for kind, text in ((ZERO, "0"), (ODD, "✕")):
        if kind in plot.rows["k"]:
            shift: Settings = {"dx": 8} if lying else {"dy": -8}
            mark = base.transform_filter(f"datum.k === {kind}").mark_text(text=text, **shift)
            layers.append(mark.encode(**edge, tooltip=_TIP))
    if isinstance(measured, alt.Y):  # where bars stand
        layers += _rules(plot, measured)
    height = max(80, 26 * names * series) if lying else HEIGHT
    return alt.layer(*layers).properties(width="container", height=height)


def _heatmap(plot: ChartRows, numbers: Sequence[float]) -> Layers:
    """Cells over x and y in steps of colour; hollow where 0 on a logarithmic scale, crossed where odd."""
    x, y = _band(plot, "x", alt.X), _band(plot, "y", alt.Y)
    base = alt.Chart(alt.NamedData(name="rows")).encode(x=x, y=y, tooltip=_TIP)
    # Steps of colour, each with its name in the legend.
    bounds = _bounds(numbers, plot.chart.log)
    names = [f"under {words.number(bounds[0])}", *(f"from {words.number(bound)}" for bound in bounds)]
    plot.rows["b"] = [_step(value, names, bounds) for value in plot.rows["v"]]
    colours = [HEAT[round(step * (len(HEAT) - 1) / len(bounds))] for step in range(len(names))]
    written = len(plot.rows["k"]) <= WRITTEN
    legend = alt.Legend(symbolType="square", symbolSize=160, orient="bottom", columns=5)
    scale = alt.Scale(domain=names, range=colours)
    colour = alt.Color(
        "b:N", title=words.heading(plot.columns["v"]), scale=scale, legend=None if written else legend
    )
    # Cells by what their value is, numbers written on top where they are few.
    layers = []
    if NUMBER in plot.rows["k"]:
        layers.append(base.transform_filter(f"datum.k === {NUMBER}").mark_rect().encode(color=colour))
    if ZERO in plot.rows["k"]:
        hollow = base.transform_filter(f"datum.k === {ZERO}")
        layers.append(hollow.mark_rect(fill="var(--card)", stroke="var(--rule-2)", strokeWidth=0.5))
    if ODD in plot.rows["k"]:
        odd = base.transform_filter(f"datum.k === {ODD}")
        layers += [
            odd.mark_rect(fill="var(--card)"),
            odd.mark_text(text="✕", fontSize=10, fill="var(--fail)"),
        ]
    if written:
        plot.rows["n"] = [words.cell(value) for value in plot.rows["v"]]
        number = base.transform_filter(f"datum.k !== {ODD}").mark_text(fontSize=12, fill="var(--ink)")
        layers.append(number.encode(text="n:N"))
    height = min(640, max(120, 22 * len(_distinct(plot.rows["y"]))))
    return alt.layer(*layers).properties(width="container", height=height)


def _step(value: Value, names: Sequence[str], bounds: Sequence[float]) -> Value:
    """The name of the step of colour in which a value lies."""
    return names[bisect_right(bounds, value)] if isinstance(value, (int, float)) else None


def _band(plot: ChartRows, name: str, channel: type[OneChannel]) -> OneChannel:
    """The rows or columns of a heat map, in the table's order; every tenth of many numbers is labelled."""
    places = _distinct(plot.rows[name])
    axis: Settings = {"labelOverlap": True, "labelAngle": 0, "ticks": False, "domain": False}
    whole = all(isinstance(place, int) for place in places)
    if whole and len(places) > 40:
        step = 10 ** math.floor(math.log10(len(places) / 4))
        round_places = [place for place in places if isinstance(place, int) and place % step == 0]
        # places left out by `_thin` leave few round ones: then every so many is labelled, round or not
        axis["values"] = round_places if len(round_places) > 5 else places[:: len(places) // 10]
    title = words.heading(plot.columns[name])
    return channel(f"{name}:O", title=title, sort=None, scale=alt.Scale(domain=places), axis=alt.Axis(**axis))


def _bounds(numbers: Sequence[float], log: bool) -> list[float]:
    """At most eight round numbers between the smallest and the largest value, where the colour changes."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return [high]
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            bounds = [float(f"{digit}e{power}") for power in powers for digit in digits]
            bounds = [bound for bound in bounds if low < bound <= high]
            if len(bounds) <= 8:
                return bounds or [high]
        return bounds[:: math.ceil(len(bounds) / 8)]
    power = 10.0 ** math.floor(math.log10((high - low) / 8))
    step = next(power * digit for digit in (1, 2, 5, 10) if (high - low) / (power * digit) <= 8)
    first = math.floor(low / step) + 1
    bounds = [float(f"{(first + index) * step:.12g}") for index in range(9)]
    return [bound for bound in bounds if low < bound <= high][:8] or [high]
