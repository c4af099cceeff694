"""Examines a trainer: opens the adapter that was named, runs every wiring probe, states what was measured.

    made = ask_trainer(preset("unit"))
    print(made.conformance.paragraph)

An adapter is `builtin`, `speculators`, `specforge`, or a class in a file of the user's own: `path/to/file.py:Name`.
That file is run: it is the user's code, and named by the user.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from parity.errors import ParityError
from parity.model.recipe.check import KeyLines, check_target, nearest
from parity.model.recipe.config import Recipe, TrainingFile
from parity.probes.adapters.base import Adapter
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_adapter
from parity.probes.table import TABLE
from parity.reports.record import Conformance

SHIPPED = {
    "builtin": "parity.probes.adapters.builtin:Builtin",
    "speculators": "parity.probes.adapters.speculators:Speculators",
    "specforge": "parity.probes.adapters.specforge:SpecForge",
}
"""Adapters that come with parity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WiringAnswers:
    """What the probes found about a trainer."""

    adapter: str
    """Name of the trainer."""
    answers: tuple[tuple[str, ProbeAnswer], ...]
    conformance: Conformance


def open_adapter(name: str, declared: TrainingFile | Recipe) -> Adapter:
    """Open the adapter of that name.

    A user's class is given the recipe, or the whole `TrainingFile` where it has a classmethod `open`.

    Args:
        name: a key of `SHIPPED`, or `path/to/file.py:Name`.
        declared: the training file, or its recipe alone.

    Raises:
        ParityError: for a name that is none, a file that cannot be read, and what the class itself refuses.
    """
    if name in SHIPPED:
        training = _whole(declared, name)
        check_target(training.recipe, KeyLines(), ours=True)
        module, _, attribute = SHIPPED[name].partition(":")
        made: Adapter = getattr(importlib.import_module(module), attribute).open(training)
        return made
    # The user's own file: what is wrong with it is theirs to put right, so every exception becomes a message.
    file, attribute = _file_and_name(name)
    cls = getattr(_module(file), attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Adapter)):
        found = "nothing of that name" if cls is None else f"{_kind(cls)} that is no Adapter"
        raise ParityError(f"--adapter {name}", f"{found}; {_list_adapters(file)}", _how(file))
    own = getattr(cls, "open", None)
    recipe = declared if isinstance(declared, Recipe) else declared.recipe
    try:
        return cls(recipe) if own is None else own(_whole(declared, name))
    except ParityError:
        raise
    except Exception as error:
        found = f"its constructor raised {type(error).__name__}: {error}"
        raise ParityError(f"--adapter {name}", found, "correct the adapter") from error


FORM = "FILE.py:NAME, NAME being a class derived from parity.probes.adapters.base.Adapter"


def _file_and_name(name: str) -> tuple[Path, str]:
    """`path/to/file.py:Name` in its two parts. Raises ParityError for anything else."""
    file, separator, attribute = name.rpartition(":")
    if separator and file.endswith(".py") and attribute:
        return _existing(Path(file)), attribute
    bare = name.removesuffix(":")
    if bare.endswith(".py"):
        path = _existing(Path(bare))
        raise ParityError(f"--adapter {name}", f"no class named; {_list_adapters(path)}", _how(path))
    if "/" in name or separator:
        raise ParityError(f"--adapter {name}", "no Python file with a class", f"give {FORM}")
    do = f"{nearest(name, SHIPPED)}; or give {FORM}"
    raise ParityError(f"--adapter {name}", "no adapter of that name", do)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ParityError(f"--adapter {file}", "no such file", f"check the path; the form is {FORM}")
    return file


def _kind(value: object) -> str:
    return f"a class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _list_adapters(file: Path) -> str:
    """The adapters of a file in words."""
    names = adapters_in(file)
    return (
        f"{file.name} has {', '.join(names)}" if names else f"{file.name} has no class derived from Adapter"
    )


def _how(file: Path) -> str:
    names = adapters_in(file)
    return " or ".join(f"--adapter {file}:{name}" for name in names[:4]) if names else f"give {FORM}"


def adapters_in(file: Path) -> list[str]:
    """Return the names of the adapter classes that a file's text defines, in its order; the file is not run.

    A class is one where a base is `Adapter`, an adapter of ours, or another such class of the file: by their names, so
    that a base which is made or renamed elsewhere is not seen. Empty where the text is no Python.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    known = {"Adapter", *(place.partition(":")[2] for place in SHIPPED.values())}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    known |= {each.asname for node in imports for each in node.names if each.asname and each.name in known}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found: list[str] = []
    for _ in classes:  # as often as a chain of bases may be long
        for node in classes:
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if node.name not in found and bases & {*known, *found}:
                found.append(node.name)
    return [node.name for node in classes if node.name in found]


def _whole(declared: TrainingFile | Recipe, adapter: str) -> TrainingFile:
    """A training file with its `run:`. Raises ParityError for a recipe alone."""
    if isinstance(declared, Recipe):
        do = "add run:, or begin the file with preset: and name what differs"
        raise ParityError(
            f"--adapter {adapter} on a file with recipe: alone", "no sizes, data or schedule", do
        )
    return declared


def _module(file: Path) -> ModuleType:
    """A user's file as a module, its folder importable as for a script."""
    spec = importlib.util.spec_from_file_location(f"parity_adapter_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ParityError(
            f"--adapter {file}", f"{type(error).__name__}: {error}", "correct the file"
        ) from error
    finally:
        sys.path.remove(str(file.parent.resolve()))
    return module


def ask_trainer(
    declared: TrainingFile | Recipe,
    adapter: str | Adapter = "builtin",
    *,
    only: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> WiringAnswers:
    """Run the wiring probes on one trainer.

    Args:
        declared: the wiring that it is declared to have.
        adapter: the trainer, or its name for `open_adapter`.
        only: names of the probes to run; all by default.
        say: called with the name of each probe before it runs.

    Raises:
        ParityError: for an adapter that cannot be opened.
    """
    opened = open_adapter(adapter, declared) if isinstance(adapter, str) else adapter
    answers = tuple(query_adapter(opened, only, say))
    return WiringAnswers(
        adapter=opened.name or type(opened).__name__,
        answers=answers,
        conformance=conformance(opened, answers),
    )


def conformance(adapter: Adapter, answers: Sequence[tuple[str, ProbeAnswer]]) -> Conformance:
    """Return all probes' statements; those without one are listed with what they reported instead."""
    recipe: Recipe = adapter.recipe
    return Conformance(
        trainer=adapter.name or type(adapter).__name__,
        recipe=recipe.hash,
        statements=tuple(answer.statement for _, answer in answers if answer.statement is not None),
        unanswered=tuple(
            (name, answer.unasked or answer.findings[0].sentence)
            for name, answer in answers
            if answer.statement is None
        ),
    )


def wiring_probes() -> list[str]:
    """Return the names of the probes that examine a trainer."""
    return [entry.name for entry in TABLE if entry.asks == "trainer"]


def check_names(only: Sequence[str], known: Sequence[str]) -> None:
    """Raise ParityError for a name of `only` that is not in `known`, with the nearest one."""
    for name in only:
        if name not in known:
            raise ParityError(f"probe {name}", "no such probe", nearest(name, known))
