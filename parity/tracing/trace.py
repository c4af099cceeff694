"""What one run computed, on disk: tensors by (request, token, tap) and a manifest. Read lazily.

A trace is a folder: `manifest.json` and one safetensors shard for each request, whose keys are tap
names and whose rows are tokens. While it is being written it is called `NAME.partial`; the last act of
a capture is the manifest and the rename, so a folder without the suffix is whole. An interrupted
capture is resumed at the request. Nothing in a trace is executed: no pickle, no path outside the folder.

    trace = Trace.open("out/torch-bf16")
    trace.tensor("r0", "layer.3.out")      # [tokens, width], memory-mapped
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from parity.errors import ParityError
from parity.files import WRITING, replace_atomically, write_atomically
from parity.reading import read_json

if TYPE_CHECKING:
    import torch

TRACE_SCHEMA = "parity-trace/1"
SKETCH_SCHEMA = "parity-sketch/1"
"""The same folder, but of each tap a norm and a projection a token (`parity.model.target.sketching`)."""
MANIFEST = "manifest.json"
PARTIAL = ".partial"
LAYER_IDS = "decoder layer i is 0-based; layer.i.out is its output, transformers' hidden_states[i + 1]"
NOT_STATED = "not stated"
"""What a manifest says where its writer does not know: another tool's dump (`parity.dumps.pair`) names no backend."""
_ONE_OF_EACH: dict[Any, Any] = {}
"""The one object that stands for all equal token ids, or texts."""
IDENTIFYING = ("token_ids", "rows", "shard", "prompt_tokens", "origin")
"""Of a request's entry, what shard and manifest have to agree on besides its id; texts and notes are for showing."""
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors")

NormState = Literal["none", "pre", "post"]
"""none: the final norm does not apply here; pre and post: before and after the target's final norm."""


class _Record(BaseModel):
    """Frozen and strict: an unknown key in a manifest is damage or a newer version, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TapInfo(_Record):
    """What one tap of this trace holds."""

    name: str
    dtype: str = Field(pattern=r"^(float64|float32|float16|bfloat16|float8_e4m3fn|float8_e5m2)$")
    """The torch dtype's name, for example `bfloat16`: the dtype the model computed, never converted."""
    width: int
    layer: int | None = Field(ge=0, le=100_000)
    """0-based decoder layer the tap belongs to; null for `embed.out`, `final.*` and `logits`."""
    norm: NormState
    hf_index: int | None
    """The equal entry of transformers' `hidden_states`, where there is one."""
    meaning: str


TokenOrigin = Literal["tokenizer", "given", "server", "retokenised"]
"""tokenizer: our own tokenisation of the prompt; given: ids in the prompt file; server: the server's own ids;
retokenised: a server's text, tokenised again here, which need not be the same."""


