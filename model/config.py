"""The training file: `recipe:` says how a step is wired, `run:` says how long, with what and on what.

    training = load("recipe.yaml")          # or from_data({...}), or presets.preset("tiny")
    print(dump(training))

The recipe is a promise: it is hashed, compared and quoted, and the probes measure whether the trainer keeps
it. So nothing is guessed. An unknown key is an error that names the nearest one; lines that contradict each
other are refused with both quoted; ids that could mean two things are refused with the question.

A file may begin with `preset: NAME`; what it says then replaces the preset's values one by one, except that a
mapping with a `kind` that changes, and `terms`, are replaced whole.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from parity.errors import ParityError
from parity.model.config_check import Key, Lines, flow, nearest, recipe_clashes, run_clashes

Validated = TypeVar("Validated", bound=BaseModel)


class _Part(BaseModel):
    """Frozen; a key that no field has is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetPart(_Part):
    """The frozen model whose tokens are drafted."""

    model: str
    """Hub name or folder; `embedded:hybrid` and `embedded:dense` ship with parity; `synthetic:unit` is a seeded
    stand-in without transformers, for tests."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "bfloat16"
    loader: Literal["AutoModelForCausalLM", "AutoModel", "AutoModelForImageTextToText"] = (
        "AutoModelForCausalLM"
    )
    backend: str = "torch"
    """Who computes the linear layers: torch, fla, fla-interpreted, fast, golden or DELTA+CONV."""


class ConditioningPart(_Part):
    """Which decoder layers are concatenated into fc, in the order of fc's slices."""

    layers: tuple[int, ...] = Field(min_length=1)
    ids: Literal["layer", "hidden_states"] | None = None
    """layer: 0-based decoder layers (z-lab, SpecForge). hidden_states: layer + 1 (speculators, vLLM). Required,
    though the type allows its absence: that is refused with the question."""

    @property
    def decoder_layers(self) -> tuple[int, ...]:
        """0-based decoder layers, whatever `ids` says."""
        return tuple(self.layer_of(number) for number in self.layers)

    def layer_of(self, number: int) -> int:
        """The 0-based decoder layer that `number` means under `ids`."""
        return number - 1 if self.ids == "hidden_states" else number


class TeacherPart(_Part):
    """The target's state from which labels or teacher logits are computed."""

    state: Literal["final"] | int = "final"
    """final, or a layer under the convention of `conditioning.ids`."""
    norm: Literal["pre", "post"] = "post"
    """pre: taken before the target's final norm, which the trainer applies. post: taken after it."""


class DraftVocabPart(_Part):
    """A reduced draft vocabulary."""

    size: int = Field(ge=2)
    t2d: str | None = None
    """File of bool [V] (npy), or null: the most frequent tokens of the training data are kept."""
    d2t: str | None = None
    """File of int64 [size] offsets (npy); null exactly when t2d is."""


class NoisePart(_Part):
    """Noise on the conditioning states in training, never on the teacher state."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    std: float = Field(default=0.0, ge=0)
    """Standard deviation, also of uniform noise (whose half-width is then sqrt(3) std)."""
    on: Literal["conditioning"] = "conditioning"


class WeightsPart(_Part):
    """How the slots of a block weigh against each other."""

    kind: Literal["exp", "dpace", "uniform"]
    gamma: float | None = Field(default=None, gt=0)
    """exp: w_k = exp(-(k - 1) / gamma)."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """dpace: the smoothing of the confidence."""


class LossPart(_Part):
    """What is minimised."""

    terms: dict[str, float]
    temperature: float = Field(default=1.0, gt=0)
    weights: WeightsPart
    reduction: Literal["weighted_mean", "mask_mean", "batch_mean"] = "weighted_mean"
    lk_eta: float = 3.0


class BlockPart(_Part):
    """Blocks, their anchors and what they see."""

    size: int = Field(ge=2)
    """B, the clean anchor included."""
    mask_token_id: int = Field(ge=0)
    anchors: int = Field(default=512, ge=1)
    """Anchors of one document in one epoch at most."""
    share: float = Field(default=1.0, gt=0, le=1)
    """And at most this share of its candidates."""
    partial: bool = True
    """Whether a block may reach past its document's end, unsupervised there."""
    past_holes: bool = True
    """Whether slots behind a hole in the loss mask are trained."""
    context: Literal["before_anchor"] = "before_anchor"
    within: Literal["bidirectional", "causal", "sliding_causal"] = "bidirectional"
    """sliding_causal: causal in sliding layers, bidirectional in full ones (z-lab 0.1.0, SpecForge)."""
    documents: Literal["isolated", "prompt_masked"] = "isolated"
    """isolated: no label crosses into another document. prompt_masked (speculators): labels could, and do not only
    because every document begins with a prompt of at least B tokens that is not trained on."""


