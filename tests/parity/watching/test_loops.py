"""Watching loops that are not ours: a plain one, transformers' Trainer; autocast, accumulation, compiled parts."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parity
from parity.probes.table import TABLE
from parity.reports import step_log
from parity.reports.record import StepReport
from parity.watching.callback import watch_callback
from parity.watching.watch import Watch, WiringChanged
from tests.parity.watching.loop import Live, Loop, recipe

TWO = ("noise", "labels")


def train(loop: Loop, steps: int, watch: Watch | None = None, broken_from: int = 10**6) -> list[float]:
    """The loop, a batch a step; losses."""
    losses = []
    for number in range(1, steps + 1):
        loop.broken = number >= broken_from
        out = loop.forward(*loop.batch(number), seed=number)
        out["loss"].backward()
        loop.optimizer.step()
        losses.append(out["loss"].item())
        if watch is not None:
            watch.step(loss=out["loss"], labels=out["labels"])
        loop.optimizer.zero_grad()
    return losses


def hooks(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in module.modules())


# --- a plain loop -------------------------------------------------------------------------------------


def test_a_plain_loop_names_step_and_fault(tmp_path: Path) -> None:
    expected = train(Loop(), 22, broken_from=13)
    loop = Loop()
    watching: Any = parity.watch
    with watching(loop.drafter, recipe(), every=5, adapter=Live(loop), probes=TWO, out=tmp_path) as watch:
        losses = train(loop, 22, watch, broken_from=13)
        assert hooks(loop.drafter) == 0  # between probed steps
    assert losses == expected
    steps = step_log.read_step_log(tmp_path / "steps.jsonl")
    assert [step.step for step in steps] == [1, 6, 11, 16, 21] and steps == watch.history
    assert all(f.outcome == "pass" for step in steps[:3] for f in step.findings)
    bad = [finding for finding in steps[3].findings if finding.outcome == "fail"]
    assert (bad[0].name, bad[0].fault) == ("noise", "noise-on-teacher") and bad[-1].name == "drift"
    report = watch.report
    loud = [f for f in report.findings if f.outcome == "fail"]
    assert loud[0].fault == "noise-on-teacher" and loud[0].sentence.startswith("first at step 16")
    values = dict(steps[0].values)
    assert values["loss"] == pytest.approx(losses[0]) and {
        "fc.gradient",
        "module.out.mean",
        "q.out.std",
    } <= set(values)


def test_a_plain_loop_stops_where_asked(tmp_path: Path) -> None:
    loop = Loop()
    watch = parity.watch(loop.drafter, adapter=Live(loop), probes=TWO, every=4, on_fail="stop", out=tmp_path)
    with pytest.raises(WiringChanged, match="step 9: noise-on-teacher: noise reaches"), watch:
        train(loop, 20, watch, broken_from=7)
    assert watch.steps == 9 and hooks(loop.drafter) == 0 and watch.stopped
    assert len(step_log.read_step_log(tmp_path / "steps.jsonl")) == 3


def test_passive_watching_says_what_it_cannot_answer() -> None:
    loop = Loop()
    with parity.watch(loop.drafter, recipe(), every=3) as watch:
        losses = train(loop, 7, watch)
    assert losses == train(Loop(), 7) and len(watch.reports) == 3
    report = watch.report
    by_name = {finding.name: finding for finding in report.findings}
    wiring = {entry.name: entry.guards for entry in TABLE if entry.asks == "trainer"}
    assert len(wiring) >= 7
    for name, guards in wiring.items():
        assert by_name[name].outcome == "skipped" and guards in by_name[name].sentence, name
        assert "hooks cannot see it" in by_name[name].sentence and "adapter" in by_name[name].next_step
    assert by_name["finite"].outcome == by_name["drift"].outcome == "pass"
    assert report.conformance is not None and report.conformance.recipe == recipe().hash
    table = next(table for table in watch.reports[0].tables if table.name == "tensors")
    rows = {str(row[0]): row for row in table.rows}
    states, row, anchors = loop.batch(1)
    fresh = Loop()
    seen: dict[str, Tensor] = {}
    fresh.drafter.get_submodule("fc").register_forward_hook(
        lambda m, i, o: seen.update(fc=o.detach().double())
    )
    fresh.forward(states, row, anchors)
    assert rows["fc.out"][1:4] == (str(list(seen["fc"].shape)), "float32", "cpu")
    assert rows["fc.out"][5] == pytest.approx(float(seen["fc"].mean()), rel=1e-4, abs=1e-7)
    assert rows["fc.out"][6] == pytest.approx(float(seen["fc"].std(correction=0)), rel=1e-5)
    assert rows["labels"][2] == "int64"  # what the loop itself showed


def test_passive_drift_sees_what_hooks_see() -> None:
    """Evaluation mode that was never left, and a part whose gradient stopped."""
    loop = Loop()
    with parity.watch(loop.drafter, recipe(), every=2) as watch:
        train(loop, 2, watch)
        loop.drafter.eval()
        loop.drafter.get_submodule("fc").requires_grad_(False)
        loop.optimizer.zero_grad(set_to_none=True)
        train(loop, 2, watch)
    drift = next(f for f in watch.reports[-1].findings if f.name == "drift")
    assert drift.outcome == "fail" and "step.training: True -> False" in drift.sentence
    assert "step.gradients: fc, k, mlp.0" in drift.sentence and "step.trainable" in drift.sentence


def test_a_run_gone_on_with_counts_on(tmp_path: Path) -> None:
    loop = Loop()
    with parity.watch(loop.drafter, every=4, out=tmp_path) as first:
        train(loop, 6, first)
    with parity.watch(loop.drafter, every=4, out=tmp_path, steps=6) as second:
        loop.drafter.eval()
        train(loop, 6, second)
    assert [step.step for step in second.history] == [1, 5, 9]
    assert {f.name: f.outcome for f in second.reports[0].findings}["drift"] == "fail"


class Careless(Live):
    """Asking it moves a weight."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            self.loop.drafter.get_parameter("slot").add_(1e-3)
        return super().step(*arguments, **options)


