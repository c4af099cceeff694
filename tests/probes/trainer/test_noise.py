"""Noise where fc's input does not show it, and what is no noise at all."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.noise.draws import find_shared_draws, measure_noise_mean
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.noise import SEEDS
from tests.faults.injected.inputs import fed
from tests.faults.injected.noise_draws import EvaluatedToo, Seeded
from tests.faults.wiring import builtin

DECLARED = {"recipe.noise": {"kind": "gaussian", "std": 0.05}}


class BehindFc(TrainingStep):
    """Noise on the blocks' embeddings: fc's input never moves."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        self.drawn = options["seed"]
        return super().step(batch, captured, **options)

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        clean = super().embeddings(batch, anchors)
        generator = torch.Generator().manual_seed(self.drawn)
        return clean + 0.1 * torch.randn(clean.shape, generator=generator).to(clean)


class SameEverySeed(TrainingStep):
    """The declared noise, drawn from a seed of its own."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return super().add_noise(conditioning, batch, 1)


def asked(wiring: type[TrainingStep], changes: dict[str, Any]) -> ProbeAnswer:
    ((_, answer),) = query_probes(ExaminedAdapter(builtin(changes, wiring)), only=["noise"])
    return answer


def test_noise_behind_fc_is_found() -> None:
    finding = asked(BehindFc, {}).findings[0]
    assert (finding.outcome, finding.fault) == (
        "fail",
        "noise-behind-fc",
    ) and "same input of fc" in finding.sentence


def test_noise_that_ignores_the_seed_leaves_the_question_without_power() -> None:
    finding = asked(SameEverySeed, DECLARED).findings[0]
    assert finding.outcome == "error" and "follows the seed" in finding.sentence


def test_slices_in_another_order_are_no_noise() -> None:
    assert [f.outcome for f in asked(fed(1, 0, 2), {}).findings] == ["pass"]
    assert [f.outcome for f in asked(fed(1, 0, 2), DECLARED).findings] == ["pass"]


def test_noise_that_grows_with_its_state_is_put_in_beforehand() -> None:
    class Growing(TrainingStep):
        def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
            return conditioning + (super().add_noise(conditioning, batch, seed) - conditioning) * conditioning

    answer = asked(Growing, DECLARED)
    assert "behind fc's input nothing moves" in answer.statement.sentence  # type: ignore[union-attr]


def test_a_dropout_of_states_leaves_what_is_behind_untold() -> None:
    class Dropout(TrainingStep):
        def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
            kept = torch.rand(conditioning.shape, generator=torch.Generator().manual_seed(seed)) > 0.1
            return conditioning * kept

    answer = asked(Dropout, DECLARED)
    assert answer.statement is not None and "could not be told" in answer.statement.sentence
    assert "noise-behind-fc" not in [finding.fault for finding in answer.findings]


def test_noise_behind_fc_in_evaluation_is_told() -> None:
    assert [f.fault for f in asked(EvaluatedToo, DECLARED).findings] == [
        "noise-behind-fc",
        "noise-in-evaluation",
    ]


def test_noise_behind_fc_from_a_generator_of_its_own_is_found() -> None:
    class Own(Seeded):
        """Another draw at every step, whatever the seed."""

        generator = torch.Generator().manual_seed(2)

        def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
            clean = super().embeddings(batch, anchors)
            drawn = torch.randn(clean.shape, generator=self.generator).to(clean)
            return clean if self.now is None else clean + 0.01 * drawn

    for changes in ({}, DECLARED):
        assert "noise-behind-fc" in [f.fault for f in asked(Own, changes).findings]


def _rows(kind: str, seed: int) -> Tensor:
    """[4, 12, 3, 16] healthy noise: gaussian, uniform, rounded to a coarse grid, or growing with a state."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(4, 12, 3, 16, generator=generator, dtype=torch.float64)
    if kind == "uniform":
        return torch.rand(drawn.shape, generator=generator, dtype=torch.float64) - 0.5
    if kind == "rounded":
        return drawn.round()
    return drawn * torch.randn(12, 3, 16, generator=generator).exp() if kind == "growing" else drawn


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "rounded", "growing"])
def test_draws_of_their_own_are_hardly_ever_called_shared(kind: str) -> None:
    document, position = torch.arange(12) // 6, torch.arange(12) % 6
    assert [find_shared_draws(_rows(kind, seed), SEEDS, document, position) for seed in range(300)] == [
        []
    ] * 300
    assert not [
        seed for seed in range(300) if abs((each := measure_noise_mean(_rows(kind, seed)))[0]) > each[1]
    ]


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "rounded"])
@pytest.mark.parametrize("over", ["seeds", "tokens", "slices", "channels"])
def test_a_shared_draw_is_named_by_what_shares_it(kind: str, over: str) -> None:
    dim = ["seeds", "tokens", "slices", "channels"].index(over)
    document, position = torch.arange(12) // 6, torch.arange(12) % 6
    for seed in range(10):
        rows = _rows(kind, seed)
        rows = rows.select(dim, 0).unsqueeze(dim).expand(rows.shape)
        found = find_shared_draws(rows, SEEDS, document, position)
        assert found[0].over == over
        assert found[0].correlation == pytest.approx(1)


def test_a_correlation_is_the_textbook_one() -> None:
    rows = _rows("gaussian", 0)
    rows[:, :, 1] = 0.6 * rows[:, :, 0] + 0.8 * rows[:, :, 1]
    document, position = torch.zeros(12, dtype=torch.long), torch.arange(12)
    found = find_shared_draws(rows, SEEDS, document, position)
    a, b = rows[:, :, 0].flatten().numpy(), rows[:, :, 1].flatten().numpy()
    assert [each.over for each in found] == ["slices"]
    assert found[0].correlation == pytest.approx(float((a * b).sum() / ((a**2).sum() * (b**2).sum()) ** 0.5))
