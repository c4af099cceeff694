"""Sketch traces: the folder of a trace that keeps of each tap a norm and a projection a token, not the states.

    trace = open_trace(Path("step-1000"))                  # a `Trace`, or a `SketchTrace`
    trace.sketch("r0", "layer.3.out").norms                # [S, 2]

Shapes: S tokens of a request, P dimensions of a projection, K outlier channels that are kept as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from parity.errors import ParityError
from parity.tracing.trace import Trace

SKETCH_PARTS = ("norms", "projection", "massive", "channels")
"""Names of the tensors of a tap in a shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TapSketch:
    """What is kept of one tap of one request."""

    norms: Tensor
    """[S, 2] float32: of the whole row, and without the massive channels. Not finite where a state is not."""
    projection: Tensor
    """[S, P] of the row without the massive channels, divided by its norm; float16 or float32."""
    massive: Tensor
    """[S, K] float32: the massive channels' values."""
    channels: Tensor
    """[K] int32: which channels those are."""

    def tensors(self, tap: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By name in a shard: those with a row a token, and the others."""
        rows = {name: getattr(self, name) for name in SKETCH_PARTS[:3]}
        return {f"{tap}:{name}": part for name, part in rows.items()}, {f"{tap}:channels": self.channels}

    @classmethod
    def of_tensors(cls, held: Mapping[str, Tensor]) -> "TapSketch":
        """From the four parts by name."""
        return cls(**{name: held[name] for name in SKETCH_PARTS})


class SketchTrace(Trace):
    """A sketch trace: the manifest of a trace, and of each tap what `sketching` keeps."""

    def tensor(self, request_id: str, tap: str) -> Tensor:
        """A sketch has no states. Raises ParityError."""
        raise ParityError(
            f"the states of {tap} in {self.path}",
            "a sketch of them",
            "capture them in full, without --sketch",
        )

    def sketch(self, request_id: str, tap: str) -> TapSketch:
        """What is kept of one tap of one request. Raises ParityError for a damaged shard."""
        entry, info = self.request(request_id), self.tap(tap)
        dims = self.manifest.sketch.dims if self.manifest.sketch is not None else 0
        shard = self.shard_of(entry)
        try:
            held = TapSketch.of_tensors({name: shard.get_tensor(f"{tap}:{name}") for name in SKETCH_PARTS})
        except Exception as error:
            raise ParityError(
                f"{tap} of request {request_id!r} in {self.path / entry.shard}",
                f"a damaged shard ({error})",
                "capture that sketch again",
            ) from error
        rows, count = entry.rows, held.channels.numel()
        shapes = [tuple(getattr(held, name).shape) for name in SKETCH_PARTS]
        inside = not count or 0 <= int(held.channels.min()) <= int(held.channels.max()) < info.width
        if shapes != [(rows, 2), (rows, dims), (rows, count), (count,)] or not inside:
            raise ParityError(
                f"{tap} of request {request_id!r} as a sketch of [{rows}, {info.width}]",
                f"parts of {', '.join(str(shape) for shape in shapes)} in {entry.shard}",
                "capture that sketch again; shard and manifest disagree",
            )
        return held


def open_trace(folder: Path) -> Trace:
    """A trace or a sketch trace. Raises ParityError as `Trace.open` does."""
    trace = Trace.of_folder(folder)
    return trace if trace.manifest.sketch is None else SketchTrace(trace.path, trace.manifest)


def is_sketch(trace: Trace) -> bool:
    """Whether the trace holds sketches."""
    return trace.manifest.sketch is not None
