"""A comparison in words: each question answered, each non-pass with a next step, and the exit codes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from parity.cli import main as cli
from parity.cli.compare import compare as command
from parity.cli.output import report_folder, save_report
from parity.commands.compare import compare_sides, report_sides
from parity.comparison.report import COARSE_DTYPE_NOTE
from parity.comparison.tolerance import Policy, TapLimits
from parity.comparison.traces import compare_traces
from parity.diagnosis.report import comparison_report, diagnosed_tables_and_findings
from parity.errors import ParityError
from parity.gating.conformance import save_conformance as save_statement
from parity.gating.environment import environment_report as env_report
from parity.gating.environment import side_of_manifest
from parity.reports import schema, to_text
from parity.reports.record import Conformance, Finding, Report, Statement
from parity.tracing.trace import Trace

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
    return comparison_report(
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
    assert COARSE_DTYPE_NOTE.format("bfloat16") in finding(found, "gate").sentence
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
    tables, findings = diagnosed_tables_and_findings(comparison, name="backends.fp32")
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
    saved = schema.read_report(tmp_path / "out" / "report.json")
    assert saved.outcome == ("fail" if code else "pass")
    assert (tmp_path / "out" / "report.html").is_file() and not list((tmp_path / "out").glob("*.writing"))
    assert "compare.gate" in capsys.readouterr().out


def test_command_exits_3_where_only_skipped(write_trace: WriteTrace, tmp_path: Path) -> None:
    for side in "ab":
        write_trace(side, {"r0": {"layer.0.out": torch.ones(4, 8)}})
    with pytest.raises(typer.Exit) as stop:
        command(tmp_path / "a", tmp_path / "b")
    assert stop.value.exit_code == 3


# --- What is in --out already ------------------------------------------------------------------------------


def compared_to(folder: Path, a: str, b: str) -> int:
    """Exit code of `parity compare A B --out FOLDER`."""
    return cli.run(["compare", a, b, "--out", str(folder)])


def test_a_report_of_the_same_sides_is_replaced(write_trace: WriteTrace, tmp_path: Path) -> None:
    write_trace("a", {"r0": taps(l1=0.1)})
    write_trace("b", {"r0": taps()})
    sides = str(tmp_path / "a"), str(tmp_path / "b")
    assert compared_to(tmp_path / "out", *sides) == 1
    first = (tmp_path / "out" / "report.json").read_text()
    shutil.rmtree(tmp_path / "a")
    write_trace("a", {"r0": taps()})
    assert compared_to(tmp_path / "out", *sides) == 0
    assert (tmp_path / "out" / "report.json").read_text() != first


def test_nothing_else_in_out_is_replaced(
    write_trace: WriteTrace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither another comparison, nor another command's report, nor a file of the user's; and no work is done first."""
    for name in "abc":
        write_trace(name, {"r0": taps()})
    a, b, c = (str(tmp_path / name) for name in "abc")
    out = tmp_path / "out"
    assert compared_to(out, a, b) == 0
    kept = {file.name: file.read_bytes() for file in out.iterdir()}
    capfd.readouterr()
    for left, right in ((a, c), (c, b), (b, a)):
        assert compared_to(out, left, right) == 2
        error = " ".join(capfd.readouterr().err.split())
        assert f"the report of another `parity compare` (a (candidate): {a}; b (reference): {b})" in error
        assert "do this: choose another --out, or move that report away first" in error
    assert {file.name: file.read_bytes() for file in out.iterdir()} == kept


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("report.json", '{"mine": 1}', "report.json, which parity did not write or cannot read"),
        ("report.json", "half a re", "report.json, which parity did not write or cannot read"),
        ("report.html", "<p>mine", "report.html without a report.json"),
        ("report.md", "# mine", "report.md without a report.json"),
    ],
)
def test_a_file_of_the_users_is_kept(
    name: str,
    content: str,
    found: str,
    write_trace: WriteTrace,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for side in "ab":
        write_trace(side, {"r0": taps()})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    assert compared_to(tmp_path / "out", str(tmp_path / "a"), str(tmp_path / "b")) == 2
    assert found in " ".join(capfd.readouterr().err.split())
    assert [file.name for file in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == content


@pytest.mark.parametrize("kind", ["check", "train", "eval"])
def test_other_commands_replace_their_own_kind_only(
    kind: str, write_trace: WriteTrace, tmp_path: Path
) -> None:
    a = write_trace("a", {"r0": taps()})
    other = comparison_report(compare_traces(a, a), "test")
    save_report(other, tmp_path)
    with pytest.raises(ParityError, match="the report of another `parity compare`"):
        report_folder(tmp_path, kind)
    save_report(replace(other, kind=kind), tmp_path)  # type: ignore[arg-type]
    assert report_folder(tmp_path, kind) == tmp_path


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_other_commands_refuse_before_they_work(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("[]")
    arguments = [str(tmp_path / "run")] if command == "eval" else []
    assert cli.run([command, *arguments, "--out", str(tmp_path)]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert "a report in" in error and "report.json, which parity did not write" in error
    assert (tmp_path / "report.json").read_text() == "[]" and len(list(tmp_path.iterdir())) == 1


def test_statements_are_compared_again_into_one_folder(tmp_path: Path) -> None:
    """Their report names the files, so that the same two may be compared again, and no others."""
    statement = Statement(probe="loss", sentence="s", facts=(("gamma", 4.0),))
    one = Conformance(trainer="t", recipe="r", statements=(statement,))
    for name in ("old", "new", "other"):
        save_statement(one, tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in ("old", "new", "other")]
    assert [compared_to(tmp_path / "out", *files[:2]) for _ in range(2)] == [0, 0]
    assert compared_to(tmp_path / "out", *files[1:]) == 2


# --- The environments --------------------------------------------------------------------------------------

MACHINE = {"torch": "2.13.0", "triton": "3.9.0", "cpu": "A", "torch threads": "1"}


def in_environments(
    write_trace: WriteTrace,
    a: dict[str, str],
    b: dict[str, str],
    states: dict[str, torch.Tensor] | None = None,
) -> Report:
    """The report of two equal traces, or of `states` against those, from two machines."""
    left = write_trace("a", {"r0": states or taps()}, environment=a)
    right = write_trace("b", {"r0": taps()}, environment=b)
    return report_sides(*compare_sides(left, right), "test")


def test_environments_are_told_apart_beside_a_failure(write_trace: WriteTrace) -> None:
    """The finding and the rows of `parity env --diff A B`, beside a comparison that fails: a suspect."""
    found = in_environments(write_trace, MACHINE, MACHINE | {"triton": "3.8.0", "cpu": "B"}, taps(l1=0.1))
    environment = finding(found, "environment")
    assert environment.outcome == "warn" and environment.tables == ("compare.environment",)
    assert "2 of " in environment.sentence and "first triton: 3.9.0 against 3.8.0" in environment.sentence
    table = found.table("compare.environment")
    assert [row[1:4] for row in table.rows] == [("triton", "3.9.0", "3.8.0"), ("cpu", "A", "B")]
    assert not table.detail and found.outcome == "fail"
    sides = [
        side_of_manifest(s, Trace.open(s).manifest) for s in (str(dict(found.subject)[key]) for key in SIDES)
    ]
    alone = env_report(sides[0], sides[1], created="", command="")
    assert table.rows == alone.tables[0].rows and environment.sentence == alone.findings[0].sentence


SIDES = ("a (candidate)", "b (reference)")


def test_environments_that_moved_nothing_are_no_warning(write_trace: WriteTrace) -> None:
    found = in_environments(write_trace, MACHINE, MACHINE | {"triton": "3.8.0"})
    environment = finding(found, "environment")
    assert found.outcome == environment.outcome == "pass" and found.table("compare.environment").detail
    assert environment.sentence.endswith("the states agree within their limits all the same")


def test_equal_environments_have_no_table(write_trace: WriteTrace) -> None:
    found = in_environments(write_trace, MACHINE, MACHINE)
    assert finding(found, "environment").outcome == "pass" and finding(found, "environment").tables == ()
    assert not any(table.name == "compare.environment" for table in found.tables)


@pytest.mark.parametrize("a, b", [({}, MACHINE), (MACHINE, {}), ({}, {})])
def test_a_side_without_an_environment_is_not_compared(
    a: dict[str, str], b: dict[str, str], write_trace: WriteTrace
) -> None:
    found = in_environments(write_trace, a, b)
    assert not any(f.name == "compare.environment" for f in found.findings)


def test_environments_alone_are_no_pass(write_trace: WriteTrace) -> None:
    """Where no tap could be judged, that both machines are alike must not turn the report into a pass."""
    flat = {"layer.0.out": torch.ones(4, 8)}
    left = write_trace("a", {"r0": flat}, environment=MACHINE)
    right = write_trace("b", {"r0": flat}, environment=MACHINE)
    found = report_sides(*compare_sides(left, right), "test")
    assert found.outcome == "skipped" and finding(found, "environment").outcome == "skipped"
