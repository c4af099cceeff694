"""Parts of a comparison and how they become one: fixed units of rows, added up in canonical order.

All rows of all requests, in canonical order, are cut into units that depend on the two traces alone. A unit's
numbers are the same whoever computes it (this process, a rank under torchrun, a run that was interrupted), and
units are added up in their order; so any number of ranks, on any machines, gives the same bits.

    share = WorkShare(ranks=ranks, folder=folder, fingerprint=fingerprint)
    for unit, parts in share.each(units_of(rows), compute):
        ...                                # parts: one `TapPart` a tap, in the order of `units`

A unit travels as safetensors: to the other ranks through PyTorch's process group, to a later run as a file.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from parity.errors import ParityError
from parity.files import write_atomically
from parity.kernel.sums import BLOCK_ROWS
from parity.model.training.distributed import Ranks

KeptColumn = NDArray[np.float32]

UNIT_ROWS = 4 * BLOCK_ROWS
"""Rows of a unit, at least: a gigabyte of a model with 64 layers of 4,096 channels, so that its partial file costs
one percent of what it saves; and few enough that four ranks share the work of 5,000 tokens."""
PART_COLUMNS = ("error", "gap", "robust_gap", "to_golden", "base_to_golden")
"""What is kept of each token at each tap; the last two where there is a golden."""
SPILL = 16 << 20
"""Bytes of kept columns above which they lie in a file that the system can page out."""
_PREFIX = "unit-"


@dataclass(frozen=True, slots=True)
class RequestSegment:
    """Some rows of one aligned request. `start` is a multiple of BLOCK_ROWS."""

    request: int
    """Index of the request in canonical order."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """The work that is done in one go, by one process."""

    number: int
    first_row: int
    """Row number of its first row among all rows of all requests."""
    segments: tuple[RequestSegment, ...]

    @property
    def rows(self) -> int:
        """How many rows it covers."""
        return sum(segment.stop - segment.start for segment in self.segments)


def units_of(rows: Sequence[int]) -> tuple[WorkUnit, ...]:
    """The units of requests of so many rows: a long request is cut every UNIT_ROWS rows, short ones are joined
    until they have as many."""
    units: list[WorkUnit] = []
    pending: list[RequestSegment] = []
    covered = 0
    for request, count in enumerate(rows):
        for start in range(0, count, UNIT_ROWS):
            pending.append(RequestSegment(request, start, min(count, start + UNIT_ROWS)))
            size = sum(segment.stop - segment.start for segment in pending)
            last = request == len(rows) - 1 and start + UNIT_ROWS >= count
            if size >= UNIT_ROWS or last:
                units.append(WorkUnit(len(units), covered, tuple(pending)))
                covered, pending = covered + size, []
    if pending:  # the last requests had no rows
        units.append(WorkUnit(len(units), covered, tuple(pending)))
    return tuple(units)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TapPart:
    """One tap's numbers over one unit."""

    columns: KeptColumn
    """[3 or 5, rows] the first or all of COLUMNS."""
    totals: NDArray[np.float64]
    """[fields] `compare_kernel.FIELDS` summed over rows; of `max_abs`, the largest."""
    channels: NDArray[np.float64]
    """[3, width] sums of |a - b|^2, |a|^2, |b|^2."""
    zeros: NDArray[np.int64]
    """[3] rows that are all zero in a, in b, on one side only."""
    ulp: NDArray[np.int64] | None
    """[6] as in `PairStats`; None where dtypes differ."""
    controls: Mapping[str, KeptColumn] = field(default_factory=dict)
    """By control's name, [2 or 4, rows]: error and gap of the broken copy, then those to the golden."""


def encode(parts: Sequence[TapPart]) -> bytes:
    """Some parts as safetensors; `decode_parts` gives back the same bits."""
    from safetensors.numpy import save

    arrays: dict[str, NDArray[np.generic]] = {}
    for index, part in enumerate(parts):
        held = {
            "columns": part.columns,
            "totals": part.totals,
            "channels": part.channels,
            "zeros": part.zeros,
        }
        held |= {"ulp": part.ulp} if part.ulp is not None else {}
        held |= {f"control {name}": values for name, values in part.controls.items()}
        arrays |= {f"{index} {name}": np.ascontiguousarray(values) for name, values in held.items()}
    return bytes(save(arrays))


def decode_parts(content: bytes) -> list[TapPart]:
    """The parts that `encode` wrote. Raises for anything else (safetensors runs no code)."""
    from safetensors.numpy import load

    found: dict[int, dict[str, NDArray[np.generic]]] = {}
    for key, values in load(content).items():
        index, _, name = key.partition(" ")
        found.setdefault(int(index), {})[name] = values
    parts = []
    for _, held in sorted(found.items()):
        controls = {
            name.removeprefix("control "): held.pop(name)
            for name in list(held)
            if name.startswith("control ")
        }
        parts.append(TapPart(controls=controls, ulp=held.pop("ulp", None), **held))  # type: ignore[arg-type]
    return parts


