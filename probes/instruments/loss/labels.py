"""Which label a slot is trained on, read from its gradient at the head's input.

    reading = read(subject, crafted, at)          # kind, place and label of every slot that gets a gradient

Of all tokens the label is the one whose cross-entropy explains the gradient, once what soft terms and smoothing may add
is projected out; a distribution is told by which state's it is.

Shapes as in `parity.probes.instruments.loss.head_gradient`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
ROUNDINGS = 8.0
SHIFTS = (0, 1, -1, 2, -2)
"""Places beside anchor + slot whose distribution is tried."""
ENOUGH = 0.5
"""Share of slots that a way of reading has to explain to be the way this trainer is read."""
NONE = -1
"""Place or label that is not read."""
SOFT = ("kl", "rkl", "js", "tv")
"""Terms that are projected out: nla has tv's direction, lk lies between kl and tv."""


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
    beside: tuple[str, ...] = ()
    """Terms that were projected out, or that explain the gradient on their own."""
    shift: int = 0
    """Place of the teacher that these terms take, beside the slot's own."""
    heat: float = 1.0

    @property
    def has_label(self) -> Tensor:
        """bool [n]: something was read."""
        return (self.place >= 0) | (self.label >= 0)


def estimate_labels(subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients) -> LabelEstimate:
    """The first way of reading that explains most slots; the one that explains most of them where none does."""
    rounding = _rounding(crafted, at)
    best = _hard(crafted, at, rounding)
    if _share(best) >= ENOUGH:
        return best
    others = [_hard(crafted, at, rounding, ("smoothing",))]
    if crafted.teacher is not None:
        others.append(_spread(crafted, at, rounding))
    best = max(best, *others, key=_share)
    if _share(best) >= ENOUGH or crafted.teacher is None:
        return best
    for shift, heat in product(SHIFTS, dict.fromkeys((subject.recipe.loss.temperature, 1.0))):
        soft = _beside(crafted, at, SOFT, shift, heat)
        whole, tolerance = _residual_outside(at.gradient, soft), _tolerance(rounding, soft[0])
        if float((whole <= tolerance).double().mean()) >= ENOUGH:
            place = torch.where(whole <= tolerance, at.index + shift, NONE)
            return LabelEstimate(
                kind="distribution",
                place=place,
                label=torch.full_like(place, NONE),
                left=whole,
                tolerance=tolerance,
                beside=SOFT,
                shift=shift,
                heat=heat,
            )
        best = max(best, _hard(crafted, at, rounding, ("smoothing", *SOFT), shift, heat), key=_share)
        if _share(best) >= ENOUGH:
            return best
    return best


def is_same_label(crafted: DesignedBatch, at: HeadGradients, before: LabelEstimate) -> Tensor:
    """bool [n]: the label that was read before explains the gradient of another step at the same slots."""
    columns = _beside(crafted, at, before.beside, before.shift, before.heat)
    if before.kind == "distribution":
        if not columns:
            assert crafted.teacher is not None
            teacher = crafted.teacher[(before.place - 1).clamp(min=0)]
            columns = [at.mean_head_row - teacher.softmax(-1) @ at.head]
    else:
        columns = [*columns, at.mean_head_row - at.head[before.label.clamp(min=0)]]
    return _residual_outside(at.gradient, columns) <= 2 * before.tolerance


def _beside(
    crafted: DesignedBatch, at: HeadGradients, names: Sequence[str], shift: int, heat: float
) -> list[Tensor]:
    """Columns of terms that are no hard label."""
    if not names:
        return []
    teacher = None if crafted.teacher is None else crafted.at(crafted.teacher, at.index - 1 + shift)
    return list(at.columns(names, {}, teacher, heat=heat).values())


def _share(reading: LabelEstimate) -> float:
    """Of slots that are read."""
    return float(reading.has_label.double().mean())


