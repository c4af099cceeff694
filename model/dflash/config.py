"""What a DFlash drafter is: sizes, what each layer sees, rope, and the optional reduced vocabulary.

Shapes: V vocabulary of the target, Vd reduced draft vocabulary, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.mask import VisibilityRule

FIXED_ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
"""Rope types whose frequencies do not change with the length of the sequence. The others (dynamic, longrope)
would give a block at inference other angles than it was trained with, so they are refused."""
TEXT_NEUTRAL_ROPE_KEYS = ("mrope_section", "mrope_interleaved", "type")
"""Without effect here: for text all three multi-modal positions are equal; `type` is the old `rope_type`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding; the names are those of transformers' `rope_parameters`."""

    rope_theta: float = 10_000.0
    """Base wavelength."""
    partial_rotary_factor: float = 1.0
    """Share of each head's dimensions that turn (the first ones). transformers' own Qwen3 class ignores this
    key for the default type; we and vLLM do not (speculators#613)."""
    rope_type: str = "default"
    """One of FIXED_ROPE_TYPES."""
    factor: float | None = None
    """Stretch of the context (linear, yarn, llama3, proportional)."""
    original_max_position_embeddings: int | None = None
    """Length the target was first trained for (yarn, llama3)."""
    attention_factor: float | None = None
    """yarn: scale of cos and sin."""
    beta_fast: float | None = None
    """yarn."""
    beta_slow: float | None = None
    """yarn."""
    mscale: float | None = None
    """yarn, DeepSeek variant."""
    mscale_all_dim: float | None = None
    """yarn, DeepSeek variant."""
    truncate: bool | None = None
    """yarn: whether the correction range is rounded."""
    low_freq_factor: float | None = None
    """llama3."""
    high_freq_factor: float | None = None
    """llama3."""

    def __post_init__(self) -> None:
        if self.rope_type not in FIXED_ROPE_TYPES:
            found = (
                f"rope_type {self.rope_type!r}, whose angles change with the sequence's length or is unknown"
            )
            raise ParityError("a rope for the drafter", found, f"use one of {', '.join(FIXED_ROPE_TYPES)}")
        if not 0 < self.partial_rotary_factor <= 1:
            found = f"partial_rotary_factor {self.partial_rotary_factor}"
            raise ParityError("a rope for the drafter", found, "give a share above 0 and up to 1")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read either schema of a `config.json`: `rope_parameters`, or flat `rope_theta` and `rope_scaling`.

        Where both are written they must agree: two readers of one checkpoint would otherwise differ.
        """
        flat: dict[str, Any] = dict(config.get("rope_scaling") or {})
        if "rope_type" not in flat and "type" in flat:
            flat["rope_type"] = flat["type"]
        for key in ("rope_theta", "partial_rotary_factor"):
            if config.get(key) is not None:
                flat.setdefault(key, config[key])
        nested: dict[str, Any] = dict(config.get("rope_parameters") or {})
        if nested and flat:
            differ = sorted(key for key in flat.keys() & nested.keys() if flat[key] != nested[key])
            if differ:
                found = ", ".join(f"{k}: {nested[k]!r} in rope_parameters, {flat[k]!r} flat" for k in differ)
                raise ParityError("one rope from config.json", found, "make both schemas say the same")
        return cls._from_keys({**flat, **nested})

    @classmethod
    def _from_keys(cls, keys: Mapping[str, Any]) -> "RopeConfig":
        known = {field.name for field in fields(cls)}
        unknown = sorted(keys.keys() - known - set(TEXT_NEUTRAL_ROPE_KEYS))
        if unknown:
            do = "take them out, or add them to RopeConfig if they change angles"
            raise ParityError("a rope from config.json", f"unknown keys {', '.join(unknown)}", do)
        return cls(**{key: value for key, value in keys.items() if key in known})

    def parameters(self) -> dict[str, Any]:
        """The `rope_parameters` schema; what is not set is left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """Frequencies [R / 2] in radians per token for the R turning dimensions; the scale of cos and sin.

        The default type is Su et al.'s (arXiv 2104.09864); scaled types are computed by transformers, from a
        configuration built of the same keys.
        """
        if self.rope_type == "default":
            rotated = int(head_dim * self.partial_rotary_factor)
            exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
            return 1.0 / self.rope_theta**exponents, 1.0
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = Qwen3Config(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
        config.rope_parameters = self.parameters()
        if self.original_max_position_embeddings is not None:
            longest = self.original_max_position_embeddings * (self.factor or 1.0)
            config.max_position_embeddings = int(longest)
        frequencies, scale = ROPE_INIT_FUNCTIONS[self.rope_type](config)
        return frequencies, float(scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter's sizes. Width and vocabulary are the target's, whose embedding and head it shares."""

    hidden_size: int
    """D."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides num_heads."""
    head_dim: int
    """Width of one head; even."""
    conditioning: int
    """How many conditioning layers of the target are concatenated into fc."""
    block_size: int
    """B, the clean anchor included."""
    mask_token_id: int
    """Id whose embedding fills slots 1..B-1."""
    layers: tuple[VisibilityRule, ...]
    """What each draft layer sees; its length is the number of layers."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""

    def __post_init__(self) -> None:
        if not self.layers or self.conditioning < 1 or self.block_size < 2:
            found = f"{len(self.layers)} layers, {self.conditioning} conditioning, block {self.block_size}"
            raise ParityError("a drafter", found, "give at least 1 layer, 1 conditioning layer and block 2")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            found = f"{self.num_heads} heads, {self.num_kv_heads} key-value heads, head_dim {self.head_dim}"
            raise ParityError("a drafter", found, "num_kv_heads must divide num_heads, head_dim must be even")


def layer_rules(
    layer_types: Sequence[str], sliding_window: int | None, is_causal: bool | None = None
) -> tuple[VisibilityRule, ...]:
    """Layers as z-lab's 0.1.0 reads them: sliding is causal, full bidirectional, unless `is_causal` says.

    speculators' `sliding_window_non_causal: true` is `is_causal=False` here.
    """
    rules = []
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            do = "use full_attention or sliding_attention"
            raise ParityError("layer_types of a drafter", f"{kind!r}", do)
        sliding = kind == "sliding_attention"
        if sliding and sliding_window is None:
            raise ParityError("a sliding layer", "no sliding_window", "give sliding_window in tokens")
        causal = sliding if is_causal is None else is_causal
        rules.append(VisibilityRule(window=sliding_window if sliding else None, causal=causal))
    return tuple(rules)
