"""Readers of a drafter's checkpoint: our own code, z-lab's `dflash` package, speculators.

    for reader in list_peer_readers("zlab"):
        hidden = reader.compute_hidden(folder, look, fc_input, table)     # [A, B, D]

Each loads the folder by its own code and computes the blocks of a row: what enters its head. Peers are imported where
they are installed (`make peers`); nothing is fetched: a verifier that the checkpoint names is not looked up.

Shapes: S tokens, A anchors, B slots, D width, F features of fc.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.export import AmbiguityAnswers, ImportedCheckpoint, load_checkpoint
from parity.model.dflash.mask import training_layout
from parity.model.training.anchors import block_ids
from parity.probes.instruments.drafter.receptive_field import ProbeBatch


class ReaderUnavailable(Exception):
    """A reader that is not available, and why."""


class ReaderRefusal(Exception):
    """A reader that does not take the checkpoint, and its message."""


def import_checkpoint(folder: Path, partial: bool) -> ImportedCheckpoint:
    """The checkpoint by our reader.

    Args:
        folder: of the checkpoint.
        partial: whether a share of each head that turns is read as vLLM reads it.
    """
    return load_checkpoint(folder, AmbiguityAnswers(partial_rotary=True) if partial else None)


class OwnReader:
    """`parity.model.dflash.export.load_checkpoint`."""

    name = "parity"

    def __init__(self, read: ImportedCheckpoint) -> None:
        self.read = read

    @torch.no_grad()
    def compute_hidden(self, folder: Path, look: ProbeBatch, fc_input: Tensor, table: Tensor) -> Tensor:
        """[A, B, D] of all blocks in one training pass, by the checkpoint's own block size and mask token.

        Args:
            folder: of the checkpoint, which `read` was made from.
            look: the row and its anchors.
            fc_input: [S, F] what enters fc.
            table: [V, D] the embedding's rows.
        """
        del folder
        drafter = self.read.drafter.float() if fc_input.dtype != torch.float64 else self.read.drafter.double()
        size, batch = drafter.config.block_size, look.batch
        layout = training_layout(batch.position, batch.document, look.anchors, size)
        ids = block_ids(batch.tokens, look.anchors, size, drafter.config.mask_token_id)
        weight = drafter.fc.weight
        made: Tensor = drafter(fc_input.to(weight), table.detach()[ids].to(weight), layout)
        return made


class ZlabReader:
    """z-lab's package, as its inference calls it: one block, the states before the anchor, positions from 0."""

    name = "dflash"

    @torch.no_grad()
    def compute_hidden(self, folder: Path, look: ProbeBatch, fc_input: Tensor, table: Tensor) -> Tensor:
        try:
            from dflash.model import DFlashDraftModel
        except ImportError as error:
            raise ReaderUnavailable("not installed (make peers)") from error
        with _as_refusal(self.name), silence_transformers():
            model = DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
        batch, rows = look.batch, []
        for anchor in look.anchors.tolist():
            before = (batch.document == batch.document[anchor]) & (batch.position < batch.position[anchor])
            with _as_refusal(self.name):
                ids = torch.full((1, model.block_size), int(model.mask_token_id))
                ids[0, 0] = batch.tokens[anchor]
                made = model(
                    position_ids=torch.arange(int(before.sum()) + model.block_size)[None],
                    noise_embedding=table.detach()[ids].float(),
                    target_hidden=fc_input[before].float()[None],
                )
            rows.append(made)
        return torch.cat(rows)


class SpeculatorsReader:
    """speculators' model, with our anchors in place of its own draw."""

    name = "speculators"

    @torch.no_grad()
    def compute_hidden(self, folder: Path, look: ProbeBatch, fc_input: Tensor, table: Tensor) -> Tensor:
        try:
            from speculators.models.dflash import core
            from speculators.models.dflash.config import DFlashSpeculatorConfig
        except ImportError as error:
            raise ReaderUnavailable("not installed (make peers)") from error
        with _as_refusal(self.name), silence_transformers():
            config = DFlashSpeculatorConfig.from_pretrained(str(folder))
            if getattr(config.transformer_layer_config, "sliding_window", None) is not None:
                raise ReaderUnavailable("it counts windows from the anchor, and no engine serves it so")
            config.speculators_config.verifier.name_or_path = None
            config.transformer_layer_config._attn_implementation = (
                "sdpa"  # its default, flex, takes 12 s on a CPU
            )
            model = core.DFlashDraftModel.from_pretrained(str(folder), config=config).eval()
        model.embed_tokens.weight.data.copy_(table.detach())
        batch, ones = look.batch, torch.ones_like(look.batch.tokens)[None]
        valid = torch.ones(len(look.anchors), dtype=torch.bool)
        drawn = core.select_anchors
        core.select_anchors = lambda *_, **__: (look.anchors, valid)
        try:
            with _as_refusal(self.name):
                made = model._backbone_forward(
                    hidden_states=fc_input.float()[None],
                    input_ids=batch.tokens[None],
                    loss_mask=ones,
                    verifier_last_hidden_states=torch.zeros(1, len(batch.tokens), len(model.norm.weight)),
                    document_ids=batch.document[None],
                    position_ids=batch.position[None],
                    max_anchors=len(look.anchors),
                )[0]
        finally:
            core.select_anchors = drawn
        hidden: Tensor = made.view(len(look.anchors), -1, made.shape[-1])
        return hidden


@contextmanager
def _as_refusal(name: str) -> Iterator[None]:
    """What a reader raises about a checkpoint, as its answer."""
    try:
        yield
    except ReaderUnavailable:
        raise
    except ParityError as error:
        raise ReaderRefusal(f"{name}: {error.asked}: {error.found}") from error
    except Exception as error:  # it may raise what it likes
        raise ReaderRefusal(
            f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


@contextmanager
def silence_transformers() -> Iterator[None]:
    """For a while no progress bars and load reports of transformers."""
    from transformers.utils import logging

    shown, said = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(said)
        if shown:
            logging.enable_progress_bar()


def list_peer_readers(layout: str) -> tuple[ZlabReader | SpeculatorsReader, ...]:
    """Other projects' readers of a layout: `zlab` or `speculators`."""
    return (ZlabReader(),) if layout == "zlab" else (SpeculatorsReader(),)
