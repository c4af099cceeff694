"""The built-in trainer as an adapter.

adapter = Builtin.open(preset("unit"))
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.model.drafting.decode import DecodeConfig, generate, greedy
from parity.model.drafting.proposer import Proposer
from parity.model.drafting.session import EmbeddingAndHead, find_ends
from parity.model.family import find_family
from parity.model.recipe.config import TrainingFile
from parity.model.target import chat
from parity.model.training.data import Batch, Document, read_documents
from parity.model.training.exchange import ExportOptions
from parity.model.training.loss import TeacherStates
from parity.model.training.states import StepStates, open_target
from parity.model.training.step import StepOutput
from parity.model.training.trainer import Trainer
from parity.probes.adapters.base import Adapter, AdapterStep, NotExposed, TargetReference
from parity.probes.adapters.targets import TargetSide

STAND_IN = 8
"""Documents the trainer is opened with where no data is given; they only say how often each token occurs."""
SHORT_RUN: dict[str, Any] = {
    "run.data": {
        "source": "corpus",
        "documents": 6,
        "validation_documents": 0,
        "length": 256,
        "document_length": 128,
    },
    "run.states.keep_mib": 64,
    "run.batch": {"rows": 1, "accumulate": 1},
    "run.save": {"every": 1000, "validate_every": 1000, "tau_prompts": 0},
}
"""What is smaller in the run that `Builtin.run` makes; the rest is the recipe's."""


