"""What law the weights of slots follow.

    law = recognise_law(slots)           # uniform, exp, dpace, ..., with its parameter

A law is accepted where it gives every slot's weight, up to one common factor, within the rounding error of that slot.

Shapes: n slots that get a gradient, A blocks, B slots of a block, G groups of slots.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

WeightArray = NDArray[np.float64]
Ints = NDArray[np.int64]

SUGGESTIVE = 0.3
"""Share of slots that must have a companion in their group before a grouping means anything."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedSlots:
    """The slots whose weights are to be explained; slot 0 is not among them."""

    block: Ints
    """[n] number of the block."""
    slot: Ints
    """[n] 1..B-1."""
    weight: WeightArray
    """[n] as fitted."""
    tolerance: WeightArray
    """[n] relative error that rounding may have made."""
    chance: WeightArray
    """[n] the draft's probability of the label."""
    value: WeightArray
    """[n] the terms' value, in which attached weights differ."""
    right: NDArray[np.bool_]
    """[n] the draft's argmax is the label."""
    document: Ints
    """[n] of the block's anchor."""
    size: int
    """B."""

    def grid(self, values: WeightArray, fill: float) -> WeightArray:
        """[A, B] of values [n], `fill` where nothing is supervised."""
        made = np.full((int(self.block.max()) + 1, self.size), fill)
        made[self.block, self.slot] = values
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightLaw:
    """How the weights are made."""

    kind: str
    """uniform, exp, dpace, dpace-confidence, dpace-continuation, dpace-attached, per-slot, per-block, streak, or
    unknown."""
    raw: WeightArray
    """[n] the law's weights, which are `weight / scale`."""
    scale: float
    """One over the denominator, as long as the terms' factors add up to 1."""
    scale_error: float
    """Relative standard error."""
    misfit: float
    """Largest deviation over its tolerance; the law is accepted at 1 and below."""
    rms: float
    """Root mean square of the same."""
    parameters: dict[str, float] = field(default_factory=dict)
    """gamma or alpha."""
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""
    sum: float | None = None
    """Of the weights themselves where `raw` also holds what flows through them."""

    @property
    def fits(self) -> bool:
        """Whether every slot's weight is explained."""
        return self.misfit <= 1


def recognise_law(slots: WeightedSlots, prefer: str = "") -> WeightLaw:
    """The law of the weights, `unknown` where none is found.

    Args:
        slots: the weights.
        prefer: the kind to take where two fit alike.
    """
    # From the simplest law to those that have a parameter for every group: the more freedom, the later.
    simple = _law(slots, "uniform", np.ones_like(slots.weight))
    if simple.fits:
        return simple
    exp = _exponential(slots)
    found = [law for law in (exp, *_dpace(slots)) if law is not None and law.fits]
    if found:
        least = 2 * min(law.rms for law in found)
        near = [law for law in found if law.rms <= least]
        return next((law for law in near if law.kind == prefer), near[0])
    for make in (_per_slot, _per_block, _streak):
        law = make(slots)
        if law is not None and law.fits:
            return law
    return _law(slots, "unknown", _means(slots.weight, slots.slot))


def _law(
    slots: WeightedSlots,
    kind: str,
    raw: WeightArray,
    parameters: Mapping[str, float] | None = None,
    **rest: object,
) -> WeightLaw:
    """With the factor that fits best, in relative terms."""
    if not (raw > 0).all() or not (slots.weight > 0).all():
        scale, deviation = 1.0, np.full(len(raw), np.inf)
        if np.isfinite(raw).all() and (raw != 0).all():
            scale = float(np.median(slots.weight / raw))
            deviation = np.abs(slots.weight / (scale * raw) - 1) if scale else deviation
    else:
        trust = 1 / slots.tolerance**2
        scale = float(np.exp((trust * np.log(slots.weight / raw)).sum() / trust.sum()))
        deviation = np.abs(slots.weight / (scale * raw) - 1)
    with np.errstate(invalid="ignore"):
        over = deviation / slots.tolerance
    return WeightLaw(
        kind=kind,
        raw=raw,
        scale=scale,
        scale_error=float(np.sqrt(np.mean(deviation**2) / len(raw))),
        misfit=float(over.max()),
        rms=float(np.sqrt(np.mean(over**2))),
        parameters=dict(parameters or {}),
        **rest,  # type: ignore[arg-type]
    )


