"""The training loop around `RecipeStep.step`: accumulate, clip, update, validate, save, go on.

    trainer = build.open_trainer(preset("tiny"), out=Path("run"))
    outcome = trainer.run()

A run that was stopped, by a signal or by kill -9, is continued by opening the same file on the same folder; its
losses are then bit for bit those of a run that was never stopped. Nothing is drawn from a global generator: the
order of documents, anchors and noise depend on (seed, epoch, sample id).

Gradients are those of numerators; they are divided once, by the denominator of the whole step over all rows and
ranks, so that splitting a step changes nothing but the order of sums.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.files import write_atomically
from parity.model.drafting.proposer import DrafterModule
from parity.model.family import find_family
from parity.model.recipe.config import TrainingFile, dump
from parity.model.recipe.parts import SchedulePart
from parity.model.training import checkpoint, distributed
from parity.model.training.data import (
    Batch,
    BatchStream,
    Document,
    StreamPosition,
    make_batch,
    pack_documents,
)
from parity.model.training.distributed import Ranks
from parity.model.training.loss import Objective
from parity.model.training.states import SharedModules, StateSource
from parity.model.training.step import RecipeStep, StepOutput

VALIDATION_EPOCH = 2**62
"""Validation draws its anchors in an epoch that training never reaches, and always the same ones."""
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""


class Observer(Protocol):
    """Whoever watches a run. It must leave parameters, random state and graph as they are."""

    def on_step(self, step: int, output: StepOutput) -> None:
        """After a forward pass and before its backward: the graph is alive. `step` counts from 1."""

    def on_update(self, step: int, record: Mapping[str, Any]) -> None:
        """After an optimizer step or a validation (`record["event"]`), with its line of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a call of `run` ended."""

    step: int
    """Optimizer steps done, those of earlier calls included."""
    finished: bool
    """Whether the schedule is at its end."""
    interrupted: bool
    """Whether a signal asked to stop."""
    records: tuple[dict[str, Any], ...]
    """Lines of the log that this call wrote."""

    @property
    def losses(self) -> list[float]:
        """Training loss of each step of this call."""
        return [record["loss"] for record in self.records if record["event"] == "step"]


class StepSums:
    """What a step or a validation adds up over forward passes and ranks, in float64."""

    def __init__(self, terms: Sequence[str], block_size: int) -> None:
        self.terms, self.block_size = list(terms), block_size
        self.values = torch.zeros(7 + len(self.terms) + 2 * block_size, dtype=torch.float64)

    def add(self, made: Objective, batch: Batch) -> None:
        """Add one forward pass."""
        counts = (len(batch.tokens), int(made.blocks))
        scalars = [made.numerator, made.denominator, made.accepted, made.expected, *made.terms.values()]
        per_slot = torch.cat((made.correct, made.counted)).double()
        numbers = torch.stack([each.detach().double() for each in scalars])
        parts = (torch.tensor(counts, dtype=torch.float64), numbers.cpu(), per_slot.cpu())
        self.values[1:] += torch.cat(parts)
        self.values[0] += len(batch.sample_ids)

    def record(self) -> dict[str, Any]:
        """The figures of a line of the log."""
        values = self.values.tolist()
        documents, tokens, blocks, numerator, denominator, accepted, expected = values[:7]
        terms, slots = values[7 : 7 + len(self.terms)], values[7 + len(self.terms) :]
        correct, counted = slots[: self.block_size], slots[self.block_size :]
        divide = denominator if denominator > 0 else 1.0
        return {
            "loss": numerator / divide,
            "terms": {name: value / divide for name, value in zip(self.terms, terms, strict=True)},
            "accuracy": sum(correct) / max(1.0, sum(counted)),
            "slots": [c / n if n else None for c, n in zip(correct[1:], counted[1:], strict=True)],
            "accepted": accepted / max(1.0, blocks),
            "expected": expected / max(1.0, blocks),
            "documents": int(documents),
            "tokens": int(tokens),
            "blocks": int(blocks),
        }

    @property
    def denominator(self) -> float:
        """What the step divides by."""
        return float(self.values[4])


def learning_rate_at(schedule: SchedulePart, peak: float, step: int, total: int) -> float:
    """Learning rate of the step that follows `step` done ones: linear warmup, then a cosine."""
    warmup = round(schedule.warmup * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * cosine)


class Trainer:
    """One run: a drafter, its optimizer, its place in the data, its folder."""

    def __init__(
        self,
        training: TrainingFile,
        parts: SharedModules,
        source: StateSource,
        documents: Sequence[Document],
        validation: Sequence[Document] = (),
        *,
        out: Path | None = None,
        observers: Sequence[Observer] = (),
        tau: Callable[[DrafterModule], float] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Begin, or go on from the newest checkpoint in `out`; without `out` nothing is written.

        tau: gives the accepted length of a drafter, measured at every validation.
        """
        run = training.run
        self.training, self.parts, self.source, self.out = training, parts, source, out
        self.observers, self.tau, self.ranks = list(observers), tau, ranks or Ranks()
        family = find_family(training.recipe)
        self.drafter: DrafterModule = family.new_drafter(training, parts, documents)
        self.config = self.drafter.config
        if run.parallel == "fsdp2":
            distributed.shard(self.drafter, self.ranks)
        self.wiring: RecipeStep = family.new_step(training, parts, self.drafter)
        self.parameters = {n: p for n, p in self.drafter.named_parameters() if p.requires_grad}
        self.optimizer = self._new_optimizer()
        self.feed = BatchStream(documents, length=run.data.length, rows=run.batch.rows, seed=run.seed)
        self.validation = list(validation)
        self.step_number, self.seconds, self.best_loss = 0, 0.0, math.inf
        self.total = run.schedule.steps or self.feed.steps(run.schedule.epochs or 1)
        self.stop_asked = False
        self.store = checkpoint.Checkpoints(out, run.save.keep) if out and self.ranks.first else None
        self.ranks.barrier()  # the others look for checkpoints after the first rank has tidied up
        try:
            self._resume(out) if out is not None else None
        except BaseException:
            self.close()
            raise

    def _new_optimizer(self) -> torch.optim.AdamW:
        part = self.training.run.optimizer
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": part.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = self.training.run.device.startswith("cuda")
        return torch.optim.AdamW(groups, lr=part.lr, betas=part.betas, eps=part.eps, fused=fused)

    # --- one step -------------------------------------------------------------------------------------

    def step(self, batch: Batch, **options: Any) -> StepOutput:
        """Forward one row: states from the source, then `RecipeStep.step`, whose options these are."""
        batch = batch.to(self.training.run.device)
        return self.wiring.step(batch, self.source(batch), **options)

    def batches(self, rows: Sequence[Sequence[Document]], epoch: int) -> list[Batch]:
        """This rank's forward passes of a step. Every rank makes equally many: a pass without rows is a muted one,
        since ranks that share parameters must run together."""
        own = list(range(self.ranks.rank, len(rows), self.ranks.world))
        parts = np.array_split(np.array(own, dtype=np.int64), self.training.run.batch.accumulate)
        made = []
        for part in parts:
            if len(part):
                made.append(make_batch([each for row in part for each in rows[row]], epoch=epoch))
            elif self.ranks.world > 1:
                made.append(make_batch(rows[0][:1], epoch=epoch).without_supervision())
        return made

    def update(self) -> dict[str, Any]:
        """One optimizer step on the next rows; returns its figures."""
        began, epoch = time.perf_counter(), self.feed.position.epoch
        sums = self._sums()
        self.drafter.train()
        self.optimizer.zero_grad(set_to_none=True)
        for batch in self.batches(next(self.feed), epoch):
            output = self.step(batch)
            for observer in self.observers:
                observer.on_step(self.step_number + 1, output)
            output.objective.numerator.backward()
            if batch.loss_mask.any():
                sums.add(output.objective, batch)
        sums.values = self.ranks.sum(sums.values)
        norm = self._divide_and_clip(sums.denominator)
        now = learning_rate_at(
            self.training.run.schedule, self.training.run.optimizer.lr, self.step_number, self.total
        )
        for group in self.optimizer.param_groups:
            group["lr"] = now
        self.optimizer.step()
        self.step_number += 1
        seconds = time.perf_counter() - began
        self.seconds += seconds
        figures = sums.record() | {"lr": now, "gradient_norm": norm, "seconds": seconds}
        figures["tokens_per_second"] = figures["tokens"] / seconds
        return {"event": "step", "step": self.step_number, "epoch": epoch} | figures

    def _divide_and_clip(self, denominator: float) -> float:
        """Make the gradients of summed numerators those of the loss; returns their norm before clipping."""
        sharded = self.training.run.parallel == "fsdp2" and self.ranks.world > 1
        if not sharded:
            self.ranks.sum_gradients(self.parameters.values())
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        factor = (self.ranks.world if sharded else 1) / (denominator if denominator > 0 else 1.0)
        torch._foreach_mul_(gradients, factor)  # fully_shard gives the mean over ranks, we want the sum
        norm = float(distributed.gather_full_tensor(torch.nn.utils.get_total_norm(gradients)))
        clip = self.training.run.optimizer.clip
        if not math.isfinite(norm):
            found = f"a gradient norm of {norm}"
            do = "look at the states of this step (parity check), or lower run.optimizer.lr"
            raise ParityError(f"step {self.step_number + 1}", found, do)
        if clip is not None and norm > clip:
            torch._foreach_mul_(gradients, clip / norm)
        return norm

    def _sums(self) -> StepSums:
        return StepSums(list(self.training.recipe.loss.terms), self.config.block_size)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Validation loss, accuracy per slot, accepted length; the same anchors every time, no noise."""
        sums = self._sums()
        self.drafter.eval()
        rows = pack_documents([len(document) for document in self.validation], self.training.run.data.length)
        padded = -(-len(rows) // self.ranks.world) * self.ranks.world
        for index in range(self.ranks.rank, padded, self.ranks.world):
            row = [self.validation[n] for n in rows[min(index, len(rows) - 1)]]
            batch = make_batch(row, epoch=VALIDATION_EPOCH)
            batch = batch if index < len(rows) else batch.without_supervision()
            output = self.step(batch, training=False)
            if batch.loss_mask.any():
                sums.add(output.objective, batch)
        sums.values = self.ranks.sum(sums.values)
        figures: dict[str, Any] = {"event": "validation", "step": self.step_number} | sums.record()
        if self.tau is not None and self.ranks.first:
            figures["tau"] = self.tau(self.drafter)
        return figures

    # --- the loop -------------------------------------------------------------------------------------

    def run(
        self,
        *,
        stop_after: int | None = None,
        show: Callable[[Mapping[str, Any]], None] = lambda record: None,
    ) -> RunEnd:
        """Train to the end of the schedule, or to step `stop_after`, or until a signal; saves on the way.

        show: called with every line of the log.
        """
        last = self.total if stop_after is None else min(stop_after, self.total)
        save, records = self.training.run.save, list[dict[str, Any]]()
        saved = self.step_number if self.step_number else -1

        def log(record: dict[str, Any]) -> None:
            records.append(record)
            self._log(record)
            show(record)

        with stopping_gently(self.ask_to_stop):
            while self.step_number < last:
                self.stop_asked = self.ranks.any(self.stop_asked)
                if self.stop_asked:
                    break
                record = self.update()
                for observer in self.observers:
                    observer.on_update(self.step_number, record)
                if self.step_number % save.log_every == 0 or self.step_number == last:
                    log(record)
                due = self.step_number % save.validate_every == 0 or self.step_number == self.total
                figures = self.evaluate() if due and self.validation else None
                if figures:
                    log(figures)
                    for observer in self.observers:
                        observer.on_update(self.step_number, figures)
                better = figures is not None and figures["loss"] < self.best_loss
                self.best_loss = min(self.best_loss, figures["loss"]) if figures else self.best_loss
                if better or self.step_number % save.every == 0 or self.step_number == last:
                    self.save(best=better)
                    saved = self.step_number
            if saved != self.step_number:
                self.save()
        return RunEnd(
            step=self.step_number,
            finished=self.step_number >= self.total,
            interrupted=self.stop_asked,
            records=tuple(records),
        )

    def ask_to_stop(self) -> None:
        """Save and end `run` after this step, as a signal does."""
        self.stop_asked = True

    def _log(self, record: Mapping[str, Any]) -> None:
        if self.out is not None and self.ranks.first:
            with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    # --- saving ---------------------------------------------------------------------------------------

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint, atomically; every rank takes part where parameters are sharded."""
        if self.out is None:
            return
        model = {
            name: distributed.gather_full_tensor(value) for name, value in self.drafter.state_dict().items()
        }
        optimizer = {"rng.torch": torch.get_rng_state()}
        for name, parameter in self.parameters.items():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                optimizer[f"{name}.{moment}"] = distributed.gather_full_tensor(value)
        state = {
            "position": asdict(self.feed.position),
            "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "seconds": self.seconds,
            "total": self.total,
        }
        if self.store is not None:
            self.store.save(
                self.training,
                self.config,
                step=self.step_number,
                model=model,
                optimizer=optimizer,
                state=state,
            )
            if best:
                self.store.mark_best(self.step_number, self.best_loss)
        self.ranks.barrier()

    def _resume(self, out: Path) -> None:
        """Go on from the newest checkpoint. Raises ParityError where it was made by another training file."""
        folders = sorted(
            p for p in (out / "checkpoints").glob("step-*") if checkpoint.CHECKPOINT_NAME.fullmatch(p.name)
        )
        if self.ranks.first:
            write_atomically(
                out / checkpoint.TRAINING, dump(self.training), durable=True
            ) if not folders else None
        if not folders:
            if self.ranks.first:
                checkpoint.cut_log(out / "log.jsonl", 0)
            return
        saved = checkpoint.read_checkpoint_folder(folders[-1])
        differ = checkpoint.checkpoint_differences(saved.training, self.training)
        if differ:
            do = "repeat the settings it was started with, or choose another --out"
            raise ParityError(f"to go on with {folders[-1]}", f"it was trained with {'; '.join(differ)}", do)
        own = self.drafter.state_dict()
        self.drafter.load_state_dict({n: distributed.shard_like(v, own[n]) for n, v in saved.model.items()})
        for name, parameter in self.parameters.items():
            state = {
                m: saved.optimizer[f"{name}.{m}"] for m in ADAM_MOMENTS if f"{name}.{m}" in saved.optimizer
            }
            if state:
                fused = self.optimizer.defaults["fused"]  # only then AdamW wants its counter on the device
                placed = {
                    moment: value if moment == "step" and not fused else _beside(value, parameter)
                    for moment, value in state.items()
                }
                self.optimizer.state[parameter] = placed
        torch.set_rng_state(saved.optimizer["rng.torch"])
        self.feed.position = StreamPosition(**saved.state["position"])
        self.step_number, self.seconds = saved.step, saved.state["seconds"]
        self.best_loss = math.inf if saved.state["best_loss"] is None else saved.state["best_loss"]
        if self.ranks.first:
            checkpoint.cut_log(out / "log.jsonl", self.step_number)

    def close(self) -> None:
        """Let another process write to the folder."""
        if self.store is not None:
            self.store.close()


def _beside(value: Tensor, parameter: Tensor) -> Tensor:
    """A moment where its parameter is, sharded as that is; a counter only moved."""
    return distributed.shard_like(value, parameter) if value.ndim else value.to(parameter.device)


@contextmanager
def stopping_gently(ask: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `ask`; a second one interrupts as usual. Only in the main thread."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        ask()
        for each, old in before.items():
            signal.signal(each, old)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
