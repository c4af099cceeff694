"""Faults of size: COMPILE, QUANT, NUMERIC, INVAR. No onset, or none but that of the policy itself.

What tells them apart is how large the first difference is, which operator it begins in, whether token 0
and the full-attention layers have their part, and whether a side agrees with itself.
"""

import numpy as np

from parity.diagnosis.onset import GROSS, OnsetEvidence, onsets
from parity.diagnosis.profile import (
    SAMPLE_CHUNK,
    FailingComparison,
    ProfileSide,
    TapErrors,
    half_of_error,
    relative,
)
from parity.diagnosis.records import KindResult, KindVerdict, RepairResult
from parity.diagnosis.weights import (
    ROUNDED_PARAMETERS,
    SEPARABLE,
    is_projection,
    other_weights,
    same_weights,
    separable,
)
from parity.reports.record import Value
from parity.reports.words import shorten_list

OPERATOR_GROSS = 0.15
"""Error of an operator's own output (inputs equal) above which no policy explains it: the largest policies
measured are .04 (an epsilon of 1e-3), the smallest wrong operators .3."""
STATE_GROSS = 0.1
"""The same in the residual stream, where the operator is one of several terms."""
WORSE_AT_FIRST = 2.0
"""First token over the median: an epsilon weighs most where little has been added up yet."""


def _numbers(case: FailingComparison) -> OnsetEvidence | str:
    """The first failing tap, where it lies in the layers."""
    return onsets(case)


def gross(series: TapErrors) -> bool:
    """Whether the error is beyond any numeric policy."""
    limit = OPERATOR_GROSS if series.kind in ("conv", "gdn") else STATE_GROSS
    middle = [
        float(np.median(row[mask]))
        for row, mask in zip(series.errors, series.wrong, strict=True)
        if mask.any()
    ]
    return bool(middle) and max(middle) >= limit


def compile_(case: FailingComparison) -> KindVerdict:
    """Does an operator return something else for equal inputs, by more than any policy?"""
    # What is no operator's fault: values that neither side can represent, one factor, other inputs.
    shared = _not_finite_on_both(case)
    if shared is not None:
        return shared
    if _one_factor(case) is not None:
        return "one side is the other times one number"
    found = _numbers(case)
    if isinstance(found, str):
        return found
    series, result = found.series, found.series.result
    where = {"conv": "the convolution", "gdn": "the delta rule"}.get(series.kind, "a layer")
    c = case.comparison
    values: tuple[tuple[str, Value], ...] = (
        *found.evidence(),
        ("backends", " against ".join(c.backends)),
        ("channels with half of the error", half_of_error(result)),
        ("devices", " against ".join(_machine(case, side) for side in ("a", "b"))),
    )
    step = (
        "run the operator's recorded inputs on an fp64 reference and on each backend (`parity check`), "
        "then on another version"
    )
    # Not finite for finite inputs is a fault whatever its size.
    if not np.isfinite(result.error_max):
        return KindResult(
            kinds=("COMPILE",),
            sentence=f"{series.tap} is not finite from token {min(found.tokens)} on while what enters it agrees: "
            f"{where} is wrong on one side",
            next_step=step,
            evidence=values,
        )
    if not gross(series):
        return f"{result.error_rms:.1e} at {series.tap} is within what a numeric policy can do"
    if any(is_projection(key) for key in other_weights(case)):
        return "the projections hold other weights"
    if not same_weights(case) and not other_weights(case):
        return KindResult(
            kinds=("LOAD", "COMPILE"),
            sentence=f"{series.tap} is wrong everywhere ({result.error_rms:.2g}) and no side holds checksums: other "
            "weights in that layer, or an operator that computes something else",
            next_step="compare that layer's parameters by checksum; " + step,
            evidence=values,
            live="operator: that layer's recorded inputs on the loaded model",
        )
    if series.kind == "layer" and series.linear:
        step = (
            "capture conv.out and gdn.out too (what stood before the first token looks like this where a state "
            "is forgotten slowly), then " + step
        )
    sure = result.error_rms > 100 or c.backends[0] != c.backends[1]
    return KindResult(
        kinds=("COMPILE",) if sure else ("COMPILE", "NUMERIC"),
        sentence=f"{where} returns something else for equal inputs: {series.tap} differs by {result.error_rms:.2g} "
        f"in {series.share:.0%} of the tokens, from token {min(found.tokens)} on"
        + (
            ""
            if sure
            else "; both sides ran the same backend, so that a switched-off policy would look like this"
        ),
        next_step=step,
        evidence=values,
        live="" if sure else "operator: the recorded inputs on fp64, and with one policy switched at a time",
    )


