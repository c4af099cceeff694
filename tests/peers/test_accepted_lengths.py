"""Our exported checkpoint drafts in z-lab's own loop with the same tokens and the same accepted lengths."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import TargetLayers, save_zlab
from parity.model.drafting.decode import DecodeConfig, decode, greedy, offline_tau, tau
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.target.load import load_target
from parity.model.target.spec import TargetSpec
from parity.model.tiny import corpus
from parity.model.tiny.embedded import find_embedded_target, tokenizer

if TYPE_CHECKING:
    from tests.peers.conftest import Bench

NEW = 40


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_accepted_lengths_of_twenty_prompts(
    kind: str, bench: "Bench", fit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecodeConfig(layers=bench.wiring.layers, max_new_tokens=NEW)
    generator = torch.Generator().manual_seed(2)
    prompts: list[list[int]] = torch.randint(5, 64, (20, 8), generator=generator).tolist()
    records = [greedy(bench.target, prompt, config) for prompt in prompts]
    drafter = bench.drafter((kind, "full_attention"))
    fit(drafter, bench.ends, records, 60)
    model = bench.zlab(drafter)
    package: Any = bench.bring("dflash.model")
    monkeypatch.setattr(package, "_cuda_time", time.perf_counter)  # it gives lengths with statistics only

    ours = decode(bench.target, drafter, prompts, config)
    for prompt, result in zip(prompts, ours, strict=True):
        theirs = package.dflash_generate(
            model, bench.target.model, torch.tensor([prompt]), NEW, stop_token_ids=None, return_stats=True
        )
        assert theirs.output_ids[0].tolist() == [*result.prompt, *result.tokens]
        assert tuple(theirs.acceptance_lengths) == result.acceptance_lengths
    lengths = {length for result in ours for length in result.acceptance_lengths}
    assert {1, 2, 3} <= lengths and 1.3 < tau(ours) < 3.9
    assert offline_tau(drafter, bench.ends, records) == ours


def test_a_stop_token_inside_a_block(
    bench: "Bench", fit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [7, 8, 9, 10, 11]
    free = DecodeConfig(layers=bench.wiring.layers, max_new_tokens=NEW)
    record = greedy(bench.target, prompt, free)
    stop = int(record.tokens[20])
    drafter = bench.drafter(("full_attention", "full_attention"))
    fit(drafter, bench.ends, [record], 30)
    model = bench.zlab(drafter)
    package: Any = bench.bring("dflash.model")
    monkeypatch.setattr(package, "_cuda_time", time.perf_counter)
    config = DecodeConfig(layers=bench.wiring.layers, max_new_tokens=NEW, stop_ids=(stop,))
    (result,) = decode(bench.target, drafter, [prompt], config)
    theirs = package.dflash_generate(
        model, bench.target.model, torch.tensor([prompt]), NEW, stop_token_ids=[stop], return_stats=True
    )
    assert theirs.output_ids[0].tolist() == [*result.prompt, *result.tokens]
    assert tuple(theirs.acceptance_lengths) == result.acceptance_lengths and result.tokens[-1] == stop


def test_on_the_embedded_dense_target(
    bench: "Bench", fit: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty held-out questions of the corpus, which the target answers; texts end with its end-of-turn token."""
    target = load_target(TargetSpec(model=str(find_embedded_target("dense")), dtype="float32"))
    ends, speaks = EmbeddingAndHead.of(target), cast(Any, tokenizer())
    stop: tuple[Any, ...] = (speaks.eos_token_id,)
    config = DecodeConfig(layers=(0, 2, 4), max_new_tokens=32, stop_ids=stop)
    chats = [corpus.conversation(seed, "held_out", 96)[:1] for seed in range(20)]
    options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False, "return_dict": True}
    prompts: list[Any] = [speaks.apply_chat_template(chat, **options)["input_ids"] for chat in chats]
    records = [greedy(target, prompt, config) for prompt in prompts]
    sizes = bench.drafter(("full_attention", "full_attention")).config
    drafter = Drafter(replace(sizes, hidden_size=ends.embed.shape[1]))
    fit(drafter, ends, [each for each in records if len(each.tokens) > each.prompt + 2], 300)
    folder = save_zlab(tmp_path / "zlab", drafter, TargetLayers.of(target, config.layers))
    package: Any = bench.bring("dflash.model")
    monkeypatch.setattr(package, "_cuda_time", time.perf_counter)
    model = package.DFlashDraftModel.from_pretrained(folder).eval()
    ours = decode(target, drafter, prompts, config)
    for prompt, result in zip(prompts, ours, strict=True):
        theirs = package.dflash_generate(
            model, target.model, torch.tensor([prompt]), 32, stop_token_ids=list(stop), return_stats=True
        )
        assert theirs.output_ids[0].tolist() == [*result.prompt, *result.tokens]
        assert tuple(theirs.acceptance_lengths) == result.acceptance_lengths
    assert {1, 2} <= {length for result in ours for length in result.acceptance_lengths} and 1.2 < tau(
        ours
    ) < 3.9
