"""A report as one self-contained page: no network, no other file, under 3 MB, dark and light.

The page is `page.html` with its slots filled. Everything that comes from the report is escaped, and a
Content-Security-Policy lets nothing run but the page's own two scripts, by their hashes, and nothing load.

    python -m parity show REPORT.json --as html > report.html
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

import altair as alt
import vl_convert

from parity.reports import charts, words
from parity.reports.record import Column, Conformance, Finding, Report, Suspicion, Table, Value
from parity.reports.schema import REPORT_SCHEMA

PAGE_BYTES = 2_900_000
"""The whole page. What does not fit is cut from the tables, and said there."""
LEAST_ROWS = 12
"""A shorter table gets no search box."""
FEW, SHORT = 6, 12
"""Places on the x axis up to which a chart fits a phone, and letters of a name beside a lying bar."""
LONG_CELL = 40
"""Characters from which the texts of a column are wrapped."""
OPEN_TABLE_ROWS = 40
"""A table without a chart is open up to this many rows."""


Drawn = charts.ChartDrawing | str | None
"""A table's chart, why it could not be drawn, or None where the table has none."""


@dataclass(frozen=True, slots=True)
class _Ids:
    """Where on the page a finding or a table stands, by its name."""

    findings: dict[str, str]
    tables: dict[str, str]


