"""Our exported checkpoint drafts in z-lab's own loop with the same tokens and the same accepted lengths."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from parity.model.decode import DecodeConfig, decode, greedy, offline_tau, tau

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
        assert tuple(theirs.acceptance_lengths) == result.accepted
    lengths = {length for result in ours for length in result.accepted}
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
    assert tuple(theirs.acceptance_lengths) == result.accepted and result.tokens[-1] == stop
