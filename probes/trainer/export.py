"""Does the exported checkpoint mean the same to its reader?

The checkpoint is written (`export`) into a temporary folder and read by our own code, by z-lab's `dflash` package (its
layout) or by speculators (its own), as far as they are installed; each computes the blocks of the shared row, and its
hidden states times the step's head must be the step's logits. Before it is written each layer's output projection is
scaled until attention adds as much as the residual, where the exporter writes the live parameters. Then what the file
declares is compared with the recipe: weights, conditioning layers under the layout's convention, mask token, block size
against speculative tokens, window and causal flags, rope, the draft vocabulary's maps row by row against the target's
head, copies of the target's tensors.

The limit is that of `decode`: a few times the rounding error in the trainer's precision, at least 1e-5 of the logits'
deviation (float32). A checkpoint in fewer bits than are trained is judged by their rounding: 1e-2. A file that two
readers could understand differently is refused by our reader with its question: that is a finding too.

Cost: one checkpoint written, read once by each reader, six blocks computed by each. Finds: vllm#40727 and its kin
(layer ids), SpecForge#742 (rope in one schema), speculators#456 (block size), #613 and #733 (partial rotary),
vllm#47745 (causal flag), vllm-ascend#9795 (head and maps), ModelOpt#1621 and NeMo#2461 (mask token). Faults: the
`export` rows of `parity.probes.deviations`.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.dflash.export import ImportedCheckpoint
from parity.probes.adapters.base import NotExposed
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.drafter import checkpoint_readers, inference
from parity.probes.instruments.drafter.hypotheses import VisibleStep, find_embedding
from parity.probes.instruments.drafter.inference import DraftLogits
from parity.probes.instruments.drafter.receptive_field import ProbeBatch
from parity.probes.instruments.drafter.reference import DrafterHypothesis, override_parameters
from parity.probes.subject import AdapterError, ExaminedAdapter
from parity.reports.record import Value

EXPORT_ANCHORS = 6
PEERS = {
    "parity": 0.0,
    "dflash": inference.LEAST_GAP[torch.float32],
    "speculators": inference.LEAST_GAP[torch.float32],
}
"""Smallest limits of readers: peers compute in float32, whatever was trained in."""
ROUNDED = 1e-2
"""Limit for a checkpoint in fewer bits than are trained: bfloat16 rounds each weight by up to 2^-9 of it."""
EXPORT_KINDS = {
    "rope": "export-rope",
    "within": "export-attention",
    "window": "export-attention",
    "slices": "export-layer-ids",
    "mask-token": "export-mask-token",
    "norm": "export-epsilon",
}
"""What a difference between reader and training is called here; the others are not recognised."""
QUESTIONS = (
    ("rope", "export-rope"),
    ("partial_rotary", "export-rope"),
    ("block_size", "export-block-size"),
    ("mask_token_id", "export-mask-token"),
    ("aux_hidden_state_layer_ids", "export-layer-ids"),
    ("conditioning layers", "export-layer-ids"),
    ("layers in config", "export-layer-ids"),
    ("num_target_layers", "export-layer-ids"),
    ("is_causal", "export-attention"),
    ("sliding", "export-attention"),
    ("layer_types", "export-attention"),
    ("vocabulary", "export-vocabulary"),
    ("weights", "export-weights"),
)
"""What our reader's refusals are about, by a word in them."""


