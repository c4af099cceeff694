"""By what a difference is judged: floors, gates, policies, negative controls. Arrays in, verdicts out.

The judged error of a token is the larger of its plain and its outlier-robust relative L2. A tap is judged
by the root mean square of that over tokens (each token counts the same) and by its worst token.

- *Semantic gate* (both sides float32 or float64): a real fault is thousands of times the rounding
  difference, so the limits are wide and nothing hides under them.
- *Kernel gate* (native 16-bit or 8-bit dtypes): with a float64 golden, the error is judged by its ratio
  to the reference side's own error; without one by a floor, and then it never rules out a small fault.

    rules = rules_for("layer.3.out", "float32", depth=4)
    judge_tap(TapEvidence(error=errors, cosine_gap=gaps), rules)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from parity.policy import FrozenModel
from parity.policy import Policy as Policy
from parity.policy import TapLimits as TapLimits
from parity.reading import read_strict_yaml
from parity.reports.record import Outcome

FloatArray = NDArray[np.floating]
Gate = Literal["semantic", "kernel"]

GROWTH = 1.03
"""Factor by which rounding grows per layer: the C of NVIDIA BioNeMo's bound k * C**depth * eps
(docs/evidence.md, "Growth with depth"); 24 layers of a residual MLP with attention grew by 1.03 to 1.05 here."""
WIDE_K, NARROW_K = 4.0, 2.0
"""The k of that bound, in units of the dtype's eps. Measured rms over tokens, without two massive channels:
float32 1.5 to 3.7 eps (layers 0 to 23, against float64 and against 8-way split sums), bfloat16 and float16
.4 to 1.5 eps. Random hybrid, torch against fla-interpreted and against decoding: float32 .3 to .8 eps in the
residual stream and 2.6 to 3.4 at gdn.out, bfloat16 .15 to .4 and .7 to 1.1."""
WORST_TOKEN = 4.0
"""Worst token over rms of benign pairs: 1.3 to 3 in residual streams, 2.5 to 5.7 at gdn.out (same models)."""
OPERATOR_TIMES = 2.0
"""The delta rule's output is read before its norm: where little is read, rounding weighs more. A benign pair
(torch against fla-interpreted, bfloat16, embedded target, 14 tokens) was 6 eps apart at layer 9, where other taps
of that depth are 1 to 1.5. In float32 a random hybrid of 8 layers (decoded, or by a recurrence, against chunks) was
57 eps apart there, 119 at its worst token: 1.6 of the limit without this factor."""
CEILING = 0.5
"""No limit on a relative error exceeds this, however deep the model: at 1 a token has nothing in common."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Of a tap's rms over tokens, and of its worst token."""

    rms: float
    token: float


FLOOR_MARGIN: dict[Gate, Limit] = {"semantic": Limit(8, 4), "kernel": Limit(2, 2.5)}
"""How many floors are allowed. In float32 the smallest injected faults are 300 floors and more (docs/evidence.md,
"Sizes of faults in float32"), so 8 hides none; in 16 bits the limits are those of GOLDEN_RATIO in units of rms: 2, and
5 * 2."""
GOLDEN_RATIO: dict[Gate, Limit] = {"semantic": Limit(16, 40), "kernel": Limit(2, 5)}
"""How many times the reference side's error to the golden is allowed. 2 is FlashAttention's test rule and
msprobe's RMSE ratio, 5 its middle limit for maxima; benign bf16 pairs had 1.2 and 1.6, a 1 % error in
float32 5,000 (docs/evidence.md)."""
_AT_ONCE = 1 << 20
_EPS = {
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
}


def eps_of(dtype: str) -> float:
    """The dtype's eps, which is also the largest relative size of one ULP."""
    return _EPS[dtype]


def coarsest(*dtypes: str) -> str:
    """The dtype with the largest eps: what a pair's rounding difference is made of."""
    return max((dtype for dtype in dtypes if dtype in _EPS), key=eps_of)


def gate_of(dtype: str) -> Gate:
    """Which gate judges a pair whose coarsest dtype this is."""
    return "semantic" if eps_of(dtype) <= eps_of("float32") else "kernel"


class TapFloor(FrozenModel):
    """The benign relative L2 of one tap: rms over tokens, and the worst token's."""

    rms: float = Field(ge=0)
    token: float = Field(ge=0)


