"""The trainer: a step does what the recipe says, and an interrupted, split or shared run is the same run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import TrainingFile
from parity.model.recipe.presets import preset
from parity.model.training.build import open_trainer
from parity.model.training.checkpoint import find_checkpoint, load_drafter
from parity.model.training.data import make_batch
from parity.model.training.states import store
from parity.model.training.step import StepOutput, loss_config
from parity.model.training.trainer import RunEnd, Trainer, learning_rate_at
from parity.model.training.vocabulary import draft_vocab

ROOT = Path(__file__).resolve().parents[3]
UNIT = preset("unit").with_values({"run.data.validation_documents": 2})
DOUBLE = {"run.precision.weights": "float64", "recipe.target.dtype": "float64"}
TINY = preset("tiny").with_values(
    {
        "run.data.regenerate": 0,
        "run.batch.rows": 1,
        "run.save.tau_prompts": 0,
        "run.data.validation_documents": 0,
    }
)
NOISE = {"recipe.noise": {"kind": "uniform", "std": 0.05}}


def run(training: TrainingFile, out: Path | None = None, **options: Any) -> tuple[Trainer, RunEnd]:
    trainer = open_trainer(training, out=out)
    outcome = trainer.run(**options)
    trainer.close()
    return trainer, outcome


def one_step(changes: dict[str, Any], **options: Any) -> tuple[Trainer, StepOutput]:
    trainer = open_trainer(UNIT.with_values(changes))
    batch = make_batch(trainer.feed.documents[:3], epoch=0)
    return trainer, trainer.step(batch, **options)


def same_weights(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.drafter.parameters(), b.drafter.parameters(), strict=True))


# --- what a step uses ---------------------------------------------------------------------------------


def test_a_step_returns_what_it_used() -> None:
    trainer, out = one_step({})
    captured, block = out.captured, trainer.training.recipe.block
    assert captured.taps == ("layer.0.out", "layer.1.out", "layer.2.out", "final.postnorm")
    assert torch.equal(
        out.fc_input, captured.states[:, :3].flatten(1)
    )  # N - 1 slices: the teacher's is not fed
    assert out.hidden.shape == (len(out.anchors), block.size, 64) and out.hidden.requires_grad
    assert out.teacher is not None and torch.equal(out.teacher.states, captured.states[:, 3])
    anchors, slots = out.supervision_mask.nonzero(as_tuple=True)
    logits = captured.states[out.anchors[anchors] + slots - 1, 3] @ out.head.T
    assert torch.equal(out.labels[anchors, slots], logits.argmax(-1))
    assert not out.supervision_mask[:, 0].any()
    gamma = trainer.training.recipe.loss.weights.gamma or 0
    expected = torch.exp(-(torch.arange(block.size) - 1.0) / gamma) * out.supervision_mask
    torch.testing.assert_close(out.weights(), expected)
    assert out.accuracy.shape == (block.size,)


def test_the_loss_is_the_weighted_mean_over_supervised_slots() -> None:
    _, out = one_step(DOUBLE)
    logits = out.hidden @ out.head.T
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), out.labels.clamp(min=0), reduction="none"
    )
    weights = out.weights()
    torch.testing.assert_close(out.loss, (each * weights).sum() / weights.sum())


def test_noise_moves_the_input_of_fc_and_nothing_else() -> None:
    changes = {"recipe.noise": {"kind": "gaussian", "std": 0.1}}
    trainer, first = one_step(changes, seed=1)
    batch = make_batch(trainer.feed.documents[:3], epoch=0)
    second = trainer.step(batch, seed=2, anchors=first.anchors)
    assert torch.equal(first.labels, second.labels) and torch.equal(
        first.captured.states, second.captured.states
    )
    assert first.teacher is not None and second.teacher is not None
    assert torch.equal(first.teacher.states, second.teacher.states)
    clean = first.captured.states[:, :3].flatten(1)
    assert abs(float((first.fc_input - clean).std()) - 0.1) < 0.003
    assert not torch.equal(first.fc_input, second.fc_input)
    assert torch.equal(trainer.step(batch, training=False).fc_input, clean)
    again = trainer.step(batch, seed=1, anchors=first.anchors)
    assert torch.equal(again.fc_input, first.fc_input)


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_has_the_declared_deviation(kind: str) -> None:
    _, out = one_step({"recipe.noise": {"kind": kind, "std": 0.05}})
    noise = out.fc_input - out.captured.states[:, :3].flatten(1)
    assert abs(float(noise.std()) / 0.05 - 1) < 0.02
    assert kind == "gaussian" or float(noise.abs().max()) <= 0.05 * 3**0.5 + 1e-6


def test_anchors_and_noise_do_not_depend_on_the_row() -> None:
    trainer = open_trainer(UNIT.with_values(NOISE))
    first, second = trainer.feed.documents[:2]
    alone = trainer.step(make_batch([second], epoch=3))
    packed = trainer.step(make_batch([first, second], epoch=3))
    start = len(first)
    assert torch.equal(packed.fc_input[start:], alone.fc_input)
    assert packed.anchors[packed.anchors >= start].sub(start).tolist() == alone.anchors.tolist()


VARIANTS: list[dict[str, Any]] = [
    {"recipe.labels": "data", "recipe.teacher": None},
    {"recipe.teacher.norm": "pre"},
    {
        "recipe.labels": "teacher_distribution",
        "recipe.loss.terms": {"kl": 1.0},
        "recipe.loss.temperature": 2.0,
    },
    {"recipe.loss.terms": {"ce": 0.3, "rkl": 0.7}, "recipe.loss.reduction": "mask_mean"},
    {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}, "recipe.loss.reduction": "batch_mean"},
    {"recipe.loss.weights": {"kind": "uniform"}, "recipe.block.within": "causal"},
    {
        "recipe.attention": {"layers": ["sliding", "full"], "window": 8},
        "recipe.block.within": "sliding_causal",
    },
    {"recipe.draft_vocab": {"size": 40}},
    {"recipe.labels": "data", "recipe.draft_vocab": {"size": 20}},
    {"recipe.conditioning": {"layers": [1, 3], "ids": "hidden_states"}},
    {"recipe.teacher": {"state": 3, "norm": "pre"}},
    {"recipe.frozen": ["embed_tokens", "lm_head", "fc"]},
    {"run.precision.autocast": "bfloat16"},
    {"recipe.target.dtype": "bfloat16"},
    {"run.drafter.attention": "sdpa", "recipe.block.partial": False, "recipe.block.past_holes": False},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=[" ".join(each) for each in VARIANTS])
def test_every_healthy_variant_trains(changes: dict[str, Any]) -> None:
    trainer, outcome = run(UNIT.with_values(changes | {"run.optimizer.lr": 3e-3}), stop_after=3)
    assert all(0 < loss < 100 for loss in outcome.losses)  # batch_mean sums over a sample's slots
    before = open_trainer(trainer.training).drafter.state_dict()
    moved = {n for n, value in trainer.drafter.state_dict().items() if not torch.equal(value, before[n])}
    frozen = {"fc.weight"} if "recipe.frozen" in changes else set()
    assert moved == {name for name, _ in trainer.drafter.named_parameters()} - frozen


def test_pre_and_post_norm_teachers_agree() -> None:
    post, pre = (one_step({"recipe.teacher.norm": norm})[1] for norm in ("post", "pre"))
    assert not torch.equal(post.captured.states[:, 3], pre.captured.states[:, 3])
    assert torch.equal(post.labels, pre.labels) and torch.equal(post.loss, pre.loss)


def test_a_reduced_vocabulary_keeps_the_most_frequent_tokens(tmp_path: Path) -> None:
    import numpy as np

    trainer = open_trainer(UNIT)
    recipe = UNIT.with_values({"recipe.draft_vocab": {"size": 20}}).recipe
    made = draft_vocab(recipe, 80, trainer.feed.documents)
    assert made is not None and int(made.t2d.sum()) == 20
    np.save(tmp_path / "t2d.npy", made.t2d.numpy())
    np.save(tmp_path / "d2t.npy", made.d2t.numpy())
    files = {"size": 20, "t2d": str(tmp_path / "t2d.npy"), "d2t": str(tmp_path / "d2t.npy")}
    read = draft_vocab(UNIT.with_values({"recipe.draft_vocab": files}).recipe, 80, [])
    assert read is not None and torch.equal(read.t2d, made.t2d) and torch.equal(read.d2t, made.d2t)
    with pytest.raises(ParityError, match="maps of 20 of 80"):
        draft_vocab(UNIT.with_values({"recipe.draft_vocab": files | {"size": 19}}).recipe, 80, [])
    with pytest.raises(ParityError, match="a vocabulary map from .*none.npy"):
        draft_vocab(UNIT.with_values({"recipe.draft_vocab": files | {"t2d": "none.npy"}}).recipe, 80, [])
    with pytest.raises(ParityError, match="the target has 80 tokens"):
        draft_vocab(UNIT.with_values({"recipe.draft_vocab": {"size": 81}}).recipe, 80, [])


def test_a_row_without_anchors_trains_nothing_but_runs() -> None:
    trainer = open_trainer(UNIT)
    out = trainer.step(make_batch(trainer.feed.documents[:1], epoch=0).without_supervision())
    out.objective.numerator.backward()
    assert out.loss.item() == 0 and not out.supervision_mask.any()
    assert all(p.grad is not None and not p.grad.any() for p in trainer.parameters.values())


def test_a_frozen_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ParityError, match="recipe.frozen: fcc; found: no such part of the drafter\ndo this: did"
    ):
        open_trainer(UNIT.with_values({"recipe.frozen": ["embed_tokens", "lm_head", "fcc"]}))


def test_learning_rate() -> None:
    schedule = UNIT.with_values(
        {"run.schedule": {"steps": 100, "warmup": 0.1, "min_ratio": 0.1}}
    ).run.schedule
    rates = [learning_rate_at(schedule, 1.0, step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0
    assert abs(rates[55] - 0.55) < 1e-9 and rates == [*rates[:10], *sorted(rates[10:], reverse=True)]
    assert abs(learning_rate_at(schedule, 1.0, 100, 100) - 0.1) < 1e-12


# --- the same run, however it is cut --------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, NOISE, {"run.batch": {"rows": 3, "accumulate": 2}}], ids=str)
def test_an_interrupted_run_is_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    training = UNIT.with_values({"run.schedule.steps": 20} | changes)
    whole, expected = run(training)
    _, first = run(training, tmp_path / "run", stop_after=7)
    torch.manual_seed(99)  # a global generator in another state must not matter
    resumed, rest = run(training, tmp_path / "run")
    assert first.losses + rest.losses == expected.losses  # bit for bit
    assert same_weights(whole, resumed) and rest.finished
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in log if line["event"] == "step"] == expected.losses


def test_the_same_offline(tmp_path: Path) -> None:
    """Embedded hybrid target: online states, then the same from a trace, interrupted."""
    small = {"run.data.documents": 6, "run.data.document_length": 80, "run.data.length": 160}
    more = {"run.data.validation_documents": 0, "recipe.block.anchors": 4, "run.schedule.steps": 4}
    online = TINY.with_values(small | more)
    trainer, expected = run(online)
    assert trainer.parts.target is not None
    backend: Any = trainer.source
    store(trainer.parts.target, backend.backend, trainer.feed.documents, tmp_path / "trace", online.recipe)
    states = {"kind": "trace", "path": str(tmp_path / "trace")}
    offline = online.with_values({"run.states": states})
    _, first = run(offline, tmp_path / "run", stop_after=2)
    resumed, rest = run(offline, tmp_path / "run")
    assert first.losses + rest.losses == expected.losses
    assert same_weights(trainer, resumed)


REDUCTIONS: list[dict[str, Any]] = [
    {"recipe.loss.reduction": "weighted_mean"},
    {"recipe.loss.reduction": "mask_mean"},
    {"recipe.loss.reduction": "batch_mean"},
    {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.3}},
]


@pytest.mark.parametrize("changes", REDUCTIONS, ids=str)
def test_accumulation_is_one_large_batch(changes: dict[str, Any]) -> None:
    made = []
    for accumulate in (1, 4):
        batch = {"run.batch": {"rows": 4, "accumulate": accumulate}}
        trainer, outcome = run(UNIT.with_values(DOUBLE | NOISE | changes | batch), stop_after=4)
        made.append((trainer, outcome.losses))
    (one, losses), (four, split_losses) = made
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(split_losses), atol=1e-10, rtol=0)
    for a, b in zip(one.drafter.parameters(), four.drafter.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_another_training_file_is_not_gone_on_with(tmp_path: Path) -> None:
    run(UNIT, tmp_path, stop_after=1)
    with pytest.raises(
        ParityError, match="it was trained with run.seed: 0, not 1\ndo this: repeat the settings"
    ):
        open_trainer(UNIT.with_values({"run.seed": 1}), out=tmp_path)


class Watcher:
    """Counts, and does something at a step."""

    def __init__(self, at: int, act: Any) -> None:
        self.at, self.act, self.steps, self.updates = at, act, list[int](), list[int]()

    def on_step(self, step: int, output: StepOutput) -> None:
        assert output.loss.requires_grad
        self.steps.append(step)
        if step == self.at:
            self.act(output)

    def on_update(self, step: int, record: Mapping[str, Any]) -> None:
        self.updates.append(step)


def test_observers_see_every_step() -> None:
    kept: list[Tensor] = []
    watcher = Watcher(2, lambda output: kept.append(output.hidden.detach()))
    trainer = open_trainer(UNIT, observers=[watcher])
    trainer.run(stop_after=3)
    assert watcher.steps == watcher.updates == [1, 2, 3] and len(kept) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    _, expected = run(UNIT)
    before = signal.getsignal(number)
    watcher = Watcher(3, lambda output: os.kill(os.getpid(), number))
    trainer = open_trainer(UNIT, out=tmp_path, observers=[watcher])
    stopped = trainer.run()
    trainer.close()
    assert stopped.interrupted and stopped.step == 3 and find_checkpoint(tmp_path).name == "step-00000003"
    assert signal.getsignal(number) is before
    _, rest = run(UNIT, tmp_path)
    assert stopped.losses + rest.losses == expected.losses


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.model.training.test_trainer import UNIT, Watcher
from parity.model.training.build import open_trainer
watcher = Watcher(7, lambda output: os.kill(os.getpid(), signal.SIGKILL))
open_trainer(UNIT, out=Path(sys.argv[1]), observers=[watcher]).run()
"""


