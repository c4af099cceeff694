"""Faults planted in a capture: each fails, and the first bad layer and token are right.

Planted in the model's own code path (its operators, its parameters), never in the numbers compared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.compare import Comparison, compare_traces
from parity.compare_report import report_of
from parity.model.backends import parse
from parity.model.capturing import capture
from parity.model.target import Target, TargetSpec, load
from parity.trace import Trace

TOKENS = 150
IDS = [(7 * i + i * i) % 61 for i in range(TOKENS)]
REQUEST = {
    "id": "r",
    "token_ids": IDS,
    "origin": "given",
    "prompt_tokens": TOKENS,
    "token_texts": [str(token) for token in IDS],
}


@contextmanager
def operator(name: str, change: Callable[..., Any]) -> Iterator[None]:
    """Replace an operator's torch body inside transformers' own wrapper by a changed one."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    wrapper = vars(modeling)[name]
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("implementation")]
    body = cell.cell_contents

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(body, *args, **kwargs)

    changed.__module__ = body.__module__
    cell.cell_contents = changed
    try:
        yield
    finally:
        cell.cell_contents = body


def rounded_a_log(target: Target) -> Any:
    """A_log held in bfloat16: the decay is slightly off, which token 0 cannot see."""
    for module in target.linear.values():
        module.A_log.data = module.A_log.data.bfloat16().float()
    return operator("causal_conv1d_fn", lambda body, *a, **k: body(*a, **k))


def dropped_state(_: Target) -> Any:
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


def shifted_convolution(_: Target) -> Any:
    """The convolution's taps are one place off."""
    return operator("causal_conv1d_fn", lambda body, x, weight, *a, **k: body(x, weight.roll(1, -1), *a, **k))


def nothing(_: Target) -> Any:
    """The same wrapper with nothing changed: the plant itself must not be what is found."""
    return operator("torch_chunk_gated_delta_rule", lambda body, *a, **k: body(*a, **k))


def traced(folder: Path, model: Path, fault: Callable[[Target], Any]) -> Trace:
    target = load(TargetSpec(model=str(model), dtype="float32"))
    with fault(target):
        capture(target, [REQUEST], folder, backend=parse("torch"), fingerprint=folder.name)
    return Trace.open(folder)


@pytest.fixture(scope="module")
def healthy(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return traced(tmp_path_factory.mktemp("healthy") / "t", hybrid, nothing)


@pytest.fixture(scope="module")
def golden(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("golden") / "t"
    target = load(TargetSpec(model=str(hybrid), dtype="float32"))
    capture(target, [REQUEST], folder, backend=parse("golden"), fingerprint="g")
    return Trace.open(folder)


FAULTS = [
    (rounded_a_log, "layer.0.gdn.out", 1),
    (dropped_state, "layer.0.gdn.out", 64),
    (shifted_convolution, "layer.0.conv.out", 0),
]


@pytest.mark.parametrize("judge", ["floor", "golden"])
@pytest.mark.parametrize(("fault", "tap", "token"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_fault_is_found_at_its_layer_and_token(
    fault: Callable[[Target], Any],
    tap: str,
    token: int,
    judge: str,
    hybrid: Path,
    healthy: Trace,
    golden: Trace,
    tmp_path: Path,
) -> None:
    faulty = traced(tmp_path / "t", hybrid, fault)
    for taps, first in ((None, tap), (["layer.?.out"], "layer.0.out")):
        found: Comparison = compare_traces(
            faulty, healthy, golden=golden if judge == "golden" else None, taps=taps
        )
        assert found.outcome == "fail"
        assert found.first_bad is not None
        assert (found.first_bad.tap, found.first_bad.layer, found.first_bad.token) == (first, 0, token)
        report = report_of(found, "test")
        gate = next(finding for finding in report.findings if finding.name == "compare.gate")
        assert gate.outcome == "fail" and first in gate.sentence and gate.next_step


@pytest.mark.parametrize("judge", ["floor", "golden"])
def test_healthy_pair_is_silent(
    judge: str, hybrid: Path, healthy: Trace, golden: Trace, tmp_path: Path
) -> None:
    again = traced(tmp_path / "t", hybrid, nothing)
    found = compare_traces(again, healthy, golden=golden if judge == "golden" else None)
    assert found.outcome == "pass" and found.first_bad is None
    assert all(control.refused is not False for tap in found.taps for control in tap.controls)
