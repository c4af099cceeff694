"""DFlash's own part of a training step, and a new drafter by a training file.

Shapes: S tokens of a row, C conditioning layers, D width, A anchors, B slots.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.drafter import INIT_STD, Drafter
from parity.model.dflash.mask import BlockLayout, training_layout
from parity.model.drafting.proposer import DrafterModule
from parity.model.recipe.config import Recipe, RunConfig, TrainingFile
from parity.model.training.data import Batch, Document
from parity.model.training.states import SharedModules
from parity.model.training.step import RecipeStep, place_drafter
from parity.model.training.vocabulary import draft_vocab

WITHIN_RULES: dict[str, bool | None] = {"bidirectional": False, "causal": True, "sliding_causal": None}
"""`block.within` as `layer_rules` takes it."""


class TrainingStep(RecipeStep):
    """The recipe's step with DFlash's blocks."""

    def __init__(self, training: TrainingFile, parts: SharedModules, drafter: DrafterModule) -> None:
        """Raises ParityError for what a recipe can declare of other trainers and this one does not do."""
        recipe = training.recipe
        if recipe.attention.window_from != "query" or recipe.block.documents != "isolated":
            asked = f"recipe.attention.window_from: {recipe.attention.window_from}"
            asked += f", recipe.block.documents: {recipe.block.documents}"
            found = "the built-in trainer counts windows from each query and isolates documents"
            raise ParityError(asked, found, "write query and isolated, or name the trainer with --adapter")
        super().__init__(training, parts, drafter)

    def predict(self, fc_input: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
        """As `RecipeStep.predict`: all blocks of the row in one pass."""
        layout = training_layout(batch.position, batch.document, anchors, self.recipe.block.size)
        return self.draft(fc_input, self.embeddings(batch, anchors), layout)

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        """[A, B, D] what enters the head; products in bf16 where the run says so."""
        precision = self.run.precision.autocast
        on = fc_input.device.type
        with torch.autocast(on, dtype=torch.bfloat16, enabled=precision is not None):
            hidden: Tensor = self.drafter(fc_input, embeddings, layout, attention=self.run.drafter.attention)
        return hidden


def drafter_config(recipe: Recipe, run: RunConfig, parts: SharedModules) -> DrafterConfig:
    """Sizes of the drafter: the training file's, else the target's. Raises ParityError where neither says."""
    config, sizes = parts.config, run.drafter
    rope = RopeConfig.from_config(_rope_keys(config))
    if sizes.rope_theta is not None:
        rope = replace(rope, rope_theta=sizes.rope_theta)
    if sizes.partial_rotary_factor is not None:
        rope = replace(rope, partial_rotary_factor=sizes.partial_rotary_factor)
    heads = sizes.heads or _size(config, "num_attention_heads", "heads")
    hidden = parts.embed.shape[1]
    if recipe.block.mask_token_id >= len(parts.embed):
        found = f"the embedding has {len(parts.embed)} rows"
        asked = f"recipe.block.mask_token_id: {recipe.block.mask_token_id}"
        raise ParityError(asked, found, "give the id of a token that the target has and no text uses")
    types = [f"{kind}_attention" for kind in recipe.attention.layers]
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=sizes.intermediate_size or _size(config, "intermediate_size", "intermediate_size"),
        num_heads=heads,
        num_kv_heads=sizes.kv_heads or _size(config, "num_key_value_heads", "kv_heads"),
        head_dim=sizes.head_dim or getattr(config, "head_dim", None) or hidden // heads,
        conditioning=len(recipe.conditioning.layers),
        block_size=recipe.block.size,
        mask_token_id=recipe.block.mask_token_id,
        layers=layer_rules(types, recipe.attention.window, WITHIN_RULES[recipe.block.within]),
        rope=rope,
        rms_norm_eps=sizes.rms_norm_eps or getattr(config, "rms_norm_eps", None) or 1e-6,
    )


def _rope_keys(config: Any) -> dict[str, Any]:
    """The rope part of a target's configuration, whichever schema."""
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    data = config.to_dict()
    return {key: data[key] for key in keys if data.get(key) is not None}


def _size(config: Any, name: str, key: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ParityError(f"run.drafter.{key}: null", f"the target has no {name}", f"give run.drafter.{key}")
    return value


def new_drafter(training: TrainingFile, parts: SharedModules, documents: Sequence[Document] = ()) -> Drafter:
    """A drafter with new weights, drawn by the run's seed, on the run's device."""
    config = drafter_config(training.recipe, training.run, parts)
    drafter = Drafter(config, draft_vocab(training.recipe, len(parts.embed), documents))
    drafter.reset(torch.Generator().manual_seed(training.run.seed))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(training.run.drafter.init_std / INIT_STD)
    place_drafter(drafter, training)
    return drafter
