"""The DFlash drafter (arXiv 2602.06036): a small bidirectional transformer over blocks of mask tokens.

The target's hidden states of the conditioning layers are concatenated, projected by `fc` and normed; the
result enters every draft layer as extra keys and values beside those of the block. It never becomes a query
and never passes the MLP. Embedding and head are the target's, frozen, and handed in by the caller. Layers are
Qwen3's: normed queries and keys, rope, grouped key-value heads, gated MLP. Parameter names are z-lab's
(dflash 0.1.0), so that checkpoints load into one another.

Training (`forward`) and drafting against cached keys (`extend`, `draft`) both go through `_run`. The layout
tells documents apart, so a batch is always one packed row.

Shapes: A anchors (blocks), B slots of a block, Q = A * B, S context tokens, C conditioning layers, D width,
H query heads, G key-value heads, E head width, N any number of tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parity.model.dflash.config import DrafterConfig, RopeConfig
from parity.model.dflash.mask import (
    BlockLayout,
    TokenPlaces,
    VisibilityRule,
    additive,
    block_tokens,
    context_tokens,
    dense_mask,
    flex_mask,
    plan_groups,
)
from parity.model.drafting.proposer import DraftContext, DrafterModule, at_least_fp32
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.training.anchors import block_ids
from parity.model.training.vocabulary import DraftVocab

KeysValues = tuple[Tensor, Tensor]
"""Keys and values, each [N, G, E], turned by rope."""
Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""(queries [Q, H, E], context's keys and values, blocks' keys and values) -> [Q, H, E]."""
Angles = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, R / 2], for the first R dimensions of a head."""
AttentionKind = Literal["grouped", "sdpa", "eager", "flex"]
"""grouped: sdpa per group of blocks on the keys it may see. sdpa: one dense mask. eager: the reference. flex:
FlexAttention, for CUDA (no backward on CPU)."""

INIT_STD = 0.02
"""Standard deviation of new projections, transformers' `initializer_range` for Qwen3."""


class _Normalise(torch.autograd.Function):
    """x / rms(x) * weight in one step; forward and backward take half of torch's own rms_norm on CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(at_least_fp32(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        gradient = gradient.to(scale.dtype)
        on_weight = (gradient * normed).flatten(0, -2).sum(0)
        on_normed = gradient * weight
        along = (on_normed * normed).mean(-1, keepdim=True)
        return ((on_normed - normed * along) * scale).to(normed.dtype), on_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the division in fp32 or wider, as transformers does it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Normalise.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class Rope(nn.Module):
    """Angles for absolute positions; no parameters, nothing in the state dict."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        frequencies, self.scale = rope.frequencies(head_dim)
        self.frequencies: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, position: Tensor, dtype: torch.dtype) -> Angles:
        """cos and sin for `position` [N], computed in fp32 or wider, in `dtype`."""
        wide = at_least_fp32(dtype)
        angles = position[:, None, None].to(wide) * self.frequencies.to(wide)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the first R dimensions of every head of x [N, heads, E]; dimension i pairs with i + R / 2."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if rest.shape[-1] == 0 else [*parts, rest], dim=-1)


