"""Are the teacher's logits the target's own?

1. The capture: the teacher's slice, as the trainer's own capture delivers it, through the declared norm and the
   target's head, against the target's logits for the same tokens: agreement of the argmax, and KL.
2. The step: fed the target's own states, its teacher logits at every slot (or the labels read from its gradient,
   where it exposes no logits) against the target's logits of the token before the slot.
3. Where they differ, each repair is tried: no norm, the norm twice, a weight w read as 1 + w and the other way
   round, one token off, another slice. And the head is read column by column from one-hot states: its columns,
   up to a factor, are the head's and only the factor is the norm's, so that a wrong head and a wrong norm are
   told apart; the same values in another order are a vocabulary map.

Test: exact up to rounding. KL has to be below 1e-6, or four times what the target's own states give when they are
rounded to the captured dtype and multiplied in the head's; where only labels are known, the argmax has to agree as
often as it does there.

Shapes: S tokens of the row, N captured slices, D width, A anchors, B slots, n slots, V the draft's vocabulary.

Bugs it finds: 1 + w norms loaded as plain ones (speculators#797, #1090, #1145), final norm missing or twice
(ModelOpt#1846, TorchSpec#169), last state a layer early (TorchSpec#87), untied heads (SpecForge#455), draft
vocabulary maps (vllm-ascend#9795).
Cost: one forward pass of the target, one of the capture, two steps. Faults: the `teacher` rows of
`parity.probes.deviations`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING
from parity.probes.adapters.base import AdapterStep, NotExposed, TargetReference
from parity.probes.answers import FoundDeviation, make_probe_answer, one
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.designed_row import DesignedBatch
from parity.probes.instruments.loss.head_gradient import (
    FINAL_STATES,
    HeadGradients,
    TeacherSlice,
    find_draft_ids,
    find_teacher_slice,
    widen_head,
)
from parity.probes.instruments.loss.labels import estimate_labels
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Table, Value, declare_columns

KL = 1e-6
"""Nats that float32 may differ by; float32 heads of 32,768 rows leave 1e-9."""
KL_ROUNDINGS = 4.0
"""Times the KL that rounding alone makes."""
AGREES = 0.999
"""Share of argmaxes."""
COLUMN = 1e-3
"""Sine between a column of the head that is read and the target's own, in float32."""
COLUMN_ULPS = 8
"""The same in units in the last place, for narrower dtypes."""
TOKEN_SHIFTS = (0, 1, -1)
"""Tokens by which the teacher's states may be off."""


@dataclass(frozen=True, kw_only=True)
class LogitDistance:
    """How far logits are from the target's own."""

    agreement: float
    """Share of equal argmaxes."""
    kl: float
    """Mean KL from the target's distribution, in nats; nan where only labels are known."""
    count: int

    @property
    def words(self) -> str:
        """`argmax 99.0 %, KL .02`."""
        kl = "" if self.kl != self.kl else f", KL {self.kl:.2g}"
        return f"argmax {self.agreement:.1%}{kl}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherSetup:
    """What everything is compared with."""

    reference: TargetReference
    slice: TeacherSlice
    rows: Tensor
    """[V] the target's ids of the draft's vocabulary."""
    limit: LogitDistance
    """What rounding alone does."""

    @cached_property
    def own(self) -> Tensor:
        """[S, V] on the draft's vocabulary: the target's logits, or where the recipe declares another state than the
        final one, that state through norm and head."""
        if self.slice.tap in FINAL_STATES:
            return self.reference.logits.double().cpu()[:, self.rows]
        states = self.reference.states[self.slice.tap][:, None].expand(-1, self.slice.number + 1, -1)
        return self.slice.logits(states, self.head)

    @cached_property
    def head(self) -> Tensor:
        """[V, D] the target's rows."""
        head = widen_head(self.reference.head)
        return head if torch.equal(self.rows, torch.arange(len(head))) else head[self.rows]

    def fits(self, distance: LogitDistance) -> bool:
        """Whether a distance is rounding. Where KL is that small, other argmaxes are ties."""
        if distance.kl == distance.kl:
            return distance.kl <= max(KL, KL_ROUNDINGS * self.limit.kl)
        return distance.agreement >= min(AGREES, self.limit.agreement)


