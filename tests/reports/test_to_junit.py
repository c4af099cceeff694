"""The JUnit painter, read back by junitparser and validated against a schema."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite
from lxml import etree

from parity.reports.record import Finding, Report
from parity.reports.to_junit import paint

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


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


@pytest.fixture(scope="module")
def schema() -> etree.XMLSchema:
    return etree.XMLSchema(etree.parse(GOLDEN / "junit.xsd"))


def test_what_is_written_is_valid(
    schema: etree.XMLSchema, small: Report, big: Report, report_of: Callable[..., Report], hostile: str
) -> None:
    finding = Finding(name=hostile, outcome="fail", sentence=hostile, next_step=hostile, fault=hostile)
    odd = report_of(
        title=hostile, created="2026-01-02T03:04:05+00:00", findings=(finding,), subject=(("x", hostile),)
    )
    empty = report_of(created="2026-01-02T03:04:05Z")
    for report in (small, big, odd, empty):
        schema.assertValid(etree.fromstring(paint(report).encode()))


@pytest.mark.parametrize(
    ("created", "timestamp"),
    [
        ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05"),
        ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:05"),
        ("2026-01-02T03:04:05.6+02:00", "2026-01-02T01:04:05"),
        ("yesterday", None),
    ],
)
def test_the_timestamp_is_utc_without_a_zone(
    report_of: Callable[..., Report], created: str, timestamp: str | None
) -> None:
    assert _suite(report_of(created=created)).timestamp == timestamp


def test_pytests_own_output_is_valid_too(schema: etree.XMLSchema, tmp_path: Path) -> None:
    """The schema is ours: that it describes the common format is shown by a writer that is not."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_a(record_property): record_property('k', 1)\ndef test_b(): print(1); assert 0\n"
        "@pytest.mark.skip\ndef test_c(): ...\n@pytest.fixture\ndef f(): 1 / 0\ndef test_d(f): ...\n"
    )
    out = tmp_path / "out.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={out}",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout
    schema.assertValid(etree.parse(out))


@pytest.mark.parametrize(
    ("text", "to"),
    [
        ('tests="5"', 'tests="many"'),
        ('tests="5"', ""),
        ("<testcase ", "<case "),
        (' classname="parity.check"', ""),
        ('timestamp="2026-01-02T03:04:05"', 'timestamp="2026-01-02T03:04:05Z"'),
        ('timestamp="2026-01-02T03:04:05"', 'timestamp="yesterday"'),
        ('time="41.2"', 'time="-1"'),
        ("<properties>", "<properties><testcase/>"),
        ("</testsuite>", "<properties><property name='a'/></properties></testsuite>"),
    ],
)
def test_the_schema_refuses_what_is_wrong(schema: etree.XMLSchema, small: Report, text: str, to: str) -> None:
    painted = paint(small)
    assert text in painted
    wrong = painted.replace(text, to).replace("</testcase>", "</case>" if to == "<case " else "</testcase>")
    assert not schema.validate(etree.fromstring(wrong.encode()))
