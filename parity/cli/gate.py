"""`parity gate REPORT`: what a merge or a run may be stopped by, with files for CI services."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from parity.errors import ParityError
from parity.files import write_atomically


def gate(
    report: Annotated[
        Path, typer.Argument(help="A report.json or the folder that holds it, or a run's steps.jsonl.")
    ],
    policy: Annotated[
        Path | None, typer.Option(help="YAML or JSON: limits, allowed skips, expected failures.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="An earlier report of the same command: what got worse, what is missing."),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="File to write JUnit XML to.")] = None,
    summary: Annotated[
        Path | None, typer.Option(help='File to append Markdown to; on GitHub "$GITHUB_STEP_SUMMARY".')
    ] = None,
    annotations: Annotated[
        bool, typer.Option("--annotations", help="Also print GitHub annotations (::error ...).")
    ] = False,
) -> None:
    """Hold a report against a policy and a baseline. A rule that matches nothing fails."""
    from parity.cli.output import exit_code, print_report
    from parity.gating.gate import gate as run_gate
    from parity.reports import to_annotations, to_junit, to_markdown

    # The verdict is printed first: a file that cannot be written does not hide it.
    command = " ".join(["parity", *sys.argv[1:]])
    verdict = run_gate(report, policy=policy, baseline=baseline, command=command)
    print_report(verdict)
    if junit is not None:
        _write(junit, to_junit.paint(verdict))
    if summary is not None:
        _write(summary, to_markdown.paint(verdict), append=True)
    if annotations:
        sys.stdout.flush()
        print(to_annotations.paint(verdict), end="")
    raise typer.Exit(int(exit_code(verdict)))


def _write(path: Path, text: str, *, append: bool = False) -> None:
    """Write a file whole or not at all, or append to it: a service gathers what all steps append.

    Raises ParityError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)
        else:
            write_atomically(path, text)
    except OSError as error:
        raise ParityError(
            f"write {path}", error.strerror or str(error), "name a file that can be written"
        ) from None
