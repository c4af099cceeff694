"""z-lab's names and its reader, for adapters of trainers whose drafters are served by it.

Shapes: S tokens of a row, n states before an anchor, C conditioning layers, D width, V vocabulary.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from parity.model.dflash.config import DrafterConfig
from parity.model.dflash.layout_write import zlab_config
from parity.model.dflash.step import drafter_config
from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed
from parity.probes.adapters.targets import TargetSide


class ZlabSide(TargetSide):
    """A recipe's target, and the drafter that z-lab's layout declares for it."""

    @cached_property
    def drafter(self) -> DrafterConfig:
        """The drafter's sizes and rules as the training file declares them."""
        return drafter_config(self.training.recipe, self.training.run, self.parts)

    def zlab_config(self) -> dict[str, Any]:
        """config.json of the declared drafter in z-lab's layout, in float32."""
        return zlab_config(self.drafter, self.layers, "float32")


class ZlabDraft:
    """z-lab's `dflash` package as the reader that serves a drafter, with weights that are handed in at each call."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: config.json in z-lab's layout. Raises NotExposed where the package is not installed."""
        try:
            from dflash.model import DFlashDraftModel
        except ImportError as error:
            raise NotExposed("draft (z-lab's dflash is not installed: make peers)") from error
        from transformers import Qwen3Config

        own = Qwen3Config(**dict(config))
        own._attn_implementation = "sdpa"
        with torch.random.fork_rng():
            self.model: Any = DFlashDraftModel(own).eval()

    @torch.no_grad()
    def logits(
        self,
        body: Mapping[str, Tensor],
        embed: Tensor,
        head: Tensor,
        *,
        token: int,
        states: Tensor,
        size: int,
    ) -> Tensor:
        """[size - 1, V] logits of the masked slots: body by z-lab's names, the token at the anchor, conditioning
        states [n, C * D] before it."""
        self.model.to(states.dtype).load_state_dict(dict(body))
        ids = torch.full((1, size), self.model.mask_token_id)
        ids[0, 0] = token
        hidden = self.model(
            position_ids=torch.arange(len(states) + size)[None],
            noise_embedding=embed[ids],
            target_hidden=states[None],
        )
        logits: Tensor = hidden[0, 1:] @ head.T
        return logits


BODY_PREFIX = ("fc.", "hidden_norm.", "layers.", "norm.")
"""What z-lab's names of a drafter's own parameters begin with."""


def body_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's own parameters by z-lab's names, the shared ones left out."""
    return {name: tensor.detach() for name, tensor in parameters.items() if name.startswith(BODY_PREFIX)}


def conditioning_before(batch: Batch, states: Tensor, anchor: int, slices: int) -> Tensor:
    """[n, slices * D] the first `slices` captured states of the anchor's document before it."""
    before = (batch.document == batch.document[anchor]) & (batch.position < batch.position[anchor])
    return states[before, :slices].flatten(1)
