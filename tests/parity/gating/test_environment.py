"""Two machines or runs: what differs, in which order, and what a silence of one side means."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parity.cli import main as cli
from parity.environment import environment
from parity.errors import NothingComparable
from parity.gating import environment as environment_diff
from parity.gating.environment import RULES, EnvironmentSide, environment_differences, finding_of, rule_for
from parity.reports import schema, to_json
from parity.reports.record import Report
from parity.tracing.trace import Manifest
from tests.parity.conftest import unwrapped

BASE = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "flash-linear-attention": "0.6.0",
    "causal-conv1d": "absent",
    "triton": "3.9.0",
    "cpu": "A",
    "numpy": "2.0",
    "torch threads": "1",
    "matmul precision": "highest",
    "cuda": "None",
}


def side(changes: Mapping[str, str | None] | None = None) -> EnvironmentSide:
    """The base environment with changes; a value of None removes the name."""
    pairs = {name: value for name, value in {**BASE, **(changes or {})}.items() if value is not None}
    return EnvironmentSide(label="s", pairs=pairs, devices="torch threads" in pairs)


def names(a: EnvironmentSide, b: EnvironmentSide) -> list[str]:
    return [difference.name for difference in environment_differences(a, b)]


def test_equal_sides_pass() -> None:
    found = environment_differences(side(), side())
    assert found == ()
    finding = finding_of(side(), side(), found)
    assert finding.outcome == "pass" and dict(finding.evidence)["compared"] == len(BASE)


def test_order_of_suspicion() -> None:
    """What ran, a kernel package that is missing, versions, devices, precision, threads, the rest."""
    other = {
        "run: delta": "fla",
        "causal-conv1d": "1.5.0",
        "triton": "3.8.0",
        "transformers": "5.20.0",
        "torch": "2.12.0",
        "cuda:0": "H200",
        "cuda": "12.8",
        "cpu": "B",
        "matmul precision": "high",
        "torch threads": "8",
        "$OMP_NUM_THREADS": "8",
        "$TORCH_LOGS": "all",
        "numpy": "2.1",
        "python": "3.12",
    }
    a = EnvironmentSide(label="a", pairs=BASE | {"run: delta": "torch"}, devices=True)
    b = EnvironmentSide(label="b", pairs=BASE | other, devices=True)
    # `causal-conv1d` is lacking on one side, so it comes before the version of triton
    assert names(a, b) == list(other)


@pytest.mark.parametrize(
    ("a", "b", "name", "values", "effect"),
    [
        ({}, {"$FLA_USE_TMA": "1"}, "$FLA_USE_TMA", ("unset", "1"), "numbers"),
        ({}, {"cuda:0": "H200"}, "cuda:0", ("none", "H200"), "rounding"),
        ({}, {"cuda:0": "H200", "tf32": "matmul True"}, "tf32", ("no CUDA", "matmul True"), "rounding"),
        # the side was not asked with torch loaded: silence about devices means nothing
        ({"torch threads": None}, {"cuda:0": "H200"}, "cuda:0", ("not recorded", "H200"), "unknown"),
        # both have a GPU, one was written by a version that did not record the flag
        ({"cuda:0": "H200"}, {"cuda:0": "H200", "tf32": "x"}, "tf32", ("not recorded", "x"), "unknown"),
        ({}, {"accelerate": "1.0"}, "accelerate", ("not recorded", "1.0"), "unknown"),
        ({}, {"numpy": "3"}, "numpy", ("2.0", "3"), "none"),
        ({}, {"new thing": "3"}, "new thing", ("not recorded", "3"), "unknown"),
        ({"new thing": "2"}, {"new thing": "3"}, "new thing", ("2", "3"), "unknown"),
    ],
)
def test_what_a_difference_can_change(
    a: dict[str, str | None], b: dict[str, str | None], name: str, values: tuple[str, str], effect: str
) -> None:
    found = {d.name: d for d in environment_differences(side(a), side(b))}
    assert (found[name].a, found[name].b, found[name].effect) == (*values, effect)
    mirrored = {d.name: d for d in environment_differences(side(b), side(a))}
    assert (mirrored[name].b, mirrored[name].a, mirrored[name].effect) == (*values, effect)


def test_outcomes() -> None:
    def outcome(**changes: str | None) -> str:
        a, b = side(), side(changes)
        return finding_of(a, b, environment_differences(a, b)).outcome

    assert outcome(python="3.12", numpy="9") == "pass"
    assert outcome(torch="2.12.0") == "warn"
    assert outcome(cpu=None) == "warn"  # not said is not the same


def test_nothing_in_common_is_nothing_comparable() -> None:
    with pytest.raises(NothingComparable):
        environment_differences(side(), EnvironmentSide(label="b", pairs={"x": "1"}, devices=False))


def test_every_name_that_this_machine_gives_has_a_rule() -> None:
    import torch  # noqa: F401 (so that devices are given)

    assert [n for n in environment() if rule_for(n) is environment_diff.OTHER] == []
    assert len({rule.glob for rule in RULES}) == len(RULES)


def report(environment: tuple[tuple[str, Any], ...]) -> str:
    return to_json.paint(
        Report(
            kind="check",
            title="t",
            created="c",
            command="k",
            subject=(),
            findings=(),
            environment=environment,
        )
    )


def run(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.run([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    return code, captured.out, unwrapped(captured.err)


def manifest(dtype: str, implementation: str, environment: dict[str, str]) -> str:
    calls = [{"layer": 0, "operator": "delta", "implementation": implementation, "callee": "c", "calls": 3}]
    data = {
        "schema": "parity-trace/1",
        "created": "c",
        "target": {
            "name": "m",
            "revision": None,
            "config_sha256": "ab" * 32,
            "model_type": "t",
            "layers": 1,
            "layer_types": ["linear_attention"],
            "weights": {"w": "1"},
        },
        "loader": "AutoModelForCausalLM",
        "dtype": dtype,
        "mode": "prefill",
        "backend": {"requested": {"delta": "torch", "conv": "torch"}, "calls": calls, "valid": True},
        "taps": [],
        "requests": [],
        "fingerprint": "f",
        "environment": environment,
    }
    return Manifest.model_validate(data).model_dump_json(by_alias=True)


def test_every_kind_of_side_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/report.json").write_text(report(tuple(BASE.items())))
    for name, dtype, ran in (("t", "float32", "torch"), ("u", "bfloat16", "fla")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest(dtype, ran, BASE))
    # reports and traces, named by folder or by file
    for a in (tmp_path / "a", tmp_path / "a/report.json"):
        for b in (tmp_path / "t", tmp_path / "t/manifest.json"):
            code, out, err = run(capfd, "env", "--diff", a, b)
            assert (code, err) == (0, "") and "only one side was a trace" in " ".join(out.split())
    code, out, _ = run(capfd, "env", "--diff", tmp_path / "t", tmp_path / "u", "--as", "json")
    rows = schema.read_report(out).table("environment.differences").rows
    assert code == 0 and [row[1:5] for row in rows] == [
        ("run: dtype", "float32", "bfloat16", "numbers"),
        ("run: delta", "torch", "fla", "numbers"),
    ]


def test_a_saved_environment_is_a_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "env", "--as", "json")
    (tmp_path / "env.json").write_text(out)
    assert code == 0 and schema.read_report(out).table("backends").rows[0] == ("torch", True, None)
    code, out, _ = run(capfd, "env", "--diff", tmp_path / "env.json", "here")
    assert code == 0 and out.startswith("PASS") and "nothing that can change numbers differs" in out


@pytest.mark.parametrize(
    ("content", "code", "found"),
    [
        (None, 2, "No such file"),
        ("{}", 2, "not a report of parity"),
        (report(()), 2, "a report of `parity check` that holds none"),
        (report((("x", "1"),)), 3, "no name that both give"),
    ],
)
def test_what_is_no_side_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str | None, code: int, found: str
) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    got, out, err = run(capfd, "env", "--diff", tmp_path / "x.json", "here")
    assert (got, out) == (code, "") and found in err and err.count("\n") == 2


def test_a_folder_that_holds_neither_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "env", "--diff", tmp_path, "here")
    assert code == 2 and "without manifest.json" in err
