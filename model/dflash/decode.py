"""Draft and verify: the real loop with caches, and the same accepted lengths from cached states.

    results = decode(target, drafter, prompts, DecodeConfig(layers=(1, 4, 7), max_new_tokens=64))
    tau(results), slot_acceptance(results)

One cycle drafts a block (the clean anchor, then mask tokens), lets the target compute the whole block with its
cache, takes the longest prefix of drafts that the target agrees with, and adds one token of the target's own (the
bonus). At temperature 0 the output is the target's greedy output (in bf16 up to ties: a block and a single token
round differently); above it every token follows the target's distribution exactly (speculative sampling, arXiv
2211.17192). Block sizes near the end and what counts as accepted are those of z-lab's dflash 0.1.0. The loop and
the offline tau stand in one file because they must count alike.

After a rejection the target must forget the refused tokens. Keys and values can be cropped; the recurrent and
convolution states of a linear-attention layer cannot: they are copied before each block, put back, and the
accepted tokens are computed again. `rollback="crop"` crops only, as transformers' own `Cache.crop` and z-lab's
loop do (huggingface/transformers#49036): the planted fault `cache-crop`, for probes.

Shapes: S tokens, n tokens of one block, C conditioning layers, D width, V vocabulary, Vd the draft's, A blocks.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import nan
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.dflash.drafter import ContextCache, Drafter, at_least_fp32
from parity.model.target.load import Target

Rollback = Literal["restore", "crop"]


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingAndHead:
    """The two ends of the target that a drafter shares, frozen."""

    embed: Tensor
    """[V, D] raw rows: a factor that the target's embedding module applies is left out, as z-lab does."""
    head: Tensor
    """[V, D]."""

    @classmethod
    def of(cls, target: Target) -> "EmbeddingAndHead":
        """Those of a loaded target. Raises ParityError where it has no head, or one with a bias."""
        if target.head is None or getattr(target.head, "bias", None) is not None:
            found = "no head" if target.head is None else "a head with a bias, which no DFlash reader applies"
            do = "load it with AutoModelForCausalLM"
            raise ParityError(f"the embedding and head of {target.spec.model}", found, do)
        embed, head = target.embed.weight, target.head.weight
        assert isinstance(embed, Tensor) and isinstance(head, Tensor)
        return cls(embed=embed.detach(), head=head.detach())


class Proposer:
    """Drafts blocks: a drafter between the target's embedding and head."""

    def __init__(self, drafter: Drafter, ends: EmbeddingAndHead) -> None:
        self.drafter, self.ends = drafter, ends
        self.vocab = drafter.draft_vocab
        self.head = ends.head if self.vocab is None else self.vocab.head_rows(ends.head)

    def extend(self, cache: ContextCache, states: Tensor, position: Tensor, document: Tensor) -> None:
        """Add captured states [n, C * D] to the cache, in the drafter's dtype."""
        self.drafter.extend(cache, states.to(self.drafter.fc.weight), position, document)

    def logits(
        self, cache: ContextCache, anchor_ids: Tensor, position: Tensor, document: Tensor, size: int
    ) -> Tensor:
        """Logits of slots 1..size-1 of blocks that start with `anchor_ids` [A]; [A, size - 1, Vd], fp32 or wider."""
        ids = torch.full((len(anchor_ids), size), self.drafter.config.mask_token_id, device=anchor_ids.device)
        ids[:, 0] = anchor_ids
        embeddings = F.embedding(ids, self.ends.embed).to(self.drafter.fc.weight)
        hidden = self.drafter.draft(cache, embeddings, position, document)[:, 1:]
        logits = F.linear(hidden.to(self.head), self.head)
        return logits.to(at_least_fp32(logits.dtype))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary as the target's."""
        return draft_ids if self.vocab is None else self.vocab.to_target(draft_ids)

    def to_target_vocabulary(self, probabilities: Tensor) -> Tensor:
        """[n, Vd] -> [n, V]: tokens that the draft vocabulary lacks get probability 0."""
        if self.vocab is None:
            return probabilities
        wide = probabilities.new_zeros(len(probabilities), len(self.ends.head))
        wide[:, self.vocab.t2d] = probabilities
        return wide


