"""Two traces, compared tap by tap and token by token: numbers and verdicts, no words to print.

One tensor pair is in memory at a time; per token and tap a few numbers stay. The requests are walked in
canonical order, so the result does not depend on who reads what first.

    comparison = compare_traces(Trace.open("candidate"), Trace.open("reference"), golden=None)
    comparison.outcome, comparison.first_bad, comparison.taps[0].cosine_min
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from parity.align import Alignment, RequestPair, TapPair, align, identity_differences
from parity.compare_kernel import (
    FIELDS,
    OUTLIER_TIMES,
    Implementation,
    PairStats,
    channel_mean_square,
    choose,
    pair_stats,
    pick_outliers,
    ratio,
)
from parity.compare_records import Comparison as Comparison
from parity.compare_records import ControlResult, HeatMap, Kept, TokenPlace
from parity.compare_records import TapResult as TapResult
from parity.errors import ParityError
from parity.reports.record import Outcome
from parity.tolerance import (
    CONTROLS,
    FirstBad,
    Floor,
    Gate,
    Judgement,
    Policy,
    TapEvidence,
    TapRules,
    coarsest,
    data_faults,
    first_bad,
    judge_tap,
    rms,
    rules_for,
)
from parity.trace import Manifest, Trace

Progress = Callable[[int, int, str], None]
"""Called with tensor pairs done, tensor pairs in all, and what comes next."""
CONTROL_ROWS = 256
"""Rows of each tap on which the negative controls run: enough to show power, and no second full pass."""
WORST_TOKENS = 10
_MAX = FIELDS.index("max_abs")
_HYSTERESIS = 1.5
"""How far a channel's rms may be on the wrong side of the outlier limit before the tap is read again."""


@dataclass
class _Tap:
    """What is gathered of one tap while the requests go by."""

    pair: TapPair
    rules: TapRules
    outliers: tuple[int, ...] | None = None
    recomputed: bool = False
    columns: dict[str, list[Kept]] = field(default_factory=dict)
    """Per request, [tokens] each: error, gap, robust_gap and, with a golden, to_golden, base_to_golden."""
    totals: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FIELDS)))
    channels: NDArray[np.float64] | None = None
    ulp: NDArray[np.int64] | None = None
    zeros: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))
    rows: int = 0
    control: dict[str, list[TapEvidence]] = field(default_factory=lambda: {name: [] for name in CONTROLS})
    control_rows: int = 0

    def joined(self, name: str) -> Kept:
        """[tokens] one column over all requests."""
        return np.concatenate(self.columns[name]) if self.columns.get(name) else np.zeros(0, np.float32)

    def evidence(self) -> TapEvidence:
        """The columns the gates judge."""
        golden = "to_golden" in self.columns
        return TapEvidence(
            error=self.joined("error"),
            cosine_gap=self.joined("gap"),
            to_golden=self.joined("to_golden") if golden else None,
            base_to_golden=self.joined("base_to_golden") if golden else None,
        )

    def add(self, stats: PairStats, to_golden: Kept | None, base: Kept | None) -> None:
        """Add one request."""
        columns = {
            "error": judged_error(stats),
            "gap": stats.cosine_gap().astype(np.float32),
            "robust_gap": stats.cosine_gap(robust=True).astype(np.float32),
        }
        if to_golden is not None and base is not None:
            columns |= {"to_golden": to_golden, "base_to_golden": base}
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)
        largest = max(self.totals[_MAX], float(stats.field("max_abs").max(initial=0.0)))
        self.totals = self.totals + stats.sums.sum(axis=1)
        self.totals[_MAX] = largest
        channels = stats.channels()
        self.channels = channels if self.channels is None else self.channels + channels
        if stats.ulp is not None:
            self.ulp = stats.ulp if self.ulp is None else self.ulp + stats.ulp
        zero_a, zero_b = stats.zero_rows()
        self.zeros = self.zeros + np.array([zero_a.sum(), zero_b.sum(), (zero_a != zero_b).sum()])
        self.rows += stats.rows


