"""Where the states of a dump lie: pieces of [tokens, channels] in the tensors of its files.

A piece is one layer's states of one request: a slice of a stacked tensor, a part of a concatenated one, or a
tensor of its own. Nothing here says which layer it is; a contract only says what its writer promises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from parity.dumps.files import TensorFile
from parity.dumps.mapping import Format, SideMap
from parity.errors import ParityError

Role = Literal["slice", "last", "tensor"]
"""slice: a conditioning layer; last: the state that labels or teacher logits are made of; tensor: named by
its tool, and nothing is promised."""
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """[rows, channels] somewhere in a file."""

    file: Path
    key: str
    axes: tuple[str, ...]
    """See `parity.dumps.mapping.parse_axes`."""
    layer: int | None = None
    """Index along L, or None where there is no L or it is not split."""
    hidden: int | None = None
    """Channels of one layer, where (L H) is split."""
    rows: tuple[int, int] | None = None
    scales: str | None = None
    """Key of a factor per token, for fp8 states."""
    bits: bool = False
    """Whether the file's 16-bit integers are bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePiece:
    """One slice of every request of a dump."""

    name: str
    """As the dump calls it, for example `hidden_states.2`."""
    dtype: str
    width: int
    role: Role
    norm: Literal["pre", "post"] | None = None
    """State of a last slice, as promised."""
    promise: str = ""
    """By whom: the format's contract, a flag in the file, the mapping."""


@dataclass(kw_only=True, slots=True)
class DumpRequest:
    """One request: its tokens (None where the dump does not say) and where each piece lies."""

    id: str
    token_ids: tuple[int, ...] | None
    rows: int
    places: dict[str, tuple[TensorPlace, ...]]
    """Piece name to places, one below the other."""


Read = tuple[list[DumpRequest], list[StatePiece], list[str]]
"""Requests, the pieces that each of them has, and what was left out, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpContents:
    """A dump, read as far as its headers and token ids."""

    format: Format
    root: Path
    requests: tuple[DumpRequest, ...]
    pieces: tuple[StatePiece, ...]
    notes: tuple[str, ...] = ()

    @property
    def has_token_ids(self) -> bool:
        """Whether every request says which tokens it is of."""
        return all(request.token_ids is not None for request in self.requests)


def split_tensor(
    opened: TensorFile,
    key: str,
    axes: tuple[str, ...],
    hidden: int | None,
    rows: int | None,
    *,
    bits: bool = False,
) -> list[tuple[TensorPlace, str, int]]:
    """Place, name and channels of each layer in one tensor. An axis (L H) of unknown width stays whole.

    Args:
        opened: The file.
        key: The tensor in it.
        axes: What its axes are: T tokens, L layers, H channels, B or 1 an axis of length 1, (L H) layers of channels.
        hidden: Channels of one layer, where they are known.
        rows: Tokens that it has to have; None: any number.
        bits: Whether its integers are the bits of bfloat16 numbers.

    Raises:
        ParityError: The tensor has other axes, another number of tokens, or no floating-point numbers.
    """
    # Its axes, with one of length 1 in front where the writer kept the batch.
    shape = tuple(opened.tensor(key).shape)
    if len(shape) == len(axes) + 1 and shape[0] == 1:
        axes = ("1", *axes)
    found = dict(zip(axes, shape, strict=False))
    single = [axis for axis in axes if axis in ("B", "1") and found.get(axis, 1) != 1]
    if len(shape) != len(axes) or single or (rows is not None and found["T"] != rows):
        tokens = f" for {rows} token ids" if rows is not None else ""
        raise ParityError(
            f"{key} of {opened.path} as [{' '.join(axes)}]{tokens}",
            f"{list(shape)}",
            "if its axes are in another order, say so under axes: in --map; if rows are missing, "
            "capture without a prefix cache",
        )
    if dtype_of(opened, key) not in FLOATS and not bits:
        raise ParityError(
            f"{key} of {opened.path} as states", f"{dtype_of(opened, key)}", "save floating-point states"
        )
    # One place a layer: along L, or in parts of `hidden` channels.
    whole = TensorPlace(file=opened.path, key=key, axes=axes, hidden=hidden, bits=bits)
    if "L" in found:
        layers, channels = found["L"], found["H"]
    elif "(L H)" in found and hidden is not None:
        layers, left = divmod(found["(L H)"], hidden)
        channels = hidden
        if left or not layers:
            raise ParityError(
                f"{key} of {opened.path} in layers of {hidden} channels",
                f"{found['(L H)']} channels, which is no multiple",
                "say `hidden:` in --map, or compare with a reference of the same model",
            )
    else:
        return [(whole, key, found.get("H") or found["(L H)"])]
    return [(replace(whole, layer=index), f"{key}.{index}", channels) for index in range(layers)]


def take(opened: TensorFile, place: TensorPlace) -> torch.Tensor:
    """The place's [rows, channels]: a view of the mapped file, or a copy where fp8 states are widened."""
    tensor = opened.tensor(place.key)
    if place.bits:
        tensor = tensor.view(torch.bfloat16)
    axes = place.axes
    for index in reversed([i for i, axis in enumerate(axes) if axis in ("B", "1")]):
        tensor = tensor.select(index, 0)
    axes = tuple(axis for axis in axes if axis not in ("B", "1"))
    if place.layer is not None:
        if "L" in axes:
            tensor = tensor.select(axes.index("L"), place.layer)
            axes = tuple(axis for axis in axes if axis != "L")
        else:
            assert place.hidden is not None, "a split place knows its width"
            tensor = tensor.narrow(axes.index("(L H)"), place.layer * place.hidden, place.hidden)
    if axes[0] != "T":
        tensor = tensor.transpose(0, 1)
    if place.rows is not None:
        tensor = tensor[place.rows[0] : place.rows[1]]
    if place.scales is not None:
        # in bfloat16, as hs_connectors.fp8_utils widens them for speculators' trainer
        factors = opened.tensor(place.scales).reshape(-1)[slice(*(place.rows or (None,)))]
        tensor = tensor.to(torch.bfloat16) * factors.to(torch.bfloat16)[:, None]
    return tensor


