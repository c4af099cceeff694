"""What can a block see?

First exactly, through every trainer: the gradient of a random projection of each block's hidden states at every
captured state is 0, or it is not. It must be non-zero strictly before the anchor in the anchor's own document (within
the window, where all layers slide) and zero everywhere else: at the anchor and behind it, in other documents, on
padding. Then tokens are exchanged: the token of another block's anchor, every token that is no anchor, the embedding
rows of all tokens but the mask token; no bit may move. Its own anchor's token and the mask token's row must move it.

Then by comparison, where the parameters have z-lab's names: a drafter that is written a second time
(`parity.probes.instruments.drafter.reference`) computes in float64 what the step should give under the recipe; where it
differs, other hypotheses are tried (windows, direction within the block, positions, rope, norm, embedding) and the one
that agrees is named. The limit is 10 times the rounding error of the same arithmetic in the trainer's own precision,
measured beside it (float32: about 1e-6 of a hidden state; bfloat16 products: about 1e-2). Attention weighs little in a
fresh narrow drafter, so its output projections are scaled to add about as much as the residual for the comparison.

What it cannot see: rope turns relative positions, so positions that do not restart in each document; the token ids'
order. Cost: one forward and a backward for each of at most 6 anchors, and for each slot of one, about 10 forwards,
and a row as long as the window where a layer slides (up to 4,096 tokens).

Finds: SpecForge#470 and #472 (blocks of the wrong place, padding), speculators#686 (a mask that masks nothing),
vllm#47745 (causal flag), speculators 0.9.0's windows counted from the anchor, SpecForge#604 (mask token).
Faults: the `context` rows of `parity.probes.deviations`.

Shapes: S tokens of the row, A anchors (one block each), B slots of a block, P slots that are probed one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.drafter.hypotheses import (
    HypothesisChange,
    HypothesisFit,
    VisibleStep,
    list_layer_changes,
    rescale_zero_projections,
)
from parity.probes.instruments.drafter.receptive_field import (
    ProbeBatch,
    exchange_anchor_tokens,
    find_filling_rows,
    override_rows,
)
from parity.probes.instruments.drafter.reference import DrafterHypothesis, compute_reach, override_parameters
from parity.probes.rows import SyntheticDocument
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Finding, Value

PROBED_ANCHORS = 6
"""Blocks that are examined: two a document of the shared row."""
LONGEST_WINDOW = 4096
"""Tokens of the longest row that is made to see a window's edge."""
WINDOWS = ("window-size", "window-from", "window-ignored", "window-undeclared")
WIDENING_STEPS = 64
"""How far from the declared one a window is looked for where only the whole stack's reach is seen."""


