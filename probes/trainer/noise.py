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
exact; where it does, the second seed is asked again with the difference of the draws put into the states
(`parity.probes.instruments.noise.behind_fc`), and the sentence says what was too small to be told. Noise that
is the same
under every seed cannot be told from a computation, and an epoch is not asked for: some trainers draw by the seed alone.

Bugs it finds: noise on the combined tensor before its last slice becomes the labels (design.md section 1), noise on
another key, noise left on in validation (speculators before 0.9.0 drew it in the data set), one noise tensor for all
slices, a dropout that nobody declared. Cost: seven steps, two to four more where noise is declared, no gradient.
Faults: the `noise` rows of `parity.probes.deviations`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from parity.probes.adapters.base import AdapterStep
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.noise.behind_fc import (
    DownstreamNoise,
    apart,
    measure_downstream_noise,
    rounding,
)
from parity.probes.instruments.noise.draws import SharedDraw, find_shared_draws, mean_of
from parity.probes.subject import (
    AdapterError,
    ExaminedAdapter,
    FoundDeviation,
    list_fc_taps,
    make_probe_answer,
)
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
        batch = subject.batch
        states, anchors = subject.states(batch), subject.anchors(batch)
        real = batch.document >= 0

        def step(seed: int, training: bool = True, states: Tensor = states) -> AdapterStep:
            return subject.step(batch, states, anchors=anchors, seed=seed, training=training)

        with torch.no_grad():
            runs = [step(seed) for seed in SEEDS]
            again, evaluation = step(SEEDS[0]), [step(seed, training=False) for seed in SEEDS[:2]]
        wanted = list_fc_taps(subject.recipe)
        clean = _clean(subject, states, runs[0].fc_input, wanted)
        # What differs from the states in the same way under every seed is no noise: `inputs` names it.
        if torch.equal(evaluation[0].fc_input, evaluation[1].fc_input):
            clean = evaluation[0].fc_input.detach().double()
        added = [(run.fc_input.detach().double() - clean)[real] for run in runs]
        width, kind, std = subject.adapter.width, subject.recipe.noise.kind, subject.recipe.noise.std
        slices = [
            torch.cat([each[:, at : at + width] for each in added]) for at in range(0, clean.shape[1], width)
        ]
        stds = [float(each.square().mean().sqrt()) for each in slices]
        table = _table(wanted, clean[real], slices, width)
        if max(stds) > 0 and kind != "none" and torch.equal(runs[0].fc_input, runs[1].fc_input):
            told = f"the same under seeds {SEEDS[0]} and {SEEDS[1]}"
            raise AdapterError("step", "noise that follows the seed it is given", told)
        drawn = _draws(added, width)
        alike = (
            find_shared_draws(drawn, SEEDS, batch.document[real], batch.position[real])
            if max(stds) > 0
            else []
        )
        faults = [
            *_size_faults(kind, std, stds, slices, clean[real], alike),
            *_shared_faults(kind, drawn, alike),
        ]
        seeded = torch.equal(again.fc_input, runs[0].fc_input)
        hidden = _behind(subject, step, states, runs, again, clean) if seeded else None
        faults += _behind_faults(hidden)
        moved = _seed_dependent(runs)
        if moved is not None:
            words = f"{moved[0]} move by up to {moved[1]:.3g} when only the seed changes"
            faults.insert(
                0,
                FoundDeviation(
                    name="noise-on-teacher", measured=words, evidence=(("largest change", moved[1]),)
                ),
            )
        still = max(float((out.fc_input.double() - clean)[real].abs().max()) for out in evaluation)
        drifts = 0.0 if still else apart(*evaluation)
        drifts = drifts if drifts > REPEATS * apart(runs[0], again) else 0.0
        if still > 0 or drifts > 0:
            words = f"fc's input moves by up to {still:.3g} with the seed"
            if drifts:
                words = f"fc's input stays and the drafts move by {drifts:.3g} of their size with the seed"
            size = (("largest change", still),) if still else (("change of the drafts", drifts),)
            faults.append(FoundDeviation(name="noise-in-evaluation", measured=words, evidence=size))
        if not seeded:
            faults.append(
                FoundDeviation(
                    name="noise-unseeded", measured=f"seed {SEEDS[0]} twice gives two inputs of fc"
                )
            )
        sentence = "no noise: fc's input and the drafts are the same under every seed"
        if max(stds) > 0:
            sentence = (
                f"noise of std {_mean(stds):.4g} on {sum(value > 0 for value in stds)} of {len(stds)} slices"
            )
            sentence += (
                "".join(f", shared by {each.over}" for each in alike) or ", every place with its own draw"
            )
        sentence += ", the labels do not move" if moved is None else f", {moved[0]} move with it"
        sentence += ", off in evaluation" if still + drifts == 0 else ", on in evaluation"
        if hidden is not None and max(stds) > 0:
            sentence += f"; {_behind_words(hidden)}"
        facts: dict[str, Value] = {
            "noise.std": _mean(stds),
            "noise.moves_labels": moved is not None,
            "noise.in_evaluation": still + drifts > 0,
        }
        if max(stds) > 0:
            facts["noise.shared"] = ", ".join(each.over for each in alike) or "no"
        if hidden is not None and (hidden.has_power or hidden.is_found):
            facts["noise.behind_fc"] = hidden.is_found
        return make_probe_answer(self.name, sentence, faults, facts=facts, tables=[table])


def _draws(added: list[Tensor], width: int) -> Tensor:
    """[R, T, C, D] the noise of every run, token, slice and channel."""
    return torch.stack([each.unflatten(1, (-1, width)) for each in added])


