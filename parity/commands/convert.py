"""`parity export` and `parity import`: checkpoints for other readers, and theirs for us.

    export("run", to="zlab", out="drafter")                       # SpecForge has the same layout
    export("run", to="speculators", out="drafter")
    import_("drafter", out="run", target="Qwen/Qwen3-8B")         # then: parity eval run

An export is read back before it is reported. An import that can be read in two ways is refused with the question;
`answers` takes the answer. What no checkpoint says (loss, data, optimizer) an import takes from a training file.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from parity.errors import ParityError
from parity.files import write_atomically

if TYPE_CHECKING:
    import torch

    from parity.model.drafting.proposer import DrafterModule, DrafterShape
    from parity.model.family import DrafterFamily
    from parity.model.recipe.config import TrainingFile
    from parity.model.training.exchange import ImportedDrafter, TargetLayers
    from parity.model.training.states import SharedModules


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionResult:
    """What an export or an import did."""

    out: Path
    layout: str
    """zlab or speculators: what was written, or what was read."""
    target: str
    parameters: int
    layers: tuple[int, ...]
    """Conditioning layers, 0-based decoder layers."""
    block_size: int
    mask_token_id: int
    draft_vocab: int | None
    """Tokens of a reduced vocabulary."""
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The result in plain lines of at most 80 columns where names are not longer."""
        reduced = f", {self.draft_vocab:,} draft tokens" if self.draft_vocab else ""
        said = [
            f"{self.out}: {self.parameters:,} parameters, {self.layout} layout",
            f"target {self.target}, decoder layers {', '.join(map(str, self.layers))} (0-based)",
            f"block {self.block_size} (drafts {self.block_size - 1}), mask token {self.mask_token_id}{reduced}",
            *(f"note: {note}" for note in self.notes),
        ]
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        return [line for text in said for line in textwrap.wrap(text, 80, subsequent_indent="  ", **options)]


# --- export -------------------------------------------------------------------------------------------


def export(
    checkpoint: str | Path,
    *,
    to: str,
    out: str | Path,
    which: Literal["last", "best"] = "last",
    full_vocabulary: bool = False,
    partial_rotary: bool = False,
    overwrite: bool = False,
) -> ConversionResult:
    """Write a checkpoint of ours, or a run's last or best one, in another layout; then read it back and compare.

    Args:
        checkpoint: a run's folder, or one checkpoint in it.
        to: a layout of the drafter's family.
        out: folder to write.
        which: the run's newest checkpoint, or that of the lowest validation loss.
        full_vocabulary, partial_rotary: as in `parity.model.training.exchange.ExportOptions`.
        overwrite: replace what is at `out`.

    Raises ParityError for what the layout cannot say, naming it.
    """
    from parity.model.family import find_family
    from parity.model.training import checkpoint as checkpoints
    from parity.model.training.exchange import ExportOptions

    # What is written, by which family.
    drafter, training = checkpoints.load_drafter(checkpoints.find_checkpoint(Path(checkpoint), which))
    family = find_family(training.recipe)
    if to not in family.layouts:
        raise ParityError(f"export to {to!r}", "no such layout", f"use one of {', '.join(family.layouts)}")
    wiring = wiring_of(training)
    options = ExportOptions(
        full_vocabulary=full_vocabulary, partial_rotary=partial_rotary, overwrite=overwrite
    )
    # Only a layout that stores rows of the target's head needs the target itself.
    folder = family.export(drafter, wiring, Path(out), to, head=lambda: _head(training), options=options)
    notes = _read_back(family, folder, drafter, wiring)
    return _write_converted(folder, to, drafter, wiring, notes)


def wiring_of(training: "TrainingFile") -> "TargetLayers":
    """What readers must know of the target, from its configuration alone. Raises ParityError where it has none."""
    from parity.model.training.exchange import TargetLayers

    config, architectures = _target_config(training)
    return TargetLayers(
        layers=training.recipe.conditioning.decoder_layers,
        num_target_layers=int(config.num_hidden_layers),
        vocab_size=int(config.vocab_size),
        target=training.recipe.target.model,
        architectures=architectures,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or 32_768),
    )