class ContextProbe:
    """Reachability, then the comparison."""

    name = "context"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault."""
        with override_parameters(subject.parameters, rescale_zero_projections(subject.parameters)):
            return self._run(subject)

    def _run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        configured = subject.adapter.configured
        reading = DrafterHypothesis.from_recipe(subject.recipe, configured)
        # The shared row, and where a layer slides a row long enough to show its window's edge.
        looks = [ProbeBatch(subject, subject.batch, subject.anchors(subject.batch, PROBED_ANCHORS))]
        notes: list[str] = []
        if subject.recipe.attention.window is not None:
            longer = window_row(subject, subject.recipe.attention.window)
            looks += [longer] if isinstance(longer, ProbeBatch) else []
            notes += [longer] if isinstance(longer, str) else []
        # What moves a block: captured states by gradient, tokens and embedding rows by exchange.
        seen = [BlockInfluence.of(look, reading) for look in looks]
        leaks, tokens = _once([fault for each in seen for fault in each.leaks()]), _tokens(looks[0])
        faults = _order_leaks(leaks, tokens)
        row, filled = _mask_row(
            looks[0], reading.mask_token_id, any(each.name == "block-tokens" for each in tokens)
        )
        faults += row
        # The comparison starts from what was measured, so that one fault is not reported a second time as another.
        lens = VisibleStep.of(
            looks, replace(reading, mask_token_id=filled, until=max(each.edge for each in seen))
        )
        match = lens if isinstance(lens, str) else lens.match(rope_known=configured is not None)
        if isinstance(match, str):
            notes.append(match)
        # Windows are seen both ways: the comparison's name is taken where it has one.
        named = [each.windows() for each in seen]
        faults += _merge_faults(faults, match, [fault for each in named for fault in each])
        sentence, facts = _describe_context(subject, seen, match, filled, notes)
        made = make_probe_answer(self.name, sentence, _once(faults), facts=facts)
        if not isinstance(match, str):
            return made
        unread = Finding(
            name=f"{self.name}.layers",
            outcome="skipped",
            sentence=f"not asked, layer by layer: direction within the block, windows, positions, rope; {match}",
            next_step="show the drafter's parameters by z-lab's names; `draft` lets `decode` compare the rest",
        )
        return replace(made, findings=(*made.findings, unread))


def window_row(subject: ExaminedAdapter, window: int) -> ProbeBatch | str:
    """One document in which two blocks lie further from its beginning than the window reaches, or why there is none.

    Args:
        subject: the adapter that is examined.
        window: of the sliding layers, in tokens.
    """
    length = window + 4 * subject.block
    if length > LONGEST_WINDOW:
        return f"its edge was not tested, since a window of {window} needs a row longer than {LONGEST_WINDOW} tokens"
    batch = subject.row([SyntheticDocument(length=length)], seed=1)
    possible = subject.candidates(batch).nonzero().squeeze(-1)
    fits = possible[possible > window + 1]
    if not len(fits):
        return f"its edge was not tested, since no anchor stands behind token {window + 1}"
    return ProbeBatch(subject, batch, torch.tensor(sorted({int(fits[0]), int(fits[-1])})))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockInfluence:
    """What moves the blocks of one row, and what should."""

    look: ProbeBatch
    reading: DrafterHypothesis
    strength: Tensor
    """[A, S] gradients."""
    wanted: Tensor
    """bool [A, B, S]"""
    chosen: int
    """Number of the block that is last in its document: it can see most."""
    slots: Tensor
    """bool [P, S] what moves each of its probed slots."""

    @classmethod
    def of(cls, look: ProbeBatch, reading: DrafterHypothesis) -> "BlockInfluence":
        """By one backward a block, and one a slot of the chosen block."""
        chosen = int(look.batch.position[look.anchors].argmax())
        return cls(
            look=look,
            reading=reading,
            strength=look.strengths(),
            wanted=compute_reach(reading, look.row),
            chosen=chosen,
            slots=look.slots(chosen),
        )

    @property
    def ahead(self) -> Tensor:
        """[A, S] position of every token of a block's own document, counted from its anchor; far ahead for others."""
        row = self.look.row
        ahead = row.position[None] - row.position[row.anchors][:, None]
        return torch.where(self.own, ahead, torch.full_like(ahead, 2**40))

    @property
    def own(self) -> Tensor:
        """bool [A, S] tokens of a block's own document."""
        row = self.look.row
        return row.document[None] == row.document[row.anchors][:, None]

    @property
    def edge(self) -> int:
        """How far past the anchor every block sees: 0 is right, 1 takes in its own state; 0 where blocks differ."""
        past = (self.strength > 0) & self.own & (self.ahead >= 0)
        ends = {int(each.sum()) for each in past}
        return ends.pop() if len(ends) == 1 else 0

    def leaks(self) -> list[FoundDeviation]:
        """States that move a block and must not."""
        # A mask without effect moves every block by every state: one fault, and no list of its consequences.
        document, ahead, extra = self.look.row.document[None], self.ahead, self.strength > 0
        real = int((document >= 0).sum())
        if bool(extra[(document >= 0).expand_as(extra)].all()) and len(document.unique()) > 1:
            words = f"each of {len(extra)} blocks is moved by all {real} states of the row"
            return [FoundDeviation("mask-ignored", words, {"states": real})]
        # Every undue state falls under exactly one of four names, by where it lies.
        kinds = {
            "context-padding": extra & (document < 0),
            "context-documents": extra & (document >= 0) & ~self.own,
            "context-future": extra & self.own & (ahead > 0),
            "context-anchor": extra & self.own & (ahead == 0),
        }
        strongest = float(self.strength.max())
        faults = []
        for name, where in kinds.items():
            if bool(where.any()):
                blocks = int(where.any(1).sum())
                share = float(self.strength[where].max()) / strongest
                block, token = where.nonzero()[0].tolist()
                words = (
                    f"{int(where.sum())} states in {blocks} of {len(where)} blocks, with up to {share:.2g} of the"
                    f" strongest gradient; the block at token {int(self.look.anchors[block])} is moved by token {token}"
                )
                evidence: dict[str, Value] = {"states": int(where.sum()), "strength": share}
                faults.append(FoundDeviation(name, words, evidence))
        return faults

    def windows(self) -> list[FoundDeviation]:
        """States before the anchor that a slot of the chosen block sees or misses against the recipe."""
        before = self.own[self.chosen] & (self.ahead[self.chosen] < 0)
        found, wanted = self.slots & before, self.wanted[self.chosen, self.look.probed_slots] & before
        # A state that is seen may have a gradient that underflows: what is missing has to be missing twice.
        missing = wanted & ~found
        if bool(missing.any()):
            again = ProbeBatch(self.look.subject, self.look.batch, self.look.anchors, states=6)
            found = found | (again.slots(self.chosen) & before)
        if torch.equal(found, wanted):
            return self._missing_elsewhere()
        more, less = int((found & ~wanted).sum()), int((wanted & ~found).sum())
        at = int(self.look.anchors[self.chosen])
        words = f"slots of the block at token {at} see {more} states more and {less} fewer"
        evidence: dict[str, Value] = {"more": more, "fewer": less}
        # Another window is named only where it gives exactly what every block shows.
        inside = self.own & (self.ahead < 0)
        for difference, reading in _other_windows(self.reading):
            other = compute_reach(reading, self.look.row)
            same = torch.equal(other[self.chosen, self.look.probed_slots] & before, found)
            if same and torch.equal(other.any(1) & inside, (self.strength > 0) & inside):
                return [FoundDeviation(difference.name, f"{difference.words}; {words}", evidence)]
        name = "context-missing" if less else "window-ignored"
        return [FoundDeviation(name, words, evidence)]

    def _missing_elsewhere(self) -> list[FoundDeviation]:
        """States that another block should see, all slots together, and does not."""
        missing = self.wanted.any(1) & (self.strength == 0)
        if bool(missing.any()):
            missing &= (
                ProbeBatch(self.look.subject, self.look.batch, self.look.anchors, states=6).strengths() == 0
            )
        if not bool(missing.any()):
            return []
        block, token = missing.nonzero()[0].tolist()
        at = int(self.look.anchors[block])
        words = f"{int(missing.sum())} states, the first at token {token} for the block at token {at}"
        return [FoundDeviation("context-missing", words, {"states": int(missing.sum())})]


