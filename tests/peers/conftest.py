"""Peers as judges: `make peers` installs them; without them these tests are skipped, and fail where they must not be.

Every comparison is between one drafter of ours and the same weights in a peer, read by the peer itself from a
checkpoint that we exported.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import TargetLayers, save_speculators, save_zlab
from parity.model.dflash.mask import training_layout
from parity.model.drafting.decode import RecordedText
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec
from parity.model.training.anchors import block_ids, blocks_at
from parity.model.training.loss import LossConfig, Uniform, objective
from parity.model.training.vocabulary import DraftVocab

BLOCK, WINDOW, MASK = 4, 6, 3
LAYERS = (0, 2, 3)
ROPE = RopeConfig(rope_theta=5000.0)
Import = Callable[[str], Any]


@pytest.fixture(scope="session")
def peer() -> Import:
    """Import a peer's module, or skip the test where peers are not asked for."""

    def bring(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if os.environ.get("CI") == "true" or os.environ.get("PARITY_PEERS") == "1":
                raise
            pytest.skip(f"{error}; run `make peers` first (PARITY_PEERS=1 makes this a failure)")

    return bring


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One small dense target, and one row of text to draft on."""

    bring: Import
    """Imports a peer's module, or skips the test."""
    out: Path
    """Where checkpoints are written."""
    folder: Path
    target: Target
    ends: EmbeddingAndHead
    ids: Tensor
    """[S]"""
    states: Tensor
    """[S, C * D] conditioning states."""
    last: Tensor
    """[S, D] what enters the final norm."""
    anchors: Tensor
    """[A]"""

    def drafter(
        self,
        types: tuple[str, ...],
        causal: bool | None = None,
        vocab: DraftVocab | None = None,
        rope: RopeConfig = ROPE,
    ) -> Drafter:
        """Random, with weights large enough for every part to matter."""
        config = DrafterConfig(
            hidden_size=32,
            intermediate_size=48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            conditioning=len(LAYERS),
            block_size=BLOCK,
            mask_token_id=MASK,
            layers=layer_rules(types, WINDOW, causal),
            rope=rope,
        )
        drafter = Drafter(config, vocab)
        drafter.reset(torch.Generator().manual_seed(0))
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.mul_(8 if parameter.dim() == 2 else 1)
        return drafter

    @torch.no_grad()
    def logits(self, drafter: Drafter, attention: Any = "grouped") -> Tensor:
        """Ours: [A, B, V or Vd]."""
        position, document = torch.arange(len(self.ids)), torch.zeros_like(self.ids)
        layout = training_layout(position, document, self.anchors, BLOCK)
        ids = block_ids(self.ids, self.anchors, BLOCK, MASK)
        hidden = drafter(self.states, self.ends.embed[ids], layout, attention=attention)
        vocab = drafter.draft_vocab
        head = self.ends.head if vocab is None else vocab.head_rows(self.ends.head)
        out: Tensor = hidden @ head.T
        return out

    @property
    def wiring(self) -> TargetLayers:
        return TargetLayers.of(self.target, LAYERS)

    def zlab(self, drafter: Drafter) -> Any:
        """The drafter in z-lab's package, read from our export."""
        model = self.bring("dflash.model").DFlashDraftModel
        return model.from_pretrained(
            save_zlab(self.out / "zlab", drafter, self.wiring, overwrite=True)
        ).eval()

    def specforge(self, drafter: Drafter) -> Any:
        """The drafter in SpecForge's training wrapper, with our anchors; the same files as for z-lab."""
        draft = self.bring("specforge.modeling.draft.dflash").DFlashDraftModel
        family = self.bring("specforge.algorithms.common.dflash_family_model")
        folder = save_zlab(self.out / "specforge", drafter, self.wiring, overwrite=True)
        wrapper = family.OnlineDFlashModel(
            draft_model=draft.from_pretrained(folder, attn_implementation="sdpa"),
            target_lm_head=self.target.head,
            target_embed_tokens=self.target.embed,
            mask_token_id=MASK,
            block_size=BLOCK,
            attention_backend="sdpa",
        )
        kept = torch.ones(1, len(self.anchors), dtype=torch.bool)
        wrapper._sample_anchor_positions = lambda *_: (self.anchors[None], kept)
        return wrapper.eval()

    def speculators(self, drafter: Drafter, patch: pytest.MonkeyPatch) -> Any:
        """The drafter in speculators, with our anchors; it reads embedding, head and norm from the target itself."""
        core = self.bring("speculators.models.dflash.core")
        folder = save_speculators(
            self.out / "speculators", drafter, self.wiring, head=self.ends.head, overwrite=True
        )
        config = self.bring("speculators.models.dflash.config").DFlashSpeculatorConfig.from_pretrained(
            str(folder)
        )
        config.transformer_layer_config._attn_implementation = (
            "sdpa"  # its default, flex, takes 12 s on a CPU
        )
        valid = torch.ones(len(self.anchors), dtype=torch.bool)
        patch.setattr(core, "select_anchors", lambda *_: (self.anchors, valid))
        return core.DFlashDraftModel.from_pretrained(str(folder), config=config).eval()

    def row(self) -> dict[str, Any]:
        """The batch that speculators' forward takes."""
        ones = torch.ones(1, len(self.ids), dtype=torch.long)
        return dict(
            hidden_states=self.states[None],
            input_ids=self.ids[None],
            loss_mask=ones,
            verifier_last_hidden_states=self.last[None],
            document_ids=torch.zeros_like(ones),
            max_anchors=len(self.anchors),
        )


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, peer: Import) -> Bench:
    """The target is a Qwen3 of six layers, vocabulary 64, random, saved where peers can read it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(9)
    sizes: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + 0.2 * torch.rand(parameter.shape)) if "norm" in name else parameter.mul_(4)
    folder = tmp_path_factory.mktemp("peers") / "target"
    model.save_pretrained(folder)
    target = load_target(TargetSpec(model=str(folder), dtype="float32"))
    ids, last = torch.randint(5, 64, (40,)), list[Tensor]()
    hook = target.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    with torch.no_grad():
        hidden = target.model(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    states = torch.cat([hidden[layer + 1][0] for layer in LAYERS], dim=-1)
    anchors = torch.tensor([1, 5, 6, 17, 30, 35])
    return Bench(
        bring=peer,
        out=folder.parent,
        folder=folder,
        target=target,
        ends=EmbeddingAndHead.of(target),
        ids=ids,
        states=states,
        last=last[0],
        anchors=anchors,
    )


@pytest.fixture(scope="session")
def fit() -> Callable[[Drafter, EmbeddingAndHead, list[RecordedText], int], None]:
    """Teach a drafter recorded texts by heart, so that accepted lengths differ."""

    def run(drafter: Drafter, ends: EmbeddingAndHead, records: list[RecordedText], steps: int) -> None:
        drafter.reset(torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
        for step in range(steps):
            record = records[step % len(records)]
            length = len(record.states)
            tokens, document = record.tokens[:length], torch.zeros(length, dtype=torch.long)
            anchors = torch.arange(record.prompt, length - 1)
            blocks = blocks_at(anchors, tokens, torch.ones(length), document, BLOCK)
            layout = training_layout(torch.arange(length), document, anchors, BLOCK)
            hidden = drafter(record.states, ends.embed[block_ids(tokens, anchors, BLOCK, MASK)], layout)
            loss = LossConfig(terms={"ce": 1.0}, weights=Uniform())
            objective(hidden, ends.head, blocks.labels, blocks.supervised, loss).loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    return run