class RequestEntry(_Record):
    """One request: what was fed to the model, and where its token ids came from."""

    id: str
    token_ids: tuple[int, ...]
    origin: TokenOrigin
    prompt_tokens: int
    """How many of the tokens are the prompt; the rest is the completion."""
    token_texts: tuple[str, ...]
    """The text of each token, for showing the worst one."""
    shard: str = ""
    rows: int = 0
    notes: tuple[str, ...] = ()

    @field_validator("token_ids", "token_texts")
    @classmethod
    def _share_equal(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Equal ids and texts as one object each: a trace of a million tokens has no more than a vocabulary of them,
        and there are two sides."""
        return tuple(_ONE_OF_EACH.setdefault(value, value) for value in values)


class TargetIdentity(_Record):
    """Which weights computed the trace."""

    name: str
    revision: str | None
    config_sha256: str
    model_type: str
    layers: int = Field(ge=1, le=100_000)
    layer_types: tuple[str, ...]
    """One of `linear_attention`, `full_attention`, `sliding_attention` for each decoder layer."""
    weights: dict[str, str]
    """Checksum of the float32 value of each parameter, by canonical key (prefixes stripped)."""


class CallProof(_Record):
    """Which implementation one operator of one linear layer really reached."""

    layer: int
    operator: Literal["delta", "conv"]
    implementation: str
    """`torch`, `fla`, `fla-interpreted`, `causal-conv1d`, `golden`, `hub:...` or `unknown:...`."""
    callee: str
    """Module and name of the function that ran."""
    calls: int


class BackendProof(_Record):
    """What was asked for, what ran, and whether they agree. A trace with `valid` false is no evidence."""

    requested: dict[str, str]
    """`delta` and `conv`, each the implementation asked for."""
    calls: tuple[CallProof, ...]
    valid: bool
    problems: tuple[str, ...] = ()
    """Each disagreement in words. Empty exactly when valid."""

    @model_validator(mode="after")
    def _consistent(self) -> "BackendProof":
        if set(self.requested) != {"delta", "conv"} or self.valid == bool(self.problems):
            raise ValueError("a proof names delta and conv, and is valid exactly when it has no problem")
        return self


class SketchInfo(_Record):
    """How the tensors of a sketch trace were made from the taps that its manifest describes."""

    dims: int = Field(ge=1, le=4096)
    """Length of each token's projection."""
    seed: int = Field(ge=0)
    """Of the random signs: two sketches can be compared where it is equal."""


class Manifest(_Record):
    """All that is needed to judge a trace without the machine it was made on."""

    schema_version: str = Field(alias="schema")
    created: str
    target: TargetIdentity
    loader: str
    dtype: str
    """The dtype the weights were asked for in; parameters kept in float32 are listed in `kept_float32`."""
    kept_float32: tuple[str, ...] = ()
    mode: str
    """How the tokens were computed: `prefill`, `decode` or `blocks:N`; `+local` where each layer was fed
    another trace's input."""
    backend: BackendProof
    layer_ids: str = LAYER_IDS
    taps: tuple[TapInfo, ...]
    requests: tuple[RequestEntry, ...]
    fingerprint: str
    """Hash of everything that was asked for; a resumed capture must match it."""
    environment: dict[str, str]
    sketch: SketchInfo | None = None
    """Set exactly where the schema is that of a sketch."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _sketch_by_name(self) -> "Manifest":
        if (self.sketch is not None) != (self.schema_version == SKETCH_SCHEMA):
            raise ValueError("a sketch says how it was made, and its schema says that it is one")
        return self


class Trace:
    """A finished trace, read lazily: opening reads the manifest, the first touch of a request its shard's header."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._checked: set[str] = set()
        self._requests = {entry.id: entry for entry in manifest.requests}
        self._taps = {tap.name: tap for tap in manifest.taps}
        # A few open maps are enough for a comparison that walks both sides in the same order.
        self._shard = lru_cache(maxsize=16)(self._open_shard)

    @classmethod
    def open(cls, path: str | Path) -> "Trace":
        """Open a trace folder. Raises ParityError where it is missing, foreign, unfinished, damaged or a sketch."""
        trace = cls.of_folder(Path(path))
        if trace.manifest.sketch is not None:
            raise ParityError(
                f"the tensors of {path}",
                "a sketch: a norm and a projection a token",
                "use `parity compare`, which reads sketches, or capture without --sketch",
            )
        return trace

    @classmethod
    def of_folder(cls, folder: Path) -> "Trace":
        """A finished trace or sketch in a folder. Raises ParityError as `open` does."""
        manifest = read_manifest(folder)
        for entry in manifest.requests:
            if not _SHARD_NAME.fullmatch(entry.shard) or not (folder / entry.shard).is_file():
                raise ParityError(
                    f"the trace {folder}",
                    f"no shard {entry.shard!r} for request {entry.id!r}",
                    "capture it again; the trace is damaged",
                )
        return cls(folder, manifest)

    @property
    def requests(self) -> tuple[RequestEntry, ...]:
        """The requests in canonical order: that of the prompt file."""
        return self.manifest.requests

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of the taps, in the order in which the model computes them."""
        return tuple(self._taps)

    def tap(self, name: str) -> TapInfo:
        """What the tap holds. Raises ParityError for an unknown name."""
        if name not in self._taps:
            raise ParityError(
                f"tap {name!r} of {self.path}", f"taps {', '.join(self._taps)}", "name one of those"
            )
        return self._taps[name]

    def depth(self, tap: str) -> int:
        """How many stages rounded before the tap: `tap_depth`, and 1 where each layer was fed another trace's input.

        Raises ParityError for an unknown name.
        """
        layer = self.tap(tap).layer
        if self.manifest.mode.endswith("+local"):
            return 1
        return tap_depth(tap, self.manifest.target.layers, layer)

    def request(self, request_id: str) -> RequestEntry:
        """The request's entry. Raises ParityError for an unknown id."""
        if request_id not in self._requests:
            raise ParityError(
                f"request {request_id!r} of {self.path}",
                f"{len(self._requests)} other requests",
                "compare traces of the same prompts",
            )
        return self._requests[request_id]

    def tensor(self, request_id: str, tap: str) -> "torch.Tensor":
        """The tap's [tokens, width] tensor of one request, memory-mapped: bytes are read when touched.

        Raises ParityError where the shard does not hold what the manifest promises, or is another request's.
        """
        entry, info = self.request(request_id), self.tap(tap)
        shard = self.shard_of(entry)
        try:
            tensor: torch.Tensor = shard.get_tensor(tap)
        except Exception as error:
            raise ParityError(
                f"{tap} of request {request_id!r} in {self.path / entry.shard}",
                f"a damaged shard ({error})",
                "capture that trace again",
            ) from error
        if tuple(tensor.shape) != (entry.rows, info.width) or str(tensor.dtype) != f"torch.{info.dtype}":
            raise ParityError(
                f"{tap} of request {request_id!r} as {info.dtype} [{entry.rows}, {info.width}]",
                f"{tensor.dtype} {list(tensor.shape)} in {entry.shard}",
                "capture that trace again; shard and manifest disagree",
            )
        return tensor

    def digest(self) -> str:
        """A checksum of the manifest, and of its shards' sizes and times: what has to be unchanged for a work that
        is resumed."""
        found = hashlib.sha256(self.manifest.model_dump_json(by_alias=True).encode())
        for shard in sorted({entry.shard for entry in self.manifest.requests}):
            file = self.path / shard
            if shard and file.is_file():
                state = file.stat()
                found.update(f"{shard} {state.st_size} {state.st_mtime_ns}".encode())
        return found.hexdigest()

    def shard_of(self, entry: RequestEntry) -> Any:
        """The request's open shard, of which no tensor is read.

        Its own header says whose states it holds, and is held against the manifest once: shards of equal size can be
        exchanged, and every tensor would still have the right name and shape. Raises ParityError where it is damaged
        or another's.
        """
        shard = self._shard(entry.shard)
        if entry.id not in self._checked:
            self._check(entry, shard.metadata() or {})
            self._checked.add(entry.id)
        return shard

    def _check(self, entry: RequestEntry, said: Mapping[str, str]) -> None:
        """Hold what a shard says of itself against the manifest. Raises ParityError where they disagree."""
        asked = f"the states of request {entry.id!r} in {self.path / entry.shard}"
        do = "capture that trace again; shard and manifest disagree"
        whose = said.get("fingerprint", self.manifest.fingerprint)  # older shards name no capture
        if whose != self.manifest.fingerprint:
            raise ParityError(asked, "a shard of another capture", do)
        if (
            said.get("request") == entry.model_dump_json()
        ):  # as text: a long request is not built a second time
            return
        try:
            held = RequestEntry.model_validate_json(said.get("request", ""))
        except ValidationError as error:
            raise ParityError(asked, "a shard that does not say which request it holds", do) from error
        if held.id != entry.id:
            raise ParityError(asked, f"the states of request {held.id!r}", do)
        for name in IDENTIFYING:
            if getattr(held, name) != getattr(entry, name):
                raise ParityError(asked, f"other {name.replace('_', ' ')} than the manifest's", do)

    def _open_shard(self, shard: str) -> Any:
        from safetensors import safe_open

        try:
            return safe_open(self.path / shard, framework="pt")
        except Exception as error:
            raise ParityError(
                f"the shard {self.path / shard}", f"a damaged shard ({error})", "capture that trace again"
            ) from error


def layer_of(tap: str) -> int | None:
    """The 0-based decoder layer that a tap's name says, or None: `layer.16.out` -> 16."""
    return int(tap.split(".")[1]) if tap.startswith("layer.") else None


def tap_depth(tap: str, layers: int, layer: int | None = None) -> int:
    """How many stages rounded the states at a tap, each of which adds to the floor of a comparison.

    The embedding is a look-up and rounds nothing (0), decoder layer i is stage i + 1, and what follows the last layer
    (final norm, logits) is one more.

    Args:
        tap: Its name.
        layers: How many decoder layers the target has.
        layer: The 0-based decoder layer it belongs to, where that is known otherwise than by its name.
    """
    layer = layer_of(tap) if layer is None else layer
    if layer is not None:
        return layer + 1
    return 0 if tap.startswith("embed") else layers + 1


def read_manifest(folder: Path) -> Manifest:
    """Read and validate a trace's manifest. Raises ParityError with what is wrong in words."""
    file = folder / MANIFEST
    # No manifest: an unfinished capture, another folder, or none.
    if not file.is_file():
        if folder.with_name(folder.name + PARTIAL).is_dir():
            raise ParityError(
                f"the trace {folder}",
                "an unfinished capture beside it",
                "run the same `parity capture` again; it goes on where it stopped",
            )
        found = "a folder without manifest.json" if folder.is_dir() else "no such folder"
        raise ParityError(f"the trace {folder}", found, "name a folder that `parity capture --out` wrote")
    data = read_json(file, f"the manifest {file}", "capture the trace again")
    # Another schema first, since its fields may be others.
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (TRACE_SCHEMA, SKETCH_SCHEMA):
        raise ParityError(
            f"a manifest of schema {TRACE_SCHEMA} in {file}",
            f"schema {schema!r}",
            "use the parity version that wrote it, or capture the trace again",
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ParityError(
            f"the manifest {file}", f"{place}: {first['msg']}", "capture the trace again"
        ) from error


class TraceWriter:
    """Writes a trace a request at a time, so that an interruption costs one request.

    Use as a context manager; leaving it by an exception keeps `NAME.partial` if it holds a finished
    request (to resume from) and removes it otherwise. Several processes may write different requests
    of one trace; one of them calls `finish`.
    """

    def __init__(self, out: str | Path, fingerprint: str) -> None:
        """Begin or resume the trace at `out`. Raises ParityError where something else is there."""
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + PARTIAL)
        self.fingerprint = fingerprint
        # A finished trace, or anything else, is never overwritten.
        if self.out.exists():
            raise ParityError(
                f"a new trace at {self.out}",
                "something of that name there already",
                "choose another --out, or remove it first",
            )
        with _explain_refusals(self.out):
            self.partial.mkdir(parents=True, exist_ok=True)
        # What is unfinished is resumed only with the same settings.
        mark = self.partial / "fingerprint"
        if mark.exists() and mark.read_text() != fingerprint:
            raise ParityError(
                f"a new trace at {self.out}",
                f"an unfinished capture of other settings in {self.partial}",
                "repeat those settings to resume it, or remove the folder",
            )
        if not mark.exists():
            if any(self.partial.glob("*.safetensors")):
                raise ParityError(
                    f"a new trace at {self.out}",
                    f"shards of an unknown capture in {self.partial}",
                    "remove that folder, or choose another --out",
                )
            with _explain_refusals(self.out):
                write_atomically(mark, fingerprint, durable=True)
        self.entries: dict[str, RequestEntry] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read again which requests are written whole, other processes' included."""
        self.entries = {entry.id: entry for entry in self._finished_entries()}

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        if kind is not None and self.partial.is_dir() and not any(self.partial.glob("*.safetensors")):
            self.abandon()

    def abandon(self) -> None:
        """Remove the unfinished folder: a capture that wrote nothing leaves nothing."""
        for file in self.partial.iterdir():
            file.unlink()
        self.partial.rmdir()

    def add(
        self,
        entry: RequestEntry,
        tensors: Mapping[str, "torch.Tensor"],
        *,
        proof: BackendProof | None = None,
        position: int | None = None,
        further: Mapping[str, "torch.Tensor"] | None = None,
    ) -> None:
        """Write one request's taps ([tokens, width] each), its entry, and the proof of who computed it.

        `position` is the request's place in canonical order; it names the shard, so that several
        processes write one trace without agreeing on anything else. `further` tensors have no row a token.
        """
        from safetensors.torch import save_file

        # A row a token, in every tap.
        rows = {int(tensor.shape[0]) for tensor in tensors.values()}
        if rows != {len(entry.token_ids)}:
            raise ValueError(
                f"request {entry.id!r} has {len(entry.token_ids)} tokens, its taps {sorted(rows)} rows"
            )
        shard = f"request-{len(self.entries) if position is None else position:06d}.safetensors"
        entry = entry.model_copy(update={"shard": shard, "rows": len(entry.token_ids)})
        # The shard says itself whose states it holds, of which capture, and who computed them.
        metadata = {"request": entry.model_dump_json(), "fingerprint": self.fingerprint} | (
            {"proof": proof.model_dump_json()} if proof else {}
        )
        with _explain_refusals(self.out):
            with replace_atomically(self.partial / shard) as temporary:
                save_file(_unshare({**tensors, **(further or {})}), temporary, metadata=metadata)
        self.entries[entry.id] = entry

    def finish(self, manifest: Manifest) -> Trace:
        """Write the manifest, give the folder its name, and open it.

        `manifest.requests` names the requests in canonical order; their shards and the fingerprint that
        these carry are filled in here, and the proofs stored with them are merged into `manifest.backend`.
        Raises ParityError where a request was never written.
        """
        self.refresh()
        missing = [entry.id for entry in manifest.requests if entry.id not in self.entries]
        if missing:
            raise ParityError(
                f"the trace {self.out}",
                f"{len(missing)} requests without tensors, first {missing[0]!r}",
                "run the same capture again to complete it",
            )
        manifest = manifest.model_copy(
            update={
                "fingerprint": self.fingerprint,
                "requests": tuple(self.entries[entry.id] for entry in manifest.requests),
                "backend": merge_proofs([manifest.backend, *self._proofs])
                if self._proofs
                else manifest.backend,
            }
        )
        for file in self.partial.glob(f"*{WRITING}"):
            file.unlink()
        content = manifest.model_dump_json(by_alias=True, indent=1)
        write_atomically(self.partial / MANIFEST, content, durable=True)
        os.replace(self.partial, self.out)
        (self.out / "fingerprint").unlink(
            missing_ok=True
        )  # last: shards without it could be taken for others
        return Trace.of_folder(self.out)

    def _finished_entries(self) -> Iterator[RequestEntry]:
        """Entries of the shards that were written whole; an unreadable shard is removed, to be redone."""
        from safetensors import safe_open

        self._proofs: list[BackendProof] = []
        for file in sorted(self.partial.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as shard:
                    metadata = shard.metadata()
                entry = RequestEntry.model_validate_json(metadata["request"])
                if "proof" in metadata:
                    self._proofs.append(BackendProof.model_validate_json(metadata["proof"]))
            except Exception:
                file.unlink()
            else:
                yield entry


def merge_proofs(proofs: Sequence[BackendProof]) -> BackendProof:
    """One proof for several captures of one request each: calls summed, problems united."""
    counts: Counter[tuple[int, str, str, str]] = Counter()
    for proof in proofs:
        for call in proof.calls:
            counts[call.layer, call.operator, call.implementation, call.callee] += call.calls
    calls = tuple(
        CallProof.model_validate(
            {
                "layer": layer,
                "operator": operator,
                "implementation": implementation,
                "callee": callee,
                "calls": count,
            }
        )
        for (layer, operator, implementation, callee), count in sorted(counts.items())
    )
    problems = tuple(dict.fromkeys(problem for proof in proofs for problem in proof.problems))
    return BackendProof(requested=proofs[0].requested, calls=calls, valid=not problems, problems=problems)


@contextmanager
def _explain_refusals(out: Path) -> Iterator[None]:
    """Turn what the system refuses (no space, no permission, no folder) into words; nothing finished is lost."""
    try:
        yield
    except Exception as error:
        # safetensors wraps the system's errors in its own
        if not isinstance(error, OSError) and "I/O error" not in str(error) and "IoError" not in str(error):
            raise
        raise ParityError(
            f"a trace written to {out}",
            str(error),
            "free some space or choose another --out; run the same command again, finished requests are kept",
        ) from error


def _unshare(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Contiguous tensors of which no two share memory: safetensors refuses shared ones, and two taps
    can be one tensor (`final.prenorm` is the last layer's output)."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result