def _other_windows(reading: DrafterHypothesis) -> list[tuple[HypothesisChange, DrafterHypothesis]]:
    """The declared layers with another window in all sliding ones, none, or one in all full ones."""
    others = []
    windows = {view.window for view in reading.layers if view.window is not None}
    for origin in ("query", "anchor"):
        others.append([replace(view, window_from=origin) for view in reading.layers])
    for window in windows:
        for step in (step for size in range(1, WIDENING_STEPS) for step in (size, -size)):
            if window + step > 0:
                others.append(
                    [replace(v, window=window + step if v.window else None) for v in reading.layers]
                )
        others.append([replace(view, window=None) for view in reading.layers])
    if not windows:
        others += [[replace(v, window=window) for v in reading.layers] for window in range(1, WIDENING_STEPS)]
    made = (replace(reading, layers=tuple(layers)) for layers in others)
    return [(found[0], each) for each in made if (found := list_layer_changes(reading, each))]


# --- tokens -------------------------------------------------------------------------------------------


def _tokens(look: ProbeBatch) -> list[FoundDeviation]:
    """Which tokens' embeddings move a block: its own anchor's, and no other."""
    vocabulary, mask = look.subject.adapter.vocabulary, look.subject.recipe.block.mask_token_id
    made, faults = exchange_anchor_tokens(look, vocabulary, mask), list[FoundDeviation]()
    if bool(made.still[:, 0].any()):  # then what fills slot 0 is some other token
        still = int(made.still[:, 0].sum())
        words = f"slot 0 of {still} of {len(made.still)} blocks does not move when its anchor's token is exchanged"
        faults.append(FoundDeviation("block-anchor", words, {"blocks": still}))
    if made.other is not None:
        size, block, anchor = made.other
        words = (
            f"the block at token {block} moves by {size:.3g} when the token at anchor {anchor} is exchanged"
        )
        faults.append(FoundDeviation("block-other", words, {"change": size}))
    most = float(made.text.max())
    if most > 0:
        slots = [slot for slot in range(look.subject.block) if float(made.text[:, slot].max()) > 0]
        words = f"slots {slots} move by up to {most:.3g} when all tokens but the anchors' are exchanged"
        faults.append(FoundDeviation("block-tokens", words, {"change": most}))
    return faults


def _mask_row(look: ProbeBatch, declared: int, text: bool) -> tuple[list[FoundDeviation], int]:
    """Which row of the embedding fills the slots, found by changing rows.

    Args:
        look: the blocks.
        declared: the recipe's mask token.
        text: whether other tokens of the row enter the blocks, whose rows then move them too.

    Returns:
        The faults, and the row's number: the declared one where no row can be changed or none moves a slot.
    """
    table = look.subject.parameters.get("embed_tokens.weight")
    if table is None or declared >= len(table):
        return [], declared
    # The declared row alone, then all rows that may not move a slot, then by halving which of them do.
    with override_rows(table, torch.tensor([declared])):
        own = float(look.changed_blocks()[:, 1:].max())
    ids = torch.arange(len(table))
    known = torch.cat(
        (look.batch.tokens if text else look.batch.tokens[look.anchors], torch.tensor([declared]))
    )
    rest = ids[~torch.isin(ids, known)]
    if own > 0:
        with override_rows(table, rest):
            more = float(look.changed_blocks().max())
        if more == 0:
            return [], declared
    rows = find_filling_rows(lambda: bool((look.changed_blocks()[:, 1:] > 0).any()), table, rest).tolist()
    if not rows:  # rows that are not the step's own, or slots that no row fills
        return [], declared
    words = f"rows {rows[:4]} of the embedding move the slots, token {declared} {'too' if own > 0 else 'does not'}"
    return [FoundDeviation("mask-token", words, {"token": int(rows[0])})], int(rows[0])


