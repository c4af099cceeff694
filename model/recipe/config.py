"""The training file: `recipe:` says how a step is wired, `run:` says how long, with what and on what.

    training = load("recipe.yaml")          # or from_data({...}), or config.preset("tiny")
    print(dump(training))

The recipe is a promise: it is hashed, compared and quoted, and the probes measure whether the trainer keeps
it. So nothing is guessed. An unknown key is an error that names the nearest one; lines that contradict each
other are refused with both quoted; ids that could mean two things are refused with the question.

A file may begin with `preset: NAME`; what it says then replaces the preset's values one by one, except that a
mapping with a `kind` that changes, and `terms`, are replaced whole.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError, ValidationInfo, model_validator

from parity.errors import ParityError
from parity.model.recipe.check import (
    KeyLines,
    KeyPath,
    check_target,
    flow,
    nearest,
    recipe_clashes,
    run_clashes,
)
from parity.model.recipe.methods import DEFAULT_METHOD
from parity.model.recipe.parts import Part, RecipeFields, RunConfig
from parity.model.recipe.presets import preset_data

KEYS_HINT = "`parity train --keys` says what each key takes"
Validated = TypeVar("Validated", bound=BaseModel)


class Recipe(RecipeFields):
    """The wiring."""

    @property
    def hash(self) -> str:
        """16 hex digits of what is declared, defaults written out but for `method`, which is newer than the hash."""
        data = self.model_dump(mode="json")
        if self.method == DEFAULT_METHOD:
            del data["method"]
        text = json.dumps(data, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "Recipe":
        for clash in recipe_clashes(self):
            clash.refuse({"recipe": self}, info.context)
        return self


class TrainingFile(Part):
    """A whole training file."""

    recipe: Recipe
    run: RunConfig

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "TrainingFile":
        for clash in run_clashes(self.recipe, self.run):
            clash.refuse({"recipe": self.recipe, "run": self.run}, info.context)
        return self

    def with_values(self, changes: Mapping[str, Any]) -> "TrainingFile":
        """A copy with values at dotted places replaced, checked as a file is: {"run.optimizer.lr": 1e-3}."""
        data = self.model_dump(mode="json")
        for place, value in changes.items():
            *parents, last = place.split(".")
            inner = data
            for name in parents:
                inner = inner[name]
            inner[last] = value
        return from_data(data)


def from_data(data: Any, lines: KeyLines | None = None) -> TrainingFile:
    """A training from plain data. Raises ParityError for an unknown key, a wrong value, a contradiction."""
    lines = lines or KeyLines()
    _refuse_unknown_keys(data, TrainingFile, (), lines)
    if "preset" in data:
        data = merge_values(
            preset_data(str(data["preset"])), {k: v for k, v in data.items() if k != "preset"}
        )
    return _validate(TrainingFile, data, lines)


def _validate(model: type[Validated], data: Any, lines: KeyLines) -> Validated:
    """Data as a model. Raises ParityError for what is missing, wrong, or contradicts itself."""
    try:
        return model.model_validate(data, context=lines)
    except ValidationError as error:
        first = error.errors()[0]
        key = tuple(str(part) for part in first["loc"] if part in _names(data, first["loc"]))
        if first["type"] == "missing":
            asked, found = f"{'.'.join(key)}", "not given"
            do = f"add {key[-1]} under {'.'.join(key[:-1]) or 'the top'}; {KEYS_HINT}"
            raise ParityError(asked, found, do) from error
        do = f"correct the value; {KEYS_HINT}"
        raise ParityError(lines.quote(key, first["input"]), first["msg"], do) from error


class _RecipeOnly(Part):
    """A file that declares the wiring of a trainer that is not ours."""

    recipe: Recipe


def load_declared(file: str | Path) -> "TrainingFile | Recipe":
    """A training file, or one with `recipe:` alone, which says enough of a trainer that is not ours.

    Raises ParityError as `load_training_file` does.
    """
    path = Path(file)
    text = _text(path)
    data, lines = _yaml(text, str(path))
    if not isinstance(data, Mapping) or "recipe" not in data or {"run", "preset"} & data.keys():
        training = from_data(data, lines)
        check_target(training.recipe, lines)
        return training
    _refuse_unknown_keys(data, TrainingFile, (), lines)
    recipe = _validate(_RecipeOnly, data, lines).recipe
    check_target(recipe, lines)
    return recipe


def _names(data: Any, loc: tuple[Any, ...]) -> list[Any]:
    """Parts of pydantic's location that are keys of the data; the rest are its own tags for unions."""
    found = []
    for index, part in enumerate(loc):
        if isinstance(data, Mapping) and (part in data or index == len(loc) - 1):
            found.append(part)
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
    return found


