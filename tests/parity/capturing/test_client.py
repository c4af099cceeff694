"""Captures by workers: shards over ranks, resume after a kill, and what the system refuses."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from parity.capturing.client import capture_to
from parity.errors import ParityError
from parity.model.tiny import embedded
from parity.tracing.trace import Trace
from tests.parity.conftest import unwrapped

COMMAND = [sys.executable, "-m", "parity", "capture", "--dtype", "float32"]


def prompts(folder: Path, count: int, tokens: int = 12) -> Path:
    file = folder / "p.jsonl"
    rows = ([(5 * i + number) % 61 for i in range(tokens)] for number in range(count))
    file.write_text(
        "".join(f'{{"id": "r{number}", "token_ids": {row}}}\n' for number, row in enumerate(rows))
    )
    return file


def same(a: Trace, b: Trace) -> bool:
    return [r.id for r in a.requests] == [r.id for r in b.requests] and all(
        torch.equal(a.tensor(r.id, tap), b.tensor(r.id, tap)) for r in a.requests for tap in a.taps
    )


def test_ranks_share_one_trace(hybrid: Path, tmp_path: Path) -> None:
    """Two processes as torchrun starts them: the trace equals one process's, proof included."""
    file = prompts(tmp_path, 5)
    capture_to(tmp_path / "one", model=str(hybrid), prompts=file, dtype="float32")
    command = [*COMMAND, "--model", str(hybrid), "--prompts", str(file), "--out", str(tmp_path / "two")]
    ranks = [
        subprocess.Popen(command, env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in (0, 1)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    one, two = Trace.open(tmp_path / "one"), Trace.open(tmp_path / "two")
    assert same(one, two) and one.manifest.backend == two.manifest.backend
    assert [call.calls for call in two.manifest.backend.calls] == [5] * 6


def test_killed_capture_resumes_and_loses_nothing(hybrid: Path, tmp_path: Path) -> None:
    """Kill -9 in the middle: what was written is kept, and the finished trace equals an undisturbed one."""
    file = prompts(tmp_path, 200, tokens=60)
    command = [*COMMAND, "--model", str(hybrid), "--prompts", str(file), "--out", str(tmp_path / "t")]
    process = subprocess.Popen(command, start_new_session=True)
    partial = tmp_path / "t.partial"
    end = time.monotonic() + 120
    while len(list(partial.glob("*.safetensors"))) < 5 and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait()
    if (tmp_path / "t").exists():
        pytest.fail("the capture ended before it could be killed; give it more prompts")
    kept = {path.name: path.stat().st_mtime_ns for path in partial.glob("request-*.safetensors")}
    with pytest.raises(ParityError, match="unfinished capture beside it"):
        Trace.open(tmp_path / "t")
    assert subprocess.run(command, check=False).returncode == 0
    untouched = [name for name, at in kept.items() if (tmp_path / "t" / name).stat().st_mtime_ns == at]
    assert len(untouched) >= len(kept) - 2, "finished requests were computed again"
    capture_to(tmp_path / "whole", model=str(hybrid), prompts=file, dtype="float32")
    assert same(Trace.open(tmp_path / "t"), Trace.open(tmp_path / "whole"))


def test_unwritable_output_is_a_message(hybrid: Path, tmp_path: Path) -> None:
    """An output below a file: two lines and exit 2, whatever the system calls it."""
    (tmp_path / "file").touch()
    file = prompts(tmp_path, 1)
    done = subprocess.run(
        [*COMMAND, "--model", str(hybrid), "--prompts", str(file), "--out", str(tmp_path / "file/t")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(unwrapped(done.stderr).strip().splitlines()) == 2, done.stderr


def test_an_embedded_target_goes_by_its_name(tmp_path: Path) -> None:
    """As in a training file; a name that none has is a message, not a question to the hub."""
    file = tmp_path / "p.txt"
    file.write_text("Compute 12 + 30.\n")
    for name, model in (("name", "embedded:dense"), ("path", str(embedded.find_embedded_target("dense")))):
        capture_to(tmp_path / name, model=model, prompts=file, dtype="float32")
    named, given = (Trace.open(tmp_path / name) for name in ("name", "path"))
    assert named.manifest.target == given.manifest.target
    with pytest.raises(ParityError, match="only dense, hybrid"):
        capture_to(tmp_path / "none", model="embedded:huge", prompts=file)
