"""A saved report judged by a policy and a baseline: what a merge may be stopped by.

The answer is a report of kind `gate`: the report's own findings, some with another outcome, and findings
`policy.*` and `baseline.*` of the gate's own. It never turns a fail into a pass: an expected failure is a
warning until its day has passed. A rule that matches nothing fails, because it compared nothing.

    parity gate parity-report --policy parity.yaml --baseline baseline/report.json
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from parity.errors import ParityError
from parity.gating.baseline import compare_with_baseline, list_judged_taps
from parity.policy import Bounds, ExpectedFailure, FindingRules, GateRules, Policy, TapLimits, matches
from parity.reports import from_steps
from parity.reports.record import Finding, Outcome, Report, Table, Value
from parity.reports.words import shorten_list

LIMIT_NOTE = {
    "min_cosine": ("cosine_min", "below"),
    "mean_cosine": ("cosine_mean", "below"),
    "relative_l2": ("error_rms", "above"),
    "ratio": ("times_floor", "above"),
}
"""A limit's name, the column that it judges, and on which side of it a value is outside."""
LISTED_FINDINGS = 4


def gate(
    report: str | Path | Report,
    *,
    policy: str | Path | Policy | None = None,
    baseline: str | Path | Report | None = None,
    today: date | None = None,
    command: str = "parity.gate",
) -> Report:
    """Judge a report, and return the verdict as a report of kind `gate`.

    Args:
        report: the record, or a path: report.json, its folder, or a training run's steps.jsonl.
        policy: limits, allowed skips and expected failures; as a record, or a YAML or JSON file.
        baseline: an earlier report of the same command, as `report`.
        today: decides which expected failures have expired; UTC's day by default.
        command: what the verdict names as its command.

    Raises:
        ParityError: where a file cannot be read.
        NothingComparable: where the baseline has nothing in common with the report.
    """
    report = report if isinstance(report, Report) else from_steps.read_steps_report(report)
    if report.kind == "gate":
        raise ParityError("a gate on a report", "the report of a gate", "give the report that was gated")
    named = str(policy) if isinstance(policy, (str, Path)) else "given" if policy else "none"
    rules = Policy.load(Path(policy)) if isinstance(policy, (str, Path)) else policy or Policy()
    day = today or datetime.now(UTC).date()
    # The report's own findings as the policy sees them, then what policy and baseline find themselves.
    findings = [_apply_policy(finding, rules.gate, day) for finding in report.findings]
    judged: dict[str, Outcome] = {finding.name: finding.outcome for finding in findings}
    findings += _policy_findings(report, rules)
    tables: tuple[Table, ...] = ()
    if baseline is not None:
        other = baseline if isinstance(baseline, Report) else from_steps.read_steps_report(baseline)
        more, tables = compare_with_baseline(report, other, judged=judged, rules=rules.gate)
        findings += more
    findings, unsaid = _no_pass_from_nothing(report, findings)
    subject: tuple[tuple[str, Value], ...] = (
        ("report", report.title),
        ("policy", named),
        ("baseline", "none" if baseline is None else other.title),
        ("judged on", day.isoformat()),
    )
    return Report(
        kind="gate",
        title=f"Gate: {report.title}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        subject=(*subject, *((k, v) for k, v in report.subject if k not in dict(subject))),
        findings=tuple(findings),
        suspicions=report.suspicions,
        tables=tables,
        environment=report.environment,
        notes=(f"The report was made by `{report.command}` on {report.created}.", *unsaid, *report.notes),
    )


def _no_pass_from_nothing(report: Report, findings: list[Finding]) -> tuple[list[Finding], tuple[str, ...]]:
    """Of a report in which nothing was judged, what the gate itself found in order is a note, and no pass."""
    if report.outcome != "skipped":
        return findings, ()
    light = [finding.name for finding in findings if finding.outcome in ("pass", "warn")]
    kept = [finding for finding in findings if finding.outcome not in ("pass", "warn")]
    note = f"In order, but no pass without a finding that judged something: {', '.join(light)}."
    return kept, (note,) if light else ()


