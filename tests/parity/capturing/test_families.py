"""Every supported model family loads, is tapped, and (where it has linear layers) is switched, with proof."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parity.capturing.client import Worker, capture_with
from parity.tracing.trace import Trace

LINEAR = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
IDS = tuple((7 * i) % 61 for i in range(70))  # one full chunk of the delta rule and a rest
REQUEST = {
    "id": "r",
    "token_ids": IDS,
    "origin": "given",
    "prompt_tokens": len(IDS),
    "token_texts": [str(token) for token in IDS],
}


@pytest.fixture(scope="module")
def torch_worker() -> Iterator[Worker]:
    with Worker("torch") as worker:
        yield worker


@pytest.fixture(scope="module")
def fla_worker() -> Iterator[Worker]:
    with Worker("fla-interpreted") as worker:
        yield worker


def spec(folder: Path) -> dict[str, str]:
    return {"model": str(folder), "dtype": "float32"}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "llama", "gemma2"])
def test_family_is_tapped(family: str, models: dict[str, Path], torch_worker: Worker, tmp_path: Path) -> None:
    """Taps equal what transformers itself returns as hidden states and logits."""
    import transformers

    capture_with(torch_worker, spec(models[family]), [REQUEST], tmp_path / "t", taps=["*"])
    trace = Trace.open(tmp_path / "t")
    model = transformers.AutoModelForCausalLM.from_pretrained(models[family]).eval()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    for name in trace.taps:
        index = trace.tap(name).hf_index
        if index is not None:
            assert torch.equal(trace.tensor("r", name), want.hidden_states[index][0]), name
    assert torch.equal(trace.tensor("r", "logits"), want.logits[0])
    linear = [i for i, kind in enumerate(trace.manifest.target.layer_types) if kind == "linear_attention"]
    assert bool(linear) == (family in LINEAR)
    for layer in linear:
        assert {f"layer.{layer}.conv.out", f"layer.{layer}.gdn.out"} <= set(trace.taps)


@pytest.mark.parametrize("family", LINEAR)
def test_family_is_switched(
    family: str, models: dict[str, Path], torch_worker: Worker, fla_worker: Worker, tmp_path: Path
) -> None:
    """fla's own kernels are proven on every linear layer, and agree with the fallback in fp32."""
    capture_with(torch_worker, spec(models[family]), [REQUEST], tmp_path / "t")
    capture_with(fla_worker, spec(models[family]), [REQUEST], tmp_path / "f")
    a, b = Trace.open(tmp_path / "f"), Trace.open(tmp_path / "t")
    assert a.manifest.backend.valid and b.manifest.backend.valid
    linear = [i for i, kind in enumerate(a.manifest.target.layer_types) if kind == "linear_attention"]
    delta = [call for call in a.manifest.backend.calls if call.operator == "delta"]
    assert [(call.layer, call.implementation, call.calls) for call in delta] == [
        (layer, "fla-interpreted", 1) for layer in linear
    ]
    assert all(call.callee.startswith("fla.ops.gated_delta_rule") for call in delta)
    for layer in range(a.manifest.target.layers):
        got, want = a.tensor("r", f"layer.{layer}.out"), b.tensor("r", f"layer.{layer}.out")
        assert float((got - want).norm() / want.norm()) < 2e-6
    assert not torch.equal(a.tensor("r", "layer.0.gdn.out"), b.tensor("r", "layer.0.gdn.out")), (
        "the kernels differ"
    )
