"""The objective: every term by hand, closed-form gradients against autograd, chunks, memory.

Run: PYTHONPATH=. python -m pytest --import-mode=importlib tests/model/training/test_loss.py
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parity.errors import ParityError
from parity.model.training.loss import (
    Dpace,
    ExpDecay,
    LossConfig,
    Objective,
    Reduction,
    SlotWeighting,
    TeacherStates,
    Uniform,
    objective,
    slot_weights,
    teacher_labels,
)

TERMS = ["ce", "kl", "rkl", "js", "tv", "nla", "lk"]
ALL_WEIGHTS: list[SlotWeighting] = [ExpDecay(gamma=2.0), Dpace(alpha=0.5), Uniform()]
REDUCTIONS: list[Reduction] = ["weighted_mean", "mask_mean", "batch_mean"]
A, B, V, D, STATES = 5, 4, 11, 6, 9


def make_batch(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> dict[str, Any]:
    """hidden, head, labels, supervised (a hole, a partial block, an empty block) and a teacher."""
    generator = torch.Generator().manual_seed(0)
    supervised = torch.ones(A, B, dtype=torch.bool)
    supervised[1, 2] = supervised[3, 2:] = supervised[4] = False
    return {
        "hidden": (torch.randn(A, B, D, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_(),
        "head": torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype),
        "labels": torch.randint(V, (A, B), generator=generator),
        "supervised": supervised,
        "teacher": TeacherStates(
            states=torch.randn(STATES, D, generator=generator, dtype=torch.float64).to(dtype),
            index=torch.randint(STATES, (A, B), generator=generator),
            head=torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype),
        ),
    }


def run(batch: dict[str, Any], config: LossConfig, **more: Any) -> Objective:
    arguments = (batch["hidden"], batch["head"], batch["labels"], batch["supervised"], config)
    return objective(*arguments, teacher=batch["teacher"], **more)


def plain_term(name: str, q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """A second definition of every term, on probabilities, left to autograd."""
    overlap = torch.minimum(p, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    m = (p + q) / 2
    share = torch.exp(-3.0 * overlap.detach())
    definitions: dict[str, Callable[[], Tensor]] = {
        "ce": lambda: -q.gather(-1, labels[..., None])[..., 0].log(),
        "kl": lambda: kl,
        "rkl": lambda: (q * (q.log() - p.log())).sum(-1),
        "js": lambda: (p * (p / m).log() + q * (q / m).log()).sum(-1) / 2,
        "tv": lambda: 1 - overlap,
        "nla": lambda: -overlap.log(),
        "lk": lambda: share * kl + (1 - share) * (1 - overlap),
    }
    return definitions[name]()


def plain_weights(weights: SlotWeighting, supervised: Tensor, confidence: Tensor) -> Tensor:
    """Slot weights with Python loops over blocks and slots."""
    out = torch.zeros_like(confidence)
    for a, k in product(range(len(out)), range(1, out.shape[1])):
        if not supervised[a, k]:
            continue
        match weights:
            case Uniform():
                out[a, k] = 1.0
            case ExpDecay(gamma=gamma):
                out[a, k] = math.exp(-(k - 1) / gamma)
            case Dpace(alpha=alpha):
                for j in range(k, out.shape[1]):
                    on = [i for i in range(1, j + 1) if supervised[a, i]]
                    factors = [(1 - alpha) * float(confidence[a, i]) + alpha for i in on]
                    out[a, k] += math.prod(factors) if supervised[a, j] else 0.0
    return out


def plain_loss(batch: dict[str, Any], config: LossConfig, samples: int) -> Tensor:
    """The whole objective unchunked, over all slots, through autograd."""
    logits, teacher = batch["hidden"] @ batch["head"].T, batch["teacher"]
    target = teacher.states[teacher.index] @ teacher.head.T
    on = batch["supervised"].clone()
    on[:, 0] = False
    total: Tensor = torch.zeros((), dtype=logits.dtype)
    confidence = logits.softmax(-1).gather(-1, batch["labels"][..., None])[..., 0].detach()
    weights = plain_weights(config.weights, on, confidence)
    for name, factor in config.terms.items():
        heat = 1.0 if name == "ce" else config.temperature
        values = plain_term(name, (logits / heat).softmax(-1), (target / heat).softmax(-1), batch["labels"])
        total = total + factor * (values * weights).sum()
    divisors = {"weighted_mean": weights.sum(), "mask_mean": on.sum(), "batch_mean": samples}
    loss: Tensor = total / divisors[config.reduction]
    return loss


MIXTURES = [{name: 1.0} for name in TERMS] + [{"ce": 0.3, "kl": 0.7}, {"tv": 2.0, "ce": 0.5, "js": 0.25}]


@pytest.mark.parametrize(("terms", "weights"), list(product(MIXTURES, ALL_WEIGHTS)), ids=str)
def test_chunked_is_the_plain_objective(terms: dict[str, float], weights: SlotWeighting) -> None:
    """Loss and gradient, one block a chunk and all at once, for every reduction and two temperatures."""
    batch = make_batch()
    for reduction, temperature in product(REDUCTIONS, (1.0, 1.7)):
        config = LossConfig(terms=terms, weights=weights, reduction=reduction, temperature=temperature)
        expected = plain_loss(batch, config, samples=3)
        (wanted,) = torch.autograd.grad(expected, batch["hidden"])
        for slots in (1, 2 * B, 10**6):
            out = run(batch, replace(config, chunk_slots=slots), samples=3)
            (found,) = torch.autograd.grad(out.loss(), batch["hidden"])
            torch.testing.assert_close(out.loss(), expected, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", TERMS)
def test_chunking_changes_nothing_in_fp32(name: str) -> None:
    batch = make_batch(torch.float32)
    config = LossConfig(terms={name: 1.0}, weights=ExpDecay(gamma=4.0))
    gradients = []
    for slots in (1, 10**6):
        loss = run(batch, replace(config, chunk_slots=slots)).loss()
        gradients += torch.autograd.grad(loss, batch["hidden"])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in TERMS if name != "lk"])
def test_gradcheck(name: str) -> None:
    """Finite differences in fp64. Not lk: its share takes no gradient by definition."""
    batch = make_batch()
    config = LossConfig(terms={name: 1.0}, weights=ExpDecay(gamma=2.0), chunk_slots=1)

    def loss(hidden: Tensor) -> Tensor:
        return run({**batch, "hidden": hidden}, config).loss()

    assert torch.autograd.gradcheck(loss, (batch["hidden"],))


# Two tokens, q = (3/4, 1/4), p = (1/4, 3/4), label 1. Sum of |p - q| is 1, overlap 1/2, m = (1/2, 1/2).
BY_HAND = {
    "ce": math.log(4),
    "kl": math.log(3) / 2,
    "rkl": math.log(3) / 2,
    "js": math.log(2) - (math.log(4) - 0.75 * math.log(3)),
    "tv": 0.5,
    "nla": math.log(2),
    "lk": math.exp(-1.5) * math.log(3) / 2 + (1 - math.exp(-1.5)) / 2,
}
# d/d(logit of token 1): ce q - 1; kl q - p; tv, from q(1) < p(1): -q(1) q(0); nla twice that; js and rkl by
# q(1) (slope - mean slope) with slopes (log 3, -log 3) and (log 3/2, log 1/2) / 2.
SLOPE_BY_HAND = {
    "ce": 0.25 - 1,
    "kl": 0.25 - 0.75,
    "rkl": 0.25 * (-math.log(3) - (0.75 - 0.25) * math.log(3)),
    "js": 0.25 * 0.75 * (math.log(0.5) - math.log(1.5)) / 2,
    "tv": -0.1875,
    "nla": -0.375,
    "lk": math.exp(-1.5) * -0.5 + (1 - math.exp(-1.5)) * -0.1875,
}


@pytest.mark.parametrize("name", TERMS)
def test_term_by_hand(name: str) -> None:
    log3 = math.log(3)
    hidden = torch.tensor([[[0.0, 0.0], [log3, 0.0]]], dtype=torch.float64, requires_grad=True)
    eye = torch.eye(2, dtype=torch.float64)
    teacher = TeacherStates(
        states=torch.tensor([[0.0, log3]], dtype=torch.float64), index=torch.zeros(1, 2).long(), head=eye
    )
    supervised, labels = torch.tensor([[True, True]]), torch.tensor([[0, 1]])
    config = LossConfig(terms={name: 1.0}, weights=Uniform())
    out = objective(hidden, eye, labels, supervised, config, teacher=teacher)
    out.loss().backward()
    assert out.loss().item() == pytest.approx(BY_HAND[name], abs=1e-12)
    assert float(out.terms[name]) == pytest.approx(BY_HAND[name], abs=1e-12)
    assert hidden.grad is not None and (hidden.grad[0, 0] == 0).all()
    slope = SLOPE_BY_HAND[name]
    assert hidden.grad[0, 1].tolist() == pytest.approx([-slope, slope], abs=1e-12)
    assert float(out.expected / out.blocks) == pytest.approx(1.5)
    assert float(out.accepted / out.blocks) == 1.0


# supervised, q[label] -> weights of a block of four slots
WEIGHTS_BY_HAND: list[tuple[SlotWeighting, list[int], list[float], list[float]]] = [
    (Uniform(), [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]),
    (ExpDecay(gamma=4.0), [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, math.exp(-1 / 4), math.exp(-2 / 4)]),
    (ExpDecay(gamma=4.0), [0, 1, 0, 1], [1, 1, 1, 1], [0, 1, 0, math.exp(-2 / 4)]),
    # alpha 1/2: s = .75, .5, .625; products .75, .375, .234375; sums from behind
    (Dpace(alpha=0.5), [0, 1, 1, 1], [0, 0.5, 0.0, 0.25], [0, 1.359375, 0.609375, 0.234375]),
    # the hole neither multiplies nor adds: products .75, (.75), .46875
    (Dpace(alpha=0.5), [0, 1, 0, 1], [0, 0.5, 0.0, 0.25], [0, 1.21875, 0, 0.46875]),
    (Dpace(alpha=0.0), [0, 1, 1, 1], [0, 0.5, 0.5, 0.5], [0, 0.875, 0.375, 0.125]),
    (Dpace(alpha=1.0), [0, 1, 1, 1], [0, 0.5, 0.5, 0.5], [0, 3, 2, 1]),
]


@pytest.mark.parametrize(("weights", "supervised", "confidence", "expected"), WEIGHTS_BY_HAND)
def test_weights_by_hand(
    weights: SlotWeighting, supervised: list[int], confidence: list[float], expected: list[float]
) -> None:
    on = torch.tensor([supervised], dtype=torch.bool)
    found = slot_weights(weights, on, torch.tensor([confidence], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("reduction", "divisor"), [("weighted_mean", 1.5), ("mask_mean", 2.0), ("batch_mean", 4.0)]
)
def test_reductions_by_hand(reduction: Reduction, divisor: float) -> None:
    """Two supervised slots with weights 1 and 1/2 and loss log 2 each, four samples in the batch."""
    hidden, head = torch.zeros(1, 3, 2, requires_grad=True), torch.eye(2)
    config = LossConfig(terms={"ce": 1.0}, weights=ExpDecay(gamma=1 / math.log(2)), reduction=reduction)
    arguments = (hidden, head, torch.zeros(1, 3).long(), torch.ones(1, 3).bool(), config)
    out = objective(*arguments, samples=4)
    assert out.loss().item() == pytest.approx(1.5 * math.log(2) / divisor, rel=1e-6)
    assert float(out.denominator) == pytest.approx(divisor, rel=1e-6)
    doubled = out.loss(lambda mine: mine * 2)
    assert doubled.item() == pytest.approx(out.loss().item() / 2, rel=1e-6)


def test_denominators_of_parts_give_the_loss_of_the_whole() -> None:
    """What ranks and accumulation do: parts share one denominator, gradients add up to the whole's."""
    batch = make_batch()
    config = LossConfig(terms={"ce": 1.0}, weights=Dpace(alpha=0.5))
    whole = run(batch, config)
    (expected,) = torch.autograd.grad(whole.loss(), batch["hidden"])
    pieces = []
    for part in (slice(0, 2), slice(2, A)):
        teacher = replace(batch["teacher"], index=batch["teacher"].index[part])
        cut = {key: batch[key][part] for key in ("hidden", "labels", "supervised")}
        pieces.append(run({**batch, **cut, "teacher": teacher}, config))
    total = torch.stack([piece.denominator for piece in pieces]).sum()
    loss = torch.stack([piece.loss(lambda _: total) for piece in pieces]).sum()
    (found,) = torch.autograd.grad(loss, batch["hidden"])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_slot_accuracy_and_accepted_length_by_hand() -> None:
    """Blocks of four: all right; wrong at slot 2; right, hole, right; nothing supervised."""
    head = torch.eye(3, dtype=torch.float64) * 50
    labels = torch.tensor([[0, 1, 2, 1]] * 4)
    guesses = torch.tensor([[0, 1, 2, 1], [0, 1, 0, 1], [0, 1, 2, 1], [0, 1, 2, 1]])
    supervised = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    hidden = torch.eye(3, dtype=torch.float64)[guesses]
    out = objective(hidden, head, labels, supervised, LossConfig(terms={"ce": 1.0}, weights=Uniform()))
    assert out.counted.tolist() == [0, 3, 2, 3]
    assert out.correct.tolist() == [0, 3, 1, 3]
    assert (int(out.blocks), float(out.accepted)) == (3, 4 + 2 + 2)
    assert float(out.expected) == pytest.approx(8.0)  # probabilities are 1 - 4e-22 and 2e-22


