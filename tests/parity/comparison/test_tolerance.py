"""Floors, gates, policies and controls on arrays: each fails on its fault and is silent on benign noise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from parity.comparison.tolerance import (
    CEILING,
    FirstBad,
    Floor,
    Limit,
    Policy,
    TapEvidence,
    TapFloor,
    TapLimits,
    coarsest,
    data_faults,
    default_floor,
    first_bad,
    gate_of,
    judge_tap,
    rms,
    roll_tokens,
    rules_for,
    shuffle_channels,
)
from parity.errors import ParityError

Floats = np.ndarray


def evidence(error: float, worst: float = 0.0, tokens: int = 100, **golden: Floats) -> TapEvidence:
    """`tokens` equal errors, the last replaced by `worst`, and the cosine gap that goes with them."""
    values = np.full(tokens, error, np.float32)
    values[-1] = max(worst, error)
    return TapEvidence(error=values, cosine_gap=values**2 / 2, **golden)


@pytest.mark.parametrize(
    "dtype, gate, low, high",
    [
        ("float64", "semantic", 1e-16, 2e-15),
        ("float32", "semantic", 3e-7, 1e-6),
        ("float16", "kernel", 1e-3, 4e-3),
        ("bfloat16", "kernel", 1e-2, 4e-2),
    ],
)
def test_default_floor_has_the_size_of_rounding(dtype: str, gate: str, low: float, high: float) -> None:
    floor = default_floor(dtype, 8)
    assert gate_of(dtype) == gate
    assert low < floor.rms < high and floor.rms < floor.token
    assert default_floor(dtype, 64).rms > 5 * default_floor(dtype, 8).rms
    assert floor.rms >= torch.finfo(getattr(torch, dtype)).eps  # one ULP at the tensor's magnitude


def test_coarsest_dtype_rules() -> None:
    assert coarsest("float32", "bfloat16", "float64") == "bfloat16"
    assert coarsest("float32", "auto") == "float32"


def test_no_limit_accepts_an_unrelated_token() -> None:
    rules = rules_for("layer.200.out", "bfloat16", depth=201)
    assert rules.limit == Limit(CEILING, CEILING)
    assert judge_tap(evidence(1.4), rules).outcome == "fail"


@pytest.mark.parametrize(
    "dtype, error, worst, outcome",
    [
        ("float32", 5e-7, 1e-6, "pass"),
        ("float32", 3e-4, 3e-4, "fail"),
        ("float32", 1e-7, 1e-3, "fail"),
        ("bfloat16", 1.5e-2, 1e-1, "pass"),
        ("bfloat16", 1e-2, 1.4, "fail"),
        ("bfloat16", 2e-1, 2e-1, "fail"),
        ("float32", 0.0, float("inf"), "fail"),
        ("float32", float("nan"), float("nan"), "fail"),
    ],
)
def test_floor_gate(dtype: str, error: float, worst: float, outcome: str) -> None:
    judged = judge_tap(evidence(error, worst), rules_for("layer.3.out", dtype, depth=4))
    assert judged.outcome == outcome
    assert judged.judged_by == f"floor (default, {dtype}, depth 4)"


def test_nothing_compared_is_skipped() -> None:
    assert judge_tap(evidence(0.0, tokens=1), rules_for("x", "float32", 1)).outcome == "pass"
    empty = TapEvidence(error=np.zeros(0), cosine_gap=np.zeros(0))
    judged = judge_tap(empty, rules_for("x", "float32", 1))
    assert (judged.outcome, judged.because) == ("skipped", "no token was compared")


@pytest.mark.parametrize(
    "dtype, ratio, worst_ratio, outcome",
    [
        ("bfloat16", 1.2, 1.6, "pass"),
        ("bfloat16", 2.5, 2.5, "fail"),
        ("bfloat16", 1.0, 31.7, "fail"),
        ("float32", 8.0, 12.0, "pass"),
        ("float32", 4839.0, 4839.0, "fail"),
        ("float32", 1.0, 360.0, "fail"),
    ],
)
def test_golden_gate_judges_the_ratio(dtype: str, ratio: float, worst_ratio: float, outcome: str) -> None:
    base = np.full(1000, 2 * torch.finfo(getattr(torch, dtype)).eps)
    mine = base * ratio
    mine[-1] = base[-1] * worst_ratio
    judged = judge_tap(evidence(0.0, to_golden=mine, base_to_golden=base), rules_for("x", dtype, 4))
    assert judged.outcome == outcome
    assert judged.judged_by == "ratio to golden"
    assert judged.worst == pytest.approx(max(ratio, worst_ratio))


def test_golden_ratio_has_one_ulp_as_its_floor() -> None:
    exact, one_ulp = np.zeros(10), np.full(10, 2.0**-8)  # flash-attention#1231: 0.0078125 <= 2 * 0.0 fails
    assert (
        judge_tap(
            evidence(0.0, to_golden=one_ulp, base_to_golden=exact), rules_for("x", "bfloat16", 1)
        ).outcome
        == "pass"
    )


def test_measured_floor_loosens_and_is_named(tmp_path: Path) -> None:
    measured = Floor.from_errors("batch 8", {"x": np.array([0.05, 0.06]), "y": np.zeros(2)}, "this CPU")
    assert measured.taps["x"] == TapFloor(rms=rms(np.array([0.05, 0.06])), token=0.06)
    judged = judge_tap(evidence(0.05, 0.06), rules_for("x", "bfloat16", 1, measured))
    assert (judged.outcome, judged.judged_by) == ("pass", "floor (measured: batch 8)")
    assert judge_tap(evidence(0.05, 0.06), rules_for("x", "bfloat16", 1)).outcome == "fail"
    # A rerun that repeats exactly does not forbid another kernel its rounding.
    assert judge_tap(evidence(0.01, 0.02), rules_for("y", "bfloat16", 1, measured)).judged_by.startswith(
        "floor (default"
    )
    both = measured.or_larger(
        Floor.from_errors("rerun", {"y": np.array([0.5]), "z": np.array([0.1])}, "this CPU")
    )
    assert (both.name, both.taps["y"].token, both.taps["x"].token) == ("batch 8 or rerun", 0.5, 0.06)
    (tmp_path / "floor.json").write_text(both.model_dump_json())
    assert Floor.load(tmp_path / "floor.json") == both


@pytest.mark.parametrize(
    "limits, error, worst, outcome, because",
    [
        ({"min_cosine": 0.99}, 0.01, 0.1, "pass", "within the limits"),
        ({"min_cosine": 0.99}, 0.01, 0.2, "fail", "minimum cosine 0.98 below 0.99"),
        ({"mean_cosine": 0.9999}, 0.02, 0.02, "fail", "mean cosine 0.9998 below 0.9999"),
        ({"relative_l2": 0.05}, 0.06, 0.06, "fail", "relative L2 0.06 above 0.05"),
        ({"ratio": 1.5}, 0.015, 0.02, "pass", "within the limits"),
        ({"ratio": 0.5}, 0.015, 0.02, "fail", "rms 0.0151 above 0.00879"),
        ({"share_of_tokens": 0.02}, 0.01, 1.4, "pass", "within the limits"),
        ({"share_of_tokens": 0.005}, 0.01, 1.4, "fail", "1.000% of tokens beyond 0.176, 0.500% allowed"),
    ],
)
def test_policy_limits(
    limits: dict[str, float], error: float, worst: float, outcome: str, because: str
) -> None:
    policy = Policy(taps={"layer.*.out": TapLimits(**limits)})
    judged = judge_tap(evidence(error, worst), rules_for("layer.3.out", "bfloat16", 4, policy=policy))
    assert judged.outcome == outcome and judged.because.startswith(because)
    assert judged.judged_by.startswith("policy, ")
    assert not judge_tap(
        evidence(error), rules_for("logits", "bfloat16", 5, policy=policy)
    ).judged_by.startswith("policy")


@pytest.mark.parametrize(
    "text, found, do",
    [
        ("taps: {layer.*: {min_cosin: 0.9}}", "taps.layer.*.min_cosin", "write 'min_cosine'"),
        ("allow_nonfinite: true", "allow_nonfinite", "write 'allow_nonfinite_at_same_place'"),
        (
            "taps: {layer.*: {min_cosine: 2}}",
            "less than or equal to 1",
            "known keys: min_cosine, mean_cosine",
        ),
        ("taps: [", "no readable YAML", "name a YAML or JSON file"),
    ],
)
def test_policy_errors_name_the_nearest_key(tmp_path: Path, text: str, found: str, do: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ParityError) as caught:
        Policy.load(file)
    assert found in caught.value.found and caught.value.do.startswith(do)


def test_policy_loads(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("taps:\n  'layer.1.*': {min_cosine: 0.9}\n  '*': {ratio: 3}\n")
    policy = Policy.load(tmp_path / "p.yaml")
    assert policy.limits("layer.1.out") == TapLimits(min_cosine=0.9)
    assert policy.limits("logits") == TapLimits(ratio=3)


SAME = Policy(allow_nonfinite_at_same_place=True)


@pytest.mark.parametrize(
    "nonfinite, zero, dtypes, policy, faults",
    [
        ((0, 0, 0), 0, ("float32", "float32"), None, 0),
        ((1, 0, 0), 0, ("float32", "float32"), SAME, 1),
        ((2, 2, 2), 0, ("float32", "float32"), None, 1),
        ((2, 2, 2), 0, ("float32", "float32"), SAME, 0),
        ((2, 2, 1), 0, ("float32", "float32"), SAME, 1),
        ((0, 0, 0), 1, ("float32", "float32"), None, 1),
        ((0, 0, 0), 0, ("float32", "bfloat16"), None, 1),
        ((0, 0, 0), 0, ("float32", "bfloat16"), Policy(allow_other_dtype=True), 0),
    ],
)
def test_rules_without_tolerance(
    nonfinite: tuple[int, int, int], zero: int, dtypes: tuple[str, str], policy: Policy | None, faults: int
) -> None:
    assert len(data_faults(nonfinite=nonfinite, zero_one_side=zero, dtypes=dtypes, policy=policy)) == faults


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([[0, 1e-4, 1e-3], [0, 0, 1e-3]], FirstBad("x", 0, 1)),
        ([[0, 0, 1e-3], [1e-3, 0, 0]], FirstBad("x", 1, 0)),
        ([[0, 1e-9, 0], [0, 0, 3e-9]], FirstBad("x", 1, 2)),
        # nothing leaves the floor: the worst token stands for it
    ],
)
def test_first_bad(rows: list[list[float]], expected: FirstBad) -> None:
    values = {"x": [np.array(row) for row in rows], "y": [np.ones(3), np.ones(3)]}
    assert first_bad(["x", "y"], values, {"x": 1e-6, "y": 1e-6}) == expected
    assert first_bad([], values, {}) is None


def test_controls_change_the_data_or_say_that_they_cannot() -> None:
    b = torch.arange(12.0).reshape(3, 4)
    turned, mixed = roll_tokens(b), shuffle_channels(b)
    assert turned is not None and torch.equal(turned, b[[2, 0, 1]])
    assert mixed is not None and not torch.equal(mixed, b) and torch.equal(mixed.sort(1).values, b)
    assert torch.equal(mixed, shuffle_channels(b))  # type: ignore[arg-type]
    assert roll_tokens(b[:1]) is None and roll_tokens(torch.ones(3, 4)) is None
    assert shuffle_channels(b[:, :1]) is None and shuffle_channels(torch.full((3, 4), float("nan"))) is None
    for seed in range(20):  # two channels: half of all permutations change nothing
        assert shuffle_channels(b[:, :2], seed) is not None
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float64):
        changed = roll_tokens(b.to(dtype))
        assert changed is not None and changed.dtype == dtype
