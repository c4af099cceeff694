"""The conformance statement: what a trainer's wiring was measured to be, beside its checkpoint, compared later.

    save(conformance, Path("run/conformance.json"))
    report = compare_statements(read(old), read(new))

Two statements are compared fact by fact. A fact that only one side has, or a probe that only one side
answered, fails: what was not compared is no pass. Facts that move with the weights are no facts of the wiring
(`MEASUREMENTS`).
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from parity.errors import ParityError
from parity.reports import schema
from parity.reports.record import Conformance, Finding, Report, Statement, Table, Value, declare_columns

RELATIVE = 5e-3
"""Two measured numbers closer than this are the same fact. Probes ask the same synthetic rows with the same seeds, so
that what differs is the trainer; half a percent is far below any wiring change and above rounding in bf16."""


MEASUREMENTS = ("residual", "distance", "apart", "denominator", "unread")
"""Last part of the names of facts that are shown and not compared: how well something was explained (residual), by how
much two computations of the same are apart (distance, apart), the number that the loss of the probe's row was divided
by (denominator: under D-PACE it depends on the drafter's confidence), and slots whose label could not be read because
the drafter was sure (unread). They move as the weights do; what the wiring is stands in the facts beside them
(recognised, precision, reduction, slots), and each has its limit in its probe."""


SHARE = ".share."
"""In the names of facts that are shares of a whole, 0 to 1: one that a side does not have is 0 there, and they are
compared by their difference. A term at 1e-5, seen one time and not the next, is rounding."""


def is_measurement(fact: str) -> bool:
    """Whether a fact of this name moves with the weights, the wiring being the same."""
    return fact.rpartition(".")[2] in MEASUREMENTS


def save_conformance(conformance: Conformance, file: Path) -> None:
    """Write it as JSON, whole or not at all."""
    text = json.dumps(schema.conformance_to_dict(conformance), indent=1, ensure_ascii=False)
    temporary = file.with_name(file.name + ".writing")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, file)


def read_conformance(file: str | Path) -> Conformance:
    """The statement in a conformance.json, or in a report that has one. Raises ParityError for anything else."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        do = "give a conformance.json, or the report.json of a check with a trainer"
        raise ParityError(f"read {path} as a conformance statement", str(error), do) from error
    data = schema.parse_json(text, str(path))
    if isinstance(data, dict) and data.get("schema") == schema.CONFORMANCE_SCHEMA:
        return schema.conformance_from_dict(data, source=str(path))
    report = schema.from_dict(data, source=str(path))
    if report.conformance is None:
        do = "check with a recipe or an adapter: only a trainer's wiring makes a statement"
        raise ParityError(f"the conformance statement of {path}", "a report without one", do)
    return report.conformance


def is_statement(file: str | Path) -> bool:
    """Whether a path is a file that holds a conformance statement."""
    path = Path(file)
    if not path.is_file() or path.suffix != ".json":
        return False
    try:
        read_conformance(path)
    except ParityError:
        return False
    return True


def compare_statements(a: Conformance, b: Conformance) -> Report:
    """What changed from statement `a` to statement `b`: a finding for each probe that either answered."""
    sides = [{statement.probe: statement for statement in side.statements} for side in (a, b)]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    if not names:
        raise ParityError("compare two conformance statements", "no statement in either", "check again")
    findings, rows = list[Finding](), list[tuple[Value, ...]]()
    reasons = dict(a.unanswered), dict(b.unanswered)
    for name in names:
        pair = sides[0].get(name), sides[1].get(name)
        if pair[0] is None or pair[1] is None:
            side = 0 if pair[0] is None else 1
            why = reasons[side].get(name, "not in its list")
            sentence = f"statement {'AB'[side]} has no answer: {why}"
            findings.append(
                Finding(
                    name=name,
                    outcome="fail",
                    sentence=sentence,
                    fault="conformance-changed",
                    next_step="check both sides with the same adapter and version",
                )  # fmt: skip
            )
            continue
        findings.append(_finding(name, pair[0], pair[1]))
        rows += _rows(name, pair[0], pair[1])
    table = Table(
        name="facts",
        title="Facts of both statements",
        columns=declare_columns("probe | fact | a A | b B | same:flag"),
        rows=tuple(rows),
        caption="Measurements move with the weights: they are shown and not compared.",
        detail=all(finding.outcome == "pass" for finding in findings),
    )
    return Report(
        kind="compare",
        title=f"conformance: {a.trainer} against {b.trainer}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command="parity compare",
        subject=(("A", a.trainer), ("recipe of A", a.recipe), ("B", b.trainer), ("recipe of B", b.recipe)),
        findings=tuple(findings),
        tables=(table,),
    )


def _finding(name: str, a: Statement, b: Statement) -> Finding:
    """Whether one probe measured the same twice."""
    old, new = dict(a.facts), dict(b.facts)
    compared = [fact for fact in dict.fromkeys([*old, *new]) if not is_measurement(fact)]
    if not compared:
        same = a.sentence == b.sentence
        changed = [] if same else [f"{a.sentence} -> {b.sentence}"]
    else:
        changed = [
            f"{fact}: {_format_fact(old.get(fact, 'absent'))} -> {_format_fact(new.get(fact, 'absent'))}"
            for fact in compared
            if not _is_unchanged(fact, old, new)
        ]
    if not changed:
        return Finding(name=name, outcome="pass", sentence=f"unchanged: {b.sentence}")
    return Finding(
        name=name,
        outcome="fail",
        sentence="; ".join(changed),
        fault="conformance-changed",
        evidence=(("A", a.sentence), ("B", b.sentence)),
        next_step="find the change between the two: recipe, trainer's version or code",
    )


def _rows(name: str, a: Statement, b: Statement) -> list[tuple[Value, ...]]:
    old, new = dict(a.facts), dict(b.facts)
    return [
        (
            name,
            fact,
            _format_fact(old.get(fact, "absent")),
            _format_fact(new.get(fact, "absent")),
            None if is_measurement(fact) else _is_unchanged(fact, old, new),
        )  # fmt: skip
        for fact in dict.fromkeys([*old, *new])
    ]


def _is_unchanged(fact: str, old: Mapping[str, Value], new: Mapping[str, Value]) -> bool:
    """Whether both sides have the same fact."""
    if SHARE in fact:
        shares = [side.get(fact, 0.0) for side in (old, new)]
        numbers = [float(share) for share in shares if isinstance(share, int | float)]
        return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= RELATIVE
    return fact in old and fact in new and _same(old[fact], new[fact])


def _format_fact(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _same(a: Value, b: Value) -> bool:
    """The same fact: numbers within RELATIVE, anything else equal."""
    if (
        isinstance(a, bool)
        or isinstance(b, bool)
        or not isinstance(a, int | float)
        or not isinstance(b, int | float)
    ):
        return a == b
    if math.isnan(a) and math.isnan(b):
        return True
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-12)
