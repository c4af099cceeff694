"""What importing the reports costs: no torch, no altair, no pandas."""

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "altair", "vl_convert", "pandas", "numpy", "pydantic", "typer")


def _loaded(module: str) -> list[str]:
    code = f"import {module}, sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout)
    return names


def test_light_modules_load_nothing_heavy() -> None:
    light = (
        "record",
        "schema",
        "words",
        "to_json",
        "to_text",
        "to_markdown",
        "to_junit",
        "to_annotations",
        "step_log",
        "from_steps",
        "chart_rows",
    )
    assert _loaded(", ".join(f"parity.reports.{name}" for name in light)) == []


def test_the_test_above_can_fail() -> None:
    assert "altair" in _loaded("parity.reports.to_html")
