"""What a check has to capture for the probes that it runs: the steps of both workers, in order, and no others.

    for step in plan_steps([find_entry("serving")]):
        print(step.worker, step.name)           # torch torch.fp32, torch torch.fp32.rerun, ...

A probe's entry names what it reads (`needs` in `parity.probes.table`): captures (`torch.fp32`), recorded operator calls
(`torch.fp32.operators`) and floors (`floor.fp32`: what a rerun and another batch size change). `CAPTURE_STEPS`
tells how each capture is made and what has to be made before it. Nothing runs here: `parity.commands.gather` does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from parity.commands.check_target import CheckTarget
from parity.probes.base import TargetStructure
from parity.probes.table import ProbeEntry

FLOOR_BATCH = 4
"""Rows of the batch whose noise is measured."""
BLOCK = 8
"""Tokens of a verify block in the serving check."""
OPERATORS = ".operators"
"""Behind a step's name: the operator calls that are recorded while it runs."""

DtypeKey = Literal["fp32", "bf16"]
Omission = Callable[[CheckTarget, TargetStructure], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureStep:
    """One job of one worker, by the name of the trace that it makes."""

    name: str
    worker: Literal["torch", "other"]
    dtype: DtypeKey = "fp32"
    does: Literal["capture", "replay", "wrap"] = "capture"
    """`replay` computes the recorded operator calls again in fp64; `wrap` saves the target inside a wrapper."""
    after: tuple[str, ...] = ()
    """What has to be made first, by either worker."""
    local_from: str | None = None
    """The trace whose layer inputs each layer is fed, for a pass layer by layer."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of a capture: `mode`, `rows`, `golden`."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """What differs from the target's own `TargetSpec`."""
    wrapped: bool = False
    """Whether the target is read from the folder that the step `wrapped` made."""
    required: bool = False
    """Whether an error of the user's in it ends the check: without it there is nothing to examine."""
    omitted: Omission = lambda target, structure: None
    """Why this target is not captured in this way, or None."""
    records: bool = False
    """Whether operator calls are recorded; set by `plan_steps` where a probe needs them."""


def _is_no_wrapping(target: CheckTarget, structure: TargetStructure) -> str | None:
    return None if target.model is None else "only the embedded target is wrapped on the spot"


def _is_declared_loader(target: CheckTarget, structure: TargetStructure) -> str | None:
    why = "AutoModel is the loader that everything else was captured with"
    return why if target.loader == "AutoModel" else None


def _has_nothing_to_round(target: CheckTarget, structure: TargetStructure) -> str | None:
    return None if structure["kept_float32"] else "no parameter is kept in float32"


def _torch_passes(dtype: DtypeKey) -> tuple[CaptureStep, ...]:
    """The reference, and the two by which its floor is measured."""
    name = f"torch.{dtype}"
    return (
        CaptureStep(name=name, worker="torch", dtype=dtype, required=True),
        CaptureStep(name=f"{name}.rerun", worker="torch", dtype=dtype),
        CaptureStep(name=f"{name}.batch", worker="torch", dtype=dtype, options={"rows": FLOOR_BATCH}),
    )


def _other_passes(dtype: DtypeKey) -> tuple[CaptureStep, ...]:
    """A whole pass of the other backend, and one in which each layer is fed torch's input."""
    name, reference = f"other.{dtype}", f"torch.{dtype}"
    return (
        CaptureStep(name=name, worker="other", dtype=dtype),
        CaptureStep(
            name=f"{name}.local", worker="other", dtype=dtype, after=(reference,), local_from=reference
        ),
    )


def _golden_replay(dtype: DtypeKey) -> CaptureStep:
    return CaptureStep(
        name=f"golden.{dtype}",
        worker="torch",
        dtype=dtype,
        does="replay",
        after=(f"torch.{dtype}{OPERATORS}",),
    )


CAPTURE_STEPS = (
    # bfloat16 first: the other worker begins with it, and waits for torch's layer inputs.
    *_torch_passes("bf16"),
    *_torch_passes("fp32"),
    CaptureStep(name="torch.fp32.decode", worker="torch", options={"mode": "decode"}),
    CaptureStep(name="torch.fp32.blocks", worker="torch", options={"mode": f"blocks:{BLOCK}"}),
    CaptureStep(name="golden", worker="torch", options={"golden": True}),
    _golden_replay("fp32"),
    _golden_replay("bf16"),
    # The target through other loaders; with A_log and dt_bias rounded; and inside a wrapper.
    CaptureStep(
        name="loading.rounded", worker="torch", spec={"round_float32": True}, omitted=_has_nothing_to_round
    ),
    CaptureStep(
        name="loading.AutoModel", worker="torch", spec={"loader": "AutoModel"}, omitted=_is_declared_loader
    ),
    CaptureStep(name="wrapped", worker="torch", does="wrap", omitted=_is_no_wrapping),
    CaptureStep(
        name="loading.wrapper",
        worker="torch",
        after=("wrapped",),
        spec={"loader": "AutoModelForImageTextToText"},
        wrapped=True,
        omitted=_is_no_wrapping,
    ),
    CaptureStep(
        name="loading.wrapped-text", worker="torch", after=("wrapped",), wrapped=True, omitted=_is_no_wrapping
    ),
    *_other_passes("bf16"),
    *_other_passes("fp32"),
)
"""Every step that a check knows, in the order in which its worker runs them."""

FLOORS = {
    f"floor.{dtype}": tuple(f"torch.{dtype}{kind}" for kind in ("", ".rerun", ".batch"))
    for dtype in ("fp32", "bf16")
}
"""A floor -> the captures by which it is measured."""


def plan_steps(entries: Iterable[ProbeEntry]) -> tuple[CaptureStep, ...]:
    """Return the steps that these probes need, and what those need in turn, in the order of `CAPTURE_STEPS`.

    Raises KeyError for a need that no step makes: a mistake in a probe's entry.
    """
    known = {step.name: step for step in CAPTURE_STEPS}
    needed, recorded = set[str](), set[str]()
    waiting = [need for entry in entries if entry.asks == "traces" for need in entry.needs]
    while waiting:
        need = waiting.pop()
        if need in FLOORS:
            waiting += FLOORS[need]
            continue
        step = known[need.removesuffix(OPERATORS)]
        if need.endswith(OPERATORS) and step.does == "capture":
            recorded.add(step.name)
        if step.name not in needed:
            needed.add(step.name)
            waiting += step.after
    return tuple(
        replace(step, records=step.name in recorded) for step in CAPTURE_STEPS if step.name in needed
    )
