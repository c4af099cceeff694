"""Which target to load, and how a trace of it is computed: the records that one process hands to another.

    spec = TargetSpec(model="Qwen/Qwen3-0.6B", dtype="bfloat16")
    options = TraceOptions(taps=("layer.*.out",), mode="decode")

Nothing here imports torch or transformers, so that a command can check its options before it starts a worker.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from pydantic import ConfigDict

from parity.errors import ParityError
from parity.model.tiny.embedded import resolve

LOADER_NAMES = ("AutoModelForCausalLM", "AutoModel", "AutoModelForImageTextToText")
TORCH_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """Which model to load, and how. Nothing is left to a default of the library.

    Raises ParityError for a loader or dtype that is not in the lists above, and for an embedded target that does
    not exist.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: str
    """Name on the hub, or path of a folder (or of a .gguf file) on this machine; `embedded:NAME` becomes its path."""
    revision: str | None = None
    dtype: str = "auto"
    """One of `TORCH_DTYPES`; `auto` is the dtype the checkpoint is stored in."""
    loader: str = "AutoModelForCausalLM"
    """One of `LOADER_NAMES`."""
    device_map: str | None = None
    round_float32: bool = False
    """Round what a lower-precision checkpoint stores in float32 (A_log, dt_bias) to the precision of the rest, as
    a plain `from_pretrained(dtype=bfloat16)` does. False keeps it, as the engines that serve the model do."""

    def __post_init__(self) -> None:
        for what, name, known in (
            ("loader", self.loader, LOADER_NAMES),
            ("dtype", self.dtype, TORCH_DTYPES),
        ):
            if name not in known:
                raise ParityError(f"{what} {name!r}", f"no such {what}", f"use one of {', '.join(known)}")
        object.__setattr__(self, "model", resolve(self.model))


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """How one trace is computed and what it keeps. Raises ParityError for numbers out of range."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    taps: tuple[str, ...] | None = None
    """Names or patterns of taps (`parity.model.target.taps.select_taps`); None records all but the logits."""
    mode: str = "prefill"
    """`prefill` (one pass), `decode` (token by token with a cache) or `blocks:N` (N tokens at a time with a cache)."""
    local_from: str | None = None
    """Folder of another trace: each layer is fed that trace's input, so that it answers for its own error alone."""
    rows: int = 1
    """Rows of the batch in which each request is computed; the others hold the same tokens, rotated."""
    operators: str | None = None
    """File for the operator calls with their inputs and outputs; None keeps none."""
    sketch: bool = False
    """Keep a norm and a projection a token instead of the states."""
    rank: int = 0
    world: int = 1
    """Of `world` processes, this one (`rank`) computes every world-th request, and rank 0 finishes the trace."""

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0 <= self.rank < self.world:
            given = f"a trace with rows {self.rows}, rank {self.rank} of {self.world}"
            raise ParityError(given, "values out of range", "rows >= 1, 0 <= rank < world")
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))  # a list is taken too


PLAIN_TRACE = TraceOptions()
"""Every tap but the logits, in one pass, by one process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request before tokenisation. Exactly one of `text`, `messages`, `token_ids` is set."""

    id: str
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    completion: str | None = None
    """Text that follows the prompt, to be tokenised here."""
    completion_ids: tuple[int, ...] | None = None
    """The server's own ids of the completion, where it gave them."""
    prompt_ids: tuple[int, ...] | None = None
    """The server's own ids of the prompt, where it gave them."""
    thinking: bool | None = None
    """`enable_thinking` for the chat template; None leaves the template's default."""
    notes: tuple[str, ...] = ()


class CaptureEvent(TypedDict):
    """Progress of a capture: `done` of `total` requests are behind it, the last one called `request`."""

    done: int
    total: int
    request: str


def source(model: str) -> tuple[str, dict[str, str]]:
    """Find the name or folder under which transformers loads a model, a .gguf file included.

    Args:
        model: name on the hub, path of a folder or of a .gguf file, or `embedded:NAME`.

    Returns:
        (name or folder, further options of `from_pretrained`).

    Raises:
        ParityError: for a path that does not exist (as a name on a hub it would only be misunderstood), and for
            an unknown embedded target.
    """
    model = resolve(model)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if (model.startswith((".", "/", "~")) or path.suffix == ".gguf") and not path.is_dir():
        raise ParityError(
            f"model {model}", "no such folder or .gguf file", "give the folder that holds config.json"
        )
    return str(path) if path.is_dir() else model, {}
