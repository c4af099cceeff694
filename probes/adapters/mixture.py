"""Which few terms, in one mixture for all slots and with one weight a slot, make up the gradients at the head.

    fit = explain(gradient, columns, limit=...)       # Fit, or the best there is with `explained` False

gradient_n = weight_n * sum over terms of share * column_n(term), shares at least 0 and adding up to 1. Terms are
taken in the smallest number that explains the gradients to `limit`: alone, in pairs, then all of them with the needless
ones put out again. What is left out is told by how large its share could be without being seen.

Shapes: n slots, J terms, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

Array = NDArray[np.float64]

ROUNDS = 60
"""Of alternating between weights and shares; from the start below one or two are enough where a mixture fits."""
COLLINEAR = 1e-4
"""Sine of the angle, over all slots, under which two terms cannot be told apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A mixture and what it leaves over."""

    shares: dict[str, float]
    """Term -> its share, 0 to 1, largest first."""
    errors: dict[str, float]
    """Term -> the standard error of its share, from the residual."""
    weights: Array
    """[n] in units of a term of weight 1."""
    residual: float
    """Relative: root of the summed squares of what is left over, of the gradients'."""
    limit: float
    alike: tuple[str, ...] = ()
    """Other mixtures of as many terms that fit as well: `tv or nla` have one direction at every slot."""

    @property
    def explained(self) -> bool:
        """Whether the residual is within the limit."""
        return self.residual <= self.limit


def explain(gradient: Tensor, columns: Mapping[str, Tensor], limit: float) -> Fit:
    """The smallest mixture that explains gradient [n, D] from columns of [n, D] each, or the best one there is."""
    names = list(columns)
    small, total = _compressed(gradient, [columns[name] for name in names])
    best: Fit | None = None
    for size in (1, 2):
        fits = [_fit(small, total, subset, names, limit) for subset in combinations(range(len(names)), size)]
        fits = [fit for fit in fits if len(fit.shares) == size]
        good = sorted((fit for fit in fits if fit.explained), key=lambda fit: fit.residual)
        if good:
            return _with_alike(good[0], good[1:])
        best = min([*fits, *([best] if best else [])], key=lambda fit: fit.residual, default=None)
    whole = _fit(small, total, range(len(names)), names, limit)
    kept = [names.index(name) for name in whole.shares]
    while whole.explained and len(kept) > 1:
        fewer = [_fit(small, total, [k for k in kept if k != out], names, limit) for out in kept]
        best_fewer = min(fewer, key=lambda fit: fit.residual)
        if not best_fewer.explained:
            break
        whole, kept = best_fewer, [names.index(name) for name in best_fewer.shares]
    if whole.explained or best is None or whole.residual < best.residual:
        return whole
    return best


def left_over(gradient: Tensor, columns: Mapping[str, Tensor]) -> float:
    """Relative residual of the mixture of all columns."""
    names = list(columns)
    small, total = _compressed(gradient, [columns[name] for name in names])
    return _fit(small, total, range(len(names)), names, 0.0).residual


def _with_alike(first: Fit, rest: Sequence[Fit]) -> Fit:
    alike = [" + ".join(fit.shares) for fit in rest]
    return Fit(
        shares=first.shares,
        errors=first.errors,
        weights=first.weights,
        residual=first.residual,
        limit=first.limit,
        alike=tuple(alike),
    )


def _compressed(gradient: Tensor, columns: Sequence[Tensor]) -> tuple[Array, float]:
    """[n, d, J + 1] the columns and then the gradient of each slot in an orthonormal basis of their span: all inner
    products are kept and d is at most J + 1. And the gradients' summed squares."""
    both = torch.stack([*columns, gradient], dim=-1)
    small = torch.linalg.qr(both, mode="r").R if both.shape[1] > both.shape[2] else both
    return small.numpy().astype(np.float64), float(gradient.square().sum())


