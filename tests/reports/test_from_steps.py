"""A run's steps as one report: the moment of drift, timelines by name, findings with their step."""

import math
from typing import Any

import pytest

from parity.errors import ParityError
from parity.reports import from_steps, schema, to_html, to_json, to_text
from parity.reports.record import Column, Finding, Outcome, Report, StepReport, Table, Value


def finding(outcome: Outcome, name: str = "noise", fault: str | None = None) -> Finding:
    step = "" if outcome == "pass" else "look"
    return Finding(name=name, outcome=outcome, sentence=f"it is {outcome}", next_step=step, fault=fault)


def step(number: int, *findings: Finding, values: tuple[tuple[str, Value], ...] = ()) -> StepReport:
    table = Table(name="t", title="T", columns=(Column(key="a", title="a", kind="int"),), rows=((number,),))
    return StepReport(
        step=number, time=f"t{number}", values=values, findings=findings, tables=(table,), seconds=0.1
    )


def run_of(*outcomes: Outcome, **more: Any) -> Any:
    steps = [step(50 * n, finding(outcome)) for n, outcome in enumerate(outcomes, 1)]
    return from_steps.steps_report(steps, title="run", command="c", **more)


def test_the_first_bad_step_is_named() -> None:
    report = run_of("pass", "pass", "fail", "fail", "pass")
    (found,) = report.findings
    assert report.outcome == found.outcome == "fail"
    assert found.sentence == "first at step 150, at 2 of 5 probed steps: it is fail"
    assert dict(found.evidence) == {"first step": 150, "last step in order": 100}
    assert report.table("outcomes").rows == (
        (50, "noise", "pass", None, "it is pass"),
        (150, "noise", "fail", None, "it is fail"),
        (250, "noise", "pass", None, "it is pass"),
    )
    assert [table.name for table in report.tables if table.name.startswith("t@")] == [
        "t@50",
        "t@150",
        "t@250",
    ]


def test_an_error_outweighs_a_fail_and_nothing_but_skips_is_no_pass() -> None:
    assert run_of("fail", "error").findings[0].outcome == "error"
    assert run_of("skipped", "skipped").outcome == "skipped"
    passed = run_of("skipped", "pass", "skipped")
    assert (
        passed.outcome == "pass" and "at 1 of 3 probed steps, last at step 100" in passed.findings[0].sentence
    )


@pytest.mark.parametrize(
    ("outcomes", "marks"),
    [
        (("pass", "pass"), ()),
        (("pass", "fail", "fail"), ((100, "noise"),)),
        (("fail", "fail"), ((50, "noise"),)),
        (("pass", "fail", "pass", "error"), ((100, "noise"), (200, "noise"))),
        (("fail", "skipped", "fail"), ((50, "noise"),)),  # a step that was not judged is no recovery
        (("pass", "warn"), ()),
    ],
)
def test_drift(outcomes: tuple[Outcome, ...], marks: tuple[tuple[int, str], ...]) -> None:
    assert from_steps.drift([step(50 * n, finding(o)) for n, o in enumerate(outcomes, 1)]) == marks


def test_a_mark_names_the_fault_and_stands_on_every_timeline() -> None:
    steps = [
        step(1, finding("pass"), values=(("loss", 2.0), ("layer.1.snr", 3.0))),
        step(
            2,
            finding("fail", fault="noise-on-labels"),
            finding("fail", "labels"),
            values=(("loss", 1.5), ("layer.1.snr", 4.0)),
        ),
    ]
    report = from_steps.steps_report(steps, title="r", command="c")
    timelines = [table for table in report.tables if table.name.startswith("timeline.")]
    assert [table.name for table in timelines] == ["timeline.loss", "timeline.layer.*.snr"]
    assert timelines[1].title == "layer.1.snr over steps"  # a group of one has its own name
    for table in timelines:
        assert table.chart is not None and table.chart.marks == ((2, "noise-on-labels +1"),)
    assert (
        timelines[0].chart is not None and "(step 2: noise-on-labels, labels)" in timelines[0].chart.caption
    )


