"""What differs between two machines or runs, and what of it can change numbers, in order of suspicion.

A side is a report, a saved `parity env --as json`, a trace or its manifest, or this machine (`here`).
Nothing is measured: a difference listed here can change numbers, and only a comparison says whether it does.

    parity env --diff parity-report/report.json traces/torch.bf16
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from parity.environment import environment
from parity.errors import NothingComparable, ParityError
from parity.reports import schema
from parity.reports.record import Finding, Report, Table, Value, declare_columns
from parity.tracing.trace import MANIFEST, Manifest, read_manifest

HERE = "here"
"""The name of this machine as a side."""
Effect = Literal["numbers", "rounding", "none", "unknown"]
"""numbers: another computation. rounding: the same one in another order or precision. none: no arithmetic
depends on it. unknown: one side does not record it, so it may differ or not."""


@dataclass(frozen=True, slots=True)
class EnvironmentRule:
    """What a difference in the names that a glob matches can do."""

    glob: str
    effect: Effect
    why: str


RULES = (
    EnvironmentRule("run: target", "numbers", "another target was run"),
    EnvironmentRule("run: weights", "numbers", "other values of the parameters"),
    EnvironmentRule("run: dtype", "numbers", "rounding of another size, and 16 bits hide what 32 show"),
    EnvironmentRule("run: loader", "numbers", "another class may load other weights, or leave some random"),
    EnvironmentRule(
        "run: mode", "rounding", "prefill, decoding and blocks take other kernels and another order of sums"
    ),
    EnvironmentRule("run: delta", "numbers", "another implementation of the delta rule ran"),
    EnvironmentRule("run: conv", "numbers", "another implementation of the convolution ran"),
    EnvironmentRule(
        "flash-linear-attention", "numbers", "brings the delta rule's kernels; absent means torch's fallback"
    ),
    EnvironmentRule("fla-core", "numbers", "holds the delta rule's kernels; absent means torch's fallback"),
    EnvironmentRule(
        "causal-conv1d", "numbers", "brings the convolution's kernel; absent means torch's fallback"
    ),
    EnvironmentRule("kernels", "numbers", "may replace operators with others from a hub"),
    EnvironmentRule("$USE_HUB_KERNELS", "numbers", "switches operators from a hub on or off"),
    EnvironmentRule(
        "triton", "numbers", "compiles fla's kernels; some versions make fla unimportable, unnoticed"
    ),
    EnvironmentRule("$TRITON_INTERPRET", "numbers", "kernels run in an interpreter, not on a device"),
    EnvironmentRule("$FLA_*", "numbers", "chooses fla's kernels"),
    EnvironmentRule(
        "transformers", "numbers", "decides, in its own way per version, which kernels run and how they round"
    ),
    EnvironmentRule("torch", "numbers", "kernels of its own, and the fallback's arithmetic"),
    EnvironmentRule("cuda:*", "rounding", "another device has other tile sizes, so another order of sums"),
    EnvironmentRule("cuda", "rounding", "other libraries for matrix products"),
    EnvironmentRule("cudnn", "rounding", "another library of convolution kernels"),
    EnvironmentRule("cpu", "rounding", "another processor may take wider vectors, so another order of sums"),
    EnvironmentRule(
        "cpu capability", "rounding", "vector width of torch's CPU kernels: another order of sums"
    ),
    EnvironmentRule("$ATEN_CPU_CAPABILITY", "rounding", "sets the vector width of torch's CPU kernels"),
    EnvironmentRule("tf32", "rounding", "TF32 keeps 10 bits of a float32 factor: errors of about 1e-3"),
    EnvironmentRule(
        "matmul precision", "rounding", "below `highest`, float32 products may use TF32 or bfloat16"
    ),
    EnvironmentRule("16-bit sums", "rounding", "sums of 16-bit products may be kept in 16 bits"),
    EnvironmentRule("deterministic", "rounding", "chooses kernels that repeat, with another order of sums"),
    EnvironmentRule("$TRITON_F32_DEFAULT", "rounding", "float32 products of Triton kernels default to TF32"),
    EnvironmentRule("$NVIDIA_TF32*", "rounding", "overrides TF32 for every library"),
    EnvironmentRule("$CUBLAS_*", "rounding", "workspace of matrix products: another order of sums"),
    EnvironmentRule("torch threads", "rounding", "sums are split over threads: another order"),
    EnvironmentRule("$OMP_*", "rounding", "sets the number of threads, and so the order of sums"),
    EnvironmentRule("$MKL_*", "rounding", "threads and code paths of matrix products on the CPU"),
    EnvironmentRule("cores", "rounding", "threads follow it where nothing sets them"),
    EnvironmentRule("$DNNL_*", "rounding", "code paths of oneDNN"),
    EnvironmentRule("$ONEDNN_*", "rounding", "code paths of oneDNN"),
    EnvironmentRule("$TRITON_*", "rounding", "options of the compiler of fla's kernels"),
    EnvironmentRule("$CUDA_*", "rounding", "which devices are seen, and how kernels are launched"),
    EnvironmentRule("$PYTORCH_*", "rounding", "options of torch's allocators and fallbacks"),
    EnvironmentRule("$TORCH_*", "rounding", "options of torch"),
    EnvironmentRule("tokenizers", "numbers", "other token ids for the same text would be other inputs"),
    EnvironmentRule("accelerate", "rounding", "places layers on devices"),
    EnvironmentRule("numpy", "none", "loads and compares, but computes no layer"),
    EnvironmentRule("safetensors", "none", "reads weights as they are"),
    EnvironmentRule("platform", "none", "system libraries may differ; no layer depends on them by itself"),
    EnvironmentRule("python", "none", "no arithmetic of a layer depends on it"),
)
"""In order of suspicion. The first glob that matches counts. Sources: facts that were measured or reported
for hybrid targets (kernels, Triton and transformers versions that silently choose another path), then what
changes rounding on every target."""
OTHER = EnvironmentRule("*", "unknown", "parity does not know what this changes")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentDifference:
    """One name with two values."""

    name: str
    a: str
    b: str
    effect: Effect
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSide:
    """What is recorded of one side."""

    label: str
    pairs: Mapping[str, str]
    devices: bool
    """Whether it was recorded with torch loaded, so that an absent device means that there is none."""


def side_of(source: str | Path) -> EnvironmentSide:
    """Read one side: a report.json (or its folder), a trace (or its manifest.json), or `here`.

    Raises ParityError where it is none of these, or holds no environment.
    """
    if str(source) == HERE:
        return _side(f"{HERE} ({os.uname().nodename})", environment())
    path = Path(source)
    file = next((path / n for n in ("report.json", MANIFEST) if (path / n).is_file()), path)
    if file.name == MANIFEST or (path.is_dir() and file is path):
        return side_of_manifest(str(source), read_manifest(file.parent if file.name == MANIFEST else path))
    return side_of_report(str(source), schema.read_report(file))


def side_of_report(label: str, report: Report) -> EnvironmentSide:
    """Read the environment of the machine that a report was made on. Raises ParityError where it holds none."""
    if not report.environment:
        raise ParityError(
            f"the environment of {label}",
            f"a report of `parity {report.kind}` that holds none",
            "give a trace, a report of `parity check`, or what `parity env --as json` wrote there",
        )
    return _side(label, {name: _text(value) for name, value in report.environment})


def side_of_manifest(label: str, manifest: Manifest) -> EnvironmentSide:
    """Read what a trace's manifest records: the machine, and what was run on it."""
    proof = manifest.backend
    run = {
        "target": f"{manifest.target.name}, config {manifest.target.config_sha256[:12]}",
        "weights": _digest(manifest.target.weights),
        "dtype": manifest.dtype,
        "loader": manifest.loader,
        "mode": manifest.mode,
    }
    for operator in ("delta", "conv"):
        ran = sorted({call.implementation for call in proof.calls if call.operator == operator})
        run[operator] = ", ".join(ran) or "never called"
    return _side(label, manifest.environment | {f"run: {name}": value for name, value in run.items()})


