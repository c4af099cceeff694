"""An adapter under examination: what probes hand to its step, and its answers checked for being answers.

    subject = ExaminedAdapter(adapter)
    made = subject.step()                                   # the shared synthetic row, seed 0

Shapes: S tokens of a row, N captured slices, D width, A anchors, B slots of a block, V draft vocabulary.
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parity.model.recipe.config import Recipe
from parity.model.training.anchors import PADDING, AnchorConfig, is_candidate
from parity.model.training.data import Batch
from parity.probes.adapters.base import Adapter, AdapterStep, NotExposed, TargetReference
from parity.probes.base import ProbeAnswer
from parity.probes.rows import SyntheticDocument, synthetic_row
from parity.probes.snapshot import Snapshot, list_random_changes, read_random_state, set_random_state

DRAWS = 8
"""Draws of the trainer's own anchors whose union tells which tokens can be an anchor."""


class AdapterError(Exception):
    """The adapter did not do what an adapter does."""

    def __init__(self, part: str, expected: str, found: str, *, do: str = "", at: str = "") -> None:
        """Make the error.

        Args:
            part: the adapter's method, or a field of what it returned (`step.hidden`).
            expected: what `Adapter` promises of it.
            found: what it was.
            do: how to put it right, where that is known.
            at: FILE:LINE of an exception.
        """
        super().__init__(f"{part}: expected {expected}, found {found}")
        self.part, self.expected, self.found, self.at = part, expected, found, at
        self.do = do or f"correct {part.split('.')[0]} in the adapter"

    @property
    def sentence(self) -> str:
        """What a report states about it."""
        return f"the adapter's {self.part}: expected {self.expected}, found {self.found}"

    @property
    def mistake(self) -> tuple[str, str, str]:
        """What makes two of them one mistake: the part, and the line that raised or else both texts without their
        numbers (rows of probes differ in length)."""
        if self.at:
            return self.part, self.at, ""
        return self.part, _numberless(self.expected), _numberless(self.found)


def _numberless(text: str) -> str:
    return re.sub(r"\d+", "#", text)


class WiringProbe(Protocol):
    """One question about a trainer's wiring. `name` is also the first part of its findings' names."""

    name: str

    def run(self, subject: "ExaminedAdapter") -> ProbeAnswer:
        """Answer from what moves in the trainer. `NotExposed` and `AdapterError` are let through."""


