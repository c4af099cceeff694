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
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from parity.errors import ParityError
from parity.model.recipe.check import (
    KeyLines,
    KeyPath,
    check_target,
    flow,
    nearest,
    recipe_clashes,
    run_clashes,
)
from parity.model.recipe.methods import DEFAULT_METHOD

KEYS_HINT = "`parity train --keys` says what each key takes"
Validated = TypeVar("Validated", bound=BaseModel)


class _Part(BaseModel):
    """Frozen; a key that no field has is an error. A field's docstring is what `parity train --keys` says of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _unit(unit: str) -> Any:
    """Metadata of a field: what its number counts, for the table of keys."""
    return Field(json_schema_extra={"unit": unit})


TokenCount = Annotated[int, _unit("tokens")]
SlotCount = Annotated[int, _unit("slots")]
StepCount = Annotated[int, _unit("steps")]
Share = Annotated[float, _unit("share")]
"""Of a whole, 0 to 1."""


class TargetPart(_Part):
    """The frozen model whose tokens are drafted."""

    model: str
    """Hub name, folder or .gguf file (a relative one is looked for where the command runs); `embedded:hybrid` and
    `embedded:dense` ship with parity; `synthetic:unit` is a seeded stand-in without transformers, for tests."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the newest."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "bfloat16"
    """What the target is loaded in; auto: as its checkpoint says."""
    loader: Literal["AutoModelForCausalLM", "AutoModel", "AutoModelForImageTextToText"] = (
        "AutoModelForCausalLM"
    )
    """The class of transformers that loads it."""
    backend: str = "torch"
    """Who computes the linear layers: torch, fla, fla-interpreted, fast, golden or DELTA+CONV."""


class ConditioningPart(_Part):
    """Which decoder layers are concatenated into fc, in the order of fc's slices."""

    layers: tuple[int, ...] = Field(min_length=1)
    """Conditioning layers in the order of fc's slices, counted as `ids` says."""
    ids: Literal["layer", "hidden_states"] | None = None
    """layer: 0-based decoder layers (z-lab, SpecForge). hidden_states: layer + 1 (speculators, vLLM). Leaving
    it out is refused, with the question which of them is meant."""

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

    size: Annotated[int, _unit("token ids")] = Field(ge=2)
    """Ids that the drafter can propose."""
    t2d: str | None = None
    """File of bool [V] (npy), or null: the most frequent tokens of the training data are kept."""
    d2t: str | None = None
    """File of int64 [size] offsets (npy); null exactly when t2d is."""


class NoisePart(_Part):
    """Noise on the conditioning states in training, never on the teacher state."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    """Its distribution."""
    std: float = Field(default=0.0, ge=0)
    """Standard deviation, also of uniform noise (whose half-width is then sqrt(3) std)."""
    on: Literal["conditioning"] = "conditioning"
    """What it is added to: the states that enter fc."""


class WeightsPart(_Part):
    """How the slots of a block weigh against each other."""

    kind: Literal["exp", "dpace", "uniform"]
    """How a slot's weight is made: exp from its place k, dpace (D-PACE, arXiv 2605.18810) from the drafter's
    confidence in its block, uniform: all weigh 1."""
    gamma: Annotated[float, _unit("slots")] | None = Field(default=None, gt=0)
    """exp: w_k = exp(-(k - 1) / gamma)."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """dpace: the smoothing of the confidence."""


class LossPart(_Part):
    """What is minimised."""

    terms: dict[str, float]
    """Factor of each term, above 0: ce (cross-entropy with the label), or against the teacher's distribution kl, rkl
    (reversed), js, tv (total variation), nla (-log of the accepted share), lk (kl and tv mixed by `lk_eta`)."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides both sides' logits in the terms that compare distributions; ce has none."""
    weights: WeightsPart
    reduction: Literal["weighted_mean", "mask_mean", "batch_mean"] = "weighted_mean"
    """What the weighted sum is divided by: the weights' sum, the number of trained slots, or the number of documents
    in the row."""
    lk_eta: float = 3.0
    """lk: kl's share is exp(-lk_eta (1 - tv))."""


