"""States that a head turns into a flat distribution whose argmax is a chosen token.

    space = LogitDirections.of(head)
    states = point_states(wanted, hidden, space, scale, strict=False)       # [m, D]

Shapes: m states (one a slot), D width, V draft vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TOP = 0.35
"""Probability that the teacher gives to its argmax, where the slice's scale is free to choose."""
TOP_RANGE = (0.15, 0.5)
"""What is taken where the final norm fixes the scale."""
TRIED = 160
"""Tokens tried for labels that the draft does not give."""
ANGLES = 24
"""Directions tried between a random one and the wanted token's row."""
RIDGE = 0.1
"""Of the mean variance of the head's rows along a direction."""
ORDINARY = 0.25
"""Of the median lead of tokens in states of length 1."""
LEAD = 0.25
"""By which share of the largest logit the wanted one has to lead while a direction is looked for."""
LOOSE = 0.02
"""Times as much lead is enough where heads have more than 16 bits."""
CLEAR = 0.05
"""Least lead of a logit, of one plus the largest: six times what rounding to bf16 may take from two logits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitDirections:
    """A head's rows, and the tokens whose logit can be made the largest by a state of ordinary length."""

    rows: Tensor
    """[V, D] float32, or float64 where the head is."""
    spread: Tensor
    """[D, D] covariance of the rows, ridge included."""
    ids: Tensor
    """Draft ids in a random order. Tokens that a target never saw have rows close to one another, and are left out."""
    lead: float
    """Least lead of a logit in a state of length 1 that counts as ordinary."""

    @classmethod
    def of(cls, head: Tensor) -> "LogitDirections":
        """Of a head; `TRIED` tokens are tried.

        Args:
            head: [V, D].
        """
        rows = head.detach().cpu().to(torch.promote_types(head.dtype, torch.float32))
        centred = rows[:: max(1, len(rows) // (4 * rows.shape[1]))]
        centred = centred - rows.mean(0)
        spread = centred.T @ centred
        spread = spread + RIDGE * spread.diagonal().mean() * torch.eye(len(spread), dtype=rows.dtype)
        order = torch.randperm(len(head), generator=torch.Generator().manual_seed(5))[:TRIED]
        space = cls(rows=rows, spread=spread, ids=order, lead=0.0)
        logits = _unit(space.aims(order)) @ rows.T
        leads = _lead(logits, order)
        least = ORDINARY * float(leads.median().clamp(min=0))
        good = (leads > least) & (leads > LEAD * logits.abs().amax(-1))
        return replace(space, ids=order[good] if good.any() else order[leads >= leads.max()], lead=least)

    def aims(self, wanted: Tensor) -> Tensor:
        """Directions in which the wanted tokens' logits stand out: their centred rows, partly whitened and without the
        rows' mean, as a trained head's rows have directions in common. What all logits have in common changes no
        probability, and costs bfloat16 its precision.

        Args:
            wanted: [m] draft ids.

        Returns:
            [m, D].
        """
        centred = self.rows[wanted] - self.rows.mean(0)
        return self.without_mean(torch.linalg.solve(self.spread, centred.T).T)

    def without_mean(self, states: Tensor) -> Tensor:
        """States [m, D] without their part along the mean row of the head."""
        mean = _unit(self.rows.mean(0)[None])[0]
        return states - (states @ mean)[:, None] * mean


def _unit(states: Tensor) -> Tensor:
    """States [m, D] of length 1."""
    made: Tensor = states / states.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    return made


def point_states(
    wanted: Tensor, hidden: Tensor, space: LogitDirections, scale: Tensor | None, strict: bool
) -> Tensor:
    """States that the head turns into a flat distribution whose argmax is the wanted token.

    Each is a random direction with the least share of the token's own row, or of the draft's hidden state, that leads
    clearly enough. Where nothing does, another token takes the wanted one's place.

    Args:
        wanted: [m] draft ids.
        hidden: [m, D] the draft's hidden states there.
        space: the head.
        scale: [D] factors of the norm in front of the head, None where there is no norm.
        strict: whether the lead has to outlive rounding to 16 bits.

    Returns:
        [m, D].
    """
    loose = 1.0 if strict else LOOSE
    made, clear = _mix_states(wanted, hidden, space, scale, loose)
    if not clear.all():
        poor = (~clear).nonzero().squeeze(-1)
        instead = space.ids[(poor * 5 + 3) % len(space.ids)]
        made[poor], _ = _mix_states(instead, space.rows[instead], space, scale, loose)
    return made if scale is None else made / _invert_scale(scale.to(made))


def _invert_scale(scale: Tensor) -> Tensor:
    """The norm's weight, 1 where it is 0."""
    return scale.where(scale.abs() > 1e-6, torch.ones_like(scale))


def _mix_states(
    wanted: Tensor, hidden: Tensor, space: LogitDirections, scale: Tensor | None, loose: float
) -> tuple[Tensor, Tensor]:
    """[m, D] what should enter the head, and bool [m]: the wanted token leads by more than rounding may take away."""
    # Towards the wanted token: along its row where that makes it the argmax, else along the draft's own state.
    rows = space.rows
    aim = space.aims(wanted)
    leads = (aim @ rows.T).argmax(-1) == wanted
    aim = _unit(torch.where(leads[:, None], aim, hidden.to(aim)))
    # Away from it: a random direction, which is flat.
    noise = torch.randn(aim.shape, generator=torch.Generator().manual_seed(6)).to(aim)
    noise = _unit(space.without_mean(noise))
    towards, away = aim @ rows.T, noise @ rows.T
    mixed, logits = aim.clone(), towards.clone()
    # From flat to sharp, each state stops at the first angle at which its token leads clearly.
    left = torch.arange(len(wanted))
    for step in range(1, ANGLES):
        angle = torch.tensor(torch.pi / 2 * step / ANGLES)
        tried = angle.sin() * towards[left] + angle.cos() * away[left]
        direction = angle.sin() * aim[left] + angle.cos() * noise[left]
        if scale is None:
            enough = _lead(tried, wanted[left]) > LEAD * tried.abs().amax(-1)
        else:
            seen = tried * _through(direction, scale)
            enough = (_lead(seen, wanted[left]) > 1) & (_top(seen, wanted[left]) > TOP_RANGE[0])
        mixed[left[enough]], logits[left[enough]] = direction[enough], tried[enough]
        left = left[~enough]
        if not len(left):
            break
    # How long: as the norm makes it, or so that the token's probability is `TOP`. Then the lead against rounding.
    short = _lead(logits, wanted) > space.lead * loose * mixed.norm(dim=-1) / 2
    size = _size(logits, wanted) if scale is None else _through(mixed, scale)
    logits = logits * size
    return mixed * size, short & (_lead(logits, wanted) > CLEAR * loose * (1 + logits.abs().amax(-1)))


def _lead(logits: Tensor, wanted: Tensor) -> Tensor:
    """[m] by how much the wanted logit is above the largest other."""
    own = logits.gather(1, wanted[:, None])
    return (own - logits.scatter(1, wanted[:, None], float("-inf")).amax(-1, keepdim=True)).squeeze(1)


def _through(direction: Tensor, scale: Tensor) -> Tensor:
    """[m, 1] how long the norm makes a state of this direction: it divides by the root mean square before `scale`."""
    before = direction / _invert_scale(scale.to(direction))
    return 1 / before.square().mean(-1, keepdim=True).sqrt()


def _top(logits: Tensor, wanted: Tensor) -> Tensor:
    """[m] probability of the wanted token."""
    return logits.softmax(-1).gather(1, wanted[:, None]).squeeze(1)


def _size(logits: Tensor, wanted: Tensor) -> Tensor:
    """[m, 1] the length at which the wanted token's probability is `TOP`, by bisection of its logarithm."""
    low, high = logits.new_full((len(logits), 1), 1e-3), logits.new_full((len(logits), 1), 1e3)
    for _ in range(16):
        middle = (low * high).sqrt()
        less = _top(logits * middle, wanted)[:, None] < TOP
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return low
