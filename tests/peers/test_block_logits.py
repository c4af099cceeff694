"""Same weights, same anchors: block logits of ours, speculators, SpecForge and z-lab's dflash, to 1e-5 in fp32."""

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash import mask
from parity.model.dflash.config import RopeConfig
from parity.model.dflash.export import load_checkpoint
from parity.model.dflash.mask import CONTEXT, TokenPlaces, VisibilityRule
from parity.model.training.anchors import PADDING
from parity.model.training.vocabulary import DraftVocab

if TYPE_CHECKING:
    from tests.peers.conftest import Bench

FULL, SLIDING = "full_attention", "sliding_attention"
TOLERANCE = 1e-5
KINDS: dict[str, tuple[tuple[str, ...], bool | None]] = {
    "full": ((FULL, FULL), None),
    "sliding": ((SLIDING, FULL), None),
    "sliding, bidirectional": ((SLIDING, SLIDING), False),
    "full, causal": ((FULL, FULL), True),
}


@torch.no_grad()
def _zlab(bench: "Bench", model: Any) -> Tensor:
    """z-lab's inference path, one anchor at a time on the states before it."""
    out = []
    for anchor in bench.anchors.tolist():
        ids = torch.full((1, model.block_size), model.mask_token_id)
        ids[0, 0] = bench.ids[anchor]
        hidden = model(
            position_ids=torch.arange(anchor + model.block_size)[None],
            noise_embedding=bench.ends.embed[ids],
            target_hidden=bench.states[None, :anchor],
        )
        out.append(hidden @ bench.ends.head.T)
    return torch.cat(out)


@torch.no_grad()
def _specforge(bench: "Bench", model: Any) -> Tensor:
    ones = torch.ones(1, len(bench.ids), dtype=torch.long)
    hidden: Tensor = model._forward_draft_blocks(bench.ids[None], bench.states[None], ones)[2]
    return hidden.view(len(bench.anchors), -1, hidden.shape[-1]) @ bench.ends.head.T


@torch.no_grad()
def _speculators(bench: "Bench", model: Any) -> Tensor:
    logits: Tensor = model._backbone_forward(**bench.row())[1]
    return logits.view(len(bench.anchors), -1, logits.shape[-1])


def _apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and ours.std() > 0.1
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_zlab(kind: str, bench: "Bench") -> None:
    drafter = bench.drafter(*KINDS[kind])
    model = bench.zlab(drafter)
    assert tuple(model.target_layer_ids) == bench.wiring.layers
    assert _apart(bench.logits(drafter), _zlab(bench, model)) < TOLERANCE


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_specforge(kind: str, bench: "Bench") -> None:
    drafter = bench.drafter(*KINDS[kind])
    assert _apart(bench.logits(drafter), _specforge(bench, bench.specforge(drafter))) < TOLERANCE


@pytest.mark.parametrize("kind", ["sliding, bidirectional", "full, causal"])
def test_specforge_does_not_read_is_causal(kind: str, bench: "Bench") -> None:
    """Its sliding layers are always causal within a block and its full layers never (create_dflash_sdpa_mask)."""
    types, causal = KINDS[kind]
    theirs = _specforge(bench, bench.specforge(bench.drafter(types, causal)))
    assert _apart(bench.logits(bench.drafter(types, causal)), theirs) > 0.01
    assert _apart(bench.logits(bench.drafter(types, None)), theirs) < TOLERANCE


def test_speculators_full_attention(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = bench.drafter(*KINDS["full"])
    assert (
        _apart(bench.logits(drafter), _speculators(bench, bench.speculators(drafter, monkeypatch)))
        < TOLERANCE
    )


YARN = RopeConfig(rope_theta=5000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def test_a_scaled_rope_is_read_by_all(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = bench.drafter(*KINDS["full"], rope=YARN)
    ours = bench.logits(drafter)
    assert _apart(ours, bench.logits(bench.drafter(*KINDS["full"]))) > 0.01
    assert _apart(ours, _zlab(bench, bench.zlab(drafter))) < TOLERANCE
    assert _apart(ours, _specforge(bench, bench.specforge(drafter))) < TOLERANCE
    assert _apart(ours, _speculators(bench, bench.speculators(drafter, monkeypatch))) < TOLERANCE


@pytest.mark.parametrize("schema", ["rope_parameters", "rope_theta and rope_scaling"])
def test_either_rope_schema_alone_is_read_as_we_do(schema: str, bench: "Bench") -> None:
    drafter = bench.drafter(*KINDS["full"], rope=YARN)
    bench.zlab(drafter)
    path = bench.out / "zlab" / "config.json"
    raw = json.loads(path.read_text())
    for key in ("rope_theta", "rope_scaling") if schema == "rope_parameters" else ("rope_parameters",):
        raw.pop(key)
    path.write_text(json.dumps(raw))
    assert load_checkpoint(path.parent).drafter.config.rope == YARN
    model = bench.bring("dflash.model").DFlashDraftModel.from_pretrained(path.parent).eval()
    assert _apart(bench.logits(drafter), _zlab(bench, model)) < TOLERANCE


def test_speculators_reduced_vocabulary(bench: "Bench", monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = DraftVocab.from_kept(torch.arange(64) % 3 > 0)
    drafter = bench.drafter(*KINDS["full"], vocab)
    model = bench.speculators(drafter, monkeypatch)
    assert torch.equal(model.t2d, vocab.t2d) and torch.equal(model.d2t, vocab.d2t)
    assert _apart(bench.logits(drafter), _speculators(bench, model)) < TOLERANCE


@pytest.mark.parametrize("kind", ["sliding", "sliding, bidirectional"])
def test_speculators_window_starts_at_the_anchor(
    kind: str, bench: "Bench", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it differs and why: its window's lower bound is anchor - W for every slot (in
    create_anchor_block_mask_mod), ours, z-lab's, SpecForge's and vLLM's is counted from each query; slot k then
    sees k + 1 more keys. With that one rule put in place of ours, the logits agree."""
    drafter = bench.drafter(*KINDS[kind])
    theirs = _speculators(bench, bench.speculators(drafter, monkeypatch))
    assert _apart(bench.logits(drafter), theirs) > 0.01

    def from_the_anchor(query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        anchor = query.position - query.slot
        same = (key.document == query.document) & (key.document != PADDING)
        context = (key.block == CONTEXT) & same & (key.position < anchor)
        if rule.window is not None:
            context = context & (key.position >= anchor - rule.window)
        own = (key.block != CONTEXT) & (key.block == query.block)
        return context | (own & (key.slot <= query.slot) if rule.causal else own)

    assert _extra_keys(drafter.config.layers[0], from_the_anchor) == [1, 2, 3, 4]
    monkeypatch.setattr(mask, "visible", from_the_anchor)
    assert _apart(bench.logits(drafter, "eager"), theirs) < TOLERANCE


def _extra_keys(rule: VisibilityRule, theirs: Any) -> list[int]:
    """How many keys more each slot of a block at token 30 sees by the rule `theirs`."""
    layout = mask.training_layout(torch.arange(40), torch.zeros(40, dtype=torch.long), torch.tensor([30]), 4)
    queries, keys = layout.blocks.at((slice(None), None)), layout.keys.at((None, slice(None)))
    more = theirs(queries, keys, rule).sum(1) - mask.visible(queries, keys, rule).sum(1)
    return [int(count) for count in more]
