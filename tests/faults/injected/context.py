"""Faults of what a block sees, in the built-in trainer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.model.dflash import mask
from parity.model.dflash.config import RopeConfig
from parity.model.dflash.drafter import RMSNorm, Rope
from parity.model.dflash.mask import CONTEXT, BlockLayout, TokenPlaces, VisibilityRule
from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import PADDING, block_ids
from parity.model.training.data import Batch
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import inject_fault

RIGHT = mask.visible


class Seeing(TrainingStep):
    """The step's masks are made by another rule, `sees`, in the layers whose rules it is given."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        raise NotImplementedError

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        with patch.object(mask, "visible", self.sees):
            out: Tensor = self.drafter(fc_input, embeddings, layout, attention="eager")
        return out


def _own(query: TokenPlaces, key: TokenPlaces) -> Tensor:
    return (key.document == query.document) & (key.document != PADDING) & (key.block == CONTEXT)


class AnchorsState(Seeing):
    """`<=` where `<` belongs."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) | (_own(query, key) & (key.position == query.position - query.slot))


class EverythingBehind(Seeing):
    """The mask forgets the anchor."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) | _own(query, key)


class UpToTheSlot(Seeing):
    """Each slot sees the states before itself: the future, for all but slot 0."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) | (_own(query, key) & (key.position < query.position))


class OtherDocuments(Seeing):
    """Documents of a row are not told apart."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        earlier = (key.block == CONTEXT) & (key.document < query.document) & (key.document != PADDING)
        return RIGHT(query, key, rule) | earlier


class OneDocumentsLastToken(Seeing):
    """One document sees one state of the document before it."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        leak = (key.block == CONTEXT) & (key.document == 0) & (query.document == 1) & (key.position == 15)
        return RIGHT(query, key, rule) | leak


class Padding(Seeing):
    """Padding belongs to everyone."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) | ((key.block == CONTEXT) & (key.document == PADDING))


class FirstTokenMissing(Seeing):
    """A document's first state is masked out."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) & ~((key.block == CONTEXT) & (key.position == 0))


class EndsEarly(Seeing):
    """The state right before the anchor is left out."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        last = (key.block == CONTEXT) & (key.position == query.position - query.slot - 1)
        return RIGHT(query, key, rule) & ~last


class OtherBlocks(Seeing):
    """Blocks of a document see each other's slots."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        others = (key.block != CONTEXT) & (key.document == query.document)
        return RIGHT(query, key, rule) | others


class NextBlocksAnchor(Seeing):
    """The block's number is one too high for one slot: it sees the next block's anchor."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return RIGHT(query, key, rule) | (
            (key.block == query.block + 1) & (key.slot == 0) & (query.slot == 1)
        )


