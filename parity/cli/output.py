"""What every command that makes a report does with it: paint it, save it, turn its outcome into an exit code."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from parity.errors import ExitCode, ParityError
from parity.files import write_atomically
from parity.reports.record import Report

REPORTS = ("report.json", "report.html", "report.md")
"""What `save_report` writes into a folder."""


def width() -> int:
    """Columns to paint for: the terminal's, at least 80, at most 120; 80 when piped."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 80), 120) if sys.stdout.isatty() else 80


def complain(message: str) -> None:
    """A message on standard error after `parity: `, as wide as the terminal (80 columns when piped).

    Each of its lines is broken at blanks alone, so that a path or a word of a command stays in one piece, however long
    it is; what goes on from the line before is indented by two.
    """
    columns = shutil.get_terminal_size((80, 24)).columns if sys.stderr.isatty() else 80
    for line in f"parity: {message}".splitlines():
        wrapped = textwrap.wrap(
            line, max(columns, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(wrapped), file=sys.stderr)


def colour() -> bool:
    """Whether to use colour: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def print_report(report: Report) -> None:
    """Paint the report as text on standard output."""
    from parity.reports import to_text

    print(to_text.paint(report, width=width(), colour=colour()), end="")


def save_report(report: Report, folder: Path) -> None:
    """Write report.json, report.html and report.md into a folder, each whole or not at all."""
    from parity.reports import to_html, to_json, to_markdown

    folder.mkdir(parents=True, exist_ok=True)
    for name, paint in zip(REPORTS, (to_json.paint, to_html.paint, to_markdown.paint), strict=True):
        write_atomically(folder / name, paint(report))


@contextmanager
def counting(label: str, unit: str, shown: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, where that is a terminal: call it with done, total, and what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not (shown and console.is_terminal), transient=True
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{label} {what}"
        )


def exit_code(report: Report) -> ExitCode:
    """0 pass or warn, 1 fail or error, 3 where nothing was compared."""
    outcome = report.outcome
    if outcome in ("fail", "error"):
        return ExitCode.FINDING
    return ExitCode.NOTHING_COMPARED if outcome == "skipped" else ExitCode.OK


def report_folder(path: Path, kind: str, about: Mapping[str, str] | None = None) -> Path:
    """A folder for a report of that kind: a new one, or one whose report answers the same question and is replaced.

    `about` names what of the earlier report's subject has to be the same: `{"a (candidate)": "out/gpu"}`.
    Raises ParityError where the folder holds another report, or files of a report's names that are none.
    """
    from parity.reports import schema

    new_folder(path)
    there = [name for name in REPORTS if (path / name).exists()]
    if not there:
        return path
    try:
        if there[0] != REPORTS[0]:  # a page or a text without its record
            raise ParityError(f"a report in {path}", f"{there[0]} without a report.json", "move it away")
        earlier = schema.read_report(path / REPORTS[0])
    except ParityError as error:
        found = f"{there[0]}, which parity did not write or cannot read ({error.found})"
    else:
        about = about or {}
        held = {key: value for key, value in earlier.subject if key in about}
        if earlier.kind == kind and all(_same(held.get(key), about[key]) for key in about):
            return path
        said = "; ".join(f"{key}: {value}" for key, value in held.items() if earlier.kind == kind)
        found = f"the report of another `parity {earlier.kind}`" + (f" ({said})" if said else "")
    raise ParityError(f"a report in {path}", found, "choose another --out, or move that report away first")


def _same(held: object, asked: str) -> bool:
    """Whether a report's subject is what was asked: the same path, to which a report may add how it was read."""
    return str(held) == asked or str(held).startswith(f"{asked} (")


def new_folder(path: Path) -> Path:
    """A folder to write into. Raises ParityError where a file of that name is in the way."""
    if path.exists() and not path.is_dir():
        raise ParityError(f"output folder {path}", "a file of that name", "choose another --out")
    return path
