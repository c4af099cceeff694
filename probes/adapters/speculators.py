"""speculators 0.9.0 as an adapter: its data set's own split of the states, its collation, its model's forward.

    adapter = Speculators.open(preset("speculators-0.9"))

Runs on CPU with sdpa attention and its eager losses (both are its own options: `_attn_implementation`,
`loss_implementation`). Its states are those that vLLM wrote (`hs_*.safetensors`), so there is no capture to examine
here; its Trainer moves the model to a CUDA device, so there is no run to resume. z-lab's reader drafts with the
declared attention, which counts windows per query as vLLM does.

Shapes: S tokens of the row, A anchors, B slots of a block, V draft vocabulary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.layout_write import speculators_config
from parity.model.recipe.config import TrainingFile
from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.adapters.peer import PeerAdapter
from parity.probes.adapters.zlab import ZlabSide

SPECULATORS_TERMS = {
    "ce": "ce",
    "kl": "kl_div",
    "rkl": "rkl",
    "js": "jsd",
    "tv": "tv",
    "nla": "nla",
    "lk": "lk_hybrid",
}
"""Our names of loss terms -> speculators'."""
WEIGHTS = {"exp": "fixed-exp-decay", "dpace": "dpace"}


class Speculators(PeerAdapter):
    """`DFlashDraftModel.forward` on what `ArrowDataset` and `CollateFn` make of the captured states."""

    name = "speculators 0.9.0"

    def __init__(self, target: ZlabSide, model: Any, *, call: Mapping[str, object]) -> None:
        """model: a DFlashDraftModel. call: keywords of its forward in training, as `get_trainer_kwargs` gives them."""
        super().__init__(target, model, taps=("final.prenorm",))
        self.call = dict(call)
        self._optimizer: torch.optim.Optimizer | None = None

    @classmethod
    def open(cls, training: TrainingFile) -> "Speculators":
        """A new drafter for a training file's target, configured as the recipe declares. Raises ParityError for what
        speculators cannot be configured for, or where it is not installed (`make peers`)."""
        core = _imports()
        # Its model from the declared configuration, seeded; then the target's tensors in their places.
        target, recipe = ZlabSide.open(training), training.recipe
        size = recipe.draft_vocab.size if recipe.draft_vocab else target.vocabulary
        config = _config(target, size)
        with torch.random.fork_rng():
            torch.manual_seed(training.run.seed)
            model = core.DFlashDraftModel(config)
        if recipe.draft_vocab:
            model.load_vocab_mappings(*_most_frequent(size, target.vocabulary))
        _load_verifier(model, target)
        # The loss by its own names, as its command line would pass them.
        weights = recipe.loss.weights
        if weights.kind not in WEIGHTS or set(recipe.loss.terms) - SPECULATORS_TERMS.keys():
            asked = f"recipe.loss: {dict(recipe.loss.terms)} with {weights.kind} weights"
            raise ParityError(asked, "speculators has exp and dpace weights", "declare what it can be told")
        call, _ = core.DFlashDraftModel.get_trainer_kwargs(
            loss_fn=json.dumps(
                {SPECULATORS_TERMS[name]: factor for name, factor in recipe.loss.terms.items()}
            ),
            loss_implementation="eager",
            dflash_decay_gamma=weights.gamma or 4.0,
            max_anchors=recipe.block.anchors,
            per_position_loss_weight=WEIGHTS[weights.kind],
            dpace_alpha=0.5 if weights.alpha is None else weights.alpha,
        )
        return cls(target, model.to(target.parts.embed.dtype), call=call)

    # --- required -------------------------------------------------------------------------------------

    def step(
        self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int, training: bool
    ) -> AdapterStep:
        """The model's forward with these anchors in place of `select_anchors`."""
        with torch.random.fork_rng(), _training(self.model, training):
            torch.manual_seed(seed)
            seen, loss = self._forward(batch, states, anchors)
        _, _, targets, mask, _ = seen["backbone"]
        blocks = (len(anchors), self.recipe.block.size)
        labels = targets[0].argmax(-1).view(blocks)
        return AdapterStep(
            loss=loss,
            hidden=seen["hidden"],
            head=self.model.lm_head.weight,
            anchors=seen["anchors"],
            fc_input=seen["fc"][0],
            labels=torch.where(mask[0].view(blocks) > 0, labels, torch.full_like(labels, -1)),
            teacher=targets[0].view(*blocks, -1),
        )

    def _forward(self, batch: Batch, states: Tensor, anchors: Tensor) -> tuple[dict[str, Any], Tensor]:
        """What the forward used on its way, and its loss. Hooks and a method are in place for the time of one call."""
        seen: dict[str, Any] = {}
        backbone = self.model._backbone_forward

        def keep(*args: object, **kwargs: object) -> object:
            seen["backbone"] = backbone(*args, **kwargs)
            return seen["backbone"]

        def as_blocks(_: object, args: object, out: Tensor) -> Tensor:
            blocks = out.view(len(anchors), -1, out.shape[-1])
            seen["hidden"] = blocks
            return blocks.view(out.shape)  # so that the loss is made from what is shown

        hooks = (
            self.model.fc.register_forward_pre_hook(lambda _, args: seen.update(fc=args[0])),
            self.model.norm.register_forward_hook(as_blocks),
        )
        self.model._backbone_forward = keep
        try:
            with _fixed_anchors(anchors, seen):
                call = self.call | {"max_anchors": len(anchors)}
                _, loss, _ = self.model(**self._batch(batch, states), **call)
        finally:
            for hook in hooks:
                hook.remove()
            del self.model._backbone_forward
        return seen, loss

    def _batch(self, batch: Batch, states: Tensor) -> dict[str, Tensor]:
        """What the trainer hands to the model: the data set's items, collated."""
        from speculators.train.data import ArrowDataset, CollateFn

        rows, cached = [], []
        for _, span in batch.spans():
            rows.append({"input_ids": batch.tokens[span], "loss_mask": batch.loss_mask[span].long()})
            cached.append({"hidden_states": states[span], "token_ids": batch.tokens[span]})
        data = ArrowDataset.__new__(ArrowDataset)  # its __init__ reads a folder; its items are what we want
        data.data, data.start_file_idx, data.on_missing = rows, 0, "raise"
        data.transfer = SimpleNamespace(get_cached=cached.__getitem__)
        data.max_len, data.hidden_states_dtype = len(batch.tokens), states.dtype
        collate = CollateFn(len(batch.tokens), self.width, states.shape[1] - 1, dtype=states.dtype)
        made: dict[str, Tensor] = collate([data[index] for index in range(len(rows))])
        return made

    def parameters(self) -> Mapping[str, Tensor]:
        """The model's own; z-lab's names."""
        return dict(self.model.named_parameters())

    # --- optional -------------------------------------------------------------------------------------

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        """`select_anchors`, from the global generator seeded by (seed, epoch)."""
        core = _imports()
        with torch.random.fork_rng():
            torch.manual_seed(seed * 1_000_003 + epoch)
            mask = batch.loss_mask.long()[None]
            anchors, valid = core.select_anchors(mask, self.recipe.block.anchors, self.recipe.block.size)
        drawn: Tensor = anchors[valid]
        return drawn

    def capture(self, batch: Batch) -> Tensor:
        """vLLM's business."""
        raise NotExposed(
            "capture (vLLM writes its states: hold a folder of hs_*.safetensors against a capture of ours)"
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Its AdamW (its default, Muon with AdamW, are two)."""
        from speculators.train.optimizers import build_optimizers

        if self._optimizer is None:
            part = self.target.training.run.optimizer
            config = SimpleNamespace(optimizer="adamw", lr=part.lr, weight_decay=part.weight_decay)
            self._optimizer = build_optimizers(self.model, config)[0]
        return self._optimizer

    def update(self, batch: Batch, states: Tensor, *, anchors: Tensor, seed: int) -> None:
        """The order of its Trainer.train_epoch: zero_grad, backward, clip at 1, step."""
        optimizer = self.optimizer()
        shown = self.step(batch, states, anchors=anchors, seed=seed, training=True)
        optimizer.zero_grad(set_to_none=True)
        shown.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()

    def run(self, folder: Path, until: int) -> Sequence[float]:
        """Not on a CPU."""
        raise NotExposed("run (its Trainer moves the model to a CUDA device)")

    def export(self, folder: Path) -> str:
        """`save_pretrained`."""
        self.model.save_pretrained(str(folder))
        return "speculators"

    def tokenize(self, messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], Sequence[bool]]:
        """A vLLM server's business."""
        raise NotExposed("tokenize (its data is rendered by a vLLM server)")


def _imports() -> Any:
    """Its model's module. Raises ParityError where it is not installed."""
    try:
        from speculators.models.dflash import core
    except ImportError as error:
        do = "install it without its dependencies: make peers"
        raise ParityError("the adapter for speculators 0.9.0", str(error), do) from error
    return core


def _config(target: ZlabSide, draft_vocab: int) -> Any:
    """A DFlashSpeculatorConfig of the declared drafter, with attention that runs on a CPU."""
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        **speculators_config(target.drafter, target.layers, "float32", draft_vocab)
    )
    config.transformer_layer_config._attn_implementation = "sdpa"
    return config


