"""One pass over a pair of [tokens, channels] tensors: every sum from which a comparison is derived.

Two implementations of one contract. `numba` compiles a loop for each pair of dtypes; it reads memory
maps in place and widens bf16, fp16 and fp8 on the fly. `torch` widens small blocks to float64; it
serves CUDA tensors and small inputs, for which a compiler would cost more than it saves.

    stats = pair_stats(candidate, reference, outliers=pick_outliers(channel_mean_square(reference)))
    stats.relative_l2(robust=True)         # [tokens], |a - b| / |b| without the massive channels

The contract. `a` is the candidate and `b` the reference. An element that is not finite on either side
is left out of every sum and counted; on both sides at once only where both are NaN, or one infinity.
`robust` sums leave out the channels in `outliers`. Sums agree with float64 to 1e-6 (of |a||b| for the dot
product, of sum |x| for sums of signed numbers); in a channel's sums, elements below 1e-18 of a narrow format
may count as 0 where their row is larger. A row's sums depend on that row alone and channel sums are combined
over fixed blocks of rows in a fixed tree, so that shards of whole blocks merge to the same bits as one pass.
All additions have a fixed order, so that machines agree too (same implementation: they differ).
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from parity.kernel.outlier_channels import MAX_OUTLIERS as MAX_OUTLIERS
from parity.kernel.outlier_channels import OUTLIER_TIMES as OUTLIER_TIMES
from parity.kernel.outlier_channels import channel_mean_square as channel_mean_square
from parity.kernel.outlier_channels import pick_outliers as pick_outliers

FloatSums = NDArray[np.float64]
Implementation = Literal["numba", "torch"]

BLOCK_ROWS = 256
"""Rows of one leaf of the merge tree. Shards begin at multiples of it."""
NUMBA_FROM_BYTES = 128 << 20
"""Bytes of both sides above which numba pays. Measured on one thread with tests/bench/bench_compare.py: the full set
by torch .2 GB/s; by numba 12 GB/s after .8 s for its import and the cached code, or 5 s for a first compile."""
_AT_ONCE = 1 << 21
"""Elements of each side that one call takes: enough that calling costs nothing, few enough to share out."""
_CACHED = 512 << 10
"""Bytes of both sides that stay in a core's second-level cache, half of it on common machines."""
_LANES_HOLD = {True: (2.0**-80, 2.0**120), False: (2.0**-900, 2.0**1000)}
"""Narrow formats or not: |a|^2 and |b|^2 of a row that float32 (float64) lanes can neither overflow nor lose."""
ULP_EDGES = (0, 1, 4, 16, 64)
FIELDS = (
    "dot",
    "aa",
    "bb",
    "dd",
    "sum_abs",
    "sum_a",
    "sum_b",
    "max_abs",
    "dot_r",
    "aa_r",
    "bb_r",
    "dd_r",
    "bad_a",
    "bad_b",
    "bad_both",
)
"""Rows of `PairStats.sums`; `_r` marks the robust sums, `bad` counts elements that are not finite."""
SIGNIFICAND_BITS = {
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float32: 23,
    torch.float64: 52,
}
_INTEGER = {
    torch.float8_e4m3fn: (torch.uint8, np.uint8),
    torch.float8_e5m2: (torch.uint8, np.int8),
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float16: (torch.int16, np.int16),
    torch.float32: (torch.int32, np.uint32),
    torch.float64: (torch.int64, np.uint64),
}
"""The integer view that names a dtype to numba: its types stand for formats (int16 is fp16)."""
_INFINITY = {
    torch.float8_e4m3fn: 0x7E,
    torch.float8_e5m2: 0x7C,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
"""Largest magnitude code that is not NaN (e4m3fn has no infinity)."""


@dataclass(frozen=True, slots=True, eq=False)
class PairStats:
    """Sums over one range of rows of a pair of tensors. `merge_sums` joins ranges; methods derive the rest."""

    start: int
    """First row, a multiple of BLOCK_ROWS."""
    width: int
    outliers: tuple[int, ...]
    sums: FloatSums
    """[len(FIELDS), rows]."""
    nodes: dict[tuple[int, int], FloatSums] | None
    """Merge tree: (level, index) to [3, channels] sums of dd, aa, bb over 2**level blocks of rows."""
    ulp: NDArray[np.int64] | None
    """[6] elements whose ULP distance is at most 0, 1, 4, 16, 64, or more (each counted once)."""

    @property
    def rows(self) -> int:
        """Number of tokens covered."""
        return int(self.sums.shape[1])

    def field(self, name: str) -> FloatSums:
        """[tokens] one of FIELDS."""
        values: FloatSums = self.sums[FIELDS.index(name)]
        return values

    def relative_l2(self, *, robust: bool = False) -> FloatSums:
        """[tokens] |a - b| / |b|. Two zero rows are equal (0); anything against a zero row is inf."""
        tail = "_r" if robust else ""
        return ratio(np.sqrt(self.field("dd" + tail)), np.sqrt(self.field("bb" + tail)))

    def cosine_gap(self, *, robust: bool = False) -> FloatSums:
        """[tokens] 1 - cosine, from |a - b|^2, exact near 0. A zero row against another has gap 1."""
        tail = "_r" if robust else ""
        a, b = np.sqrt(self.field("aa" + tail)), np.sqrt(self.field("bb" + tail))
        return _gap(self.field("dd" + tail), a, b)

    def cosine(self, *, robust: bool = False) -> FloatSums:
        """[tokens] cosine similarity."""
        return 1.0 - self.cosine_gap(robust=robust)

    def flat(self, *, robust: bool = False) -> tuple[float, float]:
        """Cosine and relative L2 of the whole range taken as one vector: shown, never a gate."""
        tail = "_r" if robust else ""
        dd, aa, bb = (np.array([self.field(name + tail).sum()]) for name in ("dd", "aa", "bb"))
        return 1.0 - float(_gap(dd, np.sqrt(aa), np.sqrt(bb))[0]), float(ratio(np.sqrt(dd), np.sqrt(bb))[0])

    def zero_rows(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[tokens] flags of each side: the whole row is zero (and both rows are finite)."""
        finite = (self.field("bad_a") + self.field("bad_b")) == 0
        return finite & (self.field("aa") == 0), finite & (self.field("bb") == 0)

    def channels(self) -> FloatSums:
        """[3, channels] sums of |a - b|^2, |a|^2, |b|^2 over the rows, folded in canonical order."""
        if self.nodes is None:
            raise ValueError("these statistics were computed without channels")
        total = np.zeros((3, self.width))
        for _, node in sorted(self.nodes.items(), key=lambda item: item[0][1] << item[0][0]):
            total = total + node
        return total


def ratio(top: FloatSums, bottom: FloatSums | np.float64) -> FloatSums:
    """top / bottom, elementwise, with 0 / 0 = 0 and x / 0 = inf."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(top == 0, 0.0, top / bottom)


def _gap(dd: FloatSums, a: FloatSums, b: FloatSums) -> FloatSums:
    """1 - cosine from |a - b|^2 and the two norms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = (dd - (a - b) ** 2) / (2 * a * b)
    return np.where(a * b == 0, np.where(a == b, 0.0, 1.0), np.clip(gap, 0.0, 2.0))


def merge_sums(parts: Iterable[PairStats]) -> PairStats:
    """Join statistics of adjacent ranges of rows, in any order of arrival. Bit-identical to one pass."""
    ordered = sorted(parts, key=lambda part: part.start)
    first = ordered[0]
    for left, right in zip(ordered, ordered[1:], strict=False):
        end = left.start + left.rows
        if end != right.start or right.start % BLOCK_ROWS or left.outliers != right.outliers:
            raise ValueError(
                f"rows {right.start}.. do not continue rows {left.start}..{end} at a multiple "
                f"of {BLOCK_ROWS} with the same outlier channels"
            )
    nodes: dict[tuple[int, int], FloatSums] | None = None
    if all(part.nodes is not None for part in ordered):
        nodes = _fold_siblings({key: node for part in ordered for key, node in (part.nodes or {}).items()})
    ulps = [part.ulp for part in ordered if part.ulp is not None]
    ulp = np.sum(ulps, axis=0) if len(ulps) == len(ordered) else None
    sums = np.concatenate([part.sums for part in ordered], axis=1)
    return PairStats(first.start, first.width, first.outliers, sums, nodes, ulp)


def _fold_siblings(nodes: dict[tuple[int, int], FloatSums]) -> dict[tuple[int, int], FloatSums]:
    """Combine sibling nodes of the merge tree as far as they go: (l, 2i) + (l, 2i + 1) = (l + 1, i)."""
    nodes = dict(nodes)
    pending = sorted(nodes)
    while pending:
        level, index = pending.pop(0)
        left, right = (level, index & ~1), (level, index | 1)
        if left in nodes and right in nodes:
            nodes[(level + 1, index >> 1)] = nodes.pop(left) + nodes.pop(right)
            pending.append((level + 1, index >> 1))
    return nodes


def choose(bytes_of_both_sides: int, *, cuda: bool = False) -> Implementation:
    """Which implementation to use. Decide once a comparison, never a shard: they differ in the last bits."""
    return "torch" if cuda or bytes_of_both_sides < NUMBA_FROM_BYTES else "numba"


def pair_stats(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    outliers: Sequence[int] = (),
    full: bool = True,
    start: int = 0,
    implementation: Implementation | None = None,
    threads: int = 1,
) -> PairStats:
    """Sums over two [tokens, channels] tensors of any dtypes of SIGNIFICAND_BITS.

    `full` adds channel sums and, where dtypes match, ULP counts. `start` is the first row's number in
    the whole tensor (a multiple of BLOCK_ROWS). `threads` spreads blocks of rows; it changes no bit.
    """
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"two [tokens, channels] tensors of one shape, not {[*a.shape]} and {[*b.shape]}")
    if start % BLOCK_ROWS:
        raise ValueError(f"a shard starts at a multiple of {BLOCK_ROWS} rows, not at {start}")
    # Shared out in ranges of whole blocks, whose sums do not depend on who computes them.
    implementation = implementation or choose(a.nbytes + b.nbytes, cuda=a.is_cuda)
    run = _numba_runner(a, b, full) if implementation == "numba" else _torch_runner(a, b, full)
    left_out = tuple(sorted(outliers))
    rows, width = a.shape
    step = BLOCK_ROWS * max(1, _AT_ONCE // (BLOCK_ROWS * max(1, width)))
    ranges = [slice(at, min(rows, at + step)) for at in range(0, rows, step)]
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(lambda part: run(part, left_out), ranges))
    else:
        parts = [run(part, left_out) for part in ranges]
    # Put together: rows one after the other, channel sums up the merge tree.
    sums = np.concatenate([part[0] for part in parts], axis=1) if parts else np.zeros((len(FIELDS), 0))
    if not full:
        return PairStats(start, width, left_out, sums, None, None)
    blocks = (block for part in parts for block in part[1])
    nodes = _fold_siblings({(0, start // BLOCK_ROWS + at): block for at, block in enumerate(blocks)})
    ulp = sum((part[2] for part in parts), np.zeros(6, np.int64)) if a.dtype == b.dtype else None
    return PairStats(start, width, left_out, sums, nodes, ulp)


SumBlocks = tuple[FloatSums, FloatSums, NDArray[np.int64]]
"""Of some blocks of rows: sums [fields, rows], channel sums [blocks, 3, width] and ULP counts [6] (zeros if not
asked)."""
Runner = Callable[[slice, tuple[int, ...]], SumBlocks]


def _torch_runner(a: torch.Tensor, b: torch.Tensor, full: bool) -> Runner:
    """The torch implementation: float64 throughout, in pieces of about a million elements."""
    piece = max(1, min(BLOCK_ROWS, (1 << (24 if a.is_cuda else 17)) // max(1, a.shape[1])))

    def run(rows: slice, outliers: tuple[int, ...]) -> SumBlocks:
        sums, channels, ulp = [], [], np.zeros(6, np.int64)
        for first in range(rows.start, rows.stop, BLOCK_ROWS):
            end, total = min(rows.stop, first + BLOCK_ROWS), np.zeros((3, a.shape[1]))
            for at in range(first, end, piece):
                some = slice(at, min(end, at + piece))
                part, squares = _torch_piece(a[some], b[some], outliers, full)
                sums.append(part)
                total += squares
                if full and a.dtype == b.dtype:
                    ulp += _torch_ulp(a[some], b[some])
            channels.append(total)
        return np.concatenate(sums, axis=1), np.stack(channels), ulp

    return run


def _torch_piece(
    a: torch.Tensor, b: torch.Tensor, outliers: tuple[int, ...], full: bool
) -> tuple[FloatSums, FloatSums]:
    """Per-token sums of FIELDS [fields, rows], and channel sums of dd, aa, bb [3, channels] if `full`."""
    x, y = a.to(torch.float64, copy=True), b.to(torch.float64, copy=True)
    counts = x.new_zeros(3, x.shape[0])
    if not bool(torch.isfinite(x.sum() + y.sum())):
        good_a, good_b = torch.isfinite(x), torch.isfinite(y)
        same = (x == y) | (torch.isnan(x) & torch.isnan(y))
        counts = torch.stack([(~good_a).sum(1), (~good_b).sum(1), (~good_a & ~good_b & same).sum(1)]).to(
            torch.float64
        )
        x, y = torch.where(good_a & good_b, x, 0.0), torch.where(good_a & good_b, y, 0.0)
    squares = np.zeros((3, x.shape[1]))
    if full:
        squares = np.asarray(_tree(torch.stack([(side * side).T for side in (x - y, x, y)])).cpu().numpy())
    index = torch.tensor(outliers, dtype=torch.int64, device=x.device)
    massive = _torch_sums(x[:, index], y[:, index])
    x[:, index], y[:, index] = 0.0, 0.0
    rest = _torch_sums(x, y)
    both = torch.cat((rest[:7] + massive[:7], torch.maximum(rest[7], massive[7])[None]))
    return np.asarray(torch.cat((both, rest[:4], counts)).cpu().numpy()), squares


def _tree(values: torch.Tensor) -> torch.Tensor:
    """[..., n] summed over n in a fixed tree of elementwise additions: torch's own sum adds in as many lanes as
    the machine is wide."""
    while values.shape[-1] > 1:
        half, odd = values.shape[-1] // 2, values.shape[-1] % 2
        joined = values[..., :half] + values[..., half : 2 * half]
        if odd:
            joined[..., 0] += values[..., -1]
        values = joined
    return values[..., 0]


def _torch_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[8, rows] the first eight FIELDS of two finite float64 tensors."""
    if not x.shape[1]:
        return x.new_zeros(8, x.shape[0])
    d = x - y
    products = [_tree(p * q) for p, q in ((x, y), (x, x), (y, y), (d, d))]
    size = d.abs_()
    return torch.stack([*products, _tree(size), _tree(x), _tree(y), size.amax(1)])


def _torch_ulp(a: torch.Tensor, b: torch.Tensor) -> NDArray[np.int64]:
    """[6] ULP-distance counts by the sign-magnitude order of the codes; +0 and -0 are equal, NaN is never."""
    bits, top = a.element_size() * 8, _INFINITY[a.dtype]
    # Half of the integer range cannot overflow when added to itself; only float64 ever reaches it.
    word, half = (torch.int32, 1 << 29) if bits <= 16 else (torch.int64, 1 << 61)
    left, right = (side.contiguous().view(_INTEGER[a.dtype][0]).to(word) for side in (a, b))
    mask = (1 << (bits - 1)) - 1
    p, q = left & mask, right & mask
    apart = ((left ^ right) >> (bits - 1)) & 1 != 0
    distance = torch.where(apart, p.clamp(max=half) + q.clamp(max=half), (p - q).abs())
    distance = torch.where((p > top) | (q > top), half, distance)
    below = [int(torch.count_nonzero(distance <= edge)) for edge in ULP_EDGES]
    return np.array(below + [distance.numel()], np.int64) - np.array([0, *below], np.int64)


def _numba_runner(a: torch.Tensor, b: torch.Tensor, full: bool) -> Runner:
    """The numba implementation over integer views of the tensors: nothing is copied."""
    from parity.kernel.loops import compile_loops

    left, right = (
        side.contiguous().view(_INTEGER[side.dtype][0]).numpy().view(_INTEGER[side.dtype][1])
        for side in (a, b)
    )
    low, high = _LANES_HOLD[max(a.element_size(), b.element_size()) < 4]
    level = 0 if not full else 2 if a.dtype == b.dtype else 1
    # A multiple of 8 rows that stays in the second-level cache between the loops over it.
    piece = max(8, (_CACHED >> 3) // max(1, a.shape[1] * (a.element_size() + b.element_size())) * 8)
    loops = compile_loops()

    def run(rows: slice, outliers: tuple[int, ...]) -> SumBlocks:
        count = rows.stop - rows.start
        sums, ulp = np.zeros((count, len(FIELDS))), np.zeros(6, np.int64)
        channels = np.zeros((-(-count // BLOCK_ROWS), 3, a.shape[1]) if full else (0, 3, 1))
        mask = np.full(a.shape[1], 0xFFFF, np.uint16)
        mask[list(outliers)] = 0
        loops(left[rows], right[rows], mask, low, high, BLOCK_ROWS, piece, level, (sums, channels, ulp))
        return sums.T, channels, ulp

    return run
