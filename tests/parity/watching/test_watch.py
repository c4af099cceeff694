"""Watching the built-in trainer: a wiring that changes on the way is named; being watched changes nothing."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
from parity.cli import main as cli
from parity.errors import ParityError
from parity.gating.conformance import read_conformance, save_conformance
from parity.model.dflash.step import TrainingStep
from parity.model.recipe.config import TrainingFile, dump
from parity.model.recipe.presets import preset
from parity.model.training.build import open_trainer
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from parity.model.training.trainer import RunEnd, Trainer
from parity.reports import schema, step_log
from parity.reports.record import Finding, Report, StepReport
from parity.watching.watch import Watch, WiringChanged, watch_training
from tests.faults.injected.noise import OnAllSlices

ROOT = Path(__file__).resolve().parents[3]
GAUSS = {"recipe.noise": {"kind": "gaussian", "std": 0.05}}
UNIT = preset("unit").with_values(
    {
        "run.schedule.steps": 12,
        "run.save.every": 100,
        "run.save.validate_every": 100,
        "run.data.documents": 12,
        "run.data.validation_documents": 0,
    }
)
TWO = ("noise", "loss")


class Planted:
    """Replaces the running wiring at a step: an observer that comes before the watch."""

    def __init__(self, trainer: Trainer, wiring: type[TrainingStep], before: int) -> None:
        self.trainer, self.kind, self.before = trainer, wiring, before
        trainer.observers.append(self)

    def on_step(self, step: int, output: StepOutput) -> None: ...

    def on_update(self, step: int, record: Mapping[str, Any]) -> None:
        if record["event"] == "step" and step == self.before - 1:
            self.trainer.wiring.__class__ = self.kind


class NoisyTeacher(OnAllSlices):
    """The plant of the probes' own tests, in a trainer that leaves `seed` and `training` at their defaults."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        return super().step(batch, captured, **{"training": True, "seed": self.run.seed} | options)


def opened(changes: Mapping[str, Any] | None = None, **options: Any) -> Trainer:
    return open_trainer(UNIT.with_values(dict(changes or {})), **options)


def watched(changes: Mapping[str, Any] | None = None, **options: Any) -> tuple[Trainer, RunEnd, Watch]:
    """A whole run with a watch, both closed."""
    trainer = opened(changes)
    given: dict[str, Any] = {"every": 4, "probes": TWO} | options
    watch = parity.watch(**given).attach(trainer)
    outcome = trainer.run()
    watch.close()
    return trainer, outcome, watch


def named(findings: tuple[Finding, ...]) -> dict[str, str]:
    return {finding.name: finding.outcome for finding in findings}


def numbers(report: StepReport, end: str) -> list[float]:
    return [float(value) for name, value in report.values if name.endswith(end) and isinstance(value, float)]


# --- the wiring changes on the way --------------------------------------------------------------------


def test_noise_on_the_teacher_is_named_within_one_interval(tmp_path: Path) -> None:
    trainer = opened(GAUSS | {"run.schedule.steps": 40}, out=tmp_path)
    Planted(trainer, NoisyTeacher, before=30)
    watch = parity.watch(every=5, probes=TWO, out=tmp_path).attach(trainer)
    trainer.run()
    watch.close()
    trainer.close()
    assert [report.step for report in watch.reports] == [1, 6, 11, 16, 21, 26, 31, 36]
    healthy, first = watch.reports[:6], watch.reports[6]
    assert all(f.outcome == "pass" for report in healthy for f in report.findings)
    bad = [finding for finding in first.findings if finding.outcome == "fail"]
    assert (bad[0].name, bad[0].fault) == ("noise", "noise-on-teacher")
    assert [f.name for f in bad][-1] == "drift" and "noise.moves_labels: False -> True" in bad[-1].sentence
    assert watch.failed == (31, bad[0])
    on_disk = step_log.read_step_log(tmp_path / "steps.jsonl")
    assert on_disk == watch.history and on_disk[-1] == watch.reports[-1]
    loud = [finding for finding in watch.report.findings if finding.outcome == "fail"]
    assert loud[0].fault == "noise-on-teacher" and loud[0].sentence.startswith("first at step 31")
    assert dict(loud[0].evidence)["last step in order"] == 26


