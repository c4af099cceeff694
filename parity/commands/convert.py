"""`parity export` and `parity import`: checkpoints for other readers, and theirs for us.

    export("run", to="zlab", out="drafter")                       # SpecForge has the same layout
    export("run", to="speculators", out="drafter")
    import_("drafter", out="run", target="Qwen/Qwen3-8B")         # then: parity eval run

An export is read back before it is reported. An import that can be read in two ways is refused with the question;
`answers` takes the answer. What no checkpoint says (loss, data, optimizer) an import takes from a training file.
"""

import ast
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

    from parity.model.dflash.config import DrafterConfig
    from parity.model.dflash.drafter import Drafter
    from parity.model.dflash.export import AmbiguityAnswers, ImportedCheckpoint, TargetLayers
    from parity.model.recipe.config import TrainingFile
    from parity.model.training.states import SharedModules

LayoutName = Literal["zlab", "speculators"]
BASES: dict[str, str] = {"zlab": "dflash-paper", "speculators": "speculators-0.9"}
"""Preset that fills in what a checkpoint of a layout does not say."""
WITHIN_NAMES = {(False, False): "bidirectional", (True, True): "causal", (False, True): "sliding_causal"}
"""(full layers causal, sliding layers causal) -> `recipe.block.within`."""


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
    to: LayoutName,
    out: str | Path,
    which: Literal["last", "best"] = "last",
    full_vocabulary: bool = False,
    partial_rotary: bool = False,
    overwrite: bool = False,
) -> ConversionResult:
    """Write a checkpoint of ours, or a run's last or best one, in another layout; then read it back and compare.

    full_vocabulary, partial_rotary: as in `parity.model.dflash.export.save_zlab`. overwrite: replace what is
    at `out`. Raises
    ParityError for what the layout cannot say, naming it.
    """
    from parity.model.dflash.export import save_speculators, save_zlab
    from parity.model.training import checkpoint as checkpoints

    if to not in BASES:
        raise ParityError(f"export to {to!r}", "no such layout", f"use one of {', '.join(BASES)}")
    drafter, training = checkpoints.load_drafter(checkpoints.find_checkpoint(Path(checkpoint), which))
    wiring = wiring_of(training)
    options: dict[str, Any] = {"partial_rotary": partial_rotary, "overwrite": overwrite}
    if to == "zlab":
        folder = save_zlab(out, drafter, wiring, full_vocabulary=full_vocabulary, **options)
    else:
        head = _head(training) if drafter.draft_vocab is not None else None
        folder = save_speculators(out, drafter, wiring, head=head, **options)
    notes = _read_back(folder, drafter, wiring, dropped=to == "zlab" and drafter.draft_vocab is not None)
    return _write_converted(folder, to, drafter, wiring, notes)


def wiring_of(training: "TrainingFile") -> "TargetLayers":
    """What readers must know of the target, from its configuration alone. Raises ParityError where it has none."""
    from parity.model.dflash.export import TargetLayers

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


def _read_back(folder: Path, drafter: "Drafter", wiring: "TargetLayers", *, dropped: bool) -> tuple[str, ...]:
    """Read an export as another would. Raises AssertionError where it says something else: a fault of ours."""
    import torch

    from parity.model.dflash.export import AmbiguityAnswers, load_checkpoint

    share = drafter.config.rope.partial_rotary_factor
    answers = AmbiguityAnswers(num_target_layers=wiring.num_target_layers, partial_rotary=share != 1 or None)
    read = load_checkpoint(folder, answers)
    assert read.drafter.config == drafter.config, (read.drafter.config, drafter.config)
    assert read.wiring.layers == wiring.layers, (read.wiring, wiring)
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
    if share != 1:
        notes.append(f"rope turns {share:g} of each head, in vLLM and here; z-lab's package turns all of it")
    return tuple(notes)


