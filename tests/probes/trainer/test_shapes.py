"""What the probe `shapes` tells, beside the faults of tests/faults."""

from typing import Any

import pytest
import torch

from parity.model.training.data import Batch
from parity.probes.adapters.base import NotExposed
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.probes.trainer.shapes import _bits, _grid, _repeats_earlier
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["shapes"])[0][1]


def test_every_tensor_is_in_the_table_with_its_numbers() -> None:
    subject = ExaminedAdapter(builtin())
    answer = query_probes(subject, only=["shapes"])[0][1]
    rows = {row[0]: row for row in answer.tables[0].rows}
    names = {
        f"step.{name}" for name in ("loss", "hidden", "head", "anchors", "fc_input", "labels", "teacher")
    }
    assert names <= set(rows)
    assert {f"captured.{tap}" for tap in subject.adapter.slices} <= set(rows)
    hidden, shown = rows["step.hidden"], subject.step_output.hidden.detach()
    assert hidden[1:5] == ("6 x 4 x 64", "float32", "cpu", "256 64 1")
    assert hidden[5] == pytest.approx(float(shown.mean()), abs=1e-6)
    assert hidden[6] == pytest.approx(float(shown.std(correction=0)), rel=1e-5)
    assert (hidden[7], hidden[8]) == (float(shown.min()), float(shown.max()))
    assert all(row[9] == 0 for row in rows.values())


def test_grids() -> None:
    values = torch.randn(100)
    assert _grid(values) is None and _grid(values.bfloat16().float()) == torch.bfloat16
    assert _grid(values.half().float()) == torch.float16 and _grid(values.double()) == torch.float32
    assert _grid(torch.tensor([1.0, 0.5, -2.0])) == torch.float8_e4m3fn and _grid(torch.arange(3)) is None
    assert _bits(torch.bfloat16) < _bits(torch.float16) < _bits(torch.float32) < _bits(torch.float64)


def test_rows_are_repeated_within_a_slice_only() -> None:
    rows = torch.randn(5, 2, 3)
    rows[3, 0] = rows[1, 0]
    rows[4, 1] = rows[2, 0]
    assert _repeats_earlier(rows).nonzero().tolist() == [[3, 0]]


class NoCapture(Builtin):
    """A trainer whose states come from elsewhere."""

    def capture(self, batch: Batch) -> Any:
        raise NotExposed("capture")


def test_without_a_capture_it_says_so() -> None:
    adapter = builtin()
    adapter.__class__ = NoCapture
    answer = _answer(adapter)
    assert answer.findings[0].outcome == "pass"
    assert "the adapter does not show capture" in answer.findings[0].sentence
    assert not any(str(row[0]).startswith("captured") for row in answer.tables[0].rows)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_declared_precision_is_the_captured_one(dtype: str) -> None:
    weights = "float64" if dtype == "float64" else "float32"
    answer = _answer(builtin({"recipe.target.dtype": dtype, "run.precision.weights": weights}))
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    assert answer.statement is not None and dict(answer.statement.facts)["shapes.states_dtype"] == dtype
