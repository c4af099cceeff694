"""The trainer of docs/case-study.md, its three faults at once, as an adapter for `parity check`."""

from typing import Any

from parity.model.recipe.config import TrainingFile
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from parity.probes.adapters.builtin import Builtin
from tests.faults.injected.inputs import AllSlices, wider
from tests.faults.injected.loss import CaseStudyLoss
from tests.faults.injected.noise import OnAllSlices


class Faulty(OnAllSlices, AllSlices, CaseStudyLoss):
    """Noise before the last slice is split off; all slices into fc; 70 % KL + 30 % CE with streaks and gamma 10."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        return super().step(batch, captured, **options)


class CaseStudy(Builtin):
    """The built-in trainer with that step."""

    name = "the case study's trainer"

    @classmethod
    def open(cls, training: TrainingFile, documents: Any = None) -> "CaseStudy":
        adapter = super().open(training, documents)
        assert isinstance(adapter, CaseStudy)
        adapter.trainer.wiring.__class__ = Faulty
        wider(adapter)
        adapter.trainer.parameters = dict(adapter.trainer.drafter.named_parameters())
        adapter.trainer.optimizer = adapter.trainer._new_optimizer()
        return adapter