def _exponential(slots: WeightedSlots) -> WeightLaw | None:
    """exp(-(k - 1) / gamma)."""
    place: WeightArray = slots.slot.astype(np.float64) - 1
    if not (slots.weight > 0).all() or len(set(slots.slot)) < 2:
        return None
    slope, error = _slope(place, np.log(slots.weight), slots.tolerance)
    if slope >= 0:
        return None
    gamma = -1 / slope
    law = _law(slots, "exp", np.exp(-place / gamma), {"gamma": gamma}, errors={"gamma": gamma**2 * error})
    return law


def _slope(x: WeightArray, y: WeightArray, tolerance: WeightArray) -> tuple[float, float]:
    """Of the weighted straight line, with its standard error."""
    trust = 1 / tolerance**2
    centre = (trust * x).sum() / trust.sum()
    spread = (trust * (x - centre) ** 2).sum()
    slope = float((trust * (x - centre) * y).sum() / spread)
    left = y - slope * (x - centre) - (trust * y).sum() / trust.sum()
    error = np.sqrt((trust * left**2).sum() / max(1, len(x) - 2) / spread)
    return slope, float(error)


# --- D-PACE -------------------------------------------------------------------------------------------

DPACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dpace": lambda prefix, on: _suffix(prefix * on),
    "dpace-confidence": lambda prefix, on: prefix,
    "dpace-continuation": lambda prefix, on: _suffix(prefix * on) / prefix,
}
"""arXiv 2605.18810 and SpecForge's two halves of it: the product of confidences up to a slot, and what it may still
gain behind it, alone."""


def _suffix(values: torch.Tensor) -> torch.Tensor:
    """[A, B] each slot's sum from itself to the block's end."""
    return values.flip(1).cumsum(1).flip(1)


