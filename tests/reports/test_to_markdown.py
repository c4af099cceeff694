"""The Markdown painter: GitHub tables, nothing of a report read as markup."""

import re
from collections.abc import Callable
from dataclasses import replace

from parity.reports.record import Column, Finding, Report, Suspicion, Table
from parity.reports.to_markdown import paint


def test_small_report(small: Report) -> None:
    text = paint(small)
    assert text.startswith("## ERROR: parity check: tiny target\n\n**1 probe broke")
    assert "\n| **PASS** | loading | AutoModel and AutoModelForCausalLM load the same weights. |\n" in text
    assert "\nNext: Install flash-linear-attention, or ask for --backend torch.\n" in text
    assert "\n| the kernels differ | **found** | Layer 3 ran the wrong kernel. |\n" in text
    assert "\n```text\nTraceback:\n  line 1\nSegmentation fault\n```\n" in text
    table = "| layer | kind | local error (relative L2) | minimum cosine |\n| --: | :-- | --: | --: |\n"
    assert table + "| 0 | linear | 2.31e-7 | 0.99984 |\n" in text
    assert "Error per token (1 row)" in text and text.endswith("fp64 pass covered 4 of 12 layers.\n")


def test_hostile_texts_stay_texts(report_of: Callable[..., Report], hostile: str) -> None:
    block = f"```\n<b>\n{hostile}"
    finding = Finding(
        name=hostile, outcome="fail", sentence=hostile, evidence=((hostile, block),), next_step=hostile
    )
    table = Table(name="t", title=hostile, columns=(Column(key="a", title=hostile),), rows=((hostile,),))
    suspicion = Suspicion(name=hostile, verdict="found", because=f"{hostile} @all")
    report = report_of(title=hostile, findings=(finding,), suspicions=(suspicion,), tables=(table,))
    text = paint(replace(report, environment=((hostile, hostile),), notes=(hostile,)))
    outside = re.sub(r"(?ms)^````text$.*?^````$", "", text)
    assert "<script" not in outside and "<img" not in outside and "<!--" not in outside
    assert "@" not in outside.replace("&#64;", "")
    assert r"\`\*\_\[a\](http://b)" in outside
    for line in outside.splitlines():
        if line.startswith("| "):
            cells = len(re.findall(r"(?<!\\)\|", line)) - 1
            assert cells in (1, 2, 3)
    assert not any(character in text for character in "\x1b\x00\u202e")


def test_a_command_with_backticks_is_one_code_span(report_of: Callable[..., Report]) -> None:
    assert "\n`` parity `x` ``, c\n" in paint(report_of(command="parity `x`"))


def test_stays_below_what_github_shows(report_of: Callable[..., Report]) -> None:
    columns = (Column(key="a", title="a"), Column(key="b", title="b"))
    tables = tuple(
        Table(name=f"t{n}", title="t", columns=columns, rows=(("x" * 900,) * 2,) * 200) for n in range(20)
    )
    text = paint(report_of(tables=tables))
    assert len(text.encode()) < 1024 * 1024
    assert text.endswith("GitHub shows no longer summary.*\n") and "100 more rows" in text


def test_part_that_breaks_is_named_and_the_rest_painted(small: Report) -> None:
    text = paint(replace(small, findings=(None, *small.findings)))  # type: ignore[arg-type]
    assert "*head: not painted (AttributeError" in text or "*findings: not painted (AttributeError" in text
    assert "the kernels differ" in text and "minimum cosine" in text
