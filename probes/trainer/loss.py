"""What is being minimised?

The gradient of the loss at the head's input is solved for what made it. Logits are formed here in float64; for every
slot a term of weight 1 leaves a known gradient (`parity.probes.instruments.loss.head_gradient`), and one mixture of
terms with one weight a slot has to give all of them. The weights are then explained: as a law of the slot, of D-PACE's
confidence or of what the draft got right; their sum gives the denominator away. The method, with an example in
numbers: `probes/instruments/loss/README.md`.

Test: exact. The residual is relative; its limit is 1e-6, or four times what forming the logits in the trainer's own
dtypes changes (about 2e-7 in float32, .003 in bfloat16), measured beside it. What is above is *not recognised*: no
term is named then. A parameter is another than declared when it is off by five standard errors and by .1 %.
The row is `parity.probes.instruments.loss.designed_row`: a flat teacher, labels half of which differ from the data.
The head need not be the target's: a parameter of its shape at which the loss has a gradient is reported, and where
the step's head explains nothing, every other one is tried, and the target's for the teacher
(`parity.probes.instruments.loss.other_heads`). A head that is neither a parameter nor the reference's stays hidden: one
gradient a slot does not determine its rows.

What stays hidden: a factor common to all terms cannot be told from a denominator, so the factors' declared
sum is assumed. The factor T^2 of distillation is seen in the shares where another term is beside it; where all terms
have it, in a denominator that is none of the known ones and becomes one with it.

Bugs it finds: 70 % KL + 30 % CE with streak-aware weights and gamma 10 for hard CE with gamma 4 (docs/case-study.md),
gamma for another block size, a loss reduced by other sums (SpecForge#455's and speculators#798's weights). Cost: two
steps, one gradient, about seven products of [96, V] and [V, D] in float64. Faults: the `loss` rows of
`parity.probes.deviations`.
"""

from dataclasses import replace

from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss import solve, words
from parity.probes.instruments.loss.designed_row import DesignedBatch, design_batch
from parity.probes.instruments.loss.head_gradient import HeadGradients
from parity.probes.instruments.loss.mixture import MixtureFit
from parity.probes.instruments.loss.other_heads import (
    HeadPair,
    TrainedHead,
    find_trained_head,
    list_head_pairs,
)
from parity.probes.instruments.loss.slot_weights import WeightedSlots, WeightLaw
from parity.probes.instruments.loss.solve import MixtureEstimate, WeightLaws
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Value


class LossProbe:
    """Solves the gradient at the head's input."""

    name = "loss"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation, with tables of terms and of slots."""
        # The gradient at the head that the step exposes.
        crafted, at = _at_head(subject)
        if not len(at):
            return make_probe_answer(
                self.name, "no slot gets a gradient", [_nothing(at)], facts={"loss.slots": 0}
            )
        at, reading = _read(subject, crafted, at)
        # Where that head explains nothing, or only the step's own teacher does, another head may make the logits.
        trains, other = find_trained_head(subject, at.shown), None
        if not reading.fit.is_explained or (crafted.slice and reading.teacher_from != solve.SLICE):
            for heads in list_head_pairs(subject, crafted.batch, at.shown):
                again, beside = _at_head(subject, heads)
                beside, tried = _read(subject, again, beside)
                if tried.fit.is_explained and (again.slice is None or tried.teacher_from == solve.SLICE):
                    crafted, at, reading, other = again, beside, tried, heads
                    break
        own = _head_faults(trains, other)
        if not reading.fit.is_explained:
            return _not_recognised(self.name, reading, len(at), own)
        # Weights, denominator, and the recipe beside them.
        reading, law, slots = solve.choose_mixture_with_law(subject, crafted, at, reading)
        found = solve.find_weight_law(subject, crafted, at, reading, law)
        faults = [*own, *_deviations(subject, reading, law, found, slots)]
        wanted = subject.recipe.loss.reduction
        text = words.describe_loss(reading, law, found, slots, wanted)
        made = words.list_loss_facts(reading, law, found, wanted)
        if trains or other:
            text += f"; {_head_words(trains, other)}"
            made["loss.head"] = "trains" if trains else "its own"
        return make_probe_answer(
            self.name,
            text,
            faults,
            facts=made,
            tables=[words.make_term_table(reading, found), words.make_slot_table(at, reading, law, slots)],
        )


def _at_head(subject: ExaminedAdapter, heads: HeadPair | None = None) -> tuple[DesignedBatch, HeadGradients]:
    """The row, and the step's gradient on it."""
    crafted = design_batch(subject, heads=heads)
    states = crafted.states.clone().requires_grad_(True)
    shown = subject.step(crafted.batch, states, anchors=crafted.anchors)
    return crafted, HeadGradients.of(shown if heads is None else replace(shown, head=heads.draft))


