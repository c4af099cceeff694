"""Which few terms, in one mixture for all slots and with one weight a slot, make up the gradients at the head.

    fit = explain(gradient, columns, limit=1e-6)       # MixtureFit; the best there is where `is_explained` is False

gradient_n = weight_n * sum over terms of share * column_n(term), shares at least 0 and adding up to 1. Terms are
taken in the smallest number that explains the gradients to `limit`: alone, in pairs, then all of them with the needless
ones taken out again. Of each term that is left out follows how large its share could be without being seen.

Shapes: n slots, J terms, D width, d = min(D, J + 1) dimensions after compression.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls
from torch import Tensor

FloatArrays = NDArray[np.float64]

ALTERNATIONS = 60
"""Of alternating between weights and shares; from the start below one or two are enough where a mixture fits."""
ROUGH = 1e-5
"""Limits above this are those of bfloat16."""
MOST_TERMS = 0.1
"""Of the gradients, that may be left over by a mixture that explains them; bfloat16 leaves about .01."""
SURE = 5.0
"""Standard errors from which on a term is there, under such a limit. The errors are counted for as many independent
values a slot as there are terms, not D: rounding errors are not independent."""
LOWER = 0.85
"""Ratio by which one more term has to lower the residual: the gradient of a term can be so small that five standard
errors of its share are less than the rounding errors of another one's."""
ALIKE = 1.05
"""Ratio of residuals up to which two mixtures fit alike."""
COLLINEAR = 1e-4
"""Sine of the angle, over all slots, under which two terms cannot be told apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureFit:
    """A mixture and what it leaves over."""

    shares: dict[str, float]
    """Term -> its share, 0 to 1, largest first."""
    errors: dict[str, float]
    """Term -> the standard error of its share, from the residual."""
    weights: FloatArrays
    """[n] in units of a term of weight 1."""
    residual: float
    """Relative: root of the summed squares of what is left over, of the gradients'."""
    limit: float
    alike: tuple["MixtureFit", ...] = ()
    """Other mixtures of as many terms that fit as well: tv and nla have one direction at every slot, and differ by
    the weights that then remain."""

    @property
    def is_explained(self) -> bool:
        """Whether the residual is within the limit, and little at all: where drafts are so sure that no term has a
        gradient to speak of, rounding alone would allow for everything."""
        return self.residual <= min(self.limit, MOST_TERMS)


def explain(gradient: Tensor, columns: Mapping[str, Tensor], limit: float) -> MixtureFit:
    """The smallest mixture that explains the gradients, or the best one there is.

    Args:
        gradient: [n, D] of the loss at the head's input.
        columns: term -> [n, D] its gradient at weight 1.
        limit: relative residual that rounding accounts for.
    """
    names = list(columns)
    small, total = _compress(gradient, [columns[name] for name in names])
    problem = _Problem(small=small, total=total, names=tuple(names), limit=limit)
    # Alone, then in pairs. Where none fits at once, the nearest is polished before it is given up.
    best: MixtureFit | None = None
    for size in (1, 2):
        fits = [problem.fit(subset) for subset in combinations(range(len(names)), size)]
        fits = sorted((fit for fit in fits if len(fit.shares) == size), key=lambda fit: fit.residual)
        if fits and not fits[0].is_explained:
            fits[0] = problem.fit([names.index(name) for name in fits[0].shares], polish=True)
        good = [fit for fit in fits if fit.is_explained]
        if good:
            like = tuple(fit for fit in good[1:] if fit.residual <= ALIKE * good[0].residual + limit / 100)
            first = replace(good[0], alike=like)
            return first if limit <= ROUGH else _with_more(problem, first)
        best = min([*fits[:1], *([best] if best else [])], key=lambda fit: fit.residual, default=None)
    # All terms, and as long as the rest still explains the gradients, without the one that is missed least.
    whole = problem.fit(range(len(names)), polish=True)
    while whole.is_explained and len(whole.shares) > 1:
        kept = [names.index(name) for name in whole.shares]
        fewer = [problem.fit([k for k in kept if k != out], polish=True) for out in kept]
        best_fewer = min(fewer, key=lambda fit: fit.residual)
        if not best_fewer.is_explained:
            break
        whole = best_fewer
    if whole.is_explained or best is None or whole.residual < best.residual:
        return whole
    return best


