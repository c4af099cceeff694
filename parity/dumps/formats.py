"""What each tool writes for one request, and plain tensors by name: from files to requests and pieces.

requests, pieces, notes = read_contract("speculators", root, files, SideMap(), width=5120)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from parity.dumps.files import FILE_LIMITS, FileLimits, TensorFile, open_file
from parity.dumps.mapping import Format, SideMap, parse_axes
from parity.dumps.pieces import (
    DumpRequest,
    Read,
    Role,
    StatePiece,
    TensorPlace,
    dtype_of,
    request_id,
    require_same_pieces,
    split_tensor,
    take,
    token_ids_of,
)
from parity.errors import ParityError

TOKEN_ID_KEYS = ("token_ids", "input_ids")
"""Keys that hold token ids wherever a mapping does not say otherwise."""
PRENORM_FLAG = "hidden_states_prenorm"
"""Model-Optimizer's word for a last state from before the final norm; its reader takes its absence for post."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """One tensor that a contract promises."""

    key: str
    axes: str
    role: Role
    norm: Literal["pre", "post"] | None = None
    last_too: bool = False
    """Whether the last entry along L is the last state."""
    needed: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contract:
    """What a tool writes for one request, in one file. Sources stand beside each."""

    ids: str
    stored: tuple[_Stored, ...]
    scales: tuple[str, str] | None = None
    """Key of fp8 states and of their factors."""


_FP8 = ("hidden_states", "hidden_states_scales")
CONTRACTS: dict[str, _Contract] = {
    # speculators 0.9.0, data_generation/offline.py; hs_connectors for fp8
    "speculators": _Contract(
        ids="token_ids",
        stored=(_Stored(key="hidden_states", axes="T L H", role="slice", norm="pre", last_too=True),),
        scales=_FP8,
    ),
    # vLLM, kv_connector/v1/example_hidden_states_connector.py: layers are the caller's choice
    "vllm": _Contract(
        ids="token_ids", stored=(_Stored(key="hidden_states", axes="T L H", role="slice"),), scales=_FP8
    ),
    # SpecForge 0.2.0, algorithms/common/dflash_family_data.py (DFlash, Domino, DSpark)
    "specforge": _Contract(
        ids="input_ids",
        stored=(
            _Stored(key="hidden_states", axes="T (L H)", role="slice"),
            _Stored(key="target_last_hidden_states", axes="T H", role="last", norm="post", needed=False),
        ),
    ),
    # SpecForge 0.2.0, runtime/data_plane/offline_reader.py (EAGLE-3)
    "specforge eagle": _Contract(
        ids="input_ids",
        stored=(
            _Stored(key="aux_hidden_state", axes="T (L H)", role="slice"),
            _Stored(key="hidden_state", axes="T H", role="last", norm="post"),
        ),
    ),
    # Model-Optimizer a2fbac7, examples/speculative_decoding/collect_hidden_states
    "modelopt": _Contract(
        ids="input_ids",
        stored=(
            _Stored(key="aux_hidden_states", axes="T (L H)", role="slice", needed=False),
            _Stored(key="hidden_states", axes="T H", role="last", norm="post"),
        ),
    ),
}


def read_contract(
    kind: Format,
    root: Path,
    files: Sequence[Path],
    side: SideMap,
    *,
    width: int | None = None,
    limits: FileLimits = FILE_LIMITS,
) -> Read:
    """Requests, pieces and notes of a format with one file for each request.

    Args:
        kind: The format, a key of `CONTRACTS`.
        root: The dump's folder.
        files: Files of the dump, in the order of their requests.
        side: What the mapping declares of this side.
        width: Channels of one layer on the other side, to split an axis of layers and channels; None where unknown.
        limits: How much a file may ask of this machine.

    Raises:
        ParityError: A file that breaks its format's contract.
    """
    requests: list[DumpRequest] = []
    pieces: list[StatePiece] | None = None
    for path in files:
        # What the file has to hold; SpecForge writes EAGLE-3 drafters' states under other names.
        opened = open_file(path, limits)
        contract = CONTRACTS[kind]
        if kind == "specforge" and "aux_hidden_state" in opened.keys:
            contract = CONTRACTS["specforge eagle"]
        missing = [part.key for part in contract.stored if part.needed and part.key not in opened.keys]
        ids_key = side.token_ids or contract.ids
        missing += [ids_key] if ids_key not in opened.keys else []
        if missing:
            raise ParityError(
                f"{path.name} as {kind}, with {', '.join(missing)}",
                f"tensors {', '.join(opened.keys) or 'none'}",
                "write that file again, or name its tensors in --map (format: plain)",
            )
        # Where its states lie, the same in every file.
        ids = token_ids_of(opened, ids_key)
        places, own = _pieces_of(opened, contract, side, width, len(ids), kind)
        pieces = require_same_pieces(pieces, own, path, files[0])
        requests.append(
            DumpRequest(id=request_id(path, root, side), token_ids=ids, rows=len(ids), places=places)
        )
    # States in fp8 are widened when they are read, which is worth a note.
    scaled = {
        dtype_of(open_file(place.file, limits), place.key)
        for held in requests[:1]
        for places in held.places.values()
        for place in places
        if place.scales is not None
    }
    notes = [
        f"stored in {dtype}, one factor a token; widened to bfloat16 as its reader does" for dtype in scaled
    ]
    return requests, pieces or [], notes


