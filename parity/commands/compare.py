"""Two paths compared: what is there is opened (traces, sketches, dumps of other tools), compared, and reported.

    comparison = compare("out/a", "hidden_states/")              # parity.compare
    comparison, pair = compare_sides("out/a", "hidden_states/")      # and how each side was read
    report = report_sides(comparison, pair, "parity compare ...")   # what the command prints

The command, the function and the pytest assertion all come through here, so they accept the same things.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from glob import escape
from pathlib import Path
from typing import get_args

from parity.comparison.records import Comparison
from parity.comparison.tolerance import Floor, Policy
from parity.comparison.traces import ComparisonProgress, compare_traces, measure_floor
from parity.diagnosis.records import Diagnosis
from parity.diagnosis.report import comparison_report
from parity.dumps.mapping import Mapping, RowAlignment
from parity.dumps.pair import ComparablePair, open_pair
from parity.dumps.report import source_problems, with_sources
from parity.errors import NothingComparable, ParityError
from parity.gating import environment
from parity.model.training.distributed import Ranks
from parity.options import accept_fields
from parity.reports.record import Finding, Report, Table
from parity.tracing.sketched import open_trace
from parity.tracing.trace import Manifest, Trace

Source = str | Path | Trace
"""A trace or a sketch (a folder, or opened), or another tool's dump (a file or a folder)."""


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and how; checked when it is made."""

    a: Source
    """The candidate: a path, or an opened trace."""
    b: Source
    """The reference."""
    _: KW_ONLY
    golden: Source | None = None
    """A float64 trace of the same prompts, which judges both sides."""
    floor: str | Path | Floor | None = None
    """Measured benign differences: a file, a record, or the folder of a trace from which they are measured (a rerun
    of side b, or the same in another batch or order of sums)."""
    policy: str | Path | Policy | None = None
    """Limits per tap: a YAML or JSON file, or a record."""
    taps: Sequence[str] | None = None
    """Names or globs of taps; all by default."""
    mapping: str | Path | Mapping | None = None
    """What a dump does not say (layers, axes, files): a YAML file, or a record."""
    align: RowAlignment | None = None
    """`order` pairs rows where a dump holds no token ids; `tokens` refuses to."""
    progress: ComparisonProgress | None = None
    """Called with tokens done, tokens in all, and the request that was read last."""
    threads: int = 1
    """Threads that read large tensors; they change no bit."""
    ranks: Ranks | None = None
    """Processes that share the work (`parity.model.training.distributed.join`); each gets the whole result."""
    work: Path | None = None
    """A folder for finished units, so that an interrupted comparison goes on where it stopped."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ParityError("a comparison", f"{self.threads} threads", "give 1 or more")
        if self.align not in (None, *get_args(RowAlignment)):
            raise ParityError("a comparison", f"align={self.align!r}", "give 'tokens' or 'order'")


@accept_fields(CompareOptions)
def compare(options: CompareOptions) -> Comparison:
    """Compare candidate `a` with reference `b`, each a trace or a dump of another tool, as `parity compare` does.

    What a dump's slices were taken for and are not is listed in `source_problems`, and fails.

    Args:
        a: The candidate: a path, or an opened trace.
        b: The reference.
        golden: A float64 trace of the same prompts, which judges both sides.
        floor: Measured benign differences: a JSON file, a `Floor`, or a trace's folder to measure them from.
        policy: Limits per tap: a YAML or JSON file, or a `Policy`.
        taps: Names or globs of taps; all by default.
        mapping: What a dump does not say (layers, axes, files): a YAML file, or a `Mapping`.
        align: `"order"` pairs rows where a dump holds no token ids.
        progress: Called with tokens done, tokens in all, and the request that was read last.
        threads: Threads that read large tensors, 1 by default.
        ranks: Processes that share the work.
        work: A folder for finished units, so that an interrupted comparison goes on.

    Raises:
        ParityError: What cannot be read.
        NothingComparable: The sides share nothing, or a dump without token ids would have to be paired by its order
            without `align`.
    """
    comparison, pair = compare_sides(**vars(options))
    return replace(comparison, source_problems=source_problems(pair))


