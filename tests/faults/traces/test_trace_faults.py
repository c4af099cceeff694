"""Faults planted in a capture: each fails, and the first bad layer and token are right.

Planted in the model's own code path (its operators, its parameters), never in the numbers compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.capturing.prompts import Prompt
from parity.commands.check import check
from parity.commands.gather import UNREAD, CaptureRun
from parity.comparison.traces import Comparison, compare_traces
from parity.diagnosis.kinds import diagnose, diagnose_or_why
from parity.diagnosis.records import Diagnosis
from parity.diagnosis.report import comparison_report
from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.load import Target, load_target
from parity.model.target.prompt_ids import entries
from parity.model.target.spec import TargetSpec
from parity.model.tiny.corpus import conversation
from parity.model.tiny.embedded import find_embedded_target
from parity.probes.base import Evidence
from parity.tracing.trace import Trace

Fault = Callable[[Target, Any], Any]


@pytest.fixture(scope="module")
def request_() -> dict[str, Any]:
    """A held-out conversation of the embedded corpus: more than two chunks of the delta rule."""
    messages = tuple(dict(message) for message in conversation(1, "held_out", 170))
    prompt = Prompt(id="r", messages=messages)
    made = entries(str(find_embedded_target("hybrid")), None, [prompt], None)[0]
    assert len(made.token_ids) > 128
    return made.model_dump()


def rounded_a_log(target: Target, operator: Any) -> Any:
    """A_log held in bfloat16: the decay is slightly off, which token 0 cannot see."""
    for module in target.linear.values():
        module.A_log.data = module.A_log.data.bfloat16().float()
    return operator("causal_conv1d_fn", lambda body, *a, **k: body(*a, **k))


def dropped_state(_: Target, operator: Any) -> Any:
    """The recurrent state is lost after every 64 tokens."""

    def change(body: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        options["output_final_state"] = False
        parts = [
            body(
                *(x[:, start : start + 64] for x in (q, k, v)),
                g=g[:, start : start + 64],
                beta=beta[:, start : start + 64],
                **options,
            )[0]
            for start in range(0, q.shape[1], 64)
        ]
        return torch.cat(parts, 1), None

    return operator("torch_chunk_gated_delta_rule", change)


def shifted_convolution(_: Target, operator: Any) -> Any:
    """The convolution's taps are one place off."""
    return operator("causal_conv1d_fn", lambda body, x, weight, *a, **k: body(x, weight.roll(1, -1), *a, **k))


def nothing(_: Target, operator: Any) -> Any:
    """The same wrapper with nothing changed: the plant itself must not be what is found."""
    return operator("torch_chunk_gated_delta_rule", lambda body, *a, **k: body(*a, **k))


def traced(folder: Path, request: dict[str, Any], fault: Fault, operator: Any) -> Trace:
    target = load_target(TargetSpec(model=str(find_embedded_target("hybrid")), dtype="float32"))
    with fault(target, operator):
        capture(target, [request], folder, backend=parse_backend("torch"), fingerprint=folder.name)
    return Trace.open(folder)