class TeacherProbe:
    """Compares the teacher's logits with the target's."""

    name = "teacher"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation."""
        if not subject.recipe.needs_teacher:
            words = "the recipe trains on the data's tokens and uses no teacher"
            then = "nothing: there is no teacher to hold against the target"
            return one(self.name, "skipped", words, next_step=then)
        reference = subject.target_reference
        where, why_not = find_teacher_slice(subject, subject.batch)
        if where is None:
            raise NotExposed(f"capture (a teacher slice: {why_not})")
        shown, states = _step(subject, reference)
        setting = _setting(subject, reference, where, shown, states)
        if isinstance(setting, FoundDeviation):
            return make_probe_answer(self.name, "the head's rows are not the target's", [setting])
        # Twice against the target: what the capture delivers, and what the step makes of right states.
        faults: list[FoundDeviation] = []
        rows: list[tuple[Value, ...]] = []
        captured = _capture(subject, setting)
        if captured is not None:
            rows.append(("capture", captured[0].agreement, captured[0].kl))
            faults += captured[1]
        at_step, found = _trainer(subject, setting, shown, states)
        rows.append(("step", at_step.agreement, at_step.kl if at_step.kl == at_step.kl else None))
        faults += found
        # The sentence and its facts.
        sentence = f"the step's teacher logits are the target's own ({at_step.words}, {at_step.count} slots)"
        if found:
            sentence = f"the step's teacher logits are not the target's own ({at_step.words})"
        if captured is None:
            sentence += "; the capture is not shown"
        else:
            through = "norm and head" if where.norm else "the head"
            sentence += f"; the captured slice through {through}: {captured[0].words}"
        facts: dict[str, Value] = {"teacher.agreement": at_step.agreement, "teacher.kl": at_step.kl}
        if captured is not None:
            facts["teacher.capture_agreement"] = captured[0].agreement
            facts["teacher.capture_kl"] = captured[0].kl
        return make_probe_answer(self.name, sentence, faults, facts=facts, tables=[_table(rows, setting)])


def _step(subject: ExaminedAdapter, reference: TargetReference) -> tuple[AdapterStep, Tensor]:
    """One step on the target's own states [S, N, D], whatever the capture delivers."""
    missing = [tap for tap in subject.adapter.slices if tap not in reference.states]
    if missing:
        raise NotExposed(f"reference (states of {', '.join(missing)})")
    states = torch.stack([reference.states[tap] for tap in subject.adapter.slices], dim=1)
    states = states.to(subject.adapter.dtype).detach().clone().requires_grad_(True)
    return subject.step(subject.batch, states, anchors=subject.anchors(subject.batch)), states


def _setting(
    subject: ExaminedAdapter,
    reference: TargetReference,
    where: TeacherSlice,
    shown: AdapterStep,
    states: Tensor,
) -> TeacherSetup | FoundDeviation:
    """The target on the draft's vocabulary, and what rounding does to its own logits.

    Args:
        subject: the adapter that is examined.
        reference: the target's states, norm and head.
        where: the teacher's slice.
        shown: a step on the target's own states.
        states: those states, [S, N, D].

    Returns:
        The setup, or the fault that makes it impossible: a head with rows that are not the target's.
    """
    # Which of the target's rows the draft's vocabulary has.
    ids = find_draft_ids(subject, shown, subject.batch)
    if ids is None:
        words = f"{len(shown.head)} rows of the draft's head, of which not every one is a row of the target's"
        return FoundDeviation("teacher-head", words, {"rows": len(shown.head)})
    rows = torch.full((len(shown.head),), -1)
    rows[ids[ids >= 0]] = (ids >= 0).nonzero().squeeze(-1)
    # The target's own states through norm and head, exactly and in the head's dtype: what is off there is rounding.
    exactly = LogitDistance(agreement=1.0, kl=0.0, count=0)
    setting = TeacherSetup(reference=reference, slice=where, rows=rows, limit=exactly)
    real = subject.batch.document != PADDING
    dtype = shown.head.dtype
    before = states.detach()[:, where.number]
    with torch.no_grad():
        normed = before if where.norm is None else where.norm(before)
        rounded = (normed.to(dtype) @ reference.head.to(dtype)[rows].T).double()
    exact = where.logits(states, setting.head)
    both = [_distance(each[real], setting.own[real]) for each in (rounded, exact)]
    limit = LogitDistance(
        agreement=min(each.agreement for each in both),
        kl=max(each.kl for each in both),
        count=int(real.sum()),
    )
    return replace(setting, limit=limit)


def _distance(logits: Tensor, own: Tensor) -> LogitDistance:
    """Of logits [n, V] from the target's."""
    log_p, log_q = own.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = logits.argmax(-1) == own.argmax(-1)
    return LogitDistance(agreement=float(same.double().mean()), kl=float(kl.mean()), count=len(own))