def _write_converted(
    out: Path, layout: str, drafter: "Drafter", wiring: "TargetLayers", notes: tuple[str, ...]
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
    """Read a checkpoint of z-lab's, SpecForge's or speculators' layout into a run of ours, at step 0.

    out: a new run: `parity eval` measures it, `parity train OUT/training.yaml --out OUT` goes on from its weights.
    target: its name or path, where the checkpoint does not say (z-lab's never does). recipe: a training file for what
    checkpoints do not say; None takes a preset of the layout, and a note says so. answers: fields
    of
    `parity.model.dflash.export.AmbiguityAnswers`. Raises ParityError with the question where the files can be read in
    two ways, and
    where drafter and target do not fit.
    """
    import torch

    from parity.model.dflash.export import load_checkpoint
    from parity.model.recipe.config import dump, load_training_file
    from parity.model.recipe.presets import preset
    from parity.model.training.checkpoint import TRAINING, Checkpoints

    folder, run = Path(out), Path(checkpoint)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ParityError(f"a new run in {folder}", "something is there", "name a new folder")
    read = load_checkpoint(run, _answers(answers or {}))
    name = target or read.wiring.target
    if name is None:
        found, do = "the checkpoint does not name it", "give --target with its name or path"
        raise ParityError(f"the target of {run}", found, do)
    base = preset(BASES[read.layout]) if recipe is None else load_training_file(recipe)
    read = replace(read, wiring=replace(read.wiring, target=name))
    training = _training(base, read, folder.resolve())
    _fits(training, read, run)
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
    source = f"preset {BASES[read.layout]}" if recipe is None else str(recipe)
    notes = [f"loss, data and optimizer are no part of a checkpoint; they are those of {source}"]
    if read.shared:
        notes.append(f"its copies of the target's tensors were left out: {', '.join(sorted(read.shared))}")
    return _write_converted(folder, read.layout, drafter, read.wiring, tuple(notes))


def _answers(given: Mapping[str, Any]) -> "AmbiguityAnswers":
    """Answers from names and values, texts read as Python literals. Raises ParityError for an unknown name."""
    from parity.model.dflash.export import AmbiguityAnswers
    from parity.model.recipe.check import nearest

    known = [field.name for field in fields(AmbiguityAnswers)]
    values = {}
    for name, value in given.items():
        if name not in known:
            raise ParityError(f"answer {name}={value}", "no such question", nearest(name, known))
        values[name] = _literal(name, value) if isinstance(value, str) else value
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
    return AmbiguityAnswers(**values)


def _literal(name: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        do = "write a number, True, False, or a list such as (1,4,7)"
        raise ParityError(f"answer {name}={text}", "no such value", do) from error


def _training(base: "TrainingFile", read: "ImportedCheckpoint", out: Path) -> "TrainingFile":
    """The base with everything in it that the checkpoint says."""
    config, wiring = read.drafter.config, read.wiring
    causal = {rule.window is not None: rule.causal for rule in config.layers}
    full, sliding = causal.get(False, False), causal.get(True, causal.get(False, False))
    if len({(rule.window is not None, rule.causal) for rule in config.layers}) != len(causal):
        raise ParityError("a recipe for this drafter", "layers of one kind that differ in causality", "none")
    if (full, sliding) not in WITHIN_NAMES:
        found = f"full layers causal: {full}, sliding layers causal: {sliding}"
        raise ParityError("recipe.block.within for this drafter", found, "answer is_causal=True or False")
    maps = {"t2d": str(out / "t2d.npy"), "d2t": str(out / "d2t.npy")}
    vocab = read.drafter.draft_vocab
    windows = {rule.window for rule in config.layers} - {None}
    return base.with_values(
        {
            "recipe.target.model": wiring.target,
            "recipe.target.revision": None,
            "recipe.conditioning": {"layers": list(wiring.layers), "ids": "layer"},
            "recipe.block.size": config.block_size,
            "recipe.block.mask_token_id": config.mask_token_id,
            "recipe.block.within": WITHIN_NAMES[full, sliding],
            "recipe.block.documents": "isolated",  # what our trainer does, whatever the base declares of another
            "recipe.attention": {
                "layers": ["full" if rule.window is None else "sliding" for rule in config.layers],
                "window": max(windows) if windows else None,  # type: ignore[type-var]
            },
            "recipe.draft_vocab": None if vocab is None else {"size": len(vocab.d2t), **maps},
            "run.drafter.intermediate_size": config.intermediate_size,
            "run.drafter.heads": config.num_heads,
            "run.drafter.kv_heads": config.num_kv_heads,
            "run.drafter.head_dim": config.head_dim,
            "run.drafter.rope_theta": config.rope.rope_theta,
            "run.drafter.partial_rotary_factor": config.rope.partial_rotary_factor,
            "run.drafter.rms_norm_eps": config.rms_norm_eps,
        }
    )


def _fits(training: "TrainingFile", read: "ImportedCheckpoint", source: Path) -> None:
    """Raises ParityError where a drafter for this target, made by this training file, would be another one."""
    from parity.model.dflash.step import drafter_config
    from parity.model.recipe.check import check_layers

    config, _ = _target_config(training)
    wiring, name = read.wiring, training.recipe.target.model
    wrong = [
        f"{what} {ours}, the target has {theirs}"
        for what, ours, theirs in (
            ("num_target_layers", wiring.num_target_layers, config.num_hidden_layers),
            ("vocab_size", wiring.vocab_size, config.vocab_size),
            ("hidden_size", read.drafter.config.hidden_size, config.hidden_size),
        )
        if ours != theirs
    ]
    if wrong:
        raise ParityError(
            f"{source} as a drafter of {name}", "; ".join(wrong), "name the target it was made for"
        )
    check_layers(training.recipe, config.num_hidden_layers)
    made = drafter_config(training.recipe, training.run, _shapes(config))
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


def _differing(made: "DrafterConfig", read: "DrafterConfig") -> list[str]:
    return [
        f"{field.name} {getattr(made, field.name)}, not {getattr(read, field.name)}"
        for field in fields(read)
        if getattr(made, field.name) != getattr(read, field.name)
    ]


def _write_maps(folder: Path, drafter: "Drafter") -> None:
    """The vocabulary's maps as files, which the training file names."""
    import numpy as np

    vocab = drafter.draft_vocab
    if vocab is not None:
        np.save(folder / "t2d.npy", vocab.t2d.cpu().numpy())
        np.save(folder / "d2t.npy", vocab.d2t.cpu().numpy())
