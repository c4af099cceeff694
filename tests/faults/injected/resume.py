"""Faults of saving and going on, in the built-in trainer's own loop."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep, new_drafter
from parity.model.training.data import Batch, StreamPosition
from parity.model.training.trainer import Trainer
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import InjectedFault, builtin


class MomentsLost(Trainer):
    """A checkpoint without the optimizer."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        self.optimizer.state.clear()


class CounterLost(Trainer):
    """Moments are there, the number of steps by which they are corrected is not."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        for state in self.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])


class ScheduleRestarts(Trainer):
    """The learning rate warms up again."""

    resumed_at = 0

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        self.resumed_at = self.step_number

    def update(self) -> dict[str, Any]:
        self.step_number -= self.resumed_at
        try:
            record = super().update()
        finally:
            self.step_number += self.resumed_at
        return record | {"step": self.step_number}


class DataRestarts(Trainer):
    """The data begin anew."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        self.feed.position = StreamPosition()


class RowSkipped(Trainer):
    """One row is passed over."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        if self.step_number:
            next(self.feed)


class WeightsLost(Trainer):
    """The drafter is new, everything else goes on."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        fresh = new_drafter(self.training, self.parts)
        self.drafter.load_state_dict(fresh.state_dict())


class WeightsRounded(Trainer):
    """Masters are saved in bfloat16."""

    def _resume(self, out: Path) -> None:
        super()._resume(out)
        if self.step_number:
            with torch.no_grad():
                for parameter in self.drafter.parameters():
                    parameter.copy_(parameter.to(torch.bfloat16))


class NeverResumes(Trainer):
    """Checkpoints are written and not read."""

    def _resume(self, out: Path) -> None:
        return


class CountedAnchors(TrainingStep):
    """Anchors from a generator that lives as long as the process: a count that no checkpoint holds."""

    drawn = 0

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        self.drawn += 1
        return super().anchors(batch, seed + self.drawn)


class RandomStateLost(Trainer):
    """Its anchors are counted anew."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wiring = CountedAnchors(self.training, self.parts, self.drafter)


class NeverSeeded(Trainer):
    """Anchors that no seed decides."""

    count = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        type(self).count += 1
        self.wiring = CountedAnchors(self.training, self.parts, self.drafter)
        self.wiring.drawn = 1000 * type(self).count


def _fault(name: str, deviation: str, trainer: type[Trainer]) -> InjectedFault:
    def then(adapter: Builtin) -> None:
        adapter.trainer.__class__ = trainer

    return InjectedFault(
        name=name,
        trainer="builtin",
        deviation=deviation,
        probe="resume",
        build=lambda: builtin({"recipe.block.anchors": 4}, then=then),
    )


FAULTS = (
    _fault("moments lost", "resume-optimizer", MomentsLost),
    _fault("moments' counter lost", "resume-optimizer", CounterLost),
    _fault("the schedule restarts", "resume-schedule", ScheduleRestarts),
    _fault("the data restart", "resume-data", DataRestarts),
    _fault("one row is passed over", "resume-data", RowSkipped),
    _fault("weights lost", "resume-weights", WeightsLost),
    _fault("weights rounded to bfloat16", "resume-weights", WeightsRounded),
    _fault("checkpoints are never read", "resume-restart", NeverResumes),
    _fault("the anchors' random state is lost", "resume-random", RandomStateLost),
    _fault("the anchors are never seeded", "run-not-deterministic", NeverSeeded),
)
