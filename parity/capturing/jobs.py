"""The worker protocol: what a worker process can do, and what it returns.

    with Worker("torch") as worker:
        worker.call(DescribeJob(spec=TargetSpec(model="M")))["layer_types"]

Each line that is sent is one job as JSON, with the job's name under `do`; each result is one JSON object. Jobs,
their fields and their results are listed here once: `parity.capturing.client` writes them, `parity.capturing.worker`
reads them back with `read_job`, which refuses an unknown job, an unknown field and a value of the wrong type.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, TypeAdapter, ValidationError

from parity.model.target.spec import PLAIN_TRACE, CaptureEvent, Prompt, TargetSpec, TraceOptions
from parity.tracing.trace import RequestEntry

Result = TypeVar("Result")

TargetDescription = TypedDict(
    "TargetDescription",
    {
        "layer_types": list[str],
        "kept_float32": list[str],
        "unchecked": str,
        "parameters": int,
        "class": str,
        "dtype": str,
        "taps": list[str],
    },
)
"""Structure of a loaded target: kind of each layer, parameters kept in float32, why weights were not compared with the
file (empty where they were), how many values it has, class and dtype, names of its taps."""


class TokenizedPrompts(TypedDict):
    """Prompts as token ids: the fields of a `RequestEntry` each."""

    requests: list[dict[str, Any]]


class CaptureOutcome(TypedDict, total=False):
    """Where a trace lies and who computed it; of any rank but the first, `rank` alone."""

    rank: int
    out: str
    valid: bool
    problems: list[str]
    calls: list[dict[str, str | int]]


class ReplayOutcome(TypedDict):
    """How many operator calls were run again."""

    replayed: int


class GraftOutcome(TypedDict):
    """Layers that add error, ranges where no single layer does or where states are missing, and the finding."""

    layers: list[int]
    spread: list[list[int]]
    unseen: list[list[int]]
    finding: dict[str, object]


class SelfTestOutcome(TypedDict):
    """Relative L2 against fp64, and the limit that it kept."""

    error: float
    limit: float


class StartMessage(TypedDict):
    """The first line that a worker reads: its backend, further modules to hide from imports, threads of torch."""

    backend: str
    hide: list[str]
    threads: int


class ErrorReport(TypedDict, total=False):
    """What went wrong: the three parts of a ParityError, or the traceback of another exception."""

    asked: str
    found: str
    do: str
    traceback: str


class WorkerReply(ErrorReport, total=False):
    """One line that a worker writes: progress of the job, its result, or its error."""

    ok: bool
    result: dict[str, object]
    progress: CaptureEvent


class Job(BaseModel, Generic[Result]):
    """One job; `Result` is what the worker returns for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    do: str


class DescribeJob(Job[TargetDescription]):
    """Load a target and report its structure; computes nothing."""

    do: Literal["describe"] = "describe"
    spec: TargetSpec


class TokenizeJob(Job[TokenizedPrompts]):
    """Token ids of prompts, by the model's own tokenizer and chat template."""

    do: Literal["tokenize"] = "tokenize"
    model: str
    revision: str | None = None
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    """Keep this many tokens of each prompt; None keeps all."""


class CaptureJob(Job[CaptureOutcome]):
    """Write one trace of these requests to the folder `out`."""

    do: Literal["capture"] = "capture"
    spec: TargetSpec
    requests: tuple[RequestEntry, ...]
    out: str
    fingerprint: str
    """Identifies what was requested: only a capture with the same fingerprint is resumed."""
    golden: bool = False
    """On a torch worker: compute in fp64 (golden needs the same modules hidden, so one worker does both)."""
    options: TraceOptions = PLAIN_TRACE


class ReplayJob(Job[ReplayOutcome]):
    """Run the recorded operator calls of the file `calls` on this backend; outputs go to the file `out`."""

    do: Literal["replay"] = "replay"
    calls: str
    out: str
    golden: bool = False


class GraftJob(Job[GraftOutcome]):
    """Bisect to the layers that add error, measured against the trace in the folder `reference`."""

    do: Literal["graft"] = "graft"
    spec: TargetSpec
    reference: str
    requests: tuple[str, ...] | None = None
    """Ids of the requests to run; None: all of the trace."""


class WrapJob(Job[dict[str, object]]):
    """Write a vision-language model around the text model in the folder `model` to the folder `out`."""

    do: Literal["wrap"] = "wrap"
    model: str
    out: str


class SelfTestJob(Job[SelfTestOutcome]):
    """Measure the error of fla's kernels under Triton's interpreter against fp64."""

    do: Literal["self_test"] = "self_test"
    dtype: str


AnyJob = DescribeJob | TokenizeJob | CaptureJob | ReplayJob | GraftJob | WrapJob | SelfTestJob
_READER: TypeAdapter[AnyJob] = TypeAdapter(Annotated[AnyJob, Discriminator("do")])


def read_job(message: Mapping[str, object]) -> AnyJob:
    """The job in a message.

    Args:
        message: one line of the protocol: `do` with the job's name, and its fields.

    Raises:
        TypeError: for an unknown job, a missing or unknown field, or a value of the wrong type, with every such
            problem in words.
        ParityError: as `TargetSpec` and `TraceOptions` do.
    """
    try:
        return _READER.validate_python(message)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, each['loc'])) or 'do'}: {each['msg']}"
            for each in error.errors(include_url=False)
        ]
        raise TypeError(f"job {message.get('do')!r}: {'; '.join(problems)}") from error
