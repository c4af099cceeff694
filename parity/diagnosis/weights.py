"""LOAD: other weights, told by checksum; without checksums by the embedding, the final norm and the head.

Which parameters differ also decides whether a difference is one of dtype (NUMERIC) or of precision (QUANT).
"""

import numpy as np

from parity.diagnosis.profile import FailingComparison, SampledRows, TapErrors, relative
from parity.diagnosis.records import KindResult, KindVerdict, RepairResult
from parity.reports.words import shorten_list

SEPARABLE = 20
"""Times the floor that may remain after a repair of a norm: its own epsilon and rounding come on top."""
ROUNDED_PARAMETERS = ("A_log", "dt_bias")
"""Parameters that engines keep in float32 and plain loading rounds: alone they are a numeric policy."""
NOT_PROJECTIONS = ("embed_tokens", "norm", "conv1d", "lm_head")
MODERATE = 0.6
"""Largest error at the first tap where projections were quantised rather than replaced: int4 in groups gives
.04 to .1 in the convolution and up to .35 in a layer's output, other matrices 1 and more."""


def other_weights(case: FailingComparison) -> list[str]:
    """Canonical names of parameters that differ or that only one side has."""
    a, b = case.a.manifest.target.weights, case.b.manifest.target.weights
    return [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)] if a and b else []


def same_weights(case: FailingComparison) -> bool:
    """Whether both sides hold checksums, and they agree."""
    a, b = case.a.manifest.target.weights, case.b.manifest.target.weights
    return bool(a) and a == b


def is_projection(key: str) -> bool:
    """Whether a parameter is the matrix of a projection inside a layer."""
    return key.endswith(".weight") and not any(part in key for part in NOT_PROJECTIONS)


def diagnose_load(case: FailingComparison) -> KindVerdict:
    """Other weights: by checksum; without checksums by what differs (embedding, final norm, head)."""
    first, keys = case.first, other_weights(case)
    if first is None:
        return "no tap fails by its numbers"
    where = f"first {first.tap}, {first.result.error_rms:.1e}"
    # Checksums that differ decide, unless they are a matter of dtype or of quantisation.
    if keys:
        if all(key.endswith(ROUNDED_PARAMETERS) for key in keys):
            return f"only {shorten_list(keys)} differ, which is a matter of dtype"
        if len(keys) > 1 and all(is_projection(key) for key in keys) and _moderate(case):
            return f"{len(keys)} projections differ by little, as quantised ones do"
        return KindResult(
            kinds=("LOAD",),
            sentence=f"the two sides hold other weights: {shorten_list(keys)} ({where})",
            next_step="load both sides from one checkpoint; look at the loader's missing and unexpected keys",
            evidence=(("parameters that differ", len(keys)), ("first", keys[0]), ("first tap", first.tap)),
        )
    # Without checksums: what differs although all before it is exact.
    if first.kind == "embed":
        return KindResult(
            kinds=("LOAD",),
            sentence=f"what enters layer 0 differs already ({where}), and its rows are nowhere else in b: "
            "another embedding",
            next_step="compare the embedding's rows of both checkpoints; look for keys nested under language_model",
            evidence=(
                ("first tap", first.tap),
                ("rms", first.result.error_rms),
                ("share wrong", first.share),
            ),
        )
    return _late_weights(case, first, where)


def _moderate(case: FailingComparison) -> bool:
    """Whether the first difference is within what quantising explains."""
    return case.first is not None and case.first.result.error_rms <= MODERATE


def _late_weights(case: FailingComparison, first: TapErrors, where: str) -> KindVerdict:
    """The final norm or the head: everything before them is exact."""
    # Another norm weight is one factor a channel.
    if first.kind == "post":
        fit = separable(case.sample_rows("a", first.tap), case.sample_rows("b", first.tap))
        if (
            fit is not None
            and case.explains(first, first.result.relative_l2, fit.residual, SEPARABLE)
            and fit.scale_spread < 1e-3
        ):
            return KindResult(
                kinds=("LOAD",),
                sentence=f"only what the final norm returns differs ({where}), by one factor for each channel "
                f"({fit.weight.min():.3g} to {fit.weight.max():.3g}): another norm weight; with these factors "
                f"{fit.residual:.1e} remains",
                next_step="compare the final norm's weight of both checkpoints; some formats store weight - 1",
                evidence=(
                    ("smallest factor", float(fit.weight.min())),
                    ("largest factor", float(fit.weight.max())),
                ),
                repairs=(
                    RepairResult(
                        tap=first.tap,
                        against="b times the factors",
                        before=first.result.relative_l2,
                        after=fit.residual,
                    ),
                ),
            )
    # All states agree: it is the head.
    if first.kind == "logits":
        return KindResult(
            kinds=("LOAD",),
            sentence=f"all states agree and the logits do not ({where}): another head, or one that is not tied",
            next_step="compare lm_head with the embedding; look at tie_word_embeddings and the vocabulary's size",
            evidence=(("first tap", first.tap), ("rms", first.result.error_rms)),
        )
    return (
        "checksums agree" if same_weights(case) else "no checksums, and embedding, final norm and head agree"
    )


class RankOneFit:
    """a = scale[token] * weight[channel] * b, with what remains."""

    def __init__(self, scale: SampledRows, weight: SampledRows, residual: float, rms: SampledRows) -> None:
        self.scale, self.weight, self.residual = scale, weight, residual
        self.scale_spread = float(scale.std() / abs(scale.mean())) if scale.size else 0.0
        # A norm divides each token by its own rms: scale * rms is then one number.
        law = scale * rms
        self.norm_spread = float(law.std() / abs(law.mean())) if law.size else 0.0
        self.rms_spread = float(rms.std() / rms.mean()) if rms.size else 0.0


def separable(a: SampledRows, b: SampledRows, rounds: int = 60) -> RankOneFit | None:
    """Fit one factor a token and one a channel by alternating least squares. None for too little data.

    Stops where it converged, and after three rounds where it leads nowhere.
    """
    good = np.isfinite(a).all(1) & np.isfinite(b).all(1) & b.any(1)
    a, b = a[good], b[good]
    if a.shape[0] < 4 or a.shape[1] < 4:
        return None
    rms = np.sqrt((b * b).mean(1))
    scale, weight = 1 / rms, np.ones(b.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        for number in range(rounds):
            before = scale
            scaled = scale[:, None] * b
            weight = np.nan_to_num((a * scaled).sum(0) / (scaled * scaled).sum(0))
            turned = weight * b
            scale = np.nan_to_num((a * turned).sum(1) / (turned * turned).sum(1))
            if float(np.abs(scale - before).max()) < 1e-12 * float(np.abs(scale).max()):
                break
            if number == 3 and relative(scale[:, None] * turned, a) > 0.05:
                break
    size = float(np.abs(weight).mean()) or 1.0
    weight, scale = weight / size, scale * size
    return RankOneFit(scale, weight, relative(scale[:, None] * weight * b, a), rms)