def _fit(small: Array, total: float, subset: Sequence[int], names: Sequence[str], limit: float) -> Fit:
    """Weights and shares of these terms by alternating least squares."""
    chosen = list(subset)
    columns, target = small[:, :, chosen], small[:, :, -1]
    shares = _start(columns, target)
    before = np.inf
    for _ in range(ROUNDS):
        weights = _weights(columns, target, shares)
        shares = _shares(columns, target, weights)
        weights = _weights(columns, target, shares)
        left = target - weights[:, None] * (columns @ shares)
        residual = float(np.sqrt((left**2).sum() / total)) if total else 0.0
        if residual <= limit / 100 or residual > before * (1 - 1e-3):
            break
        before = residual
    errors = _errors(columns, weights, float((left**2).sum()))
    order = sorted(range(len(chosen)), key=lambda j: -shares[j])
    held = [j for j in order if shares[j] > 0]
    return Fit(
        shares={names[chosen[j]]: float(shares[j]) for j in held},
        errors={names[chosen[j]]: float(errors[j]) for j in held},
        weights=weights,
        residual=residual,
        limit=limit,
    )


def _start(columns: Array, target: Array) -> Array:
    """[J] shares from each slot's own least squares: the direction that their solutions have in common."""
    solutions = np.einsum("njd,nd->nj", np.linalg.pinv(columns, rcond=1e-9), target)
    norms = np.linalg.norm(target, axis=1)
    _, _, rows = np.linalg.svd(solutions * (norms > 0)[:, None], full_matrices=False)
    first = rows[0] * (1 if rows[0].sum() >= 0 else -1)
    first = np.clip(first, 0, None)
    return first / first.sum() if first.sum() > 0 else np.full(columns.shape[2], 1 / columns.shape[2])


def _weights(columns: Array, target: Array, shares: Array) -> Array:
    """[n] the best weight of every slot for given shares."""
    mixed = columns @ shares
    square = (mixed**2).sum(1)
    return np.divide((mixed * target).sum(1), square, out=np.zeros(len(square)), where=square > 0)


def _shares(columns: Array, target: Array, weights: Array) -> Array:
    """[J] the best shares for given weights."""
    stacked = (columns * weights[:, None, None]).reshape(-1, columns.shape[2])
    reduced = np.linalg.qr(np.concatenate((stacked, target.reshape(-1, 1)), axis=1), mode="r")
    shares: Array = nnls(reduced[:, :-1], reduced[:, -1])[0]
    return shares / shares.sum() if shares.sum() > 0 else np.full(len(shares), 1 / len(shares))


def _errors(columns: Array, weights: Array, left: float) -> Array:
    """[J] standard errors of the shares: those along which weights can make up are counted as unknown."""
    mixed = columns * weights[:, None, None]
    whole = mixed.sum(2)
    square = (whole**2).sum(1, keepdims=True)
    along = np.einsum("ndj,nd->nj", mixed, whole) / np.where(square > 0, square, 1)
    free = mixed - whole[:, :, None] * along[:, None, :]
    freedom = max(1, free.shape[0] * (free.shape[1] - 1) - free.shape[2])
    information = np.einsum("ndj,ndk->jk", free, free)
    variance = np.diag(np.linalg.pinv(information, rcond=1e-12)) * left / freedom
    return np.sqrt(np.clip(variance, 0, None))


def unseen(
    gradient: Tensor, columns: Mapping[str, Tensor], fit: Fit, others: Sequence[str]
) -> dict[str, float]:
    """Term -> the largest share it could have beside the fitted mixture without moving the residual over the limit.

    1 where its column lies along the mixture at every slot (`COLLINEAR`).
    """
    weights = torch.from_numpy(fit.weights)[:, None]
    mixed = sum(share * columns[name] for name, share in fit.shares.items()) * weights
    square = mixed.square().sum(1, keepdim=True).clamp(min=1e-300)
    found = {}
    for name in others:
        column = columns[name] * weights
        off = column - mixed * ((column * mixed).sum(1, keepdim=True) / square)
        size = float(off.norm() / column.norm().clamp(min=1e-300))
        reach = float(off.norm() / gradient.norm().clamp(min=1e-300))
        found[name] = 1.0 if size < COLLINEAR else min(1.0, fit.limit / reach)
    return found
