"""A second family: one attention layer over the target's states, then a chain of steps, each for the next token.

In the manner of multi-token prediction heads: step 0 reads the anchor's embedding and attends to the states before the
anchor; step k goes on from step k - 1 and the mask token's embedding, and predicts the k-th token after the anchor. It
may be narrower than its target, and projects at both ends.

Shapes: S tokens of a row, A anchors, B steps (0 is the anchor), C conditioning layers, D width of the target, W width
of the head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.model.drafting.proposer import DraftContext, DrafterModule, DrafterShape, at_least_fp32
from parity.model.drafting.session import EmbeddingAndHead
from parity.model.family import DrafterFamily
from parity.model.recipe.config import TrainingFile
from parity.model.training.anchors import block_ids
from parity.model.training.data import Batch, Document
from parity.model.training.exchange import (
    ExportOptions,
    ImportedDrafter,
    TargetLayers,
    read_layout_config,
    read_layout_tensors,
    write_layout,
)
from parity.model.training.states import SharedModules
from parity.model.training.step import RecipeStep, place_drafter


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig:
    """Sizes of the head."""

    target_size: int
    """D."""
    hidden_size: int
    """W."""
    conditioning: int
    block_size: int
    mask_token_id: int


class MtpHead(DrafterModule):
    """The network."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config: MtpConfig = config
        wide, own = config.target_size, config.hidden_size
        self.fc = nn.Linear(config.conditioning * wide, own, bias=False)
        self.enter = nn.Linear(wide, own, bias=False)
        self.queries, self.keys, self.values, self.mix = (nn.Linear(own, own, bias=False) for _ in range(4))
        self.chain = nn.Linear(2 * own, own, bias=False)
        self.leave = nn.Linear(own, wide, bias=False)
        self.norm = nn.RMSNorm(own, eps=1e-6)

    def remember(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [S, W] of captured states [S, C * D]."""
        conditioned = F.rms_norm(self.fc(states), (self.config.hidden_size,), eps=1e-6)
        return self.keys(conditioned), self.values(conditioned)

    def forward(self, remembered: tuple[Tensor, Tensor], embeddings: Tensor, visible: Tensor) -> Tensor:
        """Embeddings [A, B, D] and visible bool [A, S] -> what enters the head, [A, B, D]."""
        # Step 0 attends to the states that it may see, and to itself, so that there always is something.
        x = F.rms_norm(self.enter(embeddings), (self.config.hidden_size,), eps=1e-6)
        anchor, (keys, values) = x[:, 0], remembered
        query = self.queries(anchor) * self.config.hidden_size**-0.5
        scores = (query @ keys.T).masked_fill(~visible, -torch.inf)
        itself = (query * self.keys(anchor)).sum(-1, keepdim=True)
        weights = torch.cat((scores, itself), dim=1).softmax(-1)
        seen = weights[:, :-1] @ values + weights[:, -1:] * self.values(anchor)
        # Each later step goes on from the one before it.
        steps = [anchor + self.mix(seen)]
        for number in range(1, x.shape[1]):
            before = torch.cat((self.norm(steps[-1]), x[:, number]), dim=-1)
            steps.append(steps[-1] + torch.tanh(self.chain(before)))
        hidden: Tensor = self.leave(self.norm(torch.stack(steps, dim=1)))
        return hidden

    def new_context(self, ends: EmbeddingAndHead, head: Tensor) -> DraftContext:
        """As `DrafterModule.new_context`."""
        return MtpContext(self, ends, head)


class MtpContext(DraftContext):
    """Keys and values of all states of a text."""

    def __init__(self, drafter: MtpHead, ends: EmbeddingAndHead, head: Tensor) -> None:
        self.drafter, self.ends, self.head = drafter, ends, head
        weight = drafter.fc.weight
        empty, none = weight.new_empty(0, len(weight)), torch.empty(0, dtype=torch.long, device=weight.device)
        self.held: tuple[Tensor, ...] = (empty, empty, none, none)

    def __len__(self) -> int:
        return len(self.held[0])

    def extend(self, states: Tensor, position: Tensor, document: Tensor) -> None:
        """As `DraftContext.extend`."""
        keys, values = self.drafter.remember(states.to(self.drafter.fc.weight))
        more = (keys, values, position, document)
        self.held = tuple(torch.cat(pair) for pair in zip(self.held, more, strict=True))

    def logits(self, anchor_ids: Tensor, position: Tensor, document: Tensor, size: int) -> Tensor:
        """As `DraftContext.logits`."""
        keys, values, positions, documents = self.held
        each = torch.arange(len(anchor_ids), device=anchor_ids.device)
        ids = block_ids(anchor_ids, each, size, self.drafter.config.mask_token_id)
        embeddings = F.embedding(ids, self.ends.embed).to(self.drafter.fc.weight)
        visible = (documents == document[:, None]) & (positions < position[:, None])
        hidden = self.drafter((keys, values), embeddings, visible)[:, 1:]
        logits = F.linear(hidden.to(self.head), self.head)
        return logits.to(at_least_fp32(logits.dtype))


class MtpStep(RecipeStep):
    """The recipe's step with this head."""

    def visible(self, batch: Batch, anchors: Tensor) -> Tensor:
        """bool [A, S]: states of the anchor's document before it."""
        document, position = batch.document[anchors][:, None], batch.position[anchors][:, None]
        return (batch.document == document) & (batch.position < position)

    def predict(self, fc_input: Tensor, batch: Batch, anchors: Tensor) -> Tensor:
        """As `RecipeStep.predict`."""
        drafter = cast(MtpHead, self.drafter)
        hidden: Tensor = drafter(
            drafter.remember(fc_input), self.embeddings(batch, anchors), self.visible(batch, anchors)
        )
        return hidden


class Mtp(DrafterFamily):
    """The family."""

    layouts = {"mtp": "unit"}

    def drafter_config(self, training: TrainingFile, parts: SharedModules) -> MtpConfig:
        """As `DrafterFamily.drafter_config`."""
        recipe, width = training.recipe, parts.embed.shape[1]
        return MtpConfig(
            target_size=width,
            hidden_size=training.run.drafter.width or width,
            conditioning=len(recipe.conditioning.layers),
            block_size=recipe.block.size,
            mask_token_id=recipe.block.mask_token_id,
        )

    def read_config(self, record: Mapping[str, object]) -> MtpConfig:
        """As `DrafterFamily.read_config`."""
        return MtpConfig(**cast("dict[str, int]", dict(record)))

    def new_drafter(
        self, training: TrainingFile, parts: SharedModules, documents: Sequence[Document] = ()
    ) -> MtpHead:
        """As `DrafterFamily.new_drafter`."""
        drafter = MtpHead(self.drafter_config(training, parts))
        generator = torch.Generator().manual_seed(training.run.seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
        place_drafter(drafter, training)
        return drafter

    def new_step(self, training: TrainingFile, parts: SharedModules, drafter: DrafterModule) -> MtpStep:
        """As `DrafterFamily.new_step`."""
        return MtpStep(training, parts, drafter)

    def restore(self, config: DrafterShape, tensors: Mapping[str, Tensor]) -> MtpHead:
        """As `DrafterFamily.restore`."""
        drafter = MtpHead(cast(MtpConfig, config)).to(tensors["fc.weight"].dtype)
        drafter.load_state_dict(dict(tensors))
        return drafter

    def export(
        self,
        drafter: DrafterModule,
        wiring: TargetLayers,
        folder: Path,
        layout: str,
        *,
        head: Callable[[], Tensor],
        options: ExportOptions,
    ) -> Path:
        """As `DrafterFamily.export`."""
        config = {"mtp": asdict(cast(MtpHead, drafter).config), "target": asdict(wiring)}
        return write_layout(folder, config, drafter.state_dict(), overwrite=options.overwrite)

    def load(self, folder: Path, answers: Mapping[str, object]) -> ImportedDrafter:
        """As `DrafterFamily.load`."""
        raw: dict[str, dict[str, Any]] = read_layout_config(folder)
        drafter = self.restore(self.read_config(raw["mtp"]), read_layout_tensors(folder))
        target: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in raw["target"].items()
        }
        return ImportedDrafter(drafter=drafter, wiring=TargetLayers(**target), layout="mtp", shared={})

    def known_answers(self, drafter: DrafterModule, wiring: TargetLayers) -> Mapping[str, object]:
        """As `DrafterFamily.known_answers`: its files leave nothing open."""
        return {}

    def training_values(self, read: ImportedDrafter, out: Path) -> dict[str, object]:
        """As `DrafterFamily.training_values`."""
        config = cast(MtpHead, read.drafter).config
        return {
            "recipe.block.size": config.block_size,
            "recipe.block.mask_token_id": config.mask_token_id,
            "run.drafter.width": config.hidden_size,
        }


MTP = Mtp()
