"""Where does noise enter, how much, and is it off in evaluation?

The step is run with the same states, tokens and anchors under several seeds. Exact: labels and teacher logits must be
bit-equal under all seeds, so must fc's input in evaluation and wherever the recipe declares no noise, and the drafts
with it; one seed must give one result, and two seeds two where noise is declared. Statistical: the added noise of
each conditioning slice has the declared standard deviation within 5 standard errors, and the fourth moment of the
declared distribution (uniform: kurtosis 1.8; gaussian: 3). Where the declared deviation is below half a unit in the
last place of the states, addition rounds it away in part; the effective deviation is what is measured, and the limit
widens by the rounding error, one unit in the last place over sqrt(12). Its mean is 0, and no two slices, tokens,
channels or seeds share a draw (`parity.probes.instruments.noise.draws`: a false alarm once in a million).

Behind fc's input: the drafts may move with the seed by no more than that input explains. Where it does not move this is
exact; where it does, the step under the second seed is repeated with the difference of the draws put into the states
(`parity.probes.instruments.noise.behind_fc`), and the sentence reports what is too small to be seen. Noise that is the
same under every seed looks like any other computation, and epochs are not compared: some trainers draw by the seed
alone.

Bugs it finds: noise on the combined tensor before its last slice becomes the labels (docs/case-study.md), noise on
another key, noise left on in validation (speculators before 0.9.0 drew it in the data set), one noise tensor for all
slices, a dropout that nobody declared. Cost: seven steps, two to four more where noise is declared, no gradient.
Faults: the `noise` rows of `parity.probes.deviations`.

Shapes: S tokens of the row, T of them no padding, F = C slices of D channels that enter fc, R runs.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from parity.probes.adapters.base import AdapterStep
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.noise.behind_fc import (
    DownstreamNoise,
    measure_downstream_noise,
    measure_draft_change,
    measure_input_rounding,
)
from parity.probes.instruments.noise.draws import SharedDraw, find_shared_draws, measure_noise_mean
from parity.probes.subject import AdapterError, ExaminedAdapter, list_fc_taps
from parity.reports.record import Chart, Table, Value, declare_columns

SEEDS = (11, 12, 13, 14)
REPEATS = 4.0
"""Times what two steps with one seed differ by, on a device whose sums have no fixed order."""
ROUGHEST = 0.02
"""Of the drafts' size: more is not made by the order of sums, even in 16 bits."""
KURTOSIS = {"uniform": 1.8, "gaussian": 3.0}
KURTOSIS_ERROR = {"uniform": math.sqrt(1.317), "gaussian": math.sqrt(24)}
"""Standard error of the sample kurtosis times sqrt(n), by the delta method from the moments m2, m4, m6, m8:
(m8 - m4^2) / m2^4 + 4 m4^2 (m4 - m2^2) / m2^6 - 4 m4 (m6 - m2 m4) / m2^5."""
STANDARD_ERRORS = 5.0
"""Limit of the statistical tests: a healthy run exceeds it once in two million."""


