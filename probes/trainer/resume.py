"""Is an interrupted run the same run?

The trainer's own short run (`run`) of 4 steps against the same in 2 steps, saved, opened again and taken to 4: every
loss must be equal bit for bit. That the run is a function of its seed is tested first: the first 2 losses of both must
be equal already. Exact on one machine and one thread; a trainer whose sums change their order from run to run (atomics
on a GPU) cannot pass, and is reported as not deterministic.

What differs is named by where it begins and by what the trainer logs. A first loss that is right and later ones that
are not: the optimizer, or the schedule where a logged rate differs. A first loss that is wrong: other data where logged
counts differ; else a run of 6 steps is interrupted after 1 to 5 of them. Weights that were lost are missed the
more, the longer they were trained, and always to the worse; weights that were rounded always by little; a random state
by chance.

Cost: 8 steps and three openings in a temporary folder, nothing else is written. Finds: ModelOpt#1621, speculators'
anchors from a generator that no checkpoint holds, mid-epoch skips. Faults: the `resume` rows of
`parity.probes.deviations`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.subject import AdapterError, ExaminedAdapter
from parity.reports.record import Value

STEPS, BREAK = 4, 2
LONGER, BREAKS = 6, (1, 2, 3, 4, 5)
"""The run that is interrupted at other places where a difference has to be named."""
DATA = ("documents", "tokens", "samples", "rows", "epoch")
"""Logged counts from which it follows which data a step had."""
RATES = ("lr", "learning_rate")
SLIGHT = 1e-3
"""Share of the loss below which a difference is rounding and not another batch or other anchors."""

ResumeStep = Mapping[str, float]
"""What a trainer logs of one step: `loss`, and counts or rates where it has them."""


class ResumeProbe:
    """Two runs, one interrupted."""

    name = "resume"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a fault."""
        with tempfile.TemporaryDirectory(prefix="parity-resume-") as folder:
            runs = _ShortRuns(subject, Path(folder))
            whole = runs.once("whole", STEPS)
            if len(whole) <= BREAK:
                raise AdapterError("run", f"{STEPS} steps", f"{len(whole)}")
            first, second = runs.once("broken", BREAK), runs.once("broken", len(whole))
            fault = _unequal(whole, first) or _check_continued(runs, whole, second)
        losses = [step["loss"] for step in whole]
        equal = sum(a["loss"] == b["loss"] for a, b in zip(whole, [*first, *second], strict=False))
        words = (
            f"{len(losses)} steps, broken after {len(first)}: {equal} of {len(losses)} losses are bit-equal"
            f" ({losses[0]:.6g} to {losses[-1]:.6g})"
        )
        facts: dict[str, Value] = {"resume.steps": len(losses), "resume.equal": equal}
        return make_probe_answer(self.name, words, [fault] if fault else [], facts=facts)


class _ShortRuns:
    """Short runs of the trainer, each in a folder of its own."""

    def __init__(self, subject: ExaminedAdapter, folder: Path) -> None:
        self.subject, self.folder = subject, folder

    def once(self, name: str, until: int) -> list[ResumeStep]:
        """Go on in the folder of that name up to step `until`: the steps made now."""
        folder = self.folder / name
        with self.subject.guard_adapter_call("run"), torch.random.fork_rng():
            made = self.subject.adapter.run(folder, until)
        steps = [each if isinstance(each, Mapping) else {"loss": float(each)} for each in made]
        if any("loss" not in each for each in steps):
            raise AdapterError("run", "a loss for each step", f"{sorted(steps[0])}")
        return steps

    def gap(self, after: int, whole: Sequence[ResumeStep]) -> float:
        """How much too high the first loss is after an interruption after so many steps."""
        self.once(f"broken-{after}", after)
        resumed = self.once(f"broken-{after}", after + 1)
        return float(resumed[0]["loss"]) - float(whole[after]["loss"]) if resumed else 0.0


