"""`parity check`: everything before training. Without arguments, on the embedded target."""

from pathlib import Path
from typing import Annotated

import typer


def check(
    recipe: Annotated[
        str | None, typer.Argument(help="Training file (`parity train --keys`) or preset; tiny by default.")
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="Trainer to ask: builtin, speculators, specforge, or path/to/file.py:Name."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Ask this probe only; may be given again (`parity probes`).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Name or path of the target; embedded:hybrid by default, or embedded:dense."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts as for capture; built-in ones by default.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="What to hold against torch; fla where a GPU is, else fla-interpreted.")
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(help="How the trainer loads the target; the recipe's, else AutoModelForCausalLM."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision on the hub.")] = None,
    device_map: Annotated[str | None, typer.Option(help="As in transformers: cuda, auto, ...")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each request that are compared.", min=2)] = 160,
    out: Annotated[
        Path, typer.Option(help="Folder for report and traces; only an earlier check's are replaced.")
    ] = Path("parity-report"),
    threads: Annotated[int, typer.Option(help="Threads of each worker.", min=1)] = 1,
) -> None:
    """Check everything before training: dispatch, loading, kernels, serving modes, and the trainer's wiring."""
    from parity.cli.output import exit_code, print_report, report_folder, save_report
    from parity.commands.check import check as run_check

    # The folder is checked before a minute of work; traces go there, then the report in all its forms.
    report = run_check(
        recipe=recipe,
        adapter=adapter,
        only=tuple(only or ()),
        model=model,
        prompts=prompts,
        backend=backend,
        loader=loader,
        revision=revision,
        device_map=device_map,
        max_tokens=max_tokens,
        traces=report_folder(out, "check") / "traces",
        threads=threads,
    )
    save_report(report, out)
    if report.conformance is not None:
        from parity.gating.conformance import save_conformance

        save_conformance(report.conformance, out / "conformance.json")
    print_report(report)
    typer.echo(f"\nreport: {out / 'report.html'}")
    raise typer.Exit(int(exit_code(report)))