def _read(
    subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients
) -> tuple[HeadGradients, MixtureEstimate]:
    """With logits as they are, or rounded to the head's 16 bits where that explains more."""
    reading, rounded = solve.estimate_mixture(subject, crafted, at), at.round_to_head_dtype()
    if rounded is not None:
        other = solve.estimate_mixture(subject, crafted, rounded)
        if other.fit.residual < reading.fit.residual:
            return rounded, other
    return at, reading


def _nothing(at: HeadGradients) -> FoundDeviation:
    """No slot gets a gradient."""
    text = f"0 of {at.shape[0] * at.shape[1]} slots have a gradient at the head's input"
    return FoundDeviation("loss-none", text)


# --- against the recipe -----------------------------------------------------------------------------------


def _declared_terms(subject: ExaminedAdapter) -> dict[str, float]:
    """Shares, 0 to 1, by the recipe's names."""
    terms = subject.recipe.loss.terms
    return {name: value / sum(terms.values()) for name, value in terms.items()}


def _deviations(
    subject: ExaminedAdapter,
    reading: MixtureEstimate,
    law: WeightLaw,
    found: WeightLaws,
    slots: WeightedSlots,
) -> list[FoundDeviation]:
    """What is other than declared, the mixture first.

    Args:
        subject: the adapter that is examined.
        reading: the mixture of terms.
        law: how the slots' weights are made.
        found: denominator, slot 0, what could hide.
        slots: the weights.
    """
    return [
        *_term_faults(subject, reading, found),
        *_weight_faults(subject, law, slots),
        *_slot0_faults(found),
        *_reduction_faults(subject, law, found),
    ]


def _term_faults(
    subject: ExaminedAdapter, reading: MixtureEstimate, found: WeightLaws
) -> list[FoundDeviation]:
    """Temperature, shares and source of labels, where they are not the declared ones."""
    faults = []
    declared, recipe = _declared_terms(subject), subject.recipe
    hard = {name.split(":")[1].rstrip("+-1") for name in reading.fit.shares if name.startswith("ce")}
    wanted = "data" if recipe.labels == "data" else "teacher"
    ambiguous = any(_names(other) == set(declared) for other in reading.fit.alike)
    shares = {name: found.terms.get(name, 0.0) for name in {**declared, **found.terms}}
    errors = {solve.name_term(name): each for name, each in reading.fit.errors.items()}
    heat, declared_heat = reading.heat, recipe.loss.temperature
    # A temperature shows in soft terms, and in a cross-entropy that was heated too.
    visible = solve.has_soft_terms(reading) or any("@" in name for name in reading.fit.shares)
    if (
        visible
        and abs(heat - declared_heat) > solve.SAME * declared_heat + solve.CERTAIN * reading.heat_error
    ):
        text = f"{heat:.4g} (standard error {reading.heat_error:.1g}), declared {declared_heat:g}"
        faults.append(FoundDeviation("loss-temperature", text, {"temperature": heat}))
    faults += _square_faults(found)
    # Shares differ beyond their errors; T^2 moves them too, and has a name of its own.
    off = {
        name: value - declared.get(name, 0.0)
        for name, value in shares.items()
        if abs(value - declared.get(name, 0.0)) > solve.SAME + solve.CERTAIN * errors.get(name, 0.0)
    }
    if off and not ambiguous and not found.squared:
        name = "loss-smoothing" if set(off) - set(declared) == {"smoothing"} else "loss-terms"
        text = f"{words.describe_mixture(found.terms)}, declared {words.describe_mixture(declared)}"
        evidence = {f"share of {each}": shares[each] for each in off}
        faults.append(FoundDeviation(name, text, evidence))
    # The hard label's source, whatever its share.
    if "ce" in declared and hard and hard != {wanted}:
        sources = " and ".join(sorted(words.describe_source(each) for each in hard))
        text = f"cross-entropy on {sources}, declared {words.describe_source(wanted)}"
        numbers = {f"share on {name}": value for name, value in reading.fit.shares.items()}
        faults.append(FoundDeviation("loss-label-source", text, numbers))
    return faults


def _square_faults(found: WeightLaws) -> list[FoundDeviation]:
    """The factor of distillation on the soft terms."""
    if not found.squared:
        return []
    square = next(iter(found.squared.values()))
    parts = " and ".join(words.describe_mixture({name: 1.0}).removeprefix("100 % ") for name in found.squared)
    text = f"{parts} {'is' if len(found.squared) == 1 else 'are'} T^2 = {square:.4g} times what is declared"
    evidence = {"temperature squared": square, **{f"share of {k}": v for k, v in found.terms.items()}}
    return [FoundDeviation("loss-temperature-squared", text, evidence)]


