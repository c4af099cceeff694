"""What the probe `frozen` does without an update, at a rate of 0, and with reduced heads."""

from typing import Any

import pytest
import torch

from parity.probes.adapters.base import NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.frozen import _unlike
from tests.faults.injected.frozen import DetachedContext
from tests.faults.wiring import builtin


def _missing(*names: str) -> type[Builtin]:
    def raising(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            raise NotExposed(name)

        return method

    return type("Lacking", (Builtin,), {name: raising(name) for name in names})


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["frozen"])[0][1]


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ((), "25 of 25 parameters train, 2 are frozen"),
        (("update",), "25 parameters train, 2 are frozen (embed_tokens, lm_head), by their gradients"),
        (("update", "optimizer"), "by their gradients: no optimizer step was seen"),
        (("reference",), "embedding and head were not compared with the target's (reference is not shown)"),
    ],
)
def test_what_is_not_shown_is_told(missing: tuple[str, ...], words: str) -> None:
    adapter = builtin()
    adapter.__class__ = _missing(*missing)
    (finding,) = _answer(adapter).findings
    assert finding.outcome == "pass" and words in finding.sentence, finding.sentence


def test_a_missing_gradient_is_found_without_an_update_too() -> None:
    adapter = builtin({}, DetachedContext)
    adapter.__class__ = _missing("update", "optimizer")
    finding = _answer(adapter).findings[0]
    assert finding.fault == "trained-without-gradient"
    assert finding.sentence.endswith(
        "2 of 25 get no gradient, or one of exactly 0: fc.weight, hidden_norm.weight"
    )


def test_a_rate_of_zero_moves_nothing_and_is_no_fault() -> None:
    def plant(adapter: Builtin) -> None:
        for group in adapter.trainer.optimizer.param_groups:
            group["lr"] = 0.0

    (finding,) = _answer(builtin(then=plant)).findings
    assert finding.outcome == "pass" and "no optimizer step was seen to move them" in finding.sentence


def test_an_update_that_draws_random_numbers_is_not_a_fault_of_the_adapter() -> None:
    class Dropping(Builtin):
        def update(self, *args: Any, **options: Any) -> None:
            torch.rand(3)
            super().update(*args, **options)

    adapter = builtin()
    adapter.__class__ = Dropping
    assert [finding.outcome for finding in _answer(adapter).findings] == ["pass"]


def test_rows_of_a_head_by_hand() -> None:
    target = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    assert _unlike(target.clone(), target) == (0, 0.0)
    assert _unlike(target[[3, 7, 40]], target) == (0, 0.0)
    assert _unlike(target.roll(1, 0), target)[0] == 50
    own = target[[3, 7, 40]].clone()
    own[1, 2] += 0.25
    wrong, size = _unlike(own, target)
    assert wrong == 1 and size >= 0.25 - 1e-6
    assert _unlike(target.to(torch.bfloat16), target) == (0, 0.0)
    assert _unlike(torch.zeros(4, 3), target)[0] == 4
