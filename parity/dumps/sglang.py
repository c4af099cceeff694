"""A dump of SGLang's dumper: one tensor in each file, named by its tags, many requests in one tensor.

The dumper (python/sglang/srt/debug_utils/dumper.py) writes `{"value": tensor, "meta": tags}` for each call, with
name, step, rank and, inside a decoder layer, layer_id. The tokens of a step lie one behind the other:
`input_ids`, `positions`, `seq_lens` and `rids`, which it dumps as well, say where a request begins. Steps of
one request are joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from parity.dumps.files import FILE_LIMITS, VALUE, FileLimits, TensorFile, open_file
from parity.dumps.mapping import SideMap, parse_axes
from parity.dumps.pieces import FLOATS, DumpRequest, Read, StatePiece, TensorPlace, dtype_of, take
from parity.errors import ParityError

CORE = ("input_ids", "positions", "seq_lens", "rids", "req_pool_indices")
"""What the dumper records of each step beside the states."""
_DIMS = {"b": "B", "t": "T", "s": "T", "h": "H", "1": "1"}
"""Letters of the dumper's `dims` to our axes: s and t both count tokens."""


def tags_of(opened: TensorFile) -> Mapping[str, object] | None:
    """Tags of a file of SGLang's dumper: its `meta`, or for older versions those in its name; None for another file."""
    meta = opened.values.get("meta")
    if isinstance(meta, dict) and "name" in meta and (VALUE in opened.keys or VALUE in opened.values):
        return meta
    stem = opened.path.name.removesuffix(".pt")
    tags = dict(part.split("=", 1) for part in stem.split("___") if "=" in part)
    return tags if "name" in tags and "rank" in tags and VALUE in opened.keys else None


