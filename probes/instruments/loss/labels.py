"""Which label a slot is trained on, read from its gradient at the head's input.

    reading = estimate_labels(subject, crafted, at)   # kind, place and label of every slot that gets a gradient

Of all tokens the label is the one whose cross-entropy explains the gradient, once what soft terms and smoothing may add
is projected out; a distribution is recognised by the state that it comes from.

Shapes: S tokens of the row, A anchors, n slots that get a gradient, J columns, D width, V draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from parity.probes.adapters.base import AdapterStep
from parity.probes.instruments.loss.designed_row import DesignedBatch, design_label_batch
from parity.probes.instruments.loss.head_gradient import HeadGradients
from parity.probes.subject import ExaminedAdapter

LEAST_LABEL = 1e-5
"""Relative part of a gradient that may be left over in float32."""
MOST_LABELS = 0.1
"""The same at most: what explains a gradient worse than that explains nothing."""
LABEL_ROUNDINGS = 8.0
"""Times the measured rounding that may be left over."""
TEACHER_SHIFTS = (0, 1, -1, 2, -2)
"""Places beside anchor + slot whose distribution is tried."""
ENOUGH = 0.5
"""Share of slots that a way of reading has to explain to be the way this trainer is read."""
NONE = -1
"""Place or label that is not read."""
PROJECTED_TERMS = ("kl", "rkl", "js", "tv")
"""Terms that are projected out: nla has tv's direction, lk lies between kl and tv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideTerms:
    """Terms that are no hard label, and the teacher that they take."""

    names: tuple[str, ...] = ()
    shift: int = 0
    """Place of the teacher, beside the slot's own."""
    heat: float = 1.0

    def columns(self, crafted: DesignedBatch, at: HeadGradients) -> list[Tensor]:
        """[n, D] each: their gradients at the head."""
        if not self.names:
            return []
        index = at.index - 1 + self.shift
        teacher = None if crafted.teacher is None else crafted.at(crafted.teacher, index)
        return list(at.columns(self.names, {}, teacher, heat=self.heat).values())


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelEstimate:
    """Per slot that gets a gradient, [n]."""

    kind: str
    """`teacher`, `data`, `distribution`, or `` where nothing was read."""
    place: Tensor
    """Token index of what the slot is trained on; `NONE` where not read."""
    label: Tensor
    """Draft id; `NONE` for a distribution, or where not read."""
    left: Tensor
    """Relative part of the gradient that is left over."""
    tolerance: Tensor
    """What rounding may leave."""
    beside: BesideTerms = BesideTerms()
    """Terms that were projected out, or that explain the gradient on their own."""

    @property
    def has_label(self) -> Tensor:
        """bool [n]: something was read."""
        return (self.place >= 0) | (self.label >= 0)


def estimate_labels(subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients) -> LabelEstimate:
    """The first way of reading that explains most slots; the one that explains most of them where none does.

    Args:
        subject: the adapter that is examined, for its declared temperature.
        crafted: the row, with its teacher and the ids of its tokens.
        at: the step's gradient at the head.
    """
    # A hard label alone, then beside smoothing, then one state's distribution alone.
    rounding = _rounding(crafted, at)
    best = _hard(crafted, at, rounding, BesideTerms())
    if _share(best) >= ENOUGH:
        return best
    others = [_hard(crafted, at, rounding, BesideTerms(names=("smoothing",)))]
    if crafted.teacher is not None:
        others.append(_spread(crafted, at, rounding))
    best = max(best, *others, key=_share)
    if _share(best) >= ENOUGH or crafted.teacher is None:
        return best
    # Soft terms of a teacher at or beside the slot: alone, or projected out beside a hard label.
    for shift, heat in product(TEACHER_SHIFTS, dict.fromkeys((subject.recipe.loss.temperature, 1.0))):
        beside = BesideTerms(names=PROJECTED_TERMS, shift=shift, heat=heat)
        columns = beside.columns(crafted, at)
        whole, tolerance = _residual_outside(at.gradient, columns), _tolerance(rounding, columns[0])
        if float((whole <= tolerance).double().mean()) >= ENOUGH:
            return _distribution(at.index + shift, whole, tolerance, beside)
        with_smoothing = replace(beside, names=("smoothing", *PROJECTED_TERMS))
        best = max(best, _hard(crafted, at, rounding, with_smoothing), key=_share)
        if _share(best) >= ENOUGH:
            return best
    return best


