"""Sketch traces: how near the estimates are to the truth in float64, what they see, and what is asked for next."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.commands.compare import compare
from parity.comparison.sketch import SketchRows, sketch_sides, sketch_stats
from parity.comparison.traces import compare_traces
from parity.errors import ParityError
from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.load import load_target
from parity.model.target.sketching import DIMS, RESOLUTION, SEED, signs, sketch
from parity.model.target.spec import TargetSpec, TraceOptions
from parity.tracing.sketched import SketchTrace, open_trace
from parity.tracing.trace import SKETCH_SCHEMA, SketchInfo, Trace, TraceWriter

WriteTrace = Callable[..., Trace]
MASSIVE = (5, 300, 700, 900)


def states(rows: int = 96, width: int = 1024, seed: int = 0) -> torch.Tensor:
    """[rows, width] float64 states with four massive channels."""
    made = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made[:, [channel for channel in MASSIVE if channel < width]] *= 300
    return made


def sketched(trace: Trace, folder: Path, seed: int = SEED) -> Trace:
    """The sketch of a full trace, written as a capture writes it."""
    with TraceWriter(folder, "test") as writer:
        for entry in trace.requests:
            rows: dict[str, torch.Tensor] = {}
            further: dict[str, torch.Tensor] = {}
            for tap in trace.taps:
                parts = sketch(trace.tensor(entry.id, tap), seed=seed).tensors(tap)
                rows, further = rows | parts[0], further | parts[1]
            writer.add(entry, rows, further=further)
        made = {"schema_version": SKETCH_SCHEMA, "sketch": SketchInfo(dims=DIMS, seed=seed)}
        writer.finish(trace.manifest.model_copy(update=made))
    return open_trace(folder)


def rows_of(x: torch.Tensor) -> SketchRows:
    """What `SketchTrace` would read back of these states."""
    held = sketch(x)
    norms = held.norms.double()
    return SketchRows(
        norms=norms,
        projection=held.projection.double() * norms[:, 1:],
        massive=held.massive.double(),
        channels=tuple(held.channels.tolist()),
        width=x.shape[1],
        seed=SEED,
    )


def test_signs_are_those_of_every_version() -> None:
    """Traces of two versions can be compared only while this holds. The bits are those of Philox 4x64-10, key 0."""
    made = signs(130)
    assert made.shape == (130, DIMS) and set(made.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(made.mean())) < 4 / made.numel() ** 0.5
    assert torch.equal(signs(4096)[:130], made) and not torch.equal(signs(130, 1), made)
    digest = hashlib.sha256((made > 0).to(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest.startswith("8fa32f0154241acb")


@pytest.mark.parametrize(
    "dtype, smallest", [(torch.bfloat16, 2e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)], ids=str
)
def test_estimates_are_within_a_factor_of_the_truth(dtype: torch.dtype, smallest: float) -> None:
    """8,192 tokens whose errors span three decades: every estimate within .65 to 1.45, all but one in a thousand
    within .7 to 1.4, plain and without the massive channels."""
    b = states(8192, 512)
    size = smallest * 1000 ** torch.rand(8192, 1, generator=torch.Generator().manual_seed(1)).double()
    noise = torch.randn(b.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kept = torch.ones(512, dtype=torch.bool)
    kept[[channel for channel in MASSIVE if channel < 512]] = False
    a = torch.where(kept, b + size * noise, b * (1 + size * noise))
    a, b = a.to(dtype), b.to(dtype)
    stats = sketch_stats(rows_of(a), rows_of(b))
    x, y = a.double(), b.double()
    for robust, left in ((False, torch.ones_like(kept)), (True, kept)):
        truth = (x - y)[:, left].norm(dim=1) / y[:, left].norm(dim=1)
        share = torch.from_numpy(stats.relative_l2(robust=robust)) / truth
        assert 0.65 < float(share.min()) and float(share.max()) < 1.45, (share.min(), share.max())
        assert float(((share < 0.7) | (share > 1.4)).double().mean()) < 1e-3
        cosine = torch.nn.functional.cosine_similarity(x[:, left], y[:, left])
        gap = torch.from_numpy(stats.cosine_gap(robust=robust))
        seen = 1 - cosine > 1e-6
        assert torch.all((gap / (1 - cosine))[seen] < 2.2) and torch.all((gap / (1 - cosine))[seen] > 0.3)


def test_what_is_equal_has_no_error_and_storing_costs_little() -> None:
    x = states().bfloat16()
    assert sketch_stats(rows_of(x), rows_of(x)).relative_l2().max() == 0
    full = SketchRows(
        norms=torch.stack((x.double().norm(dim=1),) * 2, 1),
        projection=x.double() @ signs(x.shape[1]).double(),
        massive=torch.zeros(96, 0, dtype=torch.float64),
        channels=(),
        width=x.shape[1],
        seed=SEED,
    )
    stored = sketch_stats(rows_of(x).keeping(()), full)
    assert 0 < stored.relative_l2().max() < RESOLUTION[torch.float16]


def test_sees_permutations_that_norms_cannot() -> None:
    """Rows in another order, and channels in another order: same norms, error as of unrelated rows."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    shuffled = x[:, torch.randperm(512, generator=torch.Generator().manual_seed(4))]
    for other in (x.roll(1, 0), shuffled):
        stats = sketch_stats(rows_of(other), rows_of(x))
        assert 1.0 < stats.relative_l2().min() and stats.relative_l2().max() < 2.0
    assert torch.equal(rows_of(shuffled).norms, rows_of(x).norms)


