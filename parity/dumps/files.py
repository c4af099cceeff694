"""Files that other tools wrote, opened without running anything in them: safetensors, torch, gzip, npy.

A dump is untrusted. A torch file is read by the weights-only loader and memory-mapped, after its zip
directory was checked; a gzip stream is expanded to a file that has no name, within limits; numpy never
unpickles. What would run code, lies outside the folder, is cut short or is named as what it is not ends
as a ParityError.

    for file in files_below(Path("dump")):
        opened = open_file(file)
        opened.keys, opened.tensor(opened.keys[0])      # memory-mapped
"""

import gzip
import os
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from parity.errors import ParityError

FileKind = Literal["safetensors", "torch", "gzip", "npy", "pickle", "other"]
"""What a file's first bytes say it is. `pickle`: a bare pickle, or torch's format before 1.6."""
SUFFIXES: dict[str, FileKind] = {
    ".safetensors": "safetensors",
    ".npy": "npy",
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "torch",
    ".gz": "gzip",
}
"""Names that promise a kind. A file that breaks its name's promise is refused."""
VALUE = "value"
"""Key of a file that holds one tensor without a name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLimits:
    """How much a file of someone else's may ask of this machine."""

    expanded_bytes: int = 64 << 30
    """Largest expanded gzip stream: 100,000 tokens of 64 layers of 5,120 in bfloat16."""
    ratio: float = 100.0
    """Largest expansion of a gzip stream. Hidden states shrink by less than 2; deflate can reach 1,032."""
    free_bytes: int = 16 << 20
    """A stream may expand to this much whatever its ratio: a short prompt's mask is all zeros."""
    pickle_bytes: int = 16 << 20
    """Largest description of tensors in a torch file. That of a dump with 1,000 tensors takes .2 MiB."""
    records: int = 100_000
    """Most entries of a torch file's zip directory."""
    files: int = 1_000_000
    depth: int = 4
    """Folders below the given one that are looked into. SpecForge nests one deep."""


FILE_LIMITS = FileLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFile:
    """One file's tensors by key, read when they are touched."""

    path: Path
    kind: FileKind
    keys: tuple[str, ...]
    """Keys of its tensors, in the file's order."""
    values: Mapping[str, object]
    """What else a torch file says: flags, ids, text. Nothing in it is executed."""
    read: Callable[[str], torch.Tensor]

    def tensor(self, key: str) -> torch.Tensor:
        """The tensor of that key, memory-mapped where the file is. Raises ParityError where it is damaged."""
        try:
            return self.read(key)
        except ParityError:
            raise
        except Exception as error:
            raise _damaged_error(self.path, f"{key}: {_short(error)}") from error


def files_below(root: Path, limits: FileLimits = FILE_LIMITS) -> tuple[Path, ...]:
    """Regular files at or below `root`, sorted; hidden files and `.lock` files are left out.

    Raises ParityError for a missing path, for a link that leaves the folder, for a linked folder, and for
    anything that is no regular file (a pipe would never end).
    """
    if not root.exists():
        raise ParityError(f"the dump {root}", "no such file or folder", "name the folder that holds the dump")
    if not root.is_dir():
        return (_regular(root, root.resolve().parent),)
    inside = root.resolve()
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        for name in folders:
            if (here / name).is_symlink():
                raise _outside(here / name, "a link to a folder")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(here.relative_to(root).parts) >= limits.depth and folders:
            raise ParityError(
                f"the dump {root}",
                f"folders more than {limits.depth} deep ({here.name}/{folders[0]})",
                "name the folder that holds the dump's files itself",
            )
        found += [
            _regular(here / name, inside)
            for name in names
            if not name.startswith(".") and not name.endswith(".lock")
        ]
        if len(found) > limits.files:
            raise ParityError(
                f"the dump {root}", f"more than {limits.files} files", "compare a part of it at a time"
            )
    # hs_2 before hs_10, as their writer counts
    return tuple(sorted(found, key=lambda path: natural(path.relative_to(root).as_posix())))


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key in which numbers within a name count as numbers."""
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def _regular(path: Path, inside: Path) -> Path:
    """The path, if it is a regular file that lies within `inside` after links are followed."""
    try:
        real, mode = path.resolve(strict=True), path.stat().st_mode
    except OSError as error:
        raise ParityError(f"the file {path}", str(error), "repair or remove it") from error
    if not real.is_relative_to(inside):
        raise _outside(path, f"a link to {real}")
    if not stat.S_ISREG(mode):
        raise ParityError(f"the file {path}", "no regular file", "remove it from the dump's folder")
    return path


def _outside(path: Path, found: str) -> ParityError:
    return ParityError(
        f"files of the given folder only, not {path}",
        f"{found}",
        "copy what belongs to the dump into its folder",
    )


def sniff(path: Path) -> FileKind:
    """What the file's first bytes say it is."""
    with path.open("rb") as stream:
        head = stream.read(16)
    if head[:4] == b"PK\x03\x04":
        return "torch"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if head[:6] == b"\x93NUMPY":
        return "npy"
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 100_000_000:
        return "safetensors"
    if head[:1] == b"\x80" and 2 <= int.from_bytes(head[1:2], "little") <= 5:
        return "pickle"
    return "other"


