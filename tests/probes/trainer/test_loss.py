"""What the probe `loss` measures, beside the faults of tests/faults: gradients, mixtures, laws, sentences."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.anchors import BlockLabels
from parity.model.training.loss import Objective, TeacherStates
from parity.probes.adapters.base import AdapterStep, TargetReference
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.designed_row import design_batch
from parity.probes.instruments.loss.head_gradient import (
    SOFT,
    HeadGradients,
    compute_term_values,
    find_row_ids,
)
from parity.probes.instruments.loss.mixture import bound_unseen_shares, explain
from parity.probes.instruments.loss.slot_weights import WeightedSlots, recognise_law
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from tests.faults.injected.loss import CaseStudyLoss, Plain, configured
from tests.faults.wiring import builtin


def _answer(changes: dict[str, Any] | None = None, wiring: type[TrainingStep] = TrainingStep) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(builtin(changes, wiring)), only=["loss"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


# --- terms ------------------------------------------------------------------------------------------------


def test_term_values_by_hand() -> None:
    q, p = torch.tensor([[0.5, 0.25, 0.25]]).double(), torch.tensor([[0.25, 0.25, 0.5]]).double()
    made = {
        name: float(compute_term_values(name, q.log(), torch.tensor([1]), p.log())) for name in ("ce", *SOFT)
    }
    assert made["ce"] == pytest.approx(math.log(4))
    assert made["kl"] == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2))
    assert made["rkl"] == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert made["tv"] == pytest.approx(0.25)
    assert made["nla"] == pytest.approx(-math.log(0.75))
    m = (0.375, 0.25, 0.375)
    js = 0.5 * sum(a * math.log(a / b) for a, b in zip(p[0].tolist(), m, strict=True))
    js += 0.5 * sum(a * math.log(a / b) for a, b in zip(q[0].tolist(), m, strict=True))
    assert made["js"] == pytest.approx(js)
    share = math.exp(-3 * 0.75)
    assert made["lk"] == pytest.approx(share * made["kl"] + (1 - share) * 0.25)
    assert float(compute_term_values("smoothing", q.log(), None, None)) == pytest.approx(
        (math.log(2) + 2 * math.log(4)) / 3
    )


def _at_head(
    seed: int = 0, slots: int = 12, vocabulary: int = 30, width: int = 16
) -> tuple[HeadGradients, Tensor, Tensor]:
    """A made-up step whose loss is the sum of weights times cross-entropy, in float64; labels and weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, slots // 3 + 1, width, generator=generator, dtype=torch.float64).requires_grad_(
        True
    )
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, hidden.shape[:2], generator=generator)
    weights = torch.rand(hidden.shape[:2], generator=generator, dtype=torch.float64) + 0.1
    weights[:, 0] = 0
    nll = -(hidden @ head.T).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    shown = AdapterStep(
        loss=(weights * nll).sum(),
        hidden=hidden,
        head=head,
        anchors=torch.tensor([2, 9, 20]),
        fc_input=torch.zeros(30, 4),
    )
    at = HeadGradients.of(shown)
    return at, labels[at.block, at.slot], weights[at.block, at.slot]


def test_weights_of_a_hand_made_loss_are_recovered() -> None:
    at, labels, weights = _at_head()
    assert at.slot.min() == 1 and len(at) == 12
    assert at.index.tolist()[:4] == [3, 4, 5, 6]
    columns = at.columns(["ce:x", "smoothing"], {"x": labels}, None)
    fit = explain(at.gradient, columns, 1e-12)
    assert list(fit.shares) == ["ce:x"] and fit.is_explained
    np.testing.assert_allclose(fit.weights, weights.numpy(), rtol=1e-12)


def test_wrong_labels_explain_nothing() -> None:
    at, labels, _ = _at_head()
    fit = explain(at.gradient, at.columns(["ce:x"], {"x": labels.roll(1)}, None), 1e-6)
    assert not fit.is_explained and fit.residual > 0.1