def _refuse_unknown_keys(data: Any, model: type[BaseModel], at: KeyPath, lines: KeyLines) -> None:
    """Refuse keys that no field has, nearest key named; values are pydantic's business."""
    if not isinstance(data, Mapping):
        found = f"a {type(data).__name__}" if data is not None else "nothing"
        raise ParityError(".".join(at) or "a training file", found, "give a mapping of keys to values")
    for name, value in data.items():
        known = [*model.model_fields, *([] if at else ["preset"])]
        if name not in known:
            asked = lines.quote((*at, str(name)), value)
            found = f"no key {name!r} under {'.'.join(at) or 'the top'}"
            raise ParityError(asked, found, f"{nearest(str(name), known)}; {KEYS_HINT}")
        if name not in model.model_fields:
            continue
        inner = model.model_fields[name].annotation
        parts = [inner, *get_args(inner)]
        part = next((t for t in parts if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if part is not None and not (value is None and len(parts) > 1):
            _refuse_unknown_keys(value, part, (*at, name), lines)


def load_training_file(file: str | Path) -> TrainingFile:
    """Read a training file, `preset:` included. Raises ParityError for anything that is not right."""
    path = Path(file)
    data, lines = _yaml(_text(path), str(path))
    training = from_data(data, lines)
    check_target(training.recipe, lines, ours=True)
    return training


def parse_training_file(text: str, file: str = "") -> TrainingFile:
    """The same from text."""
    return from_data(*_yaml(text, file))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"training file {path}", str(error), "give a YAML file") from error


def _yaml(text: str, file: str) -> tuple[Any, KeyLines]:
    """The data of a training file, and where its keys stand."""
    asked = f"training file {file}".strip()
    try:
        data, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ParityError(asked, f"no YAML ({found})", "correct the YAML") from error
    return data, KeyLines(file=file, text=dict(_lines(node, text.splitlines(), ())))


def _lines(node: Any, text: list[str], at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Every key of a YAML node with its quoted line. Raises ParityError for a key given twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        number = key.start_mark.line + 1
        if key.value in seen:
            asked = f"{'.'.join((*at, key.value))} on line {number}"
            raise ParityError(asked, f"the same key on line {seen[key.value]}", "keep one of the two")
        seen[key.value] = number
        line = text[number - 1].strip()
        if value.start_mark.line + 1 != number:
            line = f"{key.value}: {flow(yaml.safe_load(yaml.serialize(value)))}"
        yield (*at, key.value), f'line {number} "{line}"'
        yield from _lines(value, text, (*at, key.value))


def merge_values(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; `terms`, and a mapping whose `kind` changes, are replaced whole."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and name != "terms":
            if value.get("kind", old.get("kind")) == old.get("kind"):
                value = merge_values(old, value)
        result[name] = value
    return result


def dump(training: TrainingFile) -> str:
    """YAML that `parse_training_file` reads back to the same training."""
    text: str = yaml.safe_dump(training.model_dump(mode="json"), sort_keys=False, width=100)
    return text


def preset(name: str) -> TrainingFile:
    """A whole training file by name. Raises ParityError for an unknown name."""
    return from_data(preset_data(name))
