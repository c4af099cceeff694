"""Graft and bisection: a fault planted in any layer is found there, several are found one by one, none in health."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import parity.capturing.graft
from parity.capturing.client import Worker
from parity.capturing.graft import LayerRunner, bisect
from parity.comparison.tolerance import TapFloor, judge_tap
from parity.errors import NothingComparable, ParityError
from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.forward import forward
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec, TraceOptions
from parity.tracing.trace import Trace

LAYERS = 24
IDS = [(7 * n + 3) % 64 for n in range(48)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random hybrid of 24 layers, hidden 32, three linear layers to one of full attention."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=LAYERS,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    )
    torch.manual_seed(11)
    model = transformers.Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-5, 1)
        elif parameter.ndim > 1:
            parameter.data.mul_(3)  # else random layers hardly change the stream, and none could be wrong
    folder = tmp_path_factory.mktemp("deep") / "model"
    model.save_pretrained(folder)
    return folder


def traced(target: Target, folder: Path, **options: Any) -> Trace:
    request = {"id": "r", "token_ids": IDS, "origin": "given", "prompt_tokens": len(IDS), "token_texts": []}
    trace = TraceOptions(**options)
    capture(target, [request], folder, trace, backend=parse_backend("torch"), fingerprint=folder.name)
    return Trace.open(folder)


@pytest.fixture(scope="module")
def reference(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return traced(load_target(TargetSpec(model=str(deep))), tmp_path_factory.mktemp("trace") / "b")


def gate_one_percent(layer: Any) -> torch.Tensor:
    """The MLP's gate is one percent too large."""
    weight: torch.Tensor = layer.mlp.gate_proj.weight
    return weight


def mixer(layer: Any) -> torch.Tensor:
    """What reads the state of a linear layer, or the attention, is one percent too large."""
    mixing = getattr(layer, "linear_attn", None)
    weight: torch.Tensor = mixing.out_proj.weight if mixing is not None else layer.self_attn.o_proj.weight
    return weight


@contextmanager
def planted(target: Target, *places: tuple[int, Callable[[Any], torch.Tensor]]) -> Iterator[None]:
    """Parameters of some layers scaled by 1.01."""
    kept = [(parameter := find(target.layers[layer]), parameter.data) for layer, find in places]
    for parameter, data in kept:
        parameter.data = data * 1.01
    try:
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


@pytest.fixture(scope="module")
def grafts(deep: Path) -> Iterator[LayerRunner]:
    with LayerRunner(load_target(TargetSpec(model=str(deep))), parse_backend("torch")) as made:
        yield made


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_fault_in_each_layer_in_turn(layer: int, grafts: LayerRunner, reference: Trace) -> None:
    with planted(grafts.target, (layer, gate_one_percent if layer % 2 else mixer)):
        found = bisect(grafts, reference)
    assert found.layers == (layer,) and found.spread == () and found.proof.valid
    steps, runs = len(found.steps), sum(step.stop - step.start for step in found.steps)
    assert steps <= 2 + 2 * 5 and runs <= 4 * LAYERS  # log2(24) halvings, two halves each at most
    assert [step.fails for step in found.rest] == ([False] if layer < LAYERS - 1 else [])
    finding = found.finding("graft")
    assert finding.outcome == "fail" and finding.sentence.startswith(f"error is added by layer {layer}")


def test_several_faults_are_named_one_by_one(grafts: LayerRunner, reference: Trace) -> None:
    places = [(4, mixer), (5, gate_one_percent), (17, mixer), (23, gate_one_percent)]
    with planted(grafts.target, *places):
        found = bisect(grafts, reference)
    assert found.layers == (4, 5, 17, 23) and found.spread == ()
    assert found.finding("graft").sentence.startswith("error is added by layers 4, 5, 17, 23")


@pytest.mark.parametrize("mode", ["prefill", "decode", "blocks:16"])
def test_health_is_not_blamed(mode: str, deep: Path, grafts: LayerRunner, tmp_path: Path) -> None:
    """Against the same model computed in another order of sums."""
    other = traced(load_target(TargetSpec(model=str(deep))), tmp_path / "t", mode=mode)
    found = bisect(grafts, other)
    assert found.layers == () and found.spread == () and len(found.steps) == 1
    assert (found.steps[0].judgement.worst == 0) == (mode == "prefill")
    assert found.finding("graft").outcome == "pass"


