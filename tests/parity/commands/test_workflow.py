"""The workflow in docs/: its `run:` lines are executed as a runner would, on saved reports."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from parity.comparison.traces import compare_traces
from parity.diagnosis.report import diagnosed_tables_and_findings
from parity.policy import Policy
from parity.reports import to_json
from parity.reports.record import Finding, Report, Table
from parity.tracing.trace import Trace

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = ROOT / "docs/parity.yml"
POLICY = ROOT / "docs/parity-policy.yaml"
WriteTrace = Callable[..., Trace]

PARITY = """#!/bin/sh
# `check` takes minutes: the report that it would write lies ready. All else is the real command.
if [ "$1" = check ]; then
    [ "$2 $#" = "--out 3" ] || exit 2
    mkdir -p "$3" && cp "$SAVED_REPORT" "$3/report.json" && exit "$CHECK_EXIT"
fi
exec "$REAL_PYTHON" -m parity "$@"
"""
PYTHON = """#!/bin/sh
# Only what the installation needs: nothing is fetched by a test.
[ "$1 $2 $3" = "-m pip install" ] && echo "would install $4"
"""


def check_report(make: WriteTrace, name: str, noise: float) -> str:
    """What `parity check` would write where the kernels differ by `noise`: two comparisons, [40, 48] each."""
    generator = torch.Generator().manual_seed(0)
    tables: list[Table] = []
    findings = [Finding(name="dispatch", outcome="pass", sentence="every call reached fla")]
    for dtype, size in ((torch.float32, 1e-8), (torch.bfloat16, noise)):
        clean = {
            f"layer.{n}.{tap}": torch.randn(40, 48, generator=generator)
            for n in (0, 1)
            for tap in ("out", "gdn.out")
        }
        moved = {tap: x * (1 + size * torch.randn(40, 48, generator=generator)) for tap, x in clean.items()}
        label = "fp32" if dtype == torch.float32 else "bf16"
        pair = (
            make(f"{name}.{side}.{label}", {"r": {tap: x.to(dtype) for tap, x in states.items()}})
            for side, states in (("a", moved), ("b", clean))
        )
        more, found = diagnosed_tables_and_findings(compare_traces(*pair), name=f"kernels.{label}")
        tables += more
        findings += found
    return to_json.paint(
        Report(
            kind="check",
            title="t",
            created="2027-01-01T00:00:00+00:00",
            command="parity check --out parity-report",
            subject=(("tokens", 40),),
            findings=tuple(findings),
            tables=tuple(tables),
            environment=(("torch", "2.13.0"), ("triton", name)),
        )
    )


@dataclass
class Job:
    """What became of the steps."""

    failed: str | None
    ran: list[str]
    output: str
    summary: str
    folder: Path


@pytest.fixture
def run_job(tmp_path: Path) -> Callable[..., Job]:
    """Runs the workflow's job in a repository that holds what its head comment asks for."""

    def job(baseline: str, report: str, check_exit: int = 0) -> Job:
        repository, tools = tmp_path / "repository", tmp_path / "tools"
        (repository / "parity-baseline").mkdir(parents=True)
        (repository / "parity-baseline/report.json").write_text(baseline)
        (repository / "parity.yaml").write_bytes(POLICY.read_bytes())
        tools.mkdir()
        for name, text in (("parity", PARITY), ("python", PYTHON)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        (tmp_path / "saved.json").write_text(report)
        definition = yaml.safe_load(WORKFLOW.read_text())["jobs"]["parity"]
        environment = os.environ | {key: str(value) for key, value in definition["env"].items()}
        environment |= {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "REAL_PYTHON": sys.executable,
            "SAVED_REPORT": str(tmp_path / "saved.json"),
            "CHECK_EXIT": str(check_exit),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        }
        done = Job(None, [], "", "", repository)
        for step in definition["steps"]:
            _step(step, done, environment)
        if (tmp_path / "summary.md").exists():
            done.summary = (tmp_path / "summary.md").read_text()
        return done

    return job


def _step(step: dict[str, Any], job: Job, environment: dict[str, str]) -> None:
    """One step as a runner treats it: `bash -e` on its script, skipped after a failure unless `if` says else."""
    wanted = {None: job.failed is None, "failure()": job.failed is not None, "always()": True}[step.get("if")]
    if not wanted or "run" not in step:
        return
    command = ["bash", "-e", "-c", step["run"]]
    done = subprocess.run(
        command, cwd=job.folder, env=environment, capture_output=True, text=True, timeout=120
    )
    job.ran.append(step["name"])
    job.output += done.stdout + done.stderr
    if done.returncode and job.failed is None:
        job.failed = step["name"]


def test_nothing_changed(run_job: Callable[..., Job], write_trace: WriteTrace) -> None:
    job = run_job(check_report(write_trace, "one", 1e-3), check_report(write_trace, "two", 1e-3))
    assert (job.failed, job.ran) == (None, ["Install", "Check", "Gate"]), job.output
    assert "would install drafter-parity" in job.output and "::error" not in job.output
    assert job.summary.startswith("## PASS: Gate: t")
    assert (job.folder / "parity-report/junit.xml").read_text().startswith("<?xml")


@pytest.mark.parametrize("check_exit", [0, 1])
def test_kernels_that_got_worse_stop_the_merge(
    run_job: Callable[..., Job], write_trace: WriteTrace, check_exit: int
) -> None:
    """A check that fails (exit 1) is for the gate to judge; one that only got worse, too."""
    report = check_report(write_trace, "two", 0.05)
    job = run_job(check_report(write_trace, "one", 1e-3), report, check_exit)
    assert (job.failed, job.ran[2:]) == ("Gate", ["Gate", "What differs from the machine of the baseline"])
    assert "::error title=FAIL baseline.taps::8 of 8 taps" not in job.output  # fp32 did not change
    assert "::error title=FAIL baseline.taps::4 of 8 taps are worse" in job.output, job.output
    assert job.summary.startswith("## FAIL: Gate: t")
    assert "triton" in job.output.rpartition("What differs")[2]


def test_a_check_that_broke_ends_the_job(run_job: Callable[..., Job], write_trace: WriteTrace) -> None:
    report = check_report(write_trace, "one", 1e-3)
    assert run_job(report, report, check_exit=4).failed == "Check"


def test_the_policy_is_valid_and_the_head_names_what_the_job_needs() -> None:
    assert Policy.load(POLICY).gate.findings["dispatch"].required
    head = WORKFLOW.read_text().partition("\nname:")[0]
    assert all(
        name in head for name in ("parity.yaml", "docs/parity-policy.yaml", "parity-baseline/report.json")
    )
