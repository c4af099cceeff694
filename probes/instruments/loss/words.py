"""What was read of a loss, in words, facts and tables.

describe_loss(reading, law, found, slots, "weighted_mean")    # hard CE on the teacher's argmax, weights exp ...
"""

from collections.abc import Mapping

import numpy as np

from parity.probes.instruments.loss.head_gradient import SOFT, HeadGradients
from parity.probes.instruments.loss.slot_weights import WeightedSlots, WeightLaw
from parity.probes.instruments.loss.solve import MixtureEstimate, WeightLaws, has_soft_terms
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Chart, Table, Value, declare_columns

IDENTIFIABLE = 0.05
"""Share that another term could have unseen, from which on the mix is called not identifiable."""
RIGHT = 0.1
"""Share of slots on which drafts have to be right, and wrong, for a streak to show in the weights."""
WORDS = {
    "kl": "KL to the teacher",
    "rkl": "reverse KL",
    "js": "Jensen-Shannon divergence",
    "tv": "total variation",
    "nla": "-log(1 - TV)",
    "lk": "LK",
    "smoothing": "label smoothing",
}


def describe_source(source: str) -> str:
    """Of a hard label. source: `teacher` or `data`, with a shift where it has one."""
    return "the teacher's argmax" if source.startswith("teacher") else "the data's token"


def describe_mixture(terms: Mapping[str, float]) -> str:
    """`70 % KL to the teacher + 30 % CE`. terms: shares, 0 to 1, by the recipe's names."""
    parts = [f"{100 * share:.4g} % {WORDS.get(name, name.upper())}" for name, share in terms.items()]
    return " + ".join(parts)


def _terms_words(reading: MixtureEstimate) -> str:
    """`hard CE on the teacher's argmax`, or shares."""
    parts, shares = [], reading.fit.shares
    for name, share in shares.items():
        term, _, source = name.partition(":")
        words = WORDS.get(term, "")
        if term.startswith("ce"):
            shift = source[-2:] if source[-2] in "+-" else ""
            words = f"hard CE on {describe_source(source)}" + (f" of token {shift}" if shift else "")
        error = reading.fit.errors[name]
        number = f"{100 * share:.2f} % " if len(shares) > 1 else ""
        parts.append(number + words + (f" (standard error {100 * error:.1g} %)" if len(shares) > 1 else ""))
    text = " + ".join(parts)
    if any(name in SOFT or "@" in name for name in shares):
        text += f", temperature {reading.heat:.4g}"
    others = [" + ".join(fit.shares) for fit in reading.fit.alike]
    return text + (f" (or {' or '.join(others)})" if others else "")


def _square_words(found: WeightLaws) -> str:
    """Which terms have distillation's factor."""
    if not found.squared:
        return ""
    square = next(iter(found.squared.values()))
    return f" ({' and '.join(WORDS[name] for name in found.squared)} times T^2 = {square:.4g})"


def describe_law(law: WeightLaw, slots: WeightedSlots) -> str:
    """`weights exp with gamma 4.00 over slots 1-7`."""
    low, high = int(slots.slot.min()), int(slots.slot.max())
    over = f"over slots {low}-{high}" if high > low else f"on slot {low}"
    if high == low:
        return f"one slot a block ({over}), so no position weights"
    number = "".join(f" with {name} {value:.2f}" for name, value in law.parameters.items())
    # Every kind that a law may have.
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


def average_by_slot(slots: WeightedSlots) -> dict[int, float]:
    """Mean weight of every slot number, of slot 1's."""
    means = {int(k): float(slots.weight[slots.slot == k].mean()) for k in np.unique(slots.slot)}
    first = next(iter(means.values()))
    return {k: value / first for k, value in means.items()}


def _profile_words(slots: WeightedSlots) -> str:
    """Mean weights of the slot numbers, of slot 1's."""
    return ", ".join(f"{value:.3g}" for value in average_by_slot(slots).values())


def describe_declared_law(subject: ExaminedAdapter) -> str:
    """The recipe's law with its parameter."""
    weights = subject.recipe.loss.weights
    return {
        "exp": f"exp with gamma {weights.gamma}",
        "dpace": f"D-PACE with alpha {weights.alpha}",
        "uniform": "uniform",
    }[weights.kind]