@dataclass(slots=True)
class _Step:
    """One forward pass: its tokens, and the states that have a row for each of them."""

    core: dict[str, object] = field(default_factory=dict)
    states: dict[str, tuple[TensorFile, TensorPlace]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of one step that belong to one request."""

    request: str
    rows: tuple[int, int]
    position: int
    """Position of its first token in the request."""


def read_sglang(
    root: Path, files: Sequence[Path], side: SideMap, *, limits: FileLimits = FILE_LIMITS
) -> Read:
    """Requests and pieces of a dumper's folder.

    Raises ParityError for shards that have to be joined first, and for a request whose first tokens came from a cache.
    """
    steps, notes = _steps(root, files, side, limits)
    requests: dict[str, DumpRequest] = {}
    pieces: dict[str, StatePiece] = {}
    for name, (number, total) in _without_rows(steps).items():
        notes.append(f"{name} left out: no row for each of the {total} tokens of step {number}")
        for step in steps.values():
            step.states.pop(name, None)
    for number, step in sorted(steps.items()):
        runs = _runs(root, number, step, requests)
        if not step.states:
            continue
        if not runs:  # nobody says whose tokens these are: a request for each step
            opened, place = next(iter(step.states.values()))
            runs = [_Run(f"step{number}", (0, int(take(opened, place).shape[0])), 0)]
        _add(step, runs, requests, pieces)
    _whole(root, requests, pieces)
    return list(requests.values()), list(pieces.values()), notes


def _steps(
    root: Path, files: Sequence[Path], side: SideMap, limits: FileLimits
) -> tuple[dict[int, _Step], list[str]]:
    """The files by step. Other ranks, gradients and parameters are left out, and said to be."""
    steps: dict[int, _Step] = {}
    left: dict[str, int] = {}
    for path in files:
        # What the file is of, and whether it is left out.
        opened = open_file(path, limits)
        tags = tags_of(opened)
        if tags is None:
            raise ParityError(
                f"{path} as a file of SGLang's dumper", "no tags", "remove it from the dump's folder"
            )
        name, reason = str(tags["name"]), _left_out(tags)
        if reason:
            left[reason] = left.get(reason, 0) + 1
            continue
        # A tensor that says whose the rows are, or a state with a row a token.
        step = steps.setdefault(_number(tags, "step", "curr_step", "forward_pass_id"), _Step())
        if name in CORE:
            value = opened.tensor(VALUE) if VALUE in opened.keys else opened.values[VALUE]
            step.core.setdefault(name, value)
        elif VALUE in opened.keys and dtype_of(opened, VALUE) in FLOATS and opened.tensor(VALUE).dim() >= 2:
            _put(step, name, tags, opened, side)
        else:
            left["no states"] = left.get("no states", 0) + 1
    if not any(step.states for step in steps.values()):
        raise ParityError(
            f"states in {root}", f"{len(files)} files, none with [tokens, channels]", "dump hidden states too"
        )
    return steps, [f"{count} files left out: {reason}" for reason, count in left.items()]


def _without_rows(steps: Mapping[int, _Step]) -> dict[str, tuple[int, int]]:
    """Tensors that in some step have no row for each token, as logits of a prefill; that step and its tokens."""
    lacking: dict[str, tuple[int, int]] = {}
    for number, step in sorted(steps.items()):
        total = len(_ints(step.core.get("input_ids")) or _ints(step.core.get("positions")) or ())
        for name, (opened, place) in step.states.items():
            if total and take(opened, place).shape[0] != total:
                lacking.setdefault(name, (number, total))
    return lacking


def _left_out(tags: Mapping[str, object]) -> str:
    """Why a file is not compared; empty where it is. Raises ParityError for a shard of a tensor."""
    name, dims = str(tags["name"]), str(tags.get("dims") or "")
    if name.startswith(("grad__", "param__")):
        return "gradients and parameters"
    if "[" in dims:
        raise ParityError(
            f"{name} whole",
            f"a shard of it (dims {dims!r})",
            "join the ranks' shards first, or dump with one rank",
        )
    if _number(tags, "rank") > 0:
        return "ranks other than 0"
    return "recomputed passes" if tags.get("recompute_status") == "recompute" else ""


def _number(tags: Mapping[str, Any], *names: str) -> int:
    """The first of these tags, as a number; 0 where there is none."""
    value = next((tags[name] for name in names if name in tags), 0)
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ParityError(f"the tag {names[0]} as a number", repr(value), "dump again") from error


def _put(step: _Step, name: str, tags: Mapping[str, object], opened: TensorFile, side: SideMap) -> None:
    """Name one tensor of a step: `name.layer`, and `#2` for the second of that name."""
    layer = tags.get("layer_id")
    label = name if layer is None else f"{name}.{layer}"
    count = 2
    while label in step.states:
        label = f"{label.partition('#')[0]}#{count}"
        count += 1
    shape = tuple(opened.tensor(VALUE).shape)
    dims = str(tags.get("dims") or "").split("#")[0].split()
    axes = tuple(_DIMS.get(dim, "?") for dim in dims)
    declared = side.axes_of(label)
    if declared is not None:
        axes = parse_axes(declared, label)
    if "?" in axes or axes.count("T") != 1 or axes.count("H") != 1 or len(axes) != len(shape):
        axes = ("1", "T", "H") if len(shape) == 3 and shape[0] == 1 else ("T", "H")
    if len(axes) != len(shape) or any(
        size != 1 for axis, size in zip(axes, shape, strict=True) if axis in ("B", "1")
    ):
        raise ParityError(
            f"{label} of {opened.path} as [{' '.join(axes)}]", f"{list(shape)}", "say its axes in --map"
        )
    step.states[label] = (opened, TensorPlace(file=opened.path, key=VALUE, axes=axes))


def _runs(root: Path, number: int, step: _Step, known: Mapping[str, DumpRequest]) -> list[_Run]:
    """Which rows of a step belong to which request; empty where nothing says so."""
    ids, lengths, positions = (_ints(step.core.get(name)) for name in ("input_ids", "seq_lens", "positions"))
    total = len(ids or positions or ())
    if not total:
        return []
    # Rows of each request: prompts have their lengths, decoding steps one row each; else positions tell.
    if lengths and sum(lengths) == total:
        counts = lengths
    elif lengths and len(lengths) == total:
        counts = [1] * total
    elif positions:
        breaks = [i for i in range(1, total) if positions[i] != positions[i - 1] + 1]
        counts = [end - start for start, end in zip([0, *breaks], [*breaks, total], strict=True)]
    else:
        counts = [total]
    if lengths and len(counts) != len(lengths):
        raise ParityError(
            f"the requests of step {number} in {root}",
            f"{total} tokens for lengths {lengths[:4]}, and positions that tell {len(counts)} requests",
            "dump with positions, and with the prefix cache off",
        )
    # Where in its request each run of rows begins.
    names = _names(step, number, len(counts))
    runs, start = [], 0
    for index, count in enumerate(counts):
        if positions:
            position = positions[start]
        else:
            decoding = bool(lengths) and counts != lengths
            position = lengths[index] - 1 if lengths and decoding else 0
        runs.append(_Run(_request_name(names[index], position, known), (start, start + count), position))
        start += count
    return runs


def _names(step: _Step, number: int, count: int) -> list[str]:
    """Request ids of a step: the engine's own, its slots, or the step's number."""
    rids, slots = step.core.get("rids"), _ints(step.core.get("req_pool_indices"))
    if isinstance(rids, (list, tuple)) and len(rids) == count:
        return [str(rid) for rid in rids]
    if slots and len(slots) == count:
        return [f"slot{slot}" for slot in slots]
    return [f"step{number}.{index}" if count > 1 else f"step{number}" for index in range(count)]


def _request_name(name: str, position: int, known: Mapping[str, DumpRequest]) -> str:
    """The request that these rows continue, or a new name: a slot is used again by later requests."""
    used = [key for key in known if key == name or key.partition("#")[0] == name]
    if used and known[used[-1]].rows == position:
        return used[-1]
    return name if not used else f"{name}#{len(used) + 1}"


def _ints(value: object) -> list[int] | None:
    """A tensor or list of integers; None for anything else."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return [int(number) for number in value.reshape(-1).tolist()]
    if isinstance(value, (list, tuple)) and all(isinstance(number, int) for number in value):
        return list(value)
    return None


def _add(
    step: _Step, runs: Sequence[_Run], requests: dict[str, DumpRequest], pieces: dict[str, StatePiece]
) -> None:
    """Put a step's rows below those that each request has already."""
    ids = _ints(step.core.get("input_ids"))
    for run in runs:
        held = requests.get(run.request)
        if held is None:
            held = DumpRequest(id=run.request, token_ids=() if ids else None, rows=0, places={})
            requests[run.request] = held
        if run.position != held.rows:
            raise ParityError(
                f"request {run.request!r} from its first token on",
                f"rows from token {run.position} on, after {held.rows}: the others came from a prefix cache",
                "dump with the prefix cache off (--disable-radix-cache)",
            )
        if ids and held.token_ids is not None:
            held.token_ids += tuple(ids[run.rows[0] : run.rows[1]])
        held.rows += run.rows[1] - run.rows[0]
        for name, (opened, place) in step.states.items():
            held.places[name] = (*held.places.get(name, ()), replace(place, rows=run.rows))
            width = int(take(opened, place).shape[1])
            piece = StatePiece(name=name, dtype=dtype_of(opened, VALUE), width=width, role="tensor")
            if pieces.setdefault(name, piece) != piece:
                raise ParityError(
                    f"{name} of one width and dtype in every step",
                    f"{pieces[name].dtype} of {pieces[name].width}, then {piece.dtype} of {width}",
                    "dump one model at a time",
                )


def _whole(root: Path, requests: Mapping[str, DumpRequest], pieces: Mapping[str, StatePiece]) -> None:
    """Every request has every piece, for all of its rows."""
    for held in requests.values():
        for name in pieces:
            rows = sum(place.rows[1] - place.rows[0] for place in held.places.get(name, ()) if place.rows)
            if rows != held.rows:
                raise ParityError(
                    f"{name} of request {held.id!r} in {root}",
                    f"{rows} rows of {held.rows}",
                    "dump every tensor in every step, or remove the incomplete step",
                )
