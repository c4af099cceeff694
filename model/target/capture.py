"""One trace from one loaded target, in this process: forward by forward, request by request."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from torch import Tensor

from parity.environment import PACKAGES, environment
from parity.errors import ParityError
from parity.model.target.backends import Backend, OperatorCall
from parity.model.target.load import ForwardResult, Target, describe_taps, forward
from parity.model.target.operator_replay import save_calls
from parity.model.target.sketching import DIMS, SEED
from parity.model.target.sketching import sketch as sketch_of
from parity.tracing.trace import (
    SKETCH_SCHEMA,
    TRACE_SCHEMA,
    BackendProof,
    Manifest,
    RequestEntry,
    SketchInfo,
    Trace,
    TraceWriter,
)

# How long rank 0 waits for the other ranks' last requests before it says which are missing.
RANK_TIMEOUT = 3600.0


def capture(
    target: Target,
    requests: Sequence[Mapping[str, Any]],
    out: Path,
    *,
    backend: Backend,
    fingerprint: str,
    taps: Sequence[str] | None = None,
    mode: str = "prefill",
    local_from: str | None = None,
    rows: int = 1,
    operators: Path | None = None,
    sketch: bool = False,
    rank: int = 0,
    world: int = 1,
    problems: Sequence[str] = (),
    progress: Callable[..., None] = lambda **_: None,
) -> dict[str, Any]:
    """Compute and write a trace, or a sketch of one; see `model.target.forward` for mode, local and rows.

    Of `world` processes, this one computes every world-th request; rank 0 waits for the rest and
    finishes the trace. Returns the proof and where the trace lies. Raises ParityError as its parts do.
    """
    other = Trace.open(local_from) if local_from else None
    entries = [RequestEntry.model_validate(request) for request in requests]
    calls: list[OperatorCall] = []
    infos: tuple[Any, ...] = ()
    fingerprint = _whole_fingerprint(fingerprint, target, other)
    with TraceWriter(out, fingerprint) as writer, _BackgroundWriter() as behind:
        for position, entry in enumerate(entries):
            if position % world != rank:
                continue
            if entry.id not in writer.entries:
                local = _inputs(other, entry) if other else None
                result = forward(
                    target,
                    entry.token_ids,
                    backend=backend,
                    taps=taps,
                    mode=mode,
                    local=local,
                    rows=rows,
                    keep_calls=operators is not None,
                    problems=problems,
                )
                behind.do(partial(_add, writer, entry, result, position, sketch))
                infos, calls = describe_taps(target, result.taps), [*calls, *result.calls]
            progress(done=position + 1, total=len(entries), request=entry.id)
        behind.wait()
        if operators is not None:
            save_calls(calls, operators)
        if rank != 0:
            return {"rank": rank}
        _wait_for_ranks(writer, entries)
        infos = infos or describe_taps(target, _sample(target, entries[0], backend, taps).taps)
        trace = writer.finish(
            _manifest(
                target, entries, infos, backend, mode + ("+local" if other else ""), fingerprint, sketch
            )
        )
    proof = trace.manifest.backend
    return {
        "out": str(out),
        "valid": proof.valid,
        "problems": proof.problems,
        "calls": [call.model_dump() for call in proof.calls],
    }


def _add(
    writer: TraceWriter, entry: RequestEntry, result: ForwardResult, position: int, sketched: bool
) -> None:
    """Write one request's taps, or their sketches."""
    tensors, further = dict(result.taps), dict[str, Tensor]()
    if sketched:
        tensors = {}
        for name, states in result.taps.items():
            rows, others = sketch_of(states).tensors(name)
            tensors |= rows
            further |= others
    writer.add(entry, tensors, proof=result.proof, position=position, further=further)


def _whole_fingerprint(asked: str, target: Target, other: Trace | None) -> str:
    """What was asked for, and what it would be computed with: weights, versions, the other trace's own. A
    capture that goes on with other weights or another library would mix two models in one trace."""
    versions = {key: value for key, value in environment().items() if key in PACKAGES}
    parts = [asked, target.identity.model_dump_json(), json.dumps(versions, sort_keys=True)]
    parts += [other.manifest.fingerprint] if other else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _BackgroundWriter:
    """Writes one request while the next is computed; at most one write waits, so memory stays bounded."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> "_BackgroundWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True)

    def do(self, write: Callable[[], None]) -> None:
        """Hand over one write, after the one before it. Raises what that one raised."""
        self.wait()
        self._pending = self._pool.submit(write)

    def wait(self) -> None:
        """Until the last write is done. Raises what it raised."""
        if self._pending is not None:
            self._pending.result()
        self._pending = None


def _sample(
    target: Target, entry: RequestEntry, backend: Backend, taps: Sequence[str] | None
) -> ForwardResult:
    """One short forward, to learn what the taps hold where every request was written before."""
    return forward(target, entry.token_ids[:1], backend=backend, taps=taps)


def _inputs(other: Trace, entry: RequestEntry) -> dict[str, Tensor]:
    """Each layer's input in the other trace. Raises ParityError where its tokens are not the same."""
    if other.request(entry.id).token_ids != entry.token_ids:
        raise ParityError(
            f"local error on request {entry.id!r}",
            f"other token ids in {other.path}",
            "capture both from the same prompts",
        )
    return {
        name: other.tensor(entry.id, name)
        for name in other.taps
        if name == "embed.out" or (name.startswith("layer.") and name.count(".") == 2)
    }


def _wait_for_ranks(writer: TraceWriter, entries: Sequence[RequestEntry]) -> None:
    start = monotonic()
    missing = [entry.id for entry in entries]
    while missing and monotonic() - start < RANK_TIMEOUT:
        writer.refresh()
        missing = [entry.id for entry in entries if entry.id not in writer.entries]
        if missing:
            sleep(0.5)


def _manifest(
    target: Target,
    entries: Sequence[RequestEntry],
    infos: tuple[Any, ...],
    backend: Backend,
    mode: str,
    fingerprint: str,
    sketch: bool,
) -> Manifest:
    nothing = BackendProof(requested=backend.choices_by_operator, calls=(), valid=True)
    return Manifest(
        schema=SKETCH_SCHEMA if sketch else TRACE_SCHEMA,
        sketch=SketchInfo(dims=DIMS, seed=SEED) if sketch else None,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target.identity,
        loader=target.spec.loader,
        dtype=target.dtype,
        kept_float32=target.kept_float32,
        mode=mode,
        backend=nothing,
        taps=infos,
        requests=tuple(entries),
        fingerprint=fingerprint,
        environment=environment(),
    )
