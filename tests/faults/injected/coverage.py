"""Faults of the draw of anchors in the built-in trainer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from tests.faults.wiring import inject_fault


class RowBudget(TrainingStep):
    """The budget is the row's: speculators#1071."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        drawn = super().anchors(batch, seed)
        order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed + batch.epoch))
        return drawn[order[: self.recipe.block.anchors]].sort().values


class FirstDocuments(TrainingStep):
    """The row's budget is spent from the left."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        return super().anchors(batch, seed)[: 2 * self.recipe.block.anchors]


class NoMask(TrainingStep):
    """Prompts are drawn from, too."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        return super().anchors(replace(batch, loss_mask=batch.document >= 0), seed)


class Padding(TrainingStep):
    """Padding is drawn from as if it were a document's end."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        last = batch.document.max()
        document = torch.where(batch.document < 0, last, batch.document)
        return super().anchors(
            replace(batch, document=document, loss_mask=batch.loss_mask | (batch.document < 0)), seed
        )


class Frozen(TrainingStep):
    """The epoch does not enter the draw."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        return super().anchors(replace(batch, epoch=0), seed)


class Unseeded(TrainingStep):
    """Another draw at every call."""

    calls = 0

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        type(self).calls += 1
        return super().anchors(batch, seed + type(self).calls)


class Twice(TrainingStep):
    """Drawn with replacement."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        drawn = super().anchors(batch, seed)
        return torch.cat((drawn, drawn[:2])).sort().values


class Beginnings(TrainingStep):
    """Only the first tokens of a document are ever drawn: a sorted list that is cut short."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        early = torch.zeros_like(batch.loss_mask)
        for _, span in batch.spans():
            mask = batch.loss_mask[span]
            early[span] = mask & (mask.cumsum(0) <= self.recipe.block.anchors + 4)
        return super().anchors(replace(batch, loss_mask=early), seed)


class NoBudget(TrainingStep):
    """Every candidate is an anchor."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.anchor_config = replace(self.anchor_config, budget=512)


class Half(TrainingStep):
    """Half of the declared number."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.anchor_config = replace(self.anchor_config, budget=self.recipe.block.anchors // 2)


_fault = partial(inject_fault, "coverage")


FAULTS = (
    _fault("one budget for the row", "anchors-starved", RowBudget),
    _fault("the row's budget spent from the left", "anchors-starved", FirstDocuments),
    _fault("half of the declared anchors", "anchors-starved", Half, {"recipe.block.anchors": 32}),
    _fault("anchors in prompts", "anchors-masked", NoMask),
    _fault("anchors on padding", "anchors-padding", Padding),
    _fault("the same anchors in every epoch", "anchors-frozen", Frozen),
    _fault("anchors from an unseeded generator", "anchors-unseeded", Unseeded),
    _fault("anchors drawn twice", "anchors-repeated", Twice),
    _fault(
        "anchors at the beginning of documents only", "anchors-uneven", Beginnings, {"recipe.block.size": 8}
    ),
    _fault("no budget", "anchors-budget", NoBudget),
)
