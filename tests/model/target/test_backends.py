"""Asking for a backend, and proving what ran: parsing, hiding, call proof, fake kernels, operator replay."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.capturing.client import Worker, capture_with
from parity.errors import ParityError
from parity.model.target import backends
from parity.model.target.backends import Backend, CallRecorder, implementation_of, parse_backend, prove
from parity.model.target.forward import forward
from parity.model.target.load import load_target
from parity.model.target.operator_replay import load_calls, replay, save_calls
from parity.model.target.spec import TargetSpec
from parity.tracing.trace import Trace

IDS = [(5 * i) % 61 for i in range(12)]
REQUEST = {
    "id": "r",
    "token_ids": IDS,
    "origin": "given",
    "prompt_tokens": len(IDS),
    "token_texts": [str(token) for token in IDS],
}


@pytest.mark.parametrize(
    ("text", "delta", "conv", "name"),
    [
        ("torch", "torch", "torch", "torch"),
        ("fla", "fla", "torch", "fla"),
        ("fast", "fla", "causal-conv1d", "fast"),
        ("fla+causal-conv1d", "fla", "causal-conv1d", "fast"),
        ("golden", "golden", "golden", "golden"),
        ("torch+causal-conv1d", "torch", "causal-conv1d", "torch+causal-conv1d"),
        ("fla-interpreted", "fla-interpreted", "torch", "fla-interpreted"),
    ],
)
def test_parse(text: str, delta: str, conv: str, name: str) -> None:
    assert (parse_backend(text).delta, parse_backend(text).conv, parse_backend(text).name) == (
        delta,
        conv,
        name,
    )


@pytest.mark.parametrize("text", ["flash", "", "fla+flash", "golden+torch", "torch+golden", "causal-conv1d"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ParityError, match="no such backend"):
        parse_backend(text)


def test_isolate_comes_too_late() -> None:
    import transformers  # noqa: F401

    with pytest.raises(ParityError, match="transformers imported already"):
        backends.isolate(parse_backend("torch"))


def test_fla_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_cuda", lambda: False)
    assert backends.missing(parse_backend("fla")) == "no CUDA device"
    assert (
        "causal-conv1d" in str(backends.missing(parse_backend("torch+causal-conv1d")))
        or backends.missing(parse_backend("torch+causal-conv1d")) == "no CUDA device"
    )
    with pytest.raises(ParityError, match="no CUDA device"):
        Worker("fla")


def _function(module: str) -> Callable[..., Any]:
    function = types.FunctionType((lambda *a, **k: None).__code__, {}, "f")
    function.__module__ = module
    return function


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("fla.ops.gated_delta_rule.chunk", "fla"),
        ("causal_conv1d.causal_conv1d_interface", "causal-conv1d"),
        ("transformers.models.qwen3_5.modeling_qwen3_5", "torch"),
        ("parity.model.target.golden", "golden"),
        ("kernels_community_fla.layer", "hub:kernels_community_fla"),
        ("somewhere.else", "unknown:somewhere"),
    ],
)
def test_implementation_is_named_by_module(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert implementation_of(_function(module)) == (
        name,
        f"{module}.f" if False else f"{module}.<lambda>",
    ) or (implementation_of(_function(module))[0] == name)


def test_hub_kernel_module_is_recognised() -> None:
    """A hub `Func` module: the function sits in its forward, set by the kernel it was replaced with."""

    class Func(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Func.forward.__module__ = "kernels_community_gdn.ops"
    assert implementation_of(Func())[0] == "hub:kernels_community_gdn"


@pytest.fixture
def target(hybrid: Path) -> Any:
    return load_target(TargetSpec(model=str(hybrid), dtype="float32"))


def test_torch_is_proven(target: Any) -> None:
    result = forward(target, IDS, backend=parse_backend("torch"))
    assert result.proof.valid and not result.proof.problems
    assert [(c.layer, c.operator, c.implementation, c.calls) for c in result.proof.calls] == [
        (layer, operator, "torch", 1) for layer in (0, 1, 2) for operator in ("conv", "delta")
    ]


def test_everything_is_put_back(target: Any) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    before = {name: vars(modeling)[name] for name in backends.FUNCTIONS}
    cells = [cell.cell_contents for f in before.values() for cell in f.__closure__]
    forward(target, IDS, backend=parse_backend("torch"))
    assert {name: vars(modeling)[name] for name in backends.FUNCTIONS} == before
    assert [cell.cell_contents for f in before.values() for cell in f.__closure__] == cells
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


def test_put_back_after_an_exception(target: Any) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    before = {name: vars(modeling)[name] for name in backends.FUNCTIONS}
    with pytest.raises(IndexError):
        forward(target, [10**6], backend=parse_backend("torch"))
    assert {name: vars(modeling)[name] for name in backends.FUNCTIONS} == before


def test_patched_globals_are_a_dispatch_failure(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for torch in a process whose module global holds fla's function: found out, per layer."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    torch_body = vars(modeling)["torch_chunk_gated_delta_rule"].__wrapped__

    def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
        return torch_body(*args, **kwargs)  # the numbers agree: only the proof can tell

    chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule.chunk"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    proof = forward(target, IDS, backend=parse_backend("torch")).proof
    assert not proof.valid
    assert proof.problems == tuple(f"layer {i} delta: fla ran, asked for torch" for i in (0, 1, 2))


def test_fake_causal_conv1d_is_proven(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs CUDA is shown with a fake module: resolved inside transformers' own wrapper, as at import."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    wrapper = vars(modeling)["causal_conv1d_fn"]
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("implementation")]
    torch_body = wrapper.__wrapped__

    def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        return torch_body(x, weight, bias, activation)

    causal_conv1d_fn.__module__ = "causal_conv1d.causal_conv1d_interface"
    monkeypatch.setattr(cell, "cell_contents", causal_conv1d_fn)
    proof = forward(target, IDS, backend=Backend(delta="torch", conv="causal-conv1d")).proof
    assert proof.valid, proof.problems
    assert not forward(target, IDS, backend=parse_backend("torch")).proof.valid


def test_instance_attributes_of_older_versions() -> None:
    """Up to transformers 5.14 each instance holds its functions; the recorder watches those too."""
    fake = types.ModuleType("fake_modeling")

    class GatedDeltaNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chunk_gated_delta_rule = _body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chunk_gated_delta_rule(x)[0]

    def _body(x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * x, None

    GatedDeltaNet.__module__ = _body.__module__ = "fake_modeling"
    sys.modules["fake_modeling"] = fake
    _body.__module__ = "transformers.models.fake"
    module = GatedDeltaNet()
    with CallRecorder({0: module}) as calls:
        assert float(module(torch.ones(1, 1, 1, 1))) == 2
    assert [(c.layer, c.operator, c.implementation, c.calls) for c in calls.proofs()] == [
        (0, "delta", "torch", 1)
    ]
    assert module.chunk_gated_delta_rule is _body
    del sys.modules["fake_modeling"]


def test_no_call_is_no_proof() -> None:
    proof = prove(parse_backend("torch"), (), [0])
    assert not proof.valid and "no call was seen" in proof.problems[0]


def test_hidden_fla_is_a_dispatch_failure(hybrid: Path, tmp_path: Path) -> None:
    """fla hidden in the worker of a run that asked for fla-interpreted: the trace is written, and invalid."""
    with Worker("fla-interpreted", hide=["fla"]) as worker:
        result = capture_with(worker, {"model": str(hybrid), "dtype": "float32"}, [REQUEST], tmp_path / "t")
    assert not result["valid"]
    assert any("could not be set up" in problem for problem in result["problems"])
    assert any(
        "layer 0 delta: torch ran, asked for fla-interpreted" in problem for problem in result["problems"]
    )
    assert not Trace.open(tmp_path / "t").manifest.backend.valid


def test_operator_calls_are_recorded_once_and_replayed(target: Any, tmp_path: Path) -> None:
    result = forward(target, IDS, backend=parse_backend("torch"), keep_calls=True)
    save_calls([*result.calls, *result.calls], tmp_path / "calls.safetensors")
    calls = load_calls(tmp_path / "calls.safetensors")
    assert [(call.layer, call.operator) for call in calls] == [
        (layer, operator) for layer in (0, 1, 2) for operator in ("conv", "delta")
    ]
    replay(tmp_path / "calls.safetensors", tmp_path / "torch.safetensors", parse_backend("torch"))
    replay(tmp_path / "calls.safetensors", tmp_path / "golden.safetensors", parse_backend("golden"))
    again, want = load_calls(tmp_path / "torch.safetensors"), load_calls(tmp_path / "golden.safetensors")
    for call, same, reference in zip(calls, again, want, strict=True):
        assert torch.equal(call.output, same.output) and call.digest() == same.digest() == reference.digest()
        error = float((call.output.double() - reference.output).norm() / reference.output.norm())
        assert 0 < error < 1e-6, (call.layer, call.operator)