Compute = Callable[[WorkUnit], list[TapPart]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkShare:
    """Shares units out over ranks and keeps finished ones in a folder."""

    ranks: Ranks
    folder: Path | None
    """Where finished units are kept until the whole is done; None keeps nothing."""
    fingerprint: str
    """Of all that a unit's numbers depend on: files of another comparison are left alone and not read."""

    def each(
        self, units: Sequence[WorkUnit], compute: Compute, stage: str = ""
    ) -> Iterator[tuple[WorkUnit, list[TapPart]]]:
        """Every unit with its parts, in order, on every rank; each is computed by one rank, or read.

        `stage` tells the files of one pass from those of another.
        """
        world = self.ranks.world
        for first in range(0, len(units), world):
            together = units[first : first + world]
            mine = together[self.ranks.rank] if self.ranks.rank < len(together) else None
            if world == 1 and self.folder is None:
                yield units[first], compute(units[first])
                continue
            content = self._content(mine, compute, stage) if mine is not None else b""
            for owner, unit in enumerate(together):
                yield unit, decode_parts(_broadcast_bytes(content, owner, self.ranks))

    def clear(self) -> None:
        """Remove the files of this comparison, and the folder if nothing else is in it."""
        self.ranks.barrier()
        if self.folder is None or not self.ranks.first or not self.folder.is_dir():
            return
        for file in self.folder.glob(f"{_PREFIX}*{self.fingerprint[:16]}*"):
            file.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _content(self, unit: WorkUnit, compute: Compute, stage: str) -> bytes:
        """The unit's parts as bytes: read where a whole file is there, else computed and written."""
        if self.folder is None:
            return encode(compute(unit))
        file = self.folder / f"{_PREFIX}{unit.number:07d}{stage}-{self.fingerprint[:16]}.safetensors"
        if file.is_file():
            content = file.read_bytes()
            try:
                if all(part.columns.shape[1] == unit.rows for part in decode_parts(content)):
                    return content
            except Exception:  # damaged: it is made again
                file.unlink()
        content = encode(compute(unit))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content, durable=True)
        except OSError as error:
            raise ParityError(
                f"finished parts of the comparison kept in {self.folder}",
                str(error),
                "free some space there or choose another --out; finished parts are kept",
            ) from error
        return content


def _broadcast_bytes(content: bytes, owner: int, ranks: Ranks) -> bytes:
    """The owner's bytes, on every rank."""
    if ranks.world == 1:
        return content
    import torch.distributed as dist

    size = torch.tensor([len(content)])
    dist.broadcast(size, owner)
    if ranks.rank == owner:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), owner)
        return content
    received = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(received, owner)
    return received.numpy().tobytes()


def kept_columns(taps: int, columns: int, tokens: int) -> KeptColumn:
    """[taps, columns, tokens] zeros: in memory, or in an unnamed file where there are many.

    Raises ParityError where the folder for temporary files has no room.
    """
    shape = (taps, columns, tokens)
    size = 4 * taps * columns * tokens
    if size <= SPILL:
        return np.zeros(shape, np.float32)
    with tempfile.TemporaryFile() as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a map over a full disk kills the process
            return np.memmap(file, np.float32, "w+", shape=shape)
        except OSError as error:
            raise ParityError(
                f"{size >> 20} MiB of temporary space in {tempfile.gettempdir()}",
                str(error),
                "free some space there, or set TMPDIR to a folder that has it",
            ) from error


def quantile(values: KeptColumn, share: float) -> float:
    """The share-quantile of non-negative values, interpolated linearly, without sorting or copying them: the
    order of such floats is that of their bits, which are counted by halves."""
    place = share * (values.size - 1)
    below, above = (_in_order(values, rank) for rank in (int(place), min(int(place) + 1, values.size - 1)))
    return below + (above - below) * (place - int(place)) if above != below else below


def _in_order(values: KeptColumn, rank: int) -> float:
    """The value that would stand at `rank` if they were sorted."""
    upper = 0
    for half in (0, 1):
        counts = np.zeros(1 << 16, np.int64)
        for at in range(0, values.size, 1 << 20):
            codes = np.ascontiguousarray(values[at : at + (1 << 20)]).view(np.uint32)
            digits = codes >> 16 if half == 0 else codes[codes >> 16 == upper] & 0xFFFF
            counts += np.bincount(digits, minlength=1 << 16)
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, rank, side="right"))
        rank -= int(ends[digit - 1]) if digit else 0
        upper = (upper << 16) | digit
    return float(np.array([upper], np.uint32).view(np.float32)[0])
