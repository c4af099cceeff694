"""The plan of a check: which captures which probes need, in which order, and that no others are made."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.commands import gather
from parity.commands.check_target import CheckTarget
from parity.commands.gather import UNREAD, CaptureRun
from parity.commands.plan import CAPTURE_STEPS, OPERATORS, plan_steps
from parity.errors import ParityError
from parity.probes.table import TABLE, find_entry

TARGET = CheckTarget(
    model=None, prompts=(), loader="AutoModelForCausalLM", revision=None, device_map=None, max_tokens=8,
    other="fla-interpreted", hide=(), threads=1,
)  # fmt: skip
TORCH = ["torch.bf16", "torch.bf16.rerun", "torch.bf16.batch", "torch.fp32", "torch.fp32.rerun", "torch.fp32.batch",
         "torch.fp32.decode", "torch.fp32.blocks", "golden", "loading.rounded", "loading.AutoModel", "loading.wrapper",
         "loading.wrapped-text"]  # fmt: skip
OTHER = ["other.bf16", "other.bf16.local", "other.fp32", "other.fp32.local"]


class FakeWorker:
    """Records its jobs in place of computing them."""

    jobs: list[tuple[str, str, str]] = []
    """(backend, job, trace), of all workers."""
    failing = ""
    """The trace whose capture fails."""

    def __init__(self, backend: str, **options: object) -> None:
        self.backend = backend

    def __enter__(self) -> "FakeWorker":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def call(self, do: str, **job: Any) -> dict[str, Any]:
        self.jobs.append((self.backend, do, Path(str(job.get("out", ""))).name))
        kinds = ["linear_attention", "full_attention"]
        return {"error": 0.0, "limit": 1.0, "layer_types": kinds, "kept_float32": ["A_log"]}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CaptureRun]:
    """Run the plan of these probes with fake workers."""

    def capture(worker: FakeWorker, spec: object, requests: object, out: Path, **options: Any) -> None:
        kind = "record" if options["operators"] else "capture"
        FakeWorker.jobs.append((worker.backend, kind, out.name))
        if out.name == FakeWorker.failing:
            raise ParityError(f"capture {out.name}", "the disk is full", "make room")

    class FakeTrace:
        def __init__(self, path: Path) -> None:
            self.path = path

        @classmethod
        def open(cls, path: Path) -> "FakeTrace":
            return cls(path)

    for name, fake in (("Worker", FakeWorker), ("capture_with", capture), ("Trace", FakeTrace)):
        monkeypatch.setattr(gather, name, fake)
    monkeypatch.setattr(gather, "tokenize", lambda *args, **options: [])
    FakeWorker.jobs, FakeWorker.failing = [], ""

    def make(*probes: str, target: CheckTarget = TARGET, failing: str = "") -> CaptureRun:
        FakeWorker.failing = failing
        entries = [find_entry(name) for name in probes] or TABLE
        made = CaptureRun(target, plan_steps(entries), tmp_path, lambda worker, doing: None)
        made.gather()
        return made

    return make


def captured(*backends: str) -> list[str]:
    return [
        name for backend, do, name in FakeWorker.jobs if do in ("capture", "record") and backend in backends
    ]


def test_serving_alone_makes_its_captures_and_no_more(run: Callable[..., CaptureRun]) -> None:
    """Prefill, the two of its floor, decode and blocks: five of seventeen, nothing recorded, and one worker."""
    run("serving")
    expected = [
        "torch.fp32",
        "torch.fp32.rerun",
        "torch.fp32.batch",
        "torch.fp32.decode",
        "torch.fp32.blocks",
    ]
    assert [(do, name) for _, do, name in FakeWorker.jobs if do != "describe"] == [
        ("capture", name) for name in expected
    ]
    assert {backend for backend, _, _ in FakeWorker.jobs} == {"torch"}


def test_a_full_check_makes_seventeen_captures_in_order(run: Callable[..., CaptureRun]) -> None:
    made = run()
    assert (captured("torch"), captured("fla-interpreted")) == (TORCH, OTHER)
    replays = [(do, name) for backend, do, name in FakeWorker.jobs if do in ("replay", "wrap")]
    assert replays == [
        ("replay", "golden.fp32.operators.safetensors"),
        ("replay", "golden.bf16.operators.safetensors"),
        ("wrap", "wrapped"),
    ]
    assert made.absent == {} and len(made.traces) == 17
    recorded = {name for _, do, name in FakeWorker.jobs if do == "record"}
    assert recorded == {"torch.bf16", "torch.fp32", "other.bf16.local", "other.fp32.local"}


def test_operators_record_their_calls_and_capture_nothing_else(run: Callable[..., CaptureRun]) -> None:
    made = run("operators")
    assert sorted(captured("torch", "fla-interpreted")) == sorted(made.traces)
    assert sorted(made.traces) == ["other.bf16.local", "other.fp32.local", "torch.bf16", "torch.fp32"]
    assert made.operators.keys() == {*made.traces, "golden.fp32", "golden.bf16"}


def test_what_builds_on_a_failed_capture_is_absent_with_the_reason(run: Callable[..., CaptureRun]) -> None:
    made = run("loading", failing="loading.AutoModel")
    assert made.absent == {"loading.AutoModel": "the disk is full"}
    with pytest.raises(ParityError, match="the disk is full"):
        run("serving", failing="torch.fp32")  # without the reference there is nothing to check


def test_a_target_that_is_not_embedded_is_not_wrapped(run: Callable[..., CaptureRun]) -> None:
    made = run("loading", target=replace(TARGET, model="some/model", loader="AutoModel"))
    assert made.absent == {
        "loading.AutoModel": "AutoModel is the loader that everything else was captured with",
        **dict.fromkeys(
            ("wrapped", "loading.wrapper", "loading.wrapped-text"),
            "only the embedded target is wrapped on the spot",
        ),
    }
    assert made.traces.keys() == {"torch.fp32", "loading.rounded"}


def test_a_need_that_no_step_makes_is_refused() -> None:
    with pytest.raises(KeyError, match="torch.fp16"):
        plan_steps([replace(find_entry("serving"), needs=("torch.fp16",))])


def test_steps_build_on_what_is_made_before() -> None:
    """A worker that waited for a later step of its own would wait for ever."""
    places = {step.name: place for place, step in enumerate(CAPTURE_STEPS)}
    assert len(places) == len(CAPTURE_STEPS)
    for step in CAPTURE_STEPS:
        for name in step.after:
            assert places[name.removesuffix(OPERATORS)] < places[step.name], step.name


def test_a_target_that_could_not_be_read_leaves_no_worker_waiting(
    run: Callable[..., CaptureRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ParityError("the target", "no such folder", "check the path")

    monkeypatch.setattr(gather, "tokenize", broken)
    with pytest.raises(ParityError, match="no such folder"):
        run("kernels")
    assert threading.active_count() < 20 and captured("torch", "fla-interpreted") == []
    assert UNREAD["parameters"] == 0
