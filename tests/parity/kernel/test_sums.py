"""Both implementations of the kernel against float64 numpy, and merging to the same bits."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from parity.kernel.sums import (
    BLOCK_ROWS,
    FIELDS,
    MAX_OUTLIERS,
    Implementation,
    PairStats,
    channel_mean_square,
    choose,
    merge_sums,
    pair_stats,
    pick_outliers,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
BOTH: list[Implementation] = ["torch", "numba"]


def pair(
    dtype: torch.dtype,
    rows: int = 37,
    width: int = 131,
    other: torch.dtype | None = None,
    scale: float = 1.0,
    damaged: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A reference and a noisy candidate with two massive channels, zero rows, NaN and infinity."""
    generator = torch.Generator().manual_seed(rows * width)
    b = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale
    a = b + 0.01 * scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    if width > 7 and torch.finfo(dtype).max > 1e5 and scale == 1.0:
        a[:, 7] *= 1000
        b[:, 7] *= 1000
    if damaged and rows > 8:
        a[2], b[2], a[3] = 0, 0, 0
        a[5, 1], b[5, 1], a[6, 2], b[6, 9] = float("nan"), float("nan"), float("nan"), float("nan")
        if dtype != torch.float8_e4m3fn:
            a[8, 3], b[8, 4] = float("inf"), float("-inf")
            a[8, 5], b[8, 5] = float("inf"), float("inf")
            a[8, 6], b[8, 6] = float("inf"), float("-inf")
            a[8, 7], b[8, 7] = float("nan"), float("inf")
    return a.to(dtype), b.to(other or dtype)


def reference(a: torch.Tensor, b: torch.Tensor, outliers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """FIELDS, channel sums and scales in float64 numpy, written from the contract."""
    x, y = a.double().numpy(), b.double().numpy()
    good = np.isfinite(x) & np.isfinite(y)
    bad = {
        "bad_a": (~np.isfinite(x)).sum(1),
        "bad_b": (~np.isfinite(y)).sum(1),
        "bad_both": (~np.isfinite(x) & ((x == y) | (np.isnan(x) & np.isnan(y)))).sum(1),
    }
    x, y = np.where(good, x, 0), np.where(good, y, 0)
    kept = [c for c in range(x.shape[1]) if c not in outliers]
    d, xr, yr = x - y, x[:, kept], y[:, kept]
    out = {
        "dot": (x * y).sum(1),
        "aa": (x * x).sum(1),
        "bb": (y * y).sum(1),
        "dd": (d * d).sum(1),
        "sum_abs": abs(d).sum(1),
        "sum_a": x.sum(1),
        "sum_b": y.sum(1),
        "max_abs": abs(d).max(1),
        "dot_r": (xr * yr).sum(1),
        "aa_r": (xr * xr).sum(1),
        "bb_r": (yr * yr).sum(1),
        "dd_r": ((xr - yr) ** 2).sum(1),
        **{key: value.astype(float) for key, value in bad.items()},
    }
    out["channels"] = np.stack([(d * d).sum(0), (x * x).sum(0), (y * y).sum(0)])
    # What 1e-6 is relative to: sums that can cancel are measured against what was added.
    out["scale_dot"], out["scale_dot_r"] = np.sqrt(out["aa"] * out["bb"]), np.sqrt(out["aa_r"] * out["bb_r"])
    out["scale_sum_a"], out["scale_sum_b"] = abs(x).sum(1), abs(y).sum(1)
    return out


def check(stats: PairStats, a: torch.Tensor, b: torch.Tensor, outliers: tuple[int, ...]) -> None:
    """Every sum within 1e-6 of the reference."""
    expected = reference(a, b, outliers)
    for name in FIELDS:
        scale = expected.get(f"scale_{name}", abs(expected[name]))
        assert np.all(abs(stats.field(name) - expected[name]) <= 1e-6 * scale), name
    assert np.allclose(stats.channels(), expected["channels"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_float64(dtype: torch.dtype, implementation: Implementation) -> None:
    for rows, width, outliers in ((37, 131, (7,)), (9, 2100, (0, 7, 1030, 2099)), (1, 1, ()), (2, 33, (32,))):
        a, b = pair(dtype, rows, width)
        check(pair_stats(a, b, outliers=outliers, implementation=implementation), a, b, outliers)


@pytest.mark.parametrize("implementation", BOTH)
def test_widens_two_dtypes(implementation: Implementation) -> None:
    a, b = pair(torch.bfloat16, other=torch.float32)
    stats = pair_stats(a, b, outliers=(7,), implementation=implementation)
    check(stats, a, b, (7,))
    assert stats.ulp is None


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e25])
def test_sizes_that_float32_lanes_would_lose(scale: float, implementation: Implementation) -> None:
    a, b = pair(torch.bfloat16, scale=scale, damaged=False)
    check(pair_stats(a, b, implementation=implementation), a, b, ())


def ulp_by_rank(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """ULP counts from the position of each value among all values of its dtype, sorted."""
    bits = a.element_size() * 8
    codes = torch.arange(1 << bits).to(torch.int16 if bits == 16 else torch.uint8)
    values = codes.view(a.dtype).double()
    order = torch.unique(values[~values.isnan()])  # -0 and +0 are one value
    p, q = a.double().flatten(), b.double().flatten()
    distance = (torch.searchsorted(order, p) - torch.searchsorted(order, q)).abs()
    distance[p.isnan() | q.isnan()] = 1 << 20
    below = [int((distance <= edge).sum()) for edge in (0, 1, 4, 16, 64)]
    counts: list[int] = np.diff([0, *below, distance.numel()]).tolist()
    return counts


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if torch.finfo(dtype).bits <= 16], ids=str)
def test_ulp_counts_every_code(dtype: torch.dtype, implementation: Implementation) -> None:
    bits = torch.finfo(dtype).bits
    codes = torch.arange(1 << bits).to(torch.int16 if bits == 16 else torch.uint8)
    a = codes.view(dtype)[None]
    b = codes[torch.randperm(1 << bits, generator=torch.Generator().manual_seed(0))].view(dtype)[None]
    near = codes.roll(3).view(dtype)[None]
    for other in (a, b, near):
        stats = pair_stats(a.contiguous(), other.contiguous(), implementation=implementation)
        assert stats.ulp is not None and stats.ulp.tolist() == ulp_by_rank(a, other)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ulp_across_zero_and_at_the_ends(dtype: torch.dtype, implementation: Implementation) -> None:
    info, nan = torch.finfo(dtype), float("nan")
    tiny, top, one = info.smallest_normal * info.eps, info.max, 1 + info.eps
    a = torch.tensor([[0.0, tiny, 1.0, one, -top, nan, float("inf"), 1.0]], dtype=dtype)
    b = torch.tensor([[-0.0, -tiny, one, 1.0, top, nan, top, -1.0]], dtype=dtype)
    stats = pair_stats(a, b, implementation=implementation)
    # 0 apart: zeros; 1: next to 1 (twice), infinity and the largest; 2: across zero; far: the rest.
    assert stats.ulp is not None and stats.ulp.tolist() == [1, 3, 1, 0, 0, 3]