def compare(
    a: str | Path | Trace,
    b: str | Path | Trace,
    *,
    golden: str | Path | Trace | None = None,
    floor: str | Path | Floor | None = None,
    policy: str | Path | Policy | None = None,
    taps: Sequence[str] | None = None,
    progress: Progress | None = None,
    threads: int = 1,
) -> Comparison:
    """`compare_traces` of traces, floor and policy that may be given as paths."""

    def opened(trace: str | Path | Trace) -> Trace:
        return trace if isinstance(trace, Trace) else Trace.open(trace)

    return compare_traces(
        opened(a),
        opened(b),
        golden=None if golden is None else opened(golden),
        floor=Floor.load(Path(floor)) if isinstance(floor, (str, Path)) else floor,
        policy=Policy.load(Path(policy)) if isinstance(policy, (str, Path)) else policy,
        progress=progress,
        taps=taps,
        threads=threads,
    )


def compare_traces(
    a: Trace,
    b: Trace,
    *,
    golden: Trace | None = None,
    floor: Floor | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    taps: Sequence[str] | None = None,
    threads: int = 1,
) -> Comparison:
    """Compare candidate `a` with reference `b`; see `Comparison`.

    `golden` is a float64 trace of the same prompts, `floor` measured benign differences, `taps` names or
    globs. Raises NothingComparable where the two share nothing, ParityError for an unusable golden.
    """
    began = time.perf_counter()
    policy = policy or Policy()
    alignment = align(a, b, taps)
    held = _golden_requests(golden, b, alignment) if golden is not None else {}
    gathered = []
    for pair in alignment.taps:
        dtype = coarsest(pair.dtype_a, pair.dtype_b, a.manifest.dtype, b.manifest.dtype)
        gathered.append(_Tap(pair, rules_for(pair.name, dtype, _depth(a, pair), floor, policy)))
    rows, width = sum(pair.rows for pair in alignment.requests), sum(pair.width for pair in alignment.taps)
    reader = _Reader(a, b, golden, held, alignment.requests, choose(8 * rows * width), threads, progress)
    reader.read(gathered)
    wrong = [_outliers_wrong(tap) for tap in gathered]
    gathered = [
        _Tap(tap.pair, tap.rules, tap.outliers, True) if again else tap
        for tap, again in zip(gathered, wrong, strict=True)
    ]
    reader.read([tap for tap in gathered if tap.recomputed])
    results = tuple(_result(tap, policy) for tap in gathered)
    return _comparison(reader, alignment, gathered, results, policy, began)


def _depth(trace: Trace, pair: TapPair) -> int:
    """How many decoder layers rounded before this tap; 1 where each layer was fed another trace's input."""
    if trace.manifest.mode.endswith("+local"):
        return 1
    if pair.layer is not None:
        return pair.layer + 1
    return 0 if pair.name.startswith("embed") else trace.manifest.target.layers + 1


def _golden_requests(golden: Trace, b: Trace, alignment: Alignment) -> dict[str, str]:
    """Id in b to id in the golden. Raises ParityError where the golden is not float64 or lacks a request."""
    low = sorted({golden.tap(name).dtype for name in golden.taps} - {"float64"})
    if low:
        raise ParityError(
            f"{golden.path} as golden",
            f"taps of {', '.join(low)}",
            "capture it with --backend golden, which computes in float64",
        )
    proof = golden.manifest.backend
    if not proof.valid or proof.requested != {"delta": "golden", "conv": "golden"}:
        raise ParityError(
            f"{golden.path} as golden",
            proof.problems[0] if proof.problems else f"a capture on {_backend(golden.manifest)}",
            "capture it with --backend golden, whose operators are independent recurrences",
        )
    if golden.manifest.target.weights != b.manifest.target.weights:
        raise ParityError(
            f"{golden.path} as golden of {b.path}",
            "other weights than side B's",
            "capture the golden from the reference's checkpoint",
        )
    known = {pair.a.id: pair for pair in align(b, golden).requests}
    lacking = [
        pair.b.id
        for pair in alignment.requests
        if pair.b.id not in known or known[pair.b.id].rows < pair.rows
    ]
    if lacking:
        raise ParityError(
            f"{golden.path} as golden",
            f"not all tokens of request {lacking[0]!r} ({len(lacking)} such)",
            "capture the golden from the same prompts",
        )
    return {pair.b.id: known[pair.b.id].b.id for pair in alignment.requests}