class Attention(nn.Module):
    """Projections of one layer; who attends to what is the caller's `attend`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        width, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim)

    def keys_values(self, x: Tensor, angles: Angles) -> KeysValues:
        """Keys and values of x [N, D]: conditioning states, or a block's normed hidden states."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), angles)
        return keys, self._heads(self.v_proj(x))

    def forward(self, x: Tensor, context: KeysValues, angles: Angles, attend: Attend) -> Tensor:
        """Blocks' normed hidden states x [Q, D] -> [Q, D]."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), angles)
        seen = attend(queries, context, self.keys_values(x, angles))
        mixed: Tensor = self.o_proj(seen.flatten(1))
        return mixed


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One draft layer, for training and drafting alike."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: KeysValues, angles: Angles, attend: Attend) -> Tensor:
        """x [Q, D] -> [Q, D]; `context` from `self_attn.keys_values` of the conditioning states."""
        x = x + self.self_attn(self.input_layernorm(x), context, angles, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


@dataclass(kw_only=True, slots=True)
class ContextCache:
    """Keys and values of conditioning states, one pair a layer. Blocks are never stored in it."""

    context: TokenPlaces
    """The S cached tokens, in the order they were added; several documents may share one cache."""
    layers: list[KeysValues]
    """Per layer keys and values [S, G, E]."""

    def __len__(self) -> int:
        return len(self.context)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.context = self.context.at(slice(length))
        self.layers = [(keys[:length], values[:length]) for keys, values in self.layers]


class Drafter(DrafterModule):
    """fc, hidden_norm, layers, norm; with a reduced vocabulary also the buffers t2d and d2t."""

    def __init__(self, config: DrafterConfig, draft_vocab: DraftVocab | None = None) -> None:
        super().__init__()
        self.config: DrafterConfig = config
        width = config.hidden_size
        self.fc = nn.Linear(config.conditioning * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layers)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.rope = Rope(config.rope, config.head_dim)
        if draft_vocab is not None:
            self.t2d: Tensor
            self.d2t: Tensor
            self.register_buffer("t2d", draft_vocab.t2d)
            self.register_buffer("d2t", draft_vocab.d2t)

    @property
    def draft_vocab(self) -> DraftVocab | None:
        """The reduced vocabulary, or None where drafts are over the target's own."""
        return DraftVocab(t2d=self.t2d, d2t=self.d2t) if hasattr(self, "t2d") else None

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """New weights: projections normal with INIT_STD, norms one."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=INIT_STD, generator=generator)

    def condition(self, states: Tensor) -> Tensor:
        """Captured states [S, C * D], slices in the order of the conditioning layers -> [S, D]."""
        normed: Tensor = self.hidden_norm(self.fc(states))
        return normed

    def context_keys_values(self, states: Tensor, position: Tensor) -> Iterable[KeysValues]:
        """Layer by layer the keys and values of captured states [S, C * D] at `position` [S]."""
        conditioned = self.condition(states)
        angles = self.rope(position, conditioned.dtype)
        for layer in self._layers():
            yield layer.self_attn.keys_values(conditioned, angles)

    def forward(
        self,
        states: Tensor,
        block_embeddings: Tensor,
        layout: BlockLayout,
        *,
        attention: AttentionKind = "grouped",
    ) -> Tensor:
        """Train on many blocks of one packed row at once.

        states [S, C * D]; block_embeddings [A, B, D], the embeddings of `block_ids`; layout from
        `mask.training_layout`. Returns what enters the head, [A, B, D].
        """
        context = self.context_keys_values(states, layout.context.position)
        return self._run(block_embeddings, layout, context, attention)

    def new_cache(self) -> ContextCache:
        """An empty cache on the drafter's device."""
        weight = self.fc.weight
        none = torch.empty(0, dtype=torch.long, device=weight.device)
        empty = weight.new_empty(0, self.config.num_kv_heads, self.config.head_dim)
        return ContextCache(context=context_tokens(none, none), layers=[(empty, empty)] * len(self.layers))

    def new_context(self, ends: EmbeddingAndHead, head: Tensor) -> DraftContext:
        """As `DrafterModule.new_context`."""
        return _BlockContext(self, ends, head)

    def extend(self, cache: ContextCache, states: Tensor, position: Tensor, document: Tensor) -> None:
        """Add captured states [n, C * D] at `position` [n] of `document` [n] to the cache."""
        new = self.context_keys_values(states, position)
        cache.layers = [
            (torch.cat((keys, more_keys)), torch.cat((values, more_values)))
            for (keys, values), (more_keys, more_values) in zip(cache.layers, new, strict=True)
        ]
        cache.context = context_tokens(
            torch.cat((cache.context.position, position)), torch.cat((cache.context.document, document))
        )

    def draft(
        self,
        cache: ContextCache,
        block_embeddings: Tensor,
        position: Tensor,
        document: Tensor,
        *,
        attention: AttentionKind = "grouped",
    ) -> Tensor:
        """Draft blocks [A, B, D] whose anchors stand at `position` [A] of `document` [A]; [A, B, D].

        B may be shorter than in training, near the end of a text. The cache is only read.
        """
        size = block_embeddings.shape[1]
        blocks = block_tokens(position, document, size)
        layout = BlockLayout(context=cache.context, blocks=blocks, block_size=size)
        return self._run(block_embeddings, layout, cache.layers, attention)

    def _layers(self) -> Iterable[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def _run(
        self,
        block_embeddings: Tensor,
        layout: BlockLayout,
        context: Iterable[KeysValues],
        attention: AttentionKind,
    ) -> Tensor:
        """All layers over the blocks; `context` gives each layer's keys and values of the context."""
        x = block_embeddings.flatten(0, 1)
        angles = self.rope(layout.blocks.position, x.dtype)
        attends = prepare_attention(layout, self.config.layers, attention)
        for layer, keys_values, attend in zip(self._layers(), context, attends, strict=True):
            x = layer(x, keys_values, angles, attend)
        hidden: Tensor = self.norm(x)
        return hidden.view(block_embeddings.shape)


class _BlockContext(DraftContext):
    """Keys and values of the states, and blocks drafted from them in one pass."""

    def __init__(self, drafter: Drafter, ends: EmbeddingAndHead, head: Tensor) -> None:
        self.drafter, self.ends, self.head = drafter, ends, head
        self.cache = drafter.new_cache()

    def __len__(self) -> int:
        return len(self.cache)

    def extend(self, states: Tensor, position: Tensor, document: Tensor) -> None:
        self.drafter.extend(self.cache, states.to(self.drafter.fc.weight), position, document)

    def logits(self, anchor_ids: Tensor, position: Tensor, document: Tensor, size: int) -> Tensor:
        drafter, anchors = self.drafter, torch.arange(len(anchor_ids), device=anchor_ids.device)
        ids = block_ids(anchor_ids, anchors, size, drafter.config.mask_token_id)
        embeddings = F.embedding(ids, self.ends.embed).to(drafter.fc.weight)
        hidden = drafter.draft(self.cache, embeddings, position, document)[:, 1:]
        logits = F.linear(hidden.to(self.head), self.head)
        return logits.to(at_least_fp32(logits.dtype))


def prepare_attention(
    layout: BlockLayout, rules: tuple[VisibilityRule, ...], kind: AttentionKind
) -> list[Attend]:
    """One `Attend` a layer; layers with equal rules share it and its masks."""
    make = {"grouped": _attend_by_groups, "sdpa": _dense_sdpa, "eager": _eager, "flex": _flex}[kind]
    made = {rule: make(layout, rule) for rule in set(rules)}
    return [made[rule] for rule in rules]


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """torch's attention for [N, heads, E] tensors and a mask [Q, K], bool or additive."""
    q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
    shared = queries.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], enable_gqa=shared)
    return out[0].transpose(0, 1)


