"""All injected faults and healthy variants, from the folders beside this file; peers' where they are installed."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tests.faults.wiring import HealthyVariant, InjectedFault

HERE = Path(__file__).parent


def _all(folder: str, attribute: str) -> list[object]:
    found: list[object] = []
    for file in sorted((HERE / folder).rglob("*.py")):
        peer = file.stem if file.parent.name == "peers" else None
        missing = peer is not None and find_spec(peer) is None
        if missing and os.environ.get("CI") != "true" and os.environ.get("PARITY_PEERS") != "1":
            continue  # `make peers` installs them; CI fails on the import below instead
        name = ".".join(file.relative_to(HERE).with_suffix("").parts)
        found += getattr(import_module(f"tests.faults.{name}"), attribute, ())
    return found


def list_faults() -> list[InjectedFault]:
    """Every injected wiring fault."""
    return [each for each in _all("injected", "FAULTS") if isinstance(each, InjectedFault)]


def list_variants() -> list[HealthyVariant]:
    """Every healthy variant: ours, and the peers' beside their injected faults."""
    found = [*_all("healthy", "VARIANTS"), *_all("injected", "VARIANTS")]
    return [each for each in found if isinstance(each, HealthyVariant)]