def _capture(
    subject: ExaminedAdapter, setting: TeacherSetup
) -> tuple[LogitDistance, list[FoundDeviation]] | None:
    """The captured slice through the declared norm and the target's head; None where no capture is exposed."""
    try:
        states = subject.captured_states
    except NotExposed:
        return None
    real = subject.batch.document != PADDING
    own = setting.own
    distance = _distance(setting.slice.logits(states, setting.head)[real], own[real])
    if setting.fits(distance):
        return distance, []
    taps = subject.adapter.slices
    slices = {tap: states[:, number] for number, tap in enumerate(taps)}
    repair = _repair(setting, slices, lambda logits: _distance(logits[real], own[real]))
    return distance, [_fault(setting, "the captured slice", distance, repair)]


def _trainer(
    subject: ExaminedAdapter, setting: TeacherSetup, shown: AdapterStep, states: Tensor
) -> tuple[LogitDistance, list[FoundDeviation]]:
    """What the step makes of the target's own states [S, N, D]."""
    # Slots inside the row and the anchor's document, and the token before each.
    batch, anchors = subject.batch, shown.anchors.cpu()
    index = anchors[:, None] + torch.arange(subject.block)
    document = batch.document[index.clamp(max=len(batch.tokens) - 1)]
    use = (index < len(batch.tokens)) & (document == batch.document[anchors][:, None])
    use[:, 0] = False
    before = index[use] - 1
    # By its teacher logits, or by the labels that its gradient shows.
    if shown.teacher is not None:
        logits = shown.teacher.detach().double().cpu()[use]

        def from_variant(variant: Tensor) -> LogitDistance:
            return _distance(logits, variant[before])

    else:
        labels, at = _labels(subject, setting, shown, states)
        before = at.index - 1

        def from_variant(variant: Tensor) -> LogitDistance:
            same = variant[before.clamp(max=len(variant) - 1)].argmax(-1) == labels
            return LogitDistance(agreement=float(same.double().mean()), kl=float("nan"), count=len(labels))

    distance = from_variant(setting.own)
    if setting.fits(distance):
        return distance, []
    # A repair that explains the difference, else the head.
    slices = {tap: states.detach()[:, number] for number, tap in enumerate(subject.adapter.slices)}
    repair = _repair(setting, slices, from_variant)
    if repair is None and shown.teacher is not None:
        head = _head_fault(subject, setting, distance)
        if head is not None:
            return distance, [head]
    return distance, [_fault(setting, "the step", distance, repair)]


def _labels(
    subject: ExaminedAdapter, setting: TeacherSetup, shown: AdapterStep, states: Tensor
) -> tuple[Tensor, HeadGradients]:
    """Draft ids [n] read from the gradient, on the target's own states."""
    at = HeadGradients.of(shown)
    crafted = DesignedBatch(
        batch=subject.batch,
        states=states.detach(),
        anchors=shown.anchors.cpu(),
        slice=setting.slice,
        why_not="",
        ids=find_draft_ids(subject, shown, subject.batch),
        head=shown.head.detach().cpu(),
    )
    reading = estimate_labels(subject, crafted, at)
    known = (reading.label >= 0) & (at.slot > 0)
    if not known.any():
        raise NotExposed(
            "step.teacher (its logits at every slot; the labels cannot be read from the gradient either)"
        )
    return reading.label[known], at.part(known.nonzero().squeeze(-1))


# --- repairs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LogitExplanation:
    """What explains the logits."""

    kind: str
    """norm, shift or layer."""
    words: str
    distance: LogitDistance


def _repair(
    setting: TeacherSetup,
    slices: dict[str, Tensor],
    measure: Callable[[Tensor], LogitDistance],
) -> LogitExplanation | None:
    """The first variant of the teacher that fits.

    Args:
        setting: the target, and what counts as rounding.
        slices: states of each captured slice by its tap, [S, D]; the teacher's own is tried first.
        measure: distance of a variant's logits [S, V] from those that are examined, or from the target's.
    """
    norm = setting.reference.norm
    for tap in sorted(slices, key=lambda tap: tap != setting.slice.tap):
        for shift in TOKEN_SHIFTS:
            for words, made in _variants(slices[tap], norm):
                logits = made.double().cpu().roll(shift, 0) @ setting.head.T
                if not setting.fits(measure(logits)):
                    continue
                kind, told = "norm", words
                if tap != setting.slice.tap:
                    kind, told = "layer", f"{tap}, {words}"
                elif shift:
                    kind, told = "shift", f"{shift:+d} token, {words}"
                return LogitExplanation(kind=kind, words=told, distance=measure(logits))
    return None


