"""Are anchors where they should be?

The trainer draws anchors for one long packed row in several epochs. Exact: no anchor on padding or on a token that is
not trained on, none twice; the same seed and epoch give the same anchors; no document has more than the declared
budget. Statistical: a document gets as many as declared (a quarter fewer is starved), other epochs give other anchors,
and after the epochs as many of its tokens were ever anchored as drawing without preference gives (a third fewer is
uneven; the standard deviation is under a tenth). The row is drawn again with its documents in another order, and the
sentence reports whether a document's anchors depend on its row: they do where a global generator is used.

Bugs it finds: a budget of a packed row that starves documents (speculators#1071: 14.7 % of tokens anchored instead of
30.8 %), anchors in prompts or padding, anchors that are never drawn anew, anchors at the beginning only.

A budget of the row, not of each document, cannot be declared. It is recognised by a number that is the same in every
epoch, and for half of the documents, while a document gets now more and now fewer. Where that is the declared number,
documents are starved of what the recipe gives them, and the sentence reports it; a number of the row's own is a
warning, and what single documents get is not judged. Where the recipe declares `block.documents: prompt_masked`, a
budget of a row is reported and is no fault: speculators has one. Cost: eighteen draws, nineteen at most, no step.
Faults: the `coverage` rows of `parity.probes.deviations`.

Shapes: S tokens of the row, A anchors.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING, AnchorConfig, AnchorCoverage, is_candidate
from parity.model.training.data import Batch
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.rows import SyntheticDocument
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Chart, Table, Value, declare_columns

EPOCHS = 8
DRAW_SEED = 17
LONGEST_ROW = 4096
"""Tokens of the row at most."""
STARVED = 0.75
"""Of the declared number of anchors."""
UNEVEN = 0.67
"""Of the number of tokens that an even draw reaches."""
FEW = 4
"""Anchors or tokens below which a share means nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnchorDraws:
    """What was drawn for the row."""

    batch: Batch
    epochs: list[Tensor]
    """[A] of each epoch."""
    possible: Tensor
    """bool [S] by the declared rule."""
    counts: Tensor
    """[epochs, documents] anchors."""
    reached: Tensor
    """[documents] tokens ever anchored."""
    shares: dict[int, float]
    """Document -> share of its supervised tokens ever anchored."""

    def candidates(self, number: int) -> int:
        """Tokens of a document that can be an anchor."""
        return int((self.possible & (self.batch.document == number)).sum())