@dataclass
class _Reader:
    """Walks the aligned requests and adds each tensor pair to what is gathered of its tap."""

    a: Trace
    b: Trace
    golden: Trace | None
    golden_ids: dict[str, str]
    requests: tuple[RequestPair, ...]
    implementation: Implementation
    threads: int
    progress: Progress | None

    def read(self, taps: Sequence[_Tap]) -> None:
        """Read every request of these taps once."""
        done, total = 0, len(taps) * len(self.requests)
        for request in self.requests:
            for tap in taps:
                if self.progress is not None:
                    self.progress(done, total, f"{request.a.id} {tap.pair.name}")
                self._read_one(request, tap)
                done += 1
        if self.progress is not None and total:
            self.progress(total, total, "")

    def _read_one(self, request: RequestPair, tap: _Tap) -> None:
        """One tensor pair: its statistics, those against the golden, and its share of the controls."""
        name, rows = tap.pair.name, request.rows
        a, b = self.a.tensor(request.a.id, name)[:rows], self.b.tensor(request.b.id, name)[:rows]
        gold = None
        held = self.golden
        if held is not None and name in held.taps and held.tap(name).width == tap.pair.width:
            gold = held.tensor(self.golden_ids[request.b.id], name)[:rows]
        if tap.outliers is None:
            tap.outliers = pick_outliers(channel_mean_square(b))
        stats = self._stats(a, b, tap, full=True)
        base = judged_error(self._stats(b, gold, tap)) if gold is not None else None
        to_golden = judged_error(self._stats(a, gold, tap)) if gold is not None else None
        tap.add(stats, to_golden, base)
        short = slice(0, CONTROL_ROWS - tap.control_rows)
        if tap.control_rows < CONTROL_ROWS:
            self._control(a[short], b[short], gold[short] if gold is not None else None, tap, base)

    def _control(
        self, a: torch.Tensor, b: torch.Tensor, gold: torch.Tensor | None, tap: _Tap, base: Kept | None
    ) -> None:
        """Gather the evidence of each negative control: side B broken, in the place of side B."""
        tap.control_rows += a.shape[0]
        for name, control in CONTROLS.items():
            broken = control(b)
            if broken is None:
                continue
            stats = self._stats(a, broken, tap)
            to_golden = judged_error(self._stats(broken, gold, tap)) if gold is not None else None
            tap.control[name].append(
                TapEvidence(
                    error=judged_error(stats),
                    cosine_gap=np.asarray(stats.cosine_gap(), np.float32),
                    to_golden=to_golden,
                    base_to_golden=base[: a.shape[0]] if base is not None else None,
                )
            )

    def _stats(self, a: torch.Tensor, b: torch.Tensor, tap: _Tap, full: bool = False) -> PairStats:
        """The kernel, with this comparison's settings."""
        return pair_stats(
            a,
            b,
            outliers=tap.outliers or (),
            full=full,
            implementation=self.implementation,
            threads=self.threads,
        )


def judged_error(stats: PairStats) -> Kept:
    """[tokens] larger of plain and robust relative L2; inf where only one side is not finite."""
    error = np.maximum(stats.relative_l2(), stats.relative_l2(robust=True))
    one_sided = stats.field("bad_a") + stats.field("bad_b") > 2 * stats.field("bad_both")
    return np.where(one_sided, np.inf, error).astype(np.float32)


def _outliers_wrong(tap: _Tap) -> bool:
    """Whether the whole pass shows other massive channels than the sample did (a borderline one may pass)."""
    if tap.channels is None or tap.outliers is None or not tap.rows:
        return False
    rms = np.sqrt(tap.channels[2] / tap.rows)
    limit = OUTLIER_TIMES * float(np.median(rms))
    true, chosen = set(pick_outliers(tap.channels[2] / tap.rows)), set(tap.outliers)
    missed = [c for c in true - chosen if rms[c] > limit * _HYSTERESIS]
    needless = [c for c in chosen - true if rms[c] < limit / _HYSTERESIS]
    wrong = bool(missed or needless)
    if wrong:
        tap.outliers = tuple(sorted(true))
    return wrong


def _controls(tap: _Tap) -> tuple[ControlResult, ...]:
    """Each control's answer at this tap."""
    results = []
    for name, evidence in tap.control.items():
        if not evidence:
            results.append(ControlResult(name=name, refused=None, because="it does not change this data"))
            continue
        joined = TapEvidence(
            error=np.concatenate([part.error for part in evidence]),
            cosine_gap=np.concatenate([part.cosine_gap for part in evidence]),
            to_golden=_concatenated([part.to_golden for part in evidence]),
            base_to_golden=_concatenated([part.base_to_golden for part in evidence]),
        )
        judgement = judge_tap(joined, tap.rules)
        results.append(
            ControlResult(name=name, refused=judgement.outcome == "fail", because=judgement.because)
        )
    return tuple(results)