def dtype_of(opened: TensorFile, key: str) -> str:
    """The torch dtype's name."""
    return str(opened.tensor(key).dtype).removeprefix("torch.")


def token_ids_of(opened: TensorFile, key: str) -> tuple[int, ...]:
    """int [T], or [1, T]. Raises ParityError for anything else."""
    tensor = opened.tensor(key)
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool or not tensor.numel():
        raise ParityError(
            f"{key} of {opened.path} as token ids",
            f"{dtype_of(opened, key)} {list(tensor.shape)}",
            "name the token ids under token_ids: in --map",
        )
    return tuple(int(token) for token in tensor.tolist())


def request_id(path: Path, root: Path, side: SideMap) -> str:
    """What a file's name says of its request: `{request}` of the pattern, else the name without suffixes."""
    name = path.relative_to(root).as_posix() if path != root else path.name
    parts = side.split_name(name) or {}
    return parts.get("request") or re.sub(r"(\.ckpt)?\.(safetensors|npy|pth?|ckpt|gz)$", "", name)


def require_same_pieces(
    known: list[StatePiece] | None, own: list[StatePiece], path: Path, first: Path
) -> list[StatePiece]:
    """The pieces, if this file has the same as the first."""
    if known is not None and known != own:
        raise ParityError(
            "the same slices in every file of one dump",
            f"{_summary(known)} in {first.name}, {_summary(own)} in {path.name}",
            "write that file again, or name it alone",
        )
    return own


def _summary(pieces: Sequence[StatePiece]) -> str:
    kinds = ", ".join(sorted({f"{piece.dtype} of {piece.width}" for piece in pieces})) or "nothing"
    last = next((f", last {piece.norm}-norm" for piece in pieces if piece.norm), "")
    return f"{len(pieces)} slices ({kinds}{last})"