def _dpace_weights(kind: str, alpha: float, chance: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """[A, B] from confidences `chance` [A, B] of the slots that are `on`."""
    smooth = torch.where(on > 0, (1 - alpha) * chance + alpha, torch.ones_like(chance))
    return DPACE[kind](smooth.cumprod(1), on) * on


def _dpace(slots: WeightedSlots) -> list[WeightLaw]:
    """Every variant with its best alpha."""
    on = torch.from_numpy(slots.grid(np.ones_like(slots.weight), 0.0))
    chance = torch.from_numpy(slots.grid(slots.chance, 0.0))
    value = torch.from_numpy(slots.grid(slots.value, 0.0))
    at = (slots.block, slots.slot)
    makers: dict[str, Callable[[float], WeightArray]] = {}
    for kind in DPACE:
        makers[kind] = lambda alpha, kind=kind: _dpace_weights(kind, alpha, chance, on).numpy()[at]  # type: ignore[misc]
    for name, both in (("dpace-attached", False), ("dpace-attached-mean", True)):
        makers[name] = lambda alpha, both=both: _attached_weights(alpha, chance, on, value, both).numpy()[at]  # type: ignore[misc]
    return [law for name, make in makers.items() if (law := _best_alpha(slots, name, make)) is not None]


def _attached_weights(
    alpha: float, chance: torch.Tensor, on: torch.Tensor, value: torch.Tensor, mean: bool
) -> torch.Tensor:
    """[A, B] the weights that a gradient shows where it also flows through the confidences of D-PACE.

    d chance / d logits is -chance times cross-entropy's own gradient, so that the detour only changes a slot's weight.
    """
    leaf = chance.clone().requires_grad_(True)
    with torch.enable_grad():
        weights = _dpace_weights("dpace", alpha, leaf, on)
        total = (weights * value).sum()
        if mean:
            total = total / weights.sum() * weights.sum().detach()
        (through,) = torch.autograd.grad(total, leaf)
    return (weights - chance * through).detach() * on


def _best_alpha(slots: WeightedSlots, name: str, make: Callable[[float], WeightArray]) -> WeightLaw | None:
    """alpha by a coarse look and then a bounded search for the least squares of logarithms.

    Args:
        slots: the weights.
        name: of the variant.
        make: alpha -> its weights [n].
    """

    def loss(alpha: float) -> float:
        raw = make(alpha)
        if not (raw * slots.weight > 0).all():
            return 1e12
        gap = np.log(slots.weight / raw)
        trust = 1 / slots.tolerance**2
        gap = gap - (trust * gap).sum() / trust.sum()
        return float((trust * gap**2).sum() / trust.sum())

    # The valley may have several bottoms: a grid first, then its best cell.
    grid = np.linspace(0, 1, 21)
    coarse = [loss(float(alpha)) for alpha in grid]
    best = int(np.argmin(coarse))
    if coarse[best] >= 1e12:
        return None
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    refined = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-10})
    ends = [(coarse[best], float(grid[best])), (float(refined.fun), float(refined.x))]
    alpha = min(ends)[1]
    # alpha's standard error, from how the weights move with it.
    step = 1e-4 if alpha < 0.5 else -1e-4
    change = (np.log(np.abs(make(alpha + step))) - np.log(np.abs(make(alpha)))) / step
    spread = ((change - change.mean()) ** 2).sum()
    error = float(np.sqrt(loss(alpha) * len(change) / max(1, len(change) - 2) / spread)) if spread else np.inf
    # Attached weights also hold what flows through them: the denominator is the sum of the weights alone.
    kind, total = name, None
    if name.startswith("dpace-attached"):
        on, chance = (
            torch.from_numpy(slots.grid(each, 0.0)) for each in (slots.weight * 0 + 1, slots.chance)
        )
        kind, total = "dpace-attached", float(_dpace_weights("dpace", alpha, chance, on).sum())
    return _law(slots, kind, make(alpha), {"alpha": alpha}, errors={"alpha": error}, sum=total)


# --- what depends on the block, or on what the draft got right -----------------------------------------


def _means(values: WeightArray, groups: Ints) -> WeightArray:
    """[n] each value's group's mean."""
    _, inverse = np.unique(groups, return_inverse=True)
    sums = np.bincount(inverse, weights=values) / np.bincount(inverse)
    made: WeightArray = sums[inverse]
    return made


def _per_slot(slots: WeightedSlots) -> WeightLaw | None:
    """A weight for each slot number that is no exponential."""
    if not _companions(slots.slot):
        return None
    return _law(slots, "per-slot", _means(slots.weight, slots.slot))


