"""Faults of noise in the built-in trainer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from tests.faults.wiring import inject_fault


def _noise(like: Tensor, std: float, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like) * std


class OnAllSlices(TrainingStep):
    """Noise on the captured tensor before its last slice is split off: fault 1 of docs/case-study.md."""

    std = 0.05

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        if options["training"]:
            noisy = captured.states + _noise(captured.states, self.std, options["seed"])
            captured = replace(captured, states=noisy)
        return super().step(batch, captured, **options)

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return conditioning


class OnAllSlicesFaint(OnAllSlices):
    """The same, fifty times weaker."""

    std = 0.001


class Undeclared(TrainingStep):
    """Noise that the recipe does not know of."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return conditioning + _noise(conditioning, 0.001, seed)


class Never(TrainingStep):
    """The declared noise is not added."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return conditioning


class HalfWidth(TrainingStep):
    """The declared deviation is taken for the half-width of the uniform noise, which is smaller by sqrt(3)."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return conditioning + (super().add_noise(conditioning, batch, seed) - conditioning) / 3**0.5


class Gaussian(TrainingStep):
    """Another distribution of the same deviation."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return conditioning + _noise(conditioning, self.recipe.noise.std, seed)


class FirstSliceOnly(TrainingStep):
    """One conditioning layer of three gets noise."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        made = conditioning.clone()
        width = self.parts.embed.shape[1]
        made[:, :width] = super().add_noise(conditioning, batch, seed)[:, :width]
        return made


class AlsoInEvaluation(TrainingStep):
    """Noise is never switched off."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        return super().step(batch, captured, **options | {"training": True})


class Unseeded(TrainingStep):
    """Drawn from a generator that nobody seeds again."""

    drawn = 0

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        type(self).drawn += 1
        return super().add_noise(conditioning, batch, seed + type(self).drawn)


UNIFORM = {"recipe.noise": {"kind": "uniform", "std": 0.05}}
GAUSS = {"recipe.noise": {"kind": "gaussian", "std": 0.05}}
FAINT = {"recipe.noise": {"kind": "gaussian", "std": 0.001}}


_fault = partial(inject_fault, "noise")


FAULTS = (
    _fault("noise .05 on the joined tensor, the teacher's slice too", "noise-on-teacher", OnAllSlices, GAUSS),
    _fault("noise .001 on the joined tensor", "noise-on-teacher", OnAllSlicesFaint, FAINT),
    _fault("undeclared noise of .001", "noise-undeclared", Undeclared, {}),
    _fault("declared noise never added", "noise-missing", Never, UNIFORM),
    _fault("declared deviation used as half-width", "noise-std", HalfWidth, UNIFORM),
    _fault("gaussian where uniform is declared", "noise-kind", Gaussian, UNIFORM),
    _fault("noise on the first slice only", "noise-slices", FirstSliceOnly, GAUSS),
    _fault("noise in evaluation too", "noise-in-evaluation", AlsoInEvaluation, UNIFORM),
    _fault("noise from an unseeded generator", "noise-unseeded", Unseeded, UNIFORM),
)
