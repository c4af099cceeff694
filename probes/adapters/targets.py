"""The target beside the trainer: its parts, its own states and logits, and what readers of a checkpoint know of it.

Adapters use it to answer `reference`, `tokenize` and `request`.

Shapes: S tokens of a row, T of a document, D width, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import TrainingFile
from parity.model.target import chat
from parity.model.training.data import Batch
from parity.model.training.exchange import TargetLayers
from parity.model.training.states import SharedModules, SyntheticStates, open_target
from parity.probes.adapters.base import NotExposed, TargetReference


@dataclass(frozen=True, kw_only=True)
class TargetSide:
    """What a recipe's target gives to any trainer."""

    training: TrainingFile
    parts: SharedModules
    source: Any
    tokenizer: Any

    @classmethod
    def open(cls, training: TrainingFile) -> Self:
        """Load the target of a training file. Raises ParityError as `open_target` does."""
        parts, source, tokenizer = open_target(training)
        return cls(training=training, parts=parts, source=source, tokenizer=tokenizer)

    @property
    def width(self) -> int:
        """D."""
        return int(self.parts.embed.shape[1])

    @property
    def vocabulary(self) -> int:
        """The target's tokens."""
        return len(self.parts.embed)

    @cached_property
    def layers(self) -> TargetLayers:
        """What readers of a checkpoint must know of the target."""
        layers = self.training.recipe.conditioning.decoder_layers
        if self.parts.target is not None:
            return TargetLayers.of(self.parts.target, layers)
        return TargetLayers(layers=layers, num_target_layers=self.parts.layers, vocab_size=self.vocabulary)

    def reference(self, batch: Batch) -> TargetReference:
        """The target by its own forward, document by document, zeros on padding."""
        rows = [own_states(self.parts, self.source, batch.tokens[span]) for _, span in batch.spans()]
        padding = len(batch.tokens) - sum(len(row["logits"]) for row in rows)
        joined = {
            name: torch.nn.functional.pad(torch.cat([row[name] for row in rows]), (0, 0, 0, padding))
            for name in rows[0]
        }
        logits = joined.pop("logits")
        return TargetReference(
            embed=self.parts.embed,
            head=self.parts.head,
            states=joined,
            logits=logits,
            norm=self.parts.norm,
        )

    def tokenize(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """As our data is tokenised. Raises NotExposed."""
        if self.tokenizer is None:
            raise NotExposed("tokenize (the target has no tokenizer)")
        return chat.tokenise(self.tokenizer, messages, self.training.run.data.thinking)

    def request(self, messages: list[dict[str, str]]) -> list[int]:
        """The target's chat template, as a server applies it. Raises NotExposed."""
        if self.tokenizer is None:
            raise NotExposed("request (the target has no tokenizer)")
        made = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])


@torch.no_grad()
def own_states(parts: SharedModules, source: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Every tap of one document [T, D], and `logits` [T, V], from the target's own outputs."""
    if isinstance(source, SyntheticStates):
        made: dict[str, Tensor] = source.target(tokens)
        return made | {"logits": made["final.postnorm"] @ parts.head.T}
    if parts.target is None:
        raise ParityError(
            "the target's own states", "no target in this process", "use a target that is loaded"
        )
    seen: list[Tensor] = []
    hook = parts.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    try:
        out = parts.target.model(tokens[None], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    states = {f"layer.{i}.out": state[0] for i, state in enumerate(out.hidden_states[1:-1])}
    states |= {f"layer.{parts.layers - 1}.out": seen[-1], "final.prenorm": seen[-1]}
    return states | {"final.postnorm": out.hidden_states[-1][0], "logits": out.logits[0]}
