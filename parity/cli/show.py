"""`parity show REPORT`: paint a saved report again."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from parity.reports.record import Report


class ReportFormat(StrEnum):
    """How a report can be painted."""

    text = "text"
    json = "json"
    html = "html"
    markdown = "markdown"
    junit = "junit"


def show(
    report: Annotated[
        Path, typer.Argument(help="A report.json or the folder that holds it, or a run's steps.jsonl.")
    ],
    form: Annotated[ReportFormat, typer.Option("--as", help="How to paint it.")] = ReportFormat.text,
    parquet: Annotated[
        Path | None,
        typer.Option(help="Folder to write every table to as parquet, instead of painting.", metavar="DIR"),
    ] = None,
) -> None:
    """Paint a saved report as text, JSON, HTML, Markdown or JUnit XML, or write its tables as parquet."""
    from parity.reports import from_steps

    if parquet is None:
        print(paint(from_steps.read_steps_report(report), form), end="")
        return
    from parity.reports import step_log, to_frame

    steps = from_steps.steps_file(report)
    source = from_steps.read_steps_report(report) if steps is None else step_log.read_step_log(steps)
    for path in to_frame.write_frames(source, parquet):
        typer.echo(path)


def paint(report: "Report", form: ReportFormat) -> str:
    """The report in that form; text in the terminal's width and colours."""
    import importlib

    from parity.cli.output import colour, width
    from parity.reports import to_text

    if form is ReportFormat.text:
        return to_text.paint(report, width=width(), colour=colour())
    painted: str = importlib.import_module(f"parity.reports.to_{form}").paint(report)
    return painted