class Builtin(Adapter):
    """`parity.model.training.trainer.Trainer`. What is shown comes from `trainer.wiring.step` and nothing else."""

    name = "built-in trainer"

    def __init__(self, trainer: Trainer, tokenizer: Any = None) -> None:
        super().__init__(trainer.training.recipe)
        self.trainer, self.tokenizer = trainer, tokenizer
        self.served = tokenizer  # what a server of the target has; a run's data could be made with another
        self.slices = tuple(getattr(trainer.source, "taps", ()))
        self.vocabulary, self.width = trainer.parts.embed.shape
        self.dtype = trainer.parts.embed.dtype
        self.decoding = DecodeConfig(layers=self.recipe.conditioning.decoder_layers)
        self.family = find_family(self.recipe)
        self.configured = self.family.drafter_config(trainer.training, trainer.parts)

    @classmethod
    def open(cls, training: TrainingFile, documents: Sequence[Document] | None = None) -> "Builtin":
        """The trainer of a training file on its own target; nothing is written.

        documents: the training data; without it a stand-in, which matters for a draft vocabulary that is counted.
        Raises ParityError as `open_target` does.
        """
        parts, source, tokenizer = open_target(training)
        if documents is None:
            documents = _stand_in(len(parts.embed), training.run.data.length)
        return cls(Trainer(training, parts, source, documents), tokenizer)

    @property
    def side(self) -> TargetSide:
        """The target beside the trainer."""
        trainer = self.trainer
        return TargetSide(
            training=trainer.training, parts=trainer.parts, source=trainer.source, tokenizer=self.tokenizer
        )

    # --- required -------------------------------------------------------------------------------------

    def step(
        self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int, training: bool
    ) -> AdapterStep:
        """`RecipeStep.step` on the given states."""
        out = self._step(batch, states, anchors=anchors, seed=seed, training=training)
        return AdapterStep(
            loss=out.loss,
            hidden=out.hidden,
            head=out.head,
            anchors=out.anchors,
            fc_input=out.fc_input,
            labels=out.labels,
            teacher=None if out.teacher is None else _teacher_logits(out.teacher),
        )

    def _step(self, batch: Batch, states: Tensor, **options: Any) -> StepOutput:
        drafter, recipe = self.trainer.drafter, self.recipe
        captured = StepStates(states=states, taps=self.slices, conditioning=len(recipe.conditioning.layers))
        before = drafter.training
        drafter.train(options["training"])
        try:
            return self.trainer.wiring.step(batch, captured, **options)
        finally:
            drafter.train(before)

    def parameters(self) -> Mapping[str, Tensor]:
        """The drafter's, and the target's embedding and head as the step uses them."""
        shared = {"embed_tokens.weight": self.trainer.parts.embed, "lm_head.weight": self.trainer.wiring.head}
        return dict(self.trainer.drafter.named_parameters()) | shared

    # --- optional -------------------------------------------------------------------------------------

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        """`RecipeStep.anchors`."""
        return self.trainer.wiring.anchors(replace(batch, epoch=epoch), seed)

    def capture(self, batch: Batch) -> Tensor:
        """What the run's state source gives."""
        if self.trainer.training.run.states.kind != "online":
            raise NotExposed("capture (the states are offline, and hold the data's tokens only)")
        return self.trainer.source(batch).states

    def reference(self, batch: Batch) -> TargetReference:
        """The target by its own forward, document by document."""
        ends = find_ends(self.trainer.parts.speaker)  # the target's, not those that the step was given
        return replace(self.side.reference(batch), embed=ends.embed, head=ends.head)

    @torch.no_grad()
    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        """The drafter on a context of the states before the anchor."""
        parts, document = self.trainer.parts, batch.document[anchor]
        context = Proposer(
            self.trainer.drafter, EmbeddingAndHead(embed=parts.embed, head=parts.head)
        ).new_context()
        # Only the states before the anchor, of its own document, as a server has them.
        before = (batch.document == document) & (batch.position < batch.position[anchor])
        conditioning = states[:, : len(self.recipe.conditioning.layers)].flatten(1)
        context.extend(conditioning[before], batch.position[before], batch.document[before])
        at = slice(anchor, anchor + 1)
        size = self.recipe.block.size
        return context.logits(batch.tokens[at], batch.position[at], batch.document[at], size)[0]

    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        """`parity.model.drafting.decode.generate`."""
        config = replace(self.decoding, max_new_tokens=new_tokens)
        made = generate(self.trainer.parts.speaker, self.trainer.drafter, prompt, config)
        return made.tokens, made.acceptance_lengths

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> Sequence[int]:
        """The target token by token."""
        config = replace(self.decoding, max_new_tokens=new_tokens)
        tokens: list[int] = greedy(self.trainer.parts.speaker, prompt, config).tokens.tolist()
        return tokens[len(prompt) :]

    def optimizer(self) -> torch.optim.Optimizer:
        """The run's AdamW."""
        return self.trainer.optimizer

    def update(self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int) -> None:
        """Backward of the numerator, the trainer's own division and clipping, one optimizer step."""
        self.trainer.optimizer.zero_grad(set_to_none=True)
        made = self._step(batch, states, anchors=anchors, seed=seed, training=True).objective
        made.numerator.backward()
        self.trainer._divide_and_clip(float(made.denominator))
        self.trainer.optimizer.step()

    def run(self, folder: Path, until: int) -> Sequence[float | Mapping[str, Any]]:
        """The trainer's own loop, with its checkpoints, on a few short documents and this target."""
        training = self.trainer.training
        if training.run.states.kind != "online":
            raise NotExposed("run (the states are offline, and hold the data's tokens only)")
        training = training.with_values(SHORT_RUN)
        if training.recipe.attention.window is not None:
            window = min(training.recipe.attention.window, 128)
            training = training.with_values({"recipe.attention.window": window})
        documents = read_documents(training.run.data, self.tokenizer)
        kind = type(self.trainer)
        trainer = kind(training, self.trainer.parts, self.trainer.source, documents, out=folder)
        try:
            records = trainer.run(stop_after=until).records
        finally:
            trainer.close()
        return [record for record in records if record["event"] == "step"]

    def export(self, folder: Path) -> str:
        """The family's first layout that has readers, or the last where the draft vocabulary is reduced."""
        family, drafter, layouts = self.family, self.trainer.drafter, self.family.probed_layouts
        if not layouts:
            raise NotExposed(f"export (no probe reads a checkpoint of method {self.recipe.method})")
        layout = layouts[0] if drafter.draft_vocab is None else layouts[-1]
        options = ExportOptions(partial_rotary=True, overwrite=True)
        head = self.trainer.parts.head
        family.export(drafter, self.side.layers, folder, layout, head=lambda: head, options=options)
        return layout

    def tokenize(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], Sequence[bool]]:
        """As the data is tokenised."""
        if self.tokenizer is None:
            raise NotExposed("tokenize (no tokenizer)")
        return chat.tokenise(
            self.tokenizer, [dict(m) for m in messages], self.trainer.training.run.data.thinking
        )

    def request(self, messages: Sequence[Mapping[str, str]], thinking: bool | None = None) -> Sequence[int]:
        """The target's chat template, as a server applies it; thinking None: as the template has it."""
        if self.served is None:
            raise NotExposed("request (no tokenizer)")
        options = {} if thinking is None else {"enable_thinking": thinking}
        made = self.served.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True, **options
        )
        return list(made["input_ids"])


def _teacher_logits(teacher: TeacherStates) -> Tensor:
    """[A, B, V]."""
    return teacher.states[teacher.index].to(teacher.head) @ teacher.head.T


def _stand_in(vocabulary: int, length: int) -> list[Document]:
    """Documents in which every token occurs, from a fixed seed."""
    order = np.random.default_rng(0).permutation(vocabulary)
    size = min(length, 64)
    tokens = np.resize(order, STAND_IN * size).reshape(STAND_IN, size).astype(np.int64)
    mask = np.ones(size, dtype=np.bool_)
    return [Document(sample_id=number, tokens=row, mask=mask) for number, row in enumerate(tokens)]
