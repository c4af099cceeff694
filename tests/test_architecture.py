"""Promises about imports that the linter cannot see: what starting costs, and lists that must be whole."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from parity.reports import to_json
from parity.reports.record import Report

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "transformers", "numpy", "pandas", "scipy", "numba", "triton", "altair", "datasets")
"""None of these may be loaded by a quick command: each costs more than the whole command may take."""

RUN = f"""
import json, runpy, sys
sys.argv = ["parity", *json.loads(sys.argv[1])]
try:
    runpy.run_module("parity", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print("HEAVY", *(name for name in {HEAVY} if name in sys.modules))
"""


def run(*arguments: str, before: str = "") -> str:
    """Standard output of a command in a process of its own; `before` runs first in that process."""
    command = [sys.executable, "-c", before + RUN, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy(output: str) -> list[str]:
    """The heavy packages that were loaded, from the last line."""
    return output.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("command", ["--help", "probes", "show"])
def test_quick_commands_load_nothing_heavy(command: str, tmp_path: Path) -> None:
    """What makes them start in under .3 s; the seconds are printed by tests/bench/bench_startup.py."""
    report = Report(kind="check", title="t", created="2026-01-01", command="c", subject=(), findings=())
    (tmp_path / "report.json").write_text(to_json.paint(report))
    output = run(command, *([str(tmp_path)] if command == "show" else []))
    assert len(output.splitlines()) > 3 and heavy(output) == []


def test_the_test_above_can_fail() -> None:
    """The same run notices one heavy package that was imported from inside the package."""
    assert "numpy" in heavy(run("--help", before="import parity.errors, numpy\n"))


def test_importing_parity_loads_nothing_heavy() -> None:
    code = f"import sys, parity, parity.errors; print('HEAVY', *(n for n in {HEAVY} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy(done.stdout) == []


def test_painters_in_the_import_contract_are_the_painters_of_the_folder() -> None:
    """A painter that the contract does not list could be imported from anywhere."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (listed,) = (c["protected_modules"] for c in contracts if c["id"] == "painters-callers")
    (layers,) = (c["layers"] for c in contracts if c["id"] == "painters")
    painters = [f"parity.reports.{path.stem}" for path in sorted((ROOT / "reports").glob("to_*.py"))]
    assert sorted(listed) == painters
    assert set(painters) <= {name.strip(" ()") for name in layers[0].split("|")}
