"""`parity compare`: two traces, or dumps of other tools, tap by tap and token by token."""

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from parity.errors import ParityError

if TYPE_CHECKING:
    from parity.reports.record import Report


class RowAlignmentChoice(StrEnum):
    """How rows without token ids are paired."""

    tokens = "tokens"
    order = "order"


def compare(
    a: Annotated[Path | None, typer.Argument(help="Trace or dump of the candidate.", metavar="A")] = None,
    b: Annotated[Path | None, typer.Argument(help="Trace or dump of the reference.", metavar="B")] = None,
    golden: Annotated[Path | None, typer.Option(help="A float64 trace of the same prompts.")] = None,
    taps: Annotated[list[str] | None, typer.Option(help="Tap or glob, repeatable; all by default.")] = None,
    map_file: Annotated[
        Path | None,
        typer.Option("--map", help="YAML that names what a dump does not say: layers, axes, files."),
    ] = None,
    align: Annotated[
        RowAlignmentChoice | None,
        typer.Option(help="Pair rows by token ids, or by order where a dump has none."),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="YAML or JSON with limits per tap.")] = None,
    floor: Annotated[Path | None, typer.Option(help="JSON with measured benign differences.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for report.json and report.html. A report of the same A and B there is replaced, "
            "anything else is refused."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that read large tensors.", min=1)] = 1,
    live: Annotated[
        str | None,
        typer.Option(
            help="A model on which to run experiments: they decide between two faults. Works without A and B.",
            metavar="MODEL",
        ),
    ] = None,
) -> None:
    """Compare two traces or dumps: aligned by request, token and tap; names where the difference begins.

    Dumps of speculators, SpecForge, ModelOpt, vLLM and SGLang, safetensors and npy files are told apart by content.
    Under torchrun the ranks share the work. With --out an interrupted comparison goes on where it stopped.
    Two conformance.json of checks are compared fact by fact.
    """
    from parity.cli.output import counting, report_folder
    from parity.commands.compare import compare_sides, report_sides
    from parity.diagnosis.kinds import diagnose_or_why
    from parity.model.training.distributed import join, leave

    if a is not None and b is not None and live is None:
        from parity.gating.conformance import compare_statements, is_statement, read_conformance

        if is_statement(a) and is_statement(b):
            files = {"file of A": str(a), "file of B": str(b)}
            if out is not None:
                report_folder(out, "compare", files)
            report = compare_statements(read_conformance(a), read_conformance(b))
            _show(replace(report, subject=(*report.subject, *files.items())), out)
    if out is not None:
        sides = {"a (candidate)": str(a), "b (reference)": str(b)}
        report_folder(out, "compare", {"model asked for": str(live)} if a is None else sides)
    command = " ".join(["parity", *sys.argv[1:]])
    if live is not None:
        from parity.live.report import add_experiments, prepare, tokens_of
        from parity.live.report import run_live as experiments

        prepare()
    if a is None or b is None:
        if live is None or a is not None:
            raise ParityError("a comparison", "less than two traces", "name A and B, or a model with --live")
        with counting("live", "experiments", True) as progress:
            report = experiments(live, command=command, progress=progress)
        _show(replace(report, subject=(*report.subject, ("model asked for", live))), out)
    ranks = join("cpu")
    try:
        with counting("compare", "tokens", ranks.first) as progress:
            comparison, pair = compare_sides(
                a,
                b,
                golden=golden,
                taps=taps,
                policy=policy,
                floor=floor,
                mapping=map_file,
                align=align.value if align is not None else None,
                threads=threads,
                ranks=ranks,
                work=out.with_name(out.name + ".partial") if out is not None else None,
                progress=progress,
            )
        leave(together=True)
    finally:
        leave()  # after an error: the others meet it, too
    if not ranks.first:  # the first rank speaks, and its exit code is torchrun's
        raise typer.Exit(0)
    named = diagnose_or_why(comparison, pair.a.trace, pair.b.trace)
    report = report_sides(comparison, pair, command, diagnosis=named)
    if live is not None:
        begins = comparison.first_bad.request if comparison.first_bad is not None else None
        with counting("live", "experiments", True) as progress:
            ids = tokens_of(pair.a.trace.requests, begins)
            report = add_experiments(report, experiments(live, ids=ids, diagnosis=named, progress=progress))
    _show(report, out)


def _show(report: "Report", out: Path | None) -> NoReturn:
    """Save and print a report, and end with its exit code."""
    from parity.cli.output import exit_code, print_report, save_report

    if out is not None:
        save_report(report, out)
    print_report(report)
    if out is not None:
        typer.echo(f"\nreport: {out / 'report.html'}")
    raise typer.Exit(int(exit_code(report)))
