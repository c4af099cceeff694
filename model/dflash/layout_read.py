"""What two checkpoint layouts say in config.json: reading. `export_layouts` writes them and tells their keys.

One meaning has several spellings, and readers differ where a file is silent. What can be read in two ways is
refused with the question to answer; `AmbiguityAnswers` takes the answer. Keys that a file leaves out because they equal
transformers' Qwen3Config defaults are filled from there, as both readers do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, RopeConfig, layer_rules
from parity.model.dflash.mask import VisibilityRule
from parity.model.training.exchange import TargetLayers

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Keys of a flat Qwen3 configuration that give a drafter's sizes."""
ZLAB_KEYS = ("target_layer_ids", "mask_token_id", "block_size")
"""What we understand inside `dflash_config`."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
    "model_type": (None, "qwen3"),
    "sample_from_anchor": (None, False),
    "norm_before_fc": (None, False),
    "fc_norm": (None, False),
    "projector_type": (None, "dflash"),
    "pure_draft_prefix_len": (None, 0),
    "shift_label": (None, False),
}
"""Keys that change what a drafter computes, with the values that leave it as ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AmbiguityAnswers:
    """What the reader of an ambiguous checkpoint knows better than its files; None where nothing is said."""

    block_size: int | None = None
    """B, the anchor included: one more than the tokens drafted."""
    mask_token_id: int | None = None
    layers: tuple[int, ...] | None = None
    """Conditioning layers as 0-based decoder layers."""
    num_target_layers: int | None = None
    layer_types: tuple[str, ...] | None = None
    """`full_attention` or `sliding_attention` for each draft layer."""
    use_sliding_window: bool | None = None
    """Whether the window of sliding layers is applied."""
    is_causal: bool | None = None
    """Whether slots see only slots up to their own, in every layer."""
    rope_theta: float | None = None
    partial_rotary: bool | None = None
    """True: only the share of each head that `partial_rotary_factor` names turns (vLLM). False: all of it
    (z-lab, SpecForge, speculators)."""
    ignore: tuple[str, ...] = ()
    """Keys to pass over though they are not understood."""


def _ask(key: str, found: str, do: str) -> ParityError:
    return ParityError(f"the meaning of {key} in config.json", found, do)


def _refuse_unknown_arithmetic(raw: Mapping[str, Any], answers: AmbiguityAnswers) -> None:
    for key, neutral in NEUTRAL.items():
        if key in raw and raw[key] not in neutral and key not in answers.ignore:
            do = f"this drafter computes something else; to pass it over, answer ignore=({key!r},)"
            raise _ask(key, f"{key}: {raw[key]!r}, which we do not compute", do)


def _one_value(name: str, spellings: Mapping[str, Any], answer: Any) -> Any:
    """The one value of a setting that may stand under several keys; the answer where there is one."""
    if answer is not None:
        return answer
    said = {key: value for key, value in spellings.items() if value is not None}
    values = list(said.values())
    if any(value != values[0] for value in values):
        found = ", ".join(f"{key}: {value!r}" for key, value in said.items())
        raise _ask(name, f"{found}; readers take either", f"answer {name}=...")
    if not said:
        raise _ask(name, f"none of {', '.join(spellings)}", f"readers would guess; answer {name}=...")
    return values[0]


