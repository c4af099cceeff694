"""The parts of a diagnosis on traces small enough to work out by hand; the names on real faults are in tests/faults."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.cli import main as cli
from parity.comparison.traces import compare_traces
from parity.diagnosis.kinds import FAULT_KINDS, diagnose, diagnose_or_why
from parity.diagnosis.profile import FailingComparison, half_of_error, layer_kind_of
from parity.diagnosis.records import MEANING, Diagnosis
from parity.diagnosis.report import comparison_report
from parity.diagnosis.weights import separable
from parity.probes.deviations import DEVIATIONS
from parity.tracing.trace import Trace

Write = Callable[..., Trace]
STREAM = ("embed.out", "layer.0.out", "layer.1.out", "layer.2.out", "layer.3.out")


def stream(rows: int = 40, width: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """A residual stream: each layer adds a little to the one before."""
    generator = torch.Generator().manual_seed(seed)
    state, taps = torch.randn(rows, width, generator=generator), {}
    for tap in STREAM:
        taps[tap] = state
        state = state + 0.5 * torch.randn(rows, width, generator=generator)
    return taps


def named(write: Write, a: Mapping[str, Tensor], b: Mapping[str, Tensor], **options: object) -> Diagnosis:
    """The diagnosis of two dumps of one request."""
    left, right = write("a", {"r": a}, **options), write("b", {"r": b}, **options)
    found = diagnose(compare_traces(left, right), left, right)
    assert found is not None
    return found


def test_what_passes_is_not_diagnosed(write_trace: Write) -> None:
    a, b = write_trace("a", {"r": stream()}), write_trace("b", {"r": stream()})
    assert diagnose(compare_traces(a, b), a, b) is None


def test_kinds_are_asked_in_the_order_of_the_table() -> None:
    assert [kind.name for kind in FAULT_KINDS] == list(MEANING)


@pytest.mark.parametrize("offset", [1, -1])
def test_layer_ids_off_by_one_are_repaired(offset: int, write_trace: Write) -> None:
    """By hand: a's layer i holds b's layer i + offset, and nothing remains when it is renumbered."""
    b = stream()
    layers = [tap for tap in STREAM if tap.startswith("layer")]
    order = list(STREAM)
    a = {
        tap: b[order[order.index(tap) + offset]]
        for tap in layers
        if 0 <= order.index(tap) + offset < len(order)
    }
    found = named(write_trace, {"embed.out": b["embed.out"], **a}, b)
    assert found.kinds == ("LAYERIDX",) and f"layer i{offset:+d} of b" in found.sentence
    assert dict(found.evidence)["offset"] == offset
    assert {repair.after for repair in found.repairs} == {0.0}
    assert all(repair.before > 0.3 for repair in found.repairs)


def test_a_norm_between_the_sides_is_found_and_applied(write_trace: Write) -> None:
    """RMS norm worked out here: x / sqrt(mean x^2 + eps) * w. Only the last state is behind it."""
    b = stream()
    weight = torch.rand(32, generator=torch.Generator().manual_seed(4)) + 0.5
    last = b["layer.3.out"] * torch.linspace(0.5, 2, 40)[:, None]  # tokens of unequal size
    b = b | {"layer.3.out": last}
    normed = last / (last.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    found = named(write_trace, b | {"layer.3.out": normed}, b)
    assert found.kinds == ("NORM",) and "divided by its own rms" in found.sentence
    assert found.repairs[0].after < 1e-5 < 0.1 < found.repairs[0].before
    # The norm's own test: one factor a token that follows no rms is none.
    scaled = b | {"layer.3.out": last * torch.rand(40, 1, generator=torch.Generator().manual_seed(5))}
    assert diagnose_kinds(write_trace, scaled, b) != ("NORM",)


def diagnose_kinds(write: Write, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The kinds only, in folders of their own."""
    left, right = write("c", {"r": a}), write("d", {"r": b})
    found = diagnose(compare_traces(left, right), left, right)
    return found.kinds if found is not None else ("nothing",)


def test_separable_recovers_both_factors() -> None:
    rng = np.random.default_rng(0)
    b, scale, weight = rng.normal(size=(20, 16)), rng.uniform(0.5, 2, 20), rng.uniform(0.5, 2, 16)
    fit = separable(scale[:, None] * b * weight, b)
    assert fit is not None and fit.residual < 1e-12
    np.testing.assert_allclose(fit.weight / fit.weight[0], weight / weight[0], rtol=1e-9)
    np.testing.assert_allclose(fit.scale / fit.scale[0], scale / scale[0], rtol=1e-9)
    assert separable(b[:3], b[:3]) is None, "three rows prove nothing"


