"""The conformance statement: what a trainer's wiring was measured to be, beside its checkpoint, compared later.

    save_conformance(conformance, Path("run/conformance.json"))
    report = compare_statements(read(old), read(new))

Two statements are compared fact by fact (`list_changed_facts`, which gate, watch and compare share). A fact that only
one side has, or a probe that only one side answered, fails: what was not compared is no pass. Facts that move with the
weights are no facts of the wiring (`MEASUREMENTS`).
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from parity.errors import ParityError
from parity.files import write_atomically
from parity.reports import schema
from parity.reports.record import Conformance, Finding, Report, Statement, Table, Value, declare_columns

SAME_PART, SAME_SIZE, SAME_SHARE = 0.02, 1e-4, 5e-3
"""Two measured numbers are the same fact where they differ by at most 2 % of the larger, or by at most 1e-4; two shares
of a whole where they differ by at most half a percent of the whole. The smallest injected faults are far outside: gamma
4 against 5 (25 %), and a term of 1 % KL (one percent of the whole). Rounding is inside: probes give the same synthetic
rows and seeds each time, and what still moves are residuals near zero (a KL of 1e-13), which move by more than 2 % of
themselves, and values fitted in bf16."""


MEASUREMENTS = ("residual", "distance", "apart", "denominator", "unread")
"""Last part of the names of facts that are shown and not compared: how well something was explained (residual), by how
much two computations of the same are apart (distance, apart), the number that the loss of the probe's row was divided
by (denominator: under D-PACE it depends on the drafter's confidence), and slots whose label could not be read because
the drafter was sure (unread). They move as the weights do; what the wiring is stands in the facts beside them
(recognised, precision, reduction, slots), and each has its limit in its probe."""


SHARE = ".share."
"""In the names of facts that are shares of a whole, 0 to 1: one that a side does not have is 0 there. A term at 1e-5,
seen one time and not the next, is rounding."""


def is_measurement(fact: str) -> bool:
    """Whether a fact of this name moves with the weights, the wiring being the same."""
    return fact.rpartition(".")[2] in MEASUREMENTS


def list_changed_facts(then: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    """Return the names of the facts that are not the same in both: the one comparison of a wiring with another.

    Gate, watch and compare all use it. A fact of one side only is a change too; measurements are left out.

    Args:
        then: facts by their dotted names, as a statement or a finding's evidence has them.
        now: the same, of the later side.
    """
    names = [name for name in dict.fromkeys([*then, *now]) if not is_measurement(name)]
    return [name for name in names if not _is_same_fact(name, then, now)]


def _is_same_fact(name: str, then: Mapping[str, Value], now: Mapping[str, Value]) -> bool:
    if SHARE in name:
        shares = [side.get(name, 0.0) for side in (then, now)]
        numbers = [float(share) for share in shares if isinstance(share, int | float)]
        return len(numbers) == 2 and abs(numbers[0] - numbers[1]) <= SAME_SHARE
    return name in then and name in now and is_same_value(then[name], now[name])


def is_same_value(a: Value, b: Value) -> bool:
    """Whether two values state the same: texts, flags and counts exactly, measured numbers within the tolerance."""
    if not (isinstance(a, float) or isinstance(b, float)):
        return a == b and type(a) is type(b)
    numbers = [float(each) for each in (a, b) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < 2:
        return False
    x, y = numbers
    if not (math.isfinite(x) and math.isfinite(y)):
        return repr(x) == repr(y)
    return abs(x - y) <= max(SAME_SIZE, SAME_PART * max(abs(x), abs(y)))


def save_conformance(conformance: Conformance, file: Path) -> None:
    """Write it as JSON, whole or not at all."""
    text = json.dumps(schema.conformance_to_dict(conformance), indent=1, ensure_ascii=False)
    write_atomically(file, text + "\n")


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
    """Compare statement `b` with an earlier statement `a`: a finding for each probe that answered in either.

    Raises ParityError where neither has a statement.
    """
    sides = [{statement.probe: statement for statement in side.statements} for side in (a, b)]
    names = list(dict.fromkeys([*sides[0], *sides[1]]))
    if not names:
        raise ParityError("compare two conformance statements", "no statement in either", "check again")
    findings, rows = list[Finding](), list[tuple[Value, ...]]()
    reasons = dict(a.unanswered), dict(b.unanswered)
    # A probe that answered on one side only is a finding that fails: what was not compared is no pass.
    for name in names:
        pair = sides[0].get(name), sides[1].get(name)
        if pair[0] is None or pair[1] is None:
            side = 0 if pair[0] is None else 1
            why = reasons[side].get(name, "not in its list")
            sentence = f"statement {'AB'[side]} has no answer: {why}"
            step = "check both sides with the same adapter and version"
            findings.append(
                Finding(
                    name=name, outcome="fail", sentence=sentence, fault="conformance-changed", next_step=step
                )
            )
            continue
        findings.append(_finding(name, pair[0], pair[1]))
        rows += _rows(name, pair[0], pair[1])
    # Every fact of both, also those that are not compared.
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
    changed = [
        f"{fact}: {_format_fact(old.get(fact, 'absent'))} -> {_format_fact(new.get(fact, 'absent'))}"
        for fact in list_changed_facts(old, new)
    ]
    # Without a fact that can be compared, the sentences have to be the same: nothing compared is no pass.
    if all(is_measurement(fact) for fact in (*old, *new)) and a.sentence != b.sentence:
        changed = [f"{a.sentence} -> {b.sentence}"]
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
    """Rows of the table of facts: probe, fact, both values, and whether they are the same."""
    old, new = dict(a.facts), dict(b.facts)
    changed = set(list_changed_facts(old, new))
    return [
        (
            name,
            fact,
            _format_fact(old.get(fact, "absent")),
            _format_fact(new.get(fact, "absent")),
            None if is_measurement(fact) else fact not in changed,
        )
        for fact in dict.fromkeys([*old, *new])
    ]


def _format_fact(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