def _companions(groups: Ints) -> bool:
    """Whether enough slots share their group with another one."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return bool((counts[inverse] > 1).mean() >= SUGGESTIVE)


def _per_block(slots: WeightedSlots) -> WeightLaw | None:
    """exp or uniform within a block, times something of the block: the mean of means of blocks or documents."""
    if not (slots.weight > 0).all():
        return None
    for groups, name in ((slots.document, "document"), (slots.block, "block")):
        if len(np.unique(groups)) < 2 or not _companions(groups):
            continue
        columns, solved = _fit_groups(slots, groups)
        law = _law(slots, "per-block", np.exp(columns @ solved))
        if law.fits:
            # A mean of means gives every group the same sum.
            sums = np.bincount(columns[:, :-1].argmax(1), weights=np.exp(columns[:, -1] * solved[-1]))
            even = np.exp(solved[:-1]) * sums
            means = bool(np.ptp(even) / even.mean() < 1e-3 + 2 * slots.tolerance.max())
            note = f"a mean over {name}s of the mean in each" if means else f"each {name} has its own factor"
            gamma = {"gamma": float(1 / solved[-1])} if abs(solved[-1]) > slots.tolerance.min() else {}
            return _law(slots, "per-block", np.exp(columns @ solved), gamma, note=note)
    return None


def _fit_groups(slots: WeightedSlots, groups: WeightArray | Ints) -> tuple[WeightArray, WeightArray]:
    """log weight as one constant a group and one slope over all: the matrix [n, G + 1] and its solution [G + 1].

    The solution's last value is 1 / gamma.
    """
    numbers, inverse = np.unique(groups, return_inverse=True)
    columns = np.concatenate((np.eye(len(numbers))[inverse], -(slots.slot[:, None] - 1.0)), axis=1)
    scaled, target = columns / slots.tolerance[:, None], np.log(slots.weight) / slots.tolerance
    solved: WeightArray = np.linalg.lstsq(scaled, target, rcond=None)[0].astype(np.float64)
    return columns, solved


def _streak(slots: WeightedSlots) -> WeightLaw | None:
    """A weight that depends on the slot and on which slots of the block the draft got right."""
    fallback: WeightLaw | None = None
    kept, left_out = _states(slots, True), _states(slots, False)
    for words in kept:
        for state in (kept[words], left_out[words]):
            groups = (slots.slot * (slots.size + 1) + state).astype(np.int64)
            if len(np.unique(state)) < 2 or not _companions(groups):
                continue
            law = _law(slots, "streak", _means(slots.weight, groups), note=words)
            if law.fits:
                found = _with_gamma(slots, state, law)
                if found.parameters:
                    return found
                fallback = fallback or found
    return fallback


def _states(slots: WeightedSlots, hole: bool) -> dict[str, WeightArray]:
    """In words, what a streak may be: [n] each. hole: whether a slot that is not trained counts as right."""
    right = slots.grid(slots.right.astype(np.float64), float(hole)) > 0
    at = (slots.block, slots.slot)
    before = np.ones_like(right)
    before[:, 2:] = np.cumprod(right[:, 1:-1], axis=1) > 0
    run, length = np.zeros(right.shape), np.zeros(len(right))
    for place in range(1, slots.size):
        run[:, place] = length
        length = np.where(right[:, place], length + 1, 0)
    prefix = np.cumprod(right[:, 1:], axis=1).sum(1)
    return {
        "whether the slot itself is right": slots.right.astype(np.float64),
        "whether all slots before are right": before[at].astype(np.float64),
        "the run of right slots just before": run[at],
        "the run of right slots from the anchor on": np.minimum(prefix[slots.block], slots.slot - 1.0),
        "the block's accepted length": prefix[slots.block].astype(np.float64),
    }


def _with_gamma(slots: WeightedSlots, state: WeightArray, law: WeightLaw) -> WeightLaw:
    """The streak's law with gamma, where the weights are exponential within every state [n]."""
    if not (slots.weight > 0).all():
        return law
    columns, solved = _fit_groups(slots, state)
    inside = _law(slots, "streak", np.exp(columns @ solved), note=law.note)
    if not inside.fits or abs(solved[-1]) < 1e-9:
        return law
    # gamma's standard error from what is left over; the factor of the states, first to last.
    low, high = np.exp(solved[:-1] - solved[0])[[0, -1]]
    left = np.log(slots.weight) - columns @ solved
    covariance = np.linalg.pinv(columns.T @ columns) * (left**2).sum() / max(1, len(left) - len(solved))
    gamma = float(1 / solved[-1])
    note = f"{law.note}, times {low:.3g} to {high:.3g}"
    errors = {"gamma": gamma**2 * float(np.sqrt(covariance[-1, -1]))}
    raw = np.exp(columns @ solved - solved[0])
    return _law(slots, "streak", raw, {"gamma": gamma}, errors=errors, note=note)