def _rounding(crafted: DesignedBatch, at: HeadGradients) -> Tensor:
    """[n] absolute error that rounding may make in a gradient of weight 1."""
    labels = torch.zeros(len(at), dtype=torch.long)
    teacher = None if crafted.teacher is None else crafted.at(crafted.teacher, at.index - 1)
    return ROUNDINGS * at.rounding(labels, teacher)


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
    beside: tuple[str, ...] = (),
    shift: int = 0,
    heat: float = 1.0,
) -> LabelEstimate:
    """The token whose cross-entropy explains the gradient best, besides the given terms."""
    gradient, mean = at.gradient, at.mean_head_row
    columns = _beside(crafted, at, beside, shift, heat)
    basis = _basis(columns) if columns else gradient.new_zeros(*gradient.shape, 0)

    def off(vectors: Tensor) -> Tensor:
        return vectors - torch.einsum("ndj,nj->nd", basis, torch.einsum("ndj,nd->nj", basis, vectors))

    rest, centre = off(gradient), off(mean)

    def residual_of_label(label: Tensor) -> Tensor:
        column = off(mean - at.head[label.clamp(min=0)])
        weight = (rest * column).sum(-1) / column.square().sum(-1).clamp(min=1e-30)
        over = (rest - weight[:, None] * column).norm(dim=-1) / gradient.norm(dim=-1)
        return torch.where((weight > 0) & (label >= 0), over, torch.inf)

    # <rest, mean - row> and |mean - row|^2 for every row of the head, off the other columns
    along = (rest * centre).sum(-1, keepdim=True) - rest @ at.head.T
    size = centre.square().sum(-1, keepdim=True) - 2 * centre @ at.head.T + at.head.square().sum(-1)
    for j in range(basis.shape[2]):
        size = size - (basis[:, :, j] @ at.head.T).square()
    gain = torch.where(along > 0, along.square() / size.clamp(min=1e-12), torch.zeros_like(along))
    best = gain.argmax(-1)
    readings = []
    for kind, ids in _sources(crafted).items():
        # rows of two tokens can be so near that either explains the gradient
        nominal = crafted.at(ids, at.index)
        near_by = _tolerance(rounding, mean - at.head[nominal.clamp(min=0)])
        label = torch.where(residual_of_label(nominal) <= near_by, nominal, best)
        over, tolerance = residual_of_label(label), _tolerance(rounding, mean - at.head[label.clamp(min=0)])
        label = torch.where(over <= tolerance, label, NONE)
        readings.append(
            LabelEstimate(
                kind=kind,
                place=_place(ids, label, at.index),
                label=label,
                left=over,
                tolerance=tolerance,
                beside=beside,
                shift=shift,
                heat=heat,
            )
        )

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
    """[n] the place nearest to each slot's where its label stands, NONE where it stands nowhere."""
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
    place = torch.where(left <= tolerance, state + 1, NONE)
    label = torch.full_like(place, NONE)
    return LabelEstimate(kind="distribution", place=place, label=label, left=left, tolerance=tolerance)


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelStep:
    """One step on the row of `telling`, and the labels read from it."""

    crafted: DesignedBatch
    shown: AdapterStep
    """With its graph."""
    states: Tensor
    """[S, N, D], the leaf that it was made from."""
    at: HeadGradients
    reading: LabelEstimate | None
    """None where no slot gets a gradient."""


_TOLD: WeakKeyDictionary[ExaminedAdapter, LabelStep] = WeakKeyDictionary()


def take_label_step(subject: ExaminedAdapter) -> LabelStep:
    """The step that `labels` and `inputs` share."""
    if subject not in _TOLD:
        crafted = design_label_batch(subject)
        states = crafted.states.clone().requires_grad_(True)
        shown = subject.step(crafted.batch, states, anchors=crafted.anchors)
        at = HeadGradients.of(shown)
        reading = estimate_labels(subject, crafted, at) if len(at) else None
        _TOLD[subject] = LabelStep(crafted=crafted, shown=shown, states=states, at=at, reading=reading)
    return _TOLD[subject]
