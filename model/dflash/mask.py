"""Who may see whom: one definition of visibility, and every mask derived from it.

A drafter's query is a slot of a block. It may see the conditioning states of its own document strictly
before its anchor, and slots of its own block; nothing else. `visible` says so, element by element, from
what is known of the two tokens. The dense mask (sdpa, eager), flex's `mask_mod` and `BlockMask`, and the
groups of the grouped attention are all made from that one function.

Shapes: A anchors (blocks), B slots of a block, S context tokens, Q = A * B queries, K = S + A * B keys.
Keys stand in the order context, then blocks. The context rule and the block are those of DFlash (arXiv
2602.06036); sliding layers as in z-lab's dflash 0.1.0, whose window is counted per query.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING

CONTEXT = -1
"""`TokenPlaces.block` of a context token."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibilityRule:
    """What one layer's queries may see, beyond what holds for every layer."""

    window: int | None = None
    """W of a sliding layer: |query position - key position| < W; the query's own token takes one place."""
    causal: bool = False
    """Within the block: True sees slots up to its own, False sees all slots."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"asked: window {self.window}; a window has at least 1 token; use None for full")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPlaces:
    """What visibility knows of N tokens; four integer tensors of one shape."""

    position: Tensor
    """[N] absolute position in its document, the one rope uses."""
    document: Tensor
    """[N] whose text it is; PADDING is nobody's."""
    block: Tensor
    """[N] which block a slot belongs to; CONTEXT for a conditioning state."""
    slot: Tensor
    """[N] place in the block, 0 is the clean anchor; 0 for context."""

    def __len__(self) -> int:
        return len(self.position)

    def at(self, index: Any) -> "TokenPlaces":
        """The tokens at `index`: whatever a tensor accepts (`[:, None]` to broadcast, a traced scalar)."""
        return TokenPlaces(
            position=self.position[index],
            document=self.document[index],
            block=self.block[index],
            slot=self.slot[index],
        )


