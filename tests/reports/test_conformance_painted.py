"""Every painter shows the conformance statement, sentence by sentence, and survives what stands in it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from parity.reports import to_html, to_markdown, to_text
from parity.reports.record import Conformance, Finding, Report, Statement

SENTENCES = tuple(
    Statement(probe=f"probe{number}", sentence=f"sentence {number} " + "word " * 60) for number in range(13)
)
HOSTILE = Statement(probe="loss", sentence="<script>alert(1)</script> | `x` \x1b[31m")
REPORT = Report(
    kind="check",
    title="",
    created="",
    command="",
    subject=(),
    findings=(Finding(name="loss", outcome="pass", sentence="fine"),),
    conformance=Conformance(
        trainer="mine", recipe="ab", statements=(HOSTILE, *SENTENCES), unanswered=(("resume", "no run"),)
    ),
)


@pytest.mark.parametrize("paint", [to_text.paint, to_html.paint, to_markdown.paint])
def test_every_sentence_is_shown_and_none_runs(paint: Callable[[Report], str]) -> None:
    text = paint(REPORT)
    assert all(f"sentence {number} " in text.replace("\n", " ") for number in range(13))
    assert "no run" in text and "\x1b[31m" not in text and "not painted" not in text
    if paint is not to_text.paint:
        assert "<script>alert(1)" not in text


@pytest.mark.parametrize("paint", [to_text.paint, to_html.paint, to_markdown.paint])
def test_nothing_is_said_where_no_trainer_was_asked(paint: Callable[[Report], str]) -> None:
    assert "onformance statement" not in paint(replace(REPORT, conformance=None))


def test_text_stays_within_80_columns() -> None:
    assert max(len(line) for line in to_text.paint(REPORT).splitlines()) <= 80
