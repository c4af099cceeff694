"""Where faults are planted: two hybrid targets, their requests, and captures written as real traces."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from parity.capturing.prompts import Prompt
from parity.model.target.backends import parse_backend
from parity.model.target.input_layouts import InputLayout, run_layout
from parity.model.target.load import Target, load_target
from parity.model.target.prompt_ids import entries as entries_of
from parity.model.target.spec import TargetSpec
from parity.model.target.taps import describe_taps
from parity.model.tiny.corpus import conversation
from parity.model.tiny.embedded import find_embedded_target
from parity.tracing.trace import (
    TRACE_SCHEMA,
    BackendProof,
    Manifest,
    RequestEntry,
    Trace,
    TraceWriter,
    merge_proofs,
)

Rows = dict[str, Tensor]
"""Taps of one request, [tokens, width] each."""
WIDE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
"""The wider random hybrid: eight layers, hidden 256."""


def build_wide(folder: Path) -> Path:
    """Save the wide random hybrid. States live long (A_log in -5..1), or a state fault would look like one of
    the convolution; weights are larger than transformers' default, so that each layer moves the stream."""
    import transformers

    torch.manual_seed(11)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**WIDE, initializer_range=0.06))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-5, 1)
    model.save_pretrained(folder)
    return folder


@dataclass
class Bench:
    """One target and what it is asked."""

    model: Path
    requests: tuple[RequestEntry, ...]
    """Unequal lengths, all more than a chunk of the delta rule, with one common beginning."""
    packed: tuple[RequestEntry, ...]
    """Each holds two or more documents one after the other."""
    starts: Mapping[str, tuple[int, ...]]
    """First tokens of the further documents of each packed request."""
    operator: Callable[..., Any]
    """`changed_operator` of the top conftest."""
    folder: Path
    dtype: str = "float32"
    """In which the target is loaded unless a fault says otherwise."""
    _targets: dict[tuple[str, bool], Target] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def target(self, dtype: str | None = None, *, fresh: bool = False, **options: Any) -> Target:
        """The loaded target; a fresh one where its weights will be changed."""
        dtype = dtype or self.dtype
        if fresh or options:
            return load_target(TargetSpec(model=str(self.model), dtype=dtype, **options))
        if (dtype, False) not in self._targets:
            self._targets[dtype, False] = load_target(TargetSpec(model=str(self.model), dtype=dtype))
        return self._targets[dtype, False]

    def rows(self, target: Target, feeds: Sequence[InputLayout]) -> tuple[list[Rows], list[BackendProof]]:
        """Run batches one after the other: the taps of every row, and the proofs."""
        rows: list[Rows] = []
        proofs: list[BackendProof] = []
        for feed in feeds:
            fed = run_layout(target, feed, backend=parse_backend("torch"), taps=["*"])
            rows += fed.rows
            proofs.append(fed.proof)
        return rows, proofs

    def write(
        self,
        target: Target,
        requests: Sequence[RequestEntry],
        rows: Sequence[Rows],
        proofs: Sequence[BackendProof],
        mode: str = "prefill",
    ) -> Trace:
        """A trace of these rows."""
        folder = self.folder / f"{self.model.name}-{next(self._numbers)}"
        held = [
            {name: tensor for name, tensor in taps.items() if name in target_order(target)} for taps in rows
        ]
        with TraceWriter(folder, folder.name) as writer:
            for entry, taps in zip(requests, held, strict=True):
                writer.add(entry, taps)
            return writer.finish(
                Manifest(
                    schema=TRACE_SCHEMA,
                    created="2026-01-01T00:00:00Z",
                    target=target.identity,
                    loader=target.spec.loader,
                    dtype=target.dtype,
                    kept_float32=target.kept_float32,
                    mode=mode,
                    backend=merge_proofs(proofs),
                    taps=describe_taps(target, held[0]),
                    requests=tuple(requests),
                    fingerprint=folder.name,
                    environment={},
                )
            )

    def plain(self, target: Target | None = None, *, requests: Sequence[RequestEntry] | None = None) -> Trace:
        """Each request alone, in one pass."""
        target, requests = target or self.target(), requests or self.requests
        rows, proofs = self.rows(target, [InputLayout(rows=(entry.token_ids,)) for entry in requests])
        return self.write(target, requests, rows, proofs)

    def apart(self, target: Target | None = None) -> Trace:
        """The packed requests with each document computed alone: what packing has to equal."""
        target = target or self.target()
        rows: list[Rows] = []
        proofs: list[BackendProof] = []
        for entry in self.packed:
            edges = [0, *self.starts[entry.id], len(entry.token_ids)]
            feeds = [InputLayout(rows=(entry.token_ids[i:j],)) for i, j in itertools.pairwise(edges)]
            parts, proven = self.rows(target, feeds)
            rows.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
            proofs += proven
        return self.write(target, self.packed, rows, proofs)


def target_order(target: Target) -> list[str]:
    """Names of the taps that are recorded by default."""
    from parity.model.target.taps import select_taps

    return [*select_taps(target, None), "logits"]


def entry(name: str, ids: Sequence[int], prompt_tokens: int | None = None) -> RequestEntry:
    """A request of given token ids."""
    return RequestEntry(
        id=name,
        token_ids=tuple(ids),
        origin="given",
        prompt_tokens=len(ids) if prompt_tokens is None else prompt_tokens,
        token_texts=tuple(str(token) for token in ids),
    )


def embedded_bench(folder: Path, operator: Callable[..., Any]) -> Bench:
    """The embedded target on held-out conversations of its corpus."""
    prompts = [
        Prompt(id=f"r{seed}", messages=tuple(dict(m) for m in conversation(seed, "held_out", length)))
        for seed, length in ((1, 170), (2, 150), (3, 110))
    ]
    made = sorted(
        entries_of(str(find_embedded_target("hybrid")), None, prompts, None), key=lambda e: -len(e.token_ids)
    )
    requests = tuple(replace_id(e, f"r{i}") for i, e in enumerate(made))
    return _bench(Path(find_embedded_target("hybrid")), requests, operator, folder)


def wide_bench(folder: Path, operator: Callable[..., Any]) -> Bench:
    """The wide random hybrid on random tokens that begin as a chat template would."""
    generator = torch.Generator().manual_seed(5)
    requests = tuple(
        entry(f"r{i}", [1, 7, 9, *torch.randint(10, 300, (size - 3,), generator=generator).tolist()])
        for i, size in enumerate((157, 139, 101))
    )
    return _bench(build_wide(folder / "wide"), requests, operator, folder)


def _bench(
    model: Path, requests: tuple[RequestEntry, ...], operator: Callable[..., Any], folder: Path
) -> Bench:
    ids = [request.token_ids for request in requests]
    packed = (
        entry("p0", [*ids[2][:53], *ids[0][:90]]),
        entry("p1", [*ids[1][:37], *ids[2][:50], *ids[0][5:60]]),
    )
    return Bench(
        model=model,
        requests=requests,
        packed=packed,
        starts={"p0": (53,), "p1": (37, 87)},
        operator=operator,
        folder=folder,
    )


def replace_id(request: RequestEntry, name: str) -> RequestEntry:
    """The request under another id."""
    return request.model_copy(update={"id": name})


@contextlib.contextmanager
def patched(where: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Put `change(original, *args)` in the place of a function."""
    original = getattr(where, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    with mock.patch.object(where, name, changed):
        yield


__all__ = ["Bench", "InputLayout", "Rows", "embedded_bench", "entry", "patched", "replace", "wide_bench"]
