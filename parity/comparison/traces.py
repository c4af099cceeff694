"""Two traces, compared tap by tap and token by token: numbers and verdicts, no words to print.

A unit of rows of one tensor pair is in memory at a time; per token and tap a few numbers stay. Units are added
up in canonical order, so the result does not depend on who computes what first: `merging` shares them out
over ranks and keeps finished ones.

    comparison = compare_traces(Trace.open("candidate"), Trace.open("reference"), golden=None)
    comparison.outcome, comparison.first_bad, comparison.taps[0].cosine_min
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from parity.comparison.align import Alignment, TapPair, align
from parity.comparison.error import token_errors
from parity.comparison.records import Comparison as Comparison
from parity.comparison.records import KeptTokens
from parity.comparison.records import TapResult as TapResult
from parity.comparison.results import (
    ComparisonInputs,
    TapAccumulator,
    backend_of,
    comparison_of,
    outliers_wrong,
)
from parity.comparison.sketch import (
    SKETCH_CONTROLS,
    SketchRows,
    sketch_sides,
    sketch_stats,
    sketched_rules,
)
from parity.comparison.tolerance import CONTROLS, Floor, Policy, coarsest, hardware, rules_for
from parity.comparison.units import (
    PART_COLUMNS,
    RequestSegment,
    TapPart,
    WorkShare,
    WorkUnit,
    kept_columns,
    units_of,
)
from parity.errors import ParityError
from parity.kernel.sums import (
    FIELDS,
    Implementation,
    PairStats,
    channel_mean_square,
    choose,
    pair_stats,
    pick_outliers,
)
from parity.model.training.distributed import Ranks
from parity.tracing.sketched import is_sketch
from parity.tracing.trace import NOT_STATED, Trace

TapRows = torch.Tensor | SketchRows
"""Some rows of one tap of one side."""
ComparisonProgress = Callable[[int, int, str], None]
"""Called with tokens done, tokens in all, and the request that was read last."""
CONTROL_ROWS, CONTROL_ELEMENTS = 256, 1 << 22
"""Rows of each tap on which the negative controls run, and elements of its tensors: enough to show power, no
second full pass, and no copy of much memory where a row is a vocabulary."""
_MAX = FIELDS.index("max_abs")
VERSION = "1"
"""Of what a unit's numbers mean: a comparison that goes on after an update of this package starts afresh."""


def measure_floor(benign: Trace, reference: Trace, *, taps: Sequence[str] | None = None) -> Floor:
    """The floor that two runs of the same model show which differ in nothing that matters.

    Raises ParityError where they do not hold the same tensors of the same weights, or one is not finite: what they
    differ by is no rounding then.
    """
    found = compare_traces(benign, reference, taps=taps)
    reasons = [
        *(f"{item.kind} {item.name}: {item.detail}" for item in found.unpaired),
        *found.proof_problems,
        *found.identity,
        *(f"{tap.tap}: {tap.faults[0]}" for tap in found.taps if tap.faults),
    ]
    if reasons:
        raise ParityError(
            f"a floor measured between {benign.path} and {reference.path}",
            reasons[0],
            "capture the reference again, or in another batch, with the same prompts, taps and weights",
        )
    machines = dict.fromkeys(hardware(side.manifest.environment) for side in (benign, reference))
    return Floor.from_errors(
        benign.path.name, {tap.tap: tap.token_errors for tap in found.taps}, "; ".join(machines)
    )


