"""Adapters are opened by name or from a user's file; what is wrong with one is told, and the other probes go on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.errors import ParityError
from parity.model.recipe.config import Recipe
from parity.model.recipe.presets import preset
from parity.probes.adapters.base import AdapterStep
from parity.probes.adapters.builtin import Builtin
from parity.probes.ask import SHIPPED, ask_trainer, check_names, open_adapter, wiring_probes
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.table import TABLE

UNIT = preset("unit")
EMPTY = "from parity.probes.adapters.base import Adapter\n"
TWO = """
import parity.probes.adapters.base as base
from parity.probes.adapters.builtin import Builtin as Ours
class A(base.Adapter): pass
class B: pass
class C(Ours): pass
"""


def test_a_users_class_is_opened_with_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WIDTH = 7\n")
    (tmp_path / "mine.py").write_text(
        EMPTY + "from helper import WIDTH\n\nclass Mine(Adapter):\n    name, width = 'mine', WIDTH\n"
    )
    adapter = open_adapter(f"{tmp_path / 'mine.py'}:Mine", UNIT.recipe)
    assert adapter.name == "mine" and adapter.width == 7
    assert isinstance(adapter.recipe, Recipe) and adapter.recipe == UNIT.recipe


REFUSED: list[tuple[str, str, str, str]] = [
    ("no such name", "", "builtim", r"did you mean builtin\?.*; or give FILE.py:NAME"),
    ("no such file", "", "{}/none.py:A", "no such file\ndo this: check the path; the form is FILE.py:NAME"),
    ("no such file, no name", "", "{}/none.py", "no such file"),
    (
        "no name",
        TWO,
        "{}/mine.py",
        "no class named; mine.py has A, C\ndo this: --adapter .*mine.py:A or .*:C",
    ),
    ("an empty name", TWO, "{}/mine.py:", "mine.py has A, C\ndo this: --adapter .*mine.py:A or .*:C"),
    (
        "no name, no class",
        "x = 1",
        "{}/mine.py",
        "has no class derived from Adapter\ndo this: give FILE.py:NAME",
    ),
    ("no name, no Python", "class (", "{}/mine.py", "has no class derived from Adapter"),
    ("no name, not run", TWO + "1 / 0", "{}/mine.py", "mine.py has A, C\n"),
    ("a folder", "", "{}/mine:A", "no Python file with a class\ndo this: give FILE.py:NAME"),
    (
        "no such class",
        TWO,
        "{}/mine.py:D",
        "nothing of that name; mine.py has A, C\ndo this: --adapter .*:A or",
    ),
    ("another class", "class A: pass", "{}/mine.py:A", "a class A that is no Adapter; mine.py has no class"),
    ("no class", TWO + "x = 1", "{}/mine.py:x", "a int that is no Adapter; mine.py has A, C"),
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


@pytest.mark.parametrize("name", SHIPPED)
def test_ours_load_no_python_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    with pytest.raises(ParityError, match="only a trainer of your own"):
        open_adapter(name, UNIT.with_values({"recipe.target.model": str(tmp_path / "mine.py")}))


def test_a_probe_that_does_not_exist_is_named() -> None:
    with pytest.raises(ParityError, match="did you mean noise"):
        check_names(["nois"], wiring_probes())


class Wrong(Builtin):
    """The built-in trainer, shown wrongly."""

    def __init__(self, how: str) -> None:
        super().__init__(Builtin.open(UNIT).trainer)
        self.how = how

    def step(self, batch: Any, states: Tensor, **options: Any) -> AdapterStep:
        if self.how == "raises":
            raise ValueError("no such key: hidden")
        if self.how == "moves the random state":
            torch.rand(1)
        if self.how == "moves numpy's":
            np.random.rand()
        shown = super().step(batch, states, **options)
        values = {name: getattr(shown, name) for name in AdapterStep.__slots__}
        if self.how == "detached":
            values["hidden"] = shown.hidden.detach()
        if self.how == "another shape":
            values["hidden"] = shown.hidden.flatten(0, 1)
        if self.how == "other anchors":
            values["anchors"] = shown.anchors + 1
        return (
            shown
            if self.how in ("right", "moves the random state", "moves numpy's")
            else AdapterStep(**values)
        )


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
    subject = ExaminedAdapter(Wrong(how))
    state = torch.get_rng_state()
    answers = dict(query_probes(subject, only=["noise"]))
    finding = answers["noise"].findings[0]
    part, found = WRONG[how]
    assert finding.outcome == "error" and dict(finding.evidence)["part"] == part
    assert found in str(dict(finding.evidence)["found"])
    assert torch.equal(state, torch.get_rng_state())


def test_one_mistake_is_told_once() -> None:
    """A step that raises stops most probes: one finding names them, and those that need no step go on."""
    asked = ask_trainer(UNIT, Wrong("raises"))
    findings = [finding for _, answer in asked.answers for finding in answer.findings]
    told = [finding for finding in findings if "no such key: hidden" in finding.sentence]
    assert [(finding.name, finding.outcome) for finding in told] == [("adapter.step", "error")]
    stopped = told[0].sentence.rpartition("not asked because of it: ")[2].split(", ")
    assert {"inputs", "noise", "loss", "labels", "teacher"} <= set(stopped)
    names = [name for name, _ in asked.answers if name != "adapter"]
    assert names == [entry.name for entry in TABLE if entry.asks == "trainer"]
    went_on = {f.name.split(".")[0] for f in findings} - {"adapter"}
    assert went_on == set(names) - set(stopped) and went_on
    reasons = dict(asked.conformance.unanswered)
    assert reasons["noise"] == "see the finding adapter.step"
    assert "no such key: hidden" in reasons["adapter"]


def test_two_mistakes_are_two_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs by numbers alone (rows of other lengths) is one; another method is another."""

    def optimizer(self: Wrong) -> Any:
        raise ValueError("no optimizer yet")

    monkeypatch.setattr(Wrong, "optimizer", optimizer)
    answers = query_probes(ExaminedAdapter(Wrong("another shape")), copies=False)
    told = {f.name: f for _, answer in answers for f in answer.findings if f.outcome == "error"}
    assert "no optimizer yet" in told["frozen"].sentence
    assert [name for name in told if name.startswith("adapter")] == ["adapter.step.hidden"]
    assert "not asked because of it" not in told["frozen"].sentence


