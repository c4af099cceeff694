"""Checkpoints that other readers accept: z-lab's layout (SpecForge writes the same) and speculators 0.9.0's.

    save_zlab("out", drafter, TargetLayers.of(target, layers))
    save_speculators("out", drafter, TargetLayers.of(target, layers), head=ends.head)
    drafter = load_checkpoint("out").drafter

A checkpoint is a folder with config.json and model.safetensors; the body's tensors have the same names in both
layouts. speculators adds `t2d`, `d2t` (offsets: target id = draft id + d2t[draft id]) and `lm_head.weight` for a
reduced vocabulary. Nothing is ever unpickled. A folder appears whole or not at all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.layout_read import AmbiguityAnswers, read_speculators, read_zlab
from parity.model.dflash.layout_write import speculators_config, zlab_config
from parity.model.training.exchange import (
    ImportedDrafter,
    TargetLayers,
    read_layout_config,
    read_layout_tensors,
    write_layout,
)
from parity.model.training.vocabulary import DraftVocab
from parity.reports.words import shorten_list

__all__ = [
    "AmbiguityAnswers",
    "ImportedCheckpoint",
    "TargetLayers",
    "load_checkpoint",
    "save_speculators",
    "save_zlab",
]

CheckpointLayout = Literal["zlab", "speculators"]
SHARED_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that belong to the target; some writers put a copy beside the drafter's own."""
MAPS = ("t2d", "d2t")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImportedCheckpoint(ImportedDrafter):
    """A DFlash checkpoint that was read."""

    drafter: Drafter
    """In the dtype of the file."""