def test_nothing_supervised_is_zero_with_zero_gradient() -> None:
    batch = make_batch()
    batch["supervised"] = torch.zeros(A, B, dtype=torch.bool)
    for weights, reduction in product(ALL_WEIGHTS, REDUCTIONS):
        out = run(batch, LossConfig(terms={"ce": 1.0, "kl": 1.0}, weights=weights, reduction=reduction))
        (gradient,) = torch.autograd.grad(out.loss(), batch["hidden"])
        assert out.loss().item() == 0.0 and (gradient == 0).all()


def test_no_blocks_at_all() -> None:
    batch = make_batch()
    teacher = replace(batch["teacher"], index=batch["teacher"].index[:0])
    cut = {key: batch[key][:0] for key in ("hidden", "labels", "supervised")}
    out = run(
        {**batch, **cut, "teacher": teacher}, LossConfig(terms={"ce": 1.0, "kl": 1.0}, weights=Uniform())
    )
    assert out.loss().item() == 0.0 and int(out.blocks) == 0
    assert not out.loss().requires_grad or (torch.autograd.grad(out.loss(), batch["hidden"])[0] == 0).all()


def test_labels_outside_the_draft_vocabulary_are_not_trained_on() -> None:
    batch = make_batch()
    batch["labels"][0, 1] = -1
    config = LossConfig(terms={"ce": 1.0}, weights=ExpDecay(gamma=4.0))
    found = run(batch, config)
    batch["labels"][0, 1], batch["supervised"][0, 1] = 3, False
    torch.testing.assert_close(found.loss(), run(batch, config).loss(), atol=0, rtol=0)


