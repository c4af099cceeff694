"""How long the quick commands take to start, beside a bare Python and beside importing torch.

    python tests/bench/bench_startup.py [REPORT]

Processor and wall seconds, medians of interleaved runs; the promise is .3 s on a quiet core.
"""

import resource
import statistics
import subprocess
import sys
import time

ROUNDS = 9


def measured(command: list[str]) -> tuple[float, float]:
    """(processor seconds, wall seconds) of one run."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    """Print the table."""
    commands = {
        "python -c pass": ["-c", "pass"],
        "parity --help": ["-m", "parity", "--help"],
        "parity probes": ["-m", "parity", "probes"],
        "import torch": ["-c", "import torch"],
    }
    if len(sys.argv) > 1:
        commands["parity show"] = ["-m", "parity", "show", sys.argv[1]]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(measured(command))
    print(f"{'command':16} {'processor s':>12} {'wall s':>8}   (medians of {ROUNDS})")
    for name, runs in times.items():
        print(
            f"{name:16} {statistics.median(r[0] for r in runs):12.3f} {statistics.median(r[1] for r in runs):8.3f}"
        )


if __name__ == "__main__":
    main()