@pytest.mark.parametrize("implementation", BOTH)
def test_shards_merge_to_the_same_bits(implementation: Implementation) -> None:
    a, b = pair(torch.bfloat16, rows=5 * BLOCK_ROWS + 17, width=40)
    whole = pair_stats(a, b, outliers=(7,), implementation=implementation)
    for cuts in ((0, 1, 6), (0, 2, 3, 6), (0, 1, 2, 3, 4, 5, 6)):
        parts = []
        for begin, end in zip(cuts, cuts[1:], strict=False):
            rows = slice(begin * BLOCK_ROWS, end * BLOCK_ROWS)
            parts.append(
                pair_stats(a[rows], b[rows], outliers=(7,), start=rows.start, implementation=implementation)
            )
        joined = merge_sums(reversed(parts))
        assert np.array_equal(joined.sums, whole.sums)
        assert np.array_equal(joined.channels(), whole.channels())
        assert joined.ulp is not None and whole.ulp is not None and joined.ulp.tolist() == whole.ulp.tolist()
    again = pair_stats(a, b, outliers=(7,), implementation=implementation, threads=2)
    assert np.array_equal(again.sums, whole.sums) and np.array_equal(again.channels(), whole.channels())


def test_merge_refuses_a_gap_and_other_outliers() -> None:
    a, b = pair(torch.float32, rows=3 * BLOCK_ROWS, width=10)
    parts = [pair_stats(a[:BLOCK_ROWS], b[:BLOCK_ROWS], start=at) for at in (0, 2 * BLOCK_ROWS)]
    with pytest.raises(ValueError, match="do not continue"):
        merge_sums(parts)
    with pytest.raises(ValueError, match="multiple of 256"):
        pair_stats(a, b, start=100)
    with pytest.raises(ValueError, match="one shape"):
        pair_stats(a, b[:, :4])
    with pytest.raises(ValueError, match="without channels"):
        pair_stats(a, b, full=False).channels()