class NoiseProbe:
    """Compares steps that differ by the seed only."""

    name = "noise"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding, and the table of signal to noise per slice."""
        steps = SeededSteps(subject)
        noise, std = subject.recipe.noise, steps.stds
        # Faults by place: on the labels, at fc's input, behind it, in evaluation.
        alike = steps.find_shared()
        moved = _seed_dependent(steps.runs)
        faults = _teacher_faults(moved)
        faults += _size_faults(noise.kind, noise.std, steps, alike)
        faults += _shared_faults(noise.kind, steps.draws, alike)
        seeded = torch.equal(steps.again.fc_input, steps.runs[0].fc_input)
        hidden = _behind(steps) if seeded else None
        faults += _behind_faults(hidden)
        still, drifts = _evaluation_changes(steps)
        faults += _evaluation_faults(still, drifts)
        if not seeded:
            faults.append(FoundDeviation("noise-unseeded", f"seed {SEEDS[0]} twice gives two inputs of fc"))
        # The sentence, in the same order.
        sentence = "no noise: fc's input and the drafts are the same under every seed"
        if max(std) > 0:
            sentence = (
                f"noise of std {_mean(std):.4g} on {sum(value > 0 for value in std)} of {len(std)} slices"
            )
            shared = "".join(f", shared by {each.over}" for each in alike)
            sentence += shared or ", every place with its own draw"
        sentence += ", the labels do not move" if moved is None else f", {moved[0]} move with it"
        sentence += ", off in evaluation" if still + drifts == 0 else ", on in evaluation"
        if hidden is not None and max(std) > 0:
            sentence += f"; {_behind_words(hidden)}"
        facts: dict[str, Value] = {
            "noise.std": _mean(std),
            "noise.moves_labels": moved is not None,
            "noise.in_evaluation": still + drifts > 0,
        }
        if max(std) > 0:
            facts["noise.shared"] = ", ".join(each.over for each in alike) or "no"
        if hidden is not None and (hidden.has_power or hidden.is_found):
            facts["noise.behind_fc"] = hidden.is_found
        return make_probe_answer(self.name, sentence, faults, facts=facts, tables=[_table(steps)])


class SeededSteps:
    """Steps on one row under several seeds, and the noise that they add at fc's input."""

    def __init__(self, subject: ExaminedAdapter) -> None:
        """Raises AdapterError where noise is declared and the same under every seed.

        Args:
            subject: the adapter that is examined.
        """
        batch = subject.batch
        self.subject, self.batch, self.real = subject, batch, batch.document >= 0
        self.states, self.anchors = subject.states(batch), subject.anchors(batch)
        with torch.no_grad():
            self.runs = [self.step(seed) for seed in SEEDS]
            self.again = self.step(SEEDS[0])
            self.evaluation = [self.step(seed, training=False) for seed in SEEDS[:2]]
        self.wanted = list_fc_taps(subject.recipe)
        self.clean = _clean(subject, self.states, self.runs[0].fc_input, self.wanted)
        """[S, F] fc's input without noise."""
        # What differs from the states in the same way under every seed is no noise: `inputs` names it.
        if torch.equal(self.evaluation[0].fc_input, self.evaluation[1].fc_input):
            self.clean = self.evaluation[0].fc_input.detach().double()
        added = [(run.fc_input.detach().double() - self.clean)[self.real] for run in self.runs]
        self.draws = torch.stack([each.unflatten(1, (-1, subject.adapter.width)) for each in added])
        """[R, T, C, D] the noise of every run, token, slice and channel."""
        self.stds = [float(each.square().mean().sqrt()) for each in self.slices]
        same = torch.equal(self.runs[0].fc_input, self.runs[1].fc_input)
        if max(self.stds) > 0 and subject.recipe.noise.kind != "none" and same:
            found = f"the same under seeds {SEEDS[0]} and {SEEDS[1]}"
            raise AdapterError("step", "noise that follows the seed it is given", found)

    def step(self, seed: int, training: bool = True, states: Tensor | None = None) -> AdapterStep:
        """The trainer's step on the row, or on other states [S, N, D] of it."""
        states = self.states if states is None else states
        return self.subject.step(self.batch, states, anchors=self.anchors, seed=seed, training=training)

    @property
    def slices(self) -> list[Tensor]:
        """[R T, D] the noise of each slice."""
        return [each.flatten(0, 1) for each in self.draws.unbind(2)]

    @property
    def signals(self) -> list[Tensor]:
        """[T, D] each slice without noise."""
        return list(self.clean[self.real].unflatten(1, (-1, self.draws.shape[-1])).unbind(1))

    def find_shared(self) -> list[SharedDraw]:
        """Draws that places share; none where there is no noise."""
        if not max(self.stds) > 0:
            return []
        document, position = self.batch.document[self.real], self.batch.position[self.real]
        return find_shared_draws(self.draws, SEEDS, document, position)


def _teacher_faults(moved: tuple[str, float] | None) -> list[FoundDeviation]:
    """Labels that move with the seed. moved: as from `_seed_dependent`."""
    if moved is None:
        return []
    words = f"{moved[0]} move by up to {moved[1]:.3g} when only the seed changes"
    return [FoundDeviation("noise-on-teacher", words, {"largest change": moved[1]})]