def describe_reduction(name: str) -> str:
    """In words. name: of `WeightLaws.reductions`."""
    known = {
        "weighted_mean": "weighted mean",
        "mask_mean": "mean over trained slots",
        "batch_mean": "sum over the number of samples",
        "sum": "plain sum",
    }
    return known.get(name, f"sum over the number of {name}")


def _reduction(law: WeightLaw, found: WeightLaws, wanted: str) -> str:
    """The declared reduction where it fits, else the first that does."""
    if law.kind == "per-block":
        return law.note
    if wanted in found.reductions:
        return wanted
    return found.reductions[0] if found.reductions else "not recognised"


def _hits(slots: WeightedSlots) -> str:
    """What cannot be seen where drafts are hardly ever right, or always."""
    share = float(slots.right.mean())
    if RIGHT <= share <= 1 - RIGHT or len(set(slots.slot)) < 2:
        return ""
    return f"; drafts are right on {share:.0%} of slots, so weights that depend on it would not show"


def describe_loss(
    reading: MixtureEstimate, law: WeightLaw, found: WeightLaws, slots: WeightedSlots, wanted: str
) -> str:
    """Terms, weights and denominator in one sentence, with what would not show.

    Args:
        reading: the mixture of terms.
        law: how the slots' weights are made.
        found: denominator, slot 0, what could hide.
        slots: the weights of slots 1 and up.
        wanted: the declared reduction.
    """
    zero = "slot 0 unweighted" if not found.slot0 else f"slot 0 weighs {found.slot0:.3g} of slot 1"
    parts = [_terms_words(reading) + _square_words(found), describe_law(law, slots), zero]
    reduction = _reduction(law, found, wanted)
    parts.append(
        describe_reduction(reduction)
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


def list_loss_facts(
    reading: MixtureEstimate, law: WeightLaw, found: WeightLaws, wanted: str
) -> dict[str, Value]:
    """The same as facts of the conformance statement; their names are stable."""
    facts: dict[str, Value] = {"loss.recognised": True, "loss.residual": reading.fit.residual}
    facts |= {f"loss.share.{name}": round(share, 6) for name, share in found.terms.items()}
    hard = [name.split(":")[1] for name in reading.fit.shares if name.startswith("ce")]
    if hard:
        facts["loss.labels"] = ", ".join(hard)
    if has_soft_terms(reading):
        facts["loss.temperature"] = reading.heat
    if found.squared:
        facts["loss.times_temperature_squared"] = ", ".join(found.squared)
    facts["loss.weights"] = law.kind
    facts |= {f"loss.{name}": round(value, 6) for name, value in law.parameters.items()}
    facts["loss.slot0"] = round(found.slot0, 6)
    facts["loss.reduction"] = _reduction(law, found, wanted)
    facts["loss.denominator"] = round(found.denominator, 6)
    return facts


def make_term_table(reading: MixtureEstimate, found: WeightLaws) -> Table:
    """Shares of the terms, and from which share on another one would show."""
    rows: list[tuple[Value, ...]] = [
        (name, share, reading.fit.errors[name], None) for name, share in reading.fit.shares.items()
    ]
    rows += [(name, 0.0, None, bound) for name, bound in found.unseen.items()]
    return Table(
        name="loss.terms",
        title="Terms of the loss, from the gradient at the head's input",
        columns=declare_columns(
            "term | share:float | error:float standard error | unseen:float would show above"
        ),
        rows=tuple(rows),
        caption=f"Residual {reading.fit.residual:.2g}, limit {reading.fit.limit:.2g}; teacher: {reading.teacher_from}.",
        detail=True,
    )


def make_slot_table(
    at: HeadGradients, reading: MixtureEstimate, law: WeightLaw, slots: WeightedSlots
) -> Table:
    """Weights of every slot number beside those of the law, of slot 1's."""
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
    return Table(
        name="loss.slots",
        title="Weight of every slot, of slot 1's",
        columns=declare_columns(
            "slot:int | slots:int trained | mean:float weight | least:float | largest:float | "
            f"law:float {law.kind} gives"
        ),
        rows=tuple(rows),
        chart=Chart(kind="profile", x="slot", y="mean"),
        detail=True,
    )