class Floor(FrozenModel):
    """Benign differences that were measured: a rerun, another batch size, another order of sums."""

    name: str
    measured_on: str
    """Hardware, versions and prompts: a floor says nothing about another machine."""
    taps: dict[str, TapFloor]

    @classmethod
    def from_errors(cls, name: str, errors: Mapping[str, FloatArray], measured_on: str) -> "Floor":
        """From each tap's [tokens] judged errors of one benign pair."""
        return cls(
            name=name,
            measured_on=measured_on,
            taps={
                tap: TapFloor(rms=rms(values), token=float(np.max(values, initial=0.0)))
                for tap, values in errors.items()
            },
        )

    @classmethod
    def load(cls, path: Path) -> "Floor":
        """Read a floor that `model_dump_json` wrote. Raises ParityError."""
        return read_strict_yaml(cls, path, "floor")

    def or_larger(self, other: "Floor") -> "Floor":
        """Both floors in one: the larger of each tap."""
        taps = dict(other.taps)
        for tap, mine in self.taps.items():
            theirs = taps.get(tap, mine)
            taps[tap] = TapFloor(rms=max(mine.rms, theirs.rms), token=max(mine.token, theirs.token))
        places = "; ".join(dict.fromkeys((self.measured_on, other.measured_on)))
        return Floor(name=f"{self.name} or {other.name}", measured_on=places, taps=taps)


def hardware(environment: Mapping[str, str]) -> str:
    """What a trace was computed on, from its manifest's environment: the processor, and each CUDA device."""
    devices = [environment[name] for name in sorted(environment) if name.startswith("cuda:")]
    return ", ".join([environment.get("cpu", "an unknown machine"), *devices])


def rms(values: FloatArray) -> float:
    """Root mean square in float64; 0 for none. A million values at a time: they may lie in a file."""
    total = sum(
        float(np.sum(np.square(values[at : at + _AT_ONCE], dtype=np.float64)))
        for at in range(0, values.size, _AT_ONCE)
    )
    return float(np.sqrt(total / values.size)) if values.size else 0.0