class AttentionPart(_Part):
    """What each draft layer sees of the context."""

    layers: tuple[Literal["full", "sliding"], ...] = Field(min_length=1)
    window: int | None = Field(default=None, ge=1)
    """Tokens."""
    window_from: Literal["query", "anchor"] = "query"
    """query: each slot sees keys less than `window` before itself (z-lab 0.1.0, SpecForge, vLLM). anchor: all slots of
    a block see the `window` tokens before its anchor (speculators 0.9.0)."""


class Recipe(_Part):
    """The wiring."""

    target: TargetPart
    conditioning: ConditioningPart
    teacher: TeacherPart | None = TeacherPart()
    labels: Literal["teacher_argmax", "teacher_distribution", "data"] = "teacher_argmax"
    """What the hard label of a slot is; teacher_distribution: there is none, all terms compare distributions."""
    draft_vocab: DraftVocabPart | None = None
    noise: NoisePart = NoisePart()
    loss: LossPart
    block: BlockPart
    attention: AttentionPart
    frozen: tuple[str, ...] = ("embed_tokens", "lm_head")

    @property
    def hash(self) -> str:
        """16 hex digits of what is declared, defaults written out."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def needs_teacher(self) -> bool:
        """Whether a step needs the teacher state."""
        return self.labels != "data" or any(name != "ce" for name in self.loss.terms)

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "Recipe":
        for clash in recipe_clashes(self):
            clash.refuse({"recipe": self}, info.context)
        return self


class DrafterPart(_Part):
    """Sizes of the drafter; null takes the target's. Width and vocabulary always are the target's."""

    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: float | None = None
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of new projections; 0.02 is transformers' own, too small for narrow drafters."""
    attention: Literal["grouped", "sdpa", "eager", "flex"] = "grouped"
    """Which implementation; all compute the same."""


class DataPart(_Part):
    """Where documents come from and how they fill rows."""

    source: Literal["corpus", "jsonl", "parquet", "hf", "trace"] = "corpus"
    path: str | None = None
    """File or folder; null for the corpus that is generated."""
    validation: str | None = None
    """File or folder of the same kind; null: held-out conversations of the corpus, else the last
    `validation_documents` of `path`."""
    documents: int | None = Field(default=None, ge=1)
    """How many documents to take; null: all (the corpus needs a number)."""
    validation_documents: int = Field(default=64, ge=0)
    length: int = Field(ge=8)
    """Tokens of a packed row; longer documents are cut."""
    document_length: int | None = Field(default=None, ge=8)
    """Longest document; null: as long as a row."""
    thinking: Literal["keep", "drop"] = "keep"
    """Whether the thoughts of assistant turns are trained on."""
    regenerate: int = Field(default=0, ge=0)
    """Tokens a turn: every assistant turn is written anew by the target, greedily, before training (as in arXiv
    2602.06036); 0 trains on the turns as they are. Cached, under OUT where `cache` is null."""
    server: str | None = None
    """Address of an OpenAI-compatible server that writes them; null: the target in this process."""
    server_model: str | None = None
    """The target's name on that server; null: `recipe.target.model`."""
    cache: str | None = None
    """Folder for tokenised documents; null: none."""


class StatesPart(_Part):
    """Where the target's states come from."""

    kind: Literal["online", "trace", "speculators"] = "online"
    path: str | None = None
    """The trace, or the folder with hs_*.safetensors."""
    keep_mib: int = Field(default=0, ge=0)
    """Online: states of documents kept in memory for later epochs, up to this many MiB."""


