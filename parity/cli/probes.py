"""`parity probes`: the list of probes, with what each guards and needs."""

import typer


def probes() -> None:
    """List the probes: what each guards, and what it needs."""
    import textwrap

    from parity.probes.table import TABLE

    for entry in TABLE:
        typer.echo(f"{entry.name}")
        for label, text in (("guards", entry.guards), ("needs", entry.needs)):
            typer.echo(textwrap.fill(text, width=78, initial_indent=f"  {label}: ", subsequent_indent="    "))