def test_an_adapter_that_changes_the_run_is_told_and_at_first_put_back() -> None:
    loop = Loop()
    with parity.watch(loop.drafter, adapter=Careless(loop), probes=TWO, every=2, on_fail="warn") as watch:
        train(loop, 1, watch)
        after = loop.drafter.get_parameter("slot").clone()
        reference = Loop()
        train(reference, 1)
        assert torch.equal(after, reference.drafter.get_parameter("slot"))
        told = {f.name: f for f in watch.reports[0].findings}
        assert told["noise.untouched"].outcome == "error" and "put back" in told["noise.untouched"].sentence
        train(loop, 2, watch)
    last = {f.name: f for f in watch.reports[1].findings}
    assert "not put back" in last["asking.untouched"].sentence and watch.failed is not None


# --- how a loop may compute ---------------------------------------------------------------------------


class Layers(nn.Module):
    """Two layers and an end; layers are recomputed in backward where asked."""

    def __init__(self, recomputed: bool | None = None) -> None:
        """recomputed: use_reentrant of the checkpoint; None: none."""
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.end = nn.Linear(6, 3)
        self.recomputed, self.calls = recomputed, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.recomputed is None else checkpoint(layer, x, use_reentrant=self.recomputed)
        made: Tensor = self.end(x)
        return made