def test_inputs_are_left_as_they_were() -> None:
    batch = make_batch()
    before = batch["supervised"].clone(), batch["labels"].clone(), batch["hidden"].detach().clone()
    run(batch, LossConfig(terms={"ce": 1.0, "lk": 1.0}, weights=Uniform())).loss().backward()
    assert torch.equal(batch["supervised"], before[0]) and torch.equal(batch["labels"], before[1])
    assert torch.equal(batch["hidden"].detach(), before[2])


def test_the_head_is_frozen_whatever_its_flag() -> None:
    batch = make_batch()
    batch["head"].requires_grad_()
    run(batch, LossConfig(terms={"ce": 1.0}, weights=Uniform())).loss().backward()
    assert batch["head"].grad is None and batch["hidden"].grad is not None


def test_without_gradient_nothing_is_stored() -> None:
    batch = make_batch()
    config = LossConfig(terms={"ce": 1.0}, weights=Uniform())
    with torch.no_grad():
        out = run(batch, config)
    assert not out.numerator.requires_grad
    torch.testing.assert_close(out.loss(), run(batch, config).loss().detach())


def test_teacher_labels_are_the_argmax_where_supervised() -> None:
    batch = make_batch()
    teacher, on = batch["teacher"], batch["supervised"]
    expected = (teacher.states @ teacher.head.T).argmax(-1)[teacher.index].masked_fill(~on, -1)
    for slots in (1, 10**6):
        assert torch.equal(teacher_labels(teacher, on, slots), expected)
    assert (teacher_labels(teacher, torch.zeros_like(on)) == -1).all()