def file_kind_of(path: Path) -> FileKind:
    """What the file is, by content; a name that promises something else is refused.

    Raises ParityError for a file whose name and content disagree, and for a bare pickle.
    """
    kind, promised = sniff(path), SUFFIXES.get(path.suffix.lower())
    if kind == "pickle" and promised is not None:
        raise ParityError(
            f"the file {path}",
            "a bare pickle, or a torch file from before torch 1.6; either can run code when it is read",
            "save it again with torch.save of torch 1.6 or newer, or as safetensors",
        )
    if promised is not None and kind != promised:
        holds = "an empty file" if not path.stat().st_size else _WORDS[kind]
        raise ParityError(
            f"the file {path} as {_WORDS[promised]}",
            holds,
            "write the dump again (cut short?), or give the file the suffix of what it is (renamed?)",
        )
    return kind


_WORDS: dict[FileKind, str] = {
    "safetensors": "safetensors",
    "torch": "a torch file",
    "gzip": "a gzip stream",
    "npy": "a numpy array",
    "pickle": "a pickle",
    "other": "bytes of no known kind",
}


def open_file(path: Path, limits: FileLimits = FILE_LIMITS) -> TensorFile:
    """Open one file of a dump; see the module. Raises ParityError for anything that is not plain data."""
    kind = file_kind_of(path)
    _not_being_written(path)
    if kind == "safetensors":
        return _open_safetensors(path)
    if kind == "torch":
        return _open_torch(path, path, limits)
    if kind == "gzip":
        with _expanded(path, limits) as inner:
            if sniff(inner) != "torch":
                raise _damaged_error(path, f"the gzip stream holds {_WORDS[sniff(inner)]}, no torch file")
            return _open_torch(inner, path, limits)
    if kind == "npy":
        return _open_npy(path)
    raise ParityError(
        f"the file {path}", f"{_WORDS[kind]}", "name a safetensors, torch (.pt, .ckpt, .ckpt.gz) or npy file"
    )


def _not_being_written(path: Path) -> None:
    """vLLM's connector holds an exclusive lock on `FILE.lock` until FILE is whole; such a file is refused."""
    lock = path.with_name(path.name + ".lock")
    if not lock.is_file() or lock.is_symlink():
        return
    try:
        import fcntl
    except ImportError:  # no such locks on this system, and no such writer either
        return
    with lock.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise ParityError(
                f"the file {path}", f"its writer still holds {lock.name}", "wait until the dump is written"
            ) from error


def _open_safetensors(path: Path) -> TensorFile:
    from safetensors import safe_open

    try:
        handle = safe_open(path, framework="pt")
        keys = tuple(handle.keys())
    except Exception as error:
        raise _damaged_error(path, _short(error)) from error
    return TensorFile(path=path, kind="safetensors", keys=keys, values={}, read=handle.get_tensor)


def _open_npy(path: Path) -> TensorFile:
    try:
        # copy on write: torch warns of an array that it must not write to
        array = np.load(path, mmap_mode="c", allow_pickle=False)
        tensor = torch.from_numpy(array)
    except Exception as error:  # numpy's header parser raises whatever its tokenizer does
        code = any(word in str(error) for word in ("Object arrays", "Python objects", "pickle"))
        raise (
            _refused_error(path, "an array of Python objects")
            if code
            else _damaged_error(path, _short(error))
        ) from error
    return TensorFile(path=path, kind="npy", keys=(VALUE,), values={}, read={VALUE: tensor}.__getitem__)


def _open_torch(path: Path, named: Path, limits: FileLimits) -> TensorFile:
    """A torch file whose tensors are mapped from `path`; errors name `named`."""
    _check_zip(path, named, limits)
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise _not_loaded(path, named, error) from error
    if isinstance(data, torch.Tensor):
        data = {VALUE: data}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ParityError(
            f"tensors by name in {named}",
            f"a {type(data).__name__}" if not isinstance(data, dict) else "keys that are no text",
            "save a dictionary of tensors",
        )
    tensors = {
        key: _plain(named, key, value) for key, value in data.items() if isinstance(value, torch.Tensor)
    }
    values = {key: value for key, value in data.items() if key not in tensors}
    return TensorFile(path=named, kind="torch", keys=tuple(tensors), values=values, read=tensors.__getitem__)


