"""One trace from one loaded target, in this process: forward by forward, request by request."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from torch import Tensor

from parity.environment import PACKAGES, environment
from parity.errors import ParityError
from parity.model.target.backends import Backend, OperatorCall
from parity.model.target.forward import ForwardResult, forward
from parity.model.target.load import Target
from parity.model.target.operator_replay import save_calls
from parity.model.target.sketching import DIMS, SEED
from parity.model.target.sketching import sketch as sketch_of
from parity.model.target.spec import PLAIN_TRACE, CaptureEvent, TraceOptions
from parity.model.target.taps import describe_taps
from parity.tracing.trace import (
    SKETCH_SCHEMA,
    TRACE_SCHEMA,
    BackendProof,
    Manifest,
    RequestEntry,
    SketchInfo,
    TapInfo,
    Trace,
    TraceWriter,
)

RANK_TIMEOUT = 3600.0
"""Seconds that rank 0 waits for the other ranks' last requests before it reports which are missing."""


def capture(
    target: Target,
    requests: Sequence[RequestEntry | Mapping[str, object]],
    out: Path,
    options: TraceOptions = PLAIN_TRACE,
    *,
    backend: Backend,
    fingerprint: str,
    problems: Sequence[str] = (),
    progress: Callable[[CaptureEvent], None] = lambda event: None,
) -> BackendProof | None:
    """Compute and write a trace, or a sketch of one. A request that an earlier call wrote is not computed again.

    Args:
        requests: what to compute; entries, or their fields as mappings.
        out: the trace's folder, which must not exist.
        options: what is recorded and how it is computed.
        backend: what this process was set up to compute with; `problems` is what went wrong while it was set up.
        fingerprint: identifies what was requested; weights and versions of libraries are added to it.
        progress: called after each request.

    Returns:
        Who computed, over all requests and ranks; None on every rank but the first, which finishes the trace.

    Raises:
        ParityError: as `forward` does; where `out` holds a capture of other settings; and where the other trace of
            `options.local_from` has other tokens.
    """
    other = Trace.open(options.local_from) if options.local_from else None
    entries = [RequestEntry.model_validate(request) for request in requests]
    calls: list[OperatorCall] = []
    infos: tuple[TapInfo, ...] = ()
    fingerprint = _whole_fingerprint(fingerprint, target, other)
    with TraceWriter(out, fingerprint) as writer, _BackgroundWriter() as behind:
        # This rank's share; one request is written while the next is computed.
        for position, entry in enumerate(entries):
            if position % options.world != options.rank:
                continue
            if entry.id not in writer.entries:
                result = forward(
                    target,
                    entry.token_ids,
                    backend=backend,
                    taps=options.taps,
                    mode=options.mode,
                    local=_inputs(other, entry) if other else None,
                    rows=options.rows,
                    keep_calls=options.operators is not None,
                    problems=problems,
                )
                behind.do(partial(_add, writer, entry, result, position, options.sketch))
                infos, calls = describe_taps(target, result.taps), [*calls, *result.calls]
            progress({"done": position + 1, "total": len(entries), "request": entry.id})
        behind.wait()
        if options.operators is not None:
            save_calls(calls, Path(options.operators))
        if options.rank != 0:
            return None
        # Rank 0 finishes the trace. Where an earlier call wrote every request, one token shows what the taps hold.
        _wait_for_ranks(writer, entries)
        if not infos:
            sample = forward(target, entries[0].token_ids[:1], backend=backend, taps=options.taps)
            infos = describe_taps(target, sample.taps)
        trace = writer.finish(
            Manifest(
                schema=SKETCH_SCHEMA if options.sketch else TRACE_SCHEMA,
                sketch=SketchInfo(dims=DIMS, seed=SEED) if options.sketch else None,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                target=target.identity,
                loader=target.spec.loader,
                dtype=target.dtype,
                kept_float32=target.kept_float32,
                mode=options.mode + ("+local" if other else ""),
                # Stands for no call yet: the writer puts in what every request's proof adds up to.
                backend=BackendProof(requested=backend.choices_by_operator, calls=(), valid=True),
                taps=infos,
                requests=tuple(entries),
                fingerprint=fingerprint,
                environment=environment(),
            )
        )
    return trace.manifest.backend


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


def _whole_fingerprint(requested: str, target: Target, other: Trace | None) -> str:
    """What was requested, and what computes it: weights, versions, the other trace.

    A capture that goes on with other weights or another library would mix two models in one trace.
    """
    versions = {key: value for key, value in environment().items() if key in PACKAGES}
    parts = [requested, target.identity.model_dump_json(), json.dumps(versions, sort_keys=True)]
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
