"""The keys of a training file as records: parts of `recipe:` and of `run:`, with their defaults and units.

A field's docstring is what `parity train --keys` prints of it. Rules between fields are in `parity.model.recipe.check`,
reading a file in `parity.model.recipe.config`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from parity.model.recipe.methods import DEFAULT_METHOD


class Part(BaseModel):
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


class TargetPart(Part):
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


class ConditioningPart(Part):
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


class TeacherPart(Part):
    """The target's state from which labels or teacher logits are computed."""

    state: Literal["final"] | int = "final"
    """final, or a layer under the convention of `conditioning.ids`."""
    norm: Literal["pre", "post"] = "post"
    """pre: taken before the target's final norm, which the trainer applies. post: taken after it."""


class DraftVocabPart(Part):
    """A reduced draft vocabulary."""

    size: Annotated[int, _unit("token ids")] = Field(ge=2)
    """Ids that the drafter can propose."""
    t2d: str | None = None
    """File of bool [V] (npy), or null: the most frequent tokens of the training data are kept."""
    d2t: str | None = None
    """File of int64 [size] offsets (npy); null exactly when t2d is."""


class NoisePart(Part):
    """Noise on the conditioning states in training, never on the teacher state."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    """Its distribution."""
    std: float = Field(default=0.0, ge=0)
    """Standard deviation, also of uniform noise (whose half-width is then sqrt(3) std)."""
    on: Literal["conditioning"] = "conditioning"
    """What it is added to: the states that enter fc."""


class WeightsPart(Part):
    """How the slots of a block weigh against each other."""

    kind: Literal["exp", "dpace", "uniform"]
    """How a slot's weight is made: exp from its place k, dpace (D-PACE, arXiv 2605.18810) from the drafter's
    confidence in its block, uniform: all weigh 1."""
    gamma: Annotated[float, _unit("slots")] | None = Field(default=None, gt=0)
    """exp: w_k = exp(-(k - 1) / gamma)."""
    alpha: float | None = Field(default=None, ge=0, le=1)
    """dpace: the smoothing of the confidence."""


class LossPart(Part):
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


class BlockPart(Part):
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


class AttentionPart(Part):
    """What each draft layer sees of the context."""

    layers: tuple[Literal["full", "sliding"], ...] = Field(min_length=1)
    """One entry a draft layer, from the first."""
    window: TokenCount | None = Field(default=None, ge=1)
    """How far sliding layers see; null exactly when all layers are full."""
    window_from: Literal["query", "anchor"] = "query"
    """query: each slot sees keys less than `window` before itself (z-lab 0.1.0, SpecForge, vLLM). anchor: all slots of
    a block see the `window` tokens before its anchor (speculators 0.9.0)."""


class RecipeFields(Part):
    """The wiring, field by field; `parity.model.recipe.config.Recipe` is one that does not contradict itself."""

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
    def needs_teacher(self) -> bool:
        """Whether a step needs the teacher state."""
        return self.labels != "data" or any(name != "ce" for name in self.loss.terms)


class DrafterPart(Part):
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


class DataPart(Part):
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


class StatesPart(Part):
    """Where the target's states come from."""

    kind: Literal["online", "trace", "speculators"] = "online"
    """online: the target computes them in this process; trace: a trace of `parity capture`; speculators: its files."""
    path: str | None = None
    """The trace, or the folder with hs_*.safetensors; null exactly when online."""
    keep_mib: Annotated[int, _unit("MiB")] = Field(default=0, ge=0)
    """Online: states of documents kept in memory for later epochs, up to so much; 0: none."""


class OptimizerPart(Part):
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


class SchedulePart(Part):
    """Linear warmup, then a cosine. Exactly one of steps and epochs."""

    steps: StepCount | None = Field(default=None, ge=1)
    """Optimizer steps of the whole run; null: `epochs` says."""
    epochs: Annotated[int, _unit("epochs")] | None = Field(default=None, ge=1)
    """Passes over the data; null: `steps` says."""
    warmup: Share = Field(default=0.04, ge=0, lt=1)
    """Of all steps, those in which the rate rises."""
    min_ratio: Share = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of lr."""


class BatchPart(Part):
    """One optimizer step, over all ranks."""

    rows: Annotated[int, _unit("rows")] = Field(default=1, ge=1)
    """Packed rows of one step."""
    accumulate: Annotated[int, _unit("passes")] = Field(default=1, ge=1)
    """Forward passes they are split into, on each rank."""


class PrecisionPart(Part):
    """Weights and optimizer in `weights`; the drafter's products in `autocast` where given."""

    weights: Literal["float32", "float64"] = "float32"
    """Of the drafter and its optimizer."""
    autocast: Literal["bfloat16"] | None = None
    """What the drafter's products are computed in; null: as its weights."""


class SavePart(Part):
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


class WatchPart(Part):
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


class RunConfig(Part):
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
