"""What a user can put right (`ParityError`) and what the exit codes mean. Nothing else lives here.

Three things are never mixed: a user's mistake (two lines, exit 2), a finding (exit 1), and a fault of
ours (a traceback, exit 4).
"""

import errno
import re
from enum import IntEnum

REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a system answers that will not have a file written: no space, no quota, too large, read only, not allowed."""


class ExitCode(IntEnum):
    """What a command's exit status says. The numbers are a promise; CI scripts depend on them."""

    OK = 0
    """Every finding is `pass` or `warn`."""
    FINDING = 1
    """A finding is `fail` or `error`."""
    USAGE = 2
    """Wrong use, or input that cannot be read."""
    NOTHING_COMPARED = 3
    """Nothing was comparable: no overlap, all token ids different, or only skipped."""
    OUR_BUG = 4
    """An uncaught exception of ours."""


class ParityError(Exception):
    """Something the user asked for cannot be done, in words: what was asked, what was found, what to do.

    `str()` gives two lines: the first holds what was asked and found, the second what to do.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, asked: str, found: str, do: str) -> None:
        self.asked, self.found, self.do = asked, found, do
        super().__init__(f"asked: {asked}; found: {found}\ndo this: {do}")


def is_write_refused(error: Exception) -> bool:
    """Whether it is the system that would not have a file written. safetensors tells the number in its text alone."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and type(error).__name__ == "SafetensorError":
        told = re.search(r"\(os error (\d+)\)", str(error))
        number = int(told[1]) if told else None
    return number in REFUSED


class NothingComparable(ParityError):
    """Two sides that share nothing that could be compared. Exit code 3, never a pass."""

    exit_code = ExitCode.NOTHING_COMPARED
