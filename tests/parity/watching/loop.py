"""The documentation's plain loop as its user would run it, with a watch: a live adapter around the running drafter.

`Loop.broken` is the planted change: noise on the captured tensor before its last slice makes the labels.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.model.recipe.config import Recipe, load_declared
from parity.model.training.data import Batch
from parity.probes.adapters.base import Adapter, AdapterStep

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "example"


def example() -> Any:
    """docs/example/loop.py as a module."""
    if "parity_example_loop" not in sys.modules:
        spec = importlib.util.spec_from_file_location("parity_example_loop", EXAMPLE / "loop.py")
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["parity_example_loop"]


def recipe() -> Recipe:
    declared = load_declared(EXAMPLE / "recipe.yaml")
    return declared if isinstance(declared, Recipe) else declared.recipe


class Loop:
    """Drafter, target and optimizer of a run, and its step."""

    def __init__(self, drafter: nn.Module | None = None, wrapped: nn.Module | None = None) -> None:
        """wrapped: what the loop calls, where that is not the drafter itself (DDP, torch.compile)."""
        loop = example()
        self.target = loop.Target()
        self.drafter = loop.Drafter() if drafter is None else drafter
        self.called = self.drafter if wrapped is None else wrapped
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=2e-3)
        self.broken = False

    def forward(
        self, states: Tensor, row: dict[str, Tensor], anchors: Tensor, *, seed: int = 0, called: Any = None
    ) -> dict[str, Tensor]:
        """One step's forward pass."""
        if self.broken:
            generator = torch.Generator().manual_seed(seed)
            states = states + 0.05 * torch.randn(states.shape, generator=generator)
        made: dict[str, Tensor] = example().step(
            self.called if called is None else called, self.target, states, row, anchors
        )
        return made

    def batch(self, number: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """States, row and anchors of the number-th batch."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 199, (96,), generator=generator)
        row = {"tokens": tokens, "mask": torch.ones(96).bool(), "document": torch.arange(96) // 48}
        states = torch.cat([self.target.states(tokens[:48]), self.target.states(tokens[48:])])
        return states, row, torch.randperm(90, generator=generator)[:12].sort().values


class Live(Adapter):
    """The running drafter, shown by the loop's own step."""

    name = "plain loop"
    slices = ("layer.0.out", "layer.1.out", "layer.2.out", "layer.3.out", "final.postnorm")
    width, vocabulary = 48, 200

    def __init__(self, loop: Loop, called: Any = None) -> None:
        super().__init__(recipe())
        self.loop, self.called = loop, loop.drafter if called is None else called

    def step(
        self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int, training: bool
    ) -> AdapterStep:
        row = {"tokens": batch.tokens, "mask": batch.loss_mask, "document": batch.document}
        broken, self.loop.broken = self.loop.broken, self.loop.broken and training
        try:
            out = self.loop.forward(states, row, anchors, seed=seed, called=self.called)
        finally:
            self.loop.broken = broken
        return AdapterStep(
            loss=out["loss"],
            hidden=out["hidden"],
            head=self.loop.target.head,
            anchors=anchors,
            fc_input=out["fc_input"],
            labels=out["labels"],
        )

    def parameters(self) -> dict[str, Tensor]:
        shared = {"embed_tokens.weight": self.loop.target.embed, "lm_head.weight": self.loop.target.head}
        return dict(self.loop.drafter.named_parameters()) | shared

    def optimizer(self) -> torch.optim.Optimizer:
        return self.loop.optimizer