@pytest.mark.parametrize("share", [0.5, 0.01, 0.0005])
@pytest.mark.parametrize("name", ["kl", "rkl", "js", "smoothing"])
def test_shares_of_a_mixture(name: str, share: float) -> None:
    at, labels, weights = _at_head(1)
    teacher = torch.randn(len(at), len(at.head), generator=torch.Generator().manual_seed(5)).double()
    columns = at.columns(["ce:x", "kl", "rkl", "js", "smoothing"], {"x": labels}, teacher)
    gradient = weights[:, None] * ((1 - share) * columns["ce:x"] + share * columns[name])
    fit = explain(gradient, columns, 1e-9)
    assert fit.shares == pytest.approx({"ce:x": 1 - share, name: share}, rel=1e-4)
    np.testing.assert_allclose(fit.weights, weights.numpy(), rtol=1e-6)


def test_tv_and_nla_have_one_direction_and_other_weights() -> None:
    at, _, weights = _at_head(2)
    teacher = torch.randn(len(at), len(at.head), generator=torch.Generator().manual_seed(6)).double()
    columns = at.columns(["tv", "nla", "kl"], {}, teacher)
    fit = explain(weights[:, None] * columns["nla"], columns, 1e-9)
    both = {name: each.weights for each in (fit, *fit.alike) for name in each.shares}
    assert set(both) == {"tv", "nla"}
    np.testing.assert_allclose(both["nla"], weights.numpy(), rtol=1e-9)
    overlap = torch.minimum((at.hidden @ at.head.T).softmax(-1), teacher.softmax(-1)).sum(-1)
    np.testing.assert_allclose(both["tv"], (weights / overlap).numpy(), rtol=1e-9)


def test_what_would_not_be_seen_ends_where_it_says() -> None:
    at, labels, weights = _at_head(3)
    teacher = torch.randn(len(at), len(at.head), generator=torch.Generator().manual_seed(7)).double()
    columns, limit = at.columns(["ce:x", "kl"], {"x": labels}, teacher), 1e-6
    hard = {"ce:x": columns["ce:x"]}
    pure = weights[:, None] * columns["ce:x"]
    bound = bound_unseen_shares(pure, columns, explain(pure, hard, limit), ["kl"])["kl"]
    assert 0 < bound < 1e-4
    for factor, seen in ((0.7, False), (1.4, True)):
        share = factor * bound
        mixed = weights[:, None] * ((1 - share) * columns["ce:x"] + share * columns["kl"])
        assert explain(mixed, hard, limit).is_explained is not seen


def test_rows_are_found_whatever_the_dtype() -> None:
    rows = torch.randn(9, 5)
    assert find_row_ids(rows[[7, 2]].bfloat16(), rows).tolist() == [7, 2]
    assert find_row_ids(rows[[3]] + 1, rows).tolist() == [-1]


# --- laws -------------------------------------------------------------------------------------------------


def _slots(
    weight: Any, *, blocks: int = 4, size: int = 8, seed: int = 0, noise: float = 0.0
) -> WeightedSlots:
    """Slots of whole blocks; weight(block, slot, chance, right) gives each one's."""
    generator = np.random.default_rng(seed)
    block, slot = (each.ravel() for each in np.meshgrid(np.arange(blocks), np.arange(1, size), indexing="ij"))
    chance, right = generator.uniform(0.05, 0.9, len(block)), generator.random(len(block)) < 0.6
    made = np.array([weight(b, k, chance, right) for b, k in zip(block, slot, strict=True)], dtype=np.float64)
    return WeightedSlots(
        block=block,
        slot=slot,
        weight=made * (1 + noise * generator.standard_normal(len(made))),
        tolerance=np.full(len(made), 1e-5 + 6 * noise),
        chance=chance,
        value=-np.log(chance),
        right=right,
        document=block // 2,
        size=size,
    )


def test_exponential_and_its_error() -> None:
    law = recognise_law(_slots(lambda b, k, c, r: 0.3 * math.exp(-(k - 1) / 4)))
    assert law.kind == "exp" and law.parameters["gamma"] == pytest.approx(4, rel=1e-9)
    assert law.scale == pytest.approx(0.3) and law.errors["gamma"] < 1e-9
    noisy = recognise_law(_slots(lambda b, k, c, r: math.exp(-(k - 1) / 4), noise=3e-3))
    assert noisy.kind == "exp"
    assert abs(noisy.parameters["gamma"] - 4) < 5 * noisy.errors["gamma"] < 0.2