class DecodingSession(Protocol):
    """A target in the middle of a text. Every `feed` is followed by one `keep`."""

    def feed(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Compute ids [n] after what is kept: logits [n, V] and conditioning states [n, C * D].

        last_only: logits of the last token alone, [1, V], where the model can.
        """

    def keep(self, count: int) -> None:
        """Keep the first `count` of the tokens fed last; the state is then as if no others had been fed."""


class TextModel(Protocol):
    """A target that is no model of transformers (the stand-in of `parity.model.training.states`)."""

    @property
    def ends(self) -> EmbeddingAndHead: ...

    def session(self, layers: Sequence[int], rollback: Rollback) -> DecodingSession: ...


def _session(target: "Target | TextModel", config: DecodeConfig) -> DecodingSession:
    if isinstance(target, Target):
        return TargetSession(target, config.layers, config.rollback)
    return target.session(config.layers, config.rollback)


def _ends(target: "Target | TextModel") -> EmbeddingAndHead:
    return EmbeddingAndHead.of(target) if isinstance(target, Target) else target.ends


class TargetSession:
    """A target with its cache, fed tokens; gives logits and conditioning states, and can take tokens back.

    States are taken by hooks on the decoder layers.
    """

    def __init__(self, target: Target, layers: Sequence[int], rollback: Rollback = "restore") -> None:
        from transformers import DynamicCache

        wrong = [layer for layer in layers if not 0 <= layer < len(target.layers)]
        if wrong or not layers:
            found = f"layers {list(layers)} of a target with layers 0 to {len(target.layers) - 1}"
            raise ParityError("conditioning states", found, "give 0-based decoder layers")
        self.target, self.layers = target, tuple(layers)
        self.cache: Any = DynamicCache(config=target.config)
        accepted = inspect.signature(type(target.model).forward).parameters
        self._options = {"cache" if "cache" in accepted else "past_key_values": self.cache}
        self._limits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        recurrent = any(hasattr(layer, "recurrent_states") for layer in self.cache.layers)
        sliding = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)
        self._records = (not recurrent or rollback == "crop") and hasattr(
            self.cache, "activate_past_recording"
        )
        if self._records:  # windows and convolutions then keep what a later crop needs
            self.cache.activate_past_recording()
        self._restores = not self._records and (recurrent or sliding)
        self._fed = torch.empty(0, dtype=torch.long)
        self._before: list[dict[str, Any]] = []

    def feed(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """As `DecodingSession.feed`."""
        self._fed = ids
        if self._restores:
            self._before = [_snapshot(layer) for layer in self.cache.layers]
        return self._forward(ids, self._limits if last_only else {})

    def keep(self, count: int) -> None:
        """As `DecodingSession.keep`."""
        refused = len(self._fed) - count
        if self._records or (refused and not self._restores):
            self.cache.crop(-refused)
        elif refused:
            for layer, before in zip(self.cache.layers, self._before, strict=True):
                vars(layer).update(before)
            if count:
                self._forward(self._fed[:count], self._limits)
        self._before = []

    @torch.no_grad()
    def _forward(self, ids: Tensor, limits: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer in set(self.layers):
                hook = _keep_output(seen, layer)
                stack.callback(self.target.layers[layer].register_forward_hook(hook).remove)
            out = self.target.model(input_ids=ids[None], use_cache=True, **self._options, **limits)
        return out.logits[0], torch.cat([seen[layer] for layer in self.layers], dim=-1)


def _keep_output(seen: dict[int, Tensor], layer: int) -> Any:
    def hook(_: nn.Module, args: Any, out: Any) -> None:
        seen[layer] = (out[0] if isinstance(out, tuple) else out)[0].detach()

    return hook


def _snapshot(layer: Any) -> dict[str, Any]:
    """A cache layer's attributes. Recurrent and convolution states are overwritten in place, so they are copied;
    keys and values are replaced by longer tensors, so a reference is enough."""
    copied = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            value = {key: x.clone() if isinstance(x, Tensor) else x for key, x in value.items()}
        copied[name] = value
    return copied


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
    target: Target | TextModel, drafter: Drafter, prompt: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    """Draft and verify one prompt (token ids). Raises ParityError where layers and drafter do not fit."""
    return decode(target, drafter, [prompt], config)[0]


def decode(
    target: Target | TextModel, drafter: Drafter, prompts: Sequence[Sequence[int]], config: DecodeConfig
) -> list[DecodeResult]:
    """Draft and verify each prompt (token ids), one after another. Raises as `generate`."""
    if len(config.layers) != drafter.config.conditioning:
        found = f"{len(config.layers)} conditioning layers, and a drafter that takes {drafter.config.conditioning}"
        raise ParityError("drafting", found, "give the layers that the drafter was trained with")
    proposer = Proposer(drafter, _ends(target))
    return [
        _generate(target, proposer, prompt, replace(config, seed=config.seed + index))
        for index, prompt in enumerate(prompts)
    ]


@torch.no_grad()
def _generate(
    target: Target | TextModel, proposer: Proposer, prompt: Sequence[int], config: DecodeConfig
) -> DecodeResult:
    session, drafter = _session(target, config), proposer.drafter
    device = proposer.ends.embed.device
    chooser = _Sampler(proposer, config.temperature, torch.Generator(device).manual_seed(config.seed))
    cache, limit = drafter.new_cache(), len(prompt) + config.max_new_tokens

    def remember(states: Tensor) -> None:
        position = torch.arange(len(cache), len(cache) + len(states), device=device)
        proposer.extend(cache, states, position, torch.zeros_like(position))

    logits, states = session.feed(torch.tensor(prompt, device=device), last_only=True)
    session.keep(len(prompt))
    remember(states)
    tokens, blocks = [*prompt, chooser.first(logits[-1])], []
    while len(tokens) < limit and tokens[-1] not in config.stop_ids:
        anchor = len(tokens) - 1
        size = min(drafter.config.block_size, limit - anchor)
        here = torch.tensor([tokens[anchor], anchor, 0], device=device)
        drafts, draft = chooser.draft(proposer.logits(cache, here[:1], here[1:2], here[2:], size)[0])
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
    session = _session(target, replace(config, rollback="restore"))
    tokens, kept = list(prompt), list[Tensor]()
    new = torch.tensor(prompt, device=_ends(target).embed.device)
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
    drafter: Drafter,
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
    device, cache = proposer.head.device, proposer.drafter.new_cache()
    texts = [record.tokens.to(device) for record in records]
    lengths = [len(text) - 1 for text in texts]
    position = torch.cat([torch.arange(length, device=device) for length in lengths])
    document = torch.arange(len(texts), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    states = torch.cat(
        [record.states[:length].to(device) for record, length in zip(records, lengths, strict=True)]
    )
    proposer.extend(cache, states, position, document)
    anchors = {number: record.prompt for number, record in enumerate(records)}
    while anchors := {number: anchor for number, anchor in anchors.items() if anchor < lengths[number]}:
        for size, numbers in _by_size(proposer, records, anchors, max_new_tokens).items():
            at = torch.tensor([anchors[number] for number in numbers], device=device)
            ids = torch.stack([texts[number][anchors[number]] for number in numbers])
            logits = proposer.logits(cache, ids, at, torch.tensor(numbers, device=device), size)
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
        sizes.setdefault(min(proposer.drafter.config.block_size, end - anchor), []).append(number)
    return sizes
