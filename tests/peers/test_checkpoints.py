"""Checkpoints between us and the peers: what we export means the same to them, what they write the same to us."""

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import load_checkpoint, save_zlab
from parity.model.dflash.mask import training_layout
from parity.model.training.anchors import block_ids, blocks_at
from parity.model.training.loss import (
    Dpace,
    ExpDecay,
    LossConfig,
    SlotWeighting,
    TeacherStates,
    objective,
    teacher_labels,
)
from parity.model.training.vocabulary import DraftVocab

if TYPE_CHECKING:
    from tests.peers.conftest import Bench

FULL, SLIDING = "full_attention", "sliding_attention"
VOCAB = DraftVocab.from_kept(torch.arange(64) % 3 > 0)


def _loss(bench: "Bench", drafter: Drafter, terms: dict[str, float], weights: SlotWeighting) -> torch.Tensor:
    """Ours on the bench's row, labels and teacher from the target's last state, as speculators takes them."""
    block, mask = drafter.config.block_size, drafter.config.mask_token_id
    document = torch.zeros_like(bench.ids)
    layout = training_layout(torch.arange(len(bench.ids)), document, bench.anchors, block)
    blocks = blocks_at(bench.anchors, bench.ids, torch.ones_like(bench.ids), document, block)
    hidden = drafter(bench.states, bench.ends.embed[block_ids(bench.ids, bench.anchors, block, mask)], layout)
    head = bench.ends.head if drafter.draft_vocab is None else drafter.draft_vocab.head_rows(bench.ends.head)
    with torch.no_grad():
        normed = bench.target.norm(bench.last)
    teacher = TeacherStates(states=normed, index=blocks.teacher_index, head=head)
    labels = teacher_labels(teacher, blocks.supervised)
    config = LossConfig(terms=terms, weights=weights, reduction="mask_mean")
    return objective(hidden, head, labels, blocks.supervised, config, teacher=teacher).loss()


@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["full", "reduced"])
@pytest.mark.parametrize(
    ("term", "weights"),
    [("ce", ExpDecay(gamma=4.0)), ("kl", ExpDecay(gamma=4.0)), ("ce", Dpace(alpha=0.5))],
    ids=["ce", "kl", "ce-dpace"],  # with kl its D-PACE confidence is exp(-term), ours the label's probability
)
def test_speculators_loss_and_gradients(
    vocab: DraftVocab | None,
    term: str,
    weights: SlotWeighting,
    bench: "Bench",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = bench.drafter((FULL, FULL), None, vocab)
    model = bench.speculators(drafter, monkeypatch)
    names = {"ce": "ce", "kl": "kl_div"}
    theirs = model(
        **bench.row(),
        loss_config=bench.bring("speculators.losses").resolve_loss_config(names[term], "eager"),
        gamma=4.0,
        per_position_loss_weight="dpace" if isinstance(weights, Dpace) else "fixed-exp-decay",
        dpace_alpha=0.5,
    )[1]
    ours = _loss(bench, drafter, {term: 1.0}, weights)
    torch.testing.assert_close(ours, theirs.reshape(()), atol=1e-5, rtol=1e-5)
    ours.backward()
    theirs.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4)


def test_specforge_loss(bench: "Bench") -> None:
    """Its objective: CE on the data tokens, divided by the sum of weights."""
    drafter = bench.drafter((SLIDING, FULL))
    wrapper = bench.specforge(drafter)
    wrapper.loss_decay_gamma = 7.0
    ones, document = torch.ones_like(bench.ids), torch.zeros_like(bench.ids)
    theirs = wrapper(input_ids=bench.ids[None], hidden_states=bench.states[None], loss_mask=ones[None])[0]
    layout = training_layout(torch.arange(len(bench.ids)), document, bench.anchors, 4)
    blocks = blocks_at(bench.anchors, bench.ids, ones, document, 4)
    ids = block_ids(bench.ids, bench.anchors, 4, drafter.config.mask_token_id)
    hidden = drafter(bench.states, bench.ends.embed[ids], layout)
    config = LossConfig(terms={"ce": 1.0}, weights=ExpDecay(gamma=7.0), reduction="weighted_mean")
    ours = objective(hidden, bench.ends.head, blocks.labels, blocks.supervised, config).loss()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [None, False])
def test_what_speculators_writes(
    causal: bool | None, bench: "Bench", monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = bench.drafter((SLIDING, FULL), causal, VOCAB)
    folder = bench.out / f"written-{causal}"
    bench.speculators(drafter, monkeypatch).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("num_target_layers")  # ours; a checkpoint that speculators made from nothing lacks it
    (folder / "config.json").write_text(json.dumps(raw))
    _same(load_checkpoint(folder), drafter, bench)


def test_what_zlab_and_specforge_write(bench: "Bench") -> None:
    drafter = bench.drafter((SLIDING, FULL))
    bench.zlab(drafter).save_pretrained(bench.out / "by-zlab")
    _same(load_checkpoint(bench.out / "by-zlab"), drafter, bench)
    folder = bench.out / "by-specforge"
    bench.specforge(drafter).draft_model.save_pretrained(folder)
    bench.bring("specforge.export.checkpoint_io").apply_legacy_rope_scaling(str(folder))
    _same(load_checkpoint(folder), drafter, bench)


def test_speculators_converts_our_zlab_export(bench: "Bench") -> None:
    drafter = bench.drafter((SLIDING, FULL))
    source = save_zlab(bench.out / "to-convert", drafter, bench.wiring, overwrite=True)
    converter = bench.bring("speculators.convert.dflash.converter").DFlashConverter()
    converter.convert(source, bench.out / "converted", base_model=str(bench.folder))
    _same(load_checkpoint(bench.out / "converted"), drafter, bench)


def _same(read: Any, drafter: Drafter, bench: "Bench") -> None:
    assert read.drafter.config == drafter.config
    assert read.wiring.layers == bench.wiring.layers
    assert read.wiring.num_target_layers == 6 and read.wiring.vocab_size == 64
    theirs = read.drafter.state_dict()
    assert theirs.keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, theirs[name])
