"""The seam holds: a second family that no file of parity knows trains, drafts, is exchanged, evaluated and probed.

Its folder is all of it; the one line outside is its entry in the table of methods, made here.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.commands.convert import export, import_
from parity.commands.evaluate import evaluate
from parity.errors import ParityError
from parity.model.drafting.decode import DecodeConfig, decode, greedy, offline_tau
from parity.model.drafting.session import find_ends
from parity.model.family import find_family
from parity.model.recipe.config import TrainingFile, dump
from parity.model.recipe.methods import METHODS
from parity.model.recipe.presets import preset
from parity.model.training.build import open_trainer
from parity.model.training.checkpoint import load_drafter
from parity.model.training.data import Batch
from parity.model.training.trainer import Trainer
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.query import query_adapter
from tests.families.mtp.family import MtpHead, MtpStep

ROOT = Path(__file__).resolve().parents[2]
NARROW = 24
"""Width of the head; its target's is 64."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line."""
    monkeypatch.setitem(METHODS, "mtp", "tests.families.mtp.family:MTP")


def training_file(**changes: Any) -> TrainingFile:
    """The unit preset with this family."""
    values = {"recipe.method": "mtp", "run.drafter.width": NARROW, "recipe.attention.layers": ["full"]}
    return preset("unit").with_values(values | {f"run.{k}".replace("_", "."): v for k, v in changes.items()})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Trainer, list[float]]]:
    """A short run: its folder, its trainer and its losses."""
    out = tmp_path_factory.mktemp("mtp") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "mtp", "tests.families.mtp.family:MTP")
        trainer = open_trainer(training_file(schedule_steps=40, optimizer_lr=1e-2), out=out)
        losses = trainer.run().losses
        trainer.close()
    yield out, trainer, losses


def test_it_trains_and_its_checkpoint_is_read_again(trained: tuple[Path, Trainer, list[float]]) -> None:
    out, trainer, losses = trained
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), losses
    loaded, training = load_drafter(out)
    assert training.recipe.method == "mtp" and isinstance(loaded, MtpHead)
    assert (
        loaded.config == trainer.config
        and loaded.config.hidden_size == NARROW != trainer.parts.embed.shape[1]
    )
    own = trainer.drafter.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in loaded.state_dict().items())


def test_it_drafts_without_loss(trained: tuple[Path, Trainer, list[float]]) -> None:
    """The loop writes the target's own text, and the offline tau counts what the loop counts."""
    _, trainer, _ = trained
    target = trainer.parts.speaker
    config = DecodeConfig(layers=trainer.training.recipe.conditioning.decoder_layers, max_new_tokens=24)
    prompts = [[5, 9, 2, 7], [11, 4, 30]]
    written = decode(target, trainer.drafter, prompts, config)
    alone = [greedy(target, prompt, config) for prompt in prompts]
    assert [list(each.tokens) for each in written] == [text.tokens[text.prompt :].tolist() for text in alone]
    offline = offline_tau(trainer.drafter, find_ends(target), alone, max_new_tokens=24)
    assert [each.cycles for each in offline] == [each.cycles for each in written]


def test_it_is_evaluated(trained: tuple[Path, Trainer, list[float]]) -> None:
    report = evaluate(trained[0], max_prompts=2, new_tokens=12)
    outcomes = {finding.name: finding.outcome for finding in report.findings}
    assert outcomes["eval.lossless"] == "pass" and outcomes["eval.offline"] == "pass", outcomes


def test_it_is_exported_and_imported_bit_for_bit(
    trained: tuple[Path, Trainer, list[float]], tmp_path: Path
) -> None:
    out, trainer, _ = trained
    done = export(out, to="mtp", out=tmp_path / "mtp")
    assert done.layout == "mtp" and "bit for bit" in done.notes[0]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(training_file()))
    import_(tmp_path / "mtp", out=tmp_path / "ours", recipe=recipe)
    again, training = load_drafter(tmp_path / "ours")
    assert training.run.drafter.width == NARROW
    own = trainer.drafter.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in again.state_dict().items())
    with pytest.raises(ParityError, match="no such layout"):
        export(out, to="zlab", out=tmp_path / "zlab")


