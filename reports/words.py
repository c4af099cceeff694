"""What all painters say in the same words: numbers, verdicts, orders, and texts made safe to show.

Painters call this; nothing here knows a medium. Standard library only.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from parity.reports.record import WORST_FIRST, Column, Finding, Outcome, Report, Suspicion, Table, Value

MAX_LINES = 40
"""Lines shown of a text of several lines, the last ones: the end of a stderr says what went wrong."""
MAX_CHARACTERS = 2000
"""Characters shown of one line. The JSON holds all of them."""
LISTED = 4
"""Names that a sentence lists of many, unless it says how many."""

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
"""Controls (terminal escapes among them), characters that reorder or hide text, and what no file can hold."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def plain(text: str) -> str:
    """One line in which every control and every invisible character is spelled out, `\\n` for a newline."""
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text) - MAX_CHARACTERS} more characters)"
    return _UNSAFE.sub(lambda match: _SHORT.get(match[0]) or _spell(match[0]), text)


def _spell(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def lines(text: str) -> list[str]:
    """The last lines of a longer text, each made plain, with a note of what is left out."""
    parts = text.strip("\r\n").splitlines()
    left_out = len(parts) - MAX_LINES
    note = [f"... {left_out} earlier lines"] if left_out > 0 else []
    return note + [plain(part.expandtabs()) for part in parts[-MAX_LINES:]]


def is_block(value: Value) -> bool:
    """Whether a value is a text of several lines, to be shown as a block."""
    return isinstance(value, str) and "\n" in value.strip()


def number(value: float, *, scientific: bool = False, trim: bool = True) -> str:
    """A float in as few characters as tell it apart: `0`, `2.31e-7`, `0.0453`, `0.99984`, `nan`.

    Three digits; near 1 as many as show the distance from 1, because a cosine of .99984 is no 1.00.
    `0` and `1` are exact. `scientific` writes with an exponent what would do without; `trim` drops
    trailing zeros where that loses nothing.
    """
    if not math.isfinite(value):
        return str(float(value))
    if value in (0.0, 1.0, -1.0):
        return str(int(value))
    gap = abs(abs(value) - 1)
    scale = 1.0
    if gap < 1e-10:
        return f"{'-' if value < 0 else ''}1{'+' if abs(value) > 1 else '-'}{gap:.0e}"
    if gap < (0.01 if scientific else 0.1):
        text = f"{value:.{max(5 if gap < 0.01 else 3, math.ceil(-math.log10(gap)) + 1)}f}"
    elif scientific or not 1e-3 <= abs(value) < 1e5:
        text, exponent = f"{value:.2e}".split("e")
        scale = 10.0 ** int(exponent) if abs(int(exponent)) < 300 else 0.0
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    if trim and "." in text and math.isclose(float(text) * scale, value, rel_tol=1e-12):
        text = text.rstrip("0").rstrip(".")
    return text if scale == 1.0 else f"{text}e{int(exponent)}"


def format_number(value: float, digits: int = 2) -> str:
    """A measured number for a sentence, by default with two digits: `0.0045`, `1.2e-06`, `inf`.

    Args:
        value: The number.
        digits: Significant digits; trailing zeros are dropped.
    """
    return f"{value:.{digits}g}"


def cell(value: Value, *, scientific: bool = False, trim: bool = True) -> str:
    """A cell or a piece of evidence on one line. `-` stands for nothing; blanks at an end are quoted."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, scientific=scientific, trim=trim)
    if isinstance(value, str):
        text = plain(value)
        return text if text and text == text.strip() else f'"{text}"'
    return str(value)


def column_cells(values: Sequence[Value]) -> list[str]:
    """A column's cells: all floats with an exponent as soon as one needs it, and with as many digits."""
    floats = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    tiny = any(0 < abs(value) < 1e-3 for value in floats)
    short = all(float(number(value)) == value for value in floats if abs(abs(value) - 1) >= 1e-10)
    return [cell(value, scientific=tiny, trim=short) for value in values]


def is_numeric(column: Column) -> bool:
    """Whether a column's cells line up on the right."""
    return column.kind in ("int", "float")


def values_of(table: Table, index: int, rows: slice = slice(None)) -> list[Value]:
    """The values of one column; None where a row is too short."""
    return [row[index] if index < len(row) else None for row in table.rows[rows]]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by outcome, the worst ones first, otherwise in their order."""
    ranks = {outcome: rank for rank, outcome in enumerate(WORST_FIRST)}
    return sorted(findings, key=lambda finding: ranks.get(finding.outcome, -1))


def counts(report: Report) -> str:
    """How many findings of which outcome: `1 fail, 9 pass, 2 skipped`."""
    outcomes = [finding.outcome for finding in report.findings]
    parts = [f"{outcomes.count(outcome)} {outcome}" for outcome in WORST_FIRST if outcome in outcomes]
    return ", ".join(parts) or "no findings"


def verdict(report: Report) -> str:
    """The report's outcome in one sentence."""
    outcomes = [finding.outcome for finding in report.findings]
    failed, warned, broken = (outcomes.count(outcome) for outcome in ("fail", "warn", "error"))
    if report.outcome == "error":
        also = f" {count_words(failed, 'finding fails', 'findings fail')} beside it." if failed else ""
        return f"{count_words(broken, 'probe')} broke or had no power, so there is no verdict.{also}"
    if report.outcome == "fail":
        return f"{count_words(failed, 'finding is', 'findings are')} outside the limits."
    if report.outcome == "warn":
        return f"Nothing failed; {count_words(warned, 'finding is', 'findings are')} worth a look."
    if report.outcome == "pass":
        return "Everything that was compared is within its limits."
    if report.kind == "env" and not report.findings:
        return "This lists what one machine would run; nothing was compared."
    return "Nothing was compared, and that is not a pass."


def count_words(count: int, one: str, more: str = "") -> str:
    """A number with its noun: `1 row`, `2 rows`, `2 findings are`.

    Args:
        count: How many.
        one: The words that follow a 1.
        more: The words that follow any other number; empty: `one` with an `s`.
    """
    return f"{count} {one if count == 1 else more or one + 's'}"


def shorten_list(
    names: Sequence[str], limit: int = LISTED, separator: str = ", ", last: str = " and "
) -> str:
    """The first names of a list, and how many were left out: `a, b and 3 more`. Empty for an empty list.

    Args:
        names: What is listed, in reading order.
        limit: How many are written out at most.
        separator: What stands between two of them.
        last: What stands before the number of those left out.
    """
    left_out = len(names) - limit
    return separator.join(names[:limit]) + (f"{last}{left_out} more" if left_out > 0 else "")


def tally(suspicions: Iterable[Suspicion]) -> str:
    """How the suspicions ended: `6 ruled out, 1 found, 2 not tested`."""
    verdicts = [suspicion.verdict for suspicion in suspicions]
    known = ("found", "ruled out", "not tested")
    return ", ".join(f"{verdicts.count(each)} {each}" for each in known if each in verdicts)


THE_SAME = "the same"
"""Instead of a reason that the row above has given."""


def reasons_once(suspicions: Sequence[Suspicion]) -> list[tuple[Suspicion, str]]:
    """Suspicions with the text of their `because`. Those not tested for one reason follow the first of them, and say
    so instead of repeating it."""
    groups: dict[object, list[Suspicion]] = {}
    for index, each in enumerate(suspicions):
        groups.setdefault(each.because if each.verdict == "not tested" else index, []).append(each)
    return [
        (each, THE_SAME if position else each.because)
        for group in groups.values()
        for position, each in enumerate(group)
    ]


Painted = TypeVar("Painted")


def paint_or_say(name: str, paint_part: Callable[[], Painted], say: Callable[[str], Painted]) -> Painted:
    """A painted part; where painting raises, a sentence in its place: the rest of a report is still worth reading.

    Args:
        name: What the part is called in that sentence.
        paint_part: Paints the part.
        say: Makes of the sentence, which is not yet made plain, what the painter shows.
    """
    try:
        return paint_part()
    except Exception as error:
        return say(f"{name}: not painted ({type(error).__name__}: {error})")


def label(outcome: Outcome | str) -> str:
    """An outcome as it stands before a finding."""
    return str(outcome).upper()


def heading(column: Column) -> str:
    """A column's title with its unit."""
    return plain(f"{column.title} ({column.unit})" if column.unit else column.title)


def when(report: Report) -> str:
    """When it was made and how long that took, `2026-01-02T03:04:05Z, 41.2 s`."""
    took = f", {report.seconds:.1f} s" if report.seconds else ""
    return plain(report.created) + took
