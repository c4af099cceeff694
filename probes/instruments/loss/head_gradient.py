"""The gradient where hidden states enter the head, and what each term of a loss would leave there.

    head = HeadGradients.of(shown)
    columns = head.columns(["ce:data", "kl"], labels, teacher)      # name -> [n, D]

No trainer has to expose logits: they are formed here, in float64, from the hidden states and the head's rows. A term
is written down as its value only, and differentiated by autograd, so that nothing is shared with the closed forms
of `parity.model.training.loss` that are under examination.

Shapes: A anchors, B slots, n slots that get a gradient, D width, V draft vocabulary, Vt the target's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.subject import AdapterError, ExaminedAdapter, list_fc_taps

LOGIT_CHUNK = 2**21
"""Elements of one [slots, V] piece: 16 MiB in float64."""
FINAL_STATES = ("final.postnorm", "final.prenorm")
"""Taps behind the last layer."""
SOFT = ("kl", "rkl", "js", "tv", "nla", "lk")
"""Terms against the teacher's distribution, by the recipe's names."""

NormFunction = Callable[[Tensor], Tensor]
"""[..., D] -> [..., D]."""

_WIDE: list[tuple[Tensor, int, Tensor]] = []
"""The head that was widened last: itself, its version, the copy. Every step exposes the same one, and a copy of
32,768 rows of 1,024 takes longer than a product with it."""


def widen_head(head: Tensor) -> Tensor:
    """[V, D] in float64 on the CPU."""
    for known, version, copy in _WIDE:
        same = known.data_ptr() == head.data_ptr() and known.shape == head.shape and known.dtype == head.dtype
        if same and head.stride() == known.stride() and version == head._version:
            return copy
    copy = head.detach().double().cpu()
    _WIDE[:] = [(head.detach(), head._version, copy)]  # holding the head keeps its address its own
    return copy


def compute_term_values(
    name: str, log_q: Tensor, labels: Tensor | None, log_p: Tensor | None, eta: float = 3.0
) -> Tensor:
    """Values of one term of a loss, slot by slot.

    ce and smoothing (cross-entropy to the uniform distribution) need no teacher; nla and lk are those of
    arXiv 2602.23881.

    Args:
        name: ce, smoothing, or one of `SOFT`.
        log_q: [n, V] log-probabilities of the draft.
        labels: [n] draft ids, for ce.
        log_p: [n, V] log-probabilities of the teacher, for the soft terms.
        eta: how fast lk passes from KL to TV as the distributions overlap.

    Returns:
        [n] in nats (tv: a probability).
    """
    # Hard: one token, or all of them alike.
    if name == "smoothing":
        return -log_q.mean(-1)
    if name == "ce":
        assert labels is not None
        return -log_q.gather(1, labels[:, None]).squeeze(1)
    # Soft: the two distributions, in either direction or against their mean.
    assert log_p is not None
    q, p = log_q.exp(), log_p.exp()
    if name == "kl":
        return (p * (log_p - log_q)).sum(-1)
    if name == "rkl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
    # By what the distributions have in common, which is the chance that speculative sampling accepts.
    overlap = torch.minimum(p, q).sum(-1)
    if name == "tv":
        return 1 - overlap
    if name == "nla":
        return -overlap.log()
    assert name == "lk", name
    share = torch.exp(-eta * overlap.detach())
    return share * (p * (log_p - log_q)).sum(-1) + (1 - share) * (1 - overlap)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadGradients:
    """The n slots of one step that get a gradient, block by block."""

    block: Tensor
    """[n] which anchor."""
    slot: Tensor
    """[n] 0..B-1."""
    index: Tensor
    """[n] token index of the slot: anchor + slot, which may lie beyond the row."""
    gradient: Tensor
    """[n, D] of the loss at the head's input, float64."""
    hidden: Tensor
    """[n, D] float64."""
    head: Tensor
    """[V, D] float64."""
    shown: AdapterStep
    shape: tuple[int, int]
    """A, B."""
    grid: torch.dtype | None = None
    """The 16-bit dtype that logits are rounded to, as a product in that dtype does; None: they are exact."""

    @classmethod
    def of(cls, shown: AdapterStep) -> "HeadGradients":
        """From a step whose graph is alive.

        Args:
            shown: the step, with the loss made from its `hidden` [A, B, D].

        Raises:
            AdapterError: the loss does not depend on the hidden states, or something is not finite.
        """
        # One backward pass down to the hidden states, and no further.
        (gradient,) = torch.autograd.grad(shown.loss, shown.hidden, allow_unused=True, retain_graph=True)
        if gradient is None:
            raise AdapterError(
                "step.hidden", "the tensor that the loss is computed from", "one it does not depend on"
            )
        gradient, hidden = gradient.detach(), shown.hidden.detach()
        if not (gradient.isfinite().all() and hidden.isfinite().all() and shown.head.isfinite().all()):
            raise AdapterError(
                "step", "finite hidden states, head and gradient", "values that are not finite"
            )
        # A slot that is not trained has a gradient of exactly 0.
        block, slot = (gradient != 0).any(-1).nonzero(as_tuple=True)
        return cls(
            block=block.cpu(),
            slot=slot.cpu(),
            index=shown.anchors.cpu()[block.cpu()] + slot.cpu(),
            gradient=gradient[block, slot].double().cpu(),
            hidden=hidden[block, slot].double().cpu(),
            head=widen_head(shown.head),
            shown=shown,
            shape=(hidden.shape[0], hidden.shape[1]),
        )

    def __len__(self) -> int:
        return len(self.block)

    def part(self, rows: Tensor) -> "HeadGradients":
        """Some of the slots. rows: [m] which."""
        by_slot = ("block", "slot", "index", "gradient", "hidden")
        return replace(self, **{name: getattr(self, name)[rows] for name in by_slot})

    def round_to_head_dtype(self) -> "HeadGradients | None":
        """The same with logits rounded to the head's dtype, None where that has more than 16 bits."""
        dtype = self.shown.head.dtype
        return replace(self, grid=dtype) if dtype.itemsize == 2 else None

    def on_grid(self, logits: Tensor) -> Tensor:
        """Logits [n, V] rounded to `grid`, if there is one; gradients go through as if they were not."""
        if self.grid is None:
            return logits
        return logits + (logits.detach().to(self.grid).double() - logits.detach())

    @cached_property
    def pieces(self) -> list[slice]:
        """Slots in pieces whose logits fit `LOGIT_CHUNK`."""
        size = max(1, LOGIT_CHUNK // len(self.head))
        return [slice(at, at + size) for at in range(0, len(self), size)]

    def over(self, make: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """`make(piece, log-probabilities [piece, V])` of every piece, joined."""
        made = [
            make(piece, self.on_grid(self.hidden[piece] @ self.head.T).log_softmax(-1))
            for piece in self.pieces
        ]
        return torch.cat(made) if made else self.hidden.new_zeros(0)

    @cached_property
    def mean_head_row(self) -> Tensor:
        """[n, D] the head's mean row under the draft's distribution: every cross-entropy's gradient begins with it."""
        return self.over(lambda _, log_q: log_q.exp() @ self.head)

    @cached_property
    def best(self) -> tuple[Tensor, Tensor]:
        """[n] the draft's argmax, and [n] its probability."""
        packed = self.over(lambda _, log_q: torch.stack(tuple(map(torch.Tensor.double, log_q.max(-1))), -1))
        return packed[:, 1].long(), packed[:, 0].exp()

    def chance(self, labels: Tensor) -> Tensor:
        """[n] the draft's probability of each label [n]; 0 where there is none (negative)."""
        made = self.over(
            lambda piece, log_q: log_q.gather(1, labels[piece].clamp(min=0)[:, None]).squeeze(1).exp()
        )
        return made * (labels >= 0)

    def columns(
        self,
        names: Sequence[str],
        labels: Mapping[str, Tensor],
        teacher: Tensor | None,
        *,
        heat: float = 1.0,
        eta: float = 3.0,
    ) -> dict[str, Tensor]:
        """Gradient at the head's input of each term alone, with weight 1.

        Args:
            names: of `compute_term_values`, and one `ce:SOURCE` for each source of labels; `ce@heat:SOURCE` where the
                temperature divides the logits of the cross-entropy too.
            labels: [n] draft ids by source.
            teacher: [n, V] logits.
            heat: the temperature, by which both sides' logits are divided in the soft terms.
            eta: of lk.

        Returns:
            [n, D] by name.
        """
        # Hard terms at temperature 1 in closed form: the mean head row minus the label's, or minus the mean of all.
        made: dict[str, Tensor] = {}
        for name in names:
            if name.startswith("ce:"):
                made[name] = self.mean_head_row - self.head[labels[name[3:]].clamp(min=0)]
            elif name == "smoothing":
                made[name] = self.mean_head_row - self.head.mean(0)
        soft = [name for name in names if name not in made]
        if not soft:
            return made
        # The others by autograd, piece by piece; all terms of a piece share its logits.
        parts: dict[str, list[Tensor]] = {name: [] for name in soft}
        for piece in self.pieces:
            hidden = self.hidden[piece].clone().requires_grad_(True)
            log_p = (
                None if teacher is None else (self.on_grid(teacher[piece].double()) / heat).log_softmax(-1)
            )
            with torch.enable_grad():
                log_q = (self.on_grid(hidden @ self.head.T) / heat).log_softmax(-1)
                for name in soft:
                    at = labels[name.split(":")[1]][piece].clamp(min=0) if ":" in name else None
                    term = name.split("@")[0]
                    value = compute_term_values(term, log_q, at, log_p, eta).sum()
                    parts[name].append(torch.autograd.grad(value, hidden, retain_graph=True)[0])
        return made | {name: torch.cat(each) for name, each in parts.items()}

    def rounding(self, labels: Tensor, teacher: Tensor | None) -> Tensor:
        """By how much a gradient of weight 1 is off when logits are formed as the trainer does, in its own dtypes.

        Args:
            labels: [n] draft ids, negative where there is none.
            teacher: [n, V] logits, None for cross-entropy alone.

        Returns:
            [n] the larger of cross-entropy's and the divergence's error, absolute.
        """
        shown, rows = self.shown, (self.block, self.slot)
        dtype = shown.head.dtype
        hidden = shown.hidden.detach().cpu()[rows]
        head = shown.head.detach().cpu()
        errors = []
        for piece in self.pieces:
            # Cross-entropy's gradient through the head's dtype, against the exact one.
            wide = torch.promote_types(dtype, torch.float32)
            q = (hidden[piece].to(dtype) @ head.T).to(wide).softmax(-1)
            y = torch.nn.functional.one_hot(labels[piece].clamp(min=0), len(head)).to(q)
            exact = self.mean_head_row[piece] - self.head[labels[piece].clamp(min=0)]
            error = ((q - y).to(dtype) @ head).to(hidden.dtype).double() - exact
            errors.append(error.norm(dim=-1))
            # A divergence's, whose teacher is rounded as well.
            if teacher is not None:
                rounded = teacher[piece].to(dtype).to(wide).softmax(-1)
                p = teacher[piece].double().softmax(-1)
                soft = ((q - rounded).to(dtype) @ head).to(hidden.dtype).double()
                error = soft - (self.mean_head_row[piece] - p @ self.head)
                errors[-1] = torch.maximum(errors[-1], error.norm(dim=-1))
        return torch.cat(errors) if errors else torch.zeros(0, dtype=torch.float64)


def find_draft_ids(subject: ExaminedAdapter, shown: AdapterStep, batch: Batch) -> Tensor | None:
    """Which id each of the target's tokens has in the draft's vocabulary.

    A reduced vocabulary is read from the head's rows: each is looked up among the target's own.

    Args:
        subject: the adapter that is examined.
        shown: a step of it, for the head.
        batch: the row that the target's reference is computed on.

    Returns:
        [Vt], -1 where a token has none; None where the head's rows are not the target's, or no reference is exposed.
    """
    size = subject.adapter.vocabulary
    if len(shown.head) == size:
        return torch.arange(size)
    try:
        own = subject.reference(batch).head
    except NotExposed:
        return None
    found = find_row_ids(shown.head, own)
    if (found < 0).any():
        return None
    ids = torch.full((size,), -1)
    ids[found] = torch.arange(len(found))
    return ids


def find_row_ids(rows: Tensor, among: Tensor) -> Tensor:
    """Where equal rows are, compared in the narrower of both dtypes.

    Args:
        rows: [v, D].
        among: [V, D].

    Returns:
        [v] for each of `rows` the number of the equal one of `among`, -1 where none is.
    """
    dtype = rows.dtype if rows.dtype.itemsize <= among.dtype.itemsize else among.dtype
    keys = [row.tobytes() for row in among.detach().cpu().to(dtype).float().numpy()]
    known = {key: number for number, key in reversed(list(enumerate(keys)))}
    wanted = rows.detach().cpu().to(dtype).float().numpy()
    return torch.tensor([known.get(row.tobytes(), -1) for row in wanted])


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherSlice:
    """Which captured slice the teacher is made from, and how."""

    number: int
    tap: str
    norm: NormFunction | None
    """The final norm where the slice was taken before it."""

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        """[m, V] in float64, from states [m, N, D] and head [V, D]."""
        rows = states[:, self.number].detach()
        if self.norm is not None:
            with torch.no_grad():
                rows = self.norm(rows)
        return rows.double() @ widen_head(head).T

    def scale(self, like: Tensor) -> Tensor | None:
        """[D] what the norm multiplies each channel with, None without a norm. like: states of its dtype, [..., D]."""
        if self.norm is None:
            return None
        with torch.no_grad():
            return self.norm(torch.ones(1, like.shape[-1], dtype=like.dtype))[0].double()


def find_teacher_slice(subject: ExaminedAdapter, batch: Batch) -> tuple[TeacherSlice | None, str]:
    """The captured slice that is no conditioning layer.

    Args:
        subject: the adapter that is examined.
        batch: the row that the target's reference is computed on, for its norm.

    Returns:
        The slice, or None and the reason why there is none to compute with.
    """
    wanted, recipe = list_fc_taps(subject.recipe), subject.recipe
    rest = [(n, tap) for n, tap in enumerate(subject.adapter.slices) if tap not in wanted]
    if not rest:
        return None, "no teacher slice is captured"
    number, tap = next(((n, tap) for n, tap in rest if tap in FINAL_STATES), rest[-1])
    before = tap == "final.prenorm" or (tap not in FINAL_STATES and recipe.teacher is not None)
    if not before:
        return TeacherSlice(number=number, tap=tap, norm=None), ""
    try:
        norm = subject.reference(batch).norm
    except NotExposed as missing:
        return (
            None,
            f"the slice is taken before the final norm, and the adapter does not show {missing.args[0]}",
        )
    if norm is None:
        return None, "the slice is taken before the final norm, which the adapter's reference does not hold"
    return TeacherSlice(number=number, tap=tap, norm=norm), ""
