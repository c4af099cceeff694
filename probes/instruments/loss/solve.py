"""The mixture of terms, the law of the weights and the denominator behind a step's gradient.

    reading = estimate_mixture(subject, crafted, at)                    # terms, temperature, source of labels
    reading, law, slots = choose_mixture_with_law(subject, crafted, at, reading)
    found = find_weight_law(subject, crafted, at, reading, law)         # denominator, slot 0, what could hide

Shapes: n slots that get a gradient, A anchors, B slots of a block, D width, V draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from parity.probes.instruments.loss.designed_row import DesignedBatch
from parity.probes.instruments.loss.head_gradient import SOFT, HeadGradients, compute_term_values
from parity.probes.instruments.loss.mixture import (
    ROUGH,
    MixtureFit,
    bound_unseen_shares,
    explain,
    measure_residual,
)
from parity.probes.instruments.loss.slot_weights import WeightedSlots, WeightLaw, recognise_law
from parity.probes.subject import ExaminedAdapter

FLOOR = 1e-6
"""Least limit of the residual: above what float32 leaves (2e-7), far below the effect of 1 % of anything."""
MIXTURE_ROUNDINGS = 4.0
"""Times the measured rounding that the residual may be. In bfloat16 a term is then also named where it is there by five
standard errors: 1 % KL is, by twelve."""
LABEL_SHIFTS = (0, 1, -1)
"""Places of the label beside anchor + slot that are tried."""
CERTAIN = 5.0
"""Standard errors by which a parameter has to differ from the declared one."""
SAME = 1e-3
"""Relative difference below which a parameter counts as the declared one."""
SLICE = "the captured slice"
"""Where the teacher's logits come from, as far as one is known."""
HEATS = tuple(float(heat) for heat in np.geomspace(0.25, 4.0, 17))
"""Temperatures that are tried before the best is refined."""
NEAR = 1e-3
"""Relative step of the temperature from which its error is computed."""
LEAST_WEIGHT_ERROR = 1e-5
"""Least relative tolerance of a weight: speculators adds 1e-5 to a denominator."""
HEAT_SLOTS = 12
"""Slots on which temperatures are tried."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureEstimate:
    """The mixture that was found, and what is needed to go on with it."""

    fit: MixtureFit
    heat: float
    """Temperature of the soft terms."""
    heat_error: float
    """Its standard error; 0 where it was not searched for."""
    source: str
    """Of the hard label that confidences are taken from: `teacher`, `data`, with `+1` or `-1` where it is shifted."""
    labels: Mapping[str, Tensor]
    """[n] draft ids by source."""
    teacher: Tensor | None
    """[n, V] logits."""
    teacher_from: str
    """Where they come from, in words."""
    columns: Mapping[str, Tensor]
    """[n, D] of every term that was tried."""


def estimate_mixture(subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients) -> MixtureEstimate:
    """Hard terms first, then all terms, then other temperatures: the first mixture that explains the gradients.

    Args:
        subject: the adapter that is examined, for its declared temperature and eta.
        crafted: the row.
        at: the step's gradient at the head.

    Returns:
        The best mixture, also where it explains nothing (`fit.is_explained`).
    """
    # Hard terms, which need no teacher. Under bfloat16's wide limit a teacher's terms may still hide in them.
    labels = _sources(crafted, at)
    teachers = _teachers(crafted, at)
    hard = [f"ce:{source}" for source in labels]
    if hard:
        columns = at.columns([*hard, "smoothing"], labels, None)
        reading = _reading(at, columns, labels, teachers.get(SLICE), SLICE)
        if not teachers or (reading.fit.is_explained and reading.fit.limit <= ROUGH):
            return reading
        best = reading
    else:
        best = None
    # All terms, at the declared temperature and at 1, with the teacher of the slice and with the step's own.
    own = [name for name in hard if name[-2] not in "+-"]
    for origin, teacher in teachers.items():
        local = dict(labels)
        if origin != SLICE:
            local["teacher"] = teacher.argmax(-1)
        names = [*dict.fromkeys([*own, "ce:teacher"]), "smoothing", *SOFT]
        for heat in dict.fromkeys((subject.recipe.loss.temperature, 1.0)):
            columns = at.columns(names, local, teacher, heat=heat, eta=subject.recipe.loss.lk_eta)
            reading = _reading(at, columns, local, teacher, origin, heat=heat)
            if reading.fit.is_explained:
                return reading
            best = reading if best is None or reading.fit.residual < best.fit.residual else best
    # Some other temperature.
    for origin, teacher in teachers.items():
        found = _other_heat(subject, at, labels, teacher, origin, own)
        if found.fit.is_explained:
            return found
    assert best is not None
    return best


def _sources(crafted: DesignedBatch, at: HeadGradients) -> dict[str, Tensor]:
    """Hard labels [n] by where they may come from."""
    made: dict[str, Tensor] = {}
    for shift in LABEL_SHIFTS:
        tail = f"{shift:+d}" if shift else ""
        if crafted.teacher is not None:
            made[f"teacher{tail}"] = crafted.at(crafted.teacher, at.index - 1 + shift).argmax(-1)
        if crafted.data is not None:
            made[f"data{tail}"] = crafted.at(crafted.data, at.index + shift)
    return made


def _teachers(crafted: DesignedBatch, at: HeadGradients) -> dict[str, Tensor]:
    """The teacher's logits [n, V]: from the captured slice, and as the step exposes them."""
    made: dict[str, Tensor] = {}
    if crafted.teacher is not None:
        made[SLICE] = crafted.at(crafted.teacher, at.index - 1)
    if at.shown.teacher is not None:
        made["the step's own teacher"] = at.shown.teacher.detach().cpu()[at.block, at.slot].double()
    return made


