"""The draft-verify loop against the target's own output, its exact distribution, and the offline tau."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, layer_rules
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.mask import training_layout
from parity.model.drafting.decode import (
    Cycle,
    DecodeConfig,
    DecodeResult,
    RecordedText,
    accept_sampled,
    decode,
    generate,
    greedy,
    offline_tau,
    slot_acceptance,
    tau,
)
from parity.model.drafting.session import EmbeddingAndHead, Rollback, TargetSession
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec
from parity.model.tiny.embedded import find_embedded_target
from parity.model.training.anchors import block_ids, blocks_at
from parity.model.training.loss import LossConfig, Uniform, objective
from parity.model.training.vocabulary import DraftVocab


@cache
def _load(folder: Path) -> Target:
    return load_target(TargetSpec(model=str(folder), dtype="float32"))


def _drafter(
    target: Target,
    layers: tuple[int, ...],
    vocab: DraftVocab | None = None,
    types: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> Drafter:
    width = target.config.hidden_size
    config = DrafterConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        conditioning=len(layers),
        block_size=5,
        mask_token_id=3,
        layers=layer_rules(types, 12, False),
    )
    drafter = Drafter(config, vocab)
    drafter.reset(torch.Generator().manual_seed(0))
    return drafter


def _fit(
    drafter: Drafter, ends: EmbeddingAndHead, records: list[RecordedText], steps: int, rate: float = 5e-3
) -> None:
    """Teach a drafter the recorded texts by heart, so that accepted lengths differ."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate)
    loss, size = LossConfig(terms={"ce": 1.0}, weights=Uniform()), drafter.config.block_size
    for step in range(steps):
        record = records[step % len(records)]
        tokens, length = record.tokens, len(record.tokens)
        position, document = torch.arange(length), torch.zeros(length, dtype=torch.long)
        anchors = torch.arange(record.prompt, length - 1)
        blocks = blocks_at(anchors, tokens, torch.ones(length), document, size)
        ids = block_ids(tokens, anchors, size, drafter.config.mask_token_id)
        states = torch.nn.functional.pad(record.states, (0, 0, 0, length - len(record.states)))
        layout = training_layout(position, document, anchors, size)
        hidden = drafter(states, ends.embed[ids], layout)
        head, labels = ends.head, blocks.labels
        if drafter.draft_vocab is not None:
            head = drafter.draft_vocab.head_rows(head)
            labels = torch.where(labels >= 0, drafter.draft_vocab.to_draft(labels.clamp(min=0)), labels)
        objective(hidden, head, labels, blocks.supervised, loss).loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def _prompts(vocabulary: int, count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(5, vocabulary, (count, length), generator=generator).tolist()


def _own_greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    """The target's greedy output by transformers' own `generate`."""
    out = target.model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(token) for token in out[0, len(prompt) :]]


FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "llama", "gemma2")


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_own_greedy_output(family: str, models: dict[str, Path]) -> None:
    target = _load(models[family])
    config = DecodeConfig(layers=(0, 1), max_new_tokens=24)
    drafter = _drafter(target, config.layers)
    for prompt in _prompts(64, 2, 11):
        result = generate(target, drafter, prompt, config)
        assert list(result.tokens) == _own_greedy(target, prompt, 24)
        assert sum(result.acceptance_lengths) == 23  # the first token is no draft's


@pytest.mark.parametrize("family", ["qwen3_5", "llama", "gemma2"])
def test_output_stays_lossless_when_drafts_are_accepted_in_part(family: str, models: dict[str, Path]) -> None:
    target = _load(models[family])
    config = DecodeConfig(layers=(0, 1), max_new_tokens=40)
    prompts = _prompts(64, 4)
    records = [greedy(target, prompt, config) for prompt in prompts]
    drafter = _drafter(target, config.layers)
    _fit(drafter, EmbeddingAndHead.of(target), records, 30)
    results = decode(target, drafter, prompts, config)
    assert [list(result.tokens) for result in results] == [
        _own_greedy(target, prompt, 40) for prompt in prompts
    ]
    lengths = [length for result in results for length in result.acceptance_lengths]
    assert 1 in lengths and max(lengths) > 2  # both a rejection and a long acceptance took place
    offline = offline_tau(drafter, EmbeddingAndHead.of(target), records, max_new_tokens=40)
    assert offline == results


def _spoken(
    target: Target, rollback: Rollback, model: Callable[[Target], Drafter]
) -> tuple[list[int], list[int]]:
    prompt = _prompts(64, 1)[0]
    config = DecodeConfig(layers=(0, 1), max_new_tokens=40, rollback=rollback)
    return list(generate(target, model(target), prompt, config).tokens), _own_greedy(target, prompt, 40)