class NextTokens(Builtin):
    """Shows the steps that predict, and no step 0: the general view of `AdapterStep`."""

    def step(self, *arguments: Any, **options: Any) -> AdapterStep:
        """The loss is computed from `hidden` as a whole; what is shown is the part behind step 0, in its path."""
        whole = super().step(*arguments, **options)
        assert whole.labels is not None
        steps = whole.anchors[:, None] + torch.arange(1, whole.hidden.shape[1])
        shown = whole.hidden[:, 1:]
        first = whole.hidden[:, :1]
        (slope,) = torch.autograd.grad(whole.loss, whole.hidden, retain_graph=True)
        moved = (shown * slope[:, 1:]).sum() + (first * slope[:, :1]).sum() - (whole.hidden * slope).sum()
        teacher = None if whole.teacher is None else whole.teacher[:, 1:]
        return replace(
            whole,
            hidden=shown,
            loss=whole.loss + (moved - moved.detach()),
            labels=whole.labels[:, 1:],
            teacher=teacher,
            positions=steps,
        )


@pytest.mark.parametrize(("kind", "size"), [(Builtin, 4), (NextTokens, 4), (NextTokens, 2)])
def test_every_probe_passes_or_says_why_not(kind: type[Builtin], size: int) -> None:
    """Blocks of three tokens, the same as steps without a step 0, and the next token alone."""
    training = training_file().with_values({"recipe.block.size": size})
    answers = query_adapter(kind.open(training))
    told = {name: [(f.name, f.outcome, f.sentence) for f in made.findings] for name, made in answers}
    outcomes = {name: {outcome for _, outcome, _ in found} for name, found in told.items()}
    assert not {"fail", "error", "warn"} & set().union(*outcomes.values()), told
    skipped = {name for name, found in outcomes.items() if "pass" not in found}
    assert skipped == {"export"}, told
    assert "no probe reads a checkpoint of method mtp" in told["export"][0][2]
    assert told["context"][1][:2] == ("context.layers", "skipped")


class SeesItsAnchor(MtpStep):
    """Planted: the anchor's own state is among those it sees."""

    def visible(self, batch: Batch, anchors: Tensor) -> Tensor:
        document, position = batch.document[anchors][:, None], batch.position[anchors][:, None]
        return (batch.document == document) & (batch.position <= position)


def test_a_fault_of_its_own_step_is_named() -> None:
    adapter = Builtin.open(training_file())
    adapter.trainer.wiring = SeesItsAnchor(
        adapter.trainer.training, adapter.trainer.parts, adapter.trainer.drafter
    )
    faults = {f.fault for _, made in query_adapter(adapter, ["context"]) for f in made.findings}
    assert "context-anchor" in faults


def test_steps_that_skip_tokens_are_not_exposed() -> None:
    shown = AdapterStep(
        loss=torch.zeros(()),
        hidden=torch.zeros(2, 1, 4),
        head=torch.zeros(5, 4),
        anchors=torch.tensor([1, 3]),
        fc_input=torch.zeros(8, 4),
        positions=torch.tensor([[3], [5]]),
    )
    with pytest.raises(NotExposed, match="positions"):
        shown.as_blocks()
    assert replace(shown, positions=torch.tensor([[2], [4]])).as_blocks().hidden.shape == (2, 2, 4)


def test_the_recipe_names_its_family() -> None:
    """The default is no part of a hash; another method is, and an unknown one is refused."""
    unit = preset("unit")
    assert unit.recipe.method == "dflash" and unit.recipe.hash == "f43f28d0a8fd954f"
    assert unit.with_values({"recipe.method": "mtp"}).recipe.hash != unit.recipe.hash
    with pytest.raises(ParityError, match="no such family"):
        unit.with_values({"recipe.method": "mpt"})
    with pytest.raises(ParityError, match="run.drafter.width: 24"):
        Builtin.open(unit.with_values({"run.drafter.width": NARROW}))
    assert find_family(training_file().recipe) is find_family(training_file().recipe)


def test_the_family_is_small_and_the_seam_is_clean() -> None:
    """At most 400 lines; what trains, exchanges, evaluates and shows a trainer has no word for DFlash."""
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / "tests/families/mtp").glob("*.py"))
    assert lines <= 400
    places = [*(ROOT / "model/training").glob("*.py"), *(ROOT / "model/drafting").glob("*.py")]
    places += [ROOT / f"parity/commands/{name}.py" for name in ("train", "evaluate", "convert")]
    places += [ROOT / f"probes/adapters/{name}.py" for name in ("base", "builtin", "targets")]
    named = [
        file.name for file in places if re.search(r"model\.dflash|\bDFlash\w|\bDFLASH\b", file.read_text())
    ]
    assert not named
