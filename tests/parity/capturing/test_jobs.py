"""The worker protocol: one table of jobs on both sides; what it does not know is refused in words."""

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

import parity.capturing.jobs as jobs_module
from parity.capturing.client import CaptureOptions, Worker, WorkerCrash, capture_to
from parity.capturing.jobs import AnyJob, CaptureJob, DescribeJob, TokenizeJob, WrapJob, read_job
from parity.capturing.worker import JobServer
from parity.errors import ParityError
from parity.model.target.spec import Prompt, TargetSpec, TraceOptions

SPEC = {"model": "some/model"}
REQUEST = {
    "id": "r",
    "token_ids": (1, 2),
    "origin": "given",
    "prompt_tokens": 2,
    "token_texts": ("a", "b"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "describe": {"spec": SPEC},
    "tokenize": {"model": "m", "prompts": [{"id": "r", "messages": [{"role": "user", "content": "x"}]}]},
    "capture": {"spec": SPEC, "requests": [REQUEST], "out": "o", "fingerprint": "f", "options": {"rows": 2}},
    "replay": {"calls": "c", "out": "o", "golden": True},
    "graft": {"spec": SPEC, "reference": "r", "requests": ["a"]},
    "wrap": {"model": "m", "out": "o"},
    "self_test": {"dtype": "float32"},
}


def test_the_table_is_the_same_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job has fields here, survives the pipe unchanged, and reaches a method of the server."""
    jobs = {name: job for name, job in vars(jobs_module).items() if name.endswith("Job") and name != "Job"}
    assert set(jobs.values()) - {AnyJob} == set(get_args(AnyJob)), "a job is missing from the table"
    assert {job.model_fields["do"].default for job in get_args(AnyJob)} == set(FIELDS)
    server: Any = object.__new__(JobServer)
    for name, fields in FIELDS.items():
        job = read_job({"do": name, **fields})
        assert type(job).model_validate_json(job.model_dump_json()) == job and job.do == name
        reached: list[Any] = []
        monkeypatch.setattr(JobServer, name, lambda self, *args, reached=reached: reached.append(args[0]))
        server.run(job, lambda event: None)
        assert reached == [job]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"do": "dance"}, r"job 'dance': do: .*'dance'.*expected tags: 'describe', 'tokenize'"),
        ({"spec": SPEC}, "job None: do: Unable to extract tag"),
        ({"do": "wrap", "model": "m", "out": "o", "speed": 1}, "job 'wrap': wrap.speed: Extra inputs"),
        ({"do": "wrap", "model": 3, "out": "o"}, "wrap.model: Input should be a valid string"),
        ({"do": "describe", "spec": {"model": "m", "nonsense": 1}}, "describe.spec.nonsense: Unexpected"),
        ({"do": "capture", "spec": SPEC}, "capture.requests: Field required; capture.out: Field required"),
        (
            {**FIELDS["capture"], "do": "capture", "options": {"row": 2}},
            "capture.options.row: Unexpected keyword",
        ),
    ],
)
def test_wrong_messages_are_refused_in_words(message: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        read_job(message)


def test_values_of_the_user_are_the_users_to_put_right() -> None:
    """Through the pipe as well: a loader that does not exist is a ParityError, not a traceback."""
    with pytest.raises(ParityError, match="no such loader"):
        read_job({"do": "describe", "spec": SPEC | {"loader": "Auto"}})
    with pytest.raises(ParityError, match="rows 0"):
        TraceOptions(rows=0)
    with pytest.raises(ParityError, match="rank 2 of 2"):
        TraceOptions(rank=2, world=2)
    assert TraceOptions(taps=["a"]).taps == ("a",)  # type: ignore[arg-type]


def test_a_worker_refuses_what_the_table_lacks() -> None:
    with Worker("torch") as worker:
        for call, words in (("dance", "'dance'"), ("describe", "describe.spec: Field required")):
            with pytest.raises(WorkerCrash, match="raised an exception") as crash:
                worker.call(call)
            assert "TypeError" in crash.value.tail and words in crash.value.tail and not crash.value.dead


def test_a_job_by_name_is_the_job_of_that_record(hybrid: Path) -> None:
    """The fields as keywords, a record among them as it is."""
    spec = TargetSpec(model=str(hybrid), dtype="float32")
    with Worker("torch") as worker:
        found = worker.call(DescribeJob(spec=spec))
        assert worker.call("describe", spec=spec) == worker.call("describe", spec=asdict(spec)) == found
        assert found["dtype"] == "float32" and "layer.0.gdn.out" in found["taps"]
        tokens = worker.call(TokenizeJob(model=str(hybrid), prompts=(Prompt(id="r", token_ids=(1, 2)),)))
        assert tokens["requests"][0]["token_ids"] == [1, 2]


def test_records_hold_what_they_are_given() -> None:
    spec = TargetSpec(model="m", dtype="bfloat16")
    assert DescribeJob(spec=spec).spec is spec
    job = CaptureJob(spec=spec, requests=(), out="o", fingerprint="f")
    assert job.options == TraceOptions() and not job.golden
    assert read_job({"do": "tokenize", "model": "m", "prompts": [Prompt(id="r", text="x")]}).do == "tokenize"
    with pytest.raises(Exception, match="frozen"):
        WrapJob(model="m", out="o").model = "n"


# --- the options of a capture ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threads": 0}, "threads 0"),
        ({"new_tokens": 0}, "new_tokens 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"backend": "fastest"}, "no such backend"),
    ],
)
def test_options_are_checked_before_anything_starts(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParityError, match=words):
        capture_to(Path("out"), model="m", prompts=Path("p"), **options)


def test_keywords_of_a_capture_are_its_options() -> None:
    """Old keywords are the fields; `help` lists and describes each."""
    names = list(inspect.signature(capture_to).parameters)
    assert names[:3] == ["out", "model", "prompts"] and len(names) == 18
    assert "hide" in names and inspect.signature(capture_to).return_annotation.__name__ == "CaptureResult"
    assert all(name in (capture_to.__doc__ or "") for name in names)
    with pytest.raises(TypeError, match="speed"):
        capture_to(Path("out"), model="m", prompts=Path("p"), speed=1)  # type: ignore[call-arg]
    options = CaptureOptions(Path("out"), model="m", prompts=Path("p"), dtype="float32", loader="AutoModel")
    assert options.target == TargetSpec(model="m", dtype="float32", loader="AutoModel")
