"""A report as GitHub workflow commands, one annotation a finding that did not pass.

Printed by a step, they stand beside the merge request. GitHub shows ten errors and ten warnings of a step and
drops the rest silently, so the tenth says how many more there are.

    python -m parity gate REPORT --annotations
"""

from collections.abc import Iterator

from parity.reports import words
from parity.reports.record import Finding, Report

MOST_ANNOTATIONS = 10
"""Annotations of one level that GitHub shows for one step."""
LEVELS = {"error": "error", "fail": "error", "warn": "warning"}
"""What each outcome is called. A skip is no annotation of its own: they are counted in one notice."""


def paint(report: Report) -> str:
    """The annotations, a line each, with a newline at the end; the worst first. Empty for a clean pass."""
    lines: list[str] = []
    for level in ("error", "warning"):
        found = [each for each in words.worst_first(report.findings) if LEVELS.get(each.outcome) == level]
        lines += [
            _line(level, *_title_and_text(finding))
            for finding in found[: MOST_ANNOTATIONS - (len(found) > MOST_ANNOTATIONS)]
        ]
        if len(found) > MOST_ANNOTATIONS:
            names = ", ".join(words.plain(finding.name) for finding in found[MOST_ANNOTATIONS - 1 :])
            lines.append(_line(level, f"{len(found) - MOST_ANNOTATIONS + 1} more", names))
    lines += _notice(report)
    return "".join(f"{line}\n" for line in lines)


def _title_and_text(finding: Finding) -> tuple[str, str]:
    """Title and text: outcome and name, then the sentence and what to do."""
    fault = f" ({words.plain(finding.fault)})" if finding.fault else ""
    step = f"\nnext: {words.plain(finding.next_step)}" if finding.next_step else ""
    title = f"{words.label(finding.outcome)} {words.plain(finding.name)}{fault}"
    return title, words.plain(finding.sentence) + step


def _notice(report: Report) -> Iterator[str]:
    """One notice for all that was skipped: what was not compared did not pass."""
    skipped = [words.plain(finding.name) for finding in report.findings if finding.outcome == "skipped"]
    if skipped:
        title = f"{words.count_words(len(skipped), 'finding was', 'findings were')} skipped"
        yield _line("notice", title, ", ".join(skipped))


def _line(level: str, title: str, text: str) -> str:
    """One workflow command. What ends a command or a property is written as GitHub unescapes it."""
    return f"::{level} title={_escape(title, ':,')}::{_escape(text)}"


def _escape(text: str, also: str = "") -> str:
    """Percent first, or the escapes would be escaped; line ends always; `:` and `,` inside a property."""
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text