def test_other_massive_channels_are_put_back() -> None:
    """A channel that only one side keeps apart returns into its projection: nothing is lost or counted twice."""
    b = states()
    a = b * (1 + 0.01 * torch.randn(b.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    a[:, 5] /= 300
    kept_a, kept_b = rows_of(a.float()), rows_of(b.float())
    assert kept_a.channels == MASSIVE[1:] and kept_b.channels == MASSIVE
    stats = sketch_stats(kept_a.keeping(MASSIVE[1:]), kept_b.keeping(MASSIVE[1:]))
    truth = (a - b).norm(dim=1) / b.norm(dim=1)
    share = torch.from_numpy(stats.relative_l2()) / truth
    assert 0.7 < float(share.min()) and float(share.max()) < 1.4


def wrong_tokens(a: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[40:43] = states(3, a.shape[1], seed=9).to(a.dtype)
    return a


def damaged(a: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[7, 3] = float("nan")
    return a


FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "three unrelated tokens": (wrong_tokens, 40),
    "rows shifted by one": (lambda a: a.roll(1, 0), 0),
    "scaled by two": (lambda a: a * 2, 0),
    "channels shuffled": (lambda a: a.roll(7, 1), 0),
    "NaN on one side": (damaged, 7),
}


@pytest.mark.parametrize("both", [True, False], ids=["two sketches", "sketch against full"])
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_gates_judge_sketches_as_they_judge_traces(
    fault: str | None, both: bool, write_trace: WriteTrace, tmp_path: Path
) -> None:
    change, token = FAULTS[fault] if fault is not None else ((lambda a: a), 0)
    b, noise = states(), 0.004 * torch.randn(96, 1024, generator=torch.Generator().manual_seed(6))
    good, wrong = (b * (1 + noise)).bfloat16(), change((b * (1 + noise)).bfloat16())
    full_a = write_trace("a", {"r0": {"layer.0.out": good, "layer.1.out": wrong}})
    full_b = write_trace("b", {"r0": {"layer.0.out": b.bfloat16(), "layer.1.out": b.bfloat16()}})
    side_a = sketched(full_a, tmp_path / "sa")
    found = compare_traces(side_a, sketched(full_b, tmp_path / "sb") if both else full_b)
    expected = compare_traces(full_a, full_b)
    assert [tap.outcome for tap in found.taps] == [tap.outcome for tap in expected.taps]
    assert found.outcome == ("fail" if fault else "pass") and found.implementation == "sketch"
    assert all(control.refused for control in found.taps[0].controls)
    assert "of a sketch errors are estimates" in found.notes[0]
    assert found.taps[0].judgement.judged_by.endswith("x 1.4 for estimates)")
    if fault is None:
        assert found.escalations == () and found.first_bad is None
    else:
        assert found.first_bad is not None and found.first_bad.tap == "layer.1.out"
        assert found.first_bad.token == token
        (asked,) = found.escalations
        assert asked.taps == ("layer.0.out", "layer.1.*") and asked.request == "r0"
        last = {"three unrelated tokens": 42, "NaN on one side": 7}.get(str(fault), 95)
        assert asked.tokens == (token, last)
        assert f"--taps 'layer.1.*' --max-tokens {last + 1}" in found.notes[1]


def test_a_capture_writes_sketches(hybrid_bf16: Path, tmp_path: Path) -> None:
    """One target captured in full and as a sketch: the estimates say that nothing differs, and the proof is there."""
    requests: list[dict[str, Any]] = [
        {
            "id": f"r{n}",
            "token_ids": list(range(n, 40 + n)),
            "origin": "given",
            "prompt_tokens": 40,
            "token_texts": [],
        }
        for n in (3, 5)
    ]
    target = load_target(TargetSpec(model=str(hybrid_bf16)))
    for name in ("full", "sketch"):
        capture(
            target,
            requests,
            tmp_path / name,
            TraceOptions(sketch=name == "sketch"),
            backend=parse_backend("torch"),
            fingerprint=name,
        )
    trace = open_trace(tmp_path / "sketch")
    assert isinstance(trace, SketchTrace) and trace.manifest.backend.valid and trace.manifest.backend.calls
    assert trace.taps == Trace.open(tmp_path / "full").taps
    found = compare(tmp_path / "sketch", tmp_path / "full")
    assert found.outcome == "pass" and found.tokens == 80
    assert all(tap.error_max < RESOLUTION[torch.float16] for tap in found.taps)
    with pytest.raises(ParityError, match="a sketch: a norm and a projection a token"):
        Trace.open(tmp_path / "sketch")
    with pytest.raises(ParityError, match="a sketch of them"):
        trace.tensor("r3", "layer.0.out")


def test_size(write_trace: WriteTrace, tmp_path: Path) -> None:
    """At 4,096 channels of bfloat16 a sketch takes 136 of 8,192 bytes a token."""
    full = write_trace("full", {"r0": {"layer.0.out": torch.randn(500, 4096).bfloat16()}})
    made = sketched(full, tmp_path / "sketch")
    sizes = [sum(file.stat().st_size for file in trace.path.glob("*.safetensors")) for trace in (full, made)]
    assert sizes[0] / sizes[1] > 50


def test_refusals(write_trace: WriteTrace, tmp_path: Path) -> None:
    full = write_trace("full", {"r0": {"layer.0.out": states(8, 64)}})
    one, other = sketched(full, tmp_path / "one"), sketched(full, tmp_path / "other", seed=1)
    with pytest.raises(ParityError, match="64 dimensions, seed 0 and 64 dimensions, seed 1"):
        compare_traces(one, other)
    with pytest.raises(ParityError, match="as golden of a sketch"):
        compare_traces(one, one, golden=full)
    held = sketch(states(8, 64))
    from safetensors.torch import save_file

    parts = held.tensors("layer.0.out")
    save_file(
        {**parts[0], "layer.0.out:channels": torch.tensor([999], dtype=torch.int32)},
        one.path / one.requests[0].shard,
        metadata={"request": one.requests[0].model_dump_json()},
    )
    with pytest.raises(ParityError, match=r"as a sketch of [\s\S]*shard and manifest disagree"):
        compare_traces(open_trace(one.path), full)
    (one.path / one.requests[0].shard).write_bytes(b"nothing")
    with pytest.raises(ParityError, match="damaged shard"):
        sketch_sides([(open_trace(one.path), "r0"), (full, "r0")], "layer.0.out", slice(0, 8))