@pytest.mark.parametrize("name", TERMS)
def test_bf16_states_are_compared_in_fp32(name: str) -> None:
    """Against fp64 on the same bf16 logits: near-equal distributions, where bf16 arithmetic would cancel."""
    batch = make_batch(torch.bfloat16)
    teacher = batch["teacher"]
    near = batch["hidden"].detach().flatten(0, 1) * (1 + 2**-6)
    batch["teacher"] = TeacherStates(states=near, index=torch.arange(A * B).view(A, B), head=batch["head"])
    assert teacher.head.dtype == torch.bfloat16
    config = LossConfig(terms={name: 1.0}, weights=Uniform())
    found = run(batch, config).loss()
    logits = (batch["hidden"] @ batch["head"].T).double()
    target = (near.view(A, B, D) @ batch["head"].T).double()
    on = batch["supervised"].clone()
    on[:, 0] = False
    expected = plain_term(name, logits.softmax(-1), target.softmax(-1), batch["labels"])[on].mean()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-3, abs=1e-8)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("name", TERMS)
def test_no_tensor_is_larger_than_a_chunk(name: str) -> None:
    blocks, size, vocab, width, chunk = 64, 4, 512, 8, 8
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(blocks, size, width, generator=generator, requires_grad=True)
    head, states = torch.randn(vocab, width), torch.randn(blocks * size, width)
    teacher = TeacherStates(states=states, index=torch.arange(blocks * size).view(blocks, size), head=head)
    labels, supervised = torch.zeros(blocks, size).long(), torch.ones(blocks, size).bool()
    config = LossConfig(terms={name: 1.0}, weights=Dpace(alpha=0.5), chunk_slots=chunk)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        labels = teacher_labels(teacher, supervised, chunk)
        objective(hidden, head, labels, supervised, config, teacher=teacher).loss().backward()
    assert largest.elements <= chunk * vocab < blocks * size * vocab / 30
    assert largest.elements >= vocab  # the counter counts


WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: LossConfig(terms={"hinge": 1.0}, weights=Uniform()),
        "found: hinge\ndo this: use one or more of ce, kl",
    ),
    (lambda: LossConfig(terms={}, weights=Uniform()), "loss terms; found: none"),
    (lambda: LossConfig(terms={"ce": 1.0}, weights=Uniform(), temperature=0.0), "give one above 0"),
    (lambda: ExpDecay(gamma=0.0), "give gamma above 0, in slots"),
    (lambda: Dpace(alpha=1.5), "give alpha from 0 to 1"),
    (
        lambda: run({**make_batch(), "teacher": None}, LossConfig(terms={"kl": 1.0}, weights=Uniform())),
        "capture the teacher state, or use ce alone",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_wrong_use_says_what_to_do(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ParityError, match=message):
        make()
