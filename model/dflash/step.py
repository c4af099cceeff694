"""One training step, from captured states to the loss, and everything it used on the way.

    wiring = TrainingStep(training, parts)
    output = wiring.step(batch, captured)          # StepOutput; nothing is updated
    output.objective.numerator.backward()

`TrainingStep.step` is the whole path, a line a stage. Probes read `StepOutput`; planted faults replace one stage.
Nothing is drawn from a global generator: anchors and noise depend on (seed, epoch, sample id) only.

Shapes: S tokens of a row, N captured slices, C conditioning layers, D width, A anchors, B slots, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.anchors import AnchorConfig, BlockLabels, blocks_at, draw_anchors, random_words
from parity.model.dflash.config import DrafterConfig, DraftVocab, RopeConfig, layer_rules
from parity.model.dflash.drafter import INIT_STD, Drafter, block_ids
from parity.model.dflash.mask import BlockLayout, training_layout
from parity.model.recipe.check import nearest
from parity.model.recipe.config import LossPart, Recipe, RunConfig, TrainingFile
from parity.model.training.data import Batch, Document
from parity.model.training.loss import (
    Dpace,
    ExpDecay,
    LossConfig,
    Objective,
    SlotWeighting,
    TeacherStates,
    Uniform,
    objective,
    slot_weights,
    teacher_labels,
)
from parity.model.training.states import SharedModules, StepStates

NOISE = 0x6E6F697365
"""Added to the seed where noise is drawn, so that it does not repeat the anchors' words."""
WITHIN_RULES: dict[str, bool | None] = {"bidirectional": False, "causal": True, "sliding_causal": None}
"""`block.within` as `layer_rules` takes it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """What one step used and made."""

    objective: Objective
    """Numerator (in the graph), denominator, terms, per-slot counts."""
    batch: Batch
    """The row that the step was given, or the same muted."""
    captured: StepStates
    """Its states."""
    fc_input: Tensor
    """[S, C * D] what entered fc, noise included."""
    hidden: Tensor
    """[A, B, D] what entered the head, in the graph."""
    head: Tensor
    """[V, D] the head's rows for the draft's vocabulary, frozen."""
    labels: Tensor
    """[A, B] ids of the draft's vocabulary, negative where there is none."""
    teacher: TeacherStates | None
    """The target's distribution at every slot, where the recipe uses one."""
    blocks: BlockLabels
    """Anchors, the token of every slot, and which slots are supervised."""
    layout: BlockLayout
    """What the attention masks are made from."""
    loss_config: LossConfig

    @cached_property
    def loss(self) -> Tensor:
        """Scalar, in the graph: this batch's own numerator over its denominator."""
        return self.objective.loss()

    @property
    def anchors(self) -> Tensor:
        """[A] token indices."""
        return self.blocks.anchors

    @property
    def supervision_mask(self) -> Tensor:
        """Bool [A, B]."""
        return self.blocks.supervised & (self.labels >= 0)

    @property
    def accuracy(self) -> Tensor:
        """[B] share of supervised slots whose label is the draft's argmax; nan where none is supervised."""
        return self.objective.correct / self.objective.counted

    def weights(self) -> Tensor:
        """[A, B] weight of every slot, 0 where not supervised; forms logits of one block at a time for D-PACE."""
        on = self.supervision_mask
        confidence = torch.zeros(on.shape, dtype=torch.promote_types(self.hidden.dtype, torch.float32))
        confidence = confidence.to(self.hidden.device)
        if isinstance(self.loss_config.weights, Dpace):
            with torch.no_grad():
                for block, (hidden, labels) in enumerate(zip(self.hidden, self.labels, strict=True)):
                    logits = F.linear(hidden.to(self.head), self.head).to(confidence)
                    chosen = labels.clamp(min=0)[:, None]
                    confidence[block] = logits.softmax(-1).gather(1, chosen).squeeze(1)
        return slot_weights(self.loss_config.weights, on, confidence)