def _unequal(whole: Sequence[ResumeStep], first: Sequence[ResumeStep]) -> FoundDeviation | None:
    """Two uninterrupted runs that differ."""
    for number, (one, two) in enumerate(zip(whole, first, strict=False)):
        if one["loss"] != two["loss"]:
            gap = abs(float(one["loss"]) - float(two["loss"]))
            words = (
                f"step {number + 1} has loss {one['loss']:.9g} and {two['loss']:.9g} in two runs of one seed"
            )
            return FoundDeviation("run-not-deterministic", words, {"difference": gap})
    return None


def _check_continued(
    runs: _ShortRuns, whole: Sequence[ResumeStep], second: Sequence[ResumeStep]
) -> FoundDeviation | None:
    """What was not restored, by where the losses begin to differ; None where none does.

    Args:
        runs: makes further runs where these do not tell what is missing.
        whole: steps of the run without an interruption.
        second: steps that the interrupted run made after it was opened again.
    """
    # As many steps as were left; a run that begins anew is named for that.
    wanted = whole[BREAK:]
    if len(second) != len(wanted):
        again = [step["loss"] for step in second[:BREAK]] == [step["loss"] for step in whole[:BREAK]]
        words = f"{len(second)} steps were made after the interruption, {len(wanted)} were left"
        words += ", with the losses of the first ones" if again else ""
        return FoundDeviation("resume-restart", words, {"steps": len(second)})
    off = [number for number, (a, b) in enumerate(zip(wanted, second, strict=True)) if a["loss"] != b["loss"]]
    if not off:
        return None
    # The first loss that differs, and what is logged beside it.
    one, two = wanted[off[0]], second[off[0]]
    gap = float(two["loss"]) - float(one["loss"])
    words = f"step {BREAK + off[0] + 1} has loss {two['loss']:.9g} instead of {one['loss']:.9g}"
    evidence: dict[str, Value] = {"step": BREAK + off[0] + 1, "difference": gap}

    def fault(name: str, more: str = "") -> FoundDeviation:
        return FoundDeviation(name, f"{words}{more}", evidence)

    rate = _differs(wanted, second, RATES)
    if rate and off[0] > 0:
        return fault("resume-schedule", f"; {rate}")
    if off[0] > 0:
        return fault("resume-optimizer", "; the first loss is right, so weights, data and random state are")
    data = _differs(wanted, second, DATA)
    if data:
        return fault("resume-data", f"; {data}")
    return _by_breaks(runs, fault)


def _differs(wanted: Sequence[ResumeStep], found: Sequence[ResumeStep], names: Sequence[str]) -> str:
    """The first logged value of these names that differs, in words; empty where none does."""
    for one, two in zip(wanted, found, strict=True):
        for name in names:
            if name in one and name in two and one[name] != two[name]:
                return f"{name} is {two[name]:g} instead of {one[name]:g}"
    return ""


def _by_breaks(runs: _ShortRuns, fault: Callable[[str, str], FoundDeviation]) -> FoundDeviation:
    """Weights or a random state, by interruptions after other numbers of steps."""
    whole = runs.once("longer", LONGER)
    gaps = {number: runs.gap(number, whole) for number in BREAKS if number < len(whole)}
    ordered = [gaps[number] for number in sorted(gaps)]
    told = "; after " + ", ".join(f"{number} steps {gaps[number]:+.3g}" for number in sorted(gaps))
    sizes = [abs(each) / abs(float(whole[number]["loss"])) for number, each in sorted(gaps.items())]
    # Rounded weights miss little everywhere; lost ones the more, the longer they were trained.
    if max(sizes) < SLIGHT:
        return fault("resume-weights", f"{told}: always by little, as rounding does")
    if min(ordered) > 0 and ordered[-1] > ordered[len(ordered) // 2] > ordered[0]:
        return fault("resume-weights", f"{told}: the more, the longer it was trained")
    # Neither pattern: a random state, if the data is known to be the same.
    logged = any(name in whole[0] for name in DATA)
    if logged:
        return fault("resume-random", f"{told}; the logged counts of the data are the same")
    return fault("resume-not-recognised", f"{told}; no counts of the data are logged")
