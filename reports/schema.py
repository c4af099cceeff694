"""The JSON form of a report and of a step report: one encoder, one strict decoder, one JSON Schema each.

All three walk the types of `reports.record`, so a field added there is written, read and described without
a change here. Rules of the format:

- The first key is `schema`: `parity-report/1`, or `parity-step/1` on a line of a training run's steps
  (`reports.step_log`). The rest are the record's fields, in the record's order.
- Numbers keep their kind: an int is written without a point, a float always with a point or an exponent.
- JSON has no nan and no infinities. Such a float is the object `{"$float": "nan"}`, `"inf"` or `"-inf"`.
  No cell or piece of evidence is ever an object otherwise, so the tag cannot be taken for a text.
- A field with a default may be absent: files written before it existed stay readable. Adding such a field
  keeps the version; renaming, removing or changing a meaning raises it and adds an entry to `UPGRADES`.

    python -m parity show REPORT.json
"""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from parity.errors import ParityError
from parity.reading import ForeignLiteral, decode_json
from parity.reports.record import Conformance, Report, StepReport, Table, Value

NUMBER = 1
REPORT_SCHEMA = f"parity-report/{NUMBER}"
STEP_SCHEMA = "parity-step/1"
CONFORMANCE_SCHEMA = "parity-conformance/1"

TAG = "$float"
NON_FINITE: dict[str, float] = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

JsonObject = dict[str, Any]
"""An object as json reads and writes it. What lies in it is checked by `_decode`, not by types."""
Described = dict[str, object]
"""A JSON Schema, or a part of one."""
RecordType = TypeVar("RecordType", Report, StepReport, Conformance)

UPGRADES: dict[int, Callable[[JsonObject], JsonObject]] = {}
"""From version N to N + 1. Empty: there has been one version."""

_VALUE = frozenset(get_args(Value))


class _Damaged(Exception):
    """Where in the file, and what is wrong there. Becomes a ParityError in `from_dict`."""

    def __init__(self, where: str, found: str) -> None:
        self.where, self.found = where, found
        super().__init__(f"{where}: {found}")


def to_dict(report: Report) -> JsonObject:
    """The report as plain dicts, lists, strings and finite numbers. Raises TypeError on anything else."""
    return {"schema": REPORT_SCHEMA, **_encode(report, "report")}


def from_dict(data: object, *, source: str = "the data given") -> Report:
    """The report that `to_dict` wrote, equal in every field.

    Args:
        data: What json read.
        source: Where it came from, for the message.

    Raises:
        ParityError: Anything else than a report, or one of a newer version.
    """
    try:
        fields = _upgrade(data)
    except _Foreign as foreign:
        raise ParityError(f"read {source} as a report", foreign.found, foreign.do) from None
    return _read_record(Report, fields, source, "report", "a report")


def step_to_dict(step: StepReport) -> JsonObject:
    """A step report as plain dicts, lists, strings and finite numbers. Raises TypeError on anything else."""
    return {"schema": STEP_SCHEMA, **_encode(step, "step")}


def step_from_dict(data: object, *, source: str = "the data given") -> StepReport:
    """The step report that `step_to_dict` wrote. Raises ParityError on anything else."""
    if not isinstance(data, dict) or data.get("schema") != STEP_SCHEMA:
        found = f"the schema {_schema_name(data)!r}, where {STEP_SCHEMA!r} is known"
        give = "give the JSON lines that parity wrote while training"
        raise ParityError(f"read {source} as a step report", found, give)
    fields = {key: data[key] for key in data if key != "schema"}
    return _read_record(StepReport, fields, source, "step", "a step report")


def conformance_to_dict(conformance: Conformance) -> JsonObject:
    """A conformance statement as plain data; `paragraph` is for people, and not read back."""
    encoded = _encode(conformance, "conformance")
    return {"schema": CONFORMANCE_SCHEMA, **encoded, "paragraph": conformance.paragraph}


def conformance_from_dict(data: object, *, source: str = "the data given") -> Conformance:
    """The statement that `conformance_to_dict` wrote. Raises ParityError on anything else."""
    what = "a conformance statement"
    if not isinstance(data, dict) or data.get("schema") != CONFORMANCE_SCHEMA:
        give = "give the conformance.json that parity check wrote"
        raise ParityError(f"read {source} as {what}", f"the schema {_schema_name(data)!r}", give)
    fields = {key: data[key] for key in data if key not in ("schema", "paragraph")}
    return _read_record(Conformance, fields, source, "conformance", what)


def _schema_name(data: object) -> str:
    """What a value calls its schema, or what JSON calls the value where it can call it nothing."""
    return str(data.get("schema"))[:80] if isinstance(data, dict) else f"a JSON {_json_name(data)}"