def test_rows_elsewhere_are_put_back(write_trace: Write) -> None:
    b = stream()
    a = {tap: tensor.roll(1, 0) for tap, tensor in b.items()}
    found = named(write_trace, a, b)
    assert found.kinds == ("ROWS",) and "row t of a is row t-1 of b" in found.sentence
    assert {repair.after for repair in found.repairs} == {0.0}


@pytest.mark.parametrize(("value", "word"), [(0.0, "zero"), (float("nan"), "not a number")])
def test_rows_never_written(value: float, word: str, write_trace: Write) -> None:
    b = stream()
    a = {tap: tensor.clone() for tap, tensor in b.items()}
    for tensor in a.values():
        tensor[16:32] = value
    found = named(write_trace, a, b)
    assert found.kinds == ("ROWS",) and word in found.sentence and "a block of 16" in found.sentence


def test_missing_rows_are_counted_by_token_ids(write_trace: Write) -> None:
    b, other = stream(48), stream(48, seed=1)
    ids = {"r": tuple(range(48)), "s": tuple(range(100, 148))}
    short = {"r": ids["r"], "s": ids["s"][16:]}
    a = write_trace("a", {"r": b, "s": {tap: t[16:] for tap, t in other.items()}}, tokens=short)
    whole = write_trace("b", {"r": b, "s": other}, tokens=ids)
    found = diagnose(compare_traces(a, whole), a, whole)
    assert found is not None and found.kinds == ("ROWS",)
    assert "lacks 16 rows of request 's'" in found.sentence
    assert max(repair.after for repair in found.repairs) == 0


def test_missing_layer(write_trace: Write) -> None:
    b = stream()
    found = named(write_trace, {tap: t for tap, t in b.items() if tap != "layer.2.out"}, b)
    assert found.kinds == ("LAYERIDX",) and "side a lacks layer.2.out" in found.sentence


def test_memory_written_over(write_trace: Write) -> None:
    b = stream()
    a = b | {"layer.0.out": b["layer.3.out"], "layer.1.out": b["layer.3.out"]}
    found = named(write_trace, a, b)
    assert found.kinds == ("ALIAS",) and "0 holds 3, 1 holds 3" in found.sentence
    assert "clone" in found.next_step


def test_other_weights_are_named_by_key(write_trace: Write) -> None:
    b = stream()
    noise = {tap: t + 0.8 * torch.randn(t.shape) for tap, t in b.items() if tap != "embed.out"}
    a = write_trace("a", {"r": b | noise}, weights={"layers.0.mlp.up_proj.weight": "1", "norm.weight": "1"})
    other = write_trace("b", {"r": b}, weights={"layers.0.mlp.up_proj.weight": "2", "norm.weight": "1"})
    found = diagnose(compare_traces(a, other), a, other)
    assert found is not None and found.kinds == ("LOAD",)
    assert "layers.0.mlp.up_proj.weight" in found.sentence


def test_the_wrong_backend_comes_first(write_trace: Write) -> None:
    """Whatever the numbers say: nothing was compared."""
    b = stream()
    a = write_trace(
        "a", {"r": {tap: t.roll(1, 0) for tap, t in b.items()}}, problems=["layer 0 delta: torch ran"]
    )
    other = write_trace("b", {"r": b})
    found = diagnose(compare_traces(a, other), a, other)
    assert found is not None and found.kinds == ("DISPATCH",) and "torch ran" in found.sentence


def test_not_recognised_is_an_answer_with_the_profile(write_trace: Write) -> None:
    """An error that nothing explains: small, in one tap outside the layers."""
    b = {"final.postnorm": torch.randn(40, 32, generator=torch.Generator().manual_seed(3))}
    a = {"final.postnorm": b["final.postnorm"] * (1 + 1e-3 * torch.randn(40, 32))}
    found = named(write_trace, a, b)
    assert found.kinds == () and found.name == "not recognised" and found.fault is None
    assert "final.postnorm" in found.sentence and "--local-from" in found.next_step
    assert dict(found.evidence)["first tap"] == "final.postnorm"
    assert all(asked.because for asked in found.asked) and len(found.asked) == len(FAULT_KINDS)


