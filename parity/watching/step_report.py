"""What a watch makes of one step and of the run: probes run, wiring compared with the first report, findings joined.

Everything here turns records into records; what is read from the step itself is in `slots` and `values`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from parity.environment import environment
from parity.gating.conformance import compare_statements
from parity.model.recipe.config import Recipe
from parity.probes.adapters.base import Adapter
from parity.probes.ask import conformance
from parity.probes.query import query_adapter
from parity.probes.table import TABLE
from parity.reports.from_steps import steps_report
from parity.reports.record import Conformance, Finding, Report, Statement, StepReport, Table, Value

STEP_TABLE = "step"
"""What the statement about the step itself is called, beside those of the probes."""


@dataclass(kw_only=True)
class StepFindings:
    """What has been found of one step so far, on this rank."""

    numbers: list[tuple[str, Value]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add(
        self,
        numbers: Sequence[tuple[str, Value]] = (),
        findings: Sequence[Finding] = (),
        tables: Sequence[Table] = (),
    ) -> None:
        """Put these behind what is there."""
        self.numbers += numbers
        self.findings += findings
        self.tables += tables


def run_probes(adapter: Adapter, probes: Sequence[str], found: StepFindings, *, copies: bool) -> Conformance:
    """Run these probes, and return their statements.

    Args:
        adapter: shows the watched trainer's step.
        probes: names of wiring probes.
        found: takes their findings and tables.
        copies: whether copies of the trainer's state are kept meanwhile, to put back from.
    """
    answers = query_adapter(adapter, probes, copies=copies)
    for _, answer in answers:
        found.add(findings=answer.findings, tables=answer.tables)
    return conformance(adapter, answers)


def merge_statements(
    now: Conformance | None, facts: Sequence[tuple[str, Value]] | None, recipe: Recipe | None
) -> Conformance:
    """Return the probes' statements, with one about the step itself behind them where it has facts.

    Args:
        now: the probes' statements, if any probe ran.
        facts: of the step itself, by dotted names.
        recipe: the declared wiring, if any.
    """
    if now is None:
        now = Conformance(
            trainer="watched module", recipe="none" if recipe is None else recipe.hash, statements=()
        )
    if facts is None:
        return now
    words = "; ".join(f"{name.removeprefix(f'{STEP_TABLE}.')}: {value}" for name, value in facts)
    own = Statement(probe=STEP_TABLE, sentence=words, facts=tuple(facts))
    return replace(now, statements=(*now.statements, own))


def compare_wiring(
    name: str, before: Conformance, now: Conformance, *, what: str, only: Sequence[str] | None = None
) -> list[Finding]:
    """Return one finding, whether the wiring is still that of `what`; no finding where there is nothing to compare.

    Args:
        name: of the finding.
        before: earlier statements.
        now: this step's.
        what: the earlier side in words.
        only: the probes that count; all by default. The statement about the step itself counts where both sides have
            one.
    """
    if before is now or not before.statements:
        return []
    # Which statements count, and how they compare.
    names = {statement.probe for statement in (*before.statements, *now.statements)}
    both = {s.probe for s in before.statements} & {s.probe for s in now.statements}
    counted = {n for n in names if (only is None or n in only) and (n != STEP_TABLE or n in both)}
    found = [f for f in compare_statements(before, now).findings if f.name in counted]
    changed = [finding for finding in found if finding.outcome == "fail"]
    if not found:
        return []
    if not changed:
        sentence = f"the wiring is that of {what}: {', '.join(finding.name for finding in found)} unchanged"
        return [Finding(name=name, outcome="pass", sentence=sentence)]
    row = changed[0]
    words = "; ".join(f"{finding.name}: {finding.sentence}" for finding in changed)
    return [
        Finding(
            name=name,
            outcome="fail",
            fault=row.fault,
            sentence=f"the wiring is no longer that of {what}: {words}",
            evidence=tuple((f"{f.name}, {side}", said) for f in changed for side, said in f.evidence),
            next_step=row.next_step,
        )
    ]


def finite(numbers: Sequence[tuple[str, Value]]) -> list[Finding]:
    """Return a finding about tensors with values that are not finite; none where no tensor was described.

    Args:
        numbers: of a step, by name. Names that end in `.finite` are shares of a tensor's values, 0 to 1.
    """
    shares = [(name.removesuffix(".finite"), value) for name, value in numbers if name.endswith(".finite")]
    bad = [(name, value) for name, value in shares if value != 1.0]
    if not shares:
        return []
    if not bad:
        return [Finding(name="finite", outcome="pass", sentence="every tensor of the step is finite")]
    words = ", ".join(f"{name} ({value:.4g} of it is)" for name, value in bad[:4])
    return [
        Finding(
            name="finite",
            outcome="fail",
            fault="not-finite",
            sentence=f"{len(bad)} of {len(shares)} tensors are not finite: {words}",
            evidence=tuple(bad),
            next_step="look at the states of this step, then at the learning rate",
        )
    ]


def first_failure(report: StepReport) -> Finding | None:
    """Return the finding by which a run that is to stop does: one that fails, or a trainer that a probe changed."""
    for finding in report.findings:
        if finding.outcome == "fail" or finding.name.endswith(".untouched"):
            return finding
    return None


def whole_run(
    steps: Sequence[StepReport], probes: Sequence[str] | None, first: Conformance | None, *, steps_done: int
) -> Report:
    """Return all step reports as one report.

    Args:
        steps: the probed steps, in order.
        probes: those that ran, None where hooks were all there was; the others are listed as not run.
        first: the first step's statements.
        steps_done: all steps of the run.
    """
    findings = tuple(_unasked_findings(probes))
    if steps:
        made = steps_report(
            steps, title=f"watch: {len(steps)} of {steps_done:,} steps", command="parity.watch"
        )
        made = replace(made, findings=(*made.findings, *findings))
    else:
        none = Finding(
            name="watch",
            outcome="skipped",
            sentence=f"none of {steps_done} steps was probed",
            next_step="lower `every` or `warmup`, or train longer",
        )
        made = Report(
            kind="train",
            title="watch: no step was probed",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command="parity.watch",
            subject=(),
            findings=(none, *findings),
        )
    return replace(made, environment=tuple(sorted(environment().items())), conformance=first)


def _unasked_findings(probes: Sequence[str] | None) -> list[Finding]:
    """The wiring probes that a watch did not run: one finding each where it could run none, else one for all."""
    left = {
        entry.name: entry.guards
        for entry in TABLE
        if entry.asks == "trainer" and entry.name not in (probes or ())
    }
    if probes is None:
        do = "write an adapter, and pass it as adapter="
        return [
            Finding(
                name=name,
                outcome="skipped",
                sentence=f"not asked (hooks cannot see it): {guards}",
                next_step=do,
            )
            for name, guards in left.items()
        ]
    sentence = f"wiring questions that are not among this watch's probes: {', '.join(left)}"
    do = "parity check asks all of them; name those to be asked on the way in probes"
    return [Finding(name="watch.unasked", outcome="skipped", sentence=sentence, next_step=do)] if left else []
