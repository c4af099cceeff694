"""Traces on request: one worker process for each backend, started, given jobs, and watched.

    with Worker("torch") as worker:
        spec = TargetSpec(model="path/to/model")
        requests = tokenize(worker, spec.model, read_prompts(Path("prompts.jsonl")))
        outcome = capture_with(worker, spec, requests, Path("out/torch"))

What a worker can do is the table of `parity.capturing.jobs`. A worker that dies takes nothing with it: the crash
becomes a `WorkerCrash` with the last lines of its standard error, and the caller makes a finding of it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast, overload

from parity.capturing.jobs import (
    CaptureJob,
    CaptureOutcome,
    Job,
    Result,
    StartMessage,
    TokenizeJob,
    WorkerReply,
)
from parity.capturing.prompts import complete, read_prompts
from parity.errors import ParityError
from parity.model.target import backends
from parity.model.target.spec import CaptureEvent, Prompt, TargetSpec, TraceOptions
from parity.options import accept_fields
from parity.tracing.trace import RequestEntry

TAIL_LINES = 15
ProgressCallback = Callable[[CaptureEvent], None]


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
        """Start the process.

        Args:
            backend: what it computes with, as `parity.model.target.backends.parse_backend` reads it.
            hide: modules that imports in the process must not find, beside those that the backend excludes.
            threads: threads of torch.

        Raises:
            ParityError: for a backend that cannot run on this machine.
        """
        # Whether it can run here is known before a process is started.
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
        start: StartMessage = {"backend": backend, "hide": list(hide), "threads": threads}
        self._send(json.dumps(start))
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
                # What was still to be sent to a dead process is lost, and may be.
                with suppress(BrokenPipeError):
                    stream.close()

    @overload
    def call(self, job: Job[Result], progress: ProgressCallback | None = None) -> Result: ...

    @overload
    def call(
        self, job: str, progress: ProgressCallback | None = None, **fields: object
    ) -> dict[str, Any]: ...

    def call(
        self, job: Job[Result] | str, progress: ProgressCallback | None = None, **fields: object
    ) -> Result | dict[str, Any]:
        """Do one job and wait for its result.

        Args:
            job: a record of `parity.capturing.jobs`; or a job's name, with its fields as keywords.
            progress: called with each event of a capture.

        Raises:
            ParityError: as the job did.
            WorkerCrash: where the process died, or raised anything else (a TypeError for fields that the job lacks).
        """
        if not self._started:
            self._receive(None)
            self._started = True
        if isinstance(job, str):
            self._send(json.dumps({"do": job} | fields, default=asdict))
        else:
            self._send(job.model_dump_json())
        # The worker runs the same table of jobs, so that the result has the job's type.
        return cast(Result, self._receive(progress))

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            pass  # it died: reading the reply finds out how

    def _receive(self, progress: ProgressCallback | None) -> dict[str, object]:
        """The result of the job under way; raises what it raised."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply: WorkerReply = json.loads(line)
            if "progress" in reply:
                if progress is not None:
                    progress(reply["progress"])
                continue
            if reply["ok"]:
                return reply.get("result", {})
            if "asked" in reply:
                raise ParityError(reply["asked"], reply["found"], reply["do"])
            raise WorkerCrash(self.backend, "raised an exception", reply["traceback"][-4000:], dead=False)
        # Standard output ended without a reply: the process is gone.
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
    """Token ids of prompts, by the model's tokenizer.

    Args:
        model: name or path of the model, with its `revision` on the hub.
        max_tokens: keep this many tokens of each prompt; None keeps all.

    Returns:
        The fields of a `parity.tracing.trace.RequestEntry` for each prompt.
    """
    job = TokenizeJob(model=model, revision=revision, prompts=tuple(prompts), max_tokens=max_tokens)
    return worker.call(job)["requests"]


