"""Losses of distillation, and heads that are not the target's, in the built-in trainer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.training.anchors import BlockLabels
from parity.model.training.loss import TeacherStates
from parity.probes.adapters.builtin import Builtin
from tests.faults.injected.loss import BF16, BLOCK8, KL, Plain
from tests.faults.wiring import inject_fault


def distilled(
    *, squared: bool = True, heat: float | None = None, part: str = "kl", by: float = 1.0
) -> type[Plain]:
    """The declared terms, `part` of the soft ones times the temperature squared, as Hinton et al. write it.

    heat: of the logits and the square, instead of the declared one. by: a further factor on the whole loss."""

    class Distilled(Plain):
        def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
            assert soft is not None
            loss = self.recipe.loss
            hot = loss.temperature if heat is None else heat
            log_p, log_q = ((each / hot).log_softmax(-1) for each in (soft, logits))
            p, q = log_p.exp(), log_q.exp()
            values = {
                "ce": -logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1),
                "kl": (p * (log_p - log_q)).sum(-1),
                "rkl": (q * (log_q - log_p)).sum(-1),
                "tv": (p - q).abs().sum(-1) / 2,
            }
            scale = {
                name: hot**2 if squared and name != "ce" and part in (name, "all") else 1.0 for name in values
            }
            return by * sum(factor * scale[name] * values[name] for name, factor in loss.terms.items())  # type: ignore[return-value]

        def denominator(self, weights: Tensor, on: Tensor, samples: int) -> Tensor:
            means = self.loss_config.reduction == "mask_mean"
            return on.sum().to(weights) if means else super().denominator(weights, on, samples)

    return Distilled


class OwnHead(Plain):
    """The draft's logits come from a head of the drafter's own, the teacher's from the target's."""

    shows = True
    """Whether the step hands out the head that it uses, or the target's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own, self.of_target = self.head, self.head

    def begin(self, drift: float, trains: bool) -> None:
        """The target's rows, moved by `drift` of their size; by more than 1: rows of nothing but chance."""
        rows = self.of_target.float()
        noise = (
            torch.randn(rows.shape, generator=torch.Generator().manual_seed(4)) * rows.square().mean().sqrt()
        )
        moved = (noise if drift > 1 else rows + drift * noise).to(self.of_target)
        self.own = torch.nn.Parameter(moved, requires_grad=trains)
        self.drafter.register_parameter("own_head", self.own)
        self.head = self.own if self.shows else self.of_target

    def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
        made = super().teacher(state, blocks)
        return None if made is None else replace(made, head=self.of_target)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.own) @ self.own.T).float()

    def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        if "kl" not in self.recipe.loss.terms:
            return super().value(logits, labels, soft)
        assert soft is not None
        log_p, log_q = soft.float().log_softmax(-1), logits.log_softmax(-1)
        kl: Tensor = (log_p.exp() * (log_p - log_q)).sum(-1)
        return kl


class Hidden(OwnHead):
    shows = False


def own_head(drift: float, *, trains: bool = True) -> Callable[[Builtin], None]:
    """Gives an `OwnHead` its rows, see `OwnHead.begin`."""

    def then(adapter: Builtin) -> None:
        wiring = adapter.trainer.wiring
        assert isinstance(wiring, OwnHead)
        wiring.begin(drift, trains)

    return then


def _mixed(heat: float, **terms: float) -> dict[str, Any]:
    return {"recipe.loss.terms": terms, "recipe.loss.temperature": heat}


def _soft(heat: float, **terms: float) -> dict[str, Any]:
    return _mixed(heat, **terms) | {"recipe.labels": "teacher_distribution"}


_fault = partial(inject_fault, "loss")


DATA: dict[str, Any] = {"recipe.labels": "data", "recipe.teacher": None}
REDUCED: dict[str, Any] = {"recipe.draft_vocab": {"size": 40}}
HEAD = "loss-head"
SQUARED = "loss-temperature-squared"
FAULTS = (
    _fault("CE and KL times T^2 = 4", SQUARED, distilled(), _mixed(2.0, ce=0.3, kl=0.7)),
    _fault("CE and KL times T^2 = 1.21", SQUARED, distilled(), _mixed(1.1, ce=0.5, kl=0.5)),
    _fault("CE and KL times T^2 = 16", SQUARED, distilled(), _mixed(4.0, ce=0.5, kl=0.5) | BLOCK8),
    _fault("CE and KL times T^2 = 1/4", SQUARED, distilled(), _mixed(0.5, ce=0.5, kl=0.5)),
    _fault("KL alone times T^2 = 4", SQUARED, distilled(), _soft(2.0, kl=1.0)),
    _fault(
        "KL alone times T^2 = 9, mean over trained slots",
        SQUARED,
        distilled(),
        _soft(3.0, kl=1.0) | {"recipe.loss.reduction": "mask_mean"},
    ),
    _fault(
        "CE and KL times T^2 = 4, in bf16", SQUARED, distilled(), _mixed(2.0, ce=0.3, kl=0.7) | BF16 | BLOCK8
    ),
    _fault("KL alone times T^2 = 4, in bf16", SQUARED, distilled(), _soft(2.0, kl=1.0) | BF16 | BLOCK8),
    _fault(
        "CE, KL and reverse KL, both times T^2 = 4",
        SQUARED,
        distilled(part="all"),
        _mixed(2.0, ce=0.4, kl=0.3, rkl=0.3),
    ),
    _fault(
        "CE, KL and reverse KL, KL alone times T^2 = 4",
        SQUARED,
        distilled(),
        _mixed(2.0, ce=0.4, kl=0.3, rkl=0.3),
    ),
    _fault(
        "KL and total variation, KL alone times T^2 = 4", SQUARED, distilled(), _soft(2.0, kl=0.5, tv=0.5)
    ),
    _fault(
        "T 2 and T^2 where 1 is declared",
        "loss-temperature",
        distilled(heat=2.0),
        _mixed(1.0, ce=0.3, kl=0.7),
    ),
    _fault(
        "KL alone, T 1.5 and T^2 where 1 is declared",
        "loss-temperature",
        distilled(heat=1.5),
        _soft(1.0, kl=1.0),
    ),
    _fault("an own head, drifted by 10 %", HEAD, OwnHead, {}, own_head(0.1)),
    _fault("an own head, drifted by .1 %", HEAD, OwnHead, BLOCK8, own_head(0.001)),
    _fault("an own head that begins as the target's and trains", HEAD, OwnHead, {}, own_head(0.0)),
    _fault("an own head from chance, frozen", HEAD, OwnHead, {}, own_head(2.0, trains=False)),
    _fault("an own head, drifted by 10 %, KL", HEAD, OwnHead, KL, own_head(0.1)),
    _fault("an own head, drifted by 10 %, data labels", HEAD, OwnHead, DATA, own_head(0.1)),
    _fault("an own head, drifted by 10 %, in bf16", HEAD, OwnHead, BF16 | BLOCK8, own_head(0.1)),
    _fault("an own head of a reduced vocabulary", HEAD, OwnHead, REDUCED, own_head(0.1)),
    _fault("an own head, the target's is shown", HEAD, Hidden, {}, own_head(0.1)),
    _fault(
        "an own head, drifted by 1 %, frozen, the target's is shown",
        HEAD,
        Hidden,
        {},
        own_head(0.01, trains=False),
    ),
    _fault("an own head from chance, KL, the target's is shown", HEAD, Hidden, KL, own_head(2.0)),
)
