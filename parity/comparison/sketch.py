"""Sketch traces beside full ones: compared by estimates, and what to capture in full where they fail.

    stats = sketch_stats(*sketch_sides([(a, "r0"), (b, "r0")], "layer.3.out", slice(0, 100)))

Two sketches, or a sketch and a full trace, are compared through the same gates as two traces. What is squared and
summed is estimated from the projections (|a - b| within .7 to 1.4 of the truth), so limits are widened by SLACK; what
a projection does not tell (largest element, means, channels, ULP) is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from parity.comparison.align import RequestPair
from parity.comparison.records import Escalation, TapResult
from parity.comparison.tolerance import WORST_TOKEN, TapFloor, TapRules
from parity.errors import ParityError
from parity.kernel.sums import FIELDS, PairStats
from parity.model.target.sketching import RESOLUTION, project, signs
from parity.tracing.sketched import SketchTrace
from parity.tracing.trace import Trace

SLACK = 1.4
"""How much further a limit lies for an estimate: 64 signs estimate a norm within .68 to 1.36 of it over
8,192 tokens (docs/evidence.md, "Sketches"), and the worst of many tokens is judged."""
OPEN_FROM = 0.7
"""Share of a full trace's limit above which an estimated token may in truth be beyond it."""
WORST_REQUESTS = 4
"""How many requests a full capture is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchRows:
    """Some rows of one tap of a side, as far as a sketch knows them; float64."""

    norms: torch.Tensor
    """[tokens, 2] of the whole row, and without the massive channels."""
    projection: torch.Tensor
    """[tokens, dims] of the row without the massive channels."""
    massive: torch.Tensor
    """[tokens, k] the massive channels."""
    channels: tuple[int, ...]
    width: int
    seed: int

    @property
    def shape(self) -> torch.Size:
        """Of the states that were sketched."""
        return torch.Size((self.norms.shape[0], self.width))

    def __getitem__(self, rows: slice) -> "SketchRows":
        """Some of the rows."""
        return self._with(self.norms[rows], self.projection[rows], self.massive[rows])

    def _with(self, norms: torch.Tensor, projection: torch.Tensor, massive: torch.Tensor) -> "SketchRows":
        return SketchRows(
            norms=norms,
            projection=projection,
            massive=massive,
            channels=self.channels,
            width=self.width,
            seed=self.seed,
        )

    def keeping(self, channels: Sequence[int]) -> "SketchRows":
        """The same rows with these (of its) channels kept apart; the others are put back into the projection."""
        back = [index for index, channel in enumerate(self.channels) if channel not in channels]
        if not back:
            return self
        kept = [index for index, channel in enumerate(self.channels) if channel in channels]
        values = self.massive[:, back]
        rest = (self.norms[:, 1].square() + values.square().sum(1)).sqrt()
        rows = signs(self.width, self.seed, self.projection.shape[1])[[self.channels[i] for i in back]]
        return SketchRows(
            norms=torch.stack((self.norms[:, 0], rest), 1),
            projection=self.projection + values @ rows.double(),
            massive=self.massive[:, kept],
            channels=tuple(self.channels[index] for index in kept),
            width=self.width,
            seed=self.seed,
        )

    def roll_rows(self) -> "SketchRows | None":
        """Every row in the place of the one before it, or None where that changes nothing."""
        turned = self._with(*(torch.roll(part, 1, 0) for part in (self.norms, self.projection, self.massive)))
        same = torch.equal(turned.projection, self.projection) and torch.equal(turned.norms, self.norms)
        return None if same and torch.equal(turned.massive, self.massive) else turned

    def shuffle_dimensions(self) -> "SketchRows | None":
        """The projection's dimensions and the massive channels in another order: as far as a sketch can tell, the
        states with their channels shuffled. None where that changes nothing."""
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(self.projection.shape[1], generator=generator)
        mixed = self._with(self.norms, self.projection[:, order], self.massive.roll(1, 1))
        same = torch.equal(mixed.projection, self.projection) and torch.equal(mixed.massive, self.massive)
        return None if same else mixed


SKETCH_CONTROLS = {
    "rolled by one token": SketchRows.roll_rows,
    "channels shuffled": SketchRows.shuffle_dimensions,
}
"""The negative controls of `tolerance.CONTROLS`, made of sketches."""


def common_seed(traces: Sequence[Trace]) -> int:
    """The seed of all sketches among the traces. Raises ParityError where they were made with different signs."""
    made = [trace.manifest.sketch for trace in traces if trace.manifest.sketch is not None]
    if any(info != made[0] for info in made):
        raise ParityError(
            f"sketches made alike in {' and '.join(str(trace.path) for trace in traces)}",
            f"{' and '.join(f'{info.dims} dimensions, seed {info.seed}' for info in made)}",
            "capture both with the same version of parity",
        )
    return made[0].seed


def sketch_sides(sides: Sequence[tuple[Trace, str]], tap: str, rows: slice) -> list[SketchRows]:
    """Rows of a tap of several (trace, request id), the same massive channels kept apart: those which every sketch
    among them keeps. Full traces are projected. Raises ParityError for sketches that were made differently."""
    seed = common_seed([trace for trace, _ in sides])
    held = [_read(trace, request, tap, rows, seed) for trace, request in sides]
    known = [set(side.channels) for side in held if side is not None]
    common = tuple(sorted(set.intersection(*known)))
    return [
        _project_rows(trace.tensor(request, tap)[rows], common, seed)
        if side is None
        else side.keeping(common)
        for (trace, request), side in zip(sides, held, strict=True)
    ]


def _read(trace: Trace, request_id: str, tap: str, rows: slice, seed: int) -> SketchRows | None:
    """Rows of a sketch, or None of a full trace."""
    if not isinstance(trace, SketchTrace):
        return None
    held = trace.sketch(request_id, tap)
    norms = held.norms[rows].double()
    return SketchRows(
        norms=norms,
        projection=held.projection[rows].double() * norms[:, 1:],
        massive=held.massive[rows].double(),
        channels=tuple(int(channel) for channel in held.channels),
        width=trace.tap(tap).width,
        seed=seed,
    )


def _project_rows(states: torch.Tensor, channels: tuple[int, ...], seed: int) -> SketchRows:
    """A full side's rows as a sketch."""
    norms, projection, massive = project(states, channels, seed=seed)
    return SketchRows(
        norms=norms,
        projection=projection,
        massive=massive,
        channels=channels,
        width=states.shape[1],
        seed=seed,
    )


