"""What is being minimised?

The gradient of the loss at the head's input is solved for what made it. Logits are formed here in float64; for
every slot a term of weight 1 leaves a known gradient (`parity.probes.adapters.at_head`), and one mixture of terms with
one weight a slot has to give all of them. The weights are then explained: as a law of the slot, of D-PACE's
confidence or of what the draft got right; their sum tells what is divided by.

Test: exact. The residual is relative; its limit is 1e-6, or four times what forming the logits in the trainer's own
dtypes changes (about 2e-7 in float32, .003 in bfloat16), measured beside it. What is above is *not recognised*: no
term is named then. A parameter is another than declared when it is off by five standard errors and by .1 %.
The row is `parity.probes.adapters.crafted`: a flat teacher, labels half of which differ from the data.
What stays hidden: a factor common to all terms cannot be told from a denominator, so the factors' declared
sum is assumed.

Bugs it finds: 70 % KL + 30 % CE with streak-aware weights and gamma 10 for hard CE with gamma 4 (design.md section
1), gamma for another block size, a loss reduced by other sums (SpecForge#455's and speculators#798's weights).
Cost: two steps, one gradient, about seven products of [96, V] and [V, D] in float64. Faults: the `loss` rows of
`parity.probes.deviations`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from parity.probes.adapters.asking import Fault, Subject, answer
from parity.probes.adapters.at_head import SOFT, AtHead, term_values
from parity.probes.adapters.crafted import Crafted, craft
from parity.probes.adapters.mixture import ROUGH, Fit, explain, left_over, unseen
from parity.probes.adapters.weighting import Law, Slots, recognise
from parity.probes.base import Answer
from parity.reports.record import Chart, Column, Table, Value

FLOOR = 1e-6
"""Least limit of the residual: above what float32 leaves (2e-7), far below the effect of 1 % of anything."""
ROUNDINGS = 4.0
"""Times the measured rounding that the residual may be. In bfloat16 a term is then also named where it is there by five
standard errors: 1 % KL is, by twelve."""
SHIFTS = (0, 1, -1)
"""Places of the label beside anchor + slot that are tried."""
CERTAIN = 5.0
"""Standard errors."""
SAME = 1e-3
"""Relative difference below which a parameter counts as the declared one."""
HEATS = tuple(float(heat) for heat in np.geomspace(0.25, 4.0, 17))
NEAR = 1e-3
"""Relative step of the temperature from which its error is told."""
IDENTIFIABLE = 0.05
"""Share that another term could have unseen, from which on the mix is called not identifiable."""
RIGHT = 0.1
"""Share of slots on which drafts have to be right, and wrong, for a streak to show in the weights."""
LEAST = 1e-5
"""Least relative tolerance of a weight: speculators adds 1e-5 to a denominator."""
HEAT_SLOTS = 12
"""Slots on which temperatures are tried."""
WORDS = {
    "kl": "KL to the teacher",
    "rkl": "reverse KL",
    "js": "Jensen-Shannon divergence",
    "tv": "total variation",
    "nla": "-log(1 - TV)",
    "lk": "LK",
    "smoothing": "label smoothing",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """The mixture that was found, and what is needed to go on with it."""

    fit: Fit
    heat: float
    heat_error: float
    source: str
    """Of the hard label that confidences are taken from: `teacher`, `data`, with `+1` or `-1` where it is shifted."""
    labels: Mapping[str, Tensor]
    teacher: Tensor | None
    teacher_from: str
    columns: Mapping[str, Tensor]


class Loss:
    """Solves the gradient at the head's input."""

    name = "loss"

    def run(self, subject: Subject) -> Answer:
        """One finding a deviation, with tables of terms and of slots."""
        crafted = craft(subject)
        states = crafted.states.clone().requires_grad_(True)
        shown = subject.step(crafted.batch, states, anchors=crafted.anchors)
        at = AtHead.of(shown)
        if not len(at):
            return answer(self.name, "no slot gets a gradient", [_nothing(at)], facts={"loss.slots": 0})
        reading = _read(subject, crafted, at)
        rounded = at.rounded()
        if rounded is not None:
            other = _read(subject, crafted, rounded)
            if other.fit.residual < reading.fit.residual:
                at, reading = rounded, other
        if not reading.fit.explained:
            return _not_recognised(self.name, reading, len(at))
        reading, law, slots = _explained(subject, crafted, at, reading)
        found = _found(subject, crafted, at, reading, law)
        faults = _deviations(subject, reading, law, found, slots)
        wanted = subject.recipe.loss.reduction
        return answer(
            self.name,
            _sentence(reading, law, found, slots, wanted),
            faults,
            facts=_facts(reading, law, found, wanted),
            tables=[_term_table(reading, found), _slot_table(at, reading, law, slots)],
        )


