"""What an injected wiring fault is, and a trainer to inject it into.

A fault replaces a stage of the trainer's own path (`parity.model.dflash.step.TrainingStep`), its drafter, source,
parts or data;
never what an adapter answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parity.model.dflash.step import TrainingStep
from parity.model.recipe.presets import preset
from parity.probes.adapters.base import Adapter
from parity.probes.adapters.builtin import Builtin


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """One fault in one trainer."""

    name: str
    trainer: str
    """builtin, speculators, specforge."""
    deviation: str
    """Its right name: a row of `parity.probes.deviations`."""
    probe: str
    """That has to find it."""
    build: Callable[[], Adapter]
    detection_only: bool = False
    """True where the strength is below one unit in the last place: it must be found, by whatever name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthyVariant:
    """One variant of a trainer as it should be."""

    name: str
    trainer: str
    build: Callable[[], Adapter]
    unshown: tuple[str, ...] = ()
    """Probes that have nothing to ask here and say skipped."""


def builtin(
    changes: Mapping[str, Any] | None = None,
    wiring: type[TrainingStep] = TrainingStep,
    *,
    preset_name: str = "unit",
    then: Callable[[Builtin], None] = lambda adapter: None,
) -> Builtin:
    """The built-in trainer on a preset with `changes`, its step made by `wiring`; `then` may change the rest in place
    (source, parts, drafter, data) before it is examined."""
    training = preset(preset_name).with_values(changes or {})
    adapter = Builtin.open(training)
    trainer = adapter.trainer
    if wiring is not TrainingStep:
        trainer.wiring = wiring(training, trainer.parts, trainer.drafter)
    then(adapter)
    return adapter


def inject_fault(
    probe: str,
    name: str,
    deviation: str,
    wiring: type[TrainingStep] = TrainingStep,
    changes: Mapping[str, Any] | None = None,
    then: Callable[[Builtin], None] = lambda adapter: None,
    *,
    detection_only: bool = False,
) -> InjectedFault:
    """A fault in the built-in trainer that `probe` has to name; the rest is as in `builtin`."""
    return InjectedFault(
        name=name,
        trainer="builtin",
        deviation=deviation,
        probe=probe,
        build=lambda: builtin(changes, wiring, then=then),
        detection_only=detection_only,
    )
