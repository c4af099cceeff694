"""Noise where fc's input does not show it, and what is no noise at all."""

from typing import Any

import torch
from torch import Tensor

from parity.model.data import Batch
from parity.model.states import Captured
from parity.model.step import StepOutput, Wiring
from parity.probes.adapters.asking import Subject, ask
from parity.probes.base import Answer
from tests.faults.plants_inputs import fed
from tests.faults.wiring import builtin

DECLARED = {"recipe.noise": {"kind": "gaussian", "std": 0.05}}


class BehindFc(Wiring):
    """Noise on the blocks' embeddings: fc's input never moves."""

    def step(self, batch: Batch, captured: Captured, **options: Any) -> StepOutput:
        self.drawn = options["seed"]
        return super().step(batch, captured, **options)

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        clean = super().embeddings(batch, anchors)
        generator = torch.Generator().manual_seed(self.drawn)
        return clean + 0.1 * torch.randn(clean.shape, generator=generator).to(clean)


class SameEverySeed(Wiring):
    """The declared noise, drawn from a seed of its own."""

    def noised(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return super().noised(conditioning, batch, 1)


def asked(wiring: type[Wiring], changes: dict[str, Any]) -> Answer:
    ((_, answer),) = ask(Subject(builtin(changes, wiring)), only=["noise"])
    return answer


def test_noise_behind_fc_is_found() -> None:
    finding = asked(BehindFc, {}).findings[0]
    assert (finding.outcome, finding.fault) == (
        "fail",
        "noise-undeclared",
    ) and "behind it" in finding.sentence


def test_noise_that_ignores_the_seed_leaves_the_question_without_power() -> None:
    finding = asked(SameEverySeed, DECLARED).findings[0]
    assert finding.outcome == "error" and "follows the seed" in finding.sentence


def test_slices_in_another_order_are_no_noise() -> None:
    assert [f.outcome for f in asked(fed(1, 0, 2), {}).findings] == ["pass"]
    assert [f.outcome for f in asked(fed(1, 0, 2), DECLARED).findings] == ["pass"]