def _nothing(at: AtHead) -> Fault:
    words = f"0 of {at.shape[0] * at.shape[1]} slots have a gradient at the head's input"
    return Fault(name="loss-none", measured=words)


# --- reading the mixture ----------------------------------------------------------------------------------


def _read(subject: Subject, crafted: Crafted, at: AtHead) -> Reading:
    """Hard terms first, then all terms, then other temperatures, then shifted teachers: the first that explains."""
    labels = _sources(crafted, at)
    teachers = _teachers(crafted, at)
    hard = [f"ce:{source}" for source in labels]
    if hard:
        columns = at.columns([*hard, "smoothing"], labels, None)
        reading = _reading(at, columns, labels, teachers.get("the captured slice"), "the captured slice")
        if not teachers or (reading.fit.explained and reading.fit.limit <= ROUGH):
            return reading
        best = reading
    else:
        best = None
    own = [name for name in hard if name[-2] not in "+-"]
    for origin, teacher in teachers.items():
        local = dict(labels)
        if origin != "the captured slice":
            local["teacher"] = teacher.argmax(-1)
        names = [*dict.fromkeys([*own, "ce:teacher"]), "smoothing", *SOFT]
        for heat in dict.fromkeys((subject.recipe.loss.temperature, 1.0)):
            columns = at.columns(names, local, teacher, heat=heat, eta=subject.recipe.loss.lk_eta)
            reading = _reading(at, columns, local, teacher, origin, heat=heat)
            if reading.fit.explained:
                return reading
            best = reading if best is None or reading.fit.residual < best.fit.residual else best
    for origin, teacher in teachers.items():
        found = _other_heat(subject, at, labels, teacher, origin, own)
        if found.fit.explained:
            return found
    assert best is not None
    return best


def _sources(crafted: Crafted, at: AtHead) -> dict[str, Tensor]:
    """Hard labels [n] by where they may come from."""
    made: dict[str, Tensor] = {}
    for shift in SHIFTS:
        tail = f"{shift:+d}" if shift else ""
        if crafted.teacher is not None:
            made[f"teacher{tail}"] = crafted.at(crafted.teacher, at.index - 1 + shift).argmax(-1)
        if crafted.data is not None:
            made[f"data{tail}"] = crafted.at(crafted.data, at.index + shift)
    return made


def _teachers(crafted: Crafted, at: AtHead) -> dict[str, Tensor]:
    """The teacher's logits [n, V]: from the captured slice, and as the step shows them."""
    made: dict[str, Tensor] = {}
    if crafted.teacher is not None:
        made["the captured slice"] = crafted.at(crafted.teacher, at.index - 1)
    if at.shown.teacher is not None:
        made["the step's own teacher"] = at.shown.teacher.detach().cpu()[at.block, at.slot].double()
    return made


def _limit(at: AtHead, labels: Mapping[str, Tensor], teacher: Tensor | None) -> tuple[float, Tensor]:
    """Relative residual that rounding accounts for; and its size [n] in gradients of weight 1."""
    some = next(iter(labels), None)
    at_labels = labels[some] if some is not None else torch.zeros(len(at), dtype=torch.long)
    rounding = at.rounding(at_labels, teacher)
    column = at.columns(["ce:x"], {"x": at_labels}, None)["ce:x"]
    weight = at.gradient.norm(dim=-1) / column.norm(dim=-1).clamp(min=1e-30)
    return max(FLOOR, ROUNDINGS * float((rounding * weight).norm() / at.gradient.norm())), rounding


