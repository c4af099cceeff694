"""Faults of what enters fc, of what makes the labels, and of the capture, in the built-in trainer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.data import Batch
from parity.model.training.loss import TeacherStates
from parity.model.training.states import StepStates, SyntheticStates
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import inject_fault


class AllSlices(TrainingStep):
    """fc is fed every captured slice: fault 2 of docs/case-study.md."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        _, teacher = super().split_slices(captured)
        return captured.states.flatten(1).to(self.dtype), teacher


def wider(adapter: Builtin) -> None:
    """An fc that takes one slice more."""
    old = adapter.trainer.drafter.fc
    new = nn.Linear(old.in_features + adapter.width, old.out_features, bias=False, dtype=old.weight.dtype)
    with torch.no_grad():
        new.weight.copy_(torch.cat((old.weight, 0.1 * old.weight[:, : adapter.width]), dim=1))
    adapter.trainer.drafter.fc = new


def fed(*order: int) -> type[TrainingStep]:
    """These slices, in this order."""

    class Fed(TrainingStep):
        def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
            _, teacher = super().split_slices(captured)
            return captured.states[:, list(order)].flatten(1).to(self.dtype), teacher

    return Fed


def scaled(slice_: int, by: float) -> type[TrainingStep]:
    """One slice is multiplied by something on its way to fc."""

    class Scaled(TrainingStep):
        def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
            conditioning, teacher = super().split_slices(captured)
            width = captured.states.shape[2]
            factor = torch.ones(conditioning.shape[1])
            factor[slice_ * width : (slice_ + 1) * width] = by
            return conditioning * factor.to(conditioning), teacher

    return Scaled


class Normed(TrainingStep):
    """The final norm is applied to the conditioning states, too."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        conditioning, teacher = super().split_slices(captured)
        parts = conditioning.reshape(len(conditioning), -1, captured.states.shape[2])
        return self.parts.norm(parts).flatten(1).detach(), teacher


def teacher_from(slice_: int) -> type[TrainingStep]:
    """Labels from a conditioning slice."""

    class From(TrainingStep):
        def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
            conditioning, _ = super().split_slices(captured)
            return conditioning, captured.states[:, slice_]

    return From


class TeacherBlend(TrainingStep):
    """A tenth of a conditioning slice leaks into the teacher's."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        conditioning, teacher = super().split_slices(captured)
        assert teacher is not None
        return conditioning, 0.7 * teacher + 0.3 * captured.states[:, 1]


class DataLabels(TrainingStep):
    """Labels are the data's tokens: the teacher's slice is captured for nothing."""

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        return blocks.labels


def zero_columns(adapter: Builtin) -> None:
    """fc never reads its second slice."""
    with torch.no_grad():
        adapter.trainer.drafter.fc.weight[:, adapter.width : 2 * adapter.width] = 0


def capturing(change: Callable[[Batch, Any], Tensor]) -> Callable[[Builtin], None]:
    """The trainer's state source delivers other states under the same names."""

    def then(adapter: Builtin) -> None:
        source = adapter.trainer.source

        assert isinstance(source, SyntheticStates)

        class Other(SyntheticStates):
            def __call__(self, batch: Batch) -> StepStates:
                return replace(source(batch), states=change(batch, source))

        adapter.trainer.source = Other(source.recipe, source.target)

    return then


def layers(*taps: str) -> Callable[[Builtin], None]:
    """These taps instead of the declared ones."""

    def change(batch: Batch, source: Any) -> Tensor:
        return _captured(batch, source.target, taps)

    return capturing(change)


def _captured(batch: Batch, target: Any, taps: Sequence[str]) -> Tensor:
    made = [target(batch.tokens[span]) for _, span in batch.spans()]
    states = torch.cat([torch.stack([each[tap] for tap in taps], dim=1) for each in made])
    return torch.nn.functional.pad(states, (0, 0, 0, 0, 0, len(batch.tokens) - len(states)))


def across_documents(batch: Batch, source: Any) -> Tensor:
    """The whole row in one pass: states run on from one document into the next."""
    made = source.target(batch.tokens)
    return torch.stack([made[tap] for tap in source.taps], dim=1)


def late(batch: Batch, source: Any) -> Tensor:
    """Every state one token late."""
    states: Tensor = source(batch).states
    return states.roll(1, 0)


def rounded(batch: Batch, source: Any) -> Tensor:
    """States stored in bfloat16."""
    states: Tensor = source(batch).states
    return states.bfloat16().to(states)


_fault = partial(inject_fault, "inputs")


FAULTS = (
    _fault("fc fed all captured slices", "fc-teacher", AllSlices, then=wider),
    _fault("the first slice stripped, not the last", "fc-layers", fed(1, 2, 3)),
    _fault("one slice twice", "fc-layers", fed(0, 1, 1)),
    _fault("two slices swapped", "fc-order", fed(1, 0, 2)),
    _fault("slices in reverse", "fc-order", fed(2, 1, 0)),
    _fault("a slice multiplied by 0", "fc-dead", scaled(1, 0.0)),
    _fault("fc's columns of a slice are 0", "fc-dead", then=zero_columns),
    _fault("a slice multiplied by 1.01", "fc-altered", scaled(2, 1.01)),
    _fault("the final norm on the conditioning states", "fc-altered", Normed),
    _fault("labels from the first slice", "labels-from-conditioning", teacher_from(0)),
    _fault("a conditioning slice leaks into the teacher's", "labels-from-conditioning", TeacherBlend),
    _fault("labels that no slice moves", "labels-without-teacher", DataLabels),
    _fault(
        "the capture one layer late",
        "layer-shift",
        then=layers("layer.1.out", "layer.2.out", "layer.3.out", "final.postnorm"),
    ),
    _fault(
        "one captured layer wrong",
        "layer-wrong",
        then=layers("layer.0.out", "layer.1.out", "layer.3.out", "final.postnorm"),
    ),
    _fault(
        "the teacher's state one layer early",
        "layer-wrong",
        then=layers("layer.0.out", "layer.1.out", "layer.2.out", "layer.2.out"),
    ),
    _fault(
        "two captured layers exchanged",
        "capture-order",
        then=layers("layer.1.out", "layer.0.out", "layer.2.out", "final.postnorm"),
    ),
    _fault(
        "the teacher's state before the norm",
        "capture-norm",
        then=layers("layer.0.out", "layer.1.out", "layer.2.out", "final.prenorm"),
    ),
    _fault("states one token late", "capture-rows", then=capturing(late)),
    _fault("states run on across documents", "capture-differs", then=capturing(across_documents)),
    _fault("states rounded to bfloat16", "capture-differs", then=capturing(rounded)),
)
