"""Files that are whole or not there: a reader, or a crash, never sees half of one.

    write_atomically(folder / "report.json", text)
    with replace_atomically(folder / "states.safetensors", durable=True) as temporary:
        temporary.write_bytes(data)

Standard library only, so that every layer may use it.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRITING = ".writing"
"""Ending of a file that is being written; what has it after a crash may be removed."""


def write_atomically(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Write a file, which has its old content until it has all of the new one.

    Args:
        path: The file. Its folder has to exist.
        content: Bytes, or text that is written as UTF-8.
        durable: Whether to wait until the file is on the disk, so that a power cut keeps it too.
    """
    with replace_atomically(path, durable=durable) as temporary:
        temporary.write_bytes(content if isinstance(content, bytes) else content.encode())


@contextmanager
def replace_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Give a file to write to, beside `path`; it takes the place of `path` at the end, and goes after an error.

    Args:
        path: The file. Its folder has to exist.
        durable: Whether to wait until content and name are on the disk.
    """
    # A name of its own: two ranks that begin one trace write the same file at the same time.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{WRITING}")
    try:
        yield temporary
        if durable:
            flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
