"""A report as GitHub Markdown, for a step summary or a comment.

GitHub takes at most 1 MiB for a step's summary, so long tables are cut and tables of detail only named.

    python -m parity show REPORT.json --as markdown >> "$GITHUB_STEP_SUMMARY"
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from parity.reports import words
from parity.reports.record import Finding, Report, Table, Value

MARKDOWN_ROWS = 100
"""Rows shown of one table."""
MARKDOWN_BYTES = 1_000_000
"""A little under the 1 MiB at which GitHub drops a step's summary altogether."""

_SPECIAL = re.compile(r"[\\`*_\[\]#|~$]|^[-+=:]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def paint(report: Report) -> str:
    """The report as Markdown, with a newline at the end. What cannot be painted is named in its place."""
    parts: tuple[tuple[str, Callable[[Report], Iterator[str]]], ...] = (
        ("head", _head),
        ("findings", _findings),
        ("suspicions", _suspicions),
        ("conformance", _conformance),
        ("tables", _tables),
        ("environment", _environment),
        ("notes", _notes),
    )
    blocks: list[str] = []
    room = MARKDOWN_BYTES
    for name, part in parts:
        for block in _blocks(name, partial(part, report)):
            room -= len(block.encode()) + 2
            if room < 0:
                blocks.append("*The rest is in the JSON and HTML reports; GitHub shows no longer summary.*")
                return "\n\n".join(blocks) + "\n"
            blocks.append(block)
    return "\n\n".join(blocks) + "\n"


def _blocks(name: str, make_blocks: Callable[[], Iterator[str]]) -> list[str]:
    """The blocks of one part; where one breaks, those before it and what broke."""
    blocks: list[str] = []

    def collect() -> None:
        for block in make_blocks():
            blocks.append(block)

    words.paint_or_say(name, collect, lambda text: blocks.append(f"*{_escape(text)}*"))
    return blocks


def _escape(text: str) -> str:
    """A text that Markdown shows as it is: no markup, no HTML, no mention; also inside a table."""
    text = re.sub("[&<>@]", lambda match: _ENTITIES[match[0]], words.plain(text))
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", text)


def _code(text: str) -> str:
    """An inline code span, fenced by more backticks than the text holds in a row."""
    text = words.plain(text)
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    blank = " " if "`" in text else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def _grid(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A GitHub table of cells that are escaped already."""
    rule = " | ".join("--:" if numeric else ":--" for numeric in right)
    body = "".join(f"\n| {' | '.join(row)} |" for row in rows)
    return f"| {' | '.join(headings)} |\n| {rule} |{body}"


def _pairs(pairs: Sequence[tuple[str, Value]]) -> str:
    """Names and values on one line."""
    short = [(name, value) for name, value in pairs if not words.is_block(value)]
    return " · ".join(f"{_escape(name)} = {_escape(words.cell(value))}" for name, value in short)


def _head(report: Report) -> Iterator[str]:
    yield f"## {words.label(report.outcome)}: {_escape(report.title)}"
    yield f"**{_escape(words.verdict(report))}** {words.counts(report)}."
    subject = _pairs(report.subject)
    if subject:
        yield subject
    yield f"{_code(report.command)}, {_escape(words.when(report))}"


def _findings(report: Report) -> Iterator[str]:
    """A table of all findings, then the evidence of each that did not pass; that of a pass is folded."""
    if not report.findings:
        return
    yield "### Findings"
    findings = words.worst_first(report.findings)
    rows = [
        (f"**{words.label(each.outcome)}**", _escape(each.name), _escape(each.sentence)) for each in findings
    ]
    yield _grid(("outcome", "finding", "what was found"), rows, (False, False, False))
    passed = [each for each in findings if each.outcome == "pass" and (each.evidence or each.tables)]
    for finding in findings:
        if finding.outcome != "pass":
            yield _finding(finding)
    if passed:
        inside = "\n\n".join(_finding(finding) for finding in passed)
        yield f"<details><summary>Evidence of what passed</summary>\n\n{inside}\n\n</details>"


def _finding(finding: Finding) -> str:
    """One finding with its evidence and the next step."""
    fault = f" (fault: {_escape(finding.fault)})" if finding.fault else ""
    title = f"**{words.label(finding.outcome)} {_escape(finding.name)}**{fault}"
    lines = [f"{title}: {_escape(finding.sentence)}"]
    evidence = _pairs(finding.evidence)
    if evidence:
        lines.append(evidence)
    lines += [_block(name, str(value)) for name, value in finding.evidence if words.is_block(value)]
    if finding.next_step:
        lines.append(f"Next: {_escape(finding.next_step)}")
    if finding.tables:
        lines.append("See: " + ", ".join(_escape(name) for name in finding.tables))
    return "\n\n".join(lines)


def _block(name: str, text: str) -> str:
    """A text of several lines in a fence that it cannot close."""
    body = "\n".join(words.lines(text))
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{_escape(name)}:\n\n{fence}text\n{body}\n{fence}"


def _suspicions(report: Report) -> Iterator[str]:
    if not report.suspicions:
        return
    yield f"### Suspicions: {words.tally(report.suspicions)}"
    rows = [
        (_escape(each.name), f"**{_escape(each.verdict)}**", _escape(because))
        for each, because in words.reasons_once(report.suspicions)
    ]
    yield _grid(("suspicion", "verdict", "because"), rows, (False, False, False))


def _conformance(report: Report) -> Iterator[str]:
    if report.conformance is not None:
        yield "### Conformance statement"
        rows = [(_escape(probe), _escape(sentence)) for probe, sentence in report.conformance.sentences]
        yield _grid(("probe", "measured"), rows, (False, False))


def _tables(report: Report) -> Iterator[str]:
    """Each table, folded; those of detail only named."""
    for table in report.tables:
        if table.detail:
            continue
        yield from _blocks(table.name, partial(_table, table))
    details = [table for table in report.tables if table.detail]
    if details:
        names = [f"{_escape(t.title)} ({words.count_words(len(t.rows), 'row')})" for t in details]
        yield f"More tables, in the HTML and JSON reports: {', '.join(names)}"


def _table(table: Table) -> Iterator[str]:
    cells = [
        [_escape(text) for text in words.column_cells(words.values_of(table, index, slice(MARKDOWN_ROWS)))]
        for index in range(len(table.columns))
    ]
    headings = [_escape(words.heading(column)) for column in table.columns]
    right = [words.is_numeric(column) for column in table.columns]
    grid = _grid(headings, list(zip(*cells, strict=True)), right)
    more = len(table.rows) - MARKDOWN_ROWS
    note = f"\n\n{more} more rows, in the JSON and HTML reports." if more > 0 else ""
    caption = f"\n\n{_escape(table.caption)}" if table.caption else ""
    title = _summary(table.title)
    yield f"<details><summary>{title}</summary>\n\n{grid}{note}{caption}\n\n</details>"


def _summary(text: str) -> str:
    """A text inside an HTML tag, where backslashes escape nothing."""
    return re.sub("[&<>@]", lambda match: _ENTITIES[match[0]], words.plain(text))


def _environment(report: Report) -> Iterator[str]:
    if report.environment:
        rows = [(_escape(name), _escape(words.cell(value))) for name, value in report.environment]
        grid = _grid(("name", "value"), rows, (False, False))
        yield f"<details><summary>Environment</summary>\n\n{grid}\n\n</details>"


def _notes(report: Report) -> Iterator[str]:
    if report.notes:
        yield "### Notes"
        yield "\n".join(f"- {_escape(note)}" for note in report.notes)