def test_a_graft_is_the_rest_of_the_model(grafts: LayerRunner, reference: Trace) -> None:
    """Put in its own state, a target computes what it would have computed, bit by bit, and is left as it was."""
    taps = forward(grafts.target, IDS, backend=parse_backend("torch")).taps
    for start, stop in ((0, LAYERS), (1, 2), (9, 20), (LAYERS - 1, LAYERS)):
        state = taps[f"layer.{start - 1}.out"] if start else taps["embed.out"]
        assert torch.equal(grafts.run(IDS, state, start, stop), taps[f"layer.{stop - 1}.out"])
    again = forward(grafts.target, IDS, backend=parse_backend("torch")).taps
    assert all(torch.equal(taps[name], again[name]) for name in taps)
    assert not any("forward" in vars(layer) for layer in grafts.target.layers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo_hybrid", "qwen3_next"])
def test_other_families(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    target = load_target(TargetSpec(model=str(models[family])))
    trace, last = traced(target, tmp_path / "t"), len(target.layers) - 1
    with LayerRunner(target, parse_backend("torch")) as made:
        assert bisect(made, trace).layers == ()
        with planted(target, (last, gate_one_percent if family != "qwen3_next" else mixer)):
            assert bisect(made, trace).layers == (last,)


def test_few_states_give_a_range(deep: Path, grafts: LayerRunner, tmp_path: Path) -> None:
    """A reference that holds three states only: the fault lies between two of them, and no layer is accused."""
    taps = ["embed.out", "layer.7.out", "layer.15.out", "layer.23.out"]
    sparse = traced(load_target(TargetSpec(model=str(deep))), tmp_path / "t", taps=taps)
    with planted(grafts.target, (10, mixer)):
        found = bisect(grafts, sparse)
    assert found.layers == () and found.spread == () and found.unseen == ((8, 15),)
    sentence = found.finding("graft").sentence
    assert sentence.startswith("error is added by one of layers 8 to 15, whose states the reference lacks")
    assert sentence.endswith("stays within the floor")


def test_error_that_no_layer_adds_alone(
    grafts: LayerRunner, reference: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults too small for one layer's floor, in neighbours: the range is named, and none of its layers."""
    judge = judge_tap
    places = [(layer, mixer) for layer in range(LAYERS)]
    with planted(grafts.target, *places):
        whole = bisect(grafts, reference).steps[0].judgement

    def coarse(evidence: Any, rules: Any) -> Any:
        """A limit that only the whole model's error leaves."""
        size = 0.8 * whole.rms / 8  # eight floors are allowed
        return judge(evidence, replace(rules, floor=TapFloor(rms=size, token=whole.worst)))

    monkeypatch.setattr(parity.capturing.graft, "judge_tap", coarse)
    with planted(grafts.target, *places):
        found = bisect(grafts, reference)
    assert found.layers == () and found.spread and found.steps[0].fails
    assert "together, by none of them alone" in found.finding("graft").sentence


def test_in_a_worker(deep: Path, reference: Trace) -> None:
    """The same in the process of a backend."""
    with Worker("torch") as worker:
        found = worker.call(
            "graft", spec={"model": str(deep), "dtype": "float32"}, reference=str(reference.path)
        )
    assert found["layers"] == [] and found["finding"]["outcome"] == "pass"


def test_refusals(
    grafts: LayerRunner, deep: Path, models: dict[str, Path], reference: Trace, tmp_path: Path
) -> None:
    with pytest.raises(ParityError, match="the judge itself"):
        LayerRunner(grafts.target, parse_backend("golden"))
    other = traced(load_target(TargetSpec(model=str(models["qwen3_5"]))), tmp_path / "small")
    with pytest.raises(ParityError, match="4 layers against 24"):
        bisect(grafts, other)
    bare = traced(load_target(TargetSpec(model=str(deep))), tmp_path / "bare", taps=["layer.3.out"])
    with pytest.raises(ParityError, match="capture it with --taps states"):
        bisect(grafts, bare)
    empty = Trace(reference.path, reference.manifest.model_copy(update={"requests": ()}))
    with pytest.raises(NothingComparable):
        bisect(grafts, empty)
