"""Faults of labels in the built-in trainer: another token, another document, masked tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels, blocks_at
from parity.model.training.data import Batch
from parity.model.training.loss import TeacherStates
from tests.faults.wiring import inject_fault


def teacher_shifted(by: int) -> type[TrainingStep]:
    """The teacher's state of another token: 1 is the slot's own, speculators' `sample_from_anchor` mistaken."""

    class Shifted(TrainingStep):
        def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
            made = super().teacher(state, blocks)
            assert made is not None
            return replace(made, index=(made.index + by).clamp(0, len(made.states) - 1))

    return Shifted


def data_shifted(by: int) -> type[TrainingStep]:
    """The data token of the next slot: a loader that already shifted labels."""

    class Shifted(TrainingStep):
        def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
            made = super().blocks(batch, anchors)
            index = (made.index + by).clamp(0, len(batch.tokens) - 1)
            return replace(made, labels=torch.where(made.supervised, batch.tokens[index], made.labels))

    return Shifted


class Reblocked(TrainingStep):
    """Blocks made from a changed row."""

    def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
        return super().blocks(self.seen(batch), anchors)

    def seen(self, batch: Batch) -> Batch:
        raise NotImplementedError


class Crossing(Reblocked):
    """Labels do not end where the anchor's document ends."""

    def seen(self, batch: Batch) -> Batch:
        return replace(batch, document=torch.where(batch.document >= 0, 0, batch.document))


class OneCrosses(Reblocked):
    """Only the first document's blocks go on into the second."""

    def seen(self, batch: Batch) -> Batch:
        return replace(batch, document=torch.where(batch.document == 1, 0, batch.document))


class IntoPadding(Reblocked):
    """Padding is trained as if it were the last document's."""

    def seen(self, batch: Batch) -> Batch:
        padding = batch.document < 0
        document = torch.where(padding, batch.document.max(), batch.document)
        return replace(batch, document=document, loss_mask=batch.loss_mask | padding)


class NoMask(Reblocked):
    """The loss mask is never looked at: prompts and holes are trained."""

    def seen(self, batch: Batch) -> Batch:
        return replace(batch, loss_mask=batch.document >= 0)


class LateMask(Reblocked):
    """The loss mask of the token before (SpecForge#885)."""

    def seen(self, batch: Batch) -> Batch:
        return replace(batch, loss_mask=batch.loss_mask.roll(1))


def holes(past: bool) -> type[TrainingStep]:
    """Slots behind a hole, trained or not, whatever the recipe says."""

    class Holes(TrainingStep):
        def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
            size = self.recipe.block.size
            return blocks_at(anchors, batch.tokens, batch.loss_mask, batch.document, size, past_holes=past)

    return Holes


class NoLastSlot(TrainingStep):
    """An off-by-one leaves the last slot untrained."""

    def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
        made = super().blocks(batch, anchors)
        supervised = made.supervised.clone()
        supervised[:, -1] = False
        return replace(made, supervised=supervised)


class FromData(TrainingStep):
    """The data's tokens where the teacher's argmax is declared (speculators#818 the other way round)."""

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        return blocks.labels


class FromTeacher(TrainingStep):
    """The teacher's argmax where the data's tokens are declared."""

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        assert teacher is not None
        best = (teacher.states[teacher.index] @ teacher.head.T).argmax(-1)
        return torch.where(blocks.supervised, best, torch.full_like(best, -1))


class OtherBlocks(TrainingStep):
    """Labels of the blocks in reverse order: a gather along a sorted list of anchors."""

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        made = super().labels(blocks, teacher)
        return torch.where((made >= 0) & (made.flip(0) >= 0), made.flip(0), made)


class Unmapped(TrainingStep):
    """Target ids become labels of a reduced vocabulary as they are."""

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        return torch.where(
            blocks.supervised, blocks.labels % len(self.head), torch.full_like(blocks.labels, -1)
        )


DATA: dict[str, Any] = {"recipe.labels": "data", "recipe.teacher": None}
BOTH: dict[str, Any] = {"recipe.labels": "data", "recipe.loss.terms": {"ce": 0.5, "kl": 0.5}}
KL: dict[str, Any] = {"recipe.loss.terms": {"kl": 1.0}, "recipe.labels": "teacher_distribution"}
KEPT: dict[str, Any] = {"recipe.block.past_holes": False}
BLOCK8: dict[str, Any] = {"recipe.block.size": 8}


_fault = partial(inject_fault, "labels")


FAULTS = (
    _fault("the teacher's state at the slot, not before it", "label-offset", teacher_shifted(1)),
    _fault("the teacher's state two before the slot", "label-offset", teacher_shifted(-1), BLOCK8),
    _fault("the teacher's distribution one late", "label-offset", teacher_shifted(1), KL),
    _fault("data labels shifted twice", "label-offset", data_shifted(1), DATA),
    _fault("labels cross documents", "label-documents", Crossing),
    _fault("labels cross documents, from the data", "label-documents", Crossing, DATA | BLOCK8),
    _fault("one document's labels cross", "label-documents", OneCrosses, BLOCK8),
    _fault("padding is trained", "label-padding", IntoPadding),
    _fault("the loss mask is not looked at", "label-prompt", NoMask),
    _fault("the loss mask one token late", "label-prompt", LateMask, BLOCK8),
    _fault("slots behind holes left out", "label-holes", holes(False), BLOCK8),
    _fault("slots behind holes trained", "label-holes", holes(True), KEPT | BLOCK8),
    _fault("the last slot never trained", "label-missing", NoLastSlot),
    _fault("data labels where the argmax is declared", "label-source", FromData),
    _fault("argmax labels where data is declared", "label-source", FromTeacher, BOTH),
    _fault("labels of other blocks", "label-unknown", OtherBlocks),
    _fault(
        "unmapped ids in a reduced vocabulary",
        "label-vocabulary",
        Unmapped,
        DATA | {"recipe.draft_vocab": {"size": 40}},
    ),
)