def save_zlab(
    folder: str | Path,
    drafter: Drafter,
    wiring: TargetLayers,
    *,
    full_vocabulary: bool = False,
    partial_rotary: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write z-lab's layout; returns the folder.

    full_vocabulary: write a drafter with a reduced vocabulary without its maps, which this layout does not have;
    its readers then draft over the whole vocabulary. partial_rotary: write a rope that turns a share of each head,
    which vLLM does and z-lab's own package does not. Raises ParityError for what the layout cannot say.
    """
    if drafter.draft_vocab is not None and not full_vocabulary:
        do = "export to speculators' layout, or allow full_vocabulary: readers then draft over all tokens"
        raise ParityError("z-lab's layout", "a reduced draft vocabulary, for which it has no place", do)
    _check_rope(drafter.config, partial_rotary)
    tensors = {name: tensor for name, tensor in drafter.state_dict().items() if name not in MAPS}
    config = zlab_config(drafter.config, wiring, _dtype(drafter))
    return write_layout(Path(folder), config, tensors, overwrite=overwrite)


def save_speculators(
    folder: str | Path,
    drafter: Drafter,
    wiring: TargetLayers,
    *,
    head: Tensor | None = None,
    partial_rotary: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write speculators 0.9.0's layout; returns the folder.

    head: the target's, [V, D], needed with a reduced vocabulary, whose rows of it are part of the checkpoint.
    partial_rotary: as in `save_zlab`. Raises ParityError for what the layout cannot say.
    """
    _check_rope(drafter.config, partial_rotary)
    tensors, vocab, size = dict(drafter.state_dict()), drafter.draft_vocab, wiring.vocab_size
    if vocab is not None:
        if head is None or len(head) != len(vocab.t2d):
            found = "no head" if head is None else f"a head of {len(head)} rows for {len(vocab.t2d)} tokens"
            raise ParityError(
                "speculators' layout with a reduced vocabulary", found, "give the target's head"
            )
        tensors["lm_head.weight"], size = vocab.head_rows(head), len(vocab.d2t)
    config = speculators_config(drafter.config, wiring, _dtype(drafter), size)
    return write_layout(Path(folder), config, tensors, overwrite=overwrite)


def _dtype(drafter: Drafter) -> str:
    return str(drafter.fc.weight.dtype).removeprefix("torch.")


def _check_rope(config: DrafterConfig, allowed: bool) -> None:
    share = config.rope.partial_rotary_factor
    if share != 1.0 and not allowed:
        found = f"partial_rotary_factor {share}: vLLM turns that share of each head, the layout's own package all of it"
        do = "allow partial_rotary if vLLM will serve it, or train with partial_rotary_factor 1"
        raise ParityError("a checkpoint that every reader reads alike", found, do)


def load_checkpoint(folder: str | Path, answers: AmbiguityAnswers | None = None) -> ImportedCheckpoint:
    """Read a checkpoint of either layout. Raises ParityError where a file is missing or unsafe, tensors do not fit,
    or the configuration can be read in two ways (the message holds the question; `answers` takes the answer)."""
    folder, answers = Path(folder), answers or AmbiguityAnswers()
    raw, tensors = read_layout_config(folder), read_layout_tensors(folder)
    draft_vocab = None
    layout: CheckpointLayout = "speculators" if "speculators_model_type" in raw else "zlab"
    if layout == "speculators":
        kind = raw["speculators_model_type"]
        if kind != "dflash":
            raise ParityError(
                f"a DFlash drafter in {folder}", f"speculators_model_type {kind!r}", "give a dflash one"
            )
        config, wiring, size = read_speculators(raw, answers, _verifier_layers(raw))
        draft_vocab = _vocabulary(tensors, size, wiring.vocab_size)
    else:
        if "dflash_config" not in raw and "DFlashDraftModel" not in (raw.get("architectures") or ()):
            found = (
                f"neither dflash_config nor speculators_model_type; architectures {raw.get('architectures')}"
            )
            raise ParityError(
                f"a DFlash drafter in {folder}", found, "give a checkpoint of z-lab or speculators"
            )
        config, wiring = read_zlab(raw, answers)
    own = {name: tensor for name, tensor in tensors.items() if name not in (*SHARED_TENSORS, *MAPS)}
    shared = {name: tensor for name, tensor in tensors.items() if name in SHARED_TENSORS}
    drafter = _fill_weights(Drafter(config, draft_vocab), own, folder)
    return ImportedCheckpoint(drafter=drafter, wiring=wiring, layout=layout, shared=shared)


def _verifier_layers(raw: Mapping[str, Any]) -> int | None:
    """num_hidden_layers of the verifier, where its folder lies on this machine."""
    name = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    path = Path(name) / "config.json" if name else None
    if path is None or not path.is_file():
        return None
    config = json.loads(path.read_text())
    count = (config.get("text_config") or config).get("num_hidden_layers")
    return None if count is None else int(count)


def _vocabulary(tensors: Mapping[str, Tensor], size: int, full: int) -> DraftVocab | None:
    """The maps of a reduced vocabulary. Raises where they are missing, or d2t holds ids instead of offsets."""
    if size == full:
        return None
    absent = [name for name in MAPS if name not in tensors]
    if absent:
        found = f"draft_vocab_size {size} of {full} and no {', '.join(absent)}"
        raise ParityError("a reduced draft vocabulary", found, "take both maps from the run that trained it")
    t2d, d2t = tensors["t2d"].bool(), tensors["d2t"].long()
    if len(t2d) != full or len(d2t) != size:
        found = f"t2d of {len(t2d)} tokens (vocab_size {full}), d2t of {len(d2t)} (draft_vocab_size {size})"
        raise ParityError("a reduced draft vocabulary", found, "take both maps from the run that trained it")
    if torch.equal(d2t, t2d.nonzero().squeeze(-1)) and bool((d2t != torch.arange(size)).any()):
        do = "subtract torch.arange(len(d2t)): target id = draft id + d2t[draft id]"
        raise ParityError("d2t of a reduced draft vocabulary", "target ids where offsets belong", do)
    return DraftVocab(t2d=t2d, d2t=d2t)


def _fill_weights(drafter: Drafter, tensors: Mapping[str, Tensor], folder: Path) -> Drafter:
    """The drafter with the file's weights; all of them, of the right shape and finite."""
    wanted = {name: parameter.shape for name, parameter in drafter.named_parameters()}
    wrong = [f"no {name}" for name in sorted(wanted.keys() - tensors.keys())]
    wrong += [f"{name}, which no DFlash drafter has" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        if tensors[name].shape != wanted[name]:
            wrong.append(f"{name} {list(tensors[name].shape)} for {list(wanted[name])}")
        elif not bool(tensors[name].isfinite().all()):
            wrong.append(
                f"{name} with values that are not finite (speculators marks what was never loaded so)"
            )
    if wrong:
        do = "config.json and the weights must be of one drafter"
        raise ParityError(f"a drafter's weights in {folder}", shorten_list(wrong, separator="; "), do)
    drafter.load_state_dict(dict(tensors), strict=False, assign=True)
    return drafter.requires_grad_(True)