def _check_zip(path: Path, named: Path, limits: FileLimits) -> None:
    """A torch file stores its records plainly: no compression (which could be a bomb), none larger than it is."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise _damaged_error(named, f"its zip directory cannot be read ({_short(error)})") from error
    descriptions = [record for record in records if record.filename.endswith("/data.pkl")]
    if len(descriptions) != 1:
        raise _damaged_error(named, f"a zip archive with {len(descriptions)} data.pkl, so no torch file")
    packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
    total = sum(record.file_size for record in records)
    if packed or total > path.stat().st_size:
        what = (
            f"{packed[0]} is compressed" if packed else f"records of {total} bytes in {path.stat().st_size}"
        )
        raise ParityError(
            f"the torch file {named}",
            f"{what}; torch.save never writes that, a zip bomb does",
            "do not open it; save it again with torch.save",
        )
    if len(records) > limits.records or descriptions[0].file_size > limits.pickle_bytes:
        raise ParityError(
            f"the torch file {named}",
            f"{len(records)} records, described in {descriptions[0].file_size} bytes",
            f"a dump stays within {limits.records} records and {limits.pickle_bytes} bytes; split it",
        )


def _not_loaded(path: Path, named: Path, error: Exception) -> ParityError:
    """Why the weights-only loader gave up: code in the pickle, or damage."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # the description itself is damaged
        unsafe = []
    if unsafe:
        return _refused_error(named, f"{', '.join(sorted(unsafe)[:3])}")
    if "Weights only" in str(error) or "unsupported" in str(error).lower():
        return _refused_error(named, _short(error))
    return _damaged_error(named, _short(error))


def _plain(path: Path, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if it is dense and no larger than the bytes behind it."""
    bare = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not bare or tensor.is_quantized or tensor.is_nested or tensor.device.type != "cpu":
        raise ParityError(
            f"{key} of {path} as a dense tensor",
            f"a {type(tensor).__name__}, {tensor.layout}, on {tensor.device}",
            "save it dense, on the CPU",
        )
    size, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size > held:
        raise ParityError(
            f"{key} of {path}",
            f"{list(tensor.shape)} ({size} bytes) made of {held} bytes: an expanded view, or a bomb",
            "save it with .contiguous()",
        )
    return tensor.detach()


class _expanded:
    """A gzip stream as a plain file for the length of a `with`; a map made in it outlives the name."""

    def __init__(self, path: Path, limits: FileLimits) -> None:
        self.path, self.limits = path, limits

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(prefix="parity-", suffix=".ckpt")
        self.file = Path(name)
        try:
            with os.fdopen(handle, "wb") as out:
                for block in self._blocks():
                    out.write(block)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.file.unlink()
            raise _damaged_error(self.path, f"a broken gzip stream ({_short(error)})") from error
        except OSError as error:
            self.file.unlink()
            raise ParityError(
                f"{self.path}, expanded", str(error), "set TMPDIR to a folder with more space"
            ) from error
        except BaseException:
            self.file.unlink()
            raise
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.unlink()

    def _blocks(self) -> Iterator[bytes]:
        packed, size = self.path.stat().st_size, 0
        allowed = min(
            self.limits.expanded_bytes, max(self.limits.free_bytes, int(self.limits.ratio * packed))
        )
        with gzip.open(self.path, "rb") as stream:
            while block := stream.read(1 << 20):
                size += len(block)
                if size > allowed:
                    raise ParityError(
                        f"{self.path}, expanded",
                        f"more than {allowed} bytes from {packed}: a zip bomb, or states that are all alike",
                        f"hidden states shrink by less than 2, allowed are {self.limits.ratio:g}; look at its maker",
                    )
                yield block


def _damaged_error(path: Path, found: str) -> ParityError:
    return ParityError(f"the file {path}", f"damaged or cut short: {found}", "write that file again")


def _refused_error(path: Path, what: str) -> ParityError:
    return ParityError(
        f"plain tensors in {path}",
        f"{what}, which would run code when it is read; nothing was run",
        "save tensors, numbers and text only (torch.save of a plain dictionary, or safetensors)",
    )


def _short(error: BaseException) -> str:
    """An error of another library in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
