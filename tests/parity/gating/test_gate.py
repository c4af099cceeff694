"""The gate: what stops a merge, what is expected, what got worse, and that nothing compared never passes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from parity.cli import main as cli
from parity.comparison.traces import compare_traces
from parity.diagnosis.report import comparison_report
from parity.errors import NothingComparable, ParityError
from parity.gating.baseline import measure_growth
from parity.gating.conformance import is_same_value
from parity.gating.gate import gate
from parity.policy import Policy
from parity.reports import step_log, to_json
from parity.reports.record import (
    Column,
    Conformance,
    Finding,
    Outcome,
    Report,
    Statement,
    StepReport,
    Table,
    Value,
)
from parity.tracing.trace import Trace
from tests.parity.conftest import unwrapped

TODAY = date(2027, 1, 15)
COLUMNS = ("tap", "cosine_mean", "cosine_min", "error_rms", "error_max", "times_floor", "judged_by")


def finding(outcome: Outcome, name: str = "noise", *, fault: str | None = None, **evidence: Value) -> Finding:
    pairs = tuple((key.replace("_", " "), value) for key, value in evidence.items())
    step = "" if outcome == "pass" else "look"
    return Finding(
        name=name, outcome=outcome, sentence=f"{name} said so", evidence=pairs, fault=fault, next_step=step
    )


def layers(*rows: tuple[Value, ...], name: str = "compare.layers") -> Table:
    columns = tuple(Column(key=key, title=key) for key in COLUMNS)
    return Table(name=name, title="t", columns=columns, rows=rows)


def tap(
    name: str = "layer.0.out", mean: float = 1.0, low: float = 1.0, rms: float = 0.0, worst: float = 0.0,
    floors: float = 2.0, judged: str = "floor",
) -> tuple[Value, ...]:  # fmt: skip
    return (name, mean, low, rms, worst, floors, judged)


def report(*findings: Finding, tables: tuple[Table, ...] = (), **fields: Any) -> Report:
    parts: dict[str, Any] = {"kind": "check", "title": "t", "created": "c", "command": "k", "subject": ()}
    return Report(findings=findings, tables=tables, **(parts | fields))


def policy(text: str) -> Policy:
    return Policy.model_validate(yaml.safe_load(text))


def outcomes(verdict: Report) -> dict[str, Outcome]:
    return {each.name: each.outcome for each in verdict.findings}


def sentence(verdict: Report, name: str) -> str:
    return next(each.sentence for each in verdict.findings if each.name == name)


@pytest.mark.parametrize(
    ("found", "rules", "outcome"),
    [
        ("pass", "{}", "pass"),
        ("fail", "{}", "fail"),
        ("error", "{}", "error"),
        ("warn", "{}", "warn"),
        ("warn", "{findings: {noi*: {warn: fail}}}", "fail"),
        ("warn", "{findings: {loss: {warn: fail}}}", "warn"),
        ("skipped", "{}", "skipped"),
        ("skipped", "{skips: []}", "fail"),
        ("skipped", "{skips: [loss]}", "fail"),
        ("skipped", "{skips: [noise]}", "skipped"),
        ("skipped", "{skips: ['n*']}", "skipped"),
        ("fail", "{expected: [{finding: noise, because: b, until: 2027-01-16}]}", "warn"),
        ("fail", "{expected: [{finding: noise, because: b, until: 2027-01-15}]}", "warn"),
        ("fail", "{expected: [{finding: noise, because: b, until: 2027-01-14}]}", "fail"),
        ("fail", "{expected: [{finding: loss, because: b, until: 2027-01-16}]}", "fail"),
        ("fail", "{expected: [{finding: noise, because: b, until: 2027-01-16, fault: f}]}", "warn"),
        ("fail", "{expected: [{finding: noise, because: b, until: 2027-01-16, fault: g}]}", "fail"),
        # a probe that broke is not the failure that was expected
        ("error", "{expected: [{finding: noise, because: b, until: 2027-01-16}]}", "error"),
    ],
)
def test_outcomes_by_policy(found: Outcome, rules: str, outcome: Outcome) -> None:
    other = finding("pass", "other")
    verdict = gate(report(finding(found, fault="f"), other), policy=policy(f"gate: {rules}"), today=TODAY)
    assert outcomes(verdict)["noise"] == outcome and outcomes(verdict)["other"] == "pass"


def test_an_expected_failure_says_until_when_and_why() -> None:
    rules = policy("gate: {expected: [{finding: noise, because: see issue 7, until: 2027-01-20}]}")
    bad = report(finding("fail"))
    said = sentence(gate(bad, policy=rules, today=TODAY), "noise")
    assert said == "expected to fail until 2027-01-20 (see issue 7): noise said so"
    said = sentence(gate(bad, policy=rules, today=date(2027, 1, 21)), "noise")
    assert said == "expected to fail until 2027-01-20 only (see issue 7): noise said so"


@pytest.mark.parametrize("found", ["pass", "warn", "skipped", None])
def test_an_expected_failure_that_does_not_fail_is_reported(found: Outcome | None) -> None:
    findings = [finding("pass", "other"), *([finding(found)] if found else [])]
    rules = policy("gate: {expected: [{finding: noise, because: b, until: 2030-01-01}]}")
    verdict = gate(report(*findings), policy=rules, today=TODAY)
    assert outcomes(verdict)["policy.expected noise"] == "warn"
    assert (f"noise is {found}" if found else "no finding of that name") in sentence(
        verdict, "policy.expected noise"
    )


def test_two_expectations_of_one_name_have_names_of_their_own() -> None:
    entry = "{finding: noise, because: b, until: 2030-01-01, fault: "
    rules = policy(f"gate: {{expected: [{entry}f}}, {entry}g}}]}}")
    assert list(outcomes(gate(report(finding("pass")), policy=rules, today=TODAY))) == [
        "noise",
        "policy.expected noise",
        "policy.expected noise (2)",
    ]


@pytest.mark.parametrize(
    ("limits", "row", "broken"),
    [
        ("min_cosine: 0.999", tap(low=0.999), ""),
        ("min_cosine: 0.999", tap(low=0.9989), "min_cosine 0.9989 below 0.999"),
        ("min_cosine: 0.999", tap(low=float("nan")), "min_cosine nan below 0.999"),
        ("mean_cosine: 0.999", tap(mean=0.998, low=1.0), "mean_cosine 0.998 below 0.999"),
        ("relative_l2: 0.01", tap(rms=0.01), ""),
        ("relative_l2: 0.01", tap(rms=0.011), "relative_l2 0.011 above 0.01"),
        ("ratio: 3", tap(floors=3.1), "ratio 3.1 above 3"),
        ("share_of_tokens: 0.1", tap(), "share_of_tokens needs the tokens"),
        ("share_of_tokens: 0.1", tap(judged="policy, floor"), ""),
    ],
)
def test_limits_per_tap(limits: str, row: tuple[Value, ...], broken: str) -> None:
    rules = policy(f"taps: {{'layer.*.out': {{{limits}}}}}")
    verdict = gate(report(finding("pass"), tables=(layers(row),)), policy=rules, today=TODAY)
    name = "policy.taps layer.*.out"
    assert outcomes(verdict)[name] == ("fail" if broken else "pass")
    assert broken in sentence(verdict, name)


def test_the_first_glob_that_matches_judges_and_one_that_judges_nothing_fails() -> None:
    rules = policy(
        "taps: {layer.1.out: {min_cosine: 0.5}, 'a.layers/*': {min_cosine: 0.9}, '*': {min_cosine: 1}, "
        "layer.1.*: {min_cosine: 0}, logits: {}}"
    )
    tables = (
        layers(tap(low=0.95), tap("layer.1.out", low=0.6), name="a.layers"),
        layers(tap(low=1.0), tap("logits"), name="b.layers"),
    )
    verdict = gate(report(finding("pass"), tables=tables), policy=rules, today=TODAY)
    assert list(outcomes(verdict).values()) == ["pass", "pass", "pass", "pass", "fail", "fail"]
    assert "judged nothing" in sentence(verdict, "policy.taps layer.1.*")
    counts = [dict(each.evidence)["taps judged"] for each in verdict.findings[1:]]
    assert counts == [1, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{required: true}", ""),
        ("{evidence: {std: {min: 0.04, max: 0.06}}}", ""),
        ("{evidence: {std: {max: 0.04}}}", "noise: std 0.05 above 0.04"),
        ("{evidence: {std: {min: 0.06}}}", "noise: std 0.05 below 0.06"),
        ("{evidence: {odd: {min: 0}}}", "noise: odd nan below 0"),
        ("{evidence: {text: {min: 0}}}", "is 'x', no number"),
        ("{evidence: {gone: {min: 0}}}", "no evidence 'gone'"),
    ],
)
def test_bounds_of_evidence(rule: str, problem: str) -> None:
    found = finding("pass", std=0.05, odd=float("nan"), text="x")
    verdict = gate(report(found), policy=policy(f"gate: {{findings: {{noise: {rule}}}}}"), today=TODAY)
    assert outcomes(verdict)["policy.findings noise"] == ("fail" if problem else "pass")
    assert problem in sentence(verdict, "policy.findings noise")


@pytest.mark.parametrize("rule", ["required: true", "evidence: {std: {min: 0}}", "warn: fail"])
@pytest.mark.parametrize("found", [None, finding("skipped")])
def test_a_rule_about_nothing_fails(rule: str, found: Finding | None) -> None:
    findings = [finding("pass", "other"), *([found] if found else [])]
    verdict = gate(
        report(*findings), policy=policy(f"gate: {{findings: {{noise: {{{rule}}}}}}}"), today=TODAY
    )
    skipped_and_only_its_warning_matters = found is not None and rule.startswith("warn")
    assert (verdict.outcome == "fail") != skipped_and_only_its_warning_matters


def test_nothing_compared_never_passes() -> None:
    nothing = report(finding("skipped"), subject=(("model", "m"),), environment=(("torch", "2"),))
    assert gate(nothing).outcome == "skipped"
    assert gate(report()).outcome == "skipped"
    against_itself = gate(nothing, baseline=nothing)
    assert against_itself.outcome == "skipped" and "no pass without" in " ".join(against_itself.notes)
    assert gate(nothing, policy=policy("gate: {skips: []}")).outcome == "fail"


def test_a_gate_of_a_gate_is_refused() -> None:
    with pytest.raises(ParityError, match="the report of a gate"):
        gate(gate(report(finding("pass"))))


# against a baseline


def against(now: Report, then: Report, rules: str = "{}") -> Report:
    return gate(now, baseline=then, policy=policy(f"gate: {rules}"), today=TODAY)


@pytest.mark.parametrize(
    ("then", "now", "rules", "missing", "worse"),
    [
        ("pass", "pass", "{}", "pass", "pass"),
        ("pass", "warn", "{}", "pass", "warn"),
        ("warn", "pass", "{}", "pass", "pass"),
        ("pass", "fail", "{}", "pass", "fail"),
        ("fail", "fail", "{}", "pass", "pass"),
        ("fail", "error", "{}", "pass", "fail"),
        ("pass", "skipped", "{}", "fail", "pass"),
        ("pass", "skipped", "{skips: [noise]}", "pass", "pass"),
        ("skipped", "pass", "{}", "pass", "pass"),
        ("pass", None, "{}", "fail", "pass"),
        ("skipped", None, "{}", "pass", "pass"),
        # known to be worse: then it is a warning here too
        ("pass", "fail", "{expected: [{finding: noise, because: b, until: 2030-01-01}]}", "pass", "warn"),
    ],
)
def test_outcomes_against_a_baseline(
    then: Outcome, now: Outcome | None, rules: str, missing: Outcome, worse: Outcome
) -> None:
    other = finding("pass", "other")
    before = report(finding(then), other)
    after = report(*([finding(now)] if now else []), other)
    found = outcomes(against(after, before, rules))
    assert (found["baseline.missing"], found["baseline.outcomes"]) == (missing, worse)


def test_a_baseline_with_nothing_in_common_is_nothing_comparable() -> None:
    with pytest.raises(NothingComparable, match="no finding that both hold"):
        against(report(finding("pass")), report(finding("pass", "other")))
    with pytest.raises(NothingComparable, match="another kind of report"):
        against(report(finding("pass")), report(finding("pass"), kind="compare"))


@pytest.mark.parametrize(
    ("then", "now", "outcome"),
    [
        (tap(rms=1e-3, worst=4e-3), tap(rms=2e-3, worst=8e-3), "pass"),
        (tap(rms=1e-3, worst=4e-3), tap(rms=2.1e-3, worst=4e-3), "fail"),
        (tap(rms=1e-3, worst=4e-3), tap(rms=1e-3, worst=8.1e-3), "fail"),
        (tap(rms=0.0), tap(rms=1e-6, worst=1e-6), "fail"),
        (tap(rms=0.0), tap(rms=1e-6, worst=1e-6, floors=0.9), "pass"),  # within the noise measured beside it
        (tap(rms=0.0), tap(rms=0.0), "pass"),
        (tap(rms=1e-3), tap(rms=float("nan"), floors=float("nan")), "fail"),
        (tap(rms=1e-3), tap(rms=1e-5), "pass"),
    ],
)
def test_taps_against_a_baseline(then: tuple[Value, ...], now: tuple[Value, ...], outcome: Outcome) -> None:
    before, after = (report(finding("pass"), tables=(layers(row),)) for row in (then, now))
    verdict = against(after, before)
    assert outcomes(verdict)["baseline.taps"] == outcome
    assert verdict.table("baseline.taps").rows[0][-1] == outcome


def test_a_tap_that_is_no_longer_compared_fails() -> None:
    before = report(finding("pass"), tables=(layers(tap(), tap("layer.1.out")),))
    after = report(finding("pass"), tables=(layers(tap()),))
    assert "compare.layers layer.1.out" in sentence(against(after, before), "baseline.missing")
    assert outcomes(against(after, before))["baseline.missing"] == "fail"


@pytest.mark.parametrize(
    ("then", "now", "equal"),
    [
        ("hard CE", "hard CE", True),
        ("hard CE", "KL", False),
        (5, 4, False),
        (5, 5.0, True),
        (True, 1, False),
        (4.0, 5.0, False),  # gamma
        (0.0, 0.01, False),  # 1 % KL in the mix
        (4.0, 4.05, True),
        (2e-7, 5e-7, True),  # a residual
        (0.001, 0.05, False),  # noise
        (0.0, float("nan"), False),
        (float("nan"), float("nan"), True),
        (None, 0.0, False),
        ("x", 0.0, False),
    ],
)
def test_what_says_the_same(then: Value, now: Value, equal: bool) -> None:
    assert is_same_value(then, now) is equal and is_same_value(now, then) is equal


def test_wiring_against_a_baseline() -> None:
    before = report(
        finding("pass", "loss.sentence", gamma=4.0, labels="argmax"), finding("pass", "floor", gamma=4.0)
    )
    same_again = against(before, before)
    assert outcomes(same_again)["baseline.wiring"] == "pass"
    after = report(
        finding("pass", "loss.sentence", gamma=5.0, labels="argmax"), finding("pass", "floor", gamma=5.0)
    )
    verdict = against(after, before)
    assert outcomes(verdict)["baseline.wiring"] == "fail" and verdict.outcome == "fail"
    assert verdict.table("baseline.wiring").rows == (("loss.sentence", "gamma", 4.0, 5.0),)
    assert outcomes(against(after, before, "{wiring_changes: warn}"))["baseline.wiring"] == "warn"
    gone = report(finding("pass", "loss.sentence", gamma=4.0), finding("pass", "floor"))
    assert against(gone, before).table("baseline.wiring").rows == (
        ("loss.sentence", "labels", "argmax", None),
    )


def test_conformance_statements_against_a_baseline() -> None:
    def check(gamma: float, *probes: str) -> Report:
        said = tuple(Statement(probe=p, sentence=f"{p} said so", facts=(("gamma", gamma),)) for p in probes)
        return report(finding("pass"), conformance=Conformance(trainer="t", recipe="r", statements=said))

    then = check(4.0, "loss", "noise")
    assert outcomes(against(check(4.001, "loss", "noise"), then))["baseline.wiring"] == "pass"
    verdict = against(check(5.0, "loss", "noise"), then)
    assert outcomes(verdict)["baseline.wiring"] == "fail"
    assert sentence(verdict, "baseline.wiring").startswith("the wiring changed: loss: gamma: 4 -> 5, noise:")
    assert (
        outcomes(against(check(5.0, "loss", "noise"), then, "{wiring_changes: warn}"))["baseline.wiring"]
        == "warn"
    )
    assert outcomes(against(check(4.0, "loss"), then))["baseline.wiring"] == "fail"  # no answer is a change
    gone = against(report(finding("pass")), then)
    assert "the conformance statement" in sentence(gone, "baseline.missing") and gone.outcome == "fail"


def test_wiring_tables_are_compared_without_their_measured_numbers() -> None:
    def inputs(feeds: bool, norm: float) -> Report:
        columns = (
            Column(key="layer", title="l", kind="int"),
            Column(key="labels", title="f", kind="flag"),
            Column(key="norm", title="n", kind="float"),
        )
        table = Table(name="inputs.matrix", title="t", columns=columns, rows=((61, feeds, norm),))
        return report(
            replace(finding("pass", "inputs", slices=5), tables=("inputs.matrix",)), tables=(table,)
        )

    assert outcomes(against(inputs(True, 1.5), inputs(True, 1.0)))["baseline.wiring"] == "pass"
    assert against(inputs(False, 1.0), inputs(True, 1.0)).table("baseline.wiring").rows == (
        ("inputs", "inputs.matrix", "61, True", None),
        ("inputs", "inputs.matrix", None, "61, False"),
    )


def test_subject_and_environment_against_a_baseline() -> None:
    def machine(torch: str, outcome: Outcome = "pass", **subject: Value) -> Report:
        return report(
            finding(outcome), subject=tuple(subject.items()), environment=(("torch", torch), ("cpu", "x"))
        )

    verdict = against(machine("2.13", target="m", a="/tmp/1"), machine("2.12", target="n", a="/tmp/2"))
    assert outcomes(verdict)["baseline.subject"] == "warn"
    assert "target: n then, m now" in sentence(verdict, "baseline.subject")
    quiet = against(machine("2.13", target="m"), machine("2.12", target="m"))
    assert outcomes(quiet)["baseline.environment"] == "pass"
    assert sentence(quiet, "baseline.environment").startswith("nothing got worse, though 1 of 2 things")
    loud = against(machine("2.13", "warn", target="m"), machine("2.12", target="m"))
    assert outcomes(loud)["baseline.environment"] == "warn"
    assert loud.table("environment.differences").rows[0][1:4] == ("torch", "2.12", "2.13")


def test_growth_takes_the_larger() -> None:
    def cells(rms: float, worst: float) -> dict[str, Value]:
        return {"error_rms": rms, "error_max": worst}

    assert measure_growth(cells(1, 4), cells(3, 4)) == 3
    assert measure_growth(cells(1, 4), cells(1, 8)) == 2
    assert measure_growth(cells(0, 0), cells(0, 1)) == float("inf")


# a real comparison, and the command


def compared(make: Callable[..., Trace], noise: float) -> Report:
    """Two traces of three layers, [40, 48] float32, whose difference is `noise` relative."""
    generator = torch.Generator().manual_seed(0)
    a, b = {}, {}
    for layer in range(3):
        b[f"layer.{layer}.out"] = torch.randn(40, 48, generator=generator)
        a[f"layer.{layer}.out"] = b[f"layer.{layer}.out"] * (
            1 + noise * torch.randn(40, 48, generator=generator)
        )
    pair = (make(f"{side}{noise}", {"r": tensors}) for side, tensors in (("a", a), ("b", b)))
    return comparison_report(compare_traces(*pair), "parity compare a b")


@pytest.fixture
def files(write_trace: Callable[..., Trace], tmp_path: Path) -> Mapping[str, Path]:
    """Reports of a fine, a slightly worse and a failing comparison, on disk."""
    found = {}
    for name, noise in (("fine", 1e-8), ("worse", 1e-6), ("bad", 1e-2)):
        found[name] = tmp_path / name / "report.json"
        found[name].parent.mkdir()
        found[name].write_text(to_json.paint(compared(write_trace, noise)))
    return found


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return code, captured.out, unwrapped(captured.err)

    return command


Run = Callable[..., tuple[int, str, str]]


def test_exit_codes(files: Mapping[str, Path], run: Run, tmp_path: Path) -> None:
    assert run("gate", files["fine"].parent)[0] == 0
    assert run("gate", files["bad"])[0] == 1
    (tmp_path / "p.yaml").write_text("taps: {'*': {min_cosine: 0.99}}")
    assert run("gate", files["fine"], "--policy", tmp_path / "p.yaml")[0] == 0
    # a policy that is wider than the comparison's own limits does not undo its failure
    assert run("gate", files["bad"], "--policy", tmp_path / "p.yaml")[0] == 1
    assert run("gate", files["worse"])[0] == 0
    code, out, _ = run("gate", files["worse"], "--baseline", files["fine"])
    assert code == 1 and re.search(r"FAIL +baseline\.taps", out)
    (tmp_path / "empty.json").write_text(to_json.paint(report(finding("skipped"))))
    assert run("gate", tmp_path / "empty.json")[0] == 3
    (tmp_path / "other.json").write_text(to_json.paint(report(finding("pass"))))
    code, _, err = run("gate", files["fine"], "--baseline", tmp_path / "other.json")
    assert code == 3 and "another kind of report" in err
    code, _, err = run("gate", tmp_path / "none.json")
    assert code == 2 and "No such file" in err


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("gate: {skip: []}", "gate.skip: ", "write 'skips'"),
        (
            "gate: {expected: [{finding: a, because: b, untill: 2027-01-01}]}",
            "gate.expected.0.un",
            "write 'until'",
        ),
        ("gate: {findings: {a: {evidence: {x: {mn: 1}}}}}", "gate.findings.a.evidence.x.mn", "write 'min'"),
        ("gate: {findings: {a: {evidence: {x: {}}}}}", "bounds need min, max or both", "known keys"),
        ("taps: {a: {min_cos: 1}}", "taps.a.min_cos", "write 'min_cosine'"),
        ("gates: {}", "gates", "write 'gate'"),
        (
            "gate: {expected: [{finding: a, because: '', until: 2027-01-01}]}",
            "expected.0.because",
            "known keys",
        ),
        ("[1", "no readable YAML", "name a YAML"),
    ],
)
def test_a_policy_that_is_wrong_is_refused(
    files: Mapping[str, Path], run: Run, tmp_path: Path, text: str, found: str, do: str
) -> None:
    (tmp_path / "p.yaml").write_text(text)
    code, out, err = run("gate", files["fine"], "--policy", tmp_path / "p.yaml")
    assert (code, out) == (2, "") and found in err and f"do this: {do}" in err


def test_files_for_a_service(files: Mapping[str, Path], run: Run, tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text("before\n")
    out_files = ("--junit", tmp_path / "new/junit.xml", "--summary", tmp_path / "summary.md", "--annotations")
    code, out, _ = run("gate", files["bad"], *out_files)
    assert code == 1
    assert (tmp_path / "new/junit.xml").read_text().startswith("<?xml")
    assert (tmp_path / "summary.md").read_text().startswith("before\n## FAIL: Gate: ")
    assert "\n::error title=FAIL compare.gate::semantic gate: 3 of 3 taps outside" in out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["junit.xml"]
    code, _, err = run("gate", files["bad"], "--junit", tmp_path / "summary.md/x.xml")
    assert code == 2 and "name a file that can be written" in err


def test_a_training_runs_steps_can_be_gated(run: Run, tmp_path: Path) -> None:
    for step, outcome in ((50, "pass"), (100, "pass"), (150, "fail")):
        found = finding(outcome, fault="noise-on-labels" if outcome == "fail" else None)  # type: ignore[arg-type]
        step_log.append(tmp_path / "steps.jsonl", StepReport(step=step, time="t", findings=(found,)))
    code, out, _ = run("gate", tmp_path)
    assert code == 1 and "first at step 150, at 1 of 3 probed steps" in out
    # and shown, and taken apart
    code, out, _ = run("show", tmp_path / "steps.jsonl", "--as", "markdown")
    assert code == 0 and out.startswith("## FAIL: Training run ")
    code, out, _ = run("show", tmp_path, "--parquet", tmp_path / "frames")
    assert code == 0 and out.split() == [str(tmp_path / f"frames/{n}.parquet") for n in ("steps", "findings")]
