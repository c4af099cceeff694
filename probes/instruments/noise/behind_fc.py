"""Whether more of the drafts moves with the seed than the noise at fc's input explains.

    found = measure_downstream_noise(step, states, runs, seeds, real, clean)

Under two seeds fc's input differs by the declared noise. The second seed is therefore run again with states that have
the difference of both draws put in beforehand, so that fc is fed the first seed's input once more, up to rounding. What
still differs in the drafts then came in behind fc's input. How far rounding moves them is measured beside it: under the
first seed, with states moved by a few units in their last place.

Noise that is no sum (a dropout of states) cannot be put in beforehand: the input is not met, and the limit grows with
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.probes.adapters.base import AdapterStep

CORRECTIONS = 3
"""Times that states are corrected: noise that grows with its state is met up to rounding in two or three."""
NOISE_ROUNDINGS = 4.0
"""Times the measured rounding, which is a root mean square over all slots and channels."""
UNITS = 32
"""In the last place, by which wide states are moved to see what rounding does."""
LEAST_MOVED = 0.01
"""Share of 16-bit states that are moved."""
POWERLESS_NOTE = 0.25
"""Of what the noise at fc's input itself moves the drafts by: a limit above means that nothing was decided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DownstreamNoise:
    """What moved the drafts though fc was fed the same. Sizes are relative to the drafts' own root mean square."""

    moved: float
    limit: float
    """What rounding, and an input that was not quite met, may move."""
    whole: float
    """What the other seed moves, noise at fc's input included."""

    @property
    def has_power(self) -> bool:
        """Whether the limit lies below what the noise itself does."""
        return self.limit <= POWERLESS_NOTE * self.whole

    @property
    def is_found(self) -> bool:
        """Whether something moves them."""
        return self.moved > self.limit


def measure_draft_change(a: AdapterStep, b: AdapterStep) -> float:
    """Root mean square of the difference of what enters the head in two steps, relative to the first's own."""
    first, second = a.hidden.detach().double(), b.hidden.detach().double()
    size = float(first.square().mean().sqrt())
    return float((first - second).square().mean().sqrt()) / size if size else 0.0


def _gap(a: AdapterStep, b: AdapterStep, real: Tensor) -> Tensor:
    """What is to be added to b's input of fc to be a's, zero on padding; [S, F]."""
    gap = a.fc_input.detach().double() - b.fc_input.detach().double()
    gap[~real] = 0
    return gap


def _size(gap: Tensor) -> float:
    """Root mean square."""
    return float(gap.square().mean().sqrt())


def measure_input_rounding(
    step: Callable[[Tensor], AdapterStep], states: Tensor, first: AdapterStep, real: Tensor, gap: float = 0.0
) -> tuple[float, float]:
    """How far states that are moved by a few units in the last place move the drafts, and fc's input.

    In wide states all are moved by `UNITS`: a drafter that computes in 16 bits then rounds another way in a few places
    at least. In 16-bit states as many are moved by one unit as make `gap`.

    Args:
        step: runs the trainer on states, under the first seed.
        states: [S, N, D].
        first: the step on them.
        real: bool [S] tokens that are no padding.
        gap: root mean square that is to be made at fc's input.

    Returns:
        What moved: the drafts, relative; fc's input, root mean square.
    """
    eps = max(torch.finfo(each.dtype).eps for each in (states, first.fc_input))
    generator = torch.Generator().manual_seed(3)
    sign = (torch.randint(0, 2, states.shape, generator=generator) * 2 - 1).double()
    if states.dtype.itemsize == 2:
        all_of_them = eps * float(states.double().square().mean().sqrt())
        share = min(1.0, max((gap / all_of_them) ** 2, LEAST_MOVED)) if all_of_them else 1.0
        unit = sign * (torch.rand(states.shape, generator=generator) < share)
    else:
        unit = sign * UNITS
    shown = step((states.double() * (1 + unit.to(states.device) * eps)).to(states.dtype))
    return measure_draft_change(first, shown), _size(_gap(first, shown, real))


def measure_downstream_noise(
    step: Callable[[Tensor, int], AdapterStep],
    states: Tensor,
    runs: Sequence[AdapterStep],
    seeds: Sequence[int],
    real: Tensor,
    clean: Tensor,
) -> DownstreamNoise:
    """What moves the drafts behind fc's input, from two runs whose inputs of fc differ.

    Args:
        step: runs the trainer on states, under a seed.
        states: [S, N, D].
        runs: steps on them, of which the first two are used.
        seeds: of the runs.
        real: bool [S] tokens that are no padding.
        clean: [S, F] fc's input without noise, by which each slice of fc is found among the captured ones.
    """
    # Correct the second seed's states until fc's input is the first seed's, as near as it gets.
    first, second = runs[0], runs[1]
    order = _order(states, clean)
    moved, best = states, second
    gap = _gap(first, second, real)
    for _ in range(CORRECTIONS):
        moved = moved.clone()
        for at, number in enumerate(order):
            part = gap[:, at * states.shape[2] : (at + 1) * states.shape[2]]
            moved[:, number] = (moved[:, number].double() + part).to(states.dtype)
        shown = step(moved, seeds[1])
        left = _gap(first, shown, real)
        if _size(left) >= _size(gap):
            break
        near = _size(left) > _size(gap) / 2
        best, gap = shown, left
        if near or _size(gap) <= float(torch.finfo(states.dtype).eps) * float(
            clean[real].square().mean().sqrt()
        ):
            break
    # What rounding does, enlarged where the input was met less well than rounding would have it.
    by_rounding, by_input = measure_input_rounding(
        lambda near: step(near, seeds[0]), states, first, real, _size(gap)
    )
    more = _size(gap) / by_input if by_input else float("inf")
    limit = NOISE_ROUNDINGS * by_rounding * max(1.0, more) if by_rounding else float("inf")
    return DownstreamNoise(
        moved=measure_draft_change(first, best),
        limit=limit,
        whole=measure_draft_change(first, second),
    )


def _order(states: Tensor, clean: Tensor) -> list[int]:
    """Which captured slice each slice of fc's input is nearest to."""
    width = states.shape[2]
    slices = states.detach().double()
    parts = clean.split(width, dim=1)
    return [int((slices - part[:, None]).square().sum((0, 2)).argmin()) for part in parts]
