"""End to end: `parity compare` against msprobe's compare and SGLang's dump comparator on the same tensors.

    PYTHONPATH=. python tests/bench/bench_compare_tools.py --mib 2048 --rounds 3 --msprobe DIR --sglang DIR

DIR is a folder into which the package and what it imports were installed (`pip install --no-deps --target DIR`):
mindstudio-probe==26.2.0 protobuf openpyxl et_xmlfile einops wheel matplotlib contourpy cycler fonttools kiwisolver
pyparsing pillow pytz tensorboard absl-py grpcio markdown werkzeug setuptools tensorboard-data-server; or
sglang==0.5.23 polars polars-runtime-32 termcolor orjson pyzmq. Neither is a dependency. SGLang's comparator is run
as it is, with stubs in place of the serving modules that its package imports on the way. One interleaved run; whole
processes, start-up and report included, the page cache warm. Rates are both sides' bytes over wall time, and over
processor time, which a shared machine changes less;
memory is the peak of anonymous pages of the process and its children, every 20 ms.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from parity.tracing.trace import TRACE_SCHEMA, BackendProof, Manifest, RequestEntry, TapInfo, TargetIdentity

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH = 8192, 4096
MEASURED = {
    "msprobe 26.2.0": "33.5 s, .128 GB/s, 2.18 GiB (docs/evidence.md: idle machine, median of 3)",
    "SGLang 0.5.23": "33.3 s, .129 GB/s, 2.07 GiB (the same run)",
}
STUBS = """
import runpy, sys, types
from pathlib import Path
from unittest.mock import MagicMock
class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
for name in ("utils", "utils.common", "managers.io_struct", "runtime_context"):
    sys.modules["sglang.srt." + name] = Stub(name)
top = types.ModuleType("sglang")
top.__path__ = [str(Path(sys.argv[1]) / "sglang")]
sys.modules["sglang"] = top
sys.argv = ["comparator", *sys.argv[2:]]
runpy.run_module("sglang.srt.debug_utils.comparator", run_name="__main__")
"""


def pair(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A reference [ROWS, WIDTH] bfloat16 with 4 massive channels, and a candidate .4 % off."""
    generator = torch.Generator().manual_seed(index)
    base = torch.randn(ROWS, WIDTH, generator=generator)
    base[:, 5::1000][:, :4] *= 100
    noisy = base * (1 + 0.004 * torch.randn(ROWS, WIDTH, generator=generator))
    return noisy.bfloat16(), base.bfloat16()


def write_trace(folder: Path, shard: dict[str, torch.Tensor]) -> None:
    """A trace of one request."""
    folder.mkdir()
    ids = tuple(index % 50_000 for index in range(ROWS))
    entry = RequestEntry(
        id="r0",
        token_ids=ids,
        origin="given",
        prompt_tokens=ROWS,
        token_texts=tuple(f"t{token}" for token in ids),
        shard="request-000000.safetensors",
        rows=ROWS,
    )
    save_file(shard, folder / entry.shard, metadata={"request": entry.model_dump_json()})
    target = TargetIdentity(
        name="bench",
        revision=None,
        config_sha256="0",
        model_type="bench",
        layers=len(shard),
        layer_types=("full_attention",) * len(shard),
        weights={"w": "1"},
    )
    taps = tuple(
        TapInfo(
            name=name, dtype="bfloat16", width=WIDTH, layer=index, norm="none", hf_index=None, meaning="bench"
        )
        for index, name in enumerate(shard)
    )
    manifest = Manifest(
        schema=TRACE_SCHEMA,
        created="2026-01-01T00:00:00Z",
        target=target,
        loader="bench",
        dtype="bfloat16",
        mode="prefill",
        backend=BackendProof(requested={"delta": "torch", "conv": "torch"}, calls=(), valid=True),
        taps=taps,
        requests=(entry,),
        fingerprint="bench",
        environment={},
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(by_alias=True))