def compare_traces(
    a: Trace,
    b: Trace,
    *,
    golden: Trace | None = None,
    floor: Floor | None = None,
    policy: Policy | None = None,
    progress: ComparisonProgress | None = None,
    taps: Sequence[str] | None = None,
    threads: int = 1,
    ranks: Ranks | None = None,
    work: Path | None = None,
) -> Comparison:
    """Compare candidate `a` with reference `b`; see `Comparison`. Either may be a sketch trace.

    `golden` is a float64 trace of the same prompts, `floor` measured benign differences, `taps` names or
    globs. `ranks` (`parity.model.training.distributed.join`) share the work; each gets the whole result, the
    same on any
    number of them. In the folder `work` finished units are kept until the end, so that an interrupted comparison
    goes on. Raises NothingComparable where the two share nothing, ParityError for an unusable golden.
    """
    began = time.perf_counter()
    policy = policy or Policy()
    alignment = align(a, b, taps)
    sketched = is_sketch(a) or is_sketch(b)
    # What belongs together, and whether the golden can judge it.
    golden_ids = _golden_requests(golden, a, b, alignment, sketched) if golden is not None else {}
    held = [golden is not None and _holds(golden, pair) for pair in alignment.taps]
    rows = [pair.rows for pair in alignment.requests]
    columns = kept_columns(len(alignment.taps), len(PART_COLUMNS) if any(held) else 3, sum(rows))
    first = alignment.requests[0]
    # For each tap its limits, and the outlier channels of its first rows.
    gathered = []
    for index, pair in enumerate(alignment.taps):
        dtype = coarsest(pair.dtype_a, pair.dtype_b, a.manifest.dtype, b.manifest.dtype)
        rules = rules_for(pair.name, dtype, a.depth(pair.name), floor, policy)
        chosen: tuple[int, ...] = ()
        if sketched:
            rules = sketched_rules(rules, (pair.dtype_a, pair.dtype_b))
        else:
            chosen = pick_outliers(channel_mean_square(b.tensor(first.b.id, pair.name)[: first.rows]))
        gathered.append(
            TapAccumulator(
                pair=pair, rules=rules, columns=columns[index], golden=held[index], outliers=chosen
            )
        )
    # The first pass over all rows, shared out in units.
    width = sum(pair.width for pair in alignment.taps)
    reader = _Reader(
        a=a,
        b=b,
        golden=golden,
        golden_ids=golden_ids,
        alignment=alignment,
        implementation="sketch" if sketched else choose(8 * sum(rows) * width),
        threads=threads,
    )
    shared = WorkShare(ranks=ranks or Ranks(), folder=work, fingerprint=_fingerprint(reader, gathered))
    reader.gather(gathered, shared, progress)
    # Where the first rows misled about outlier channels, that tap is read again.
    wrong = [outliers_wrong(tap) for tap in gathered]
    gathered = [tap.again() if again else tap for tap, again in zip(gathered, wrong, strict=True)]
    reader.gather([tap for tap in gathered if tap.recomputed], shared, progress, "-again")
    shared.clear()
    inputs = ComparisonInputs(
        a=a,
        b=b,
        golden=golden,
        alignment=alignment,
        policy=policy,
        notes=_floor_notes(floor, a, b) + _golden_notes(golden, a, b),
        implementation=reader.implementation,
        began=began,
    )
    return comparison_of(inputs, gathered)


def _floor_notes(floor: Floor | None, a: Trace, b: Trace) -> tuple[str, ...]:
    """A floor says nothing about another machine: where it comes from one, that is said."""
    if floor is None or not floor.measured_on:
        return ()
    machines = [hardware(side.manifest.environment) for side in (a, b)]
    known = [machine for machine in machines if machine in floor.measured_on or floor.measured_on in machine]
    if known:
        return ()
    return (
        f"the floor {floor.name!r} was measured on {floor.measured_on}, the sides on {' and '.join(machines)}",
    )


def _holds(golden: Trace, pair: TapPair) -> bool:
    """Whether the golden can judge this tap."""
    return pair.name in golden.taps and golden.tap(pair.name).width == pair.width


def _fingerprint(reader: "_Reader", gathered: Sequence[TapAccumulator]) -> str:
    """Of all that a unit's numbers depend on."""
    sides = [side.digest() for side in (reader.a, reader.b, reader.golden) if side is not None]
    asked = [(tap.pair, tap.outliers, tap.golden) for tap in gathered]
    rows = [(pair.a.id, pair.b.id, pair.rows) for pair in reader.alignment.requests]
    parts = (VERSION, reader.implementation, sides, asked, rows, CONTROL_ROWS, CONTROL_ELEMENTS)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _golden_requests(
    golden: Trace, a: Trace, b: Trace, alignment: Alignment, sketched: bool
) -> dict[str, str]:
    """Id in b to id in the golden. Raises ParityError where the golden is not float64 or lacks a request."""
    if sketched or is_sketch(golden):
        raise ParityError(
            f"{golden.path} as golden of a sketch",
            "a ratio of two estimates, which may be off by two",
            "compare sketches without a golden, and full traces with one",
        )
    # It has to be float64, by independent operators, of the same weights and tokens.
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
            proof.problems[0] if proof.problems else f"a capture on {backend_of(golden.manifest)}",
            "capture it with --backend golden, whose operators are independent recurrences",
        )
    judged, letter = _stating_weights(golden, a, b)
    if golden.manifest.target.weights != judged.manifest.target.weights:
        raise ParityError(
            f"{golden.path} as golden of {judged.path}",
            f"other weights than side {letter}'s",
            f"capture the golden from the checkpoint of side {letter}",
        )
    # Its requests may have other ids and more rows, but none fewer.
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