def _rope(flat: Mapping[str, Any], answers: AmbiguityAnswers) -> RopeConfig:
    nested = flat.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in nested.values()):
        found = f"one rope for each of {', '.join(nested)}"
        raise _ask("rope_parameters", found, "a drafter has one rope; write it flat")
    keys = dict(flat)
    if "rope_theta" not in nested and flat.get("rope_theta") is None:
        if answers.rope_theta is None:
            found = "neither rope_parameters.rope_theta nor rope_theta"
            raise _ask("rope_theta", found, "readers would take 10000; answer rope_theta=...")
        keys["rope_theta"] = answers.rope_theta
    share = nested.get("partial_rotary_factor", flat.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        if answers.partial_rotary is None:
            found = f"partial_rotary_factor: {share}, which vLLM applies and transformers' Qwen3 rope ignores"
            do = "answer partial_rotary=True if it was trained turning that share, False if all of each head"
            raise _ask("partial_rotary_factor", found, do)
        if not answers.partial_rotary:
            keys["rope_parameters"] = {k: v for k, v in nested.items() if k != "partial_rotary_factor"}
            keys.pop("partial_rotary_factor", None)
    return RopeConfig.from_config(keys)


def _layers_seen(
    flat: Mapping[str, Any], count: int, answers: AmbiguityAnswers, causal: bool | None
) -> tuple[VisibilityRule, ...]:
    """What each draft layer sees. `causal` as in `layer_rules`."""
    types = answers.layer_types or flat.get("layer_types")
    if types is None:
        if flat.get("use_sliding_window"):
            found, do = "use_sliding_window: true and no layer_types", "answer layer_types=(...)"
            raise _ask("layer_types", found, do)
        types = ["full_attention"] * count
    if len(types) != count:
        found = f"{len(types)} layer_types, num_hidden_layers {count}"
        raise _ask("layer_types", found, "answer layer_types=(...), one for each draft layer")
    window = flat.get("sliding_window")
    if "sliding_attention" in types:
        applied = answers.use_sliding_window
        if applied is None and not flat.get("use_sliding_window"):
            found = f"sliding layers, sliding_window: {window!r}, and use_sliding_window not true"
            do = (
                "transformers then drops the window, others apply it; answer use_sliding_window=True or False"
            )
            raise _ask("sliding_window", found, do)
        if applied is False:
            rules = layer_rules(types, 1, causal)
            return tuple(VisibilityRule(causal=rule.causal) for rule in rules)
    return layer_rules(types, window, causal if answers.is_causal is None else answers.is_causal)


def _build(
    flat: Mapping[str, Any],
    answers: AmbiguityAnswers,
    *,
    block: int,
    mask: int,
    layers: int,
    causal: bool | None,
) -> tuple[DrafterConfig, Any]:
    """The drafter, and the filled Qwen3Config its sizes were taken from."""
    from transformers import Qwen3Config

    sizes: Any = Qwen3Config(**{key: flat[key] for key in SIZES if key in flat})
    if not 0 <= mask < sizes.vocab_size:
        found = f"mask_token_id: {mask}, vocab_size: {sizes.vocab_size}"
        raise _ask("mask_token_id", found, "answer mask_token_id=... with an id of the target's vocabulary")
    config = DrafterConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        conditioning=layers,
        block_size=block,
        mask_token_id=mask,
        layers=_layers_seen(flat, sizes.num_hidden_layers, answers, causal),
        rope=_rope(flat, answers),
        rms_norm_eps=sizes.rms_norm_eps,
    )
    return config, sizes


def _wiring(
    sizes: Any, layers: Sequence[int], count: int, target: str | None = None, kinds: Sequence[str] = ()
) -> TargetLayers:
    return TargetLayers(
        layers=tuple(layers),
        num_target_layers=count,
        vocab_size=sizes.vocab_size,
        target=target,
        architectures=tuple(kinds),
        max_position_embeddings=sizes.max_position_embeddings,
    )


