"""A comparison in words: each question answered, each non-pass with a next step, and the exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from parity.cli.compare import compare as command
from parity.compare import compare_traces
from parity.compare_report import BLIND, report_of, tables_and_findings
from parity.reports import schema, to_text
from parity.reports.record import Finding, Report
from parity.tolerance import Policy, TapLimits
from parity.trace import Trace

WriteTrace = Callable[..., Trace]


def taps(dtype: torch.dtype = torch.float32, noise: float = 0.0, **wrong: float) -> dict[str, torch.Tensor]:
    """Three layers of [40, 48]; `wrong` adds a number to a layer from token 10 on, as in l1=0.1."""
    generator, found = torch.Generator().manual_seed(0), {}
    for layer in range(3):
        states = torch.randn(40, 48, generator=generator)
        states = states * (1 + noise * torch.randn(40, 48, generator=generator))
        states[10:] += wrong.get(f"l{layer}", 0.0)
        found[f"layer.{layer}.out"] = states.to(dtype)
    return found


def report(
    write_trace: WriteTrace,
    a: dict[str, torch.Tensor],
    b: dict[str, torch.Tensor] | None = None,
    policy: Policy | None = None,
    **options: object,
) -> Report:
    left = write_trace("a", {"r0": a}, **options)
    return report_of(
        compare_traces(left, write_trace("b", {"r0": b or taps()}), policy=policy),
        "parity compare a b",
        created="2026-01-01T00:00:00Z",
    )


def finding(report: Report, suffix: str) -> Finding:
    return next(found for found in report.findings if found.name == f"compare.{suffix}")


def verdicts(report: Report) -> dict[str, str]:
    return {suspicion.name: suspicion.verdict for suspicion in report.suspicions}


TOKENS, ROUNDING, FUNCTIONS = (
    "the two runs were fed other tokens",
    "the states differ by more than rounding",
    "the two runs compute different functions",
)


def test_equal_in_float32_rules_everything_out(write_trace: WriteTrace) -> None:
    found = report(write_trace, taps(noise=1e-7))
    assert found.outcome == "pass" and found.kind == "compare"
    assert [f.name.split(".")[-1] for f in found.findings] == [
        "structure",
        "proof",
        "identity",
        "gate",
        "controls",
    ]
    sentence = finding(found, "gate").sentence
    assert sentence.startswith("semantic gate: all 3 taps within the limits; the nearest, ")
    assert "judged by floor (default, float32, depth " in sentence
    assert verdicts(found) == {TOKENS: "ruled out", ROUNDING: "ruled out", FUNCTIONS: "ruled out"}


def test_a_pass_in_bf16_never_rules_out_a_semantic_fault(write_trace: WriteTrace) -> None:
    found = report(write_trace, taps(torch.bfloat16, noise=0.004), taps(torch.bfloat16))
    assert found.outcome == "pass"
    assert BLIND.format("bfloat16") in finding(found, "gate").sentence
    assert verdicts(found) == {TOKENS: "ruled out", ROUNDING: "ruled out", FUNCTIONS: "not tested"}


def test_failure_says_where_and_by_which_floor(write_trace: WriteTrace) -> None:
    found = report(write_trace, taps(l1=0.1))
    gate = finding(found, "gate")
    assert gate.outcome == "fail" and gate.next_step.startswith("look at layer.1.out first")
    assert gate.sentence.startswith(
        "semantic gate: 1 of 3 taps outside, first layer.1.out "
        "(linear_attention), from token 10 ('t110') of request r0 on: rms "
    )
    assert gate.sentence.endswith("judged by floor (default, float32, depth 2)")
    assert dict(gate.evidence)["nearest tap"] == "layer.1.out"
    assert verdicts(found) == {TOKENS: "ruled out", ROUNDING: "found", FUNCTIONS: "found"}


@pytest.mark.parametrize(
    "suffix, outcome, text, options",
    [
        (
            "structure",
            "fail",
            "without an equal partner: 1 item, first tap layer.2.out (side b): float32, width",
            {"a": {k: v for k, v in taps().items() if k != "layer.2.out"}},
        ),
        (
            "structure",
            "fail",
            "first tokens r0 (both sides): token 3 is 9 in a, 103 in b; 3 tokens before it",
            {"a": taps(), "tokens": {"r0": [100, 101, 102] + [9] * 37}},
        ),
        (
            "proof",
            "fail",
            "a trace is no evidence for its backend: side a: layer 0 ran torch",
            {"a": taps(), "backend": "fla", "problems": ["layer 0 ran torch"]},
        ),
        (
            "proof",
            "warn",
            "fla+torch and torch+torch agree to the last bit, as no two kernels do",
            {"a": taps(), "backend": "fla"},
        ),
        (
            "identity",
            "warn",
            "the two targets differ: other values in w",
            {"a": taps(), "weights": {"w": "2"}},
        ),
        (
            "controls",
            "error",
            "broken copies of side b passed: no power at layer.0.out, rolled by one token, ",
            {"a": taps(), "policy": Policy(taps={"*": TapLimits(mean_cosine=-1)})},
        ),
        (
            "gate",
            "error",
            "semantic gate: no power at layer.0.out, layer.1.out, layer.2.out",
            {"a": taps(), "policy": Policy(taps={"*": TapLimits(mean_cosine=-1)})},
        ),
        (
            "controls",
            "skipped",
            "no broken copy could be made: it does not change this data",
            {"a": {"layer.0.out": torch.ones(4, 8)}, "b": {"layer.0.out": torch.ones(4, 8)}},
        ),
        (
            "gate",
            "skipped",
            "no tap could be judged",
            {"a": {"layer.0.out": torch.ones(4, 8)}, "b": {"layer.0.out": torch.ones(4, 8)}},
        ),
        (
            "controls",
            "pass",
            "broken copies of b (tokens rolled, channels shuffled): 1 refused; 1 left out",
            {"a": {"layer.0.out": torch.arange(8.0)[None]}, "b": {"layer.0.out": torch.arange(8.0)[None]}},
        ),
    ],
)
def test_each_question_has_its_answer(
    suffix: str, outcome: str, text: str, options: dict[str, object], write_trace: WriteTrace
) -> None:
    found = finding(report(write_trace, **options), suffix)  # type: ignore[arg-type]
    assert found.outcome == outcome and text in found.sentence
    assert found.next_step or outcome == "pass"


def test_tables_hold_the_numbers(write_trace: WriteTrace) -> None:
    comparison = compare_traces(write_trace("a", {"r0": taps(l1=0.1)}), write_trace("b", {"r0": taps()}))
    tables, findings = tables_and_findings(comparison, name="backends.fp32")
    assert [table.name.removeprefix("backends.fp32.") for table in tables] == [
        "layers",
        "profile",
        "tokens",
        "worst",
    ]
    assert all(found.name.startswith("backends.fp32.") for found in findings)
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    layers = {
        row[0]: dict(zip([column.key for column in tables[0].columns], row, strict=True))
        for row in tables[0].rows
    }
    assert layers["layer.1.out"]["outcome"] == "fail"
    assert layers["layer.1.out"]["cosine_min"] == comparison.taps[1].cosine_min
    assert {row[1] for row in tables[1].rows} == {
        "worst token",
        "rms over tokens",
        "floor, worst token",
        "floor, rms",
    }
    assert len(tables[2].rows) == 3 * 40 and tables[2].detail
    assert tables[3].rows[0][4] == "layer.1.out"


def test_report_survives_json_and_text(write_trace: WriteTrace) -> None:
    broken = taps()
    broken["layer.1.out"][3, 3] = float("nan")
    found = report(write_trace, broken)
    again = schema.from_dict(json.loads(json.dumps(schema.to_dict(found))))
    assert again.outcome == "fail" and again.findings == found.findings
    text = to_text.paint(found, width=80)
    assert "not finite: 1 elements in a, 0 in b" in text.replace("\n         ", " ")


@pytest.mark.parametrize("wrong, tokens, code", [({}, None, 0), ({"l1": 0.1}, None, 1)])
def test_command_writes_reports_and_exits(
    wrong: dict[str, float],
    tokens: None,
    code: int,
    write_trace: WriteTrace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_trace("a", {"r0": taps(torch.float32, 0.0, **wrong)})
    write_trace("b", {"r0": taps()})
    with pytest.raises(typer.Exit) as stop:
        command(tmp_path / "a", tmp_path / "b", out=tmp_path / "out")
    assert stop.value.exit_code == code
    saved = schema.read(tmp_path / "out" / "report.json")
    assert saved.outcome == ("fail" if code else "pass")
    assert (tmp_path / "out" / "report.html").is_file() and not list((tmp_path / "out").glob("*.writing"))
    assert "compare.gate" in capsys.readouterr().out


def test_command_exits_3_where_only_skipped(write_trace: WriteTrace, tmp_path: Path) -> None:
    for side in "ab":
        write_trace(side, {"r0": {"layer.0.out": torch.ones(4, 8)}})
    with pytest.raises(typer.Exit) as stop:
        command(tmp_path / "a", tmp_path / "b")
    assert stop.value.exit_code == 3
