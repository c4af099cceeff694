"""How the probe `resume` names what differs: on runs that are written by hand, beside the faults of tests/faults."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from parity.probes.adapters.builtin import Builtin
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Finding
from tests.faults.wiring import builtin

Step = float | Mapping[str, Any]


class Scripted(Builtin):
    """A run whose steps a function gives: (step, steps done before this opening, whether it was opened before)."""

    script: Callable[[int, int], Step]

    def run(self, folder: Path, until: int) -> Sequence[Step]:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / "steps"
        done = int(mark.read_text()) if mark.exists() else 0
        mark.write_text(str(until))
        return [type(self).script(step, done) for step in range(done, until)]


def _finding(script: Callable[[int, int], Step]) -> Finding:
    adapter = builtin()
    adapter.__class__ = type("Scripted", (Scripted,), {"script": staticmethod(script)})
    return query_probes(ExaminedAdapter(adapter), only=["resume"])[0][1].findings[0]


def _right(step: int) -> float:
    return 5.0 - step / 8


def _record(step: int, loss: float, **more: Any) -> Step:
    return {"loss": loss, "lr": 0.1 * step, "tokens": 100 + step} | more


CASES: dict[str, tuple[Callable[[int, int], Step], str | None]] = {
    "plain losses, right": (lambda step, done: _right(step), None),
    "records, right": (lambda step, done: _record(step, _right(step)), None),
    "later losses": (lambda step, done: _right(step) + (done and step > done) * 0.1, "resume-optimizer"),
    "another rate": (
        lambda step, done: _record(step, _right(step) + (done and step > done) * 0.1, lr=0.1 * (step - done)),
        "resume-schedule",
    ),
    "other tokens": (
        lambda step, done: _record(step, _right(step) + bool(done), tokens=100 + step - done),
        "resume-data",
    ),
    "worse by the steps lost": (lambda step, done: _right(step) + done * 0.1, "resume-weights"),
    "always a little": (lambda step, done: _right(step) - bool(done) * 1e-5, "resume-weights"),
    "by chance, counts logged": (
        lambda step, done: _record(step, _right(step) + bool(done) * (-1) ** done * 0.2),
        "resume-random",
    ),
    "by chance, nothing logged": (
        lambda step, done: _right(step) + bool(done) * (-1) ** done * 0.2,
        "resume-not-recognised",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named(name: str) -> None:
    script, fault = CASES[name]
    finding = _finding(script)
    assert finding.fault == fault, finding.sentence
    assert finding.outcome == ("fail" if fault else "pass")


def test_numbers_are_told() -> None:
    words = _finding(CASES["worse by the steps lost"][0]).sentence
    assert "step 3 has loss 4.95 instead of 4.75; after 1 steps +0.1, 2 steps +0.2, 3 steps +0.3" in words
    assert "4 of 4 losses are bit-equal (5 to 4.625)" in _finding(CASES["plain losses, right"][0]).sentence


def test_two_runs_that_differ_before_any_interruption() -> None:
    calls: list[int] = []

    def script(step: int, done: int) -> float:
        calls.append(step)
        return _right(step) + (len(calls) > 4) * 1e-7

    finding = _finding(script)
    assert finding.fault == "run-not-deterministic" and "step 1 has loss" in finding.sentence


def test_a_run_that_is_too_short_or_without_losses_is_the_adapters_fault() -> None:
    class Short(Builtin):
        def run(self, folder: Path, until: int) -> Sequence[Step]:
            return [1.0]

    class Silent(Builtin):
        def run(self, folder: Path, until: int) -> Sequence[Step]:
            return [{"step": 1}]

    for kind, words in ((Short, "expected 4 steps, found 1"), (Silent, "expected a loss for each step")):
        adapter = builtin()
        adapter.__class__ = kind
        finding = query_probes(ExaminedAdapter(adapter), only=["resume"])[0][1].findings[0]
        assert finding.outcome == "error" and words in finding.sentence
