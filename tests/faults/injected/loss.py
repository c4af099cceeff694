"""Faults of the loss in the built-in trainer: what is minimised, with which weights, divided by what."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.loss import Dpace as DpaceWeights
from parity.model.training.loss import ExpDecay as ExpWeights
from parity.model.training.loss import (
    LossConfig,
    Objective,
    SlotWeighting,
    TeacherStates,
    objective,
    slot_weights,
)
from parity.model.training.loss import Uniform as UniformWeights
from tests.faults.wiring import inject_fault


def configured(**changes: Any) -> type[TrainingStep]:
    """The trainer's own objective with another configuration than the recipe's."""

    class Configured(TrainingStep):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.loss_config: LossConfig = replace(self.loss_config, **changes)

    return Configured


class Plain(TrainingStep):
    """The loss as a user might write it: all logits at once, by autograd; each stage below can be replaced."""

    def objective(
        self,
        hidden: Tensor,
        labels: Tensor,
        blocks: BlockLabels,
        teacher: TeacherStates | None,
        *,
        samples: int,
    ) -> Objective:
        on = self.trained(blocks, labels)
        logits = self.logits(hidden)
        labels = self.chosen(labels, blocks).clamp(min=0)
        soft = None if teacher is None else teacher.states[teacher.index].to(self.head) @ teacher.head.T
        values = self.value(logits, labels, soft)
        weights = self.weight(logits, labels, on)
        total = (values * weights).sum()
        counted = on.sum(0)
        denominator = self.denominator(weights, on, samples)
        return Objective(
            numerator=total,
            denominator=denominator,
            terms={},
            correct=counted,
            counted=counted,
            accepted=total.detach(),
            expected=total.detach(),
            blocks=on.any(1).sum(),
        )

    def trained(self, blocks: BlockLabels, labels: Tensor) -> Tensor:
        return blocks.supervised & (labels >= 0)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.head) @ self.head.T).float()

    def chosen(self, labels: Tensor, blocks: BlockLabels) -> Tensor:
        return labels

    def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        return -logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        chance = logits.softmax(-1).gather(-1, labels[..., None]).squeeze(-1).detach()
        return slot_weights(self.loss_config.weights, on, chance)

    def denominator(self, weights: Tensor, on: Tensor, samples: int) -> Tensor:
        return weights.sum().detach()


def smoothed(amount: float) -> type[TrainingStep]:
    """Label smoothing."""

    class Smoothed(Plain):
        def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
            return (1 - amount) * super().value(logits, labels, soft) - amount * logits.log_softmax(-1).mean(
                -1
            )

    return Smoothed


class Streak(Plain):
    """A slot behind a run of right slots weighs more."""

    gain = 0.5

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        right = (logits.argmax(-1) == labels) & on
        before = torch.ones_like(right)
        before[:, 2:] = right[:, 1:-1].cumprod(1).bool()
        return super().weight(logits, labels, on) * torch.where(before, 1 + self.gain, 1.0)


class CaseStudyLoss(Streak):
    """Fault 3 of docs/case-study.md: 70 % soft KL + 30 % CE, streak-aware weights, gamma 10."""

    def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        assert soft is not None
        p = soft.softmax(-1)
        kl = (p * (p.log() - logits.log_softmax(-1))).sum(-1)
        return 0.7 * kl + 0.3 * super().value(logits, labels, soft)

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        self.loss_config = replace(self.loss_config, weights=ExpWeights(gamma=10.0))
        return super().weight(logits, labels, on)


class RunLength(Plain):
    """The weight grows with the run of right slots just before."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        right, weights = (logits.argmax(-1) == labels) & on, super().weight(logits, labels, on)
        run, made = torch.zeros(len(right)), []
        for slot in range(right.shape[1]):
            made.append(1 + 0.1 * run)
            run = torch.where(right[:, slot] & (slot > 0), run + 1, torch.zeros_like(run))
        return weights * torch.stack(made, 1)


class Hot(Plain):
    """The logits of cross-entropy are divided by a temperature."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / 1.1


class Capped(Plain):
    """The draft's logits are soft-capped, as Gemma's are; serving does not."""

    def logits(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(super().logits(hidden) / 5)


class EntropyBonus(Plain):
    """A term the recipe does not know."""

    def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        log_q = logits.log_softmax(-1)
        return super().value(logits, labels, soft) + 0.01 * (log_q.exp() * log_q).sum(-1)


class DataLabels(Plain):
    """Labels are the data's tokens though the teacher's argmax is declared."""

    def chosen(self, labels: Tensor, blocks: BlockLabels) -> Tensor:
        return blocks.labels


class Attached(Plain):
    """D-PACE whose weights carry a gradient."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        chance = logits.softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return slot_weights(self.loss_config.weights, on, chance)


class Continuation(Plain):
    """SpecForge's dpace-continuation-value-only."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        chance = logits.softmax(-1).gather(-1, labels[..., None]).squeeze(-1).detach()
        smooth = torch.where(on, 0.5 * chance + 0.5, torch.ones_like(chance))
        prefix = smooth.cumprod(1)
        return (prefix * on).flip(1).cumsum(1).flip(1) / prefix * on


class AnchorToo(Plain):
    """Slot 0, whose token is given, is trained like the others."""

    def trained(self, blocks: BlockLabels, labels: Tensor) -> Tensor:
        on = super().trained(blocks, labels).clone()
        on[:, 0] = True
        return on

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        made = super().labels(blocks, teacher)
        assert teacher is not None
        first = (teacher.states[teacher.index[:, 0]] @ teacher.head.T).argmax(-1)
        return torch.cat((first[:, None], made[:, 1:]), dim=1)


class BlockMeans(Plain):
    """The mean over blocks of each block's weighted mean: short blocks weigh as much as whole ones."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        weights = super().weight(logits, labels, on)
        return weights / weights.sum(1, keepdim=True).clamp(min=1e-9)


