"""From the numbers of a comparison's taps to its record: verdicts, controls, places. No tensor is read here."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from parity.comparison.align import Alignment, RequestPair, TapPair, identity_differences
from parity.comparison.records import (
    Comparison,
    ControlResult,
    Escalation,
    HeatMap,
    KeptTokens,
    TapResult,
    TokenPlace,
)
from parity.comparison.sketch import escalations
from parity.comparison.tolerance import (
    CONTROLS,
    FirstBad,
    Gate,
    Judgement,
    Policy,
    TapEvidence,
    TapRules,
    data_faults,
    first_bad,
    judge_tap,
    rms,
)
from parity.comparison.units import PART_COLUMNS, TapPart, WorkUnit, quantile
from parity.kernel.sums import FIELDS, OUTLIER_TIMES, Implementation, pick_outliers, ratio
from parity.reports.record import Outcome
from parity.tracing.trace import Manifest, Trace

WORST_TOKENS = 10
ESTIMATED = "of a sketch errors are estimates, within .7 to 1.4 of the truth; what it does not tell is nan"
_MAX = FIELDS.index("max_abs")
_HYSTERESIS = 1.5
"""How far a channel's rms may be on the wrong side of the outlier limit before the tap is read again."""


@dataclass(kw_only=True)
class TapAccumulator:
    """What is gathered of one tap while the units go by, in their order."""

    pair: TapPair
    rules: TapRules
    columns: KeptTokens
    """[3 or 5, tokens] the first or all of `merging.COLUMNS`."""
    golden: bool
    """Whether the last two columns are filled."""
    outliers: tuple[int, ...]
    recomputed: bool = False
    totals: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(FIELDS)))
    channels: NDArray[np.float64] | None = None
    ulp: NDArray[np.int64] | None = None
    zeros: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))
    rows: int = 0
    control: dict[str, list[TapEvidence]] = field(default_factory=lambda: {name: [] for name in CONTROLS})

    def column(self, name: str) -> KeptTokens:
        """[tokens] one column over all requests."""
        values: KeptTokens = self.columns[PART_COLUMNS.index(name)]
        return values

    def evidence(self) -> TapEvidence:
        """The columns the gates judge."""
        return TapEvidence(
            error=self.column("error"),
            cosine_gap=self.column("gap"),
            to_golden=self.column("to_golden") if self.golden else None,
            base_to_golden=self.column("base_to_golden") if self.golden else None,
        )

    def add(self, unit: WorkUnit, part: TapPart) -> None:
        """Add one unit; the sums depend on the order of these calls."""
        self.columns[: len(part.columns), unit.first_row : unit.first_row + unit.rows] = part.columns
        largest = np.maximum(self.totals[_MAX], part.totals[_MAX])  # NaN of a sketch stays NaN
        self.totals = self.totals + part.totals
        self.totals[_MAX] = largest
        self.channels = part.channels if self.channels is None else self.channels + part.channels
        if part.ulp is not None:
            self.ulp = part.ulp if self.ulp is None else self.ulp + part.ulp
        self.zeros = self.zeros + part.zeros
        for name, values in part.controls.items():
            golden = (values[2], values[3]) if len(values) > 2 else (None, None)
            self.control[name].append(
                TapEvidence(
                    error=values[0], cosine_gap=values[1], to_golden=golden[0], base_to_golden=golden[1]
                )
            )
        self.rows += unit.rows

    def again(self) -> "TapAccumulator":
        """The same tap, nothing gathered yet, with the outliers that the first pass found."""
        return TapAccumulator(
            pair=self.pair,
            rules=self.rules,
            columns=self.columns,
            golden=self.golden,
            outliers=self.outliers,
            recomputed=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonInputs:
    """What was compared, and how."""

    a: Trace
    b: Trace
    golden: Trace | None
    alignment: Alignment
    policy: Policy
    notes: tuple[str, ...]
    """What a reader should know beside the alignment's notes."""
    implementation: Implementation | Literal["sketch"]
    began: float
    """`time.perf_counter()` at the beginning."""


def outliers_wrong(tap: TapAccumulator) -> bool:
    """Whether the whole pass shows other massive channels than the sample did (a borderline one may pass)."""
    if tap.channels is None or not tap.rows or np.isnan(tap.channels).any():  # a sketch knows no channels
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


def _controls(tap: TapAccumulator) -> tuple[ControlResult, ...]:
    """Each control's answer at this tap."""
    results = []
    for name, evidence in tap.control.items():
        if not evidence:
            results.append(ControlResult(name=name, refused=None, because="it does not change this data"))
            continue
        joined = TapEvidence(
            error=np.concatenate([part.error for part in evidence]),
            cosine_gap=np.concatenate([part.cosine_gap for part in evidence]),
            to_golden=_concatenate([part.to_golden for part in evidence]),
            base_to_golden=_concatenate([part.base_to_golden for part in evidence]),
        )
        judgement = judge_tap(joined, tap.rules)
        results.append(
            ControlResult(name=name, refused=judgement.outcome == "fail", because=judgement.because)
        )
    return tuple(results)


def _concatenate(parts: Sequence[NDArray[np.floating] | None]) -> NDArray[np.floating] | None:
    """The parts in one, or None where one is missing."""
    known = [part for part in parts if part is not None]
    return np.concatenate(known) if known and len(known) == len(parts) else None


def _result(tap: TapAccumulator, policy: Policy) -> TapResult:
    """Everything about one tap in numbers, with its verdict."""
    pair, rules, gap, robust_gap = tap.pair, tap.rules, tap.column("gap"), tap.column("robust_gap")
    t = dict(zip(FIELDS, tap.totals.tolist(), strict=True))
    # Elements that both sides hold finite: means are taken over these.
    nonfinite = (int(t["bad_a"]), int(t["bad_b"]), int(t["bad_both"]))
    count = max(1, tap.rows * pair.width - nonfinite[0] - nonfinite[1] + nonfinite[2])
    # The verdict: the gate, whether it had power, and faults that no limit excuses.
    judgement, controls = judge_tap(tap.evidence(), rules), _controls(tap)
    faults = data_faults(
        nonfinite=nonfinite,
        zero_one_side=int(tap.zeros[2]),
        dtypes=(pair.dtype_a, pair.dtype_b),
        policy=policy,
    )
    errors = tap.column("error")
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
        cosine_p01=1 - quantile(gap, 0.99),
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
        outliers=tap.outliers,
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
    variance = squares / count - (total / count) ** 2
    return math.sqrt(variance) if variance > 0 else 0.0 * variance


def comparison_of(inputs: ComparisonInputs, gathered: Sequence[TapAccumulator]) -> Comparison:
    """Put the parts together and find where the difference begins."""
    a, b, golden, alignment = inputs.a.manifest, inputs.b.manifest, inputs.golden, inputs.alignment
    results = tuple(_result(tap, inputs.policy) for tap in gathered)
    places = _TokenPlaces(alignment.requests, gathered)
    # Where it begins, and what a reader has to know about how it was judged.
    first = _begins(gathered, results, places)
    other_dtype = inputs.policy.allow_other_dtype
    missing = [tap.pair.name for tap in gathered if golden is not None and not tap.golden]
    notes = alignment.notes + inputs.notes
    further = escalations(alignment.requests, results) if inputs.implementation == "sketch" else ()
    if inputs.implementation == "sketch":
        notes += (ESTIMATED, *(_asked_for(each) for each in further))
    if missing:
        notes += (f"the golden holds no {', '.join(missing)}: judged by the floor",)
    # What was compared, its verdicts, and what could not be paired.
    return Comparison(
        sides=(str(inputs.a.path), str(inputs.b.path)),
        backends=(backend_of(a), backend_of(b)),
        dtypes=(a.dtype, b.dtype),
        modes=(a.mode, b.mode),
        target=a.target.name,
        gate=_overall_gate(gathered),
        golden=str(golden.path) if golden is not None else None,
        requests=len(alignment.requests),
        tokens=sum(pair.rows for pair in alignment.requests),
        taps=results,
        unpaired=tuple(item for item in alignment.unpaired if item.kind != "dtype" or not other_dtype),
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
        heat=HeatMap.of(
            {tap.pair.name: places.split_by_request(tap, "error") for tap in gathered},
            texts=[pair.a.token_texts for pair in alignment.requests],
        ),
        implementation=inputs.implementation,
        seconds=time.perf_counter() - inputs.began,
        escalations=further,
    )


def _asked_for(escalation: Escalation) -> str:
    """A full capture in words."""
    first, last = escalation.tokens
    taps = " ".join(f"--taps '{tap}'" for tap in escalation.taps)
    return (
        f"to see more, capture request {escalation.request} in full with {taps} --max-tokens {last + 1}: "
        f"tokens {first} to {last} are out, or may be"
    )


def _begins(
    gathered: Sequence[TapAccumulator], results: Sequence[TapResult], places: "_TokenPlaces"
) -> FirstBad | None:
    """Where the difference begins. A tap that fails only by its dtype has no first token."""
    failing = [
        tap
        for tap, result in zip(gathered, results, strict=True)
        if result.judgement.outcome == "fail" or any(result.nonfinite) or result.zero_rows[2]
        if result.outcome == "fail"
    ]
    return first_bad(
        [tap.pair.name for tap in failing],
        {tap.pair.name: places.split_by_request(tap, "error") for tap in failing[:1]},
        {tap.pair.name: tap.rules.floor.token for tap in failing[:1]},
    )


def backend_of(manifest: Manifest) -> str:
    """`delta+conv` as requested."""
    return "+".join(manifest.backend.requested.get(part, "?") for part in ("delta", "conv"))


def _overall_gate(gathered: Sequence[TapAccumulator]) -> Gate:
    """`kernel` as soon as one tap was rounded to less than float32."""
    return "kernel" if any(tap.rules.gate == "kernel" for tap in gathered) else "semantic"


@dataclass
class _TokenPlaces:
    """Finds tokens by tap, request and position."""

    requests: tuple[RequestPair, ...]
    taps: Sequence[TapAccumulator]

    def split_by_request(self, tap: TapAccumulator, name: str) -> list[KeptTokens]:
        """One column, an array a request."""
        ends = np.cumsum([pair.rows for pair in self.requests])
        return np.split(tap.column(name), ends[:-1])

    def place(self, at: FirstBad) -> TokenPlace:
        """All that is known of one token at one tap."""
        tap = next(tap for tap in self.taps if tap.pair.name == at.tap)
        entry = self.requests[at.request].a
        row = sum(pair.rows for pair in self.requests[: at.request]) + at.token
        error, gap = (float(tap.column(name)[row]) for name in ("error", "gap"))
        return TokenPlace(
            tap=at.tap,
            layer=tap.pair.layer,
            request=entry.id,
            token=at.token,
            token_id=entry.token_ids[at.token],
            text=entry.token_texts[at.token] if at.token < len(entry.token_texts) else "",
            error=error,
            cosine=1 - gap,
            times_limit=float(self._times_limit(tap, slice(row, row + 1))[0]),
        )

    def worst(self) -> tuple[TokenPlace, ...]:
        """The tokens furthest beyond (or nearest to) their limit, each with the tap where it is worst."""
        ranked: list[tuple[float, int, int, int]] = []
        start = 0
        for request, pair in enumerate(self.requests):
            times = np.stack([self._times_limit(tap, slice(start, start + pair.rows)) for tap in self.taps])
            start, peak = start + pair.rows, times.max(axis=0)
            for token in np.argsort(-peak, kind="stable")[:WORST_TOKENS]:
                ranked.append((-float(peak[token]), request, int(token), int(times[:, token].argmax())))
        ranked = [entry for entry in sorted(ranked) if entry[0] < 0][:WORST_TOKENS]
        return tuple(
            self.place(FirstBad(self.taps[tap].pair.name, request, token))
            for _, request, token, tap in ranked
        )

    def _times_limit(self, tap: TapAccumulator, rows: slice) -> NDArray[np.floating]:
        """[tokens] what was held against the limit, over that limit."""
        whole = tap.evidence()
        part = TapEvidence(
            error=whole.error[rows],
            cosine_gap=whole.cosine_gap[rows],
            to_golden=None if whole.to_golden is None else whole.to_golden[rows],
            base_to_golden=None if whole.base_to_golden is None else whole.base_to_golden[rows],
        )
        values, _, limit, _ = part.measure(tap.rules)
        return ratio(np.asarray(values, np.float64), np.float64(limit.token))
