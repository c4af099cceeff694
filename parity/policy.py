"""A policy: a user's limits per tap, and what `parity gate` holds a report against. One file for both.

An unknown key is an error that names the nearest known one.

    taps:
      "layer.*.out": {min_cosine: 0.9999, mean_cosine: 0.99999}
    gate:
      skips: ["backends.cuda"]                    # what may be skipped; without the list, everything may
      findings:
        "kernels.bf16.gate": {required: true, evidence: {"lowest cosine": {min: 0.999}}}
      expected:
        - {finding: loading.wrapper, because: "transformers#123", until: 2027-01-31}
"""

from collections.abc import Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from parity.reading import read_strict_yaml, validate_data


class FrozenModel(BaseModel):
    """Rules do not change after they were read, and an unknown key is a mistake, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Bounds(FrozenModel):
    """What one piece of evidence, a number, must lie within. Both ends are allowed; nan never is."""

    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Bounds":
        if self.min is None and self.max is None:
            raise ValueError("bounds need min, max or both")
        return self


class FindingRules(FrozenModel):
    """What the findings that a glob names must look like."""

    required: bool = False
    """Whether at least one finding of that name must be there and must not be skipped."""
    warn: Literal["pass", "fail"] = "pass"
    """What a warning counts as."""
    evidence: dict[str, Bounds] = {}
    """Bounds by the name of the evidence, as the report writes it: `lowest cosine`."""


class ExpectedFailure(FrozenModel):
    """A failure that is known, with its reason and the last day on which it is accepted."""

    finding: str
    """Name or glob."""
    because: str = Field(min_length=1)
    """Why it is accepted, for those who read the gate: an issue, a sentence."""
    until: date
    """The last day. From the next day on the failure fails."""
    fault: str | None = None
    """The fault that is expected; a failure of another kind is not this one."""


class GateRules(FrozenModel):
    """What `parity gate` holds a report against, beside the limits per tap."""

    skips: tuple[str, ...] | None = None
    """Globs of findings that may be skipped. None: all may, and the gate says how many were."""
    findings: dict[str, FindingRules] = {}
    """By name or glob. Every entry that matches a finding counts."""
    expected: tuple[ExpectedFailure, ...] = ()
    worse_than_baseline: float = Field(default=2.0, ge=1)
    """How many times a tap's error in the baseline (rms and worst token) is allowed. 2 is the kernel gate's
    allowance for benign pairs (`tolerance.GOLDEN_RATIO`): they had 1.2 and 1.6."""
    wiring_changes: Literal["fail", "warn"] = "fail"
    """What a statement about the wiring that differs from the baseline's counts as."""


class TapLimits(FrozenModel):
    """A user's limits for the taps that a glob names. What is set replaces the default judgement."""

    min_cosine: float | None = Field(default=None, ge=-1, le=1)
    """Smallest cosine of any token."""
    mean_cosine: float | None = Field(default=None, ge=-1, le=1)
    relative_l2: float | None = Field(default=None, ge=0)
    """Largest rms over tokens of the judged error."""
    ratio: float | None = Field(default=None, gt=0)
    """How many times the floor, or the golden's benign error, rms and worst token may be."""
    share_of_tokens: float | None = Field(default=None, ge=0, le=1)
    """Share of tokens that may leave their limit; without it none may."""


class Policy(FrozenModel):
    """Limits per tap glob (the first glob that matches counts) and the named exceptions."""

    taps: dict[str, TapLimits] = {}
    allow_nonfinite_at_same_place: bool = False
    """Whether NaN or infinity at the same element of both sides is accepted."""
    allow_other_dtype: bool = False
    """Whether a tap may have another dtype on side B: bfloat16 compared with float32 on purpose."""
    gate: GateRules = GateRules()
    """What `parity gate` holds the report against; a comparison does not read it."""

    def limits(self, tap: str) -> TapLimits | None:
        """The limits of the first glob that matches the tap."""
        return next((limits for glob, limits in self.taps.items() if fnmatchcase(tap, glob)), None)

    @classmethod
    def load(cls, path: Path) -> "Policy":
        """Read a YAML or JSON policy. Raises ParityError, for an unknown key with the nearest known one."""
        return read_strict_yaml(cls, path, "policy")


def policy_from(data: Mapping[str, object], what: str = "policy") -> Policy:
    """A policy from what its file would hold. Raises ParityError as `Policy.load` does."""
    return validate_data(Policy, dict(data), what)


def matches(name: str, globs: Sequence[str] | Mapping[str, object]) -> bool:
    """Whether a name is one of the globs' (case matters, as in tap names)."""
    return any(fnmatchcase(name, glob) for glob in globs)
