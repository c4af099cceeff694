"""Which token is slot k trained on?

The label is read from the gradient at the head's input: of all tokens of the draft's vocabulary it is the one whose
cross-entropy explains a slot's gradient (what soft terms and smoothing may add is projected out first). The row's
tokens are all different, and the teacher's argmax after every token is another one, so that a label gives its source
and its place away; a distribution is recognised by the state that it comes from. Trained slots are those that get a
gradient.

Test: exact. A label counts as read where what is left of the slot's gradient is below 1e-5, or eight times what
forming logits in the trainer's own dtypes changes (about .02 in bfloat16; the next best token leaves a third).
The row is the shared one: a document whose successor has no prompt (labels could cross), a prompt, a hole in the loss
mask, padding; anchors are at each document's first and last possible place and before the hole.

Bugs it finds: labels one token off (SpecForge#455, #885, speculators#760), labels of another document
(speculators#901), trained prompts and holes, data for the teacher's argmax (speculators#818), wrong vocabulary
maps. Cost: two steps, one gradient, one product of [slots, D] and [D, V]. Faults: the `label` rows of
`parity.probes.deviations`.

Shapes: S tokens of the row, A anchors, B slots of a block, n slots that get a gradient, V draft vocabulary.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING, blocks_at
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.designed_row import DesignedBatch
from parity.probes.instruments.loss.head_gradient import HeadGradients
from parity.probes.instruments.loss.labels import ENOUGH, LabelEstimate, take_label_step
from parity.probes.rows import SyntheticDocument
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Table, Value, declare_columns

ASTRAY = 0.2
"""Share of slots whose labels lie elsewhere than the others', from which on it is no repeated token."""


