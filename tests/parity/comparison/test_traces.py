"""Whole comparisons of synthetic traces: silent on benign noise, failing at the right place on each fault."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parity.commands.compare import CompareOptions, compare
from parity.comparison.records import Comparison, HeatMap
from parity.comparison.tolerance import Floor, Policy, TapLimits
from parity.comparison.traces import compare_traces, measure_floor
from parity.errors import NothingComparable, ParityError
from parity.tracing.trace import Trace

WriteTrace = Callable[..., Trace]
Tensors = dict[str, torch.Tensor]
MASSIVE = (5, 300, 1000, 2000)


def hidden(rows: int = 96, width: int = 2048, seed: int = 0) -> torch.Tensor:
    """[rows, width] hidden states with four massive channels, float32."""
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    states[:, [channel for channel in MASSIVE if channel < width]] *= 1000
    return states


def noisy(states: torch.Tensor, size: float, seed: int = 1) -> torch.Tensor:
    return states * (1 + size * torch.randn(states.shape, generator=torch.Generator().manual_seed(seed)))


def channels_unrelated(a: torch.Tensor) -> torch.Tensor:
    other = torch.randn(a.shape, generator=torch.Generator().manual_seed(9)).to(a.dtype)
    other[:, MASSIVE] = a[:, MASSIVE]
    return other


def with_row(row: int, value: torch.Tensor | float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(a: torch.Tensor) -> torch.Tensor:
        a = a.clone()
        a[row] = value
        return a

    return change


def garbage_token(a: torch.Tensor) -> torch.Tensor:
    row = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(9))
    row *= a[40].float().square().mean().sqrt()
    return with_row(40, row.to(a.dtype))(a)


# What msprobe, SGLang's comparator or Polygraphy let through is among these (docs/evidence.md).
FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "2044 of 2048 channels unrelated": (channels_unrelated, 0),
    "one garbage token": (garbage_token, 40),
    "one zero token": (with_row(40, 0.0), 40),
    "rows shifted by one": (lambda a: a.roll(1, 0), 0),
    "scaled by two": (lambda a: a * 2, 0),
    "unrelated": (lambda a: hidden(a.shape[0], a.shape[1], seed=5).to(a.dtype), 0),
    "NaN on one side": (with_row(7, float("nan")), 7),
    "infinity on one side": (with_row(7, float("inf")), 7),
}


@pytest.fixture
def reference(write_trace: WriteTrace) -> Trace:
    return write_trace(
        "b", {"r0": {"layer.0.out": hidden().bfloat16(), "layer.1.out": hidden(seed=3).bfloat16()}}
    )


def candidate(write_trace: WriteTrace, change: Callable[[torch.Tensor], torch.Tensor] = lambda a: a) -> Trace:
    """bf16 noise in both layers, and a fault in the second."""
    return write_trace(
        "a",
        {
            "r0": {
                "layer.0.out": noisy(hidden(), 0.004).bfloat16(),
                "layer.1.out": change(noisy(hidden(seed=3), 0.004).bfloat16()),
            }
        },
    )


def test_benign_noise_is_silent(write_trace: WriteTrace, reference: Trace) -> None:
    found = compare_traces(candidate(write_trace), reference)
    assert found.outcome == "pass" and found.first_bad is None and found.gate == "kernel"
    assert [tap.outcome for tap in found.taps] == ["pass", "pass"]
    assert all(tap.outliers == MASSIVE and not tap.recomputed for tap in found.taps)
    assert all(control.refused for tap in found.taps for control in tap.controls)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_at_its_token(fault: str, write_trace: WriteTrace, reference: Trace) -> None:
    change, token = FAULTS[fault]
    found = compare_traces(candidate(write_trace, change), reference)
    assert found.outcome == "fail"
    assert [tap.outcome for tap in found.taps] == ["pass", "fail"]
    assert found.first_bad is not None
    assert (found.first_bad.tap, found.first_bad.token, found.first_bad.text) == (
        "layer.1.out",
        token,
        f"t{100 + token}",
    )


def test_numbers_against_numpy(write_trace: WriteTrace, reference: Trace) -> None:
    trace = candidate(write_trace)
    tap = compare_traces(trace, reference).taps[1]
    a, b = (side.tensor("r0", "layer.1.out").double().numpy() for side in (trace, reference))
    kept = [channel for channel in range(2048) if channel not in MASSIVE]
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    plain = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    robust = np.linalg.norm((a - b)[:, kept], axis=1) / np.linalg.norm(b[:, kept], axis=1)
    judged = np.maximum(plain, robust)
    expected = {
        "cosine_mean": cosines.mean(),
        "cosine_min": cosines.min(),
        "cosine_p01": np.quantile(cosines, 0.01),
        "relative_l2": np.linalg.norm(a - b) / np.linalg.norm(b),
        "robust_relative_l2": np.linalg.norm((a - b)[:, kept]) / np.linalg.norm(b[:, kept]),
        "error_rms": np.sqrt((judged**2).mean()),
        "error_max": judged.max(),
        "max_abs": abs(a - b).max(),
        "mean_abs": abs(a - b).mean(),
        "tokens": 96,
        "width": 2048,
    }
    for name, value in expected.items():
        assert getattr(tap, name) == pytest.approx(value, rel=1e-6), name
    assert tap.mean == pytest.approx((a.mean(), b.mean()), rel=1e-6)
    assert tap.std == pytest.approx((a.std(), b.std()), rel=1e-6)
    assert tap.ulp is not None and sum(tap.ulp) == a.size
    rms_error, rms_value = np.sqrt(((a - b) ** 2).mean(0)), np.sqrt((b**2).mean(0))
    assert np.allclose(tap.channel_errors, rms_error / rms_value, rtol=1e-5)


def test_another_infinity_is_not_the_same(write_trace: WriteTrace) -> None:
    """At one place, but of another kind: what only the option for equal places could accept is never accepted."""
    for index, (mine, theirs) in enumerate(
        [(float("inf"), float("-inf")), (float("nan"), float("inf")), (float("inf"), float("inf"))]
    ):
        states = hidden(8, 64).bfloat16()
        other = states.clone()
        states[3, 9], other[3, 9] = mine, theirs
        a, b = (
            write_trace(f"a{index}", {"r0": {"layer.0.out": states}}),
            write_trace(f"b{index}", {"r0": {"layer.0.out": other}}),
        )
        found = compare_traces(a, b, policy=Policy(allow_nonfinite_at_same_place=True))
        assert found.outcome == ("pass" if mine == theirs else "fail")
        assert found.taps[0].nonfinite == (1, 1, int(mine == theirs))


def test_nonfinite_at_the_same_place_is_an_option(write_trace: WriteTrace) -> None:
    states = hidden(8, 64).bfloat16()
    states[3, 9] = float("nan")
    a, b = (write_trace(side, {"r0": {"layer.0.out": states}}) for side in "ab")
    assert compare_traces(a, b).taps[0].faults == ("not finite on both sides: 1 elements at the same place",)
    assert compare_traces(a, b, policy=Policy(allow_nonfinite_at_same_place=True)).outcome == "pass"


@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda taps: {"layer.0.out": taps["layer.0.out"]}, "tap"),
        (lambda taps: taps | {"layer.2.out": taps["layer.0.out"]}, "tap"),
        (lambda taps: taps | {"layer.1.out": taps["layer.1.out"][:, :40]}, "width"),
        (lambda taps: taps | {"layer.1.out": taps["layer.1.out"].half()}, "dtype"),
    ],
)
def test_structure_fails(change: Callable[[Tensors], Tensors], kind: str, write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48), "layer.1.out": torch.randn(8, 48)}
    found = compare_traces(write_trace("a", {"r0": change(taps)}), write_trace("b", {"r0": taps}))
    assert found.outcome == "fail" and [item.kind for item in found.unpaired] == [kind]
    assert found.taps[0].outcome == "pass"


def test_missing_request_and_other_tokens_fail(write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48)}
    b = write_trace("b", {"r0": taps, "r1": taps}, tokens={"r1": list(range(8))})
    found = compare_traces(write_trace("a", {"r0": taps}), b)
    assert found.outcome == "fail" and [(item.kind, item.side) for item in found.unpaired] == [
        ("request", "b")
    ]
    found = compare_traces(write_trace("c", {"r0": taps}, tokens={"r0": [100, 101, 102, 9, 9, 9, 9, 9]}), b)
    assert found.tokens == 3 and {item.kind for item in found.unpaired} == {"request", "tokens"}
    with pytest.raises(NothingComparable):
        compare_traces(write_trace("d", {"r0": taps}, tokens={"r0": [9] * 8}), b)


def test_dtype_may_differ_on_purpose(write_trace: WriteTrace) -> None:
    states = {"layer.0.out": hidden(16, 64)}
    a = write_trace("a", {"r0": {"layer.0.out": states["layer.0.out"].bfloat16()}})
    b = write_trace("b", {"r0": states})
    assert compare_traces(a, b).outcome == "fail"
    found = compare_traces(a, b, policy=Policy(allow_other_dtype=True))
    assert found.outcome == "pass" and found.unpaired == () and found.taps[0].ulp is None
    assert found.taps[0].judgement.judged_by == "floor (default, bfloat16, depth 1)"


def test_an_unproven_backend_fails(write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48)}
    a = write_trace("a", {"r0": taps}, backend="fla", problems=["layer 0 ran torch"])
    found = compare_traces(a, write_trace("b", {"r0": taps}))
    assert found.outcome == "fail" and found.proof_problems == ("side a: layer 0 ran torch",)


def test_a_floor_is_measured_between_two_benign_runs(write_trace: WriteTrace, tmp_path: Path) -> None:
    """A machine whose reruns differ by more than the default floor: its own reruns say so, and another machine's do
    not speak for it."""
    b = {"layer.0.out": hidden(64, 256)}
    rerun = {"layer.0.out": noisy(b["layer.0.out"], 2e-5)}
    for name, taps in (
        ("a", {"layer.0.out": noisy(b["layer.0.out"], 3e-5, seed=8)}),
        ("b", b),
        ("rerun", rerun),
    ):
        write_trace(name, {"r0": taps})
    assert compare(tmp_path / "a", tmp_path / "b").outcome == "fail"
    found = compare(tmp_path / "a", tmp_path / "b", floor=tmp_path / "rerun")
    assert found.outcome == "pass" and found.taps[0].floor_name == "measured: rerun" and found.notes == ()
    truth = (rerun["layer.0.out"] - b["layer.0.out"]).double().norm(dim=1) / b["layer.0.out"].double().norm(
        dim=1
    )
    floor = measure_floor(Trace.open(tmp_path / "rerun"), Trace.open(tmp_path / "b"))
    assert floor.taps["layer.0.out"].token >= 0.99 * float(truth.max())
    (tmp_path / "floor.json").write_text(floor.model_copy(update={"measured_on": "a B200"}).model_dump_json())
    found = compare(tmp_path / "a", tmp_path / "b", floor=tmp_path / "floor.json")
    assert found.notes == (
        "the floor 'rerun' was measured on a B200, the sides on an unknown machine and an unknown machine",
    )


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda taps: taps | {"layer.1.out": taps["layer.0.out"]}, "tap layer.1.out"),
        (lambda taps: {"layer.0.out": with_row(3, float("nan"))(taps["layer.0.out"])}, "not finite"),
        (lambda taps: {"layer.0.out": taps["layer.0.out"].half()}, "dtype layer.0.out"),
    ],
)
def test_what_is_no_floor(change: Callable[[Tensors], Tensors], found: str, write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48)}
    b = write_trace("b", {"r0": taps})
    with pytest.raises(ParityError, match=found):
        measure_floor(write_trace("rerun", {"r0": change(taps)}), b)
    with pytest.raises(ParityError, match="other values in w"):
        measure_floor(write_trace("other", {"r0": taps}, weights={"w": "2"}), b)


def test_controls_without_power_are_errors(write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48)}
    a, b = (write_trace(side, {"r0": taps}) for side in "ab")
    blind = Policy(taps={"*": TapLimits(mean_cosine=-1)})
    found = compare_traces(a, b, policy=blind)
    assert found.outcome == "error" and [control.refused for control in found.taps[0].controls] == [
        False,
        False,
    ]
    deep = Floor(name="absurd", measured_on="", taps={})
    assert compare_traces(a, b, floor=deep).outcome == "pass"


def test_controls_that_change_nothing_are_left_out(write_trace: WriteTrace) -> None:
    one_token = [
        write_trace(f"one-{side}", {"r0": {"layer.0.out": torch.arange(8.0)[None]}}) for side in "ab"
    ]
    found = compare_traces(*one_token)
    assert [control.refused for control in found.taps[0].controls] == [None, True] and found.outcome == "pass"
    constant = [write_trace(f"same-{side}", {"r0": {"layer.0.out": torch.ones(6, 8)}}) for side in "ab"]
    found = compare_traces(*constant)
    assert found.outcome == "skipped" and found.taps[0].controls[0].because == "it does not change this data"


# A linear-attention layer in a few lines, for faults whose onset is known.
def hybrid(
    fault: str | None = None,
    dtype: torch.dtype = torch.float32,
    layers: int = 4,
    tokens: int = 130,
    width: int = 32,
    at: int = 1,
    order: int = 1,
) -> Tensors:
    """Taps of a stack of gated linear-attention layers; `fault` sits in layer `at`; `order` splits sums."""
    generator, taps = torch.Generator().manual_seed(0), {}
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    for layer in range(layers):
        weights = [torch.randn(width, width, generator=generator).to(dtype) / width**0.5 for _ in range(4)]
        kernel, gate = (
            torch.randn(4, width, generator=generator).to(dtype),
            torch.randn(width, generator=generator),
        )
        a_log = torch.rand(width, generator=generator) * 6 - 5
        here = fault if layer == at else None
        if here == "A_log rounded to bf16":
            a_log = a_log.bfloat16().float()
        padded = torch.cat([torch.zeros(3, width, dtype=dtype), x])
        shift = 1 if here == "conv shifted by a tap" else 0
        conv = sum((padded.roll(shift, 0)[i : i + tokens] * kernel[i] for i in range(4)), torch.zeros_like(x))
        normal = conv / conv.square().mean(-1, keepdim=True).sqrt()
        q, k, v, out = (_split_matmul(normal, w, order) for w in (*weights[:3], weights[3]))
        decay = torch.exp(-torch.exp(a_log.to(dtype)) * torch.nn.functional.softplus(out + gate.to(dtype)))
        state, rows = torch.zeros(width, width, dtype=dtype), []
        for t in range(tokens):
            if here == "state dropped every 64" and t and t % 64 == 0:
                state = torch.zeros_like(state)
            state = decay[t][:, None] * state + k[t][:, None] * v[t][None] / width
            rows.append(q[t] @ state)
        delta = torch.stack(rows)
        taps[f"layer.{layer}.conv.out"], taps[f"layer.{layer}.gdn.out"] = conv, delta
        x = x + delta
        taps[f"layer.{layer}.out"] = x
    return taps


def _split_matmul(x: torch.Tensor, w: torch.Tensor, parts: int) -> torch.Tensor:
    products = [p @ q for p, q in zip(x.chunk(parts, 1), w.chunk(parts, 0), strict=True)]
    return sum(products[1:], products[0])


def compare_hybrid(
    write_trace: WriteTrace, fault: str | None, with_golden: bool, **options: Any
) -> Comparison:
    golden = write_trace("golden", {"r0": hybrid(dtype=torch.float64)}) if with_golden else None
    return compare_traces(
        write_trace("a", {"r0": hybrid(fault, **options)}), write_trace("b", {"r0": hybrid()}), golden=golden
    )


@pytest.mark.parametrize("with_golden", [False, True])
@pytest.mark.parametrize(
    "fault, tap, token",
    [
        ("A_log rounded to bf16", "layer.1.gdn.out", 1),
        ("state dropped every 64", "layer.1.gdn.out", 64),
        ("conv shifted by a tap", "layer.1.conv.out", 0),
    ],
)
def test_first_bad_layer_and_token(
    fault: str, tap: str, token: int, with_golden: bool, write_trace: WriteTrace
) -> None:
    found = compare_hybrid(write_trace, fault, with_golden)
    assert found.outcome == "fail" and found.gate == "semantic" and found.first_bad is not None
    assert (found.first_bad.tap, found.first_bad.layer, found.first_bad.token) == (tap, 1, token)
    assert [result.outcome for result in found.taps[:3]] == ["pass"] * 3
    assert found.worst[0].token >= token and found.worst[0].times_limit > 1


@pytest.mark.parametrize("with_golden", [False, True])
def test_other_order_of_sums_is_benign(with_golden: bool, write_trace: WriteTrace) -> None:
    found = compare_hybrid(write_trace, None, with_golden, order=8)
    assert found.outcome == "pass"
    assert all(0 < tap.error_max < 5e-6 for tap in found.taps if tap.tap != "layer.0.conv.out")
    by = {tap.judgement.judged_by for tap in found.taps}
    assert by == {"ratio to golden"} if with_golden else all(text.startswith("floor") for text in by)


def test_golden_must_be_float64_and_complete(write_trace: WriteTrace) -> None:
    taps = {"layer.0.out": torch.randn(8, 48), "layer.1.out": torch.randn(8, 48)}
    a, b = (write_trace(side, {"r0": taps}) for side in "ab")
    with pytest.raises(ParityError, match="as golden; found: taps of float32"):
        compare_traces(a, b, golden=b)
    short = write_trace("short", {"r0": {"layer.0.out": taps["layer.0.out"][:5].double()}})
    with pytest.raises(ParityError, match="not all tokens of request 'r0'"):
        compare_traces(a, b, golden=short)
    part = write_trace("part", {"r0": {"layer.0.out": taps["layer.0.out"].double()}})
    found = compare_traces(a, b, golden=part)
    assert [tap.judgement.judged_by.split(" (")[0] for tap in found.taps] == ["ratio to golden", "floor"]
    assert found.notes == ("the golden holds no layer.1.out: judged by the floor",)


def test_wrong_outliers_are_found_and_read_again(write_trace: WriteTrace) -> None:
    plain, massive = torch.randn(300, 64), torch.randn(300, 64)
    massive[:, 11] *= 1000  # only in the second request: the sample of the first cannot know
    taps = {"r0": {"layer.0.out": plain}, "r1": {"layer.0.out": massive}}
    tap = compare_traces(write_trace("a", taps), write_trace("b", taps)).taps[0]
    assert tap.outliers == (11,) and tap.recomputed and tap.tokens == 600


def test_local_traces_are_judged_at_depth_one(write_trace: WriteTrace) -> None:
    taps = {"layer.3.out": torch.randn(8, 48)}
    a, b = (write_trace(side, {"r0": taps}, mode="prefill+local") for side in "ab")
    assert compare_traces(a, b).taps[0].floor_name == "default, float32, depth 1"


def test_heat_map_keeps_the_peak(write_trace: WriteTrace) -> None:
    states = torch.randn(500, 16)
    wrong = states.clone()
    wrong[333] *= -1
    found = compare_traces(
        write_trace("a", {"r0": {"layer.0.out": wrong}}), write_trace("b", {"r0": {"layer.0.out": states}})
    )
    assert len(found.heat.starts) <= 96 and found.heat.starts[1] == 6
    peak = int(np.argmax(found.heat.values[0]))
    assert found.heat.starts[peak] <= 333 < found.heat.starts[peak] + 6
    assert found.heat.values[0][peak] == pytest.approx(2)
    assert found.heat.texts[0][peak] == "t433"  # of the token itself (100 + 333), not of the column's first


def test_heat_map_names_the_worst_requests_token() -> None:
    errors = [np.array([0.1, 0.9, 0.2], np.float32), np.array([0.3, 0.1, 0.1, np.nan], np.float32)]
    found = HeatMap.of({"t": errors}, columns=2, texts=[("a", "b", "c"), ("d", "e", "f", "g")])
    assert found.starts == (0, 2) and found.values[0][0] == pytest.approx(0.9)
    assert found.texts == (("b", "g"),)  # 0.9 of the first request; nan of the second outweighs 0.2
    assert HeatMap.of({"t": errors}, columns=2, texts=[(), ("d",)]).texts == (("", ""),)
    assert HeatMap.of({"t": errors}, columns=2).texts == ()


def test_paths_progress_and_identity(write_trace: WriteTrace, tmp_path: Path) -> None:
    taps = {"layer.0.out": torch.randn(8, 48)}
    write_trace("a", {"r0": taps}, weights={"w": "1", "layers.0.A_log": "2"})
    write_trace("b", {"r0": taps}, weights={"w": "1", "layers.0.A_log": "3", "v": "4"})
    (tmp_path / "p.yaml").write_text("taps: {'*': {min_cosine: 0.999}}")
    seen: list[tuple[int, int, str]] = []
    found = compare(
        tmp_path / "a",
        tmp_path / "b",
        policy=tmp_path / "p.yaml",
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    assert found.outcome == "pass" and seen == [(8, 8, "r0")]
    assert found.identity == ("other values in layers.0.A_log", "only side b has v")
    assert found.taps[0].judgement.judged_by.startswith("policy")
    assert math.isclose(found.taps[0].cosine_min, 1.0)


def test_options_of_a_comparison_are_keywords_of_the_public_function_and_in_its_help() -> None:
    fields = {field.name for field in dataclasses.fields(CompareOptions)}
    assert fields == set(inspect.signature(compare).parameters)
    listed = set(re.findall(r"^ {4}(\w+):", inspect.getdoc(compare) or "", re.M))
    assert fields <= listed


@pytest.mark.parametrize(
    ("options", "found"), [({"threads": 0}, "0 threads"), ({"align": "rows"}, "align='rows'")]
)
def test_options_of_a_comparison_are_checked(options: dict[str, object], found: str, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=found):
        compare(tmp_path, tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="flor"):
        compare(tmp_path, tmp_path, flor="x")  # type: ignore[call-arg]
