"""The table that a check ends with: every suspicion is ruled out, found, or not tested, with the reason.

    summarise_suspicions(report.findings, {"trainer": "no recipe was given"})

Which findings answer a suspicion is in the entry of the probe that answers it (`parity.probes.table`).
"""

from collections.abc import Mapping, Sequence

from parity.probes.table import ProbeEntry, SuspicionRule, list_suspicions
from parity.reports.record import Finding, Suspicion, Verdict


def summarise_suspicions(
    findings: Sequence[Finding], unasked: Mapping[str, str] | None = None
) -> tuple[Suspicion, ...]:
    """Return every suspicion with its verdict.

    Args:
        findings: of all probes that ran.
        unasked: why there are none, where there are none: `target`, `trainer` or a probe's name -> the reason.
    """
    return tuple(_judge(entry, rule, findings, unasked or {}) for entry, rule in list_suspicions())


def _judge(
    entry: ProbeEntry, rule: SuspicionRule, findings: Sequence[Finding], unasked: Mapping[str, str]
) -> Suspicion:
    """One row of the table, from the findings whose names begin as the rule says."""
    names = rule.findings or (entry.name,)
    mine = [f for f in findings if any(f"{f.name}.".startswith(f"{name}.") for name in names)]
    failed = [f for f in mine if f.outcome == "fail"]
    passed = [f for f in mine if f.outcome == "pass"]
    unanswered = [f for f in mine if f.outcome in ("error", "skipped", "warn")]
    # A capture whose backend did not run is no evidence for any question but the one about backends.
    unproven = [f for f in failed if f.fault == "dispatch" and entry.name != "dispatch"]
    verdict: Verdict = "not tested"
    if unproven:
        because = f"the captures are no evidence: {unproven[0].sentence}"
    elif failed:
        verdict, because = "found", failed[0].sentence
    elif not passed or (unanswered and rule.needs_all) or any(f.outcome == "error" for f in mine):
        side = "target" if entry.asks == "traces" else "trainer"
        nobody = unasked.get(names[0]) or unasked.get(side, "no probe asked")
        because = unanswered[0].sentence if unanswered else nobody
    else:
        verdict, because = "ruled out", passed[0].sentence
        if unanswered:
            because += f" ({len(unanswered)} of {len(mine)} checks gave no answer)"
    return Suspicion(name=rule.name, verdict=verdict, because=because, findings=tuple(f.name for f in mine))