def _evaluation_changes(steps: SeededSteps) -> tuple[float, float]:
    """In evaluation: the largest change of fc's input, and what the drafts move by where that is none."""
    real = steps.real
    still = max(float((out.fc_input.double() - steps.clean)[real].abs().max()) for out in steps.evaluation)
    drifts = 0.0 if still else measure_draft_change(*steps.evaluation)
    return still, drifts if drifts > REPEATS * measure_draft_change(steps.runs[0], steps.again) else 0.0


def _evaluation_faults(still: float, drifts: float) -> list[FoundDeviation]:
    """Noise that is on in evaluation."""
    if not (still > 0 or drifts > 0):
        return []
    words = f"fc's input moves by up to {still:.3g} with the seed"
    if drifts:
        words = f"fc's input stays and the drafts move by {drifts:.3g} of their size with the seed"
    size = {"largest change": still} if still else {"change of the drafts": drifts}
    return [FoundDeviation("noise-in-evaluation", words, size)]


def _shared_faults(kind: str, drawn: Tensor, alike: list[SharedDraw]) -> list[FoundDeviation]:
    """Noise that is declared, and is not a draw around 0 for every place."""
    if kind == "none" or not drawn.any():
        return []
    mean, limit = measure_noise_mean(drawn)
    largest = max((abs(each.correlation) for each in alike), default=0.0)
    if abs(mean) > limit and mean**2 > largest / 2:  # a mean is what all places have in common
        words = f"a mean of {mean:.3f} of its size (limit {limit:.2g}), declared noise has none"
        return [FoundDeviation("noise-kind", words, {"mean": mean, "limit": limit})]
    return [
        FoundDeviation("noise-shared", each.words, {"correlation": each.correlation, "limit": each.limit})
        for each in alike
    ]


def _behind(steps: SeededSteps) -> DownstreamNoise | None:
    """What moves the drafts behind fc's input; None where nothing does and nothing could hide it."""
    runs, repeated = steps.runs, measure_draft_change(steps.runs[0], steps.again)

    def step(states: Tensor, seed: int, training: bool = True) -> AdapterStep:
        with torch.no_grad():
            return steps.step(seed, training, states)

    whole = max(measure_draft_change(runs[0], run) for run in runs[1:])
    if repeated:  # a generator of its own, or a device that adds up in another order each time
        off = step(steps.states, SEEDS[0], False)
        by_order, _ = measure_input_rounding(
            lambda near: step(near, SEEDS[0], False), steps.states, off, steps.real
        )
        by_order = REPEATS * min(by_order, ROUGHEST)
        if repeated > by_order:
            return DownstreamNoise(moved=repeated, limit=by_order, whole=whole)
    if torch.equal(runs[0].fc_input, runs[1].fc_input):  # nothing enters before: then this is exact
        moved = whole if whole > REPEATS * repeated else 0.0
        return DownstreamNoise(moved=moved, limit=0.0, whole=whole) if moved else None
    found = measure_downstream_noise(step, steps.states, runs, SEEDS, steps.real, steps.clean)
    return replace(found, limit=max(found.limit, REPEATS * repeated))


def _behind_words(found: DownstreamNoise) -> str:
    """What moves behind fc's input, or how little would be seen."""
    if found.is_found:
        return f"behind fc's input {found.moved:.3g} of the drafts moves with the seed"
    words = f"behind fc's input nothing moves the drafts by more than {max(found.moved, found.limit):.2g} of their size"
    if not found.has_power:
        words = (
            "what moves behind fc's input with the seed could not be told: it would show above "
            f"{found.limit:.2g} of the drafts' size, and the noise at fc's input moves them by {found.whole:.2g}"
        )
    return words


def _behind_faults(found: DownstreamNoise | None) -> list[FoundDeviation]:
    """Drafts that move with the seed by more than fc's input explains."""
    if found is None or not found.is_found:
        return []
    words = f"with the same input of fc the drafts move by {found.moved:.3g} of their size"
    words += f", rounding by up to {found.limit:.2g}" if found.limit else ""
    numbers: dict[str, Value] = {"change of the drafts": found.moved, "limit": found.limit}
    return [FoundDeviation("noise-behind-fc", words, numbers)]


def _mean(values: list[float]) -> float:
    """Root of the mean square."""
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0


