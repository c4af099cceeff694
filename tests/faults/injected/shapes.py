"""Faults of the tensors that the built-in trainer sends: captured rows, precision, width."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.data import Batch
from parity.model.training.loss import TeacherStates
from parity.model.training.states import StepStates, SyntheticStates
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import InjectedFault, builtin


def captured(change: Callable[[Tensor], Tensor]) -> Callable[[Builtin], None]:
    """The state source delivers changed states [S, N, D]."""

    def then(adapter: Builtin) -> None:
        source = adapter.trainer.source
        assert isinstance(source, SyntheticStates)

        class Other(SyntheticStates):
            def __call__(self, batch: Batch) -> StepStates:
                made = super().__call__(batch)
                return replace(made, states=change(made.states.clone()))

        adapter.trainer.source = Other(source.recipe, source.target)

    return then


def zero_slice(states: Tensor) -> Tensor:
    """A whole layer of zeros (vllm#46301)."""
    states[:, 1] = 0
    return states


def zero_row(states: Tensor) -> Tensor:
    """One token's state was never written."""
    states[5, 0] = 0
    return states


def constant(states: Tensor) -> Tensor:
    """A buffer's fill value."""
    states[8:10, 2] = 1.0
    return states


def stale(states: Tensor) -> Tensor:
    """A page of the cache written twice."""
    states[12:16, 1] = states[8:12, 1]
    return states


def not_a_number(states: Tensor) -> Tensor:
    """One value."""
    states[3, 0, 7] = float("nan")
    return states


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Stored in a narrower dtype and read back."""
    return lambda states: states.to(dtype).to(states.dtype)


def kept(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Stored, and left, in another dtype."""
    return lambda states: states.to(dtype)


class Rounded(TrainingStep):
    """The conditioning states are cast to bfloat16 and back on their way to fc."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        conditioning, teacher = super().split_slices(captured)
        return conditioning.bfloat16().to(conditioning), teacher


class Joined(TrainingStep):
    """fc is fed every captured slice."""

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        _, teacher = super().split_slices(captured)
        return captured.states.flatten(1).to(self.dtype), teacher


def wider(adapter: Builtin) -> None:
    """An fc that takes them."""
    old = adapter.trainer.drafter.fc
    adapter.trainer.drafter.fc = nn.Linear(old.in_features + adapter.width, old.out_features, bias=False)


class Overflow(TrainingStep):
    """Logits of the teacher in float16 on states a thousand times as large: they overflow."""

    def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
        made = super().teacher(state, blocks)
        assert made is not None
        return replace(made, states=(made.states * 1e5).half().float())


def nan_weights(adapter: Builtin) -> None:
    """A parameter that was never loaded."""
    with torch.no_grad():
        adapter.trainer.drafter.norm.weight.fill_(float("nan"))


def _fault(
    name: str,
    deviation: str,
    then: Callable[[Builtin], None] = lambda adapter: None,
    wiring: type[TrainingStep] = TrainingStep,
    changes: dict[str, Any] | None = None,
) -> InjectedFault:
    return InjectedFault(
        name=name,
        trainer="builtin",
        deviation=deviation,
        probe="shapes",
        build=lambda: builtin(changes, wiring, then=then),
    )


FAULTS = (
    _fault("a captured slice is zero", "states-zero", captured(zero_slice)),
    _fault("one captured row is zero", "states-zero", captured(zero_row)),
    _fault("captured rows are a fill value", "states-constant", captured(constant)),
    _fault("captured rows are written twice", "states-repeated", captured(stale)),
    _fault("one captured value is not a number", "states-not-finite", captured(not_a_number)),
    _fault(
        "states stored in bfloat16 and read as float32", "states-dtype", captured(through(torch.bfloat16))
    ),
    _fault("states stored in float16 and read as float32", "states-dtype", captured(through(torch.float16))),
    _fault("states stay in bfloat16", "states-dtype", captured(kept(torch.bfloat16))),
    _fault("states rounded on their way to fc", "fc-rounded", wiring=Rounded),
    _fault("a slice too many enters fc", "fc-width", wider, Joined),
    _fault("the teacher overflows in float16", "step-not-finite", wiring=Overflow),
    _fault("a norm's weight was never loaded", "step-not-finite", nan_weights),
)
