"""The fp64 reference: recurrences against the promoted fallback, and proof that nothing lower was made."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from parity.model.target import golden
from parity.model.target.backends import parse_backend
from parity.model.target.forward import forward
from parity.model.target.load import load_target
from parity.model.target.spec import TargetSpec


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_recurrence_agrees_with_the_promoted_chunk_rule() -> None:
    """Two independent forms of the delta rule: ours over tokens, transformers' over chunks, in true fp64."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    q, k, v = draw(2, 130, 2, 16), draw(2, 130, 2, 16) + 1, draw(2, 130, 4, 8)
    g, beta = -draw(2, 130, 4).abs() / 10, draw(2, 130, 4).sigmoid()
    state = draw(2, 4, 16, 8)
    want, want_state = golden.delta_rule(q, k, v, g, beta, state)
    with golden.promote_to_float64(golden.Float64Promotion()) as record:
        got, got_state = modeling_qwen3_5.torch_chunk_gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    assert record.lower == [] and record.promoted > 0
    assert float((got - want).norm() / want.norm()) < 5e-15
    assert float((got_state - want_state).norm() / want_state.norm()) < 5e-15


def test_convolution_by_hand() -> None:
    """Two taps, two channels, three tokens."""
    x = torch.tensor([[[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]]])
    weight = torch.tensor([[10.0, 1.0], [0.0, 2.0]])
    assert golden.causal_conv(x, weight).tolist() == [[[1.0, 12.0, 23.0], [0.0, 2.0, -2.0]]]


def test_convolution_update_continues_the_whole() -> None:
    x, weight = draw(1, 6, 9), draw(6, 4)
    whole = golden.causal_conv(x, weight, activation="silu")
    state = torch.zeros(1, 6, 4, dtype=torch.float64)
    parts = [golden.conv_update(x[..., t : t + 1], state, weight, activation="silu") for t in range(9)]
    assert torch.allclose(torch.cat(parts, -1), whole, rtol=0, atol=1e-14)


def test_double_alone_is_not_golden_and_is_seen() -> None:
    """A module that casts to float32 inside leaves a mark, unless the promotion catches the cast."""

    class Casting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, -1, dtype=torch.float32).double() + x.to(torch.float32) + x.float()

    with golden._LowerDtypeCounter(record := golden.Float64Promotion()):
        Casting()(draw(3, 3))
    assert len(record.lower) >= 3
    with golden.promote_to_float64(golden.Float64Promotion()) as record:
        result = Casting()(draw(3, 3))
    assert record.lower == [] and record.promoted == 3 and result.dtype is torch.float64


def test_golden_forward_is_fp64_everywhere_and_restores_the_weights(hybrid: Path) -> None:
    target = load_target(TargetSpec(model=str(hybrid), dtype="float32"))
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    result = forward(target, list(range(40)), backend=parse_backend("golden"), taps=["*"])
    assert result.proof.valid, result.proof.problems
    assert {tensor.dtype for tensor in result.taps.values()} == {torch.float64}
    after: dict[str, Any] = target.model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before
    )
    plain = forward(target, list(range(40)), backend=parse_backend("torch"), taps=["*"])
    for name, tensor in plain.taps.items():
        want = result.taps[name]
        assert float((tensor.double() - want).norm() / want.norm()) < 1e-5, name
