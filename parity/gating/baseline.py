"""A report compared with an earlier one: what is no longer answered, what got worse, what the wiring now is.

    findings, tables = compare_with_baseline(report, baseline, judged=outcomes, rules=policy.gate)

Findings `baseline.missing`, `.outcomes`, `.taps`, `.wiring`, `.subject` and `.environment`. Each compares only
what both reports hold; what the baseline held and the report does not is `baseline.missing`, which fails.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parity.errors import NothingComparable
from parity.gating import environment
from parity.gating.conformance import compare_statements, list_changed_facts
from parity.policy import GateRules, matches
from parity.probes.table import TABLE
from parity.reports.record import (
    WORST_FIRST,
    Conformance,
    Finding,
    Outcome,
    Report,
    Table,
    Value,
    declare_columns,
)
from parity.reports.words import shorten_list

WIRING = {entry.name for entry in TABLE if entry.states_wiring} | {"recipe", "conformance"}
"""First parts of the names of findings whose evidence states what a trainer does; the last two are a training run's."""
NOT_WIRING = ("first step", "last step", "last step in order")
"""Evidence that tells when a step was probed, not what it did."""
JUDGED = {"tap", "error_rms", "error_max", "cosine_min"}
"""Columns of a table whose rows are taps that a comparison judged."""

BaselineRows = dict[str, Value]


@dataclass(frozen=True, slots=True)
class WiringChange:
    """One piece of what a wiring finding states, then and now."""

    finding: str
    what: str
    before: Value
    now: Value


def compare_with_baseline(
    report: Report, baseline: Report, *, judged: Mapping[str, Outcome], rules: GateRules
) -> tuple[tuple[Finding, ...], tuple[Table, ...]]:
    """Return the findings `baseline.*` and their tables.

    Args:
        report: the later report.
        baseline: the earlier one, of the same command.
        judged: name -> outcome of the report's findings, as the policy sees them.
        rules: what the policy allows.

    Raises:
        NothingComparable: where the two are of other kinds or have no finding in common.
    """
    then = {finding.name: finding for finding in baseline.findings}
    now = {finding.name: finding for finding in report.findings}
    if report.kind != baseline.kind or not then.keys() & now.keys():
        why = "no finding that both hold" if report.kind == baseline.kind else "another kind of report"
        raise NothingComparable(
            f"a report of `parity {report.kind}` against a baseline of `parity {baseline.kind}`",
            why,
            "give a baseline that the same command wrote",
        )
    # Outcomes first, then what is behind them: taps, wiring, and whether the two are about the same thing.
    findings = [_missing(report, baseline, judged, rules), _outcomes(then, judged)]
    tables: list[Table] = []
    for found, table in (
        _taps(report, baseline, rules),
        _wiring(then, now, report, baseline, rules),
        _subject(report, baseline),
    ):
        findings += found
        tables += table
    # Another machine is worth a warning only where something got worse.
    worse = any(finding.outcome not in ("pass", "skipped") for finding in findings)
    found, table = _environment(report, baseline, worse)
    return (*findings, *found), (*tables, *table)


Part = tuple[tuple[Finding, ...], tuple[Table, ...]]


def _missing(report: Report, baseline: Report, judged: Mapping[str, Outcome], rules: GateRules) -> Finding:
    """Is everything still answered that the baseline answered?"""
    # Findings that are gone, findings that are skipped now and may not be, and taps.
    answered = [finding.name for finding in baseline.findings if finding.outcome != "skipped"]
    gone = [name for name in answered if name not in judged]
    allowed = rules.skips or ()
    raw = {finding.name: finding.outcome for finding in report.findings}
    silent = [n for n in answered if raw.get(n) == "skipped" and not matches(n, allowed)]
    taps = sorted(f"{table} {tap}" for table, tap in _rows(baseline).keys() - _rows(report).keys())
    evidence: tuple[tuple[str, Value], ...] = (
        ("findings of the baseline", len(answered)),
        ("missing", len(gone)),
        ("skipped now", len(silent)),
        ("taps missing", len(taps)),
    )
    lost = [*gone, *(f"{name} (skipped now)" for name in silent), *taps]
    if baseline.conformance is not None and report.conformance is None:
        lost.append("the conformance statement")
    if not lost:
        return Finding(
            name="baseline.missing",
            outcome="pass",
            evidence=evidence,
            sentence=f"everything that the baseline answered is answered again ({len(answered)} findings)",
        )
    return Finding(
        name="baseline.missing",
        outcome="fail",
        evidence=evidence,
        sentence=f"the baseline answered what this report does not: {shorten_list(lost)}",
        next_step="find out why it no longer runs, or make a new baseline if it was removed on purpose",
    )


