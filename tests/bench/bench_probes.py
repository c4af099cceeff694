"""How long each wiring probe takes on the built-in trainer, and how much memory all of them need.

    python -m tests.bench.bench_probes [unit] [tiny] [wide]

`wide`: hidden 1,024, 5 layers, vocabulary 32,768, float32 (aims: 2 s, 20 s, and 3 minutes within 8 GiB). Each size
runs in a process of its own, on one thread; peak memory is the process's largest resident set.
"""

import os
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

AIMS = {"unit": 2.0, "tiny": 20.0, "wide": 180.0}
WIDE = {
    "recipe.conditioning.layers": [0, 1, 2, 3, 4],
    "recipe.attention.layers": ["full"] * 5,
    "recipe.block.size": 16,
    "recipe.loss.weights.gamma": 7.0,
    "run.drafter.heads": 16,
    "run.drafter.kv_heads": 4,
    "run.drafter.head_dim": 64,
    "run.drafter.intermediate_size": 3072,
}


def measure(size: str) -> None:
    """Ask every probe once, and print the table."""
    import resource

    import torch

    torch.set_num_threads(1)
    from parity.model.target.backends import isolate, parse_backend

    isolate(parse_backend("torch"))
    from parity.model.recipe.config import preset
    from parity.model.training import states
    from parity.probes.adapters.builtin import Builtin
    from parity.probes.query import query_probes
    from parity.probes.subject import ExaminedAdapter

    training = preset("tiny" if size == "tiny" else "unit")
    if size == "wide":
        states.SYNTHETIC.update(hidden_size=1024, num_hidden_layers=8, vocab_size=32_768)
        training = training.with_values(WIDE)
    began = time.perf_counter()
    adapter = Builtin.open(training)
    opened = time.perf_counter() - began
    marks = list[tuple[str, float]]()
    began = time.perf_counter()
    answers = query_probes(
        ExaminedAdapter(adapter), say=lambda name: marks.append((name, time.perf_counter()))
    )
    end = time.perf_counter()
    times = [*(at for _, at in marks[1:]), end]
    print(f"{size}: opened in {opened:.1f} s")
    for (name, at), after, (_, answer) in zip(marks, times, answers, strict=True):
        print(f"  {name:<10} {after - at:8.2f} s  {answer.findings[0].outcome}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    cpu = time.process_time()
    print(
        f"  {'all':<10} {end - began:8.2f} s  (aim {AIMS[size]:g} s; {cpu:.1f} s of CPU with imports),"
        f" peak {peak:.2f} GiB"
    )


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        measure(sys.argv[2])
        return
    for size in sys.argv[1:] or AIMS:
        subprocess.run([sys.executable, "-m", "tests.bench.bench_probes", "--one", size], check=True)


if __name__ == "__main__":
    main()