def _clean(subject: ExaminedAdapter, states: Tensor, fc_input: Tensor, wanted: tuple[str, ...]) -> Tensor:
    """[S, F] in float64: the declared slices side by side, cut or filled up to what fc is really fed."""
    order = [subject.adapter.slices.index(name) for name in wanted if name in subject.adapter.slices]
    width = subject.adapter.width
    more = [index for index in range(states.shape[1]) if index not in order]
    order = (order + more)[: fc_input.shape[1] // width]
    return states[:, order].detach().to(fc_input.dtype).flatten(1).double()


def _seed_dependent(runs: list[AdapterStep]) -> tuple[str, float] | None:
    """What of the labels' side depends on the seed, and by how much."""
    for what in ("teacher", "labels"):
        values = [getattr(run, what) for run in runs]
        if values[0] is not None:
            size = max(float((value.double() - values[0].double()).abs().max()) for value in values)
            if size > 0:
                return {"teacher": "the teacher's logits", "labels": "the labels"}[what], size
    return None


def _size_faults(kind: str, std: float, steps: SeededSteps, alike: list[SharedDraw]) -> list[FoundDeviation]:
    """Amount and distribution of the noise, the first that is wrong.

    Args:
        kind: declared: none, uniform or gaussian.
        std: declared, in units of the states.
        steps: the noise that was added.
        alike: draws that are shared: so many fewer values are independent.
    """
    stds, largest = steps.stds, max(steps.stds)
    copies = math.prod(1 + abs(each.correlation) * (each.copies - 1) for each in alike)
    # Where it is, and where it is not.
    if kind == "none":
        words = f"std {largest:.4g} is added to fc's input"
        return [FoundDeviation("noise-undeclared", words, {"std": largest})] if largest else []
    if largest == 0:
        return [FoundDeviation("noise-missing", f"std {std:g} is declared and fc's input never moves")]
    silent = [index for index, value in enumerate(stds) if value == 0]
    if silent:
        return [FoundDeviation("noise-slices", f"slices {silent} of {len(stds)} get none")]
    # The standard deviation of each slice.
    rounding = [_rounding(signal) for signal in steps.signals]
    for index, (value, each) in enumerate(zip(stds, steps.slices, strict=True)):
        error = std * math.sqrt((KURTOSIS[kind] - 1) / (4 * max(1.0, each.numel() / copies)))
        limit = STANDARD_ERRORS * error + rounding[index]
        if abs(value - std) > limit:
            words = f"{value:.4g} on slice {index}, declared {std:g} (limit {limit:.2g})"
            return [FoundDeviation("noise-std", words, {"std": value, "limit": limit})]
    # The fourth moment of all slices, where there are enough independent values.
    if alike:
        return []
    whole = torch.cat([each.flatten() for each in steps.slices])
    kurtosis = float(whole.pow(4).mean() / whole.square().mean() ** 2)
    error = KURTOSIS_ERROR[kind] / math.sqrt(len(whole))
    if max(rounding) < std / 10 and abs(kurtosis - KURTOSIS[kind]) > STANDARD_ERRORS * error:
        words = f"kurtosis {kurtosis:.3f}, {kind} noise has {KURTOSIS[kind]}"
        return [FoundDeviation("noise-kind", words, {"kurtosis": kurtosis})]
    return []


def _rounding(states: Tensor) -> float:
    """Root mean square error of one addition in float32 at these magnitudes: a uniform error of one ulp."""
    return float((states.abs() * torch.finfo(torch.float32).eps).square().mean().sqrt()) / math.sqrt(12)


def _table(steps: SeededSteps) -> Table:
    """Signal to noise per conditioning slice."""
    rows, wanted = [], steps.wanted
    for index, (own, noise) in enumerate(zip(steps.signals, steps.stds, strict=True)):
        signal = float(own.square().mean().sqrt())
        name = wanted[index] if index < len(wanted) else f"slice {index}, undeclared"
        rows.append((index, name, signal, noise, signal / noise if noise else float("inf")))
    return Table(
        name="noise.slices",
        title="Signal and noise of every slice that enters fc",
        columns=declare_columns(
            "slice:int | tap | signal:float (rms) | noise:float (rms) | ratio:float signal/noise"
        ),
        rows=tuple(rows),
        caption="On synthetic states of rms 1.",
        chart=Chart(kind="bars", x="tap", y="noise"),
        detail=True,
    )