def paint(report: Report) -> str:
    """The page. What cannot be painted is named in its place, and the rest is painted."""
    ids = _Ids(
        {finding.name: f"finding-{index}" for index, finding in enumerate(report.findings)},
        {table.name: f"table-{index}" for index, table in enumerate(report.tables)},
    )
    drawings = {table.name: _drawing(table) for table in report.tables}
    drawn = {name: item for name, item in drawings.items() if isinstance(item, charts.ChartDrawing)}
    data = _script_json({ids.tables[name]: _chart_data(drawing) for name, drawing in drawn.items()})
    bundle = _bundle() if drawn else ""
    slots = {
        "page_title": _text(f"{words.label(report.outcome)}: {report.title}"),
        "head": _paint("head", lambda: _head(report)),
        "nav": _nav(report),
        "suspicions": _paint("suspicions", lambda: _suspicions(report.suspicions, ids)),
        "conformance": _paint("conformance", lambda: _conformance(report.conformance)),
        "findings": _paint("findings", lambda: _findings(report, ids)),
        "environment": _paint("environment", lambda: _environment(report)),
        "notes": _paint("notes", lambda: _notes(report)),
        "schema": REPORT_SCHEMA,
        "data": data,
        "bundle": f"<script>{bundle}</script>" if bundle else "",
    }
    template = resources.files("parity.reports").joinpath("page.html").read_text(encoding="utf-8")
    used = len(template) + sum(len(part.encode()) for part in slots.values())
    slots["tables"] = _tables(report, ids, drawings, PAGE_BYTES - used)
    slots["policy"] = _policy(template, bundle)
    return re.sub("@@([a-z_]+)@@", lambda slot: slots[slot[1]], template)  # once: no slot is filled twice


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed, of the version for which altair writes. Takes a second to make."""
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    script = vl_convert.javascript_bundle("window.vegaEmbed=vegaEmbed;", vl_version=version)
    assert "</script" not in script and "<!--" not in script
    return script


def _policy(template: str, bundle: str) -> str:
    """The Content-Security-Policy: the page's scripts by hash, inline styles, nothing else."""
    scripts = re.findall("<script>(.+?)</script>", template, re.DOTALL) + ([bundle] if bundle else [])
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    rules = (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return f"{'; '.join(rules)}; script-src {allowed}"


def _text(text: object) -> str:
    """Any text or value, safe between tags and in a quoted attribute."""
    return html.escape(words.plain(text) if isinstance(text, str) else str(text))


def _cell(value: Value) -> str:
    return html.escape(words.cell(value))


def _script_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _paint(name: str, paint_part: Callable[[], str]) -> str:
    """One part of the page, or what broke in its place."""
    return words.paint_or_say(name, paint_part, _broken)


def _broken(text: str) -> str:
    return f'<p class="broken">{_text(text)}</p>'


def _badge(word: str) -> str:
    """An outcome or a verdict: its word, with a colour and a mark besides."""
    return f'<span class="badge {re.sub("[^a-z]+", "-", word.lower())}">{_text(word)}</span>'


def _head(report: Report) -> str:
    """The verdict, in a word and a sentence; what was examined; how the report was made."""
    subject = "".join(_evidence(name, value) for name, value in report.subject)
    return (
        f'<p class="kicker">parity {_text(report.kind)}</p><h1>{_text(report.title)}</h1>'
        f'<p class="verdict">{_badge(report.outcome)} <span>{_text(words.verdict(report))}</span></p>'
        f'<p class="counts">{_text(words.counts(report))}</p>'
        + (f'<dl class="subject">{subject}</dl>' if subject else "")
        + f'<p class="made"><code>{_text(report.command)}</code> <span>{_text(words.when(report))}</span></p>'
    )


def _nav(report: Report) -> str:
    """Links to the sections that are there."""
    sections = (
        ("suspicions", "Suspicions", report.suspicions),
        ("conformance", "Conformance", report.conformance),
        ("findings", "Findings", report.findings),
        ("measurements", "Measurements", report.tables),
        ("environment", "Environment", report.environment),
        ("notes", "Notes", report.notes),
    )
    return "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title, there in sections if there)


def _section(name: str, title: str, body: str) -> str:
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{body}</section>'


def _links(names: tuple[str, ...], places: dict[str, str]) -> str:
    """Names as links to where they stand; a name that stands nowhere stays a text."""
    links = [f'<a href="#{places[n]}">{_text(n)}</a>' if n in places else _text(n) for n in names]
    return ", ".join(links)


def _suspicions(suspicions: tuple[Suspicion, ...], ids: _Ids) -> str:
    if not suspicions:
        return ""
    rows = []
    for each, because in words.reasons_once(suspicions):
        links = f' <span class="from">{_links(each.findings, ids.findings)}</span>' if each.findings else ""
        rows.append(
            f'<tr><th scope="row">{_text(each.name)}</th><td>{_badge(each.verdict)}</td>'
            f"<td>{_text(because)}{links}</td></tr>"
        )
    body = (
        f'<table class="suspicions"><caption>{_text(words.tally(suspicions))}</caption><thead><tr>'
        '<th scope="col">Suspicion</th><th scope="col">Verdict</th><th scope="col">Because</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )
    return _section("suspicions", "Suspicions", body)


def _conformance(conformance: Conformance | None) -> str:
    """What the wiring was measured to be: a sentence a probe."""
    if conformance is None:
        return ""
    said = "".join(f"<dt>{_text(probe)}</dt><dd>{_text(line)}</dd>" for probe, line in conformance.sentences)
    about = (
        f"<p>{_text(conformance.trainer)}, recipe <code>{_text(conformance.recipe)}</code>, as measured.</p>"
    )
    return _section("conformance", "Conformance statement", f'{about}<dl class="said">{said}</dl>')


def _findings(report: Report, ids: _Ids) -> str:
    if not report.findings:
        return ""
    cards = [
        _paint(finding.name, partial(_finding, finding, ids))
        for finding in words.worst_first(report.findings)
    ]
    return _section("findings", "Findings", "".join(cards))


def _finding(finding: Finding, ids: _Ids) -> str:
    """One finding; open unless it passed."""
    is_open = "" if finding.outcome == "pass" else " open"
    fault = f' <span class="fault">fault: {_text(finding.fault)}</span>' if finding.fault else ""
    evidence = "".join(_evidence(name, value) for name, value in finding.evidence)
    parts = [f"<dl>{evidence}</dl>" if evidence else ""]
    if finding.next_step:
        parts.append(f'<p class="next"><b>Next</b> {_text(finding.next_step)}</p>')
    if finding.tables:
        parts.append(f'<p class="from">See {_links(finding.tables, ids.tables)}</p>')
    body = "".join(parts) or '<p class="from">No further evidence.</p>'
    sentence = f'<span class="sentence">{_text(finding.sentence)}</span>'
    summary = f"{_badge(finding.outcome)} <h3>{_text(finding.name)}</h3>{fault} {sentence}"
    return (
        f'<details class="finding" id="{ids.findings[finding.name]}"{is_open}><summary>{summary}</summary>'
        f'<div class="body">{body}</div></details>'
    )


def _evidence(name: str, value: Value) -> str:
    if words.is_block(value):
        block = html.escape("\n".join(words.lines(str(value))))
        return f'<div class="block"><dt>{_text(name)}</dt><dd><pre tabindex="0">{block}</pre></dd></div>'
    return f"<div><dt>{_text(name)}</dt><dd>{_cell(value)}</dd></div>"


def _drawing(table: Table) -> Drawn:
    """The table's chart, or why there is none; a chart that cannot be drawn takes no table with it."""
    return words.paint_or_say("chart", partial(charts.draw, table), str)


def _chart_data(drawing: charts.ChartDrawing) -> dict[str, object]:
    """A drawing for the page; texts that repeat are written once."""
    rows: dict[str, object] = {}
    for name, values in drawing.rows.items():
        distinct = list(dict.fromkeys(values))
        if any(isinstance(value, str) for value in values) and 2 * len(distinct) < len(values):
            place = {value: index for index, value in enumerate(distinct)}
            rows[name] = {"of": distinct, "at": [place[value] for value in values]}
        else:
            rows[name] = values
    return {"spec": drawing.spec, "rows": rows, "tips": drawing.tips}


def _tables(report: Report, ids: _Ids, drawings: dict[str, Drawn], room: int) -> str:
    """All tables with their charts. Each may take its share of the room that is left on the page."""
    parts = []
    for index, table in enumerate(report.tables):
        share = max(0, room) // (len(report.tables) - index)
        where, drawing = ids.tables[table.name], drawings[table.name]
        part = _paint(table.name, partial(_table, table, where, drawing, share))
        room -= len(part.encode())
        parts.append(part)
    body = f'<div class="tables">{"".join(parts)}</div>'
    return _section("measurements", "Measurements", body) if parts else ""


def _table(table: Table, where: str, drawing: Drawn, share: int) -> str:
    """One table under its title, with its chart above it."""
    rows, shown = _rows(table, share)
    size = words.count_words(len(table.rows), "row")
    cut = "" if shown == len(table.rows) else f" The first {shown} are shown; the JSON report holds all."
    is_open = " open" if drawing is None and len(table.rows) <= OPEN_TABLE_ROWS else ""
    search = _search(where) if len(table.rows) >= LEAST_ROWS else ""
    caption = f'<p class="about">{_text(table.caption)}</p>' if table.caption else ""
    title = _text(table.title)
    half = " half" if table.chart is not None and table.chart.kind == "timeline" else ""
    return (
        f'<section class="table{half}" id="{where}"><h3>{title}</h3>{caption}{_figure(table, where, drawing)}'
        f'<details{is_open}><summary>Table <span class="from">{size}.{cut}</span></summary>'
        f"{_column_styles(table, where)}{search}"
        f'<div class="scroll" role="region" aria-label="{title}, table" tabindex="0">'
        f'<table class="data"><caption>{title}</caption>'
        f"<thead><tr>{_headings(table.columns)}</tr></thead><tbody>{rows}</tbody></table></div></details></section>"
    )


def _column_styles(table: Table, where: str) -> str:
    """A table's own rules: numbers on the right (also in the first column), long texts wrapped."""
    rules = ""
    for number, column in enumerate(table.columns, 1):
        cells = f"#{where} tbody>tr>:nth-child({number})"
        if words.is_numeric(column):
            rules += f"{cells}{{text-align:right}}"
        elif any(len(str(value)) > LONG_CELL for value in words.values_of(table, number - 1)):
            rules += f"{cells}{{white-space:normal;min-width:14rem;overflow-wrap:anywhere}}"
    return f"<style>{rules}</style>" if rules else ""


def _search(where: str) -> str:
    """The box that searches the rows of the table inside the element `where`."""
    return (
        f'<p class="search"><label>Search the rows <input type="search" data-table="{where}" '
        f'autocomplete="off"></label> <span role="status"></span></p>'
    )


def _headings(columns: tuple[Column, ...]) -> str:
    """The column headings, each a button that sorts by it."""
    cells = []
    for column in columns:
        unit = f" <small>{_text(column.unit)}</small>" if column.unit else ""
        numeric = ' class="n"' if words.is_numeric(column) else ""
        cells.append(
            f'<th scope="col"{numeric}><button type="button">{_text(column.title)}{unit}</button></th>'
        )
    return "".join(cells)


def _rows(table: Table, share: int) -> tuple[str, int]:
    """The rows that fit in `share` bytes, and how many they are. HTML needs no closing tags here."""
    most = slice(max(0, share) // len('<tr><th scope="row">'))  # no row is shorter: the rest cannot fit
    columns = [words.column_cells(words.values_of(table, index, most)) for index in range(len(table.columns))]
    outcomes = {index for index, column in enumerate(table.columns) if column.kind == "outcome"}
    lines: list[str] = []
    for row in zip(*columns, strict=True):
        cells = [_badge(text) if index in outcomes else html.escape(text) for index, text in enumerate(row)]
        line = f'<tr><th scope="row">{cells[0]}' + "".join(f"<td>{text}" for text in cells[1:])
        share -= len(line.encode())
        if share < 0:
            break
        lines.append(line)
    return "".join(lines), len(lines)


def _figure(table: Table, where: str, drawing: Drawn) -> str:
    """The place of a chart, with its caption."""
    if drawing is None or table.chart is None:
        return ""
    if isinstance(drawing, str):
        return _broken(drawing)
    names = {str(value) for value in drawing.rows["x"]}
    # a few short names fit on a phone; long ones beside lying bars would leave the bars no room
    small = len(names) <= FEW and (table.chart.kind != "bars" or max(map(len, names)) <= SHORT)
    kind = _text(table.chart.kind) + (" small" if small else "")
    caption = " ".join(part for part in (table.chart.caption, *drawing.remarks) if part)
    return (
        f'<figure><div class="chart-box"><div class="chart {kind}" data-chart="{where}" role="img" '
        f'aria-label="{_text(drawing.label)}"></div></div>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _environment(report: Report) -> str:
    if not report.environment:
        return ""
    pairs = [(_text(name), _cell(value)) for name, value in report.environment]
    rows = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in pairs)
    caption = "<caption>Versions, devices and variables that can change numbers</caption>"
    head = '<thead><tr><th scope="col">Name</th><th scope="col">Value</th></tr></thead>'
    table = f'<table class="data environment">{caption}{head}<tbody>{rows}</tbody></table>'
    box = f'<div class="scroll" role="region" aria-label="Environment, table" tabindex="0">{table}</div>'
    body = _search("environment") + box
    return _section("environment", "Environment", body)


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    items = "".join(f"<li>{_text(note)}</li>" for note in report.notes)
    return _section("notes", "Notes", f"<ul>{items}</ul>")