def _shared_faults(kind: str, drawn: Tensor, alike: list[SharedDraw]) -> list[FoundDeviation]:
    """Noise that is declared, and is not a draw around 0 for every place."""
    if kind == "none" or not drawn.any():
        return []
    mean, limit = mean_of(drawn)
    largest = max((abs(each.correlation) for each in alike), default=0.0)
    if abs(mean) > limit and mean**2 > largest / 2:  # a mean is what all places have in common
        words = f"a mean of {mean:.3f} of its size (limit {limit:.2g}), declared noise has none"
        return [
            FoundDeviation(name="noise-kind", measured=words, evidence=(("mean", mean), ("limit", limit)))
        ]
    return [
        FoundDeviation(
            name="noise-shared",
            measured=each.words,
            evidence=(("correlation", each.correlation), ("limit", each.limit)),
        )
        for each in alike
    ]


def _behind(
    subject: ExaminedAdapter,
    step: Callable[..., AdapterStep],
    states: Tensor,
    runs: list[AdapterStep],
    again: AdapterStep,
    clean: Tensor,
) -> DownstreamNoise | None:
    """What moves the drafts behind fc's input; None where nothing does and nothing could hide it."""
    real, repeated = subject.batch.document >= 0, apart(runs[0], again)

    def quiet(states: Tensor, seed: int) -> AdapterStep:
        with torch.no_grad():
            return step(seed, states=states)

    whole = max(apart(runs[0], run) for run in runs[1:])
    if repeated:  # a generator of its own, or a device that adds up in another order each time
        with torch.no_grad():
            off = step(SEEDS[0], training=False)
            by_order, _ = rounding(
                lambda near: step(SEEDS[0], training=False, states=near), states, off, real
            )
        by_order = REPEATS * min(by_order, ROUGHEST)
        if repeated > by_order:
            return DownstreamNoise(moved=repeated, limit=by_order, whole=whole)
    if torch.equal(runs[0].fc_input, runs[1].fc_input):
        moved = whole if whole > REPEATS * repeated else 0.0
        return DownstreamNoise(moved=moved, limit=0.0, whole=whole) if moved else None
    found = measure_downstream_noise(quiet, states, runs, SEEDS, real, clean)
    return replace(found, limit=max(found.limit, REPEATS * repeated))


def _behind_words(found: DownstreamNoise) -> str:
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
    if found is None or not found.is_found:
        return []
    words = f"with the same input of fc the drafts move by {found.moved:.3g} of their size"
    words += f", rounding by up to {found.limit:.2g}" if found.limit else ""
    numbers = (("change of the drafts", found.moved), ("limit", found.limit))
    return [FoundDeviation(name="noise-behind-fc", measured=words, evidence=numbers)]


def _mean(values: list[float]) -> float:
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


def _size_faults(
    kind: str, std: float, stds: list[float], slices: list[Tensor], clean: Tensor, alike: list[SharedDraw]
) -> list[FoundDeviation]:
    """Faults of amount and distribution."""
    largest, width = max(stds), slices[0].shape[1]
    copies = math.prod(1 + abs(each.correlation) * (each.copies - 1) for each in alike)
    if kind == "none":
        words = f"std {largest:.4g} is added to fc's input"
        return (
            [FoundDeviation(name="noise-undeclared", measured=words, evidence=(("std", largest),))]
            if largest
            else []
        )
    if largest == 0:
        return [
            FoundDeviation(
                name="noise-missing", measured=f"std {std:g} is declared and fc's input never moves"
            )
        ]
    silent = [index for index, value in enumerate(stds) if value == 0]
    if silent:
        return [FoundDeviation(name="noise-slices", measured=f"slices {silent} of {len(stds)} get none")]
    rounding = [_rounding(clean[:, at * width : (at + 1) * width]) for at in range(len(stds))]
    for index, (value, each) in enumerate(zip(stds, slices, strict=True)):
        error = std * math.sqrt((KURTOSIS[kind] - 1) / (4 * max(1.0, each.numel() / copies)))
        limit = STANDARD_ERRORS * error + rounding[index]
        if abs(value - std) > limit:
            words = f"{value:.4g} on slice {index}, declared {std:g} (limit {limit:.2g})"
            return [
                FoundDeviation(name="noise-std", measured=words, evidence=(("std", value), ("limit", limit)))
            ]
    if alike:
        return []  # too few independent values for a fourth moment
    whole = torch.cat([each.flatten() for each in slices])
    kurtosis = float(whole.pow(4).mean() / whole.square().mean() ** 2)
    error = KURTOSIS_ERROR[kind] / math.sqrt(len(whole))
    if max(rounding) < std / 10 and abs(kurtosis - KURTOSIS[kind]) > STANDARD_ERRORS * error:
        words = f"kurtosis {kurtosis:.3f}, {kind} noise has {KURTOSIS[kind]}"
        return [FoundDeviation(name="noise-kind", measured=words, evidence=(("kurtosis", kurtosis),))]
    return []


def _rounding(states: Tensor) -> float:
    """Root mean square error of one addition in float32 at these magnitudes: a uniform error of one ulp."""
    return float((states.abs() * torch.finfo(torch.float32).eps).square().mean().sqrt()) / math.sqrt(12)


def _table(wanted: tuple[str, ...], clean: Tensor, slices: list[Tensor], width: int) -> Table:
    """Signal to noise per conditioning slice."""
    rows = []
    for index, each in enumerate(slices):
        signal = float(clean[:, index * width : (index + 1) * width].square().mean().sqrt())
        noise = float(each.square().mean().sqrt())
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
