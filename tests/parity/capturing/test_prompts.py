"""Prompt files and completions from a server (a local one that answers as vLLM, SGLang and transformers do)."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from parity.capturing.prompts import Prompt, complete, read_prompts
from parity.errors import ParityError


def test_text_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert [(p.id, p.text) for p in read_prompts(tmp_path / "p.txt")] == [
        ("line-1", "one"),
        ("line-3", "two"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "b"},
        {"id": "x", "token_ids": [1, 2]},
        {"messages": [{"role": "user", "content": "q"}], "enable_thinking": False},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first, second, third = read_prompts(tmp_path / "p.jsonl")
    assert (first.text, first.completion, second.id, second.token_ids) == ("a", "b", "x", (1, 2))
    assert third.messages == ({"role": "user", "content": "q"},) and third.thinking is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "an empty file"),
        ("  \n\n", "an empty file"),
        ("{", "no JSON"),
        ('{"prompt": "a", "completion": 5}', "completion = 5"),
        ('{"prompt": "a", "enable_thinking": "no"}', "enable_thinking = "),
        ('{"text": "a"}', "keys text"),
        ('{"prompt": "a", "token_ids": [1]}', "exactly one of"),
        ('{"prompt": ""}', "none may be empty"),
        ('{"token_ids": []}', "none may be empty"),
        ('{"token_ids": [true]}', "whole numbers"),
        ('{"token_ids": [-1]}', "whole numbers"),
        ('{"messages": ["a"]}', "list of objects"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "id 'x' twice"),
    ],
)
def test_malformed_files(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(ParityError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="No such file"):
        read_prompts(tmp_path / "no.txt")


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any], list[Callable[[dict[str, Any]], tuple[int, Any]]]]]:
    """(address, bodies it received, a list whose last function answers)."""
    received: list[Any] = []
    answers: list[Callable[[dict[str, Any]], tuple[int, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 (the library's name)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, body))
            code, data = answers[-1](body)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(data if isinstance(data, bytes) else json.dumps(data).encode())

        def log_message(self, *_: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", received, answers
    http.shutdown()
    http.server_close()


CHAT = Prompt(id="c", messages=({"role": "user", "content": "2+2"},))


def test_ids_of_the_server_are_kept(server: Any) -> None:
    address, received, answers = server
    answers.append(
        lambda body: (
            200,
            {"prompt_token_ids": [5, 6], "choices": [{"message": {"content": " 4"}, "token_ids": [9]}]},
        )
    )
    got = complete(CHAT, address + "/v1", "m", 8)
    assert (got.completion, got.completion_ids, got.prompt_ids, got.notes) == (" 4", (9,), (5, 6), ())
    path, body = received[0]
    assert path == "/v1/chat/completions" and body["temperature"] == 0 and body["return_token_ids"] is True


def test_server_that_refuses_ids_is_asked_again(server: Any) -> None:
    address, received, answers = server
    answers.append(
        lambda body: (
            (422, {"detail": "unexpected"})
            if "return_token_ids" in body
            else (200, {"choices": [{"message": {"content": "4"}}]})
        )
    )
    got = complete(CHAT, address, "m", 8)
    assert got.completion == "4" and got.completion_ids is None and "tokenised again" in got.notes[0]
    assert len(received) == 2


def test_echoed_prompt_is_cut_and_noted(server: Any) -> None:
    address, _, answers = server
    answers.append(lambda body: (200, {"choices": [{"text": "once upon a time", "token_ids": [1, 2, 3]}]}))
    got = complete(Prompt(id="p", text="once upon"), address, "m", 8)
    assert got.completion == " a time" and got.completion_ids is None and "which was cut" in got.notes[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"e": 1}), "HTTP 500"),
        ((200, {"choices": []}), "an answer without one"),
        ((200, b"<html>"), "no answer"),
    ],
)
def test_server_trouble_is_told(server: Any, answer: tuple[int, Any], message: str) -> None:
    address, _, answers = server
    answers.append(lambda body: answer)
    with pytest.raises(ParityError, match=message):
        complete(CHAT, address, "m", 8)


def test_no_server() -> None:
    with pytest.raises(ParityError, match="no answer"):
        complete(CHAT, "http://127.0.0.1:9", "m", 8, timeout=2)
