"""The built-in trainer as it should be: presets, losses, windows, dtypes, block sizes, packings."""

from typing import Any

from tests.faults.wiring import HealthyVariant, builtin

CHANGES: dict[str, dict[str, Any]] = {
    "unit": {},
    "uniform noise": {"recipe.noise": {"kind": "uniform", "std": 0.05}},
    "faint gaussian noise": {"recipe.noise": {"kind": "gaussian", "std": 0.001}},
    "float64": {"run.precision.weights": "float64", "recipe.target.dtype": "float64"},
    "block of 8, gamma 5": {"recipe.block.size": 8, "recipe.loss.weights.gamma": 5.0},
}
BF16: dict[str, Any] = {"recipe.target.dtype": "bfloat16", "run.precision.autocast": "bfloat16"}
SOFT: dict[str, Any] = {"recipe.labels": "teacher_distribution"}
DPACE: dict[str, Any] = {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}}
DATA: dict[str, Any] = {"recipe.labels": "data", "recipe.teacher": None}
LOSSES: dict[str, dict[str, Any]] = {
    **{name: SOFT | {"recipe.loss.terms": {name: 1.0}} for name in ("kl", "rkl", "js", "tv", "nla", "lk")},
    "KL at temperature 2": SOFT | {"recipe.loss.terms": {"kl": 1.0}, "recipe.loss.temperature": 2.0},
    "KL times 4, CE at temperature 2": {
        "recipe.loss.terms": {"ce": 1.0, "kl": 4.0},
        "recipe.loss.temperature": 2.0,
    },
    "70 % KL, 30 % CE": {"recipe.loss.terms": {"kl": 0.7, "ce": 0.3}},
    "CE and a factor-.9 TV": {"recipe.loss.terms": {"ce": 1.0, "tv": 0.9}},
    "four terms": {"recipe.loss.terms": {"ce": 0.1, "kl": 0.2, "rkl": 0.3, "js": 0.4}},
    "data labels and KL": {"recipe.labels": "data", "recipe.loss.terms": {"ce": 0.5, "kl": 0.5}},
    "mean over trained slots": {"recipe.loss.reduction": "mask_mean"},
    "sum over samples": {"recipe.loss.reduction": "batch_mean"},
    "uniform weights": {"recipe.loss.weights": {"kind": "uniform"}},
    "D-PACE": DPACE | {"recipe.block.size": 8},
    "D-PACE, alpha 0, mean over trained slots": {
        "recipe.loss.weights": {"kind": "dpace", "alpha": 0.0},
        "recipe.loss.reduction": "mask_mean",
        "recipe.block.size": 8,
    },
    "D-PACE of TV": DPACE | SOFT | {"recipe.loss.terms": {"tv": 1.0}, "recipe.block.size": 8},
}
WIRINGS: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16, KL": BF16 | SOFT | {"recipe.loss.terms": {"kl": 1.0}},
    "bf16, D-PACE": BF16 | DPACE | {"recipe.block.size": 8},
    "autocast alone": {"run.precision.autocast": "bfloat16"},
    "gaussian noise, bf16": BF16 | {"recipe.noise": {"kind": "gaussian", "std": 0.05}},
    "uniform noise, autocast alone": {
        "run.precision.autocast": "bfloat16",
        "recipe.noise": {"kind": "uniform", "std": 0.2},
    },
    "block of 2": {"recipe.block.size": 2},
    "block of 3": {"recipe.block.size": 3},
    "block of 16, gamma 7": {"recipe.block.size": 16, "recipe.loss.weights.gamma": 7.0},
    "teacher before the norm": {"recipe.teacher.norm": "pre"},
    "teacher from a layer": {"recipe.teacher": {"state": 3, "norm": "pre"}},
    "hidden_states ids": {"recipe.conditioning": {"layers": [1, 2, 3], "ids": "hidden_states"}},
    "layers in another order": {"recipe.conditioning.layers": [2, 0, 1]},
    "reduced vocabulary": {"recipe.draft_vocab": {"size": 40}},
    "whole blocks only": {"recipe.block.partial": False},
    "nothing behind holes": {"recipe.block.past_holes": False},
    "few anchors": {"recipe.block.anchors": 2},
    "half of the candidates": {"recipe.block.share": 0.5},
    "qwen3.6-27b's wiring": {
        "recipe.block.size": 16,
        "recipe.block.within": "sliding_causal",
        "recipe.attention": {"layers": ["sliding", "full"], "window": 24},
    },
    "speculators' wiring, documents isolated": {
        **DPACE,
        "recipe.teacher.norm": "pre",
        "recipe.loss.reduction": "mask_mean",
        "recipe.block": {"size": 8, "mask_token_id": 3, "partial": False, "within": "causal"},
        "recipe.attention": {"layers": ["sliding", "sliding"], "window": 24},
    },
}
WITHOUT_TEACHER: dict[str, dict[str, Any]] = {
    "the paper's wiring": DATA | {"recipe.block.size": 16, "recipe.loss.weights.gamma": 7.0},
    "SpecForge's wiring": {
        **DATA,
        "recipe.loss.weights": {"kind": "uniform"},
        "recipe.block.within": "sliding_causal",
    },
    "reduced vocabulary, data labels": DATA | {"recipe.draft_vocab": {"size": 40}},
    "bf16, data labels": DATA | BF16,
}
WHOLE_HEADS: dict[str, Any] = {"run.drafter.partial_rotary_factor": 1.0}
"""z-lab's package turns all of a head, so that a share of it is no healthy export."""
EMBEDDED: dict[str, dict[str, Any]] = {"tiny, bf16": BF16 | WHOLE_HEADS}


def _variant(
    name: str, changes: dict[str, Any], preset_name: str = "unit", unshown: tuple[str, ...] = ()
) -> HealthyVariant:
    return HealthyVariant(
        name=name,
        trainer="builtin",
        build=lambda: builtin(changes, preset_name=preset_name),
        unshown=unshown,
    )


VARIANTS = (
    *(_variant(name, changes) for name, changes in (CHANGES | LOSSES | WIRINGS).items()),
    *(_variant(name, changes, unshown=("teacher",)) for name, changes in WITHOUT_TEACHER.items()),
    *(_variant(name, changes, preset_name="tiny") for name, changes in EMBEDDED.items()),
)
