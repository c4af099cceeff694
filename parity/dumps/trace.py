"""A dump with the interface of a trace, so that everything that reads traces reads dumps.

dump = dump_of(Path("hidden_states"), SideMap(), 5120, LIMITS)
dump.tensor(dump.requests[0].id, dump.taps[0])      # [tokens, channels], a view of the mapped file
"""

import hashlib
from collections.abc import Mapping as Names
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from parity.dumps.files import FileLimits, TensorFile, open_file
from parity.dumps.identify import LAST, layer_of_tap
from parity.dumps.mapping import SideMap
from parity.dumps.pieces import DumpContents, StatePiece, take
from parity.dumps.read import read_dump
from parity.errors import ParityError
from parity.tracing.trace import (
    NOT_STATED,
    TRACE_SCHEMA,
    BackendProof,
    Manifest,
    RequestEntry,
    TapInfo,
    TargetIdentity,
    Trace,
)


class DumpTrace(Trace):
    """Another tool's dump, with the interface of a trace. `contents` says how it was read."""

    def __init__(
        self, contents: DumpContents, manifest: Manifest, sources: Names[str, tuple[str, ...]]
    ) -> None:
        """`sources` gives the pieces that are summed for each tap."""
        super().__init__(contents.root, manifest)
        self.contents, self.sources = contents, dict(sources)
        self._held = {
            entry.id: held for entry, held in zip(manifest.requests, contents.requests, strict=True)
        }
        self._open = lru_cache(maxsize=16)(open_file)

    def tensor(self, request_id: str, tap: str) -> torch.Tensor:
        """The tap's [tokens, width] tensor of one request: a view of the mapped file where nothing has to be joined.

        Raises ParityError where the file does not hold any more what it held when it was opened.
        """
        entry, info = self.request(request_id), self.tap(tap)
        held = self._held[request_id]
        total: torch.Tensor | None = None
        for name in self.sources[tap]:
            parts = [take(self._file(place.file), place) for place in held.places[name]]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
            total = tensor if total is None else total + tensor
        assert total is not None, "a tap has at least one source"
        if tuple(total.shape) != (entry.rows, info.width) or str(total.dtype) != f"torch.{info.dtype}":
            raise ParityError(
                f"{tap} of request {request_id!r} as {info.dtype} [{entry.rows}, {info.width}]",
                f"{total.dtype} {list(total.shape)} in {self.path}",
                "do not write a dump while it is compared",
            )
        return total

    def _file(self, path: Path) -> TensorFile:
        return self._open(path)

    def digest(self) -> str:
        """A checksum of what was read of the dump, and of its files' sizes and times."""
        found = hashlib.sha256(self.manifest.model_dump_json(by_alias=True).encode())
        for file in sorted(
            {place.file for held in self._held.values() for p in held.places.values() for place in p}
        ):
            state = file.stat()
            found.update(f"{file} {state.st_size} {state.st_mtime_ns}".encode())
        return found.hexdigest()

    def rename_taps(self, names: Names[str, str], reference: Manifest | None = None) -> "DumpTrace":
        """The same dump with other tap names; the reference's layers are taken over where it has any."""
        manifest = self.manifest
        taps = tuple(
            sorted((_info(names.get(tap.name, tap.name), tap) for tap in manifest.taps), key=_depth)
        )  # in the order in which the model computes them: a comparison names the first that is off
        sources = {names.get(tap, tap): pieces for tap, pieces in self.sources.items()}
        target = manifest.target
        if reference is not None:
            update = {"layers": reference.target.layers, "layer_types": reference.target.layer_types}
            target = target.model_copy(update=update)
        return DumpTrace(self.contents, manifest.model_copy(update={"taps": taps, "target": target}), sources)

    def with_requests(self, entries: Sequence[RequestEntry]) -> "DumpTrace":
        """The same dump with other request entries, one for each of its own."""
        manifest = self.manifest.model_copy(update={"requests": tuple(entries)})
        return DumpTrace(self.contents, manifest, self.sources)


