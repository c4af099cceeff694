"""The factor of distillation, and heads of the drafter's own, as the probe `loss` tells them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.training.anchors import block_ids
from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed, TargetReference
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.designed_row import design_batch
from parity.probes.instruments.loss.solve import _squares
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from tests.faults.injected.loss import KL, Plain, configured
from tests.faults.injected.loss_head import OwnHead, distilled, own_head
from tests.faults.wiring import builtin


def _asked(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["loss"])[0][1]


def test_a_squared_temperature_that_is_declared_as_a_factor_is_no_fault() -> None:
    """The step multiplies by T^2 = 4 what a recipe without the square declares as .7: together they are 2.8."""
    step = {"recipe.loss.terms": {"ce": 0.3, "kl": 0.7}, "recipe.loss.temperature": 2.0}
    adapter = builtin(step, distilled())
    declared = adapter.recipe.loss.model_copy(update={"terms": {"ce": 0.3, "kl": 2.8}})
    adapter.recipe = adapter.recipe.model_copy(update={"loss": declared})
    answer = _asked(adapter)
    assert [f.outcome for f in answer.findings] == ["pass"], answer.findings[0].sentence
    assert answer.statement is not None
    assert "loss.times_temperature_squared" not in dict(answer.statement.facts)


def test_shares_are_the_squares_and_not_something_near_them() -> None:
    changes = {"recipe.loss.terms": {"ce": 0.5, "kl": 0.5}, "recipe.loss.temperature": 2.0}
    assert [f.fault for f in _asked(builtin(changes, distilled())).findings] == ["loss-temperature-squared"]
    other = configured(terms={"ce": 0.5, "kl": 0.5 * 3.9})
    assert _asked(builtin(changes, other)).findings[0].fault == "loss-terms"


def test_a_denominator_that_is_known_is_no_square() -> None:
    """KL alone at T = 2: the plain sum over the number of samples is recognised, and no T^2 is spoken of."""
    changes = {"recipe.loss.terms": {"kl": 1.0}, "recipe.loss.temperature": 2.0}
    changes |= {"recipe.labels": "teacher_distribution"}
    findings = _asked(builtin(changes, configured(reduction="batch_mean"))).findings
    assert [f.fault for f in findings] == ["loss-reduction"]


def test_squares_are_found_by_hand() -> None:
    none = dict.fromkeys(("ce", "kl", "rkl"), 0.0)
    declared = {"ce": 0.5, "kl": 0.25, "rkl": 0.25}
    measured = {"ce": 0.5 / 1.5, "kl": 0.75 / 1.5, "rkl": 0.25 / 1.5}
    assert _squares(declared, measured, none, (3**0.5, 1.0)) == [{"kl": pytest.approx(3.0)}]
    assert _squares(declared, declared, none, (3**0.5, 1.0)) == [{}]
    assert _squares({"kl": 1.0}, {"kl": 1.0}, none, (2.0, 2.0)) == [{}, {"kl": 4.0}]
    assert _squares(declared, {"ce": 1.0}, none, (2.0, 1.0)) == [{}]


def _with_head(drift: float, changes: dict[str, Any] | None = None, *, trains: bool = True) -> Builtin:
    return builtin(changes, OwnHead, then=own_head(drift, trains=trains))


def test_a_head_of_its_own_is_told_with_the_loss_that_it_has() -> None:
    answer = _asked(_with_head(0.1, KL))
    assert [f.fault for f in answer.findings] == ["loss-head"]
    assert answer.statement is not None and dict(answer.statement.facts)["loss.head"] == "trains"
    assert "80 of its 80 rows are not the target's" in answer.statement.sentence
    assert answer.statement.sentence.startswith("KL to the teacher")


def test_the_gradient_at_a_head_is_told_as_it_is() -> None:
    adapter = _with_head(0.0)
    finding = _asked(adapter).findings[0]
    subject = ExaminedAdapter(adapter)
    crafted = design_batch(subject)
    states = crafted.states.clone().requires_grad_(True)
    loss = subject.step(crafted.batch, states, anchors=crafted.anchors).loss
    (gradient,) = torch.autograd.grad(loss, subject.parameters["own_head"])
    assert dict(finding.evidence)["gradient"] == pytest.approx(float(gradient.abs().max()))


class NoReference(Builtin):
    """The target is not shown."""

    def reference(self, batch: Batch) -> TargetReference:
        raise NotExposed("reference")


def test_without_the_target_a_trained_head_is_named_before_what_is_not_recognised() -> None:
    adapter = _with_head(2.0, KL)
    adapter.__class__ = NoReference
    faults = [f.fault for f in _asked(adapter).findings]
    assert faults[0] == "loss-head"


def test_an_embedding_that_trains_is_no_head() -> None:
    class Embeds(Plain):
        """Slot embeddings are looked up in a parameter of the head's shape."""

        def embeddings(self, batch: Batch, anchors: Tensor) -> Tensor:
            ids = block_ids(batch.tokens, anchors, self.recipe.block.size, self.recipe.block.mask_token_id)
            return torch.nn.functional.embedding(ids, self.drafter.get_parameter("table"))

    def then(adapter: Builtin) -> None:
        table = torch.nn.Parameter(adapter.trainer.parts.embed.detach().clone())
        adapter.trainer.drafter.register_parameter("table", table)

    answer = _asked(builtin(None, Embeds, then=then))
    assert [f.outcome for f in answer.findings] == ["pass"], answer.findings[0].sentence