def test_it_stops_and_saves_where_asked(tmp_path: Path) -> None:
    trainer = opened(GAUSS, out=tmp_path)
    Planted(trainer, NoisyTeacher, before=8)
    watch = parity.watch(every=4, probes=TWO, out=tmp_path, on_fail="stop").attach(trainer)
    outcome = trainer.run()
    watch.close()
    trainer.close()
    assert (outcome.step, outcome.interrupted, watch.stopped) == (9, True, True)
    assert (tmp_path / "checkpoints" / "step-000009").is_dir() or any(
        folder.name.endswith("9") for folder in (tmp_path / "checkpoints").iterdir()
    )


LOSSES: list[dict[str, Any]] = [
    {},
    {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}},
    {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}, "recipe.loss.reduction": "mask_mean"} | GAUSS,
    {"recipe.loss.terms": {"ce": 0.3, "kl": 0.7}},
    {"recipe.loss.terms": {"ce": 0.5, "lk": 0.5}, "recipe.loss.weights": {"kind": "uniform"}},
    {"recipe.labels": "data", "recipe.teacher": None, "recipe.loss.reduction": "batch_mean"},
    {"run.precision.autocast": "bfloat16"},
    {"run.precision.autocast": "bfloat16", "recipe.loss.terms": {"ce": 0.3, "kl": 0.7}},
]
DISTRIBUTION = {"recipe.labels": "teacher_distribution"}
TERMS: list[dict[str, Any]] = [
    *(DISTRIBUTION | {"recipe.loss.terms": {name: 1.0}} for name in ("kl", "rkl", "js", "tv", "nla", "lk")),
    DISTRIBUTION | {"recipe.loss.terms": {"rkl": 0.5, "kl": 0.5}, "recipe.loss.temperature": 2.0},
    {"recipe.draft_vocab": {"size": 40}},
    {"run.precision.weights": "float64", "recipe.target.dtype": "float64"},
    {"recipe.target.dtype": "bfloat16", "run.precision.autocast": "bfloat16"},
]


@pytest.mark.parametrize("changes", LOSSES, ids=[str(index) for index in range(len(LOSSES))])
def test_a_healthy_run_raises_nothing(changes: dict[str, Any]) -> None:
    lively = {"run.optimizer.lr": 8e-3, "run.schedule.steps": 41, "run.data.documents": 32}
    _, _, watch = watched(changes | lively, every=20, probes=("noise", "loss", "labels"))
    assert len(watch.reports) == 3
    loud = [(r.step, f.name, f.sentence) for r in watch.reports for f in r.findings if f.outcome != "pass"]
    assert not loud, loud
    assert named(watch.reports[-1].findings)["drift"] == "pass"


@pytest.mark.parametrize("changes", TERMS, ids=[str(index) for index in range(len(TERMS))])
def test_the_steps_own_gradient_is_read_for_every_loss(changes: dict[str, Any]) -> None:
    """Of the untrained drafter and of one that has learned."""
    lively = {"run.optimizer.lr": 8e-3, "run.schedule.steps": 41, "run.data.documents": 32}
    _, _, watch = watched(changes | lively, every=20, probes=())
    for report in watch.reports:
        loud = [(report.step, f.name, f.sentence) for f in report.findings if f.outcome != "pass"]
        assert not loud, loud
        assert dict(report.values)["slot.1.weight"] == pytest.approx(1.0, rel=2e-2)
    assert len(watch.reports) == 3


# --- nothing changes by being watched -----------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    GAUSS,
    {"run.batch": {"rows": 3, "accumulate": 2}},
    {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.5}, "run.precision.autocast": "bfloat16"},
    {"recipe.labels": "data", "recipe.teacher": None},
    {"recipe.attention": {"layers": ["sliding", "full"], "window": 8}, "run.drafter.attention": "sdpa"},
]


