"""Conformance statements: written, read back, compared fact by fact."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parity.conformance import compare_statements, is_statement, read, save
from parity.errors import ParityError
from parity.reports import to_json
from parity.reports.record import Conformance, Finding, Report, Statement

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
    save(ONE, file)
    assert read(file) == ONE and is_statement(file)
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
    assert read(tmp_path / "report.json") == ONE
    (tmp_path / "report.json").write_text(to_json.paint(replace(report, conformance=None)))
    with pytest.raises(ParityError, match="a report without one"):
        read(tmp_path / "report.json")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "parity-conformance/1"}', '{"schema": "other"}'])
def test_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert not is_statement(file)
    with pytest.raises(ParityError):
        read(file)


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


def test_the_change_is_quoted() -> None:
    report = compare_statements(ONE, with_fact("loss.gamma", 5.0))
    assert report.findings[0].sentence == "loss.gamma: 4 -> 5" and report.outcome == "fail"


def test_two_empty_statements_are_no_pass() -> None:
    empty = replace(ONE, statements=())
    with pytest.raises(ParityError, match="no statement in either"):
        compare_statements(empty, empty)


def test_the_command_compares_two_statements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from parity.cli.main import run

    save(ONE, tmp_path / "a.json")
    save(with_fact("loss.gamma", 5.0), tmp_path / "b.json")
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
    assert "loss.gamma: 4 -> 5" in capsys.readouterr().out