class FromTheAnchor(Seeing):
    """A window's lower bound is the anchor's for every slot, as in speculators 0.9.0."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        seen = RIGHT(query, key, replace_rule(rule, window=None))
        if rule.window is None:
            return seen
        low = key.position >= query.position - query.slot - rule.window
        return seen & (low | (key.block != CONTEXT))


class MaskThatIsAdded(Seeing):
    """A bool mask added to the scores: everything is seen (speculators#686)."""

    def sees(self, query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
        return torch.ones_like(RIGHT(query, key, rule))


def replace_rule(rule: VisibilityRule, **changes: Any) -> VisibilityRule:
    """The rule with other values."""
    return replace(rule, **changes)


class SlotsTakeText(TrainingStep):
    """Slot 1 is filled with the token that follows the anchor, not with the mask token."""

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        ids = block_ids(batch.tokens, anchors, self.recipe.block.size, self.recipe.block.mask_token_id)
        ids[:, 1] = batch.tokens[(anchors + 1).clamp(max=len(batch.tokens) - 1)]
        return F.embedding(ids, self.parts.embed).to(self.dtype)


class NoAnchorToken(TrainingStep):
    """Slot 0 is filled with the mask token too."""

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        ids = torch.full((len(anchors), self.recipe.block.size), self.recipe.block.mask_token_id)
        return F.embedding(ids, self.parts.embed).to(self.dtype)


class OtherMaskToken(TrainingStep):
    """A default fills the slots, not the declared mask token (SpecForge#604)."""

    mask = 0

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        ids = block_ids(batch.tokens, anchors, self.recipe.block.size, self.mask)
        return F.embedding(ids, self.parts.embed).to(self.dtype)


class Placed(TrainingStep):
    """Blocks stand at other positions."""

    def placed(self, blocks: TokenPlaces) -> Tensor:
        raise NotImplementedError

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        rope, placed = self.drafter.rope, self.placed(layout.blocks)
        slots = len(layout.blocks)

        def turned(position: Tensor, dtype: torch.dtype) -> Any:
            return rope(
                placed
                if len(position) == slots and torch.equal(position, layout.blocks.position)
                else position,
                dtype,
            )

        self.drafter._modules["rope"] = None
        try:
            self.drafter.__dict__["rope"] = turned
            return super().draft(fc_input, embeddings, layout)
        finally:
            self.drafter.__dict__.pop("rope")
            self.drafter._modules["rope"] = rope


class OneTooHigh(Placed):
    """Slot 0 stands where slot 1 belongs."""

    def placed(self, blocks: TokenPlaces) -> Tensor:
        return blocks.position + 1


class AllAtTheAnchor(Placed):
    """All slots have the anchor's position."""

    def placed(self, blocks: TokenPlaces) -> Tensor:
        return blocks.position - blocks.slot


class NoContextNorm(TrainingStep):
    """fc's output goes into the layers without its norm."""

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        fc = self.drafter.fc
        with patch.object(self.drafter, "condition", lambda states: fc(states)):
            return super().draft(fc_input, embeddings, layout)


def _rules(change: Callable[[int, VisibilityRule], VisibilityRule]) -> Callable[[Builtin], None]:
    """Other rules in the drafter's layers, before anything else is made of them."""

    def inject(adapter: Builtin) -> None:
        config: Any = adapter.trainer.drafter.config
        layers = tuple(change(index, rule) for index, rule in enumerate(config.layers))
        adapter.trainer.drafter.config = replace(config, layers=layers)

    return inject


def _causal(*which: int, causal: bool = True) -> Callable[[Builtin], None]:
    return _rules(lambda index, rule: replace(rule, causal=causal) if index in which else rule)


def _window(change: Callable[[int, int | None], int | None]) -> Callable[[Builtin], None]:
    return _rules(lambda index, rule: replace(rule, window=change(index, rule.window)))


def _rope(rope: RopeConfig) -> Callable[[Builtin], None]:
    def inject(adapter: Builtin) -> None:
        drafter: Any = adapter.trainer.drafter
        drafter.rope = Rope(rope, drafter.config.head_dim)

    return inject


def _epsilon(value: float) -> Callable[[Builtin], None]:
    def inject(adapter: Builtin) -> None:
        for module in adapter.trainer.drafter.modules():
            if isinstance(module, RMSNorm):
                module.eps = value

    return inject


class LargerEmbeddings(TrainingStep):
    """The blocks' embeddings are one percent too large: a fault without a name."""

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        return super().draft(fc_input, embeddings * 1.01, layout)


SLIDING = {"recipe.attention": {"layers": ["sliding", "full"], "window": 6}}
ALL_SLIDE = {"recipe.attention": {"layers": ["sliding", "sliding"], "window": 6}}
BF16 = {"run.precision.autocast": "bfloat16", "recipe.target.dtype": "bfloat16"}

_fault = partial(inject_fault, "context")


FAULTS = (
    _fault("the anchor's own state is seen", "context-anchor", AnchorsState),
    _fault("the mask forgets the anchor", "context-future", EverythingBehind),
    _fault("each slot sees up to itself", "context-future", UpToTheSlot),
    _fault("documents are not told apart", "context-documents", OtherDocuments),
    _fault("one document sees one state of another", "context-documents", OneDocumentsLastToken),
    _fault(
        "one document sees one state of another, bfloat16", "context-documents", OneDocumentsLastToken, BF16
    ),
    _fault("padding is seen", "context-padding", Padding),
    _fault("a bool mask is added", "mask-ignored", MaskThatIsAdded),
    _fault("first state missing", "context-edge", FirstTokenMissing),
    _fault("last state missing", "context-edge", EndsEarly),
    _fault("blocks of a document see each other", "block-other", OtherBlocks),
    _fault("a slot sees the next block's anchor", "block-other", NextBlocksAnchor),
    _fault("slot 1 holds the next token", "block-tokens", SlotsTakeText),
    _fault("slot 0 holds the mask token", "block-anchor", NoAnchorToken),
    _fault("token 0 fills the slots", "mask-token", OtherMaskToken),
    _fault("window counted from the anchor", "window-from", FromTheAnchor, ALL_SLIDE),
    _fault("window counted from the anchor in one layer", "window-from", FromTheAnchor, SLIDING),
    _fault("window of 7 for 6", "window-size", then=_window(lambda _, w: 7), changes=ALL_SLIDE),
    _fault(
        "window of 7 for 6, bfloat16", "window-size", then=_window(lambda _, w: 7), changes=ALL_SLIDE | BF16
    ),
    _fault(
        "window of 5 for 6 in one layer",
        "window-size",
        then=_window(lambda layer, w: 5 if layer == 0 else w),
        changes=ALL_SLIDE,
    ),
    _fault(
        "one sliding layer is full",
        "window-ignored",
        then=_window(lambda layer, w: None if layer == 0 else w),
        changes=ALL_SLIDE,
    ),
    _fault("a full layer slides", "window-undeclared", then=_window(lambda layer, w: w or 8)),
    _fault("one layer of two is causal", "within-block", then=_causal(1)),
    _fault("one layer of two is causal, bfloat16", "within-block", changes=BF16, then=_causal(1)),
    _fault("all layers are causal", "within-block", then=_causal(0, 1)),
    _fault(
        "one causal layer is not",
        "within-block",
        changes={"recipe.block.within": "causal"},
        then=_causal(0, causal=False),
    ),
    _fault("block one position too high", "block-positions", OneTooHigh),
    _fault("block one position too high, bfloat16", "block-positions", OneTooHigh, BF16),
    _fault("all slots at the anchor's position", "block-positions", AllAtTheAnchor),
    _fault("rope base 1e6", "rope-base", then=_rope(RopeConfig(rope_theta=1e6))),
    _fault("half of each head turns", "rope-part", then=_rope(RopeConfig(partial_rotary_factor=0.5))),
    _fault("epsilon 1e-5", "norm-epsilon", then=_epsilon(1e-5)),
    _fault("no norm behind fc", "context-norm", NoContextNorm),
    _fault("embeddings one percent too large", "drafter-not-recognised", LargerEmbeddings),
)
