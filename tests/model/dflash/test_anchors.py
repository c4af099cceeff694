"""Anchors: what they depend on, where they may stand, and what their slots are trained on.

Run: PYTHONPATH=. python -m pytest --import-mode=importlib tests/model/dflash/test_anchors.py
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.training.anchors import (
    IGNORE,
    AnchorConfig,
    AnchorCoverage,
    blocks_at,
    draw_anchors,
    random_words,
)

BLOCK = 4
PINNED_WORDS = [1698847724010054570, 15883277800842851901, 5181459167236842228]


def pack(lengths: Sequence[int], padding: int = 0, prompt: int = 0) -> tuple[Tensor, Tensor]:
    """loss_mask and document of a row; the first `prompt` tokens of each document are not supervised."""
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    mask = torch.cat([torch.arange(n) >= prompt for n in lengths] + [torch.ones(padding, dtype=torch.bool)])
    return mask, document


def draw(
    row: tuple[Tensor, Tensor], ids: Sequence[int], *, epoch: int = 0, seed: int = 7, **config: Any
) -> Tensor:
    anchors = AnchorConfig(**config)
    return draw_anchors(*row, ids, seed=seed, epoch=epoch, block_size=BLOCK, config=anchors)


def test_anchors_follow_the_sample_not_its_place() -> None:
    """The same sample gives the same anchors alone, in another row, at another place, behind padding."""
    alone = draw(pack([30]), [12], budget=5)
    mask, document = pack([9, 30, 17], padding=6)
    packed = draw((mask, document), [3, 12, 4], budget=5)
    assert torch.equal(packed[(packed >= 9) & (packed < 39)] - 9, alone)
    reordered = draw(pack([17, 30, 9]), [4, 12, 3], budget=5)
    assert torch.equal(reordered[(reordered >= 17) & (reordered < 47)] - 17, alone)


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 8}, {"ids": [13]}])
def test_anchors_change_with_seed_epoch_and_sample(change: dict[str, Any]) -> None:
    base = draw(pack([200]), [12], budget=20)
    other = draw(pack([200]), **{"ids": [12], **change}, budget=20)
    assert not torch.equal(base, other)


def test_words_are_pinned() -> None:
    """Frozen values: another numpy, machine or Python must draw the same anchors."""
    words = random_words(3, seed=1, epoch=2, sample_id=3).tolist()
    assert words == PINNED_WORDS


def test_every_bit_of_a_seed_and_a_sample_id_counts() -> None:
    big = [2**64 - 1, 2**64 - 2, 2**63, 2**63 + 1, 2**53, 2**53 + 1, 0, 1]
    drawn = {tuple(random_words(2, seed=seed, epoch=0, sample_id=5).tolist()) for seed in big}
    drawn |= {tuple(random_words(2, seed=6, epoch=0, sample_id=sample).tolist()) for sample in big}
    drawn |= {tuple(random_words(2, seed=7, epoch=epoch, sample_id=7).tolist()) for epoch in big}
    assert len(drawn) == 3 * len(big)
    negative = random_words(2, seed=-1, epoch=0, sample_id=5)
    assert negative.tolist() == random_words(2, seed=2**64 - 1, epoch=0, sample_id=5).tolist()


def test_global_generators_stay_untouched() -> None:
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # type: ignore[index]
    draw(pack([50, 60]), [1, 2])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index]
    assert before[2] == random.getstate()


def test_every_candidate_is_equally_likely() -> None:
    """5 of 20 candidates over 2,000 epochs: each token within 5 standard deviations of 500."""
    counts = torch.zeros(21)
    for epoch in range(2_000):
        counts[draw(pack([21]), [0], epoch=epoch, budget=5)] += 1
    assert counts[20] == 0
    assert (counts[:20] - 500).abs().max() < 5 * (2_000 * 0.25 * 0.75) ** 0.5


# lengths, padding, prompt, config -> the candidates (all are drawn: the budget is large)
CANDIDATES: list[tuple[list[int], int, int, dict[str, Any], list[int]]] = [
    ([6], 0, 0, {}, [0, 1, 2, 3, 4]),
    ([6], 0, 2, {}, [2, 3, 4]),
    ([6], 3, 0, {"partial": False}, [0, 1, 2]),
    ([3], 0, 0, {"partial": False}, []),
    ([3], 5, 0, {}, [0, 1]),
    ([3, 6], 0, 0, {"partial": False}, [3, 4, 5]),
    ([1, 1, 2], 0, 0, {}, [2]),
    ([4, 5], 2, 2, {}, [2, 6, 7]),
    ([5], 0, 5, {}, []),
]


@pytest.mark.parametrize(("lengths", "padding", "prompt", "config", "expected"), CANDIDATES)
def test_candidates(
    lengths: list[int], padding: int, prompt: int, config: dict[str, Any], expected: list[int]
) -> None:
    assert draw(pack(lengths, padding, prompt), list(range(len(lengths))), **config).tolist() == expected


@pytest.mark.parametrize(
    ("config", "counts"), [({"budget": 4}, [4, 2, 4]), ({"share": 0.25}, [5, 1, 10]), ({}, [20, 2, 40])]
)
def test_budget_is_per_document(config: dict[str, Any], counts: list[int]) -> None:
    anchors = draw(pack([21, 3, 41]), [5, 6, 7], **config)
    assert [
        int(((anchors >= low) & (anchors < high)).sum()) for low, high in ((0, 21), (21, 24), (24, 65))
    ] == counts
    assert torch.equal(anchors, anchors.sort().values) and len(anchors.unique()) == len(anchors)


def test_hole_in_the_loss_mask() -> None:
    mask, document = pack([9])
    mask[4] = False
    assert draw((mask, document), [0]).tolist() == [0, 1, 2, 5, 6, 7]
    tokens, anchors = torch.arange(100, 109), torch.tensor([2, 6])
    kept = blocks_at(anchors, tokens, mask, document, BLOCK)
    assert kept.labels.tolist() == [[IGNORE, 103, IGNORE, 105], [IGNORE, 107, 108, IGNORE]]
    stopped = blocks_at(anchors, tokens, mask, document, BLOCK, past_holes=False)
    assert stopped.labels.tolist() == [[IGNORE, 103, IGNORE, IGNORE], [IGNORE, 107, 108, IGNORE]]


def test_labels_stay_in_their_document() -> None:
    mask, document = pack([5, 3], padding=4)
    tokens = torch.arange(100, 112)
    blocks = blocks_at(torch.tensor([1, 3, 5, 9]), tokens, mask, document, BLOCK)
    none = IGNORE
    assert blocks.labels.tolist() == [
        [none, 102, 103, 104],
        [none, 104, none, none],
        [none, 106, 107, none],
        [none, none, none, none],
    ]
    assert torch.equal(blocks.supervised, blocks.labels != IGNORE)
    assert blocks.teacher_index[0].tolist() == [0, 1, 2, 3]
    assert blocks.index.max() < len(tokens)


def test_a_document_number_that_returns_is_not_the_same_stretch() -> None:
    document, mask = torch.tensor([0, 0, 1, 0, 0]), torch.ones(5, dtype=torch.bool)
    blocks = blocks_at(torch.tensor([0]), torch.arange(5), mask, document, BLOCK)
    assert blocks.supervised.tolist() == [[False, True, False, False]]


def test_coverage_per_sample_and_in_all() -> None:
    coverage = AnchorCoverage()
    mask, document = pack([6, 4], padding=2, prompt=1)
    assert coverage.share() == 0.0
    coverage.update(mask, document, [40, 41], torch.tensor([1, 2]))
    assert coverage.shares() == {40: 2 / 5, 41: 0.0}
    other_mask, other_document = pack([4], prompt=1)
    coverage.update(other_mask, other_document, [41], torch.tensor([1]))
    assert coverage.shares() == {40: 2 / 5, 41: 1 / 3}
    assert coverage.share() == 3 / 8


def test_coverage_reaches_all_candidates() -> None:
    row, coverage = pack([40]), AnchorCoverage()
    for epoch in range(60):
        coverage.update(*row, [9], draw(row, [9], epoch=epoch, budget=8))
    assert coverage.shares() == {9: 39 / 40}


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"share": 0.0}, {"share": 1.5}])
def test_config_says_what_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParityError, match="give a budget of at least 1 and a share above 0 and up to 1"):
        AnchorConfig(**wrong)
