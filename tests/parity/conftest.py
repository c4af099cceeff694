"""Small synthetic traces: tensors in, a finished trace folder out."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from parity.tracing.trace import (
    TRACE_SCHEMA,
    BackendProof,
    Manifest,
    RequestEntry,
    TapInfo,
    TargetIdentity,
    Trace,
    TraceWriter,
)

Tensors = Mapping[str, torch.Tensor]
WriteTrace = Callable[..., Trace]
LAYER_TYPES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def unwrapped(err: str) -> str:
    """A message of the command line as it was before it was broken into lines: one that goes on is indented by two."""
    return re.sub(r"\n  (?=\S)", " ", err) if err.startswith("parity: ") else err


def tap_info(name: str, tensor: torch.Tensor) -> TapInfo:
    """The entry of a tap in a manifest, read off its name and tensor."""
    parts = name.split(".")
    return TapInfo(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        width=tensor.shape[1],
        layer=int(parts[1]) if parts[0] == "layer" else None,
        norm="none",
        hf_index=None,
        meaning="test",
    )


def write(
    path: Path,
    requests: Mapping[str, Tensors],
    *,
    tokens: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    mode: str = "prefill",
    backend: str = "torch",
    problems: Sequence[str] = (),
    weights: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Trace:
    """Write a trace of {request: {tap: [tokens, width]}} and open it. Tokens default to 100, 101, ..."""
    first = next(iter(requests.values()))
    entries = []
    with TraceWriter(path, "test") as writer:
        for name, tensors in requests.items():
            rows = next(iter(tensors.values())).shape[0]
            ids = (
                tuple(tokens[name])
                if tokens is not None and name in tokens
                else tuple(range(100, 100 + rows))
            )
            entry = RequestEntry(
                id=name,
                token_ids=ids,
                origin="given",
                prompt_tokens=rows,
                token_texts=tuple(f"t{token}" for token in ids),
            )
            writer.add(entry, tensors)
            entries.append(entry)
        taps = tuple(tap_info(name, tensor) for name, tensor in first.items())
        identity = TargetIdentity(
            name="test",
            revision=None,
            config_sha256="0",
            model_type="test",
            layers=4,
            layer_types=LAYER_TYPES,
            weights=dict(weights or {"w": "1"}),
        )
        golden = {tensor.dtype for tensor in first.values()} == {torch.float64}  # as a golden capture says it
        proof = BackendProof(
            requested={"delta": "golden", "conv": "golden"}
            if golden
            else {"delta": backend, "conv": "torch"},
            calls=(),
            valid=not problems,
            problems=tuple(problems),
        )
        return writer.finish(
            Manifest(
                schema=TRACE_SCHEMA,
                created="2026-01-01T00:00:00Z",
                target=identity,
                loader="test",
                dtype=dtype or taps[0].dtype,
                mode=mode,
                backend=proof,
                taps=taps,
                requests=tuple(entries),
                fingerprint="test",
                environment=dict(environment or {}),
            )
        )


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """`write` into a fresh folder of this test: write_trace("a", {"r0": {"layer.0.out": tensor}})."""

    def make(name: str, requests: Mapping[str, Tensors], **options: object) -> Trace:
        return write(tmp_path / name, requests, **options)  # type: ignore[arg-type]

    return make
