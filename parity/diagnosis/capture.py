"""Faults of the capture: DISPATCH, LAYERIDX, NORM, ALIAS.

The states were computed by the right function and stand under another name. Most can be repaired on paper, and
are: what remains after the repair is part of the answer.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from parity.diagnosis.profile import FailingComparison, ProfileSide, TapErrors, relative, without
from parity.diagnosis.records import KindResult, KindVerdict, RepairResult
from parity.diagnosis.weights import SEPARABLE, separable
from parity.reports.record import Value
from parity.reports.words import shorten_list
from parity.tracing.trace import NOT_STATED


def dispatch(case: FailingComparison) -> KindVerdict:
    """Did another implementation run? The call proof says so; or two kernels agree to the last bit."""
    c = case.comparison
    if c.proof_problems:
        return KindResult(
            kinds=("DISPATCH",),
            sentence=f"a side did not run what it names, so nothing was compared: {c.proof_problems[0]}",
            next_step="repair the environment that `parity env` shows and capture that side again",
            evidence=(("problems", len(c.proof_problems)), ("first", c.proof_problems[0])),
        )
    linear = [s for s in case.series if s.linear and s.kind in ("conv", "gdn", "layer")]
    known = all(NOT_STATED not in backend and "?" not in backend for backend in c.backends)
    if known and c.backends[0] != c.backends[1] and linear and all(s.result.error_max == 0 for s in linear):
        return KindResult(
            kinds=("DISPATCH",),
            sentence=f"{c.backends[0]} and {c.backends[1]} agree to the last bit in {len(linear)} taps of "
            "linear layers, as no two kernels do: one of them did not run",
            next_step="look at who was called (`parity check` counts the calls), and capture that side again",
            evidence=(("taps of linear layers", len(linear)), ("largest error", 0.0)),
        )
    return "both sides prove who computed them"


def _twin(case: FailingComparison, series: TapErrors, others: Sequence[str]) -> tuple[str, float] | None:
    """The tap of b that equals a's `series`, with the relative error; None where none does."""
    mine = without(case.sample_rows("a", series.tap), series.result.outliers)
    own = relative(mine, without(case.sample_rows("b", series.tap), series.result.outliers))
    best: tuple[str, float] | None = None
    for tap in others:
        if not case.holds("b", tap) or case.b.tap(tap).width != series.result.width:
            continue
        theirs = without(case.sample_rows("b", tap), series.result.outliers)
        few_rows = slice(None, None, max(1, len(mine) // 8))
        if relative(mine[few_rows], theirs[few_rows]) > 10 * case.accept(series):
            continue  # most pairs of layers are far apart; a few rows tell
        error = relative(mine, theirs)
        if case.explains(series, own, error) and (best is None or error < best[1]):
            best = tap, error
    return best


def _layer_names(case: FailingComparison, side: ProfileSide) -> list[str]:
    """Names of the layer outputs a side holds, with the embedding's as that before layer 0."""
    trace = case.a if side == "a" else case.b
    return [
        tap for tap in trace.taps if tap == "embed.out" or (tap.startswith("layer.") and tap.count(".") == 2)
    ]


def _number(tap: str) -> int:
    """The layer's number; -1 for the embedding."""
    return -1 if tap == "embed.out" else int(tap.split(".")[1])


def twins(case: FailingComparison) -> dict[int, int]:
    """Layer of a -> layer of b that it equals, for the failing layer outputs that have one."""
    known = _layer_names(case, "b")
    found = {}
    for series in case.layers:
        if series in case.failing and not np.isinf(series.result.error_max):
            twin = _twin(case, series, [tap for tap in known if tap != series.tap])
            if twin is not None:
                found[_number(series.tap)] = _number(twin[0])
    return found


def layer_ids(case: FailingComparison) -> KindVerdict:
    """Do a's layers equal other layers of b, at a constant distance or exchanged? Is one missing?"""
    wrong = [_number(s.tap) for s in case.layers if s in case.failing]
    found = twins(case) if wrong else {}
    # Layers that one side alone holds, under the names that layers have.
    lone = sorted(
        (item.side, _number(item.name))
        for item in case.comparison.unpaired
        if item.kind == "tap" and item.side in ("a", "b") and item.name in _layer_names(case, item.side)
    )
    # Nearly all failing layers have a twin: a constant offset, or an exchange.
    if found and len(found) >= max(1, len(wrong) - 1):
        offsets = {found[i] - i for i in found}
        exchanged = set(found) == set(found.values())
        last = case.a.manifest.target.layers - 1
        own_last = any(_number(s.tap) == last and s not in case.failing for s in case.layers)
        if (
            len(offsets) == 1 and not (own_last and offsets == {1}) and len(wrong) == len(case.layers)
        ) or exchanged:
            return _answer_renumbered(case, found, offsets)
        if len(offsets) == 1 and len(wrong) == 1 and found[wrong[0]] < wrong[0]:
            return _answer_renumbered(case, found, offsets)
    # What both hold agrees, and an entry is missing.
    if lone and not wrong:
        held = len(_layer_names(case, "b" if lone[0][0] == "a" else "a"))
        if len(lone) <= max(1, held // 2):
            side = "b" if lone[0][0] == "a" else "a"
            names = [f"layer.{n}.out" if n >= 0 else "embed.out" for _, n in lone]
            return KindResult(
                kinds=("LAYERIDX",),
                sentence=f"side {side} lacks {shorten_list(names)}; its other {held} states agree",
                next_step="ask for that id in the dump's own convention: an id equal to the number of layers, or an "
                "unselected entry, records nothing",
                evidence=(("side", side), ("missing", len(lone)), ("first missing", names[0])),
            )
    skipped = _passed_through(case)
    if skipped is not None:
        return skipped
    return (
        f"{len(found)} of {len(wrong)} failing layers equal another layer of b"
        if wrong
        else "no layer output fails"
    )


def _answer_renumbered(case: FailingComparison, found: dict[int, int], offsets: set[int]) -> KindResult:
    """The answer for a constant offset or an exchange, with each layer compared to its twin."""
    # Each layer beside its twin, as proof.
    repairs = []
    for mine, theirs in found.items():
        series = case.get(f"layer.{mine}.out")
        assert series is not None
        twin = f"layer.{theirs}.out" if theirs >= 0 else "embed.out"
        repairs.append(
            RepairResult(
                tap=series.tap,
                against=twin,
                before=series.result.relative_l2,
                after=relative(case.sample_rows("a", series.tap), case.sample_rows("b", twin)),
            )
        )
    # In words: one offset, or a list of pairs.
    worst = max(repair.after for repair in repairs)
    if len(offsets) == 1:
        (offset,) = offsets
        how = f"layer i of a is layer i{offset:+d} of b"
        step = f"add {offset:+d} to a's layer ids (one side counts layer outputs, the other hidden states)"
    else:
        pairs = shorten_list([f"{i} is {j}" for i, j in found.items()])
        how, step = (
            f"a's layers are numbered otherwise: {pairs}",
            "name a's layers as the table of repairs does",
        )
    values: tuple[tuple[str, Value], ...] = (
        ("layers that match", len(found)),
        ("largest error after", worst),
    )
    if len(offsets) == 1:
        values = (("offset", next(iter(offsets))), *values)
    return KindResult(
        kinds=("LAYERIDX",),
        sentence=f"{how}, in all {len(found)} that fail; renumbered, at most {worst:.1e} remains",
        next_step=step,
        evidence=values,
        repairs=tuple(repairs),
    )


def _passed_through(case: FailingComparison) -> KindResult | None:
    """A layer that returns what entered it, on one side only."""
    for side in ("a", "b"):
        other: ProfileSide = "b" if side == "a" else "a"
        for before, after in pairwise(_layer_names(case, side)):
            series = case.get(after)
            if series is None or series not in case.failing or _number(after) != _number(before) + 1:
                continue
            if not case.holds(other, before) or case.get(before) in case.failing:
                continue
            through = [
                relative(case.sample_rows(s, after), case.sample_rows(s, before)) for s in (side, other)
            ]
            if through[0] <= 1e-6 < through[1]:
                return KindResult(
                    kinds=("LAYERIDX",),
                    sentence=f"{after} of side {side} is what entered that layer: the layer was skipped there",
                    next_step="look at the number of layers that side was built with, and at early exits",
                    evidence=(("side", side), ("layer", _number(after)), ("change in it", through[0])),
                )
    return None


def norm(case: FailingComparison) -> KindVerdict:
    """Is a failing state the other side's, before or after a norm?"""
    candidates = [s for s in case.failing if s.kind in ("layer", "pre", "post")]
    if not candidates:
        return "no state fails"
    for mine, theirs in (("final.prenorm", "final.postnorm"), ("final.postnorm", "final.prenorm")):
        series = case.get(mine)
        if series is not None and series in case.failing and case.holds("b", theirs):
            twin = _twin(case, series, [theirs])
            if twin is not None:
                return _answer_norm(case, [series], f"{mine} of a is {theirs} of b", [twin[1]], [theirs])
    for direction in ("a", "b"):
        fits = []
        for series in candidates:
            sides: tuple[ProfileSide, ProfileSide] = ("a", "b") if direction == "a" else ("b", "a")
            fit = separable(case.sample_rows(sides[0], series.tap), case.sample_rows(sides[1], series.tap))
            # One factor a channel explains a single row: several must obey one law, and the law must be seen.
            own = series.result.relative_l2
            if fit is None or not case.explains(series, own, fit.residual, SEPARABLE):
                continue
            if fit.rms_spread > 0.01 and fit.norm_spread < 0.05 * fit.rms_spread:
                fits.append((series, fit.residual))
        if fits and fits[0][0] is candidates[0]:
            names = shorten_list([s.tap for s, _ in fits])
            other = "b" if direction == "a" else "a"
            return _answer_norm(
                case,
                [s for s, _ in fits],
                f"{names} of side {direction}: each token is side {other}'s divided by its own rms, times one "
                "factor a channel",
                [residual for _, residual in fits],
                [f"the norm of {other}"] * len(fits),
            )
    return "no failing state is the other's with a norm between them"


def _answer_norm(
    case: FailingComparison,
    series: Sequence[TapErrors],
    how: str,
    after: Sequence[float],
    against: Sequence[str],
) -> KindResult:
    """The answer for states on two sides of a norm."""
    repairs = tuple(
        RepairResult(tap=s.tap, against=name, before=s.result.relative_l2, after=value)
        for s, name, value in zip(series, against, after, strict=True)
    )
    return KindResult(
        kinds=("NORM",),
        sentence=f"{how}; with the norm applied, {max(after):.1e} remains (lowest cosine before: "
        f"{min(s.result.cosine_min for s in series):.4f})",
        next_step="say in the recipe which norm state the teacher uses, and apply the final norm to the side "
        "that lacks it (the other way cannot be undone)",
        evidence=(("taps", len(series)), ("largest error after", max(after)), ("first tap", series[0].tap)),
        repairs=repairs,
    )


def alias(case: FailingComparison) -> KindVerdict:
    """Does a layer's entry hold a later state, or a branch without the residual stream?"""
    wrong = [s for s in case.layers if s in case.failing]
    if not wrong:
        return "no layer output fails"
    found = twins(case)
    later = {i: j for i, j in found.items() if j > i}
    if later and len(later) == len(found):
        repairs = tuple(
            RepairResult(
                tap=f"layer.{i}.out",
                against=f"layer.{j}.out",
                before=_before(case, i),
                after=relative(
                    case.sample_rows("a", f"layer.{i}.out"), case.sample_rows("b", f"layer.{j}.out")
                ),
            )
            for i, j in later.items()
        )
        pairs = shorten_list([f"{i} holds {j}" for i, j in later.items()])
        return KindResult(
            kinds=("ALIAS",),
            sentence=f"{len(later)} of a's layer entries hold a later layer's state ({pairs}): memory that the "
            "model wrote over after it was recorded",
            next_step="record with a copy (clone) at the hook, and dump again",
            evidence=(("entries", len(later)), ("of failing", len(wrong))),
            repairs=repairs,
        )
    return _without_residual(case, wrong)


def _before(case: FailingComparison, layer: int) -> float:
    """The relative error of a layer's output as it is."""
    series = case.get(f"layer.{layer}.out")
    return series.result.relative_l2 if series is not None else float("nan")


def _without_residual(case: FailingComparison, wrong: Sequence[TapErrors]) -> KindVerdict:
    """a's entry is b's minus a residual stream: exactly b's input, or something close to it."""
    # For each failing layer: is a equal to b without what entered it, or does what is missing point its way?
    exact, near, sizes = [], [], []
    for series in wrong:
        number = _number(series.tap)
        before = f"layer.{number - 1}.out" if number else "embed.out"
        if not case.holds("b", before):
            continue
        a, b = case.sample_rows("a", series.tap), case.sample_rows("b", series.tap)
        entered = case.sample_rows("b", before)
        rest = relative(a, b - entered)
        if case.explains(series, relative(a, b), rest, SEPARABLE):
            exact.append(
                RepairResult(
                    tap=series.tap,
                    against=f"b without {before}",
                    before=series.result.relative_l2,
                    after=rest,
                )
            )
        missing = b - a
        cosines = (missing * entered).sum(1) / np.maximum(
            np.linalg.norm(missing, axis=1) * np.linalg.norm(entered, axis=1), 1e-300
        )
        size = float(np.median(np.linalg.norm(a, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-300)))
        sizes.append(size)
        near.append(float(np.median(cosines)))
    # Exactly so in nearly all layers: the residual stream is missing.
    if len(exact) >= max(1, 0.8 * len(wrong)):
        return KindResult(
            kinds=("ALIAS",),
            sentence=f"{len(exact)} of a's layer entries are b's without what entered the layer: the residual "
            f"stream is missing; with it at most {max(r.after for r in exact):.1e} remains",
            next_step="record hidden states plus residual, after the layer has added them",
            evidence=(("entries", len(exact)), ("median size of a over b", float(np.median(sizes)))),
            repairs=tuple(exact),
        )
    # Only its direction, and the final states agree: a branch alone was recorded.
    downstream = [s for s in case.series if s.kind in ("pre", "post", "logits")]
    unharmed = bool(downstream) and all(s not in case.failing for s in downstream)
    if near and float(np.median(near)) > 0.8 and unharmed and len(near) >= max(2, 0.8 * len(wrong)):
        return KindResult(
            kinds=("ALIAS",),
            sentence=f"what is missing in {len(near)} of a's layer entries points the way of the residual stream "
            f"(median cosine {float(np.median(near)):.3f} to what entered the layer), and the final states agree: a "
            "branch's output was recorded without it",
            next_step="record hidden states plus residual, after the layer has added them",
            evidence=(
                ("entries", len(near)),
                ("median cosine of what is missing to the layer's input", float(np.median(near))),
                ("median size of a over b", float(np.median(sizes))),
            ),
        )
    return "no failing layer holds a later state or lacks the residual stream"
