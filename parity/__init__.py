"""parity proves that a speculative-decoding drafter is trained on what it will be served.

Every command is also a function that returns records:

    import parity
    report = parity.check(recipe="recipe.yaml")
    print(report.outcome)

Names are looked up when they are first used, so that importing parity never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers, which do not run `__getattr__`
    from parity.capturing.client import capture_to as capture
    from parity.commands.check import check as check
    from parity.commands.compare import compare as compare
    from parity.commands.convert import export as export
    from parity.commands.convert import import_ as import_
    from parity.commands.evaluate import evaluate as evaluate
    from parity.commands.train import train as train
    from parity.errors import ExitCode as ExitCode
    from parity.errors import NothingComparable as NothingComparable
    from parity.errors import ParityError as ParityError
    from parity.gating.gate import gate as gate
    from parity.reports.record import Finding as Finding
    from parity.reports.record import Report as Report
    from parity.tracing.trace import Trace as Trace
    from parity.watching.watch import watch as watch

PUBLIC: dict[str, str] = {
    "ExitCode": "parity.errors:ExitCode",
    "Finding": "parity.reports.record:Finding",
    "NothingComparable": "parity.errors:NothingComparable",
    "ParityError": "parity.errors:ParityError",
    "Report": "parity.reports.record:Report",
    "Trace": "parity.tracing.trace:Trace",
    "capture": "parity.capturing.client:capture_to",
    "check": "parity.commands.check:check",
    "compare": "parity.commands.compare:compare",
    "evaluate": "parity.commands.evaluate:evaluate",
    "export": "parity.commands.convert:export",
    "gate": "parity.gating.gate:gate",
    "import_": "parity.commands.convert:import_",
    "train": "parity.commands.train:train",
    "watch": "parity.watching.watch:watch",
}
"""Public name -> module and attribute. A promise: tests/test_packaging.py looks every one up."""

__all__ = [
    "ExitCode",
    "Finding",
    "NothingComparable",
    "ParityError",
    "Report",
    "Trace",
    "capture",
    "check",
    "compare",
    "evaluate",
    "export",
    "gate",
    "import_",
    "train",
    "watch",
]


def __getattr__(name: str) -> Any:
    """The public object of that name, imported now."""
    if name == "__version__":
        return _version()
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PUBLIC[name].partition(":")
    return globals().setdefault(name, getattr(import_module(module), attribute))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The installed version, or what a source tree without an installation can say."""
    from importlib.metadata import PackageNotFoundError, version  # costs 15 ms, and few ask

    try:
        return version("drafter-parity")
    except PackageNotFoundError:
        return "0+source"
