"""Every key of a training file with its type, default, unit and meaning: what `parity train --keys` prints.

    python -m parity.model.recipe.keys > docs/recipe.md     # after a change of parity.model.recipe.config

All of it is read off the JSON schema that pydantic makes of `parity.model.recipe.config` (field docstrings
included), so that
nothing is written twice. No torch is imported.
"""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parity.model.recipe.check import flow
from parity.model.recipe.config import TrainingFile
from parity.model.recipe.presets import PRESETS

REQUIRED = "required"
TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
LIMIT_WORDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
"""JSON schema's names of what a value is held to."""
INTRODUCTION = (
    "A training file is YAML with two parts: `recipe:` declares the wiring of a training step, which probes measure "
    "and reports quote, and `run:` says how long, with what and on what. A file with `recipe:` alone is enough to "
    "check a trainer that is not parity's own. A file may begin with `preset: NAME`; what it says then replaces that "
    "preset's values one by one, except that `terms`, and a mapping whose `kind` changes, are replaced whole."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One key of a mapping."""

    name: str
    type: str
    """Type or choices, and what the value is held to: `integer, at least 2`."""
    default: str
    """As YAML, or `required`."""
    unit: str
    """Empty where a number counts nothing."""
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSection:
    """One mapping of the file, and its keys that are no mappings themselves."""

    place: str
    """Dotted: `recipe.block`; empty for the file."""
    default: str
    """`required`, `null`, or empty where the mapping may be left out and its keys then have their defaults."""
    meaning: str
    keys: tuple[ConfigKey, ...]


def sections() -> tuple[ConfigSection, ...]:
    """The whole file, mapping by mapping, in its order."""
    schema = TrainingFile.model_json_schema()
    preset = ConfigKey(
        name="preset",
        type=_or(list(PRESETS)),
        default="no preset",
        unit="",
        meaning="Values to begin with; nothing else is then required.",
    )
    top = ConfigSection(place="", default=REQUIRED, meaning="", keys=(preset,))
    return top, *(each for each in _walk(schema, schema["$defs"], "", REQUIRED) if each.place)


def _walk(
    model: Mapping[str, Any], parts: Mapping[str, Any], at: str, default: str, more: str = ""
) -> Iterator[ConfigSection]:
    """The section of a model of the schema, then those of the models in it."""
    keys, inner = list[ConfigKey](), list[ConfigSection]()
    for name, field in model["properties"].items():
        needed = name in model.get("required", ())
        said = _one_line(field.get("description", ""))
        options = field.get("anyOf", [field])
        reference = next((each["$ref"].rpartition("/")[2] for each in options if "$ref" in each), None)
        if reference is not None:
            left_out = REQUIRED if needed else "null" if field.get("default") is None else ""
            inner += _walk(parts[reference], parts, f"{at}.{name}".lstrip("."), left_out, said)
            continue
        keys.append(
            ConfigKey(
                name=name,
                type=" or ".join(_type(each) for each in options),
                default=REQUIRED if needed else flow(field.get("default")),
                unit=next((each["unit"] for each in options if "unit" in each), ""),
                meaning=said,
            )
        )
    meaning = " ".join(filter(None, (_one_line(model.get("description", "")), more)))
    yield ConfigSection(place=at, default=default, meaning=meaning, keys=tuple(keys))
    yield from inner


def _type(field: Mapping[str, Any]) -> str:
    """A type of the schema in words."""
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return _or([str(each) for each in field["enum"]])
    if "prefixItems" in field:
        return f"list of {len(field['prefixItems'])} {_type(field['prefixItems'][0])}s"
    if field["type"] == "array":
        return f"list of {_type(field['items'])}" + (", not empty" if field.get("minItems") else "")
    if field["type"] == "object":
        return f"mapping of names to {_type(field['additionalProperties'])}"
    limits = [words.format(f"{field[name]:g}") for name, words in LIMIT_WORDS.items() if name in field]
    return ", ".join([TYPES[field["type"]], *limits])


def _or(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- as text and as Markdown ----------------------------------------------------------------------------


def as_text(width: int = 80) -> str:
    """For a terminal of so many columns: each key with its type, default and unit, its meaning below."""
    lines = textwrap.wrap(INTRODUCTION.replace("`", ""), width)
    for section in sections():
        lines.append("")
        if section.place:
            head = f"{section.place}{_shown_default(section)}: {section.meaning}"
            lines += textwrap.wrap(head, width, subsequent_indent="  ", break_on_hyphens=False)
        for key in section.keys:
            unit = f" ({key.unit})" if key.unit else ""
            head = f"{key.name}: {key.type}{unit}; {_format_default(key.default)}"
            lines += textwrap.wrap(
                head, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
            )
            lines += textwrap.wrap(
                key.meaning.replace("`", ""),
                width,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


def _format_default(default: str) -> str:
    return default if default == REQUIRED else f"default {default}"


def _shown_default(section: ConfigSection) -> str:
    return f" ({_format_default(section.default)})" if section.default else ""


def as_markdown() -> str:
    """docs/recipe.md."""
    lines = [
        "# The training file",
        "",
        "<!-- made by: python -m parity.model.recipe.keys > docs/recipe.md -->",
        "",
        INTRODUCTION,
        "",
        "`parity train --keys` prints this list. A mapping that is not marked may be left out; its keys then have the",
        "defaults shown.",
    ]
    for section in sections():
        lines += [
            "",
            f"## `{section.place}`{_shown_default(section)}" if section.place else "## The file",
            "",
        ]
        lines += [section.meaning, ""] if section.meaning else []
        if section.keys:
            lines += ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
        for key in section.keys:
            default = key.default if key.default in (REQUIRED, "no preset") else f"`{key.default}`"
            cells = (f"`{key.name}`", key.type, default, key.unit, key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
