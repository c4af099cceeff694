"""Faults of the teacher in the built-in trainer: its norm, its head, its state, its vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.data import Batch
from parity.model.training.loss import TeacherStates
from parity.model.training.states import StepStates, SyntheticStates
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import inject_fault


def made(change: Callable[[TrainingStep, TeacherStates], TeacherStates]) -> type[TrainingStep]:
    """The teacher, changed after it was made as declared."""

    class Changed(TrainingStep):
        def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
            teacher = super().teacher(state, blocks)
            assert teacher is not None
            return change(self, teacher)

    return Changed


class NoNorm(TrainingStep):
    """The state before the norm goes to the head as it is (TorchSpec#169)."""

    def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
        assert state is not None
        return TeacherStates(states=state.detach(), index=blocks.teacher_index, head=self.head)


def twice(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
    """The state after the norm is normed again (ModelOpt#1846)."""
    with torch.no_grad():
        return replace(teacher, states=wiring.parts.norm(teacher.states))


def shifted_weight(by: float) -> Callable[[TrainingStep, TeacherStates], TeacherStates]:
    """The norm's weight is read as w + 1, or as w - 1 (speculators#797)."""

    def change(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
        weight = wiring.parts.norm.weight
        assert isinstance(weight, Tensor)
        return replace(teacher, states=(teacher.states / weight * (weight + by)).detach())

    return change


def weighted(adapter: Builtin) -> None:
    """A final norm whose weight is not 1 everywhere, as trained ones are."""
    norm = adapter.trainer.parts.norm
    with torch.no_grad():
        assert isinstance(norm.weight, Tensor)
        generator = torch.Generator().manual_seed(1)
        norm.weight.copy_(0.5 + torch.rand(norm.weight.shape, generator=generator))


def token_off(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
    """The states are rolled by one token."""
    return replace(teacher, states=teacher.states.roll(1, 0))


def other_head(amount: float) -> Callable[[TrainingStep, TeacherStates], TeacherStates]:
    """The teacher's head is not the target's: random, or fine-tuned by this much."""

    def change(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
        generator = torch.Generator().manual_seed(2)
        drawn = torch.randn(teacher.head.shape, generator=generator) * teacher.head.std()
        return replace(teacher, head=(1 - amount) * teacher.head + amount * drawn)

    return change


def swapped_rows(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
    """The teacher's rows stand in the reverse order of the draft's vocabulary."""
    return replace(teacher, head=teacher.head.flip(0))


def two_rows(wiring: TrainingStep, teacher: TeacherStates) -> TeacherStates:
    """The vocabulary map of the teacher's rows is rolled by one."""
    return replace(teacher, head=teacher.head.roll(1, 0))


class Conditioning(TrainingStep):
    """The teacher is made from a conditioning slice."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        conditioning, _ = super().split_slices(captured)
        return conditioning, captured.states[:, 2]


def lastly(tap: str) -> Callable[[Builtin], None]:
    """The capture's last slice is another state under the same name."""

    def then(adapter: Builtin) -> None:
        source = adapter.trainer.source
        assert isinstance(source, SyntheticStates)

        class Other(SyntheticStates):
            def __call__(self, batch: Batch) -> StepStates:
                captured = super().__call__(batch)
                states = captured.states.clone()
                for _, span in batch.spans():
                    states[span, -1] = self.target(batch.tokens[span])[tap]
                return replace(captured, states=states)

        adapter.trainer.source = Other(source.recipe, source.target)

    return then


def random_head(adapter: Builtin) -> None:
    """A head that was tied and not loaded: random rows, for the drafter too (SpecForge#455)."""
    generator = torch.Generator().manual_seed(3)
    wiring = adapter.trainer.wiring
    wiring.head = torch.randn(wiring.head.shape, generator=generator) * 0.2


def both(*changes: Callable[[Builtin], None]) -> Callable[[Builtin], None]:
    """One change after the other."""

    def then(adapter: Builtin) -> None:
        for change in changes:
            change(adapter)

    return then


PRE: dict[str, Any] = {"recipe.teacher.norm": "pre"}
KEPT: dict[str, Any] = {"recipe.draft_vocab": {"size": 40}}


_fault = partial(inject_fault, "teacher")


FAULTS = (
    _fault("the final norm left out", "teacher-norm", NoNorm, PRE),
    _fault("the final norm twice", "teacher-norm", made(twice), then=weighted),
    _fault("1 + w where w is stored", "teacher-norm", made(shifted_weight(1.0)), PRE, then=weighted),
    _fault("w where 1 + w is stored", "teacher-norm", made(shifted_weight(-1.0)), PRE, then=weighted),
    _fault("the teacher one token off", "teacher-shift", made(token_off)),
    _fault("the teacher from a conditioning slice", "teacher-layer", Conditioning),
    _fault("a random teacher's head", "teacher-head", made(other_head(1.0))),
    _fault("a teacher's head off by 2 %", "teacher-head", made(other_head(0.02))),
    _fault("a head that was not loaded", "teacher-head", then=random_head),
    _fault("the teacher's rows in reverse", "teacher-vocabulary", made(swapped_rows), KEPT),
    _fault("the teacher's rows rolled by one", "teacher-vocabulary", made(two_rows), KEPT),
    _fault("the captured slice before the norm", "teacher-norm", then=lastly("final.prenorm")),
    _fault(
        "the captured slice after the norm",
        "teacher-norm",
        TrainingStep,
        PRE,
        then=both(weighted, lastly("final.postnorm")),
    ),
    _fault("the captured slice a layer early", "teacher-differs", then=lastly("layer.2.out")),
)
