"""What two checkpoint layouts say in config.json: writing. `export_reading` is the way back.

    z-lab (SpecForge writes the same)   flat Qwen3 keys, `dflash_config`; layer ids count decoder layers from 0
    speculators 0.9.0                   `transformer_layer_config` inside; layer ids are layer + 1

Nothing is left to a reader's default that differs between readers: rope stands in both schemas, the block size
beside and inside `dflash_config`, the window with the flag without which Qwen3Config drops it.

Sources: dflash 0.1.0 model.py (`_draft_value`, `Qwen3DFlashAttention`), speculators 0.9.0
models/dflash/{config,core,attention}.py and convert/dflash/converter.py, SpecForge 0.2.0 export/checkpoint_io.py.
"""

from typing import Any

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig
from parity.model.dflash.mask import VisibilityRule
from parity.model.training.exchange import TargetLayers

SPECULATORS_VERSION = "0.9.0"


def _attention_keys(layers: tuple[VisibilityRule, ...]) -> dict[str, Any]:
    """layer_types and window keys; raises where layers have different windows."""
    windows = {rule.window for rule in layers} - {None}
    if len(windows) > 1:
        found, do = f"windows {sorted(filter(None, windows))}", "use one window for all sliding layers"
        raise ParityError("one sliding_window for a checkpoint", found, do)
    types = ["full_attention" if rule.window is None else "sliding_attention" for rule in layers]
    return {
        "layer_types": types,
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": "sliding_attention" in types,  # Qwen3Config drops the window without it
    }


def _causal(layers: tuple[VisibilityRule, ...], *, sliding: bool) -> bool | None:
    """Whether full (or sliding) layers are causal; None where there are none. Raises where they differ."""
    flags = {rule.causal for rule in layers if (rule.window is not None) == sliding}
    if len(flags) > 1:
        found = f"{'sliding' if sliding else 'full'} layers of both kinds"
        raise ParityError("one causal flag for a checkpoint", found, "no layout can say this")
    return flags.pop() if flags else None


def _flat(config: DrafterConfig, wiring: TargetLayers, dtype: str) -> dict[str, Any]:
    """Qwen3 keys, with both rope schemas: each reader knows only one, so both must say the same."""
    if len(wiring.layers) != config.conditioning:
        found = f"{len(wiring.layers)} layers for a drafter that takes {config.conditioning}"
        raise ParityError("conditioning layers of a checkpoint", found, "name each slice of fc once")
    rope = config.rope.parameters()
    scaling = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
    }
    return {
        "model_type": "qwen3",
        "vocab_size": wiring.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": wiring.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **_attention_keys(config.layers),
        "rope_parameters": rope,
        "rope_theta": config.rope.rope_theta,
        "rope_scaling": None if config.rope.rope_type == "default" else scaling,
    }


def zlab_config(config: DrafterConfig, wiring: TargetLayers, dtype: str) -> dict[str, Any]:
    """config.json in z-lab's layout. Raises ParityError for what that layout cannot say."""
    full, sliding = _causal(config.layers, sliding=False), _causal(config.layers, sliding=True)
    flag: dict[str, Any] = {}
    if full or sliding is False:  # the reader's own default: sliding causal, full not
        if None not in (full, sliding) and full != sliding:
            found = f"full layers causal: {full}, sliding layers causal: {sliding}"
            raise ParityError(
                "z-lab's is_causal", found, "z-lab has one flag for both; use the same, or its default"
            )
        flag["is_causal"] = bool(full or sliding)
    return {
        "architectures": ["DFlashDraftModel"],
        **_flat(config, wiring, dtype),
        **flag,
        "block_size": config.block_size,  # readers of either age: beside and inside dflash_config
        "num_target_layers": wiring.num_target_layers,
        "dflash_config": {
            "target_layer_ids": list(wiring.layers),
            "mask_token_id": config.mask_token_id,
            "block_size": config.block_size,
        },
    }


def speculators_config(
    config: DrafterConfig, wiring: TargetLayers, dtype: str, draft_vocab: int
) -> dict[str, Any]:
    """config.json in speculators 0.9.0's layout; `draft_vocab` is the size of the draft's vocabulary."""
    if _causal(config.layers, sliding=False):
        found = "causal full-attention layers, and speculators' are always bidirectional"
        raise ParityError("a speculators checkpoint", found, "export to z-lab's layout")
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    verifier = {"name_or_path": wiring.target, "architectures": list(wiring.architectures)}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in wiring.layers],
        "num_target_layers": wiring.num_target_layers,  # ours: speculators leaves the id's range unsaid
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": _causal(config.layers, sliding=True) is False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": _flat(config, wiring, dtype),
    }