def dump_of(path: Path, part: SideMap, width: int | None, limits: FileLimits) -> DumpTrace:
    """A dump under its own names: a piece is called what its tool calls it, or what the mapping says.

    Raises ParityError as `read_dump` does, and for a mapping that names what is not there.
    """
    contents = read_dump(path, part, width=width, limits=limits)
    pieces = {piece.name: piece for piece in contents.pieces}
    sources = part.match_sources(tuple(pieces)) if part.taps else {name: (name,) for name in pieces}
    left = set(pieces) - {name for names in sources.values() for name in names}
    if left:
        notes = (*contents.notes, f"not named in the mapping, so left out: {', '.join(sorted(left))}")
        contents = replace(contents, notes=notes)
    taps = tuple(_tap_of(tap, [pieces[name] for name in names], contents) for tap, names in sources.items())
    dtypes = {tap.dtype for tap in taps}
    return DumpTrace(contents, _manifest(contents, taps, min(dtypes, key=_bits)), sources)


def _bits(dtype: str) -> int:
    """Bytes of a dtype, as a rank of how coarse it is."""
    return int(torch.empty(0, dtype=getattr(torch, dtype)).element_size())


def _tap_of(name: str, pieces: Sequence[StatePiece], contents: DumpContents) -> TapInfo:
    """The manifest entry of a tap that is the sum of these pieces."""
    kinds = {(piece.dtype, piece.width) for piece in pieces}
    if len(kinds) > 1:
        raise ParityError(
            f"{name} as the sum of {', '.join(piece.name for piece in pieces)}",
            ", ".join(f"{dtype} of {width}" for dtype, width in sorted(kinds)),
            "sum tensors of one dtype and width",
        )
    info = TapInfo(
        name=name,
        dtype=pieces[0].dtype,
        width=pieces[0].width,
        layer=None,
        norm="none",
        hf_index=None,
        meaning=f"{' + '.join(piece.name for piece in pieces)} of a {contents.format} dump",
    )
    return _info(name, info)


def _depth(tap: TapInfo) -> int:
    """Where in the model a tap lies; what has no known place comes last, in the dump's own order."""
    layer = layer_of_tap(tap.name)
    return (
        layer if layer is not None else 1_000_000 + (LAST.index(tap.name) if tap.name in LAST else len(LAST))
    )


def _info(name: str, info: TapInfo) -> TapInfo:
    """The same entry under another name, with what the name implies."""
    layer = layer_of_tap(name)
    norm = {"final.prenorm": "pre", "final.postnorm": "post"}.get(name, "none")
    return info.model_copy(
        update={"name": name, "layer": layer if layer is not None and layer >= 0 else None, "norm": norm}
    )


def _manifest(contents: DumpContents, taps: tuple[TapInfo, ...], dtype: str) -> Manifest:
    """A manifest that claims nothing the dump does not say."""
    # A request is called as the dump calls it; what a prompt was, a dump does not say.
    entries = tuple(
        RequestEntry(
            id=held.id,
            token_ids=held.token_ids or (),
            origin="given",
            prompt_tokens=held.rows,
            token_texts=(),
            rows=held.rows,
        )
        for held in contents.requests
    )
    # Nor does it say which target ran, or how.
    target = TargetIdentity(
        name=NOT_STATED,
        revision=None,
        config_sha256=NOT_STATED,
        model_type=NOT_STATED,
        layers=1,
        layer_types=(),
        weights={},
    )
    return Manifest(
        schema=TRACE_SCHEMA,
        created=NOT_STATED,
        target=target,
        loader=NOT_STATED,
        dtype=dtype,
        mode=NOT_STATED,
        backend=BackendProof(requested={"delta": NOT_STATED, "conv": NOT_STATED}, calls=(), valid=True),
        layer_ids=NOT_STATED,
        taps=taps,
        requests=entries,
        fingerprint=NOT_STATED,
        environment={},
    )


def unsplit(dump: DumpTrace) -> bool:
    """Whether a concatenation of layers is still whole."""
    return any(
        "(L H)" in place.axes and place.layer is None
        for held in dump.contents.requests[:1]
        for places in held.places.values()
        for place in places
    )


def state_width(trace: Trace | None) -> int | None:
    """Channels of one layer's state, where this side knows it."""
    if trace is None:
        return None
    if isinstance(trace, DumpTrace):
        whole = {
            name
            for held in trace.contents.requests[:1]
            for name, places in held.places.items()
            if any("(L H)" in place.axes and place.layer is None for place in places)
        }
        widths = [piece.width for piece in trace.contents.pieces if piece.name not in whole]
    else:
        widths = [trace.tap(tap).width for tap in trace.taps if layer_of_tap(tap) is not None or tap in LAST]
    return max(set(widths), key=widths.count) if widths else None