@accept_fields(CompareOptions)
def compare_sides(options: CompareOptions) -> tuple[Comparison, ComparablePair]:
    """The comparison of `compare`, and the pair as it was read; `report_sides` reports both.

    Raises ParityError and NothingComparable as `compare` does.
    """
    mapping, golden, floor = options.mapping, options.golden, options.floor
    policy, taps = options.policy, options.taps
    # What each side is comes first: a dump says which taps it holds.
    pair = open_pair(
        _as_path_or_trace(options.a),
        _as_path_or_trace(options.b),
        Mapping.load(Path(mapping)) if isinstance(mapping, str | Path) else mapping,
        align=options.align,
    )
    if taps is None and pair.taps is not None:
        taps = [escape(tap) for tap in pair.taps]
    # Then what judges them, which may be files, or a trace to measure a floor from.
    if isinstance(floor, str | Path):
        given = Path(floor)
        floor = (
            measure_floor(open_trace(given), pair.b.trace, taps=taps) if given.is_dir() else Floor.load(given)
        )
    comparison = compare_traces(
        pair.a.trace,
        pair.b.trace,
        golden=open_trace(Path(golden)) if isinstance(golden, str | Path) else golden,
        floor=floor,
        policy=Policy.load(Path(policy)) if isinstance(policy, str | Path) else policy,
        progress=options.progress,
        taps=taps,
        threads=options.threads,
        ranks=options.ranks,
        work=options.work,
    )
    return comparison, pair


def _as_path_or_trace(source: Source) -> Path | Trace:
    """A path as one, an opened trace as it is."""
    return source if isinstance(source, Trace) else Path(source)


def report_sides(
    comparison: Comparison,
    pair: ComparablePair,
    command: str,
    *,
    diagnosis: Diagnosis | None = None,
    name: str = "compare",
) -> Report:
    """The report of two compared sides: the comparison, what reading them found, how their environments differ."""
    report = with_sources(
        comparison_report(comparison, command, name=name, diagnosis=diagnosis), pair, name=name
    )
    told = environments(pair.a.trace.manifest, pair.b.trace.manifest, comparison, name)
    if told is None:
        return report
    finding, tables = told
    return replace(report, findings=(*report.findings, finding), tables=(*report.tables, *tables))


def environments(
    a: Manifest, b: Manifest, comparison: Comparison, name: str
) -> tuple[Finding, tuple[Table, ...]] | None:
    """How the sides' environments differ, as `parity env --diff A B` says it; None where a side states none.

    A difference there only may change numbers, and here is the comparison that says whether it did: beside one that
    passes it is no warning, and beside one that could judge nothing it is no pass.
    """
    if not a.environment or not b.environment:
        return None
    sides = (
        environment.side_of_manifest(comparison.sides[0], a),
        environment.side_of_manifest(comparison.sides[1], b),
    )
    try:
        found = environment.environment_differences(*sides)
    except NothingComparable:
        return None
    # A warning by itself; beside a comparison it is evidence for or against.
    title = f"{name}.environment"
    finding = environment.finding_of(*sides, found, title)
    passes, warned = comparison.outcome == "pass", finding.outcome == "warn"
    if passes and warned:
        finding = replace(
            finding,
            outcome="pass",
            next_step="",
            sentence=f"{finding.sentence}; the states agree within their limits all the same",
        )
    elif comparison.outcome == "skipped":
        finding = replace(
            finding, outcome="skipped", next_step=finding.next_step or "compare states that can be judged"
        )
    tables: tuple[Table, ...] = ()
    if found:
        tables = (replace(environment.environment_table(*sides, found, title), detail=passes),)
    return replace(finding, tables=tuple(table.name for table in tables)), tables
