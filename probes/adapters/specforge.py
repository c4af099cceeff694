"""SpecForge 0.2.0 as an adapter: its normaliser and collation, its DFlash strategy, its training model.

    adapter = SpecForge.open(preset("specforge-0.2"))

Runs on CPU with sdpa attention. It does not pack: every document of a synthetic row is a row of its own, padded on the
right. Its labels are the data's tokens and it takes no teacher state. Its states come from SGLang, so there is no
capture to examine here; its controller expects torch.distributed, so there is no run to resume. z-lab's reader drafts,
whose layout its checkpoints have.

Shapes: S tokens of the row, A anchors, F = features that enter fc.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.recipe.config import TrainingFile
from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.adapters.peer import PeerAdapter, copy_weight
from parity.probes.adapters.zlab import ZlabSide


class SpecForge(PeerAdapter):
    """`DFlashTrainStrategy.forward_loss` on what its normaliser and collator make of the captured states."""

    name = "SpecForge 0.2.0"
    packs = False

    def __init__(self, target: ZlabSide, strategy: Any) -> None:
        """strategy: a DFlashTrainStrategy around an OnlineDFlashModel."""
        super().__init__(target, strategy.trainable_module())
        self.strategy = strategy

    def reader_config(self) -> Mapping[str, object]:
        """The draft model's own configuration."""
        config: dict[str, object] = self.model.draft_model.config.to_dict()
        return config

    @classmethod
    def open(cls, training: TrainingFile) -> "SpecForge":
        """A new drafter for a training file's target, configured as the recipe declares. Raises ParityError for what
        SpecForge cannot be configured for, or where it is not installed (`make peers`)."""
        draft, family, base = _imports()
        from transformers import Qwen3Config

        recipe, target = training.recipe, ZlabSide.open(training)
        loss = recipe.loss
        if dict(loss.terms) != {"ce": 1.0} or recipe.draft_vocab:
            asked = f"recipe.loss.terms: {dict(loss.terms)}, recipe.draft_vocab: {recipe.draft_vocab}"
            raise ParityError(asked, "SpecForge's DFlash has ce over all tokens", "declare that")
        # Its draft model from the declared configuration, seeded; then its training model around the target's two ends.
        config = Qwen3Config(**target.zlab_config())
        config._attn_implementation = "sdpa"
        with torch.random.fork_rng():
            torch.manual_seed(training.run.seed)
            drafter = draft.DFlashDraftModel(config)
        model = family.OnlineDFlashModel(
            draft_model=drafter,
            target_lm_head=copy_weight(
                nn.Linear(target.width, target.vocabulary, bias=False), target.parts.head
            ),
            target_embed_tokens=copy_weight(
                nn.Embedding(target.vocabulary, target.width), target.parts.embed
            ),
            mask_token_id=recipe.block.mask_token_id,
            block_size=recipe.block.size,
            attention_backend="sdpa",
            num_anchors=recipe.block.anchors,
            loss_decay_gamma=loss.weights.gamma,
            loss_type="dpace" if loss.weights.kind == "dpace" else "dflash",
            dpace_alpha=0.5 if loss.weights.alpha is None else loss.weights.alpha,
        )
        return cls(target, base.DFlashTrainStrategy(model.to(target.parts.embed.dtype)))

    # --- required -------------------------------------------------------------------------------------

    def step(
        self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int, training: bool
    ) -> AdapterStep:
        """The strategy's loss with these anchors in place of `_sample_anchor_positions`."""
        rows = _Rows(batch)
        before = self.model.training
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model.train(training)
            try:
                seen, loss = self._forward(rows, states, anchors)
            finally:
                self.model.train(before)
        # Back from its padded rows [rows, longest, ...] to the packed row.
        row, place = rows.at(anchors)
        at = rows.numbers(anchors)
        labels, weights = (torch.cat(seen[name], dim=1)[at] for name in ("labels", "weights"))
        return AdapterStep(
            loss=loss,
            hidden=seen["hidden"],
            head=self.model.lm_head.weight,
            anchors=rows.start[row] + place,
            fc_input=rows.pack(seen["fc"]),
            labels=torch.where(weights > 0, labels, torch.full_like(labels, -1)),
        )

    def _forward(self, rows: "_Rows", states: Tensor, anchors: Tensor) -> tuple[dict[str, Any], Tensor]:
        """What the forward used on its way, and its loss. The model's methods are replaced for the time of one call."""
        from specforge.runtime.contracts import TrainBatch

        model, seen = self.model, dict[str, Any](labels=[], weights=[])
        draft, terms = model._forward_draft_blocks, model._dflash_objective_chunk_terms

        def keep_hidden(*args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
            places, keep, hidden = draft(*args, **kwargs)
            blocks = hidden.view(*places.shape, self.recipe.block.size, -1)
            at = rows.numbers(anchors)
            seen["hidden"] = blocks[at]  # and back, so that the loss is made from what is shown
            return places, keep, blocks.index_put(at, seen["hidden"]).view(hidden.shape)

        def keep_labels(hidden: Tensor, labels: Tensor, weights: Tensor) -> object:
            seen["labels"].append(labels)
            seen["weights"].append(weights)
            return terms(hidden, labels, weights)

        hook = model.draft_model.fc.register_forward_pre_hook(lambda _, args: seen.update(fc=args[0]))
        model._sample_anchor_positions = lambda *_, **__: rows.blocks(anchors)
        model._forward_draft_blocks, model._dflash_objective_chunk_terms = keep_hidden, keep_labels
        try:
            tensors = self._batch(rows, states)
            batch = TrainBatch(
                sample_ids=[str(n) for n in range(len(rows))], strategy="dflash", tensors=tensors
            )
            loss = self.strategy.forward_loss(batch).loss
        finally:
            hook.remove()
            for name in ("sample_anchor_positions", "forward_draft_blocks", "dflash_objective_chunk_terms"):
                delattr(model, f"_{name}")
        # Copies, since backward runs the chunks again and would add to the lists.
        seen["labels"], seen["weights"] = list(seen["labels"]), list(seen["weights"])
        return seen, loss

    def _batch(self, rows: "_Rows", states: Tensor) -> dict[str, Tensor]:
        """Features [rows, longest, ...] by its own normaliser and collator."""
        from specforge.algorithms.common import dflash_family_data as data

        features = []
        for span in rows.spans:
            raw = {
                "input_ids": rows.batch.tokens[span],
                "loss_mask": rows.batch.loss_mask[span].long(),
                "hidden_states": states[span].flatten(1),
            }
            features.append(data.normalize_offline_sample(raw, max_len=rows.longest))
        made: dict[str, Tensor] = data.build_collator()(features)
        return made

    def parameters(self) -> Mapping[str, Tensor]:
        """The draft model's by z-lab's names, and the target's two ends."""
        shared = {
            "embed_tokens.weight": self.model.embed_tokens.weight,
            "lm_head.weight": self.model.lm_head.weight,
        }
        return dict(self.model.draft_model.named_parameters()) | shared

    # --- optional -------------------------------------------------------------------------------------

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        """`_sample_anchor_positions`, from the global generator seeded by (seed, epoch)."""
        rows = _Rows(batch)
        mask = rows.pad(batch.loss_mask.long()[:, None])[..., 0]
        with torch.random.fork_rng():
            torch.manual_seed(seed * 1_000_003 + epoch)
            anchors, keep = self.model._sample_anchor_positions(rows.longest, mask, mask.device)
        drawn: Tensor = (rows.start[:, None] + anchors)[keep]
        return drawn.sort().values

    def capture(self, batch: Batch) -> Tensor:
        """SGLang's business."""
        raise NotExposed("capture (SGLang makes its states: hold its .ckpt files against a capture of ours)")

    def optimizer(self) -> torch.optim.Optimizer:
        """The AdamW inside its BF16Optimizer, over fp32 copies of the parameters."""
        raise NotExposed("optimizer (its BF16Optimizer trains fp32 copies: membership says nothing)")

    def update(self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int) -> None:
        """Backward and a step of its own optimizer, made anew each time so that nothing of it is left."""
        from specforge.optimizer import BF16Optimizer

        part = self.target.training.run.optimizer
        own = BF16Optimizer(
            self.model.draft_model, lr=part.lr, max_grad_norm=part.clip or 0.5, warmup_ratio=0.0
        )
        self.step(batch, states, anchors=anchors, seed=seed, training=True).loss.backward()
        own.step()

    def run(self, folder: Path, until: int) -> Sequence[float]:
        """Not without its distributed set-up."""
        raise NotExposed("run (its controller expects torch.distributed and NCCL)")

    def export(self, folder: Path) -> str:
        """Its export's two lines: `save_pretrained`, then both rope schemas."""
        from specforge.export.checkpoint_io import apply_legacy_rope_scaling

        self.model.draft_model.save_pretrained(str(folder))
        apply_legacy_rope_scaling(str(folder))
        return "zlab"

    def tokenize(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], Sequence[bool]]:
        """Its parsers are bound to named templates."""
        raise NotExposed("tokenize (its parsers know templates by name, and not this target's)")


