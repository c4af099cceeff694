"""A DFlash drafter written a second time, from the paper: what a block's hidden states should be.

    reading = DrafterHypothesis.from_recipe(recipe, configured)
    wanted = compute_hidden_states(weights, reading, row, fc_input, table)        # [A, B, D], float64

A `DrafterHypothesis` is a set of assumptions (what each layer sees, positions, rope, mask token, ...). Probes compare a
trainer's step, or its inference, with the declared hypothesis and, where they differ, with others until one agrees.
Plain tensors, one mask a layer, no code shared with `parity.model.dflash.drafter`, which this must be able to convict.

Sources: DFlash (arXiv 2602.06036) for what enters keys, values and blocks; Qwen3 for the layer (normed queries and
keys, rope over the halves of a head, grouped heads, gated MLP); speculators 0.9.0 `create_anchor_block_mask_mod` for
windows counted from the anchor.

Shapes: S tokens, A anchors, B slots, D width, F features of fc, H query heads, G key-value heads, E head width.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.model.dflash.config import DrafterConfig, RopeConfig
from parity.model.drafting.proposer import DrafterShape
from parity.model.recipe.config import Recipe
from parity.model.training.data import Batch

FLOOR_FACTORS = {torch.float64: 10.0, torch.float32: 10.0, torch.bfloat16: 4.0}
"""A difference is judged by this many times the measured rounding error of the same arithmetic, in the trainer's
precision. Ours stays at 1 to 1.5 times; other orders of summation differ more. bfloat16 hides more, so it gets less."""
LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerView:
    """What one layer's slots may see."""

    window: int | None = None
    """Tokens; None sees all of the context."""
    window_from: Literal["query", "anchor"] = "query"
    """query: fewer than `window` before the slot, which counts itself. anchor: `window` tokens before the anchor."""
    causal: bool = False
    """Within the block: only slots up to its own."""

    def __str__(self) -> str:
        kind = "full" if self.window is None else f"window {self.window} from the {self.window_from}"
        return f"{kind}, {'causal' if self.causal else 'bidirectional'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterHypothesis:
    """Everything that is assumed of a drafter beside its weights."""

    layers: tuple[LayerView, ...]
    rope: RopeConfig = RopeConfig()
    eps: float = 1e-6
    mask_token_id: int = 0
    """Of the embedding, at every slot but the anchor's."""
    until: int = 0
    """The context ends this many tokens behind the anchor: 0 is strictly before it, 1 takes the anchor's own state."""
    drop_first: int = 0
    """Tokens missing at the beginning of the context."""
    shift: int = 0
    """Added to the positions of the block, not of the context."""
    stride: int = 1
    """Positions from slot to slot."""
    scale: float = 1.0
    """Factor on the block's embeddings."""
    context_norm: bool = True
    """Whether the norm behind fc is applied."""
    rolled: int = 0
    """Slices of fc's input, rolled by this many places."""
    reversed_slices: bool = False

    @classmethod
    def from_recipe(cls, recipe: Recipe, configured: DrafterShape | None = None) -> "DrafterHypothesis":
        """What is declared.

        Args:
            recipe: the training's.
            configured: the drafter's configuration, for rope and epsilon; their usual values where None.
        """
        layers = tuple(
            LayerView(
                window=recipe.attention.window if kind == "sliding" else None,
                window_from=recipe.attention.window_from,
                causal=recipe.block.within == "causal"
                or (recipe.block.within == "sliding_causal" and kind == "sliding"),
            )
            for kind in recipe.attention.layers
        )
        reading = cls(layers=layers, mask_token_id=recipe.block.mask_token_id)
        if not isinstance(configured, DrafterConfig):
            return reading
        return replace(reading, rope=configured.rope, eps=configured.rms_norm_eps)

    def with_layer(self, index: int, view: LayerView) -> "DrafterHypothesis":
        """The same with another view in layer `index`."""
        return replace(self, layers=(*self.layers[:index], view, *self.layers[index + 1 :]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrafterWeights:
    """A drafter's parameters under z-lab's names."""

    values: Mapping[str, Tensor]
    layers: int
    head_dim: int

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> "DrafterWeights | None":
        """From parameters by name; None where the names or shapes are not z-lab's."""
        layers = 0
        while f"layers.{layers}.self_attn.q_proj.weight" in parameters:
            layers += 1
        names = ["fc.weight", "hidden_norm.weight", "norm.weight"]
        names += [f"layers.{layer}.{part}.weight" for layer in range(layers) for part in LAYER_WEIGHTS]
        if not layers or any(name not in parameters for name in names):
            return None
        head_dim = len(parameters["layers.0.self_attn.q_norm.weight"])
        if any(name.endswith(".bias") for name in parameters):
            return None
        return cls(values={name: parameters[name] for name in names}, layers=layers, head_dim=head_dim)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        """The parameter `name`.weight, converted, without its graph."""
        return self.values[f"{name}.weight"].detach().to(dtype)

    @property
    def width(self) -> int:
        """D."""
        return len(self.values["norm.weight"])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRow:
    """A row and the blocks in it."""

    tokens: Tensor
    """[S]"""
    position: Tensor
    """[S] within the document."""
    document: Tensor
    """[S] number of the document, negative on padding."""
    anchors: Tensor
    """[A] token indices."""
    block: int
    """B."""

    @classmethod
    def of(cls, batch: Batch, anchors: Tensor, block: int) -> "BlockRow":
        """From a batch and its anchors [A]."""
        return cls(
            tokens=batch.tokens,
            position=batch.position,
            document=batch.document,
            anchors=anchors,
            block=block,
        )


# --- what may be seen ---------------------------------------------------------------------------------


def mask_context(view: LayerView, reading: DrafterHypothesis, row: BlockRow) -> Tensor:
    """bool [A, B, S]: which captured states each slot sees in a layer with this view.

    Args:
        view: of the layer.
        reading: where the context begins and ends.
        row: tokens and anchors.
    """
    anchor = row.position[row.anchors][:, None, None]
    slot = torch.arange(row.block)[None, :, None]
    key = row.position[None, None, :]
    document = row.document[None, None, :]
    seen = (document == row.document[row.anchors][:, None, None]) & (document >= 0)
    seen = seen & (key < anchor + reading.until) & (key >= reading.drop_first)
    if view.window is not None and view.window_from == "query":
        seen = seen & (anchor + slot - key < view.window)
    elif view.window is not None:
        seen = seen & (key >= anchor - view.window)
    return seen.expand(len(row.anchors), row.block, len(row.tokens))


def mask_own_block(view: LayerView, block: int) -> Tensor:
    """bool [B, B]: which slots each slot of the same block sees."""
    query, key = torch.arange(block)[:, None], torch.arange(block)[None, :]
    seen = torch.ones(block, block, dtype=torch.bool)
    if view.causal:
        seen = key <= query
    if view.window is not None and view.window_from == "query":
        seen = seen & ((query - key).abs() < view.window)
    return seen


def compute_reach(reading: DrafterHypothesis, row: BlockRow) -> Tensor:
    """bool [A, B, S]: which captured states can move each slot's hidden state through all layers together.

    Args:
        reading: the hypothesis.
        row: tokens and anchors.
    """
    reached = torch.zeros(len(row.anchors), row.block, len(row.tokens), dtype=torch.bool)
    for view in reading.layers:
        own = mask_own_block(view, row.block).float()
        passed = torch.einsum("kj,ajs->aks", own, reached.float()) > 0
        reached = reached | passed | mask_context(view, reading, row)
    return reached


# --- the computation ----------------------------------------------------------------------------------


def compute_hidden_states(
    weights: DrafterWeights,
    reading: DrafterHypothesis,
    row: BlockRow,
    fc_input: Tensor,
    table: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    mixing: list[float] | None = None,
) -> Tensor:
    """What enters the head under a hypothesis.

    Args:
        weights: the drafter's parameters.
        reading: the hypothesis.
        row: S tokens and the A anchors in them.
        fc_input: [S, F] what enters fc.
        table: [V, D] the embedding's rows.
        dtype: of all products.
        mixing: gets the root mean square of what each layer's attention adds, layer by layer.

    Returns:
        [A, B, D] in `dtype`.
    """
    # Context: fc and its norm, one state a token.
    size, width = weights.head_dim, weights.width
    slices = fc_input.detach().to(dtype).view(len(fc_input), -1, width)
    if reading.reversed_slices:
        slices = slices.flip(1)
    context = slices.roll(reading.rolled, 1).flatten(1) @ weights.get("fc", dtype).T
    if reading.context_norm:
        context = _norm(context, weights.get("hidden_norm", dtype), reading.eps)
    # Blocks: the anchor's token, then mask tokens; and where both stand.
    ids = torch.full((len(row.anchors), row.block), reading.mask_token_id)
    ids[:, 0] = row.tokens[row.anchors]
    x = table.detach()[ids].to(dtype) * reading.scale
    slots = row.position[row.anchors][:, None] + reading.shift + reading.stride * torch.arange(row.block)
    turn_block = _angles(reading.rope, slots, size, dtype)
    turn_context = _angles(reading.rope, row.position, size, dtype)
    for layer, view in enumerate(reading.layers):

        def project(given: Tensor, part: str, layer: int = layer) -> Tensor:
            return given @ weights.get(f"layers.{layer}.{part}_proj", dtype).T

        def heads(given: Tensor, part: str) -> Tensor:
            made = project(given, f"self_attn.{part}")  # noqa: B023
            return made.view(*given.shape[:-1], -1, size)

        def norm_and_rotate(
            given: Tensor, part: str, angles: tuple[Tensor, Tensor], layer: int = layer
        ) -> Tensor:
            weight = weights.get(f"layers.{layer}.self_attn.{part}_norm", dtype)
            return _turn(_norm(heads(given, part), weight, reading.eps), angles)  # noqa: B023

        # Keys and values of the context are made from fc's output in every layer, those of the block from its states.
        normed = _norm(x, weights.get(f"layers.{layer}.input_layernorm", dtype), reading.eps)
        queries = norm_and_rotate(normed, "q", turn_block)
        keys_c, values_c = norm_and_rotate(context, "k", turn_context), heads(context, "v")
        keys_b, values_b = norm_and_rotate(normed, "k", turn_block), heads(normed, "v")
        share = queries.shape[-2] // keys_b.shape[-2]
        keys_c, values_c, keys_b, values_b = (
            part.repeat_interleave(share, dim=-2) for part in (keys_c, values_c, keys_b, values_b)
        )
        # One softmax over context and block together: [A, H, B, S + B].
        to_context = torch.einsum("akhe,she->ahks", queries, keys_c)
        scores = torch.cat((to_context, torch.einsum("akhe,ajhe->ahkj", queries, keys_b)), dim=-1)
        own = mask_own_block(view, row.block).expand(len(row.anchors), -1, -1)
        seen = torch.cat((mask_context(view, reading, row), own), dim=-1)[:, None]
        share_of = (scores * size**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
        mixed = torch.einsum("ahks,she->akhe", share_of[..., : len(row.tokens)], values_c)
        mixed = mixed + torch.einsum("ahkj,ajhe->akhe", share_of[..., len(row.tokens) :], values_b)
        added = project(mixed.flatten(-2), "self_attn.o")
        if mixing is not None:
            mixing.append(float(added.double().square().mean().sqrt()))
        x = x + added
        # The gated MLP.
        normed = _norm(x, weights.get(f"layers.{layer}.post_attention_layernorm", dtype), reading.eps)
        x = x + project(F.silu(project(normed, "mlp.gate")) * project(normed, "mlp.up"), "mlp.down")
    return _norm(x, weights.get("norm", dtype), reading.eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of [..., D], in 32 bits at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _angles(rope: RopeConfig, position: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, R / 2] at positions [...]; R is the part of a head that turns."""
    frequencies, factor = rope.frequencies(head_dim)
    wide = torch.promote_types(dtype, torch.float32)
    angles = (position[..., None].to(wide) * frequencies.to(wide))[..., None, :]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rope of [..., H, E]: dimension i turns with i + R / 2; what is behind R stays."""
    cos, sin = angles
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


# --- judging ------------------------------------------------------------------------------------------


def measure_hidden_distance(found: Tensor, wanted: Tensor) -> float:
    """Largest over slots of |found - wanted| / |wanted|, both [..., D]; inf where one is not finite."""
    found, wanted = found.detach().double(), wanted.detach().double()
    apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(apart.max()) if bool(apart.isfinite().all()) else math.inf


def estimate_hidden_limit(
    weights: DrafterWeights,
    reading: DrafterHypothesis,
    row: BlockRow,
    fc_input: Tensor,
    table: Tensor,
    precision: torch.dtype,
) -> float:
    """`measure_hidden_distance` up to which rounding may be the reason: `FLOOR_FACTORS` times what it makes here.

    Args:
        weights: the drafter's parameters.
        reading: the hypothesis.
        row: S tokens and the A anchors in them.
        fc_input: [S, F] what enters fc.
        table: [V, D] the embedding's rows.
        precision: dtype of the trainer's products.
    """
    if precision == torch.float64:
        return FLOOR_FACTORS[precision] * 1e-12

    def compute(dtype: torch.dtype) -> Tensor:
        return compute_hidden_states(weights, reading, row, fc_input, table, dtype=dtype)

    wanted = compute(torch.float64)
    if precision == torch.float32:
        single = measure_hidden_distance(compute(torch.float32), wanted)
        return FLOOR_FACTORS[precision] * max(single, 1e-7)
    # Wide weights are multiplied in bfloat16 by autocast, narrow ones are narrow throughout.
    if weights.values["fc.weight"].dtype == torch.float32:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = compute(torch.float32)
    else:
        rounded = compute(torch.bfloat16)
    return FLOOR_FACTORS[precision] * measure_hidden_distance(rounded, wanted)


@contextmanager
def override_parameters(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Put values into parameters for a while.

    Goes around autograd's version counters, so that graphs that were built before can still be differentiated after.

    Args:
        parameters: the trainer's own, by name.
        values: what is put into some of them.
    """
    kept = {name: parameters[name].data.clone() for name in values}
    try:
        for name, value in values.items():
            parameters[name].data.copy_(value)
        yield
    finally:
        for name, value in kept.items():
            parameters[name].data.copy_(value)
