"""How fast a comparison reads: our per-token and full sets against summing the same mapped bytes.

One interleaved run: every round times every reader once, on the same two memory-mapped files, so that a
busy machine slows all alike. Rates are both sides' bytes over wall time, medians over the rounds; the
ratio to the summing rate with as many threads is the figure that travels between machines, and the rate per
processor second the one to read on a machine that is shared. `bench_compare_tools.py` has whole commands and peers.

    PYTHONPATH=. python tests/bench/bench_compare.py --mib 2048 --rounds 5
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from parity.kernel.sums import channel_mean_square, pair_stats, pick_outliers

WIDTH = 4096
ROWS_AT_ONCE = 4096
"""Rows that are made at a time: the files, and not this process, hold the states."""
AIM = {"per token": 0.6, "full set": 0.2}
"""Share of the summing rate (issue D)."""


def mapped_pair(folder: Path, mib: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two memory-mapped [rows, WIDTH] tensors of `mib` MiB: states with 4 massive channels, and noise."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, (mib << 20) // (WIDTH * torch.empty(0, dtype=dtype).element_size()))
    sides = torch.empty(rows, WIDTH, dtype=dtype), torch.empty(rows, WIDTH, dtype=dtype)
    for at in range(0, rows, ROWS_AT_ONCE):
        base = torch.randn(min(ROWS_AT_ONCE, rows - at), WIDTH, generator=generator)
        base[:, 5::1000][:, :4] *= 100
        sides[1][at : at + ROWS_AT_ONCE] = base.to(dtype)
        noise = torch.randn(base.shape, generator=generator)
        sides[0][at : at + ROWS_AT_ONCE] = (base * (1 + 0.004 * noise)).to(dtype)
    for letter, states in zip("ab", sides, strict=True):
        save_file({"x": states}, folder / f"{letter}.safetensors")
    a, b = (safe_open(folder / f"{side}.safetensors", framework="pt").get_tensor("x") for side in "ab")
    return a, b


def byte_sum(tensors: tuple[torch.Tensor, ...], threads: int) -> int:
    """Sum the tensors' bytes as 64-bit words: what reading the memory costs."""
    parts = [
        part
        for tensor in tensors
        for part in np.array_split(tensor.view(torch.int64).numpy().reshape(-1), 64)
    ]
    if threads == 1:
        return sum(int(part.sum()) for part in parts)
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(lambda part: int(part.sum()), parts))


def torch_loop(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    """The plain loop over 64 rows at a time: cosine, relative L2 and largest difference of each token, in float32."""
    cosine, error, largest = 1.0, 0.0, 0.0
    for at in range(0, a.shape[0], 64):
        x, y = a[at : at + 64].float(), b[at : at + 64].float()
        d = x - y
        norm = torch.linalg.vector_norm(y, dim=1)
        cosine = min(cosine, float(((x * y).sum(1) / torch.linalg.vector_norm(x, dim=1) / norm).min()))
        error = max(error, float((torch.linalg.vector_norm(d, dim=1) / norm).max()))
        largest = max(largest, float(d.abs().max()))
    return cosine, error, largest


def readers_of(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """By name: number of threads, and what reads both tensors once."""
    out = pick_outliers(channel_mean_square(b))
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    for threads in (1, 2):
        found[f"sum of the bytes, {threads}"] = (threads, lambda n=threads: byte_sum((a, b), n))  # type: ignore[misc]
    for name, full in (("per token", False), ("full set", True)):
        for threads in (1, 2):
            found[f"{name}, {threads}"] = (
                threads,
                lambda full=full, n=threads: pair_stats(  # type: ignore[misc]
                    a, b, outliers=out, full=full, implementation="numba", threads=n
                ),
            )
    found["plain torch loop, 1"] = (1, lambda: torch_loop(a, b))
    return found


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
        readers = readers_of(a, b)
        seconds: dict[str, list[float]] = {name: [] for name in readers}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in readers}
        first: dict[str, float] = {}
        for _ in range(options.rounds + 1):
            for name, (_, reader) in readers.items():
                began, cpu = time.perf_counter(), time.process_time()
                reader()
                took = time.perf_counter() - began
                if first.setdefault(name, took) != took:
                    seconds[name].append(took)
                    cpu_seconds[name].append(time.process_time() - cpu)
    gigabytes = (a.nbytes + b.nbytes) / 1e9
    wall = {name: gigabytes / statistics.median(times) for name, times in seconds.items()}
    work = {name: gigabytes / statistics.median(times) for name, times in cpu_seconds.items()}
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"2 x {options.mib} MiB of {options.dtype} {[*a.shape]}, numpy {np.__version__}, load {load}")
    print(
        f"{'reader, threads':22} {'GB/s':>7} {'of sum':>7} {'GB/CPU s':>9} {'of sum':>7} {'first s':>8}   aim"
    )
    for name, (threads, _) in readers.items():
        base = f"sum of the bytes, {threads}"
        aim = AIM.get(name.split(",")[0])
        print(
            f"{name:22} {wall[name]:7.2f} {wall[name] / wall[base]:7.0%} {work[name]:9.2f} "
            f"{work[name] / work[base]:7.0%} {first[name]:8.2f}   {f'{aim:.0%}' if aim else ''}"
        )


if __name__ == "__main__":
    main()
