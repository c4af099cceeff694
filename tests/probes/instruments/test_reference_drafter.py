"""The drafter that is written a second time: against the first, and its masks by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.mask import training_layout
from parity.model.training.anchors import block_ids
from parity.probes.instruments.drafter.reference import (
    BlockRow,
    DrafterHypothesis,
    DrafterWeights,
    LayerView,
    compute_hidden_states,
    compute_reach,
    estimate_hidden_limit,
    mask_context,
    mask_own_block,
    measure_hidden_distance,
    override_parameters,
)

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = RopeConfig(rope_theta=5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
ROW = BlockRow(
    tokens=torch.arange(10, 24),
    position=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 1]),
    document=torch.tensor([0] * 8 + [1] * 4 + [-1] * 2),
    anchors=torch.tensor([1, 5, 10]),
    block=3,
)


def _drafter(types: tuple[str, ...], causal: bool | None, rope: RopeConfig) -> Drafter:
    config = DrafterConfig(
        hidden_size=16,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        conditioning=2,
        block_size=3,
        mask_token_id=3,
        layers=layer_rules(types, 4, causal),
        rope=rope,
        rms_norm_eps=1e-5,
    )
    drafter = Drafter(config)
    drafter.reset(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(15 if parameter.dim() == 2 else 1)
    return drafter.double()


@pytest.mark.parametrize(
    ("types", "causal", "rope"),
    [
        ((FULL, FULL), None, RopeConfig()),
        ((SLIDING, FULL), None, RopeConfig(rope_theta=1e6)),
        ((SLIDING, SLIDING), False, RopeConfig(partial_rotary_factor=0.5)),
        ((FULL,), True, YARN),
    ],
)
def test_it_computes_what_the_drafter_computes(
    types: tuple[str, ...], causal: bool | None, rope: RopeConfig
) -> None:
    drafter = _drafter(types, causal, rope)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(len(ROW.tokens), 32, generator=generator, dtype=torch.float64)
    table = torch.randn(40, 16, generator=generator, dtype=torch.float64)
    layout = training_layout(ROW.position, ROW.document, ROW.anchors, 3)
    ids = block_ids(ROW.tokens, ROW.anchors, 3, 3)
    with torch.no_grad():
        ours = drafter(states, table[ids], layout, attention="eager")
    layers = tuple(LayerView(window=rule.window, causal=rule.causal) for rule in drafter.config.layers)
    reading = DrafterHypothesis(layers=layers, rope=rope, eps=1e-5, mask_token_id=3)
    weights = DrafterWeights.of(dict(drafter.named_parameters()))
    assert weights is not None
    made = compute_hidden_states(weights, reading, ROW, states, table)
    torch.testing.assert_close(made, ours, atol=1e-12, rtol=1e-10)
    for other in (
        replace(reading, shift=1),
        replace(reading, until=1),
        replace(reading, eps=1e-3),
        replace(reading, rolled=1),
        replace(reading, mask_token_id=4),
        reading.with_layer(0, replace(layers[0], causal=not layers[0].causal)),
    ):
        assert measure_hidden_distance(compute_hidden_states(weights, other, ROW, states, table), made) > 1e-4
    bound = estimate_hidden_limit(weights, reading, ROW, states, table, torch.float32)
    single = compute_hidden_states(weights, reading, ROW, states, table, dtype=torch.float32)
    assert 1e-8 < measure_hidden_distance(single, made) < bound < 1e-4
    assert estimate_hidden_limit(weights, reading, ROW, states, table, torch.bfloat16) > 100 * bound


def _tokens(view: LayerView, anchor: int, slot: int) -> list[int]:
    return (
        mask_context(view, DrafterHypothesis(layers=(view,)), ROW)[anchor, slot].nonzero().flatten().tolist()
    )


def test_what_is_seen_by_hand() -> None:
    full, query, anchor = LayerView(), LayerView(window=3), LayerView(window=3, window_from="anchor")
    assert [_tokens(full, 1, slot) for slot in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert [_tokens(query, 1, slot) for slot in range(3)] == [[3, 4], [4], []]
    assert [_tokens(anchor, 1, slot) for slot in range(3)] == [[2, 3, 4]] * 3
    assert _tokens(full, 2, 0) == [8, 9]
    assert _tokens(full, 0, 2) == [0]
    assert mask_own_block(LayerView(causal=True), 3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True] * 3,
    ]
    assert mask_own_block(LayerView(window=2), 3).tolist() == [
        [True, True, False],
        [True] * 3,
        [False, True, True],
    ]


def test_reach_goes_through_other_slots_from_the_second_layer_on() -> None:
    def reached(slot: int, *views: LayerView) -> list[int]:
        return compute_reach(DrafterHypothesis(layers=views), ROW)[1, slot].nonzero().flatten().tolist()

    two = LayerView(
        window=2
    )  # of the context slot 0 sees token 4, the others nothing; of the block their neighbours
    assert [reached(slot, two) for slot in range(3)] == [[4], [], []]
    assert [reached(slot, two, two) for slot in range(3)] == [[4], [4], []]
    assert [reached(slot, two, two, two) for slot in range(3)] == [[4], [4], [4]]
    assert reached(2, LayerView(window=2), LayerView(window=2, window_from="anchor", causal=True)) == [3, 4]
    assert reached(0, two, LayerView(causal=True)) == [0, 1, 2, 3, 4]


def test_names_that_are_not_zlabs_are_no_weights() -> None:
    parameters: dict[str, Any] = dict(_drafter((FULL,), None, RopeConfig()).named_parameters())
    assert DrafterWeights.of(parameters) is not None
    assert DrafterWeights.of({f"model.{name}": tensor for name, tensor in parameters.items()}) is None
    parameters["layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    assert DrafterWeights.of(parameters) is None


def test_a_distance_to_what_is_not_finite_is_infinite() -> None:
    assert measure_hidden_distance(torch.tensor([[1.0, math.nan]]), torch.ones(1, 2)) == math.inf
    assert measure_hidden_distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 0.0]])) == pytest.approx(
        4 / 3
    )


def test_changed_values_leave_earlier_graphs_alone() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    made = (weight * weight).sum()
    with override_parameters({"weight": weight}, {"weight": torch.tensor([5.0])}):
        assert weight.item() == 5
    assert weight.item() == 2
    assert torch.autograd.grad(made, weight)[0].item() == 4
