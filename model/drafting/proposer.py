"""What a drafter is at inference: it remembers the target's states of a text and proposes the tokens after an anchor.

    proposer = Proposer(drafter, EmbeddingAndHead.of(target))
    context = proposer.new_context()
    context.extend(states, position, document)
    logits = context.logits(anchor_ids, position, document, size=4)      # [A, 3, Vd]

A family writes `DrafterModule.new_context`; vocabulary maps, the draft-verify loop and the offline tau are the same
for all families.

Shapes: A anchors, n states added at once, C conditioning layers, D width of the target, V its vocabulary, Vd
the drafter's (V, where it is not reduced). A block of `size`
slots is the anchor and the `size - 1` tokens drafted after it.
"""

from abc import ABC, abstractmethod
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from parity.model.drafting.session import EmbeddingAndHead
from parity.model.training.vocabulary import DraftVocab


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16 and fp16, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


class DrafterShape(Protocol):
    """What every family's configuration says. It is a frozen dataclass that JSON can hold, as checkpoints store it."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def hidden_size(self) -> int:
        """Width of the drafter's own layers; it may differ from the target's."""

    @property
    def conditioning(self) -> int:
        """C: how many conditioning layers of the target it reads."""

    @property
    def block_size(self) -> int:
        """B: the anchor and the tokens it drafts after it, B - 1 at once."""

    @property
    def mask_token_id(self) -> int:
        """Id whose embedding stands for a token that is not written yet."""


class DraftContext(ABC):
    """The target's states of a text, or of several, as the drafter remembers them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many tokens are remembered."""

    @abstractmethod
    def extend(self, states: Tensor, position: Tensor, document: Tensor) -> None:
        """Remember more states, in the dtype that the drafter computes in.

        Args:
            states: [n, C * D] the conditioning layers' states, concatenated in their order.
            position: [n] place of each token in its document, from 0.
            document: [n] which text each token belongs to.
        """

    @abstractmethod
    def logits(self, anchor_ids: Tensor, position: Tensor, document: Tensor, size: int) -> Tensor:
        """Propose the tokens after each anchor; the context stays as it is.

        Args:
            anchor_ids: [A] the anchors' token ids.
            position: [A] their places in their documents; states before them are used.
            document: [A] which text each belongs to.
            size: slots of a block, at most the drafter's own; fewer near the end of a text.

        Returns:
            [A, size - 1, Vd] in fp32 or wider.
        """


class DrafterModule(nn.Module):
    """A family's network; its parameters are what trains."""

    config: DrafterShape

    if TYPE_CHECKING:  # a family's own parts (`drafter.fc`), which no type here names

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    @property
    def draft_vocab(self) -> DraftVocab | None:
        """The reduced vocabulary, or None where drafts are over the target's own."""
        return None

    def new_context(self, ends: EmbeddingAndHead, head: Tensor) -> DraftContext:
        """An empty context.

        Args:
            ends: the target's embedding and head.
            head: [Vd, D] the head's rows for the tokens that the drafter can propose.
        """
        raise NotImplementedError


class Proposer:
    """A drafter between the target's embedding and head."""

    def __init__(self, drafter: DrafterModule, ends: EmbeddingAndHead) -> None:
        self.drafter, self.ends = drafter, ends
        self.vocab, self.block_size = drafter.draft_vocab, drafter.config.block_size
        self.head = ends.head if self.vocab is None else self.vocab.head_rows(ends.head)

    def new_context(self) -> DraftContext:
        """An empty context of the drafter."""
        return self.drafter.new_context(self.ends, self.head)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary, of any shape, as the target's."""
        return draft_ids if self.vocab is None else self.vocab.to_target(draft_ids)

    def to_target_vocabulary(self, probabilities: Tensor) -> Tensor:
        """[n, Vd] -> [n, V]: tokens that the draft vocabulary lacks get probability 0."""
        if self.vocab is None:
            return probabilities
        wide = probabilities.new_zeros(len(probabilities), len(self.ends.head))
        wide[:, self.vocab.t2d] = probabilities
        return wide