def _apply_policy(finding: Finding, rules: GateRules, day: date) -> Finding:
    """One finding of the report as the policy sees it. Its tables stay in the report."""
    # What may be skipped and which warnings count as failures, then failures that are expected for now.
    finding = replace(finding, tables=())
    if finding.outcome == "skipped":
        if rules.skips is None or matches(finding.name, rules.skips):
            return finding
        said = f"was skipped, and the policy does not allow that: {finding.sentence}"
        step = f"{finding.next_step}; or name it under gate.skips"
        return replace(finding, outcome="fail", sentence=said, next_step=step)
    if finding.outcome == "warn":
        strict = [
            glob
            for glob, rule in rules.findings.items()
            if rule.warn == "fail" and fnmatchcase(finding.name, glob)
        ]
        if strict:
            said = f"{finding.sentence} (a warning, which the policy counts as a failure)"
            return replace(finding, outcome="fail", sentence=said)
        return finding
    if finding.outcome != "fail":
        return finding
    entry = _entry(finding, rules.expected)
    if entry is None:
        return finding
    if entry.fault is not None and entry.fault != finding.fault:
        said = f"{finding.sentence} (expected was fault {entry.fault}, found {finding.fault or 'none named'})"
        return replace(finding, sentence=said)
    if day > entry.until:
        said = f"expected to fail until {entry.until} only ({entry.because}): {finding.sentence}"
        return replace(finding, sentence=said)
    said = f"expected to fail until {entry.until} ({entry.because}): {finding.sentence}"
    return replace(finding, outcome="warn", sentence=said)


def _entry(finding: Finding, expected: Sequence[ExpectedFailure]) -> ExpectedFailure | None:
    """The entry that speaks of a finding: of those that match, one of its own fault first, then the latest."""
    found = [entry for entry in expected if fnmatchcase(finding.name, entry.finding)]
    return max(found, key=lambda e: (e.fault in (None, finding.fault), e.until), default=None)


def _policy_findings(report: Report, policy: Policy) -> list[Finding]:
    """What the policy requires beside the findings' own outcomes: a finding for each of its rules."""
    found = [_tap_rule(glob, limits, report, policy) for glob, limits in policy.taps.items()]
    found += [_finding_rule(glob, rule, report) for glob, rule in policy.gate.findings.items()]
    names: dict[str, int] = {}
    for entry in policy.gate.expected:
        for finding in _expectation(entry, report):
            names[finding.name] = names.get(finding.name, 0) + 1
            again = f" ({names[finding.name]})" if names[finding.name] > 1 else ""
            found.append(replace(finding, name=finding.name + again))
    return found


def _tap_rule(glob: str, limits: TapLimits, report: Report, policy: Policy) -> Finding:
    """The limits of one glob, on every judged tap whose first matching glob it is.

    A glob may name a table too, `kernels.bf16.layers/layer.*.out`, where a report compares several pairs.
    """
    name = f"policy.taps {glob}"
    outside, count = [], 0
    # A tap is judged by the first glob that matches it, and by no other.
    for where, tap, cells in list_judged_taps(report):
        first = next((g for g in policy.taps if _names_tap(g, where, tap)), None)
        if first != glob:
            continue
        count += 1
        outside += [f"{where} {tap}: {text}" for text in _broken(limits, cells)]
    evidence: tuple[tuple[str, Value], ...] = (("taps judged", count), ("outside", len(outside)))
    if not count:
        return Finding(
            name=name,
            outcome="fail",
            evidence=evidence,
            sentence="judged nothing: no tap that was compared has this as its first matching entry",
            next_step="correct the entry; `parity show REPORT` lists the taps that were compared",
        )
    if not limits.model_fields_set:
        return Finding(
            name=name,
            outcome="skipped",
            evidence=evidence,
            sentence="sets no limit",
            next_step="set min_cosine, mean_cosine, relative_l2 or ratio",
        )
    if outside:
        return Finding(
            name=name,
            outcome="fail",
            evidence=evidence,
            sentence=shorten_list(outside, separator="; ", last="; and "),
            next_step="see that tap in the report's table; raise a limit only with a reason",
        )
    said = ", ".join(f"{key} {value:g}" for key, value in limits.model_dump(exclude_none=True).items())
    return Finding(name=name, outcome="pass", evidence=evidence, sentence=f"{count} taps are within {said}")


