"""A report as strict JSON. The format is described by `reports.schema`, which also reads it.

python -m parity show REPORT.json --as json
"""

import json
import re

from parity.reports.record import Report
from parity.reports.schema import to_dict


def paint(report: Report) -> str:
    """The report as indented JSON in ASCII (any file encoding holds it), with a newline at the end.

    A table's row stays on one line, so that the file can be read and compared by line.
    """
    data = to_dict(report)
    rows: list[str] = []
    for table in data["tables"]:
        table["rows"] = [_set_aside(row, rows) for row in table["rows"]]
    text = json.dumps(data, indent=1, allow_nan=False)
    return _MARK.sub(lambda mark: rows[int(mark[1])], text) + "\n"


_MARK = re.compile(r'\{\s*"\$row": ([0-9]+)\s*\}')
"""A row's place. No text can look like it: JSON escapes the quotes inside a text."""


def _set_aside(row: object, rows: list[str]) -> dict[str, int]:
    """Writes a row on one line, keeps it for later, and leaves a mark in its place."""
    rows.append(json.dumps(row, allow_nan=False))
    return {"$row": len(rows) - 1}