class ExportProbe:
    """Written, read, compared."""

    name = "export"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault."""
        # Written with attention scaled up, and once more as it is where the exporter writes a copy.
        look = _look(subject)
        reading = DrafterHypothesis.from_recipe(subject.recipe, subject.adapter.configured)
        lens = VisibleStep.of([look], reading, inference.ALL)
        values: Mapping[str, Tensor] = {} if isinstance(lens, str) else lens.whole.values
        with tempfile.TemporaryDirectory(prefix="parity-export-") as place:
            with override_parameters(subject.parameters, values):
                written = ExportedCheckpoint(subject, look, reading, Path(place) / "scaled")
            if values and not written.holds(values):
                values = {}
                written = ExportedCheckpoint(subject, look, reading, Path(place) / "plain")
            hidden = look.step_output.hidden
            if values and not isinstance(lens, str):
                hidden = lens.whole.found[0]
            said, compared, notes = written.read(inference.compute_draft_logits(look, hidden))
        # What the file declares comes first: a reader that differs for that reason is not named again.
        limit = max(inference.estimate_logit_limit(look, lens), ROUNDED if written.narrower else 0.0)
        faults = [*written.refused, *_check_statement(written, reading, subject), *_weights(written)]
        if not faults:
            off = [
                name
                for name, each in compared.items()
                if float(each.draft_distance.max()) > max(limit, PEERS[name])
            ]
            made = [_name_difference(name, compared[name], lens, values, limit) for name in off]
            notes += [fault.measured for fault in made if inference.is_declared_gap(subject, fault.measured)]
            faults = [fault for fault in made if not inference.is_declared_gap(subject, fault.measured)][:1]
        # The sentence and its facts.
        worst = max((float(each.draft_distance.max()) for each in compared.values()), default=float("inf"))
        words = f"{written.layout} layout, {written.dtype}; read by {', '.join(said) or 'nobody'}"
        words += f"; logits at {len(look.anchors)} anchors at most {worst:.2g} of their deviation apart"
        words += f" (limit {limit:.2g})" + "".join(f"; {note}" for note in notes)
        facts: dict[str, Value] = {
            "export.layout": written.layout,
            "export.dtype": written.dtype,
            "export.readers": ", ".join(said),
            "export.apart": worst,
            **written.facts,
        }
        return make_probe_answer(self.name, words, faults, facts=facts)


def _look(subject: ExaminedAdapter) -> ProbeBatch:
    """Blocks of the shared row that end within it, as speculators requires, with a state before them."""
    batch = subject.batch
    anchors = subject.anchors(batch, 2 * EXPORT_ANCHORS)
    inside = anchors[(anchors + subject.block <= len(batch.tokens)) & (batch.position[anchors] > 0)]
    if not len(inside):
        raise AdapterError("draw", "an anchor with a state before it", f"{anchors.tolist()}")
    return ProbeBatch(subject, batch, inside[:EXPORT_ANCHORS], training=False)


class ExportedCheckpoint:
    """A checkpoint written now, and what reading it gives."""

    def __init__(
        self, subject: ExaminedAdapter, look: ProbeBatch, reading: DrafterHypothesis, folder: Path
    ) -> None:
        self.subject, self.look, self.folder = subject, look, folder
        with (
            subject.guard_adapter_call("export"),
            torch.random.fork_rng(),
            torch.no_grad(),
            checkpoint_readers.silence_transformers(),
        ):
            self.layout = subject.adapter.export(folder)
        if self.layout not in ("zlab", "speculators"):
            raise AdapterError("export", "a layout: zlab or speculators", repr(self.layout))
        self.parameters = {name: tensor.detach().clone() for name, tensor in subject.parameters.items()}
        self.refused: list[FoundDeviation] = []
        self.imported: ImportedCheckpoint | None = None
        try:
            with torch.random.fork_rng():  # a new module draws its first weights
                self.imported = checkpoint_readers.import_checkpoint(
                    folder, reading.rope.partial_rotary_factor != 1
                )
        except ParityError as error:
            self.refused.append(_question(error))
        self.tensors = {} if self.imported is None else dict(self.imported.drafter.state_dict())

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of the weights in the file; None where our reader refuses it."""
        return self.tensors["fc.weight"].dtype if self.tensors else None

    @property
    def dtype(self) -> str:
        """The same in words."""
        return "unread" if self.stored_dtype is None else str(self.stored_dtype).removeprefix("torch.")

    @property
    def narrower(self) -> bool:
        """Whether the file keeps fewer bits than are trained."""
        trained = self.parameters.get("fc.weight")
        if self.stored_dtype is None or trained is None:
            return False
        return torch.finfo(self.stored_dtype).eps > torch.finfo(trained.dtype).eps

    def holds(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the scaled parameters are what was written; taken for so where nothing could be read."""
        return all(
            torch.equal(self.tensors[name], values[name].to(self.stored_dtype))
            for name in values
            if self.tensors
        )

    @property
    def facts(self) -> dict[str, Value]:
        """What the file declares."""
        if self.imported is None:
            return {}
        config, wiring = self.imported.drafter.config, self.imported.wiring
        return {
            "export.layers": ", ".join(map(str, wiring.layers)),
            "export.mask_token_id": config.mask_token_id,
            "export.block_size": config.block_size,
            "export.rope.base": config.rope.rope_theta,
            "export.rope.part": config.rope.partial_rotary_factor,
        }

    def read(self, trained: Tensor) -> tuple[list[str], dict[str, DraftLogits], list[str]]:
        """Let every reader of the layout compute the blocks.

        Args:
            trained: logits of the step, [A, B - 1, V].

        Returns:
            Readers that computed, their logits by name, notes on those that are not available. A refusal is added to
            `refused`.
        """
        readers = [
            *([checkpoint_readers.OwnReader(self.imported)] if self.imported is not None else []),
            *checkpoint_readers.list_peer_readers(self.layout),
        ]
        table, fc_input = find_embedding(self.subject), self.look.step_output.fc_input.detach()
        head = self.look.step_output.head.detach().double()
        # A reader that is not installed is a note; one that refuses is a fault, the first one only.
        said: list[str] = []
        compared: dict[str, DraftLogits] = {}
        notes: list[str] = []
        for reader in readers:
            try:
                with torch.random.fork_rng():
                    hidden = reader.compute_hidden(self.folder, self.look, fc_input, table)
            except checkpoint_readers.ReaderUnavailable as reason:
                notes.append(f"{reader.name} was not asked: {reason}")
                continue
            except checkpoint_readers.ReaderRefusal as error:
                self.refused += [] if self.refused else [FoundDeviation("export-unreadable", str(error))]
                continue
            said.append(reader.name)
            if hidden.shape[1] == self.subject.block:
                drafted = hidden[:, 1:].double() @ head.T
                compared[reader.name] = DraftLogits(look=self.look, trained=trained, drafted=drafted)
        return said, compared, notes


def _question(error: ParityError) -> FoundDeviation:
    """A refusal of our reader, named by the word that it contains."""
    text = f"{error.asked}: {error.found}"
    name = next((name for word, name in QUESTIONS if word in text), "export-unreadable")
    return FoundDeviation(name, f"our reader refuses it: {text}", {"refused": text})


def _check_statement(
    written: ExportedCheckpoint, reading: DrafterHypothesis, subject: ExaminedAdapter
) -> list[FoundDeviation]:
    """What the file declares against the recipe, and against the drafter's configuration where it is known."""
    if written.imported is None:
        return []
    recipe, read = subject.recipe, written.imported
    config, faults = read.drafter.config, list[FoundDeviation]()

    def check(name: str, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            words = f"{what} {found} in the file, {wanted} in training"
            evidence: dict[str, Value] = {"file": str(found), "training": str(wanted)}
            faults.append(FoundDeviation(name, words, evidence))

    # What every recipe declares, then rope and epsilon, which only a configuration does.
    check("export-layer-ids", "conditioning layers", read.wiring.layers, recipe.conditioning.decoder_layers)
    check("export-mask-token", "mask token", config.mask_token_id, recipe.block.mask_token_id)
    check("export-block-size", "block size", config.block_size, recipe.block.size)
    found = [
        f"{'full' if rule.window is None else rule.window}{', causal' * rule.causal}"
        for rule in config.layers
    ]
    wanted = [
        f"{'full' if view.window is None else view.window}{', causal' * view.causal}"
        for view in reading.layers
    ]
    check("export-attention", "layers", "; ".join(found), "; ".join(wanted))
    if subject.adapter.configured is not None:
        check("export-rope", "rope", config.rope.parameters(), reading.rope.parameters())
        check("export-epsilon", "norm epsilon", config.rms_norm_eps, reading.eps)
    return [*faults, *_vocabulary(written), *_copies(written)]


def _vocabulary(written: ExportedCheckpoint) -> list[FoundDeviation]:
    """Whether every draft id is that of the target token whose head row the step uses."""
    assert written.imported is not None
    vocab, head = written.imported.drafter.draft_vocab, written.look.step_output.head.detach()
    try:
        own = written.subject.reference(written.look.batch).head
    except NotExposed:
        return []
    ids = torch.arange(len(own)) if vocab is None else vocab.to_target(torch.arange(len(vocab.d2t)))
    if len(ids) != len(head):
        words = f"{len(ids)} draft ids in the file, a head of {len(head)} rows in training"
        return [FoundDeviation("export-vocabulary", words, {"ids": len(ids)})]
    wrong = int((own[ids].to(head) != head).any(1).sum())
    if not wrong or vocab is None:
        return []
    words = f"{wrong} of {len(ids)} draft ids stand for other target tokens than the step's head has rows of"
    return [FoundDeviation("export-vocabulary", words, {"ids": wrong})]


def _copies(written: ExportedCheckpoint) -> list[FoundDeviation]:
    """Copies of the target's tensors that the file holds, against the step's own."""
    assert written.imported is not None
    wanted = {
        "lm_head.weight": written.look.step_output.head.detach(),
        "embed_tokens.weight": find_embedding(written.subject),
    }
    for name, tensor in written.imported.shared.items():
        own = wanted.get(name)
        if own is None:
            continue
        same = own.shape == tensor.shape and torch.equal(own.detach().to(tensor), tensor)
        if not same:
            words = f"{name} in the file {list(tensor.shape)} is not the step's {list(own.shape)}"
            return [FoundDeviation("export-shared", words, {"tensor": name})]
    return []


def _weights(written: ExportedCheckpoint) -> list[FoundDeviation]:
    """Tensors of the file that are not the trained ones, rounded to the file's dtype."""
    wrong = {
        name: float((tensor.double() - written.parameters[name].double()).abs().max())
        for name, tensor in written.tensors.items()
        if name in written.parameters
        and not torch.equal(tensor, written.parameters[name].to(tensor.dtype).view(tensor.shape))
    }
    if not wrong:
        return []
    first = max(wrong, key=lambda name: wrong[name])
    words = f"{len(wrong)} of {len(written.tensors)} tensors differ, {first} by up to {wrong[first]:.3g}"
    return [FoundDeviation("export-weights", words, {"tensors": len(wrong), "largest": wrong[first]})]


def _name_difference(
    reader: str, each: DraftLogits, lens: VisibleStep | str, values: Mapping[str, Tensor], limit: float
) -> FoundDeviation:
    """Why a reader that finds everything as declared computes something else."""
    apart = float(each.draft_distance.max())
    numbers = f"{reader}'s logits are up to {apart:.3g} of their deviation apart (limit {limit:.2g})"
    evidence: dict[str, Value] = {"apart": apart, "limit": limit, "reader": reader}
    factor = inference.find_common_factor([each], limit)
    if factor is not None:
        words = f"they are {factor:.4g} times the step's; {numbers}"
        return FoundDeviation("export-not-recognised", words, evidence)
    found = None if isinstance(lens, str) else inference.explain_gap([each], lens, values, limit)
    if found is None:
        return FoundDeviation("export-not-recognised", numbers, evidence)
    who = "training" if found.training else reader
    words = f"{found.words} for {who}; {numbers}"
    return FoundDeviation(EXPORT_KINDS.get(found.kind, "export-not-recognised"), words, evidence)