def capture_with(
    worker: Worker,
    spec: TargetSpec | Mapping[str, Any],
    requests: Sequence[RequestEntry | Mapping[str, object]],
    out: Path,
    *,
    golden: bool = False,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> CaptureOutcome:
    """Write one trace by one worker.

    Args:
        spec: which target to load; also its fields as a mapping.
        requests: what to compute; entries, or their fields as mappings (as `tokenize` returns them).
        out: the trace's folder, which must not exist.
        golden: compute in fp64, on a torch worker.
        progress: called after each request.
        options: fields of `TraceOptions`.
    """
    spec = spec if isinstance(spec, TargetSpec) else TargetSpec(**spec)
    entries = tuple(RequestEntry.model_validate(request) for request in requests)
    trace = TraceOptions(**options)
    # Ranks share a trace, and recorded operators lie beside it: neither makes it another one.
    kept = {k: v for k, v in asdict(trace).items() if k not in ("rank", "world", "operators")}
    requested = {
        "spec": asdict(spec),
        "backend": worker.backend,
        "ids": [entry.token_ids for entry in entries],
        "golden": golden,
        **kept,
    }
    job = CaptureJob(
        spec=spec,
        requests=entries,
        out=str(out),
        fingerprint=hashlib.sha256(json.dumps(requested, sort_keys=True).encode()).hexdigest(),
        golden=golden,
        options=trace,
    )
    return worker.call(job, progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureResult:
    """What `parity capture` did."""

    out: Path
    backend: str
    requests: int
    tokens: int
    valid: bool
    problems: tuple[str, ...]
    calls: tuple[dict[str, str | int], ...]
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


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What `parity capture` captures, how, and where to. Checked when it is made: raises ParityError."""

    out: Path
    """Folder to write; must not exist."""
    _: KW_ONLY
    model: str
    """Name or path of the target; `embedded:hybrid` and `embedded:dense` come with the package."""
    prompts: Path
    """Text (a prompt a line) or JSON lines with `prompt`, `messages` or `token_ids`."""
    backend: str = "torch"
    """torch, fla, fla-interpreted, fast, golden, or DELTA+CONV."""
    taps: Sequence[str] | None = None
    """Names or patterns of taps; None records the states (embedding, layers, final norm)."""
    dtype: str = "auto"
    """auto, float32, bfloat16, float16 or float64; auto is the checkpoint's."""
    loader: str = "AutoModelForCausalLM"
    """AutoModelForCausalLM, AutoModel or AutoModelForImageTextToText."""
    revision: str | None = None
    """Revision on the hub."""
    device_map: str | None = None
    """As in transformers; None is cuda for backends that need it, else cpu."""
    mode: str = "prefill"
    """prefill, decode (token by token) or blocks:N."""
    max_tokens: int | None = None
    """Keep this many tokens of each request."""
    complete_with: str | None = None
    """Address of an OpenAI-compatible server that first completes each prompt."""
    complete_model: str | None = None
    """The model's name on that server; None is `model`."""
    new_tokens: int = 64
    """How many tokens the server may add."""
    local_from: Path | None = None
    """Folder of a trace whose states are fed to each layer, for the layer's own error."""
    sketch: bool = False
    """Keep a norm and a projection a token: 60 times smaller."""
    threads: int = 1
    """Threads of the worker."""
    hide: Sequence[str] = ()
    """Modules that the worker must not find."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "new_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ParityError(f"a capture with {name} {value}", "less than one", f"give {name} >= 1")
        backends.parse_backend(self.backend)

    @property
    def target(self) -> TargetSpec:
        """Which model to load. Raises ParityError as TargetSpec does."""
        return TargetSpec(
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            loader=self.loader,
            device_map=self.device_map,
        )


@accept_fields(CaptureOptions)
def capture_to(options: CaptureOptions) -> CaptureResult:
    """Capture one trace of a prompt file; the function behind `parity capture`.

    Under torchrun each rank computes its share and rank 0 finishes the trace.

    Args:
        out: folder to write; must not exist.
        model: name or path of the target; `embedded:hybrid` and `embedded:dense` come with the package.
        prompts: text (a prompt a line) or JSON lines with `prompt`, `messages` or `token_ids`.
        backend: torch, fla, fla-interpreted, fast, golden, or DELTA+CONV.
        taps: names or patterns of taps; the states by default.
        dtype, loader, revision, device_map: how the target is loaded.
        mode: prefill, decode (token by token) or blocks:N.
        max_tokens: keep this many tokens of each request.
        complete_with: address of a server that first completes each prompt with up to `new_tokens` tokens;
            `complete_model` is the model's name there.
        local_from: folder of a trace whose states are fed to each layer, for the layer's own error.
        sketch: keep a norm and a projection a token.
        threads, hide: threads of the worker, and modules that it must not find.

    Raises:
        ParityError: for whatever the user can put right.
        WorkerCrash: where the worker died.
    """
    prompts, spec = read_prompts(options.prompts), options.target
    with (
        Worker(options.backend, hide=options.hide, threads=options.threads) as worker,
        _progress("capture") as report,
    ):
        # Completions first: what the server wrote is part of what is captured.
        if url := options.complete_with:
            name = options.complete_model or options.model
            prompts = [complete(prompt, url, name, options.new_tokens) for prompt in prompts]
        requests = tokenize(
            worker, options.model, prompts, revision=options.revision, max_tokens=options.max_tokens
        )
        # torchrun tells each process its share by these two variables.
        outcome = capture_with(
            worker,
            spec,
            requests,
            options.out,
            progress=report,
            taps=tuple(options.taps) if options.taps else ("states",),
            mode=options.mode,
            local_from=str(options.local_from) if options.local_from else None,
            sketch=options.sketch,
            rank=int(os.environ.get("RANK", 0)),
            world=int(os.environ.get("WORLD_SIZE", 1)),
        )
    return CaptureResult(
        out=options.out,
        backend=worker.backend,
        requests=len(requests),
        valid=outcome.get("valid", True),
        tokens=sum(len(request["token_ids"]) for request in requests),
        problems=tuple(outcome.get("problems", ())),
        calls=tuple(outcome.get("calls", ())),
        notes=tuple(note for request in requests for note in request["notes"]),
    )


@contextmanager
def _progress(label: str) -> Iterator[ProgressCallback]:
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
