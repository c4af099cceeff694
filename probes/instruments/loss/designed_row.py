"""A row on which a loss can be read: a flat teacher, labels and drafts that agree on some slots and not on others.

On ordinary data the teacher is nearly sure of the token that the data have too: hard and soft terms, and both
sources of labels, then have the same gradient. Here the teacher's slice is built state by state, so that its argmax is
a chosen token with a probability near `TOP`; half of the data's tokens are that argmax and half are not; and in
every block the draft is right for a run of slots of its own length. Anchors and the conditioning slices are left alone,
so that drafts are the same as before.

Shapes: S tokens of the row, N captured slices, A anchors, B slots of a block, m slots that are built, D width,
V draft vocabulary, Vt the target's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep
from parity.probes.instruments.loss.flat_teacher import LogitDirections, point_states
from parity.probes.instruments.loss.head_gradient import TeacherSlice, find_draft_ids, find_teacher_slice
from parity.probes.instruments.loss.other_heads import HeadPair
from parity.probes.rows import SyntheticDocument
from parity.probes.subject import AdapterError, ExaminedAdapter

SLOTS = 96
"""Slots built at most: a term is a product of [slots, V] and [V, D]."""
LARGE = 2**23
"""V * D from which on half as many are built."""
ANCHORS = 12
"""Blocks at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DesignedBatch:
    """A row, its states and anchors, and what was built into them."""

    batch: Batch
    states: Tensor
    """[S, N, D]."""
    anchors: Tensor
    """[A]."""
    slice: TeacherSlice | None
    why_not: str
    """Why there is no teacher to compute with."""
    ids: Tensor | None
    """[Vt] draft id of each token, see `draft_ids`."""
    head: Tensor
    """[V, D]."""

    @cached_property
    def teacher(self) -> Tensor | None:
        """[S, V] the teacher's logits after every token, in float64."""
        return None if self.slice is None else self.slice.logits(self.states, self.head)

    @cached_property
    def data(self) -> Tensor | None:
        """[S] draft id of every token of the row, -1 where it has none or is padding."""
        if self.ids is None:
            return None
        return torch.where(self.batch.document >= 0, self.ids[self.batch.tokens], torch.tensor(-1))

    def at(self, values: Tensor, index: Tensor) -> Tensor:
        """`values` [S, ...] at `index` [n], which is brought into the row where it lies beyond."""
        return values[index.clamp(0, len(values) - 1)]


