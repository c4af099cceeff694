"""Traces on request: one worker process for each backend, started, asked, and watched.

    with Worker("torch") as worker:
        requests = tokenize(worker, "path/to/model", read_prompts(Path("prompts.jsonl")))
        result = capture_with(worker, spec, requests, Path("out/torch"))

A worker that dies takes nothing with it: the crash becomes a `WorkerCrash` with the last lines of its
standard error, and the caller makes a finding of it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from parity.capturing.prompts import Prompt, complete, read_prompts
from parity.errors import ParityError
from parity.model.target import backends

TAIL_LINES = 15
CaptureProgress = Callable[[dict[str, Any]], None]


class WorkerCrash(Exception):
    """A worker process died, or raised something that is not the user's to put right.

    `dead` says which: after an exception the process still serves other jobs.
    """

    def __init__(self, backend: str, found: str, tail: str, *, dead: bool) -> None:
        last = tail.strip().splitlines()[-1:] or ["nothing on its standard error"]
        super().__init__(f"the {backend} worker {found}: {last[0]}")
        self.backend, self.found, self.tail, self.dead = backend, found, tail, dead


class Worker:
    """A process that computes with one backend. Use as a context manager."""

    def __init__(self, backend: str, *, hide: Sequence[str] = (), threads: int = 1) -> None:
        """Start it. Raises ParityError for a backend that cannot run on this machine."""
        choice = backends.parse_backend(backend)
        why = backends.missing(choice)
        if why:
            raise ParityError(
                f"backend {choice.name}", why, "choose a backend that runs here: `parity env` lists them"
            )
        self.backend = choice.name
        self._stderr: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "parity.capturing.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_environment(threads),
        )
        self._send({"backend": backend, "hide": list(hide), "threads": threads})
        self._started = False

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it holds no state worth saving."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with suppress(
                    BrokenPipeError
                ):  # what was still to be sent to a dead process is lost, and may be
                    stream.close()

    def call(self, do: str, progress: CaptureProgress | None = None, **job: Any) -> dict[str, Any]:
        """Do one job and wait for its result. Raises ParityError as the job did, WorkerCrash where it died."""
        if not self._started:
            self._answer(None)
            self._started = True
        self._send({"do": do, **job})
        return self._answer(progress)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # it died: reading the answer says how

    def _answer(self, progress: CaptureProgress | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                if progress is not None:
                    progress(answer["progress"])
                continue
            if answer["ok"]:
                return dict(answer.get("result", {}))
            if "asked" in answer:
                raise ParityError(answer["asked"], answer["found"], answer["do"])
            raise WorkerCrash(self.backend, "raised an exception", answer["traceback"][-4000:], dead=False)
        code = self._process.wait()
        found = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise WorkerCrash(self.backend, found, self._tail(), dead=True)

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def _environment(threads: int) -> dict[str, str]:
    """The worker's variables: ours, with the thread count, and this copy of the package importable."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def tokenize(
    worker: Worker,
    model: str,
    prompts: Sequence[Prompt],
    *,
    revision: str | None = None,
    max_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Requests (`parity.tracing.trace.RequestEntry` as dicts) of prompts, by the model's tokenizer."""
    result = worker.call(
        "tokenize",
        model=model,
        revision=revision,
        prompts=[asdict(prompt) for prompt in prompts],
        max_tokens=max_tokens,
    )
    return list(result["requests"])


def capture_with(
    worker: Worker,
    spec: dict[str, Any],
    requests: Sequence[dict[str, Any]],
    out: Path,
    *,
    progress: CaptureProgress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One trace by one worker. `options` are those of `model.capturing.capture`."""
    asked = {
        "spec": spec,
        "backend": worker.backend,
        "ids": [request["token_ids"] for request in requests],
        **{key: value for key, value in options.items() if key not in ("rank", "world", "operators")},
    }
    fingerprint = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
    return worker.call(
        "capture",
        progress,
        spec=spec,
        requests=list(requests),
        out=str(out),
        fingerprint=fingerprint,
        **options,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureResult:
    """What `parity capture` did."""

    out: Path
    backend: str
    requests: int
    tokens: int
    valid: bool
    problems: tuple[str, ...]
    calls: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The result in plain lines of at most 80 columns, the proof first."""
        reached = sorted({f"{call['operator']}: {call['implementation']}" for call in self.calls})
        ran = "; ".join(reached) if reached else "no linear-attention layer in this model"
        lines = [
            f"{self.out}: {self.requests} requests, {self.tokens} tokens",
            f"asked for {self.backend}; ran {ran}",
        ]
        lines += [f"note: {note}" for note in dict.fromkeys(self.notes)]
        if not self.valid:
            lines += [
                "dispatch FAILED, this trace is no evidence:",
                *(f"  {line}" for line in self.problems[:8]),
                "do this: `parity env` shows which backends run here",
            ]
        return lines


def capture_to(
    out: Path,
    *,
    model: str,
    prompts: Path,
    backend: str = "torch",
    taps: Sequence[str] | None = None,
    dtype: str = "auto",
    loader: str = "AutoModelForCausalLM",
    revision: str | None = None,
    device_map: str | None = None,
    mode: str = "prefill",
    max_tokens: int | None = None,
    complete_with: str | None = None,
    complete_model: str | None = None,
    new_tokens: int = 64,
    local_from: Path | None = None,
    sketch: bool = False,
    threads: int = 1,
    hide: Sequence[str] = (),
) -> CaptureResult:
    """Capture one trace of a prompt file; the function behind `parity capture`.

    Under torchrun each rank computes its share and rank 0 finishes the trace. Raises ParityError for
    whatever the user can put right, WorkerCrash where the worker died.
    """
    asked = read_prompts(prompts)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    spec = {"model": model, "revision": revision, "dtype": dtype, "loader": loader, "device_map": device_map}
    with Worker(backend, hide=hide, threads=threads) as worker, _progress("capture") as report:
        if complete_with:
            asked = [complete(prompt, complete_with, complete_model or model, new_tokens) for prompt in asked]
        requests = tokenize(worker, model, asked, revision=revision, max_tokens=max_tokens)
        result = capture_with(
            worker,
            spec,
            requests,
            out,
            progress=report,
            taps=list(taps) if taps else ["states"],
            mode=mode,
            local_from=str(local_from) if local_from else None,
            sketch=sketch,
            rank=rank,
            world=world,
        )
    return CaptureResult(
        out=out,
        backend=worker.backend,
        requests=len(requests),
        valid=result.get("valid", True),
        tokens=sum(len(request["token_ids"]) for request in requests),
        problems=tuple(result.get("problems", ())),
        calls=tuple(result.get("calls", ())),
        notes=tuple(note for request in requests for note in request["notes"]),
    )


@contextmanager
def _progress(label: str) -> Iterator[CaptureProgress]:
    """A progress bar on standard error where that is a terminal; silent where it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda event: bar.update(task, completed=event["done"], total=event["total"])
