"""Conformance statements: written, read back, compared fact by fact."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import ParityError
from parity.gating.conformance import compare_statements, is_statement, read_conformance, save_conformance
from parity.gating.gate import gate
from parity.reports import to_json
from parity.reports.record import Conformance, Finding, Report, Statement
from parity.watching.step_report import compare_wiring

LOSS = Statement(
    probe="loss", sentence="hard CE, gamma 4.00", facts=(("loss.gamma", 4.0), ("loss.kind", "exp"))
)
NOISE = Statement(probe="noise", sentence="no noise", facts=(("noise.std", 0.0),))
SHORT = replace(LOSS, facts=LOSS.facts[:1])
ONE = Conformance(
    trainer="mine 1", recipe="ab12", statements=(LOSS, NOISE), unanswered=(("resume", "no run"),)
)


def with_fact(name: str, value: float | str) -> Conformance:
    facts = tuple((fact, value if fact == name else old) for fact, old in LOSS.facts)
    return replace(ONE, statements=(replace(LOSS, facts=facts), NOISE))


def outcomes(a: Conformance, b: Conformance) -> dict[str, str]:
    return {finding.name: finding.outcome for finding in compare_statements(a, b).findings}


def test_a_statement_survives_the_file(tmp_path: Path) -> None:
    file = tmp_path / "conformance.json"
    save_conformance(ONE, file)
    assert read_conformance(file) == ONE and is_statement(file)
    said = json.loads(file.read_text())["paragraph"]
    assert (
        said
        == "mine 1, recipe ab12. loss: hard CE, gamma 4.00. noise: no noise. resume: not answered (no run)."
    )
    assert [each.name for each in tmp_path.iterdir()] == ["conformance.json"]


def test_a_report_gives_its_statement(tmp_path: Path) -> None:
    finding = Finding(name="loss", outcome="pass", sentence="x")
    report = Report(
        kind="check", title="", created="", command="", subject=(), findings=(finding,), conformance=ONE
    )
    (tmp_path / "report.json").write_text(to_json.paint(report))
    assert read_conformance(tmp_path / "report.json") == ONE
    (tmp_path / "report.json").write_text(to_json.paint(replace(report, conformance=None)))
    with pytest.raises(ParityError, match="a report without one"):
        read_conformance(tmp_path / "report.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "parity-conformance/1"}', '{"schema": "other"}'])
def test_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert not is_statement(file)
    with pytest.raises(ParityError):
        read_conformance(file)


CHANGES: list[tuple[str, Conformance, dict[str, str]]] = [
    ("the same", ONE, {"loss": "pass", "noise": "pass"}),
    ("rounding", with_fact("loss.gamma", 4.004), {"loss": "pass", "noise": "pass"}),
    ("another gamma", with_fact("loss.gamma", 5.0), {"loss": "fail", "noise": "pass"}),
    ("another kind", with_fact("loss.kind", "dpace"), {"loss": "fail", "noise": "pass"}),
    ("a probe less", replace(ONE, statements=(LOSS,)), {"loss": "pass", "noise": "fail"}),
    ("a fact less", replace(ONE, statements=(SHORT, NOISE)), {"loss": "fail", "noise": "pass"}),
]


@pytest.mark.parametrize(("other", "expected"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_changes_are_found_both_ways(other: Conformance, expected: dict[str, str]) -> None:
    assert outcomes(ONE, other) == outcomes(other, ONE) == expected


@pytest.mark.parametrize(
    ("shares", "outcome"),
    [
        ({"ce": 0.3, "kl": 0.7, "js": 1e-5}, "pass"),  # seen one time and not the other
        ({"ce": 0.302, "kl": 0.698}, "pass"),
        ({"ce": 0.31, "kl": 0.69}, "fail"),
        ({"ce": 0.3, "kl": 0.69, "js": 0.01}, "fail"),
        ({"ce": 0.3}, "fail"),
    ],
)
def test_a_share_that_is_not_there_is_zero(shares: dict[str, float], outcome: str) -> None:
    first = Statement(probe="loss", sentence="a", facts=(("loss.share.ce", 0.3), ("loss.share.kl", 0.7)))
    facts = tuple((f"loss.share.{name}", value) for name, value in shares.items())
    a, b = (replace(ONE, statements=(each,)) for each in (first, replace(first, facts=facts)))
    assert outcomes(a, b) == outcomes(b, a) == {"loss": outcome}


MEASURED = Statement(
    probe="loss",
    sentence="hard CE (residual 1e-07)",
    facts=(("loss.gamma", 4.0), ("loss.residual", 1e-7), ("loss.denominator", 23.7)),
)


def test_measurements_are_shown_and_not_compared() -> None:
    """The residual doubles, the denominator of D-PACE halves: the wiring is the same."""
    facts = (("loss.gamma", 4.0), ("loss.residual", 2e-7), ("loss.denominator", 11.0))
    moved = replace(MEASURED, sentence="hard CE (residual 2e-07)", facts=facts)
    a, b = (replace(ONE, statements=(each,)) for each in (MEASURED, moved))
    report = compare_statements(a, b)
    assert report.outcome == "pass" and report.findings[0].sentence == "unchanged: hard CE (residual 2e-07)"
    rows = {row[1]: row[2:] for row in report.tables[0].rows}
    assert rows["loss.residual"] == ("1e-07", "2e-07", None) and rows["loss.gamma"] == ("4", "4", True)
    gone = replace(MEASURED, facts=facts[1:])
    assert (
        compare_statements(a, replace(ONE, statements=(gone,))).outcome == "fail"
    )  # gamma is on one side only
    only = [replace(ONE, statements=(replace(each, facts=each.facts[1:]),)) for each in (MEASURED, moved)]
    assert compare_statements(*only).outcome == "fail"  # nothing but measurements: no pass for want of a fact


def test_the_change_is_quoted() -> None:
    report = compare_statements(ONE, with_fact("loss.gamma", 5.0))
    assert report.findings[0].sentence == "loss.gamma: 4 -> 5" and report.outcome == "fail"


def test_two_empty_statements_are_no_pass() -> None:
    empty = replace(ONE, statements=())
    with pytest.raises(ParityError, match="no statement in either"):
        compare_statements(empty, empty)


def test_the_command_compares_two_statements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from parity.cli.main import run

    save_conformance(ONE, tmp_path / "a.json")
    save_conformance(with_fact("loss.gamma", 5.0), tmp_path / "b.json")
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "loss.gamma: 4 -> 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "then", "now", "same"),
    [
        ("loss.gamma", 4.0, 5.0, False),  # the smallest injected change of gamma
        ("loss.gamma", 4.0, 4.07, True),
        ("loss.gamma", 4.0, 4.1, False),
        ("loss.share.kl", 0.0, 0.01, False),  # 1 % KL, the smallest injected term
        ("loss.share.ce", 0.5, 0.51, False),
        ("loss.share.ce", 0.5, 0.504, True),
        ("teacher.capture_kl", 1e-13, 9e-13, True),  # a residual moves by more than 2 % of itself
        ("labels.slots", 1000, 1001, False),  # a count
        ("noise.moves_labels", False, True, False),
        ("loss.denominator", 20.0, 40.0, True),  # a measurement
    ],
)
def test_gate_watch_and_compare_have_one_identity_of_a_wiring(
    name: str, then: float, now: float, same: bool
) -> None:
    """One function decides, also about a baseline from before statements, whose findings hold the facts."""
    sides = [
        replace(
            ONE, statements=(Statement(probe="loss", sentence="s", facts=((name, v), ("loss.kind", "exp"))),)
        )
        for v in (then, now)
    ]
    assert (compare_statements(*sides).outcome == "pass") is same
    (finding,) = compare_wiring("wiring", *sides, what="step 1")
    assert (finding.outcome == "pass") is same
    for conformance in (True, False):
        reports = [
            Report(
                kind="check", title="", created="", command="", subject=(),
                findings=(Finding(name="loss", outcome="pass", sentence="s", evidence=side.statements[0].facts),),
                conformance=side if conformance else None,
            )
            for side in sides
        ]  # fmt: skip
        verdict = gate(reports[1], baseline=reports[0])
        outcome = next(each.outcome for each in verdict.findings if each.name == "baseline.wiring")
        assert (outcome == "pass") is same, conformance
