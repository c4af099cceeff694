"""What the probe `inputs` measures, beside the faults of tests/faults."""

from typing import Any

import pytest

from parity.model.dflash.step import TrainingStep
from parity.model.training.data import Batch
from parity.model.training.states import StepStates
from parity.model.training.step import StepOutput
from parity.probes.adapters.base import NotExposed, TargetReference
from parity.probes.adapters.builtin import Builtin
from parity.probes.base import ProbeAnswer
from parity.probes.query import query_probes
from parity.probes.subject import ExaminedAdapter
from parity.reports.record import Table
from tests.faults.injected.inputs import AllSlices, fed, layers, teacher_from, wider
from tests.faults.injected.noise import OnAllSlices
from tests.faults.wiring import builtin


def _answer(adapter: Builtin) -> ProbeAnswer:
    return query_probes(ExaminedAdapter(adapter), only=["inputs"])[0][1]


def _facts(answer: ProbeAnswer) -> dict[str, Any]:
    assert answer.statement is not None
    return dict(answer.statement.facts)


def _matrix(answer: ProbeAnswer) -> dict[tuple[Any, Any], float]:
    table: Table = next(each for each in answer.tables if each.name == "inputs.influence")
    return {(row[0], row[1]): float(row[2] or 0.0) for row in table.rows}


def test_the_influence_matrix_of_a_healthy_trainer() -> None:
    answer = _answer(builtin())
    assert [finding.outcome for finding in answer.findings] == ["pass"]
    matrix = _matrix(answer)
    for layer in range(3):
        assert matrix[(f"layer.{layer}.out", "drafts")] > 0 == matrix[(f"layer.{layer}.out", "labels")]
    assert matrix[("final.postnorm", "drafts")] == 0.0 and matrix[("final.postnorm", "labels")] == 1.0
    chart = answer.tables[0].chart
    assert chart is not None and chart.kind == "heatmap" and chart.value == "influence"


def test_gradient_shares_add_up_and_the_teacher_has_none() -> None:
    answer = _answer(builtin())
    shares = {row[0]: float(row[3]) for row in answer.tables[0].rows if row[1] == "drafts"}  # type: ignore[arg-type]
    assert sum(share**2 for share in shares.values()) == pytest.approx(1)
    assert shares["final.postnorm"] == 0 and min(list(shares.values())[:3]) > 0.05


def test_order_in_fc_is_told() -> None:
    facts = _facts(_answer(builtin(None, fed(2, 0, 1))))
    assert facts["inputs.order"] == "layer.2.out, layer.0.out, layer.1.out"
    other = builtin({"recipe.conditioning.layers": [2, 0, 1]})
    assert _answer(other).findings[0].outcome == "pass"
    assert _facts(_answer(other))["inputs.order"] == "layer.2.out, layer.0.out, layer.1.out"


def test_the_slice_of_the_labels_in_fc_is_named_with_its_size() -> None:
    answer = _answer(builtin(None, AllSlices, then=wider))
    fault = answer.findings[0]
    assert fault.fault == "fc-teacher" and "final.postnorm" in fault.sentence
    assert (
        dict(fault.evidence)["final.postnorm moves drafts by"]
        == _matrix(answer)[("final.postnorm", "drafts")]
        > 0
    )


def test_labels_are_followed_to_the_slice_that_moves_them() -> None:
    answer = _answer(builtin(None, teacher_from(1)))
    assert answer.findings[0].fault == "labels-from-conditioning"
    assert _matrix(answer)[("layer.1.out", "labels")] == 1.0
    assert _matrix(answer)[("final.postnorm", "labels")] == 0.0


def test_the_layers_found_stand_in_the_table() -> None:
    taps = ("layer.1.out", "layer.2.out", "layer.3.out", "final.postnorm")
    answer = _answer(builtin(then=layers(*taps)))
    table = next(each for each in answer.tables if each.name == "inputs.capture")
    assert tuple(row[3] for row in table.rows) == taps
    assert [row[4] for row in table.rows] == [0.0] * 4


class NoCapture(Builtin):
    """A trainer whose states come from elsewhere."""

    def capture(self, batch: Batch) -> Any:
        raise NotExposed("capture (vLLM makes them)")

    def reference(self, batch: Batch) -> TargetReference:
        raise NotExposed("reference")


def test_without_a_capture_the_rest_is_asked() -> None:
    adapter = builtin()
    adapter.__class__ = NoCapture
    answer = _answer(adapter)
    assert answer.findings[0].outcome == "pass"
    assert "does not show capture (vLLM makes them)" in answer.findings[0].sentence
    assert _facts(answer)["inputs.capture"] is None


class Both(OnAllSlices, AllSlices):
    """Faults 1 and 2 of docs/case-study.md together."""

    def step(self, batch: Batch, captured: StepStates, **options: Any) -> StepOutput:
        return OnAllSlices.step(self, batch, captured, **options)

    def split_slices(self, captured: StepStates) -> Any:
        return AllSlices.split_slices(self, captured)


def test_noise_on_the_teacher_does_not_hide_what_enters_fc() -> None:
    noise = {"recipe.noise": {"kind": "gaussian", "std": 0.05}}
    answer = _answer(builtin(noise, Both, then=wider))
    assert answer.findings[0].fault == "fc-teacher"


class Detached(TrainingStep):
    """Conditioning states are data: no gradient reaches them."""

    def split_slices(self, captured: StepStates) -> Any:
        conditioning, teacher = super().split_slices(captured)
        return conditioning.detach(), teacher


def test_states_without_gradient_are_still_followed() -> None:
    answer = _answer(builtin(None, Detached))
    assert answer.findings[0].outcome == "pass", answer.findings[0].sentence
    assert all(row[3] is None for row in answer.tables[0].rows)
