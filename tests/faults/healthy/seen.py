"""The built-in trainer as it should be, in what a block sees: masks, windows, blocks, dtypes, targets, vocabularies."""

from collections.abc import Callable
from typing import Any

from parity.probes.adapters.base import Adapter
from tests.faults.injected.decode import hybrid
from tests.faults.wiring import HealthyVariant, builtin

SLIDING: dict[str, Any] = {"recipe.attention": {"layers": ["sliding", "full"], "window": 6}}
ALL_SLIDE: dict[str, Any] = {"recipe.attention": {"layers": ["sliding", "sliding"], "window": 6}}
CHANGES: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]] = {
    "a sliding layer, causal": SLIDING | {"recipe.block.within": "sliding_causal"},
    "all layers slide, bidirectional": ALL_SLIDE,
    "all layers slide, causal": ALL_SLIDE | {"recipe.block.within": "causal"},
    "all layers causal": {"recipe.block.within": "causal"},
    "one layer": {"recipe.attention.layers": ["full"]},
    "a window of 1": {"recipe.attention": {"layers": ["sliding", "full"], "window": 1}},
    "a window longer than any document of the shared row": {
        "recipe.attention": {"layers": ["sliding", "sliding"], "window": 40}
    },
    "block of 2": {"recipe.block.size": 2},
    "block of 16, gamma 7": {"recipe.block.size": 16, "recipe.loss.weights.gamma": 7.0},
    "products in bfloat16": {"run.precision.autocast": "bfloat16"},
    "states in bfloat16": {"recipe.target.dtype": "bfloat16"},
    "states and products in bfloat16": {
        "recipe.target.dtype": "bfloat16",
        "run.precision.autocast": "bfloat16",
    },
    "reduced vocabulary": {"recipe.draft_vocab": {"size": 40}},
    "masks as tensors": {"run.drafter.attention": "sdpa"},
    "attention in the open": SLIDING | {"run.drafter.attention": "eager"},
    "whole blocks only": {"recipe.block.partial": False},
    "ids of hidden_states, teacher before the norm": {
        "recipe.conditioning": {"layers": [1, 2, 3], "ids": "hidden_states"},
        "recipe.teacher.norm": "pre",
    },
    "two conditioning layers, in falling order": {"recipe.conditioning.layers": [2, 0]},
    "another rope and epsilon": {"run.drafter.rope_theta": 1e6, "run.drafter.rms_norm_eps": 1e-5},
    "wide weights": {"run.drafter.init_std": 0.2},
    "thoughts dropped from the data": {"run.data.thinking": "drop"},
    "weight decay, no clipping": {"run.optimizer": {"lr": 1e-3, "weight_decay": 0.1, "clip": None}},
    "two rows a step": {"run.batch": {"rows": 2, "accumulate": 2}},
    "a random hybrid target": hybrid,
}
"""`unit` with these changes."""
EMBEDDED: dict[str, dict[str, Any]] = {
    "embedded hybrid": {"run.drafter.partial_rotary_factor": 1.0},
    "embedded dense": {"recipe.target.model": "embedded:dense", "recipe.conditioning.layers": [0, 2, 4]},
}
"""`tiny` with these changes. z-lab's package turns all of a head, so a share of it is no healthy export."""


def _unit(changes: dict[str, Any] | Callable[[], dict[str, Any]]) -> Callable[[], Adapter]:
    return lambda: builtin(changes() if callable(changes) else changes)


def _tiny(changes: dict[str, Any]) -> Callable[[], Adapter]:
    return lambda: builtin(changes, preset_name="tiny")


VARIANTS = (
    *(
        HealthyVariant(name=name, trainer="builtin", build=_unit(changes))
        for name, changes in CHANGES.items()
    ),
    *(
        HealthyVariant(name=name, trainer="builtin", build=_tiny(changes))
        for name, changes in EMBEDDED.items()
    ),
)
