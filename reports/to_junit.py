"""A report as JUnit XML, so that a CI service shows findings as tests. A `warn` passes, and says so.

python -m parity show REPORT.json --as junit > junit.xml
"""

from datetime import UTC, datetime

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from parity.reports import words
from parity.reports.record import Finding, Report

RESULTS = {"fail": Failure, "error": Error, "skipped": Skipped}


def paint(report: Report) -> str:
    """The report as one test suite with a test case a finding, in the report's order."""
    suite = TestSuite(f"parity {words.plain(report.kind)}")
    if (timestamp := _timestamp(report.created)) is not None:
        suite.timestamp = timestamp
    about = (("title", report.title), ("command", report.command))
    for name, value in (*about, *report.subject, *report.environment):
        suite.add_property(words.plain(name), words.cell(value))
    for finding in report.findings:
        suite.add_testcase(_case(report, finding))
    xml = JUnitXml("parity")
    xml.add_testsuite(suite)
    xml.update_statistics()
    suite.time = xml.time = report.seconds  # after the statistics, which would add up the cases' zeros
    text: str = xml.tostring().decode("utf-8")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text.rstrip()}\n'


def _timestamp(created: str) -> str | None:
    """UTC without a zone, which strict readers of JUnit do not know; None for what is no time."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        return None
    time = time.astimezone(UTC) if time.tzinfo else time
    return time.replace(tzinfo=None).isoformat(timespec="seconds")


def _case(report: Report, finding: Finding) -> TestCase:
    """A finding as a test case; its evidence is the result's text, or the output of a pass."""
    case = TestCase(words.plain(finding.name), classname=f"parity.{words.plain(report.kind)}", time=0.0)
    kind = RESULTS.get(finding.outcome)
    if kind is None:
        case.system_out = _text(finding)
        return case
    result = kind(words.plain(finding.sentence), words.plain(finding.fault or finding.outcome))
    result.text = _text(finding)
    case.result = [result]
    return case


def _text(finding: Finding) -> str:
    """The finding in lines: outcome and sentence, evidence, next step."""
    text = [f"{words.label(finding.outcome)}: {words.plain(finding.sentence)}"]
    for name, value in finding.evidence:
        if words.is_block(value):
            text += [f"{words.plain(name)}:", *(f"  {line}" for line in words.lines(str(value)))]
        else:
            text.append(f"{words.plain(name)} = {words.cell(value)}")
    if finding.next_step:
        text.append(f"next: {words.plain(finding.next_step)}")
    return "\n".join(text)