def _variants(state: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Iterator[tuple[str, Tensor]]:
    """A state with the final norm applied in the ways in which it goes wrong."""
    yield "taken as it is", state
    if norm is None:
        return
    with torch.no_grad():
        weight = norm(torch.ones_like(state[:1]))
        once = norm(state)
        plain = once / weight.where(weight.abs() > 1e-6, torch.ones_like(weight))
        yield "normed once", once
        yield "normed twice", norm(once)
        yield "normed with w for 1 + w", plain * (weight - 1)
        yield "normed with 1 + w for w", plain * (weight + 1)
        yield "normed without its weight", plain
        before = state / weight.where(weight.abs() > 1e-6, torch.ones_like(weight))
        yield "normed once, with w for 1 + w", before * (weight - 1)
        yield "normed once, with 1 + w for w", before * (weight + 1)
        yield "normed once, without its weight", before


def _fault(
    setting: TeacherSetup, who: str, distance: LogitDistance, repair: LogitExplanation | None
) -> FoundDeviation:
    """A distance beyond rounding, by the repair that explains it. who: whose logits."""
    evidence: dict[str, Value] = {"agreement": distance.agreement, "KL": distance.kl, "slots": distance.count}
    declared = "before the final norm" if setting.slice.norm is not None else "after the final norm"
    if repair is None:
        words = f"{who}: {distance.words} against the target, and no repair explains it"
        return FoundDeviation("teacher-differs", words, evidence)
    words = f"{who}: {distance.words} against the target; {setting.slice.tap} is declared {declared}, and what fits is"
    words += f" {repair.words} ({repair.distance.words})"
    return FoundDeviation(f"teacher-{repair.kind}", words, evidence)


def _head_fault(
    subject: ExaminedAdapter, setting: TeacherSetup, distance: LogitDistance
) -> FoundDeviation | None:
    """Whether the teacher's head is another one: its columns are read from one-hot states.

    Args:
        subject: the adapter that is examined.
        setting: the target's own head.
        distance: of the step's teacher logits, quoted in the fault.
    """
    # A step on states that have one channel each: what the head gives is that column, times the norm's factor.
    width, batch = subject.adapter.width, subject.batch
    anchors, states = subject.anchors(batch), subject.states(batch)
    channel = torch.arange(len(batch.tokens)) % width
    states[:, setting.slice.number] = torch.nn.functional.one_hot(channel, width).to(states) * width**0.5
    shown = subject.step(batch, states, anchors=anchors)
    assert shown.teacher is not None
    # Columns that are read beside the target's own, as rows [m, V].
    index = anchors[:, None] + torch.arange(subject.block) - 1
    inside = (index >= 0) & (index < len(batch.tokens))
    inside[:, 0] = False
    found = shown.teacher.detach().double().cpu()[inside]
    own = setting.head[:, channel[index[inside]]].T
    limit = max(COLUMN, COLUMN_ULPS * torch.finfo(shown.head.dtype).eps)
    size = float(_sine(found, own).median())
    if size <= limit:
        return None
    # The same values in another order, whatever the factor's sign, are a vocabulary map.
    ordered, falling = own.sort(-1).values, -found.sort(-1, descending=True).values
    nearer = torch.minimum(_sine(found.sort(-1).values, ordered), _sine(falling, ordered))
    numbers: dict[str, Value] = {"columns": len(found), "sine": size}
    if float(nearer.median()) <= limit:
        words = f"{len(found)} columns of the head hold the target's values in another order"
        return FoundDeviation("teacher-vocabulary", f"{words}; {distance.words}", numbers)
    words = f"{len(found)} columns of the teacher's head are off the target's by {size:.2g} (sine, median)"
    return FoundDeviation("teacher-head", f"{words}; {distance.words}", numbers)


def _sine(a: Tensor, b: Tensor) -> Tensor:
    """[n] of the angle between rows."""
    size = a.norm(dim=-1) * b.norm(dim=-1)
    cosine = (a * b).sum(-1) / size.clamp(min=1e-30)
    made: Tensor = (1 - cosine.square()).clamp(min=0).sqrt()
    return made


def _table(rows: list[tuple[Value, ...]], setting: TeacherSetup) -> Table:
    """Agreement and KL of the capture and of the step."""
    return Table(
        name="teacher.agreement",
        title="The teacher's logits against the target's own",
        columns=declare_columns("what logits of | agreement:float argmax agrees | kl:float KL (nats)"),
        rows=tuple(rows),
        caption=f"Rounding alone: {setting.limit.words}.",
        detail=True,
    )
