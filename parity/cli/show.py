"""`parity show REPORT`: paint a saved report again."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Form(StrEnum):
    """How a report can be painted."""

    text = "text"
    json = "json"
    html = "html"
    markdown = "markdown"
    junit = "junit"


def show(
    report: Annotated[Path, typer.Argument(help="A report.json, or the folder that holds it.")],
    form: Annotated[Form, typer.Option("--as", help="How to paint it.")] = Form.text,
) -> None:
    """Paint a saved report as text, JSON, HTML, Markdown or JUnit XML."""
    import importlib

    from parity.cli.output import colour, width
    from parity.reports import schema, to_text

    record = schema.read(report / "report.json" if report.is_dir() else report)
    if form is Form.text:
        print(to_text.paint(record, width=width(), colour=colour()), end="")
    else:
        print(importlib.import_module(f"parity.reports.to_{form}").paint(record), end="")
