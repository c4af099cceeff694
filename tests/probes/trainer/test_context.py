"""What the probe `context` measures, beside the faults of tests/faults: facts, power, and what it leaves alone."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash.config import RopeConfig
from parity.model.dflash.drafter import Rope
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.drafter.receptive_field import ProbeBatch, exchange_anchor_tokens
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer import context
from tests.faults.injected.context import FAULTS, FirstTokenMissing, OtherDocuments, _causal
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["context"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


def test_facts_of_two_different_layers() -> None:
    layers = {"recipe.attention": {"layers": ["sliding", "full"], "window": 6}}
    answer = _answer(builtin(layers | {"recipe.block.within": "sliding_causal"}))
    assert [finding.outcome for finding in answer.findings] == ["pass"]
    facts = _facts(answer)
    assert facts["context.layer.0"] == "window 6 from the query, causal"
    assert facts["context.layer.1"] == "full, bidirectional"
    assert facts["context.mask_token_id"] == 3 and facts["context.precision"] == "float32"
    assert facts["context.reached"] == facts["context.expected"] > 0 == facts["context.undue"]
    assert facts["context.distance"] < 1e-5
    assert "rope is relative" in answer.findings[0].sentence


def test_a_measured_window_is_told_in_the_facts() -> None:
    fault = next(each for each in FAULTS if each.name == "window of 5 for 6 in one layer")
    facts = _facts(query_probes(ExaminedAdapter(fault.build()), only=["context"])[0][1])
    assert facts["context.layer.0"] == "window 5 from the query, bidirectional"
    assert facts["context.layer.1"] == "window 6 from the query, bidirectional"


class Renamed(Builtin):
    """Other names than z-lab's, as in a loop of one's own."""

    def parameters(self) -> Mapping[str, Tensor]:
        return {f"net.{name}": tensor for name, tensor in super().parameters().items()}


class Copies(Builtin):
    """Parameters that are not the step's own."""

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in super().parameters().items()}


def _as(kind: type[Builtin], adapter: Builtin) -> Builtin:
    adapter.__class__ = kind
    return adapter


def test_other_names_leave_the_exact_part() -> None:
    answer = _answer(_as(Renamed, builtin()))
    assert answer.findings[0].outcome == "pass"
    assert "no z-lab names" in answer.findings[0].sentence and "context.layer.0" not in _facts(answer)
    for wiring, name in ((OtherDocuments, "context-documents"), (FirstTokenMissing, "context-missing")):
        answer = _answer(_as(Renamed, builtin({}, wiring)))
        assert answer.findings[0].fault == name, answer.findings[0].sentence


def test_copies_of_the_parameters_are_compared_as_they_are() -> None:
    answer = _answer(_as(Copies, builtin({"run.drafter.init_std": 0.2})))
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    assert _facts(answer)["context.distance"] < 1e-5


def test_a_rope_that_nobody_declares_is_told_and_not_judged() -> None:
    adapter = builtin()
    drafter: Any = adapter.trainer.drafter
    drafter.rope = Rope(RopeConfig(rope_theta=1e6), drafter.config.head_dim)
    assert _answer(adapter).findings[0].fault == "rope-base"
    adapter.configured = None
    answer = _answer(adapter)
    assert answer.findings[0].outcome == "pass" and _facts(answer)["context.rope.base"] == 1e6


def test_a_window_that_no_row_can_hold_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LONGEST_WINDOW", 40)
    answer = _answer(builtin({"recipe.attention": {"layers": ["sliding", "sliding"], "window": 30}}))
    assert answer.findings[0].outcome == "pass"
    assert (
        "its edge was not tested, since a window of 30 needs a row longer than 40"
        in answer.findings[0].sentence
    )


@pytest.mark.parametrize("factor", [1e-9, 0.0])
def test_attention_that_adds_nothing_is_made_to_add(factor: float) -> None:
    """Where output projections are tiny, or start at zero, a causal flag would drown in rounding."""

    def quiet(adapter: Builtin) -> None:
        for name, parameter in adapter.trainer.drafter.named_parameters():
            if name.endswith("o_proj.weight"):
                parameter.data.mul_(factor)

    def inject(adapter: Builtin) -> None:
        quiet(adapter)
        _causal(1)(adapter)

    assert _answer(builtin(then=quiet)).findings[0].outcome == "pass"
    assert _answer(builtin(then=inject)).findings[0].fault == "within-block"


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_anchor_is_exchanged_without_every_other_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = ExaminedAdapter(builtin())
    look = ProbeBatch(subject, subject.batch, subject.anchors(subject.batch, 6)[:count])
    steps: list[Tensor] = []
    right = ProbeBatch.moved_by

    def moved_by(self: ProbeBatch, tokens: Tensor) -> Tensor:
        steps.append((tokens != self.batch.tokens)[self.anchors])
        return right(self, tokens)

    monkeypatch.setattr(ProbeBatch, "moved_by", moved_by)
    made = exchange_anchor_tokens(look, subject.adapter.vocabulary, 3)
    assert made.other is None and not bool(made.still.any()) and not bool(made.text.any())
    on = torch.stack(steps)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    assert all(bool((on[:, a] & ~on[:, b]).any()) for a, b in pairs)
    assert len(steps) <= 5 and bool(on.any(0).all()) and bool((~on).any(0).all())


def test_a_graph_that_was_made_before_can_be_differentiated_after() -> None:
    subject = ExaminedAdapter(builtin())
    parameters = [tensor for tensor in subject.parameters.values() if tensor.requires_grad]
    before = torch.autograd.grad(subject.step_output.loss, parameters, retain_graph=True)
    query_probes(subject, only=["context", "decode", "export"])
    after = torch.autograd.grad(subject.step_output.loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