@pytest.mark.parametrize(
    ("how", "do"),
    [
        ("moves the random state", "torch.random.fork_rng"),
        ("moves numpy's", "numpy.random.default_rng"),
        ("detached", "correct step in the adapter"),
    ],
)
def test_a_mistake_says_what_to_do(how: str, do: str) -> None:
    ((_, answer),) = query_probes(ExaminedAdapter(Wrong(how)), only=["noise"])
    assert do in answer.findings[0].next_step


def test_what_another_finding_explains_is_not_judged() -> None:
    """Noise on all captured slices makes labels and teacher of its own: one fault is reported, not two."""
    from tests.faults.injected.noise import OnAllSlices
    from tests.faults.wiring import builtin

    answers = dict(query_probes(ExaminedAdapter(builtin(wiring=OnAllSlices)), only=["noise", "teacher"]))
    assert answers["noise"].findings[0].fault == "noise-on-teacher"
    finding = answers["teacher"].findings[0]
    assert (finding.outcome, finding.fault) == ("skipped", None)
    assert "not judged, since noise-on-teacher was found" in finding.sentence
    assert "What was seen: the teacher's head is not the target's" in finding.sentence
    alone = dict(query_probes(ExaminedAdapter(builtin(wiring=OnAllSlices)), only=["teacher"]))
    assert alone["teacher"].findings[0].fault == "teacher-head", "by itself it is what was found"


