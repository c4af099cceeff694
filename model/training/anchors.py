"""Where blocks start and what their slots are trained on.

Anchors are drawn anew each epoch from (seed, epoch, sample id) with Philox, a counter-based generator: never
from the rank, from the order of documents or from a global generator, so that packing, sharding and resuming
change nothing. The paper draws at random among response tokens (arXiv 2602.06036); the two conditions on a
candidate are SpecForge's and DeepSpec's (the anchor and the token after it are supervised), and no label
leaves its document.

Shapes: S tokens of a packed row, A anchors (blocks), B slots of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parity.errors import ParityError

PADDING = -1
"""Document number of a padding token, which belongs to no text."""
IGNORE = -100
"""Label of a slot that is not supervised (torch's own `ignore_index`)."""
WORD = 2**64
"""Philox works on unsigned 64-bit words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    """How many anchors a document gets in one epoch, and which tokens can be one."""

    budget: int = 512
    """Anchors of one document at most (paper: 512)."""
    share: float = 1.0
    """Share of a document's candidates at most: bounds the slots of a row packed from short documents."""
    partial: bool = True
    """True: a block may reach past its document's end, with its outer slots unsupervised. False: it must fit
    (speculators, NeMo), and documents shorter than a block get no anchor."""
    past_holes: bool = True
    """True: slots after a hole in the loss mask stay supervised (speculators, SpecForge). False: only those
    before the first hole (DeepSpec), as acceptance would stop there."""

    def __post_init__(self) -> None:
        if self.budget < 1 or not 0 < self.share <= 1:
            found = f"budget {self.budget}, share {self.share}"
            raise ParityError("anchors", found, "give a budget of at least 1 and a share above 0 and up to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLabels:
    """What the slots of A blocks stand for."""

    anchors: Tensor
    """[A] token index of slot 0."""
    index: Tensor
    """[A, B] token index of every slot, clamped to the row."""
    supervised: Tensor
    """bool [A, B]: the slot is trained on. Never slot 0, never beyond the anchor's document."""
    labels: Tensor
    """[A, B] the data token where supervised, else IGNORE."""

    @property
    def teacher_index(self) -> Tensor:
        """[A, B] index of the target's state that predicts the slot's token: the token before it."""
        return (self.index - 1).clamp(min=0)


def is_candidate(loss_mask: Tensor, document: Tensor, block_size: int, config: AnchorConfig) -> Tensor:
    """bool [S]: the token may be an anchor. loss_mask bool [S]; document [S], PADDING where there is none."""
    mask = loss_mask.bool() & (document != PADDING)
    candidate = torch.zeros_like(mask)
    candidate[:-1] = mask[:-1] & mask[1:] & (document[:-1] == document[1:])
    if not config.partial:
        reach = block_size - 1
        fits = torch.zeros_like(mask)
        fits[: max(len(mask) - reach, 0)] = document[reach:] == document[: max(len(mask) - reach, 0)]
        candidate &= fits
    return candidate


def random_words(count: int, *, seed: int, epoch: int, sample_id: int) -> NDArray[np.uint64]:
    """`count` words that depend on nothing but the four arguments.

    The raw output of Philox is fixed; numpy's methods on top of it (`permutation`) may change with versions.
    """
    key = np.array([seed % WORD, sample_id % WORD], dtype=np.uint64)  # a list would pass through float64
    counter = np.array([0, 0, epoch % WORD, 0], dtype=np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(count)
    return words


def draw_anchors(
    loss_mask: Tensor,
    document: Tensor,
    sample_ids: Sequence[int],
    *,
    seed: int,
    epoch: int,
    block_size: int,
    config: AnchorConfig,
) -> Tensor:
    """Anchors of one packed row: sorted token indices [A], on the device of `document`.

    loss_mask bool [S]; document [S] counts 0, 1, ... with PADDING where there is none; sample_ids names each
    document's sample in the data set. Each argument after the row says what the draw depends on.
    """
    candidate = is_candidate(loss_mask, document, block_size, config).cpu()
    chosen = [torch.empty(0, dtype=torch.long)]
    for number, own in _by_document(candidate, document.cpu()):
        count = min(config.budget, ceil(config.share * len(own)))
        words = random_words(len(own), seed=seed, epoch=epoch, sample_id=sample_ids[number])
        order = np.argsort(words, kind="stable")[:count]
        chosen.append(own[torch.from_numpy(order)])
    return torch.cat(chosen).sort().values.to(document.device)


def _by_document(select: Tensor, document: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each document's number with the indices of its selected tokens, in the order of the row."""
    index = select.nonzero().squeeze(-1)
    owners = document[index]
    for number in owners.unique().tolist():
        yield number, index[owners == number]


def blocks_at(
    anchors: Tensor,
    tokens: Tensor,
    loss_mask: Tensor,
    document: Tensor,
    block_size: int,
    *,
    past_holes: bool = True,
) -> BlockLabels:
    """The blocks at `anchors` [A] of a row: tokens [S], loss_mask bool [S], document [S]."""
    wanted = anchors[:, None] + torch.arange(block_size, device=anchors.device)
    index = wanted.clamp(max=len(tokens) - 1)
    same = (wanted < len(tokens)) & (document[index] == document[anchors][:, None])
    inside = same.cumprod(dim=1).bool() & (document[anchors] != PADDING)[:, None]
    supervised = inside & loss_mask.bool()[index]
    if not past_holes:
        supervised[:, 0] = True
        supervised = supervised.cumprod(dim=1).bool()
    supervised[:, 0] = False
    labels = torch.where(supervised, tokens[index], torch.full_like(index, IGNORE))
    return BlockLabels(anchors=anchors, index=index, supervised=supervised, labels=labels)


def block_ids(tokens: Tensor, anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Ids [A, B] that fill the blocks: the token at the anchor, then mask tokens. tokens [S], anchors [A]."""
    ids = torch.full((len(anchors), block_size), mask_token_id, dtype=tokens.dtype, device=tokens.device)
    ids[:, 0] = tokens[anchors]
    return ids


@dataclass(kw_only=True, slots=True)
class AnchorCoverage:
    """Which supervised tokens of each sample have ever been an anchor."""

    anchored: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    """Per sample one flag for each of its supervised tokens, in the order of the text."""

    def update(self, loss_mask: Tensor, document: Tensor, sample_ids: Sequence[int], anchors: Tensor) -> None:
        """Count the anchors of one packed row, as given to and drawn by `draw_anchors`."""
        hit = torch.zeros(len(document), dtype=torch.bool)
        hit[anchors.cpu()] = True
        counted = (loss_mask.bool() & (document != PADDING)).cpu()
        for number, own in _by_document(counted, document.cpu()):
            now = hit[own].numpy()
            before = self.anchored.get(sample_ids[number])
            self.anchored[sample_ids[number]] = now if before is None else before | now

    def shares(self) -> dict[int, float]:
        """Per sample id the share of its supervised tokens that were ever anchored, 0 to 1."""
        return {sample: float(flags.mean()) for sample, flags in sorted(self.anchored.items())}

    def share(self) -> float:
        """The same over all supervised tokens seen so far; 0 when there are none."""
        total = sum(len(flags) for flags in self.anchored.values())
        return sum(int(flags.sum()) for flags in self.anchored.values()) / total if total else 0.0