def _pieces_of(
    opened: TensorFile, contract: _Contract, side: SideMap, width: int | None, rows: int, kind: Format
) -> tuple[dict[str, tuple[TensorPlace, ...]], list[StatePiece]]:
    """Places and pieces of one request's file."""
    places: dict[str, tuple[TensorPlace, ...]] = {}
    pieces: list[StatePiece] = []
    hidden = side.hidden or _own_width(opened, contract) or width
    for stored in contract.stored:
        if stored.key not in opened.keys or not opened.tensor(stored.key).numel():
            continue  # Model-Optimizer writes an empty tensor where no auxiliary layer was asked for
        scales = None
        if contract.scales and stored.key == contract.scales[0] and contract.scales[1] in opened.keys:
            scales = contract.scales[1]
        axes = parse_axes(side.axes_of(stored.key) or stored.axes, stored.key)
        for place, name, channels in split_tensor(opened, stored.key, axes, hidden, rows):
            places[name] = (replace(place, scales=scales),)
            dtype = "bfloat16" if scales else dtype_of(opened, stored.key)
            pieces.append(StatePiece(name=name, dtype=dtype, width=channels, role=stored.role))
        if stored.role == "last" or stored.last_too or (side.last is not None and stored.axes == "T L H"):
            norm, promise = _norm_state_of(opened, stored, side, kind)
            pieces[-1] = replace(pieces[-1], role="last", norm=norm, promise=promise)
    return places, pieces


def _own_width(opened: TensorFile, contract: _Contract) -> int | None:
    """Channels of one layer, where the file holds a last state of that width."""
    for stored in contract.stored:
        if stored.axes == "T H" and stored.key in opened.keys:
            return int(opened.tensor(stored.key).shape[-1])
    return None


def _norm_state_of(
    opened: TensorFile, stored: _Stored, side: SideMap, kind: Format
) -> tuple[Literal["pre", "post"] | None, str]:
    """Norm state of a last slice, and who says so: the mapping, the file's flag, the format."""
    if side.last is not None:
        return side.last, "the mapping"
    if kind == "modelopt":
        flag = opened.values.get(PRENORM_FLAG)
        if PRENORM_FLAG in opened.keys:
            flag = bool(opened.tensor(PRENORM_FLAG).any())
        if isinstance(flag, bool):
            return ("pre" if flag else "post"), f"its flag {PRENORM_FLAG}"
        return stored.norm, f"the {kind} format where {PRENORM_FLAG} is not set"
    return stored.norm, f"the {kind} format"


@dataclass(slots=True)
class _Plain:
    """What a plain dump says of one request, gathered file by file."""

    sources: dict[str, tuple[TensorFile, str]] = field(default_factory=dict)
    ids: tuple[int, ...] | None = None


