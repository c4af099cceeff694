"""Draft and verify: the real loop with caches, and the same accepted lengths from cached states.

    results = decode(target, drafter, prompts, DecodeConfig(layers=(1, 4, 7), max_new_tokens=64))
    tau(results), slot_acceptance(results)

One cycle drafts a block (the clean anchor, then mask tokens), lets the target compute the whole block with its
cache, takes the longest prefix of drafts that the target agrees with, and adds one token of the target's own (the
bonus). At temperature 0 the output is the target's greedy output (in bf16 up to ties: a block and a single token
round differently); above it every token follows the target's distribution exactly (speculative sampling, arXiv
2211.17192). Block sizes near the end and what counts as accepted are those of z-lab's dflash 0.1.0. The loop and
the offline tau stand in one file because they must count alike.

Shapes: S tokens, n tokens of one block, C conditioning layers, D width, V vocabulary, Vd the draft's, A blocks, B slots
of a block: the anchor and the B - 1 tokens drafted after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.drafting.proposer import DrafterModule, Proposer, at_least_fp32
from parity.model.drafting.session import EmbeddingAndHead, Rollback, TextModel, find_ends, open_session
from parity.model.target.load import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How texts are drafted and verified."""

    layers: tuple[int, ...]
    """Conditioning layers in the order of fc's slices; 0-based decoder layers (never `hidden_states` indices)."""
    max_new_tokens: int = 128
    """Generated tokens at most; the last block is shortened to end there."""
    temperature: float = 0.0
    """0 takes the most probable token; above 0 tokens are sampled from softmax(logits / temperature)."""
    stop_ids: tuple[int, ...] = ()
    """A text ends with the first of these, which is kept."""
    rollback: Rollback = "restore"
    """`crop` is the planted fault cache-crop: a hybrid target's recurrent states keep what was refused."""
    seed: int = 0
    """Sampling only: prompt i uses seed + i."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.max_new_tokens < 1:
            found = f"temperature {self.temperature}, max_new_tokens {self.max_new_tokens}"
            do = "give a temperature of 0 or more and at least 1 new token"
            raise ParityError("drafting and verifying", found, do)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cycle:
    """One block, drafted and verified. Slots past the end of the text do not count."""

    drafted: int
    """Draft slots that could be accepted, 1..B-1."""
    matched: int
    """Length of the longest prefix of them that the target agreed with."""
    accepted: int
    """Tokens added to the text, the bonus token included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeResult:
    """What one prompt gave."""

    prompt: tuple[int, ...]
    """Token ids that went in."""
    tokens: tuple[int, ...]
    """Token ids that came out; the first is the target's own, before any draft."""
    cycles: tuple[Cycle, ...]

    @property
    def acceptance_lengths(self) -> tuple[int, ...]:
        """Accepted length of each cycle, the bonus token included."""
        return tuple(cycle.accepted for cycle in self.cycles)

    @property
    def tau(self) -> float:
        """Mean accepted length of this text; nan where there was no cycle."""
        return tau([self])


def tau(results: Sequence[DecodeResult]) -> float:
    """Accepted tokens of all texts over all their cycles (a long text counts more); nan without a cycle."""
    lengths = [length for result in results for length in result.acceptance_lengths]
    return sum(lengths) / len(lengths) if lengths else nan


def slot_acceptance(results: Sequence[DecodeResult]) -> tuple[float, ...]:
    """For slots 1, 2, ...: the share of cycles that drafted the slot in which it and all before it matched."""
    cycles = [cycle for result in results for cycle in result.cycles]
    longest = max((cycle.drafted for cycle in cycles), default=0)
    shares = []
    for slot in range(1, longest + 1):
        drafted = [cycle for cycle in cycles if cycle.drafted >= slot]
        shares.append(sum(cycle.matched >= slot for cycle in drafted) / len(drafted))
    return tuple(shares)


def _cycle(anchor: int, size: int, matched: int, last: int) -> Cycle:
    """The cycle of a block of `size` slots at token `anchor`, in a text whose last token has index `last`."""
    drafted = min(size - 1, last - anchor)
    matched = min(matched, drafted)
    return Cycle(drafted=drafted, matched=matched, accepted=min(matched + 1, last - anchor))


def accept_greedy(drafts: Tensor, logits: Tensor) -> tuple[int, int]:
    """(length of the longest prefix of `drafts` [n] equal to the target's argmax, the bonus token).

    logits [n + 1, V] of the anchor and the n drafts.
    """
    own = logits.argmax(-1)
    matched = int((drafts == own[:-1]).long().cumprod(0).sum())
    return matched, int(own[matched])


