"""A report for a terminal, a log or a pipe: verdict first, the table of suspicions last.

Everything fits `width` columns; a table that is too wide is split into blocks that repeat its first
columns. Texts are shown as they are, with controls spelled out, so that no report can drive a terminal.

    python -m parity show REPORT.json --as text
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from io import StringIO

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from parity.reports import text_table, words
from parity.reports.record import Finding, Report, Table, Value, declare_columns

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "warn": "yellow",
    "skipped": "cyan",
    "error": "bold magenta",
    "ruled out": "green",
    "found": "bold red",
    "not tested": "cyan",
}
INDENT = 9
"""Columns before a finding's text: the longest outcome and two blanks."""
LONG_LINE = 44
"""Columns from which a piece of evidence gets a line of its own."""


def paint(report: Report, *, width: int = 80, colour: bool = False) -> str:
    """The report as text of at most `width` columns, with a newline at the end.

    What cannot be painted is named where it would stand, and the rest is painted.
    """
    console = Console(
        file=StringIO(),
        width=max(width, 40),  # below, one word a line: unreadable, and no terminal is that narrow
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
        _environ={},  # a painter's text must not depend on COLUMNS, NO_COLOR or FORCE_COLOR
    )
    with console.capture() as capture:
        for name, part in (
            ("head", _head),
            ("findings", _findings),
            ("tables", _tables),
            ("environment", _environment),
            ("notes", _notes),
            ("conformance", _conformance),
            ("suspicions", _suspicions),
        ):
            _print_part(console, name, partial(part, console, report))
    painted = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(painted).strip("\n") + "\n"


def _print_part(console: Console, name: str, print_part: Callable[[], None]) -> None:
    """Prints one part, or what broke in its place."""
    words.paint_or_say(
        name, print_part, lambda text: console.print(Text(words.plain(text), style=STYLES["error"]))
    )


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Rule(Text(title, style="bold"), align="left", style="dim"))


def _head(console: Console, report: Report) -> None:
    """The outcome, what it is about, and how it was made."""
    outcome = report.outcome
    title = words.plain(report.title)
    _print_marked(console, words.label(outcome), Text(title, style="bold"), STYLES.get(outcome, ""))
    _print_indented(console, Text(words.verdict(report)))
    _print_indented(console, Text(words.counts(report)))
    _pairs(console, report.subject)
    _print_indented(console, Text(f"$ {words.plain(report.command)}", style="dim"))
    _print_indented(console, Text(words.when(report), style="dim"))


def _findings(console: Console, report: Report) -> None:
    """Every finding, the worst first."""
    if not report.findings:
        return
    _section(console, "Findings")
    for index, finding in enumerate(words.worst_first(report.findings)):
        if index and finding.outcome != "pass":
            console.print()
        _print_part(console, finding.name, partial(_finding, console, finding))


def _finding(console: Console, finding: Finding) -> None:
    title = Text(words.plain(finding.name), style="bold")
    if finding.fault:
        title.append(f"  fault: {words.plain(finding.fault)}", style="not bold")
    _print_marked(console, words.label(finding.outcome), title, STYLES.get(finding.outcome, ""))
    _print_indented(console, Text(words.plain(finding.sentence)))
    if finding.outcome == "pass":
        return  # its numbers are in its sentence; the rest is in the page and the JSON
    _pairs(console, finding.evidence)
    if finding.next_step:
        _print_indented(console, Text(f"next: {words.plain(finding.next_step)}"))
    if finding.tables:
        _print_indented(console, Text("see: " + words.plain(", ".join(finding.tables)), style="dim"))


def _print_marked(console: Console, mark: str, text: Text, style: str) -> None:
    """A word in the margin, with a text beside it that wraps beside it too."""
    wrapped = text.wrap(console, console.width - INDENT)
    for index, line in enumerate(wrapped):
        margin = Text(mark.ljust(INDENT) if index == 0 else " " * INDENT, style=style)
        console.print(margin + line)