def _with_more(problem: "_Problem", fit: MixtureFit) -> MixtureFit:
    """Under a wide limit, one term after the other that is there beyond chance, whatever the limit allows."""
    names = list(problem.names)
    for _ in range(len(names) - len(fit.shares)):
        chosen = [names.index(name) for name in fit.shares]
        more = [problem.fit([*chosen, k], polish=True) for k in range(len(names)) if k not in chosen]
        sure = [
            each
            for each in more
            if len(each.shares) > len(fit.shares)
            and each.residual <= LOWER * fit.residual
            and all(share > SURE * each.errors[name] for name, share in each.shares.items())
        ]
        if not sure:
            return fit
        fit = min(sure, key=lambda each: each.residual)
    return fit


def measure_residual(gradient: Tensor, columns: Mapping[str, Tensor]) -> float:
    """Relative residual of the mixture of all columns. Arguments as of `explain`."""
    names = tuple(columns)
    small, total = _compress(gradient, [columns[name] for name in names])
    return _Problem(small=small, total=total, names=names, limit=0.0).fit(range(len(names))).residual


def _compress(gradient: Tensor, columns: Sequence[Tensor]) -> tuple[FloatArrays, float]:
    """[n, d, J + 1] the columns and then the gradient of each slot in an orthonormal basis of their span: all inner
    products are kept and d is at most J + 1. And the gradients' summed squares."""
    both = torch.stack([*columns, gradient], dim=-1)
    small = torch.linalg.qr(both, mode="r").R if both.shape[1] > both.shape[2] else both
    return small.numpy().astype(np.float64), float(gradient.square().sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """Slots in their compressed form."""

    small: FloatArrays
    """[n, d, J + 1]."""
    total: float
    names: tuple[str, ...]
    limit: float

    def fit(self, subset: Sequence[int], *, polish: bool = False) -> MixtureFit:
        """Weights and shares of some terms by alternating least squares.

        Args:
            subset: numbers of the terms.
            polish: whether to go on from there by Gauss-Newton, which also gets along valleys.
        """
        chosen = list(subset)
        columns, target = self.small[:, :, chosen], self.small[:, :, -1]
        # Shares for given weights, weights for given shares, until nothing is gained.
        shares = _start(columns, target)
        before, residual = np.inf, np.inf
        for _ in range(ALTERNATIONS):
            shares = _shares(columns, target, _weights(columns, target, shares))
            residual = self._residual(columns, target, shares)
            if residual <= self.limit / 100 or residual > before * (1 - 1e-3):
                break
            before = residual
        if polish and len(chosen) > 1 and residual > self.limit / 4:
            shares = _polish_shares(columns, target, shares)
            residual = self._residual(columns, target, shares)
        # Terms of share 0 are left out, the largest share comes first.
        weights = _weights(columns, target, shares)
        errors = _errors(columns, shares, weights, (residual**2) * self.total)
        held = [j for j in sorted(range(len(chosen)), key=lambda j: -shares[j]) if shares[j] > 0]
        return MixtureFit(
            shares={self.names[chosen[j]]: float(shares[j]) for j in held},
            errors={self.names[chosen[j]]: float(errors[j]) for j in held},
            weights=weights,
            residual=residual,
            limit=self.limit,
        )

    def _residual(self, columns: FloatArrays, target: FloatArrays, shares: FloatArrays) -> float:
        """Relative, with the best weights for these shares."""
        left = target - _weights(columns, target, shares)[:, None] * (columns @ shares)
        return float(np.sqrt((left**2).sum() / self.total)) if self.total else 0.0


def _polish_shares(columns: FloatArrays, target: FloatArrays, shares: FloatArrays) -> FloatArrays:
    """[J] shares of least residual, at least 0, their sum held at 1."""
    scale = np.sqrt((target**2).sum())

    def residual_of_shares(shares: FloatArrays) -> FloatArrays:
        rest = target - _weights(columns, target, shares)[:, None] * (columns @ shares)
        return np.append(rest.ravel() / scale, shares.sum() - 1)

    start = np.clip(shares, 1e-9, None)
    found = least_squares(
        residual_of_shares, start, bounds=(0, np.inf), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=60
    )
    return _normalise(np.where(found.x < 1e-9, 0, found.x))


def _start(columns: FloatArrays, target: FloatArrays) -> FloatArrays:
    """[J] shares from each slot's own least squares: the direction that their solutions have in common."""
    solutions = np.einsum("njd,nd->nj", np.linalg.pinv(columns, rcond=1e-9), target)
    norms = np.linalg.norm(target, axis=1)
    _, _, rows = np.linalg.svd(solutions * (norms > 0)[:, None], full_matrices=False)
    first = rows[0] * (1 if rows[0].sum() >= 0 else -1)
    return _normalise(np.clip(first, 0, None))


def _normalise(shares: FloatArrays) -> FloatArrays:
    """With a sum of 1; even where all are 0."""
    made: FloatArrays = shares / shares.sum() if shares.sum() > 0 else np.full(len(shares), 1 / len(shares))
    return made


def _weights(columns: FloatArrays, target: FloatArrays, shares: FloatArrays) -> FloatArrays:
    """[n] the best weight of every slot for given shares."""
    mixed = columns @ shares
    square = (mixed**2).sum(1)
    made: FloatArrays = np.divide(
        (mixed * target).sum(1), square, out=np.zeros(len(square)), where=square > 0
    )
    return made


def _shares(columns: FloatArrays, target: FloatArrays, weights: FloatArrays) -> FloatArrays:
    """[J] the best shares for given weights."""
    stacked = (columns * weights[:, None, None]).reshape(-1, columns.shape[2])
    reduced: FloatArrays = np.asarray(
        np.linalg.qr(np.concatenate((stacked, target.reshape(-1, 1)), axis=1), mode="r")
    )
    shares: FloatArrays = nnls(reduced[:, :-1], reduced[:, -1])[0]
    return _normalise(shares)


def _errors(columns: FloatArrays, shares: FloatArrays, weights: FloatArrays, left: float) -> FloatArrays:
    """[J] standard errors of the shares, given that each slot's weight may make up for what lies along the mixture."""
    mixed = columns * weights[:, None, None]
    whole = mixed @ shares
    square = (whole**2).sum(1, keepdims=True)
    along = np.einsum("ndj,nd->nj", mixed, whole) / np.where(square > 0, square, 1)
    free = mixed - whole[:, :, None] * along[:, None, :]
    freedom = max(1, free.shape[0] * (free.shape[1] - 1) - free.shape[2])
    information = np.einsum("ndj,ndk->jk", free, free)
    variance = np.diag(np.linalg.pinv(information, rcond=1e-12)) * left / freedom
    errors: FloatArrays = np.sqrt(np.clip(variance, 0, None))
    return errors


def bound_unseen_shares(
    gradient: Tensor, columns: Mapping[str, Tensor], fit: MixtureFit, others: Sequence[str]
) -> dict[str, float]:
    """How large the share of a term that is left out could be without moving the residual over the limit.

    Args:
        gradient: [n, D].
        columns: term -> [n, D], of fitted and other terms.
        fit: the mixture.
        others: the terms in question.

    Returns:
        Term -> share; 1 where its column lies along the mixture at every slot (`COLLINEAR`).
    """
    # What of each column is not along the mixture, which a weight could make up for.
    weights = torch.from_numpy(fit.weights)[:, None]
    mixed = sum(share * columns[name] for name, share in fit.shares.items()) * weights
    square = mixed.square().sum(1, keepdim=True).clamp(min=1e-300)
    found = {}
    for name in others:
        column = columns[name] * weights
        off = column - mixed * ((column * mixed).sum(1, keepdim=True) / square)
        size = float(off.norm() / column.norm().clamp(min=1e-300))
        reach = float(off.norm() / gradient.norm().clamp(min=1e-300))
        least = fit.limit if fit.limit <= ROUGH else SURE * fit.residual / (2 * len(gradient)) ** 0.5
        found[name] = 1.0 if size < COLLINEAR else min(1.0, least / reach)
    return found