@pytest.mark.parametrize("changes", KINDS, ids=[str(index) for index in range(len(KINDS))])
def test_losses_are_bit_identical(changes: dict[str, Any]) -> None:
    plain = opened(changes)
    expected = plain.run()
    trainer, outcome, watch = watched(
        changes, every=3, probes=("noise", "loss", "labels", "context", "frozen")
    )
    assert len(watch.reports) == 4 and not any("untouched" in f.name for f in watch.report.findings)
    assert outcome.losses == expected.losses
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.drafter.parameters(), trainer.drafter.parameters(), strict=True)
    )
    states = [opt.state_dict()["state"] for opt in (plain.optimizer, trainer.optimizer)]
    assert all(
        torch.equal(a, b)
        for one, other in zip(states[0].values(), states[1].values(), strict=True)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def hooks(trainer: Trainer) -> int:
    modules = sum(len(m._forward_hooks) + len(m._backward_hooks) for m in trainer.drafter.modules())
    return modules + sum(len(p._backward_hooks or ()) for p in trainer.drafter.parameters())


class Looks:
    """What is there while each step's graph is alive."""

    def __init__(self, trainer: Trainer, watch: Watch | None = None) -> None:
        self.trainer, self.watch, self.seen = trainer, watch, list[tuple[int, bool, int, bool]]()
        trainer.observers.insert(0, self)

    def on_step(self, step: int, output: StepOutput) -> None:
        kept = self.trainer.wiring.keep_gradients
        self.seen.append((step, kept, hooks(self.trainer), output.fc_input.requires_grad))

    def on_update(self, step: int, record: Mapping[str, Any]) -> None: ...


def test_off_is_no_work_at_all(tmp_path: Path) -> None:
    trainer = opened()
    assert watch_training(trainer, tmp_path) is None and trainer.observers == []
    assert not trainer.wiring.keep_gradients and not hooks(trainer)
    watch = parity.watch(every=5, probes=TWO, warmup=2).attach(trainer)
    looks = Looks(trainer)
    values, called = watch._values, list[int]()
    trainer.run(stop_after=2)
    assert (
        watch.seconds == 0.0 and watch._values is not values and not watch.reports
    )  # armed for step 3 alone
    original = watch._count_time

    def counted() -> Any:
        called.append(watch.steps)
        return original()

    watch._count_time = counted  # type: ignore[method-assign]
    trainer.run(stop_after=9)
    watch.close()
    for step, kept, hooked, taken in looks.seen:
        probed = step in (3, 8)
        assert (kept, hooked > 0, taken) == (probed, probed, probed), step
    assert sorted(set(called)) == [
        2,
        3,
        7,
        8,
    ]  # in steps 3 and 8: after the forward pass, and after the update
    assert not hooks(trainer) and not trainer.wiring.keep_gradients


# --- what a step shows --------------------------------------------------------------------------------


class Keeps:
    """The outputs of every step, with the graph's own gradients at fc's and the head's input taken once more."""

    def __init__(self, trainer: Trainer) -> None:
        self.outputs = dict[int, StepOutput]()
        self.influence, self.at_head = dict[int, Tensor](), dict[int, Tensor]()
        trainer.observers.insert(0, self)

    def on_step(self, step: int, output: StepOutput) -> None:
        if output.fc_input.requires_grad:
            inputs = (output.fc_input, output.hidden)
            fc, head = torch.autograd.grad(output.loss, inputs, retain_graph=True)
            self.outputs[step], self.influence[step], self.at_head[step] = output, fc, head

    def on_update(self, step: int, record: Mapping[str, Any]) -> None: ...


@pytest.fixture(scope="module", params=["exp", "dpace", "mix"])
def shown(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Trainer, StepOutput, Tensor, StepReport, dict[str, Any]]]:
    kinds: dict[str, dict[str, Any]] = {
        "exp": {},
        "dpace": {"recipe.loss.weights": {"kind": "dpace", "alpha": 0.3}},
        "mix": {"recipe.loss.terms": {"ce": 0.25, "kl": 0.75}, "recipe.loss.weights": {"kind": "uniform"}},
    }
    trainer = opened(GAUSS | kinds[request.param] | {"run.batch.rows": 2})
    watch = parity.watch(every=3, probes=()).attach(trainer)
    keeps = Keeps(trainer)
    outcome = trainer.run(stop_after=4)
    watch.close()
    log = next(record for record in outcome.records if record["step"] == 4)
    yield trainer, keeps.outputs[4], keeps.influence[4], watch.reports[1], log


Shown = tuple[Trainer, StepOutput, Tensor, StepReport, dict[str, Any]]


def test_influence_is_the_gradient_of_the_loss_at_each_slice(shown: Shown) -> None:
    _, output, gradient, report, _ = shown
    width = output.captured.states.shape[2]
    expected = [float(part.norm()) for part in gradient.split(width, dim=1)]
    assert len(expected) == 3 and numbers(report, ".influence") == pytest.approx(expected, rel=1e-5)


