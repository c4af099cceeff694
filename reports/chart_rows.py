"""The rows of a chart: columns looked up, each value sorted into what can be placed, too many rows thinned.

Used by `charts` alone. Standard library only; what becomes of the rows on a page is not known here.
"""

import math
from dataclasses import dataclass

from parity.reports import words
from parity.reports.record import Chart, Column, Table, Value

MAX_ROWS = 12_000
"""Marks in one chart: 64 layers by 187 tokens. A browser draws these as SVG in about a second."""
NUMBER, ZERO, ODD = 0, 1, 2
"""What a row's `k` says of its value: it has a place on the axis, it is an exact 0, it has no place."""


@dataclass(slots=True)
class ChartRows:
    """A chart with its columns looked up and its rows sorted into what can be placed."""

    chart: Chart
    columns: dict[str, Column]
    """By field: `x`, `y`, `s`, `v` and the further ones to show on hover."""
    rows: dict[str, list[Value]]
    remarks: list[str]

    @property
    def value(self) -> str:
        """The field that is measured: the colour of a heat map, the height of all else."""
        return "v" if self.chart.kind == "heatmap" else "y"

    def numbers(self) -> list[float]:
        """The values that have a place on the axis, the limits that are ruled there included."""
        pairs = zip(self.rows[self.value], self.rows["k"], strict=True)
        found = [float(value) for value, kind in pairs if kind == NUMBER and isinstance(value, (int, float))]
        if self.chart.kind != "heatmap":
            found += [limit for limit, _ in self.chart.limits if math.isfinite(limit)]
        return [number for number in found if number > 0 or not self.chart.log]


def plot_of(table: Table, chart: Chart) -> ChartRows:
    """Looks up the columns, sorts each value, and thins the rows where there are too many."""
    places = {column.key: index for index, column in enumerate(table.columns)}
    wanted = {"x": chart.x, "y": chart.y, "s": chart.series, "v": chart.value}
    fields = {name: key for name, key in wanted.items() if key is not None}
    fields |= {f"t{number}": key for number, key in enumerate(chart.hover) if key not in fields.values()}
    missing = sorted({key for key in fields.values() if key not in places})
    if missing or (chart.kind == "heatmap" and chart.value is None):
        found = f"the table has no column {missing[0]!r}" if missing else "a heat map needs a `value`"
        raise ValueError(found)
    rows = {name: words.values_of(table, places[key]) for name, key in fields.items()}
    plot = ChartRows(chart, {name: table.columns[places[key]] for name, key in fields.items()}, rows, [])
    rows["k"] = [_kind(value, chart.log) for value in rows[plot.value]]
    _thin(plot)
    for name, values in rows.items():
        rows[name] = [_short(value) for value in values]
    _remark(plot)
    return plot


def _kind(value: Value, log: bool) -> int:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return ODD
    if value == 0 and log:
        return ZERO
    return ODD if log and value < 0 else NUMBER


def _short(value: Value) -> Value:
    """A value for the page: five digits are more than a pixel shows; ten beside 1, where cosines are."""
    if not isinstance(value, float):
        return words.cell(value) if isinstance(value, str) else value
    if not math.isfinite(value):
        return str(value)
    return float(f"{value:.10g}" if 0.9 < abs(value) < 1.1 else f"{value:.5g}")


def _thin(plot: ChartRows) -> None:
    """Keeps, of neighbouring places on x, the one with the largest value, until the rows are few enough."""
    rows, count = plot.rows, len(plot.rows["x"])
    if count <= MAX_ROWS:
        return
    peaks: dict[Value, float] = {}
    for x, value, kind in zip(rows["x"], rows[plot.value], rows["k"], strict=True):
        size = float(value) if kind == NUMBER and isinstance(value, (int, float)) else -math.inf
        size = math.inf if kind == ODD else size  # what is not finite is worth seeing first
        peaks[x] = max(size, peaks.get(x, -math.inf))
    places = list(peaks)
    step = math.ceil(count / MAX_ROWS)
    kept = {max(places[start : start + step], key=peaks.__getitem__) for start in range(0, len(places), step)}
    keep = [index for index, x in enumerate(rows["x"]) if x in kept][:MAX_ROWS]
    for name, values in rows.items():
        rows[name] = [values[index] for index in keep]
    title = plot.columns["x"].title
    plot.remarks.append(f"Of every {step} neighbours on {title} the one with the largest value is drawn.")


def _remark(plot: ChartRows) -> None:
    """Says what zeros and values without a place look like, or that they are not drawn."""
    kinds = plot.rows["k"]
    zeros, odd = kinds.count(ZERO), kinds.count(ODD)
    zero, cross = {
        "heatmap": ("Hollow cells are", "crossed out"),
        "bars": ("Bars replaced by a 0 are", "replaced by a cross"),
    }.get(plot.chart.kind, ("Marks on the line labelled 0 are", "marked by a cross at the upper edge"))
    if zeros:
        plot.remarks.append(f"{zero} exactly 0 ({zeros} of {len(kinds)}); the scale is logarithmic.")
    if odd:
        what = "negative or not finite" if plot.chart.log else "not finite"
        plot.remarks.append(f"{words.count_words(odd, 'value is', 'values are')} {what}, {cross}.")