class BlockPart(_Part):
    """Blocks, their anchors and what they see."""

    size: SlotCount = Field(ge=2)
    """B, the clean anchor included."""
    mask_token_id: int = Field(ge=0)
    """The target's token id that stands in slots 1 to B - 1."""
    anchors: Annotated[int, _unit("anchors")] = Field(default=512, ge=1)
    """Anchors of one document in one epoch at most."""
    share: Share = Field(default=1.0, gt=0, le=1)
    """Of a document's possible anchors, at most this share in one epoch."""
    partial: bool = True
    """Whether a block may reach past its document's end, unsupervised there."""
    past_holes: bool = True
    """Whether slots behind a hole in the loss mask are trained."""
    context: Literal["before_anchor"] = "before_anchor"
    """Which states a block sees: those of its document strictly before the anchor."""
    within: Literal["bidirectional", "causal", "sliding_causal"] = "bidirectional"
    """What a slot sees of its own block.
    sliding_causal: causal in sliding layers, bidirectional in full ones (z-lab 0.1.0, SpecForge)."""
    documents: Literal["isolated", "prompt_masked"] = "isolated"
    """isolated: no label crosses into another document. prompt_masked (speculators): labels could, and do not only
    because every document begins with a prompt of at least B tokens that is not trained on."""


class AttentionPart(_Part):
    """What each draft layer sees of the context."""

    layers: tuple[Literal["full", "sliding"], ...] = Field(min_length=1)
    """One entry a draft layer, from the first."""
    window: TokenCount | None = Field(default=None, ge=1)
    """How far sliding layers see; null exactly when all layers are full."""
    window_from: Literal["query", "anchor"] = "query"
    """query: each slot sees keys less than `window` before itself (z-lab 0.1.0, SpecForge, vLLM). anchor: all slots of
    a block see the `window` tokens before its anchor (speculators 0.9.0)."""


class Recipe(_Part):
    """The wiring."""

    method: str = DEFAULT_METHOD
    """Family of drafters; DFlash drafts a block of mask tokens in one pass. What a key means to another family, that
    family says."""
    target: TargetPart
    conditioning: ConditioningPart
    teacher: TeacherPart | None = TeacherPart()
    """null: nothing is taken from the target's states but the conditioning (labels: data, ce alone)."""
    labels: Literal["teacher_argmax", "teacher_distribution", "data"] = "teacher_argmax"
    """What the hard label of a slot is; teacher_distribution: there is none, all terms compare distributions."""
    draft_vocab: DraftVocabPart | None = None
    """null: the drafter proposes all of the target's ids."""
    noise: NoisePart = NoisePart()
    loss: LossPart
    block: BlockPart
    attention: AttentionPart
    frozen: tuple[str, ...] = ("embed_tokens", "lm_head")
    """Parameters that do not train, by the first part of their names; the drafter shares the target's embedding and
    head, so both are required."""

    @property
    def hash(self) -> str:
        """16 hex digits of what is declared, defaults written out but for `method`, which is newer than the hash."""
        data = self.model_dump(mode="json")
        if self.method == DEFAULT_METHOD:
            del data["method"]
        text = json.dumps(data, sort_keys=True)
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
    """Sizes of the drafter; null takes the target's."""

    width: int | None = Field(default=None, ge=1)
    """Of the drafter's layers. A DFlash drafter has its target's; other families may project at both ends."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    heads: int | None = None
    """Attention heads (queries)."""
    kv_heads: int | None = None
    """Heads of keys and values."""
    head_dim: int | None = None
    """Width of one head."""
    rope_theta: float | None = None
    """Base of the rotary embedding."""
    partial_rotary_factor: Share | None = None
    """Part of each head that is rotated."""
    rms_norm_eps: float | None = None
    """Added to the mean square in each norm."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of new projections; 0.02 is transformers' own, too small for narrow drafters."""
    attention: Literal["grouped", "sdpa", "eager", "flex"] = "grouped"
    """Which implementation; all compute the same."""


class DataPart(_Part):
    """Where documents come from and how they fill rows."""

    source: Literal["corpus", "jsonl", "parquet", "hf", "trace"] = "corpus"
    """corpus: worked tasks that are generated; jsonl, parquet: `path` with a conversation a record; hf: a folder that
    datasets' save_to_disk wrote; trace: the token ids of a trace."""
    path: str | None = None
    """File or folder; null for the corpus that is generated."""
    validation: str | None = None
    """File or folder of the same kind; null: held-out conversations of the corpus, else the last
    `validation_documents` of `path`."""
    documents: Annotated[int, _unit("documents")] | None = Field(default=None, ge=1)
    """How many documents to take; null: all (the corpus needs a number)."""
    validation_documents: Annotated[int, _unit("documents")] = Field(default=64, ge=0)
    """How many are held out for validation."""
    length: TokenCount = Field(ge=8)
    """Of a packed row; longer documents are cut."""
    document_length: TokenCount | None = Field(default=None, ge=8)
    """Longest document; null: as long as a row."""
    thinking: Literal["keep", "drop"] = "keep"
    """Whether the thoughts of assistant turns are trained on."""
    regenerate: TokenCount = Field(default=0, ge=0)
    """At most so many a turn: every assistant turn is written anew by the target, greedily, before training (as in
    arXiv 2602.06036); 0 trains on the turns as they are. Cached, under OUT where `cache` is null."""
    server: str | None = None
    """Address of an OpenAI-compatible server that writes them; null: the target in this process."""
    server_model: str | None = None
    """The target's name on that server; null: `recipe.target.model`."""
    cache: str | None = None
    """Folder for tokenised documents; null: none."""