def _digest(weights: Mapping[str, str]) -> str:
    """All parameters' checksums as one short text."""
    lines = "\n".join(f"{name} {checksum}" for name, checksum in sorted(weights.items()))
    return f"{len(weights)} parameters, {hashlib.sha256(lines.encode()).hexdigest()[:12]}"


def _text(value: Value) -> str:
    return "none" if value is None else str(value)


def _side(label: str, pairs: Mapping[str, str]) -> EnvironmentSide:
    return EnvironmentSide(label=label, pairs=pairs, devices="torch threads" in pairs)


def environment_differences(a: EnvironmentSide, b: EnvironmentSide) -> tuple[EnvironmentDifference, ...]:
    """Return every name whose values differ, the most suspicious first; what only one side records comes last.

    Raises NothingComparable where the sides have no name in common.
    """
    if not a.pairs.keys() & b.pairs.keys():
        raise NothingComparable(
            f"the environments of {a.label} and {b.label}", "no name that both give", "name two other sides"
        )
    return tuple(sorted(_find_differences(a, b), key=_suspicion))


def _suspicion(difference: EnvironmentDifference) -> tuple[bool, bool, int, int, str]:
    """What to sort by: what was run comes first, then packages that one side lacks, then the rules' order."""
    rule = rule_for(difference.name)
    lacking = "absent" in (difference.a, difference.b) and rule.effect == "numbers"
    tier = 0 if difference.name.startswith("run: ") else 1 if lacking else 2
    rank = RULES.index(rule) if rule in RULES else len(RULES)
    return difference.effect == "unknown", difference.effect == "none", tier, rank, difference.name


