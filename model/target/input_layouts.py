"""The same tokens fed in other ways: padded, batched, packed, in pieces with a cache, with other positions.

What a serving engine or a training step does to a request beside computing it. The function must not
change; `run_layout` returns the taps of every row, padding removed, so that two feedings can be compared.

    alone = run_layout(target, InputLayout(rows=(ids,)), backend=parse_backend("torch"))
    padded = run_layout(target, InputLayout(rows=(ids,), left=(5,)), backend=parse_backend("torch"))
    padded.rows[0]["layer.0.out"]                                # [tokens, width], as in alone.rows[0]
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.target.backends import Backend, CallRecorder, prove
from parity.model.target.forward import new_cache
from parity.model.target.load import Target
from parity.model.target.taps import TapRecorder, select_taps
from parity.tracing.trace import BackendProof


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLayout:
    """How one batch reaches the model. Token ids are those of the real tokens; what is padded is added here."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids of each row. Rows of unequal length are padded on the left up to the longest."""
    left: tuple[int, ...] = ()
    """Further pads on the left of each row; empty for none."""
    right: int = 0
    """Further pads on the right of every row."""
    pad_id: int = 0
    splits: tuple[int, ...] = ()
    """Columns of the batch before which a new forward begins, the cache kept."""
    positions: tuple[int, ...] = ()
    """Position of each column; empty: as the model counts them (padding left out)."""
    segments: tuple[int, ...] = ()
    """First columns of the segments after the first: one row that holds several documents."""
    boundaries: bool = False
    """Whether the kernels get `segments` too (cu_seq_lens, seq_idx), beside the positions."""
    drafted: tuple[int, ...] = ()
    """Tokens that are computed at the first split, then taken out of the cache again, as rejected drafts are."""

    def __post_init__(self) -> None:
        if self.splits and list(self.splits) != sorted(set(self.splits)):
            raise ParityError(f"splits {self.splits}", "not in rising order", "name each column once")
        if self.drafted and not self.splits:
            raise ParityError("drafted tokens", "no split after which to draft", "give one split")
        if self.segments and len(self.rows) != 1:
            raise ParityError("packed segments", f"{len(self.rows)} rows", "pack into one row")

    @property
    def pads(self) -> tuple[int, ...]:
        """Pads on the left of each row, those that make the rows equally long included."""
        longest = max(len(row) for row in self.rows)
        more = self.left or (0,) * len(self.rows)
        ends = [longest - len(row) + extra for row, extra in zip(self.rows, more, strict=True)]
        # Every row ends at the same column: what one row has more, the others get too.
        width = max(end + len(row) for end, row in zip(ends, self.rows, strict=True))
        return tuple(width - len(row) for row in self.rows)

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(ids, mask) [rows, columns]; no mask where nothing is padded."""
        pads = self.pads
        ids = [
            [self.pad_id] * pad + [*row] + [self.pad_id] * self.right
            for pad, row in zip(pads, self.rows, strict=True)
        ]
        if not any(pads) and not self.right:
            return torch.tensor(ids, device=device), None
        mask = [
            [0] * pad + [1] * len(row) + [0] * self.right for pad, row in zip(pads, self.rows, strict=True)
        ]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutOutput:
    """What one feeding gave."""

    rows: tuple[dict[str, Tensor], ...]
    """For each row, its taps: [real tokens, width] on CPU, in the dtype computed."""
    proof: BackendProof


def run_layout(
    target: Target, feed: InputLayout, *, backend: Backend, taps: Sequence[str] | None = None
) -> LayoutOutput:
    """Run one feeding and record its taps, with proof of who computed it.

    Args:
        feed: the tokens, and how they reach the model.
        backend: what this process was set up to compute with.
        taps: as `select_taps` reads them.

    Raises what the model raises where it refuses such a batch: a refusal is no silent fault.
    """
    names = select_taps(target, taps)
    recorder = TapRecorder(target, names, rows=None)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        calls = stack.enter_context(CallRecorder(target.linear, on_output=recorder.operator))
        stack.enter_context(recorder)
        _forwards(target, feed, recorder)
    rows = _remove_padding(recorder.result(), feed)
    return LayoutOutput(rows=rows, proof=prove(backend, calls.proofs(), target.linear))


def _remove_padding(taps: dict[str, Tensor], feed: InputLayout) -> tuple[dict[str, Tensor], ...]:
    """Of each row its taps, [real tokens, width], from the batch's [rows, columns, width]."""
    return tuple(
        {name: tap[row, pad : pad + len(ids)] for name, tap in taps.items()}
        for row, (pad, ids) in enumerate(zip(feed.pads, feed.rows, strict=True))
    )


def _forwards(target: Target, feed: InputLayout, recorder: TapRecorder) -> None:
    """The forwards of one feeding, each recorded with its number of columns."""
    ids, mask = feed.batch(target.device)
    columns = ids.shape[1]
    positions = torch.tensor([feed.positions or _resets(feed, columns)] * len(feed.rows), device=ids.device)
    cut = [0, *feed.splits, columns]
    given: dict[str, Any] = {"use_cache": False}
    if feed.splits:
        name, cache = new_cache(target)
        given = {"use_cache": True, name: cache}
    if feed.boundaries:
        given |= _boundaries(feed, columns, ids.device)
    for number, (start, stop) in enumerate(pairwise(cut)):
        if number == 1 and feed.drafted:
            _draft_and_crop(target, feed, start, given, recorder)
        part: dict[str, Any] = {"input_ids": ids[:, start:stop]}
        if mask is not None:
            part["attention_mask"] = mask[:, :stop]
        if feed.positions or feed.segments:
            part["position_ids"] = positions[:, start:stop]
        elif mask is not None:
            counted = (mask.cumsum(1) - 1).clamp(min=0)
            part["position_ids"] = counted[:, start:stop]
        recorder.sizes.append(stop - start)
        recorder.run(**part, **given)


def _resets(feed: InputLayout, columns: int) -> tuple[int, ...]:
    """Positions that begin anew with each segment."""
    starts = [0, *feed.segments, columns]
    return tuple(position for begin, end in pairwise(starts) for position in range(end - begin))


def _boundaries(feed: InputLayout, columns: int, device: torch.device) -> dict[str, Any]:
    """What transformers' packed call takes beside the positions ."""
    starts = [0, *feed.segments, columns]
    lengths = [end - begin for begin, end in pairwise(starts)]
    edges = torch.tensor(starts, dtype=torch.int32, device=device)
    index = [number for number, length in enumerate(lengths) for _ in range(length)]
    return {
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": torch.tensor([index], dtype=torch.int32, device=device),
    }


def _draft_and_crop(
    target: Target, feed: InputLayout, start: int, given: dict[str, Any], recorder: TapRecorder
) -> None:
    """Compute the drafted tokens with the cache, then take them out of it again, nothing recorded."""
    cache = next(value for value in given.values() if hasattr(value, "crop"))
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    recorder.recording = False
    target.model(input_ids=torch.tensor([feed.drafted] * len(feed.rows), device=target.device), **given)
    recorder.recording = True
    cache.crop(-len(feed.drafted))