def write_all(folder: Path, tensors: int, peers: bool) -> None:
    """Both sides in every tool's form; the peers' files are links to one file a tensor."""
    shards: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    described: tuple[dict[str, object], dict[str, object]] = ({}, {})
    for index in range(tensors):
        for side, (letter, states) in enumerate(zip("ab", pair(index), strict=True)):
            shards[side][f"layer.{index}.out"] = states
            if not peers:
                continue
            name = f"Module.layers.{index}.Block.forward.0"
            dumps, loose = folder / f"ms-{letter}" / "dump_tensor_data", folder / f"sgl-{letter}"
            for place in (dumps, loose):
                place.mkdir(parents=True, exist_ok=True)
            file = dumps / f"{name}.output.0.pt"
            torch.save(states[None], file)
            os.link(file, loose / f"name=layer_{index}___rank=0___step=0___dump_index={index}.pt")
            described[side][name] = {
                "input_args": [],
                "input_kwargs": {},
                "output": [
                    {
                        "type": "torch.Tensor",
                        "dtype": "torch.bfloat16",
                        "shape": [1, ROWS, WIDTH],
                        "Max": float(states.max()),
                        "Min": float(states.min()),
                        "Mean": float(states.mean()),
                        "Norm": float(states.norm()),
                        "requires_grad": False,
                        "data_name": file.name,
                    }
                ],
            }
    for side, letter in enumerate("ab"):
        write_trace(folder / letter, shards[side])
        if peers:
            stack = folder / f"ms-{letter}"
            dump = {
                "task": "tensor",
                "level": "L0",
                "framework": "pytorch",
                "dump_data_dir": str(stack / "dump_tensor_data"),
                "data": described[side],
            }
            (stack / "dump.json").write_text(json.dumps(dump))
            (stack / "stack.json").write_text("{}")
            (stack / "construct.json").write_text("{}")


@dataclass(frozen=True, slots=True)
class Run:
    """One process, from start to end, its children included."""

    wall: float
    cpu: float
    mib: float
    code: int
    output: str


def measured(command: Sequence[str], path: Sequence[str]) -> Run:
    """Run a command and measure it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    began, peak, before = time.perf_counter(), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=path[0]) as process:
            while process.poll() is None:
                peak = max(peak, anonymous(process.pid))
                time.sleep(0.02)
        took = time.perf_counter() - began
        output.seek(0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Run(took, cpu, peak / 2**20, process.returncode, output.read())


def anonymous(pid: int) -> int:
    """Bytes of anonymous memory of a process and its children."""
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for each in family:
        try:
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048, help="MiB of each side, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--msprobe", type=Path)
    parser.add_argument("--sglang", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_all(folder, options.mib // 64, bool(options.msprobe or options.sglang))
        python, root = sys.executable, str(ROOT)
        ours = [python, "-m", "parity", "compare", str(folder / "a"), str(folder / "b")]
        tools: dict[str, tuple[list[str], list[str]]] = {
            "parity compare": (ours, [root]),
            "parity compare --threads 2": ([*ours, "--threads", "2"], [root]),
            "parity compare --out (HTML)": ([*ours, "--out", str(folder / "report")], [root]),
        }
        if options.msprobe:
            sides = ["-tp", str(folder / "ms-a/dump.json"), "-gp", str(folder / "ms-b/dump.json")]
            script = [
                python,
                str(options.msprobe / "bin/msprobe"),
                "compare",
                *sides,
                "-o",
                str(folder / "ms-out"),
            ]
            tools["msprobe 26.2.0"] = (script, [str(options.msprobe)])
        if options.sglang:
            sides = ["--baseline-path", str(folder / "sgl-b"), "--target-path", str(folder / "sgl-a")]
            script = [python, "-c", STUBS, str(options.sglang), *sides, "--verbosity", "minimal"]
            tools["SGLang 0.5.23"] = (script, [str(options.sglang)])
        results: dict[str, list[Run]] = {tool: [] for tool in tools}
        for _ in range(options.rounds):
            for tool, (command, path) in tools.items():
                results[tool].append(measured(command, path))
    gigabytes = 2 * (options.mib // 64) * ROWS * WIDTH * 2 / 1e9
    print(
        f"2 x {options.mib} MiB of bfloat16, {options.mib // 64} tensors [{ROWS}, {WIDTH}], load {os.getloadavg()}"
    )
    print(f"{'tool':28} {'wall s':>8} {'GB/s':>7} {'CPU s':>7} {'GB/CPU s':>9} {'MiB anon':>9} {'exit':>5}")
    for tool, rounds in results.items():
        wall, cpu = (
            statistics.median(values) for values in zip(*((r.wall, r.cpu) for r in rounds), strict=True)
        )
        peak = max(run.mib for run in rounds)
        print(
            f"{tool:28} {wall:8.1f} {gigabytes / wall:7.3f} {cpu:7.1f} {gigabytes / cpu:9.3f} {peak:9.0f} "
            f"{rounds[-1].code:5}"
        )
        if rounds[-1].code not in (0, 1) or "Traceback" in rounds[-1].output:
            print(rounds[-1].output[-2000:])
    for tool, cited in MEASURED.items():
        if tool not in results:
            print(f"{tool:28} not installed here; measured before: {cited}")


if __name__ == "__main__":
    main()