# --- words --------------------------------------------------------------------------------------------


def _merge_faults(
    faults: Sequence[FoundDeviation], match: HypothesisFit | str, windows: Sequence[FoundDeviation]
) -> list[FoundDeviation]:
    """Faults of the comparison, and of the reach where the comparison does not name the same better."""
    if isinstance(match, str) or match.agrees:
        return list(windows)
    evidence: dict[str, Value] = {"distance": match.declared, "limit": match.limit}
    numbers = f"hidden states are {match.declared:.3g} from the declared ones (limit {match.limit:.2g})"
    if match.reading is not None:
        named = [
            FoundDeviation(each.name, f"{each.words}; {numbers}", evidence) for each in match.differences
        ]
        return named + [fault for fault in windows if fault.name not in WINDOWS]
    if faults or windows:  # what moves the block already says why it is another function
        return list(windows)
    words = f"{numbers}; the nearest reading, {match.nearest[0]}, is {match.nearest[1]:.3g} away"
    return [FoundDeviation("drafter-not-recognised", words, evidence)]


def _order_leaks(leaks: Sequence[FoundDeviation], tokens: Sequence[FoundDeviation]) -> list[FoundDeviation]:
    """Without what follows from another fault.

    A block that sees another block sees what that one may see: then this comes first, and of the rest only padding,
    which no other block explains. Where states behind the anchor are seen, the anchor's own is not named beside them.
    """
    if leaks and leaks[0].name == "mask-ignored":
        return list(leaks)
    names = {fault.name for fault in leaks}
    if any(fault.name == "block-other" for fault in tokens):
        return [*tokens, *(fault for fault in leaks if fault.name == "context-padding")]
    kept = [fault for fault in leaks if not (fault.name == "context-anchor" and "context-future" in names)]
    return [*kept, *tokens]


def _once(faults: Sequence[FoundDeviation]) -> list[FoundDeviation]:
    """Each name once, the first."""
    return list({fault.name: fault for fault in reversed(faults)}.values())[::-1]


def _describe_context(
    subject: ExaminedAdapter,
    seen: Sequence[BlockInfluence],
    match: HypothesisFit | str,
    filled: int,
    notes: Sequence[str],
) -> tuple[str, dict[str, Value]]:
    """The sentence and its facts."""
    # How many states move blocks, of all rows together.
    right = sum(int((each.wanted.any(1) & (each.strength > 0)).sum()) for each in seen)
    wanted = sum(int(each.wanted.any(1).sum()) for each in seen)
    wrong = sum(int((~each.wanted.any(1) & (each.strength > 0)).sum()) for each in seen)
    facts: dict[str, Value] = {
        "context.reached": right,
        "context.expected": wanted,
        "context.undue": wrong,
        "context.mask_token_id": filled,
    }
    words = (
        f"blocks are moved by {right} of {wanted} states strictly before their anchor in its document"
        f"{' and window' if subject.recipe.attention.window else ''}, and by {wrong} others"
    )
    # What the comparison with the reference drafter adds, and what it leaves open.
    if isinstance(match, HypothesisFit):
        read = match.reading
        facts |= {"context.distance": match.declared, "context.precision": match.precision}
        if read is not None:
            for layer, view in enumerate(read.layers):
                facts[f"context.layer.{layer}"] = str(view)
            facts |= {
                "context.rope.base": read.rope.rope_theta,
                "context.rope.part": read.rope.partial_rotary_factor,
            }
            kinds = ", ".join(dict.fromkeys(str(view) for view in read.layers))
            words += f"; {len(read.layers)} layers: {kinds}; rope base {read.rope.rope_theta:g}"
        words += (
            f"; hidden states are {match.declared:.2g} from the declared drafter's "
            f"(limit {match.limit:.2g}, products in {match.precision})"
        )
        words += f"; not told apart: {', '.join(match.blind)}" if match.blind else ""
    if not isinstance(match, str):
        notes = [*notes, "rope is relative: whether positions restart in each document cannot be seen"]
    return f"{words}; {'; '.join(notes)}", facts
