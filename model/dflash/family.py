"""DFlash behind the seam: what `parity.model.family.DrafterFamily` asks, answered by this folder's modules."""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.config import DrafterConfig, RopeConfig
from parity.model.dflash.drafter import Drafter
from parity.model.dflash.export import AmbiguityAnswers, load_checkpoint, save_speculators, save_zlab
from parity.model.dflash.mask import VisibilityRule
from parity.model.dflash.step import TrainingStep, drafter_config, new_drafter
from parity.model.drafting.proposer import DrafterModule, DrafterShape
from parity.model.family import DrafterFamily
from parity.model.recipe.check import nearest
from parity.model.recipe.config import TrainingFile
from parity.model.training.data import Document
from parity.model.training.exchange import ExportOptions, ImportedDrafter, TargetLayers
from parity.model.training.states import SharedModules
from parity.model.training.vocabulary import DraftVocab

WITHIN_NAMES = {(False, False): "bidirectional", (True, True): "causal", (False, True): "sliding_causal"}
"""(full layers causal, sliding layers causal) -> `recipe.block.within`."""


class DFlash(DrafterFamily):
    """Blocks of mask tokens, drafted in one pass (arXiv 2602.06036)."""

    layouts = {"zlab": "dflash-paper", "speculators": "speculators-0.9"}
    probed_layouts = ("zlab", "speculators")

    def drafter_config(self, training: TrainingFile, parts: SharedModules) -> DrafterConfig:
        """As `DrafterFamily.drafter_config`."""
        width, given = parts.embed.shape[1], training.run.drafter.width
        if given not in (None, width):
            do = "write null, or use a method with a projection at both ends"
            raise ParityError(f"run.drafter.width: {given}", f"a DFlash drafter has its target's {width}", do)
        return drafter_config(training.recipe, training.run, parts)

    def read_config(self, record: Mapping[str, object]) -> DrafterConfig:
        """As `DrafterFamily.read_config`."""
        data = cast("dict[str, Any]", dict(record))
        rules = tuple(VisibilityRule(**rule) for rule in data["layers"])
        return DrafterConfig(**{**data, "layers": rules, "rope": RopeConfig(**data["rope"])})

    def new_drafter(
        self, training: TrainingFile, parts: SharedModules, documents: Sequence[Document] = ()
    ) -> Drafter:
        """As `DrafterFamily.new_drafter`."""
        self.drafter_config(training, parts)
        return new_drafter(training, parts, documents)

    def new_step(self, training: TrainingFile, parts: SharedModules, drafter: DrafterModule) -> TrainingStep:
        """As `DrafterFamily.new_step`."""
        return TrainingStep(training, parts, drafter)

    def restore(self, config: DrafterShape, tensors: Mapping[str, Tensor]) -> Drafter:
        """As `DrafterFamily.restore`."""
        vocab = DraftVocab(t2d=tensors["t2d"], d2t=tensors["d2t"]) if "t2d" in tensors else None
        drafter = Drafter(cast(DrafterConfig, config), vocab)
        drafter.to(tensors["fc.weight"].dtype).load_state_dict(dict(tensors))
        return drafter

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
        """As `DrafterFamily.export`."""
        own = cast(Drafter, drafter)
        common = {"partial_rotary": options.partial_rotary, "overwrite": options.overwrite}
        if layout == "zlab":
            return save_zlab(folder, own, wiring, full_vocabulary=options.full_vocabulary, **common)
        rows = None if own.draft_vocab is None else head()
        return save_speculators(folder, own, wiring, head=rows, **common)

    def load(self, folder: Path, answers: Mapping[str, object]) -> ImportedDrafter:
        """As `DrafterFamily.load`; answers are fields of `AmbiguityAnswers`, texts read as Python literals."""
        return load_checkpoint(folder, _read_answers(answers))

    def known_answers(self, drafter: DrafterModule, wiring: TargetLayers) -> Mapping[str, object]:
        """As `DrafterFamily.known_answers`."""
        share = cast(Drafter, drafter).config.rope.partial_rotary_factor
        return {"num_target_layers": wiring.num_target_layers, "partial_rotary": share != 1 or None}

    def export_notes(self, drafter: DrafterModule) -> tuple[str, ...]:
        """As `DrafterFamily.export_notes`."""
        share = cast(Drafter, drafter).config.rope.partial_rotary_factor
        if share == 1:
            return ()
        return (f"rope turns {share:g} of each head, in vLLM and here; z-lab's package turns all of it",)

    def training_values(self, read: ImportedDrafter, out: Path) -> dict[str, object]:
        """As `DrafterFamily.training_values`; a reduced vocabulary's maps are named, and written by `write_maps`."""
        drafter = cast(Drafter, read.drafter)
        config, vocab = drafter.config, drafter.draft_vocab
        # Direction within the block: the recipe has three names for what each layer says by itself.
        causal = {rule.window is not None: rule.causal for rule in config.layers}
        full, sliding = causal.get(False, False), causal.get(True, causal.get(False, False))
        if len({(rule.window is not None, rule.causal) for rule in config.layers}) != len(causal):
            found = "layers of one kind that differ in causality"
            raise ParityError("a recipe for this drafter", found, "none")
        if (full, sliding) not in WITHIN_NAMES:
            found = f"full layers causal: {full}, sliding layers causal: {sliding}"
            raise ParityError("recipe.block.within for this drafter", found, "answer is_causal=True or False")
        # Everything else has a key of its own.
        windows = [rule.window for rule in config.layers if rule.window is not None]
        maps = {"t2d": str(out / "t2d.npy"), "d2t": str(out / "d2t.npy")}
        return {
            "recipe.block.size": config.block_size,
            "recipe.block.mask_token_id": config.mask_token_id,
            "recipe.block.within": WITHIN_NAMES[full, sliding],
            "recipe.block.documents": "isolated",  # what our trainer does, whatever the base declares of another
            "recipe.attention": {
                "layers": ["full" if rule.window is None else "sliding" for rule in config.layers],
                "window": max(windows, default=None),
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


def _read_answers(given: Mapping[str, object]) -> AmbiguityAnswers:
    """Answers by name. Raises ParityError for an unknown name, or a text that is no value."""
    known = [field.name for field in fields(AmbiguityAnswers)]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ParityError(f"answer {name}={value}", "no such question", nearest(name, known))
        values[name] = _read_literal(name, value) if isinstance(value, str) else value
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
    return AmbiguityAnswers(**values)


def _read_literal(name: str, text: str) -> object:
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        do = "write a number, True, False, or a list such as (1,4,7)"
        raise ParityError(f"answer {name}={text}", "no such value", do) from error
    return value


DFLASH = DFlash()
"""The family, as `parity.model.recipe.methods` names it."""
