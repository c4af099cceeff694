"""Training files by name, each value with its source.

    training = preset("tiny")
    for row in PRESETS["dflash-paper"]: print(row.place, row.value, row.source)

What no source states is marked `NOT_STATED`; it is our choice and says nothing about the original. Everything
that a preset does not name has the default of `parity.model.recipe.config`.
"""

from dataclasses import dataclass
from typing import Any

from parity.errors import ParityError

NOT_STATED = "not stated by the source; ours"
PAPER = "arXiv 2602.06036"
SPECULATORS = "speculators 0.9.0, default"
SPECFORGE = "SpecForge 0.2.0, default"
ZLAB_8B = "z-lab/Qwen3-8B-DFlash config.json"
QWEN36 = "SpecForge configs/qwen3.6-27b-dflash.json"
OURS = "ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetValue:
    """One value of a preset."""

    place: str
    """Dotted, as in the training file."""
    value: Any
    source: str


def _rows(*rows: tuple[str, Any, str]) -> tuple[PresetValue, ...]:
    return tuple(PresetValue(place=place, value=value, source=source) for place, value, source in rows)


PRESETS: dict[str, tuple[PresetValue, ...]] = {
    "dflash-paper": _rows(
        ("recipe.target.model", "Qwen/Qwen3-8B", f"{PAPER}, one of its targets"),
        ("recipe.target.dtype", "bfloat16", NOT_STATED),
        ("recipe.conditioning.layers", [1, 9, 17, 25, 33], f"{PAPER} (uniform, 2nd to 3rd-last); {ZLAB_8B}"),
        ("recipe.conditioning.ids", "layer", ZLAB_8B),
        ("recipe.teacher", None, f"{PAPER}: trained on the tokens of the responses"),
        ("recipe.labels", "data", PAPER),
        ("recipe.noise.kind", "none", f"{PAPER} mentions none"),
        ("recipe.loss.terms", {"ce": 1.0}, PAPER),
        ("recipe.loss.weights.kind", "exp", PAPER),
        ("recipe.loss.weights.gamma", 7.0, f"{PAPER}, for block 16"),
        ("recipe.loss.reduction", "weighted_mean", NOT_STATED),
        ("recipe.block.size", 16, PAPER),
        ("recipe.block.mask_token_id", 151669, ZLAB_8B),
        ("recipe.block.anchors", 512, f"{PAPER}, of a sequence"),
        ("recipe.block.within", "bidirectional", PAPER),
        ("recipe.attention.layers", ["full"] * 5, PAPER),
        ("run.drafter", {}, f"{PAPER}: Qwen3-style layers; sizes taken from the target: {NOT_STATED}"),
        ("run.data.source", "jsonl", f"{OURS}: regenerate 800K responses of the two corpora it names"),
        ("run.data.path", "data.jsonl", OURS),
        ("run.data.length", 3072, PAPER),
        ("run.optimizer.lr", 6e-4, PAPER),
        ("run.optimizer.betas", [0.9, 0.999], f"{NOT_STATED} (AdamW's own)"),
        ("run.optimizer.weight_decay", 0.01, f"{NOT_STATED} (AdamW's own)"),
        ("run.optimizer.clip", 1.0, PAPER),
        ("run.schedule.epochs", 6, PAPER),
        ("run.schedule.warmup", 0.04, PAPER),
        ("run.schedule.min_ratio", 0.0, f"{NOT_STATED} (cosine)"),
        ("run.batch.rows", 32, NOT_STATED),
        ("run.batch.accumulate", 32, NOT_STATED),
        ("run.precision.autocast", "bfloat16", NOT_STATED),
    ),
    "speculators-0.9": _rows(
        ("recipe.target.model", "Qwen/Qwen3-8B", f"{OURS}: speculators takes any"),
        ("recipe.target.dtype", "bfloat16", SPECULATORS),
        ("recipe.conditioning.layers", [2, 18, 33], f"{SPECULATORS} for 36 layers: 2, n // 2, n - 3"),
        ("recipe.conditioning.ids", "hidden_states", SPECULATORS),
        ("recipe.teacher.state", "final", SPECULATORS),
        ("recipe.teacher.norm", "pre", f"{SPECULATORS}: the trainer applies verifier_norm"),
        ("recipe.labels", "teacher_argmax", SPECULATORS),
        ("recipe.noise.kind", "none", "speculators 0.9.0: noise transforms removed"),
        ("recipe.loss.terms", {"ce": 1.0}, SPECULATORS),
        ("recipe.loss.weights.kind", "dpace", SPECULATORS),
        ("recipe.loss.weights.alpha", 0.5, SPECULATORS),
        ("recipe.loss.reduction", "mask_mean", SPECULATORS),
        ("recipe.block.size", 8, NOT_STATED),
        ("recipe.block.mask_token_id", 151669, f"{ZLAB_8B}; speculators: as given"),
        ("recipe.block.anchors", 512, f"{SPECULATORS}, there of a packed row, here of a document"),
        ("recipe.block.partial", False, SPECULATORS),
        ("recipe.block.within", "causal", f"{SPECULATORS}: causal in sliding layers, and all slide"),
        ("recipe.attention.layers", ["sliding"] * 5, f"{SPECULATORS}: all slide; their number: {NOT_STATED}"),
        ("recipe.attention.window", 2048, f"{SPECULATORS}, there counted from the anchor, here per query"),
        ("run.drafter", {}, f"sizes taken from the target: {NOT_STATED}"),
        ("run.data.source", "hf", SPECULATORS),
        ("run.data.path", "data", OURS),
        ("run.data.length", 8192, SPECULATORS),
        ("run.states.kind", "speculators", SPECULATORS),
        ("run.states.path", "data/hidden_states", SPECULATORS),
        ("run.optimizer.lr", 6e-4, f"{PAPER}; speculators' default is Muon at 1e-3, which is not built here"),
        ("run.optimizer.weight_decay", 0.01, SPECULATORS),
        ("run.optimizer.clip", 1.0, NOT_STATED),
        ("run.schedule.epochs", 20, SPECULATORS),
        ("run.schedule.warmup", 0.01, f"{SPECULATORS}; its decay is linear, here a cosine"),
        ("run.schedule.min_ratio", 0.0, NOT_STATED),
        ("run.batch.rows", 1, SPECULATORS),
        ("run.precision.autocast", "bfloat16", SPECULATORS),
    ),
    "specforge-0.2": _rows(
        ("recipe.target.model", "Qwen/Qwen3-8B", "SpecForge 0.2.0, configs/qwen3-8b-dflash.json"),
        ("recipe.target.dtype", "bfloat16", SPECFORGE),
        ("recipe.conditioning.layers", [1, 9, 17, 25, 33], SPECFORGE),
        ("recipe.conditioning.ids", "layer", SPECFORGE),
        ("recipe.teacher", None, "SpecForge 0.2.0: DFlash does not use the last state"),
        ("recipe.labels", "data", SPECFORGE),
        ("recipe.noise.kind", "none", SPECFORGE),
        ("recipe.loss.terms", {"ce": 1.0}, SPECFORGE),
        ("recipe.loss.weights.kind", "uniform", f"{SPECFORGE} (its examples set gamma 7)"),
        ("recipe.loss.reduction", "weighted_mean", SPECFORGE),
        ("recipe.block.size", 16, "SpecForge 0.2.0, configs/qwen3-8b-dflash.json"),
        ("recipe.block.mask_token_id", 151669, SPECFORGE),
        ("recipe.block.anchors", 512, SPECFORGE),
        ("recipe.block.partial", True, SPECFORGE),
        ("recipe.block.within", "sliding_causal", SPECFORGE),
        ("recipe.attention.layers", ["full"] * 5, "SpecForge 0.2.0, configs/qwen3-8b-dflash.json"),
        ("run.drafter", {}, "sizes taken from the target, as its configuration does"),
        ("run.data.source", "jsonl", SPECFORGE),
        ("run.data.path", "data.jsonl", OURS),
        ("run.data.length", 4096, SPECFORGE),
        ("run.optimizer.lr", 1e-4, f"{SPECFORGE} (its examples set 6e-4)"),
        ("run.optimizer.clip", 0.5, f"{SPECFORGE} (its examples set 1)"),
        ("run.schedule.epochs", 6, SPECFORGE),
        ("run.schedule.warmup", 0.015, f"{SPECFORGE} (its examples set .04)"),
        ("run.schedule.min_ratio", 0.0, NOT_STATED),
        ("run.batch.rows", 1, NOT_STATED),
        ("run.precision.autocast", "bfloat16", "SpecForge: bf16 with fp32 masters in the optimizer"),
    ),
    "qwen3.6-27b": _rows(
        ("recipe.target.model", "Qwen/Qwen3.6-27B", QWEN36),
        ("recipe.target.dtype", "bfloat16", NOT_STATED),
        ("recipe.target.backend", "fast", NOT_STATED),
        ("recipe.conditioning.layers", [1, 16, 31, 46, 61], QWEN36),
        ("recipe.conditioning.ids", "layer", QWEN36),
        ("recipe.teacher.state", "final", NOT_STATED),
        ("recipe.teacher.norm", "post", NOT_STATED),
        ("recipe.labels", "teacher_argmax", NOT_STATED),
        ("recipe.noise.kind", "none", NOT_STATED),
        ("recipe.loss.terms", {"ce": 1.0}, NOT_STATED),
        ("recipe.loss.weights.kind", "exp", NOT_STATED),
        ("recipe.loss.weights.gamma", 4.0, NOT_STATED),
        ("recipe.loss.reduction", "weighted_mean", NOT_STATED),
        ("recipe.block.size", 16, QWEN36),
        ("recipe.block.mask_token_id", 248070, QWEN36),
        ("recipe.block.anchors", 512, PAPER),
        ("recipe.block.within", "sliding_causal", "z-lab dflash 0.1.0 reads such layer types so"),
        ("recipe.attention.layers", ["sliding"] * 4 + ["full"], QWEN36),
        ("recipe.attention.window", 2048, QWEN36),
        ("run.drafter.heads", 32, QWEN36),
        ("run.drafter.kv_heads", 8, QWEN36),
        ("run.drafter.head_dim", 128, QWEN36),
        ("run.drafter.rope_theta", 1e7, QWEN36),
        ("run.drafter.partial_rotary_factor", 1.0, "SpecForge: rope_scaling null, all dimensions turn"),
        ("run.data.source", "jsonl", OURS),
        ("run.data.path", "data.jsonl", OURS),
        ("run.data.length", 3072, PAPER),
        ("run.optimizer.lr", 6e-4, PAPER),
        ("run.optimizer.clip", 1.0, PAPER),
        ("run.schedule.epochs", 6, PAPER),
        ("run.schedule.warmup", 0.04, PAPER),
        ("run.batch.rows", 32, NOT_STATED),
        ("run.batch.accumulate", 32, NOT_STATED),
        ("run.precision.autocast", "bfloat16", NOT_STATED),
    ),
    "tiny": _rows(
        ("recipe.target.model", "embedded:hybrid", OURS),
        ("recipe.target.dtype", "float32", OURS),
        ("recipe.conditioning.layers", [1, 3, 5, 7, 9], f"{OURS}, by the paper's rule: uniform, 1 to n - 3"),
        ("recipe.conditioning.ids", "layer", OURS),
        ("recipe.teacher.state", "final", OURS),
        ("recipe.teacher.norm", "post", OURS),
        ("recipe.labels", "teacher_argmax", OURS),
        ("recipe.noise.kind", "none", OURS),
        ("recipe.loss.terms", {"ce": 1.0}, PAPER),
        ("recipe.loss.weights.kind", "exp", PAPER),
        ("recipe.loss.weights.gamma", 4.0, f"{PAPER}, for block 8"),
        ("recipe.loss.reduction", "weighted_mean", OURS),
        ("recipe.block.size", 8, PAPER),
        ("recipe.block.mask_token_id", 3, "the embedded tokenizer's <|mask|>"),
        ("recipe.block.anchors", 16, f"{OURS}: more documents a step do more than more anchors of each"),
        ("recipe.attention.layers", ["full"] * 3, OURS),
        ("run.drafter.head_dim", 64, f"{OURS}: 80 steps, validation loss 1.53 against 1.82 with 32"),
        ("run.drafter.rope_theta", 200, f"{OURS}: wavelengths within a conversation, not far beyond it"),
        ("run.drafter.partial_rotary_factor", 1.0, "z-lab dflash 0.1.0 turns all of every head"),
        ("run.drafter.init_std", 0.08, f"{OURS}: about 1 / sqrt(width); .02 cost a quarter of the progress"),
        ("run.data.source", "corpus", OURS),
        (
            "run.data.documents",
            6400,
            f"{OURS}: with 3,200 validation loss stayed at .37 where training was at .23",
        ),
        ("run.data.length", 1536, f"{OURS}: about eight conversations"),
        ("run.data.document_length", 192, OURS),
        (
            "run.data.regenerate",
            64,
            f"{PAPER}: responses written by the target; without it tau stays near 1.5",
        ),
        ("run.states.keep_mib", 4096, f"{OURS}: all of them, 3.4 GiB"),
        ("run.optimizer.lr", 8e-3, f"{OURS}: best of .002, .004, .008"),
        ("run.optimizer.weight_decay", 0.01, OURS),
        ("run.schedule.steps", 400, OURS),
        ("run.schedule.warmup", 0.05, OURS),
        ("run.schedule.min_ratio", 0.02, OURS),
        ("run.batch.rows", 8, f"{OURS}: 64 conversations a step"),
        ("run.save.tau_prompts", 32, OURS),
    ),
    "unit": _rows(
        ("recipe.target.model", "synthetic:unit", OURS),
        ("recipe.target.dtype", "float32", OURS),
        ("recipe.conditioning.layers", [0, 1, 2], OURS),
        ("recipe.conditioning.ids", "layer", OURS),
        ("recipe.loss.terms", {"ce": 1.0}, OURS),
        ("recipe.loss.weights.kind", "exp", PAPER),
        ("recipe.loss.weights.gamma", 4.0, OURS),
        ("recipe.block.size", 4, OURS),
        ("recipe.block.mask_token_id", 3, "the embedded tokenizer's <|mask|>"),
        ("recipe.block.anchors", 8, OURS),
        ("recipe.attention.layers", ["full"] * 2, OURS),
        ("run.data.source", "corpus", OURS),
        ("run.data.documents", 32, OURS),
        ("run.data.validation_documents", 4, OURS),
        ("run.data.length", 160, OURS),
        ("run.data.document_length", 80, OURS),
        ("run.optimizer.lr", 1e-3, OURS),
        ("run.schedule.steps", 8, OURS),
        ("run.save.every", 4, OURS),
        ("run.save.validate_every", 4, OURS),
    ),
}
"""Name -> rows. `tiny` trains on the embedded hybrid target, `unit` is for tests (hidden 64, 2 layers)."""


def preset_data(name: str) -> dict[str, Any]:
    """The nested data of a preset. Raises ParityError for an unknown name."""
    if name not in PRESETS:
        raise ParityError(f"preset {name!r}", "no such preset", f"use one of {', '.join(PRESETS)}")
    data: dict[str, Any] = {}
    for row in PRESETS[name]:
        *parents, last = row.place.split(".")
        inner = data
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = row.value
    return data
