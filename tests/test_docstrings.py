"""Examples in docstrings call functions that exist, with arguments that they take.

An example is an indented block of a docstring that is Python. Its calls are looked up where a reader would: in the
module itself, among what the module imports, or under `parity`; the arguments are bound to the signature, and
nothing is run. Calls on values that the example made (`report.outcome`) are not looked up.
"""

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import parity
from tests.house import Module, read_modules
from tests.test_packaging import ROOT

MODULES = [m for m in read_modules(ROOT) if not m.name.endswith("__main__")]


def examples(module: Module) -> Iterator[tuple[str, ast.Module]]:
    """(where, syntax tree) of every block of Python in a module's docstrings."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (ast.get_docstring(node) or "").splitlines()
        block: list[str] = []
        for line in [*lines[1:], "end"]:
            if line.startswith("    ") or (not line.strip() and block):
                block.append(line)
                continue
            if block:
                with_code = textwrap.dedent("\n".join(block))
                try:
                    yield f"{module.name}.{getattr(node, 'name', '')}", ast.parse(with_code)
                except SyntaxError:
                    pass  # a command line, a table, a formula
            block = []


def look_up(module: ModuleType, function: ast.expr, made: set[str]) -> Any:
    """The object an example calls; None where it is a value of the example's own or a method of one."""
    parts = ast.unparse(function).split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] in made:
        return None
    if parts[0] == "parity":
        found: Any = parity
    elif parts[0] in vars(module):
        found = vars(module)[parts[0]]
    elif siblings(module) >= {parts[0]}:
        found = importlib.import_module(f"{module.__name__.rpartition('.')[0]}.{parts[0]}")
    elif parts[0] in everywhere():
        found = importlib.import_module(everywhere()[parts[0]])
    elif parts[0] in unique_names():
        found = getattr(importlib.import_module(unique_names()[parts[0]]), parts[0])
    elif hasattr(builtins, parts[0]):
        return None
    else:
        raise LookupError(f"{ast.unparse(function)}: no such name")
    for part in parts[1:]:
        found = getattr(found, part)
    return found


def siblings(module: ModuleType) -> set[str]:
    """Modules in the same folder."""
    package = importlib.import_module(module.__name__.rpartition(".")[0] or "parity")
    return {each.name for each in pkgutil.iter_modules(package.__path__)}


@cache
def unique_names() -> dict[str, str]:
    """Public function or class -> the module that defines it; public names are unique."""
    return {name: module.name for module in MODULES for name in module.public_names}


@cache
def everywhere() -> dict[str, str]:
    """Last part of a module's name -> its name, where only one module has it."""
    names: dict[str, list[str]] = {}
    for module in MODULES:
        names.setdefault(module.name.rpartition(".")[2], []).append(module.name)
    return {last: whole[0] for last, whole in names.items() if len(whole) == 1}


def wrong_calls(module: ModuleType, tree: ast.Module) -> Iterator[str | None]:
    """For each call that was looked up: what is wrong with it, or None."""
    made = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    made |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    made |= {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    made |= {
        each.asname or each.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for each in n.names
    }
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        try:
            found = look_up(module, call.func, made)
        except (LookupError, AttributeError) as error:
            yield str(error)
            continue
        if not callable(found):
            continue
        keywords = {each.arg: None for each in call.keywords if each.arg is not None}
        positional = [] if any(isinstance(each, ast.Starred) for each in call.args) else call.args
        if any(isinstance(each, ast.Constant) and each.value is ... for each in positional):
            continue  # `f(...)` stands for its arguments
        try:
            signature(found).bind_partial(*positional, **keywords)
            yield None
        except TypeError as error:
            yield f"{ast.unparse(call)}: {error}"
        except ValueError:
            continue  # a builtin without a signature


def signature(function: Any) -> inspect.Signature:
    """The signature, with the keys of `**options: Unpack[TypedDict]` as keywords of its own."""
    found = inspect.signature(function)
    parameters = []
    for each in found.parameters.values():
        packed = (
            re.search(r"(\w+)[\"']?[\]>]+$", str(each.annotation)) if each.kind is each.VAR_KEYWORD else None
        )
        if packed is None or packed[1] not in unique_names():
            parameters.append(each)
            continue
        options = getattr(importlib.import_module(unique_names()[packed[1]]), packed[1])
        parameters += [
            inspect.Parameter(key, each.KEYWORD_ONLY, default=None) for key in options.__annotations__
        ]
    return found.replace(parameters=parameters)


def test_examples_of_docstrings_can_be_called() -> None:
    wrong, looked_up = [], 0
    for module in MODULES:
        for where, tree in examples(module):
            for answer in wrong_calls(importlib.import_module(module.name), tree):
                looked_up += 1
                if answer is not None:
                    wrong.append(f"{where}: {answer}")
    assert wrong == []
    assert looked_up > 40  # the examples are still found


@pytest.mark.parametrize(
    "example",
    ['parity.check(out="report")', "parity.nothing(1)", "compare_traces()(1, 2)", "read_nothing(3)"],
)
def test_a_wrong_example_is_seen(example: str) -> None:
    from parity.comparison import traces

    seen = [each for each in wrong_calls(traces, ast.parse(example)) if each is not None]
    assert bool(seen) == (example != "compare_traces()(1, 2)")