def default_floor(dtype: str, depth: int) -> TapFloor:
    """What rounding alone does after `depth` layers: k * GROWTH**depth * eps, never below one ULP."""
    size = (WIDE_K if gate_of(dtype) == "semantic" else NARROW_K) * GROWTH**depth * eps_of(dtype)
    return TapFloor(rms=size, token=WORST_TOKEN * size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TapRules:
    """All that one tap is judged by."""

    gate: Gate
    dtype: str
    """The coarsest dtype that rounded either side."""
    floor: TapFloor
    floor_name: str
    limits: TapLimits | None = None

    @property
    def limit(self) -> Limit:
        """Largest relative error allowed without a golden: floor times margin, capped."""
        margin = self.ratio(FLOOR_MARGIN)
        return Limit(min(CEILING, self.floor.rms * margin.rms), min(CEILING, self.floor.token * margin.token))

    def ratio(self, defaults: Mapping[Gate, Limit]) -> Limit:
        """The allowed multiples: the policy's one number, or the gate's default."""
        if self.limits is not None and self.limits.ratio is not None:
            return Limit(self.limits.ratio, self.limits.ratio)
        return defaults[self.gate]


def rules_for(
    tap: str, dtype: str, depth: int, floor: Floor | None = None, policy: Policy | None = None
) -> TapRules:
    """The rules of one tap. A measured floor counts where it is larger than what rounding alone explains:
    a rerun that repeats exactly says nothing about another kernel's order of additions."""
    base, name = default_floor(dtype, depth), f"default, {dtype}, depth {depth}"
    if tap.endswith(".gdn.out"):
        base = TapFloor(rms=OPERATOR_TIMES * base.rms, token=OPERATOR_TIMES * base.token)
    measured = floor.taps.get(tap) if floor is not None else None
    if floor is not None and measured is not None:
        larger = TapFloor(rms=max(measured.rms, base.rms), token=max(measured.token, base.token))
        base, name = larger, name if larger == base else f"measured: {floor.name}"
    return TapRules(
        gate=gate_of(dtype),
        dtype=dtype,
        floor=base,
        floor_name=name,
        limits=policy.limits(tap) if policy is not None else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TapEvidence:
    """What was measured at one tap, over all tokens of all requests. inf marks a token that is not finite."""

    error: FloatArray
    """[tokens] judged error of a against b."""
    cosine_gap: FloatArray
    """[tokens] 1 - cosine."""
    to_golden: FloatArray | None = None
    """[tokens] judged error of a against the golden."""
    base_to_golden: FloatArray | None = None
    """[tokens] judged error of b against the golden."""

    def measure(self, rules: TapRules) -> tuple[FloatArray, float, Limit, str]:
        """What is held against the limit: [tokens] values, their rms, the limit, and by what it is judged."""
        if self.to_golden is None or self.base_to_golden is None:
            return self.error, rms(self.error), rules.limit, f"floor ({rules.floor_name})"
        ulp = eps_of(rules.dtype)
        ratios = self.to_golden / np.maximum(self.base_to_golden, ulp)
        whole = rms(self.to_golden) / max(rms(self.base_to_golden), ulp)
        return ratios, whole, rules.ratio(GOLDEN_RATIO), "ratio to golden"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """One tap's verdict, and how far it is from the limit."""

    outcome: Outcome
    judged_by: str
    because: str
    rms: float
    worst: float
    limit: Limit
    times_floor: float
    """Judged error over the floor (or over the golden's benign error): larger of rms and worst token."""
    share_outside: float
    """Share of tokens beyond their limit."""


def judge_tap(evidence: TapEvidence, rules: TapRules) -> Judgement:
    """Hold one tap's evidence against its rules. `skipped` where there is no token."""
    values, whole, limit, judged_by = evidence.measure(rules)
    worst = float(np.max(values, initial=0.0))
    share = float(np.mean(values > limit.token)) if values.size else 0.0
    scale = Limit(1.0, 1.0) if evidence.to_golden is not None else Limit(rules.floor.rms, rules.floor.token)
    reasons, policy = _broken(evidence, rules, (whole, worst, share), limit)
    outcome: Outcome = "skipped" if not values.size else "fail" if reasons else "pass"
    because = "; ".join(reasons) or ("within the limits" if values.size else "no token was compared")
    return Judgement(
        outcome=outcome,
        judged_by=f"policy, {judged_by}" if policy else judged_by,
        because=because,
        rms=whole,
        worst=worst,
        limit=limit,
        times_floor=max(whole / scale.rms, worst / scale.token),
        share_outside=share,
    )


def _broken(
    evidence: TapEvidence, rules: TapRules, measured: tuple[float, float, float], limit: Limit
) -> tuple[list[str], bool]:
    """The limits that are broken, in words, and whether a policy set any of those that were applied."""
    (whole, worst, share), chosen = measured, rules.limits or TapLimits()
    gaps, reasons = evidence.cosine_gap, []
    lowest, mean = 1 - float(np.max(gaps, initial=0.0)), 1 - float(np.mean(gaps)) if gaps.size else 1.0
    direct = (chosen.min_cosine, chosen.mean_cosine, chosen.relative_l2)
    if chosen.min_cosine is not None and not lowest >= chosen.min_cosine:
        reasons.append(f"minimum cosine {lowest:.6g} below {chosen.min_cosine:g}")
    if chosen.mean_cosine is not None and not mean >= chosen.mean_cosine:
        reasons.append(f"mean cosine {mean:.6g} below {chosen.mean_cosine:g}")
    if chosen.relative_l2 is not None and not rms(evidence.error) <= chosen.relative_l2:
        reasons.append(f"relative L2 {rms(evidence.error):.3g} above {chosen.relative_l2:g}")
    if (allowed := chosen.share_of_tokens) is not None:
        if share > allowed:
            reasons.append(f"{share:.3%} of tokens beyond {limit.token:.3g}, {allowed:.3%} allowed")
    elif chosen.ratio is not None or all(value is None for value in direct):
        if not whole <= limit.rms:
            reasons.append(f"rms {whole:.3g} above {limit.rms:.3g}")
        if not worst <= limit.token:
            reasons.append(f"worst token {worst:.3g} above {limit.token:.3g}")
    return [*reasons, *_broken_reference(evidence, rules)], rules.limits is not None


def _broken_reference(evidence: TapEvidence, rules: TapRules) -> list[str]:
    """A ratio to the golden says nothing where the reference itself is wrong: then b is named, not passed."""
    if evidence.to_golden is None or evidence.base_to_golden is None:
        return []
    own, other = rms(evidence.base_to_golden), rms(evidence.to_golden)
    back, limit = own / max(other, eps_of(rules.dtype)), rules.ratio(GOLDEN_RATIO).rms
    if not back <= limit:
        return [
            f"the reference is {back:.3g} times as far from the golden as the candidate, {limit:.3g} allowed"
        ]
    if rules.gate == "semantic" and not own <= rules.limit.rms:
        return [f"the reference itself is {own:.3g} from the golden, {rules.limit.rms:.3g} allowed"]
    return []


def data_faults(
    *,
    nonfinite: tuple[int, int, int],
    zero_one_side: int,
    dtypes: tuple[str, str],
    policy: Policy | None = None,
) -> tuple[str, ...]:
    """Rules that no tolerance softens, in words: `nonfinite` counts elements of a, of b, and of both at once;
    `zero_one_side` the tokens whose whole row is zero on one side only."""
    policy, faults = policy or Policy(), []
    in_a, in_b, same = nonfinite
    if in_a + in_b > 2 * same:
        faults.append(f"not finite: {in_a} elements in a, {in_b} in b, {same} of them at the same place")
    elif same and not policy.allow_nonfinite_at_same_place:
        faults.append(f"not finite on both sides: {same} elements at the same place")
    if zero_one_side:
        faults.append(f"{zero_one_side} rows are all zero on one side only")
    if dtypes[0] != dtypes[1] and not policy.allow_other_dtype:
        faults.append(f"{dtypes[0]} in a, {dtypes[1]} in b")
    return tuple(faults)


@dataclass(frozen=True, slots=True)
class FirstBad:
    """Where a difference begins: the first failing tap in the model's order, and its first token outside."""

    tap: str
    request: int
    """Index of the request in canonical order."""
    token: int
    """Position within that request."""


def first_bad(
    order: Sequence[str], values: Mapping[str, Sequence[FloatArray]], onset: Mapping[str, float]
) -> FirstBad | None:
    """The first tap of `order` (failing taps, as the model computes them) and, in it, the earliest token
    position of any request whose value leaves the tap's `onset`: the floor itself, not the limit, because the
    tap is known to be bad and a fault may grow from little. None for an empty order."""
    if not order:
        return None
    tap = order[0]
    found = [
        (int(np.argmax(row > onset[tap])), index)
        for index, row in enumerate(values[tap])
        if np.any(row > onset[tap])
    ]
    if not found:  # failed by something other than size: the worst token stands for it
        peaks = [(float(np.max(row)), index) for index, row in enumerate(values[tap]) if row.size]
        request = max(peaks)[1]
        return FirstBad(tap, request, int(np.argmax(values[tap][request])))
    token, request = min(found)
    return FirstBad(tap, request, token)


def roll_tokens(b: torch.Tensor) -> torch.Tensor | None:
    """Side B rolled by one token, or None where that changes nothing (one token, equal rows)."""
    return _if_changed(b, torch.roll(b.contiguous().view(_INTEGERS[b.element_size()]), 1, 0))


def shuffle_channels(b: torch.Tensor, seed: int = 0, tries: int = 16) -> torch.Tensor | None:
    """Side B with its channels in another order: the first of `tries` seeded permutations that changes the
    data, or None."""
    codes, generator = b.contiguous().view(_INTEGERS[b.element_size()]), torch.Generator().manual_seed(seed)
    for _ in range(tries if b.shape[1] > 1 else 0):
        order = torch.randperm(b.shape[1], generator=generator).to(b.device)
        changed = _if_changed(b, codes[:, order])
        if changed is not None:
            return changed
    return None


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _if_changed(b: torch.Tensor, codes: torch.Tensor) -> torch.Tensor | None:
    """The codes as b's dtype, unless they are b's own (compared as bits, so that NaN equals itself)."""
    same = torch.equal(codes, b.contiguous().view(codes.dtype))
    return None if same else codes.contiguous().view(b.dtype)


CONTROLS = {"rolled by one token": roll_tokens, "channels shuffled": shuffle_channels}
"""Broken copies of side B that every gate must refuse: one that accepts them has no power."""
