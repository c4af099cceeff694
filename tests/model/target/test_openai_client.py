"""Responses written anew by an OpenAI-compatible server; the server here answers as vLLM does."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from parity.errors import ParityError
from parity.model.recipe.config import preset
from parity.model.target.openai_client import address, regenerate_by_server
from parity.model.tiny import corpus
from parity.model.tiny.embedded import tokenizer
from parity.model.training import build
from parity.model.training.build import open_trainer

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # as many as the client may open at once; the library's 5 would reset some


class Stub:
    """A server on this machine: `answer` makes (status, JSON) of a request's body; bodies are kept."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies, self.paths = answer, list[dict[str, Any]](), set[str]()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802 (the library's name)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.bodies.append(body)
                stub.paths.add(self.path)
                code, data = stub.answer(body)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(data).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.http = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def said(text: str | None, **more: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text, **more}}]}


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    """A text that shows which question it answers, and how many turns came before."""
    return said(f"{len(body['messages'])}: {body['messages'][-1]['content']}")


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub(echo)
    yield made
    made.http.shutdown()
    made.http.server_close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def old(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_turns_are_written_after_new_turns(stub: Stub) -> None:
    system = {"role": "system", "content": "be brief"}
    given = [[system, user("a"), old("x"), user("b"), old("y")]] + [
        [user(f"q{n}"), old("z")] for n in range(40)
    ]
    done: list[int] = []
    made = regenerate_by_server(stub.url + "/v1/", "name", given, max_new_tokens=7, progress=done.append)
    assert made[0] == [system, user("a"), old("2: a"), user("b"), old("4: b")]
    assert made[1:] == [[user(f"q{n}"), old(f"1: q{n}")] for n in range(40)]  # in order, though asked at once
    assert done == list(range(1, 42)) and stub.paths == {"/v1/chat/completions"}
    (second,) = (body for body in stub.bodies if len(body["messages"]) == 4)
    assert second["messages"] == made[0][:4]  # the new answer is the history of the next
    assert {(b["model"], b["max_tokens"], b["temperature"], b["stream"]) for b in stub.bodies} == {
        ("name", 7, 0, False)
    }
    assert given[0][2]["content"] == "x"  # what was given stays as it is


def test_thinking_where_the_old_answer_thought(stub: Stub) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["chat_template_kwargs"]["enable_thinking"]:
            return said("new", reasoning_content="so")
        return said(None)

    stub.answer = answer
    thought = [[user("a"), old("x", reasoning_content="hm")], [user("a"), old("<think>hm</think>x")]]
    made = regenerate_by_server(stub.url, "m", [*thought, [user("a"), old("x")]])
    assert [each[1] for each in made] == [old("new", reasoning_content="so")] * 2 + [old("")]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((500, {"e": 1}), "HTTP 500"),
        ((400, {"e": "no such model"}), "HTTP 400.*no such model"),
        ((200, {"choices": []}), "an answer without one"),
        ((200, ["a"]), "found: a list"),
        ((200, {"choices": [{"message": {"content": 5}}]}), "a content that is no text"),
    ],
)
def test_trouble_is_told(stub: Stub, answer: tuple[int, Any], found: str) -> None:
    stub.answer = lambda body: answer
    with pytest.raises(ParityError, match=found):
        regenerate_by_server(stub.url, "m", [[user("a"), old("x")]] * 3)


def test_no_server_and_addresses() -> None:
    with pytest.raises(ParityError, match="no answer .*\ndo this: start the server"):
        regenerate_by_server("http://127.0.0.1:9", "m", [[user("a"), old("x")]], timeout=2)
    assert {
        address(url, "/v1/x") for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")
    } == {"http://h:1/v1/x"}


SMALL = preset("unit").with_values(
    {"run.data.documents": 10, "run.data.validation_documents": 2, "run.data.regenerate": 9}
)


def test_a_run_on_a_servers_responses(stub: Stub, tmp_path: Path) -> None:
    stub.answer = lambda body: said("7 7 7")
    training = SMALL.with_values({"run.data.server": stub.url, "run.data.server_model": "target"})
    heard: list[str] = []
    trainer = open_trainer(training, out=tmp_path, say=heard.append)
    trainer.close()
    assert heard == ["the server wrote 10 of 10 conversations", "the server wrote 2 of 2 conversations"]
    assert len(stub.bodies) >= 12 and {body["model"] for body in stub.bodies} == {"target"}
    for document in [*trainer.feed.documents, *trainer.validation]:
        assert str(tokenizer().decode(document.tokens[document.mask])).startswith("7 7 7")
    asked = len(stub.bodies)
    again = open_trainer(training, out=tmp_path, say=heard.append)
    again.close()
    assert len(stub.bodies) == asked and len(heard) == 2  # tokens from the cache
    assert [d.tokens.tolist() for d in again.feed.documents] == [
        d.tokens.tolist() for d in trainer.feed.documents
    ]


def test_what_was_written_before_an_interruption_is_kept(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "REGENERATED_TOGETHER", 4)
    training = SMALL.with_values({"run.data.server": stub.url})

    talks = [corpus.conversation(n, "train", 80) for n in range(10)]
    talks += [corpus.conversation(n, "held_out", 80) for n in range(2)]
    asked = [sum(turn["role"] == "assistant" for turn in talk) for talk in talks]
    sixth = next(turn["content"] for turn in talks[5] if turn["role"] == "user")

    def failing(body: dict[str, Any]) -> tuple[int, Any]:
        return (503, {}) if any(m["content"] == sixth for m in body["messages"]) else said("1")

    stub.answer = failing
    heard: list[str] = []
    with pytest.raises(ParityError, match="HTTP 503"):
        open_trainer(training, out=tmp_path, say=heard.append)
    assert heard == ["the server wrote 4 of 10 conversations"]
    (file,) = (tmp_path / "cache").glob("turns-*.jsonl")
    assert len(file.read_text().splitlines()) == 4
    with file.open("a") as stream:
        stream.write('["half a li')  # killed while writing
    stub.answer, before = lambda body: said("1"), len(stub.bodies)
    open_trainer(training, out=tmp_path, say=heard.append).close()
    assert heard[1] == "the server wrote 8 of 10 conversations" and heard[2].startswith("the server wrote 10")
    assert len(stub.bodies) - before == sum(
        asked[4:]
    )  # of the first four none, but of the two for validation
    assert [len(json.loads(line)) for line in file.read_text().splitlines()] == [2] * 12


def test_a_server_without_regeneration_is_refused(tmp_path: Path) -> None:
    training = SMALL.with_values({"run.data.regenerate": 0, "run.data.server": "http://h"})
    with pytest.raises(ParityError, match="run.data.server: http://h; found: run.data.regenerate: 0"):
        open_trainer(training, out=tmp_path)