def script(
    code: str, *arguments: str, launcher: tuple[str, ...] = ("-c",)
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def test_kill_9_during_training_loses_only_steps_since_the_last_save(tmp_path: Path) -> None:
    _, expected = run(UNIT)
    done = script(KILLED, str(tmp_path))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert find_checkpoint(tmp_path).name == "step-00000004"
    _, rest = run(UNIT, tmp_path)
    assert rest.losses == expected.losses[4:]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["event"] == "step"] == list(range(1, 9))


SHARED = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from parity.model.training import distributed
from parity.model.training.build import open_trainer
from tests.model.training.test_trainer import SHARED_RUNS

made = {}
for name, training, stop in SHARED_RUNS(Path(sys.argv[1])):
    trainer = open_trainer(training, out=Path(sys.argv[1]) / name.split("/")[0])
    outcome = trainer.run(stop_after=stop)
    sharded = all(type(p).__name__ == "DTensor" for p in trainer.drafter.parameters())
    assert sharded == (training.run.parallel == "fsdp2")
    weights = [distributed.gather_full_tensor(p).flatten() for p in trainer.drafter.parameters()]
    made[name] = {"losses": outcome.losses, "sum": float(torch.cat(weights).double().abs().sum())}
    trainer.close()
if trainer.ranks.first:
    Path(sys.argv[1], "made.json").write_text(json.dumps(made))