def _outcomes(then: Mapping[str, Finding], judged: Mapping[str, Outcome]) -> Finding:
    """Which findings have a worse outcome than they had?"""
    # A finding that was skipped on either side has no outcome to compare.
    both = [name for name in then if name in judged]
    rank = {outcome: place for place, outcome in enumerate(WORST_FIRST)}
    answered = [name for name in both if "skipped" not in (then[name].outcome, judged[name])]
    worse = [name for name in answered if rank[judged[name]] < rank[then[name].outcome]]
    better = [name for name in answered if rank[judged[name]] > rank[then[name].outcome]]
    evidence: tuple[tuple[str, Value], ...] = (
        ("findings compared", len(answered)),
        ("worse", len(worse)),
        ("better", len(better)),
        ("new", sum(name not in then for name in judged)),
    )
    if not worse:
        return Finding(
            name="baseline.outcomes",
            outcome="pass" if answered else "skipped",
            evidence=evidence,
            sentence=f"no finding has a worse outcome than in the baseline ({len(answered)} compared)",
            next_step="" if answered else "make a baseline in which something was compared",
        )
    severe = any(judged[name] in ("fail", "error") for name in worse)
    named = [f"{name} ({then[name].outcome} then, {judged[name]} now)" for name in worse]
    return Finding(
        name="baseline.outcomes",
        outcome="fail" if severe else "warn",
        evidence=evidence,
        sentence=f"worse than in the baseline: {shorten_list(named)}",
        next_step="look at what changed between the two, `baseline.environment` first",
    )


def list_judged_taps(report: Report) -> Iterator[tuple[str, str, BaselineRows]]:
    """Yield table, tap and cells by column key, of every tap that a comparison judged."""
    for table in report.tables:
        keys = [column.key for column in table.columns]
        if set(keys) >= JUDGED:
            for row in table.rows:
                cells = dict(zip(keys, row, strict=True))
                yield table.name, str(cells["tap"]), cells


def _rows(report: Report) -> dict[tuple[str, str], BaselineRows]:
    """By table and tap, the cells of every judged tap by column key."""
    return {(table, tap): cells for table, tap, cells in list_judged_taps(report)}


def _float(value: Value) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def measure_growth(then: BaselineRows, now: BaselineRows) -> float:
    """Return how many times the baseline's error a tap has: the larger of rms and worst token. 1 for 0 against 0."""
    sizes = []
    for key in ("error_rms", "error_max"):
        a, b = _float(then[key]), _float(now[key])
        if math.isnan(b) or math.isinf(b):
            sizes.append(1.0 if not math.isfinite(a) else math.inf)
        else:
            sizes.append(1.0 if a == b else math.inf if a == 0 else b / a)
    return max(sizes)


