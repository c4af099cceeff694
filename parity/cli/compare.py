"""`parity compare`: two traces, tap by tap and token by token."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[Path, typer.Argument(help="Trace of the candidate.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Trace of the reference.", metavar="B")],
    golden: Annotated[Path | None, typer.Option(help="A float64 trace of the same prompts.")] = None,
    taps: Annotated[list[str] | None, typer.Option(help="Tap or glob, repeatable; all by default.")] = None,
    policy: Annotated[Path | None, typer.Option(help="YAML or JSON with limits per tap.")] = None,
    floor: Annotated[Path | None, typer.Option(help="JSON with measured benign differences.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and report.html.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that read large tensors.", min=1)] = 1,
) -> None:
    """Compare two traces: aligned by request, token and tap; names where the difference begins."""
    from parity.cli.output import exit_code, new_folder, print_report, save_report
    from parity.compare import compare as compare_paths
    from parity.compare_report import report_of

    if out is not None:
        new_folder(out)
    comparison = compare_paths(a, b, golden=golden, taps=taps, policy=policy, floor=floor, threads=threads)
    report = report_of(comparison, " ".join(["parity", *sys.argv[1:]]))
    if out is not None:
        save_report(report, out)
    print_report(report)
    if out is not None:
        typer.echo(f"\nreport: {out / 'report.html'}")
    raise typer.Exit(int(exit_code(report)))
