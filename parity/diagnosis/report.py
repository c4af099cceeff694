"""A comparison with its diagnosis, in words: tables, findings, and the report of `parity compare`.

    report = comparison_report(comparison, command="parity compare A B", diagnosis=diagnosis)

Finding `NAME.diagnosis` names the fault, every failing finding carries that name, and tables `NAME.kinds` and
`NAME.repaired` list every kind with its answer, and what remains after a repair.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from parity.comparison.records import Comparison
from parity.comparison.report import comparison_suspicions, tables_and_findings
from parity.diagnosis.records import MEANING, Diagnosis
from parity.reports.record import Finding, Report, Table, Value, collect_rows, declare_columns


def diagnosed_tables_and_findings(
    comparison: Comparison, *, name: str = "compare", diagnosis: Diagnosis | None = None
) -> tuple[tuple[Table, ...], tuple[Finding, ...]]:
    """The comparison's tables and findings, the diagnosis' first where there is one."""
    tables, findings = tables_and_findings(comparison, name=name)
    if diagnosis is None:
        return tables, findings
    named = tuple(
        replace(finding, fault=finding.fault or diagnosis.fault) if finding.outcome == "fail" else finding
        for finding in findings
    )
    own = (_kinds_table(diagnosis, name), *([_repaired_table(diagnosis, name)] if diagnosis.repairs else []))
    return (*own, *tables), (_diagnosis_finding(diagnosis, comparison, name), *named)


def comparison_report(
    comparison: Comparison,
    command: str,
    *,
    name: str = "compare",
    created: str | None = None,
    environment: Sequence[tuple[str, Value]] = (),
    diagnosis: Diagnosis | None = None,
) -> Report:
    """The whole comparison as a report of kind `compare`. `created` (ISO 8601) is now unless given."""
    tables, findings = diagnosed_tables_and_findings(comparison, name=name, diagnosis=diagnosis)
    c, notes = comparison, comparison.notes
    if c.outcome == "skipped":  # a report that only says that nothing was in the way is no pass
        in_order = [finding.name for finding in findings if finding.outcome == "pass"]
        findings = tuple(finding for finding in findings if finding.outcome != "pass")
        notes += (f"in order, but no pass without a gate that judged: {', '.join(in_order)}",)
    subject: tuple[tuple[str, Value], ...] = (
        ("target", c.target),
        ("a (candidate)", c.sides[0]),
        ("b (reference)", c.sides[1]),
        ("golden", c.golden or "none"),
        ("backends", " against ".join(c.backends)),
        ("dtypes", " against ".join(c.dtypes)),
        ("modes", " against ".join(c.modes)),
        ("requests", c.requests),
        ("tokens", c.tokens),
        ("taps", len(c.taps)),
        ("kernel", c.implementation),
    )
    return Report(
        kind="compare",
        title=f"{c.backends[0]} against {c.backends[1]}",
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        subject=subject,
        findings=findings,
        suspicions=comparison_suspicions(c, name=name),
        tables=tables,
        environment=tuple(environment),
        seconds=c.seconds,
        notes=notes,
    )


def _diagnosis_finding(diagnosis: Diagnosis, c: Comparison, name: str) -> Finding:
    """What fails, by its name. A comparison that passes keeps its outcome: then this is a warning."""
    evidence: tuple[tuple[str, Value], ...] = (("kind", diagnosis.name), *diagnosis.evidence)
    if diagnosis.live:
        evidence += (("what decides", diagnosis.live),)
    tables = (f"{name}.kinds", *((f"{name}.repaired",) if diagnosis.repairs else ()))
    meaning = ", or ".join(MEANING[kind] for kind in diagnosis.kinds)
    return Finding(
        name=f"{name}.diagnosis",
        outcome="fail" if c.outcome == "fail" else "warn",
        fault=diagnosis.fault,
        sentence=f"{diagnosis.name}, {meaning}: {diagnosis.sentence}" if meaning else diagnosis.sentence,
        evidence=evidence,
        next_step=diagnosis.next_step
        + ("; `parity compare A B --live MODEL` runs what decides" if diagnosis.live else ""),
        tables=tables,
    )


def _kinds_table(diagnosis: Diagnosis, name: str) -> Table:
    """Each kind of fault in the order asked, and why it was or was not named."""
    columns = declare_columns("kind | meaning what it is | answer | because")
    return Table(
        name=f"{name}.kinds",
        title="Kinds of fault, in the order asked",
        columns=columns,
        rows=collect_rows(columns, diagnosis.asked, meaning=lambda asked: MEANING[asked.kind]),
        caption="The first that answers names the fault: an earlier kind can imitate every later one.",
        detail=True,
    )


def _repaired_table(diagnosis: Diagnosis, name: str) -> Table:
    """What remains after the repair."""
    columns = declare_columns(
        "tap tap of a | against | before:float rel L2 before | after:float rel L2 after"
    )
    return Table(
        name=f"{name}.repaired",
        title="After the repair",
        columns=columns,
        rows=collect_rows(columns, diagnosis.repairs),
        caption="On a sample of rows: what the repair does not explain is in the last column.",
    )
