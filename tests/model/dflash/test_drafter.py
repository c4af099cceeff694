"""The drafter: what it sees, that all attentions agree, and that drafting computes what training computed.

Run: PYTHONPATH=. python -m pytest --import-mode=importlib tests/model/dflash/test_drafter.py
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.drafter import AttentionKind, Drafter, rotate
from parity.model.dflash.mask import BlockLayout, VisibilityRule, training_layout
from parity.model.training.anchors import block_ids
from parity.model.training.vocabulary import DraftVocab

WIDTH, BLOCK, CONDITIONING, VOCAB, MASK_ID = 32, 4, 3, 50, 49
DOCUMENT = torch.tensor([0] * 14 + [1] * 10 + [2] * 3 + [-1] * 5)
POSITION = torch.cat([torch.arange(14), torch.arange(10), torch.arange(3), torch.zeros(5, dtype=torch.long)])
ANCHORS = torch.tensor([2, 5, 6, 13, 16, 20, 25])
MIXES: dict[str, tuple[VisibilityRule, ...]] = {
    "full": layer_rules(["full_attention"] * 2, None),
    "full, causal": layer_rules(["full_attention"] * 2, None, is_causal=True),
    "sliding": layer_rules(["sliding_attention"] * 2, 3),
    "sliding, not causal": layer_rules(["sliding_attention"] * 2, 6, is_causal=False),
    "mixed": layer_rules(["sliding_attention", "full_attention"], 5),
}


def make_drafter(
    layers: tuple[VisibilityRule, ...] = MIXES["full"], dtype: torch.dtype = torch.float32, **more: Any
) -> Drafter:
    config = DrafterConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        conditioning=CONDITIONING,
        block_size=BLOCK,
        mask_token_id=MASK_ID,
        layers=layers,
        **more,
    )
    drafter = Drafter(config)
    drafter.reset(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(8 if parameter.dim() == 2 else 1)  # attention far from uniform
    return drafter.to(dtype)


def make_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """States [S, C * D] and block embeddings [A, B, D], both leaves."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB - 1, DOCUMENT.shape, generator=generator)
    embedding = torch.randn(VOCAB, WIDTH, generator=generator)
    states = torch.randn(len(DOCUMENT), CONDITIONING * WIDTH, generator=generator)
    embedded = embedding[block_ids(tokens, ANCHORS, BLOCK, MASK_ID)]
    return states.to(dtype).requires_grad_(), embedded.to(dtype).requires_grad_()


def make_layout(anchors: Tensor = ANCHORS) -> BlockLayout:
    return training_layout(POSITION, DOCUMENT, anchors, BLOCK)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("mix", "kind"), list(product(MIXES, ["grouped", "sdpa", "flex"])))
def test_every_attention_is_the_eager_reference(mix: str, kind: AttentionKind) -> None:
    drafter, (states, embedded) = make_drafter(MIXES[mix]), make_batch()
    expected = drafter(states, embedded, make_layout(), attention="eager")
    with torch.set_grad_enabled(kind != "flex"):  # flex has no backward on CPU
        found = drafter(states, embedded, make_layout(), attention=kind)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if kind != "flex":
        probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
        inputs = (states, embedded, *drafter.parameters())
        wanted = torch.autograd.grad((expected * probe).sum(), inputs)
        got = torch.autograd.grad((found * probe).sum(), inputs)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * max(1.0, float(b.abs().max())), rtol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "eager"])
@pytest.mark.parametrize("mix", list(MIXES))
def test_gradient_is_zero_wherever_a_block_must_not_look(mix: str, kind: AttentionKind) -> None:
    """Exactly zero: context at or after the anchor, other documents, padding, other blocks."""
    drafter, (states, embedded) = make_drafter(MIXES[mix]), make_batch()
    hidden = drafter(states, embedded, make_layout(), attention=kind)
    index = torch.arange(len(DOCUMENT))
    for a, anchor in enumerate(ANCHORS.tolist()):
        on_states, on_blocks = torch.autograd.grad(
            hidden[a].square().sum(), (states, embedded), retain_graph=True
        )
        allowed = (index < anchor) & (DOCUMENT == DOCUMENT[anchor])
        assert (on_states[~allowed] == 0).all()
        assert (on_blocks[torch.arange(len(ANCHORS)) != a] == 0).all()
        nearest = allowed & (index >= anchor - 2)  # within every window tried here
        assert (on_states[nearest].abs().sum(1) > 0).all()
        assert (on_blocks[a].abs().sum(1) > 0).all()