distributed.leave(together=True)
"""


def SHARED_RUNS(folder: Path) -> list[tuple[str, TrainingFile, int | None]]:
    """(folder/part, training, stop after): double over 50 steps, single over 10, each shared in both ways; what was
    interrupted, with states made online and read from files."""
    double = UNIT.with_values(
        DOUBLE | NOISE | {"run.batch": {"rows": 3, "accumulate": 2}, "run.schedule.steps": 50}
    )
    single = UNIT.with_values({"run.batch": {"rows": 4, "accumulate": 1}, "run.schedule.steps": 10})
    files = {"run.states": {"kind": "speculators", "path": str(folder / "states")}}
    more = {"run.batch.rows": 3, "run.schedule.steps": 8, "run.data.validation_documents": 0}
    offline = UNIT.with_values(files | more)
    runs: list[tuple[str, TrainingFile, int | None]] = []
    for kind in ("ddp", "fsdp2"):
        shared = double.with_values({"run.parallel": kind})
        runs += [
            (f"{kind}-double/all", shared, None),
            (f"{kind}-cut/1", shared, 20),
            (f"{kind}-cut/2", shared, None),
        ]
        runs.append((f"{kind}-single/all", single.with_values({"run.parallel": kind}), None))
        shared = offline.with_values({"run.parallel": kind})
        for name, stop in (("offline/all", None), ("offline-cut/1", 3), ("offline-cut/2", None)):
            runs.append((f"{kind}-{name}", shared, stop))
    return runs


def write_states(folder: Path) -> None:
    """States of all of UNIT's documents as speculators' files: conditioning layers, then before the final norm."""
    from safetensors.torch import save_file

    folder.mkdir()
    trainer = open_trainer(UNIT.with_values({"recipe.teacher.norm": "pre"}))
    for document in trainer.feed.documents:
        batch = make_batch([document], epoch=0)
        made = {"token_ids": batch.tokens, "hidden_states": trainer.source(batch).states}
        save_file(made, folder / f"hs_{document.sample_id}.safetensors")


def test_two_processes_are_one(tmp_path: Path) -> None:
    """DDP and FSDP2 by two processes against one process; interrupted against whole, online and offline."""
    file = tmp_path / "shared.py"
    file.write_text(SHARED)
    write_states(tmp_path / "states")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = script(str(file), str(tmp_path), launcher=launcher)
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads((tmp_path / "made.json").read_text())
    runs = {name: training for name, training, _ in SHARED_RUNS(tmp_path)}
    for kind in ("ddp", "fsdp2"):
        for precision, tolerance in (("double", 1e-10), ("single", 1e-5)):
            alone, expected = run(runs[f"{kind}-{precision}/all"])
            shared = made[f"{kind}-{precision}/all"]
            gaps = [abs(a - b) for a, b in zip(expected.losses, shared["losses"], strict=True)]
            assert max(gaps) < tolerance, (kind, precision, max(gaps))
            total = sum(float(p.detach().double().abs().sum()) for p in alone.drafter.parameters())
            assert abs(total - shared["sum"]) < max(tolerance * 1e3, 1e-3 if precision == "single" else 0)
        for whole, cut in (("double", "cut"), ("offline", "offline-cut")):  # bit for bit
            parts = made[f"{kind}-{cut}/1"]["losses"] + made[f"{kind}-{cut}/2"]["losses"]
            assert parts == made[f"{kind}-{whole}/all"]["losses"] and len(parts) == (
                50 if whole == "double" else 8
            )
        _, expected = run(runs[f"{kind}-offline/all"])
        torch.testing.assert_close(
            torch.tensor(made[f"{kind}-offline/all"]["losses"]),
            torch.tensor(expected.losses),
            atol=1e-5,
            rtol=0,
        )
        assert load_drafter(tmp_path / f"{kind}-double")[0].fc.weight.dtype == torch.float64


# --- validation, errors, command ------------------------------------------------------------------------


def test_validation_is_the_same_every_time_and_the_best_is_kept(tmp_path: Path) -> None:
    trainer = open_trainer(UNIT, out=tmp_path, tau=lambda drafter: 1.25)
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first == second and first["tau"] == 1.25 and first["documents"] == 2
    outcome = trainer.run()
    trainer.close()
    validations = {r["step"]: r["loss"] for r in outcome.records if r["event"] == "validation"}
    best = min(validations, key=lambda step: validations[step])
    assert find_checkpoint(tmp_path, "best").name == f"step-{best:08d}" and sorted(validations) == [4, 8]


def test_tau_is_measured_against_the_targets_own_text() -> None:
    small = {"run.data.documents": 4, "run.data.length": 192, "run.save.tau_prompts": 2}
    trainer = open_trainer(TINY.with_values(small | {"run.data.validation_documents": 2}))
    tau = trainer.evaluate()["tau"]
    assert 1 <= tau < 2  # nothing learned yet
    assert trainer.evaluate()["tau"] == tau
    with pytest.raises(ParityError, match="run.save.tau_prompts: 2; found: no target in this process"):
        open_trainer(UNIT.with_values({"run.save.tau_prompts": 2}))


def test_a_run_on_regenerated_responses(tmp_path: Path) -> None:
    small = {"run.data.documents": 3, "run.data.length": 192, "run.data.validation_documents": 1}
    training = TINY.with_values(small | {"run.data.regenerate": 24})
    said: list[str] = []
    trainer = open_trainer(training, out=tmp_path, say=said.append)
    trainer.close()
    assert said == ["the target wrote 3 of 3 conversations", "the target wrote 1 of 1 conversations"]
    again = open_trainer(training, out=tmp_path, say=said.append)  # from the cache under OUT
    again.close()
    assert len(said) == 2
    for document in again.feed.documents:  # greedy text: the target's argmax is the text itself
        batch = make_batch([document], epoch=0)
        out = again.step(batch)
        agree = out.labels == out.blocks.labels
        assert (
            agree[out.supervision_mask].float().mean() > 0.9
        )  # but for ties and what the old history led to
    with pytest.raises(ParityError, match="run.data.regenerate: 4; found: no target in this process"):
        open_trainer(UNIT.with_values({"run.data.regenerate": 4}))


def test_without_tensorboard_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as where it is not installed
    with pytest.raises(ParityError, match="run.save.tensorboard: true; found: no tensorboard"):
        open_trainer(UNIT.with_values({"run.save.tensorboard": True}), out=tmp_path)


def test_tensorboard_shows_the_log(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(UNIT.with_values({"run.save.tensorboard": True}), tmp_path, stop_after=4)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for event, steps in (("step", [1, 2, 3, 4]), ("validation", [4])):
        shown = events.Scalars(f"{event}/loss")
        assert [each.step for each in shown] == steps
        told = [line["loss"] for line in log if line["event"] == event]
        assert [each.value for each in shown] == pytest.approx(told, rel=1e-6)  # it stores float32
    assert {"step/terms/ce", "step/lr", "step/tokens_per_second"} <= set(events.Tags()["scalars"])


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    trainer = open_trainer(UNIT)
    with torch.no_grad():
        trainer.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(ParityError, match="step 1; found: a gradient norm of nan"):
        trainer.update()


def test_the_loss_configuration_is_the_recipes() -> None:
    made = loss_config(preset("speculators-0.9").recipe.loss)
    assert (made.terms, made.reduction) == ({"ce": 1.0}, "mask_mean")
    assert getattr(made.weights, "alpha", None) == 0.5


def test_tiny_learns_in_a_few_steps(tmp_path: Path) -> None:
    small = {"run.data.documents": 16, "run.data.length": 384, "run.data.validation_documents": 0}
    _, outcome = run(TINY.with_values(small), tmp_path, stop_after=6)
    assert len(outcome.losses) == 6 and outcome.losses[-1] < outcome.losses[0] / 2
    assert load_drafter(tmp_path)[0].config.block_size == 8
