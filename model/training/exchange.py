"""Checkpoints for other readers, as far as every family has them: files on the disk, and what they say of the target.

A family's layout is a folder with config.json and model.safetensors. Nothing is ever unpickled. A folder appears whole
or not at all.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parity.errors import ParityError
from parity.files import flush_to_disk
from parity.model.drafting.proposer import DrafterModule
from parity.model.target.load import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayers:
    """What readers of a checkpoint must know of the target, beside the drafter's own sizes."""

    layers: tuple[int, ...]
    """Conditioning layers, 0-based decoder layers, in the order of fc's slices. Never the last layer: readers
    that take it from `hidden_states` get it after the final norm, those that hook the layer before it."""
    num_target_layers: int
    vocab_size: int
    """Of the target."""
    target: str | None = None
    """Name or path of the target, where it is known."""
    architectures: tuple[str, ...] = ()
    """The target's, as its config.json names them."""
    max_position_embeddings: int = 32_768
    """Longest text in tokens that the checkpoint claims."""

    def __post_init__(self) -> None:
        wrong = [layer for layer in self.layers if not 0 <= layer < self.num_target_layers - 1]
        if wrong or not self.layers:
            found = (
                f"layers {list(self.layers)} of {self.num_target_layers} (speculators' ids are one higher)"
            )
            do = f"give 0-based decoder layers from 0 to {self.num_target_layers - 2}"
            raise ParityError("conditioning layers of a checkpoint", found, do)

    @classmethod
    def of(cls, target: Target, layers: Sequence[int]) -> "TargetLayers":
        """For a loaded target."""
        config = target.config
        return cls(
            layers=tuple(layers),
            num_target_layers=len(target.layers),
            vocab_size=int(config.vocab_size),
            target=target.spec.model,
            architectures=tuple(getattr(target.model.config, "architectures", None) or ()),
            max_position_embeddings=int(config.max_position_embeddings),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImportedDrafter:
    """A drafter that was read from another layout."""

    drafter: DrafterModule
    """In the dtype of the file."""
    wiring: TargetLayers
    layout: str
    """Which of the family's layouts it was."""
    shared: dict[str, Tensor]
    """Copies of the target's tensors that the file holds, by name: to be compared with the target's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What an export may do that changes what readers compute, and whether it replaces what is there."""

    full_vocabulary: bool = False
    """Leave the maps of a reduced vocabulary out, where the layout has no place for them."""
    partial_rotary: bool = False
    """Write a rope that turns a share of each head, which some readers turn whole."""
    overwrite: bool = False


def write_layout(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], *, overwrite: bool
) -> Path:
    """Write config.json and model.safetensors into a new folder beside the wanted one, which then takes its name.

    Args:
        folder: where the checkpoint is to be.
        config: what config.json says.
        tensors: weights by name.
        overwrite: replace what is there; else ParityError is raised.
    """
    from safetensors.torch import save_file

    if folder.exists() and not overwrite:
        raise ParityError(
            f"a checkpoint in {folder}", "something is there", "name a new folder, or allow overwrite"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)  # mkdtemp's folder is for its owner only
        held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(held, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for path in fresh.iterdir():
            flush_to_disk(path)
        old = fresh.with_name(f"{fresh.name}.old")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        flush_to_disk(folder.parent)
        if old.exists():
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return folder


def read_layout_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint's folder. Raises ParityError where there is none, or no mapping."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ParityError(f"config.json in {folder}", str(error), "give a checkpoint's folder") from error
    if not isinstance(raw, dict):
        raise ParityError(f"config.json in {folder}", "no mapping", "give a checkpoint's folder")
    return raw


def read_layout_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's folder, by name. Nothing is ever unpickled. Raises ParityError for what is missing
    or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        names = [single.name]
    elif index.is_file():
        names = sorted({Path(name).name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        others = sorted(
            path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
        )
        found = f"no model.safetensors{', but ' + ', '.join(others) if others else ''}"
        raise ParityError(
            f"weights in {folder}", found, "convert them to safetensors; pickles are never loaded"
        )
    try:
        return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    except (OSError, SafetensorError) as error:
        raise ParityError(f"weights in {folder}", str(error), "the file is damaged; copy it again") from error