def test_signal_to_noise_is_that_of_the_declared_deviation(shown: Shown) -> None:
    trainer, output, _, report, _ = shown
    real = output.batch.document >= 0
    rms = output.captured.states[real, :3].double().square().mean((0, 2)).sqrt()
    measured = numbers(report, ".snr")
    assert measured == pytest.approx((rms / trainer.training.recipe.noise.std).tolist(), rel=0.02)


def test_slot_weights_are_the_recipes(shown: Shown) -> None:
    trainer, output, _, report, _ = shown
    weights, on = output.weights(), output.supervision_mask
    assert int(on.sum()) > 20
    values = dict(report.values)
    by_slot = {slot: float(values[f"slot.{slot}.weight"]) for slot in range(1, output.labels.shape[1])}  # type: ignore[arg-type]
    recipe = trainer.training.recipe.loss.weights
    blocks = on.any(1).nonzero().squeeze(-1)
    chosen = blocks[torch.linspace(0, len(blocks) - 1, min(16, len(blocks))).round().long()]
    for slot, measured in by_slot.items():
        own = weights[chosen, slot][on[chosen, slot]]
        assert measured == pytest.approx(float(own.mean()), rel=1e-5)
        if recipe.kind == "exp":
            assert recipe.gamma and measured == pytest.approx(
                2.718281828459045 ** (-(slot - 1) / recipe.gamma), rel=1e-6
            )
    assert named(report.findings)["step.loss"] == "pass"
    if "kl" in trainer.training.recipe.loss.terms:
        assert values["loss.step.kl.share"] == pytest.approx(0.75, abs=1e-4)


def test_accuracy_coverage_and_tau_are_the_steps(shown: Shown) -> None:
    _, output, _, report, log = shown
    values = dict(report.values)
    best = (output.hidden.detach() @ output.head.T).argmax(-1)
    right = (best == output.labels) & output.supervision_mask
    for slot in range(1, output.labels.shape[1]):
        share = float(right[:, slot].sum() / output.supervision_mask[:, slot].sum())
        assert (
            values[f"slot.{slot}.accuracy"] == pytest.approx(share) == pytest.approx(log["slots"][slot - 1])
        )
    blocks = output.supervision_mask.any(1)
    lengths = [
        1 + next((k for k, hit in enumerate(row[1:].tolist()) if not hit), len(row) - 1)
        for row in right[blocks]
    ]
    assert values["tau.estimate"] == pytest.approx(sum(lengths) / len(lengths)) == log["accepted"]
    assert values["loss"] == log["loss"] and values["gradient_norm"] == log["gradient_norm"]
    reached = {
        int(anchor) + slot
        for anchor, row in zip(output.anchors, output.supervision_mask.tolist(), strict=True)
        for slot, on in enumerate(row)
        if on
    }
    supervised = int(output.batch.loss_mask.sum())
    assert values["anchors.covered"] == pytest.approx(len(reached) / supervised)
    assert values["anchors.count"] == len(output.anchors)


def test_tensors_are_described(shown: Shown) -> None:
    trainer, output, _, report, _ = shown
    table = next(table for table in report.tables if table.name == "tensors")
    rows = {
        row[0]: dict(zip([column.key for column in table.columns], row, strict=True)) for row in table.rows
    }
    assert {
        "captured",
        "fc_input",
        "hidden",
        "labels",
        "teacher",
        "hidden.gradient",
        "fc.out",
        "layers.1.out",
    } <= set(rows)
    states = output.captured.states.double()
    row = rows["captured"]
    assert row["shape"] == str(list(states.shape)) and row["dtype"] == "float32" and row["finite"] == 1.0
    assert row["mean"] == pytest.approx(float(states.mean()), abs=1e-6)
    assert row["std"] == pytest.approx(float(states.std(correction=0)), rel=1e-5)
    values = dict(report.values)
    grads = {n: p for n, p in trainer.drafter.named_parameters()}
    assert {f"{group}.gradient" for group in ("fc", "layers.0", "layers.1", "norm", "hidden_norm")} <= set(
        values
    )
    assert grads


def test_gradient_norms_are_the_parameters(tmp_path: Path) -> None:
    trainer = opened()
    watch = parity.watch(every=100, probes=()).attach(trainer)
    trainer.run(stop_after=1)
    watch.close()
    for group in ("fc", "layers.0", "norm"):
        own = [
            p.grad
            for n, p in trainer.drafter.named_parameters()
            if f"{n}.".startswith(f"{group}.") and p.grad is not None
        ]
        expected = float(torch.cat([grad.flatten() for grad in own]).double().norm())
        assert dict(watch.reports[0].values)[f"{group}.gradient"] == pytest.approx(expected, rel=1e-5)