class _Rows:
    """A packed row as SpecForge has it: one row a document, padded on the right."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.spans = [span for _, span in batch.spans()]
        self.start = torch.tensor([span.start for span in self.spans])
        self.longest = max(span.stop - span.start for span in self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def at(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row and place within it of token indices [A]."""
        row = self.batch.document[tokens]
        return row, tokens - self.start[row]

    def numbers(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each anchor [A], and which of the row's blocks it is."""
        row, _ = self.at(anchors)
        return row, torch.tensor([int((row[:index] == row[index]).sum()) for index in range(len(row))])

    def pad(self, values: Tensor) -> Tensor:
        """[S, F] -> [rows, longest, F], zeros behind each document."""
        out = values.new_zeros(len(self), self.longest, values.shape[1])
        for row, span in enumerate(self.spans):
            out[row, : span.stop - span.start] = values[span]
        return out

    def pack(self, values: Tensor) -> Tensor:
        """[rows, longest, F] -> [S, F], in the graph."""
        parts = [values[row, : span.stop - span.start] for row, span in enumerate(self.spans)]
        joined = torch.cat(parts)
        return nn.functional.pad(joined, (0, 0, 0, len(self.batch.tokens) - len(joined)))

    def blocks(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Anchors as its sampler gives them: places [rows, widest], and which of them are there."""
        row, place = self.at(anchors)
        counts = torch.bincount(row, minlength=len(self))
        keep = torch.arange(int(counts.max())) < counts[:, None]
        places = torch.zeros(keep.shape, dtype=torch.long)
        places[keep] = place  # by row, then in the order of `anchors`, which rise
        return places, keep


def _imports() -> tuple[Any, Any, Any]:
    """Its draft model, training model and strategies. Raises ParityError where it is not installed."""
    try:
        from specforge.algorithms.common import dflash_family_model as family
        from specforge.modeling.draft import dflash as draft
        from specforge.training.strategies import base
    except ImportError as error:
        do = "install it without its dependencies: make peers"
        raise ParityError("the adapter for SpecForge 0.2.0", str(error), do) from error
    return draft, family, base