def regress(
    module: nn.Module,
    steps: int,
    watch: Watch | None = None,
    *,
    accumulate: int = 1,
    autocast: bool = False,
    called: Any = None,
) -> list[float]:
    """A few SGD steps on fixed random numbers; losses."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for _ in range(accumulate):
            x, y = (torch.randn(5, size, generator=generator) for size in (6, 3))
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
                loss = (
                    (module if called is None else called)(x.requires_grad_()).float().sub(y).square().mean()
                )
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if watch is not None:
            watch.step(loss=loss)
        optimizer.zero_grad()
    return losses


def shown(report: StepReport) -> dict[str, Any]:
    table = next(table for table in report.tables if table.name == "tensors")
    return {str(row[0]): row for row in table.rows}


@pytest.mark.parametrize("recomputed", [None, False, True])
def test_gradient_checkpointing(recomputed: bool | None) -> None:
    module = Layers(recomputed)
    with parity.watch(module, every=2) as watch:
        losses = regress(module, 4, watch)
    assert losses == regress(Layers(recomputed), 4) == regress(Layers(), 4)
    values = dict(watch.reports[1].values)
    assert "hooks.unseen" not in values
    rows = [str(row[0]) for row in watch.reports[1].tables[0].rows]
    assert sorted(rows) == sorted(set(rows)) and {
        "layers.0.out",
        "layers.1.out",
        "end.out",
        "module.out",
    } <= set(rows)
    assert {"layers.0.gradient", "end.out.gradient"} <= set(values)


def test_autocast() -> None:
    module = Layers()
    with parity.watch(module, every=2) as watch:
        losses = regress(module, 4, watch, autocast=True)
    assert losses == regress(Layers(), 4, autocast=True)
    rows = shown(watch.reports[0])
    assert rows["end.out"][2] == rows["layers.0.out"][2] == "bfloat16"
    facts = dict(watch.reports[0].values)
    assert facts["step.bfloat16"] == "end.out, layers.0.out, layers.1.out, module.out"


def test_leaving_autocast_is_drift() -> None:
    module = Layers()
    with parity.watch(module, every=2) as watch:
        regress(module, 2, watch, autocast=True)
        regress(module, 2, watch)
    drift = next(f for f in watch.reports[1].findings if f.name == "drift")
    assert (
        drift.outcome == "fail" and "step.bfloat16: end.out" in drift.sentence and "absent" in drift.sentence
    )


def test_gradient_accumulation() -> None:
    module = Layers()
    with parity.watch(module, every=1) as watch:
        losses = regress(module, 2, watch, accumulate=3)
    assert losses == regress(Layers(), 2, accumulate=3) and len(watch.reports) == 2
    again = Layers()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = (torch.randn(5, size, generator=generator) for size in (6, 3))
        again(x).sub(y).square().mean().backward()
    assert again.end.weight.grad is not None and again.end.bias.grad is not None
    expected = float(torch.cat([again.end.weight.grad.flatten(), again.end.bias.grad]).norm())
    assert dict(watch.reports[0].values)["end.gradient"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def dynamo() -> Iterator[Any]:
    torch._dynamo.reset()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["wrapped", "method", "inner"])
def test_compiled_parts_are_listed_and_not_compiled_again(how: str, dynamo: Any) -> None:
    def build() -> tuple[nn.Module, Any]:
        module = Layers()
        if how == "wrapped":
            return module, torch.compile(module, backend="aot_eager")
        if how == "method":
            module.compile(backend="aot_eager")
        else:
            module.end = torch.compile(module.end, backend="aot_eager")  # type: ignore[assignment]
        return module, module

    dynamo.clear()
    module, called = build()
    expected = regress(module, 5, called=called)
    graphs = dynamo["stats"]["unique_graphs"]
    torch._dynamo.reset()
    dynamo.clear()
    module, called = build()
    with parity.watch(called, every=2) as watch:
        losses = regress(module, 5, watch, called=called)
    assert losses == expected and graphs == dynamo["stats"]["unique_graphs"] > 0
    values = dict(watch.reports[-1].values)
    assert {"layers.0.gradient", "layers.1.gradient", "end.gradient"} <= set(values)
    rows = set(shown(watch.reports[-1]))
    if how == "wrapped":
        assert values["hooks.unseen"] == "end, layers.0, layers.1" and "module.out" in rows
    elif how == "method":
        assert values["hooks.unseen"] == "end, layers.0, layers.1, module" and not rows - {"loss"}
    else:
        assert "hooks.unseen" not in values and {"end.out", "layers.1.out"} <= rows


def test_a_part_that_is_never_called_is_listed() -> None:
    module = Layers()
    module.spare = nn.Linear(2, 2)
    with parity.watch(module, every=1) as watch:
        regress(module, 1, watch)
    assert dict(watch.reports[0].values)["hooks.unseen"] == "spare"


# --- transformers' Trainer ----------------------------------------------------------------------------


class Model(nn.Module):
    """What a Trainer trains: the loop's drafter behind a forward that returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.drafter = self.loop.drafter
        self.calls = 0

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        target, row = tokens[0], {"mask": torch.ones(96).bool(), "document": torch.arange(96) // 48}
        states = torch.cat([self.loop.target.states(part) for part in target.split(48)])
        anchors = torch.arange(0, 88, 8) + self.calls % 3
        return {
            "loss": self.loop.forward(states, {"tokens": target, **row}, anchors, seed=self.calls)["loss"]
        }


def fit(folder: Path, model: Model, callbacks: list[Any], steps: int = 14) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [
        {"tokens": torch.randint(0, 199, (96,), generator=torch.Generator().manual_seed(n))} for n in range(8)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    return trainer


def breaks(model: Model, at: int) -> Any:
    from transformers import TrainerCallback

    class Breaks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            model.loop.broken = state.global_step + 1 >= at

    return Breaks()


def test_transformers_trainer(tmp_path: Path) -> None:
    plain = Model()
    expected = fit(tmp_path / "plain", plain, [breaks(plain, 6)], steps=10)
    model = Model()
    callback = watch_callback(
        recipe(),
        adapter=lambda inner: Live(inner.loop),
        probes=TWO,
        every=4,
        out=tmp_path / "watch",
        on_fail="warn",
    )
    trainer = fit(tmp_path / "run", model, [breaks(model, 6), callback], steps=10)
    logged = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (expected, trainer)]
    assert logged[0] == logged[1] and len(logged[0]) == 10
    steps = step_log.read_step_log(tmp_path / "watch" / "steps.jsonl")
    assert [step.step for step in steps] == [1, 5, 9]
    assert all(f.outcome == "pass" for step in steps[:2] for f in step.findings), steps[0].findings
    bad = next(f for f in steps[2].findings if f.outcome == "fail")
    assert (bad.name, bad.fault) == ("noise", "noise-on-teacher")
    assert {"drafter.fc.gradient", "drafter.mlp.0.gradient"} <= set(dict(steps[0].values))
    assert hooks(model) == 0


def test_transformers_trainer_stops_and_saves(tmp_path: Path) -> None:
    model = Model()
    callback = watch_callback(
        recipe(), adapter=lambda m: Live(m.loop), probes=("noise",), every=4, on_fail="stop"
    )
    trainer = fit(tmp_path, model, [breaks(model, 6), callback])
    assert callback.watch is not None and callback.watch.failed is not None
    assert trainer.state.global_step == 9 and callback.watch.failed[1].fault == "noise-on-teacher"
    assert any(tmp_path.glob("checkpoint-9/*"))
    assert callback.watch.report.outcome == "fail"
