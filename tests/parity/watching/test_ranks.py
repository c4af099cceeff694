"""Watching under torchrun: two gloo processes, DDP and FSDP2, the built-in trainer and a plain loop."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.reports import step_log
from parity.reports.record import Finding
from parity.watching.ranks import _merged_findings, _merged_numbers

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from parity.model.training import distributed
from parity.model.target.backends import isolate, parse_backend
isolate(parse_backend("torch"))
from tests.parity.watching import shared

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
made = shared.run_all_cases(Path(sys.argv[1]), rank)
Path(sys.argv[1], f"made-{rank}.json").write_text(json.dumps(made))
distributed.leave(together=True)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What both ranks saw of every case of `watch_shared`, run once."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(folder / "script.py"), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder, [json.loads((folder / f"made-{rank}.json").read_text()) for rank in (0, 1)]


Made = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("who", ["trainer", "loop"])
def test_both_ranks_stop_at_the_step_that_broke(made: Made, who: str, kind: str) -> None:
    folder, ranks = made
    seen = [rank[f"{who}-{kind}"] for rank in ranks]
    for each in seen:
        assert each["losses"] == each["unwatched"] and len(each["losses"]) == 9
        assert each["failed"] == [9, "noise", "noise-on-teacher"]
        assert each["hooks"] == 0
    steps = step_log.read_step_log(folder / f"{who}-{kind}" / "steps.jsonl")
    assert [step.step for step in steps] == [1, 5, 9]
    text = (folder / f"{who}-{kind}" / "steps.jsonl").read_text()
    assert text.count("\n") == 3  # the first rank alone writes
    quiet = [f for step in steps[:2] for f in step.findings]
    assert quiet and all(f.outcome == "pass" for f in quiet), [f for f in quiet if f.outcome != "pass"]
    assert {"noise", "drift", "finite"} <= {f.name for f in steps[1].findings}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("who", ["trainer", "loop"])
def test_statistics_are_those_of_all_ranks(made: Made, who: str, kind: str) -> None:
    folder, ranks = made
    values = dict(step_log.read_step_log(folder / f"{who}-{kind}" / "steps.jsonl")[0].values)
    seen = [rank[f"{who}-{kind}"] for rank in ranks]
    assert seen[0]["first"] != seen[1]["first"]  # other rows on each rank
    for name, expected in seen[0]["expected"].items():
        assert values[name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert len(seen[0]["expected"]) >= 3


def test_what_breaks_on_one_rank_stops_all(made: Made) -> None:
    folder, ranks = made
    for rank in ranks:
        assert rank["one"]["failed"] == [5, "noise", "noise-on-teacher"] and rank["one"]["steps"] == 5
        assert rank["one"]["sentence"].startswith("rank 1: noise reaches")


def test_numbers_of_ranks_are_joined() -> None:
    """Means and deviations by hand: rank 0 holds 1, 3 and rank 1 holds 5, 5, 5, 5."""
    parts = [
        ([("x.mean", 2.0), ("x.std", 1.0), ("count", 2), ("only", 1.5)], {"x": 2}),
        ([("x.mean", 5.0), ("x.std", 0.0), ("count", 4), ("late", 0.5)], {"x": 4}),
    ]
    merged = dict(_merged_numbers(parts))
    assert merged["x.mean"] == pytest.approx(24 / 6)
    assert merged["x.std"] == pytest.approx(((9 + 1 + 1 + 1 + 1 + 1) / 6 - 0) ** 0.5)
    assert (merged["count"], merged["only"], merged["late"]) == (2, 1.5, 0.5)


def test_the_worst_outcome_of_any_rank_counts() -> None:
    good = Finding(name="a", outcome="pass", sentence="fine")
    bad = Finding(name="a", outcome="fail", sentence="broken", next_step="x")
    gap = Finding(name="b", outcome="skipped", sentence="missing", next_step="x")
    merged = _merged_findings([[good, gap], [bad]])
    assert [(f.name, f.outcome, f.sentence) for f in merged] == [
        ("a", "fail", "rank 1: broken"),
        ("b", "skipped", "missing"),
    ]