class CoverageProbe:
    """Draws, and draws again."""

    name = "coverage"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation, with the table of documents."""
        # Eight epochs, one of them again, and the same documents in the reverse order.
        texts = _texts(subject)
        draws = _draws(subject, subject.row(texts, padding=subject.block))
        again = _draw_anchors(subject, draws.batch, 0)
        moved = _depends_on_order(subject, texts, draws)
        expected = _expected_anchors(subject, draws)
        of_row = _row_budget(subject, texts, draws, expected)
        # Where anchors are, whether they repeat, how many there are.
        faults = [
            *_place_faults(draws),
            *_repeat_faults(draws, again),
            *_number_faults(subject, draws, expected, of_row),
        ]
        # Coverage is of supervised tokens, over all epochs.
        share = sum(draws.reached.tolist()) / max(1, int(_supervised_tokens(draws.batch).sum()))
        least = min(draws.shares.values(), default=0.0)
        sentence = (
            f"{share:.1%} of supervised tokens are anchored within {EPOCHS} epochs, "
            f"at least {least:.1%} of a document; "
            f"{len(draws.epochs[0])} anchors an epoch in {len(texts)} documents"
        )
        sentence += f"; the budget of {of_row} is the row's and shared by its documents" if of_row else ""
        sentence += (
            "; a document's anchors depend on the row it stands in"
            if moved
            else "; a document draws the same anchors in another row"
        )
        facts: dict[str, Value] = {
            "coverage.share": round(share, 6),
            "coverage.least": round(least, 6),
            "coverage.budget": "row" if of_row else "document",
            "coverage.depends_on_row": moved,
        }
        return make_probe_answer(self.name, sentence, faults, facts=facts, tables=[_table(draws, expected)])


def _texts(subject: ExaminedAdapter) -> list[SyntheticDocument]:
    """Documents of which several have more candidates than the budget, and some are shorter than a block."""
    size, block = subject.block, subject.recipe.block
    begins = size if block.documents == "prompt_masked" else 0
    long = min(LONGEST_ROW // 8, max(4 * size, 2 * block.anchors))
    shapes = (  # length, prompt
        (long + 2, 2),
        (3 * size + begins, begins),
        (long // 2 + size, size),
        (long + begins, begins),
        (max(4, size // 2) + begins, begins),
        (4 * size, size),
        (long // 2 + 3 + begins, 3 + begins),
        (4 * size, size),
    )
    texts = [SyntheticDocument(length=length, prompt=prompt) for length, prompt in shapes]
    texts[5] = replace(texts[5], holes=(2 * size,))
    return texts


def _draw_anchors(subject: ExaminedAdapter, batch: Batch, epoch: int) -> Tensor:
    """[A] on the CPU."""
    with subject.guard_adapter_call("draw"):
        return subject.adapter.draw(batch, seed=DRAW_SEED, epoch=epoch).cpu()


def _supervised_tokens(batch: Batch) -> Tensor:
    """bool [S]."""
    return batch.loss_mask.bool() & (batch.document != PADDING)


def _draws(subject: ExaminedAdapter, batch: Batch) -> AnchorDraws:
    """Anchors of every epoch, counted by document."""
    epochs = [_draw_anchors(subject, batch, epoch) for epoch in range(EPOCHS)]
    documents = len(batch.sample_ids)
    covered, counts = AnchorCoverage(), torch.zeros(EPOCHS, documents, dtype=torch.long)
    union = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for epoch, anchors in enumerate(epochs):
        inside = anchors[(anchors >= 0) & (anchors < len(batch.tokens))]
        owners = batch.document[inside]
        counts[epoch] = torch.bincount(owners[owners >= 0], minlength=documents)
        covered.update(batch.loss_mask, batch.document, range(documents), inside)
        union[inside] = True
    union &= _supervised_tokens(batch)
    reached = torch.bincount(batch.document[union], minlength=documents)
    config = AnchorConfig(partial=subject.recipe.block.partial)
    possible = is_candidate(batch.loss_mask, batch.document, subject.block, config)
    return AnchorDraws(
        batch=batch,
        epochs=epochs,
        possible=possible,
        counts=counts,
        reached=reached,
        shares=covered.shares(),
    )


def _expected_anchors(subject: ExaminedAdapter, draws: AnchorDraws) -> list[int]:
    """Anchors of every document in one epoch, by the recipe."""
    block = subject.recipe.block
    return [
        min(block.anchors, math.ceil(block.share * draws.candidates(number)))
        for number in range(draws.counts.shape[1])
    ]


def _row_budget(
    subject: ExaminedAdapter, texts: list[SyntheticDocument], draws: AnchorDraws, expected: list[int]
) -> int:
    """Anchors that a whole row gets where its documents have no budget of their own, else 0.

    Either the declared number in all; or any number that is the same in every epoch, and in a row of half as many
    documents, while a document gets now more and now fewer.

    Args:
        subject: the adapter that is examined.
        texts: the row's documents.
        draws: what was drawn for them.
        expected: anchors of each document in one epoch, by the recipe.
    """
    budget, totals = subject.recipe.block.anchors, {len(anchors) for anchors in draws.epochs}
    total = max(totals, default=0)
    if len(totals) != 1 or total >= int(draws.possible.sum()):
        return 0
    if total == budget and sum(expected) > budget:
        return total
    if not bool((draws.counts != draws.counts[0]).any()):
        return 0
    half = subject.row(texts[: len(texts) // 2], padding=subject.block)
    config = AnchorConfig(partial=subject.recipe.block.partial)
    possible = is_candidate(half.loss_mask, half.document, subject.block, config)
    same = len(_draw_anchors(subject, half, 0)) == total or int(possible.sum()) <= total
    return total if same else 0


def _depends_on_order(subject: ExaminedAdapter, texts: list[SyntheticDocument], draws: AnchorDraws) -> bool:
    """Whether any document draws other anchors where the row's documents come in the reverse order."""
    batch = subject.row(texts[::-1], padding=subject.block)
    batch = replace(batch, sample_ids=batch.sample_ids[::-1])
    first, second = (_relative(each, _draw_anchors(subject, each, 0)) for each in (draws.batch, batch))
    return first != second


def _relative(batch: Batch, anchors: Tensor) -> dict[int, list[int]]:
    """Sample id -> positions of its anchors."""
    made: dict[int, list[int]] = {sample: [] for sample in batch.sample_ids}
    for anchor in anchors.sort().values.tolist():
        if 0 <= anchor < len(batch.tokens) and batch.document[anchor] >= 0:
            made[batch.sample_ids[int(batch.document[anchor])]].append(int(batch.position[anchor]))
    return made


# --- what is wrong ----------------------------------------------------------------------------------------


def _place_faults(draws: AnchorDraws) -> list[FoundDeviation]:
    """Anchors where none may be."""
    batch = draws.batch
    every = torch.cat(draws.epochs)
    outside = (every < 0) | (every >= len(batch.tokens))
    inside = every[~outside]
    padding = int(outside.sum()) + int((batch.document[inside] == PADDING).sum())
    masked = int((~batch.loss_mask[inside].bool() & (batch.document[inside] != PADDING)).sum())
    faults = []
    for name, count, what in (
        ("anchors-padding", padding, "on padding or beyond the row"),
        ("anchors-masked", masked, "on tokens that the loss mask takes out"),
    ):
        if count:
            words = f"{count} of {len(every)} anchors are {what}"
            faults.append(FoundDeviation(name, words, {"anchors": count}))
    return faults


