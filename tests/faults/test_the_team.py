"""The three faults of design.md section 1, planted together, are each named with evidence in one `parity check`."""

from pathlib import Path

import pytest

from parity.model.presets import preset
from parity.reports.record import Finding, Report
from parity.runner import check
from tests.faults.wiring import builtin

DECLARED = preset("unit").changed(
    {
        "recipe.noise": {"kind": "gaussian", "std": 0.05},
        "recipe.block.size": 8,
        "recipe.loss.weights.gamma": 4.0,
    }
)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report() -> Report:
    return check(recipe=DECLARED, adapter=f"{HERE / 'the_team.py'}:TheTeam")


def named(report: Report, fault: str) -> Finding:
    return next(f for f in report.findings if f.fault == fault)


def test_each_fault_is_named_with_numbers(report: Report) -> None:
    assert report.outcome == "error"  # beside the faults: inference cannot draft with an fc of four slices
    assert [f.name for f in report.findings if f.outcome == "error"] == ["decode"]
    noise, fed = named(report, "noise-on-teacher"), named(report, "fc-teacher")
    assert float(str(dict(noise.evidence)["largest change"])) > 0.01
    assert fed.outcome == "fail" and fed.next_step
    loss = [f for f in report.findings if f.name.startswith("loss") and f.outcome == "fail"]
    assert {f.fault for f in loss} == {"loss-terms", "loss-streak"}
    said = " ".join(f.sentence for f in loss)
    assert "70 % KL" in said and "30 % CE" in said and "gamma 10.00" in said


def test_the_suspicions_say_found(report: Report) -> None:
    verdicts = {suspicion.name: suspicion.verdict for suspicion in report.suspicions}
    for name in (
        "noise reaches the labels, or drafting",
        "fc is fed other layers than declared",
        "the loss is not the declared one",
    ):
        assert verdicts[name] == "found"


def test_the_same_recipe_without_them_passes() -> None:
    builtin()  # the plants leave the classes as they are
    assert check(recipe=DECLARED, only=("noise", "loss", "labels")).outcome == "pass"
