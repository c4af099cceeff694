"""What a reader of a drafter drafts against what training computed, and how the two differ.

    drafted = DraftLogits(look=look, trained=trained, drafted=found)    # logits of both, [A, B - 1, V]
    explain_gap([drafted], lens, values, limit)                         # kind "rope", words "rope base 1e+06 ..."

A reader is the trainer's own inference, or whoever reads its exported checkpoint. Where its logits differ from the
step's, they are compared with the drafter that is written a second time, under other hypotheses, heads and embeddings.

Shapes: A anchors, B slots, D width, V the draft's vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from parity.comparison.error import logit_errors
from parity.probes.adapters.base import NotExposed
from parity.probes.instruments.drafter.hypotheses import VisibleStep, list_global_changes
from parity.probes.instruments.drafter.receptive_field import ProbeBatch
from parity.probes.instruments.drafter.reference import DrafterHypothesis
from parity.probes.subject import ExaminedAdapter

LEAST_GAP = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Smallest limits: the head's product, which the reference does not round, adds its own error."""
GAP_KINDS = {
    "block-positions": "positions",
    "rope-base": "rope",
    "rope-part": "rope",
    "context-edge": "context",
    "context-norm": "norm",
    "norm-epsilon": "norm",
    "within-block": "within",
    "window-size": "window",
    "window-from": "window",
    "window-ignored": "window",
    "window-undeclared": "window",
}
"""How a hypothesis' change is called when it is a reader and training that differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedGap:
    """Why a reader and training differ."""

    kind: str
    """positions, rope, context, norm, within, window, slices, embedding, head, mask-token; empty: not recognised."""
    words: str
    training: bool = False
    """Whether the reader computes the declared drafter, and training does not."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftLogits:
    """Logits of one row's blocks by both ways."""

    look: ProbeBatch
    trained: Tensor
    """[A, B - 1, V]"""
    drafted: Tensor
    """[A, B - 1, V]"""

    @property
    def draft_distance(self) -> Tensor:
        """[A] the largest distance of a slot."""
        return logit_errors(self.drafted, self.trained)


def find_common_factor(compared: Sequence[DraftLogits], limit: float) -> float | None:
    """One number that all drafted logits are multiplied by; None where it leaves more than the limit."""
    found = torch.cat([each.drafted.double().flatten() for each in compared])
    wanted = torch.cat([each.trained.flatten() for each in compared])
    factor = float(found @ wanted / (wanted @ wanted))
    fits = all(float(logit_errors(each.drafted, each.trained * factor).max()) <= limit for each in compared)
    return factor if fits else None


def find_last_agreement(compared: Sequence[DraftLogits], limit: float) -> tuple[int, int] | None:
    """(last position where both agree, first where they do not); None where agreement does not end at one position."""
    position = torch.cat([each.look.batch.position[each.look.anchors] for each in compared])
    right = torch.cat([each.draft_distance for each in compared]) <= limit
    if (
        not bool(right.any())
        or bool(right.all())
        or int(position[right].max()) >= int(position[~right].min())
    ):
        return None
    return int(position[right].max()), int(position[~right].min())


def explain_gap(
    compared: Sequence[DraftLogits],
    lens: VisibleStep,
    values: Mapping[str, Tensor],
    limit: float,
    filled: Callable[[], int | None] | None = None,
) -> ExplainedGap | None:
    """The first hypothesis under which the reference gives the drafted logits; None where none does.

    Args:
        compared: logits of both ways, row by row.
        lens: the step and its reference.
        values: put in place of some of the drafter's parameters, in the trainer as well.
        limit: distance that rounding may make.
        filled: finds the embedding row that fills the slots, or None.
    """
    match = lens.match(rope_known=compared[0].look.subject.adapter.configured is not None)
    base = match.reading or lens.declared
    subject = compared[0].look.subject
    cap = max(limit, 1e-4)  # the reference's angles, in another order of operations, at position 500

    def fits(reading: DrafterHypothesis, table: Tensor, head: Tensor | None = None) -> bool:
        for each in compared:
            rows = each.look.step_output.head.detach() if head is None else head
            made = lens.compute_hidden(each.look, reading, values, table)[:, 1:] @ rows.to(torch.float32).T
            if not float(logit_errors(each.drafted, made).max()) <= cap:
                return False
        return True

    # The reader computes the declared drafter: then it is training that does not.
    if fits(lens.declared, lens.table):
        kinds = [GAP_KINDS[each.name] for each in match.differences]
        words = "; ".join(each.words for each in match.differences) or "something that is not recognised"
        return ExplainedGap(kind=kinds[0] if len(set(kinds)) == 1 else "", words=words, training=True)
    # From what training computes on: another hypothesis, another head, another embedding, another mask token.
    for kind, words, reading in _readings(base, subject):
        if fits(reading, lens.table):
            return ExplainedGap(kind=kind, words=words)
    head = compared[0].look.step_output.head.detach()
    for words, rows in _heads(subject, head):
        if fits(base, lens.table, rows):
            return ExplainedGap(kind="head", words=words)
    for words, table in _tables(lens.table, head):
        if fits(base, table):
            return ExplainedGap(kind="embedding", words=words)
    row = None if filled is None else filled()
    if row is not None and fits(replace(base, mask_token_id=row), lens.table):
        words = f"row {row} of the embedding fills the slots instead of {base.mask_token_id}"
        return ExplainedGap(kind="mask-token", words=words)
    return None


