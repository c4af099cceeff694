"""Numbers and texts as every painter writes them."""

import json
import math
from collections.abc import Callable

import pytest

from parity.reports import schema, to_html, to_markdown, to_text, words
from parity.reports.record import Report, Suspicion, Verdict


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (-1.0, "-1"),
        (2.46e-7, "2.46e-7"),
        (2e-6, "2e-6"),
        (0.0453, "0.0453"),
        (0.5, "0.5"),
        (0.49996, "0.500"),
        (0.99984, "0.99984"),
        (0.99887, "0.99887"),
        (0.9999998, "0.9999998"),
        (1 - 2.2e-16, "1-2e-16"),
        (1 + 4.4e-16, "1+4e-16"),
        (-0.9999, "-0.9999"),
        (1.0000002, "1.0000002"),
        (1.31, "1.31"),
        (31.4159, "31.4"),
        (128.0, "128"),
        (12345.6, "12346"),
        (1.5e9, "1.5e9"),
        (-3.25e-5, "-3.25e-5"),
        (5e-324, "4.94e-324"),
        (1.7976931348623157e308, "1.80e308"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert words.number(value) == text


def test_a_column_is_written_in_one_way() -> None:
    assert words.column_cells([0.0, 2.3e-7, 0.0121]) == ["0", "2.3e-7", "1.21e-2"]
    assert words.column_cells([1.234567e-7, 2e-6]) == ["1.23e-7", "2.00e-6"]
    assert words.column_cells([1, None, True, "x", " the", ""]) == ["1", "-", "yes", "x", '" the"', '""']


def test_plain_spells_out_what_is_invisible() -> None:
    assert words.plain("a\nb\t\x1b[0m\u202e\ud800") == "a\\nb\\t\\x1b[0m\\u202e\\ud800"
    assert words.plain("x" * 3000).endswith("... (1000 more characters)")


def test_lines_keeps_the_end() -> None:
    kept = words.lines("\n".join(str(number) for number in range(100)))
    assert kept[0] == "... 60 earlier lines" and kept[-1] == "99" and len(kept) == 41


def test_worst_comes_first_and_order_is_kept(big: Report) -> None:
    outcomes = [finding.outcome for finding in words.worst_first(big.findings)]
    assert outcomes[:3] == ["warn", "skipped", "skipped"]
    names = [finding.name for finding in words.worst_first(big.findings)]
    assert names[3:5] == ["environment", "dispatch"]


def test_a_machines_list_is_no_comparison(report_of: Callable[..., Report]) -> None:
    assert words.verdict(report_of(kind="env")).startswith("This lists what one machine would run")
    assert words.verdict(report_of(kind="check")) == "Nothing was compared, and that is not a pass."


def test_a_reason_is_given_once() -> None:
    """Not tested for one reason: one after the other, the reason at the first. Answers keep theirs."""
    rows: tuple[tuple[str, Verdict, str], ...] = (
        ("a", "not tested", "no GPU"),
        ("b", "found", "no GPU"),
        ("c", "ruled out", "equal"),
        ("d", "not tested", "no GPU"),
        ("e", "ruled out", "equal"),
        ("f", "not tested", "no draft"),
        ("g", "not tested", "no GPU"),
    )
    made = words.reasons_once([Suspicion(name=n, verdict=v, because=b) for n, v, b in rows])
    assert [(each.name, because) for each, because in made] == [
        ("a", "no GPU"),
        ("d", "the same"),
        ("g", "the same"),
        ("b", "no GPU"),
        ("c", "equal"),
        ("e", "equal"),
        ("f", "no draft"),
    ]


@pytest.mark.parametrize("paint", [to_text.paint, to_html.paint, to_markdown.paint])
def test_painters_say_a_reason_once(paint: Callable[[Report], str]) -> None:
    names = ("the kernels differ", "the loader differs", "the machine differs")
    report = Report(
        kind="check",
        title="t",
        created="2026-01-02T03:04:05Z",
        command="parity check",
        subject=(),
        findings=(),
        suspicions=tuple(Suspicion(name=n, verdict="not tested", because="no other machine") for n in names),
    )
    text = paint(report).partition("application/json")[0]
    assert text.count("no other machine") == 1 and text.count("the same") == 2
    assert all(name in text for name in names)
    assert json.dumps(schema.to_dict(report)).count("no other machine") == 3


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (list("abcd"), "a, b, c, d"),
        (list("abcde"), "a, b, c, d and 1 more"),
    ],
)
def test_a_list_is_cut_and_says_how_much_is_left_out(names: list[str], text: str) -> None:
    assert words.shorten_list(names) == text


def test_a_list_has_its_own_separators() -> None:
    assert words.shorten_list(list("abc"), 2, "; ", last="; and ") == "a; b; and 1 more"


def test_a_number_has_the_noun_that_fits() -> None:
    assert [words.count_words(count, "tap") for count in (0, 1, 2)] == ["0 taps", "1 tap", "2 taps"]
    assert words.count_words(2, "finding is", "findings are") == "2 findings are"


def test_what_breaks_is_named_in_its_place() -> None:
    def broken() -> str:
        raise KeyError("gone")

    assert words.paint_or_say("head", lambda: "painted", str.upper) == "painted"
    assert words.paint_or_say("head", broken, str.upper) == "HEAD: NOT PAINTED (KEYERROR: 'GONE')"


def test_a_number_in_a_sentence_has_two_digits_unless_more_are_given() -> None:
    assert [words.format_number(value) for value in (0.004512, 1.24e-6, 3.0, math.inf)] == [
        "0.0045",
        "1.2e-06",
        "3",
        "inf",
    ]
    assert words.format_number(0.004512, 3) == "0.00451"