class LabelsProbe:
    """Reads labels from the gradient."""

    name = "labels"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation, with the table of slots."""
        step = take_label_step(subject)
        crafted, at, reading = step.crafted, step.at, step.reading
        if reading is None:
            words = f"0 of {at.shape[0] * at.shape[1]} slots have a gradient"
            fault = FoundDeviation("label-missing", words)
            return make_probe_answer(self.name, "no slot is trained", [fault], facts={"labels.slots": 0})
        slots = LabelledSlots.of(subject, crafted, at, reading)
        sentence, facts = _sentence(subject, slots), _facts(slots)
        if subject.recipe.block.documents == "prompt_masked":
            crossing, beyond = _would_cross(subject)
            sentence += f"; where a document begins without a prompt, {crossing} of {beyond} slots beyond"
            sentence += " their document are trained (as declared: prompts mask them)"
            facts["labels.would_cross"] = crossing
        return make_probe_answer(
            self.name,
            sentence,
            _faults(subject, slots),
            facts=facts,
            tables=[_table(slots)],
        )


def _would_cross(subject: ExaminedAdapter) -> tuple[int, int]:
    """(slots that get a gradient beyond their anchor's document, slots there) on a row without prompts."""
    size = subject.block
    batch = subject.row([SyntheticDocument(length=3 * size), SyntheticDocument(length=3 * size)], padding=1)
    possible = (subject.candidates(batch) & (batch.document == 0)).nonzero().squeeze(-1)
    anchors = possible[-min(3, len(possible)) :]
    at = HeadGradients.of(subject.step(batch, subject.states(batch, grad=True), anchors=anchors))
    beyond = anchors[:, None] + torch.arange(size) >= 3 * size
    return int((at.index >= 3 * size).sum()), int(beyond.sum())


# --- what the slots are trained on ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSlots:
    """The reading, and what the recipe declares, slot by slot."""

    at: HeadGradients
    reading: LabelEstimate
    crafted: DesignedBatch
    shift: int
    """How many tokens behind anchor + slot most labels lie."""
    expected: Tensor
    """bool [A, B] trained by the recipe."""
    trained: Tensor
    """bool [A, B] gets a gradient; slot 0 is left out."""
    behind: Tensor
    """bool [A, B] within the document, behind a hole in the loss mask, itself not one."""

    @classmethod
    def of(
        cls, subject: ExaminedAdapter, crafted: DesignedBatch, at: HeadGradients, reading: LabelEstimate
    ) -> "LabelledSlots":
        """Of a reading of the labels.

        Args:
            subject: the adapter that is examined.
            crafted: the row with the states and anchors of the step.
            at: the step's gradient at the head.
            reading: the labels read from it.
        """
        # Trained by the recipe: with and without the slots behind a hole, and only those that have an id.
        batch, block = crafted.batch, subject.recipe.block
        made = [
            blocks_at(
                crafted.anchors, batch.tokens, batch.loss_mask, batch.document, block.size, past_holes=past
            ).supervised
            for past in (True, False)
        ]
        expected = made[0] if block.past_holes else made[1]
        if subject.recipe.labels == "data" and crafted.data is not None:
            wanted = crafted.anchors[:, None] + torch.arange(block.size)
            expected = expected & (crafted.at(crafted.data, wanted) >= 0)
        trained = torch.zeros_like(expected)
        trained[at.block, at.slot] = True
        trained[:, 0] = False
        # The common offset is what most slots have.
        read = reading.place >= 0
        gaps = Counter((reading.place - at.index)[read].tolist())
        return cls(
            at=at,
            reading=reading,
            crafted=crafted,
            shift=gaps.most_common(1)[0][0] if gaps else 0,
            expected=expected,
            trained=trained,
            behind=made[0] & ~made[1],
        )

    @property
    def place(self) -> Tensor:
        """[n] token that the slot is trained on; where nothing was read, its own."""
        return torch.where(self.reading.place >= 0, self.reading.place, self.at.index + self.shift)

    @property
    def is_not_anchor(self) -> Tensor:
        """bool [n]: not slot 0."""
        return self.at.slot > 0

    def among(self, values: Tensor, outside: int | bool) -> Tensor:
        """[n] `values` [S] at `place`, `outside` where that lies beyond the row."""
        beyond = (self.place >= len(values)) | (self.place < 0)
        return torch.where(beyond, torch.tensor(outside).to(values), self.crafted.at(values, self.place))

    @property
    def document(self) -> Tensor:
        """[n] of the label."""
        return self.among(self.crafted.batch.document, PADDING)

    @property
    def own(self) -> Tensor:
        """[n] document of the anchor."""
        return self.crafted.batch.document[self.crafted.anchors[self.at.block]]

    @property
    def in_padding(self) -> Tensor:
        """bool [n]."""
        return (self.document == PADDING) & self.is_not_anchor

    @property
    def crossing(self) -> Tensor:
        """bool [n]: the label lies in another document than the anchor."""
        return (self.document != self.own) & ~self.in_padding & self.is_not_anchor

    @property
    def is_loss_masked(self) -> Tensor:
        """bool [n]: the label lies in the anchor's document where nothing is to be trained."""
        masked = ~self.among(self.crafted.batch.loss_mask.bool(), True)
        return masked & (self.document == self.own) & self.is_not_anchor

    @property
    def unread(self) -> Tensor:
        """bool [n]: no label found."""
        return (self.reading.place < 0) & (self.reading.label < 0) & self.is_not_anchor

    @property
    def unknown(self) -> Tensor:
        """bool [n]: a token was read that is no label of any place of the row."""
        return (self.reading.place < 0) & (self.reading.label >= 0) & self.is_not_anchor

    @property
    def astray(self) -> Tensor:
        """bool [n]: trained on the label of another place than most."""
        return (
            (self.reading.place >= 0)
            & (self.reading.place - self.at.index != self.shift)
            & self.is_not_anchor
        )

    @property
    def is_unmapped(self) -> Tensor:
        """bool [n]: the label is the target's id of the slot's token, which is no id of the draft's vocabulary."""
        raw = self.crafted.at(self.crafted.batch.tokens, self.at.index)
        mapped = None if self.crafted.data is None else self.crafted.at(self.crafted.data, self.at.index)
        same = (self.reading.label == raw % len(self.crafted.head)) & self.is_not_anchor
        return same if mapped is None else same & (mapped != raw)

    @property
    def missing(self) -> Tensor:
        """bool [A, B]: to be trained, gets no gradient, and lies not behind a hole."""
        return self.expected & ~self.trained & ~self.behind

    @property
    def share_behind(self) -> float | None:
        """Share of slots behind a hole that are trained, None where there are none."""
        return float(self.trained[self.behind].double().mean()) if self.behind.any() else None


def _faults(subject: ExaminedAdapter, slots: LabelledSlots) -> list[FoundDeviation]:
    """What is other than declared, the most telling first."""
    reading, recipe = slots.reading, subject.recipe
    total = int(slots.is_not_anchor.sum())
    unread, unmapped, astray = (int(each.sum()) for each in (slots.unread, slots.is_unmapped, slots.astray))

    def fault(name: str, count: int, words: str) -> FoundDeviation:
        return FoundDeviation(name, f"{count} of {total} slots{words}", {"slots": count})

    # After one of these no other fault has a meaning: no labels, raw ids, labels from anywhere.
    if unread > (1 - ENOUGH) * total:
        least = float(reading.left[slots.is_not_anchor].median()) if total else float("nan")
        words = f"{unread} of {total} slots, of whose gradients {least:.2g} is left over (median)"
        return [FoundDeviation("label-unrecognised", words, {"left over": least})]
    if recipe.draft_vocab is not None and unmapped > ASTRAY * total:
        return [
            fault("label-vocabulary", unmapped, " have the target's id of their token for a label, unmapped")
        ]
    if astray > ASTRAY * total:
        words = f" are trained on labels of other places, {_where(slots, slots.astray)}"
        return [fault("label-unknown", astray, words)]
    # Place, identity and source of the labels.
    faults = []
    if slots.shift:
        words = f"slot k is trained on token anchor + k {slots.shift:+d}, in {_most(slots)} of {total} slots"
        faults.append(FoundDeviation("label-offset", words, {"offset": slots.shift}))
    if unknown := int(slots.unknown.sum()):
        names = sorted({int(each) for each in reading.label[slots.unknown]})[:6]
        faults.append(fault("label-unknown", unknown, f", draft ids {names}"))
    wanted = {"data": "data", "teacher_argmax": "teacher"}.get(recipe.labels)
    if wanted is not None and reading.kind in ("data", "teacher") and reading.kind != wanted:
        words = f" are trained on {_WORDS[reading.kind]}, declared {_WORDS[wanted]}"
        faults.append(fault("label-source", _most(slots), words))
    # Slots that may not be trained; labels that are all one token off lie there for that reason alone.
    where = {
        "label-prompt": slots.is_loss_masked,
        "label-documents": slots.crossing,
        "label-padding": slots.in_padding,
    }
    for name, found in where.items():
        if found.any() and not slots.shift:
            faults.append(fault(name, int(found.sum()), f", {_where(slots, found)}"))
    # Slots that have to be trained.
    if slots.missing.any():
        block, slot = (int(each) for each in slots.missing.nonzero()[0])
        words = f"{int(slots.missing.sum())} of {int(slots.expected.sum())} slots, the first at anchor "
        words += f"{int(slots.crafted.anchors[block])} slot {slot}"
        faults.append(FoundDeviation("label-missing", words, {"slots": int(slots.missing.sum())}))
    return faults + _hole_faults(subject, slots)


_WORDS = {
    "data": "the data's token",
    "teacher": "the teacher's argmax",
    "distribution": "the teacher's distribution",
}


def _hole_faults(subject: ExaminedAdapter, slots: LabelledSlots) -> list[FoundDeviation]:
    """Slots behind a hole in the loss mask, where all of them are trained against the declaration, or none."""
    share, declared = slots.share_behind, subject.recipe.block.past_holes
    if share != float(not declared) or slots.missing.any():
        return []
    words = f"{share:.0%} of {int(slots.behind.sum())} slots behind a hole are trained, "
    words += f"declared past_holes: {str(declared).lower()}"
    return [FoundDeviation("label-holes", words, {"share": share})]


def _most(slots: LabelledSlots) -> int:
    """How many slots are read at the common shift."""
    same = (slots.reading.place - slots.at.index == slots.shift) & (slots.reading.place >= 0)
    return int((same & slots.is_not_anchor).sum())


def _where(slots: LabelledSlots, found: Tensor) -> str:
    """The first slot of `found` (bool [n]) in words."""
    first = int(found.nonzero()[0])
    anchor = int(slots.crafted.anchors[slots.at.block[first]])
    return f"the first at anchor {anchor} slot {int(slots.at.slot[first])}, trained on token {int(slots.place[first])}"


def _sentence(subject: ExaminedAdapter, slots: LabelledSlots) -> str:
    """What the slots are trained on, and what could not be seen."""
    total = int(slots.is_not_anchor.sum())
    kind = _WORDS.get(slots.reading.kind, "something that is not recognised")
    shift = f" {slots.shift:+d}" if slots.shift else ""
    text = f"slot k is trained on {kind} for token anchor + k{shift} in {_most(slots)} of {total} slots"
    crossing, padding, masked = (
        int(each.sum()) for each in (slots.crossing, slots.in_padding, slots.is_loss_masked)
    )
    text += (
        f"; {crossing} cross into another document, {padding} into padding, {masked} stand on masked tokens"
    )
    share = slots.share_behind
    if share is not None:
        text += f"; {share:.0%} of slots behind a hole are trained"
    if slots.crafted.ids is None:
        text += "; the draft vocabulary's tokens are not shown, so data labels cannot be told"
    if slots.crafted.why_not and subject.recipe.labels != "data":
        text += f"; {slots.crafted.why_not}"
    return text


def _facts(slots: LabelledSlots) -> dict[str, Value]:
    return {
        "labels.source": slots.reading.kind or None,
        "labels.offset": slots.shift,
        "labels.slots": int(slots.is_not_anchor.sum()),
        "labels.crossing": int(slots.crossing.sum()),
        "labels.padding": int(slots.in_padding.sum()),
        "labels.masked": int(slots.is_loss_masked.sum()),
        "labels.behind_holes": slots.share_behind,
        "labels.unread": int(slots.unread.sum()),
    }


def _table(slots: LabelledSlots) -> Table:
    at, reading, anchors = slots.at, slots.reading, slots.crafted.anchors
    rows = [
        (
            int(anchors[at.block[n]]),
            int(at.slot[n]),
            int(at.index[n]),
            int(reading.place[n]) if reading.place[n] >= 0 else None,
            int(reading.label[n]) if reading.label[n] >= 0 else None,
            float(reading.left[n]),
        )
        for n in range(len(at))
    ]
    return Table(
        name="labels.slots",
        title="What every slot is trained on, read from the gradient",
        columns=declare_columns(
            "anchor:int | slot:int | token:int its token | read:int trained on token | "
            "label:int (draft id) | left:float left over (relative)"
        ),
        rows=tuple(rows),
        caption=f"Source: {_WORDS.get(reading.kind, 'not recognised')}.",
        detail=True,
    )