class TrainingStep:
    """The recipe as code: a drafter between the parts of its target."""

    def __init__(self, training: TrainingFile, parts: SharedModules, drafter: Drafter) -> None:
        """Raises ParityError for what a recipe can declare of other trainers and this one does not do."""
        recipe, run = training.recipe, training.run
        if recipe.attention.window_from != "query" or recipe.block.documents != "isolated":
            asked = f"recipe.attention.window_from: {recipe.attention.window_from}"
            asked += f", recipe.block.documents: {recipe.block.documents}"
            found = "the built-in trainer counts windows from each query and isolates documents"
            raise ParityError(asked, found, "write query and isolated, or name the trainer with --adapter")
        self.recipe, self.run, self.parts, self.drafter = recipe, run, parts, drafter
        self.vocab = drafter.draft_vocab
        self.keep_gradients = False
        """Set for a step by who wants the gradient at fc's input afterwards, in `StepOutput.fc_input.grad`."""
        self.head = (parts.head if self.vocab is None else self.vocab.head_rows(parts.head)).detach()
        self.dtype = getattr(torch, run.precision.weights)
        self.loss_config = loss_config(recipe.loss)
        self.anchor_config = AnchorConfig(
            budget=recipe.block.anchors,
            share=recipe.block.share,
            partial=recipe.block.partial,
            past_holes=recipe.block.past_holes,
        )

    def step(
        self,
        batch: Batch,
        captured: StepStates,
        *,
        anchors: Tensor | None = None,
        seed: int | None = None,
        training: bool = True,
    ) -> StepOutput:
        """Captured states of a row -> loss. `anchors` fixes them; `seed` replaces the run's, for noise too."""
        seed = self.run.seed if seed is None else seed
        conditioning, teacher_state = self.split_slices(captured)
        fc_input = self.add_noise(conditioning, batch, seed) if training else conditioning
        if self.keep_gradients and training:
            fc_input = fc_input.requires_grad_()
        anchors = self.anchors(batch, seed) if anchors is None else anchors
        if not len(
            anchors
        ):  # one block that trains nothing, so that every parameter takes part in every step
            batch, anchors = batch.without_supervision(), anchors.new_zeros(1)
        blocks = self.blocks(batch, anchors)
        layout = training_layout(batch.position, batch.document, anchors, self.recipe.block.size)
        # Labels first: their chunks of logits are let go of before the activations are there (a quarter of the peak
        # at vocabulary 32,768, tests/bench/bench_drafter.py).
        teacher = self.teacher(teacher_state, blocks)
        labels = self.labels(blocks, teacher)
        hidden = self.draft(fc_input, self.embeddings(batch, anchors), layout)
        return StepOutput(
            objective=self.objective(hidden, labels, blocks, teacher, samples=len(batch.sample_ids)),
            batch=batch,
            captured=captured,
            fc_input=fc_input,
            hidden=hidden,
            head=self.head,
            labels=labels,
            teacher=teacher,
            blocks=blocks,
            layout=layout,
            loss_config=self.loss_config,
        )

    def split_slices(self, captured: StepStates) -> tuple[Tensor, Tensor | None]:
        """Conditioning slices joined for fc [S, C * D] in the weights' dtype; the teacher's slice [S, D] as it is."""
        conditioning = captured.states[:, : captured.conditioning].flatten(1).to(self.dtype)
        rest = captured.states[:, captured.conditioning :]
        return conditioning, rest[:, 0] if rest.shape[1] else None

    def add_noise(self, conditioning: Tensor, batch: Batch, seed: int) -> Tensor:
        """The recipe's noise on the conditioning states, document by document; [S, C * D]."""
        noise = self.recipe.noise
        if noise.kind == "none":
            return conditioning
        added = torch.zeros_like(conditioning)
        for sample, span in batch.spans():
            word = random_words(1, seed=seed + NOISE, epoch=batch.epoch, sample_id=sample)
            generator = torch.Generator().manual_seed(int(word[0] >> np.uint64(1)))
            size = (span.stop - span.start, conditioning.shape[1])
            if noise.kind == "gaussian":
                drawn = torch.randn(size, generator=generator, dtype=self.dtype)
            else:
                drawn = (torch.rand(size, generator=generator, dtype=self.dtype) - 0.5) * 12**0.5
            added[span] = (drawn * noise.std).to(added.device)
        return conditioning + added

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        """[A] drawn by (seed, epoch, sample id)."""
        return draw_anchors(
            batch.loss_mask,
            batch.document,
            batch.sample_ids,
            seed=seed,
            epoch=batch.epoch,
            block_size=self.recipe.block.size,
            config=self.anchor_config,
        )

    def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
        """What the slots stand for."""
        return blocks_at(
            anchors,
            batch.tokens,
            batch.loss_mask,
            batch.document,
            self.recipe.block.size,
            past_holes=self.anchor_config.past_holes,
        )

    def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
        """[A, B, D]: the anchor's embedding, then the mask token's."""
        ids = block_ids(batch.tokens, anchors, self.recipe.block.size, self.recipe.block.mask_token_id)
        return F.embedding(ids, self.parts.embed).to(self.dtype)

    def draft(self, fc_input: Tensor, embeddings: Tensor, layout: BlockLayout) -> Tensor:
        """[A, B, D] what enters the head; products in bf16 where the run says so."""
        precision = self.run.precision.autocast
        on = fc_input.device.type
        with torch.autocast(on, dtype=torch.bfloat16, enabled=precision is not None):
            hidden: Tensor = self.drafter(fc_input, embeddings, layout, attention=self.run.drafter.attention)
        return hidden

    def teacher(self, state: Tensor | None, blocks: BlockLabels) -> TeacherStates | None:
        """The target's distributions, from a state after the final norm."""
        declared = self.recipe.teacher
        if state is None or declared is None:
            return None
        if declared.norm == "pre":
            with torch.no_grad():
                state = self.parts.norm(state)
        return TeacherStates(states=state.detach(), index=blocks.teacher_index, head=self.head)

    def labels(self, blocks: BlockLabels, teacher: TeacherStates | None) -> Tensor:
        """[A, B] ids of the draft's vocabulary, negative where there is none."""
        if self.recipe.labels != "data":
            assert teacher is not None  # the recipe's own check
            return teacher_labels(teacher, blocks.supervised)
        if self.vocab is None:
            return blocks.labels
        ids = self.vocab.to_draft(blocks.labels.clamp(min=0))
        return torch.where(blocks.supervised, ids, torch.full_like(ids, -1))

    def objective(
        self,
        hidden: Tensor,
        labels: Tensor,
        blocks: BlockLabels,
        teacher: TeacherStates | None,
        *,
        samples: int,
    ) -> Objective:
        """The recipe's loss; the teacher's distributions are formed only where a term needs them."""
        return objective(
            hidden,
            self.head,
            labels,
            blocks.supervised,
            self.loss_config,
            teacher=teacher if self.loss_config.needs_teacher else None,
            samples=samples,
        )


