"""Faults injected in SpecForge 0.2.0's own code, configuration and weights; and it unchanged, as it declares itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from specforge.algorithms.common import dflash_family_data as data
from specforge.algorithms.common import dflash_family_model as family
from specforge.modeling.draft import dflash as draft

from parity.model.recipe.presets import preset
from parity.probes.adapters.specforge import SpecForge
from tests.faults.mutation import Patch, apply_patches, mutate
from tests.faults.wiring import HealthyVariant, InjectedFault

DECLARED: dict[str, Any] = {"recipe.labels": "data", "recipe.teacher": None}
"""What SpecForge 0.2.0 does with `loss_decay_gamma: 4`, at the sizes of `unit`."""
SLIDING: dict[str, Any] = DECLARED | {
    "recipe.attention": {"layers": ["sliding", "full"], "window": 6},
    "recipe.block.within": "sliding_causal",
}
DPACE: dict[str, Any] = {
    "recipe.loss.weights": {"kind": "dpace", "gamma": None, "alpha": 0.5},
    "recipe.loss.reduction": "batch_mean",
}
UNIFORM: dict[str, Any] = {"recipe.loss.weights": {"kind": "uniform", "gamma": None}}
UNSHOWN = ("resume", "teacher", "tokens")


def specforge(changes: Mapping[str, Any] | None = None, *patches: Patch) -> SpecForge:
    """The adapter on `unit` as SpecForge declares itself, with changes to the recipe and to its code."""
    adapter = SpecForge.open(preset("unit").with_values(dict(changes or DECLARED)))
    return apply_patches(adapter, *patches) if patches else adapter


def _code(
    name: str, probe: str, deviation: str, owner: Any, function: str, old: str, new: str, changes: Any = None
) -> InjectedFault:
    """One line of its source replaced."""
    return InjectedFault(
        name=name,
        trainer="specforge",
        deviation=deviation,
        probe=probe,
        build=lambda: specforge(changes, mutate(owner, function, old, new)),
    )


def _set(
    name: str, probe: str, deviation: str, change: Callable[[SpecForge], Any], changes: Any = None
) -> InjectedFault:
    """Its configuration or weights changed after it was opened."""

    def build() -> SpecForge:
        adapter = specforge(changes)
        with torch.no_grad():
            change(adapter)
        return adapter

    return InjectedFault(name=name, trainer="specforge", deviation=deviation, probe=probe, build=build)


def _random(module: Any) -> None:
    """A module filled as transformers fills one that no file holds."""
    generator = torch.Generator().manual_seed(5)
    module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * module.weight.std())


MODEL, DRAFT = family.OnlineDFlashModel, draft.DFlashDraftModel
STATES = "return hidden_states[:max_len].unsqueeze(0)"

FAULTS = (
    # data
    _code("noise .001 on the states", "noise", "noise-undeclared", data, "_normalize_hidden_states", STATES,
          "import torch; return (hidden_states + .001 * torch.randn(hidden_states.shape))[:max_len].unsqueeze(0)"),
    _code("halves of the features exchanged", "inputs", "fc-order", data, "_normalize_hidden_states", STATES,
          "return hidden_states.roll(hidden_states.shape[1] // 3, 1)[:max_len].unsqueeze(0)"),
    _code("one slice is never filled", "inputs", "fc-dead", data, "_normalize_hidden_states", STATES,
          "import torch; keep = (torch.arange(hidden_states.shape[1]) >= hidden_states.shape[1] // 3); "
          "return (hidden_states * keep)[:max_len].unsqueeze(0)"),
    _code("states one token late", "context", "context-anchor", data, "_normalize_hidden_states", STATES,
          "return hidden_states.roll(-1, 0)[:max_len].unsqueeze(0)"),
    # objective
    _set("gamma 5", "loss", "loss-gamma", lambda a: setattr(a.model, "loss_decay_gamma", 5.0)),
    _set("no decay where gamma 4 is declared", "loss", "loss-weights",
         lambda a: setattr(a.model, "loss_decay_gamma", None)),
    _set("alpha .45", "loss", "loss-alpha", lambda a: setattr(a.model, "dpace_alpha", 0.45), DECLARED | DPACE),
    _set("D-PACE without the suffix sum", "loss", "loss-weights",
         lambda a: setattr(a.model, "loss_type", "dpace-cumulative-confidence-only"), DECLARED | DPACE),
    _code("1 % label smoothing", "loss", "loss-smoothing", MODEL, "_dflash_objective_chunk_terms",
          'reduction="none",', 'reduction="none", label_smoothing=0.01,'),
    _code("divided by the number of slots", "loss", "loss-reduction", MODEL, "_dflash_objective_chunk_terms",
          "loss_den = loss_weights.sum()", "loss_den = weight_mask.sum()"),
    _code("slot 0 trained too", "loss", "loss-slot0", MODEL, "forward", "(pos_in_block > 0)", "(pos_in_block >= 0)"),
    _code("labels of the next token (SpecForge#473)", "labels", "label-offset", MODEL, "forward",
          "torch.arange(0, self.block_size", "torch.arange(1, self.block_size + 1"),
    _code("the loss mask is looked at for padding only", "labels", "label-prompt", MODEL, "forward",
          "weight_mask = weight_mask * original_loss_mask_gathered",
          "weight_mask = weight_mask * (original_loss_mask_gathered + (target_ids > 0)).clamp(max=1)"),
    # what a block sees
    _code("the anchor's own state is visible", "context", "context-anchor", family, "create_dflash_sdpa_mask",
          "(kv_indices < anchor_expanded)", "(kv_indices <= anchor_expanded)"),
    _code("earlier blocks are visible (SpecForge#470)", "context", "block-other", family, "create_dflash_sdpa_mask",
          "is_draft & (q_block_ids == kv_block_ids)", "is_draft & (q_block_ids >= kv_block_ids)"),
    _code("a window one token longer", "context", "window-size", family, "create_dflash_sdpa_mask",
          "- (sliding_window - 1)", "- sliding_window", SLIDING),
    _code("bidirectional in a sliding layer", "context", "within-block", family, "create_dflash_sdpa_mask",
          "mask_draft & (kv_block_offsets <= q_block_offsets)", "mask_draft", SLIDING),
    # the draft model
    _set("mask token id ignored (SpecForge#604)", "context", "mask-token",
         lambda a: setattr(a.model, "mask_token_id", 0)),
    _code("the block begins with the token after its anchor", "context", "block-anchor", MODEL, "_create_noise_embed",
          "torch.gather(input_ids, 1, valid_anchor_positions)",
          "torch.gather(input_ids, 1, (valid_anchor_positions + 1).clamp(max=seq_len - 1))"),
    _code("positions one too high", "context", "block-positions", MODEL, "_create_position_ids",
          "anchor_positions.unsqueeze(-1) + offsets", "anchor_positions.unsqueeze(-1) + offsets + 1"),
    _code("hidden_norm left out in training", "context", "context-norm", DRAFT, "forward",
          "self.hidden_norm(self.fc(target_hidden))", "self.fc(target_hidden)"),
    # shared parts, anchors, checkpoint
    _set("the head is random (SpecForge#455)", "frozen", "head-differs", lambda a: _random(a.model.lm_head)),
    _set("the embedding trains", "frozen", "frozen-trains", lambda a: a.model.embed_tokens.weight.requires_grad_(True)),
    _code("anchors drawn from prompts too", "coverage", "anchors-masked", MODEL, "_sample_anchor_positions",
          "valid = (loss_mask[:, :num_candidates] > 0.5) & (", "valid = (loss_mask[:, :num_candidates] > -1) & ("),
    _set("layer ids written plus 1", "export", "export-layer-ids",
         lambda a: a.model.draft_model.config.dflash_config.update(target_layer_ids=[1, 2, 3])),
)  # fmt: skip

VARIANTS = tuple(
    HealthyVariant(
        name=name,
        trainer="specforge",
        build=lambda changes=changes: specforge(changes),  # type: ignore[misc]
        unshown=UNSHOWN,
    )
    for name, changes in {
        "exp weights": DECLARED,
        "uniform weights": DECLARED | UNIFORM,
        "D-PACE": DECLARED | DPACE,
        "sliding windows": SLIDING,
        "block of 8": DECLARED | {"recipe.block.size": 8},
    }.items()
)
