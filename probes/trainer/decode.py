"""Does drafting at inference compute what training computed?

The step's hidden states times its head's rows, at an anchor, against the logits that `draft` gives for the same
anchor: its own cache, one block, its own embeddings, mask and head. Anchors are at both ends of documents and, in
one document of 512 tokens, early to late. Compared with each layer's output projection scaled until
attention adds as much as the residual (in a fresh narrow drafter rounding hides it else); on the short documents also
as they are.

Where they differ, the drafter that is written a second time (`parity.probes.instruments.drafter.reference`) names the
difference: hypotheses with other positions, rope, mask, window, context, slices, embedding, head or mask token are
tried until one gives what was drafted.

The limit is a few times the rounding error of the same arithmetic in the trainer's precision, at least 1e-5 of the
logits' standard deviation (float32) or 1e-2 (bfloat16 products or head). Without z-lab's parameter names there is no
reading to name, and attention is not scaled.

The real loop, where the adapter exposes `generate` and `greedy`: speculative decoding at temperature 0 must write what
the target writes alone. A wrong token before any rejection is a wrong acceptance; one after a rejection means that
the target's caches kept what was refused (huggingface/transformers#49036: recurrent states cannot be cropped). In
bfloat16 a tie is no difference: the gap of the target's own two logits is taken from `reference`.

Cost: five steps, 17 calls of `draft`, 2 x 16 tokens written twice. Finds: vllm#52873 (long
positions), vllm#47745 (causal flag), SpecForge#455 (head), speculators#613 (rope), llama.cpp#25792. Faults: the
`decode` rows of `parity.probes.deviations`.

Shapes: A anchors, B slots of a block, V the draft's vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.drafter import inference
from parity.probes.instruments.drafter.hypotheses import VisibleStep
from parity.probes.instruments.drafter.inference import DraftLogits
from parity.probes.instruments.drafter.receptive_field import ProbeBatch, find_filling_rows
from parity.probes.instruments.drafter.reference import DrafterHypothesis, override_parameters
from parity.probes.rows import SyntheticDocument
from parity.probes.subject import AdapterError, ExaminedAdapter
from parity.reports.record import Value

LONG_TEXT = 512
"""Tokens of the document in which positions are swept: a short cache or a wrong rope shows within it."""
SWEEP = (0.02, 0.25, 0.5, 0.75, 0.98)
PROMPTS, PROMPT, NEW = 2, 12, 16
"""The loop: prompts, tokens of each, tokens written. A random prompt leaves a target unsure: a wrong state shows."""
NAMES = {
    "positions": "decode-positions",
    "rope": "decode-rope",
    "context": "decode-context",
    "norm": "decode-not-recognised",
    "within": "decode-within",
    "window": "decode-window",
    "slices": "decode-slices",
    "embedding": "decode-embedding",
    "head": "decode-head",
    "mask-token": "decode-mask-token",
}
"""What a reader's difference is called here."""


class DecodeProbe:
    """Logits of training and of inference, then the loop."""

    name = "decode"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault."""
        faults: list[FoundDeviation] = []
        words: list[str] = []
        facts: dict[str, Value] = {}
        missing: list[NotExposed] = []
        for part in (_drafts, _loop):
            try:
                found, told, more = part(subject)
            except NotExposed as error:
                missing.append(error)
                words.append(f"not tested: {error.args[0]}")
                continue
            faults += found
            words.append(told)
            facts |= more
        if len(missing) == 2:
            raise missing[0]
        return make_probe_answer(self.name, "; ".join(words), faults, facts=facts)


# --- one block ----------------------------------------------------------------------------------------


def _looks(subject: ExaminedAdapter) -> list[ProbeBatch]:
    """The shared row, and one long document."""
    shared = ProbeBatch(subject, subject.batch, subject.anchors(subject.batch, 6), training=False)
    window = subject.recipe.attention.window or 0
    length = max(LONG_TEXT, window + 4 * subject.block) if window <= 8 * LONG_TEXT else LONG_TEXT
    batch = subject.row([SyntheticDocument(length=length)], seed=2)
    possible = subject.candidates(batch).nonzero().squeeze(-1)
    if not len(possible):
        return [shared]
    wanted = torch.tensor(SWEEP) * (len(possible) - 1)
    return [shared, ProbeBatch(subject, batch, possible[wanted.round().long().unique()], training=False)]


def _inference(look: ProbeBatch) -> Tensor:
    """[A, B - 1, V] by the adapter's `draft`. Raises Missing, or Broken for another shape."""
    subject, states = look.subject, look.states.detach()
    rows = []
    for anchor in look.anchors.tolist():
        with subject.guard_adapter_call("draft"), torch.no_grad():
            rows.append(subject.adapter.draft(look.batch, states, anchor).detach())
    shape = (subject.block - 1, len(look.step_output.head))
    for row in rows:
        if tuple(row.shape) != shape:
            raise AdapterError("draft", f"logits {list(shape)}", f"{list(row.shape)}")
    return torch.stack(rows)