def test_derived_values_and_zero_rows() -> None:
    a = torch.tensor([[3.0, 4.0], [0, 0], [0, 0], [1, 0], [2, 0]])
    b = torch.tensor([[3.0, 4.0], [0, 0], [1, 1], [0, 1], [1, 0]])
    stats = pair_stats(a, b)
    assert stats.relative_l2().tolist() == [0, 0, 1, 2**0.5, 1]
    assert stats.cosine().tolist() == [1, 1, 0, 0, 1]
    assert [flags.tolist() for flags in stats.zero_rows()] == [
        [False, True, True, False, False],
        [False, True, False, False, False],
    ]
    nothing = pair_stats(torch.zeros(0, 5), torch.zeros(0, 5))
    assert nothing.rows == 0 and nothing.relative_l2().size == 0 and nothing.flat() == (1.0, 0.0)
    against_zero = pair_stats(torch.ones(1, 4), torch.zeros(1, 4))
    assert against_zero.relative_l2().tolist() == [float("inf")]


def test_cosine_gap_is_exact_near_one() -> None:
    b = torch.randn(4, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = torch.randn(4, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turned -= (turned * b).sum(1, keepdim=True) / (b * b).sum(1, keepdim=True) * b
    a = b + 1e-7 * turned * b.norm(dim=1, keepdim=True) / turned.norm(dim=1, keepdim=True)
    assert np.allclose(pair_stats(a, b).cosine_gap(), 0.5e-14, rtol=1e-4)


def test_outliers_are_the_massive_channels() -> None:
    b = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    assert pick_outliers(channel_mean_square(b)) == ()
    b[:, [3, 100]] *= 50
    assert pick_outliers(channel_mean_square(b)) == (3, 100)
    b[:, 110:140] *= 20
    assert len(pick_outliers(channel_mean_square(b))) == MAX_OUTLIERS
    assert pick_outliers(np.zeros(64)) == ()
    assert pick_outliers(np.array([1.0, 1, 1, 1e6])) == ()  # too narrow to leave anything out


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_the_lanes_cannot_hold(dtype: torch.dtype, implementation: Implementation) -> None:
    """Beside ordinary rows, rows that are tiny, huge, zero on one side, or huge in a left-out channel only."""
    a, b = pair(dtype, rows=20, width=200, damaged=False)
    top = torch.finfo(dtype).max
    for side in (a, b):
        side[1] *= 1e-25
        side[3] = side[3].double().mul(1e25).to(dtype)
        side[5, 7] = top / 4
        side[6, 9] = 1e-38
    b[4], a[8, 50:] = 0, 0
    b[9, :], a[10] = -0.0, torch.full((200,), -0.0, dtype=dtype)
    check(pair_stats(a, b, outliers=(7,), implementation=implementation), a, b, (7,))


BITS = """
import hashlib, numpy, torch
from parity.kernel.sums import pair_stats
rng = numpy.random.default_rng(0)  # torch's own normal numbers depend on the machine
x = torch.from_numpy(rng.standard_normal((300, 700), numpy.float32))
y = torch.from_numpy(rng.standard_normal((300, 700), numpy.float32)) * 0.01 + x
y[5], x[7, 3] = 0, float("nan")
for name in ("bfloat16", "float32"):
    for implementation in ("numba", "torch"):
        p, q = (side.to(getattr(torch, name)) for side in (x, y))
        s = pair_stats(p, q, outliers=(5, 600), implementation=implementation)
        digest = hashlib.sha256(s.sums.tobytes() + s.channels().tobytes() + s.ulp.tobytes()).hexdigest()
        print(name, implementation, digest)
"""


@pytest.mark.slow  # what it compiles is kept for the next run
def test_machines_of_other_widths_give_the_same_bits() -> None:
    """The same sums compiled for 128-bit vectors without fused multiply-add, and for 256 bits, as for this CPU."""
    if platform.machine() != "x86_64":
        pytest.skip("the processors named here are x86-64")
    root = str(Path(__file__).resolve().parents[3])
    answers = set()
    for numba_cpu, torch_capability in (("", ""), ("haswell", "avx2"), ("generic", "default")):
        environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        if numba_cpu:
            environment |= {"NUMBA_CPU_NAME": numba_cpu, "ATEN_CPU_CAPABILITY": torch_capability}
        done = subprocess.run(
            [sys.executable, "-c", BITS], env=environment, capture_output=True, text=True, check=True
        )
        answers.add(done.stdout)
    assert len(answers) == 1 and len(answers.pop().splitlines()) == 4


def test_choice_of_implementation() -> None:
    assert choose(1 << 20) == "torch"
    assert choose(1 << 33) == "numba"
    assert choose(1 << 33, cuda=True) == "torch"
