"""The built-in trainer as it should be: presets, losses, windows, dtypes, block sizes, packings."""

from typing import Any

from tests.faults.wiring import Healthy, builtin

VARIANTS: dict[str, dict[str, Any]] = {
    "unit": {},
    "uniform noise": {"recipe.noise": {"kind": "uniform", "std": 0.05}},
    "faint gaussian noise": {"recipe.noise": {"kind": "gaussian", "std": 0.001}},
    "float64": {"run.precision.weights": "float64", "recipe.target.dtype": "float64"},
    "block of 8, gamma 5": {"recipe.block.size": 8, "recipe.loss.weights.gamma": 5.0},
}
HEALTHY = tuple(
    Healthy(name=name, trainer="builtin", build=lambda changes=changes: builtin(changes))  # type: ignore[misc]
    for name, changes in VARIANTS.items()
)