def loss_config(loss: LossPart) -> LossConfig:
    """The recipe's loss as `parity.model.training.loss` takes it."""
    weights: SlotWeighting = Uniform()
    if loss.weights.gamma is not None:
        weights = ExpDecay(gamma=loss.weights.gamma)
    if loss.weights.alpha is not None:
        weights = Dpace(alpha=loss.weights.alpha)
    return LossConfig(
        terms=dict(loss.terms),
        weights=weights,
        reduction=loss.reduction,
        temperature=loss.temperature,
        lk_eta=loss.lk_eta,
    )


def drafter_config(recipe: Recipe, run: RunConfig, parts: SharedModules) -> DrafterConfig:
    """Sizes of the drafter: the training file's, else the target's. Raises ParityError where neither says."""
    config, sizes = parts.config, run.drafter
    rope = RopeConfig.from_config(_rope_keys(config))
    if sizes.rope_theta is not None:
        rope = replace(rope, rope_theta=sizes.rope_theta)
    if sizes.partial_rotary_factor is not None:
        rope = replace(rope, partial_rotary_factor=sizes.partial_rotary_factor)
    heads = sizes.heads or _size(config, "num_attention_heads", "heads")
    hidden = parts.embed.shape[1]
    if recipe.block.mask_token_id >= len(parts.embed):
        found = f"the embedding has {len(parts.embed)} rows"
        asked = f"recipe.block.mask_token_id: {recipe.block.mask_token_id}"
        raise ParityError(asked, found, "give the id of a token that the target has and no text uses")
    types = [f"{kind}_attention" for kind in recipe.attention.layers]
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=sizes.intermediate_size or _size(config, "intermediate_size", "intermediate_size"),
        num_heads=heads,
        num_kv_heads=sizes.kv_heads or _size(config, "num_key_value_heads", "kv_heads"),
        head_dim=sizes.head_dim or getattr(config, "head_dim", None) or hidden // heads,
        conditioning=len(recipe.conditioning.layers),
        block_size=recipe.block.size,
        mask_token_id=recipe.block.mask_token_id,
        layers=layer_rules(types, recipe.attention.window, WITHIN_RULES[recipe.block.within]),
        rope=rope,
        rms_norm_eps=sizes.rms_norm_eps or getattr(config, "rms_norm_eps", None) or 1e-6,
    )