class StatesPart(_Part):
    """Where the target's states come from."""

    kind: Literal["online", "trace", "speculators"] = "online"
    """online: the target computes them in this process; trace: a trace of `parity capture`; speculators: its files."""
    path: str | None = None
    """The trace, or the folder with hs_*.safetensors; null exactly when online."""
    keep_mib: Annotated[int, _unit("MiB")] = Field(default=0, ge=0)
    """Online: states of documents kept in memory for later epochs, up to so much; 0: none."""


class OptimizerPart(_Part):
    """AdamW; weight decay on matrices only."""

    lr: float = Field(gt=0)
    """Highest learning rate, at the end of the warmup."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of both moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled, as a factor of lr."""
    clip: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm; null: none."""


class SchedulePart(_Part):
    """Linear warmup, then a cosine. Exactly one of steps and epochs."""

    steps: StepCount | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; null: `epochs` says."""
    epochs: Annotated[int, _unit("epochs")] | None = Field(default=None, ge=1)
    """Passes over the data; null: `steps` says."""
    warmup: Share = Field(default=0.04, ge=0, lt=1)
    """Of all steps, those in which the rate rises."""
    min_ratio: Share = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of lr."""


class BatchPart(_Part):
    """One optimizer step, over all ranks."""

    rows: Annotated[int, _unit("rows")] = Field(default=1, ge=1)
    """Packed rows of one step."""
    accumulate: Annotated[int, _unit("passes")] = Field(default=1, ge=1)
    """Forward passes they are split into, on each rank."""


class PrecisionPart(_Part):
    """Weights and optimizer in `weights`; the drafter's products in `autocast` where given."""

    weights: Literal["float32", "float64"] = "float32"
    """Of the drafter and its optimizer."""
    autocast: Literal["bfloat16"] | None = None
    """What the drafter's products are computed in; null: as its weights."""


class SavePart(_Part):
    """When to write what."""

    every: StepCount = Field(default=100, ge=1)
    """Between two checkpoints."""
    keep: Annotated[int, _unit("checkpoints")] = Field(default=2, ge=1)
    """Newest checkpoints kept; the best is kept beside them."""
    validate_every: StepCount = Field(default=100, ge=1)
    """Between two validations."""
    tau_prompts: Annotated[int, _unit("prompts")] = Field(default=0, ge=0)
    """Validation documents on whose prompts tau is measured at every validation; 0: none."""
    log_every: StepCount = Field(default=1, ge=1)
    """Between two lines of the log."""
    tensorboard: bool = False
    """Whether to write OUT/tensorboard too; needs the extra `tensorboard`."""


class WatchPart(_Part):
    """The probes that ride along (`parity.watch`)."""

    every: StepCount = Field(default=50, ge=1)
    """Between two step reports; the first is due at step warmup + 1."""
    warmup: StepCount = Field(default=0, ge=0)
    """Before the first report."""
    probes: tuple[str, ...] = ("noise", "inputs", "labels", "loss")
    """Wiring probes that are asked at each report (`parity probes`); none leaves what the step itself shows."""
    on_fail: Literal["warn", "stop"] = "warn"
    """stop: the run saves and ends at the first report with a finding that fails."""
    baseline: str | None = None
    """A conformance.json of another run, with which the wiring is compared as it is with this run's first report."""
    recapture: TokenCount = Field(default=64, ge=0)
    """Of one sample, whose states are captured again and compared with those the step was given; 0: none."""


class RunConfig(_Part):
    """Everything but the wiring."""

    seed: int = Field(default=0, ge=0)
    """Of weights, anchors, noise and the order of rows."""
    device: str = "cpu"
    """As in torch: cpu, cuda, cuda:1."""
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


class TrainingFile(_Part):
    """A whole training file."""

    recipe: Recipe
    run: RunConfig

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "TrainingFile":
        for clash in run_clashes(self):
            clash.refuse({"recipe": self.recipe, "run": self.run}, info.context)
        return self

    def with_values(self, changes: Mapping[str, Any]) -> "TrainingFile":
        """A copy with values at dotted places replaced, checked as a file is: {"run.optimizer.lr": 1e-3}."""
        data = self.model_dump(mode="json")
        for place, value in changes.items():
            *parents, last = place.split(".")
            inner = data
            for name in parents:
                inner = inner[name]
            inner[last] = value
        return from_data(data)


