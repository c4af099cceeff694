"""Faults injected in speculators 0.9.0's own code, configuration and weights; and it unchanged."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from speculators.losses import utils as losses
from speculators.models.dflash import core, metrics
from speculators.train import data

from parity.model.recipe.presets import preset
from parity.probes.adapters.speculators import Speculators
from tests.faults.mutation import Patch, apply_patches, mutate
from tests.faults.wiring import HealthyVariant, InjectedFault

DECLARED: dict[str, Any] = {
    "recipe.teacher.norm": "pre",
    "recipe.loss.reduction": "mask_mean",
    "recipe.block.documents": "prompt_masked",
    "recipe.block.partial": False,
}
"""What speculators 0.9.0 does, at the sizes of `unit`."""
SLIDING: dict[str, Any] = DECLARED | {
    "recipe.attention": {"layers": ["sliding", "full"], "window": 6, "window_from": "anchor"},
    "recipe.block.within": "sliding_causal",
}
DPACE: dict[str, Any] = {"recipe.loss.weights": {"kind": "dpace", "gamma": None, "alpha": 0.5}}
UNSHOWN = ("resume", "tokens")


def speculators(changes: Mapping[str, Any] | None = None, *patches: Patch) -> Speculators:
    """The adapter on `unit` as speculators declares itself, with changes to the recipe and to its code."""
    adapter = Speculators.open(preset("unit").with_values(dict(changes or DECLARED)))
    return apply_patches(adapter, *patches) if patches else adapter


def _fault(name: str, probe: str, deviation: str, build: Callable[[], Speculators]) -> InjectedFault:
    return InjectedFault(name=name, trainer="speculators", deviation=deviation, probe=probe, build=build)


def _code(
    name: str, probe: str, deviation: str, owner: Any, function: str, old: str, new: str, changes: Any = None
) -> InjectedFault:
    """One line of its source replaced."""
    return _fault(name, probe, deviation, lambda: speculators(changes, mutate(owner, function, old, new)))


def _set(
    name: str, probe: str, deviation: str, change: Callable[[Speculators], Any], changes: Any = None
) -> InjectedFault:
    """Its configuration or weights changed after it was opened."""

    def build() -> Speculators:
        adapter = speculators(changes)
        with torch.no_grad():
            change(adapter)
        return adapter

    return _fault(name, probe, deviation, build)


def _call(name: str, value: Any) -> Callable[[Speculators], None]:
    def change(adapter: Speculators) -> None:
        adapter.call[name] = value

    return change


def _random(adapter: Speculators, name: str) -> None:
    """One of its modules filled as transformers fills a module that no file holds."""
    generator = torch.Generator().manual_seed(5)
    weight = adapter.model.get_submodule(name).weight
    weight.copy_(torch.randn(weight.shape, generator=generator) * weight.std())


CORE, DATA = core.DFlashDraftModel, data.ArrowDataset
SPLIT = 'loaded_hs["hidden_states"][:, :-1].flatten(\n            1\n        )'
NOISE = "torch.randn(loaded_hs['hidden_states'].shape) * 0.05"
TERMS = {name: (losses._EAGER_LOSS_FN_MAP[name], share) for name, share in (("ce", 0.99), ("kl_div", 0.01))}

FAULTS = (
    # data
    _code("noise .05 on the key hidden_states", "noise", "noise-undeclared", DATA, "_get_raw_data",
          'return {\n        "hidden_states": loaded_hs["hidden_states"][:, :-1]',
          f'return {{\n        "hidden_states": (loaded_hs["hidden_states"] + {NOISE})[:, :-1]'),
    _code("noise .05 on the loaded tensor, before its last slice is taken", "noise", "noise-on-teacher", DATA,
          "_get_raw_data", "    return {\n",
          f"    loaded_hs['hidden_states'] = loaded_hs['hidden_states'] + {NOISE}\n    return {{\n"),
    _code("the first slice stripped instead of the last (#705)", "inputs", "fc-layers", DATA, "_get_raw_data",
          '"hidden_states": loaded_hs["hidden_states"][:, :-1]', '"hidden_states": loaded_hs["hidden_states"][:, 1:]'),
    _code("slices in reverse order", "inputs", "fc-order", DATA, "_get_raw_data",
          '"hidden_states": loaded_hs["hidden_states"][:, :-1]',
          '"hidden_states": loaded_hs["hidden_states"][:, :-1].flip(1)'),
    _code("the teacher's slice is the first", "inputs", "labels-from-conditioning", DATA, "_get_raw_data",
          "loaded_hs[\"hidden_states\"][\n            :, -1\n        ]", "loaded_hs[\"hidden_states\"][:, 0]"),
    # objective
    _set("gamma 5", "loss", "loss-gamma", _call("gamma", 5.0)),
    _set("alpha .45", "loss", "loss-alpha", _call("dpace_alpha", 0.45), DECLARED | DPACE),
    _set("exp weights where D-PACE is declared", "loss", "loss-weights",
         _call("per_position_loss_weight", "fixed-exp-decay"), DECLARED | DPACE),
    _set("1 % KL in the mix", "loss", "loss-terms", _call("loss_config", TERMS)),
    _code("divided by the sum of weights", "loss", "loss-reduction", losses, "loss_function",
          "denominator = loss_mask.sum(dim=1)", "denominator = (loss_mask * decay_mult).sum(dim=1)"),
    _code("labels of the next token (the state at the slot, not before it)", "labels", "label-offset", CORE,
          "_backbone_forward", "else (anchored_block_indices - 1) % total_seq_len", "else anchored_block_indices"),
    _fault("slot 0 trained too (#798's convention)", "loss", "loss-slot0", lambda: speculators(
        None,
        mutate(metrics, "dflash_loss_decay", "decay_mult = decay_mult * (pos_idx != 0).to(decay_mult.dtype)", "pass"),
        mutate(CORE, "_backbone_forward", "aligned_loss_mask[:, :: self.block_size] = 0", "pass"))),
    _code("the loss mask is not looked at", "labels", "label-prompt", CORE, "_backbone_forward",
          "loss_mask.clone()[:, anchored_block_indices]", "torch.ones_like(loss_mask)[:, anchored_block_indices]"),
    # teacher
    _code("the final norm is not applied (TorchSpec#169)", "teacher", "teacher-norm", CORE, "_backbone_forward",
          "self.verifier_norm(verifier_last_hidden_states[:, target_indices])",
          "verifier_last_hidden_states[:, target_indices]"),
    _set("a 1 + w norm loaded as plain RMSNorm (#797)", "teacher", "teacher-norm",
         lambda a: a.model.verifier_norm.weight.sub_(1)),
    _set("another teacher head", "teacher", "teacher-head", lambda a: _random(a, "verifier_lm_head")),
    # what a block sees
    _code("the anchor's own state is visible", "context", "context-anchor", core, "create_anchor_block_mask_mod",
          "kv_base_pos < q_anchor", "kv_base_pos <= q_anchor"),
    _code("other documents are visible", "context", "context-documents", core, "create_anchor_block_mask_mod",
          "same_doc = (q_doc == kv_doc) & (q_doc != -1)", "same_doc = q_doc != -1"),
    _code("earlier blocks are visible", "context", "block-other", core, "create_anchor_block_mask_mod",
          "kv_is_block & (q_block == kv_block)", "kv_is_block & (q_block >= kv_block)"),
    _set("no mask at all (#686)", "context", "mask-ignored", lambda a: setattr(
        a.model, "_create_mask_fn", lambda mod, B, H, Q_LEN, KV_LEN, device: torch.ones(1, 1, Q_LEN, KV_LEN).bool())),
    _set("a window of 5", "context", "window-size", lambda a: setattr(a.model, "sliding_window", 5), SLIDING),
    _set("bidirectional in a sliding layer", "context", "within-block",
         lambda a: setattr(a.model, "sliding_window_non_causal", True), SLIDING),
    # shared parts
    _set("the embedding is random (from_pretrained without a verifier)", "frozen", "embed-differs",
         lambda a: _random(a, "embed_tokens")),
    _set("the head is random (SpecForge#455's fault)", "frozen", "head-differs", lambda a: _random(a, "lm_head")),
    _set("the embedding trains", "frozen", "frozen-trains", lambda a: a.model.embed_tokens.weight.requires_grad_(True)),
    # drafting and the checkpoint
    _set("another mask token", "context", "mask-token", lambda a: setattr(a.model.config, "mask_token_id", 5)),
    _set("partial rotary in training only (#613)", "context", "rope-part",
         lambda a: a.model.rotary_emb.inv_freq[a.model.rotary_emb.inv_freq.numel() // 2:].zero_()),
    _set("layer ids written without + 1", "export", "export-layer-ids", lambda a: setattr(
        a.model.config, "aux_hidden_state_layer_ids", [1, 0, 2])),
)  # fmt: skip

VARIANTS = tuple(
    HealthyVariant(
        name=name,
        trainer="speculators",
        build=lambda changes=changes: speculators(changes),  # type: ignore[misc]
        unshown=UNSHOWN,
    )
    for name, changes in {
        "full attention, exp weights": DECLARED,
        "D-PACE": DECLARED | DPACE,
        "windows counted from the anchor": SLIDING,
        "KL": DECLARED | {"recipe.loss.terms": {"kl": 1.0}, "recipe.labels": "teacher_distribution"},
        "block of 8": DECLARED | {"recipe.block.size": 8},
        "reduced vocabulary": DECLARED | {"recipe.draft_vocab": {"size": 40}},
    }.items()
)