def _limit(at: HeadGradients, labels: Mapping[str, Tensor], teacher: Tensor | None) -> tuple[float, Tensor]:
    """Relative residual that rounding accounts for; and its size [n] in gradients of weight 1."""
    some = next(iter(labels), None)
    at_labels = labels[some] if some is not None else torch.zeros(len(at), dtype=torch.long)
    rounding = at.rounding(at_labels, teacher)
    column = at.columns(["ce:x"], {"x": at_labels}, None)["ce:x"]
    weight = at.gradient.norm(dim=-1) / column.norm(dim=-1).clamp(min=1e-30)
    return max(FLOOR, MIXTURE_ROUNDINGS * float((rounding * weight).norm() / at.gradient.norm())), rounding


def _reading(
    at: HeadGradients,
    columns: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    teacher: Tensor | None,
    origin: str,
    *,
    heat: float = 1.0,
    heat_error: float = 0.0,
) -> MixtureEstimate:
    """The smallest mixture of these columns, and what is needed to go on with it."""
    limit, rounding = _limit(at, labels, teacher)
    fit = explain(at.gradient, columns, limit)
    weights = torch.from_numpy(fit.weights).abs()
    larger = MIXTURE_ROUNDINGS * float((rounding * weights).norm() / at.gradient.norm())
    # Terms that cancel leave a smaller gradient, in which the rounding of each weighs more.
    if not fit.is_explained and limit < larger <= MIXTURE_ROUNDINGS * limit:
        fit = explain(at.gradient, columns, larger)
    hard = [name.split(":")[1] for name in fit.shares if name.startswith("ce:")]
    source = hard[0] if hard else next(iter(labels), "")
    return MixtureEstimate(
        fit=fit,
        heat=heat,
        heat_error=heat_error,
        source=source,
        labels=labels,
        teacher=teacher,
        teacher_from=origin,
        columns=columns,
    )


