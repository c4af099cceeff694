"""The seam between the trainer and a family of drafters: all that trainer, checkpoints and exchange ask of it.

    family = find_family(training.recipe)
    drafter = family.new_drafter(training, parts, documents)
    output = family.new_step(training, parts, drafter).step(batch, captured)

A family is a class derived from `DrafterFamily` in a folder of its own, and one line in `parity.model.recipe.methods`.
Nothing else in parity names it. Drafting and verifying ask the network itself (`DrafterModule.new_context`).

What a family may choose: its layers and their width (`DrafterShape.hidden_size`; states and embeddings that come in,
and what goes into the target's head, have the target's width, so a narrower drafter projects at both ends), how many
tokens it drafts after an anchor, and what it remembers of a text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from torch import Tensor

from parity.errors import ParityError
from parity.model.drafting.proposer import DrafterModule, DrafterShape
from parity.model.recipe.check import nearest
from parity.model.recipe.config import Recipe, TrainingFile
from parity.model.recipe.methods import DEFAULT_METHOD, METHODS
from parity.model.training.data import Document
from parity.model.training.exchange import ExportOptions, ImportedDrafter, TargetLayers
from parity.model.training.states import SharedModules
from parity.model.training.step import RecipeStep


class DrafterFamily(ABC):
    """One kind of drafter. Its methods hold no state: everything is in what they are given."""

    layouts: Mapping[str, str] = {}
    """Layouts that `export` writes and `load` reads -> the preset that fills in what such a checkpoint does not say."""
    probed_layouts: tuple[str, ...] = ()
    """Those of them for which the export probe has readers."""

    # --- config ---------------------------------------------------------------------------------------

    @abstractmethod
    def drafter_config(self, training: TrainingFile, parts: SharedModules) -> DrafterShape:
        """The drafter's sizes by a training file, and by the target where the file leaves them open.

        Raises ParityError where neither says, and for what the recipe declares and this family does not do.
        """

    @abstractmethod
    def read_config(self, record: Mapping[str, object]) -> DrafterShape:
        """The configuration from plain data, as `dataclasses.asdict` made it for a checkpoint."""

    # --- build and train ------------------------------------------------------------------------------

    @abstractmethod
    def new_drafter(
        self, training: TrainingFile, parts: SharedModules, documents: Sequence[Document] = ()
    ) -> DrafterModule:
        """A drafter with new weights, drawn by the run's seed, on the run's device (`step.place_drafter`).

        Args:
            training: the training file.
            parts: what the drafter shares with its target.
            documents: the training data, for what is counted in it.
        """

    @abstractmethod
    def new_step(self, training: TrainingFile, parts: SharedModules, drafter: DrafterModule) -> RecipeStep:
        """The training step of a drafter. Raises ParityError for what the recipe declares and the step does not do."""

    @abstractmethod
    def restore(self, config: DrafterShape, tensors: Mapping[str, Tensor]) -> DrafterModule:
        """The drafter of a checkpoint: its configuration and its state dict, in the dtype of the tensors."""

    # --- exchange -------------------------------------------------------------------------------------

    @abstractmethod
    def export(
        self,
        drafter: DrafterModule,
        wiring: TargetLayers,
        folder: Path,
        layout: str,
        *,
        head: Callable[[], Tensor],
        options: ExportOptions,
    ) -> Path:
        """Write a drafter for other readers.

        Args:
            drafter: what is written.
            wiring: what its readers must know of the target.
            folder: where to.
            layout: one of `layouts`.
            head: gives the target's head [V, D], where a layout stores rows of it.
            options: what may be changed or replaced.

        Returns:
            The folder. Raises ParityError for what the layout cannot say.
        """

    @abstractmethod
    def load(self, folder: Path, answers: Mapping[str, object]) -> ImportedDrafter:
        """Read a checkpoint of one of the layouts.

        Args:
            folder: what `export`, or another program, wrote.
            answers: to questions that its files leave open, by name.

        Raises ParityError with the question where the files can be read in two ways, and for an unknown answer.
        """

    @abstractmethod
    def known_answers(self, drafter: DrafterModule, wiring: TargetLayers) -> Mapping[str, object]:
        """Answers with which an export of this drafter is read back without a question."""

    def export_notes(self, drafter: DrafterModule) -> tuple[str, ...]:
        """Sentences that whoever exports this drafter has to know."""
        return ()

    def training_values(self, read: ImportedDrafter, out: Path) -> dict[str, object]:
        """What an imported drafter says of its training file, by dotted place, beside the target and its layers.

        Args:
            read: the drafter.
            out: folder of the run, where files that the training file names are written.
        """
        return {}


def load_family(method: str) -> DrafterFamily:
    """The family of a name. Raises ParityError for a name that no line of `METHODS` has."""
    if method not in METHODS:
        raise ParityError(f"recipe.method: {method}", "no such family of drafters", nearest(method, METHODS))
    module, _, attribute = METHODS[method].partition(":")
    family: DrafterFamily = getattr(import_module(module), attribute)
    return family


def find_family(recipe: Recipe | None = None) -> DrafterFamily:
    """The family that a recipe names; without a recipe the default."""
    return load_family(DEFAULT_METHOD if recipe is None else recipe.method)