def _target_config(training: "TrainingFile") -> tuple[Any, tuple[str, ...]]:
    """(the target's text configuration, its architectures)."""
    from parity.model.target.spec import source
    from parity.model.training import states

    target = training.recipe.target
    if target.model.startswith("synthetic:"):
        return states.synthetic(training.with_values({"run.states": {"kind": "online"}}))[0].config, ()
    from transformers import AutoConfig

    name, options = source(target.model)
    try:
        config = AutoConfig.from_pretrained(name, revision=target.revision, **options)
    except (OSError, ValueError) as error:
        found = str(error).strip().splitlines()[0]
        raise ParityError(
            f"the configuration of {target.model}", found, "correct its name or path"
        ) from error
    return config.get_text_config(), tuple(config.architectures or ())


def _head(training: "TrainingFile") -> "torch.Tensor":
    """The target's head, for layouts that store the rows a reduced vocabulary uses."""
    from parity.model.training.states import open_target

    return open_target(training.with_values({"run.states": {"kind": "online"}}))[0].head


def _read_back(
    family: "DrafterFamily", folder: Path, drafter: "DrafterModule", wiring: "TargetLayers"
) -> tuple[str, ...]:
    """Read an export as another would. Raises AssertionError where it says something else: a fault of ours."""
    import torch

    read = family.load(folder, family.known_answers(drafter, wiring))
    assert read.drafter.config == drafter.config, (read.drafter.config, drafter.config)
    assert read.wiring.layers == wiring.layers, (read.wiring, wiring)
    # A layout without a place for the maps of a reduced vocabulary leaves them out, and nothing else.
    dropped = drafter.draft_vocab is not None and read.drafter.draft_vocab is None
    own = dict(drafter.state_dict())
    if dropped:
        own = {name: value for name, value in own.items() if name not in ("t2d", "d2t")}
    theirs = read.drafter.state_dict()
    assert own.keys() == theirs.keys(), own.keys() ^ theirs.keys()
    other = [name for name, value in own.items() if not torch.equal(value.cpu(), theirs[name].cpu())]
    assert not other, other
    notes = ["read back: the same configuration, and every weight bit for bit"]
    if dropped:
        notes.append("the maps of the reduced vocabulary are left out; readers draft over all tokens")
    return (*notes, *family.export_notes(drafter))


def _write_converted(
    out: Path, layout: str, drafter: "DrafterModule", wiring: "TargetLayers", notes: tuple[str, ...]
) -> ConversionResult:
    vocab = drafter.draft_vocab
    return ConversionResult(
        out=out,
        layout=layout,
        target=str(wiring.target),
        parameters=sum(parameter.numel() for parameter in drafter.parameters()),
        layers=wiring.layers,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
        draft_vocab=None if vocab is None else len(vocab.d2t),
        notes=notes,
    )


# --- import -------------------------------------------------------------------------------------------