def is_same_label(crafted: DesignedBatch, at: HeadGradients, before: LabelEstimate) -> Tensor:
    """Whether labels that were read before explain the gradient of another step at the same slots.

    Args:
        crafted: the row of both steps.
        at: the other step's gradient, [n] slots.
        before: the labels [n].

    Returns:
        bool [n].
    """
    columns = before.beside.columns(crafted, at)
    if before.kind != "distribution":
        columns = [*columns, at.mean_head_row - at.head[before.label.clamp(min=0)]]
    elif not columns:
        assert crafted.teacher is not None
        teacher = crafted.teacher[(before.place - 1).clamp(min=0)]
        columns = [at.mean_head_row - teacher.softmax(-1) @ at.head]
    return _residual_outside(at.gradient, columns) <= 2 * before.tolerance


def _share(reading: LabelEstimate) -> float:
    """Of slots that are read."""
    return float(reading.has_label.double().mean())


def _rounding(crafted: DesignedBatch, at: HeadGradients) -> Tensor:
    """[n] absolute error that rounding may make in a gradient of weight 1."""
    labels = torch.zeros(len(at), dtype=torch.long)
    teacher = None if crafted.teacher is None else crafted.at(crafted.teacher, at.index - 1)
    return LABEL_ROUNDINGS * at.rounding(labels, teacher)


def _tolerance(rounding: Tensor, column: Tensor) -> Tensor:
    """[n] relative part of a gradient along `column` [n, D] that rounding may leave."""
    made: Tensor = (rounding / column.norm(dim=-1).clamp(min=1e-30)).clamp(LEAST_LABEL, MOST_LABELS)
    return made


def _basis(columns: Sequence[Tensor]) -> Tensor:
    """[n, D, J] an orthonormal basis of each slot's columns."""
    basis: Tensor = torch.linalg.qr(torch.stack(tuple(columns), -1)).Q
    return basis