class Unknown(TrainingStep):
    """A tenth of the loss is something else: it pulls the hidden states towards zero."""

    def objective(self, hidden: Tensor, *arguments: Any, **options: Any) -> Any:
        made = super().objective(hidden, *arguments, **options)
        return replace(made, numerator=made.numerator + 0.1 * hidden.square().sum())


def test_a_loss_of_the_real_step_that_the_recipe_does_not_know_is_told() -> None:
    trainer = opened()
    Planted(trainer, Unknown, before=2)
    watch = parity.watch(every=2, probes=()).attach(trainer)
    trainer.run(stop_after=3)
    watch.close()
    found = [named(report.findings)["step.loss"] for report in watch.reports]
    assert found == ["pass", "fail"]
    told = next(f for f in watch.reports[1].findings if f.name == "step.loss")
    assert told.fault == "loss-unrecognised" and "residual" in told.sentence


def test_values_that_are_not_finite_are_told() -> None:
    trainer = opened(GAUSS)  # with noise fc's input is a copy
    watch = parity.watch(every=1, probes=()).attach(trainer)

    class Overflow:
        def on_step(self, step: int, output: StepOutput) -> None:
            output.captured.states[3, 0, 5] = float("inf")  # after the forward pass: the run goes on

        def on_update(self, step: int, record: Mapping[str, Any]) -> None: ...

    trainer.observers.insert(0, Overflow())
    trainer.run(stop_after=1)
    watch.close()
    finding = watch.reports[0].findings[0]
    assert (finding.name, finding.outcome, finding.fault) == ("finite", "fail", "not-finite")
    assert "captured" in finding.sentence and len(finding.evidence) == 1


# --- captured again -----------------------------------------------------------------------------------


class Source:
    """The run's source, and what becomes of its states."""

    def __init__(self, inner: Any, change: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.change, self.on = inner, change, False

    def __call__(self, batch: Batch) -> StepStates:
        captured: StepStates = self.inner(batch)
        return replace(captured, states=self.change(captured.states)) if self.on else captured


def deeper(states: Tensor) -> Tensor:
    """Slices 0 and 1 exchanged for the next layer's: with conditioning 0, 1, 2, an off-by-one of the first two."""
    return torch.cat((states[:, 1:3], states[:, 2:]), dim=1)


SHIFTS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("layer-shift", deeper),
    ("layer-wrong", lambda states: states[:, [2, 1, 0, 3]]),
    ("capture-rows", lambda states: states.roll(1, 0)),
    (
        "capture-differs",
        lambda states: states + 0.01 * torch.randn(states.shape, generator=torch.Generator().manual_seed(0)),
    ),
]


@pytest.mark.parametrize(("fault", "change"), SHIFTS, ids=[row[0] for row in SHIFTS])
def test_states_that_silently_change_are_found_and_named(
    fault: str, change: Callable[[Tensor], Tensor]
) -> None:
    trainer = opened()
    source = Source(trainer.source, change)
    watch = parity.watch(every=2, probes=()).attach(trainer)
    trainer.source = source
    trainer.run(stop_after=2)
    source.on = True
    trainer.run(stop_after=3)
    watch.close()
    first, second = (next(f for f in report.findings if f.name == "recapture") for report in watch.reports)
    assert (
        first.outcome == "pass"
        and "relative L2 0 at" in first.sentence
        and "rounding in float32" in first.sentence
    )
    assert (second.outcome, second.fault) == ("fail", fault), second.sentence
    assert min(v for n, v in second.evidence if n.endswith(".cosine") and isinstance(v, float)) < 1 - 1e-6


def test_no_recapture_where_none_is_asked(tmp_path: Path) -> None:
    _, _, watch = watched(recapture=0, probes=())
    assert "recapture" not in named(watch.report.findings)


# --- going on, and beside another run -----------------------------------------------------------------