def _most_frequent(size: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Its own maps (t2d, d2t) for a reduced vocabulary, from counts that fall with the token's number."""
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = {token: vocabulary - token for token in range(0, vocabulary, 2)}
    d2t, t2d = build_vocab_mappings_from_distribution(counts, size, vocabulary)
    return t2d, d2t


@torch.no_grad()
def _load_verifier(model: Any, target: ZlabSide) -> None:
    """Its own loading where the target is a folder that it can read, else the same tensors put in place."""
    name = model.config.speculators_config.verifier.name_or_path
    if name is not None and Path(name).is_dir():
        model.load_verifier_weights()
        return
    parts = target.parts
    head = parts.head if model.t2d is None else parts.head[model.t2d]
    model.embed_tokens.weight.copy_(parts.embed)
    model.lm_head.weight.copy_(head)
    model.verifier_lm_head.weight.copy_(head)
    model.verifier_norm.weight.copy_(parts.norm.weight)


@contextmanager
def _fixed_anchors(anchors: Tensor, seen: dict[str, Any]) -> Iterator[None]:
    """`select_anchors` gives these instead of drawing; what the model then uses is kept."""
    core = _imports()
    own = core.select_anchors

    def give_fixed_anchors(loss_mask: Tensor, count: int, block_size: int) -> tuple[Tensor, Tensor]:
        seen["anchors"] = anchors
        return anchors.to(loss_mask.device), torch.ones(
            len(anchors), dtype=torch.bool, device=loss_mask.device
        )

    core.select_anchors = give_fixed_anchors
    try:
        yield
    finally:
        core.select_anchors = own


@contextmanager
def _training(model: Any, training: bool) -> Iterator[None]:
    """The model's mode for the time of a step."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)
