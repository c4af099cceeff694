"""Files that a person or another program wrote, read strictly: YAML into models, JSON without what is no JSON.

    policy = read_strict_yaml(Policy, Path("policy.yaml"), "policy")
    manifest = read_json(Path("trace/manifest.json"), "the manifest of a trace", "capture the trace again")

Whatever is wrong becomes a ParityError that names the file. yaml and pydantic are loaded when a YAML file is read,
because reports are read without them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, TypeGuard, TypeVar, Union, get_args, get_origin

from parity.errors import ParityError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)


class ForeignLiteral(ValueError):
    """NaN or an infinity written as a bare word: Python's json reads it, the standard and other readers do not."""

    def __init__(self, literal: str) -> None:
        self.literal = literal
        super().__init__(f"the literal {literal} is no JSON")


def decode_json(text: str | bytes) -> object:
    """The value that a JSON text holds.

    Raises:
        ForeignLiteral: NaN, Infinity or -Infinity in it.
        ValueError: No JSON, or lists in lists deeper than Python can follow.
    """

    def refuse(literal: str) -> object:
        raise ForeignLiteral(literal)

    try:
        value: object = json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return value


def read_json(path: Path, asked: str, do: str) -> object:
    """The value that a JSON file in UTF-8 holds.

    Args:
        path: The file.
        asked: What was wanted of it, for the message: `the manifest trace/manifest.json`.
        do: What to do where it cannot be read.

    Raises:
        ParityError: No such file, no UTF-8, no JSON.
    """
    try:
        return decode_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParityError(asked, f"no readable JSON ({error})", do) from error


def read_strict_yaml(
    model: type[Model],
    path: Path,
    what: str,
    *,
    form: str = "YAML or JSON",
    known: str = "known keys",
    empty: object = None,
) -> Model:
    """A YAML file (or JSON, which is YAML) as a model; an unknown key is refused with the nearest known one.

    Args:
        model: What the file has to hold; it forbids keys that it does not know.
        path: The file.
        what: What it is called in messages: `policy`.
        form: What the advice calls its format.
        known: How the advice introduces the keys that could have been meant.
        empty: What a file without content holds.

    Raises:
        ParityError: No readable YAML, or a value that the model does not take.
    """
    import yaml

    # The safe loader makes plain values only: a file cannot have Python objects built.
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ParityError(
            f"the {what} {path}", f"no readable YAML ({error})", f"name a {form} file"
        ) from error
    return validate_data(model, empty if data is None else data, f"{what} {path}", known=known)


def validate_data(model: type[Model], data: object, what: str, *, known: str = "known keys") -> Model:
    """Data as a model.

    Args:
        model: What the data has to be.
        data: What a file or a caller gave.
        what: What it is called in messages.
        known: How the advice introduces the keys that could have been meant.

    Raises:
        ParityError: The first thing that is wrong with it, and the key that could have been meant.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(data)
    except ValidationError as error:
        # Of a misspelt key and the missing one it stands for, the misspelt one says more.
        errors = error.errors()
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        steps, is_unknown = first["loc"], first["type"] == "extra_forbidden"
        place = ".".join(map(str, steps)) or "the file"
        keys = _keys_at(model, steps[:-1] if is_unknown else steps)
        if is_unknown:
            do = f"write {(difflib.get_close_matches(str(steps[-1]), keys, 1, 0.0) or keys)[0]!r}"
        else:
            do = f"{known}: {', '.join(keys)}"
        raise ParityError(f"the {what}", f"{place}: {first['msg']}", do) from error


def _keys_at(model: type[BaseModel], steps: Sequence[int | str]) -> list[str]:
    """The keys of the innermost model on the way that `steps` (keys and indices) lead through `model`."""
    at: object = model
    inner = model
    for step in steps:
        at = _type_inside(at, step)
        if _is_model(at):
            inner = at
    return list(inner.model_fields)


def _type_inside(hint: object, step: int | str) -> object:
    """The type found one step (a key or an index) inside a type."""
    if _is_model(hint):
        field = hint.model_fields.get(str(step))
        hint = field.annotation if field is not None else None
    else:
        arguments = get_args(hint)
        if get_origin(hint) is dict:
            hint = arguments[1]
        elif get_origin(hint) is tuple:
            hint = arguments[0]
    if get_origin(hint) in (Union, UnionType):
        hint = next((each for each in get_args(hint) if each is not NoneType), None)
    return hint


def _is_model(hint: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(hint, type) and hasattr(hint, "model_fields")