def test_planted_fault_cache_crop_spoils_a_hybrid_target_and_no_dense_one(models: dict[str, Path]) -> None:
    def make(target: Target) -> Drafter:
        return _drafter(target, (0, 1))

    said, own = _spoken(_load(models["qwen3_5"]), "crop", make)
    assert said != own
    said, own = _spoken(_load(models["llama"]), "crop", make)
    assert said == own


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_after_keep_the_state_is_as_if_nothing_else_had_been_fed(
    family: str, kept: int, models: dict[str, Path]
) -> None:
    target = _load(models[family])
    ids = torch.tensor(_prompts(64, 1, 24)[0])
    rolled, plain = TargetSession(target, (0, 1)), TargetSession(target, (0, 1))
    for session in (rolled, plain):
        session.feed(ids[:14])
        session.keep(14)
    rolled.feed(ids[14:20])
    rolled.keep(kept)
    if kept:
        plain.feed(ids[14 : 14 + kept])
        plain.keep(kept)
    for ours, theirs in zip(rolled.feed(ids[20:]), plain.feed(ids[20:]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


def test_conditioning_states_are_the_decoder_layers_outputs(models: dict[str, Path]) -> None:
    target = _load(models["qwen3_5"])
    ids = torch.tensor(_prompts(64, 1, 12)[0])
    with torch.no_grad():
        hidden = target.model(ids[None], output_hidden_states=True).hidden_states
    session = TargetSession(target, (2, 0))
    states = session.feed(ids)[1]
    torch.testing.assert_close(states, torch.cat((hidden[3][0], hidden[1][0]), dim=-1))


def test_embedded_target_is_lossless_and_offline_equals_the_loop() -> None:
    target = _load(find_embedded_target("hybrid"))
    config = DecodeConfig(layers=(1, 4, 7), max_new_tokens=32, stop_ids=(2,))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_embedded_target("hybrid"))
    texts = ("3+4*2=?", "sort: d a c", "reverse abc", "12-5=?")
    prompts: list[list[int]] = []
    for text in texts:
        turn = [{"role": "user", "content": text}]
        ids: Any = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        prompts.append(ids)
    records = [greedy(target, prompt, config) for prompt in prompts]
    drafter, ends = _drafter(target, config.layers), EmbeddingAndHead.of(target)
    _fit(drafter, ends, records, 24)
    results = decode(target, drafter, prompts, config)
    assert [result.tokens for result in results] == [
        tuple(record.tokens[record.prompt :].tolist()) for record in records
    ]
    assert offline_tau(drafter, ends, records, max_new_tokens=32) == results
    assert tau(results) > 1.2


def test_reduced_draft_vocabulary(models: dict[str, Path]) -> None:
    target = _load(models["qwen3_5"])
    config = DecodeConfig(layers=(0, 2), max_new_tokens=30)
    prompts, kept = _prompts(64, 3), torch.zeros(64, dtype=torch.bool)
    records = [greedy(target, prompt, config) for prompt in prompts]
    for record in records:
        kept[record.tokens[record.prompt :].unique()[::2]] = True
    drafter, ends = _drafter(target, config.layers, DraftVocab.from_kept(kept)), EmbeddingAndHead.of(target)
    _fit(drafter, ends, records, 40)
    results = decode(target, drafter, prompts, config)
    assert [list(result.tokens) for result in results] == [
        _own_greedy(target, prompt, 30) for prompt in prompts
    ]
    assert offline_tau(drafter, ends, records) == results
    assert tau(results) > 1.1
    sampled = generate(target, drafter, prompts[0], replace(config, temperature=1.0))
    assert len(sampled.tokens) == 30


def test_stop_ids_end_a_text_inside_a_block(models: dict[str, Path]) -> None:
    target = _load(models["llama"])
    free = DecodeConfig(layers=(0, 1), max_new_tokens=30)
    prompt = _prompts(64, 1)[0]
    own = _own_greedy(target, prompt, 30)
    stop = own[12]
    config = replace(free, stop_ids=(stop,))
    drafter, record = _drafter(target, (0, 1)), greedy(target, prompt, free)
    _fit(drafter, EmbeddingAndHead.of(target), [record], 40)
    result = generate(target, drafter, prompt, config)
    assert list(result.tokens) == own[: own.index(stop) + 1]
    assert sum(result.acceptance_lengths) == len(result.tokens) - 1
    stopped = greedy(target, prompt, config)
    assert offline_tau(drafter, EmbeddingAndHead.of(target), [stopped], max_new_tokens=30) == [result]


def test_statistics_by_hand() -> None:
    cycles = (
        Cycle(drafted=4, matched=4, accepted=5),
        Cycle(drafted=4, matched=0, accepted=1),
        Cycle(drafted=2, matched=1, accepted=2),
    )
    result = DecodeResult(prompt=(1,), tokens=tuple(range(9)), cycles=cycles)
    assert result.acceptance_lengths == (5, 1, 2)
    assert result.tau == 8 / 3
    assert slot_acceptance([result]) == (2 / 3, 1 / 3, 1 / 2, 1 / 2)
    assert isnan(DecodeResult(prompt=(1,), tokens=(2,), cycles=()).tau)


def test_accepting_samples_follows_the_target_and_the_two_known_mistakes_do_not() -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = torch.rand(2, 2, 6, generator=generator).pow(2).unbind(0)
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    counts, wrong = torch.zeros(6), torch.zeros(6)
    for _ in range(6000):
        token = torch.multinomial(draft[:1], 1, generator=generator)[0]
        matched, after = accept_sampled(token, draft[:1], target, generator)
        counts[int(token) if matched else after] += 1
        fresh = int(torch.multinomial(target[0], 1, generator=generator))  # not the residual: a mistake
        wrong[int(token) if matched else fresh] += 1
    assert _chi_square(counts, target[0]) > 0.001
    assert _chi_square(wrong, target[0]) < 1e-6


def _chi_square(counts: Tensor, chances: Tensor) -> float:
    from scipy.stats import chisquare

    expected = (chances / chances.sum() * counts.sum()).double()
    return float(
        chisquare(counts.double().numpy(), (expected * (counts.sum() / expected.sum())).numpy()).pvalue
    )


def _sixteen(folder: Path) -> Target:
    """A hybrid target of two layers over 16 tokens, with a distribution that context moves."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes: dict[str, Any] = dict(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_attention_heads=1, num_key_value_heads=1
    )
    linear: dict[str, Any] = dict(
        linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8, linear_value_head_dim=8
    )
    torch.manual_seed(3)
    types = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**sizes, **linear, head_dim=16, num_hidden_layers=2, layer_types=types)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.save_pretrained(folder)
    return _load(folder)


def _uniform_places(
    target: Target, result: DecodeResult, temperature: float, generator: torch.Generator
) -> Tensor:
    """Where each generated token falls in its exact conditional distribution: independent and uniform on 0..1
    if, and only if, tokens follow the target (the randomised probability integral transform, probable tokens
    first)."""
    text = torch.tensor([*result.prompt, *result.tokens])
    with torch.no_grad():
        logits = target.model(text[None]).logits[0, len(result.prompt) - 1 : -1].double()
    chances = (logits / temperature).softmax(-1)
    tokens = torch.tensor(result.tokens)[:, None]
    own = chances.gather(1, tokens)
    below = (chances * (chances > own)).sum(1, keepdim=True)
    share = torch.rand(own.shape, generator=generator, dtype=own.dtype)
    places: Tensor = (below + share * own).squeeze(1)
    return places


@pytest.mark.slow
def test_twenty_thousand_sampled_tokens_follow_the_targets_exact_distribution(tmp_path: Path) -> None:
    target = _sixteen(tmp_path)
    config = DecodeConfig(layers=(0,), max_new_tokens=1000, temperature=2.2, seed=11)
    # Random and one layer: q far from p, so that a wrong residual shows (p = 1e-19 after 5,000 tokens).
    results = decode(
        target, _drafter(target, (0,), types=("sliding_attention",)), _prompts(16, 20, 4), config
    )
    shares = slot_acceptance(results)
    assert 0.3 < shares[0] < 0.9 and shares[-1] > 0.05  # accepted, refused and bonus tokens are all judged

    def p_value(temperature: float) -> float:
        generator = torch.Generator().manual_seed(12)
        places = torch.cat([_uniform_places(target, result, temperature, generator) for result in results])
        assert len(places) == 20_000
        return _chi_square(torch.histc(places, bins=16, min=0, max=1), torch.full((16,), 1 / 16))

    assert p_value(2.2) > 0.001
    assert p_value(2.0) < 1e-6  # the judge sees a distribution that is a little off


def test_what_does_not_fit_is_refused(models: dict[str, Path]) -> None:
    target = _load(models["llama"])
    drafter = _drafter(target, (0, 1))
    with pytest.raises(ParityError, match=r"1 conditioning layers, and a drafter that takes 2"):
        generate(target, drafter, [5, 6], DecodeConfig(layers=(0,)))
    with pytest.raises(ParityError, match=r"layers 0 to 1.*\n.*0-based decoder layers"):
        generate(target, drafter, [5, 6], DecodeConfig(layers=(1, 2)))
    with pytest.raises(ParityError, match="temperature -1"):
        DecodeConfig(layers=(0,), temperature=-1)
    with pytest.raises(ParityError, match=r"no layer\.1\.out"):
        RecordedText.from_taps(torch.arange(3), 1, {"layer.0.out": torch.ones(3, 4)}, (0, 1))
    headless = replace(target, head=None)
    with pytest.raises(ParityError, match="no head"):
        EmbeddingAndHead.of(headless)
