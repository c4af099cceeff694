"""The example in docs/example works as printed: the plain loop passes, and docs/your-trainer.md's change is found."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parity.commands.check import check
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.reports import to_text
from parity.reports.record import Report

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "example"
UNSHOWN = {"decode", "resume", "export", "tokens", "coverage", "context.layers"}
MOST_LINES = 60


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy in a folder of its own; its modules are forgotten afterwards."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.delitem(sys.modules, "loop", raising=False)
    return folder


def asked(folder: Path, *only: str) -> Report:
    try:
        return check(recipe=folder / "recipe.yaml", adapter=f"{folder / 'adapter.py'}:Plain", only=only)
    finally:
        sys.modules.pop("loop", None)


def test_the_adapter_is_short() -> None:
    assert len((EXAMPLE / "adapter.py").read_text().splitlines()) <= MOST_LINES


def test_the_loop_trains(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, "loop.py"], cwd=example, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and re.search(r"loss \d", done.stdout), done.stderr


def test_every_question_that_it_shows_passes(example: Path) -> None:
    report = asked(example)
    outcomes = {finding.name: finding.outcome for finding in report.findings}
    assert {name for name, outcome in outcomes.items() if outcome == "skipped"} == UNSHOWN
    assert {outcome for name, outcome in outcomes.items() if name not in UNSHOWN} == {"pass"}


CHANGES = [
    ("captured[index - 1, 4]", "captured[index, 4]", "labels", "label-offset"),  # docs/your-trainer.md's
    ("captured[:, :3].flatten(1)", "captured[:, [0, 2, 1]].flatten(1)", "inputs", "fc-order"),
    ("place < anchors", "place <= anchors", "context", "context-anchor"),
    (" & (document == document[anchors][:, None])", "", "context", "context-documents"),
    ("GAMMA = 4.0", "GAMMA = 5.0", "loss", "loss-gamma"),
    ("weights.sum()", "trained.sum()", "loss", "loss-reduction"),
]


@pytest.mark.parametrize(("old", "new", "probe", "fault"), CHANGES, ids=[row[3] for row in CHANGES])
def test_a_line_that_is_changed_is_named(old: str, new: str, probe: str, fault: str, example: Path) -> None:
    text = (example / "loop.py").read_text()
    assert text.count(old) >= 1
    (example / "loop.py").write_text(text.replace(old, new, 1))
    report = asked(example, probe)
    failed = [finding.fault for finding in report.findings if finding.outcome == "fail"]
    assert failed and failed[0] == fault


def test_a_mistake_in_the_adapter_is_told_once(example: Path) -> None:
    """In the findings, in the text and beside the suspicions."""
    adapter = example / "adapter.py"
    adapter.write_text(adapter.read_text().replace('out["fc_input"]', 'out["fc_inputt"]'))
    report = asked(example)
    assert [finding.name for finding in report.findings if finding.outcome == "error"] == ["adapter.step"]
    because = {each.name: each.because for each in report.suspicions}
    for name in ("noise reaches the labels, or drafting", "the loss is not the declared one"):
        assert because[name] == "see the finding adapter.step"
    assert because["an interrupted run is another run"] == "the adapter does not show run"
    text = to_text.paint(report, width=80, colour=False).partition("Conformance statement")[0]
    assert text.count("KeyError") == 2  # the sentence and its evidence


def test_a_class_that_is_none_yet_is_told_at_every_suspicion(example: Path) -> None:
    adapter = example / "adapter.py"
    adapter.write_text(
        adapter.read_text().replace("width, vocabulary = 48, 200", "width, vocabulary = 48, 0")
    )
    report = asked(example)
    assert [finding.name for finding in report.findings] == ["adapter"]
    asks_trainer = [each.because for each in report.suspicions if "loop.py" not in each.because]
    assert set(asks_trainer) == {"see the finding adapter"} and len(asks_trainer) == 13


def test_asking_leaves_the_loop_alone(example: Path) -> None:
    """`update` trains one step in between; the drafter is bit for bit the same afterwards."""
    from parity.model.recipe.config import load_declared
    from parity.probes.ask import open_adapter

    try:
        adapter = open_adapter(f"{example / 'adapter.py'}:Plain", load_declared(example / "recipe.yaml"))
    finally:
        sys.modules.pop("loop", None)
    before = {name: value.detach().clone() for name, value in adapter.parameters().items()}
    query_probes(ExaminedAdapter(adapter), only=["frozen", "loss"])
    assert all(value.equal(before[name]) for name, value in adapter.parameters().items())
