"""`parity check` as a whole: on the embedded target, with fla hidden, with a worker that dies."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.capturing.client import Worker, WorkerCrash
from parity.commands import check
from parity.commands.check_target import TargetOptions
from parity.commands.plan import FLOORS, OPERATORS
from parity.commands.suspicions import summarise_suspicions
from parity.errors import ParityError
from parity.probes.ask import wiring_probes
from parity.probes.base import Evidence, ProbeAnswer
from parity.probes.table import TABLE, ProbeEntry, list_suspicions
from parity.reports import to_html, to_text
from parity.reports.record import Finding, Report
from parity.tracing.trace import Trace


class ReadMapping(dict[str, Any]):
    """A mapping that notes which of its keys were looked up."""

    def __init__(self, values: Mapping[str, Any], read: set[str], suffix: str) -> None:
        super().__init__(values)
        self.read, self.suffix = read, suffix

    def __getitem__(self, key: str) -> Any:
        self.read.add(key + self.suffix)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key) + self.suffix)
        return super().__contains__(key)


READ: dict[str, set[str]] = {}
"""Trace probe -> the captures and recorded calls that it looked up in the full check."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """One full check of the embedded target: the first answer a new user gets."""
    traces = tmp_path_factory.mktemp("check") / "traces"
    run = check._run_probe

    def noting(entry: ProbeEntry, evidence: Evidence) -> ProbeAnswer:
        read = READ.setdefault(entry.name, set())
        noted = replace(
            evidence,
            traces=ReadMapping(evidence.traces, read, ""),
            operators=ReadMapping(evidence.operators, read, OPERATORS),
            _floors={},
        )
        return run(entry, noted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_run_probe", noting)
        report = check.check(traces=traces)
    return report, traces


def test_a_probe_reads_what_its_entry_needs_and_no_more(checked: tuple[Report, Path]) -> None:
    """What it reads beside its needs is there in a full check, and missing where the probe is asked alone."""
    for entry in TABLE:
        if entry.asks == "traces":
            needs = {part for need in entry.needs for part in FLOORS.get(need, (need,))}
            assert READ[entry.name] <= needs, entry.name


def finding(report: Report, name: str) -> Finding:
    return next(f for f in report.findings if f.name == name)


def test_everything_passes_and_every_suspicion_is_ruled_out(checked: tuple[Report, Path]) -> None:
    report, _ = checked
    assert report.outcome == "pass" and {f.outcome for f in report.findings} == {"pass"}
    verdicts = {s.name: s.verdict for s in report.suspicions}
    assert set(verdicts.values()) == {"ruled out"} and len(verdicts) == len(list_suspicions())


def test_the_trainer_is_stated_beside_the_target(checked: tuple[Report, Path]) -> None:
    report, _ = checked
    assert report.conformance is not None and report.conformance.unanswered == ()
    assert [statement.probe for statement in report.conformance.statements] == wiring_probes()
    assert "gamma 4.00" in report.conformance.paragraph


def test_interpreted_kernels_are_proven_on_every_linear_layer(checked: tuple[Report, Path]) -> None:
    """Four passes of one row, and no interpreted call more: that is what a check costs."""
    report, traces = checked
    names = ("other.bf16", "other.bf16.local", "other.fp32", "other.fp32.local")
    calls = {
        name: [c for c in Trace.open(traces / name).manifest.backend.calls if c.operator == "delta"]
        for name in names
    }
    linear = [layer for layer in range(12) if layer % 4 != 3]
    for name in names:
        assert [(c.layer, c.implementation, c.calls) for c in calls[name]] == [
            (layer, "fla-interpreted", 1) for layer in linear
        ]
        assert len(Trace.open(traces / name).requests[0].token_ids) <= 160
    assert dict(report.subject)["delta-rule calls on fla-interpreted"] == 36


def test_layers_agree_as_promised(checked: tuple[Report, Path]) -> None:
    """fp32 within 2e-6 at every layer; in bf16 linear layers differ locally and full attention by exactly 0."""
    report, _ = checked
    fp32, bf16 = (report.table(f"layers.{dtype}") for dtype in ("fp32", "bf16"))
    keys = [column.key for column in fp32.columns]
    local, inherited, cosine = (keys.index(key) for key in ("local", "inherited", "cosine_min"))
    for row in fp32.rows:
        assert 0 < float(str(row[inherited])) <= 2e-6
    for row in bf16.rows:
        size = float(str(row[local]))
        assert size > 1e-4 if row[1] == "linear" else size == 0
    lowest = min(float(str(row[cosine])) for row in bf16.rows)
    assert 0.99 < lowest < 0.9999


def test_report_is_painted(checked: tuple[Report, Path]) -> None:
    report, _ = checked
    text, page = to_text.paint(report), to_html.paint(report)
    assert max(map(len, text.splitlines())) <= 80 and text.startswith("PASS")
    assert len(page.encode()) < 3 << 20 and "http://" not in page.split("<body", 1)[0].split("<script", 1)[0]


def test_traces_of_an_earlier_check_are_replaced_and_nothing_else(
    checked: tuple[Report, Path], tmp_path: Path
) -> None:
    _, traces = checked
    assert {"torch.fp32", "golden"} <= {path.name for path in traces.iterdir()}
    check._keep(traces, tmp_path / "kept")
    check._keep(traces, tmp_path / "kept")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ParityError, match="a folder that parity did not make"):
        check._keep(traces, tmp_path / "mine")


def test_hidden_fla_is_found_not_passed(tmp_path: Path) -> None:
    """fla hidden in the other worker: torch runs in its place, every number agrees, and the check fails."""
    traced = [entry.name for entry in TABLE if entry.asks == "traces"]
    report = check.check(hide=("fla",), only=traced)
    dispatch = finding(report, "dispatch")
    assert report.outcome == "fail" and (dispatch.outcome, dispatch.fault) == ("fail", "dispatch")
    assert "fla's kernels could not be set up" in dispatch.sentence
    verdicts = {s.name: (s.verdict, s.because) for s in report.suspicions}
    assert verdicts["the kernels that were asked for never ran"][0] == "found"
    verdict, because = verdicts["the kernels compute another function"]
    assert verdict == "not tested" and "no evidence" in because


@pytest.mark.parametrize(
    ("backend", "found"), [("fla", "no CUDA device"), ("torch", "already"), ("golden", "already")]
)
def test_backend_that_cannot_be_held_against_torch_is_refused(backend: str, found: str) -> None:
    """Asked for by name, a backend that does not run here is no skip: nothing would have been compared."""
    with pytest.raises(ParityError, match=found):
        check.check(backend=backend)


def test_default_backend_that_cannot_run_leaves_the_question_open(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for one, and none runs here: torch is examined, and no suspicion of kernels is ruled out."""
    from parity.model.target import backends

    why = "triton is not installed"
    monkeypatch.setattr(backends, "missing", lambda backend: why if backend.delta.startswith("fla") else None)
    (tmp_path / "p.jsonl").write_text(json.dumps({"token_ids": list(range(40))}))
    report = check.check(model=str(hybrid), prompts=tmp_path / "p.jsonl")
    assert finding(report, "dispatch").outcome == finding(report, "kernels.fp32").outcome == "skipped"
    assert why in finding(report, "dispatch").sentence and why in finding(report, "kernels.fp32").sentence
    verdicts = {s.name: s.verdict for s in report.suspicions}
    for name in (
        "the kernels that were asked for never ran",
        "the kernels compute another function",
        "an operator is wrong by itself",
    ):
        assert verdicts[name] == "not tested", name
    assert verdicts["torch's fallback itself is wrong"] == "ruled out"


