"""What two ranks run for test_watch_ranks.py: each case with a watch and without, broken on the way."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import parity
from parity.model.training.build import open_trainer
from parity.model.training.distributed import gather_full_tensor
from parity.watching.watch import Watch, WiringChanged
from tests.parity.watching.loop import Live, Loop, example
from tests.parity.watching.test_watch import GAUSS, UNIT, Keeps, NoisyTeacher, Planted

TWO = ("noise", "labels")
EVERY, BROKEN = 4, 8
"""Probed are steps 1, 5, 9; broken from step 8 on."""


def run_all_cases(folder: Path, rank: int) -> dict[str, Any]:
    made = {}
    for kind in ("ddp", "fsdp2"):
        made[f"trainer-{kind}"] = trainer(folder / f"trainer-{kind}", kind)
        made[f"loop-{kind}"] = loop(folder / f"loop-{kind}", kind, rank)
    made["one"] = one_rank(folder / "one", rank)
    return made


def joined(tensor: Tensor) -> tuple[float, float]:
    """Mean and std of all ranks' values together."""
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, tensor.detach().double().flatten())
    whole = torch.cat(parts)
    return float(whole.mean()), float(whole.std(correction=0))


def hooks(module: nn.Module, watch: Watch) -> int:
    """Hooks of the watch that are left; FSDP2 keeps its own."""
    return len(watch._taps) + sum(len(taps.handles) for taps in watch._taps)


def trainer(out: Path, kind: str) -> dict[str, Any]:
    training = UNIT.with_values(GAUSS | {"run.parallel": kind, "run.batch": {"rows": 4, "accumulate": 1}})
    plain = open_trainer(training)
    Planted(plain, NoisyTeacher, before=BROKEN)
    unwatched = plain.run(stop_after=9).losses
    running = open_trainer(training, out=out)
    Planted(running, NoisyTeacher, before=BROKEN)
    watch = parity.watch(every=EVERY, probes=(*TWO, "loss"), on_fail="stop", out=out).attach(running)
    keeps = Keeps(running)
    outcome = running.run()
    watch.close()
    running.close()
    states = keeps.outputs[1].captured.states
    mean, std = joined(states)
    step, finding = watch.failed or (0, None)
    expected = {"captured.mean": mean, "captured.std": std, "loss": outcome.losses[0]}
    return {
        "losses": outcome.losses,
        "unwatched": unwatched,
        "failed": [step, finding and finding.name, finding and finding.fault],
        "first": float(states.sum()),
        "expected": expected,
        "hooks": hooks(running.drafter, watch),
    }


def shared(kind: str) -> Loop:
    torch.manual_seed(0)
    drafter: nn.Module = example().Drafter()
    if kind == "fsdp2":
        fully_shard(drafter)
        return Loop(drafter)
    return Loop(drafter, DistributedDataParallel(drafter))


def train(loop: Loop, rank: int, steps: int, watch: Watch | None = None) -> tuple[list[float], Tensor, float]:
    """Losses of this rank, the first step's hidden states, and its gradient's norm at fc over all ranks."""
    losses: list[float] = []
    first, norm = torch.empty(0), 0.0
    for number in range(1, steps + 1):
        loop.broken = number >= BROKEN
        out = loop.forward(*loop.batch(2 * number + rank), seed=number)
        out["loss"].backward()
        loop.optimizer.step()
        losses.append(out["loss"].item())
        if number == 1:
            first = out["hidden"].detach().clone()
            norm = float(gather_full_tensor(loop.drafter.get_parameter("fc.weight").grad).norm())  # type: ignore[arg-type]
        if watch is not None:
            try:
                watch.step(loss=out["loss"])
            except WiringChanged:
                break
        loop.optimizer.zero_grad()
    return losses, first, norm


def loop(out: Path, kind: str, rank: int) -> dict[str, Any]:
    unwatched, _, _ = train(shared(kind), rank, 9)
    running = shared(kind)
    watch = parity.watch(
        running.called, adapter=Live(running), probes=TWO, every=EVERY, on_fail="stop", out=out
    )
    with watch:
        losses, first, norm = train(running, rank, 14, watch)
    mean, std = joined(first)
    loss, _ = joined(torch.tensor(losses[0]))
    step, finding = watch.failed or (0, None)
    return {
        "losses": losses,
        "unwatched": unwatched,
        "failed": [step, finding and finding.name, finding and finding.fault],
        "first": float(first.sum()),
        "expected": {"module.out.mean": mean, "module.out.std": std, "loss": loss, "fc.gradient": norm},
        "hooks": hooks(running.drafter, watch),
    }


def one_rank(out: Path, rank: int) -> dict[str, Any]:
    """The wiring breaks on the second rank alone."""
    running = open_trainer(UNIT.with_values(GAUSS | {"run.batch": {"rows": 4, "accumulate": 1}}))
    if rank == 1:
        Planted(running, NoisyTeacher, before=3)
    watch = parity.watch(every=EVERY, probes=("noise",), on_fail="stop", out=out, recapture=0).attach(running)
    outcome = running.run()
    watch.close()
    step, finding = watch.failed or (0, None)
    assert finding is not None
    return {
        "failed": [step, finding.name, finding.fault],
        "steps": outcome.step,
        "sentence": finding.sentence,
    }