def _zlab_ids(raw: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Every spelling of the conditioning layers, as 0-based decoder layers."""
    ids = raw.get("aux_hidden_state_layer_ids")
    return {
        "dflash_config.target_layer_ids": own.get("target_layer_ids"),
        "target_layer_ids": raw.get("target_layer_ids"),
        "aux_hidden_state_layer_ids - 1": None if ids is None else [index - 1 for index in ids],
    }


def read_zlab(raw: Mapping[str, Any], answers: AmbiguityAnswers) -> tuple[DrafterConfig, TargetLayers]:
    """A config.json in z-lab's layout. Raises ParityError with the question where it can be read in two ways."""
    own = raw.get("dflash_config") or {}
    _refuse_unknown_arithmetic({**raw, **own}, answers)
    unknown = sorted(own.keys() - set(ZLAB_KEYS) - NEUTRAL.keys() - set(answers.ignore))
    if unknown:
        found, do = f"keys {', '.join(unknown)}", f"to pass them over, answer ignore={tuple(unknown)!r}"
        raise _ask("dflash_config", found, do)

    def both(key: str, answer: Any) -> Any:
        return _one_value(key, {f"dflash_config.{key}": own.get(key), key: raw.get(key)}, answer)

    layers = _one_value("layers", _zlab_ids(raw, own), answers.layers)
    count = _one_value(
        "num_target_layers", {"num_target_layers": raw.get("num_target_layers")}, answers.num_target_layers
    )
    causal = raw.get("is_causal")
    bidirectional = raw.get("sliding_window_non_causal")  # speculators' key, in a file of z-lab's layout
    if bidirectional is not None and answers.is_causal is None and bidirectional == (causal is not False):
        found = f"is_causal: {causal!r}, sliding_window_non_causal: {bidirectional}"
        raise _ask("is_causal", found, "answer is_causal=True or False")
    config, sizes = _build(
        raw,
        answers,
        block=both("block_size", answers.block_size),
        mask=both("mask_token_id", answers.mask_token_id),
        layers=len(layers),
        causal=causal,
    )
    return config, _wiring(sizes, layers, count)


def read_speculators(
    raw: Mapping[str, Any], answers: AmbiguityAnswers, verifier_layers: int | None = None
) -> tuple[DrafterConfig, TargetLayers, int]:
    """A config.json in speculators' layout, with the size of the draft's vocabulary.

    verifier_layers: of the verifier's own config.json, where it lies on this machine; the file itself does not say
    how many layers the target has. Raises ParityError with the question where it can be read in two ways.
    """
    flat = raw.get("transformer_layer_config") or {}
    _refuse_unknown_arithmetic({**flat, **raw, "model_type": flat.get("model_type")}, answers)
    width = raw.get("target_hidden_size")
    if width not in (None, flat.get("hidden_size")):
        found = f"target_hidden_size: {width}, hidden_size: {flat.get('hidden_size')}"
        raise _ask("target_hidden_size", found, "a drafter of another width than its target is not supported")
    said = raw.get("speculators_config") or {}
    counts = {
        "num_target_layers": raw.get("num_target_layers"),
        "the verifier's num_hidden_layers": verifier_layers,
    }
    count = _one_value("num_target_layers", counts, answers.num_target_layers)
    ids = raw.get("aux_hidden_state_layer_ids")
    layers = _one_value("layers", {"aux_hidden_state_layer_ids": ids}, answers.layers)
    if answers.layers is None:
        layers = [index - 1 for index in _in_range(layers, count)]
    blocks: dict[str, Any] = {"block_size": raw.get("block_size")}
    for method in said.get("proposal_methods") or []:
        if method.get("speculative_tokens") is not None:
            blocks["speculative_tokens + 1"] = method["speculative_tokens"] + 1
    config, sizes = _build(
        flat,
        answers,
        block=_one_value("block_size", blocks, answers.block_size),
        mask=_one_value("mask_token_id", {"mask_token_id": raw.get("mask_token_id")}, answers.mask_token_id),
        layers=len(layers),
        causal=None,
    )
    if raw.get("sliding_window_non_causal") and answers.is_causal is None:
        config = _bidirectional(config)
    verifier = said.get("verifier") or {}
    wiring = _wiring(sizes, layers, count, verifier.get("name_or_path"), verifier.get("architectures") or ())
    return config, wiring, int(raw.get("draft_vocab_size") or sizes.vocab_size)


def _in_range(ids: Sequence[int], count: int) -> Sequence[int]:
    wrong = [index for index in ids if not 1 <= index < count]
    if wrong:
        found = f"{list(ids)} for a target of {count} layers; {wrong[0]} is "
        found += (
            "the embedding's output" if wrong[0] == 0 else "the last layer, before or after the final norm"
        )
        do = "speculators' ids are layer + 1; answer layers=(...) with 0-based decoder layers below the last"
        raise _ask("aux_hidden_state_layer_ids", found, do)
    return ids


def _bidirectional(config: DrafterConfig) -> DrafterConfig:
    return replace(config, layers=tuple(replace(rule, causal=False) for rule in config.layers))
