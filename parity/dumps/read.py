"""Any known dump, read as far as its headers and token ids: the format is told by content.

contents = read(Path("hidden_states"), SideMap(), width=5120)
contents.format, contents.requests[0].token_ids, [piece.name for piece in contents.pieces]
"""

from collections.abc import Sequence
from pathlib import Path

from parity.dumps.files import FILE_LIMITS, FileLimits, TensorFile, file_kind_of, files_below, open_file
from parity.dumps.formats import PRENORM_FLAG, read_contract, read_plain
from parity.dumps.mapping import Format, SideMap
from parity.dumps.pieces import DumpContents
from parity.dumps.sglang import read_sglang, tags_of
from parity.errors import ParityError


def read_dump(
    root: Path, side: SideMap | None = None, *, width: int | None = None, limits: FileLimits = FILE_LIMITS
) -> DumpContents:
    """Read a dump's headers and token ids.

    Args:
        root: Its folder, or its one file.
        side: What the mapping declares of it.
        width: Channels of one layer on the other side, to split tensors of [tokens, layers * channels].
        limits: How much a file may ask of this machine.

    Raises:
        ParityError: No readable dump there, files of two formats, or a file that breaks its format's contract.
    """
    # The files that can hold states, and how many cannot.
    side = side or SideMap()
    root = _states_folder(root)
    files, others = [], 0
    for path in files_below(root, limits):
        name = path.relative_to(root).as_posix() if path != root else path.name
        if side.split_name(name) is not None and file_kind_of(path) not in ("other", "pickle"):
            files.append(path)
        else:
            others += 1
    if not files:
        named = f" and named like {side.files!r}" if side.files else ""
        raise ParityError(
            f"a dump in {root}",
            f"{others} files, none of them safetensors, torch, gzip or npy{named}",
            "name the folder (or file) that holds hidden states, or a trace of `parity capture`",
        )
    # Each format has its reader.
    kind = side.format or _one_format(files, limits)
    if kind == "sglang":
        requests, pieces, notes = read_sglang(root, files, side, limits=limits)
    elif kind == "plain":
        requests, pieces, notes = read_plain(root, files, side, width=width, limits=limits)
    else:
        requests, pieces, notes = read_contract(kind, root, files, side, width=width, limits=limits)
    if others:
        notes = [f"{others} other files left out", *notes]
    return DumpContents(
        format=kind, root=root, requests=tuple(requests), pieces=tuple(pieces), notes=tuple(notes)
    )


def recognise_format(opened: TensorFile) -> Format:
    """The format of a file, from its keys; `plain` where no tool's contract fits."""
    keys, values = set(opened.keys), opened.values
    if opened.kind == "safetensors":
        if not {"token_ids", "hidden_states"} <= keys:
            return "plain"
        name = opened.path.name
        return "speculators" if name.startswith("hs_") and name[3:].split(".")[0].isdigit() else "vllm"
    if opened.kind == "npy":
        return "plain"
    if tags_of(opened) is not None:
        return "sglang"
    if {"input_ids", "hidden_state", "aux_hidden_state"} <= keys:
        return "specforge"
    if {"input_ids", "hidden_states"} <= keys:
        if "aux_hidden_states" in keys or {"conversation_id", PRENORM_FLAG} & (keys | set(values)):
            return "modelopt"
        return "specforge" if "loss_mask" in keys else "plain"
    return "plain"


def _states_folder(root: Path) -> Path:
    """speculators keeps the states in a folder of the data set's; the data set may be named instead."""
    inner = root / "hidden_states"
    if inner.is_dir() and not inner.is_symlink() and any(inner.glob("hs_*.safetensors")):
        return inner
    return root


def _one_format(files: Sequence[Path], limits: FileLimits) -> Format:
    """The format that all files have. Raises ParityError where they differ."""
    found: dict[Format, Path] = {}
    for path in files:
        found.setdefault(recognise_format(open_file(path, limits)), path)
    if len(found) > 1:
        raise ParityError(
            "one format in one dump",
            "; ".join(f"{path.name} is {kind}" for kind, path in found.items()),
            "name the folder of one of them, or say `format:` or `files:` in --map",
        )
    return next(iter(found))
