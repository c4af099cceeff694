"""Runs the steps of a plan with one worker a backend, and keeps what came of them as the probes' evidence.

Two workers run at a time: torch (also golden), and the backend that is compared with it. A worker that dies, or a step
that fails, leaves its trace absent with the reason; the probes that need it report that they were skipped.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parity.capturing.client import Worker, WorkerCrash, capture_with, tokenize
from parity.commands.plan import OPERATORS, CaptureStep
from parity.errors import ParityError
from parity.probes.base import CAPTURE_DTYPES, Evidence, TargetStructure
from parity.tracing.trace import Trace

if TYPE_CHECKING:
    from parity.commands.check_target import CheckTarget

UNREAD: TargetStructure = {
    "layer_types": [],
    "kept_float32": [],
    "unchecked": "the target could not be read",
    "parameters": 0,
    "class": "unknown",
}
"""What is known of a target whose worker died before it described it."""
READ = "the target"
"""What both workers wait for before their first step."""


class CaptureRun:
    """Runs a plan, and holds what came of it."""

    def __init__(
        self,
        target: "CheckTarget",
        steps: Sequence[CaptureStep],
        folder: Path,
        report_step: Callable[[str, str], None],
    ) -> None:
        """Prepare the run.

        Args:
            target: what is captured.
            steps: the plan, in order for each worker.
            folder: where traces and recorded operator calls are written.
            report_step: called with worker (`torch`, `other`) and what it is about to do.
        """
        self.subject, self.steps, self.folder, self.report_step = target, steps, folder, report_step
        self.traces: dict[str, Trace] = {}
        self.absent: dict[str, str] = {}
        self.crashes: dict[str, tuple[str, str]] = {}
        self.operators: dict[str, Path] = {}
        self.self_tests: dict[str, tuple[float, float]] = {}
        self.target = UNREAD
        self.requests: list[dict[str, object]] = []
        self._made = set[str]()
        self._ended = {name: threading.Event() for name in (READ, *(step.name for step in steps))}

    def gather(self) -> Evidence:
        """Run everything. Raises ParityError where the target itself cannot be examined."""
        with ThreadPoolExecutor(2) as pool:
            workers = [pool.submit(self._run_torch), pool.submit(self._run_other)]
            try:
                # The reference's trouble (a wrong path, say) comes first, since it is the user's to put right.
                for worker in workers:
                    worker.result()
            finally:
                self._end_all()
        return Evidence(
            other=self.subject.other,
            # In the order that a reader expects, not in that of two racing workers.
            traces={name: self.traces[name] for name in sorted(self.traces)},
            absent=self.absent,
            crashes=self.crashes,
            operators=self.operators,
            self_tests=self.self_tests,
            target=self.target,
        )

    def _end_all(self) -> None:
        """Let whoever waits go on: nothing more will be made."""
        for event in self._ended.values():
            event.set()

    def _run_torch(self) -> None:
        """Read the target, and run torch's steps."""
        try:
            with Worker("torch", threads=self.subject.threads) as worker:
                self.report_step("torch", "reading the target")
                if self._try(READ, worker, lambda: self._read_target(worker), required=True):
                    self._ended[READ].set()
                    self._run_steps("torch", worker)
        finally:
            self._end_all()

    def _read_target(self, worker: Worker) -> None:
        """Read token ids of the prompts, and the structure of the target."""
        subject = self.subject
        self.requests = tokenize(
            worker, subject.path, subject.prompts, revision=subject.revision, max_tokens=subject.max_tokens
        )
        described = worker.call("describe", spec=subject.spec("bfloat16"))
        self.target = cast(TargetStructure, UNREAD | described)

    def _run_other(self) -> None:
        """Run the steps of the backend that is compared with torch; no step, no worker."""
        names = [step.name for step in self.steps if step.worker == "other"]
        if not names:
            return
        name = self.subject.other
        try:
            worker = Worker(name, threads=self.subject.threads, hide=self.subject.hide)
        except ParityError as error:
            self.absent |= dict.fromkeys(names, error.found)
            return
        with worker:
            if name == "fla-interpreted":
                for dtype in CAPTURE_DTYPES.values():
                    self._self_test(worker, dtype)
            self._ended[READ].wait()
            if "linear_attention" in self.target["layer_types"]:
                self._run_steps("other", worker)
            elif self.target is UNREAD:
                self.absent |= dict.fromkeys(names, "the target could not be read")
            else:
                self.absent |= dict.fromkeys(names, "no linear-attention layer in this model")

    def _self_test(self, worker: Worker, dtype: str) -> None:
        """Compare the interpreter with an fp64 recurrence, before anything that it computes is believed."""

        def run() -> None:
            result = worker.call("self_test", dtype=dtype)
            self.self_tests[dtype] = (result["error"], result["limit"])

        self.report_step("other", f"self-test in {dtype}")
        self._try(f"self-test.{dtype}", worker, run)

    def _run_steps(self, side: str, worker: Worker) -> None:
        """Run one worker's steps in order, each as soon as what it builds on has been made or given up."""
        for step in self.steps:
            if step.worker != side:
                continue
            why = step.omitted(self.subject, self.target)
            for name in () if why else step.after:
                self._ended[name.removesuffix(OPERATORS)].wait()
                if name not in self._made:
                    why = why or f"{name} was not captured"
            if why:
                self.absent[step.name] = why
            else:
                self.report_step(side, step.name)
                run = {"capture": self._capture, "replay": self._replay, "wrap": self._wrap}[step.does]
                self._try(step.name, worker, partial(run, worker, step), required=step.required)
            self._ended[step.name].set()

    def _capture(self, worker: Worker, step: CaptureStep) -> None:
        """Make one trace, and record operator calls where a probe needs them."""
        out, calls = self.folder / step.name, self.folder / f"{step.name}.operators.safetensors"
        spec, options = dict(step.spec), dict[str, Any](step.options)
        if step.wrapped:
            spec["model"] = str(self.folder / "wrapped")
        if step.local_from is not None:
            options["local_from"] = str(self.traces[step.local_from].path)
        capture_with(
            worker,
            self.subject.spec(CAPTURE_DTYPES[step.dtype], **spec),
            self.requests,
            out,
            operators=str(calls) if step.records else None,
            **options,
        )
        self.traces[step.name] = Trace.open(out)
        self._made.add(step.name)
        if step.records:
            self.operators[step.name] = calls
            self._made.add(f"{step.name}{OPERATORS}")

    def _replay(self, worker: Worker, step: CaptureStep) -> None:
        """Compute torch's recorded operator calls again in fp64."""
        out = self.folder / f"{step.name}.operators.safetensors"
        calls = self.operators[step.after[0].removesuffix(OPERATORS)]
        worker.call("replay", calls=str(calls), out=str(out), golden=True)
        self.operators[step.name] = out

    def _wrap(self, worker: Worker, step: CaptureStep) -> None:
        """Save the target inside a vision-language wrapper."""
        worker.call("wrap", model=self.subject.path, out=str(self.folder / "wrapped"))
        self._made.add(step.name)

    def _try(self, name: str, worker: Worker, run: Callable[[], object], *, required: bool = False) -> bool:
        """Whether `run` came through; where not, the reason is kept, and a crash becomes a finding."""
        if worker.backend in self.crashes:
            self.absent[name] = f"the {worker.backend} worker {self.crashes[worker.backend][0]}"
            return False
        try:
            run()
        except ParityError as error:
            if required:  # without it there is nothing to check: the user's to put right
                raise
            self.absent[name] = error.found
            return False
        except WorkerCrash as crash:
            self.absent[name] = str(crash)
            self.crashes[worker.backend if crash.dead else f"{worker.backend}.{name}"] = (
                f"{crash.found}, at {name}",
                crash.tail,
            )
            return False
        return True
