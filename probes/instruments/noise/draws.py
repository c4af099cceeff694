"""Whether every place has a draw of its own: noise that is shared between slices, tokens, channels or seeds.

    found = find_shared_draws(added, seeds, document, position)          # [] where every place has its own

Two rows of noise a, b with independent signs give z = sum(a b) / sqrt(sum(a^2 b^2)), and P(|z| > x) <= 2 exp(-x^2 / 2)
by Hoeffding's inequality, whatever the magnitudes are: exact for every symmetric noise, also one that is rounded or
grows with the state. The limit of the largest z of M pairs is sqrt(2 ln(2 M / FALSE_ALARM)). Channels are many and
their rows short, so they are tested together: the squared sums over a slice's channels, of the summed squares, are 1
for independent signs, and chi-square distributed (as many degrees of freedom as rows) where magnitudes are alike.

Shapes: R runs that differ by the seed, T tokens, C slices of D channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from scipy.special import chdtri
from torch import Tensor

FALSE_ALARM = 1e-6
"""Chance that one of the four tests (slices, tokens, seeds, channels) fails on healthy noise."""
LEAST_CORRELATION = 0.02
"""Least correlation that is reported, however large the row is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedDraw:
    """One way in which draws are shared."""

    over: str
    """slices, tokens, seeds or channels."""
    words: str
    copies: int
    """Places that have one draw, were the correlation 1: so many fewer values are independent."""
    correlation: float
    """The largest, with its sign."""
    limit: float
    """Of the correlation, at this size of the sample."""


def find_shared_draws(
    added: Tensor, seeds: Sequence[int], document: Tensor, position: Tensor
) -> list[SharedDraw]:
    """What is shared in noise, the largest correlation first.

    Args:
        added: [R, T, C, D] the noise.
        seeds: of the R runs.
        document: [T] of each token.
        position: [T] within its document.
    """
    found = [_slices(added), _tokens(added, document, position), _seeds(added, seeds), _channels(added)]
    there = sorted(
        (each for each in found if each is not None), key=lambda each: abs(each.correlation), reverse=True
    )
    if not there:
        return []
    first = there[0]  # where it has copies, as many fewer values are independent
    wider = math.sqrt(1 + abs(first.correlation) * (first.copies - 1))
    return [first, *(each for each in there[1:] if abs(each.correlation) > wider * each.limit)]


def measure_noise_mean(added: Tensor) -> tuple[float, float]:
    """Mean of the noise [...] in units of its root mean square, and the limit at which independent signs leave it."""
    square = added.square()
    size = float(square.sum())
    limit = math.sqrt(2 * math.log(2 / FALSE_ALARM))
    return float(added.sum()) / math.sqrt(size * added.numel()), max(
        LEAST_CORRELATION, limit / math.sqrt(added.numel())
    )


def _pair(a: Tensor, b: Tensor, pairs: int) -> tuple[float, float]:
    """Correlation of two rows and its limit among so many pairs."""
    product = a * b
    size = float(a.square().sum().sqrt() * b.square().sum().sqrt())
    if not size:
        return 0.0, 1.0
    limit = math.sqrt(2 * math.log(2 * pairs / FALSE_ALARM)) * float(product.square().sum().sqrt()) / size
    return float(product.sum()) / size, max(LEAST_CORRELATION, limit)


def _find_pair(rows: Sequence[Tensor]) -> tuple[tuple[int, int], float, float] | None:
    """Of all pairs of rows: the one whose correlation is furthest above its limit, with both; None where none is."""
    pairs = list(combinations(range(len(rows)), 2))
    found = {(a, b): _pair(rows[a], rows[b], len(pairs)) for a, b in pairs}
    over = {pair: each for pair, each in found.items() if abs(each[0]) > each[1]}
    if not over:
        return None
    pair = max(over, key=lambda each: abs(over[each][0]))
    return (pair, *over[pair])


def _slices(added: Tensor) -> SharedDraw | None:
    """Pairs of slices, over all runs, tokens and channels."""
    worst = _find_pair(added.unbind(2))
    if worst is None:
        return None
    (a, b), size, limit = worst
    words = f"the noise of slices {a} and {b} has a correlation of {size:.3f} (limit {limit:.2g})"
    return SharedDraw(over="slices", words=words, copies=1, correlation=size, limit=limit)


def _seeds(added: Tensor, seeds: Sequence[int]) -> SharedDraw | None:
    """Pairs of runs, over all tokens, slices and channels."""
    worst = _find_pair(added.unbind(0))
    if worst is None:
        return None
    (a, b), size, limit = worst
    names = f"seeds {seeds[a]} and {seeds[b]}"
    words = f"the noise under {names} has a correlation of {size:.3f} (limit {limit:.2g})"
    return SharedDraw(over="seeds", words=words, copies=len(added), correlation=size, limit=limit)


def _tokens(added: Tensor, document: Tensor, position: Tensor) -> SharedDraw | None:
    """Pairs of tokens, over all runs, slices and channels."""
    rows = added.transpose(0, 1).flatten(1)
    count = len(rows)
    if count < 2:
        return None
    square = rows.square()
    size = square.sum(1).sqrt()
    scale = (size[:, None] * size).clamp(min=1e-300)
    correlation = (rows @ rows.T) / scale
    bound = math.sqrt(2 * math.log(count * (count - 1) / FALSE_ALARM))
    limit = (bound * (square @ square.T).sqrt() / scale).clamp(min=LEAST_CORRELATION)
    upper = torch.ones(count, count, dtype=torch.bool).triu(1)
    over = (correlation.abs() > limit) & upper
    if not over.any():
        return None
    size_of = float(correlation[over][correlation[over].abs().argmax()])
    first, second = over.nonzero(as_tuple=True)
    share = len(first) / int(upper.sum())
    where = f"{len(first)} of {int(upper.sum())} pairs of tokens have correlated noise"
    if share > 0.9:
        where = f"{where}: one draw for all"
    elif bool(((position[first] == position[second]) & (document[first] != document[second])).all()):
        where = f"{where}, each at one position of two documents"
    words = f"{where}, up to {size_of:.3f} (limit {float(limit[over].min()):.2g})"
    return SharedDraw(
        over="tokens", words=words, copies=count, correlation=size_of, limit=float(limit[over].min())
    )


def _channels(added: Tensor) -> SharedDraw | None:
    """All channels of a slice together: their mean correlation."""
    width = added.shape[3]
    own = added.square().sum(-1)
    total = float(own.sum())
    if width < 2 or not total:
        return None
    ratio = float(added.sum(-1).square().sum()) / total
    rows = total**2 / float(own.square().sum())  # as many rows of equal size
    limit = max(LEAST_CORRELATION, (float(chdtri(rows, FALSE_ALARM)) / rows - 1) / (width - 1))
    size = (ratio - 1) / (width - 1)
    if size <= limit:
        return None
    words = f"the channels of a slice have a mean correlation of {size:.3f} (limit {limit:.2g})"
    return SharedDraw(over="channels", words=words, copies=width, correlation=size, limit=limit)