def visible(query: TokenPlaces, key: TokenPlaces, rule: VisibilityRule) -> Tensor:
    """THE definition: may `query` see `key`? Broadcasts; bool.

    A query is always a slot of a block, so `position - slot` is its anchor's position. A block that belongs
    to no document (a padded anchor) still sees its own slots, so that no row of a softmax is empty.
    """
    same_document = (key.document == query.document) & (key.document != PADDING)
    before_anchor = key.position < query.position - query.slot
    context = (key.block == CONTEXT) & same_document & before_anchor
    own = (key.block != CONTEXT) & (key.block == query.block)
    if rule.causal:
        own = own & (key.slot <= query.slot)
    seen = context | own
    if rule.window is not None:
        seen = seen & (key.position > query.position - rule.window)
        seen = seen & (key.position < query.position + rule.window)
    return seen


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Context and blocks of one forward pass, for training (many blocks) and drafting (few) alike."""

    context: TokenPlaces
    """S context tokens."""
    blocks: TokenPlaces
    """Q = A * B slots, block after block."""
    block_size: int
    """B."""

    @property
    def keys(self) -> TokenPlaces:
        """The K = S + A * B keys, context first."""
        pairs = ((self.context.position, self.blocks.position), (self.context.document, self.blocks.document))
        position, document = (torch.cat(pair) for pair in pairs)
        block = torch.cat((self.context.block, self.blocks.block))
        slot = torch.cat((self.context.slot, self.blocks.slot))
        return TokenPlaces(position=position, document=document, block=block, slot=slot)


def context_tokens(position: Tensor, document: Tensor) -> TokenPlaces:
    """S conditioning states from their positions [S] and documents [S]."""
    return TokenPlaces(
        position=position,
        document=document,
        block=torch.full_like(document, CONTEXT),
        slot=torch.zeros_like(position),
    )


def block_tokens(position: Tensor, document: Tensor, block_size: int) -> TokenPlaces:
    """A * B slots of blocks whose anchors stand at `position` [A] of `document` [A]."""
    slot = torch.arange(block_size, device=position.device)
    anchors = len(position)
    return TokenPlaces(
        position=(position[:, None] + slot).reshape(-1),
        document=document.repeat_interleave(block_size),
        block=torch.arange(anchors, device=position.device).repeat_interleave(block_size),
        slot=slot.repeat(anchors),
    )


def training_layout(position: Tensor, document: Tensor, anchors: Tensor, block_size: int) -> BlockLayout:
    """Blocks at the token indices `anchors` [A] of a packed row with `position` [S] and `document` [S]."""
    return BlockLayout(
        context=context_tokens(position, document),
        blocks=block_tokens(position[anchors], document[anchors], block_size),
        block_size=block_size,
    )


def dense_mask(queries: TokenPlaces, keys: TokenPlaces, rule: VisibilityRule) -> Tensor:
    """Bool [Q, K], True where visible: what sdpa and the eager reference take."""
    return visible(queries.at((slice(None), None)), keys.at((None, slice(None))), rule)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to scores: 0 where visible, minus infinity elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def mask_mod(queries: TokenPlaces, keys: TokenPlaces, rule: VisibilityRule) -> MaskMod:
    """Flex attention's `mask_mod(batch, head, query index, key index)`; batch and head do not matter."""

    def mod(batch: Tensor, head: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        del batch, head
        return visible(queries.at(q_index), keys.at(k_index), rule)

    return mod


def flex_mask(layout: BlockLayout, rule: VisibilityRule) -> Any:
    """Flex attention's `BlockMask` over Q queries and K keys. Imported late: flex loads the compiler."""
    from torch.nn.attention.flex_attention import create_block_mask

    keys = layout.keys
    mod = mask_mod(layout.blocks, keys, rule)
    device = str(keys.position.device)
    return create_block_mask(mod, None, None, len(layout.blocks), len(keys), device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Neighbouring blocks and the one span of context that any of them may see."""

    first: int
    """First block."""
    last: int
    """One past the last block."""
    low: int
    """First context token any of the blocks sees."""
    high: int
    """One past the last such token; equals `low` when they see none."""
    mask: Tensor
    """Bool [(last - first) * B, high - low + (last - first) * B]: the dense mask cut to this group."""


GROUP_BLOCKS = 16
"""Blocks of a group at most: a larger group wastes keys, a smaller one calls too often (bench_drafter.py)."""
GROUP_COST = 2_500
"""What one more group costs, in query-key pairs of 8 heads: calls and copies (bench_drafter.py)."""


def context_spans(layout: BlockLayout, rule: VisibilityRule) -> list[tuple[int, int]]:
    """Per block the context span [low, high) that holds everything any of its slots sees.

    Slot 0's row of the dense mask is enough: all slots share the anchor, and slot 0's window reaches back
    farthest.
    """
    first_slots = layout.blocks.at(slice(None, None, layout.block_size))
    seen = dense_mask(first_slots, layout.context, rule)
    if not len(layout.context):
        return [(0, 0)] * len(seen)
    low = seen.int().argmax(dim=1)
    high = seen.shape[1] - seen.flip(1).int().argmax(dim=1)
    some = seen.any(dim=1)
    return list(zip((low * some).tolist(), (high * some).tolist(), strict=True))


def plan_groups(layout: BlockLayout, rule: VisibilityRule) -> tuple[BlockGroup, ...]:
    """Cut the blocks into groups of neighbours; a group grows while that is cheaper than a new one.

    Right for any order of anchors, fast for sorted ones.
    """
    whole = (0, len(layout.context))
    if len(layout.blocks) == layout.block_size and rule.window is None:
        return (_group(layout, rule, blocks=(0, 1), span=whole),)  # a draft: its cache ends at the anchor
    spans = context_spans(layout, rule)
    groups: list[BlockGroup] = []
    first = 0
    while first < len(spans):
        (low, high), last = spans[first], first + 1
        while last < len(spans) and last - first < GROUP_BLOCKS:
            merged = _union((low, high), spans[last])
            together = _pairs(last + 1 - first, merged, layout.block_size)
            apart = _pairs(last - first, (low, high), layout.block_size)
            if together > apart + _pairs(1, spans[last], layout.block_size) + GROUP_COST:
                break
            (low, high), last = merged, last + 1
        groups.append(_group(layout, rule, blocks=(first, last), span=(low, high)))
        first = last
    return tuple(groups)


def _pairs(blocks: int, span: tuple[int, int], block_size: int) -> int:
    queries = blocks * block_size
    return queries * (span[1] - span[0] + queries)


def _union(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The span over both; an empty one does not count."""
    if a[0] == a[1] or b[0] == b[1]:
        return b if a[0] == a[1] else a
    return min(a[0], b[0]), max(a[1], b[1])


def _group(
    layout: BlockLayout, rule: VisibilityRule, *, blocks: tuple[int, int], span: tuple[int, int]
) -> BlockGroup:
    queries = layout.blocks.at(slice(blocks[0] * layout.block_size, blocks[1] * layout.block_size))
    parts = (layout.context.at(slice(*span)), queries)
    mask = torch.cat([dense_mask(queries, part, rule) for part in parts], dim=1)
    return BlockGroup(first=blocks[0], last=blocks[1], low=span[0], high=span[1], mask=mask)
