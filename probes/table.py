"""The probes, by hand: name, class, what each guards, what it needs. A test compares this with the folder."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the table. Reading it imports no probe."""

    name: str
    where: str
    """`module:Class`."""
    guards: str
    needs: str
    asks: Literal["traces", "trainer"] = "traces"
    """What its `run` is given: `Evidence`, or a `Subject`."""

    def load(self) -> Any:
        """The probe itself, a `TraceProbe` or a `WiringProbe`."""
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)()


TABLE: tuple[Entry, ...] = (
    Entry(
        name="dispatch",
        where="parity.probes.dispatch:Dispatch",
        guards="that the backend asked for is the one that computed, on every linear layer and operator",
        needs="any capture; a model with linear-attention layers",
    ),
    Entry(
        name="loading",
        where="parity.probes.loading:Loading",
        guards="that every loader gives the same states, and what plain bfloat16 loading rounds",
        needs="captures through AutoModelForCausalLM, AutoModel and a vision-language wrapper",
    ),
    Entry(
        name="floor",
        where="parity.probes.floor:MeasuredFloor",
        guards="the noise of reruns and batch sizes, by which other differences are judged",
        needs="a rerun and a larger batch on torch",
    ),
    Entry(
        name="golden",
        where="parity.probes.golden:AgainstGolden",
        guards="that the model computes in float32 what a true fp64 pass computes",
        needs="float32 and golden captures",
    ),
    Entry(
        name="kernels",
        where="parity.probes.kernels:Kernels",
        guards="that two backends compute the same function, and which layer adds the difference",
        needs="captures on torch and another backend, in fp32 and bf16, whole and layer by layer",
    ),
    Entry(
        name="operators",
        where="parity.probes.operators:Operators",
        guards="the delta rule and the convolution alone, on recorded inputs, against fp64 recurrences",
        needs="recorded operator calls of both backends",
    ),
    Entry(
        name="serving",
        where="parity.probes.serving:Serving",
        guards="that decoding with a cache, and verifying in blocks, computes what prefill computes",
        needs="captures as prefill, decode and blocks",
    ),
    Entry(
        name="noise",
        where="parity.probes.noise:Noise",
        guards="that noise enters the conditioning states alone, as much as declared, and never in evaluation",
        needs="a trainer's step",
        asks="trainer",
    ),
)
