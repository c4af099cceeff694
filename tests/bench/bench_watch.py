"""What watching costs a training: time, the probed step, memory, against a control of two identical runs.

    PYTHONPATH=. python tests/bench/bench_watch.py                    # about five minutes of one core
    PYTHONPATH=. python tests/bench/bench_watch.py --every 10 --intervals 1 --json watch.json

The wiring is `tiny`'s on steps of 4 rows of 1,536 tokens, half as many as the preset takes (`--rows 8`): the shorter
the step, the more a report weighs. States are kept after the first epoch, which is not measured. Three runs take steps
in turn: plain, plain again, and watched with the default probes. Processor time is measured, since the clock also
counts whoever else is on the machine. Losses have to be the same bits in all three.

- share: time in hooks, probes and writing by the watch's own clock, over the run's by the same. Aim: 1 % at every 50.
- probed step: median probed step over median plain step. Aim: 1.5.
- whole run: the watched run's time over the plain one's, beside the same ratio of the two plain runs. It fails above
  1.03 alone: two identical loops differed by up to 1.1 %.
- peak memory: the most anonymous memory of a process that trains with a watch, over one without. Aim: 1.05.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parity.model.recipe.config import TrainingFile, preset
from parity.model.target.backends import isolate, parse_backend
from parity.model.training.trainer import Trainer

WORST = 1.03
AIMS = {"share": 0.01, "probed step": 1.5, "whole run": WORST, "peak memory": 1.05}
ROWS, DOCUMENTS = 4, 16
"""Rows of a step, and documents a row: two steps an epoch of 64 documents."""


def training(every: int | None, rows: int = ROWS) -> TrainingFile:
    """`tiny` on texts as they are (what the target writes anew costs minutes and no step)."""
    changes: dict[str, Any] = {
        "run.data.regenerate": 0,
        "run.data.documents": DOCUMENTS * rows,
        "run.batch.rows": rows,
        "run.data.validation_documents": 0,
        "run.save.tau_prompts": 0,
        "run.save.every": 10**6,
        "run.schedule.steps": 10**5,
    }
    if every is not None:
        changes["run.watch"] = {"every": every}
    return preset("tiny").with_values(changes)


def opened(every: int | None, rows: int = ROWS) -> Trainer:
    from parity.model.training.build import open_trainer

    trainer = open_trainer(training(every, rows))
    for _ in range(3):  # an epoch computes the states, and a step more warms up
        trainer.update()
        trainer.step_number = 0
    return trainer


@dataclass
class Side:
    """One of the runs."""

    trainer: Trainer
    seconds: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One step by the run's own loop, its observers included."""
        began = time.process_time(), time.perf_counter()
        outcome = self.trainer.run(stop_after=self.trainer.step_number + 1)
        self.seconds.append(time.process_time() - began[0])
        self.clock.append(time.perf_counter() - began[1])
        self.losses += outcome.losses


def measure(every: int, intervals: int, rows: int = ROWS) -> dict[str, Any]:
    """Times of the three runs, step by step in turn."""
    from parity.watching.watch import watch_training

    sides = [Side(opened(None, rows)), Side(opened(None, rows)), Side(opened(every, rows))]
    plain, again, watched = sides
    with tempfile.TemporaryDirectory() as folder:
        watch = watch_training(watched.trainer, Path(folder))
        assert watch is not None
        own = 0.0
        for number in range(1 + every * intervals):
            if number == 1:  # the first step's report loads what probes need, and is not measured
                own = watch.seconds
                for side in sides:
                    side.seconds.clear()
                    side.clock.clear()
            for side in sides if number % 2 else reversed(sides):
                side.step()
        own = watch.seconds - own
        watch.close()
    assert plain.losses == again.losses == watched.losses, "a watched run must have the same losses"
    probed = watched.seconds[every - 1 :: every]
    usual = statistics.median(plain.seconds)
    return {
        "step": usual,
        "reports": len(probed),
        "report": own / len(probed),
        "share": own / sum(watched.clock),
        "probed step": statistics.median(probed) / usual,
        "whole run": sum(watched.seconds) / sum(plain.seconds),
        "control": sum(again.seconds) / sum(plain.seconds),
    }


def peak(every: int | None, rows: int = ROWS, steps: int = 7) -> float:
    """MiB of its own that a process holds at most, over some steps of which every third is probed."""
    command = [
        sys.executable,
        __file__,
        "--alone",
        str(steps),
        "--rows",
        str(rows),
        *(["--watched"] if every else []),
    ]
    # A fixed threshold gives every tensor's memory back when it dies; glibc's own grows with what it has seen, and
    # two runs of the same were a fifth apart.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.strip().splitlines()[-1])


class Held:
    """The largest anonymous memory of this process, looked at every two milliseconds."""

    def __init__(self) -> None:
        self.most, self._on = 0.0, True
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        status = Path("/proc/self/status")
        while self._on:
            line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]) / 1024)
            time.sleep(0.002)

    def __enter__(self) -> "Held":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._on = False
        self._thread.join()


def alone(steps: int, rows: int, watched: bool) -> None:
    """One run in this process; prints its peak."""
    trainer = opened(3 if watched else None, rows)
    with Held() as held:
        if watched:
            from parity.watching.watch import watch_training

            watch_training(trainer, None)
        trainer.run(stop_after=steps)
    print(held.most)


def table(found: dict[str, Any], every: int, rows: int) -> str:
    """The figures as Markdown."""
    lines = [
        f"| every {every}, {rows} rows, a step of {found['step']:.2f} s | measured | aim |",
        "|---|---|---|",
    ]
    lines.append(f"| self-timed share of the run | {found['share']:.2%} | {AIMS['share']:.0%} |")
    lines.append(f"| probed step over a plain one | {found['probed step']:.2f} | {AIMS['probed step']} |")
    control = f"(control: {found['control']:.3f})"
    lines.append(
        f"| watched run over a plain one | {found['whole run']:.3f} {control} | {AIMS['whole run']} |"
    )
    if "peak memory" in found:
        lines.append(f"| peak memory | {found['peak memory']:.3f} | {AIMS['peak memory']} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--intervals", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    isolate(parse_backend("torch"))
    if options.alone:
        alone(options.alone, options.rows, options.watched)
        return 0
    peaks = [peak(every, options.rows) for every in (None, options.every)]
    found = measure(options.every, options.intervals, options.rows)
    found |= {"peak memory": peaks[1] / peaks[0], "peak MiB": peaks}
    found |= {"every": options.every, "rows": options.rows}
    print(table(found, options.every, options.rows))
    print(f"peaks {peaks[0]:,.0f} and {peaks[1]:,.0f} MiB; {found['reports']} reports measured")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["whole run"] > WORST)


if __name__ == "__main__":
    sys.exit(main())