class AllSlots(Plain):
    """`.mean()` over all slots, the untrained ones included."""

    def denominator(self, weights: Tensor, on: Tensor, samples: int) -> Tensor:
        return torch.tensor(float(on.numel()))


class FromSlotZero(Plain):
    """exp(-k / gamma): DeepSpec's convention, for slots that begin with the anchor's successor."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        return super().weight(logits, labels, on) * torch.exp(torch.tensor(-1 / 4.0))

    def denominator(self, weights: Tensor, on: Tensor, samples: int) -> Tensor:
        return on.sum().to(weights)


class Linear(Plain):
    """Weights that fall linearly."""

    def weight(self, logits: Tensor, labels: Tensor, on: Tensor) -> Tensor:
        return on * torch.linspace(1.25, 0.5, on.shape[1])


class Ordered(TrainingStep):
    """The objective as it is, but sent a detached copy: nothing trains."""

    def objective(self, hidden: Tensor, *args: Any, **options: Any) -> Objective:
        made = objective(hidden.detach(), self.head, args[0], args[1].supervised, self.loss_config)
        return replace(made, numerator=made.numerator + 0 * hidden.sum())


BF16: dict[str, Any] = {"recipe.target.dtype": "bfloat16", "run.precision.autocast": "bfloat16"}
BLOCK8: dict[str, Any] = {"recipe.block.size": 8}
EXP5: SlotWeighting = ExpWeights(gamma=5.0)
DPACE = {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}} | BLOCK8
KL = {"recipe.loss.terms": {"kl": 1.0}, "recipe.labels": "teacher_distribution"}
UNIFORM = {"recipe.loss.weights": {"kind": "uniform"}}
MASK_MEAN = {"recipe.loss.reduction": "mask_mean"}


_fault = partial(inject_fault, "loss")


FAULTS = (
    _fault("gamma 5 where 4 is declared", "loss-gamma", configured(weights=EXP5)),
    _fault(
        "gamma 4.05 where 4 is declared", "loss-gamma", configured(weights=ExpWeights(gamma=4.05)), BLOCK8
    ),
    _fault("1 % KL in the mix", "loss-terms", configured(terms={"ce": 0.99, "kl": 0.01})),
    _fault(
        "1 % KL in the mix, in bf16", "loss-terms", configured(terms={"ce": 0.99, "kl": 0.01}), BF16 | BLOCK8
    ),
    _fault("gamma 5 where 4 is declared, in bf16", "loss-gamma", configured(weights=EXP5), BF16 | BLOCK8),
    _fault("1 % reverse KL in the mix", "loss-terms", configured(terms={"ce": 0.99, "rkl": 0.01}), BLOCK8),
    _fault("30 % total variation in the mix", "loss-terms", configured(terms={"ce": 0.7, "tv": 0.3})),
    _fault("reverse KL where KL is declared", "loss-terms", configured(terms={"rkl": 1.0}), KL),
    _fault("hard CE where KL is declared", "loss-terms", configured(terms={"ce": 1.0}), KL),
    _fault("1 % label smoothing", "loss-smoothing", smoothed(0.01)),
    _fault("0.2 % label smoothing", "loss-smoothing", smoothed(0.002)),
    _fault("70 % KL, 30 % CE, streak-aware weights, gamma 10", "loss-terms", CaseStudyLoss, BLOCK8),
    _fault("weights 1.5 times as large behind right slots", "loss-streak", Streak, BLOCK8),
    _fault("weights that grow with the run of right slots", "loss-streak", RunLength, BLOCK8),
    _fault("temperature 1.1 of the divergence", "loss-temperature", configured(temperature=1.1), KL),
    _fault("temperature 1.1 of cross-entropy", "loss-temperature", Hot),
    _fault("logits soft-capped at 5", "loss-unrecognised", Capped),
    _fault("an entropy bonus of 1 %", "loss-unrecognised", EntropyBonus),
    _fault("labels from the data", "loss-label-source", DataLabels),
    _fault(
        "alpha .45 where .5 is declared", "loss-alpha", configured(weights=DpaceWeights(alpha=0.45)), DPACE
    ),
    _fault("alpha .5 and the weights attached", "loss-weights-attached", Attached, DPACE),
    _fault("D-PACE's continuation alone", "loss-weights", Continuation, DPACE),
    _fault("exponential weights where D-PACE is declared", "loss-weights", configured(weights=EXP5), DPACE),
    _fault("uniform weights where gamma 4 is declared", "loss-weights", configured(weights=UniformWeights())),
    _fault("weights that fall linearly", "loss-weights", Linear, BLOCK8),
    _fault("slot 0 trained", "loss-slot0", AnchorToo),
    _fault("mean over trained slots", "loss-reduction", configured(reduction="mask_mean")),
    _fault("sum over samples", "loss-reduction", configured(reduction="batch_mean"), UNIFORM),
    _fault("mean over blocks of their means", "loss-reduction", BlockMeans, BLOCK8),
    _fault("divided by all slots", "loss-reduction", AllSlots, MASK_MEAN),
    _fault("exp(-k / gamma) over trained slots", "loss-reduction", FromSlotZero, MASK_MEAN),
    _fault("hidden states detached before the loss", "loss-none", Ordered),
)