@pytest.mark.parametrize(
    ("injected", "cause", "probe", "seen"),
    [
        ("noise .1 on fc's output beside the declared noise", "noise-behind-fc", "context", "drafter"),
        ("an own head, drifted by 10 %, KL", "loss-head", "labels", "label"),
        ("an own head of a reduced vocabulary", "loss-head", "teacher", "head"),
    ],
)
def test_what_noise_behind_fc_and_a_head_of_ones_own_explain(
    injected: str, cause: str, probe: str, seen: str
) -> None:
    from tests.faults import collect

    (fault,) = (each for each in collect.list_faults() if each.name == injected and each.trainer == "builtin")
    answers = dict(query_probes(ExaminedAdapter(fault.build()), only=[fault.probe, probe]))
    assert [f.fault for f in answers[fault.probe].findings if f.outcome == "fail"] == [cause]
    assert [f.outcome for f in answers[probe].findings if f.outcome == "fail"] == []
    told = [
        f.sentence for f in answers[probe].findings if f"not judged, since {cause} was found" in f.sentence
    ]
    assert told and seen in told[0].partition("What was seen: ")[2]


def test_a_window_is_not_judged_where_the_states_are_detached() -> None:
    from tests.faults.injected.context import FAULTS as CONTEXT
    from tests.faults.injected.frozen import DetachedContext
    from tests.faults.wiring import builtin

    answers = dict(query_probes(ExaminedAdapter(builtin(wiring=DetachedContext)), only=["context", "frozen"]))
    assert answers["frozen"].findings[0].fault == "trained-without-gradient"
    told = [f.outcome for f in answers["context"].findings if "window" in f.sentence]
    assert "skipped" in told and "fail" not in told
    window = next(fault for fault in CONTEXT if fault.name == "a full layer slides")
    assert (
        dict(query_probes(ExaminedAdapter(window.build()), only=["context"]))["context"].findings[0].outcome
        == "fail"
    )


def test_asking_changes_nothing() -> None:
    """Parameters, their grad, optimizer, hooks and random state are bit for bit what they were, after all probes."""
    adapter = Builtin.open(UNIT)
    subject = ExaminedAdapter(adapter)
    states, anchors = subject.states(subject.batch), subject.anchors(subject.batch)
    adapter.update(subject.batch, states, anchors=anchors, seed=0)  # moments in the optimizer, .grad in place
    before = subject.take_snapshot()
    rng = torch.get_rng_state(), np.random.get_state(legacy=False)
    training = adapter.trainer.drafter.training
    answers = query_probes(ExaminedAdapter(adapter))
    assert before.list_changes() == [] and adapter.trainer.drafter.training == training
    assert torch.equal(rng[0], torch.get_rng_state())
    assert np.array_equal(rng[1]["state"]["key"], np.random.get_state(legacy=False)["state"]["key"])
    told = [f.name for _, answer in answers for f in answer.findings if f.name.endswith(".untouched")]
    assert told == []


def test_a_probe_that_changes_something_is_told_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from parity.probes.trainer.noise import NoiseProbe

    adapter = Builtin.open(UNIT)
    weight = adapter.trainer.drafter.fc.weight
    before = weight.detach().clone()

    def spoil(self: NoiseProbe, subject: ExaminedAdapter) -> Any:
        with torch.no_grad():
            weight.add_(1)
        return own(self, subject)

    own = NoiseProbe.run
    monkeypatch.setattr(NoiseProbe, "run", spoil)
    ((_, answer),) = query_probes(ExaminedAdapter(adapter), only=["noise"])
    assert answer.findings[-1].name == "noise.untouched" and "fc.weight" in answer.findings[-1].sentence
    assert torch.equal(weight, before)


def test_the_statement_says_what_was_measured_and_what_was_not() -> None:
    asked = ask_trainer(UNIT, only=["noise"])
    assert asked.conformance.trainer == "built-in trainer" and asked.conformance.recipe == UNIT.recipe.hash
    assert [statement.probe for statement in asked.conformance.statements] == ["noise"]
    assert "no noise" in asked.conformance.paragraph