def import_(
    checkpoint: str | Path,
    *,
    out: str | Path,
    target: str | None = None,
    recipe: str | Path | None = None,
    answers: Mapping[str, Any] | None = None,
) -> ConversionResult:
    """Read a checkpoint of another layout (z-lab's, SpecForge's, speculators') into a run of ours, at step 0.

    Args:
        checkpoint: its folder.
        out: a new run: `parity eval` measures it, `parity train OUT/training.yaml --out OUT` goes on from its weights.
        target: the target's name or path, where the checkpoint does not say (z-lab's never does).
        recipe: a training file for what checkpoints do not say; None takes a preset of the layout, and a note says so.
        answers: to questions of an earlier import, by name; texts are read as Python literals.

    Raises ParityError with the question where the files can be read in two ways, and where drafter and target do not
    fit.
    """
    import torch

    from parity.model.family import find_family
    from parity.model.recipe.config import dump, load_training_file
    from parity.model.recipe.presets import preset
    from parity.model.training.checkpoint import TRAINING, Checkpoints

    folder, run = Path(out), Path(checkpoint)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParityError(f"a new run in {folder}", "something is there", "name a new folder")
    # What the files say, and what they leave to a training file.
    given = None if recipe is None else load_training_file(recipe)
    family = find_family(None if given is None else given.recipe)
    read = family.load(run, answers or {})
    name = target or read.wiring.target
    if name is None:
        found, do = "the checkpoint does not name it", "give --target with its name or path"
        raise ParityError(f"the target of {run}", found, do)
    read = replace(read, wiring=replace(read.wiring, target=name))
    base = preset(family.layouts[read.layout]) if given is None else given
    training = base.with_values(
        {
            "recipe.target.model": name,
            "recipe.target.revision": None,
            "recipe.conditioning": {"layers": list(read.wiring.layers), "ids": "layer"},
            **family.training_values(read, folder.resolve()),
        }
    )
    _fits(training, family, read, run)
    # A run as it would be before its first step.
    drafter = read.drafter.to(getattr(torch, training.run.precision.weights))
    store = Checkpoints(folder)
    try:
        _write_maps(folder, drafter)
        write_atomically(folder / TRAINING, dump(training), durable=True)
        store.save(
            training,
            drafter.config,
            step=0,
            model=drafter.state_dict(),
            optimizer={"rng.torch": torch.Generator().manual_seed(training.run.seed).get_state()},
            state={"position": {"epoch": 0, "row": 0}, "best_loss": None, "seconds": 0.0, "total": 0},
        )
    finally:
        store.close()
    source = f"preset {family.layouts[read.layout]}" if recipe is None else str(recipe)
    notes = [f"loss, data and optimizer are no part of a checkpoint; they are those of {source}"]
    if read.shared:
        notes.append(f"its copies of the target's tensors were left out: {', '.join(sorted(read.shared))}")
    return _write_converted(folder, read.layout, drafter, read.wiring, tuple(notes))


def _fits(training: "TrainingFile", family: "DrafterFamily", read: "ImportedDrafter", source: Path) -> None:
    """Raises ParityError where a drafter for this target, made by this training file, would be another one."""
    from parity.model.recipe.check import check_layers

    config, _ = _target_config(training)
    # First what every drafter has to share with its target, then all that the family makes of the two.
    wiring, name = read.wiring, training.recipe.target.model
    wrong = [
        f"{what} {ours}, the target has {theirs}"
        for what, ours, theirs in (
            ("num_target_layers", wiring.num_target_layers, config.num_hidden_layers),
            ("vocab_size", wiring.vocab_size, config.vocab_size),
            ("hidden_size", _width(training, read), config.hidden_size),
        )
        if ours != theirs
    ]
    if wrong:
        raise ParityError(
            f"{source} as a drafter of {name}", "; ".join(wrong), "name the target it was made for"
        )
    check_layers(training.recipe, config.num_hidden_layers)
    made = family.drafter_config(training, _shapes(config))
    differ = _differing(made, read.drafter.config)
    if differ:
        found = f"with this target our trainer would make {'; '.join(differ)}"
        raise ParityError(
            f"{source} as a run of ours", found, "such a drafter can be read, but not trained on"
        )


def _shapes(config: Any) -> "SharedModules":
    """Parts of a target of which only shapes are known."""
    import torch

    from parity.model.training.states import SharedModules

    rows = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    shown = config if hasattr(config, "to_dict") else SimpleNamespace(**vars(config))
    return SharedModules(
        embed=rows, head=rows, norm=torch.nn.Identity(), layers=config.num_hidden_layers, config=shown
    )


def _width(training: "TrainingFile", read: "ImportedDrafter") -> int:
    """The width of the target that the drafter was made for, which is its own unless the training file names one."""
    width = read.drafter.config.hidden_size
    return width if training.run.drafter.width is None else _target_config(training)[0].hidden_size


def _differing(made: "DrafterShape", read: "DrafterShape") -> list[str]:
    return [
        f"{field.name} {getattr(made, field.name)}, not {getattr(read, field.name)}"
        for field in fields(read)
        if getattr(made, field.name) != getattr(read, field.name)
    ]


def _write_maps(folder: Path, drafter: "DrafterModule") -> None:
    """The vocabulary's maps as files, which the training file names."""
    import numpy as np

    vocab = drafter.draft_vocab
    if vocab is not None:
        np.save(folder / "t2d.npy", vocab.t2d.cpu().numpy())
        np.save(folder / "d2t.npy", vocab.d2t.cpu().numpy())
