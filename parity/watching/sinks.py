"""Where step reports go: JSON lines, TensorBoard, the terminal. Any object with a sink's two methods is one."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from parity.errors import ParityError
from parity.reports import step_log
from parity.reports.record import WORST_FIRST, Finding, StepReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console, RenderableType
    from rich.live import Live

Samples = Mapping[str, "NDArray[np.floating]"]
"""Name -> up to 1,000 values of a tensor of the step, for histograms."""


class Sink(Protocol):
    """Receives every step report as it is made."""

    def write(self, report: StepReport, samples: Samples) -> None:
        """Take one report, with the samples of its step."""

    def close(self) -> None:
        """After the last."""


class JsonLines:
    """OUT/steps.jsonl, a line a step, whole at any moment."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / step_log.STEP_LOG_NAME

    def write(self, report: StepReport, samples: Samples) -> None:
        """Append one line."""
        step_log.append(self.file, report)

    def close(self) -> None:
        """Nothing is kept open."""


class TensorBoardSink:
    """Scalars and histograms in OUT/tensorboard."""

    def __init__(self, out: Path) -> None:
        """Raises ParityError where tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            do = "pip install 'drafter-parity[tensorboard]'"
            raise ParityError("step reports in TensorBoard", f"no tensorboard ({error})", do) from error
        self.writer: SummaryWriter = SummaryWriter(str(out / "tensorboard"))

    def write(self, report: StepReport, samples: Samples) -> None:
        """Every number of the report under watch/, and what can be drawn as a histogram."""
        for name, value in report.values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.writer.add_scalar(f"watch/{name.replace('.', '/')}", value, report.step)
        for name, values in samples.items():
            self.writer.add_histogram(f"watch/{name.replace('.', '/')}", values, report.step)

    def close(self) -> None:
        """Write what is buffered."""
        self.writer.close()


class TerminalPanel:
    """The last step report on a terminal, and a line for each finding whose outcome is new and not good.

    Where there is no terminal, the lines alone. Inside another live display it is a renderable of rich.
    """

    def __init__(self, console: "Console | None" = None, *, alone: bool = True) -> None:
        """Take a terminal over.

        Args:
            console: rich's; standard error where none is given.
            alone: keep a live display of its own.
        """
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.last: StepReport | None = None
        self._live: Live | None = None
        self._reported: dict[str, tuple[str, str | None]] = {}
        if alone and self.console.is_terminal:
            from rich.live import Live as Display

            self._live = Display(self, console=self.console, transient=True, auto_refresh=False)
            self._live.start()

    def write(self, report: StepReport, samples: Samples) -> None:
        """Show the step's main numbers and its worst findings."""
        self.last = report
        for finding in _loud(report):
            if self._reported.get(finding.name) != (finding.outcome, finding.fault):
                text = f"step {report.step}: {finding.outcome.upper()} {finding.name}: {finding.sentence}"
                self.console.print(
                    text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal
                )
        self._reported = {finding.name: (finding.outcome, finding.fault) for finding in report.findings}
        if self._live is not None:
            self._live.refresh()

    def __rich__(self) -> "RenderableType":
        from rich.panel import Panel as Box
        from rich.text import Text

        if self.last is None:
            return Text("")
        numbers = dict(self.last.values)
        lines = ["  ".join(f"{name} {_short(numbers[name])}" for name in PANEL_LINES if name in numbers)]
        groups = [[n for n in numbers if n.endswith(end)] for end in (".influence", ".weight", ".accuracy")]
        lines += [
            f"{group[0].rpartition('.')[2]} " + " ".join(_short(numbers[name]) for name in group[:WIDEST])
            for group in groups
            if group
        ]
        loud = _loud(self.last)
        lines += [f"{finding.outcome.upper()} {finding.name}: {finding.sentence}" for finding in loud[:4]]
        passed = sum(finding.outcome == "pass" for finding in self.last.findings)
        lines += [] if loud else [f"{passed} of {len(self.last.findings)} findings pass"]
        style = "red" if any(f.outcome in ("fail", "error") for f in loud) else "none"
        title = f"watch, step {self.last.step:,}"
        return Box(Text("\n".join(lines)), title=title, title_align="left", border_style=style)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None


PANEL_LINES = ("loss", "tau.estimate", "gradient_norm", "anchors.covered")
"""Values in the panel's first line."""
WIDEST = 16
"""Numbers in one of its other lines: as many as a block has slots."""


def _loud(report: StepReport) -> list[Finding]:
    """Findings that warn or fail, worst first."""
    loud = [finding for finding in report.findings if finding.outcome in ("error", "fail", "warn")]
    return sorted(loud, key=lambda finding: WORST_FIRST.index(finding.outcome))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
