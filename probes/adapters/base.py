"""What a trainer shows of its step, so that the probes can ask it. Small enough to write for a loop of one's own.

    class Mine(Adapter):
        name = "my loop"

        def __init__(self, recipe):
            super().__init__(recipe)
            self.slices = taps_of(recipe)          # what the capture delivers, in order
            self.width, self.vocabulary = 64, 1000

        def step(self, batch, states, *, anchors, seed, training):
            ...                                    # the trainer's own path, noise and splitting included
            return AdapterStep(loss=loss, hidden=hidden, head=head, anchors=anchors, fc_input=fc_input)

        def parameters(self):
            return dict(self.model.named_parameters())

`step` and `parameters` are required. Every other method is optional: what is not written raises `NotExposed`, and
the probes that need it say skipped, with the method's name. Probes believe nothing of what is shown: they look at what
moves when the captured states, the tokens, the seed or the weights move.

Nothing is trained: a probe takes gradients with `torch.autograd.grad`, and parameters, their `.grad`, optimizer,
random state and hooks are as they were when it is done.

Shapes: S tokens of a row, N captured slices, C conditioning layers, D width of the target, A anchors, B steps of an
anchor (slots of a block; a next-token family has one step, or K), V draft vocabulary, F features that enter fc (C * D).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.model.drafting.proposer import DrafterShape
from parity.model.recipe.config import Recipe
from parity.model.training.data import Batch


class NotExposed(Exception):
    """An adapter does not show this part. The first argument says which, and why where there is a reason."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterStep:
    """What one step used and made. Tensors in the graph have not been detached on their way from the states."""

    loss: Tensor
    """Scalar, in the graph: what `backward` is called on, before gradient accumulation divides it."""
    hidden: Tensor
    """[A, B, D] what enters the head, in the graph, in the order of `anchors`; step by step as `positions` says."""
    head: Tensor
    """[V, D] the head's rows for the draft's vocabulary; D may differ from the target's where the head is its own."""
    anchors: Tensor
    """[A] token indices after which the drafts begin, as the step used them."""
    fc_input: Tensor
    """[S, F] what entered fc, noise included, in the graph."""
    labels: Tensor | None = None
    """[A, B] ids of the draft's vocabulary, negative where a step has none; None where the step makes none."""
    teacher: Tensor | None = None
    """[A, B, V] the teacher's logits at every step, None where the step makes none."""
    positions: Tensor | None = None
    """[A, B] index in the row of the token that each step predicts. None: a block, whose step 0 is the anchor's own
    token, given and never trained, and whose step k is the k-th token after it. A family that predicts the next
    tokens and has no such step 0 gives `anchors[:, None] + 1`, or `+ 1 .. K` for K steps; `recipe.block.size` is then
    K + 1."""

    def as_blocks(self) -> "AdapterStep":
        """The same with a step 0 in front where `positions` has none, as the probes look at it.

        The loss has the same value, and the gradients that it had: at the new `hidden`, at parameters and at states.
        Raises NotExposed where the steps are not the tokens after each anchor, one after the other.
        """
        if self.positions is None:
            return self
        first = self.positions - self.anchors[:, None]
        steps = torch.arange(self.hidden.shape[1], device=first.device)
        if torch.equal(first, steps.expand_as(first)):
            return replace(self, positions=None)
        if not torch.equal(first, (steps + 1).expand_as(first)):
            raise NotExposed("step (its positions are not the tokens after each anchor, one after the other)")

        def pad(part: Tensor, value: float = 0.0) -> Tensor:
            return torch.cat((torch.full_like(part[:, :1], value), part), dim=1)

        # Step 0 repeats the first one, so that it sees what that sees. The loss was computed from `hidden`; its
        # derivative there is moved to the longer tensor, 0 at the new step, and nothing else.
        hidden, loss = torch.cat((self.hidden[:, :1], self.hidden), dim=1), self.loss
        if loss.requires_grad and self.hidden.requires_grad:
            (slope,) = torch.autograd.grad(loss, self.hidden, allow_unused=True, retain_graph=True)
            if slope is not None:
                moved = (hidden * pad(slope)).sum() - (self.hidden * slope).sum()
                loss = loss + (moved - moved.detach())
        return replace(
            self,
            loss=loss,
            hidden=hidden,
            labels=None if self.labels is None else pad(self.labels, -1),
            teacher=None if self.teacher is None else pad(self.teacher),
            positions=None,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetReference:
    """The target as itself, computed beside the trainer's capture, to hold that against."""

    embed: Tensor
    """[Vt, D] the target's own embedding rows, Vt its vocabulary."""
    head: Tensor
    """[Vt, D]."""
    states: Mapping[str, Tensor]
    """Tap -> [S, D]: every `layer.{i}.out`, `final.prenorm` and `final.postnorm` for the tokens of one row, documents
    apart from one another."""
    logits: Tensor
    """[S, Vt] of the target itself."""
    norm: Any = None
    """The final norm as a callable on [..., D], or None where it is not at hand."""


class Adapter:
    """One trainer. Attributes that `__init__` sets: slices, width, vocabulary, and packs where it is not so."""

    name: str = ""
    """What reports call the trainer, with its version."""
    slices: tuple[str, ...] = ()
    """Taps of the captured slices in the order in which the trainer's capture delivers them."""
    width: int = 0
    """D."""
    vocabulary: int = 0
    """The target's tokens."""
    packs: bool = True
    """Whether a row may hold several documents. Where not, the adapter makes each document a row of its own."""
    dtype: torch.dtype = torch.float32
    """Of the captured states, as the capture delivers them."""
    configured: DrafterShape | None = None
    """Sizes, rope and norm epsilon that the drafter is configured with, which no recipe says; None: what is found of
    them is told and compared with nothing."""

    def __init__(self, recipe: Recipe) -> None:
        """The declared wiring. An adapter that configures its trainer does it from this."""
        self.recipe = recipe

    # --- required -------------------------------------------------------------------------------------

    def step(
        self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int, training: bool
    ) -> AdapterStep:
        """The trainer's own path from the captured states [S, N, D] to the loss, with these anchors [A].

        `seed` starts whatever is random (noise, dropout) and leaves the global generators as they were
        (`torch.random.fork_rng`). `training` False is the trainer's evaluation mode. `batch` has tokens, loss_mask,
        document (-1 on padding) and position, each [S].
        """
        raise NotImplementedError

    def parameters(self) -> Mapping[str, Tensor]:
        """Every parameter by name; `requires_grad` says which train. z-lab's names (fc.weight, hidden_norm.weight,
        layers.0.self_attn.q_proj.weight, ..., norm.weight) let more be asked; `embed_tokens.weight` and
        `lm_head.weight` where the trainer holds its own copies or the target's."""
        raise NotImplementedError

    # --- optional -------------------------------------------------------------------------------------

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        """[A] the anchors that the trainer itself draws for this row."""
        raise NotExposed("draw")

    def capture(self, batch: Batch) -> Tensor:
        """States [S, N, D] as the trainer's own capture (or its files) delivers them for these tokens."""
        raise NotExposed("capture")

    def reference(self, batch: Batch) -> TargetReference:
        """The target's own states and logits for these tokens, not through the trainer's capture."""
        raise NotExposed("reference")

    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        """[B - 1, V] logits of slots 1..B-1 of the block at token `anchor`, drafted as inference does it: the states of
        its document before it through the cache, one block, the inference's own embeddings, mask and head."""
        raise NotExposed("draft")

    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """(new token ids, accepted length of each cycle with its bonus token) of the inference's draft-verify loop at
        temperature 0, caches and their rollback included. The first new token is no draft's."""
        raise NotExposed("generate")

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> Sequence[int]:
        """New token ids that the target writes by itself, greedily, one at a time, without the drafter."""
        raise NotExposed("greedy")

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the run."""
        raise NotExposed("optimizer")

    def update(self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int) -> None:
        """One whole optimizer step on this row, as training does it. The probe puts everything back."""
        raise NotExposed("update")

    def run(self, folder: Path, until: int) -> Sequence[float | Mapping[str, Any]]:
        """Train a short run of its own in `folder`, from where the folder's checkpoint is (else from the start),
        up to step `until`, and save. Returns the steps made now, each its loss, or a record with `loss` and what else
        the trainer logs (`lr`, `tokens`, `blocks`, `gradient_norm`, ...), by which a difference is named. This
        adapter's own drafter is not touched."""
        raise NotExposed("run")

    def export(self, folder: Path) -> str:
        """Write the checkpoint that serving reads; returns its layout: `zlab` or `speculators`."""
        raise NotExposed("export")

    def tokenize(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], Sequence[bool]]:
        """Token ids of a conversation as the training data has them, and which are trained on."""
        raise NotExposed("tokenize")

    def request(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Token ids that the server forms for these messages, up to where the assistant begins to write, as for a
        client that does not say whether to think. One that can say so takes `thinking: bool | None = None` too."""
        raise NotExposed("request")


OLD_NAMES = {"Shown": AdapterStep, "Missing": NotExposed, "Reference": TargetReference}
"""Names of version 0.1 that adapters of users import; they still work, with a DeprecationWarning."""


def __getattr__(name: str) -> type:
    """An old name's class, with a warning that names the new one."""
    if name not in OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = OLD_NAMES[name]
    warnings.warn(
        f"{name} is now {new.__name__}: from {__name__} import {new.__name__}", DeprecationWarning, 2
    )
    return new
