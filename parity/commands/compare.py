"""Two paths compared: what is there is opened (traces, sketches, dumps of other tools), compared, and reported.

    comparison = compare("out/a", "hidden_states/")              # parity.compare
    comparison, pair = compared("out/a", "hidden_states/")       # and how each side was read
    report = reported(comparison, pair, "parity compare ...")    # what the command prints

The command, the function and the pytest assertion all come through here, so they accept the same things.
"""

from collections.abc import Sequence
from dataclasses import replace
from glob import escape
from pathlib import Path

from parity.comparison.records import Comparison
from parity.comparison.sketch import open_trace
from parity.comparison.tolerance import Floor, Policy
from parity.comparison.traces import ComparisonProgress, compare_traces, measure_floor
from parity.diagnosis.records import Diagnosis
from parity.diagnosis.report import comparison_report
from parity.dumps.mapping import Mapping, RowAlignment
from parity.dumps.pair import ComparablePair, open_pair
from parity.dumps.report import source_problems, with_sources
from parity.errors import NothingComparable
from parity.gating import environment
from parity.model.training.distributed import Ranks
from parity.reports.record import Finding, Report, Table
from parity.tracing.trace import Manifest, Trace

Source = str | Path | Trace
"""A trace or a sketch (a folder, or opened), or another tool's dump (a file or a folder)."""


def compare(
    a: Source,
    b: Source,
    *,
    golden: Source | None = None,
    floor: str | Path | Floor | None = None,
    policy: str | Path | Policy | None = None,
    taps: Sequence[str] | None = None,
    mapping: str | Path | Mapping | None = None,
    align: RowAlignment | None = None,
    progress: ComparisonProgress | None = None,
    threads: int = 1,
    ranks: Ranks | None = None,
    work: Path | None = None,
) -> Comparison:
    """Compare candidate `a` with reference `b`, each a trace or a dump of another tool, as `parity compare` does.

    `mapping` (a file, or read) says what a dump does not: layers, axes, files; `align="order"` pairs rows where a dump
    holds no token ids. A `floor` that is a trace's folder is measured (`measure_floor`): a rerun of side b, or the
    same in another batch or order of sums. The rest is as in `compare_traces`. What a dump's slices were taken for and
    are not stands in `source_problems` and fails. Raises ParityError for what cannot be read, NothingComparable where
    the sides share nothing or a dump without token ids would have to be paired by its order unasked.
    """
    comparison, pair = compare_sides(
        a,
        b,
        golden=golden,
        floor=floor,
        policy=policy,
        taps=taps,
        mapping=mapping,
        align=align,
        progress=progress,
        threads=threads,
        ranks=ranks,
        work=work,
    )
    return replace(comparison, source_problems=source_problems(pair))


def compare_sides(
    a: Source,
    b: Source,
    *,
    golden: Source | None = None,
    floor: str | Path | Floor | None = None,
    policy: str | Path | Policy | None = None,
    taps: Sequence[str] | None = None,
    mapping: str | Path | Mapping | None = None,
    align: RowAlignment | None = None,
    progress: ComparisonProgress | None = None,
    threads: int = 1,
    ranks: Ranks | None = None,
    work: Path | None = None,
) -> tuple[Comparison, ComparablePair]:
    """The comparison of `compare`, without what reading found, and the pair that tells it; see `report_sides`."""
    said = Mapping.load(Path(mapping)) if isinstance(mapping, str | Path) else mapping
    pair = open_pair(_as_path_or_trace(a), _as_path_or_trace(b), said, align=align)
    if taps is None and pair.taps is not None:
        taps = [escape(tap) for tap in pair.taps]
    reference = pair.b.trace
    if isinstance(floor, str | Path):
        given = Path(floor)
        floor = (
            measure_floor(open_trace(given), reference, taps=taps) if given.is_dir() else Floor.load(given)
        )
    comparison = compare_traces(
        pair.a.trace,
        reference,
        golden=golden if golden is None or isinstance(golden, Trace) else open_trace(Path(golden)),
        floor=floor,
        policy=Policy.load(Path(policy)) if isinstance(policy, str | Path) else policy,
        progress=progress,
        taps=taps,
        threads=threads,
        ranks=ranks,
        work=work,
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