def _reading(
    at: AtHead,
    columns: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    teacher: Tensor | None,
    origin: str,
    *,
    heat: float = 1.0,
    heat_error: float = 0.0,
) -> Reading:
    limit, rounding = _limit(at, labels, teacher)
    fit = explain(at.gradient, columns, limit)
    weights = torch.from_numpy(fit.weights).abs()
    larger = ROUNDINGS * float((rounding * weights).norm() / at.gradient.norm())
    if (
        not fit.explained and limit < larger <= ROUNDINGS * limit
    ):  # terms that cancel leave a smaller gradient
        fit = explain(at.gradient, columns, larger)
    hard = [name.split(":")[1] for name in fit.shares if name.startswith("ce:")]
    source = hard[0] if hard else next(iter(labels), "")
    return Reading(
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
    subject: Subject, at: AtHead, labels: Mapping[str, Tensor], teacher: Tensor, origin: str, own: list[str]
) -> Reading:
    """The temperature of the soft terms, or of all, by the least residual on a few slots; then all slots with it."""
    rows = torch.arange(0, len(at), max(1, len(at) // HEAT_SLOTS))[:HEAT_SLOTS]
    few, some = at.part(rows), {name: each[rows] for name, each in labels.items()}
    eta = subject.recipe.loss.lk_eta
    best: tuple[float, float, list[str]] | None = None
    for names in ([*own, "smoothing", *SOFT], [name.replace("ce:", "ce@heat:") for name in own]):

        def left(log_heat: float, names: list[str] = names) -> float:
            columns = few.columns(names, some, teacher[rows], heat=float(np.exp(log_heat)), eta=eta)
            return left_over(few.gradient, columns)

        coarse = [left(float(np.log(heat))) for heat in HEATS]
        at_best = int(np.argmin(coarse))
        bounds = np.log([HEATS[max(0, at_best - 1)], HEATS[min(len(HEATS) - 1, at_best + 1)]])
        fine = minimize_scalar(left, bounds=tuple(bounds), method="bounded", options={"xatol": 1e-7})
        if best is None or fine.fun < best[0]:
            best = (float(fine.fun), float(np.exp(fine.x)), names)
    assert best is not None
    _, heat, names = best
    made = [at.columns(names, labels, teacher, heat=each, eta=eta) for each in (heat, heat * (1 + NEAR))]
    reading = _reading(at, made[0], labels, teacher, origin, heat=heat)
    beside = explain(at.gradient, {name: made[1][name] for name in reading.fit.shares}, 0.0).residual
    error = heat * NEAR * reading.fit.residual / max(beside, 1e-12)
    return replace(reading, heat_error=error)


# --- weights and denominator ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """What follows from the weights."""

    denominator: float
    """What the sum of weights times values was divided by, were the terms' factors the declared ones."""
    reductions: tuple[str, ...]
    """Names of what has that value here; several where they cannot be told apart."""
    slot0: float
    """Weight of slot 0 over slot 1's; 0 where it is not trained."""
    unseen: dict[str, float]
    """Term -> the share it could have without being seen."""
    terms: dict[str, float]
    """The mixture by the recipe's names: `ce`, `kl`, `smoothing`."""


def _explained(
    subject: Subject, crafted: Crafted, at: AtHead, reading: Reading
) -> tuple[Reading, Law, Slots]:
    """The reading whose weights follow a law, where several mixtures have the gradient's direction."""
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


def _law_of(at: AtHead, crafted: Crafted, reading: Reading, prefer: str) -> tuple[Law, Slots]:
    """The weights of slots 1 and up."""
    labels = reading.labels.get(reading.source, torch.zeros(len(at), dtype=torch.long))
    rows = (at.slot > 0).nonzero().squeeze(-1)
    column = sum(share * reading.columns[name] for name, share in reading.fit.shares.items())
    assert isinstance(column, Tensor)
    rounding = at.rounding(labels, reading.teacher if _soft(reading) else None) / column.norm(dim=-1).clamp(
        min=1e-30
    )
    chance = at.chance(labels)
    value = -chance.clamp(min=1e-300).log()
    if set(reading.fit.shares) <= set(SOFT) and reading.teacher is not None and len(reading.fit.shares) == 1:
        value = _values(at, next(iter(reading.fit.shares)), reading)
    slots = Slots(
        block=at.block[rows].numpy(),
        slot=at.slot[rows].numpy(),
        weight=reading.fit.weights[rows.numpy()],
        tolerance=(ROUNDINGS * 2 * rounding[rows] + LEAST).numpy(),
        chance=chance[rows].numpy(),
        value=value[rows].numpy(),
        right=(at.best[0] == labels)[rows].numpy(),
        document=crafted.batch.document[at.shown.anchors.cpu()[at.block[rows]]].numpy(),
        size=at.shape[1],
    )
    law = recognise(slots, prefer)
    if not law.fits and set(reading.fit.shares) <= set(
        SOFT
    ):  # speculators' confidence of any term: exp(-value)
        other = replace(slots, chance=np.exp(-slots.value))
        again = recognise(other, prefer)
        law = replace(again, note="confidence exp(-value)") if again.fits else law
    return law, slots


def _soft(reading: Reading) -> bool:
    return any(name in SOFT for name in reading.fit.shares)


def _values(at: AtHead, name: str, reading: Reading) -> Tensor:
    """[n] a soft term's value."""
    teacher, heat = reading.teacher, reading.heat
    assert teacher is not None
    return at.over(
        lambda piece, log_q: term_values(
            name, (log_q / heat).log_softmax(-1), None, (teacher[piece] / heat).log_softmax(-1)
        )
    )


def _found(subject: Subject, crafted: Crafted, at: AtHead, reading: Reading, law: Law) -> Found:
    """Denominator, slot 0, and what could hide."""
    weights, zero = reading.fit.weights, (at.slot == 0).numpy()
    first = (
        float(np.mean(weights[(at.slot == 1).numpy()])) if (at.slot == 1).any() else float(np.mean(weights))
    )
    slot0 = float(weights[zero].mean() / first) if zero.any() and first else 0.0
    factor = sum(subject.recipe.loss.terms.values())
    denominator = factor / law.scale if law.scale else float("inf")
    total = (float(law.raw.sum()) if law.sum is None else law.sum) + float(weights[zero].sum()) / law.scale
    others = [
        name for name in ("kl", "rkl") if reading.teacher is not None and name not in reading.fit.shares
    ]
    more = at.columns(others, reading.labels, reading.teacher, heat=reading.heat) if others else {}
    columns = {**reading.columns, **more}
    others = [
        name for name in ("smoothing", "kl", "rkl") if name in columns and name not in reading.fit.shares
    ]
    terms: dict[str, float] = {}
    for name, share in reading.fit.shares.items():
        terms[name.split(":")[0].split("@")[0]] = terms.get(name.split(":")[0].split("@")[0], 0.0) + share
    return Found(
        denominator=denominator,
        reductions=_reductions(crafted, at, law, total, denominator),
        slot0=slot0,
        unseen=unseen(at.gradient, columns, reading.fit, others),
        terms=terms,
    )


def _reductions(crafted: Crafted, at: AtHead, law: Law, total: float, denominator: float) -> tuple[str, ...]:
    """Which sums have the denominator's value on this row."""
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


# --- against the recipe -----------------------------------------------------------------------------------


def _declared_terms(subject: Subject) -> dict[str, float]:
    """Shares, 0 to 1, by the recipe's names."""
    terms = subject.recipe.loss.terms
    return {name: value / sum(terms.values()) for name, value in terms.items()}


def _deviations(subject: Subject, reading: Reading, law: Law, found: Found, slots: Slots) -> list[Fault]:
    """What is other than declared, the mixture first."""
    return [
        *_term_faults(subject, reading, found),
        *_weight_faults(subject, law, slots),
        *_slot0_faults(found),
        *_reduction_faults(subject, law, found),
    ]


def _term_faults(subject: Subject, reading: Reading, found: Found) -> list[Fault]:
    faults = []
    declared, recipe = _declared_terms(subject), subject.recipe
    hard = {name.split(":")[1].rstrip("+-1") for name in reading.fit.shares if name.startswith("ce")}
    wanted = "data" if recipe.labels == "data" else "teacher"
    ambiguous = any(_names(other) == set(declared) for other in reading.fit.alike)
    shares = {name: found.terms.get(name, 0.0) for name in {**declared, **found.terms}}
    errors = {name.split(":")[0].split("@")[0]: each for name, each in reading.fit.errors.items()}
    off = {
        name: value - declared.get(name, 0.0)
        for name, value in shares.items()
        if abs(value - declared.get(name, 0.0)) > SAME + CERTAIN * errors.get(name, 0.0)
    }
    if off and not ambiguous:
        name = "loss-smoothing" if set(off) - set(declared) == {"smoothing"} else "loss-terms"
        words = f"{_mixture(found.terms)}, declared {_mixture(declared)}"
        evidence = tuple((f"share of {each}", shares[each]) for each in off)
        faults.append(Fault(name=name, measured=words, evidence=evidence))
    if "ce" in declared and hard and hard != {wanted}:
        words = f"cross-entropy on {' and '.join(sorted(_origin(each) for each in hard))}, declared {_origin(wanted)}"
        numbers = tuple((f"share on {name}", value) for name, value in reading.fit.shares.items())
        faults.append(Fault(name="loss-label-source", measured=words, evidence=numbers))
    heat, declared_heat = reading.heat, recipe.loss.temperature
    visible = _soft(reading) or any("@" in name for name in reading.fit.shares)
    if visible and abs(heat - declared_heat) > SAME * declared_heat + CERTAIN * reading.heat_error:
        words = f"{heat:.4g} (standard error {reading.heat_error:.1g}), declared {declared_heat:g}"
        faults.append(Fault(name="loss-temperature", measured=words, evidence=(("temperature", heat),)))
    return faults


def _names(fit: Fit) -> set[str]:
    return {name.split(":")[0].split("@")[0] for name in fit.shares}


def _weight_faults(subject: Subject, law: Law, slots: Slots) -> list[Fault]:
    """Of the law and its parameter."""
    weights, several = subject.recipe.loss.weights, len(set(slots.slot)) > 1
    if not several or law.kind == "per-block":
        return []
    name, value = ("gamma", weights.gamma) if weights.kind == "exp" else ("alpha", weights.alpha)
    profile = tuple((f"slot {k}", each) for k, each in _profile(slots).items())
    kind_words = f"{_law_words(law, slots)}, declared {_declared_law(subject)}"
    if law.kind == "streak":
        return [Fault(name="loss-streak", measured=kind_words, evidence=profile)]
    if law.kind == "dpace-attached":
        return [Fault(name="loss-weights-attached", measured=kind_words, evidence=profile)]
    if law.kind != weights.kind:
        return [Fault(name="loss-weights", measured=kind_words, evidence=profile)]
    if value is None:
        return []
    measured, error = law.parameters[name], law.errors.get(name, 0.0)
    if abs(measured - value) <= SAME * max(value, 0.1) + CERTAIN * error:
        return []
    words = f"{name} {measured:.4g} (standard error {error:.1g}), declared {value:g}"
    return [Fault(name=f"loss-{name}", measured=words, evidence=((name, measured), *profile))]


def _slot0_faults(found: Found) -> list[Fault]:
    if not found.slot0:
        return []
    words = f"it weighs {found.slot0:.4g} of what slot 1 weighs"
    return [Fault(name="loss-slot0", measured=words, evidence=(("weight of slot 0", found.slot0),))]


def _reduction_faults(subject: Subject, law: Law, found: Found) -> list[Fault]:
    wanted = subject.recipe.loss.reduction
    if law.kind == "per-block":
        words = f"{law.note}, declared {_reduction_words(wanted)}"
        return [Fault(name="loss-reduction", measured=f"{words} (misfit {law.misfit:.2g} of its tolerance)")]
    if not law.fits or wanted in found.reductions:
        return []
    what = " or ".join(map(_reduction_words, found.reductions)) or "not recognised"
    words = f"the sum is divided by {found.denominator:.5g} ({what}), declared {_reduction_words(wanted)}"
    return [Fault(name="loss-reduction", measured=words, evidence=(("denominator", found.denominator),))]


def _not_recognised(name: str, reading: Reading, slots: int) -> Answer:
    """No term is named where the gradients are not explained."""
    fit = reading.fit
    near = " + ".join(f"{share:.3g} {term}" for term, share in fit.shares.items())
    words = (
        f"the best mixture leaves {fit.residual:.2g} of the gradient of {slots} slots (limit {fit.limit:.1g})"
    )
    evidence = (("residual", fit.residual), ("limit", fit.limit), ("best mixture", near))
    fault = Fault(name="loss-unrecognised", measured=words, evidence=evidence)
    facts = {"loss.recognised": False, "loss.residual": fit.residual}
    return answer(name, f"the loss is not recognised: {words}", [fault], facts=facts)


# --- words ------------------------------------------------------------------------------------------------


def _origin(source: str) -> str:
    return "the teacher's argmax" if source.startswith("teacher") else "the data's token"


def _mixture(terms: Mapping[str, float]) -> str:
    parts = [f"{100 * share:.4g} % {WORDS.get(name, name.upper())}" for name, share in terms.items()]
    return " + ".join(parts)


def _terms_words(reading: Reading) -> str:
    """`hard CE on the teacher's argmax`, or shares."""
    parts, shares = [], reading.fit.shares
    for name, share in shares.items():
        term, _, source = name.partition(":")
        words = WORDS.get(term, "")
        if term.startswith("ce"):
            shift = source[-2:] if source[-2] in "+-" else ""
            words = f"hard CE on {_origin(source)}" + (f" of token {shift}" if shift else "")
        error = reading.fit.errors[name]
        number = f"{100 * share:.2f} % " if len(shares) > 1 else ""
        parts.append(number + words + (f" (standard error {100 * error:.1g} %)" if len(shares) > 1 else ""))
    text = " + ".join(parts)
    if any(name in SOFT or "@" in name for name in shares):
        text += f", temperature {reading.heat:.4g}"
    others = [" + ".join(fit.shares) for fit in reading.fit.alike]
    return text + (f" (or {' or '.join(others)})" if others else "")


def _law_words(law: Law, slots: Slots) -> str:
    low, high = int(slots.slot.min()), int(slots.slot.max())
    over = f"over slots {low}-{high}" if high > low else f"on slot {low}"
    if high == low:
        return f"one slot a block ({over}), so no position weights"
    number = "".join(f" with {name} {value:.2f}" for name, value in law.parameters.items())
    words = {
        "uniform": "weights uniform",
        "exp": f"weights exp{number}",
        "per-slot": f"weights of the slot alone, in no known form ({_profile_words(slots)})",
        "per-block": f"{law.note}{number}",
        "streak": f"weights that depend on the slot and on {law.note}{number}",
        "dpace-confidence": f"weights of D-PACE's confidences alone{number}",
        "dpace-continuation": f"weights of D-PACE's continuation alone{number}",
        "dpace-attached": f"D-PACE weights{number} through which the gradient flows",
        "dpace": f"weights D-PACE{number}",
        "unknown": f"weights in no known form ({_profile_words(slots)})",
    }[law.kind]
    if law.kind == "dpace" and law.note:
        words += f" ({law.note})"
    return f"{words} {over}"


def _profile(slots: Slots) -> dict[int, float]:
    """Mean weight of every slot number, of slot 1's."""
    means = {int(k): float(slots.weight[slots.slot == k].mean()) for k in np.unique(slots.slot)}
    first = next(iter(means.values()))
    return {k: value / first for k, value in means.items()}


def _profile_words(slots: Slots) -> str:
    return ", ".join(f"{value:.3g}" for value in _profile(slots).values())


def _declared_law(subject: Subject) -> str:
    weights = subject.recipe.loss.weights
    return {
        "exp": f"exp with gamma {weights.gamma}",
        "dpace": f"D-PACE with alpha {weights.alpha}",
        "uniform": "uniform",
    }[weights.kind]


def _reduction_words(name: str) -> str:
    known = {
        "weighted_mean": "weighted mean",
        "mask_mean": "mean over trained slots",
        "batch_mean": "sum over the number of samples",
        "sum": "plain sum",
    }
    return known.get(name, f"sum over the number of {name}")


def _reduction(law: Law, found: Found, wanted: str) -> str:
    if law.kind == "per-block":
        return law.note
    if wanted in found.reductions:
        return wanted
    return found.reductions[0] if found.reductions else "not recognised"


def _hits(slots: Slots) -> str:
    """What cannot be seen where drafts are hardly ever right, or always."""
    share = float(slots.right.mean())
    if RIGHT <= share <= 1 - RIGHT or len(set(slots.slot)) < 2:
        return ""
    return f"; drafts are right on {share:.0%} of slots, so weights that depend on it would not show"


def _sentence(reading: Reading, law: Law, found: Found, slots: Slots, wanted: str) -> str:
    zero = "slot 0 unweighted" if not found.slot0 else f"slot 0 weighs {found.slot0:.3g} of slot 1"
    parts = [_terms_words(reading), _law_words(law, slots), zero]
    reduction = _reduction(law, found, wanted)
    parts.append(
        _reduction_words(reduction)
        if reduction != "not recognised"
        else f"divided by {found.denominator:.5g}, which is not recognised"
    )
    hidden = max(found.unseen.items(), key=lambda pair: pair[1], default=None)
    text = ", ".join(parts) + f" (residual {reading.fit.residual:.1g}, limit {reading.fit.limit:.1g}"
    if hidden is not None:
        name, bound = hidden
        if bound > IDENTIFIABLE:
            text += f"; mix not identifiable: {100 * bound:.2g} % {WORDS[name]} would not show"
        else:
            text += f"; {100 * bound:.1g} % of another term would show"
    return text + _hits(slots) + ")"


def _facts(reading: Reading, law: Law, found: Found, wanted: str) -> dict[str, Value]:
    facts: dict[str, Value] = {"loss.recognised": True, "loss.residual": reading.fit.residual}
    facts |= {f"loss.share.{name}": round(share, 6) for name, share in found.terms.items()}
    hard = [name.split(":")[1] for name in reading.fit.shares if name.startswith("ce")]
    if hard:
        facts["loss.labels"] = ", ".join(hard)
    if _soft(reading):
        facts["loss.temperature"] = reading.heat
    facts["loss.weights"] = law.kind
    facts |= {f"loss.{name}": round(value, 6) for name, value in law.parameters.items()}
    facts["loss.slot0"] = round(found.slot0, 6)
    facts["loss.reduction"] = _reduction(law, found, wanted)
    facts["loss.denominator"] = round(found.denominator, 6)
    return facts


def _term_table(reading: Reading, found: Found) -> Table:
    rows: list[tuple[Value, ...]] = [
        (name, share, reading.fit.errors[name], None) for name, share in reading.fit.shares.items()
    ]
    rows += [(name, 0.0, None, bound) for name, bound in found.unseen.items()]
    return Table(
        name="loss.terms",
        title="Terms of the loss, from the gradient at the head's input",
        columns=(
            Column(key="term", title="term"),
            Column(key="share", title="share", kind="float"),
            Column(key="error", title="standard error", kind="float"),
            Column(key="unseen", title="would show above", kind="float"),
        ),
        rows=tuple(rows),
        caption=f"Residual {reading.fit.residual:.2g}, limit {reading.fit.limit:.2g}; teacher: {reading.teacher_from}.",
        detail=True,
    )


def _slot_table(at: AtHead, reading: Reading, law: Law, slots: Slots) -> Table:
    rows: list[tuple[Value, ...]] = []
    first = float(slots.weight[slots.slot == slots.slot.min()].mean()) or 1.0
    for place in range(at.shape[1]):
        weights = reading.fit.weights[(at.slot == place).numpy()] / first
        where = slots.slot == place
        expected = float(law.raw[where].mean() * law.scale / first) if where.any() else None
        if len(weights):
            numbers = (float(weights.mean()), float(weights.min()), float(weights.max()))
            rows.append((place, len(weights), *numbers, expected))
        else:
            rows.append((place, 0, 0.0, 0.0, 0.0, None))
    names = ("slot", "slots", "mean", "least", "largest", "law")
    titles = ("slot", "trained", "weight", "least", "largest", f"{law.kind} gives")
    kinds = ("int", "int", "float", "float", "float", "float")
    return Table(
        name="loss.slots",
        title="Weight of every slot, of slot 1's",
        columns=tuple(Column(key=k, title=t, kind=d) for k, t, d in zip(names, titles, kinds, strict=True)),  # type: ignore[arg-type]
        rows=tuple(rows),
        chart=Chart(kind="profile", x="slot", y="mean"),
        detail=True,
    )
