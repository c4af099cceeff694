"""Tiny models for every test. This process runs the torch backend; other backends run in workers."""

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # two threads on shared cores were ten times slower

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.model.target.backends import isolate, parse_backend

torch.set_num_threads(1)
isolate(
    parse_backend("torch")
)  # before transformers is imported: without a GPU an importable fla would be chosen, and crash

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", SIZES | LINEAR | EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SIZES | LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", SIZES | LINEAR | EXPERTS),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        SIZES
        | LINEAR
        | {"linear_num_key_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES | {"num_hidden_layers": 2}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", SIZES | {"num_hidden_layers": 2, "sliding_window": 8}),
}


def build_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a seeded random model of a family; its linear layers' states live long (A_log in -5..1)."""
    import transformers

    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(7)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-5, 1)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")) and dtype != torch.float32:
            parameter.data = parameter.data.float() + 1e-4 * torch.rand(parameter.shape)  # off the bf16 grid
    model.save_pretrained(folder)
    return folder


@contextmanager
def changed_operator(name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Change an operator's torch body inside transformers' own wrapper, where the call proof sees it run:
    `change(body, *args, **kwargs)` is called in its place."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    wrapper = vars(modeling)[name]
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("implementation")]
    body = cell.cell_contents

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(body, *args, **kwargs)

    changed.__module__ = body.__module__
    cell.cell_contents = changed
    try:
        yield
    finally:
        cell.cell_contents = body


@pytest.fixture(scope="session")
def change_operator() -> Callable[..., Any]:
    """`changed_operator`, for tests that plant a fault in the model's own code path."""
    return changed_operator


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of one tiny random model of each family, float32."""
    base = tmp_path_factory.mktemp("models")
    return {family: build_model(family, base / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def hybrid(models: dict[str, Path]) -> Path:
    """A qwen3_5 model: three linear layers, one full-attention layer, hidden 32."""
    return models["qwen3_5"]


@pytest.fixture(scope="session")
def hybrid_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16, with A_log and dt_bias in float32 off the bfloat16 grid."""
    return build_model("qwen3_5", tmp_path_factory.mktemp("bf16") / "qwen3_5", torch.bfloat16)
