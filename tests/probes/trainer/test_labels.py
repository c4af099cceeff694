"""What the probe `labels` reads, beside the faults of tests/faults."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.data import Batch
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.labels import estimate_labels, is_same_label, take_label_step
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from tests.faults.injected.labels import Crossing, teacher_shifted
from tests.faults.wiring import builtin


def _answer(changes: dict[str, Any] | None = None, wiring: type[TrainingStep] = TrainingStep) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(builtin(changes, wiring)), only=["labels"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, "teacher"),
        ({"recipe.labels": "data", "recipe.teacher": None}, "data"),
        ({"recipe.labels": "teacher_distribution", "recipe.loss.terms": {"kl": 1.0}}, "distribution"),
        ({"recipe.labels": "teacher_distribution", "recipe.loss.terms": {"rkl": 1.0}}, "distribution"),
        ({"recipe.labels": "data", "recipe.loss.terms": {"ce": 0.4, "js": 0.6}}, "data"),
        ({"recipe.target.dtype": "bfloat16"}, "teacher"),
    ],
)
def test_the_source_is_read(changes: dict[str, Any], source: str) -> None:
    answer = _answer(changes | {"recipe.block.size": 8})
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    facts = _facts(answer)
    assert facts["labels.source"] == source and facts["labels.offset"] == 0 and facts["labels.unread"] == 0
    assert facts["labels.crossing"] == facts["labels.padding"] == facts["labels.masked"] == 0


def test_labels_read_are_the_step_s_own() -> None:
    step = take_label_step(ExaminedAdapter(builtin({"recipe.block.size": 8})))
    assert step.reading is not None and step.shown.labels is not None
    own = step.shown.labels[step.at.block, step.at.slot]
    assert torch.equal(step.reading.label, own)
    assert torch.equal(step.reading.place, step.at.index)
    assert float(step.reading.left.max()) < 1e-5


def test_a_label_explains_only_its_own_gradient() -> None:
    subject = ExaminedAdapter(builtin({"recipe.block.size": 8}))
    step = take_label_step(subject)
    assert step.reading is not None
    assert is_same_label(step.crafted, step.at, step.reading).all()
    other = replace(step.reading, label=step.reading.label.roll(1))
    differ = other.label != step.reading.label
    assert differ.any() and not is_same_label(step.crafted, step.at, other)[differ].any()
    again = estimate_labels(subject, step.crafted, step.at)
    assert torch.equal(again.label, step.reading.label)


def test_offsets_are_told_with_their_sign() -> None:
    for by in (1, -1):
        answer = _answer({"recipe.block.size": 8}, teacher_shifted(by))
        assert answer.findings[0].fault == "label-offset" and _facts(answer)["labels.offset"] == by


def test_the_place_of_a_crossing_label() -> None:
    answer = _answer({"recipe.block.size": 8}, Crossing)
    assert answer.findings[0].fault == "label-documents"
    subject = ExaminedAdapter(builtin({"recipe.block.size": 8}))
    boundary = int((subject.batch.document == 0).sum())
    assert f"trained on token {boundary}" in answer.findings[0].sentence


def test_a_hole_is_met_and_its_rule_told() -> None:
    assert _facts(_answer({"recipe.block.size": 8}))["labels.behind_holes"] == 1.0
    before = _facts(_answer({"recipe.block.size": 8, "recipe.block.past_holes": False}))
    assert before["labels.behind_holes"] == 0.0
    assert before["labels.slots"] < _facts(_answer({"recipe.block.size": 8}))["labels.slots"]


class Nothing(TrainingStep):
    """No slot is supervised."""

    def blocks(self, batch: Batch, anchors: Tensor) -> BlockLabels:
        return super().blocks(batch.without_supervision(), anchors)


def test_nothing_trained_is_no_pass() -> None:
    answer = _answer(None, Nothing)
    assert [finding.fault for finding in answer.findings] == ["label-missing"]
    assert _facts(answer) == {"labels.slots": 0}


class Odd(TrainingStep):
    """Logits that no softmax of the head's product has."""

    def objective(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        return super().objective(hidden.square(), *args, **options)


def test_what_cannot_be_read_is_said() -> None:
    answer = _answer(None, Odd)
    assert answer.findings[0].fault == "label-unrecognised"
    assert _facts(answer)["labels.unread"] > 0
