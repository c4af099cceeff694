"""What moves a block: gradients and exchanged tokens, without a look into the drafter.

    look = ProbeBatch(subject, batch, anchors)
    look.strengths() > 0      # bool [A, S]: which captured states move any slot of each block, exact zeros
    look.moved_by(tokens)     # [A, B] largest change of each slot when the row has these tokens instead

Exactness: a state that attention masks out has a gradient of exactly 0, in every dtype; a token that is not used
leaves every bit as it was. A state that is seen could have a gradient that underflows, so a state that seems to be
missing is tested again with other states.

Shapes: S tokens, A anchors, B slots, P slots that are probed one by one, D width, V the target's vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep
from parity.probes.instruments.drafter.reference import BlockRow, override_parameters
from parity.probes.subject import ExaminedAdapter

PROJECTION = 77
"""Seed of the random directions that hidden states are projected on before they are differentiated."""
EACH = 8
"""Longest block whose slots are all probed one by one."""
FIELD_SEED = 3
"""Seed of the steps: any, but the same for all."""


class ProbeBatch:
    """One row with its states and anchors, and the step on them."""

    def __init__(
        self,
        subject: ExaminedAdapter,
        batch: Batch,
        anchors: Tensor,
        *,
        states: int = 5,
        training: bool = True,
    ) -> None:
        """One row; the step is run when it is needed.

        Args:
            subject: the adapter that is examined.
            batch: S tokens.
            anchors: [A] token indices.
            states: seed of the captured states.
            training: the trainer's mode.
        """
        self.subject, self.batch, self.anchors, self.training = subject, batch, anchors, training
        self.states = subject.states(batch, seed=states, grad=True)
        self.row = BlockRow.of(batch, anchors, subject.block)

    def step(self, batch: Batch | None = None) -> AdapterStep:
        """The trainer's step on this row, or on one with other tokens."""
        return self.subject.step(
            batch or self.batch, self.states, anchors=self.anchors, seed=FIELD_SEED, training=self.training
        )

    @cached_property
    def step_output(self) -> AdapterStep:
        """The step, with its graph."""
        return self.step()

    @cached_property
    def directions(self) -> Tensor:
        """[B, D] a random direction a slot."""
        generator = torch.Generator().manual_seed(PROJECTION)
        return torch.randn(self.subject.block, self.subject.adapter.width, generator=generator)

    def strength(self, anchor: int, slot: int | None = None, shown: AdapterStep | None = None) -> Tensor:
        """Largest gradient of a random projection of hidden states at each captured state.

        Args:
            anchor: number of the block, not its token.
            slot: one slot of it, all where None.
            shown: a step on the same states; `step_output` where None.

        Returns:
            [S].
        """
        hidden = (self.step_output if shown is None else shown).hidden[anchor]
        directions = self.directions.to(hidden)
        projected = hidden * directions if slot is None else hidden[slot] * directions[slot]
        (gradient,) = torch.autograd.grad(
            projected.sum(), self.states, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return gradient.detach().abs().amax(dim=(1, 2))

    def strengths(self) -> Tensor:
        """[A, S] of every block."""
        return torch.stack([self.strength(anchor) for anchor in range(len(self.anchors))])

    @property
    def probed_slots(self) -> list[int]:
        """Slots that are probed one by one: all of a short block, both ends and the middle of a long one."""
        last = self.subject.block - 1
        return list(range(last + 1)) if last < EACH else sorted({0, 1, last // 2, last - 1, last})

    def slots(self, anchor: int, shown: AdapterStep | None = None) -> Tensor:
        """bool [P, S] which captured states move each probed slot of one block. Arguments as of `strength`."""
        return torch.stack([self.strength(anchor, slot, shown) for slot in self.probed_slots]) > 0

    def moved_by(self, tokens: Tensor) -> Tensor:
        """[A, B] largest change of each slot's hidden state when the row's tokens are `tokens` [S]."""
        return measure_change(self.step_output.hidden, self.step(replace_tokens(self.batch, tokens)).hidden)

    def changed_blocks(self) -> Tensor:
        """[A, B] the same after something else was changed."""
        return measure_change(self.step_output.hidden, self.step().hidden)


def measure_change(before: Tensor, after: Tensor) -> Tensor:
    """[A, B] largest difference of two hidden states [A, B, D]; inf where one is not finite."""
    apart = (after.detach().double() - before.detach().double()).abs().amax(-1)
    return apart.nan_to_num(nan=torch.inf)


def replace_tokens(batch: Batch, tokens: Tensor) -> Batch:
    """The row with other tokens [S]."""
    return replace(batch, tokens=tokens)


def exchange_tokens(batch: Batch, where: Tensor, vocabulary: int, avoid: int) -> Tensor:
    """The row's tokens, some of them replaced by others.

    Args:
        batch: the row.
        where: bool [S] which are replaced.
        vocabulary: V.
        avoid: id that is never put in.

    Returns:
        [S].
    """
    other = (batch.tokens + 1 + vocabulary // 3) % vocabulary
    other = torch.where(other == avoid, (other + 1) % vocabulary, other)
    other = torch.where(other == batch.tokens, (other + 1) % vocabulary, other)
    return torch.where(where, other, batch.tokens)


@contextmanager
def override_rows(table: Tensor, rows: Tensor) -> Iterator[None]:
    """Give some rows (ids [n]) of an embedding [V, D] other values for a while."""
    kept = table.data[rows].clone()
    try:
        table.data[rows] = kept.roll(1, -1) + 1
        yield
    finally:
        table.data[rows] = kept


def find_filling_rows(moves: Callable[[], bool], table: Tensor, suspects: Tensor) -> Tensor:
    """Which embedding rows make something move, by halving.

    Args:
        moves: whether it moves now.
        table: [V, D] the embedding.
        suspects: [n] ids, rising.

    Returns:
        Those ids that make it move when their rows are changed, rising.
    """
    if not len(suspects):
        return suspects
    with override_rows(table, suspects):
        if not moves():
            return suspects[:0]
    if len(suspects) == 1:
        return suspects
    half = len(suspects) // 2
    return torch.cat([find_filling_rows(moves, table, part) for part in (suspects[:half], suspects[half:])])


def detect_product_dtype(look: ProbeBatch, parameters: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype in which matrix products are taken: bfloat16 where rounding fc's weight to it changes no bit.

    Args:
        look: a row with its step; the answer is kept for its subject.
        parameters: the trainer's own, by name.
    """
    known = look.subject.__dict__
    if "products_in" not in known:
        known["products_in"] = _products_in(look, parameters)
    dtype: torch.dtype = known["products_in"]
    return dtype


def _products_in(look: ProbeBatch, parameters: Mapping[str, Tensor]) -> torch.dtype:
    weight = parameters["fc.weight"]
    if weight.dtype in (torch.bfloat16, torch.float16):
        return torch.bfloat16
    rounded = weight.data.to(torch.bfloat16).to(weight.dtype)
    if torch.equal(rounded, weight.data):
        return weight.dtype  # nothing to be seen; the narrower limit is the safe one
    with override_parameters(parameters, {"fc.weight": rounded}):
        still = bool((look.changed_blocks() == 0).all())
    return torch.bfloat16 if still else weight.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEffect:
    """What exchanged tokens do to blocks."""

    other: tuple[float, int, int] | None
    """(largest change, the block's anchor, the anchor whose token was exchanged) of a block by another's anchor."""
    text: Tensor
    """[A, B] change of each slot when all tokens but the anchors' are exchanged."""
    still: Tensor
    """bool [A, B] slots that do not move when their own anchor's token is exchanged."""


def exchange_anchor_tokens(look: ProbeBatch, vocabulary: int, avoid: int) -> TokenEffect:
    """Exchange tokens: all but the anchors' always, and some anchors' in each step.

    Anchors are so chosen that for every two of them the first alone is exchanged in one step and the second alone in
    another. Where a block moves that should not, the two reasons are taken apart.

    Args:
        look: the row and its blocks.
        vocabulary: V.
        avoid: id that is never put in, the mask token.
    """
    # Each anchor gets its own half of the steps: subsets of one size never contain each other.
    count = len(look.anchors)
    steps = next(m for m in range(2, count + 2) if comb(m, m // 2) >= count)
    chosen = torch.zeros(count, steps, dtype=torch.bool)
    for number, some in zip(range(count), combinations(range(steps), steps // 2), strict=False):
        chosen[number, list(some)] = True
    still = torch.ones(count, look.subject.block, dtype=torch.bool)
    leak = False
    for on in chosen.T:
        moved = _exchange_at(look, on, vocabulary, avoid, text=True)
        still &= (moved == 0) | ~on[:, None]
        leak |= bool((moved[~on] > 0).any())
    # A block that moves although its anchor's token stays: because of the text, or because of another anchor.
    text = torch.zeros(still.shape, dtype=torch.float64)
    if not leak:
        return TokenEffect(other=None, text=text, still=still)
    nobody = torch.zeros(count, dtype=torch.bool)
    text = _exchange_at(look, nobody, vocabulary, avoid, text=True)
    return TokenEffect(
        other=_other(look, vocabulary, avoid), text=text, still=_still(look, vocabulary, avoid)
    )


def _exchange_at(look: ProbeBatch, anchors: Tensor, vocabulary: int, avoid: int, *, text: bool) -> Tensor:
    """[A, B] change when the tokens at the chosen anchors (bool [A]) are exchanged; text: and all that are none."""
    where = torch.full_like(look.batch.tokens, text, dtype=torch.bool)
    where[look.anchors] = anchors
    return look.moved_by(exchange_tokens(look.batch, where, vocabulary, avoid))


def _still(look: ProbeBatch, vocabulary: int, avoid: int) -> Tensor:
    """bool [A, B] slots that do not move when all anchors' tokens are exchanged, and nothing else."""
    everybody = torch.ones(len(look.anchors), dtype=torch.bool)
    return _exchange_at(look, everybody, vocabulary, avoid, text=False) == 0


def _other(look: ProbeBatch, vocabulary: int, avoid: int) -> tuple[float, int, int] | None:
    """`TokenEffect.other`, one anchor after the other."""
    found = None
    for number in range(len(look.anchors)):
        on = torch.arange(len(look.anchors)) == number
        moved = _exchange_at(look, on, vocabulary, avoid, text=False).amax(1).masked_fill(on, 0)
        if float(moved.max()) > (found[0] if found else 0.0):
            found = (float(moved.max()), int(look.anchors[moved.argmax()]), int(look.anchors[number]))
    return found
