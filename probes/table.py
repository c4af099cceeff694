"""The probes, one entry each: what it guards, what it needs, which suspicions it answers, which faults it names.

An entry is all that the rest of parity knows of a probe: `parity check` captures what `needs` lists and ends with the
table of `suspicions`, `parity gate` compares what `states_wiring` marks, `parity probes` prints the rest. The probe
`loss` is the class `LossProbe` in `probes/trainer/loss.py`; a probe of traces lies in `probes/target/`. Tests compare
the entries with the two folders, with the names of faults, with the captures that `parity.commands.plan` knows and with
the methods of an adapter. Reading this module imports no probe.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from parity.probes.base import TraceProbe
    from parity.probes.subject import WiringProbe


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspicionRule:
    """One row of the table that a check ends with: something that a user may suspect, and which findings answer it."""

    name: str
    """In a user's words."""
    findings: tuple[str, ...] = ()
    """Findings, by the first parts of their names, that answer it. Empty: those of the probe itself."""
    needs_all: bool = False
    """True where each of the findings is needed: one that was skipped leaves the question open."""
    place: int = 100
    """Rows are listed by this number, the likeliest cause first, and rows of one number in the order of the probes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEntry:
    """One probe."""

    name: str
    """Also the first part of its findings' names."""
    asks: Literal["traces", "trainer"]
    """What its `run` is given: `Evidence` of captured traces, or an `ExaminedAdapter`."""
    guards: str
    """What is right where it passes; follows the words "guards:"."""
    needs: tuple[str, ...]
    """What it reads, as data. A probe of traces: captures, recorded operator calls and floors, by the names that
    `parity.commands.plan` gives them; a check makes these and no others. A probe of a trainer: every method of the
    adapter that it may call; where one is not written, what depends on it is *skipped*."""
    needs_text: str
    """The same for a reader; follows the words "needs:"."""
    suspicions: tuple[SuspicionRule, ...]
    faults: tuple[str, ...]
    """Every fault that its findings may name. Those of a trainer are rows of `parity.probes.deviations`."""
    names_kinds: bool = False
    """Whether it also names a difference of two traces by its kind (`parity.diagnosis.records.MEANING`)."""
    states_wiring: bool = False
    """Whether its findings' evidence states what a trainer does, so that a gate compares it with the baseline's."""

    def load(self) -> "TraceProbe | WiringProbe":
        """Import the probe's module and return the probe."""
        folder = "target" if self.asks == "traces" else "trainer"
        module = import_module(f"parity.probes.{folder}.{self.name}")
        probe: TraceProbe | WiringProbe = getattr(module, f"{self.name.capitalize()}Probe")()
        return probe


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split())


def _trainer_probe(
    *,
    name: str,
    suspicion: str,
    guards: str,
    needs: tuple[str, ...],
    needs_text: str,
    faults: tuple[str, ...],
) -> ProbeEntry:
    """The entry of a probe that examines a running trainer: one suspicion, and a statement of the wiring."""
    return ProbeEntry(
        name=name,
        asks="trainer",
        guards=guards,
        needs=needs,
        needs_text=needs_text,
        suspicions=(SuspicionRule(name=suspicion),),
        faults=faults,
        states_wiring=True,
    )


