"""A table as lines of text: numbers never broken, texts wrapped, too many columns split into blocks.

Used by `to_text` alone. rich's own tables give every column a share of the width, which breaks numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from parity.reports import words
from parity.reports.record import Table

GAP = "  "
TEXT_TABLE_ROWS = 200
"""Rows that a terminal shows of one table; 64 layers in three series fit."""
NARROW, WIDE = 16, 30
"""Columns that a text may be wrapped to, where the table is too wide and where it is not."""
MAX_KEYS = 3
"""First columns that a further block repeats, at most."""


@dataclass(frozen=True, slots=True)
class _Track:
    """One column as it is painted."""

    heading: str
    cells: list[str]
    numeric: bool
    least: int
    """The narrowest it may be."""
    natural: int
    """The width at which nothing wraps."""


def paint(table: Table, *, width: int, styles: Mapping[str, str]) -> Iterator[Text]:
    """The table's lines. A cell of kind `outcome` takes the style of its text."""
    if not table.columns or not table.rows:
        yield Text("(no rows)")
        return
    tracks = [_track(table, index) for index in range(len(table.columns))]
    outcomes = {index for index, column in enumerate(table.columns) if column.kind == "outcome"}
    for number, block in enumerate(_blocks(tracks, _keys(table), width)):
        if number:
            yield Text()
        yield from _block(tracks, block, outcomes, width=width, styles=styles)
    if len(table.rows) > TEXT_TABLE_ROWS:
        yield Text(f"... {len(table.rows) - TEXT_TABLE_ROWS} more rows, in the JSON and HTML reports")


def _track(table: Table, index: int) -> _Track:
    column = table.columns[index]
    cells = words.column_cells(words.values_of(table, index, slice(TEXT_TABLE_ROWS)))
    heading = words.heading(column)
    widest = max(cell_len(text) for text in cells)
    word = max(cell_len(text) for text in heading.split(" "))
    keep = column.kind != "text"
    least = max(widest if keep else min(widest, NARROW), min(word, NARROW))
    natural = max(widest, min(cell_len(heading), WIDE) if not keep else word)
    return _Track(heading, cells, words.is_numeric(column), least, max(natural, least))


def _keys(table: Table) -> int:
    """How many first columns tell the rows apart: those are repeated beside every block."""
    last = min(MAX_KEYS, len(table.columns) - 1)
    for count in range(1, last):
        if len({row[:count] for row in table.rows}) == len(table.rows):
            return count
        if table.columns[count].kind == "float":
            return count
    return max(1, last) if len(table.columns) > 1 else 0


def _blocks(tracks: list[_Track], keys: int, width: int) -> Iterator[list[int]]:
    """The columns of each block: all in one where they fit, else as many as fit beside the keys."""
    every = list(range(len(tracks)))
    if _width([tracks[index].least for index in every]) <= width:
        yield every
        return
    if _width([track.least for track in tracks[:keys]]) > width // 2:
        keys = 1
    block = every[:keys]
    for index in every[keys:]:
        wider = [tracks[each].least for each in [*block, index]]
        if len(block) > keys and _width(wider) > width:
            yield block
            block = every[:keys]
        block = [*block, index]
    yield block


def _width(widths: list[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _block(
    tracks: list[_Track], block: list[int], outcomes: set[int], *, width: int, styles: Mapping[str, str]
) -> Iterator[Text]:
    """The lines of one block: headings at the bottom of their line, a rule, the rows."""
    shown = [tracks[index] for index in block]
    widths = _stretch_columns(shown, width)
    heads = [_wrap_text(track.heading, size) for track, size in zip(shown, widths, strict=True)]
    height = max(len(head) for head in heads)
    for line in range(height):
        texts = [([""] * (height - len(head)) + head)[line] for head in heads]
        yield _line(texts, shown, widths, ["bold"] * len(shown))
    yield Text(GAP.join("─" * size for size in widths), style="dim")
    for row in range(len(shown[0].cells)):
        cells = [_wrap_text(track.cells[row], size) for track, size in zip(shown, widths, strict=True)]
        looks = [styles.get(tracks[each].cells[row], "") if each in outcomes else "" for each in block]
        for line in range(max(len(parts) for parts in cells)):
            yield _line([parts[line] if line < len(parts) else "" for parts in cells], shown, widths, looks)


def _stretch_columns(shown: list[_Track], width: int) -> list[int]:
    """The columns' widths: the narrowest, and what is left over given to those that would wrap."""
    widths = [track.least for track in shown]
    spare = width - _width(widths)
    while spare > 0:
        short = [index for index, track in enumerate(shown) if widths[index] < track.natural]
        if not short:
            break
        narrowest = min(short, key=lambda index: widths[index] / shown[index].natural)
        widths[narrowest] += 1
        spare -= 1
    return widths


_CONSOLE = Console(width=80, _environ={})
"""Only measures and wraps; nothing is printed on it."""


def _wrap_text(text: str, width: int) -> list[str]:
    """The text's lines of at most `width` columns; a longer word is cut."""
    if cell_len(text) <= width:
        return [text]
    return [line.plain.rstrip() for line in Text(text).wrap(_CONSOLE, max(width, 2))]


def _line(texts: list[str], tracks: list[_Track], widths: list[int], styles: list[str]) -> Text:
    """One line of a block, padded to the columns' widths."""
    line = Text()
    for position, (text, track) in enumerate(zip(texts, tracks, strict=True)):
        blanks = " " * max(0, widths[position] - cell_len(text))
        line.append(GAP if position else "")
        line.append(blanks if track.numeric else "")
        line.append(text, style=styles[position])
        line.append("" if track.numeric else blanks)
    return line