def read_plain(
    root: Path,
    files: Sequence[Path],
    side: SideMap,
    *,
    width: int | None = None,
    limits: FileLimits = FILE_LIMITS,
) -> Read:
    """Requests, pieces and notes of tensors by name: a file for each request, or for each request and tap.

    Args:
        root: The dump's folder.
        files: Files of the dump, in the order of their requests.
        side: What the mapping declares of this side.
        width: Channels of one layer on the other side, to split an axis of layers and channels; None where unknown.
        limits: How much a file may ask of this machine.

    Raises:
        ParityError: A request without states, or with tensors of several lengths.
    """
    # Every file's tensors, gathered by the request that its name stands for.
    gathered: dict[str, _Plain] = {}
    skipped: set[str] = set()
    for path in files:
        opened = open_file(path, limits)
        request, tap = _plain_name(path, root, side, opened)
        held = gathered.setdefault(request, _Plain())
        for key in opened.keys:
            name = tap if tap is not None and len(opened.keys) == 1 else key
            _take_source(held, name, opened, key, side, skipped)
    # Each request's states as pieces, the same for all of them.
    requests: list[DumpRequest] = []
    pieces: list[StatePiece] | None = None
    for request, held in gathered.items():
        if not held.sources:
            raise ParityError(
                f"states of request {request!r} in {root}",
                "no floating-point tensor of two axes or more",
                "name the dump's folder, or say `files:` in --map",
            )
        places, own, rows = _plain_pieces(held, side, width)
        first = next(iter(held.sources.values()))[0].path
        pieces = require_same_pieces(pieces, own, first, files[0])
        requests.append(DumpRequest(id=request, token_ids=held.ids, rows=rows, places=places))
    left = [f"no states, so left out: {', '.join(sorted(skipped))}"] if skipped else []
    return requests, pieces or [], left


def _plain_name(path: Path, root: Path, side: SideMap, opened: TensorFile) -> tuple[str, str | None]:
    """Request and tap that a file's name stands for. An npy file is one tap, in a folder for each request."""
    name = path.relative_to(root).as_posix() if path != root else path.name
    if side.files is not None:
        parts = side.split_name(name) or {}
        return parts.get("request") or "0", parts.get("tap")
    if opened.kind == "npy":
        folder, _, last = name.rpartition("/")
        return folder or "0", last.removesuffix(".npy")
    return request_id(path, root, side), None


def _take_source(
    held: _Plain, name: str, opened: TensorFile, key: str, side: SideMap, skipped: set[str]
) -> None:
    """Sort one tensor: token ids, states, or neither (masks, positions)."""
    tensor = opened.tensor(key)
    if name == side.token_ids or (side.token_ids is None and name in TOKEN_ID_KEYS):
        held.ids = token_ids_of(opened, key)
    elif name in held.sources:
        raise ParityError(
            f"one tensor {name!r} for a request",
            f"{held.sources[name][0].path.name} and {opened.path.name}",
            "say with `files:` in --map which part of a name is the request",
        )
    elif tensor.dim() >= 2 and (tensor.is_floating_point() or _is_bits(tensor, side)):
        held.sources[name] = (opened, key)
    else:
        skipped.add(name)


def _is_bits(tensor: torch.Tensor, side: SideMap) -> bool:
    """Whether these integers are said to be bfloat16."""
    return side.dtype == "bfloat16" and tensor.dtype in (torch.uint16, torch.int16)


def _plain_pieces(
    held: _Plain, side: SideMap, width: int | None
) -> tuple[dict[str, tuple[TensorPlace, ...]], list[StatePiece], int]:
    """Places, pieces and rows of one request.

    Without declared axes a tensor is [T, H], [1, T, H] or, where the token ids say which axis is T, [T, L, H].
    """
    places: dict[str, tuple[TensorPlace, ...]] = {}
    pieces: list[StatePiece] = []
    counts: dict[str, int] = {}
    rows = len(held.ids) if held.ids is not None else None
    for name, (opened, key) in held.sources.items():
        shape = tuple(opened.tensor(key).shape)
        stacked = len(shape) == 3 and rows is not None and shape[0] == rows
        axes = parse_axes(side.axes_of(name) or ("T L H" if stacked else "T H"), name)
        bits = _is_bits(opened.tensor(key), side)
        for place, part, channels in split_tensor(opened, key, axes, side.hidden or width, rows, bits=bits):
            label = name + part.removeprefix(key)
            places[label] = (place,)
            dtype = "bfloat16" if bits else dtype_of(opened, key)
            pieces.append(StatePiece(name=label, dtype=dtype, width=channels, role="tensor"))
            counts[label] = int(take(opened, place).shape[0])
    if len(set(counts.values())) != 1:
        raise ParityError(
            f"the same number of rows in every tensor of {next(iter(held.sources.values()))[0].path.parent}",
            ", ".join(f"{name} {count}" for name, count in list(counts.items())[:6]),
            "say which axis is T under axes: in --map",
        )
    return places, pieces, next(iter(counts.values()))
