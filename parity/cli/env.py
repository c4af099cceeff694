"""`parity env`: what this machine would run."""

import typer


def env() -> None:
    """Show versions, devices, variables that can change numbers, and which backends run here."""
    import torch  # noqa: F401 (imported so that devices are listed too)

    from parity.environment import environment
    from parity.model import backends

    for name, value in environment().items():
        typer.echo(f"{name:24} {value}")
    typer.echo("")
    for name in backends.SHORTHANDS:
        why = backends.missing(backends.parse(name))
        typer.echo(f"backend {name:16} {'runs here' if why is None else 'does not run here: ' + why}")
