"""The relative error of a token, |a - b| / |b| over its channels: one definition, and the few that differ on purpose.

    errors = token_errors(pair_stats(candidate, reference, full=False))            # [S]
    errors = tensor_errors(candidate, reference)                                   # the same from two tensors

The rules, for a row of the candidate `a` beside the same row of the reference `b`:

==============================================  ================================================================
the row                                         its error
==============================================  ================================================================
zero on both sides                              0
zero in `b` alone                               infinite; `floored`: measured by the usual row instead
NaN or infinity on one side, or another value   infinite
the same NaN or infinity on both sides          that channel is left out; `strict`: infinite
==============================================  ================================================================

Shapes: S tokens, D channels, A blocks of a draft, B slots of a block, V tokens of the vocabulary.
"""

import math

import numpy as np
import torch
from torch import Tensor

from parity.kernel.sums import FloatSums, PairStats, pair_stats, ratio
from parity.tracing.trace import Trace

USUAL_ROW = 1e-6
"""Share of the root mean square row below which a `floored` row counts as that much: a row that is zero by formula
(a masked one) would turn the rounding of the other side into an infinite error."""


def token_errors(
    stats: PairStats, *, robust: bool = False, strict: bool = False, floored: bool = False
) -> FloatSums:
    """The relative L2 error of every token, by the rules above.

    Args:
        stats: Sums over S tokens of `a` and `b`.
        robust: Whether to give the larger of two errors, over all channels and without the outlier channels, which
            would hide what the others do.
        strict: Whether a value that is not finite is an error even where both sides hold it: right where `b` is a
            formula or a float64 pass, which has none.
        floored: Whether a row of `b` counts at least USUAL_ROW of the root mean square row: right where `b` may
            hold rows that are zero by definition.

    Returns:
        [S] errors, not negative.
    """
    size = np.sqrt(stats.field("bb"))
    if floored and size.size:
        size = np.maximum(size, USUAL_ROW * np.sqrt(np.square(size).mean()))
    error = ratio(np.sqrt(stats.field("dd")), size)
    if robust:
        error = np.maximum(error, stats.relative_l2(robust=True))
    bad = stats.field("bad_a") + stats.field("bad_b")
    return np.where(bad > (0 if strict else 2 * stats.field("bad_both")), np.inf, error)


def tensor_errors(a: Tensor, b: Tensor, *, strict: bool = False, floored: bool = False) -> FloatSums:
    """`token_errors` of two tensors of one shape.

    Args:
        a: [S, ...] the candidate; what follows the tokens is one row.
        b: [S, ...] the reference, possibly of another dtype.
        strict: See `token_errors`.
        floored: See `token_errors`.

    Returns:
        [S] errors.
    """
    stats = pair_stats(a.flatten(1), b.flatten(1), full=False)
    return token_errors(stats, strict=strict, floored=floored)


def cosine_gaps(a: Tensor, b: Tensor) -> FloatSums:
    """[S] 1 - cosine of two [S, D] tensors, exact near 0; 1 for a zero row beside another."""
    return pair_stats(a, b, full=False).cosine_gap()


def trace_error(a: Trace, b: Trace, tap: str) -> float:
    """The relative error of a whole tap, all tokens of all requests taken as one vector; strict.

    A layer's share of an error is read from it, where a worst token would say which token is worst.

    Args:
        a: The candidate.
        b: The reference, whose requests are counted; its dtype may be another.
        tap: A tap that both hold.
    """
    difference = reference = 0.0
    for request in b.requests:
        stats = pair_stats(a.tensor(request.id, tap), b.tensor(request.id, tap), full=False)
        if stats.field("bad_a").any() or stats.field("bad_b").any():
            return math.inf
        difference += float(stats.field("dd").sum())
        reference += float(stats.field("bb").sum())
    return (difference / reference) ** 0.5 if reference else math.inf if difference else 0.0


def median_error(a: Tensor, b: Tensor) -> float:
    """The median token's error; infinite where fewer than half are finite.

    Not `tensor_errors`: thousands of pairs are searched for the nearest, a few tokens may be anything, and the
    tensors' own precision is enough. A zero row of `b` is no special case, since half of them would have to be zero.

    Args:
        a: [S, D] float tensor.
        b: [S, D] float tensor.
    """
    error = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
    return float(torch.where(torch.isfinite(error), error, math.inf).median())


def logit_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """The worst slot's error of every block: |found - wanted| / |wanted - its mean|.

    Not `tensor_errors`: a constant added to all logits of a slot changes no probability, so a slot is measured by
    how far its logits are spread, not by how large they are.

    Args:
        found: [A, B, V] logits.
        wanted: [A, B, V] logits of the reference.

    Returns:
        [A] float64 errors; infinite where one is not finite.
    """
    found, wanted = found.double(), wanted.double()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    apart: Tensor = (found - wanted).norm(dim=-1) / spread.clamp_min(1e-300)
    return apart.nan_to_num(nan=math.inf).amax(-1)
