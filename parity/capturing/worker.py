"""A process of its own for each backend: hides what must not be imported, loads, captures, replies in JSON.

    python -m parity.capturing.worker          (started by parity.capturing.client.Worker, never by hand)

The first line on standard input is the start message (backend, modules to hide, threads); each further
line is a job of `parity.capturing.jobs`, answered by one line. Whatever libraries print goes to standard error, which
the parent keeps, so that a crash can be reported with its last lines.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from parity.capturing.jobs import (
    AnyJob,
    CaptureJob,
    CaptureOutcome,
    DescribeJob,
    GraftJob,
    GraftOutcome,
    ReplayJob,
    ReplayOutcome,
    SelfTestJob,
    SelfTestOutcome,
    StartMessage,
    TargetDescription,
    TokenizedPrompts,
    TokenizeJob,
    WorkerReply,
    WrapJob,
    read_job,
)
from parity.errors import ParityError
from parity.model.target import backends
from parity.model.target.spec import CaptureEvent, TargetSpec

if TYPE_CHECKING:
    from parity.model.target.load import Target

ProgressSender = Callable[[CaptureEvent], None]


def _end_with_the_parent() -> None:
    """End this process when the one that started it is gone: a long job does not read standard input."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve_jobs() -> None:
    """Serve jobs until standard input ends, or the parent does."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # From here on, what a library prints goes to standard error: it must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(reply: WorkerReply) -> None:
        replies.write(json.dumps(reply) + "\n")

    # The first line starts the server, each further one is a job; an exception is a reply like any other.
    server: JobServer | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if server is None:
                server = JobServer(message)
                send({"ok": True})
            else:
                result = server.run(read_job(message), lambda event: send({"progress": event}))
                send({"ok": True, "result": {**result}})
        except ParityError as error:
            send({"ok": False, "asked": error.asked, "found": error.found, "do": error.do})
        except Exception:
            send({"ok": False, "traceback": traceback.format_exc()})


class JobServer:
    """One backend, and the model loaded last."""

    def __init__(self, start: StartMessage) -> None:
        """Make this process compute with one backend, before anything imports transformers."""
        self.backend = backends.parse_backend(start["backend"])
        self.problems = backends.isolate(self.backend, start["hide"])
        import torch

        torch.set_num_threads(start["threads"])
        # The semantic gate compares float32; TF32 would hide what it looks for. Manifests record both settings.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._loaded: tuple[TargetSpec, Target] | None = None

    def run(self, job: AnyJob, progress: ProgressSender) -> Mapping[str, object]:
        """Do one job. `progress` is called after each request of a capture.

        Each method returns the result that its job names; to the pipe they are all mappings.
        """
        match job:
            case DescribeJob():
                return self.describe(job)
            case TokenizeJob():
                return self.tokenize(job)
            case CaptureJob():
                return self.capture(job, progress)
            case ReplayJob():
                return self.replay(job)
            case GraftJob():
                return self.graft(job)
            case WrapJob():
                return self.wrap(job)
            case SelfTestJob():
                return self.self_test(job)

    def target(self, spec: TargetSpec) -> "Target":
        """The model of that specification, loaded once."""
        from parity.model.target.load import load_target

        wanted = replace(spec, device_map=spec.device_map or backends.device_map(self.backend))
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None  # free the old model before the new one is read
            self._loaded = wanted, load_target(wanted)
        return self._loaded[1]

    def describe(self, job: DescribeJob) -> TargetDescription:
        """Structure of the target, without computing anything."""
        from parity.model.target.taps import tap_infos

        target = self.target(job.spec)
        return {
            "layer_types": list(target.layer_types),
            "kept_float32": list(target.kept_float32),
            "unchecked": target.unchecked,
            "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "class": type(target.model).__name__,
            "dtype": target.dtype,
            "taps": list(tap_infos(target)),
        }

    def tokenize(self, job: TokenizeJob) -> TokenizedPrompts:
        """Token ids of prompts, by the model's own tokenizer and chat template."""
        from parity.model.target.prompt_ids import entries

        found = entries(job.model, job.revision, job.prompts, job.max_tokens)
        return {"requests": [entry.model_dump() for entry in found]}

    def capture(self, job: CaptureJob, progress: ProgressSender) -> CaptureOutcome:
        """Write one trace. Only this rank's share of the requests; rank 0 finishes it."""
        from parity.model.target.capture import capture

        proof = capture(
            self.target(job.spec),
            job.requests,
            Path(job.out),
            job.options,
            backend=self._backend(job.golden),
            fingerprint=job.fingerprint,
            problems=self.problems,
            progress=progress,
        )
        if proof is None:
            return {"rank": job.options.rank}
        return {
            "out": job.out,
            "valid": proof.valid,
            "problems": list(proof.problems),
            "calls": [call.model_dump() for call in proof.calls],
        }

    def replay(self, job: ReplayJob) -> ReplayOutcome:
        """Run recorded operator calls on this worker's backend."""
        from parity.model.target.operator_replay import replay

        return {"replayed": replay(Path(job.calls), Path(job.out), self._backend(job.golden))}

    def graft(self, job: GraftJob) -> GraftOutcome:
        """Bisect to the layers that add error, against a trace of the other side."""
        from parity.capturing.graft import LayerRunner, bisect
        from parity.tracing.trace import Trace

        with LayerRunner(self.target(job.spec), self.backend) as grafts:
            found = bisect(grafts, Trace.open(job.reference), requests=job.requests)
        return {
            "layers": list(found.layers),
            "spread": [list(each) for each in found.spread],
            "unseen": [list(each) for each in found.unseen],
            "finding": asdict(found.finding("graft")),
        }

    def _backend(self, golden: bool) -> backends.Backend:
        """Golden needs the same modules hidden as torch, so that one worker can do both."""
        return backends.parse_backend("golden") if golden and self.backend.name == "torch" else self.backend

    def wrap(self, job: WrapJob) -> dict[str, object]:
        """Build a vision-language model around a text model's weights."""
        from parity.model.target.vision_language import build_vision_wrapper

        build_vision_wrapper(Path(job.model), Path(job.out))
        return {}

    def self_test(self, job: SelfTestJob) -> SelfTestOutcome:
        """The interpreter's error against fp64. Raises ParityError where the interpreter could not be set up."""
        from parity.model.target import interpreter

        if self.problems:
            raise ParityError(
                "the interpreter's self-test", self.problems[0], "install flash-linear-attention and triton"
            )
        return {"error": interpreter.self_test(job.dtype), "limit": interpreter.SELF_TEST_LIMIT[job.dtype]}


if __name__ == "__main__":
    serve_jobs()