def _taps(report: Report, baseline: Report, rules: GateRules) -> Part:
    """Which taps are further from their reference than they were?"""
    before, after = _rows(baseline), _rows(report)
    shared = [key for key in after if key in before]
    if not shared:
        return (), ()
    grown = {key: measure_growth(before[key], after[key]) for key in shared}
    allowed = rules.worse_than_baseline
    # What is still within the noise that was measured beside it has not got worse.
    worse = [k for k in shared if grown[k] > allowed and not _float(after[k].get("times_floor")) <= 1]
    top = max(shared, key=lambda key: (key in worse, grown[key]))
    # All shared taps as a table, the worst first.
    numbers = [(side, column) for side in (before, after) for column in ("error_rms", "cosine_min")]
    rows = tuple(
        (*key, *(side[key][c] for side, c in numbers), grown[key], "fail" if key in worse else "pass")
        for key in sorted(shared, key=lambda key: (key not in worse, -grown[key]))
    )
    columns = declare_columns(
        "table | tap | rms_then:float token rms then | cosine_then:float min cos then | "
        "rms_now:float token rms now | cosine_now:float min cos now | times:float | "
        "outcome:outcome"
    )
    table = Table(
        name="baseline.taps",
        title="Taps, then and now",
        columns=columns,
        rows=rows,
        detail=not worse,
        caption="times: the larger growth of token rms and worst token.",
    )
    evidence: tuple[tuple[str, Value], ...] = (
        ("taps compared", len(shared)),
        ("worse", len(worse)),
        ("largest growth", grown[top]),
        ("at", " ".join(top)),
        ("allowed", allowed),
    )
    where = f"{' '.join(top)}: {grown[top]:.3g} times the baseline's error"
    finding = Finding(
        name="baseline.taps",
        outcome="fail" if worse else "pass",
        evidence=evidence,
        tables=("baseline.taps",),
        sentence=f"{len(worse)} of {len(shared)} taps are worse than in the baseline, first {where}"
        if worse
        else f"no tap of {len(shared)} is worse than in the baseline; the largest growth is at {where}",
        next_step="compare the two runs' traces at that tap, and see `baseline.environment`" if worse else "",
    )
    return (finding,), (table,)


def _wiring(
    then: Mapping[str, Finding],
    now: Mapping[str, Finding],
    report: Report,
    baseline: Report,
    rules: GateRules,
) -> Part:
    """Does the trainer still do what it did? By the conformance statements; a report without one, as older versions
    wrote them, by its findings' evidence."""
    if report.conformance is not None and baseline.conformance is not None:
        return _statements(report.conformance, baseline.conformance, rules)
    names = [n for n in now if n in then and n.partition(".")[0] in WIRING]
    if not names:
        return (), ()
    # Evidence piece by piece, and what the findings' tables hold beside measured numbers.
    changes = [change for name in names for change in _changes(name, then[name], now[name])]
    changes += [
        change for name in names for change in _table_changes(then[name], now[name], report, baseline)
    ]
    pieces = sum(len(now[name].evidence) for name in names)
    evidence: tuple[tuple[str, Value], ...] = (
        ("statements compared", len(names)),
        ("pieces of evidence", pieces),
        ("changed", len(changes)),
    )
    if not changes:
        finding = Finding(
            name="baseline.wiring",
            outcome="pass" if pieces else "skipped",
            evidence=evidence,
            sentence=f"the wiring is stated as in the baseline ({len(names)} statements, {pieces} pieces)",
            next_step="" if pieces else "make a baseline whose findings hold evidence",
        )
        return (finding,), ()
    # The first change in words, all of them as a table.
    first = changes[0]
    table = Table(
        name="baseline.wiring",
        title="What changed in the wiring",
        columns=declare_columns("finding | what | then | now"),
        rows=tuple((c.finding, c.what, c.before, c.now) for c in changes),
    )
    finding = Finding(
        name="baseline.wiring",
        outcome=rules.wiring_changes,
        evidence=evidence,
        tables=("baseline.wiring",),
        sentence=f"the wiring changed: {first.finding}, {first.what}: {first.before} then, {first.now} now"
        + (f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""),
        next_step="if it was meant, make a new baseline; if not, look at what was merged since",
    )
    return (finding,), (table,)


