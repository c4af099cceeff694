"""Promises about imports that the linter cannot see: what starting costs, and lists that must be whole."""

import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "transformers", "numpy", "pandas", "scipy", "numba", "triton", "altair", "datasets")
"""None of these may be loaded by `parity --help`: each costs more than the whole command may take."""

HELP = f"""
import runpy, sys
sys.argv = ["parity", "--help"]
try:
    runpy.run_module("parity", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code, ended.code
print("HEAVY", *(name for name in {HEAVY} if name in sys.modules))
"""


def run_help(before: str = "") -> str:
    """Standard output of `parity --help` in a process of its own; `before` runs first in that process."""
    command = [sys.executable, "-c", before + HELP]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy(output: str) -> list[str]:
    """The heavy packages that were loaded, from the last line."""
    return output.splitlines()[-1].split()[1:]


def test_help_loads_nothing_heavy() -> None:
    output = run_help()
    assert "check" in output and "--help" in output
    assert heavy(output) == []


def test_the_test_above_can_fail() -> None:
    """The same run notices one heavy package that was imported from inside the package."""
    assert "numpy" in heavy(run_help("import parity.errors, numpy\n"))


def test_importing_parity_loads_nothing_heavy() -> None:
    code = f"import sys, parity, parity.errors; print('HEAVY', *(n for n in {HEAVY} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy(done.stdout) == []


@pytest.mark.parametrize("limit", [0.3])
def test_help_is_quick(limit: float) -> None:
    """Processor seconds of `parity --help`, the best of a few: other work on the machine counts little."""
    best = float("inf")
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "parity", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if best < limit:
            break
    assert best < limit


def test_painters_in_the_import_contract_are_the_painters_of_the_folder() -> None:
    """A painter that the contract does not list could be imported from anywhere."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (listed,) = (c["protected_modules"] for c in contracts if c["id"] == "painters-callers")
    (layers,) = (c["layers"] for c in contracts if c["id"] == "painters")
    painters = [f"parity.reports.{path.stem}" for path in sorted((ROOT / "reports").glob("to_*.py"))]
    assert sorted(listed) == painters
    assert set(painters) <= {name.strip(" ()") for name in layers[0].split("|")}
