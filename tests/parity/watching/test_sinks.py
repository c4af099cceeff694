"""Where step reports go: lines on disk while the run goes on, TensorBoard, a terminal, pandas, anyone's sink."""

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from parity.errors import ParityError
from parity.reports import from_steps, step_log, to_frame
from parity.reports.record import Finding, StepReport
from parity.watching.sinks import TensorBoardSink, TerminalPanel
from parity.watching.watch import watch_training
from tests.parity.watching.test_watch import GAUSS, UNIT, NoisyTeacher, Planted, opened, watched

GOOD = Finding(name="noise", outcome="pass", sentence="no noise")
BAD = Finding(
    name="noise", outcome="fail", sentence="noise moves the labels", fault="noise-on-teacher", next_step="x"
)


def step(number: int, *findings: Finding) -> StepReport:
    values = (
        ("loss", 2.5),
        ("slot.1.weight", 1.0),
        ("slot.2.weight", 0.75),
        ("noise.moves_labels", False),
        ("word", "a"),
    )
    return StepReport(step=number, time="2026-01-01T00:00:00Z", values=values, findings=findings)


class Readers:
    """A sink that reads the file at every report, as someone beside the run would."""

    def __init__(self, file: Path) -> None:
        self.file, self.steps, self.samples = file, list[list[int]](), list[dict[str, Any]]()
        self.closed = 0

    def write(self, report: StepReport, samples: Mapping[str, Any]) -> None:
        self.steps.append([each.step for each in step_log.read_step_log(self.file)])
        self.samples.append(dict(samples))

    def close(self) -> None:
        self.closed += 1


def test_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    reader = Readers(tmp_path / "steps.jsonl")
    watched(GAUSS, out=tmp_path, sinks=[reader], probes=("noise",))
    assert reader.steps == [[1], [1, 5], [1, 5, 9]] and reader.closed == 1
    for name in ("captured", "fc_input", "hidden", "hidden.gradient", "layers.1.out"):
        sample = reader.samples[-1][name]
        assert isinstance(sample, np.ndarray) and 100 < sample.size <= 1000 and np.isfinite(sample).all()


def test_frames_and_pages_of_a_real_run(tmp_path: Path) -> None:
    trainer = opened(GAUSS, out=tmp_path)
    Planted(trainer, NoisyTeacher, before=8)
    training = UNIT.with_values(GAUSS | {"run.watch": {"every": 4, "probes": ["noise"]}})
    trainer.training = training
    watch = watch_training(trainer, tmp_path)
    assert watch is not None
    trainer.run()
    watch.close()
    trainer.close()
    steps = step_log.read_step_log(tmp_path / "steps.jsonl")
    frame = to_frame.steps_frame(steps)
    assert list(frame.index) == [1, 5, 9] and (frame["slot.1.weight"] > 0.99).all()
    assert not to_frame.step_tables(steps, "tensors").empty
    to_frame.to_parquet(frame, tmp_path / "steps.parquet")
    assert (tmp_path / "steps.parquet").stat().st_size > 0
    report = from_steps.read_steps_report(tmp_path)
    assert from_steps.drift(steps)[0][0] == 9 and "noise-on-teacher" in from_steps.drift(steps)[0][1]
    assert {"timeline.layer.*.out.snr", "timeline.slot.*.weight"} <= {table.name for table in report.tables}


class Writer:
    """Stands in for torch.utils.tensorboard.SummaryWriter where tensorboard is not installed."""

    made: "list[Writer]" = []

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.histograms = folder, list[Any](), list[Any]()
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, at: int) -> None:
        self.scalars.append((name, value, at))

    def add_histogram(self, name: str, values: Any, at: int) -> None:
        self.histograms.append((name, len(values), at))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.made = []
    return Writer


def test_tensorboard_gets_numbers_and_histograms(tmp_path: Path, writer: type[Writer]) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(step(7, GOOD), {"hidden": np.zeros(9)})
    sink.close()
    (made,) = writer.made
    assert made.folder == str(tmp_path / "tensorboard") and made.closed
    assert made.scalars == [
        ("watch/loss", 2.5, 7),
        ("watch/slot/1/weight", 1.0, 7),
        ("watch/slot/2/weight", 0.75, 7),
    ]
    assert made.histograms == [("watch/hidden", 9, 7)]


def test_the_training_file_turns_it_on(tmp_path: Path, writer: type[Writer]) -> None:
    changes = {"run.watch": {"every": 4, "probes": []}, "run.save.tensorboard": True}
    trainer = opened(changes, out=tmp_path)  # the trainer's own writer, of the log
    watch = watch_training(trainer, tmp_path)
    assert watch is not None and len(writer.made) == 2
    trainer.run(stop_after=1)
    watch.close()
    trainer.close()
    names = {name for name, _, _ in writer.made[1].scalars}
    assert {"watch/loss", "watch/fc/gradient", "watch/slot/1/weight", "watch/layer/0/out/influence"} <= names
    assert {name for name, _, _ in writer.made[1].histograms} >= {"watch/hidden", "watch/captured"}


def test_tensorboard_that_is_not_there_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ParityError, match="tensorboard"):
        TensorBoardSink(tmp_path)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=70, color_system=None), out


def test_a_pipe_gets_a_line_when_something_begins(tmp_path: Path) -> None:
    to, out = console(terminal=False)
    panel = TerminalPanel(to)
    for number, finding in ((1, GOOD), (51, BAD), (101, BAD), (151, GOOD), (201, BAD)):
        panel.write(step(number, finding), {})
    panel.close()
    assert out.getvalue().splitlines() == [
        "step 51: FAIL noise: noise moves the labels",
        "step 201: FAIL noise: noise moves the labels",
    ]


def test_a_terminal_gets_a_panel() -> None:
    to, out = console(terminal=True)
    panel = TerminalPanel(to, alone=False)
    to.print(panel)
    panel.write(step(1, GOOD), {})
    to.print(panel)
    said = out.getvalue()
    assert (
        "watch, step 1" in said
        and "loss 2.5" in said
        and "weight 1 0.75" in said
        and "1 of 1 findings pass" in said
    )
    panel.write(step(51, BAD), {})
    to.print(panel)
    assert "FAIL noise: noise moves the labels" in out.getvalue()
    live = TerminalPanel(to)  # with a display of its own
    live.write(step(101, BAD), {})
    assert "watch, step 101" in out.getvalue()
    live.close()