def _not_finite_on_both(case: FailingComparison) -> KindResult | None:
    """The same elements are not finite on both sides, and nothing else differs there."""
    series = case.first
    if series is None or not series.result.nonfinite[2] or np.isinf(series.result.error_max):
        return None
    if (
        sum(series.result.nonfinite[:2]) != 2 * series.result.nonfinite[2]
        or series.result.error_max > series.limit > 0
    ):
        return None
    return KindResult(
        kinds=("ATTN", "COMPILE"),
        sentence=f"{series.result.nonfinite[2]} elements of {series.tap} are not finite on both sides, at the same "
        "places: the two agree in a fault, so that no comparison of them can tell",
        next_step="look whether these rows are pads (then name it in the policy), and compare with an fp64 golden",
        evidence=(("elements", series.result.nonfinite[2]), ("tap", series.tap)),
        live="operator and attention: each part against fp64 on its own inputs",
    )


def _machine(case: FailingComparison, side: ProfileSide) -> str:
    """What a side ran on, as its manifest says it."""
    environment = (case.a if side == "a" else case.b).manifest.environment
    return environment.get("device") or environment.get("cpu") or "not recorded"


def quant(case: FailingComparison) -> KindVerdict:
    """Are weights or recorded states of lower precision on one side?"""
    # Values on a coarse grid, or one factor, say it themselves.
    grid = _on_a_grid(case) or _one_factor(case)
    if grid is not None:
        return grid
    found = _numbers(case)
    if isinstance(found, str):
        return found
    series = found.series
    # Checksums: projections alone were rounded.
    keys = [key for key in other_weights(case) if not key.endswith(ROUNDED_PARAMETERS)]
    if keys and all(is_projection(key) for key in keys):
        modules = sorted({key.split(".")[-2] for key in keys})
        return KindResult(
            kinds=("QUANT",),
            sentence=f"{len(keys)} projections ({shorten_list(modules)}) hold values that are off by "
            f"little: {series.tap} differs by {series.result.error_rms:.1e} from token {min(found.tokens)} on, "
            "norms and decay agree",
            next_step="dump from the precision that will be served, and compare the list of quantised modules "
            "with the checkpoint's",
            evidence=(("projections", len(keys)), ("modules", shorten_list(modules, 6)), *found.evidence()),
        )
    # Inputs in lower precision: every token and every kind of layer differs, steadily, by a step's size.
    if series.kind == "gdn" or not _everywhere(case, found):
        return f"the difference begins at {series.tap} and weights agree"
    noisy = _unsteady(case, "a") or _unsteady(case, "b")
    if noisy:
        return noisy
    if series.result.error_rms < QUANT_FROM:
        return f"{series.result.error_rms:.1e} at {series.tap} is below a quantisation step"
    return KindResult(
        kinds=("QUANT", "NUMERIC"),
        sentence=f"every token and every kind of layer differs by {series.result.error_rms:.1e} from {series.tap} on, "
        "and checksums agree: inputs of the projections of lower precision, or products in lower precision",
        next_step="list the modules by dtype and scheme on both sides, then run the side in question with "
        "plain projections",
        evidence=(*found.evidence(), ("channels with half of the error", half_of_error(series.result))),
        live="operator: one layer with its projections in full precision",
    )


QUANT_FROM = 1.5e-3
"""int8 inputs give 2e-3 at the first projection, bfloat16 products 1e-3 to 3e-3, TF32 1e-4."""


def _on_a_grid(case: FailingComparison) -> KindResult | None:
    """Recorded values that lie on a coarse grid, scaled, on one side only."""
    for series in case.failing:
        if series.kind not in ("layer", "pre", "post", "embed"):
            continue
        told = {side: _distinct(case, side, series.tap) for side in ("a", "b")}
        (low, rows), (high, _) = sorted(told.values())
        if rows > 2000 and low <= 256 < high / 8:
            side = "a" if told["a"][0] == low else "b"
            return KindResult(
                kinds=("QUANT",),
                sentence=f"{series.tap} of side {side} takes {low} different values in {rows} elements (the other "
                f"side {high}): the states were stored in eight bits or fewer",
                next_step="store the states in the dtype the model computed, and dump again",
                evidence=(
                    ("side", side),
                    ("different values", low),
                    ("elements", rows),
                    ("of the other side", high),
                ),
            )
    return None


