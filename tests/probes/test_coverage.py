"""What the probe `coverage` counts, beside the faults of tests/faults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.data import Batch
from parity.model.step import Wiring
from parity.probes.adapters.asking import Subject, ask
from parity.probes.adapters.base import Missing
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import Answer
from parity.probes.coverage import EPOCHS, SEED
from tests.faults.plants_coverage import RowBudget
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> Answer:
    return ask(Subject(adapter), only=["coverage"])[0][1]


def _facts(answer: Answer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


class Seen(Builtin):
    """Keeps what it was asked for."""

    rows: list[tuple[Batch, int]]

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        drawn = super().draw(batch, seed=seed, epoch=epoch)
        if seed == SEED:
            type(self).drawn.append((batch, drawn))
        return drawn

    drawn: list[tuple[Batch, Tensor]] = []


def test_the_share_is_the_union_of_the_draws() -> None:
    adapter = builtin()
    adapter.__class__ = Seen
    Seen.drawn = []
    facts = _facts(_answer(adapter))
    row = Seen.drawn[0][0]
    same = [drawn for batch, drawn in Seen.drawn if batch is row][:EPOCHS]
    assert len(same) == EPOCHS
    supervised = row.loss_mask & (row.document >= 0)
    union = torch.zeros(len(row.tokens), dtype=torch.bool)
    union[torch.cat(same)] = True
    assert facts["coverage.share"] == pytest.approx(float(union.sum() / supervised.sum()), abs=1e-6)
    least = min(
        float(union[own].sum() / supervised[own].sum()) for own in (row.document == n for n in range(8))
    )
    assert facts["coverage.least"] == pytest.approx(least, abs=1e-6)


def test_our_anchors_do_not_depend_on_the_row() -> None:
    facts = _facts(_answer(builtin()))
    assert facts["coverage.depends_on_row"] is False and facts["coverage.budget"] == "document"


class ByRow(Wiring):
    """A global generator: what a document draws depends on what stands before it."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        from dataclasses import replace

        return super().anchors(replace(batch, sample_ids=tuple(range(len(batch.sample_ids)))), seed)


def test_a_draw_that_depends_on_the_row_is_told_and_no_fault() -> None:
    answer = _answer(builtin(None, ByRow))
    assert answer.findings[0].outcome == "pass"
    assert _facts(answer)["coverage.depends_on_row"] is True


def test_a_row_s_budget_is_a_fault_of_isolated_documents() -> None:
    answer = _answer(builtin(None, RowBudget))
    assert answer.findings[0].fault == "anchors-starved"
    assert _facts(answer)["coverage.budget"] == "row" and "for the whole row" in answer.findings[0].sentence


class NoDraw(Builtin):
    """Anchors are drawn elsewhere."""

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        raise Missing("draw")


def test_skipped_without_a_draw() -> None:
    adapter = builtin()
    adapter.__class__ = NoDraw
    assert [f.outcome for f in _answer(adapter).findings] == ["skipped"]


def test_share_and_budget_are_what_is_declared() -> None:
    for changes in ({"recipe.block.share": 0.3}, {"recipe.block.anchors": 1}, {"recipe.block.anchors": 512}):
        answer = _answer(builtin(changes))
        assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
        table = answer.tables[0]
        assert all(abs(float(row[3]) - float(row[2])) < 1e-9 for row in table.rows)  # type: ignore[arg-type]
