"""The JUnit painter, read back by junitparser."""

from collections.abc import Callable

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from parity.reports.record import Finding, Report
from parity.reports.to_junit import paint


def _suite(report: Report) -> TestSuite:
    suites = list(JUnitXml.fromstring(paint(report).encode()))
    assert len(suites) == 1
    return suites[0]


def _case(suite: TestSuite, name: str) -> TestCase:
    return next(case for case in suite if case.name == name)


def test_findings_become_cases(small: Report) -> None:
    suite = _suite(small)
    assert (suite.name, suite.tests, suite.failures, suite.errors, suite.skipped) == (
        "parity check",
        5,
        1,
        1,
        1,
    )
    assert suite.time == 41.2 and suite.timestamp == "2026-01-02T03:04:05"
    assert [case.name for case in suite] == [finding.name for finding in small.findings]
    kinds = {case.name: [type(result) for result in case.result] for case in suite}
    assert kinds == {
        "loading": [],
        "dispatch": [Failure],
        "floor": [],
        "backends.cuda": [Skipped],
        "golden": [Error],
    }


def test_a_result_holds_sentence_evidence_and_next_step(small: Report) -> None:
    failure = _case(_suite(small), "dispatch").result[0]
    assert failure.type == "wrong-backend"
    assert failure.message.startswith("fla-interpreted was asked for")
    assert "layers proven = 8\n" in failure.text and failure.text.endswith("or ask for --backend torch.")


def test_a_warning_passes_and_is_heard(small: Report) -> None:
    case = _case(_suite(small), "floor")
    assert case.is_passed
    assert case.system_out == "WARN: The noise floor is one run only.\nnext: Run again with --reruns 3."


def test_hostile_texts_are_well_formed(report_of: Callable[..., Report], hostile: str) -> None:
    finding = Finding(
        name=hostile,
        outcome="error",
        sentence=hostile,
        evidence=((hostile, f"a\n{hostile}"),),
        next_step=hostile,
    )
    text = paint(report_of(title=hostile, findings=(finding,), environment=((hostile, hostile),)))
    case = next(iter(_suite(report_of(findings=(finding,)))))
    assert case.name.startswith("</script><script>alert(1)")
    assert "<script" not in text and "\x1b" not in text and "\x00" not in text


def test_nothing_found_is_an_empty_suite(report_of: Callable[..., Report]) -> None:
    assert _suite(report_of()).tests == 0