def _plain(look: ProbeBatch) -> DraftLogits:
    """Both ways, with the parameters as they are."""
    return DraftLogits(
        look=look,
        trained=inference.compute_draft_logits(look, look.step_output.hidden),
        drafted=_inference(look),
    )


def _drafts(subject: ExaminedAdapter) -> tuple[list[FoundDeviation], str, dict[str, Value]]:
    """Whether inference drafts the step's logits: faults, words and facts."""
    looks = _looks(subject)
    reading = DrafterHypothesis.from_recipe(subject.recipe, subject.adapter.configured)
    lens = VisibleStep.of(looks, reading, inference.ALL)
    limit = inference.estimate_logit_limit(looks[0], lens)
    # With attention scaled up, where the parameters that are exposed are those that inference uses too.
    plain, compared, values, note = [_plain(looks[0])], list[DraftLogits](), dict[str, Tensor](), ""
    if not isinstance(lens, str) and lens.live:
        values = dict(lens.whole.values)
        with override_parameters(subject.parameters, values):
            drafted = [_inference(look) for look in looks]
        if torch.equal(drafted[0], plain[0].drafted):
            values, note = {}, ", whose weights are a copy of the step's"
        else:
            compared = [
                DraftLogits(look=look, trained=inference.compute_draft_logits(look, hidden), drafted=made)
                for look, hidden, made in zip(looks, lens.whole.found, drafted, strict=True)
            ]
    # Else every row with the parameters as they are.
    if not compared:
        plain += [_plain(look) for look in looks[1:]]
        compared = plain
    # One number and its limit; beyond it the difference is named, and may be one that the recipe declares.
    worst = max(float(each.draft_distance.max()) for each in (*plain, *compared))
    anchors = sum(len(each.look.anchors) for each in compared)
    positions = torch.cat([each.look.batch.position[each.look.anchors] for each in compared])
    words = (
        f"drafting gives the step's logits at {anchors} anchors, positions {int(positions.min())} to"
        f" {int(positions.max())}{note}: at most {worst:.2g} of their deviation apart (limit {limit:.2g})"
    )
    facts: dict[str, Value] = {"decode.apart": worst, "decode.anchors": anchors}
    if worst <= limit:
        return [], words, facts
    fault = _name_hypothesis(compared, lens, values, limit, worst)
    if inference.is_declared_gap(subject, fault.measured):
        return (
            [],
            f"{words}; trained with windows from the anchor as declared, drafted with {fault.measured}",
            facts,
        )
    return [fault], words.replace("gives", "does not give"), facts


def _name_hypothesis(
    compared: Sequence[DraftLogits],
    lens: VisibleStep | str,
    values: Mapping[str, Tensor],
    limit: float,
    worst: float,
) -> FoundDeviation:
    """The fault whose hypothesis gives what inference drafts.

    Args:
        compared: logits of both ways, row by row.
        lens: the step and its reference, or why there is none.
        values: what stood in the output projections meanwhile.
        limit: distance that rounding may make.
        worst: the largest distance found.
    """
    off = sum(int((each.draft_distance > limit).sum()) for each in compared)
    count = sum(len(each.draft_distance) for each in compared)
    numbers = f"logits are up to {worst:.3g} of their deviation apart at {off} of {count} anchors (limit {limit:.2g})"
    evidence: dict[str, Value] = {"apart": worst, "anchors": off, "limit": limit}

    def fault(name: str, words: str) -> FoundDeviation:
        return FoundDeviation(name, f"{words}{'; ' if words else ''}{numbers}", evidence)

    # From the narrowest name to the widest: a factor, a hypothesis, a position from which on it is off.
    factor = inference.find_common_factor(compared, limit)
    if factor is not None:
        return fault("decode-head", f"the logits are {factor:.4g} times the step's")
    if not isinstance(lens, str):
        found = inference.explain_gap(
            compared, lens, values, limit, lambda: _mask_row(compared[-1], lens.table)
        )
        if found is not None:
            return fault("decode-training" if found.training else NAMES[found.kind], found.words)
    late = inference.find_last_agreement(compared, limit)
    if late is not None:
        return fault("decode-long", f"up to position {late[0]} they agree, from {late[1]} on they do not")
    return fault("decode-not-recognised", "" if not isinstance(lens, str) else lens)