def test_dense_model_says_what_was_not_asked(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"token_ids": list(range(40))}))
    report = check.check(model=str(models["llama"]), prompts=tmp_path / "p.jsonl")
    assert report.outcome == "pass"
    for name in ("dispatch", "kernels.fp32", "kernels.bf16", "operators"):
        assert (
            finding(report, name).outcome == "skipped"
            and "no linear-attention layer" in finding(report, name).sentence
        )
    assert finding(report, "golden").outcome == finding(report, "loading.AutoModel").outcome == "pass"


def test_every_option_is_documented_and_no_other_is_taken() -> None:
    """The options of the target are keywords as any other: help(parity.check) lists them, and a misspelt one fails."""
    documented = set(re.findall(r"^        (\w+): ", str(check.check.__doc__), flags=re.MULTILINE)) - {
        "ParityError"
    }
    named = {
        name
        for name, each in inspect.signature(check.check).parameters.items()
        if each.kind == each.KEYWORD_ONLY
    }
    assert documented == named | TargetOptions.__annotations__.keys()
    with pytest.raises(TypeError, match="unexpected keyword argument 'modell'"):
        check.check(modell="x")  # type: ignore[call-arg]


def test_unknown_model_is_the_users_to_put_right() -> None:
    with pytest.raises(ParityError, match="no such folder"):
        check.check(model="/no/such/model")