def accept_sampled(
    drafts: Tensor, draft: Tensor, target: Tensor, generator: torch.Generator | None = None
) -> tuple[int, int]:
    """(drafts accepted, the token after them), so that every token follows `target` exactly.

    drafts [n] sampled from the rows of `draft` [n, V]; target [n + 1, V]; both are probabilities. Draft d is
    accepted with chance min(1, target / draft); the first refused one is replaced by a sample from the positive
    part of target - draft.
    """
    index = torch.arange(len(drafts), device=drafts.device)
    chance = torch.rand(len(drafts), generator=generator, dtype=draft.dtype, device=drafts.device)
    taken = chance * draft[index, drafts] < target[index, drafts]
    matched = int(taken.long().cumprod(0).sum())
    rest = target[matched]
    if matched < len(drafts):
        positive = (rest - draft[matched]).clamp_min(0)
        rest = positive if positive.sum() > 0 else rest  # equal up to rounding: refused by rounding alone
    return matched, int(torch.multinomial(rest, 1, generator=generator))


class _Sampler:
    """What temperature changes: how drafts and the target's tokens are taken from logits."""

    def __init__(self, proposer: Proposer, temperature: float, generator: torch.Generator) -> None:
        self.proposer, self.temperature, self.generator = proposer, temperature, generator

    def _probabilities(self, logits: Tensor) -> Tensor:
        return (logits.to(at_least_fp32(logits.dtype)) / self.temperature).softmax(-1)

    def first(self, logits: Tensor) -> int:
        """The token after the prompt, from its logits [V]."""
        if self.temperature == 0:
            return int(logits.argmax(-1))
        return int(torch.multinomial(self._probabilities(logits), 1, generator=self.generator))

    def draft(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """(target ids [n], their probabilities [n, V] where sampled) from draft logits [n, Vd]."""
        if self.temperature == 0:
            return self.proposer.to_target(logits.argmax(-1)), None
        probabilities = self._probabilities(logits)
        ids = torch.multinomial(probabilities, 1, generator=self.generator).squeeze(-1)
        return self.proposer.to_target(ids), self.proposer.to_target_vocabulary(probabilities)

    def verify(self, drafts: Tensor, draft: Tensor | None, logits: Tensor) -> tuple[int, int]:
        """(drafts accepted, the token after them); logits [n + 1, V] are the target's."""
        if draft is None:
            return accept_greedy(drafts, logits)
        return accept_sampled(drafts, draft, self._probabilities(logits), self.generator)


def generate(
    target: Target | TextModel, drafter: DrafterModule, prompt: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    """Draft and verify one prompt (token ids). Raises ParityError where layers and drafter do not fit."""
    return decode(target, drafter, [prompt], config)[0]


def decode(
    target: Target | TextModel, drafter: DrafterModule, prompts: Sequence[Sequence[int]], config: DecodeConfig
) -> list[DecodeResult]:
    """Draft and verify each prompt (token ids), one after another. Raises as `generate`."""
    if len(config.layers) != drafter.config.conditioning:
        found = f"{len(config.layers)} conditioning layers, and a drafter that takes {drafter.config.conditioning}"
        raise ParityError("drafting", found, "give the layers that the drafter was trained with")
    proposer = Proposer(drafter, find_ends(target))
    return [
        _generate(target, proposer, prompt, replace(config, seed=config.seed + index))
        for index, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def _generate(
    target: Target | TextModel, proposer: Proposer, prompt: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    session = open_session(target, config.layers, config.rollback)
    device = proposer.ends.embed.device
    chooser = _Sampler(proposer, config.temperature, torch.Generator(device).manual_seed(config.seed))
    context, limit = proposer.new_context(), len(prompt) + config.max_new_tokens

    def remember(states: Tensor) -> None:
        position = torch.arange(len(context), len(context) + len(states), device=device)
        context.extend(states, position, torch.zeros_like(position))

    logits, states = session.feed(torch.tensor(prompt, device=device), last_only=True)
    session.keep(len(prompt))
    remember(states)
    tokens, blocks = [*prompt, chooser.first(logits[-1])], []
    while len(tokens) < limit and tokens[-1] not in config.stop_ids:
        anchor = len(tokens) - 1
        size = min(proposer.block_size, limit - anchor)
        here = torch.tensor([tokens[anchor], anchor, 0], device=device)
        drafts, draft = chooser.draft(context.logits(here[:1], here[1:2], here[2:], size)[0])
        logits, states = session.feed(torch.cat((here[:1], drafts)))
        matched, bonus = chooser.verify(drafts, draft, logits)
        session.keep(matched + 1)
        remember(states[: matched + 1])
        tokens += _until_stop([*drafts[:matched].tolist(), bonus], config.stop_ids)[: limit - len(tokens)]
        blocks.append((anchor, size, matched))
    cycles = tuple(_cycle(*block, last=len(tokens) - 1) for block in blocks)
    return DecodeResult(prompt=tuple(prompt), tokens=tuple(tokens[len(prompt) :]), cycles=cycles)


def _until_stop(tokens: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    ends = [index for index, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0] + 1] if ends else tokens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedText:
    """One text of the target's own (greedy) with its conditioning states: what the offline tau needs."""

    tokens: Tensor
    """[S] prompt and continuation."""
    prompt: int
    """How many of them are the prompt."""
    states: Tensor
    """[S - 1 or more, C * D]; the last token's state is never looked at."""

    @classmethod
    def from_taps(
        cls, tokens: Tensor, prompt: int, taps: Mapping[str, Tensor], layers: Sequence[int]
    ) -> "RecordedText":
        """From a trace's taps `layer.i.out`, each [S, D]."""
        absent = [layer for layer in layers if f"layer.{layer}.out" not in taps]
        if absent:
            found, do = f"no layer.{absent[0]}.out", f"capture layers {', '.join(map(str, layers))}"
            raise ParityError("conditioning states from a trace", found, do)
        states = torch.cat([taps[f"layer.{layer}.out"] for layer in layers], dim=-1)
        return cls(tokens=tokens, prompt=prompt, states=states)


@torch.no_grad()
def greedy(target: Target | TextModel, prompt: Sequence[int], config: DecodeConfig) -> RecordedText:
    """The target's own greedy text, token by token with its cache, and its conditioning states."""
    session = open_session(target, config.layers, "restore")
    tokens, kept = list(prompt), list[Tensor]()
    new = torch.tensor(prompt, device=find_ends(target).embed.device)
    while True:
        logits, states = session.feed(new, last_only=True)
        session.keep(len(new))
        kept.append(states)
        new = logits[-1].argmax(-1, keepdim=True)
        tokens.append(int(new))
        if len(tokens) == len(prompt) + config.max_new_tokens or tokens[-1] in config.stop_ids:
            return RecordedText(tokens=torch.tensor(tokens), prompt=len(prompt), states=torch.cat(kept))


WAVE = 32
"""Texts drafted together offline: enough to fill a matrix product, few enough for their keys to fit."""


@torch.no_grad()
def offline_tau(
    drafter: DrafterModule,
    ends: EmbeddingAndHead,
    records: Sequence[RecordedText],
    *,
    max_new_tokens: int | None = None,
) -> list[DecodeResult]:
    """What `decode` gives at temperature 0, without running the target: every cycle's drafts are compared with
    the text that the target is known to write.

    max_new_tokens: the loop's limit, which shortens blocks near the end; None takes each text's own length.
    """
    results = []
    for start in range(0, len(records), WAVE):
        wave = records[start : start + WAVE]
        blocks: list[list[tuple[int, int, int]]] = [[] for _ in wave]
        for number, block in _walk(Proposer(drafter, ends), wave, max_new_tokens):
            blocks[number].append(block)
        for record, own in zip(wave, blocks, strict=True):
            tokens = record.tokens.tolist()
            cycles = tuple(_cycle(*block, last=len(tokens) - 1) for block in own)
            prompt, text = tuple(tokens[: record.prompt]), tuple(tokens[record.prompt :])
            results.append(DecodeResult(prompt=prompt, tokens=text, cycles=cycles))
    return results


def _walk(
    proposer: Proposer, records: Sequence[RecordedText], max_new_tokens: int | None
) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Every cycle's (text, (anchor, size, matched)); each round drafts one block of every unfinished text."""
    device, context = proposer.head.device, proposer.new_context()
    texts = [record.tokens.to(device) for record in records]
    lengths = [len(text) - 1 for text in texts]
    position = torch.cat([torch.arange(length, device=device) for length in lengths])
    document = torch.arange(len(texts), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    states = torch.cat(
        [record.states[:length].to(device) for record, length in zip(records, lengths, strict=True)]
    )
    context.extend(states, position, document)
    anchors = {number: record.prompt for number, record in enumerate(records)}
    while anchors := {number: anchor for number, anchor in anchors.items() if anchor < lengths[number]}:
        for size, numbers in _by_size(proposer, records, anchors, max_new_tokens).items():
            at = torch.tensor([anchors[number] for number in numbers], device=device)
            ids = torch.stack([texts[number][anchors[number]] for number in numbers])
            logits = context.logits(ids, at, torch.tensor(numbers, device=device), size)
            for number, drafts in zip(numbers, proposer.to_target(logits.argmax(-1)), strict=True):
                anchor = anchors[number]
                own = texts[number][anchor + 1 : anchor + size]
                matched = int((drafts[: len(own)] == own).long().cumprod(0).sum())
                yield number, (anchor, size, matched)
                anchors[number] += _cycle(anchor, size, matched, lengths[number]).accepted


def _by_size(
    proposer: Proposer, records: Sequence[RecordedText], anchors: Mapping[int, int], limit: int | None
) -> dict[int, list[int]]:
    """Texts by the size of their next block."""
    sizes: dict[int, list[int]] = {}
    for number, anchor in anchors.items():
        record = records[number]
        end = len(record.tokens) if limit is None else record.prompt + limit
        sizes.setdefault(min(proposer.block_size, end - anchor), []).append(number)
    return sizes