def _print_indented(console: Console, text: Text) -> None:
    console.print(Padding(text, (0, 0, 0, INDENT)))


def _pairs(console: Console, pairs: tuple[tuple[str, Value], ...]) -> None:
    """Names and values, several on a line where they are short, none broken across lines."""
    line = ""
    for name, value in pairs:
        piece = f"{words.plain(name)} = {words.cell(value)}"
        joined = f"{line} · {piece}" if line else piece
        if (
            not words.is_block(value)
            and cell_len(piece) <= LONG_LINE
            and cell_len(joined) <= console.width - INDENT
        ):
            line = joined
            continue
        if line:
            _print_indented(console, Text(line, style="dim"))
        line = ""
        if words.is_block(value):
            _block(console, name, str(value))
        elif cell_len(piece) <= LONG_LINE:
            line = piece
        else:
            _print_indented(console, Text(piece, style="dim"))
    if line:
        _print_indented(console, Text(line, style="dim"))


def _block(console: Console, name: str, value: str) -> None:
    """A text of several lines, for example the end of a stderr."""
    _print_indented(console, Text(f"{words.plain(name)}:", style="dim"))
    for line in words.lines(value):
        console.print(Padding(Text(f"| {line}", style="dim"), (0, 0, 0, INDENT + 2)))


def _tables(console: Console, report: Report) -> None:
    """The tables' rows; of those marked as detail only that they exist."""
    for table in report.tables:
        if table.detail:
            continue
        _section(console, words.plain(table.title))
        _print_part(console, table.name, partial(_table, console, table))
    details = [table for table in report.tables if table.detail]
    if details:
        rows = words.count_words(sum(len(table.rows) for table in details), "row")
        names = ", ".join(_together(table.name for table in details))
        console.print()
        console.print(
            Text(words.plain(f"More tables in the page and the JSON ({rows}): {names}"), style="dim")
        )


def _together(names: Iterable[str]) -> list[str]:
    """Names, those of three and more that begin alike (`timeline.loss`, `tensors@1`) in one with their number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.split(r"[.@]", name)[0], []).append(name)
    return [
        name
        for first, all_ in groups.items()
        for name in (all_ if len(all_) < 3 else [f"{first} ({len(all_)} tables)"])
    ]


def _table(console: Console, table: Table) -> None:
    for line in text_table.paint(table, width=console.width, styles=STYLES):
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    if table.caption:
        console.print(Text(words.plain(table.caption), style="dim"))


def _environment(console: Console, report: Report) -> None:
    """Only where it is what was asked for; elsewhere the JSON and the page have it."""
    if report.kind != "env" or not report.environment:
        return
    _section(console, "Environment")
    columns = declare_columns("name | value")
    _table(console, Table(name="environment", title="", columns=columns, rows=report.environment))


def _notes(console: Console, report: Report) -> None:
    if report.notes:
        _section(console, "Notes")
        for note in report.notes:
            console.print(Padding(Text(words.plain(note)), (0, 0, 0, 2)))


def _conformance(console: Console, report: Report) -> None:
    """What the wiring was measured to be, a sentence a probe."""
    if report.conformance is None:
        return
    _section(console, "Conformance statement")
    columns = declare_columns("probe | said measured")
    _table(console, Table(name="conformance", title="", columns=columns, rows=report.conformance.sentences))


def _suspicions(console: Console, report: Report) -> None:
    """What a user may suspect, with the answer and the reason."""
    if not report.suspicions:
        return
    _section(console, f"Suspicions: {words.tally(report.suspicions)}")
    columns = declare_columns("name suspicion | verdict:outcome | because")
    rows = tuple(
        (each.name, each.verdict, because) for each, because in words.reasons_once(report.suspicions)
    )
    _table(console, Table(name="suspicions", title="", columns=columns, rows=rows))