def _concatenated(parts: Sequence[NDArray[np.floating] | None]) -> NDArray[np.floating] | None:
    """The parts in one, or None where one is missing."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None


def _result(tap: _Tap, policy: Policy) -> TapResult:
    """Everything about one tap in numbers, with its verdict."""
    pair, rules, gap, robust_gap = tap.pair, tap.rules, tap.joined("gap"), tap.joined("robust_gap")
    t = dict(zip(FIELDS, tap.totals.tolist(), strict=True))
    nonfinite = (int(t["bad_a"]), int(t["bad_b"]), int(t["bad_both"]))
    count = max(1, tap.rows * pair.width - nonfinite[0] - nonfinite[1] + nonfinite[2])
    judgement, controls = judge_tap(tap.evidence(), rules), _controls(tap)
    faults = data_faults(
        nonfinite=nonfinite,
        zero_one_side=int(tap.zeros[2]),
        dtypes=(pair.dtype_a, pair.dtype_b),
        policy=policy,
    )
    errors = tap.joined("error")
    channels = tap.channels if tap.channels is not None else np.zeros((3, pair.width))
    return TapResult(
        tap=pair.name,
        layer=pair.layer,
        layer_type=pair.layer_type,
        dtypes=(pair.dtype_a, pair.dtype_b),
        tokens=tap.rows,
        width=pair.width,
        cosine_mean=1 - float(np.mean(gap, dtype=np.float64)),
        cosine_min=1 - float(gap.max()),
        cosine_p01=1 - float(np.quantile(gap, 0.99)),
        robust_cosine_min=1 - float(robust_gap.max()),
        cosine_flat=_quotient(t["dot"], (t["aa"] * t["bb"]) ** 0.5),
        relative_l2=_quotient(t["dd"], t["bb"]) ** 0.5,
        robust_relative_l2=_quotient(t["dd_r"], t["bb_r"]) ** 0.5,
        error_rms=rms(errors),
        error_max=float(errors.max()),
        max_abs=t["max_abs"],
        mean_abs=t["sum_abs"] / count,
        mean=(t["sum_a"] / count, t["sum_b"] / count),
        std=(_std(t["aa"], t["sum_a"], count), _std(t["bb"], t["sum_b"], count)),
        nonfinite=nonfinite,
        zero_rows=(int(tap.zeros[0]), int(tap.zeros[1]), int(tap.zeros[2])),
        ulp=tuple(tap.ulp.tolist()) if tap.ulp is not None else None,
        outliers=tap.outliers or (),
        recomputed=tap.recomputed,
        floor_name=rules.floor_name,
        floor_rms=rules.floor.rms,
        floor_token=rules.floor.token,
        judgement=judgement,
        faults=faults,
        controls=controls,
        outcome=_verdict(judgement, faults, controls),
        token_errors=errors,
        channel_errors=ratio(np.sqrt(channels[0]), np.sqrt(channels[2])).astype(np.float32),
    )


def _verdict(judgement: Judgement, faults: Sequence[str], controls: Sequence[ControlResult]) -> Outcome:
    """A tap passes only where its gate refused every control that could be made, and at least one could."""
    if faults or judgement.outcome != "pass":
        return "fail" if faults else judgement.outcome
    if any(control.refused is False for control in controls):
        return "error"
    return "pass" if any(control.refused for control in controls) else "skipped"


def _quotient(top: float, bottom: float) -> float:
    """top / bottom; equal zeros give 0, anything else over 0 gives inf."""
    return top / bottom if bottom else (0.0 if top == 0 else float("inf"))


def _std(squares: float, total: float, count: int) -> float:
    """Standard deviation from a sum of squares and a sum."""
    return math.sqrt(max(0.0, squares / count - (total / count) ** 2))


def _comparison(
    reader: _Reader,
    alignment: Alignment,
    gathered: Sequence[_Tap],
    results: tuple[TapResult, ...],
    policy: Policy,
    began: float,
) -> Comparison:
    """Put the parts together and find where the difference begins."""
    a, b, golden = reader.a.manifest, reader.b.manifest, reader.golden
    # A tap that fails only by its dtype has no first token.
    failing = [
        tap
        for tap, result in zip(gathered, results, strict=True)
        if result.judgement.outcome == "fail" or any(result.nonfinite) or result.zero_rows[2]
        if result.outcome == "fail"
    ]
    first = first_bad(
        [tap.pair.name for tap in failing],
        {tap.pair.name: tap.columns["error"] for tap in failing[:1]},
        {tap.pair.name: tap.rules.floor.token for tap in failing[:1]},
    )
    places = _Places(alignment.requests, gathered)
    loose = tuple(item for item in alignment.unpaired if item.kind != "dtype" or not policy.allow_other_dtype)
    missing = [tap.pair.name for tap in gathered if golden is not None and "to_golden" not in tap.columns]
    notes = alignment.notes
    if missing:
        notes += (f"the golden holds no {', '.join(missing)}: judged by the floor",)
    return Comparison(
        sides=(str(reader.a.path), str(reader.b.path)),
        backends=(_backend(a), _backend(b)),
        dtypes=(a.dtype, b.dtype),
        modes=(a.mode, b.mode),
        target=a.target.name,
        gate=_overall_gate(gathered),
        golden=str(golden.path) if golden is not None else None,
        requests=len(alignment.requests),
        tokens=sum(pair.rows for pair in alignment.requests),
        taps=results,
        unpaired=loose,
        notes=notes,
        proof_problems=tuple(
            f"side {side}: {text}"
            for side, manifest in (("a", a), ("b", b))
            for text in manifest.backend.problems
            or (() if manifest.backend.valid else ("the trace is marked invalid",))
        ),
        identity=identity_differences(a, b),
        first_bad=places.place(first) if first is not None else None,
        worst=places.worst(),
        heat=HeatMap.of({tap.pair.name: tap.columns["error"] for tap in gathered}),
        implementation=reader.implementation,
        seconds=time.perf_counter() - began,
    )


def _backend(manifest: Manifest) -> str:
    """`delta+conv` as requested."""
    return "+".join(manifest.backend.requested.get(part, "?") for part in ("delta", "conv"))


def _overall_gate(gathered: Sequence[_Tap]) -> Gate:
    """`kernel` as soon as one tap was rounded to less than float32."""
    return "kernel" if any(tap.rules.gate == "kernel" for tap in gathered) else "semantic"


@dataclass
class _Places:
    """Finds tokens by tap, request and position."""

    requests: tuple[RequestPair, ...]
    taps: Sequence[_Tap]

    def place(self, at: FirstBad) -> TokenPlace:
        """All that is known of one token at one tap."""
        tap = next(tap for tap in self.taps if tap.pair.name == at.tap)
        entry = self.requests[at.request].a
        error, gap = (float(tap.columns[name][at.request][at.token]) for name in ("error", "gap"))
        return TokenPlace(
            tap=at.tap,
            layer=tap.pair.layer,
            request=entry.id,
            token=at.token,
            token_id=entry.token_ids[at.token],
            text=entry.token_texts[at.token] if at.token < len(entry.token_texts) else "",
            error=error,
            cosine=1 - gap,
            times_limit=float(self._times_limit(tap, at.request)[at.token]),
        )

    def worst(self) -> tuple[TokenPlace, ...]:
        """The tokens furthest beyond (or nearest to) their limit, each with the tap where it is worst."""
        ranked: list[tuple[float, int, int, int]] = []
        for request in range(len(self.requests)):
            times = np.stack([self._times_limit(tap, request) for tap in self.taps])
            peak = times.max(axis=0)
            for token in np.argsort(-peak, kind="stable")[:WORST_TOKENS]:
                ranked.append((-float(peak[token]), request, int(token), int(times[:, token].argmax())))
        ranked = [entry for entry in sorted(ranked) if entry[0] < 0][:WORST_TOKENS]
        return tuple(
            self.place(FirstBad(self.taps[tap].pair.name, request, token))
            for _, request, token, tap in ranked
        )

    def _times_limit(self, tap: _Tap, request: int) -> NDArray[np.floating]:
        """[tokens] what was held against the limit, over that limit."""
        rows = {name: values[request] for name, values in tap.columns.items()}
        values, _, limit, _ = TapEvidence(
            error=rows["error"],
            cosine_gap=rows["gap"],
            to_golden=rows.get("to_golden"),
            base_to_golden=rows.get("base_to_golden"),
        ).measure(tap.rules)
        return ratio(np.asarray(values, np.float64), np.float64(limit.token))
