"""Visibility against plain loops, and every mask against visibility.

Run: PYTHONPATH=. python -m pytest --import-mode=importlib tests/model/dflash/test_mask.py
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from parity.model.dflash import mask as masks
from parity.model.dflash.mask import BlockLayout, VisibilityRule

RULES = [
    VisibilityRule(),
    VisibilityRule(causal=True),
    VisibilityRule(window=3),
    VisibilityRule(window=3, causal=True),
    VisibilityRule(window=1),
    VisibilityRule(window=40),
]
# name: (document of each token, position of each token, anchors)
ROWS: dict[str, tuple[list[int], list[int], list[int]]] = {
    "one document": ([0] * 12, list(range(12)), [1, 4, 5, 9]),
    "packed": ([0] * 5 + [1] * 6 + [2] * 4, [*range(5), *range(6), *range(4)], [0, 3, 5, 8, 12]),
    "positions go on over documents": ([0] * 5 + [1] * 6, list(range(11)), [2, 5, 7]),
    "padding at the end": ([0] * 6 + [-1] * 4, [*range(6), 0, 0, 0, 0], [2, 4]),
    "padding before, padded anchor": ([-1] * 3 + [0] * 6, [0, 0, 0, *range(6)], [0, 5, 7]),
    "unsorted anchors": ([0] * 8 + [1] * 8, [*range(8), *range(8)], [14, 3, 9, 6]),
}


def layout_of(name: str, block_size: int) -> BlockLayout:
    document, position, anchors = (torch.tensor(part) for part in ROWS[name])
    return masks.training_layout(position, document, anchors, block_size)


def by_loops(name: str, block_size: int, rule: VisibilityRule) -> Tensor:
    """The rules of the paper and of z-lab 0.1.0, written with token indices and no shared code."""
    document, position, anchors = ROWS[name]
    context, queries = len(document), len(anchors) * block_size
    seen = torch.zeros(queries, context + queries, dtype=torch.bool)
    for a, anchor in enumerate(anchors):
        for slot in range(block_size):
            here = position[anchor] + slot
            row = seen[a * block_size + slot]
            for token in range(anchor):
                inside = rule.window is None or here - position[token] < rule.window
                row[token] = document[token] == document[anchor] != -1 and inside
            for other in range(block_size):
                inside = rule.window is None or abs(slot - other) < rule.window
                row[context + a * block_size + other] = inside and (other <= slot or not rule.causal)
    return seen


@pytest.mark.parametrize(("name", "size", "rule"), list(product(ROWS, [2, 4], RULES)))
def test_dense_mask_is_what_loops_say(name: str, size: int, rule: VisibilityRule) -> None:
    layout = layout_of(name, size)
    assert torch.equal(masks.dense_mask(layout.blocks, layout.keys, rule), by_loops(name, size, rule))


@pytest.mark.parametrize(("name", "rule"), list(product(ROWS, RULES)))
def test_mask_mod_says_the_same(name: str, rule: VisibilityRule) -> None:
    layout = layout_of(name, 4)
    mod = masks.mask_mod(layout.blocks, layout.keys, rule)
    q, k = torch.arange(len(layout.blocks)), torch.arange(len(layout.keys))
    assert torch.equal(mod(q * 0, q * 0, q[:, None], k[None, :]), by_loops(name, 4, rule))


@pytest.mark.parametrize("rule", RULES[:4])
def test_flex_mask_holds_every_visible_pair(rule: VisibilityRule) -> None:
    from torch.nn.attention.flex_attention import create_mask

    layout = layout_of("packed", 4)
    block_mask = masks.flex_mask(layout, rule)
    expected = by_loops("packed", 4, rule)
    mod = block_mask.mask_mod
    assert torch.equal(
        create_mask(mod, 1, 1, len(layout.blocks), len(layout.keys), device="cpu")[0, 0], expected
    )
    assert block_mask.shape[-2:] == expected.shape


@pytest.mark.parametrize(("name", "rule"), list(product(ROWS, RULES)))
def test_groups_together_are_the_dense_mask(
    name: str, rule: VisibilityRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "GROUP_BLOCKS", 2)
    layout, context = layout_of(name, 4), len(ROWS[name][0])
    rebuilt = torch.zeros_like(by_loops(name, 4, rule))
    covered: list[int] = []
    for group in masks.plan_groups(layout, rule):
        rows = slice(group.first * 4, group.last * 4)
        columns = [*range(group.low, group.high), *range(context + group.first * 4, context + group.last * 4)]
        rebuilt[rows, columns] = group.mask
        covered += range(group.first, group.last)
    assert torch.equal(rebuilt, by_loops(name, 4, rule))
    assert covered == list(range(len(ROWS[name][2])))


def test_groups_shrink_to_what_their_blocks_see() -> None:
    documents, length = 4, 500
    document = torch.arange(documents).repeat_interleave(length)
    position = torch.arange(length).repeat(documents)
    anchors = torch.arange(10, documents * length, 20)
    layout = masks.training_layout(position, document, anchors, 8)
    for rule, widest in ((VisibilityRule(), length), (VisibilityRule(window=32), 32 + 16 * 20)):
        groups = masks.plan_groups(layout, rule)
        assert max(group.high - group.low for group in groups) <= widest
        assert all(group.last - group.first <= masks.GROUP_BLOCKS for group in groups)


def test_no_query_is_blind() -> None:
    for name, rule in product(ROWS, RULES):
        layout = layout_of(name, 4)
        assert masks.dense_mask(layout.blocks, layout.keys, rule).any(1).all(), (name, rule)


def test_no_context_at_all() -> None:
    none = torch.empty(0, dtype=torch.long)
    blocks = masks.block_tokens(torch.tensor([0]), torch.tensor([0]), 4)
    layout = BlockLayout(context=masks.context_tokens(none, none), blocks=blocks, block_size=4)
    (group,) = masks.plan_groups(layout, VisibilityRule())
    assert (group.low, group.high) == (0, 0)
    assert group.mask.shape == (4, 4) and group.mask.all()


def test_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window 0; a window has at least 1 token; use None for full"):
        VisibilityRule(window=0)