def _names(fit: MixtureFit) -> set[str]:
    """Its terms by the recipe's names."""
    return {solve.name_term(name) for name in fit.shares}


def _weight_faults(subject: ExaminedAdapter, law: WeightLaw, slots: WeightedSlots) -> list[FoundDeviation]:
    """Of the law and its parameter."""
    weights, several = subject.recipe.loss.weights, len(set(slots.slot)) > 1
    if not several or law.kind == "per-block":
        return []
    name, value = ("gamma", weights.gamma) if weights.kind == "exp" else ("alpha", weights.alpha)
    numbers = {f"slot {k}": each for k, each in words.average_by_slot(slots).items()}
    by_kind = f"{words.describe_law(law, slots)}, declared {words.describe_declared_law(subject)}"
    if law.kind == "streak":
        return [FoundDeviation("loss-streak", by_kind, numbers)]
    if law.kind == "dpace-attached":
        return [FoundDeviation("loss-weights-attached", by_kind, numbers)]
    if law.kind != weights.kind:
        return [FoundDeviation("loss-weights", by_kind, numbers)]
    if value is None:
        return []
    measured, error = law.parameters[name], law.errors.get(name, 0.0)
    if abs(measured - value) <= solve.SAME * max(value, 0.1) + solve.CERTAIN * error:
        return []
    text = f"{name} {measured:.4g} (standard error {error:.1g}), declared {value:g}"
    return [FoundDeviation(f"loss-{name}", text, {name: measured, **numbers})]


def _slot0_faults(found: WeightLaws) -> list[FoundDeviation]:
    """Slot 0 holds the anchor itself and is not to be trained."""
    if not found.slot0:
        return []
    text = f"it weighs {found.slot0:.4g} of what slot 1 weighs"
    return [FoundDeviation("loss-slot0", text, {"weight of slot 0": found.slot0})]


def _reduction_faults(subject: ExaminedAdapter, law: WeightLaw, found: WeightLaws) -> list[FoundDeviation]:
    """A denominator that is not the declared one, or one for each block."""
    wanted = subject.recipe.loss.reduction
    if law.kind == "per-block":
        text = f"{law.note}, declared {words.describe_reduction(wanted)}"
        return [FoundDeviation("loss-reduction", f"{text} (misfit {law.misfit:.2g} of its tolerance)")]
    if not law.fits or wanted in found.reductions:
        return []
    what = " or ".join(map(words.describe_reduction, found.reductions)) or "not recognised"
    text = (
        f"the sum is divided by {found.denominator:.5g} ({what}), declared {words.describe_reduction(wanted)}"
    )
    return [FoundDeviation("loss-reduction", text, {"denominator": found.denominator})]


def _head_words(trains: TrainedHead | None, other: HeadPair | None) -> str:
    """Which head makes the logits, and which one trains."""
    parts = []
    if other is not None:
        text = (
            f"{other.rows} of its {len(other.draft)} rows are not the target's, by up to {other.change:.3g}"
        )
        parts.append(f"{other.name} makes the logits, and {text}")
    if trains is not None:
        parts.append(f"the loss's gradient at {trains.name} is up to {trains.gradient:.2g}")
    return ", ".join(parts)


def _head_faults(trains: TrainedHead | None, other: HeadPair | None) -> list[FoundDeviation]:
    """The draft's head is not the target's frozen one."""
    if trains is None and other is None:
        return []
    numbers: dict[str, Value] = {}
    if other is not None:
        numbers |= {"rows": other.rows, "change": other.change}
    if trains is not None:
        numbers["gradient"] = trains.gradient
    return [FoundDeviation("loss-head", _head_words(trains, other), numbers)]


def _not_recognised(
    name: str, reading: MixtureEstimate, slots: int, own: list[FoundDeviation]
) -> ProbeAnswer:
    """No term is named where the gradients are not explained."""
    fit = reading.fit
    near = " + ".join(f"{share:.3g} {term}" for term, share in fit.shares.items())
    text = (
        f"the best mixture leaves {fit.residual:.2g} of the gradient of {slots} slots (limit {fit.limit:.1g})"
    )
    evidence: dict[str, Value] = {"residual": fit.residual, "limit": fit.limit, "best mixture": near}
    fault = FoundDeviation("loss-unrecognised", text, evidence)
    numbers = {"loss.recognised": False, "loss.residual": fit.residual}
    return make_probe_answer(name, f"the loss is not recognised: {text}", [*own, fault], facts=numbers)
