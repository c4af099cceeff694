"""A process of its own for each backend: hides what must not be found, loads, captures, answers in JSON.

    python -m parity.capturing.worker          (started by parity.capturing.client.Worker, never by hand)

The first line on standard input is the start message (backend, modules to hide, threads); each further
line is a job, answered by one line. Whatever libraries print goes to standard error, which the parent
keeps, so that a crash can be shown with its last lines.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity.errors import ParityError
from parity.model.target import backends


def _end_with_the_parent() -> None:
    """End this process when the one that started it is gone: a long job does not read standard input."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve_jobs() -> None:
    """Serve jobs until standard input ends, or the parent does."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library's print must not be taken for an answer

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    server: JobServer | None = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if server is None:
                server = JobServer(job)
                send({"ok": True})
            else:
                send({"ok": True, "result": server.run(job, lambda **event: send({"progress": event}))})
        except ParityError as error:
            send({"ok": False, "asked": error.asked, "found": error.found, "do": error.do})
        except Exception:
            send({"ok": False, "traceback": traceback.format_exc()})


class JobServer:
    """One backend, and the model loaded last."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.backend = backends.parse_backend(start["backend"])
        self.problems = backends.isolate(self.backend, start.get("hide", ()))
        import torch

        torch.set_num_threads(int(start.get("threads", 1)))
        # The semantic gate compares float32; TF32 would hide what it looks for. Manifests record both settings.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._spec: Any = None
        self._target: Any = None

    def run(self, job: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
        """Do one job; `job["do"]` names the method."""
        jobs: dict[str, Callable[..., dict[str, Any]]] = {
            "tokenize": self.tokenize,
            "capture": self.capture,
            "replay": self.replay,
            "graft": self.graft,
            "wrap": self.wrap,
            "self_test": self.self_test,
            "describe": self.describe,
        }
        return jobs[job.pop("do")](progress=progress, **job)

    def target(self, spec: dict[str, Any]) -> Any:
        """The model of that specification, loaded once."""
        from parity.model.target.load import TargetSpec, load_target

        spec = {**spec, "device_map": spec.get("device_map") or backends.device_map(self.backend)}
        wanted = TargetSpec(**spec)
        if wanted != self._spec:
            self._spec, self._target = None, None  # free the old model before the new one is read
            self._target, self._spec = load_target(wanted), wanted
        return self._target

    def describe(self, *, spec: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
        """Structure of the target, without computing anything."""
        from parity.model.target.load import tap_infos

        target = self.target(spec)
        return {
            "layer_types": target.layer_types,
            "kept_float32": target.kept_float32,
            "unchecked": target.unchecked,
            "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "class": type(target.model).__name__,
            "dtype": target.dtype,
            "taps": list(tap_infos(target)),
        }

    def tokenize(
        self,
        *,
        model: str,
        revision: str | None,
        prompts: list[dict[str, Any]],
        max_tokens: int | None,
        progress: Callable[..., None],
    ) -> dict[str, Any]:
        """Token ids of prompts, by the model's own tokenizer and chat template."""
        from parity.model.target.prompt_ids import entries

        return {"requests": [entry.model_dump() for entry in entries(model, revision, prompts, max_tokens)]}

    def capture(
        self,
        *,
        spec: dict[str, Any],
        requests: list[dict[str, Any]],
        out: str,
        fingerprint: str,
        progress: Callable[..., None],
        taps: list[str] | None = None,
        mode: str = "prefill",
        local_from: str | None = None,
        rows: int = 1,
        operators: str | None = None,
        golden: bool = False,
        sketch: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> dict[str, Any]:
        """Write one trace. Only this rank's share of the requests; rank 0 finishes it."""
        from parity.model.target.capture import capture

        target = self.target(spec)
        return capture(
            target,
            requests,
            Path(out),
            backend=self._backend(golden),
            fingerprint=fingerprint,
            taps=taps,
            mode=mode,
            local_from=local_from,
            rows=rows,
            operators=Path(operators) if operators else None,
            sketch=sketch,
            rank=rank,
            world=world,
            problems=self.problems,
            progress=progress,
        )

    def replay(
        self, *, calls: str, out: str, progress: Callable[..., None], golden: bool = False
    ) -> dict[str, Any]:
        """Run recorded operator calls on this worker's backend."""
        from parity.model.target.operator_replay import replay

        return {"replayed": replay(Path(calls), Path(out), self._backend(golden))}

    def graft(
        self,
        *,
        spec: dict[str, Any],
        reference: str,
        progress: Callable[..., None],
        requests: list[str] | None = None,
    ) -> dict[str, Any]:
        """Bisect to the layers that add error, against a trace of the other side."""
        from dataclasses import asdict

        from parity.capturing.graft import LayerRunner, bisect
        from parity.tracing.trace import Trace

        with LayerRunner(self.target(spec), self.backend) as grafts:
            found = bisect(grafts, Trace.open(reference), requests=requests)
        return {
            "layers": found.layers,
            "spread": found.spread,
            "unseen": found.unseen,
            "finding": asdict(found.finding("graft")),
        }

    def _backend(self, golden: bool) -> backends.Backend:
        """Golden needs the same modules hidden as torch, so that one worker can do both."""
        return backends.parse_backend("golden") if golden and self.backend.name == "torch" else self.backend

    def wrap(self, *, model: str, out: str, progress: Callable[..., None]) -> dict[str, Any]:
        """Build a vision-language model around a text model's weights."""
        from parity.model.target.vision_language import build_vision_wrapper

        build_vision_wrapper(Path(model), Path(out))
        return {}

    def self_test(self, *, dtype: str, progress: Callable[..., None]) -> dict[str, Any]:
        """The interpreter's error against fp64."""
        from parity.model.target import interpreter

        if self.problems:
            raise ParityError(
                "the interpreter's self-test", self.problems[0], "install flash-linear-attention and triton"
            )
        return {"error": interpreter.self_test(dtype), "limit": interpreter.SELF_TEST_LIMIT[dtype]}


if __name__ == "__main__":
    serve_jobs()