def _read_record(kind: type[RecordType], fields: object, source: str, root: str, what: str) -> RecordType:
    """The fields of a file as a record; `root` names it in places such as `report.tables[0]`."""
    try:
        record = _decode(kind, fields, root)
        assert isinstance(record, kind)
        if not isinstance(record, Conformance):
            _check_tables(record.tables, root)
    except _Damaged as damage:
        raise ParityError(
            f"read {source} as {what}",
            f"at {damage.where}, {damage.found}",
            "write it again with the command that made it; if a newer parity wrote it, update this one",
        ) from None
    return record


def read_report(source: str | Path) -> Report:
    """The report in a file (a path) or in a text (a string that starts with `{`).

    Raises ParityError where there is no file, no JSON, or no report.
    """
    if isinstance(source, str) and source.lstrip()[:1] == "{":
        return from_dict(parse_json(source, "the text given"), source="the text given")
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParityError(
            f"read {path} as a report", "bytes that are no text", "give a report.json"
        ) from None
    except OSError as error:
        found = error.strerror or str(error)
        raise ParityError(f"read {path} as a report", found, "check the path; commands print it") from None
    return from_dict(parse_json(text, str(path)), source=str(path))


def parse_json(text: str, source: str) -> object:
    """The JSON in a text.

    Args:
        text: The text.
        source: Where it came from, for the message.

    Raises:
        ParityError: No JSON in it, or the literals NaN and Infinity, which are none.
    """
    try:
        return decode_json(text)
    except ForeignLiteral as error:
        found = f"the literal {error.literal}, which is no JSON"
        do = "give the file as parity wrote it; another program has changed it"
    except ValueError as error:
        found = "nothing in it" if not text.strip() else f"no JSON ({str(error)[:120]})"
        do = "give a whole report.json; this one may be cut short"
    raise ParityError(f"read {source} as a report", found, do)


class _Foreign(Exception):
    """No report of ours, or one of a version that cannot be read here."""

    def __init__(self, found: str, do: str) -> None:
        self.found, self.do = found, do
        super().__init__(found)


def _upgrade(data: object) -> JsonObject:
    """The fields of a report in the present version, without the version's key."""
    give = "give a report.json that a parity command wrote"
    if not isinstance(data, dict):
        raise _Foreign(f"a JSON {_json_name(data)} where a report is an object", give)
    if "schema" not in data:
        raise _Foreign("a JSON object without the key `schema`, so not a report of parity", give)
    match = re.fullmatch(r"parity-report/([1-9][0-9]{0,8})", str(data["schema"]))
    if match is None:
        raise _Foreign(f"the schema {str(data['schema'])[:80]!r}, where {REPORT_SCHEMA!r} is known", give)
    number = int(match[1])
    if number > NUMBER:
        raise _Foreign(
            f"the newer schema {data['schema']!r}; this parity reads up to {REPORT_SCHEMA!r}", "update parity"
        )
    fields = {key: value for key, value in data.items() if key != "schema"}
    while number < NUMBER:
        fields = UPGRADES[number](fields)
        number += 1
    return fields


def _check_tables(tables: tuple[Table, ...], where: str) -> None:
    """Refuses rows that do not fit their columns: no painter could tell which cell is which."""
    for index, table in enumerate(tables):
        for line, row in enumerate(table.rows):
            if len(row) != len(table.columns):
                found = f"{len(row)} cells for {len(table.columns)} columns"
                raise _Damaged(f"{where}.tables[{index}].rows[{line}]", found)


def _encode(item: object, where: str) -> Any:
    """One record, tuple or value in JSON's types."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return {name: _encode(getattr(item, name), f"{where}.{name}") for name in names}
    if isinstance(item, tuple):
        return [_encode(part, f"{where}[{index}]") for index, part in enumerate(item)]
    if item is None or isinstance(item, bool):
        return item
    if isinstance(item, str):
        return str(item)
    if isinstance(item, int):
        return int(item)
    if isinstance(item, float):
        return float(item) if math.isfinite(item) else {TAG: str(float(item))}
    raise TypeError(f"{where} holds a {type(item).__name__}, which a report cannot hold: {item!r:.80}")


def _decode(hint: Any, data: object, where: str) -> object:
    """`data` as the type `hint`, which is one of those that `reports.record` uses."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_record(hint, data, where)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if data not in args:
            raise _Damaged(where, f"{data!r:.80} is none of {', '.join(map(str, args))}")
        return data
    if origin is tuple:
        return _decode_tuple(args, data, where)
    if origin is UnionType and frozenset(args) != _VALUE:
        return None if data is None else _decode(args[0], data, where)
    allowed = _VALUE if origin is UnionType else {hint}
    if hint is float:
        allowed = {float, int}
    if float in allowed and isinstance(data, dict) and len(data) == 1 and data.get(TAG) in NON_FINITE:
        return NON_FINITE[data[TAG]]
    if type(data) not in allowed or (isinstance(data, float) and not math.isfinite(data)):
        wanted = "a value" if origin is UnionType else f"a {hint.__name__}"
        raise _Damaged(where, f"a JSON {_json_name(data)} where {wanted} belongs: {data!r:.80}")
    return data