@pytest.mark.parametrize(("window", "causal"), [(3, True), (6, False), (5, True)])
def test_window_is_counted_from_each_query(window: int, causal: bool) -> None:
    """One sliding layer: slot k at position p + k sees context positions above p + k - W, and no other."""
    drafter, (states, embedded) = make_drafter((VisibilityRule(window=window, causal=causal),)), make_batch()
    hidden = drafter(states, embedded, make_layout())
    anchor, a = 13, ANCHORS.tolist().index(13)
    for slot in range(BLOCK):
        (gradient,) = torch.autograd.grad(hidden[a, slot].square().sum(), states, retain_graph=True)
        seen = gradient.abs().sum(1).nonzero().squeeze(1).tolist()
        assert seen == list(range(max(0, anchor + slot - window + 1), anchor))


@pytest.mark.parametrize("causal", [True, False])
def test_causal_flag_decides_within_the_block(causal: bool) -> None:
    drafter, (states, embedded) = make_drafter((VisibilityRule(causal=causal),)), make_batch()
    hidden = drafter(states, embedded, make_layout())
    for slot in range(BLOCK):
        (gradient,) = torch.autograd.grad(hidden[3, slot].square().sum(), embedded, retain_graph=True)
        seen = gradient[3].abs().sum(1).nonzero().squeeze(1).tolist()
        assert seen == list(range(slot + 1 if causal else BLOCK))


@pytest.mark.parametrize(("mix", "kind"), list(product(MIXES, ["grouped", "eager"])))
def test_drafting_computes_what_training_computed(mix: str, kind: AttentionKind) -> None:
    """Each block alone, against a cache filled in two pieces with the states before its anchor."""
    drafter, (states, embedded) = make_drafter(MIXES[mix]), make_batch()
    with torch.no_grad():
        trained = drafter(states, embedded, make_layout())
        for a, anchor in enumerate(ANCHORS.tolist()):
            own = (DOCUMENT == DOCUMENT[anchor]) & (torch.arange(len(DOCUMENT)) < anchor)
            cache, index = drafter.new_cache(), own.nonzero().squeeze(1)
            for piece in (index[:2], index[2:]):
                drafter.extend(cache, states[piece], POSITION[piece], DOCUMENT[piece])
            place = (POSITION[anchor][None], DOCUMENT[anchor][None])
            drafted = drafter.draft(cache, embedded[a : a + 1], *place, attention=kind)
            torch.testing.assert_close(drafted[0], trained[a], atol=1e-5, rtol=1e-5)


def test_one_cache_serves_several_documents_and_drafts_leave_it_alone() -> None:
    drafter, (states, embedded) = make_drafter(MIXES["mixed"]), make_batch()
    with torch.no_grad():
        trained = drafter(states, embedded, make_layout())
        cache = drafter.new_cache()
        drafter.extend(cache, states, POSITION, DOCUMENT)
        place = (POSITION[ANCHORS], DOCUMENT[ANCHORS])
        for _ in range(2):
            drafted = drafter.draft(cache, embedded, *place)
            torch.testing.assert_close(drafted, trained, atol=1e-5, rtol=1e-5)
        assert len(cache) == len(DOCUMENT)
        cache.crop(6)
        again = drafter.draft(cache, embedded[:3], place[0][:3], place[1][:3])
        torch.testing.assert_close(again, trained[:3], atol=1e-5, rtol=1e-5)


def test_a_shorter_block_drafts_alike_when_causal() -> None:
    drafter, (states, embedded) = make_drafter(MIXES["full, causal"]), make_batch()
    with torch.no_grad():
        trained = drafter(states, embedded, make_layout())
        cache = drafter.new_cache()
        drafter.extend(cache, states, POSITION, DOCUMENT)
        drafted = drafter.draft(cache, embedded[:, :2], POSITION[ANCHORS], DOCUMENT[ANCHORS])
    torch.testing.assert_close(drafted, trained[:, :2], atol=1e-5, rtol=1e-5)


def test_order_of_anchors_does_not_matter() -> None:
    drafter, (states, embedded) = make_drafter(), make_batch()
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    sorted_out = drafter(states, embedded, make_layout())
    shuffled = drafter(states, embedded[order], make_layout(ANCHORS[order]))
    torch.testing.assert_close(shuffled, sorted_out[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "sdpa", "eager"])
