"""The answers of wiring probes: findings made from deviations, the statement beside them, and a probe that broke.

fault = FoundDeviation(name="noise-std", measured=".05 declared, .03 measured")
return make_probe_answer("noise", "gaussian noise, std .03", [fault], facts={"noise.std": 0.03})
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parity.probes.base import ProbeAnswer
from parity.probes.deviations import deviation
from parity.reports.record import WORST_FIRST, Finding, Outcome, Statement, Table, Value


@dataclass(frozen=True, slots=True)
class FoundDeviation:
    """A deviation that a probe found."""

    name: str
    """A row of `parity.probes.deviations`."""
    measured: str
    """The measured numbers in words; follows the row's own sentence."""
    evidence: Mapping[str, Value] = field(default_factory=dict)
    """Measured numbers by their names in the report."""
    outcome: Outcome = "fail"


def make_probe_answer(
    name: str,
    sentence: str,
    faults: Sequence[FoundDeviation] = (),
    *,
    facts: Mapping[str, Value] | None = None,
    tables: Sequence[Table] = (),
) -> ProbeAnswer:
    """Make a wiring probe's answer: one finding for each fault, worst first, or one that passes.

    Args:
        name: the probe. Findings are called `name`, `name.1`, ...
        sentence: what was measured, right or wrong. It is the finding that passes, and with `facts` the probe's part
            of the conformance statement.
        faults: what was found; none means that the probe passes.
        facts: measured facts by stable dotted names (`loss.gamma`), which later statements are compared with.
        tables: tables of the report that the findings refer to.
    """
    pairs, shown = tuple((facts or {}).items()), tuple(table.name for table in tables)
    findings = [
        Finding(
            name=name if index == 0 else f"{name}.{index}",
            outcome=fault.outcome,
            sentence=f"{deviation(fault.name).sentence}: {fault.measured}",
            fault=fault.name,
            evidence=tuple(fault.evidence.items()),
            next_step=deviation(fault.name).do,
            tables=shown,
        )
        for index, fault in enumerate(sorted(faults, key=lambda each: WORST_FIRST.index(each.outcome)))
    ]
    # Nothing found: what was measured is the finding.
    if not findings:
        findings = [Finding(name=name, outcome="pass", sentence=sentence, evidence=pairs, tables=shown)]
    statement = Statement(probe=name, sentence=sentence, facts=pairs)
    return ProbeAnswer(findings=tuple(findings), tables=tuple(tables), statement=statement)


def one(
    name: str,
    outcome: Outcome,
    sentence: str,
    *,
    evidence: tuple[tuple[str, Value], ...] = (),
    next_step: str = "",
) -> ProbeAnswer:
    """Make an answer of one finding and no statement."""
    finding = Finding(name=name, outcome=outcome, sentence=sentence, evidence=evidence, next_step=next_step)
    return ProbeAnswer(findings=(finding,))


def make_broken_answer(name: str, error: Exception) -> ProbeAnswer:
    """Make the answer of a probe that raised: a finding `error` with the traceback's last lines."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return one(
        name,
        "error",
        f"the probe itself broke: {type(error).__name__}: {error}",
        evidence=(("traceback", "\n".join(lines[-12:])),),
        next_step="report it to parity with this report",
    )