@pytest.fixture(scope="module")
def healthy(
    request_: dict[str, Any], change_operator: Any, tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    return traced(tmp_path_factory.mktemp("healthy") / "t", request_, nothing, change_operator)


@pytest.fixture(scope="module")
def golden(request_: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("golden") / "t"
    target = load_target(TargetSpec(model=str(find_embedded_target("hybrid")), dtype="float32"))
    capture(target, [request_], folder, backend=parse_backend("golden"), fingerprint="g")
    return Trace.open(folder)


FAULTS = [
    (rounded_a_log, "layer.0.gdn.out", 1),
    (dropped_state, "layer.0.gdn.out", 64),
    (shifted_convolution, "layer.0.conv.out", 0),
]


CHECKED = [
    (rounded_a_log, "NUMERIC", "kernels"),
    (dropped_state, "TAIL", "serving"),
    (shifted_convolution, "COMPILE", "kernels"),
]
"""The kind that is given, perhaps beside another that two dumps cannot tell from it, and the probe that meets it."""


@pytest.mark.parametrize("judge", ["floor", "golden"])
@pytest.mark.parametrize(("fault", "tap", "token"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_fault_is_found_at_its_layer_and_token(
    fault: Fault,
    tap: str,
    token: int,
    judge: str,
    request_: dict[str, Any],
    change_operator: Any,
    healthy: Trace,
    golden: Trace,
    tmp_path: Path,
) -> None:
    faulty = traced(tmp_path / "t", request_, fault, change_operator)
    for taps, first in ((None, tap), (["layer.?.out"], "layer.0.out")):
        found: Comparison = compare_traces(
            faulty, healthy, golden=golden if judge == "golden" else None, taps=taps
        )
        assert found.outcome == "fail"
        assert found.first_bad is not None
        assert (found.first_bad.tap, found.first_bad.layer, found.first_bad.token) == (first, 0, token)
        report = comparison_report(found, "test")
        gate = next(finding for finding in report.findings if finding.name == "compare.gate")
        assert gate.outcome == "fail" and first in gate.sentence and gate.next_step


def test_faulty_reference_is_named_and_not_passed(
    request_: dict[str, Any], change_operator: Any, healthy: Trace, golden: Trace, tmp_path: Path
) -> None:
    """The fault sits on side B, and A is right: a ratio to the golden alone would pass."""
    faulty = traced(tmp_path / "t", request_, shifted_convolution, change_operator)
    found = compare_traces(healthy, faulty, golden=golden)
    assert found.outcome == "fail"
    assert any("the reference is" in tap.judgement.because for tap in found.taps if tap.outcome == "fail")


@pytest.mark.parametrize("judge", ["floor", "golden"])
def test_healthy_pair_is_silent(
    judge: str, request_: dict[str, Any], change_operator: Any, healthy: Trace, golden: Trace, tmp_path: Path
) -> None:
    again = traced(tmp_path / "t", request_, nothing, change_operator)
    found = compare_traces(again, healthy, golden=golden if judge == "golden" else None)
    assert found.outcome == "pass" and found.first_bad is None
    assert all(control.refused is not False for tap in found.taps for control in tap.controls)


@pytest.mark.parametrize(("fault", "kind", "probe"), CHECKED, ids=[row[0].__name__ for row in CHECKED])
def test_check_names_the_fault_by_its_kind(
    fault: Fault,
    kind: str,
    probe: str,
    request_: dict[str, Any],
    change_operator: Any,
    healthy: Trace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`parity check` says of a pair that fails what `parity compare` says of it: the finding, its sentence, the table
    of kinds; and of a pair that passes nothing. Workers cannot be given a fault, so their captures are made here."""
    faulty = traced(tmp_path / "t", request_, fault, change_operator)
    again = traced(tmp_path / "again", request_, nothing, change_operator)
    name = {"serving": "serving.decode", "kernels": "kernels.fp32"}[probe]
    place = {"serving": "torch.fp32.decode", "kernels": "other.fp32"}[probe]
    other = {"serving": "torch.fp32.blocks", "kernels": "torch.fp32.rerun"}[probe]
    evidence = Evidence(
        other="fla-interpreted",
        traces={"torch.fp32": healthy, place: faulty, other: again},
        absent={},
        target=UNREAD | {"layer_types": healthy.manifest.target.layer_types},
    )
    monkeypatch.setattr(CaptureRun, "gather", lambda _: evidence)
    asked: list[str] = []

    def counted(comparison: Comparison, a: Trace, b: Trace) -> Diagnosis | None:
        asked.append(comparison.sides[0])
        return diagnose_or_why(comparison, a, b)

    monkeypatch.setattr("parity.probes.base.diagnose_or_why", counted)
    report = check(only=[probe])
    found = {finding.name: finding for finding in report.findings}
    told = found[f"{name}.diagnosis"]
    direct = diagnose(compare_traces(faulty, healthy), faulty, healthy)
    assert report.outcome == "fail" and direct is not None
    assert (told.outcome, told.fault) == ("fail", direct.fault) and direct.sentence in told.sentence
    assert kind in direct.kinds and told.next_step
    assert {f"{name}.kinds"} <= {table.name for table in report.tables}
    assert all(set(finding.tables) <= {table.name for table in report.tables} for finding in (told,))
    assert [n for n in found if n.endswith(".diagnosis")] == [f"{name}.diagnosis"]
    assert asked == [str(faulty.path)], "once, and for what fails alone: a healthy check pays nothing"
