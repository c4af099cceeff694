"""Noise behind fc's input beside the declared noise, and draws that are shared, in the built-in trainer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parity.model.dflash.mask import BlockLayout
from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from tests.faults.injected.noise import FAINT, GAUSS, UNIFORM
from tests.faults.wiring import inject_fault


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Seeded(TrainingStep):
    """Keeps the step's seed for the stages that are not given it; None in evaluation."""

    now: int | None = None

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        self.now = options["seed"] + 1000 if options["training"] else None
        return super().step(batch, captured, **options)


def fc_output(std: float) -> type[TrainingStep]:
    """Noise on what fc makes, before it is normed, of `std` times its size."""

    class Output(Seeded):
        def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
            def added(_: Any, __: Any, out: Tensor) -> Tensor:
                size = out.detach().square().mean().sqrt()
                return (
                    out if self.now is None else out + _drawn(tuple(out.shape), self.now).to(out) * std * size
                )

            hook = self.drafter.fc.register_forward_hook(added)
            try:
                return super().draft(fc_input, embeddings, layout)
            finally:
                hook.remove()

    return Output


def embedded(std: float) -> type[TrainingStep]:
    """Noise on the blocks' embeddings."""

    class Embedded(Seeded):
        def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
            clean = super().embeddings(batch, anchors)
            return clean if self.now is None else clean + _drawn(tuple(clean.shape), self.now).to(clean) * std

    return Embedded


def dropped(share: float) -> type[TrainingStep]:
    """A dropout of what enters the head."""

    class Dropped(Seeded):
        def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
            hidden = super().draft(fc_input, embeddings, layout)
            if self.now is None:
                return hidden
            with torch.random.fork_rng():
                torch.manual_seed(self.now)
                return functional.dropout(hidden, share)

    return Dropped


class EvaluatedToo(TrainingStep):
    """Noise on the blocks' embeddings, in evaluation as well."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        self.now = options["seed"]
        return super().step(batch, captured, **options)

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        clean = super().embeddings(batch, anchors)
        return clean + _drawn(tuple(clean.shape), self.now).to(clean) * 0.01


class Mixed(TrainingStep):
    """The declared amount of noise, a part of its variance from a draw that other places have too."""

    part = 1.0

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        """[S, C, D] of the shared draw, of deviation 1."""
        raise NotImplementedError

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        width = self.parts.embed.shape[1]
        parts = conditioning.unflatten(1, (-1, width))
        own, std = _drawn(tuple(parts.shape), seed + 77), self.recipe.noise.std
        common = self.draw(parts.shape, batch, seed).expand(parts.shape)
        mixed = self.part**0.5 * common + (1 - self.part) ** 0.5 * own
        mixed = torch.where((batch.document >= 0)[:, None, None], mixed, torch.zeros(()))
        return conditioning + (mixed * std).flatten(1).to(conditioning)


class OneForSlices(Mixed):
    """One noise tensor [S, D], added to each slice."""

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        return _drawn((size[0], 1, size[2]), seed)


class PartForSlices(OneForSlices):
    part = 0.3


class Mirrored(OneForSlices):
    """The same with its sign turned in every other slice."""

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        signs = torch.tensor([(-1.0) ** number for number in range(size[1])])
        return super().draw(size, batch, seed) * signs[:, None]


class OneForTokens(Mixed):
    """A draw [C * D] that is broadcast over the tokens."""

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        return _drawn((1, *size[1:]), seed)


class PartForTokens(OneForTokens):
    part = 0.5


class OneForDocuments(Mixed):
    """Every document begins with the same generator."""

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        return _drawn(tuple(size), seed)[batch.position]


class OneForChannels(Mixed):
    """A draw [S, C, 1]: a size that was given as 1."""

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        return _drawn((*size[:2], 1), seed)


class PartForSeeds(Mixed):
    """Half of the noise is the same at every step."""

    part = 0.5

    def draw(self, size: torch.Size, batch: Batch, seed: int) -> Tensor:
        return _drawn(tuple(size), 5)


class EveryOtherSeed(TrainingStep):
    """Two steps have one draw: the seed is halved somewhere."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        return super().add_noise(conditioning, batch, seed // 2)


class OneSided(TrainingStep):
    """rand() without minus one half: as wide as declared around 0, and never below it."""

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        drawn = torch.rand(conditioning.shape, generator=torch.Generator().manual_seed(seed))
        drawn = torch.where((batch.document >= 0)[:, None], drawn, torch.zeros(()))
        return conditioning + (drawn * 3**0.5 * self.recipe.noise.std).to(conditioning)


BF16: dict[str, Any] = {"recipe.target.dtype": "bfloat16", "run.precision.autocast": "bfloat16"}


_fault = partial(inject_fault, "noise")


BEHIND, SHARED = "noise-behind-fc", "noise-shared"
FAULTS = (
    _fault("noise .1 on fc's output beside the declared noise", BEHIND, fc_output(0.1), GAUSS),
    _fault("noise .0001 on fc's output beside uniform noise", BEHIND, fc_output(1e-4), UNIFORM),
    _fault("noise .001 on fc's output beside faint noise", BEHIND, fc_output(1e-3), FAINT),
    _fault(
        "noise .05 on fc's output beside the declared noise, in bf16", BEHIND, fc_output(0.05), GAUSS | BF16
    ),
    _fault("noise .1 on the blocks' embeddings beside the declared noise", BEHIND, embedded(0.1), GAUSS),
    _fault("noise .0001 on the blocks' embeddings beside it", BEHIND, embedded(1e-4), GAUSS),
    _fault("a dropout of 1 % before the head beside the declared noise", BEHIND, dropped(0.01), UNIFORM),
    _fault("a dropout of 10 % before the head, no noise declared", BEHIND, dropped(0.1), {}),
    _fault("noise .0001 on fc's output, none declared", BEHIND, fc_output(1e-4), {}),
    _fault("noise .01 on the embeddings in evaluation too", BEHIND, EvaluatedToo, GAUSS),
    _fault("one noise tensor for all slices", SHARED, OneForSlices, GAUSS),
    _fault("30 % of the noise shared by the slices", SHARED, PartForSlices, GAUSS),
    _fault("one noise tensor, its sign turned in every other slice", SHARED, Mirrored, FAINT),
    _fault("one draw for every token", SHARED, OneForTokens, GAUSS),
    _fault("half of the noise shared by the tokens", SHARED, PartForTokens, GAUSS),
    _fault("one draw for every document", SHARED, OneForDocuments, GAUSS),
    _fault("one draw for every channel of a slice", SHARED, OneForChannels, GAUSS),
    _fault("half of the noise the same under every seed", SHARED, PartForSeeds, GAUSS),
    _fault("one draw for two seeds", SHARED, EveryOtherSeed, UNIFORM),
    _fault("one noise tensor for all slices, in bf16", SHARED, OneForSlices, GAUSS | BF16),
    _fault("uniform noise on one side of 0", "noise-kind", OneSided, UNIFORM),
)
