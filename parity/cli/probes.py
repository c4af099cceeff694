"""`parity probes`: the list of probes, with what each guards and needs, and how well they find planted faults."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer


def probes(
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Show instead which planted faults each probe found and named.")
    ] = False,
) -> None:
    """List the probes, what each guards and needs, and the kinds of difference that are told apart."""
    import textwrap

    from parity.diagnosis.records import MEANING
    from parity.probes.table import TABLE

    if matrix:
        _print_matrix()
        return

    def show(text: str, *, names: bool = False) -> None:
        """A paragraph under the line before; names stay in one piece."""
        wrapper = textwrap.TextWrapper(78, initial_indent="  ", subsequent_indent="    ")
        wrapper.break_on_hyphens = not names
        typer.echo(wrapper.fill(text))

    # A probe's paragraphs are made from its entry, so that this list cannot fall behind.
    for entry in TABLE:
        typer.echo(f"{entry.name} ({'asks a trainer' if entry.asks == 'trainer' else 'reads traces'})")
        show(f"guards: {entry.guards}")
        show(f"needs: {entry.needs_text}")
        kinds = ("and kinds of difference, below",) if entry.names_kinds else ()
        show(f"names: {', '.join((*entry.faults, *kinds))}", names=True)
    typer.echo("kinds of difference between two traces (named by `parity compare` and by")
    typer.echo("  the probes that compare; `A or B` where only `--live` can decide)")
    for kind, meaning in MEANING.items():
        show(f"{kind}: {meaning}")


def _print_matrix() -> None:
    """The matrix that `make faults` wrote, probe by probe, faults that were not named at the end."""
    from parity import probes as package
    from parity.errors import ParityError

    file = Path(next(iter(package.__path__))) / "matrix.json"
    if not file.is_file():
        raise ParityError("the matrix of planted faults", f"no {file}", "run make faults in a source tree")
    made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows, healthy = made["faults"], made["healthy"]
    typer.echo(f"commit {made['commit']}, {made['date']}")
    typer.echo(f"{'probe':<10} {'trainer':<12} {'faults':>6} {'named':>6} {'found':>6} {'missed':>6}")
    by: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        by.setdefault((row["probe"], row["trainer"]), Counter())[row["result"]] += 1
    for (probe, trainer), counts in sorted(by.items()):
        numbers = " ".join(f"{counts[result]:>6}" for result in ("named", "found", "missed"))
        typer.echo(f"{probe:<10} {trainer:<12} {counts.total():>6} {numbers}")
    total = Counter(row["result"] for row in rows)
    numbers = " ".join(f"{total[result]:>6}" for result in ("named", "found", "missed"))
    typer.echo(f"{'all':<10} {'':<12} {total.total():>6} {numbers}")
    for row in rows:
        if row["result"] != "named":
            typer.echo(f"{row['result']}: {row['fault']} ({row['trainer']}): given {row['given']}")
    alarms = sum(bool(row["alarms"]) for row in healthy)
    typer.echo(f"healthy variants: {len(healthy)}, with alarms: {alarms}")