class ExaminedAdapter:
    """An adapter, the rows that probes give to it, and its answers checked for being answers."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.recipe = adapter, adapter.recipe
        if not adapter.slices or adapter.width < 1 or adapter.vocabulary < 2:
            found = f"slices {adapter.slices!r}, width {adapter.width}, vocabulary {adapter.vocabulary}"
            raise AdapterError("__init__", "slices, width and vocabulary set", found)

    @property
    def block(self) -> int:
        """B as declared."""
        return self.recipe.block.size

    # --- rows -----------------------------------------------------------------------------------------

    def row(self, texts: Sequence[SyntheticDocument], *, padding: int = 0, seed: int = 0) -> Batch:
        """Return `synthetic_row` for this trainer: no document holds the declared mask token."""
        avoid = [self.recipe.block.mask_token_id]
        return synthetic_row(texts, self.adapter.vocabulary, avoid=avoid, padding=padding, seed=seed)

    @cached_property
    def batch(self) -> Batch:
        """The row most probes share: three documents with a prompt, none (where labels could cross into it), and a
        prompt with a hole behind it, then padding. One document where the trainer does not pack."""
        size = self.block
        begins = size if self.recipe.block.documents == "prompt_masked" else 0
        texts = [
            SyntheticDocument(length=4 * size, prompt=2),
            SyntheticDocument(length=3 * size, prompt=begins),
        ]
        texts.append(SyntheticDocument(length=3 * size, prompt=size, holes=(2 * size,)))
        return self.row(texts, padding=3)

    def states(self, batch: Batch, *, seed: int = 0, grad: bool = False) -> Tensor:
        """Return captured states [S, N, D] as a capture delivers them: normal, every slice its own, zero on padding.

        Args:
            batch: the row [S].
            seed: of the draw.
            grad: whether they take gradients.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (len(batch.tokens), len(self.adapter.slices), self.adapter.width)
        states = torch.randn(shape, generator=generator)
        states[batch.document == PADDING] = 0
        return states.to(self.adapter.dtype).requires_grad_(grad)

    def candidates(self, batch: Batch) -> Tensor:
        """Return bool [S]: tokens that this trainer may make an anchor, by its own draws or else by the rule."""
        seen = torch.zeros(len(batch.tokens), dtype=torch.bool)
        try:
            for seed in range(DRAWS):
                with self.guard_adapter_call("draw"):
                    seen[self.adapter.draw(batch, seed=seed, epoch=seed).cpu()] = True
        except NotExposed:
            config = AnchorConfig(partial=self.recipe.block.partial)
            seen = is_candidate(batch.loss_mask, batch.document, self.block, config)
        return seen & (batch.document != PADDING)

    def anchors(self, batch: Batch, count: int = 8) -> Tensor:
        """Return up to `count` anchors [A], spread over the row; each document's first and last possible one are in it.

        Raises AdapterError where the trainer draws none.
        """
        possible = self.candidates(batch)
        chosen: list[int] = []
        each = max(2, count // max(1, int(batch.document.max()) + 1))
        for number in range(int(batch.document.max()) + 1):
            own = (possible & (batch.document == number)).nonzero().squeeze(-1)
            if len(own):
                picks = np.unique(np.linspace(0, len(own) - 1, min(each, len(own))).round().astype(int))
                chosen += own[torch.from_numpy(picks)].tolist()
        if not chosen:
            raise AdapterError("draw", "an anchor in a row with supervised tokens", "none")
        return torch.tensor(sorted(chosen)[:count])

    # --- steps ----------------------------------------------------------------------------------------

    def step(
        self,
        batch: Batch | None = None,
        states: Tensor | None = None,
        *,
        anchors: Tensor | None = None,
        seed: int = 0,
        training: bool = True,
    ) -> AdapterStep:
        """Run one step of the trainer, and check what it returned.

        Args:
            batch: the row [S]; the shared one by default.
            states: captured states [S, N, D]; those of the row by default.
            anchors: [A] token indices; those of the row by default.
            seed: starts whatever is random in the step.
            training: False for the trainer's evaluation mode.

        Raises:
            AdapterError: where the step is not what `Adapter.step` promises.
        """
        batch = self.batch if batch is None else batch
        states = self.states(batch, grad=True) if states is None else states
        anchors = self.anchors(batch) if anchors is None else anchors
        with self.guard_adapter_call("step"), torch.enable_grad():
            shown = self.adapter.step(batch, states, anchors=anchors, seed=seed, training=training)
            shown = shown.as_blocks() if isinstance(shown, AdapterStep) else shown
        self._check(shown, batch, anchors)
        return shown

    @cached_property
    def step_output(self) -> AdapterStep:
        """The shared row's step, with its graph. Its states are `shown_states`."""
        return self.step(self.batch, self.shown_states)

    @cached_property
    def shown_states(self) -> Tensor:
        """The captured states [S, N, D] that `step_output` was made from, a leaf that takes gradients."""
        return self.states(self.batch, grad=True)

    def _check(self, shown: object, batch: Batch, anchors: Tensor) -> None:
        """Raise AdapterError for what was not returned as promised."""
        if not isinstance(shown, AdapterStep):
            raise AdapterError("step", "an AdapterStep", type(shown).__name__)
        # Shapes that every step has, and those of parts that a step may have; None: any size.
        # A head of its own may have another width than the target's.
        own = shown.head.ndim == 2 and shown.head.shape[1:] == shown.hidden.shape[2:]
        width = shown.head.shape[1] if own else self.adapter.width
        where = (len(anchors), self.block, width)
        shapes: dict[str, tuple[Tensor, tuple[int | None, ...]]] = {
            "step.hidden": (shown.hidden, where),
            "step.loss": (shown.loss, ()),
            "step.head": (shown.head, (None, width)),
            "step.fc_input": (shown.fc_input, (len(batch.tokens), None)),
            "step.anchors": (shown.anchors, (len(anchors),)),
        }
        if shown.labels is not None:
            shapes["step.labels"] = (shown.labels, where[:2])
        if shown.teacher is not None:
            shapes["step.teacher"] = (shown.teacher, (*where[:2], len(shown.head)))
        for part, (tensor, shape) in shapes.items():
            if not isinstance(tensor, Tensor):
                raise AdapterError(part, f"a tensor {_shape(shape)}", type(tensor).__name__)
            fits = tensor.ndim == len(shape) and all(
                want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
            )
            if not fits:
                raise AdapterError(part, _shape(shape), _shape(tensor.shape))
        # Gradients have to reach the states, and the anchors have to be those that were given.
        for part in ("loss", "hidden"):
            if not getattr(shown, part).requires_grad:
                raise AdapterError(f"step.{part}", "a tensor in the graph", "a detached one")
        if not torch.equal(shown.anchors.cpu(), anchors):
            raise AdapterError(
                "step.anchors", f"the anchors it was given {anchors.tolist()}", f"{shown.anchors.tolist()}"
            )

    def reference(self, batch: Batch) -> TargetReference:
        """Return the target's own states and logits. Raises NotExposed."""
        with self.guard_adapter_call("reference"), torch.no_grad():
            return self.adapter.reference(batch)

    def capture(self, batch: Batch) -> Tensor:
        """Return the trainer's own capture [S, N, D]. Raises NotExposed, or AdapterError for another shape."""
        with self.guard_adapter_call("capture"), torch.no_grad():
            states = self.adapter.capture(batch)
        shape = (len(batch.tokens), len(self.adapter.slices), self.adapter.width)
        if tuple(states.shape) != shape:
            raise AdapterError("capture", _shape(shape), _shape(states.shape))
        return states

    @cached_property
    def captured_states(self) -> Tensor:
        """The shared row as the trainer's own capture delivers it, [S, N, D]. Raises NotExposed."""
        return self.capture(self.batch)

    @cached_property
    def target_reference(self) -> TargetReference:
        """The target's own states and logits of the shared row. Raises NotExposed."""
        return self.reference(self.batch)

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """Every parameter by name. Raises AdapterError for what is no tensor, or none at all."""
        with self.guard_adapter_call("parameters"):
            found = self.adapter.parameters()
        if not found or not all(isinstance(each, Tensor) for each in found.values()):
            types = sorted(type(each).__name__ for each in found.values())
            raise AdapterError("parameters", "tensors by name", f"{len(found)} of {types}")
        return found

    # --- care -----------------------------------------------------------------------------------------

    @contextmanager
    def guard_adapter_call(self, part: str) -> Iterator[None]:
        """Run a method of the adapter, called `part`. Raises AdapterError for whatever goes wrong in it.

        A changed random state is put back, and is such an error too.
        """
        before = read_random_state()
        try:
            yield
        except (NotExposed, AdapterError):
            raise
        except NotImplementedError as error:
            raise AdapterError(part, "a method", "not written") from error
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
            at = f"{type(error).__name__} at {last.filename}:{last.lineno}"
            raise AdapterError(part, "no exception", found, at=at) from error
        finally:
            moved = list_random_changes(before)
            set_random_state(before)
        if moved:
            found = f"{', '.join(moved)} moved"
            raise AdapterError(
                part, "the global random state left as it was", found, do=_forked_hint(part, moved)
            )

    def take_snapshot(self, *, copies: bool = True) -> Snapshot:
        """Read the trainer's state, to compare with later. copies: see `Snapshot`. Raises AdapterError."""
        optimizer: torch.optim.Optimizer | None = None
        with suppress(NotExposed), self.guard_adapter_call("optimizer"):
            optimizer = self.adapter.optimizer()
        with self.guard_adapter_call("optimizer"):  # its state_dict is the trainer's code too
            return Snapshot(self.parameters, optimizer, copies=copies)

    @contextmanager
    def restore_state(self) -> Iterator[None]:
        """Put parameters, `.grad`, optimizer and random state back afterwards, whatever is done to them."""
        snapshot = self.take_snapshot()
        try:
            yield
        finally:
            snapshot.restore()


def _shape(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('*' if size is None else str(size) for size in shape)}]"


def _forked_hint(part: str, moved: Sequence[str]) -> str:
    """What to do about a method that uses up these global generators."""
    ways = {
        "torch": "wrap what draws in `with torch.random.fork_rng():` and call torch.manual_seed(seed) in it",
        "cuda": "wrap what draws in `with torch.random.fork_rng():`, which forks CUDA's generators too",
        "numpy": "draw from numpy.random.default_rng(seed)",
        "python": "draw from random.Random(seed)",
    }
    return f"in the adapter's {part.split('.')[0]}, {', and '.join(ways[name] for name in moved)}"


def list_fc_taps(recipe: Recipe) -> tuple[str, ...]:
    """Return the taps of the slices that the recipe feeds to fc, in order."""
    return tuple(f"layer.{layer}.out" for layer in recipe.conditioning.decoder_layers)