def _repeat_faults(draws: AnchorDraws, again: Tensor) -> list[FoundDeviation]:
    """Anchors twice in one draw, draws that do not repeat, draws that only repeat."""
    faults, first = [], draws.epochs[0]
    twice = sum(len(anchors) - len(anchors.unique()) for anchors in draws.epochs)
    if twice:
        words = f"{twice} anchors in {EPOCHS} epochs are drawn a second time"
        faults.append(FoundDeviation("anchors-repeated", words, {"anchors": twice}))
    if not torch.equal(again.sort().values, first.sort().values):
        common = len(set(again.tolist()) & set(first.tolist()))
        words = f"seed {DRAW_SEED} twice gives draws that share {common} of {len(first)} anchors"
        faults.append(FoundDeviation("anchors-unseeded", words, {"shared": common}))
    free = len(first) < int(draws.possible.sum())
    same = all(torch.equal(each.sort().values, first.sort().values) for each in draws.epochs)
    if free and same and len(first):
        words = f"{EPOCHS} epochs draw the same {len(first)} of {int(draws.possible.sum())} possible anchors"
        faults.append(FoundDeviation("anchors-frozen", words, {"epochs": EPOCHS}))
    return faults


def _number_faults(
    subject: ExaminedAdapter, draws: AnchorDraws, expected: list[int], of_row: int
) -> list[FoundDeviation]:
    """Too few, too many, or unevenly spread."""
    # Each document's mean over the epochs against its declared number. Small numbers are not judged.
    faults, means = [], draws.counts.double().mean(0)
    over = [
        n for n, want in enumerate(expected) if float(means[n]) > max(want, 1) * (2 - STARVED) and want >= FEW
    ]
    starved = [n for n, want in enumerate(expected) if want >= FEW and float(means[n]) < STARVED * want]
    # A budget of the row: declared with `prompt_masked`, a warning where it is a number of its own.
    declared_row = of_row and subject.recipe.block.documents == "prompt_masked"
    own_number = of_row and of_row != subject.recipe.block.anchors
    if own_number and not declared_row:
        faults.append(_row_fault(draws, of_row, subject.recipe.block.anchors))
        starved, over = [], []
    if starved and not declared_row:
        worst = min(starved, key=lambda n: float(means[n]) / expected[n])
        words = f"{len(starved)} of {len(expected)} documents; document {worst} gets {float(means[worst]):.1f} anchors"
        words += f" an epoch, declared {expected[worst]}"
        words += f" ({of_row} for the whole row, which its documents share)" if of_row else ""
        faults.append(FoundDeviation("anchors-starved", words, {"document": worst}))
    if over:
        words = (
            f"{len(over)} documents; document {over[0]} gets {float(means[over[0]]):.1f} anchors an epoch, "
        )
        words += f"declared {expected[over[0]]}"
        faults.append(FoundDeviation("anchors-budget", words, {"document": over[0]}))
    # Evenness: epochs that draw the same anchors reach few tokens for that reason alone.
    if any(fault.name == "anchors-frozen" for fault in _repeat_faults(draws, draws.epochs[0])):
        return faults
    uneven = []
    for number in range(len(expected)):
        candidates, drawn = draws.candidates(number), float(means[number])
        even = candidates * (1 - (1 - min(1.0, drawn / max(1, candidates))) ** EPOCHS)
        if even >= FEW and drawn < candidates and int(draws.reached[number]) < UNEVEN * even:
            uneven.append((number, int(draws.reached[number]), even))
    if uneven and not (of_row or starved):
        number, reached, even = uneven[0]
        words = f"{len(uneven)} documents; in document {number} {reached} tokens are ever anchored, "
        words += f"an even draw reaches {even:.0f}"
        faults.append(FoundDeviation("anchors-uneven", words, {"document": number}))
    return faults


def _row_fault(draws: AnchorDraws, of_row: int, budget: int) -> FoundDeviation:
    """A row's number that is no document's: reported, and not judged by what each document was to get."""
    candidates = [draws.candidates(number) for number in range(draws.counts.shape[1])]
    longest = max(range(len(candidates)), key=candidates.__getitem__)
    low, high = int(draws.counts[:, longest].min()), int(draws.counts[:, longest].max())
    words = (
        f"{of_row} for a row of {len(candidates)} documents in every epoch, of which document {longest} gets "
    )
    words += f"{low} to {high}; the recipe's {budget} are each document's, and it has no key for a row's"
    numbers: dict[str, Value] = {"anchors of the row": of_row, "declared of a document": budget}
    return FoundDeviation("anchors-row-budget", words, numbers, "warn")


def _table(draws: AnchorDraws, expected: list[int]) -> Table:
    """Candidates, anchors and coverage of every document."""
    rows = []
    for number, want in enumerate(expected):
        mean = float(draws.counts[:, number].double().mean())
        share = draws.shares.get(number)
        rows.append((number, draws.candidates(number), want, mean, share))
    return Table(
        name="coverage.documents",
        title=f"Anchors of every document over {EPOCHS} epochs",
        columns=declare_columns(
            "document:int | candidates:int | declared:int (an epoch) | "
            "anchors:float drawn (an epoch, mean) | "
            "share:float ever anchored (of supervised tokens)"
        ),
        rows=tuple(rows),
        chart=Chart(kind="bars", x="document", y="share"),
        detail=True,
    )