def test_dying_worker_is_told_with_its_last_words(hybrid: Path) -> None:
    with Worker("torch") as worker:
        worker.call("describe", spec={"model": str(hybrid), "dtype": "float32"})
        threading.Timer(0.5, lambda: os.kill(worker._process.pid, signal.SIGKILL)).start()
        time.sleep(1)
        with pytest.raises(WorkerCrash, match="was killed by signal 9") as crash:
            worker.call("describe", spec={"model": str(hybrid), "dtype": "float32"})
    assert crash.value.tail


def test_worker_ends_with_its_parent() -> None:
    """A parent that is killed leaves no worker behind, even one in the middle of a long job."""
    code = (
        "from parity.capturing.client import Worker\nimport os, signal\nw = Worker('torch')\n"
        "print(w._process.pid, flush=True)\nos.kill(w._process.pid, signal.SIGSTOP)\nos.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    worker = int(done.stdout)
    os.kill(worker, signal.SIGCONT)
    for _ in range(300):
        if not Path(f"/proc/{worker}").exists() or "State:\tZ" in Path(f"/proc/{worker}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_exception_in_a_worker_is_told_with_its_traceback(hybrid: Path) -> None:
    with Worker("torch") as worker, pytest.raises(WorkerCrash, match="raised an exception") as crash:
        worker.call("describe", spec={"nonsense": 1})
    assert "TypeError" in crash.value.tail


def test_probe_that_breaks_is_an_error_and_the_others_go_on() -> None:
    class Broken:
        name = "broken"

        def load(self) -> "Broken":
            return self

        def run(self, _: object) -> None:
            raise ZeroDivisionError("oh")

    answer = check._run_probe(Broken(), None)  # type: ignore[arg-type]
    assert answer.findings[0].outcome == "error" and "ZeroDivisionError: oh" in answer.findings[0].sentence


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["pass", "pass"], "ruled out"),
        (["pass", "fail"], "found"),
        (["skipped"], "not tested"),
        (["error", "pass"], "not tested"),
        ([], "not tested"),
        (["pass", "skipped"], "ruled out"),
        (["warn"], "not tested"),
    ],
)
def test_suspicions(outcomes: list[str], verdict: str) -> None:
    findings = [
        Finding(name=f"golden.{i}", outcome=outcome, sentence="s", next_step="n")  # type: ignore[arg-type]
        for i, outcome in enumerate(outcomes)
    ]
    answer = next(s for s in summarise_suspicions(findings) if s.name == "torch's fallback itself is wrong")
    assert answer.verdict == verdict


def test_crash_of_the_reference_is_a_finding(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch worker dies while it reads the target: a report that says so, not a traceback of ours."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"token_ids": list(range(40))}))
    original = Worker.call

    def dying(self: Worker, do: str, *args: object, **job: object) -> object:
        if self.backend == "torch" and do == "describe":
            os.kill(self._process.pid, signal.SIGSEGV)
        return original(self, do, *args, **job)  # type: ignore[call-overload]

    monkeypatch.setattr(Worker, "call", dying)
    report = check.check(model=str(hybrid), prompts=tmp_path / "p.jsonl")
    crash = finding(report, "dispatch.crash.torch")
    assert report.outcome == "fail" and crash.fault == "crash" and "killed by signal 11" in crash.sentence
    assert all(s.verdict != "ruled out" for s in report.suspicions)
    assert to_text.paint(report).startswith("FAIL")