def rule_for(name: str) -> EnvironmentRule:
    """Return the first rule whose glob matches the name; `OTHER` where none does."""
    return next((rule for rule in RULES if fnmatchcase(name, rule.glob)), OTHER)


def _find_differences(a: EnvironmentSide, b: EnvironmentSide) -> Iterator[EnvironmentDifference]:
    """The differences, in no order."""
    for name in sorted(a.pairs.keys() | b.pairs.keys()):
        values = _values(name, a, b)
        rule = rule_for(name)
        if None in values:
            given = ["not recorded" if value is None else value for value in values]
            what = "only one side was a trace" if name.startswith("run: ") else "one side does not say"
            yield EnvironmentDifference(name=name, a=given[0], b=given[1], effect="unknown", why=what)
        elif values[0] != values[1]:
            yield EnvironmentDifference(
                name=name, a=str(values[0]), b=str(values[1]), effect=rule.effect, why=rule.why
            )


def _values(name: str, a: EnvironmentSide, b: EnvironmentSide) -> list[str | None]:
    """What each side records under a name; None where nothing."""
    return [side.pairs.get(name, _missing(name, side)) for side in (a, b)]


def _missing(name: str, side: EnvironmentSide) -> str | None:
    """What it means that a side does not record a name; None where that means nothing."""
    if name.startswith("$"):
        return "unset"
    if side.devices and fnmatchcase(name, "cuda:*"):
        return "none"
    only_with_a_gpu = ("tf32", "cudnn", "16-bit sums")
    return "no CUDA" if side.devices and "cuda:0" not in side.pairs and name in only_with_a_gpu else None


DIFFERENCE_COLUMNS = declare_columns("rank:int | name what | a | b | effect can change | why")


def environment_table(
    a: EnvironmentSide,
    b: EnvironmentSide,
    found: tuple[EnvironmentDifference, ...],
    name: str = "environment.differences",
) -> Table:
    """Return the differences as a table, in order of suspicion."""
    return Table(
        name=name,
        title="What differs between the two, in order of suspicion",
        caption=f"a: {a.label}. b: {b.label}. numbers: another computation; rounding: the same one in another "
        "order or precision; none: no layer depends on it; unknown: one side does not say.",
        columns=DIFFERENCE_COLUMNS,
        rows=tuple((i, d.name, d.a, d.b, d.effect, d.why) for i, d in enumerate(found, 1)),
    )


def finding_of(
    a: EnvironmentSide,
    b: EnvironmentSide,
    found: tuple[EnvironmentDifference, ...],
    name: str = "environment",
) -> Finding:
    """Return one finding: a pass where nothing that can change numbers differs, else a warning with the first suspect.

    Args:
        a, b: the two sides.
        found: their differences, in order of suspicion.
        name: of the finding.
    """
    counts = {
        effect: sum(d.effect == effect for d in found)
        for effect in ("numbers", "rounding", "none", "unknown")
    }
    shared = sum(None not in _values(name, a, b) for name in a.pairs.keys() | b.pairs.keys())
    evidence: tuple[tuple[str, Value], ...] = (
        ("compared", shared),
        *((f"can change: {effect}", count) for effect, count in counts.items()),
    )
    # What can change numbers comes before what nobody knows; everything else passes.
    suspects = [d for d in found if d.effect in ("numbers", "rounding")]
    if suspects:
        first = suspects[0]
        return Finding(
            name=name,
            outcome="warn",
            sentence=f"{len(suspects)} of {shared} things that were compared differ and can change numbers, "
            f"first {first.name}: {first.a} against {first.b} ({first.why})",
            evidence=evidence,
            next_step="make the first ones equal, or compare a trace from each side: only that says what they do",
            tables=("environment.differences",),
        )
    if counts["unknown"]:
        return Finding(
            name=name,
            outcome="warn",
            sentence=f"of {shared} things that were compared none that can change numbers differs, but "
            f"{counts['unknown']} are given by one side only or unknown to parity",
            evidence=evidence,
            next_step="ask both sides with the same version: `parity env --as json > env.json`",
            tables=("environment.differences",),
        )
    return Finding(
        name=name,
        outcome="pass",
        sentence=f"nothing that can change numbers differs ({shared} things compared)",
        evidence=evidence,
        tables=("environment.differences",) if found else (),
    )


def environment_report(a: EnvironmentSide, b: EnvironmentSide, *, created: str, command: str) -> Report:
    """Return the differences of two sides as a report of kind `env`. Raises NothingComparable."""
    found = environment_differences(a, b)
    return Report(
        kind="env",
        title=f"{a.label} against {b.label}",
        created=created,
        command=command,
        subject=(("a", a.label), ("b", b.label)),
        findings=(finding_of(a, b, found),),
        tables=(environment_table(a, b, found),) if found else (),
    )