def _decode_tuple(args: tuple[object, ...], data: object, where: str) -> tuple[object, ...]:
    """A list as a tuple of one kind (`tuple[X, ...]`) or of fixed length (`tuple[A, B]`)."""
    if not isinstance(data, list):
        raise _Damaged(where, f"a JSON {_json_name(data)} where a list belongs")
    if args[-1] is Ellipsis:
        return tuple([_decode(args[0], part, f"{where}[{index}]") for index, part in enumerate(data)])
    if len(data) != len(args):
        raise _Damaged(where, f"{len(data)} items where {len(args)} belong")
    return tuple([_decode(arg, part, where) for arg, part in zip(args, data, strict=True)])


def _decode_record(kind: type, data: object, where: str) -> object:
    """A dict as one of the frozen records; what it lacks takes the record's default."""
    if not isinstance(data, dict):
        raise _Damaged(where, f"a JSON {_json_name(data)} where an object belongs")
    hints = _hints(kind)
    unknown = sorted(str(key) for key in data.keys() - hints.keys())
    if unknown:
        raise _Damaged(where, f"the unknown field {unknown[0]!r:.80}")
    missing = [name for name in _required_fields(kind) if name not in data]
    if missing:
        raise _Damaged(where, f"the field {missing[0]!r} is missing")
    parts = {name: _decode(hints[name], value, f"{where}.{name}") for name, value in data.items()}
    try:
        return kind(**parts)
    except ValueError as error:  # a record's own check, for example a finding without a next step
        raise _Damaged(where, str(error)) from None


@cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


@cache
def _required_fields(kind: Any) -> tuple[str, ...]:
    """The fields without a default."""
    fields = dataclasses.fields(kind)
    absent = dataclasses.MISSING
    return tuple(f.name for f in fields if f.default is absent and f.default_factory is absent)


def _json_name(data: object) -> str:
    """What JSON calls this."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", NoneType: "null"}
    return names.get(type(data), "number")


def json_schema() -> Described:
    """A JSON Schema (2020-12) of what `to_dict` writes, derived from the records."""
    return _schema_of(Report, REPORT_SCHEMA)


def step_json_schema() -> Described:
    """A JSON Schema (2020-12) of what `step_to_dict` writes."""
    return _schema_of(StepReport, STEP_SCHEMA)


def _schema_of(kind: type, name: str) -> Described:
    """The JSON Schema of a record, whose first key names the schema."""
    definitions: Described = {
        "float": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/tagged"}]},
        "tagged": {
            "type": "object",
            "properties": {TAG: {"enum": list(NON_FINITE)}},
            "required": [TAG],
            "additionalProperties": False,
        },
        "value": {"anyOf": [{"type": ["string", "number", "boolean", "null"]}, {"$ref": "#/$defs/tagged"}]},
    }
    start = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
    top = _describe_record(kind, definitions, schema={"const": name})
    return {**start, **top, "$defs": definitions}


def _describe_record(kind: type, definitions: Described, **first: object) -> Described:
    """The object schema of one record, after the properties `first`; records inside it become definitions."""
    properties = {name: _describe(hint, definitions) for name, hint in _hints(kind).items()}
    text = " ".join((kind.__doc__ or "").split())
    return {
        "type": "object",
        "description": text,
        "properties": {**first, **properties},
        "required": [*first, *_required_fields(kind)],
        "additionalProperties": False,
    }


def _describe(hint: Any, definitions: Described) -> Described:
    """The schema of one type that `reports.record` uses."""
    origin, args = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        name = hint.__name__.lower()
        if name not in definitions:
            definitions[name] = {}  # holds the place, should a record ever contain itself
            definitions[name] = _describe_record(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple and args[-1] is Ellipsis:
        return {"type": "array", "items": _describe(args[0], definitions)}
    if origin is tuple:
        items = [_describe(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is UnionType:
        if frozenset(args) == _VALUE:
            return {"$ref": "#/$defs/value"}
        return {"anyOf": [_describe(arg, definitions) for arg in args]}
    if hint is float:
        return {"$ref": "#/$defs/float"}
    return {"type": {str: "string", int: "integer", bool: "boolean", NoneType: "null"}[hint]}
