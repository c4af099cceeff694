"""Faults of what trains, in the built-in trainer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.mask import BlockLayout
from parity.model.dflash.step import TrainingStep
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import InjectedFault, builtin


class DetachedContext(TrainingStep):
    """The conditioning keys come from a branch without gradients."""

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        right = self.drafter.condition
        self.drafter.condition = lambda states: right(states).detach()
        try:
            return super().draft(fc_input, embeddings, layout)
        finally:
            del self.drafter.condition


def _grow(adapter: Builtin, tensor: Tensor, decay: float = 0.0) -> None:
    adapter.trainer.optimizer.add_param_group({"params": [tensor], "weight_decay": decay})


def _head_trains(adapter: Builtin) -> None:
    """The head is a parameter of the step and of the optimizer."""
    wiring = adapter.trainer.wiring
    wiring.head = torch.nn.Parameter(wiring.head.clone())
    _grow(adapter, wiring.head)


def _embedding_decays(adapter: Builtin) -> None:
    """The embedding is in a decaying group: it moves without a gradient."""
    embed = adapter.trainer.parts.embed
    embed.requires_grad_(True)
    embed.grad = torch.zeros_like(embed)
    _grow(adapter, embed, decay=0.1)
    right = adapter.trainer.optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        right(set_to_none=set_to_none)
        embed.grad = torch.zeros_like(embed)

    adapter.trainer.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _flag_off(*names: str) -> Callable[[Builtin], None]:
    def inject(adapter: Builtin) -> None:
        for name, parameter in adapter.trainer.drafter.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(False)

    return inject


def _norms_left_out(adapter: Builtin) -> None:
    """The optimizer is made of matrices only."""
    groups = adapter.trainer.optimizer.param_groups
    groups[:] = [group for group in groups if all(each.ndim > 1 for each in group["params"])]


def _last_layer_left_out(adapter: Builtin) -> None:
    """The optimizer was made before the last layer was."""
    last = {id(each) for each in adapter.trainer.drafter.layers[-1].parameters()}
    for group in adapter.trainer.optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) not in last]


def _copies(adapter: Builtin) -> None:
    """The optimizer updates copies that are never written back."""
    trainer = adapter.trainer
    right = trainer.optimizer.step

    def step(*args: Any) -> Any:
        kept = [each.detach().clone() for each in trainer.drafter.layers[0].parameters()]
        made = right(*args)
        with torch.no_grad():
            for each, value in zip(trainer.drafter.layers[0].parameters(), kept, strict=True):
                each.copy_(value)
        return made

    trainer.optimizer.step = step  # type: ignore[method-assign, assignment]


def _other(name: str, rows: int | None, std: float) -> Callable[[Builtin], None]:
    """The step's own embedding or head is not the target's, in some rows or all."""

    def inject(adapter: Builtin) -> None:
        trainer = adapter.trainer
        generator = torch.Generator().manual_seed(3)
        own = (trainer.parts.embed if name == "embed" else trainer.wiring.head).detach().clone()
        noise = torch.randn(own[:rows].shape, generator=generator)
        own[:rows] = own[:rows] + noise * std if std < 1 else noise
        target = trainer.source.target  # type: ignore[attr-defined]
        if name == "embed":
            from dataclasses import replace

            parts = replace(trainer.parts, embed=own)
            trainer.wiring.parts = parts
            adapter.trainer.parts = replace(trainer.parts, embed=own, head=target.head)
        else:
            trainer.wiring.head = own

    return inject


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
        probe="frozen",
        build=lambda: builtin(changes, wiring, then=then),
    )


FAULTS = (
    _fault("the head trains", "frozen-trains", _head_trains),
    _fault("the embedding decays", "frozen-trains", _embedding_decays),
    _fault("fc is frozen", "trained-frozen", _flag_off("fc")),
    _fault("one layer is frozen", "trained-frozen", _flag_off("layers.1.")),
    _fault("conditioning is detached", "trained-without-gradient", wiring=DetachedContext),
    _fault("norms are not in the optimizer", "trained-not-in-optimizer", _norms_left_out),
    _fault("the last layer is not in the optimizer", "trained-not-in-optimizer", _last_layer_left_out),
    _fault("a layer's copies are updated", "trained-still", _copies),
    _fault("the head is random", "head-differs", _other("head", None, 1.0)),
    _fault("one row of the head is off by 1e-6", "head-differs", _other("head", 1, 1e-6)),
    _fault(
        "a reduced head with other rows",
        "head-differs",
        _other("head", 8, 1e-3),
        changes={"recipe.draft_vocab": {"size": 40}},
    ),
)