def _readings(
    base: DrafterHypothesis, subject: ExaminedAdapter
) -> Iterator[tuple[str, str, DrafterHypothesis]]:
    """(kind, words, hypothesis): what inference may do otherwise than training, likely ones first."""
    for difference, reading in list_global_changes(base):
        yield GAP_KINDS[difference.name], difference.words, reading
    lower = replace(base, shift=-1, until=-1)
    yield "positions", "the block stands one position too low, and its context ends one early", lower
    yield from _direction_readings(base)
    yield from _window_readings(base)
    # States that are missing at either end of the context, and fc's slices in another order.
    for count in range(2, subject.block + 1):
        yield "context", f"the last {count} states are missing", replace(base, until=-count)
        yield "context", f"the first {count} states are missing", replace(base, drop_first=count)
    slices = len(subject.recipe.conditioning.layers)
    for rolled in range(1, slices):
        yield "slices", f"fc's slices are rolled by {rolled}", replace(base, rolled=rolled)
    if slices > 1:
        yield "slices", "fc's slices are in reverse", replace(base, reversed_slices=True)
    # Models that scale their embeddings by sqrt(D).
    width = subject.adapter.width**0.5
    for scale, words in ((width, "times sqrt(D)"), (1 / width, "over sqrt(D)")):
        yield "embedding", f"the block's embeddings {words}", replace(base, scale=scale)


def _direction_readings(base: DrafterHypothesis) -> Iterator[tuple[str, str, DrafterHypothesis]]:
    """All layers causal or bidirectional, then each layer alone the other way."""
    for causal in (True, False):
        if {view.causal for view in base.layers} != {causal}:
            layers = tuple(replace(view, causal=causal) for view in base.layers)
            words = f"all layers are {'causal' if causal else 'bidirectional'} within the block"
            yield "within", words, replace(base, layers=layers)
    for layer, view in enumerate(base.layers):
        words = f"layer {layer} is {'bidirectional' if view.causal else 'causal'} within the block"
        yield "within", words, base.with_layer(layer, replace(view, causal=not view.causal))


def _window_readings(base: DrafterHypothesis) -> Iterator[tuple[str, str, DrafterHypothesis]]:
    """Where layers have windows: none, or one more or fewer from the query or the anchor."""
    if not any(view.window for view in base.layers):
        return
    without = tuple(replace(view, window=None) for view in base.layers)
    yield "window", "no layer has a window", replace(base, layers=without)
    for origin, step in product(("query", "anchor"), (0, 1, -1)):
        layers = tuple(
            replace(v, window_from=origin, window=v.window + step if v.window else None)  # type: ignore[arg-type]
            for v in base.layers
        )
        if layers != base.layers and all(v.window is None or v.window > 0 for v in layers):
            size = next(view.window for view in layers if view.window)
            yield "window", f"a window of {size} from the {origin}", replace(base, layers=layers)


def _heads(subject: ExaminedAdapter, head: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Other rows for the head [V, D], in words."""
    table = subject.parameters.get("embed_tokens.weight")
    if table is not None and table.shape == head.shape:
        yield "the embedding's rows serve as head", table.detach()
    for step in (1, -1):
        yield f"the head's rows are {step} off", head.roll(step, 0)
    try:
        own = subject.reference(subject.batch).head
    except NotExposed:
        return
    if own.shape == head.shape and not torch.equal(own, head):
        yield "the target's own head is used, which is not the step's", own
    elif len(own) > len(head):
        yield "the first rows of the target's head stand for the draft's vocabulary", own[: len(head)]


def _tables(table: Tensor, head: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Other embeddings [V, D], in words."""
    if table.shape == head.shape:
        yield "the head's rows serve as embedding", head
    for step in (1, -1):
        yield f"the embedding's rows are {step} off", table.roll(step, 0)


def find_precision(look: ProbeBatch, lens: VisibleStep | str) -> torch.dtype:
    """The coarsest of the step's products and its head."""
    held = look.step_output.head.dtype
    coarse = torch.bfloat16 if held in (torch.bfloat16, torch.float16) else held
    products = coarse if isinstance(lens, str) else lens.precision
    return max((coarse, products), key=list(LEAST_GAP).index)


def estimate_logit_limit(look: ProbeBatch, lens: VisibleStep | str) -> float:
    """Distance up to which rounding may be the reason."""
    least = LEAST_GAP[find_precision(look, lens)]
    return least if isinstance(lens, str) else max(least, lens.limit())


ALL = 10**6
"""Blocks of a row that are computed twice where every one is to be compared."""


def compute_draft_logits(look: ProbeBatch, hidden: Tensor) -> Tensor:
    """Logits of hidden states by the step's head.

    Args:
        look: the row with its step.
        hidden: [A, B, D] what enters the head.

    Returns:
        [A, B - 1, V] in float64, without the anchor's slot.
    """
    return hidden.detach()[:, 1:].double() @ look.step_output.head.detach().double().T


def is_declared_gap(subject: ExaminedAdapter, words: str) -> bool:
    """Whether a difference is the one that the recipe declares itself.

    A recipe may count windows from the anchor; readers count them from each query. That is reported, not judged.

    Args:
        subject: the adapter that is examined.
        words: of the difference.
    """
    attention = subject.recipe.attention
    return attention.window_from == "anchor" and words.startswith(
        f"a window of {attention.window} from the query"
    )
