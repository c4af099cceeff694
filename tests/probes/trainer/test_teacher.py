"""What the probe `teacher` measures, beside the faults of tests/faults."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.training.data import Batch
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.teacher import _distance, _sine, _variants
from tests.faults.injected.teacher import (
    NoNorm,
    lastly,
    made,
    other_head,
    shifted_weight,
    token_off,
    weighted,
)
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["teacher"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


def test_distance_by_hand() -> None:
    own = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]).double().log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]]).double().log()
    found = _distance(other, own)
    assert found.agreement == 0.5 and found.count == 2
    kl = 0.5 * torch.log(torch.tensor(2.0)) + 0.25 * torch.log(torch.tensor(0.5))
    assert found.kl == pytest.approx(float(kl) / 2, rel=1e-6)
    assert _distance(other + 3.0, other).kl == pytest.approx(0, abs=1e-12)


def test_variants_of_a_norm() -> None:
    norm = torch.nn.RMSNorm(8, eps=1e-12)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    state = torch.randn(4, 8)
    unit = state / state.square().mean(-1, keepdim=True).sqrt()
    found = dict(_variants(state, norm))
    torch.testing.assert_close(found["normed once"], unit * norm.weight.detach())
    torch.testing.assert_close(found["normed with w for 1 + w"], unit * (norm.weight.detach() - 1))
    torch.testing.assert_close(found["normed with 1 + w for w"], unit * (norm.weight.detach() + 1))
    torch.testing.assert_close(found["normed without its weight"], unit)
    assert [name for name, _ in _variants(state, None)] == ["taken as it is"]


def test_sine_is_blind_to_length_and_sign() -> None:
    rows = torch.randn(3, 9).double()
    assert float(_sine(rows, -4 * rows).max()) < 1e-6
    assert float(_sine(torch.eye(3).double(), torch.eye(3).double().roll(1, 0)).min()) == 1.0


@pytest.mark.parametrize(
    "changes", [{}, {"recipe.teacher.norm": "pre"}, {"recipe.draft_vocab": {"size": 40}}]
)
def test_the_target_s_own_logits(changes: dict[str, Any]) -> None:
    answer = _answer(builtin(changes, then=weighted))
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    facts = _facts(answer)
    assert facts["teacher.agreement"] == facts["teacher.capture_agreement"] == 1.0
    assert facts["teacher.kl"] < 1e-9 and facts["teacher.capture_kl"] < 1e-9


def test_a_head_off_by_little_is_measured() -> None:
    """Columns of (1 - a) W + a R, with R of the same size: the sine of the angle is about a."""
    answer = _answer(builtin(None, made(other_head(0.1))))
    assert answer.findings[0].fault == "teacher-head"
    assert float(dict(answer.findings[0].evidence)["sine"]) == pytest.approx(0.11, abs=0.03)  # type: ignore[arg-type]


def test_a_missing_norm_is_no_wrong_head() -> None:
    answer = _answer(builtin({"recipe.teacher.norm": "pre"}, NoNorm, then=weighted))
    assert answer.findings[0].fault == "teacher-norm"
    assert "what fits is taken as it is" in answer.findings[0].sentence


class NoLogits(Builtin):
    """A step that shows neither labels nor the teacher's logits."""

    def step(self, batch: Batch, states: Tensor, **options: Any) -> AdapterStep:
        return replace(super().step(batch, states, **options), teacher=None, labels=None)


def test_labels_read_from_the_gradient_stand_in_for_logits() -> None:
    for wiring, outcome in ((None, "pass"), (made(token_off), "fail")):
        adapter = builtin({"recipe.block.size": 8}, *([wiring] if wiring else []))
        adapter.__class__ = NoLogits
        answer = _answer(adapter)
        assert answer.findings[0].outcome == outcome, answer.findings[0].sentence
    assert answer.findings[0].fault in ("teacher-shift", "teacher-differs")


class NoReference(Builtin):
    """No target at hand."""

    def reference(self, batch: Batch) -> Any:
        raise NotExposed("reference")


def test_skipped_with_the_reason() -> None:
    adapter = builtin()
    adapter.__class__ = NoReference
    assert [(f.outcome, f.sentence) for f in _answer(adapter).findings] == [
        ("skipped", "the adapter does not show reference")
    ]
    answer = _answer(builtin({"recipe.labels": "data", "recipe.teacher": None}))
    assert answer.findings[0].outcome == "skipped" and "no teacher" in answer.findings[0].sentence
    assert answer.statement is None


def test_capture_and_step_are_blamed_apart() -> None:
    capture = _answer(builtin(then=lastly("final.prenorm"))).findings
    assert [f.fault for f in capture] == ["teacher-norm"] and "the captured slice" in capture[0].sentence
    step = _answer(builtin(None, made(shifted_weight(1.0)), then=weighted)).findings
    assert [f.fault for f in step] == ["teacher-norm"] and "the step" in step[0].sentence
