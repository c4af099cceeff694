"""parity proves that a speculative-decoding drafter is trained on what it will be served.

Every command is also a function that returns records:

    import parity
    report = parity.check(out="parity-report")

Names are looked up when they are first used, so that importing parity never imports torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers, which do not run `__getattr__`
    from parity.capture import capture_to as capture
    from parity.compare_paths import compare as compare
    from parity.errors import ExitCode as ExitCode
    from parity.errors import NothingComparable as NothingComparable
    from parity.errors import ParityError as ParityError
    from parity.evaluate import evaluate as evaluate
    from parity.exchange import export as export
    from parity.exchange import import_ as import_
    from parity.gate import gate as gate
    from parity.reports.record import Finding as Finding
    from parity.reports.record import Report as Report
    from parity.runner import check as check
    from parity.trace import Trace as Trace
    from parity.train import train as train
    from parity.watch import watch as watch

PUBLIC: dict[str, str] = {
    "ExitCode": "parity.errors:ExitCode",
    "Finding": "parity.reports.record:Finding",
    "NothingComparable": "parity.errors:NothingComparable",
    "ParityError": "parity.errors:ParityError",
    "Report": "parity.reports.record:Report",
    "Trace": "parity.trace:Trace",
    "capture": "parity.capture:capture_to",
    "check": "parity.runner:check",
    "compare": "parity.compare_paths:compare",
    "evaluate": "parity.evaluate:evaluate",
    "export": "parity.exchange:export",
    "gate": "parity.gate:gate",
    "import_": "parity.exchange:import_",
    "train": "parity.train:train",
    "watch": "parity.watch:watch",
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


class _Command(ModuleType):
    """A module of ours that can be called as the command of its name: `parity.compare(a, b)`.

    `parity.compare` is both a module and a command. Python makes the module an attribute of the package
    as soon as anything imports it, so without this class the name would mean one or the other by import
    order.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, function = PUBLIC[self.__name__.removeprefix("parity.")].partition(":")
        return getattr(import_module(module), function)(*args, **kwargs)


class _Package(ModuleType):
    """The package `parity`: makes each command's module callable when it is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in PUBLIC:
            value.__class__ = _Command
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """The public object of that name, imported now."""
    if name == "__version__":
        return _version()
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PUBLIC[name].partition(":")
    found = getattr(import_module(module), attribute)
    return globals().setdefault(name, found)  # a command's module is set by the import, and stays


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """The installed version, or what a source tree without an installation can say."""
    from importlib.metadata import PackageNotFoundError, version  # costs 15 ms, and few ask

    try:
        return version("drafter-parity")
    except PackageNotFoundError:
        return "0+source"
