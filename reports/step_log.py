"""A training run's step reports on disk: JSON lines, one step a line, readable while the run goes on.

The last line of a run that was killed may be cut short: a reader leaves it out, the next writer removes it.
A resumed run goes back to its checkpoint and writes those steps again: of the steps it went back over, only
what it wrote last counts.

    for step in read(Path("parity-train/steps.jsonl")): ...
"""

import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from parity.errors import ParityError
from parity.reading import decode_json
from parity.reports.record import StepReport
from parity.reports.schema import step_from_dict, step_to_dict

STEP_LOG_NAME = "steps.jsonl"
"""What the file is called in the folder of a run."""


def line(step: StepReport) -> str:
    """The step on one line of strict JSON in ASCII, with a newline at the end."""
    return json.dumps(step_to_dict(step), allow_nan=False, separators=(",", ":")) + "\n"


def append(path: Path, step: StepReport) -> None:
    """Add one step to the file, which need not exist, in a single write; a cut last line is removed first."""
    with open(path, "a+b", buffering=0) as file:  # unbuffered: a reader sees a line whole, or its beginning
        _end_last_line(file, path)
        file.write(line(step).encode("ascii"))


def _end_last_line(file: FileIO, path: Path) -> None:
    """Removes what follows the last newline, or ends it where it is whole."""
    size = file.seek(0, os.SEEK_END)
    if not size or os.pread(file.fileno(), 1, size - 1) == b"\n":
        return
    content = path.read_bytes()
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:])
    except ValueError:
        file.truncate(start)
    else:
        file.write(b"\n")


def read_step_log(path: str | Path) -> tuple[StepReport, ...]:
    """The steps in the file, rising. A cut last line is left out; an empty file has no steps.

    Raises ParityError where there is no file, or where any other line is no step report.
    """
    kept: list[StepReport] = []
    for step in _lines(Path(path)):
        while kept and kept[-1].step >= step.step:
            kept.pop()
        kept.append(step)
    return tuple(kept)


def _lines(path: Path) -> Iterator[StepReport]:
    """Every whole line as a step, in the file's order."""
    asked = f"read {path} as step reports"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ParityError(asked, error.strerror or str(error), "check the path") from None
    lines = content.split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        source = f"line {number} of {path}"
        try:
            data = decode_json(text)
        except ValueError as error:
            if number == len(lines):  # no newline after it: it is being written, or never was whole
                return
            found = f"no JSON in line {number} ({str(error)[:80]})"
            raise ParityError(asked, found, "give the file as parity wrote it") from None
        yield step_from_dict(data, source=source)