class OptimizerPart(_Part):
    """AdamW; weight decay on matrices only."""

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; null: none."""


class SchedulePart(_Part):
    """Linear warmup, then a cosine. Exactly one of steps and epochs."""

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """Share of all steps."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of lr."""


class BatchPart(_Part):
    """One optimizer step, over all ranks."""

    rows: int = Field(default=1, ge=1)
    """Packed rows of one step."""
    accumulate: int = Field(default=1, ge=1)
    """Forward passes they are split into, on each rank."""


class PrecisionPart(_Part):
    """Weights and optimizer in `weights`; the drafter's products in `autocast` where given."""

    weights: Literal["float32", "float64"] = "float32"
    autocast: Literal["bfloat16"] | None = None


class SavePart(_Part):
    """When to write what."""

    every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept; the best is kept beside them."""
    validate_every: int = Field(default=100, ge=1)
    tau_prompts: int = Field(default=0, ge=0)
    """Validation documents on whose prompts tau is measured at every validation; 0: none."""
    log_every: int = Field(default=1, ge=1)
    tensorboard: bool = False
    """Needs the extra `tensorboard`; writes into OUT/tensorboard."""


class WatchPart(_Part):
    """The probes that ride along (`parity.watch`)."""

    every: int = Field(default=50, ge=1)
    """Steps between two step reports; the first is due at step warmup + 1."""
    warmup: int = Field(default=0, ge=0)
    """Steps before the first."""
    probes: tuple[str, ...] = ("noise", "inputs", "labels", "loss")
    """Wiring probes that are asked at each report (`parity probes`); none leaves what the step itself shows."""
    on_fail: Literal["warn", "stop"] = "warn"
    """stop: the run saves and ends at the first report with a finding that fails."""
    baseline: str | None = None
    """A conformance.json of another run, with which the wiring is compared as it is with this run's first report."""
    recapture: int = Field(default=64, ge=0)
    """Tokens of one sample whose states are captured again and compared with those the step was given; 0: none."""


class Run(_Part):
    """Everything but the wiring."""

    seed: int = Field(default=0, ge=0)
    device: str = "cpu"
    drafter: DrafterPart = DrafterPart()
    data: DataPart
    states: StatesPart = StatesPart()
    optimizer: OptimizerPart
    schedule: SchedulePart
    batch: BatchPart = BatchPart()
    precision: PrecisionPart = PrecisionPart()
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """How ranks share the drafter under torchrun; one process needs neither."""
    save: SavePart = SavePart()
    watch: WatchPart | None = None
    """What `parity train` asks on the way; null: nothing, at no cost. The trainer itself does not read it."""


class Training(_Part):
    """A whole training file."""

    recipe: Recipe
    run: Run

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "Training":
        for clash in run_clashes(self):
            clash.refuse({"recipe": self.recipe, "run": self.run}, info.context)
        return self

    def changed(self, changes: Mapping[str, Any]) -> "Training":
        """A copy with values at dotted places replaced, checked as a file is: {"run.optimizer.lr": 1e-3}."""
        data = self.model_dump(mode="json")
        for place, value in changes.items():
            *parents, last = place.split(".")
            inner = data
            for name in parents:
                inner = inner[name]
            inner[last] = value
        return from_data(data)


def from_data(data: Any, lines: Lines | None = None) -> Training:
    """A training from plain data. Raises ParityError for an unknown key, a wrong value, a contradiction."""
    lines = lines or Lines()
    _known(data, Training, (), lines)
    if "preset" in data:
        from parity.model.presets import preset_data

        data = merge(preset_data(str(data["preset"])), {k: v for k, v in data.items() if k != "preset"})
    return _validated(Training, data, lines)


