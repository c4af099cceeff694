"""Injects a fault into another trainer's own source: one line of one function is replaced, and nothing else.

    mutated = mutate(core.DFlashDraftModel, "_backbone_forward", "- 1) % total", ") % total")
    apply_patches(adapter, (core.DFlashDraftModel, "_backbone_forward", mutated))

The function's source is read from the installed package, so a fault states exactly what it changed, and fails loudly
where another version reads differently. The change holds only while the adapter runs the trainer.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

from parity.probes.adapters.base import Adapter

Patch = tuple[Any, str, Any]
"""Owner (class or module), attribute, what stands there instead."""
Opened = TypeVar("Opened", bound=Adapter)


def mutate(owner: Any, name: str, old: str, new: str) -> Patch:
    """The function `owner.name` with `old`, which must occur exactly once in its source, replaced by `new`."""
    function = inspect.unwrap(inspect.getattr_static(owner, name))
    wrap: Callable[[Any], Any] = (
        (lambda each: each) if not isinstance(function, staticmethod) else staticmethod
    )
    function = function.__func__ if isinstance(function, staticmethod) else function
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {name}"
    source = source.replace(old, new)
    source = source[source.index("def ") :]  # decorators (compilation) are left out
    scope: dict[str, Any] = {}
    exec(compile(source, f"<{name}, mutated>", "exec"), function.__globals__, scope)
    return owner, name, wrap(scope[name])


def apply_patches(adapter: Opened, *patches: Patch) -> Opened:
    """The same adapter, with the patches in force whenever one of its methods runs."""

    @contextmanager
    def in_force() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with in_force():
                return method(*args, **kwargs)

        return call

    base = type(adapter)
    names = [name for name in vars(Adapter) if not name.startswith("_") and callable(getattr(Adapter, name))]
    methods = {name: wrapped(getattr(base, name)) for name in names}
    adapter.__class__ = type(base.__name__, (base,), methods)
    return adapter
