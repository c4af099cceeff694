"""What the probe `coverage` counts, beside the faults of tests/faults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.coverage import DRAW_SEED, EPOCHS
from tests.faults.injected.coverage import RowBudget
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["coverage"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


class Seen(Builtin):
    """Keeps what it was asked for."""

    rows: list[tuple[Batch, int]]

    def draw(self, batch: Batch, *, seed: int, epoch: int) -> Tensor:
        drawn = super().draw(batch, seed=seed, epoch=epoch)
        if seed == DRAW_SEED:
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


class ByRow(TrainingStep):
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
        raise NotExposed("draw")


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


def by_row(anchors: int) -> type[TrainingStep]:
    """So many anchors a row, whatever documents it holds."""

    class ByRowNumber(TrainingStep):
        def anchors(self, batch: Batch, seed: int) -> Tensor:
            every = torch.nonzero(batch.loss_mask & (batch.document >= 0)).squeeze(-1)
            order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed + batch.epoch))
            return every[order[:anchors]].sort().values

    return ByRowNumber


@pytest.mark.parametrize("anchors", [5, 12, 24, 40])
def test_a_row_s_own_number_is_told_in_words(anchors: int) -> None:
    answer = _answer(builtin({"recipe.block.anchors": 8}, by_row(anchors)))
    assert [(f.outcome, f.fault) for f in answer.findings] == [("warn", "anchors-row-budget")]
    assert f"{anchors} for a row of 8 documents in every epoch" in answer.findings[0].sentence
    assert _facts(answer)["coverage.budget"] == "row"


def test_a_row_s_budget_of_the_declared_number_starves_its_documents() -> None:
    answer = _answer(builtin({"recipe.block.anchors": 8}, by_row(8)))
    assert answer.findings[0].fault == "anchors-starved"
    assert "8 for the whole row, which its documents share" in answer.findings[0].sentence


class ByChance(TrainingStep):
    """Every candidate with a chance of its own: no number is anyone's."""

    def anchors(self, batch: Batch, seed: int) -> Tensor:
        every = torch.nonzero(batch.loss_mask & (batch.document >= 0)).squeeze(-1)
        drawn = torch.rand(len(every), generator=torch.Generator().manual_seed(seed + batch.epoch))
        return every[drawn < 0.3]


def test_documents_with_a_budget_or_a_chance_of_their_own_are_no_row() -> None:
    for wiring in (TrainingStep, ByChance):
        answer = _answer(builtin({"recipe.block.share": 0.3, "recipe.block.anchors": 512}, wiring))
        assert _facts(answer)["coverage.budget"] == "document"