def _validated(model: type[Validated], data: Any, lines: Lines) -> Validated:
    """Data as a model. Raises ParityError for what is missing, wrong, or contradicts itself."""
    try:
        return model.model_validate(data, context=lines)
    except ValidationError as error:
        first = error.errors()[0]
        key = tuple(str(part) for part in first["loc"] if part in _names(data, first["loc"]))
        if first["type"] == "missing":
            asked, found = f"{'.'.join(key)}", "not given"
            raise ParityError(
                asked, found, f"add {key[-1]} under {'.'.join(key[:-1]) or 'the top'}"
            ) from error
        do = "correct the value; `parity.model.config` says what each key takes"
        raise ParityError(lines.quote(key, first["input"]), first["msg"], do) from error


class _RecipeOnly(_Part):
    """A file that declares the wiring of a trainer that is not ours."""

    recipe: Recipe


def load_declared(file: str | Path) -> "Training | Recipe":
    """A training file, or one with `recipe:` alone, which says enough of a trainer that is not ours.

    Raises ParityError as `load` does.
    """
    path = Path(file)
    text = _text(path)
    data, lines = _yaml(text, str(path))
    if not isinstance(data, Mapping) or "recipe" not in data or {"run", "preset"} & data.keys():
        return from_data(data, lines)
    _known(data, Training, (), lines)
    return _validated(_RecipeOnly, data, lines).recipe


def _names(data: Any, loc: tuple[Any, ...]) -> list[Any]:
    """Parts of pydantic's location that are keys of the data; the rest are its own tags for unions."""
    found = []
    for index, part in enumerate(loc):
        if isinstance(data, Mapping) and (part in data or index == len(loc) - 1):
            found.append(part)
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
    return found


def _known(data: Any, model: type[BaseModel], at: Key, lines: Lines) -> None:
    """Refuse keys that no field has, nearest key named; values are pydantic's business."""
    if not isinstance(data, Mapping):
        found = f"a {type(data).__name__}" if data is not None else "nothing"
        raise ParityError(".".join(at) or "a training file", found, "give a mapping of keys to values")
    for name, value in data.items():
        known = [*model.model_fields, *([] if at else ["preset"])]
        if name not in known:
            asked = lines.quote((*at, str(name)), value)
            raise ParityError(
                asked, f"no key {name!r} under {'.'.join(at) or 'the top'}", nearest(str(name), known)
            )
        if name not in model.model_fields:
            continue
        inner = model.model_fields[name].annotation
        parts = [inner, *get_args(inner)]
        part = next((t for t in parts if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if part is not None and not (value is None and len(parts) > 1):
            _known(value, part, (*at, name), lines)


def load(file: str | Path) -> Training:
    """Read a training file, `preset:` included. Raises ParityError for anything that is not right."""
    path = Path(file)
    return parse(_text(path), str(path))


def parse(text: str, file: str = "") -> Training:
    """The same from text."""
    return from_data(*_yaml(text, file))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"training file {path}", str(error), "give a YAML file") from error


def _yaml(text: str, file: str) -> tuple[Any, Lines]:
    """The data of a training file, and where its keys stand."""
    asked = f"training file {file}".strip()
    try:
        data, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ParityError(asked, f"no YAML ({found})", "correct the YAML") from error
    return data, Lines(file=file, text=dict(_lines(node, text.splitlines(), ())))


def _lines(node: Any, text: list[str], at: Key) -> Iterator[tuple[Key, str]]:
    """Every key of a YAML node with its quoted line. Raises ParityError for a key given twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        number = key.start_mark.line + 1
        if key.value in seen:
            asked = f"{'.'.join((*at, key.value))} on line {number}"
            raise ParityError(asked, f"the same key on line {seen[key.value]}", "keep one of the two")
        seen[key.value] = number
        line = text[number - 1].strip()
        if value.start_mark.line + 1 != number:
            line = f"{key.value}: {flow(yaml.safe_load(yaml.serialize(value)))}"
        yield (*at, key.value), f'line {number} "{line}"'
        yield from _lines(value, text, (*at, key.value))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; `terms`, and a mapping whose `kind` changes, are replaced whole."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and name != "terms":
            if value.get("kind", old.get("kind")) == old.get("kind"):
                value = merge(old, value)
        result[name] = value
    return result


def dump(training: Training) -> str:
    """YAML that `parse` reads back to the same training."""
    text: str = yaml.safe_dump(training.model_dump(mode="json"), sort_keys=False, width=100)
    return text
