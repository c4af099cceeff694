"""Traces larger than memory: compared within half a GiB of anonymous memory, whatever their size.

PYTHONPATH=. pytest -m optin tests/parity/comparison/test_scale.py -s        (2 x 40 GiB; needs 1.3 GiB of disk)
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parity.tracing.trace import TRACE_SCHEMA, BackendProof, Manifest, RequestEntry, TargetIdentity, Trace
from tests.parity.conftest import tap_info

LIMIT_MIB = 512
ROOT = Path(__file__).resolve().parents[3]
COMPARE = """
import json, sys
from pathlib import Path
from parity.commands.compare import compare
from parity.diagnosis.report import comparison_report
from parity.reports import to_json
from parity.tracing.trace import Trace
# One file stands for many shards here, so it cannot name each one's request; what reading that costs is paid.
hold = Trace._check
Trace._check = lambda self, entry, said: hold(self, entry, {**said, "request": str(entry.model_dump_json())})
found = compare(sys.argv[1], sys.argv[2])
Path(sys.argv[3]).write_text(to_json.paint(comparison_report(found, "test")))
print(json.dumps({"outcome": found.outcome, "tokens": found.tokens, "kernel": found.implementation,
                  "first": [found.first_bad.request, found.first_bad.token] if found.first_bad else None,
                  "seconds": found.seconds}))
"""


def repeated_trace(folder: Path, shard: Path, requests: int, odd: tuple[int, Path] | None = None) -> Trace:
    """A trace of many requests whose shards are hard links to one file; `odd` (index, file) is another one."""
    from safetensors import safe_open

    folder.mkdir()
    with safe_open(shard, framework="pt") as held:
        taps = tuple(
            tap_info(name, held.get_tensor(name))
            for name in sorted(held.keys(), key=lambda name: int(name.split(".")[1]))
        )
        rows = held.get_slice(taps[0].name).get_shape()[0]
    entries = []
    for index in range(requests):
        name = f"request-{index:06d}.safetensors"
        os.link(odd[1] if odd is not None and index == odd[0] else shard, folder / name)
        ids = tuple((7 * index + 13 * token) % 248_000 for token in range(rows))
        entries.append(
            RequestEntry(
                id=f"r{index}",
                token_ids=ids,
                origin="given",
                prompt_tokens=rows,
                token_texts=tuple(f"t{token}" for token in ids),
                shard=name,
                rows=rows,
            )
        )
    manifest = Manifest(
        schema=TRACE_SCHEMA,
        created="2026-01-01T00:00:00Z",
        target=TargetIdentity(
            name="scale",
            revision=None,
            config_sha256="0",
            model_type="scale",
            layers=8,
            layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2,
            weights={"w": "1"},
        ),
        loader="test",
        dtype="bfloat16",
        mode="prefill",
        backend=BackendProof(requested={"delta": "torch", "conv": "torch"}, calls=(), valid=True),
        taps=taps,
        requests=tuple(entries),
        fingerprint="test",
        environment={},
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(by_alias=True))
    return Trace.open(folder)


def shards(folder: Path, rows: int, width: int, taps: int) -> tuple[Path, Path, Path]:
    """A reference shard, one with benign noise, and one with noise whose last tap has an unrelated token 5."""
    generator = torch.Generator().manual_seed(0)
    tensors: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})
    for tap in range(taps):
        base = torch.randn(rows, width, generator=generator)
        base[:, 5::1000] *= 100
        noise = 0.004 * torch.randn(rows, width, generator=generator)
        tensors[0][f"layer.{tap}.out"] = base.bfloat16()
        tensors[1][f"layer.{tap}.out"] = (base + base * noise).bfloat16()
        if tap == taps - 1:
            base[5] = torch.randn(width, generator=generator)
        tensors[2][f"layer.{tap}.out"] = (base + base * noise).bfloat16()
    files = tuple(folder / f"shard-{name}.safetensors" for name in ("b", "a", "wrong"))
    for file, held in zip(files, tensors, strict=True):
        save_file(held, file)
    return files[0], files[1], files[2]


def compared(folder: Path, out: Path) -> tuple[dict[str, object], float, float]:
    """What a comparison in a process of its own says, its peak of anonymous memory in MiB, and its seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began, peak = time.perf_counter(), 0
    with subprocess.Popen(
        [sys.executable, "-c", COMPARE, str(folder / "a"), str(folder / "b"), str(out)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon:")]
            peak = max([peak, *(int(line[1]) for line in lines)])
            time.sleep(0.01)
        assert process.stdout is not None and process.returncode == 0
        answer = json.loads(process.stdout.read().splitlines()[-1])
    return answer, peak / 1024, time.perf_counter() - began


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads anonymous memory from /proc")
@pytest.mark.parametrize(
    "requests, rows, taps",
    [
        pytest.param(32, 2048, 4, id="2GiB"),
        pytest.param(128, 5120, 8, id="40GiB", marks=pytest.mark.optin),
    ],
)
def test_memory_does_not_grow_with_the_traces(tmp_path: Path, requests: int, rows: int, taps: int) -> None:
    """A pair of traces whose shards repeat one file; one request of many holds one wrong token, which is found."""
    reference, candidate, wrong = shards(tmp_path, rows, 4096, taps)
    at = requests * 3 // 4
    b = repeated_trace(tmp_path / "b", reference, requests)
    repeated_trace(tmp_path / "a", candidate, requests, odd=(at, wrong))
    each_side = sum(file.stat().st_size for file in b.path.glob("*.safetensors")) / 2**30
    answer, peak, seconds = compared(tmp_path, tmp_path / "report.json")
    rate = 2 * each_side * 2**30 / 1e9 / float(str(answer["seconds"]))
    print(
        f"\n2 x {each_side:.1f} GiB, {answer['tokens']} tokens: {seconds:.1f} s "
        f"({answer['seconds']:.1f} s comparing, {rate:.1f} GB/s), at most {peak:.0f} MiB anonymous"
    )
    assert each_side > 4 * LIMIT_MIB / 1024
    assert peak < LIMIT_MIB
    assert answer["tokens"] == requests * rows and answer["kernel"] == "numba"
    assert answer["outcome"] == "fail" and answer["first"] == [f"r{at}", 5]
