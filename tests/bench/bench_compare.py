"""How fast a comparison reads: our per-token and full sets against numpy summing the same mapped bytes.

One interleaved run: every round times every reader once, on the same two memory-mapped files, so that a
busy machine slows all alike. Rates are both sides' bytes over wall time, medians over the rounds; the
ratio to the summing rate is the figure that travels between machines, and the rate per CPU second the one
to read on a machine that is shared.

    PYTHONPATH=. python tests/bench/bench_compare.py --mib 64 --rounds 5 --dtype bfloat16
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from parity.compare_kernel import channel_mean_square, pair_stats, pick_outliers

WIDTH = 4096


def mapped_pair(folder: Path, mib: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two memory-mapped [rows, WIDTH] tensors of `mib` MiB: states with 4 massive channels, and noise."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, (mib << 20) // (WIDTH * torch.empty(0, dtype=dtype).element_size()))
    base = torch.randn(rows, WIDTH, generator=generator)
    base[:, 5::1000][:, :4] *= 100
    save_file({"x": base.to(dtype)}, folder / "b.safetensors")
    base *= 1 + 0.004 * torch.randn(rows, WIDTH, generator=generator)
    save_file({"x": base.to(dtype)}, folder / "a.safetensors")
    a, b = (safe_open(folder / f"{side}.safetensors", framework="pt").get_tensor("x") for side in "ab")
    return a, b


def byte_sum(tensor: torch.Tensor) -> int:
    """Sum the tensor's bytes as 64-bit words: what reading the memory costs."""
    return int(tensor.view(torch.int64).numpy().sum())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB of each side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        a, b = mapped_pair(Path(folder), options.mib, getattr(torch, options.dtype))
        out = pick_outliers(channel_mean_square(b))
        readers: dict[str, Callable[[], object]] = {
            "numpy sum of the bytes": lambda: byte_sum(a) + byte_sum(b),
            "numba, per token, 1 thread": lambda: pair_stats(
                a, b, outliers=out, full=False, implementation="numba"
            ),
            "numba, per token, 2 threads": lambda: pair_stats(
                a, b, outliers=out, full=False, implementation="numba", threads=2
            ),
            "numba, full set, 1 thread": lambda: pair_stats(a, b, outliers=out, implementation="numba"),
            "numba, full set, 2 threads": lambda: pair_stats(
                a, b, outliers=out, implementation="numba", threads=2
            ),
            "torch, per token": lambda: pair_stats(a, b, outliers=out, full=False, implementation="torch"),
            "torch, full set": lambda: pair_stats(a, b, outliers=out, implementation="torch"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in readers}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in readers}
        first: dict[str, float] = {}
        for _ in range(options.rounds + 1):
            for name, reader in readers.items():
                began, cpu = time.perf_counter(), time.process_time()
                reader()
                took = time.perf_counter() - began
                if first.setdefault(name, took) != took:
                    seconds[name].append(took)
                    cpu_seconds[name].append(time.process_time() - cpu)
    gigabytes = (a.nbytes + b.nbytes) / 1e9
    rates = {name: gigabytes / statistics.median(times) for name, times in seconds.items()}
    print(f"2 x {options.mib} MiB of {options.dtype} {[*a.shape]}, outliers {out}, numpy {np.__version__}")
    print(f"{'reader':30} {'GB/s':>7} {'of sum':>7} {'per CPU s':>10} {'first s':>8}")
    for name, rate in rates.items():
        print(
            f"{name:30} {rate:7.2f} {rate / rates['numpy sum of the bytes']:7.0%} "
            f"{gigabytes / statistics.median(cpu_seconds[name]):10.2f} {first[name]:8.2f}"
        )


if __name__ == "__main__":
    main()
