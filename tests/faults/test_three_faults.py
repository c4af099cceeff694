"""design.md section 1: the three faults that cost a team days, in one trainer, each found and named in one pass."""

from typing import Any

import pytest
from torch import Tensor, nn

from parity.model.data import Batch
from parity.model.states import Captured
from parity.model.step import StepOutput
from parity.probes.adapters.asking import Subject, ask
from parity.probes.adapters.builtin import Builtin
from tests.faults.plants_inputs import AllSlices
from tests.faults.plants_loss import Team
from tests.faults.plants_noise import OnAllSlices
from tests.faults.wiring import builtin


class Theirs(OnAllSlices, AllSlices, Team):
    """Noise before the last slice becomes the labels; every slice into fc; 70 % KL + 30 % CE, streaks, gamma 10."""

    def step(self, batch: Batch, captured: Captured, **options: Any) -> StepOutput:
        return OnAllSlices.step(self, batch, captured, **options)

    def split(self, captured: Captured) -> tuple[Tensor, Tensor | None]:
        return AllSlices.split(self, captured)


def _wider(adapter: Builtin) -> None:
    """An fc for one slice more, with new weights."""
    drafter, width = adapter.trainer.drafter, adapter.width
    drafter.fc = nn.Linear(drafter.fc.in_features + width, width, bias=False)


@pytest.mark.parametrize("preset_name", ["unit", "tiny"])
def test_each_is_named_with_its_numbers(preset_name: str) -> None:
    changes = {"recipe.noise": {"kind": "gaussian", "std": 0.05}, "recipe.block.size": 8}
    adapter = builtin(changes, Theirs, preset_name=preset_name, then=_wider)
    answers = dict(ask(Subject(adapter), only=["noise", "inputs", "loss"]))
    named = {name: [finding.fault for finding in answer.findings] for name, answer in answers.items()}
    assert named["noise"][0] == "noise-on-teacher"
    assert named["inputs"][0] == "fc-teacher"
    assert named["loss"] == ["loss-terms", "loss-streak"]
    statement = answers["loss"].statement
    assert statement is not None
    facts = dict(statement.facts)
    assert facts["loss.share.kl"] == pytest.approx(0.7, abs=1e-3)
    assert facts["loss.gamma"] == pytest.approx(10, abs=0.05)
    sizes = [dict(answers[name].findings[0].evidence) for name in ("noise", "inputs")]
    assert all(any(isinstance(value, float) and value > 0 for value in size.values()) for size in sizes)