def _one_factor(case: FailingComparison) -> KindResult | None:
    """A recorded state that is the other side's times one number: a scale that was not applied, or twice."""
    series = next((s for s in case.failing if s.kind in ("layer", "pre", "post")), None)
    if series is None or not np.isfinite(series.result.error_max):
        return None
    a, b = (case.sample_rows(side, series.tap) for side in ("a", "b"))
    factor = float((a * b).sum() / max((b * b).sum(), 1e-300))
    if factor == 0 or abs(factor - 1) < 0.01:
        return None
    rest = relative(a / factor, b)
    if not case.explains(series, relative(a, b), rest):
        return None
    return KindResult(
        kinds=("QUANT",),
        sentence=f"{series.tap} of a is b times {factor:.6g}, and {rest:.1e} remains: a scale that was not applied, or "
        "applied twice",
        next_step="look for the scale of the stored states, and for multipliers of embedding or residual",
        evidence=(("factor", factor), ("remains", rest), ("tap", series.tap)),
        repairs=(
            RepairResult(
                tap=series.tap, against=f"b times {factor:.6g}", before=series.result.relative_l2, after=rest
            ),
        ),
    )


def _distinct(case: FailingComparison, side: ProfileSide, tap: str) -> tuple[int, int]:
    """(different values, elements) of one request's sample, sizes only: a grid is symmetric."""
    rows = np.abs(case.rows(side, case.sample[0], tap)[:256])
    scale = rows.max() or 1.0
    return int(np.unique(np.round(rows / scale, 7)).size), int(rows.size)


def _everywhere(case: FailingComparison, found: OnsetEvidence) -> bool:
    """Whether every token of every request is wrong, at the first tap and at a tap of each kind of layer."""
    kinds = {s.result.layer_type for s in case.layers}
    seen = {s.result.layer_type for s in case.failing if s.kind == "layer"}
    return found.series.share > 0.9 and 0 in found.tokens and kinds <= seen


def numeric(case: FailingComparison) -> KindVerdict:
    """A smooth, small difference: which policy does its profile point at?"""
    found = onsets(case)
    if isinstance(found, str):
        return _final_norm_policy(case) or found
    series, result = found.series, found.series.result
    if not np.isfinite(result.error_max) or gross(series):
        return f"{result.error_rms:.2g} at {series.tap} is beyond a numeric policy"
    noisy = _unsteady(case, "a") or _unsteady(case, "b")
    if noisy:
        return noisy
    keys = other_weights(case)
    if keys and all(key.endswith(ROUNDED_PARAMETERS) for key in keys):
        what = f"{len(keys)} parameters of the decay ({shorten_list(keys, 2)}) hold other values: their dtype"
    else:
        what = _policy(case, found)
    kernel = case.comparison.gate == "kernel"
    sure = not kernel or bool(keys)
    # A product that depends on the run or the batch would show in the projections, and between requests.
    spread = _everywhere(case, found) and not keys and series.kind != "gdn" and not _steady(case)
    return KindResult(
        kinds=("NUMERIC",) if sure and not spread else ("NUMERIC", "INVAR"),
        sentence=f"a small difference without a jump ({result.error_rms:.1e} at {series.tap}, "
        f"{_last(case):.1e} at {case.failing[-1].tap}): {what}",
        next_step="run both sides in float32 and switch one policy at a time in the torch reference; compare the "
        "dtypes of A_log, dt_bias and the norms",
        evidence=(
            *found.evidence(),
            ("first token", _token_zero(found)),
            ("growth over the depth", _growth(case)),
        ),
        live="" if sure and not spread else "repeat: three runs, and batch 1 against a larger batch",
    )


def _policy(case: FailingComparison, found: OnsetEvidence) -> str:
    """Which policy, by the part that token 0, the chunk's edge and the kinds of layers have in it."""
    series = found.series
    if series.kind == "conv" or _everywhere(case, found) and series.kind == "layer":
        return "every token from the first projection on: a norm's epsilon or rounding, or products in lower precision"
    if all(at % SAMPLE_CHUNK == 0 and at for at in found.tokens):
        return f"from token {min(found.tokens)} on, where a second chunk takes up the state: the dtype of the state"
    if 0 not in found.tokens:
        return "token 0 is exact, where no decay is used yet: the gate (A_log, dt_bias, or its dtype)"
    first = _token_zero(found)
    middle = float(np.median(np.concatenate(series.errors)))
    if first > WORSE_AT_FIRST * middle:
        return f"worst at token 0 ({first:.1e}, median {middle:.1e}): an epsilon"
    if series.full:
        return "from a full-attention layer on: its softmax, scale or norm"
    return "every token of the linear layers: the dtype or rounding of their inputs"


