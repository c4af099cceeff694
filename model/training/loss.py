"""The objective: terms, slot weights and reduction, without ever holding [A x B x V].

Blocks go through the frozen head in chunks. For each chunk the loss and its gradient at the head's input are
computed at once, in closed form, and the logits are dropped; backward only scales the stored gradient
[A, B, D]. Everything after the head's matrix product runs in fp32 or wider (in bf16 the divergences cancel,
speculators#788). Every term is a function of the draft's distribution q and a label or the teacher's
distribution p at one slot:

    ce   -log q[label]                          kl   sum p log(p / q)          rkl  sum q log(q / p)
    js   (KL(p|m) + KL(q|m)) / 2, m = (p+q)/2   tv   sum |p - q| / 2           nla  -log(1 - tv)
    lk   h kl + (1 - h) tv, h = exp(-eta (1 - tv)) without gradient

1 - tv = sum min(p, q) is the chance that speculative sampling accepts the slot; nla and lk are the LK losses
of arXiv 2602.23881. Each returns its gradient with respect to the logits of q beside its value.

Shapes: A anchors (blocks), B slots, V the draft's vocabulary, D width, n slots of a chunk, T teacher states.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from parity.errors import ParityError

Reduction = Literal["weighted_mean", "mask_mean", "batch_mean"]
"""Numerator sum of w * l over: sum of w; number of supervised slots (speculators); number of samples
(SpecForge's D-PACE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpDecay:
    """w_k = exp(-(k - 1) / gamma) for slots k = 1..B-1 (arXiv 2602.06036; gamma 7, 5, 4 for B 16, 10, 8)."""

    gamma: float

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ParityError("exp weights", f"gamma {self.gamma}", "give gamma above 0, in slots")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dpace:
    """D-PACE (arXiv 2605.18810): a slot weighs what the draft may still gain behind it, without gradient.

    s_i = (1 - alpha) q[label_i] + alpha on supervised slots, 1 elsewhere; w_k = sum over supervised j >= k of
    the product of s_1..s_j. The confidence is the label's; speculators takes exp(-term), the same for ce.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ParityError("dpace weights", f"alpha {self.alpha}", "give alpha from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform:
    """Every supervised slot weighs 1."""


SlotWeighting = ExpDecay | Dpace | Uniform


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised."""

    terms: Mapping[str, float]
    """Term name -> its factor; a mixture is their sum."""
    weights: SlotWeighting
    """How slots weigh against each other."""
    reduction: Reduction = "weighted_mean"
    """What the weighted sum is divided by."""
    temperature: float = 1.0
    """Divides both sides' logits in every term but ce. No factor of temperature squared is added."""
    lk_eta: float = 3.0
    """eta of `lk` (the paper's best)."""
    chunk_slots: int = 128
    """Slots sent through the head at once: logits are [chunk_slots, V]. At least one block. 128 is fastest on
    one CPU thread: at V 4,096 a chunk stays in cache, at 32,768 the product is still dense."""

    def __post_init__(self) -> None:
        unknown = sorted(self.terms.keys() - {"ce"} - SOFT_TERMS.keys())
        if unknown or not self.terms:
            do = f"use one or more of ce, {', '.join(SOFT_TERMS)}"
            raise ParityError("loss terms", ", ".join(unknown) or "none", do)
        if not self.temperature > 0:
            raise ParityError("a loss temperature", f"{self.temperature}", "give one above 0")

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the teacher's distribution."""
        return any(name != "ce" for name in self.terms)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherStates:
    """The target's distribution at every slot, kept as states: logits are formed chunk by chunk."""

    states: Tensor
    """[T, D] what enters the target's head, after its final norm."""
    index: Tensor
    """[A, B] which state predicts the slot's token (`Blocks.teacher_index`)."""
    head: Tensor
    """[V, D] the head's rows for the draft's vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """Sums of one batch. Sums add up over batches and ranks; `loss` divides."""

    numerator: Tensor
    """Scalar, in the graph: sum of w * l over all supervised slots and terms."""
    denominator: Tensor
    """Scalar, no gradient: what the reduction divides by."""
    terms: dict[str, Tensor]
    """Per term its own sum of w * l, before its factor, no gradient."""
    correct: Tensor
    """[B] supervised slots whose label is the draft's argmax."""
    counted: Tensor
    """[B] supervised slots."""
    accepted: Tensor
    """Scalar: sum over blocks of 1 + the run of correct slots from slot 1; an unsupervised slot ends it."""
    expected: Tensor
    """Scalar: the same with each slot's chance of acceptance, sum min(p, q) or without a teacher q[label]."""
    blocks: Tensor
    """Scalar: blocks with a supervised slot. accepted / blocks and expected / blocks are accepted lengths,
    the bonus token included."""

    def loss(self, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """numerator / denominator, 0 where nothing is supervised.

        `reduce` maps this rank's denominator to the one to divide by: under DDP, which averages gradients,
        the all-reduced sum over the world size; in gradient accumulation the sum over the window.
        """
        denominator = self.denominator if reduce is None else reduce(self.denominator)
        return self.numerator / torch.where(denominator > 0, denominator, torch.ones_like(denominator))


Term = tuple[Tensor, Tensor]
"""A term's value [n] and its gradient with respect to the logits of q, [n, V]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftTeacherPair:
    """Draft q and teacher p at n slots, as probabilities and logarithms, each [n, V]."""

    q: Tensor
    log_q: Tensor
    p: Tensor
    log_p: Tensor


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """Gradient at the logits from the gradient `slope` at the probabilities: q (slope - sum q slope)."""
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _kl(pair: DraftTeacherPair, eta: float) -> Term:
    return (pair.p * (pair.log_p - pair.log_q)).sum(-1), pair.q - pair.p


def _rkl(pair: DraftTeacherPair, eta: float) -> Term:
    ratio = pair.log_q - pair.log_p
    return (pair.q * ratio).sum(-1), _through_softmax(pair.q, ratio)


def _js(pair: DraftTeacherPair, eta: float) -> Term:
    log_m = torch.logaddexp(pair.log_p, pair.log_q) - math.log(2)
    from_q = pair.log_q - log_m
    value = (pair.p * (pair.log_p - log_m)).sum(-1) + (pair.q * from_q).sum(-1)
    return value / 2, _through_softmax(pair.q, from_q / 2)


def _tv(pair: DraftTeacherPair, eta: float) -> Term:
    gap = pair.p - pair.q
    return gap.abs().sum(-1) / 2, _through_softmax(pair.q, -(gap > 0).to(gap.dtype))


def _nla(pair: DraftTeacherPair, eta: float) -> Term:
    distance, slope = _tv(pair, eta)
    overlap = (1 - distance).clamp_min(torch.finfo(distance.dtype).tiny)
    return -overlap.log(), slope / overlap[:, None]


def _lk(pair: DraftTeacherPair, eta: float) -> Term:
    divergence, divergence_slope = _kl(pair, eta)
    distance, distance_slope = _tv(pair, eta)
    share = torch.exp(-eta * (1 - distance))
    slope = share[:, None] * divergence_slope + (1 - share)[:, None] * distance_slope
    return share * divergence + (1 - share) * distance, slope


SOFT_TERMS: dict[str, Callable[[DraftTeacherPair, float], Term]] = {
    "kl": _kl,
    "rkl": _rkl,
    "js": _js,
    "tv": _tv,
    "nla": _nla,
    "lk": _lk,
}
"""Terms against the teacher's distribution, by the recipe's names."""


def slot_weights(weights: SlotWeighting, supervised: Tensor, confidence: Tensor) -> Tensor:
    """w [A, B], zero where not supervised. supervised bool [A, B], confidence q[label] [A, B]."""
    on = supervised.to(confidence.dtype)
    match weights:
        case Uniform():
            return on
        case ExpDecay(gamma=gamma):
            slot = torch.arange(on.shape[1], device=on.device, dtype=on.dtype)
            return on * torch.exp(-(slot - 1) / gamma)
        case Dpace(alpha=alpha):
            smooth = torch.where(supervised, (1 - alpha) * confidence + alpha, torch.ones_like(on))
            reach = smooth.cumprod(1) * on
            return on * reach.flip(1).cumsum(1).flip(1)


def objective(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    supervised: Tensor,
    config: LossConfig,
    *,
    teacher: TeacherStates | None = None,
    samples: int = 1,
) -> Objective:
    """The objective of one batch.

    hidden [A, B, D] what enters the head; head [V, D], frozen whatever its flag says; labels [A, B] ids of
    the draft's vocabulary, negative where there is none; supervised bool [A, B], slot 0 never counts; teacher
    where a term needs one (else it serves `expected`); samples is what batch_mean divides by.
    """
    if config.needs_teacher and teacher is None:
        asked, do = f"loss terms {', '.join(config.terms)}", "capture the teacher state, or use ce alone"
        raise ParityError(asked, "no teacher states", do)
    supervised = supervised & (labels >= 0)
    supervised[:, 0] = False
    batch = _Batch(head=head.detach(), labels=labels, supervised=supervised, config=config, teacher=teacher)
    numerator, weight, terms, per_slot, lengths = _Chunked.apply(hidden, batch)  # type: ignore[no-untyped-call]
    counted = supervised.sum(0)
    denominators = {"weighted_mean": weight, "mask_mean": counted.sum().to(weight), "batch_mean": samples}
    return Objective(
        numerator=numerator,
        denominator=torch.as_tensor(denominators[config.reduction]).to(weight),
        terms=dict(zip(config.terms, terms, strict=True)),
        correct=per_slot,
        counted=counted,
        accepted=lengths[0],
        expected=lengths[1],
        blocks=supervised.any(1).sum(),
    )


@torch.no_grad()
def teacher_labels(teacher: TeacherStates, supervised: Tensor, chunk_slots: int = 128) -> Tensor:
    """The teacher's argmax at every supervised slot, [A, B], -1 elsewhere; a state meets the head once."""
    states, where = teacher.index[supervised].unique(return_inverse=True)
    best = [_logits(teacher.states[part], teacher.head).argmax(-1) for part in states.split(chunk_slots)]
    labels = torch.full_like(teacher.index, -1)
    labels[supervised] = torch.cat(best)[where] if best else labels[supervised]
    return labels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Batch:
    """What `_Chunked` needs beside the hidden states; nothing in it takes a gradient."""

    head: Tensor
    labels: Tensor
    supervised: Tensor
    config: LossConfig
    teacher: TeacherStates | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Slots:
    """n supervised slots of one chunk."""

    values: list[Tensor]
    """Per term its value [n]."""
    slope: Tensor | None
    """[n, V] gradient of the mixture at the logits, before slot weights."""
    confidence: Tensor
    """[n] q[label]."""
    chance: Tensor
    """[n] chance of acceptance."""
    right: Tensor
    """bool [n]: argmax is the label."""


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[n, D] -> [n, V]: the product in the head's dtype, the result in fp32 or wider."""
    logits = F.linear(hidden.to(head.dtype), head)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _slots(logits: Tensor, labels: Tensor, teacher: Tensor | None, config: LossConfig, grad: bool) -> _Slots:
    """All terms at n slots: logits [n, V], labels [n], the teacher's logits [n, V] or None."""
    right = logits.argmax(-1) == labels
    log_q = logits.log_softmax(-1)
    ce = -log_q.gather(1, labels[:, None]).squeeze(1)
    values, slope, chance = {"ce": ce}, None, torch.exp(-ce)
    if teacher is not None:
        log_p = teacher.log_softmax(-1)
        chance = torch.minimum(log_q, log_p).exp_().sum(-1)
        values, slope = _soft_terms(log_q, log_p, config, grad)
        values["ce"] = ce
    factor = config.terms.get("ce", 0.0)
    if grad and factor:
        q = log_q.exp_()  # in place: nothing below needs log_q, and a chunk is mostly memory traffic
        slope = q.mul_(factor) if slope is None else slope.add_(q, alpha=factor)
        slope[torch.arange(len(labels), device=labels.device), labels] -= factor
    terms = [values[name] for name in config.terms]
    return _Slots(values=terms, slope=slope, confidence=torch.exp(-ce), chance=chance, right=right)


def _soft_terms(
    log_q: Tensor, log_p: Tensor, config: LossConfig, grad: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Values of the terms against the teacher; the gradient [n, V] of their mixture at the draft's logits."""
    values: dict[str, Tensor] = {}
    slope: Tensor | None = None
    if not config.needs_teacher:
        return values, slope
    heat = config.temperature
    if heat != 1.0:
        log_q, log_p = ((x / heat).log_softmax(-1) for x in (log_q, log_p))
    pair = DraftTeacherPair(q=log_q.exp(), log_q=log_q, p=log_p.exp(), log_p=log_p)
    for name, factor in config.terms.items():
        if name != "ce":
            values[name], term_slope = SOFT_TERMS[name](pair, config.lk_eta)
            if grad:
                scaled = term_slope.mul_(factor / heat)
                slope = scaled if slope is None else slope.add_(scaled)
    return values, slope


class _Chunked(torch.autograd.Function):
    """hidden [A, B, D] -> numerator; beside it, without gradient, what `Objective` reports."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, batch: _Batch) -> tuple[Tensor, ...]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden) if grad else None
        sums = torch.zeros(len(batch.config.terms) + 2, dtype=torch.float64, device=hidden.device)
        right = torch.zeros_like(batch.supervised)
        chance = torch.zeros(right.shape, dtype=wide, device=hidden.device)
        size = max(1, batch.config.chunk_slots // hidden.shape[1])
        for start in range(0, len(hidden), size):
            _chunk(hidden, batch, slice(start, start + size), (gradient, sums, right, chance))
        if grad:
            ctx.save_for_backward(gradient)
        weight, numerator, terms = sums[0].to(wide), sums[1].to(wide), sums[2:].to(wide)
        some = batch.supervised.any(1)
        runs = torch.stack([right.to(wide), chance])[..., 1:].cumprod(-1).sum(-1) + 1
        lengths = (runs * some).sum(-1)
        correct = right.sum(0)
        ctx.mark_non_differentiable(weight, terms, correct, lengths)
        return numerator, weight, terms, correct, lengths

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, numerator: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * numerator.to(gradient.dtype), None


def _chunk(
    hidden: Tensor, batch: _Batch, blocks: slice, out: tuple[Tensor | None, Tensor, Tensor, Tensor]
) -> None:
    """Whole blocks (D-PACE looks along the block); adds to `out`: gradient, sums, right, chance."""
    gradient, sums, right, chance = out
    on, teacher = batch.supervised[blocks], batch.teacher
    if not on.any():
        return
    inputs = hidden[blocks][on]
    soft = None if teacher is None else _logits(teacher.states[teacher.index[blocks][on]], teacher.head)
    logits = _logits(inputs, batch.head)
    slots = _slots(logits, batch.labels[blocks][on], soft, batch.config, gradient is not None)
    confidence = torch.zeros(on.shape, dtype=slots.confidence.dtype, device=on.device)
    confidence[on] = slots.confidence
    weights = slot_weights(batch.config.weights, on, confidence)[on]
    per_term = torch.stack(slots.values) @ weights
    factors = torch.tensor(list(batch.config.terms.values()), dtype=sums.dtype, device=sums.device)
    sums += torch.cat([weights.sum()[None], (per_term.to(sums) @ factors)[None], per_term.to(sums)]).to(sums)
    right[blocks][on] = slots.right
    chance[blocks][on] = slots.chance.to(chance.dtype)
    if gradient is not None and slots.slope is not None:
        at_input = (slots.slope.to(batch.head.dtype) @ batch.head).to(weights.dtype) * weights[:, None]
        gradient[blocks][on] = at_input.to(gradient.dtype)
