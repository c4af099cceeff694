"""What adapters of other trainers share: the target beside the trainer, and z-lab's reader for drafting.

Both trainers write checkpoints that z-lab's reader serves, so `draft` is asked of it with the trainer's live weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import Adapter, TargetReference
from parity.probes.adapters.zlab import ZlabDraft, ZlabSide, body_of, conditioning_before


class PeerAdapter(Adapter):
    """A trainer of another project around a model with `embed_tokens` and `lm_head`."""

    def __init__(self, target: ZlabSide, model: Any, taps: Sequence[str] = ()) -> None:
        """One adapter for one model.

        Args:
            target: the recipe's target.
            model: the trainer's module, as its own code builds it.
            taps: captured slices beside the conditioning layers.
        """
        super().__init__(target.training.recipe)
        self.target, self.model = target, model
        self.slices = (*(f"layer.{layer}.out" for layer in self.recipe.conditioning.decoder_layers), *taps)
        self.width, self.vocabulary = target.width, target.vocabulary
        self.dtype, self.configured = target.parts.embed.dtype, target.drafter
        self._reader: ZlabDraft | None = None

    def reader_config(self) -> Mapping[str, object]:
        """config.json of the drafter in z-lab's layout, as declared."""
        return self.target.zlab_config()

    def draft(self, batch: Batch, states: Tensor, anchor: int) -> Tensor:
        """[B - 1, V] logits by z-lab's reader with these weights."""
        if self._reader is None:
            self._reader = ZlabDraft(self.reader_config())
        return self._reader.logits(
            body_of(self.parameters()),
            self.model.embed_tokens.weight,
            self.model.lm_head.weight,
            token=int(batch.tokens[anchor]),
            states=conditioning_before(batch, states, anchor, len(self.recipe.conditioning.decoder_layers)),
            size=self.recipe.block.size,
        )

    def reference(self, batch: Batch) -> TargetReference:
        """The target by its own forward."""
        return self.target.reference(batch)

    def request(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """The target's chat template."""
        return self.target.request([dict(each) for each in messages])


@torch.no_grad()
def copy_weight(module: torch.nn.Module, weight: Tensor) -> torch.nn.Module:
    """One of the target's ends as a frozen module of its own. weight: copied into `module.weight`."""
    own = module.weight
    assert isinstance(own, Tensor)
    own.copy_(weight)
    return module.requires_grad_(False)