def _residual_outside(gradient: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """[n] relative part of the gradient outside the columns' span."""
    basis = _basis(columns)
    inside = torch.einsum("ndj,nd->nj", basis, gradient)
    rest = gradient - torch.einsum("ndj,nj->nd", basis, inside)
    made: Tensor = rest.norm(dim=-1) / gradient.norm(dim=-1)
    return made


def _hard(
    crafted: DesignedBatch,
    at: HeadGradients,
    rounding: Tensor,
    beside: BesideTerms,
) -> LabelEstimate:
    """The token whose cross-entropy explains the gradient best, besides the given terms."""
    gradient, mean = at.gradient, at.mean_head_row
    columns = beside.columns(crafted, at)
    basis = _basis(columns) if columns else gradient.new_zeros(*gradient.shape, 0)

    def off(vectors: Tensor) -> Tensor:
        return vectors - torch.einsum("ndj,nj->nd", basis, torch.einsum("ndj,nd->nj", basis, vectors))

    rest, centre = off(gradient), off(mean)

    def residual_of_label(label: Tensor) -> Tensor:
        column = off(mean - at.head[label.clamp(min=0)])
        weight = (rest * column).sum(-1) / column.square().sum(-1).clamp(min=1e-30)
        over = (rest - weight[:, None] * column).norm(dim=-1) / gradient.norm(dim=-1)
        return torch.where((weight > 0) & (label >= 0), over, torch.inf)

    # Least squares for every row of the head at once: <rest, mean - row> and |mean - row|^2, off the other columns.
    along = (rest * centre).sum(-1, keepdim=True) - rest @ at.head.T
    size = centre.square().sum(-1, keepdim=True) - 2 * centre @ at.head.T + at.head.square().sum(-1)
    for j in range(basis.shape[2]):
        size = size - (basis[:, :, j] @ at.head.T).square()
    best = torch.where(along > 0, along.square() / size.clamp(min=1e-12), torch.zeros_like(along)).argmax(-1)
    # Each source's label at the slot's own place goes first: rows can be so near that either token explains.
    readings = []
    for kind, ids in _sources(crafted).items():
        nominal = crafted.at(ids, at.index)
        near_by = _tolerance(rounding, mean - at.head[nominal.clamp(min=0)])
        label = torch.where(residual_of_label(nominal) <= near_by, nominal, best)
        over, tolerance = residual_of_label(label), _tolerance(rounding, mean - at.head[label.clamp(min=0)])
        label = torch.where(over <= tolerance, label, NONE)
        place = _place(ids, label, at.index)
        readings.append(
            LabelEstimate(kind=kind, place=place, label=label, left=over, tolerance=tolerance, beside=beside)
        )

    # The source whose labels lie nearest to their slots.
    def near(reading: LabelEstimate) -> float:
        gap = (reading.place - at.index).abs()
        return float(((reading.place >= 0) / (1.0 + gap)).sum())

    return max(readings, key=near)


def _sources(crafted: DesignedBatch) -> dict[str, Tensor]:
    """Draft ids [S] that each token of the row has as a label, by where they come from."""
    made: dict[str, Tensor] = {}
    if crafted.teacher is not None:
        best = crafted.teacher.argmax(-1)
        made["teacher"] = torch.cat((torch.tensor([NONE]), best[:-1]))  # of the token that is predicted
    if crafted.data is not None:
        made["data"] = crafted.data
    return made or {"": torch.full_like(crafted.batch.tokens, NONE)}


def _place(ids: Tensor, label: Tensor, index: Tensor) -> Tensor:
    """[n] the place nearest to each slot's where its label occurs in `ids` [S], NONE where it does not."""
    same = (ids[None] == label[:, None]) & (label[:, None] >= 0)
    distance = (torch.arange(len(ids))[None] - index[:, None]).abs().double()
    distance[~same] = float("inf")
    nearest = distance.min(-1)
    return torch.where(nearest.values.isfinite(), nearest.indices, NONE)


def _spread(crafted: DesignedBatch, at: HeadGradients, rounding: Tensor) -> LabelEstimate:
    """The state whose distribution alone, by KL, explains the gradient best."""
    assert crafted.teacher is not None
    means = crafted.teacher.softmax(-1) @ at.head
    along = (at.gradient * at.mean_head_row).sum(-1, keepdim=True) - at.gradient @ means.T
    size = (at.mean_head_row[:, None] - means[None]).square().sum(-1)
    gain = torch.where(along > 0, along.square() / size.clamp(min=1e-30), torch.zeros_like(along))
    state = gain.argmax(-1)
    column = at.mean_head_row - means[state]
    left, tolerance = _residual_outside(at.gradient, [column]), _tolerance(rounding, column)
    return _distribution(state + 1, left, tolerance, BesideTerms())


def _distribution(place: Tensor, left: Tensor, tolerance: Tensor, beside: BesideTerms) -> LabelEstimate:
    """Slots [n] trained on a distribution, where little enough is left over."""
    place = torch.where(left <= tolerance, place, NONE)
    return LabelEstimate(
        kind="distribution",
        place=place,
        label=torch.full_like(place, NONE),
        left=left,
        tolerance=tolerance,
        beside=beside,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelStep:
    """One step on the row of `design_label_batch`, and the labels read from it."""

    crafted: DesignedBatch
    shown: AdapterStep
    """With its graph."""
    states: Tensor
    """[S, N, D], the leaf that it was made from."""
    at: HeadGradients
    reading: LabelEstimate | None
    """None where no slot gets a gradient."""


_STEPS: WeakKeyDictionary[ExaminedAdapter, LabelStep] = WeakKeyDictionary()


def take_label_step(subject: ExaminedAdapter) -> LabelStep:
    """The step that `labels` and `inputs` share."""
    if subject not in _STEPS:
        crafted = design_label_batch(subject)
        states = crafted.states.clone().requires_grad_(True)
        shown = subject.step(crafted.batch, states, anchors=crafted.anchors)
        at = HeadGradients.of(shown)
        reading = estimate_labels(subject, crafted, at) if len(at) else None
        _STEPS[subject] = LabelStep(crafted=crafted, shown=shown, states=states, at=at, reading=reading)
    return _STEPS[subject]
