"""The three faults of docs/case-study.md, injected together, are each named with evidence in one `parity check`."""

from pathlib import Path

import pytest

from parity.commands.check import check
from parity.model.recipe.presets import preset
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Finding, Report
from tests.faults.case_study import Faulty
from tests.faults.injected.inputs import wider
from tests.faults.wiring import builtin

DECLARED = preset("unit").with_values(
    {
        "recipe.noise": {"kind": "gaussian", "std": 0.05},
        "recipe.block.size": 8,
        "recipe.loss.weights.gamma": 4.0,
    }
)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report() -> Report:
    return check(recipe=DECLARED, adapter=f"{HERE / 'case_study.py'}:CaseStudy")


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
    builtin()  # the injected faults leave the classes as they are
    assert check(recipe=DECLARED, only=("noise", "loss", "labels")).outcome == "pass"


@pytest.mark.parametrize("preset_name", ["unit", "tiny"])
def test_the_statement_has_their_numbers(preset_name: str) -> None:
    changes = {"recipe.noise": {"kind": "gaussian", "std": 0.05}, "recipe.block.size": 8}
    adapter = builtin(changes, Faulty, preset_name=preset_name, then=wider)
    answers = dict(query_probes(ExaminedAdapter(adapter), only=["noise", "inputs", "loss"]))
    named = {name: [finding.fault for finding in answer.findings] for name, answer in answers.items()}
    assert named["noise"][0] == "noise-on-teacher"
    assert named["inputs"][0] == "fc-teacher"
    assert named["loss"] == ["loss-terms", "loss-streak"]
    statement = answers["loss"].statement
    assert statement is not None
    facts = dict(statement.facts)
    assert facts["loss.share.kl"] == pytest.approx(0.7, abs=1e-3)
    assert facts["loss.gamma"] == pytest.approx(10, abs=0.05)
