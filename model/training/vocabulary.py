"""A reduced draft vocabulary: which of the target's tokens a drafter can propose, and how they are chosen.

Shapes: V vocabulary of the target, Vd reduced draft vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import Recipe
from parity.model.training.data import Document


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftVocab:
    """A reduced draft vocabulary: which target tokens it holds, and the way back (speculators' maps)."""

    t2d: Tensor
    """bool [V]: the target token has a draft id. Draft ids follow the order of target ids."""
    d2t: Tensor
    """int64 [Vd], offsets: target id = draft id + d2t[draft id]."""

    def __post_init__(self) -> None:
        kept = self.t2d.nonzero().squeeze(-1)
        own = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        if len(kept) != len(own) or not torch.equal(kept.to(own.device), own):
            found = f"t2d keeps {len(kept)} tokens, d2t names {len(own)}, and they are not the same tokens"
            raise ParityError("a reduced draft vocabulary", found, "take both maps from the same run")

    @classmethod
    def from_kept(cls, t2d: Tensor) -> "DraftVocab":
        """The maps for the kept tokens `t2d` (bool [V])."""
        kept = t2d.nonzero().squeeze(-1)
        return cls(t2d=t2d, d2t=kept - torch.arange(len(kept), device=kept.device))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of any shape as target ids."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Target ids of any shape as draft ids; -1 where the draft vocabulary lacks the token."""
        ids = self.t2d.cumsum(0) - 1
        return torch.where(self.t2d, ids, torch.full_like(ids, -1))[target_ids]

    def head_rows(self, head: Tensor) -> Tensor:
        """The rows [Vd, D] of the target's head [V, D] that the drafter uses."""
        return head[self.t2d]


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