def test_uniform_per_slot_and_unknown() -> None:
    assert recognise_law(_slots(lambda b, k, c, r: 2.5)).kind == "uniform"
    assert recognise_law(_slots(lambda b, k, c, r: 9.0 - k)).kind == "per-slot"
    odd = np.random.default_rng(3).uniform(0.5, 2, (9, 9))
    assert recognise_law(_slots(lambda b, k, c, r: odd[b, k])).kind == "unknown"


@pytest.mark.parametrize("alpha", [0.0, 0.45, 0.5, 1.0])
def test_dpace_by_its_definition(alpha: float) -> None:
    """arXiv 2605.18810: the sum over j >= k of the products of s_1..s_j."""

    def weight(b: int, k: int, chance: Any, right: Any) -> float:
        own = (1 - alpha) * chance[b * 7 : b * 7 + 7] + alpha
        return float(sum(np.prod(own[:j]) for j in range(k, 8)))

    law = recognise_law(_slots(weight), prefer="dpace")
    assert law.kind == "dpace" and law.parameters["alpha"] == pytest.approx(alpha, abs=1e-6)
    assert law.scale == pytest.approx(1)


def test_attached_dpace_by_finite_differences() -> None:
    """The weights that the gradient of sum w(q) * -log q shows, with respect to -log q."""

    def total(values: Any) -> float:
        q = np.exp(-values)
        smooth = 0.5 * q + 0.5
        prefix = np.cumprod(smooth, 1)
        return float((np.flip(np.cumsum(np.flip(prefix, 1), 1), 1) * values).sum())

    values = -np.log(np.random.default_rng(0).uniform(0.05, 0.9, 28)).reshape(4, 7)
    shown = np.zeros_like(values)
    for at in np.ndindex(values.shape):
        step = np.zeros_like(values)
        step[at] = 1e-6
        shown[at] = (total(values + step) - total(values - step)) / 2e-6
    slots = _slots(lambda b, k, c, r: shown[b, k - 1])
    law = recognise_law(slots)
    assert law.kind == "dpace-attached" and law.parameters["alpha"] == pytest.approx(0.5, abs=1e-4)


def test_streak_with_its_gamma() -> None:
    def weight(b: int, k: int, chance: Any, right: Any) -> float:
        alive = bool(right[b * 7 : b * 7 + k - 1].all())
        return math.exp(-(k - 1) / 10) * (2.0 if alive else 1.0)

    law = recognise_law(_slots(weight, blocks=8))
    assert law.kind == "streak" and law.note.startswith("whether all slots before are right, times 1 to 2")
    assert law.parameters["gamma"] == pytest.approx(10, rel=1e-6)


def test_means_of_blocks() -> None:
    sums = {0: 1.0, 1: 3.0, 2: 2.0, 3: 0.5}
    law = recognise_law(_slots(lambda b, k, c, r: math.exp(-(k - 1) / 4) / sums[b]))
    assert law.kind == "per-block" and "each block has its own factor" in law.note


# --- the whole probe --------------------------------------------------------------------------------------


def test_the_sentence() -> None:
    answer = _answer({"recipe.block.size": 8})
    assert [finding.outcome for finding in answer.findings] == ["pass"]
    wanted = (
        "hard CE on the teacher's argmax, weights exp with gamma 4.00 over slots 1-7, slot 0 unweighted, "
    )
    wanted += "weighted mean"
    assert answer.findings[0].sentence.startswith(wanted)
    assert {table.name for table in answer.tables} == {"loss.terms", "loss.slots"}
    facts = _facts(answer)
    assert facts["loss.gamma"] == pytest.approx(4.0, abs=1e-4) and facts["loss.reduction"] == "weighted_mean"
    assert facts["loss.share.ce"] == 1.0 and facts["loss.labels"] == "teacher" and facts["loss.slot0"] == 0