def numbers_of(report: Report) -> list[str]:
    """Names of the tables that the steps' numbers went into."""
    return [table.name for table in report.tables if table.name.startswith(("timeline.", "unchanged"))]


def test_what_never_changed_has_no_timeline_and_is_listed() -> None:
    steps = [
        step(
            n,
            values=(
                ("a.mean", 1.0 * n),
                ("slot.2.weight", 0.5),
                ("slot.10.weight", 0.25),
                ("loss.gamma", 4.0),
            ),
        )
        for n in (1, 2, 3)
    ]
    report = from_steps.steps_report(steps, title="r", command="c")
    assert numbers_of(report) == ["timeline.*.mean", "unchanged"]
    assert report.table("unchanged").rows == (
        ("slot.2.weight", 0.5, 3),
        ("slot.10.weight", 0.25, 3),
        ("loss.gamma", 4.0, 3),
    )
    only = from_steps.steps_report(steps[:1], title="r", command="c")
    assert (
        numbers_of(only) == ["unchanged"] and len(only.table("unchanged").rows) == 4
    )  # one step moves nothing, and hides nothing


def test_what_is_never_finite_has_not_changed() -> None:
    steps = [step(n, values=(("snr", math.nan),)) for n in (1, 2)]
    report = from_steps.steps_report(steps, title="r", command="c")
    assert numbers_of(report) == ["unchanged"]


def test_a_run_is_looked_at_for_its_loss_and_tau_before_its_moments() -> None:
    names = ("x.std", "x.mean", "lr", "layer.1.snr", "slot.1.accuracy", "tau.estimate", "loss")
    steps = [step(n, values=tuple((name, 1.0 * n) for name in names)) for n in (1, 2)]
    report = from_steps.steps_report(steps, title="r", command="c")
    assert [report.table(name).title.removesuffix(" over steps") for name in numbers_of(report)] == [
        "loss",
        "tau.estimate",
        "slot.1.accuracy",
        "layer.1.snr",
        "lr",
        "x.mean",
        "x.std",
    ]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("loss", ("loss", "loss")),
        ("fc_input.mean", ("*.mean", "fc_input")),
        ("layer.16.snr", ("layer.*.snr", "16")),
        ("grad.layers.3.slot.2.norm", ("grad.layers.*.slot.*.norm", "3.2")),
        ("a.b.std", ("*.std", "a.b")),
    ],
)
def test_values_are_grouped_by_name(name: str, group: tuple[str, str]) -> None:
    assert from_steps.column_group_of(name) == group


def test_timelines_sort_lines_by_number_and_choose_their_axis() -> None:
    def values(step: int) -> tuple[tuple[str, Value], ...]:
        return (
            ("slot.10.weight", 1e-4 * step),
            ("slot.2.weight", 1.0),
            ("a.mean", -1.0 * step),
            ("b.mean", 200.0),
        )

    report = from_steps.steps_report([step(n, values=values(n)) for n in (1, 2)], title="r", command="c")
    slots, means = report.table("timeline.slot.*.weight"), report.table("timeline.*.mean")
    assert [row[:2] for row in slots.rows] == [(1, "2"), (2, "2"), (1, "10"), (2, "10")]
    assert slots.chart is not None and slots.chart.log and slots.chart.series == "series"
    assert means.chart is not None and not means.chart.log
    assert report.outcome == "skipped"  # numbers without a finding were not judged


def test_texts_and_flags_are_listed_where_they_change() -> None:
    steps = [
        step(n, values=(("loss.kind", "hard CE" if n < 3 else "KL"), ("train", True))) for n in range(1, 5)
    ]
    rows = from_steps.steps_report(steps, title="r", command="c").table("changes").rows
    assert rows == (
        (1, "loss.kind", None, "hard CE"),
        (1, "train", None, True),
        (3, "loss.kind", "hard CE", "KL"),
    )


def test_every_painter_takes_it_and_no_step_is_an_error() -> None:
    report = run_of("pass", "fail")
    assert schema.read_report(to_json.paint(report)) == report
    assert "first at step 100" in to_text.paint(report) and "first at step 100" in to_html.paint(report)
    with pytest.raises(ParityError, match="no step report"):
        from_steps.steps_report([], title="r", command="c")