def test_no_anchors_no_blocks(kind: AttentionKind) -> None:
    drafter, (states, embedded) = make_drafter(MIXES["mixed"]), make_batch()
    none = torch.empty(0, dtype=torch.long)
    assert drafter(states, embedded[:0], make_layout(none), attention=kind).shape == (0, BLOCK, WIDTH)


def test_packed_is_alone() -> None:
    """A document in a packed row gives what it gives by itself."""
    drafter, (states, embedded) = make_drafter(MIXES["mixed"]), make_batch()
    packed = drafter(states, embedded, make_layout())
    own = DOCUMENT == 1
    layout = training_layout(POSITION[own], DOCUMENT[own], torch.tensor([2, 6]), BLOCK)
    alone = drafter(states[own], embedded[4:6], layout)
    torch.testing.assert_close(alone, packed[4:6], atol=1e-5, rtol=1e-5)


def test_names_and_shapes_are_z_labs() -> None:
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    expected = {"fc.weight": (32, 96), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    assert {name: tuple(x.shape) for name, x in make_drafter().state_dict().items()} == expected


def test_one_layer_by_hand_is_transformers_qwen3() -> None:
    """With a single block, no context and full attention, a draft layer is a Qwen3 layer without a mask."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    drafter, (_, embedded) = make_drafter((VisibilityRule(),), rope=RopeConfig(rope_theta=1e6)), make_batch()
    config = Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    config._attn_implementation = "eager"
    reference = Qwen3DecoderLayer(config, 0)
    reference.load_state_dict(
        {k[9:]: v for k, v in drafter.state_dict().items() if k.startswith("layers.0.")}
    )
    position = torch.arange(7, 7 + BLOCK)[None]
    angles = Qwen3RotaryEmbedding(config)(embedded, position)
    with torch.no_grad():
        expected = drafter.norm(reference(embedded[:1], position_embeddings=angles, attention_mask=None))
        found = drafter.draft(drafter.new_cache(), embedded[:1], position[0, :1], torch.tensor([0]))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


SCALED = [
    RopeConfig(rope_type="linear", factor=2.0),
    RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, rope_theta=1e6),
    RopeConfig(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_theta=5e5,
    ),
    RopeConfig(rope_type="proportional", partial_rotary_factor=0.25),
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope.rope_type)
def test_scaled_ropes_shift_with_position_like_the_plain_one(rope: RopeConfig) -> None:
    """Rope is relative: moving every position by 1,000 changes nothing; and it is not the plain rope."""
    plain, _ = RopeConfig(rope_theta=rope.rope_theta).frequencies(8)
    scaled, scale = rope.frequencies(8)
    assert scaled.shape == plain.shape and not torch.allclose(plain, scaled)
    assert (scale > 1) == (rope.rope_type == "yarn")
    drafter, (states, embedded) = make_drafter(rope=rope, dtype=torch.float64), make_batch(torch.float64)
    here = drafter(states, embedded, make_layout())
    there = drafter(states, embedded, training_layout(POSITION + 1000, DOCUMENT, ANCHORS, BLOCK))
    torch.testing.assert_close(here, there, atol=1e-9, rtol=1e-9)


def test_partial_rotary_turns_the_first_dimensions_only() -> None:
    frequencies, scale = RopeConfig(partial_rotary_factor=0.5, rope_theta=100.0).frequencies(8)
    assert scale == 1.0
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    angles = 3 * frequencies[None, None, :]
    x = torch.arange(8.0).view(1, 1, 8) + 1
    turned = rotate(x, (angles.cos(), angles.sin()))[0, 0]
    assert torch.equal(turned[4:], x[0, 0, 4:])
    for i, angle in enumerate((3.0, 0.3)):
        expected = torch.polar(torch.tensor(1.0), torch.tensor(angle)) * torch.complex(
            x[0, 0, i], x[0, 0, i + 2]
        )
        torch.testing.assert_close(turned[i], expected.real)
        torch.testing.assert_close(turned[i + 2], expected.imag)


CONFIGS: list[tuple[dict[str, Any], RopeConfig]] = [
    ({"rope_theta": 1e7, "rope_scaling": None}, RopeConfig(rope_theta=1e7)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}, RopeConfig(rope_theta=1e7)),
    (
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        replace(SCALED[0], rope_theta=1e6),
    ),
    (
        {
            "rope_theta": 1e7,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1]},
        },
        RopeConfig(rope_theta=1e7, partial_rotary_factor=0.25),
    ),
    ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, RopeConfig(partial_rotary_factor=0.5)),
]


@pytest.mark.parametrize(("written", "expected"), CONFIGS)
def test_rope_is_read_from_both_schemas(written: dict[str, Any], expected: RopeConfig) -> None:
    assert RopeConfig.from_config(written) == expected
    assert RopeConfig.from_config({"rope_parameters": expected.parameters()}) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
        "rope_theta: 1000000.0 in rope_parameters, 10000.0 flat",
    ),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic', whose angles change",
    ),
    ({"rope_parameters": {"rope_thita": 1e6}}, "unknown keys rope_thita"),
]


@pytest.mark.parametrize(("written", "message"), REFUSED)
def test_rope_that_two_readers_would_read_differently_is_refused(
    written: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParityError, match=message):
        RopeConfig.from_config(written)


def test_layer_rules_follow_z_lab() -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert layer_rules(kinds, 8) == (VisibilityRule(window=8, causal=True), VisibilityRule())
    assert layer_rules(kinds, 8, is_causal=False) == (VisibilityRule(window=8), VisibilityRule())
    assert layer_rules(kinds, 8, is_causal=True) == (
        VisibilityRule(window=8, causal=True),
        VisibilityRule(causal=True),
    )
    with pytest.raises(ParityError, match="give sliding_window in tokens"):
        layer_rules(kinds, None)
    with pytest.raises(ParityError, match="use full_attention or sliding_attention"):
        layer_rules(["chunked_attention"], None)


def test_reduced_vocabulary_goes_both_ways() -> None:
    t2d = torch.tensor([False, True, True, False, True])
    vocab = DraftVocab.from_kept(t2d)
    assert vocab.d2t.tolist() == [1, 1, 2]
    assert vocab.to_target(torch.tensor([[0, 1], [2, 0]])).tolist() == [[1, 2], [4, 1]]
    assert vocab.to_draft(torch.tensor([0, 1, 2, 3, 4])).tolist() == [-1, 0, 1, -1, 2]
    assert vocab.head_rows(torch.arange(5.0)[:, None]).squeeze(1).tolist() == [1, 2, 4]
    with pytest.raises(ParityError, match="take both maps from the same run"):
        DraftVocab(t2d=t2d, d2t=torch.tensor([1, 1, 1]))


def test_reduced_vocabulary_is_saved_with_the_drafter() -> None:
    vocab = DraftVocab.from_kept(torch.arange(VOCAB) % 3 == 0)
    drafter = Drafter(make_drafter().config, vocab)
    state = drafter.state_dict()
    assert {name for name in state if "." not in name} == {"t2d", "d2t"}
    assert state["t2d"].dtype == torch.bool and state["d2t"].dtype == torch.int64
    assert drafter.draft_vocab is not None and torch.equal(drafter.draft_vocab.d2t, vocab.d2t)
    assert make_drafter().draft_vocab is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads must divide"),
        ({"block_size": 1}, "block 2"),
        ({"layers": ()}, "1 layer"),
    ],
)
def test_config_says_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        replace(make_drafter().config, **wrong)


def test_gradients_are_right_in_double_precision() -> None:
    drafter = make_drafter(MIXES["mixed"], torch.float64)
    states, embedded = make_batch(torch.float64)

    def run(states: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
        parameters = {"fc.weight": weight}
        arguments = (states, embedded, make_layout())
        out: Tensor = torch.func.functional_call(drafter, parameters, arguments, {"attention": "grouped"})
        return out

    weight = drafter.fc.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (states, embedded, weight), fast_mode=True)


@pytest.mark.parametrize("kind", ["grouped", "eager"])
def test_bf16_runs_and_stays_close(kind: AttentionKind) -> None:
    drafter, (states, embedded) = make_drafter(), make_batch()
    expected = drafter(states, embedded, make_layout())
    lower = make_drafter(dtype=torch.bfloat16)(
        states.bfloat16(), embedded.bfloat16(), make_layout(), attention=kind
    )
    assert lower.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(lower.float().flatten(), expected.flatten(), dim=0) > 0.999
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = drafter(states, embedded, make_layout(), attention=kind)
    cast.float().square().mean().backward()
    assert torch.nn.functional.cosine_similarity(cast.float().flatten(), expected.flatten(), dim=0) > 0.999
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
