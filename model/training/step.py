"""One training step, from captured states to the loss, and everything it used on the way.

    wiring = RecipeStep(training, parts, drafter)  # in truth a family's own class
    output = wiring.step(batch, captured)          # StepOutput; nothing is updated
    output.objective.numerator.backward()

`RecipeStep.step` is the whole path, a line a stage, the same for every family; a family writes `predict`, from what
enters fc to what enters the head. Probes read `StepOutput`; planted faults replace one stage.
Nothing is drawn from a global generator: anchors and noise depend on (seed, epoch, sample id) only.

A trained position is an anchor with an axis of steps behind it: step 0 is the anchor's own token, which is given, step
k the k-th token after it. A family that predicts the next token only has two of them (B = 2).

Shapes: S tokens of a row, N captured slices, C conditioning layers, D width of the target, A anchors, B steps of an
anchor (slots of a block), V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.errors import ParityError
from parity.model.drafting.proposer import DrafterModule
from parity.model.recipe.check import nearest
from parity.model.recipe.config import LossPart, Recipe, TrainingFile
from parity.model.training.anchors import (
    AnchorConfig,
    BlockLabels,
    block_ids,
    blocks_at,
    draw_anchors,
    random_words,
)
from parity.model.training.data import Batch
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


class RecipeStep:
    """The recipe as code: a drafter between the parts of its target. A family derives from it and writes `predict`."""

    def __init__(self, training: TrainingFile, parts: SharedModules, drafter: DrafterModule) -> None:
        recipe, run = training.recipe, training.run
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
        """One forward pass, from a row's captured states to its loss.

        Args:
            batch: the row.
            captured: the target's states of it.
            anchors: [A] token indices; None draws them by (seed, epoch, sample id).
            seed: of anchors and noise; None takes the run's.
            training: False leaves the noise out.
        """
        seed = self.run.seed if seed is None else seed
        # What enters fc.
        conditioning, teacher_state = self.split_slices(captured)
        fc_input = self.add_noise(conditioning, batch, seed) if training else conditioning
        if self.keep_gradients and training:
            fc_input = fc_input.requires_grad_()
        # Where it trains. Without an anchor one block trains nothing, so that every parameter takes part in every step.
        anchors = self.anchors(batch, seed) if anchors is None else anchors
        if not len(anchors):
            batch, anchors = batch.without_supervision(), anchors.new_zeros(1)
        blocks = self.blocks(batch, anchors)
        # Labels first: their chunks of logits are let go of before the activations are there (a quarter of the peak
        # at vocabulary 32,768, tests/bench/bench_drafter.py).
        teacher = self.teacher(teacher_state, blocks)
        labels = self.labels(blocks, teacher)
        # The drafter itself, and the loss.
        hidden = self.predict(fc_input, batch, anchors)
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
            loss_config=self.loss_config,
        )

    def predict(self, fc_input: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
        """The family's own part.

        Args:
            fc_input: [S, C * D] conditioning states, noise included.
            batch: the row they belong to.
            anchors: [A] token indices.

        Returns:
            [A, B, D] what enters the head, in the graph. Step 0 is the anchor itself and never trains.
        """
        raise NotImplementedError

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


def place_drafter(drafter: DrafterModule, training: TrainingFile) -> None:
    """Put a new drafter on the run's device, in its dtype, and freeze what the recipe freezes.

    Raises ParityError where the recipe freezes a part that the drafter does not have.
    """
    drafter.to(device=training.run.device, dtype=getattr(torch, training.run.precision.weights))
    names = [name for name, _ in drafter.named_parameters()]
    for part in training.recipe.frozen:
        if part not in ("embed_tokens", "lm_head") and not any(f"{n}.".startswith(f"{part}.") for n in names):
            raise ParityError(f"recipe.frozen: {part}", "no such part of the drafter", nearest(part, names))
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not is_frozen(name, training.recipe))


def is_frozen(name: str, recipe: Recipe) -> bool:
    """Whether the recipe freezes a parameter of the drafter: by its name, or by a part it begins with."""
    return any(f"{name}.".startswith(f"{part}.") for part in recipe.frozen)