def test_a_resumed_run_goes_on_in_the_same_file_and_against_the_same_first_report(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out, stops in ((whole, (12,)), (parts, (6, 12))):
        for stop in stops:
            trainer = opened(GAUSS, out=out)
            watch = parity.watch(every=4, probes=TWO, out=out).attach(trainer)
            outcome = trainer.run(stop_after=stop)
            watch.close()
            trainer.close()
    one, two = (step_log.read_step_log(out / "steps.jsonl") for out in (whole, parts))
    assert [step.step for step in two] == [1, 5, 9] and outcome.step == 12

    def plain(steps: tuple[StepReport, ...]) -> list[StepReport]:
        return [replace(step, time="", seconds=0.0) for step in steps]

    assert plain(one) == plain(two)
    assert len(watch.reports) == 1 and len(watch.history) == 3
    assert "probed steps" in dict(watch.report.subject) and dict(watch.report.subject)["probed steps"] == 3


def test_drift_across_a_resume_is_against_the_first_report_on_disk(tmp_path: Path) -> None:
    for stop, kind in ((6, None), (12, NoisyTeacher)):
        trainer = opened(GAUSS, out=tmp_path)
        if kind is not None:
            trainer.wiring.__class__ = kind
        watch = parity.watch(every=4, probes=("noise",), out=tmp_path).attach(trainer)
        trainer.run(stop_after=stop)
        watch.close()
        trainer.close()
    assert watch.reports[0].step == 9
    drift = next(f for f in watch.reports[0].findings if f.name == "drift")
    assert drift.outcome == "fail" and "noise.moves_labels: False -> True" in drift.sentence
    fresh = opened(GAUSS, out=tmp_path / "fresh")
    (tmp_path / "fresh" / "steps.jsonl").write_text("of a run before this one\n")
    parity.watch(every=4, probes=("noise",), out=tmp_path / "fresh").attach(fresh)
    fresh.close()
    assert not (tmp_path / "fresh" / "steps.jsonl").exists()


def test_another_runs_wiring_is_the_baseline(tmp_path: Path) -> None:
    watched(out=tmp_path / "a")
    file = tmp_path / "a" / "conformance.json"
    assert [s.probe for s in read_conformance(file).statements] == ["noise", "loss", "step"]
    _, _, same = watched(baseline=file)
    assert named(same.report.findings)["baseline"] == "pass"
    changed = {"recipe.loss.weights": {"kind": "exp", "gamma": 5.0}}
    _, _, other = watched(changed, baseline=file)
    told = next(f for f in other.report.findings if f.name == "baseline")
    assert told.outcome == "fail" and "loss.gamma: 4 -> 5" in told.sentence
    assert named(other.report.findings)["drift"] == "pass"  # within the run nothing changed
    statement = read_conformance(file)
    save_conformance(
        replace(statement, statements=statement.statements[:2]), file
    )  # as `parity check` leaves one
    _, _, without = watched(baseline=file)
    assert named(without.report.findings)["baseline"] == "pass"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every >= 1"),
        ({"warmup": -1}, "warmup"),
        ({"on_fail": "halt"}, "warn or stop"),
        ({"probes": ("nois",)}, "noise"),
        ({"baseline": "nowhere.json"}, "conformance statement"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ParityError, match=said):
        parity.watch(**options)


# --- the command --------------------------------------------------------------------------------------


def recipe_file(folder: Path, on_fail: str = "stop") -> Path:
    part = {"every": 4, "probes": ["noise", "loss"], "on_fail": on_fail}
    file = folder / "recipe.yaml"
    file.write_text(dump(UNIT.with_values(GAUSS | {"run.watch": part})))
    return file


def broken(training: TrainingFile, *arguments: Any, **options: Any) -> Trainer:
    """`open_trainer`, with the plant that comes before step 8."""
    trainer = open_trainer(training, *arguments, **options)
    Planted(trainer, NoisyTeacher, before=8)
    return trainer


def test_the_command_watches_and_stops(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, healthy, out = recipe_file(tmp_path), tmp_path / "healthy", tmp_path / "run"
    assert cli.run(["train", str(recipe), "--out", str(healthy)]) == 0
    text = capfd.readouterr().out
    assert "SKIPPED  watch.unasked" in text and "this watch's probes: inputs," in text
    report = schema.read_report(healthy / "report.json")
    assert {"noise": "pass", "loss": "pass", "drift": "pass", "train.schedule": "pass"}.items() <= named(
        report.findings
    ).items()
    assert report.conformance is not None and report.conformance.statements[0].probe == "noise"
    assert len(step_log.read_step_log(healthy / "steps.jsonl")) == 3
    monkeypatch.setattr("parity.model.training.build.open_trainer", broken)
    code = cli.run(["train", str(recipe), "--out", str(out)])
    captured = capfd.readouterr()
    assert code == 1, captured
    assert "step 9: FAIL noise: noise reaches the state" in captured.err and "go on" not in captured.err
    report = schema.read_report(out / "report.json")
    first = next(finding for finding in report.findings if finding.outcome == "fail")
    assert (first.name, first.fault) == ("watch.stop", "noise-on-teacher")
    assert first.sentence.startswith("the run saved and stopped at step 9, at noise")
    assert len(json.loads((out / "report.json").read_text())["tables"]) == len(report.tables)


def test_a_warning_watch_lets_the_run_end_and_fails_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parity.model.training.build.open_trainer", broken)
    trained = parity.train(recipe_file(tmp_path, "warn"), out=tmp_path / "run")
    assert (trained.step, trained.stopped, trained.interrupted) == (12, False, False)
    report: Report = trained.report
    assert report.outcome == "fail" and named(report.findings)["train.schedule"] == "pass"


def test_keywords_of_a_watch_are_its_options() -> None:
    """Old keywords are the fields of the record; `help` lists each; the first two may come by position."""
    names = list(inspect.signature(parity.watch).parameters)
    assert names == [
        *("module", "recipe", "every", "warmup", "probes", "on_fail", "baseline"),
        *("out", "adapter", "sinks", "recapture", "steps"),
    ]
    assert all(name in (parity.watch.__doc__ or "") for name in names)
    module = torch.nn.Linear(2, 2)
    assert parity.watch(module, UNIT.recipe).recipe is UNIT.recipe
    assert parity.watch(module=module, every=3).options.every == 3
    with pytest.raises(TypeError, match="often"):
        parity.watch(module, often=3)  # type: ignore[call-arg]


def test_public_names() -> None:
    assert isinstance(parity.watch(torch.nn.Linear(2, 2)), Watch)
    error = WiringChanged(
        7, Finding(name="noise", outcome="fail", sentence="it moves", fault="noise-on-teacher", next_step="x")
    )
    assert str(error) == "step 7: noise-on-teacher: it moves" and error.step == 7


# --- another backend ----------------------------------------------------------------------------------

INTERPRETED = """
import json, sys
from dataclasses import replace
import torch
torch.set_num_threads(1)
from parity.model.training.build import open_trainer
from parity.model.recipe.presets import preset
import parity

trainer = open_trainer(preset("tiny").with_values({
    "recipe.target.backend": "fla-interpreted",
    "recipe.block.anchors": 2,
    "run.data": {"source": "corpus", "documents": 1, "validation_documents": 0, "length": 80, "document_length": 80},
    "run.batch.rows": 1, "run.save.tau_prompts": 0, "run.save.every": 100, "run.schedule.steps": 4,
}))
seen = []


class Seen:
    def write(self, report, samples):
        seen.append([report.step, dict(report.values).get("recapture.step"), [
            [f.outcome, f.fault, f.sentence] for f in report.findings if f.name == "recapture"]])

    def close(self): ...


class Shifted:
    on = False

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, batch):
        made = self.inner(batch)
        if not self.on:
            return made
        return replace(made, states=made.states[:, [1, 1, 2, 3, 4, 5]])  # layer 3 in layer 1's place


watch = parity.watch(every=2, probes=(), sinks=[Seen()]).attach(trainer)
trainer.source = Shifted(trainer.source)
trainer.run(stop_after=2)
watch._recapture._worker._thread.join()  # so that the next report has the answer, however slow this machine is
trainer.source.on = True
trainer.run()
watch.close()
print(json.dumps([trainer.wiring.recipe.target.backend, seen]))
"""


@pytest.mark.slow
def test_states_of_another_backend_are_captured_again_on_torch_beside_the_run() -> None:
    """fla's kernels, interpreted, in the run; the torch fallback in a worker; the answer is in the next report."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        timeout=500,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    backend, seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert backend == "fla-interpreted" and [row[:2] for row in seen] == [[1, None], [3, 1], [3, 3]]
    assert seen[0][2] == []
    ((outcome, _, sentence),) = seen[1][2]
    assert outcome == "pass" and "second capture on torch" in sentence and "rounding in float32" in sentence
    ((outcome, fault, sentence),) = seen[2][2]
    assert (outcome, fault) == ("fail", "layer-wrong") and "layer.1.out is layer.3.out" in sentence
