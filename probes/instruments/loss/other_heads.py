"""Heads that could make the draft's logits beside the one that a step exposes.

    find_trained_head(subject, shown)            # a head at which the loss has a gradient, or None
    list_head_pairs(subject, batch, shown)      # pairs of a draft's and a teacher's head to be tried, likely ones first

A drafter's own head is a parameter [V, D]; the target's is the reference's. Names are not trusted: a pair counts
where it explains the gradient, a head trains where the loss has a gradient there.

Shapes: V draft vocabulary, Vt the target's, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.subject import ExaminedAdapter

BODY = ("fc.", "layers.")
"""What names of the drafter's own parameters begin with."""
ROUNDING = 1e-3
"""Of a gradient, that two ways of adding it up may differ by."""
DISTANCE_CHUNK = 2**24
"""Elements of one piece of distances between rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadPair:
    """A pair to be tried."""

    draft: Tensor
    """[V, D]."""
    teacher: Tensor
    """[V, D] of the target, for the same vocabulary."""
    name: str
    """Of the draft's."""
    rows: int
    """How many of the draft's are not the teacher's."""
    change: float
    """The largest difference in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedHead:
    """A head at which the loss has a gradient."""

    name: str
    gradient: float
    """The largest."""


def find_trained_head(subject: ExaminedAdapter, shown: AdapterStep) -> TrainedHead | None:
    """The head with the largest gradient that does not come through the hidden states; None where none has one.

    What comes through them is taken off: an embedding that is looked up, too, is no head.

    Args:
        subject: the adapter that is examined.
        shown: a step with its graph.
    """
    # Everything of a head's shape, the step's own included.
    named = {name: each for name, each in _own(subject, shown).items() if each.requires_grad}
    if shown.head.requires_grad and not any(each is shown.head for each in named.values()):
        named["the head shown"] = shown.head
    if not named:
        return None
    heads = list(named.values())
    (above, *whole) = torch.autograd.grad(
        shown.loss, [shown.hidden, *heads], allow_unused=True, retain_graph=True
    )
    # The whole gradient, less what arrives through the hidden states.
    below: Sequence[Tensor | None] = [None] * len(heads)
    if above is not None:
        below = torch.autograd.grad(shown.hidden, heads, above, allow_unused=True, retain_graph=True)
    found: list[TrainedHead] = []
    for name, all_of_it, through in zip(named, whole, below, strict=True):
        if all_of_it is None:
            continue
        rest = all_of_it if through is None else all_of_it - through
        size, scale = (float(each.detach().abs().max()) for each in (rest, all_of_it))
        if size > ROUNDING * scale:
            found.append(TrainedHead(name=name, gradient=size))
    return max(found, key=lambda each: each.gradient, default=None)


def _own(subject: ExaminedAdapter, shown: AdapterStep) -> dict[str, Tensor]:
    """Parameters that may be a head: of its shape, and no part of the drafter by z-lab's names."""
    return {
        name: each
        for name, each in subject.parameters.items()
        if _like(each, shown.head) and not name.startswith(BODY)
    }


def list_head_pairs(subject: ExaminedAdapter, batch: Batch, shown: AdapterStep) -> Iterator[HeadPair]:
    """The step's head beside the target's as the teacher's, then every parameter of its shape beside either.

    Args:
        subject: the adapter that is examined.
        batch: the row that the target's reference is computed on.
        shown: a step, for its head [V, D].
    """
    target = _target(subject, batch, shown)
    own = {name: each.detach() for name, each in _own(subject, shown).items() if not _same(each, shown.head)}
    if target is not None and not _same(shown.head, target):
        yield _pair("the head shown", shown.head.detach(), target)
    teachers = [shown.head.detach()]
    if target is not None:
        teachers = [target, *(each for each in teachers if not _same(each, target))]
    for name, each in own.items():
        for teacher in teachers:
            if not _same(each, teacher):
                yield _pair(name, each, teacher)


def _pair(name: str, draft: Tensor, teacher: Tensor) -> HeadPair:
    """Two heads [V, D] with the rows in which they differ."""
    apart = (draft.detach().cpu().double() - teacher.cpu().double()).abs().amax(1)
    return HeadPair(
        draft=draft, teacher=teacher, name=name, rows=int((apart > 0).sum()), change=float(apart.max())
    )


def _like(each: Tensor, head: Tensor) -> bool:
    """Whether a parameter could be a head by its shape."""
    return each.shape == head.shape and each.is_floating_point()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal in the narrower of both dtypes."""
    dtype = a.dtype if a.dtype.itemsize <= b.dtype.itemsize else b.dtype
    return a.shape == b.shape and torch.equal(a.detach().cpu().to(dtype), b.detach().cpu().to(dtype))


def _target(subject: ExaminedAdapter, batch: Batch, shown: AdapterStep) -> Tensor | None:
    """[V, D] the target's own rows in the dtype of the step's head, None where no reference is exposed. Of a reduced
    vocabulary those nearest to the head's, None where two of them are nearest to one."""
    try:
        rows = subject.reference(batch).head.detach().cpu().to(shown.head.dtype)
    except NotExposed:
        return None
    head = shown.head.detach().cpu()
    if len(rows) == len(head):
        return rows
    near = [
        torch.cdist(part.float(), rows.float()).argmin(-1)
        for part in head.split(max(1, DISTANCE_CHUNK // len(rows)))
    ]
    place = torch.cat(near)
    return rows[place] if len(place.unique()) == len(place) else None
