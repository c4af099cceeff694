"""The probes, by hand: name, class, what each guards, what it needs. A test compares this with the folder."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEntry:
    """One line of the table. Reading it imports no probe."""

    name: str
    where: str
    """`module:Class`."""
    guards: str
    needs: str
    asks: Literal["traces", "trainer"] = "traces"
    """What its `run` is given: `Evidence`, or a `ExaminedAdapter`."""

    def load(self) -> Any:
        """The probe itself, a `TraceProbe` or a `WiringProbe`."""
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)()


TABLE: tuple[ProbeEntry, ...] = (
    ProbeEntry(
        name="dispatch",
        where="parity.probes.target.dispatch:DispatchProbe",
        guards="that the backend asked for is the one that computed, on every linear layer and operator",
        needs="any capture; a model with linear-attention layers",
    ),
    ProbeEntry(
        name="loading",
        where="parity.probes.target.loading:LoadingProbe",
        guards="that every loader gives the same states, and what plain bfloat16 loading rounds",
        needs="captures through AutoModelForCausalLM, AutoModel and a vision-language wrapper",
    ),
    ProbeEntry(
        name="floor",
        where="parity.probes.target.floor:FloorProbe",
        guards="the noise of reruns and batch sizes, by which other differences are judged",
        needs="a rerun and a larger batch on torch",
    ),
    ProbeEntry(
        name="golden",
        where="parity.probes.target.golden:GoldenProbe",
        guards="that the model computes in float32 what a true fp64 pass computes",
        needs="float32 and golden captures",
    ),
    ProbeEntry(
        name="kernels",
        where="parity.probes.target.kernels:KernelsProbe",
        guards="that two backends compute the same function, and which layer adds the difference",
        needs="captures on torch and another backend, in fp32 and bf16, whole and layer by layer",
    ),
    ProbeEntry(
        name="operators",
        where="parity.probes.target.operators:OperatorsProbe",
        guards="the delta rule and the convolution alone, on recorded inputs, against fp64 recurrences",
        needs="recorded operator calls of both backends",
    ),
    ProbeEntry(
        name="serving",
        where="parity.probes.target.serving:ServingProbe",
        guards="that decoding with a cache, and verifying in blocks, computes what prefill computes",
        needs="captures as prefill, decode and blocks",
    ),
    ProbeEntry(
        name="inputs",
        where="parity.probes.trainer.inputs:InputsProbe",
        guards="which captured layers move the drafts and which the labels, in which order, and what each really is",
        needs="a trainer's step; `capture` and `reference` for what the layers are",
        asks="trainer",
    ),
    ProbeEntry(
        name="noise",
        where="parity.probes.trainer.noise:NoiseProbe",
        guards="that noise enters the conditioning states alone, as much as declared, and never in evaluation",
        needs="a trainer's step",
        asks="trainer",
    ),
    ProbeEntry(
        name="loss",
        where="parity.probes.trainer.loss:LossProbe",
        guards="terms, temperature, position weights and denominator of the loss, read from its gradient",
        needs="a trainer's step; the captured teacher slice, where the loss uses one",
        asks="trainer",
    ),
    ProbeEntry(
        name="labels",
        where="parity.probes.trainer.labels:LabelsProbe",
        guards="which token every slot is trained on: offset, source, documents, prompts, holes, padding",
        needs="a trainer's step",
        asks="trainer",
    ),
    ProbeEntry(
        name="context",
        where="parity.probes.trainer.context:ContextProbe",
        guards="what a block sees: before its anchor, in its document and window, and of its own slots, layer by layer",
        needs="a trainer's step; z-lab's parameter names for the comparison layer by layer",
        asks="trainer",
    ),
    ProbeEntry(
        name="teacher",
        where="parity.probes.trainer.teacher:TeacherProbe",
        guards="that the teacher's logits are the target's own: state, final norm, head, vocabulary map",
        needs="a trainer's step and `reference`; a recipe with a teacher; `capture` for the captured slice",
        asks="trainer",
    ),
    ProbeEntry(
        name="decode",
        where="parity.probes.trainer.decode:DecodeProbe",
        guards="that inference drafts what training computed, at every position, and that verifying changes no text",
        needs="a trainer's `draft`; `generate` and `greedy` for the loop",
        asks="trainer",
    ),
    ProbeEntry(
        name="frozen",
        where="parity.probes.trainer.frozen:FrozenProbe",
        guards="that everything trains but what the recipe freezes, and that embedding and head are the target's",
        needs="a trainer's `update`, `optimizer` and `reference`; without them gradients and flags only",
        asks="trainer",
    ),
    ProbeEntry(
        name="resume",
        where="parity.probes.trainer.resume:ResumeProbe",
        guards="that an interrupted run is the same run: losses bit-equal",
        needs="a trainer's `run`",
        asks="trainer",
    ),
    ProbeEntry(
        name="export",
        where="parity.probes.trainer.export:ExportProbe",
        guards="that the exported checkpoint means the same to its readers",
        needs="a trainer's `export`; z-lab's dflash and speculators as readers where they are installed",
        asks="trainer",
    ),
    ProbeEntry(
        name="coverage",
        where="parity.probes.trainer.coverage:CoverageProbe",
        guards="that anchors stand on supervised tokens, are drawn anew, and reach every document",
        needs="a trainer's `draw`",
        asks="trainer",
    ),
    ProbeEntry(
        name="shapes",
        where="parity.probes.trainer.shapes:ShapesProbe",
        guards="shape, dtype and range of every tensor of a step, and captured rows that are zero, stale or rounded",
        needs="a trainer's step; `capture` for the captured states",
        asks="trainer",
    ),
    ProbeEntry(
        name="tokens",
        where="parity.probes.trainer.tokens:TokensProbe",
        guards="that training data and the server's requests have the same ids, and what of them is trained on",
        needs="a trainer's `tokenize` and `request`",
        asks="trainer",
    ),
)
