"""The rows that wiring probes give to a trainer's step: packed documents of which every token is known.

row = synthetic_row([SyntheticDocument(length=32, prompt=4), SyntheticDocument(length=16)], 1000, padding=3)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from parity.errors import ParityError
from parity.model.training.anchors import PADDING
from parity.model.training.data import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticDocument:
    """One document of a synthetic row; lengths in tokens."""

    length: int
    prompt: int = 0
    """Tokens at its beginning that are not trained on."""
    holes: tuple[int, ...] = ()
    """Further tokens that are not, counted from its beginning."""


def synthetic_row(
    texts: Sequence[SyntheticDocument],
    vocabulary: int,
    *,
    avoid: Sequence[int] = (),
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """Make a packed row [S] whose tokens are all different as long as the vocabulary lasts.

    Args:
        texts: the documents, one behind the other.
        vocabulary: ids are drawn from 0 to this, exclusive.
        avoid: ids that no document uses (the mask token).
        padding: tokens behind the documents.
        seed: of the order in which ids are drawn.

    Raises:
        ParityError: where fewer than 2 ids are left.
    """
    ids = np.setdiff1d(np.arange(vocabulary), np.array(list(avoid), dtype=np.int64))
    if len(ids) < 2:
        raise ParityError("a synthetic row", f"{vocabulary} tokens", "give the adapter's vocabulary")
    total = sum(text.length for text in texts)
    order = np.random.default_rng(seed).permutation(ids)
    tokens = np.concatenate((np.resize(order, total), np.zeros(padding, dtype=np.int64)))
    # Per document: what is trained on, whose it is, and the position in it; padding behind them all.
    mask, document, position = [], [], []
    for number, text in enumerate(texts):
        own = np.arange(text.length) >= text.prompt
        own[list(text.holes)] = False
        mask.append(own)
        document.append(np.full(text.length, number))
        position.append(np.arange(text.length))
    mask.append(np.zeros(padding, dtype=np.bool_))
    document.append(np.full(padding, PADDING))
    position.append(np.arange(padding))
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate(mask)),
        document=torch.from_numpy(np.concatenate(document).astype(np.int64)),
        position=torch.from_numpy(np.concatenate(position).astype(np.int64)),
        sample_ids=tuple(range(len(texts))),
        epoch=0,
    )