def _names_tap(glob: str, table: str, tap: str) -> bool:
    return fnmatchcase(tap, glob) or fnmatchcase(f"{table}/{tap}", glob)


def _broken(limits: TapLimits, cells: dict[str, Value]) -> Iterator[str]:
    """The limits that a tap breaks, in words. A number that is not there, or is nan, breaks its limit."""
    for name, (column, side) in LIMIT_NOTE.items():
        limit: float | None = getattr(limits, name)
        if limit is None:
            continue
        value = cells.get(column)
        if not isinstance(value, (int, float)):
            yield f"no {column} in the report to hold against {name}"
        elif side == "below" and not value >= limit:
            yield f"{name} {value:.6g} below {limit:g}"
        elif side == "above" and not value <= limit:
            yield f"{name} {value:.4g} above {limit:g}"
    if limits.share_of_tokens is not None and not str(cells.get("judged_by", "")).startswith("policy"):
        yield "share_of_tokens needs the tokens, which a report does not hold: give this policy to `parity compare`"


def _finding_rule(glob: str, rule: FindingRules, report: Report) -> Finding:
    """What one entry requires of the findings that it names: to be there, and evidence within bounds."""
    # To be there at all.
    named = [finding for finding in report.findings if fnmatchcase(finding.name, glob)]
    answered = [finding for finding in named if finding.outcome != "skipped"]
    problems, checked = [], 0
    if not named and (rule.required or rule.evidence or rule.warn == "fail"):
        problems.append("names no finding of this report")
    elif rule.required and not answered:
        problems.append("is required, and was skipped")
    # Evidence within its bounds; a number that is not there breaks them.
    for key, bounds in rule.evidence.items():
        values = [
            (finding.name, dict(finding.evidence)[key])
            for finding in answered
            if key in dict(finding.evidence)
        ]
        checked += len(values)
        if not values and answered:
            problems.append(f"no evidence {key!r} to hold against its bounds")
        elif not values and named and not rule.required:
            problems.append(f"{key!r} could not be judged: the finding was skipped")
        problems += [f"{name}: {key} {text}" for name, value in values if (text := _outside(value, bounds))]
    evidence: tuple[tuple[str, Value], ...] = (("findings named", len(named)), ("numbers judged", checked))
    name = f"policy.findings {glob}"
    if problems:
        return Finding(
            name=name,
            outcome="fail",
            evidence=evidence,
            sentence=shorten_list(problems, separator="; ", last="; and "),
            next_step="see the finding in the report; names of findings and evidence are as the report writes them",
        )
    return Finding(
        name=name,
        outcome="pass",
        evidence=evidence,
        sentence=f"{len(answered)} findings are there, {checked} numbers within their bounds",
    )


def _outside(value: Value, bounds: Bounds) -> str:
    """How a piece of evidence breaks its bounds; empty where it does not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"is {value!r}, no number"
    if bounds.min is not None and not value >= bounds.min:
        return f"{value:.6g} below {bounds.min:g}"
    if bounds.max is not None and not value <= bounds.max:
        return f"{value:.6g} above {bounds.max:g}"
    return ""


def _expectation(entry: ExpectedFailure, report: Report) -> Iterator[Finding]:
    """A warning where an expected failure does not fail: then the entry hides whatever fails there next."""
    named = [finding for finding in report.findings if fnmatchcase(finding.name, entry.finding)]
    if any(finding.outcome == "fail" for finding in named):
        return
    outcomes = ", ".join(f"{finding.name} is {finding.outcome}" for finding in named[:LISTED_FINDINGS])
    yield Finding(
        name=f"policy.expected {entry.finding}",
        outcome="warn",
        evidence=(("until", entry.until.isoformat()), ("because", entry.because)),
        sentence=f"was expected to fail and does not: {outcomes or 'no finding of that name is in the report'}",
        next_step="take the entry out of gate.expected",
    )