def from_data(data: Any, lines: KeyLines | None = None) -> TrainingFile:
    """A training from plain data. Raises ParityError for an unknown key, a wrong value, a contradiction."""
    lines = lines or KeyLines()
    _refuse_unknown_keys(data, TrainingFile, (), lines)
    if "preset" in data:
        from parity.model.recipe.presets import preset_data

        data = merge_values(
            preset_data(str(data["preset"])), {k: v for k, v in data.items() if k != "preset"}
        )
    return _validate(TrainingFile, data, lines)


def _validate(model: type[Validated], data: Any, lines: KeyLines) -> Validated:
    """Data as a model. Raises ParityError for what is missing, wrong, or contradicts itself."""
    try:
        return model.model_validate(data, context=lines)
    except ValidationError as error:
        first = error.errors()[0]
        key = tuple(str(part) for part in first["loc"] if part in _names(data, first["loc"]))
        if first["type"] == "missing":
            asked, found = f"{'.'.join(key)}", "not given"
            do = f"add {key[-1]} under {'.'.join(key[:-1]) or 'the top'}; {KEYS_HINT}"
            raise ParityError(asked, found, do) from error
        do = f"correct the value; {KEYS_HINT}"
        raise ParityError(lines.quote(key, first["input"]), first["msg"], do) from error


class _RecipeOnly(_Part):
    """A file that declares the wiring of a trainer that is not ours."""

    recipe: Recipe


def load_declared(file: str | Path) -> "TrainingFile | Recipe":
    """A training file, or one with `recipe:` alone, which says enough of a trainer that is not ours.

    Raises ParityError as `load_training_file` does.
    """
    path = Path(file)
    text = _text(path)
    data, lines = _yaml(text, str(path))
    if not isinstance(data, Mapping) or "recipe" not in data or {"run", "preset"} & data.keys():
        training = from_data(data, lines)
        check_target(training.recipe, lines)
        return training
    _refuse_unknown_keys(data, TrainingFile, (), lines)
    recipe = _validate(_RecipeOnly, data, lines).recipe
    check_target(recipe, lines)
    return recipe


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


def _refuse_unknown_keys(data: Any, model: type[BaseModel], at: KeyPath, lines: KeyLines) -> None:
    """Refuse keys that no field has, nearest key named; values are pydantic's business."""
    if not isinstance(data, Mapping):
        found = f"a {type(data).__name__}" if data is not None else "nothing"
        raise ParityError(".".join(at) or "a training file", found, "give a mapping of keys to values")
    for name, value in data.items():
        known = [*model.model_fields, *([] if at else ["preset"])]
        if name not in known:
            asked = lines.quote((*at, str(name)), value)
            found = f"no key {name!r} under {'.'.join(at) or 'the top'}"
            raise ParityError(asked, found, f"{nearest(str(name), known)}; {KEYS_HINT}")
        if name not in model.model_fields:
            continue
        inner = model.model_fields[name].annotation
        parts = [inner, *get_args(inner)]
        part = next((t for t in parts if isinstance(t, type) and issubclass(t, BaseModel)), None)
        if part is not None and not (value is None and len(parts) > 1):
            _refuse_unknown_keys(value, part, (*at, name), lines)


def load_training_file(file: str | Path) -> TrainingFile:
    """Read a training file, `preset:` included. Raises ParityError for anything that is not right."""
    path = Path(file)
    data, lines = _yaml(_text(path), str(path))
    training = from_data(data, lines)
    check_target(training.recipe, lines, ours=True)
    return training


def parse_training_file(text: str, file: str = "") -> TrainingFile:
    """The same from text."""
    return from_data(*_yaml(text, file))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"training file {path}", str(error), "give a YAML file") from error


def _yaml(text: str, file: str) -> tuple[Any, KeyLines]:
    """The data of a training file, and where its keys stand."""
    asked = f"training file {file}".strip()
    try:
        data, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())
        raise ParityError(asked, f"no YAML ({found})", "correct the YAML") from error
    return data, KeyLines(file=file, text=dict(_lines(node, text.splitlines(), ())))


def _lines(node: Any, text: list[str], at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
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


def merge_values(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`; `terms`, and a mapping whose `kind` changes, are replaced whole."""
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and name != "terms":
            if value.get("kind", old.get("kind")) == old.get("kind"):
                value = merge_values(old, value)
        result[name] = value
    return result


def dump(training: TrainingFile) -> str:
    """YAML that `parse_training_file` reads back to the same training."""
    text: str = yaml.safe_dump(training.model_dump(mode="json"), sort_keys=False, width=100)
    return text