def sketch_stats(a: SketchRows, b: SketchRows) -> PairStats:
    """The statistics of two sides that keep the same channels apart: squares estimated, the rest NaN.

    A row that is not finite counts as one bad element, and on both sides as one in each: a sketch does not know
    whether it is the same.
    """
    if a.channels != b.channels or a.shape != b.shape:
        raise ValueError(f"sketches of {a.shape} and {b.shape} that keep {a.channels} and {b.channels} apart")
    bad_a, bad_b = (~torch.isfinite(side.norms).all(1) for side in (a, b))
    good = ~(bad_a | bad_b)
    rest = (a.projection - b.projection).square().sum(1) / a.projection.shape[1]
    whole = rest + (a.massive - b.massive).square().sum(1)
    aa, bb = a.norms.square().T, b.norms.square().T
    unknown = torch.full_like(rest, float("nan"))
    fields = {
        "dot": (aa[0] + bb[0] - whole) / 2,
        "aa": aa[0],
        "bb": bb[0],
        "dd": whole,
        "dot_r": (aa[1] + bb[1] - rest) / 2,
        "aa_r": aa[1],
        "bb_r": bb[1],
        "dd_r": rest,
    }
    known = {name: torch.where(good, values, 0.0) for name, values in fields.items()}
    known |= {"bad_a": bad_a.double(), "bad_b": bad_b.double(), "bad_both": torch.zeros_like(rest)}
    sums = torch.stack([known.get(name, unknown) for name in FIELDS]).numpy()
    return PairStats(0, a.shape[1], a.channels, sums, None, None)


def sketched_rules(rules: TapRules, dtypes: Sequence[str]) -> TapRules:
    """The rules of a tap whose errors are estimated: no floor below what storing a sketch explains, and SLACK."""
    narrow = any(torch.empty(0, dtype=getattr(torch, dtype)).element_size() < 4 for dtype in dtypes)
    stored = RESOLUTION[torch.float16 if narrow else torch.float32]
    floor = TapFloor(
        rms=SLACK * max(rules.floor.rms, stored), token=SLACK * max(rules.floor.token, WORST_TOKEN * stored)
    )
    return replace(rules, floor=floor, floor_name=f"{rules.floor_name}, x {SLACK:g} for estimates")


def escalations(requests: Sequence[RequestPair], results: Sequence[TapResult]) -> tuple[Escalation, ...]:
    """What to capture in full to see what a sketch only estimates: the first tap that fails (or may), in the requests
    whose tokens are furthest out."""
    doubtful = [tap for tap in results if tap.outcome == "fail" or tap.judgement.worst > _open_at(tap)]
    if not doubtful:
        return ()
    tap = doubtful[0]
    ends = np.cumsum([pair.rows for pair in requests])
    found = []
    for pair, errors in zip(requests, np.split(tap.token_errors, ends[:-1]), strict=True):
        out = np.flatnonzero(errors > _open_at(tap))
        if out.size:
            found.append(
                Escalation(
                    taps=_worth_seeing(tap),
                    request=pair.a.id,
                    tokens=(int(out[0]), int(out[-1])),
                    error=float(errors.max()),
                )
            )
    return tuple(sorted(found, key=lambda each: -each.error)[:WORST_REQUESTS])


def _open_at(tap: TapResult) -> float:
    """The estimate from which on a token may be beyond the limit that a full trace has."""
    return OPEN_FROM * tap.judgement.limit.token / SLACK


def _worth_seeing(tap: TapResult) -> tuple[str, ...]:
    """Tap patterns that show where an error at this tap comes from: its layer's, and what the layer was fed."""
    if tap.layer is None:
        return (tap.tap,)
    return (f"layer.{tap.layer - 1}.out" if tap.layer else "embed.out", f"layer.{tap.layer}.*")