TABLE: tuple[ProbeEntry, ...] = (
    ProbeEntry(
        name="dispatch",
        asks="traces",
        guards="that the backend asked for is the one that computed, on every linear layer and operator",
        needs=("torch.bf16", "torch.fp32", "other.bf16", "other.fp32"),
        needs_text="any capture; a model with linear-attention layers",
        suspicions=(SuspicionRule(name="the kernels that were asked for never ran", place=1),),
        faults=("dispatch", "crash"),
    ),
    ProbeEntry(
        name="loading",
        asks="traces",
        guards="that every loader gives the same states, and what plain bfloat16 loading rounds",
        needs=(
            "torch.fp32",
            "loading.rounded",
            "loading.AutoModel",
            "loading.wrapper",
            "loading.wrapped-text",
        ),
        needs_text="captures through AutoModelForCausalLM, AutoModel and a vision-language wrapper",
        suspicions=(
            SuspicionRule(
                name="it matters how the target is loaded",
                findings=("loading.AutoModel", "loading.wrapper", "loading.wrapped-text"),
                place=5,
            ),
            SuspicionRule(
                name="weights are random or were not loaded", findings=("loading.weights",), place=6
            ),
        ),
        faults=("loader",),
    ),
    ProbeEntry(
        name="floor",
        asks="traces",
        guards="the noise of reruns and batch sizes, by which other differences are judged",
        needs=("torch.fp32", "torch.bf16", "floor.fp32", "floor.bf16"),
        needs_text="a rerun and a larger batch on torch",
        suspicions=(
            SuspicionRule(name="the states are not finite", findings=("finite",), place=7),
            SuspicionRule(name="runs or batch sizes change the states", place=9),
        ),
        faults=("not-finite", "not-reproducible"),
    ),
    ProbeEntry(
        name="golden",
        asks="traces",
        guards="that the model computes in float32 what a true fp64 pass computes",
        needs=("torch.fp32", "golden"),
        needs_text="float32 and golden captures",
        suspicions=(SuspicionRule(name="torch's fallback itself is wrong", place=4),),
        faults=("semantics",),
    ),
    ProbeEntry(
        name="kernels",
        asks="traces",
        guards="that two backends compute the same function, and which layer adds the difference",
        needs=(
            "torch.fp32",
            "other.fp32",
            "other.fp32.local",
            "floor.fp32",
            "torch.bf16",
            "other.bf16",
            "other.bf16.local",
            "floor.bf16",
            "golden",
        ),
        needs_text="captures on torch and another backend, in fp32 and bf16, whole and layer by layer",
        suspicions=(
            SuspicionRule(
                name="the kernels compute another function",
                findings=("kernels.fp32",),
                needs_all=True,
                place=2,
            ),
            SuspicionRule(
                name="the bf16 kernels differ by more than rounding",
                findings=("kernels.bf16",),
                needs_all=True,
                place=2,
            ),
        ),
        faults=("dispatch", "full-attention-differs"),
        names_kinds=True,
    ),
    ProbeEntry(
        name="operators",
        asks="traces",
        guards="the delta rule and the convolution alone, on recorded inputs, against fp64 recurrences",
        needs=(
            "torch.fp32.operators",
            "torch.bf16.operators",
            "golden.fp32.operators",
            "golden.bf16.operators",
            "other.fp32.local.operators",
            "other.bf16.local.operators",
        ),
        needs_text="recorded operator calls of both backends",
        suspicions=(SuspicionRule(name="an operator is wrong by itself", needs_all=True, place=3),),
        faults=("operator",),
    ),
    ProbeEntry(
        name="serving",
        asks="traces",
        guards="that decoding with a cache, and verifying in blocks, computes what prefill computes",
        needs=("torch.fp32", "torch.fp32.decode", "torch.fp32.blocks", "floor.fp32"),
        needs_text="captures as prefill, decode and blocks",
        suspicions=(SuspicionRule(name="decoding or verifying gives other states than prefill", place=8),),
        faults=("serving-mode",),
        names_kinds=True,
    ),
    _trainer_probe(
        name="inputs",
        suspicion="fc is fed other layers than declared",
        guards="which captured layers move the drafts and which the labels, in which order, and what each really is",
        needs=("step", "draw", "capture", "reference"),
        needs_text="a trainer's step; `capture` and `reference` for what the layers are",
        faults=_split(
            "fc-teacher fc-layers fc-order fc-dead fc-altered labels-from-conditioning "
            "labels-without-teacher labels-undeclared-teacher layer-shift layer-wrong capture-order "
            "capture-norm capture-rows capture-differs"
        ),
    ),
    _trainer_probe(
        name="noise",
        suspicion="noise reaches the labels, or drafting",
        guards="that noise enters the conditioning states alone, as much as declared, and never in evaluation",
        needs=("step", "draw"),
        needs_text="a trainer's step",
        faults=_split(
            "noise-on-teacher noise-undeclared noise-missing noise-std noise-kind noise-slices "
            "noise-in-evaluation noise-shared noise-behind-fc noise-unseeded"
        ),
    ),
    _trainer_probe(
        name="loss",
        suspicion="the loss is not the declared one",
        guards="terms, temperature, position weights and denominator of the loss, read from its gradient",
        needs=("step", "draw", "parameters"),
        needs_text="a trainer's step; the captured teacher slice, where the loss uses one",
        faults=_split(
            "loss-none loss-unrecognised loss-head loss-terms loss-smoothing loss-label-source "
            "loss-temperature loss-temperature-squared loss-weights loss-streak loss-weights-attached "
            "loss-gamma loss-alpha loss-slot0 loss-reduction"
        ),
    ),
    _trainer_probe(
        name="labels",
        suspicion="slots are trained on the wrong tokens",
        guards="which token every slot is trained on: offset, source, documents, prompts, holes, padding",
        needs=("step", "draw"),
        needs_text="a trainer's step",
        faults=_split(
            "label-unrecognised label-offset label-source label-documents label-padding label-prompt "
            "label-holes label-missing label-vocabulary label-unknown"
        ),
    ),
    _trainer_probe(
        name="context",
        suspicion="a block sees what serving will not have",
        guards="what a block sees: before its anchor, in its document and window, and of its own slots, layer by layer",
        needs=("step", "draw", "parameters"),
        needs_text="a trainer's step; z-lab's parameter names for the comparison layer by layer",
        faults=_split(
            "mask-ignored context-anchor context-future context-documents context-padding "
            "context-missing context-edge window-size window-from window-ignored window-undeclared "
            "within-block block-other block-tokens block-anchor block-positions mask-token rope-base "
            "rope-part norm-epsilon context-norm drafter-not-recognised"
        ),
    ),
    _trainer_probe(
        name="teacher",
        suspicion="the teacher's logits are not the target's own",
        guards="that the teacher's logits are the target's own: state, final norm, head, vocabulary map",
        needs=("step", "draw", "capture", "reference"),
        needs_text="a trainer's step and `reference`; a recipe with a teacher; `capture` for the captured slice",
        faults=_split(
            "teacher-norm teacher-shift teacher-layer teacher-head teacher-vocabulary teacher-differs"
        ),
    ),
    _trainer_probe(
        name="decode",
        suspicion="drafting computes something else than training",
        guards="that inference drafts what training computed, at every position, and that verifying changes no text",
        needs=("draft", "generate", "greedy", "step", "draw", "parameters"),
        needs_text="a trainer's `draft`; `generate` and `greedy` for the loop",
        faults=_split(
            "decode-positions decode-rope decode-context decode-within decode-window decode-slices "
            "decode-embedding decode-mask-token decode-head decode-long decode-training "
            "decode-not-recognised recurrent-state verification"
        ),
    ),
    _trainer_probe(
        name="frozen",
        suspicion="something frozen trains, or something else does not",
        guards="that everything trains but what the recipe freezes, and that embedding and head are the target's",
        needs=("step", "draw", "update", "optimizer", "parameters", "reference"),
        needs_text="a trainer's `update`, `optimizer` and `reference`; without them gradients and flags only",
        faults=_split(
            "frozen-trains trained-frozen trained-without-gradient trained-not-in-optimizer "
            "trained-still embed-differs head-differs"
        ),
    ),
    _trainer_probe(
        name="resume",
        suspicion="an interrupted run is another run",
        guards="that an interrupted run is the same run: losses bit-equal",
        needs=("run",),
        needs_text="a trainer's `run`",
        faults=_split(
            "run-not-deterministic resume-restart resume-data resume-weights resume-random "
            "resume-optimizer resume-schedule resume-not-recognised"
        ),
    ),
    _trainer_probe(
        name="export",
        suspicion="the exported checkpoint means something else to its reader",
        guards="that the exported checkpoint means the same to its readers",
        needs=("export", "step", "draw", "parameters", "reference"),
        needs_text="a trainer's `export`; z-lab's dflash and speculators as readers where they are installed",
        faults=_split(
            "export-layer-ids export-mask-token export-block-size export-rope export-attention "
            "export-epsilon export-vocabulary export-weights export-shared export-unreadable "
            "export-not-recognised"
        ),
    ),
    _trainer_probe(
        name="coverage",
        suspicion="part of the data is never trained on",
        guards="that anchors stand on supervised tokens, are drawn anew, and reach every document",
        needs=("draw",),
        needs_text="a trainer's `draw`",
        faults=_split(
            "anchors-padding anchors-masked anchors-repeated anchors-unseeded anchors-frozen "
            "anchors-starved anchors-row-budget anchors-budget anchors-uneven"
        ),
    ),
    _trainer_probe(
        name="shapes",
        suspicion="a step's tensors are not what they seem",
        guards="shape, dtype and range of every tensor of a step, and captured rows that are zero, stale or rounded",
        needs=("step", "draw", "capture"),
        needs_text="a trainer's step; `capture` for the captured states",
        faults=_split(
            "step-not-finite states-not-finite states-zero states-constant states-repeated states-dtype "
            "fc-width fc-rounded labels-range"
        ),
    ),
    _trainer_probe(
        name="tokens",
        suspicion="the server sends other tokens than training saw",
        guards="that training data and the server's requests have the same ids, and what of them is trained on",
        needs=("tokenize", "request"),
        needs_text="a trainer's `tokenize` and `request`",
        faults=_split(
            "tokens-bos tokens-cut tokens-thinking tokens-template tokens-text tokens-mask tokens-end"
        ),
    ),
)


def find_entry(name: str) -> ProbeEntry:
    """Return the entry of that probe. Raises KeyError where there is none."""
    entries = {entry.name: entry for entry in TABLE}
    return entries[name]


def list_suspicions() -> list[tuple[ProbeEntry, SuspicionRule]]:
    """Return every suspicion with its probe's entry, in the order in which a report lists them."""
    rows = [(entry, rule) for entry in TABLE for rule in entry.suspicions]
    return sorted(rows, key=lambda row: row[1].place)
