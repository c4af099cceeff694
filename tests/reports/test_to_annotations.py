"""GitHub annotations: levels, escapes, and what is said when there are more than GitHub shows."""

import re
from collections.abc import Callable
from dataclasses import replace

from parity.reports.record import Finding, Report
from parity.reports.to_annotations import paint


def test_levels_and_order(small: Report) -> None:
    assert [line.partition("::")[2].partition(" ")[0] for line in paint(small).splitlines()] == [
        "error",
        "error",
        "warning",
        "notice",
    ]
    assert paint(small).splitlines()[1] == (
        "::error title=FAIL dispatch (wrong-backend)::fla-interpreted was asked for, but layer 3 ran torch's "
        "fallback in 6 of 6 calls.%0Anext: Install flash-linear-attention, or ask for --backend torch."
    )
    assert paint(small).splitlines()[3] == "::notice title=1 finding was skipped::backends.cuda"


def test_a_clean_pass_says_nothing(small: Report) -> None:
    assert paint(replace(small, findings=small.findings[:1])) == ""


def unescaped(text: str) -> str:
    """What GitHub makes of an escaped text (its runner's command parser: percent last)."""
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_texts_stay_texts(report_of: Callable[..., Report], hostile: str) -> None:
    name = "a:b,c::error::%0A"
    found = Finding(name=name, outcome="fail", sentence=f"50%\n::error::x\r{hostile}", next_step="n%2C")
    (line,) = paint(report_of(findings=(found,))).splitlines()
    title, text = re.fullmatch(r"::error title=([^:,]*)::(.*)", line).groups()  # type: ignore[union-attr]
    assert unescaped(title) == f"FAIL {name}"
    assert unescaped(text).startswith("50%\\n::error::x\\r</script>") and unescaped(text).endswith(
        "next: n%2C"
    )
    assert "\x1b" not in line and "\x00" not in line


def test_more_than_github_shows_is_said(report_of: Callable[..., Report]) -> None:
    def lines(errors: int, warnings: int) -> list[str]:
        findings = [
            Finding(name=f"{outcome}{n}", outcome=outcome, sentence="s", next_step="n")  # type: ignore[arg-type]
            for outcome, count in (("fail", errors), ("warn", warnings))
            for n in range(count)
        ]
        return paint(report_of(findings=tuple(findings))).splitlines()

    assert len(lines(10, 10)) == 20 and "more" not in "".join(lines(10, 10))
    many = lines(12, 11)
    assert len(many) == 20
    assert many[9] == "::error title=3 more::fail9, fail10, fail11"
    assert many[19] == "::warning title=2 more::warn9, warn10"