def _stating_weights(golden: Trace, a: Trace, b: Trace) -> tuple[Trace, str]:
    """The side whose weights are held against the golden's, and its letter: b, or a where b is a dump.

    A dump states no weights. Where one side is known to have the golden's, a dump of others shows: it is further from
    the golden than the rule allows, whichever side it is. Two dumps can both be far, equally, and would pass.
    """
    stated = [(side, letter) for side, letter in ((b, "B"), (a, "A")) if _states_weights(side)]
    if not stated:
        raise ParityError(
            f"{golden.path} as golden of {b.path}",
            "dumps on both sides, which state no weights, so nobody knows whether the golden is of theirs",
            "compare each dump with a trace of `parity capture` and that golden, or leave --golden out",
        )
    return stated[0]


def _states_weights(side: Trace) -> bool:
    """Whether a side says which weights computed it; another tool's dump does not."""
    return side.manifest.target.config_sha256 != NOT_STATED


def _golden_notes(golden: Trace | None, a: Trace, b: Trace) -> tuple[str, ...]:
    """Whose weights were not held against the golden's."""
    silent = [letter for side, letter in ((a, "a"), (b, "b")) if not _states_weights(side)]
    if golden is None or not silent:
        return ()
    return (
        f"side {' and '.join(silent)} states no weights: only the other side's were held against the golden's",
    )


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reads units of the aligned requests and makes their parts."""

    a: Trace
    b: Trace
    golden: Trace | None
    golden_ids: dict[str, str]
    alignment: Alignment
    implementation: Implementation | Literal["sketch"]
    threads: int

    def gather(
        self,
        taps: Sequence[TapAccumulator],
        work: WorkShare,
        progress: ComparisonProgress | None,
        stage: str = "",
    ) -> None:
        """Read every request of these taps once."""
        rows = [pair.rows for pair in self.alignment.requests]
        units = units_of(rows) if taps else ()
        done = 0
        with self._pool(len(taps)) as spread:
            for unit, parts in work.each(units, lambda unit: spread(partial(self._part, unit), taps), stage):
                for tap, part in zip(taps, parts, strict=True):
                    tap.add(unit, part)
                done += unit.rows
                if progress is not None:
                    progress(done, sum(rows), self.alignment.requests[unit.segments[-1].request].a.id)

    @contextmanager
    def _pool(
        self, taps: int
    ) -> Iterator[Callable[[Callable[[TapAccumulator], TapPart], Sequence[TapAccumulator]], list[TapPart]]]:
        """How to do one thing for each tap: in threads where there are as many taps."""
        if self._over_taps(taps):
            with ThreadPoolExecutor(self.threads) as pool:
                yield lambda do, each: list(pool.map(do, each))
        else:
            yield lambda do, each: [do(tap) for tap in each]

    def _over_taps(self, taps: int) -> bool:
        return self.threads > 1 and taps > 1

    def _part(self, unit: WorkUnit, tap: TapAccumulator) -> TapPart:
        """One tap's numbers over one unit."""
        pieces, start = [], unit.first_row
        for segment in unit.segments:
            pieces.append(self._piece(segment, start, tap))
            start += segment.stop - segment.start
        first = pieces[0]
        totals = np.sum([piece.totals for piece in pieces], axis=0)
        totals[_MAX] = np.max([piece.totals[_MAX] for piece in pieces])
        channels = first.channels
        for piece in pieces[1:]:
            channels = channels + piece.channels
        names = [name for name in CONTROLS if any(name in piece.controls for piece in pieces)]
        return TapPart(
            columns=np.concatenate([piece.columns for piece in pieces], axis=1),
            totals=totals,
            channels=channels,
            zeros=np.sum([piece.zeros for piece in pieces], axis=0),
            ulp=None
            if first.ulp is None
            else sum((p.ulp for p in pieces if p.ulp is not None), first.ulp * 0),
            controls={
                name: np.concatenate(
                    [piece.controls[name] for piece in pieces if name in piece.controls], axis=1
                )
                for name in names
            },
        )

    def _piece(self, segment: RequestSegment, row: int, tap: TapAccumulator) -> TapPart:
        """One tensor pair's rows: their statistics, those against the golden, and their share of the controls.

        `row` is the first one's number among all rows of all requests.
        """
        request, name = self.alignment.requests[segment.request], tap.pair.name
        rows = slice(segment.start, segment.stop)
        a: TapRows
        b: TapRows
        gold: torch.Tensor | None = None
        # The rows, or what a sketch knows of them.
        if self.implementation == "sketch":
            a, b = sketch_sides([(self.a, request.a.id), (self.b, request.b.id)], name, rows)
        else:
            a, b = self.a.tensor(request.a.id, name)[rows], self.b.tensor(request.b.id, name)[rows]
        if tap.golden and self.golden is not None:
            gold = self.golden.tensor(self.golden_ids[request.b.id], name)[rows]
        # Per token: the judged error, two cosine gaps, and both sides' errors to the golden.
        stats = self._stats(a, b, tap, full=True)
        columns: list[NDArray[np.floating]] = [token_errors(stats, robust=True)]
        columns += [stats.cosine_gap(), stats.cosine_gap(robust=True)]
        if gold is not None:
            columns += [token_errors(self._stats(side, gold, tap), robust=True) for side in (a, b)]
        # Sums over all tokens, which add up over pieces.
        zero_a, zero_b = stats.zero_rows()
        totals = np.ascontiguousarray(stats.sums).sum(axis=1)
        totals[_MAX] = stats.field("max_abs").max(initial=0.0)
        # Controls run on the tap's first rows alone.
        short = min(a.shape[0], max(0, _control_rows(tap.pair.width) - row))
        base = columns[-1].astype(np.float32)[:short] if gold is not None else None
        return TapPart(
            columns=np.stack(columns).astype(np.float32),
            totals=totals,
            channels=stats.channels() if stats.nodes is not None else np.full((3, tap.pair.width), np.nan),
            zeros=np.array([zero_a.sum(), zero_b.sum(), (zero_a != zero_b).sum()], np.int64),
            ulp=stats.ulp,
            controls=self._controls(a[:short], b[:short], None if gold is None else gold[:short], tap, base)
            if short
            else {},
        )

    def _controls(
        self, a: TapRows, b: TapRows, gold: torch.Tensor | None, tap: TapAccumulator, base: KeptTokens | None
    ) -> dict[str, KeptTokens]:
        """The evidence of each negative control: side B broken, in the place of side B."""
        found = {}
        for name in CONTROLS:
            broken: TapRows | None
            broken = SKETCH_CONTROLS[name](b) if isinstance(b, SketchRows) else CONTROLS[name](b)
            if broken is None:
                continue
            stats = self._stats(a, broken, tap)
            rows: list[NDArray[np.floating]] = [token_errors(stats, robust=True), stats.cosine_gap()]
            if gold is not None and base is not None:
                rows += [token_errors(self._stats(broken, gold, tap), robust=True), base]
            found[name] = np.stack(rows).astype(np.float32)
        return found

    def _stats(self, a: TapRows, b: TapRows, tap: TapAccumulator, full: bool = False) -> PairStats:
        """The kernel, with this comparison's settings, or the estimates of sketches."""
        if isinstance(a, SketchRows) and isinstance(b, SketchRows):
            return sketch_stats(a, b)
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and self.implementation != "sketch"
        return pair_stats(
            a,
            b,
            outliers=tap.outliers,
            full=full,
            implementation=self.implementation,
            threads=1 if self._over_taps(len(self.alignment.taps)) else self.threads,
        )


def _control_rows(width: int) -> int:
    """How many of a tap's first rows the controls run on."""
    return max(2, min(CONTROL_ROWS, CONTROL_ELEMENTS // width))
