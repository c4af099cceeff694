"""The target of a check: which model, with which prompts, and which backend is compared with torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from parity.capturing.prompts import Prompt, read_prompts
from parity.errors import ParityError
from parity.model.target import backends

if TYPE_CHECKING:
    from parity.model.recipe.parts import TargetPart

GENERIC_PROMPTS = (
    "The speed of light in a vacuum is a constant, and it follows that two observers who move apart",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the ride?\nAnswer:",
)
"""For a user's model without prompts of their own: prose, code and a question."""


class TargetOptions(TypedDict, total=False):
    """Keyword arguments of `check` about the target."""

    model: str | None
    """Name or path of the target; the recipe's by default, else the embedded one."""
    prompts: Path | None
    """Prompt file as for `parity capture`; built-in prompts by default."""
    backend: str | None
    """What is compared with torch; fla where a GPU is, else fla-interpreted."""
    loader: str | None
    """The transformers class that the trainer loads the target with; the recipe's, else AutoModelForCausalLM."""
    revision: str | None
    """Revision on the hub."""
    device_map: str | None
    """As in transformers: cuda, auto, ..."""
    max_tokens: int
    """Tokens of each request that are compared; 160 by default."""
    hide: Sequence[str]
    """Modules that the other backend's worker must not find."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTarget:
    """The target that is examined, every choice made."""

    model: str | None
    """None for the embedded target."""
    prompts: tuple[Prompt, ...]
    loader: str
    revision: str | None
    device_map: str | None
    max_tokens: int
    other: str
    """The backend that is compared with torch."""
    hide: tuple[str, ...]
    threads: int
    """Of each worker."""

    @property
    def path(self) -> str:
        """Name or path of the model; the embedded one, checked, where none was named."""
        if self.model is not None:
            return self.model
        from parity.model.tiny.embedded import find_embedded_target

        return str(find_embedded_target("hybrid"))

    def spec(self, dtype: str, **changes: object) -> dict[str, object]:
        """Return the fields of its `TargetSpec` in that dtype, with changes."""
        return {
            "model": self.path,
            "revision": self.revision,
            "dtype": dtype,
            "loader": self.loader,
            "device_map": self.device_map,
        } | changes


def choose_check_target(
    options: TargetOptions, declared: "TargetPart | None", *, threads: int = 1
) -> CheckTarget:
    """Choose the target to capture: the one that the options name, else the recipe's, else the embedded one.

    Args:
        options: what the caller of `check` named.
        declared: the recipe's target, where it is a model that can be captured.
        threads: of each worker.

    Raises:
        ParityError: for a backend that does not run here, or that is compared with torch already.
    """
    from parity.model.tiny.embedded import resolve

    model, loader = options.get("model"), options.get("loader")
    revision, backend = options.get("revision"), options.get("backend")
    # What the options leave open is as the recipe declares it.
    model = None if model is None else resolve(model)
    if declared is not None and declared.model != "embedded:hybrid":
        model = model or resolve(declared.model)
        loader, revision = loader or declared.loader, revision or declared.revision
        if backend is None and declared.backend not in ("torch", "golden"):
            backend = declared.backend
    # A backend that was named has to run; one that was not may be missing, which the probes report.
    other = backends.parse_backend(
        backend or ("fla" if backends.missing(backends.parse_backend("fla")) is None else "fla-interpreted")
    )
    why = backends.missing(other)
    if backend is not None and (why or other.name in ("torch", "golden")):
        raise ParityError(
            f"torch against {other.name}",
            why or "every check holds torch against golden already",
            "name another backend that runs here, or none: `parity env` lists them",
        )
    # Both sides on one device: the kernels are to differ, not the machine.
    device_map = options.get("device_map") or (backends.device_map(other) if why is None else None)
    return CheckTarget(
        model=model,
        loader=loader or "AutoModelForCausalLM",
        revision=revision,
        device_map=device_map,
        max_tokens=options.get("max_tokens", 160),
        threads=threads,
        hide=tuple(options.get("hide", ())),
        prompts=_read_or_build_prompts(model, options.get("prompts")),
        other=other.name,
    )


def _read_or_build_prompts(model: str | None, file: Path | None) -> tuple[Prompt, ...]:
    """The user's prompts, or built-in ones: one row of the embedded corpus, or generic text."""
    if file is not None:
        return tuple(read_prompts(file))
    if model is not None:
        return tuple(Prompt(id=f"built-in-{i}", text=text) for i, text in enumerate(GENERIC_PROMPTS))
    from parity.model.tiny.corpus import conversation

    messages = tuple(dict(message) for message in conversation(1, "held_out", 170))
    return (Prompt(id="conversation", messages=messages),)
