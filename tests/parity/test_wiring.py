"""Adapters are opened by name or from a user's file; what is wrong with one is told, and the other probes go on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.config import Recipe
from parity.model.presets import preset
from parity.probes.adapters.asking import Snapshot, Subject, ask
from parity.probes.adapters.base import Shown
from parity.probes.adapters.builtin import Builtin
from parity.probes.table import TABLE
from parity.wiring import SHIPPED, ask_trainer, check_names, open_adapter, wiring_probes

UNIT = preset("unit")
EMPTY = "from parity.probes.adapters.base import Adapter\n"


def test_a_users_class_is_opened_with_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WIDTH = 7\n")
    (tmp_path / "mine.py").write_text(
        EMPTY + "from helper import WIDTH\n\nclass Mine(Adapter):\n    name, width = 'mine', WIDTH\n"
    )
    adapter = open_adapter(f"{tmp_path / 'mine.py'}:Mine", UNIT.recipe)
    assert adapter.name == "mine" and adapter.width == 7
    assert isinstance(adapter.recipe, Recipe) and adapter.recipe == UNIT.recipe


REFUSED: list[tuple[str, str, str, str]] = [
    ("no such name", "", "builtim", "did you mean builtin"),
    ("no such file", "", "{}/none.py:A", "no such file"),
    ("no such class", EMPTY, "{}/mine.py:B", "nothing of that name"),
    ("another class", "class A: pass", "{}/mine.py:A", "no Adapter"),
    ("a broken file", "1 / 0", "{}/mine.py:A", "ZeroDivisionError"),
    (
        "a broken class",
        EMPTY + "class A(Adapter):\n    def __init__(self, r): 1 / 0",
        "{}/mine.py:A",
        "ZeroDivision",
    ),
]


@pytest.mark.parametrize(
    ("text", "name", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_is_no_adapter_is_refused(text: str, name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ParityError, match=message):
        open_adapter(name.format(tmp_path), UNIT)


@pytest.mark.parametrize("name", SHIPPED)
def test_ours_need_a_whole_training_file(name: str) -> None:
    with pytest.raises(ParityError, match="recipe: alone"):
        open_adapter(name, UNIT.recipe)


def test_a_probe_that_does_not_exist_is_named() -> None:
    with pytest.raises(ParityError, match="did you mean noise"):
        check_names(["nois"], wiring_probes())


class Wrong(Builtin):
    """The built-in trainer, shown wrongly."""

    def __init__(self, how: str) -> None:
        super().__init__(Builtin.open(UNIT).trainer)
        self.how = how

    def step(self, batch: Any, states: Tensor, **options: Any) -> Shown:
        if self.how == "raises":
            raise ValueError("no such key: hidden")
        if self.how == "moves the random state":
            torch.rand(1)
        if self.how == "moves numpy's":
            np.random.rand()
        shown = super().step(batch, states, **options)
        values = {name: getattr(shown, name) for name in Shown.__slots__}
        if self.how == "detached":
            values["hidden"] = shown.hidden.detach()
        if self.how == "another shape":
            values["hidden"] = shown.hidden.flatten(0, 1)
        if self.how == "other anchors":
            values["anchors"] = shown.anchors + 1
        return shown if self.how in ("right", "moves the random state", "moves numpy's") else Shown(**values)


WRONG = {
    "raises": ("step", "ValueError: no such key: hidden"),
    "moves the random state": ("step", "torch moved"),
    "moves numpy's": ("step", "numpy moved"),
    "detached": ("step.hidden", "a detached one"),
    "another shape": ("step.hidden", "[24, 64]"),
    "other anchors": ("step.anchors", "[3, "),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_step_is_a_finding_that_names_the_part(how: str) -> None:
    subject = Subject(Wrong(how))
    state = torch.get_rng_state()
    answers = dict(ask(subject, only=["noise"]))
    finding = answers["noise"].findings[0]
    part, found = WRONG[how]
    assert finding.outcome == "error" and dict(finding.evidence)["part"] == part
    assert found in str(dict(finding.evidence)["found"])
    assert torch.equal(state, torch.get_rng_state())


def test_the_other_probes_go_on() -> None:
    """A step that raises leaves alone what asks no step."""
    asked = ask_trainer(UNIT, Wrong("raises"))
    outcomes = {name: answer.findings[0].outcome for name, answer in asked.answers}
    assert set(outcomes) == {entry.name for entry in TABLE if entry.asks == "trainer"}
    assert outcomes["noise"] == "error"


def test_asking_changes_nothing() -> None:
    """Parameters, their grad, optimizer, hooks and random state are bit for bit what they were, after all probes."""
    adapter = Builtin.open(UNIT)
    subject = Subject(adapter)
    states, anchors = subject.states(subject.batch), subject.anchors(subject.batch)
    adapter.update(subject.batch, states, anchors=anchors, seed=0)  # moments in the optimizer, .grad in place
    before = Snapshot(subject)
    rng = torch.get_rng_state(), np.random.get_state(legacy=False)
    training = adapter.trainer.drafter.training
    answers = ask(Subject(adapter))
    assert before.changed() == [] and adapter.trainer.drafter.training == training
    assert torch.equal(rng[0], torch.get_rng_state())
    assert np.array_equal(rng[1]["state"]["key"], np.random.get_state(legacy=False)["state"]["key"])
    told = [f.name for _, answer in answers for f in answer.findings if f.name.endswith(".untouched")]
    assert told == []


def test_a_probe_that_changes_something_is_told_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from parity.probes.noise import Noise

    adapter = Builtin.open(UNIT)
    weight = adapter.trainer.drafter.fc.weight
    before = weight.detach().clone()

    def spoil(self: Noise, subject: Subject) -> Any:
        with torch.no_grad():
            weight.add_(1)
        return own(self, subject)

    own = Noise.run
    monkeypatch.setattr(Noise, "run", spoil)
    ((_, answer),) = ask(Subject(adapter), only=["noise"])
    assert answer.findings[-1].name == "noise.untouched" and "fc.weight" in answer.findings[-1].sentence
    assert torch.equal(weight, before)


def test_the_statement_says_what_was_measured_and_what_was_not() -> None:
    asked = ask_trainer(UNIT, only=["noise"])
    assert asked.conformance.trainer == "built-in trainer" and asked.conformance.recipe == UNIT.recipe.hash
    assert [statement.probe for statement in asked.conformance.statements] == ["noise"]
    assert "no noise" in asked.conformance.paragraph
