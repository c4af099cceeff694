"""Each trace probe speaks on its planted fault, is silent on the healthy run, and says skipped without evidence.

Faults are planted in the model's own operators, parameters or attention; the small hybrid target computes in
this process, so that `other` is torch with something changed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from parity.model.target.backends import parse_backend
from parity.model.target.capture import capture
from parity.model.target.load import Target, load_target
from parity.model.target.operator_replay import replay
from parity.model.target.spec import TargetSpec, TraceOptions
from parity.probes.base import Evidence, ProbeAnswer, TraceProbe
from parity.probes.table import find_entry
from parity.reports.record import Finding
from parity.tracing.trace import Trace

IDS = [(7 * i + i * i) % 61 for i in range(70)]
REQUEST = {
    "id": "r",
    "token_ids": IDS,
    "origin": "given",
    "prompt_tokens": 70,
    "token_texts": [str(t) for t in IDS],
}
Change = Callable[..., AbstractContextManager[Any]]
"""`change_operator` of conftest."""
Plant = Callable[[Target, Change], AbstractContextManager[Any]]


def healthy(_: Target, operator: Change) -> AbstractContextManager[Any]:
    return nullcontext()


def rounding(_: Target, operator: Change) -> AbstractContextManager[Any]:
    """Another kernel in all honesty: the same function, rounded differently in the last bits."""

    def change(body: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        out, state = body(q, k, v.double().mul(3).div(3).to(v.dtype), **options)
        return (out.double() * (1 + 6e-8)).to(out.dtype), state

    return operator("torch_chunk_gated_delta_rule", change)


def shifted(_: Target, operator: Change) -> AbstractContextManager[Any]:
    return operator("causal_conv1d_fn", lambda body, x, w, *a, **k: body(x, w.roll(1, -1), *a, **k))


def scaled(_: Target, operator: Change) -> AbstractContextManager[Any]:
    """One per cent too much from the delta rule."""

    def change(body: Any, *args: Any, **options: Any) -> Any:
        out, state = body(*args, **options)
        return out * 1.01, state

    return operator("torch_chunk_gated_delta_rule", change)


def eager(target: Target, _: Change) -> AbstractContextManager[Any]:
    target.model.set_attn_implementation("eager")
    return nullcontext()


def off_norm(target: Target, _: Change) -> AbstractContextManager[Any]:
    """One value of one parameter is off, as after loading another checkpoint."""
    target.layers[1].get_parameter("mlp.up_proj.weight").data[0, 0] += 0.5
    return nullcontext()


class Bench:
    """Captures by name into one folder."""

    def __init__(self, folder: Path, model: Path, operator: Change) -> None:
        self.folder, self.model, self.operator = folder, model, operator
        self.traces: dict[str, Trace] = {}
        self.operators: dict[str, Path] = {}

    def take(
        self,
        name: str,
        plant: Plant = healthy,
        dtype: str = "float32",
        backend: str = "torch",
        **options: Any,
    ) -> None:
        target = load_target(TargetSpec(model=str(self.model), dtype=dtype))
        calls = self.folder / f"{name}.operators.safetensors"
        with plant(target, self.operator):
            capture(
                target,
                [REQUEST],
                self.folder / name,
                TraceOptions(operators=str(calls) if calls else None, **options),
                backend=parse_backend(backend),
                fingerprint=name,
            )
        self.traces[name] = Trace.open(self.folder / name)
        self.operators[name] = calls

    def ask(self, probe: str, **changes: Any) -> ProbeAnswer:
        evidence = Evidence(
            **(
                {
                    "other": "torch",
                    "traces": self.traces,
                    "absent": {},
                    "operators": self.operators,
                    "target": {
                        "layer_types": self.traces["torch.fp32"].manifest.target.layer_types,
                        "unchecked": "",
                        "parameters": 1,
                        "kept_float32": ("layers.0.linear_attn.A_log",),
                    },
                }
                | changes
            )
        )
        return cast(TraceProbe, find_entry(probe).load()).run(evidence)


@pytest.fixture
def bench(tmp_path: Path, hybrid: Path, change_operator: Change) -> Bench:
    made = Bench(tmp_path, hybrid, change_operator)
    made.take("torch.fp32")
    return made


def found(answer: ProbeAnswer, name: str) -> Finding:
    return next(finding for finding in answer.findings if finding.name == name)


def local(bench: Bench) -> str:
    return str(bench.traces["torch.fp32"].path)


def test_kernels_silent_on_rounding(bench: Bench) -> None:
    bench.take("golden", backend="golden")
    bench.take("other.fp32", rounding)
    bench.take("other.fp32.local", rounding, local_from=local(bench))
    answer = bench.ask("kernels")
    mine = [f for f in answer.findings if f.name.startswith("kernels.fp32")]
    assert {f.outcome for f in mine} == {"pass"} and len(mine) == 5
    table = next(t for t in answer.tables if t.name == "layers.fp32")
    assert [row[:2] for row in table.rows] == [(0, "linear"), (1, "linear"), (2, "linear"), (3, "full")]
    assert table.rows[3][2] == 0 and all(
        isinstance(v, float) and v < 2e-6 for row in table.rows for v in row[2:6]
    )


@pytest.mark.parametrize("plant", [shifted, scaled])
def test_kernels_speak_on_a_fault(plant: Plant, bench: Bench) -> None:
    bench.take("other.fp32", plant)
    bench.take("other.fp32.local", plant, local_from=local(bench))
    answer = bench.ask("kernels")
    assert found(answer, "kernels.fp32.gate").outcome == "fail"
    assert found(answer, "kernels.fp32.local.gate").outcome == "fail"
    assert "layer.0" in found(answer, "kernels.fp32.gate").sentence


def test_kernels_that_agree_to_the_last_bit_did_not_run(bench: Bench) -> None:
    bench.take("other.fp32")
    bench.take("other.fp32.local", local_from=local(bench))
    finding = found(bench.ask("kernels"), "kernels.fp32.layers")
    assert (finding.outcome, finding.fault) == ("fail", "dispatch") and "[0, 1, 2]" in finding.sentence


def test_kernels_speak_when_full_attention_differs(bench: Bench) -> None:
    def both(target: Target, operator: Change) -> AbstractContextManager[Any]:
        eager(target, operator)
        return rounding(target, operator)

    bench.take("other.fp32", both)
    bench.take("other.fp32.local", both, local_from=local(bench))
    finding = found(bench.ask("kernels"), "kernels.fp32.layers")
    assert (finding.outcome, finding.fault) == (
        "fail",
        "full-attention-differs",
    ) and "[3]" in finding.sentence


def test_golden(bench: Bench) -> None:
    bench.take("golden", backend="golden")
    assert found(bench.ask("golden"), "golden").outcome == "pass"
    bench.take("wrong", scaled)
    finding = found(
        bench.ask("golden", traces=bench.traces | {"torch.fp32": bench.traces["wrong"]}), "golden"
    )
    assert finding.outcome == "fail" and "layer.0.gdn.out" in finding.sentence


def test_golden_that_is_not_golden_is_an_error(bench: Bench) -> None:
    bench.take("golden", backend="torch")
    manifest = bench.traces["golden"].manifest
    bad = manifest.backend.model_copy(
        update={"valid": False, "problems": ("golden made 3 floating tensors",)}
    )
    broken = Trace(bench.traces["golden"].path, manifest.model_copy(update={"backend": bad}))
    assert found(bench.ask("golden", traces=bench.traces | {"golden": broken}), "golden").outcome == "error"


def test_floor(bench: Bench) -> None:
    for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16")):
        bench.take(f"torch.{dtype}", dtype=name) if dtype == "bf16" else None
        bench.take(f"torch.{dtype}.rerun", dtype=name)
        bench.take(f"torch.{dtype}.batch", dtype=name, rows=4)
    assert {f.outcome for f in bench.ask("floor").findings} == {"pass"}
    assert found(bench.ask("floor"), "finite").outcome == "pass"
    bench.take("noisy", scaled)
    answer = bench.ask("floor", traces=bench.traces | {"torch.fp32.rerun": bench.traces["noisy"]})
    assert (found(answer, "floor.fp32").outcome, found(answer, "floor.fp32").fault) == (
        "fail",
        "not-reproducible",
    )
    assert found(answer, "floor.bf16").outcome == "pass"


@pytest.mark.parametrize("probe", ["golden", "operators"])
def test_what_is_not_finite_does_not_pass(probe: str, bench: Bench) -> None:
    """Statistics leave out what is not finite; a probe that read them alone would pass a kernel that returns NaN."""

    def broken(_: Target, operator: Change) -> AbstractContextManager[Any]:
        def change(body: Any, *args: Any, **options: Any) -> Any:
            out, state = body(*args, **options)
            return out.index_fill(1, torch.arange(40, 70), float("nan")), state

        return operator("torch_chunk_gated_delta_rule", change)

    bench.take("golden", backend="golden")
    golden = bench.folder / "golden.fp32.calls.safetensors"
    replay(bench.operators["torch.fp32"], golden, parse_backend("golden"))
    bench.take("wrong", broken)
    answer = bench.ask(
        probe,
        traces=bench.traces | {"torch.fp32": bench.traces["wrong"]},
        operators={"torch.fp32": bench.operators["wrong"], "golden.fp32": golden},
    )
    assert any(f.outcome == "fail" and "layer" in f.sentence for f in answer.findings)
    finite = found(bench.ask("floor", traces={"torch.fp32": bench.traces["wrong"]}), "finite")
    assert finite.outcome == "fail" and "layer.0.gdn.out" in finite.sentence and "token 40" in finite.sentence


def test_loading(bench: Bench) -> None:
    bench.take("loading.AutoModel")
    assert found(bench.ask("loading"), "loading.AutoModel").outcome == "pass"
    bench.take("wrong", off_norm)
    answer = bench.ask("loading", traces=bench.traces | {"loading.AutoModel": bench.traces["wrong"]})
    finding = found(answer, "loading.AutoModel")
    assert (finding.outcome, finding.fault) == (
        "fail",
        "loader",
    ) and "first at layer.1.out" in finding.sentence


def test_operators(bench: Bench) -> None:
    golden = bench.folder / "golden.safetensors"
    replay(bench.operators["torch.fp32"], golden, parse_backend("golden"))
    bench.operators["golden.fp32"] = golden
    bench.take("other.fp32.local", rounding, local_from=local(bench))
    answer = bench.ask("operators", other="fla-interpreted")
    assert {found(answer, f"operators.fp32.{name}").outcome for name in ("torch", "fla-interpreted")} == {
        "pass"
    }
    for plant, operator_ in ((scaled, "delta"), (shifted, "conv")):
        bench.take(f"wrong.{operator_}", plant, local_from=local(bench))
        changed = bench.operators | {"other.fp32.local": bench.operators[f"wrong.{operator_}"]}
        finding = found(bench.ask("operators", other="x", operators=changed), "operators.fp32.x")
        assert finding.outcome == "fail" and operator_ in finding.sentence


def test_operators_with_other_inputs_are_no_evidence(bench: Bench) -> None:
    """Calls whose inputs were not recorded on torch are counted, and nothing compared is not a pass."""
    golden = bench.folder / "golden.safetensors"
    replay(bench.operators["torch.fp32"], golden, parse_backend("golden"))
    bench.take("elsewhere", off_norm)
    changed = {
        "torch.fp32": bench.operators["torch.fp32"],
        "golden.fp32": golden,
        "other.fp32.local": bench.operators["elsewhere"],
    }
    assert found(bench.ask("operators", other="x", operators=changed), "operators.fp32.x").outcome == "fail"


def test_serving(bench: Bench) -> None:
    bench.take("torch.fp32.decode", mode="decode")
    bench.take("torch.fp32.blocks", mode="blocks:8")
    answer = bench.ask("serving")
    assert {f.outcome for f in answer.findings} == {"pass"} and len(answer.findings) == 4

    def forgets(_: Target, operator: Change) -> AbstractContextManager[Any]:
        return operator(
            "torch_chunk_gated_delta_rule", lambda body, *a, **k: body(*a, **(k | {"initial_state": None}))
        )

    bench.take("wrong", forgets, mode="blocks:8")
    answer = bench.ask("serving", traces=bench.traces | {"torch.fp32.blocks": bench.traces["wrong"]})
    finding = found(answer, "serving.blocks")
    assert (finding.outcome, finding.fault) == ("fail", "serving-mode") and "token 8" in finding.sentence
    assert found(answer, "serving.decode").outcome == "pass"


def test_dispatch(bench: Bench) -> None:
    assert found(bench.ask("dispatch"), "dispatch").outcome == "skipped", "the other backend was never asked"
    bench.take("other.fp32")
    assert found(bench.ask("dispatch"), "dispatch").outcome == "pass"
    answer = bench.ask(
        "dispatch", crashes={"fla": ("was killed by signal 11, at other.fp32", "Segmentation fault")}
    )
    crash = found(answer, "dispatch.crash.fla")
    assert crash.outcome == "fail" and ("standard error", "Segmentation fault") in crash.evidence
    manifest = bench.traces["torch.fp32"].manifest
    bad = manifest.backend.model_copy(
        update={"valid": False, "problems": ("layer 0 delta: fla ran, asked for torch",)}
    )
    wrong = Trace(bench.traces["torch.fp32"].path, manifest.model_copy(update={"backend": bad}))
    finding = found(bench.ask("dispatch", traces={"torch.fp32": wrong}), "dispatch")
    assert (finding.outcome, finding.fault) == (
        "fail",
        "dispatch",
    ) and "fla ran, asked for torch" in finding.sentence


@pytest.mark.parametrize("probe", ["floor", "golden", "kernels", "operators", "serving"])
def test_without_evidence_is_skipped_with_the_reason(probe: str, bench: Bench) -> None:
    answer = bench.ask(probe, traces={}, operators={}, absent={"torch.fp32": "the disk is full"})
    assert {f.outcome for f in answer.findings} == {"skipped"}
    assert all(f.next_step for f in answer.findings)


@pytest.mark.parametrize("probe", ["dispatch", "kernels", "operators"])
def test_dense_model_skips_linear_attention(probe: str, bench: Bench) -> None:
    target = {"layer_types": ("full_attention",), "unchecked": "", "parameters": 1, "kept_float32": ()}
    answer = bench.ask(probe, target=target)
    assert (
        answer.findings[0].outcome == "skipped" and "no linear-attention layer" in answer.findings[0].sentence
    )
