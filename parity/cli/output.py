"""What every command that makes a report does with it: paint it, save it, turn its outcome into an exit code."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parity.errors import ExitCode, ParityError
from parity.reports.record import Report


def width() -> int:
    """Columns to paint for: the terminal's, at least 80, at most 120; 80 when piped."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, 80), 120) if sys.stdout.isatty() else 80


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
    for name, paint in (
        ("report.json", to_json.paint),
        ("report.html", to_html.paint),
        ("report.md", to_markdown.paint),
    ):
        temporary = folder / (name + ".writing")
        temporary.write_text(paint(report), encoding="utf-8")
        os.replace(temporary, folder / name)


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


def new_folder(path: Path) -> Path:
    """A folder to write into. Raises ParityError where a file of that name is in the way."""
    if path.exists() and not path.is_dir():
        raise ParityError(f"output folder {path}", "a file of that name", "choose another --out")
    return path