def _token_zero(found: OnsetEvidence) -> float:
    """Largest error of any request's first token at the first failing tap."""
    return max((float(row[0]) for row in found.series.errors if row.size), default=0.0)


def _last(case: FailingComparison) -> float:
    """The last failing tap's error."""
    return case.failing[-1].result.error_rms


def _growth(case: FailingComparison) -> float:
    """Last failing layer over the first."""
    layers = [s.result.error_rms for s in case.failing if s.kind == "layer"]
    return layers[-1] / layers[0] if layers and layers[0] else 1.0


def _final_norm_policy(case: FailingComparison) -> KindResult | None:
    """Only what the final norm returns differs, by one factor a token: its epsilon."""
    first = case.first
    if first is None or first.kind != "post":
        return None
    fit = separable(case.sample_rows("a", first.tap), case.sample_rows("b", first.tap))
    if fit is None or float(fit.weight.std()) > 1e-3:
        return None
    if not case.explains(first, first.result.relative_l2, fit.residual, SEPARABLE):
        return None
    return KindResult(
        kinds=("NUMERIC",),
        sentence=f"only what the final norm returns differs, by one factor for each token ({fit.scale.min():.6g} to "
        f"{fit.scale.max():.6g}): its epsilon or rounding",
        next_step="compare the norm's epsilon on both sides",
        evidence=(("smallest factor", float(fit.scale.min())), ("largest factor", float(fit.scale.max()))),
    )


def _unsteady(case: FailingComparison, side: ProfileSide) -> str | None:
    """Where a side does not agree with itself: requests that begin alike, computed differently, while the
    other side computes them alike. In words, or None."""
    series = case.first
    if series is None or series.kind == "logits":
        return None
    other: ProfileSide = "b" if side == "a" else "a"
    for one, two, common in _same_beginnings(case):
        parts = [case.rows(s, r, series.tap)[:common] for s in (side, other) for r in (one, two)]
        own, theirs = _apart(parts[0], parts[1]), _apart(parts[2], parts[3])
        if own > 4 * series.limit and theirs <= series.limit:
            ids = [case.requests[r].a.id for r in (one, two)]
            return (
                f"side {side} does not agree with itself: the first {common} tokens of {ids[0]} and {ids[1]} are "
                f"the same and differ by {own:.1e} at {series.tap} (side {other}: {theirs:.1e})"
            )
    return None


def _steady(case: FailingComparison) -> bool:
    """Whether there are requests of unequal lengths that begin alike, and both sides compute them alike: then
    what differs is a function of the tokens, not of the run, the batch or the shapes."""
    series = case.first
    pairs = _same_beginnings(case)
    return (
        series is not None
        and bool(pairs)
        and all(
            _apart(*(case.rows(side, r, series.tap)[:common] for r in (one, two))) <= series.limit
            for one, two, common in pairs
            for side in ("a", "b")
        )
    )


def _apart(left: "np.ndarray", right: "np.ndarray") -> float:
    """Largest relative difference of two blocks of rows."""
    return float(
        np.max(np.linalg.norm(left - right, axis=1) / np.maximum(np.linalg.norm(right, axis=1), 1e-300))
    )


def _same_beginnings(case: FailingComparison) -> list[tuple[int, int, int]]:
    """(request, request, common tokens) of sampled pairs that begin alike."""
    found = []
    for index, one in enumerate(case.sample):
        for two in case.sample[index + 1 :]:
            left, right = (case.requests[r].a.token_ids for r in (one, two))
            common = next(
                (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
                min(len(left), len(right)),
            )
            if common:
                found.append((one, two, min(common, 64)))
    return found


def invar(case: FailingComparison) -> KindVerdict:
    """Does a side depend on the run or the batch? Then requests that begin alike do not agree on it."""
    found = _numbers(case)
    if isinstance(found, str):
        return found
    for side in ("a", "b"):
        why = _unsteady(case, side)
        if why and found.head < GROSS:
            return KindResult(
                kinds=("INVAR",),
                sentence=why,
                next_step="run that side three times, alone and in a batch: what changes between runs is its floor, "
                "and above bfloat16's rounding a fault",
                evidence=found.evidence(),
            )
    return "each side agrees with itself where requests begin alike"