def build_design_row(subject: ExaminedAdapter) -> Batch:
    """The row: three documents (a short prompt; none where labels could cross; a prompt of a block, with a hole behind
    it), then padding.

    Args:
        subject: the adapter that is examined.
    """
    size = subject.block
    begins = size if subject.recipe.block.documents == "prompt_masked" else 0
    texts = [
        SyntheticDocument(length=6 * size + 1, prompt=2),
        SyntheticDocument(length=4 * size + begins, prompt=begins),
    ]
    texts.append(SyntheticDocument(length=5 * size, prompt=size, holes=(2 * size + size // 2,)))
    return subject.row(texts, padding=3)


def choose_design_anchors(subject: ExaminedAdapter, batch: Batch) -> Tensor:
    """[A] anchors whose blocks do not meet, and each document's last possible one, from all documents in turn."""
    size, queues = subject.block, list[list[int]]()
    for own in _possible_anchors(subject, batch):
        apart: list[int] = []
        for at in own:
            if not apart or at >= apart[-1] + size:
                apart.append(at)
        if own[-1] not in apart:
            apart.insert(min(2, len(apart)), own[-1])
        queues.append(apart)
    slots = SLOTS if subject.adapter.vocabulary * subject.adapter.width <= LARGE else SLOTS // 2
    count = max(3, min(ANCHORS, slots // max(1, size - 1)))
    turns = chain.from_iterable(zip_longest(*queues))
    return torch.tensor(sorted([at for at in turns if at is not None][:count]))


def _possible_anchors(subject: ExaminedAdapter, batch: Batch) -> list[list[int]]:
    """Token indices that may be an anchor, by document, rising; documents without one are left out."""
    possible = subject.candidates(batch)
    documents = range(int(batch.document.max()) + 1)
    found = [(possible & (batch.document == number)).nonzero().squeeze(-1).tolist() for number in documents]
    if not any(found):
        raise AdapterError("draw", "an anchor in a row with supervised tokens", "none")
    return [own for own in found if own]


def design_batch(
    subject: ExaminedAdapter,
    *,
    batch: Batch | None = None,
    right: bool = True,
    agree: float = 0.5,
    heads: HeadPair | None = None,
) -> DesignedBatch:
    """Build the row, from the drafts of a first step.

    Args:
        subject: the adapter that is examined.
        batch: a row to build on, `build_design_row` where None.
        right: whether drafts are right on runs of slots.
        agree: share of slots whose data token is the teacher's argmax.
        heads: the draft's and the teacher's, where they are not the one that the step exposes.
    """
    # A first step: the drafts depend on anchors and conditioning slices, which stay as they are.
    batch = build_design_row(subject) if batch is None else batch
    anchors, states = choose_design_anchors(subject, batch), subject.states(batch)
    with torch.no_grad():
        shown = subject.step(batch, states, anchors=anchors)
    where, why_not = find_teacher_slice(subject, batch)
    shown = shown if heads is None else replace(shown, head=heads.draft)
    of_teacher = shown if heads is None else replace(shown, head=heads.teacher)
    ids = find_draft_ids(subject, of_teacher, batch)
    head = of_teacher.head.detach().cpu()
    space = _space(subject, head) if heads is None else LogitDirections.of(head)
    # A label for every slot, and the teacher's state before it that has this argmax.
    slots = _slots(batch, anchors, subject.block)
    wanted, hidden = _choose_labels(batch, slots, shown, right, ids, space.ids)
    if where is not None:
        before = torch.tensor([index - 1 for _, _, index in slots])
        strict = shown.head.dtype.itemsize == 2
        made = point_states(wanted, hidden, space, where.scale(states), strict)
        states = states.clone()
        states[before, where.number] = made.to(states)
        wanted, share = where.logits(states[before], head).argmax(-1), agree
    else:
        share = 1.0
    # The data agree with the label on a share of the slots, so that the two sources can be told apart.
    tokens = _tokens(batch, slots, wanted, ids, anchors, share if where is not None or right else 0.0)
    return DesignedBatch(
        batch=replace(batch, tokens=tokens),
        states=states,
        anchors=anchors,
        slice=where,
        why_not=why_not,
        ids=ids,
        head=head,
    )


def design_label_batch(subject: ExaminedAdapter) -> DesignedBatch:
    """The shared row with anchors where labels could go wrong, and a teacher whose argmax is another token after every
    token, none of them the data's as far as the vocabulary goes.

    Args:
        subject: the adapter that is examined.
    """
    batch = subject.batch
    anchors, states = _choose_label_anchors(subject, batch), subject.states(batch)
    with torch.no_grad():
        shown = subject.step(batch, states, anchors=anchors)
    where, why_not = find_teacher_slice(subject, batch)
    head = shown.head.detach().cpu()
    if where is not None:
        space, strict = _space(subject, head), head.dtype.itemsize == 2
        wanted = space.ids[torch.arange(len(batch.tokens)) % len(space.ids)]
        states = states.clone()
        made = point_states(wanted, space.rows[wanted], space, where.scale(states), strict)
        states[:, where.number] = made.to(states)
    ids = find_draft_ids(subject, shown, batch)
    return DesignedBatch(
        batch=batch, states=states, anchors=anchors, slice=where, why_not=why_not, ids=ids, head=head
    )


def _choose_label_anchors(subject: ExaminedAdapter, batch: Batch) -> Tensor:
    """[A] each document's first and last possible anchor, those whose block goes over a hole, and some between."""
    size, index = subject.block, torch.arange(len(batch.tokens))
    chosen: set[int] = set()
    for own in _possible_anchors(subject, batch):
        document = batch.document == batch.document[own[0]]
        holes = (document & ~batch.loss_mask & (index > own[0])).nonzero()
        chosen |= {own[0], own[-1], own[len(own) // 2]}
        for hole in holes.squeeze(-1).tolist():
            chosen |= set([at for at in own if hole - size < at < hole][-2:-1] or own[-1:])
    return torch.tensor(sorted(chosen))


def _slots(batch: Batch, anchors: Tensor, size: int) -> list[tuple[int, int, int]]:
    """(block, slot, token index) of every slot 1..B-1 inside the row whose token no earlier block has."""
    found, taken = [], set(anchors.tolist())
    for block, anchor in enumerate(anchors.tolist()):
        for slot in range(1, size):
            index = anchor + slot
            if index < len(batch.tokens) and index not in taken:
                taken.add(index)
                found.append((block, slot, index))
    return found


def _choose_labels(
    batch: Batch,
    slots: Sequence[tuple[int, int, int]],
    shown: AdapterStep,
    right: bool,
    ids: Tensor | None,
    free: Tensor,
) -> tuple[Tensor, Tensor]:
    """The labels that slots are to have: the draft's own argmax in a run of slots, else another token.

    Args:
        batch: the row.
        slots: (block, slot, token index) of each.
        shown: the first step.
        right: whether drafts are right at all.
        ids: [Vt] draft id of each token.
        free: draft ids that a state can point at.

    Returns:
        [m] draft ids, and [m, D] the draft's hidden states there.
    """
    size = shown.hidden.shape[1]
    blocks, places, indices = (torch.tensor(each) for each in zip(*slots, strict=True))
    hidden = shown.hidden.detach().cpu()[blocks, places]
    head = shown.head.detach().cpu()
    best = (hidden.to(head) @ head.T).argmax(-1)
    run = torch.tensor([[0, size - 1, 1, size // 2, 2, size][block % 6] for block in blocks.tolist()])
    hit = (places <= run) | ((places > run + 1) & ((places + blocks) % 3 == 0))
    place = torch.arange(len(slots))
    other = free[place % len(free)]
    own = torch.full((len(slots),), -1) if ids is None else ids[batch.tokens[indices]]
    for shift in range(1, 4):  # neither the draft's argmax nor the data's token
        clash = (other == best) | (other == own)
        other = torch.where(clash, free[(place + shift * 7) % len(free)], other)
    return torch.where(hit & right, best, other), hidden.double()


_SPACES: WeakKeyDictionary[ExaminedAdapter, LogitDirections] = WeakKeyDictionary()
"""A head of 32,768 rows takes a second to look through."""


def _space(subject: ExaminedAdapter, head: Tensor) -> LogitDirections:
    """Directions of the head [V, D], kept for as long as the subject lives."""
    if subject not in _SPACES:
        _SPACES[subject] = LogitDirections.of(head)
    return _SPACES[subject]


def _tokens(
    batch: Batch,
    slots: Sequence[tuple[int, int, int]],
    wanted: Tensor,
    ids: Tensor | None,
    anchors: Tensor,
    agree: float,
) -> Tensor:
    """[S] the row's tokens, of which a share `agree` of the slots' is the wanted label [m], a draft id."""
    tokens = batch.tokens.clone()
    if ids is None or agree == 0:
        return tokens
    back = torch.full((int(ids.max()) + 1,), -1)
    back[ids[ids >= 0]] = (ids >= 0).nonzero().squeeze(-1)
    taken = set(anchors.tolist())
    for number, (_, _, index) in enumerate(slots):
        chosen = int((number + 1) * agree) > int(number * agree)
        if chosen and index not in taken and batch.document[index] >= 0:
            tokens[index] = back[wanted[number]]
    return tokens
