"""What separates a bug from noise: the table of docs/evidence.md, on a random hybrid of 24 layers.

Each case is captured through the model's own code and judged by its error to the fp64 golden over a healthy run's
error. In float32 (semantic gate) every fault is hundreds of times the benign difference; in bfloat16 (kernel gate)
the small ones hide inside it, which is why a 16-bit comparison alone never rules a fault out.

    PYTHONPATH=. pytest tests/faults/traces/test_bug_against_noise.py -s
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.comparison.records import TapResult
from parity.comparison.traces import compare_traces
from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec, TraceOptions
from parity.tracing.trace import Trace

LAYERS, FAULTY, TOKENS = 24, 12, 64
LAST = f"layer.{LAYERS - 1}.out"
Plant = Callable[[Target], Any]


@contextmanager
def nothing(_: Target) -> Iterator[None]:
    yield


def scaled(factor: float) -> Plant:
    """The MLP's gate of one layer is too large."""

    @contextmanager
    def plant(target: Target) -> Iterator[None]:
        layer: Any = target.layers[FAULTY]
        parameter = layer.mlp.gate_proj.weight
        data = parameter.data
        parameter.data = data * factor
        yield
        parameter.data = data

    return plant


@contextmanager
def other_eps(target: Target) -> Iterator[None]:
    """One norm has eps 1e-2 instead of 1e-6."""
    layer: Any = target.layers[FAULTY]
    norm = layer.post_attention_layernorm
    (name,) = [name for name in ("variance_epsilon", "eps") if hasattr(norm, name)]
    kept = getattr(norm, name)
    setattr(norm, name, 1e-2)
    yield
    setattr(norm, name, kept)


def changed_output(layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """A layer's output is changed on its way to the next."""

    @contextmanager
    def plant(target: Target) -> Iterator[None]:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        handle = target.layers[layer].register_forward_hook(hook)
        yield
        handle.remove()

    return plant


def one_token_wrong(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[:, 40] = states[:, 17]
    return states


BENIGN: dict[str, dict[str, Any]] = {
    "batch of four": {"rows": 4},
    "blocks of 16": {"mode": "blocks:16"},
    "token by token": {"mode": "decode"},
}
FAULTS: dict[str, Plant] = {
    "gate +1 % in one layer": scaled(1.01),
    "gate +.2 % in one layer": scaled(1.002),
    "norm's eps 1e-2 in one layer": other_eps,
    "one token wrong at layer 12": changed_output(FAULTY, one_token_wrong),
    "tokens shifted in the last layer": changed_output(LAYERS - 1, lambda states: states.roll(1, 1)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights on the bfloat16 grid (so that one golden serves both dtypes), three massive channels."""
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=LAYERS,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    )
    torch.manual_seed(5)
    made = transformers.Qwen3_5ForCausalLM(config)
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-5, 1)
        elif "embed" in name:
            parameter.data[:, [3, 20, 41]] += 20
        elif parameter.ndim > 1:
            parameter.data.mul_(3)
        parameter.data = parameter.data.bfloat16().float()
    folder = tmp_path_factory.mktemp("noise") / "model"
    made.save_pretrained(folder)
    return folder


@dataclass
class Bench:
    """Captures cases of one dtype and judges them against the golden."""

    target: Target
    folder: Path
    golden: Trace
    healthy: Trace

    def case(self, name: str, plant: Plant, **options: Any) -> TapResult:
        """The last layer's result of one case."""
        with plant(self.target):
            trace = traced(self.target, self.folder / name, **options)
        found = compare_traces(trace, self.healthy, golden=self.golden, taps=[LAST])
        (tap,) = found.taps
        return tap


def traced(target: Target, folder: Path, backend: str = "torch", **options: Any) -> Trace:
    ids = [(11 * n + n * n // 7) % 64 for n in range(TOKENS)]
    request = {"id": "r", "token_ids": ids, "origin": "given", "prompt_tokens": TOKENS, "token_texts": []}
    capture(
        target,
        [request],
        folder,
        TraceOptions(taps=("states",), **options),
        backend=parse_backend(backend),
        fingerprint=folder.name,
    )
    return Trace.open(folder)


@pytest.fixture(scope="module")
def benches(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    folder = tmp_path_factory.mktemp("cases")
    golden = traced(load_target(TargetSpec(model=str(model), dtype="float32")), folder / "golden", "golden")
    made = {}
    for dtype in ("float32", "bfloat16"):
        target = load_target(TargetSpec(model=str(model), dtype=dtype))
        (folder / dtype).mkdir()
        made[dtype] = Bench(target, folder / dtype, golden, traced(target, folder / dtype / "healthy"))
    return made


def test_semantic_gate_separates_every_fault_and_16_bits_do_not(benches: dict[str, Bench]) -> None:
    lines = [
        "",
        "ratio to golden    fp32 rms     worst      bf16 rms     worst   bf16 1 - flat cosine   case",
    ]
    fp32, bf16 = dict[str, TapResult](), dict[str, TapResult]()
    for name, plant, options in [(n, nothing, o) for n, o in BENIGN.items()] + [
        (n, p, {}) for n, p in FAULTS.items()
    ]:
        fp32[name] = benches["float32"].case(name, plant, **options)
        bf16[name] = benches["bfloat16"].case(name, plant, **options)
        a, b = fp32[name].judgement, bf16[name].judgement
        shown = "".join(f"{value:11.2f}" for value in (a.rms, a.worst, b.rms, b.worst))
        lines.append(f"{shown} {1 - bf16[name].cosine_flat:14.1e}   {name}")
    print("\n".join(lines))
    noise = max(fp32[name].judgement.rms for name in BENIGN)
    for name in BENIGN:
        assert fp32[name].outcome == bf16[name].outcome == "pass", name
        assert fp32[name].judgement.judged_by == "ratio to golden"
    for name in FAULTS:
        assert fp32[name].outcome == "fail" and fp32[name].judgement.rms > 100 * noise, name
    hidden = bf16["gate +.2 % in one layer"]
    assert hidden.outcome == "pass" and hidden.judgement.rms < 2, "16 bits would have shown it"
    for name in ("one token wrong at layer 12", "tokens shifted in the last layer"):
        assert bf16[name].outcome == "fail", name