def _mask_row(each: DraftLogits, table: Tensor) -> int | None:
    """The embedding row that moves the drafted logits, beside the anchor's own."""
    look = each.look
    one = ProbeBatch(look.subject, look.batch, look.anchors[:1], training=look.training)
    before = _inference(one)
    ids = torch.arange(len(table))
    rest = ids[~torch.isin(ids, look.batch.tokens[one.anchors])]
    rows = find_filling_rows(lambda: not torch.equal(_inference(one), before), table, rest)
    return int(rows[0]) if len(rows) == 1 else None


# --- the loop -----------------------------------------------------------------------------------------


def _loop(subject: ExaminedAdapter) -> tuple[list[FoundDeviation], str, dict[str, Value]]:
    """Whether drafting and verifying writes the target's own text."""
    # Random prompts leave the target unsure, so that a wrong state changes its next token soon.
    adapter, same, refused = subject.adapter, 0, 0
    generator = torch.Generator().manual_seed(4)
    for _ in range(PROMPTS):
        prompt = torch.randint(0, adapter.vocabulary, (PROMPT,), generator=generator).tolist()
        with subject.guard_adapter_call("greedy"), torch.no_grad():
            own = list(adapter.greedy(prompt, NEW))
        with subject.guard_adapter_call("generate"), torch.no_grad():
            said, lengths = adapter.generate(prompt, NEW)
        said, lengths = list(said), list(lengths)
        # The first token that differs; equal texts and ties in the target's own logits are no fault.
        refused += sum(length < subject.block for length in lengths[:-1])
        wrong = next((n for n, pair in enumerate(zip(own, said, strict=False)) if pair[0] != pair[1]), None)
        if wrong is None and len(own) == len(said):
            same += len(own)
            continue
        wrong = min(len(own), len(said)) if wrong is None else wrong
        if (
            wrong < len(own)
            and wrong < len(said)
            and _tie(subject, [*prompt, *own[:wrong]], own[wrong], said[wrong])
        ):
            same += wrong
            continue
        return (
            [_loop_fault(subject.block, own, said, lengths, wrong)],
            "drafting and verifying changes the text",
            {},
        )
    words = f"drafting and verifying writes the target's own {same} tokens, {refused} cycles with a rejection"
    return [], words, {"decode.loop.tokens": same, "decode.loop.rejections": refused}


def _loop_fault(
    block: int, own: list[int], said: list[int], lengths: list[int], wrong: int
) -> FoundDeviation:
    """A text that is not the target's, by where it departs from it.

    Args:
        block: B; a cycle that writes fewer tokens had a rejection.
        own: the target's own text.
        said: what drafting and verifying wrote.
        lengths: tokens written by each cycle.
        wrong: the first place where the texts differ.
    """
    ends = [1 + sum(lengths[: n + 1]) for n in range(len(lengths))]
    cycle = next((n for n, end in enumerate(ends) if end > wrong), len(lengths))
    rejections = sum(length < block for length in lengths[:cycle])
    name = "recurrent-state" if rejections else "verification"
    told = f"{own[wrong]} becomes {said[wrong]}" if wrong < min(len(own), len(said)) else "the text ends"
    words = f"at token {wrong} of {len(own)} {told}, in cycle {cycle + 1}, after {rejections} rejections"
    return FoundDeviation(name, words, {"token": wrong, "rejections": rejections})


def _tie(subject: ExaminedAdapter, text: list[int], one: int, other: int) -> bool:
    """Whether the target's own logits of two tokens are equal up to rounding of its dtype."""
    tokens = torch.tensor(text)
    batch = Batch(
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        document=torch.zeros_like(tokens),
        position=torch.arange(len(tokens)),
        sample_ids=(0,),
        epoch=0,
    )
    try:
        logits = subject.reference(batch).logits[-1]
    except NotExposed:
        return False
    rounding = 8 * torch.finfo(subject.adapter.dtype).eps * float(logits.abs().max())
    return abs(float(logits[one]) - float(logits[other])) <= rounding