def _attend_by_groups(layout: BlockLayout, rule: VisibilityRule) -> Attend:
    """Each group of neighbouring blocks attends to its own span of context and its own slots only."""
    groups = plan_groups(layout, rule)
    sizes = [(group.last - group.first) * layout.block_size for group in groups]
    added: dict[torch.dtype, list[Tensor]] = {}  # sdpa would make these from bool masks in every layer, twice

    def attend(queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        if queries.dtype not in added:
            added[queries.dtype] = [additive(group.mask, queries.dtype) for group in groups]
        own = zip(groups, queries.split(sizes), blocks[0].split(sizes), blocks[1].split(sizes), strict=True)
        out = []
        for (group, q, own_keys, own_values), mask in zip(own, added[queries.dtype], strict=True):
            span = slice(group.low, group.high)
            keys, values = torch.cat((context[0][span], own_keys)), torch.cat((context[1][span], own_values))
            out.append(_sdpa(q, keys, values, mask))
        return torch.cat(out) if out else queries

    return attend


def _dense_sdpa(layout: BlockLayout, rule: VisibilityRule) -> Attend:
    mask = dense_mask(layout.blocks, layout.keys, rule)

    def attend(queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        keys, values = (torch.cat(pair) for pair in zip(context, blocks, strict=True))
        return _sdpa(queries, keys, values, mask)

    return attend


def _eager(layout: BlockLayout, rule: VisibilityRule) -> Attend:
    """The reference: scores, mask, softmax in fp32 or wider, weighted sum; every step in the open."""
    mask = dense_mask(layout.blocks, layout.keys, rule)

    def attend(queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        keys, values = (torch.cat(pair) for pair in zip(context, blocks, strict=True))
        share = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
        scores = torch.einsum("qhe,khe->hqk", queries, keys) * queries.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=at_least_fp32(scores.dtype))
        return torch.einsum("hqk,khe->qhe", weights.to(values.dtype), values)

    return attend


_compiled_flex: Callable[..., Tensor] | None = None


def _flex(layout: BlockLayout, rule: VisibilityRule) -> Attend:
    """FlexAttention; compiled on CUDA, where the uncompiled form would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    global _compiled_flex
    block_mask = flex_mask(layout, rule)
    run: Callable[..., Tensor] = flex_attention
    if layout.blocks.position.is_cuda:
        _compiled_flex = _compiled_flex or torch.compile(flex_attention)
        run = _compiled_flex

    def attend(queries: Tensor, context: KeysValues, blocks: KeysValues) -> Tensor:
        keys, values = (torch.cat(pair) for pair in zip(context, blocks, strict=True))
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        shared = queries.shape[1] != keys.shape[1]
        return run(q, k, v, block_mask=block_mask, enable_gqa=shared)[0].transpose(0, 1)

    return attend