def test_an_empty_state_is_read_off_the_operators(write_trace: Write) -> None:
    """By hand, two heads of width 16: with an empty state the output of a head is beta (q . k) v."""
    generator = torch.Generator().manual_seed(6)
    conv = torch.randn(8, 16 + 16 + 32, generator=generator)
    value = conv[:, 32:].reshape(8, 2, 16)
    gdn = torch.randn(8, 2, 16, generator=generator)
    gdn[0], gdn[5] = value[0] * torch.tensor([[0.3], [-2.0]]), value[5] * torch.tensor([[1.5], [0.1]])
    taps = {"layer.0.conv.out": conv, "layer.0.gdn.out": gdn.flatten(1)}
    a = write_trace("a", {"r": taps})
    b = write_trace("b", {"r": taps | {"layer.0.gdn.out": taps["layer.0.gdn.out"] + 1e-4}})
    case = FailingComparison.of(compare_traces(b, a), b, a)
    assert [case.fresh("b", 0, token, 0) for token in range(8)] == [t in (0, 5) for t in range(8)]
    assert case.fresh("b", 0, 0, 1) is None, "no taps, no answer"


def test_onsets_heads_and_tails(write_trace: Write) -> None:
    """One request right, one wrong from token 5 on and falling."""
    b = {"r": stream(), "s": stream(seed=1)}
    a = {name: {tap: t.clone() for tap, t in taps.items()} for name, taps in b.items()}
    fall = 0.5 ** torch.arange(35, dtype=torch.float32)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(2))
    a["s"]["layer.0.out"][5:] += fall[:, None] * direction
    left, right = write_trace("a", a), write_trace("b", b)
    case = FailingComparison.of(compare_traces(left, right), left, right)
    first = case.first
    assert first is not None and first.tap == "layer.0.out" and first.onsets == (None, 5)
    assert first.head(1) == pytest.approx(float(direction.norm() / b["s"]["layer.0.out"][5].norm()), rel=0.2)
    assert first.tail(1) < 1e-5 and first.head(0) == 0.0
    assert half_of_error(first.result) <= 32


def test_taps_are_known_by_their_names() -> None:
    names = {
        "embed.out": "embed",
        "layer.12.out": "layer",
        "layer.0.conv.out": "conv",
        "layer.0.gdn.out": "gdn",
        "final.prenorm": "pre",
        "final.postnorm": "post",
        "logits": "logits",
        "aux": "other",
    }
    assert {tap: layer_kind_of(tap) for tap in names} == names


def test_a_trace_that_cannot_be_read_again_costs_the_name_only(write_trace: Write) -> None:
    b = stream()
    a, other = write_trace("a", {"r": {t: x.roll(1, 0) for t, x in b.items()}}), write_trace("b", {"r": b})
    comparison = compare_traces(a, other)
    shard = next(a.path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:200])
    found = diagnose_or_why(comparison, Trace.open(a.path), other)
    assert found is not None and found.kinds == () and "damaged shard" in found.sentence
    assert comparison_report(comparison, "x", diagnosis=found).findings[0].outcome == "fail"


def test_every_form_of_the_report_names_the_fault(
    write_trace: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`parity compare A B`: text, JSON and HTML, through the record."""
    b = stream()
    write_trace("a", {"r": {t: x.roll(1, 0) for t, x in b.items()}})
    write_trace("b", {"r": b})
    code = cli.run(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "report")])
    shown = capfd.readouterr().out
    assert code == 1 and "compare.diagnosis  fault: rows" in shown and "After the repair" in shown
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    faults = {finding["name"]: finding["fault"] for finding in data["findings"]}
    assert faults["compare.diagnosis"] == faults["compare.gate"] == "rows"
    assert {table["name"] for table in data["tables"]} >= {"compare.kinds", "compare.repaired"}
    page = (tmp_path / "report" / "report.html").read_text()
    assert "fault: rows" in page and "row t of a is row t-1 of b" in page


def test_probes_lists_every_kind_and_every_deviation(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever reads a fault's name in a report finds it there."""
    assert cli.run(["probes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = {" ".join(line.split()) for line in lines}
    assert {f"{kind}: {meaning}" for kind, meaning in MEANING.items()} <= said
    words = {word.strip(",") for line in lines for word in line.split()}
    assert DEVIATIONS.keys() <= words and max(map(len, lines)) <= 80
