"""A watch in transformers' `Trainer`.

Trainer(model, ..., callbacks=[watch_callback(recipe, every=50, out="run")])
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from parity.model.recipe.config import Recipe
from parity.probes.adapters.base import Adapter
from parity.watching.watch import Watch, WiringChanged, watch

AdapterMaker = Callable[[Any], Adapter]
"""Makes an adapter from the Trainer's model, whose class only its user knows."""


class WatchCallback(TrainerCallback):
    """Reports at every probed step; has the Trainer save and stop where a finding fails and `on_fail` is stop."""

    def __init__(self, make_watch: Callable[[nn.Module | None, int], Watch]) -> None:
        """make_watch: from the model and the number of steps done before."""
        self._make_watch = make_watch
        self.watch: Watch | None = None
        """The watch, with its `report`; None before training begins."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Make the watch and hook the first step."""
        self.watch = self._make_watch(model, state.global_step)
        self.watch.__enter__()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Read gradients now: the Trainer clears them before the step ends."""
        if self.watch is not None:
            self.watch.gradients()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Report a probed step; save and stop where it fails."""
        if self.watch is None:
            return
        try:
            self.watch.step()
        except WiringChanged:
            control.should_save = control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Take every hook away."""
        if self.watch is not None:
            self.watch.close()


def watch_callback(
    recipe: Recipe | None = None, *, adapter: Adapter | AdapterMaker | None = None, **options: Any
) -> WatchCallback:
    """A callback that watches the model of a `Trainer`.

    Args:
        recipe: what the model is trained by.
        adapter: connects the wiring probes to the running trainer; or a function that makes one from the model,
            called when training begins.
        options: other keywords of `parity.watch`.
    """

    def make_watch(model: nn.Module | None, steps: int) -> Watch:
        own = adapter
        if callable(own) and not isinstance(own, Adapter):
            own = own(model)
        return watch(model, recipe, adapter=own, steps=steps, **options)

    return WatchCallback(make_watch)