def _statements(now: Conformance, then: Conformance, rules: GateRules) -> Part:
    """The two conformance statements, fact by fact. An answer that only one side has is a change too."""
    # The gate's policy decides what a change is worth, so the comparison's own outcomes are not kept.
    compared = compare_statements(then, now)
    changed = [finding for finding in compared.findings if finding.outcome != "pass"]
    facts = compared.table("facts")
    table = Table(
        name="baseline.wiring",
        title="Facts about the wiring, then (A) and now (B)",
        columns=facts.columns,
        rows=facts.rows,
        detail=not changed,
    )
    evidence: tuple[tuple[str, Value], ...] = (
        ("statements compared", len(compared.findings)),
        ("facts compared", len(facts.rows)),
        ("statements changed", len(changed)),
    )
    if not changed:
        count = len(compared.findings)
        said = f"all {count} statements about the wiring are as in the baseline"
        return (Finding(name="baseline.wiring", outcome="pass", sentence=said, evidence=evidence),), (table,)
    finding = Finding(
        name="baseline.wiring",
        outcome=rules.wiring_changes,
        fault="conformance-changed",
        sentence="the wiring changed: " + shorten_list([f"{each.name}: {each.sentence}" for each in changed]),
        evidence=evidence,
        tables=("baseline.wiring",),
        next_step="if it was meant, make a new baseline; if not, look at what was merged since",
    )
    return (finding,), (table,)


def _changes(name: str, then: Finding, now: Finding) -> Iterator[WiringChange]:
    """The pieces of evidence that differ. A piece of one side only differs too."""
    before, after = (
        {what: value for what, value in side.evidence if what not in NOT_WIRING} for side in (then, now)
    )
    for what in list_changed_facts(before, after):
        yield WiringChange(name, what, before.get(what), after.get(what))
    if then.fault != now.fault:
        yield WiringChange(name, "fault", then.fault, now.fault)


def _table_changes(then: Finding, now: Finding, report: Report, baseline: Report) -> Iterator[WiringChange]:
    """Rows of a statement's tables that only one side has; measured numbers in them are left out."""
    before, after = ({table.name: table for table in each.tables} for each in (baseline, report))
    for name in now.tables:
        if name in then.tables and name in before and name in after:
            old, new = _rows_without_floats(before[name]), _rows_without_floats(after[name])
            for row in [row for row in old if row not in new]:
                yield WiringChange(now.name, name, ", ".join(map(str, row)), None)
            for row in [row for row in new if row not in old]:
                yield WiringChange(now.name, name, None, ", ".join(map(str, row)))


def _rows_without_floats(table: Table) -> dict[tuple[Value, ...], None]:
    """The rows without their floats, in order."""
    at = [index for index, column in enumerate(table.columns) if column.kind != "float"]
    return dict.fromkeys(tuple(row[index] for index in at) for row in table.rows)


def _subject(report: Report, baseline: Report) -> Part:
    """Are the two about the same thing? Paths are left out: they name places, not things."""
    before, after = dict(baseline.subject), dict(report.subject)

    def is_path(value: Value) -> bool:
        return isinstance(value, str) and ("/" in value or "\\" in value) and " " not in value

    keys = [k for k in before if k in after and not (is_path(before[k]) or is_path(after[k]))]
    other = [key for key in keys if before[key] != after[key]]
    if not keys:
        return (), ()
    evidence = tuple((key, f"{before[key]} then, {after[key]} now") for key in other)
    finding = Finding(
        name="baseline.subject",
        outcome="warn" if other else "pass",
        evidence=evidence,
        sentence=f"the two reports are about other things: {shorten_list([f'{k}: {v}' for k, v in evidence])}"
        if other
        else f"both reports are about the same thing ({len(keys)} properties compared)",
        next_step="make a baseline of the same target, prompts and dtypes" if other else "",
    )
    return (finding,), ()


def _environment(report: Report, baseline: Report, worse: bool) -> Part:
    """How the two machines differ; worth a look only where something got worse."""
    if not report.environment or not baseline.environment:
        return (), ()
    a = environment.side_of_report("the baseline", baseline)
    b = environment.side_of_report("this report", report)
    try:
        found = environment.environment_differences(a, b)
    except NothingComparable:
        return (), ()
    finding = environment.finding_of(a, b, found, name="baseline.environment")
    if finding.outcome != "pass" and not worse:
        finding = Finding(
            name=finding.name,
            outcome="pass",
            sentence=f"nothing got worse, though {finding.sentence}",
            evidence=finding.evidence,
            tables=finding.tables,
        )
    return (finding,), (environment.environment_table(a, b, found),) if found else ()