def test_the_denominator_is_the_sum_of_weights() -> None:
    facts = _facts(_answer({"recipe.block.size": 8}))
    subject = ExaminedAdapter(builtin({"recipe.block.size": 8}))
    crafted = design_batch(subject)
    shown = subject.step(crafted.batch, crafted.states, anchors=crafted.anchors)
    assert shown.labels is not None
    on = shown.labels >= 0
    expected = (on * torch.exp(-(torch.arange(8.0) - 1) / 4)).sum()
    assert facts["loss.denominator"] == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_of_the_case_study_is_named_with_its_numbers() -> None:
    answer = _answer({"recipe.block.size": 8}, CaseStudyLoss)
    assert [finding.fault for finding in answer.findings] == ["loss-terms", "loss-streak"]
    facts = _facts(answer)
    assert facts["loss.share.kl"] == pytest.approx(0.7, abs=1e-5)
    assert facts["loss.share.ce"] == pytest.approx(0.3, abs=1e-5)
    assert facts["loss.gamma"] == pytest.approx(10, abs=1e-3) and facts["loss.weights"] == "streak"


@pytest.mark.parametrize("gamma", [3.99, 4.02])
def test_gamma_to_half_a_percent(gamma: float) -> None:
    from parity.model.training.loss import ExpDecay

    answer = _answer({"recipe.block.size": 8}, configured(weights=ExpDecay(gamma=gamma)))
    assert answer.findings[0].fault == "loss-gamma"
    assert _facts(answer)["loss.gamma"] == pytest.approx(gamma, abs=1e-4)


def test_the_row_is_flat_and_half_differs() -> None:
    subject = ExaminedAdapter(builtin({"recipe.block.size": 8}))
    crafted = design_batch(subject)
    shown = subject.step(crafted.batch, crafted.states.requires_grad_(True), anchors=crafted.anchors)
    at = HeadGradients.of(shown)
    assert crafted.teacher is not None and crafted.data is not None
    teacher = crafted.at(crafted.teacher, at.index - 1)
    assert teacher.softmax(-1).amax(-1).max() < 0.5
    same = (teacher.argmax(-1) == crafted.at(crafted.data, at.index)).double().mean()
    right = (at.best[0] == teacher.argmax(-1)).double().mean()
    assert 0.3 < same < 0.7 and 0.3 < right < 0.8


class Bonus(Plain):
    """An unknown term, a thousandth of cross-entropy."""

    def value(self, logits: Tensor, labels: Tensor, soft: Tensor | None) -> Tensor:
        return super().value(logits, labels, soft) + 1e-3 * logits.square().mean(-1)


def test_what_is_not_recognised_is_not_named() -> None:
    answer = _answer(None, Bonus)
    assert [finding.fault for finding in answer.findings] == ["loss-unrecognised"]
    assert answer.statement is not None and "not recognised" in answer.statement.sentence
    assert _facts(answer) == {
        "loss.recognised": False,
        "loss.residual": pytest.approx(_facts(answer)["loss.residual"]),
    }
    assert 1e-6 < _facts(answer)["loss.residual"] < 0.1
    assert "hard CE" not in answer.statement.sentence


class NoReference(Builtin):
    """An adapter that cannot show the target."""

    def reference(self, batch: Any) -> TargetReference:
        from parity.probes.adapters.base import NotExposed

        raise NotExposed("reference")


def test_without_the_norm_the_steps_own_teacher_serves() -> None:
    adapter = builtin({"recipe.teacher.norm": "pre", "recipe.loss.terms": {"kl": 0.5, "ce": 0.5}})
    adapter.__class__ = NoReference
    answer = query_probes(ExaminedAdapter(adapter), only=["loss"])[0][1]
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    assert "step's own teacher" in answer.tables[0].caption


class Detached(TrainingStep):
    """The loss does not depend on what is shown as hidden states."""

    def objective(
        self,
        hidden: Tensor,
        labels: Tensor,
        blocks: BlockLabels,
        teacher: TeacherStates | None,
        *,
        samples: int,
    ) -> Objective:
        return super().objective(hidden.detach().clone(), labels, blocks, teacher, samples=samples)


def test_a_loss_that_does_not_depend_on_hidden_is_an_error_of_the_adapter() -> None:
    answer = _answer(None, Detached)
    assert answer.findings[0].outcome == "error" and "step.loss" in answer.findings[0].sentence


def test_a_factor_of_all_terms_is_told_as_a_denominator() -> None:
    answer = _answer({"recipe.loss.terms": {"ce": 1.0}}, configured(terms={"ce": 2.0}))
    assert answer.findings[0].fault == "loss-reduction"