def _other_heat(
    subject: ExaminedAdapter,
    at: HeadGradients,
    labels: Mapping[str, Tensor],
    teacher: Tensor,
    origin: str,
    own: list[str],
) -> MixtureEstimate:
    """The temperature of the soft terms, or of all, by the least residual on a few slots; then all slots with it."""
    # A few slots are enough for the search. Where no soft term is, a heated cross-entropy may be.
    rows = torch.arange(0, len(at), max(1, len(at) // HEAT_SLOTS))[:HEAT_SLOTS]
    few, some = at.part(rows), {name: each[rows] for name, each in labels.items()}
    eta = subject.recipe.loss.lk_eta
    best: tuple[float, float, list[str]] | None = None
    for names in ([*own, "smoothing", *SOFT], [name.replace("ce:", "ce@heat:") for name in own]):

        def residual_at_heat(log_heat: float, names: list[str] = names) -> float:
            columns = few.columns(names, some, teacher[rows], heat=float(np.exp(log_heat)), eta=eta)
            return measure_residual(few.gradient, columns)

        # The residual over the temperature has one bottom, flat on both sides: a grid, then its best cell.
        coarse = [residual_at_heat(float(np.log(heat))) for heat in HEATS]
        at_best = int(np.argmin(coarse))
        bounds = np.log([HEATS[max(0, at_best - 1)], HEATS[min(len(HEATS) - 1, at_best + 1)]])
        fine = minimize_scalar(
            residual_at_heat, bounds=tuple(bounds), method="bounded", options={"xatol": 1e-7}
        )
        if best is None or fine.fun < best[0]:
            best = (float(fine.fun), float(np.exp(fine.x)), names)
    # All slots at the best temperature, whose error is the residual over the residual of a small step.
    assert best is not None
    _, heat, names = best
    made = [at.columns(names, labels, teacher, heat=each, eta=eta) for each in (heat, heat * (1 + NEAR))]
    reading = _reading(at, made[0], labels, teacher, origin, heat=heat)
    beside = explain(at.gradient, {name: made[1][name] for name in reading.fit.shares}, 0.0).residual
    error = heat * NEAR * reading.fit.residual / max(beside, 1e-12)
    return replace(reading, heat_error=error)


# --- weights and denominator ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WeightLaws:
    """What follows from the weights."""

    denominator: float
    """What the sum of weights times values was divided by, were the terms' factors the declared ones, and `squared`."""
    reductions: tuple[str, ...]
    """Names of what has that value here; several where they cannot be told apart."""
    slot0: float
    """Weight of slot 0 over slot 1's; 0 where it is not trained."""
    unseen: dict[str, float]
    """Term -> the share it could have without being seen."""
    terms: dict[str, float]
    """The mixture by the recipe's names: `ce`, `kl`, `smoothing`."""
    squared: dict[str, float]
    """Soft term -> the temperature squared that it is multiplied with, as in distillation; where none is, empty."""


def choose_mixture_with_law(
    subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients, reading: MixtureEstimate
) -> tuple[MixtureEstimate, WeightLaw, WeightedSlots]:
    """The mixture whose weights follow a law, where several have the gradient's direction.

    Args:
        subject: the adapter that is examined; its declared law is preferred where two fit alike.
        crafted: the row.
        at: the step's gradient at the head.
        reading: the mixture, with those that fit alike.

    Returns:
        The mixture, the law, and the weights of slots 1 and up that the law explains.
    """
    prefer = subject.recipe.loss.weights.kind
    fits = [reading.fit, *reading.fit.alike]
    tried = []
    for fit in fits:
        beside = tuple(other for other in fits if other is not fit)
        each = replace(reading, fit=replace(fit, alike=beside))
        tried.append((each, *_law_of(at, crafted, each, prefer)))
        if tried[-1][1].fits:
            lone = tried[-1][1].kind in ("uniform", "exp", "dpace")
            return (replace(each, fit=replace(fit, alike=())), *tried[-1][1:]) if lone else tried[-1]
    return tried[0]


def _law_of(
    at: HeadGradients, crafted: DesignedBatch, reading: MixtureEstimate, prefer: str
) -> tuple[WeightLaw, WeightedSlots]:
    """The weights of slots 1 and up."""
    labels = reading.labels.get(reading.source, torch.zeros(len(at), dtype=torch.long))
    # Each slot's tolerance: rounding beside the size of the mixture's own gradient there.
    rows = (at.slot > 0).nonzero().squeeze(-1)
    column = sum(share * reading.columns[name] for name, share in reading.fit.shares.items())
    assert isinstance(column, Tensor)
    rounding = at.rounding(labels, reading.teacher if has_soft_terms(reading) else None) / column.norm(
        dim=-1
    ).clamp(min=1e-30)
    # What D-PACE goes by: the label's probability, and the value of the term that a detour flows through.
    chance = at.chance(labels)
    value = -chance.clamp(min=1e-300).log()
    if set(reading.fit.shares) <= set(SOFT) and reading.teacher is not None and len(reading.fit.shares) == 1:
        value = _values(at, next(iter(reading.fit.shares)), reading)
    slots = WeightedSlots(
        block=at.block[rows].numpy(),
        slot=at.slot[rows].numpy(),
        weight=reading.fit.weights[rows.numpy()],
        tolerance=(MIXTURE_ROUNDINGS * 2 * rounding[rows] + LEAST_WEIGHT_ERROR).numpy(),
        chance=chance[rows].numpy(),
        value=value[rows].numpy(),
        right=(at.best[0] == labels)[rows].numpy(),
        document=crafted.batch.document[at.shown.anchors.cpu()[at.block[rows]]].numpy(),
        size=at.shape[1],
    )
    law = recognise_law(slots, prefer)
    if not law.fits and set(reading.fit.shares) <= set(
        SOFT
    ):  # speculators' confidence of any term: exp(-value)
        other = replace(slots, chance=np.exp(-slots.value))
        again = recognise_law(other, prefer)
        law = replace(again, note="confidence exp(-value)") if again.fits else law
    return law, slots


def has_soft_terms(reading: MixtureEstimate) -> bool:
    """Whether a term against the teacher's distribution is in the mixture."""
    return any(name in SOFT for name in reading.fit.shares)


def _values(at: HeadGradients, name: str, reading: MixtureEstimate) -> Tensor:
    """[n] a soft term's value."""
    teacher, heat = reading.teacher, reading.heat
    assert teacher is not None
    return at.over(
        lambda piece, log_q: compute_term_values(
            name, (log_q / heat).log_softmax(-1), None, (teacher[piece] / heat).log_softmax(-1)
        )
    )


def find_weight_law(
    subject: ExaminedAdapter,
    crafted: DesignedBatch,
    at: HeadGradients,
    reading: MixtureEstimate,
    law: WeightLaw,
) -> WeightLaws:
    """Denominator, slot 0, and what could hide.

    Args:
        subject: the adapter that is examined, for the declared factors and temperature.
        crafted: the row.
        at: the step's gradient at the head.
        reading: the mixture of terms.
        law: of the weights of slots 1 and up.
    """
    # Slot 0 belongs to no law: its mean weight beside slot 1's, and its part of the sum.
    weights, zero, one = reading.fit.weights, (at.slot == 0).numpy(), (at.slot == 1).numpy()
    first = float(np.mean(weights[one] if one.any() else weights))
    slot0 = float(weights[zero].mean() / first) if zero.any() and first else 0.0
    total = (float(law.raw.sum()) if law.sum is None else law.sum) + float(weights[zero].sum()) / law.scale
    # Terms that are not in the mixture, and how much of them would not be seen.
    soft = [] if reading.teacher is None else ["kl", "rkl"]
    more = [name for name in soft if name not in reading.fit.shares]
    columns = {**reading.columns, **at.columns(more, reading.labels, reading.teacher, heat=reading.heat)}
    others = [name for name in ("smoothing", *more) if name in columns and name not in reading.fit.shares]
    # The denominator follows from the scale and the declared factors; a factor T^2 makes another of it.
    terms, errors = _by_name(reading)
    declared = subject.recipe.loss.terms
    made = []
    for squared in _squares(declared, terms, errors, (reading.heat, subject.recipe.loss.temperature)):
        factor = sum(value * squared.get(name, 1.0) for name, value in declared.items())
        denominator = factor / law.scale if law.scale else float("inf")
        made.append((squared, denominator, _reductions(crafted, at, law, total, denominator)))
    squared, denominator, reductions = next((each for each in made if each[2]), made[0])
    return WeightLaws(
        denominator=denominator,
        reductions=reductions,
        slot0=slot0,
        unseen=bound_unseen_shares(at.gradient, columns, reading.fit, others),
        terms=terms,
        squared=squared,
    )


def name_term(name: str) -> str:
    """The recipe's name of a term: `ce` of `ce:teacher` and of `ce@heat:data`."""
    return name.split(":")[0].split("@")[0]


def _by_name(reading: MixtureEstimate) -> tuple[dict[str, float], dict[str, float]]:
    """Shares and their standard errors by the recipe's names."""
    terms: dict[str, float] = {}
    errors: dict[str, float] = {}
    for name, share in reading.fit.shares.items():
        short = name_term(name)
        terms[short] = terms.get(short, 0.0) + share
        errors[short] = max(errors.get(short, 0.0), reading.fit.errors[name])
    return terms, errors


def _squares(
    declared: Mapping[str, float],
    terms: Mapping[str, float],
    errors: Mapping[str, float],
    heats: tuple[float, ...],
) -> list[dict[str, float]]:
    """Which soft terms may be multiplied by a temperature squared, given the measured shares: none of them comes first,
    where that fits or nothing does. Where all terms are, shares alone cannot tell, and the denominator has to."""
    names = [name for name in declared if name in SOFT]
    fitting: list[dict[str, float]] = []
    subsets = [subset for size in range(len(names), 0, -1) for subset in combinations(names, size)]
    squares = [heat**2 for heat in dict.fromkeys(heats) if abs(heat**2 - 1) > SAME]
    for option in ({}, *(dict.fromkeys(subset, square) for square in squares for subset in subsets)):
        factors = {name: value * option.get(name, 1.0) for name, value in declared.items()}
        whole = sum(factors.values())
        off = (
            abs(terms.get(name, 0.0) - factors.get(name, 0.0) / whole) - CERTAIN * errors.get(name, 0.0)
            for name in {**factors, **terms}
        )
        if max(off) <= SAME:
            fitting.append(option)
    return fitting or [{}]


def _reductions(
    crafted: DesignedBatch, at: HeadGradients, law: WeightLaw, total: float, denominator: float
) -> tuple[str, ...]:
    """Which sums have the denominator's value on this row.

    Args:
        crafted: the row.
        at: the step's gradient at the head.
        law: of the weights.
        total: sum of the weights, slot 0 included.
        denominator: as measured.
    """
    # Reductions by the recipe's names, then other sums that trainers divide by.
    blocks = at.shape[0]
    known = {
        "weighted_mean": total,
        "mask_mean": float(len(at)),
        "batch_mean": float(len(crafted.batch.sample_ids)),
        "sum": 1.0,
        "blocks": float(blocks),
        "blocks with a trained slot": float(len(at.block.unique())),
        "all slots but the anchor's": float(blocks * (at.shape[1] - 1)),
        "all slots": float(blocks * at.shape[1]),
        "trained tokens of the row": float(crafted.batch.loss_mask.sum()),
        "tokens of the row": float(len(crafted.batch.tokens)),
    }
    if law.kind == "exp":
        known["trained slots, with weights that begin at exp(-1 / gamma)"] = len(at) * float(
            np.exp(1 / law.parameters["gamma"])
        )
    near = CERTAIN * law.scale_error + SAME
    return tuple(name for name, value in known.items() if abs(denominator / value - 1) <= near)