def _rope_keys(config: Any) -> dict[str, Any]:
    """The rope part of a target's configuration, whichever schema."""
    keys = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
    data = config.to_dict()
    return {key: data[key] for key in keys if data.get(key) is not None}


def _size(config: Any, name: str, key: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ParityError(f"run.drafter.{key}: null", f"the target has no {name}", f"give run.drafter.{key}")
    return value


def draft_vocab(recipe: Recipe, vocabulary: int, documents: Sequence[Document]) -> DraftVocab | None:
    """The reduced draft vocabulary: from its files, or the most frequent supervised tokens of the data."""
    part = recipe.draft_vocab
    if part is None:
        return None
    if part.size > vocabulary:
        found = f"the target has {vocabulary} tokens"
        raise ParityError(f"recipe.draft_vocab.size: {part.size}", found, "give a smaller size, or null")
    if part.t2d is not None and part.d2t is not None:
        t2d, d2t = (_map(Path(file)) for file in (part.t2d, part.d2t))
        read = DraftVocab(t2d=t2d.bool(), d2t=d2t.long())
        if len(read.d2t) != part.size or len(read.t2d) != vocabulary:
            asked = f"recipe.draft_vocab.size: {part.size} of {vocabulary} tokens"
            found = f"maps of {len(read.d2t)} of {len(read.t2d)}"
            raise ParityError(asked, found, "take maps of this size, made for this target")
        return read
    counts = np.zeros(vocabulary, dtype=np.int64)
    for document in documents:
        counts += np.bincount(document.tokens[document.mask], minlength=vocabulary)[:vocabulary]
    order = np.argsort(-counts, kind="stable")[: part.size]  # ties: the lower id, so that it never changes
    kept = torch.zeros(vocabulary, dtype=torch.bool)
    kept[torch.from_numpy(order)] = True
    return DraftVocab.from_kept(kept)


def _map(file: Path) -> Tensor:
    """One vocabulary map. Raises ParityError for what is no array; never unpickles."""
    try:
        return torch.from_numpy(np.load(file, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise ParityError(f"a vocabulary map from {file}", str(error), "give an npy file") from error


def new_drafter(training: TrainingFile, parts: SharedModules, documents: Sequence[Document] = ()) -> Drafter:
    """A drafter with new weights, drawn by the run's seed, on the run's device."""
    config = drafter_config(training.recipe, training.run, parts)
    drafter = Drafter(config, draft_vocab(training.recipe, len(parts.embed), documents))
    drafter.reset(torch.Generator().manual_seed(training.run.seed))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(training.run.drafter.init_std / INIT_STD)
    drafter.to(device=training.run.device, dtype=getattr(torch, training.run.precision.weights))
    names = [name for name, _ in drafter.named_parameters()]
    for part in training.recipe.frozen:
        if part not in ("embed_tokens", "lm_head") and not any(f"{n}.".startswith(f"{part}.") for n in names):
            raise ParityError(f"recipe.frozen: {part}", "no such part of the drafter", nearest(part, names))
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not frozen(name, training.recipe))
    return drafter


def frozen(name: str, recipe: Recipe) -> bool:
    """Whether the recipe freezes a parameter of the drafter: by its name, or by a part it begins with."""
    return any(f"{name}.".startswith(f"{part}.") for part in recipe.frozen)
