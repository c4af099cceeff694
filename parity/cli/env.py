"""`parity env`: what this machine would run, and how two machines or runs differ."""

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from parity.cli.show import ReportFormat

if TYPE_CHECKING:
    from parity.reports.record import Report


def env(
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="How two sides differ: a report, a trace, `parity env --as json` of another machine, or `here`.",
        ),
    ] = None,
    form: Annotated[ReportFormat, typer.Option("--as", help="How to paint it.")] = ReportFormat.text,
) -> None:
    """Show versions, devices, variables that can change numbers, and which backends run here."""
    from parity.cli.show import paint

    if diff is None or "here" in diff:
        import torch  # noqa: F401 (imported so that devices are listed too)
    if diff is None:
        report = machine()
        print(_plain(report) if form is ReportFormat.text else paint(report, form), end="")
        return
    from parity.gating import environment as environment_diff

    a, b = (environment_diff.side_of(side) for side in diff)
    print(paint(environment_diff.environment_report(a, b, created=_now(), command=_command()), form), end="")


def machine() -> "Report":
    """This machine as a report of kind `env`: what `--diff` reads on another one."""
    from parity.environment import environment
    from parity.model.target import backends
    from parity.reports.record import Report, Table, declare_columns

    missing = {name: backends.missing(backends.parse_backend(name)) for name in backends.SHORTHANDS}
    return Report(
        kind="env",
        title="What this machine would run",
        created=_now(),
        command=_command(),
        subject=(),
        findings=(),
        tables=(
            Table(
                name="backends",
                title="Backends",
                columns=declare_columns("backend | runs:flag runs here | because"),
                rows=tuple((name, why is None, why) for name, why in missing.items()),
            ),
        ),
        environment=tuple(environment().items()),
    )


def _plain(report: "Report") -> str:
    """The machine as lines of names and values: no verdict, since nothing was compared."""
    lines = [f"{name:24} {value}" for name, value in report.environment]
    for name, runs, why in report.table("backends").rows:
        lines.append(f"backend {name!s:16} {'runs here' if runs else f'does not run here: {why}'}")
    at = len(report.environment)
    return "\n".join([*lines[:at], "", *lines[at:]]) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _command() -> str:
    return " ".join(["parity", *sys.argv[1:]])
