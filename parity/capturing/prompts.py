"""Prompts from a file, and completions from a server: the input of a capture.

A prompt file is text (one prompt a line) or JSON lines with one of `prompt`, `messages` (chat) or
`token_ids`, and optionally `id` and `completion`. `complete` has an OpenAI-compatible server, as vLLM,
SGLang and `transformers serve` offer, continue them, so that a trace covers what is served.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.errors import ParityError
from parity.model.target.openai_client import address, post_request
from parity.model.target.spec import Prompt as Prompt


def read_prompts(file: Path) -> list[Prompt]:
    """All prompts of a file, in order. Raises ParityError for a missing, empty or malformed file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParityError(f"prompts from {file}", str(error), "give a text or JSON lines file") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ParityError(f"prompts from {file}", "an empty file", "write one prompt a line, or JSON lines")
    as_json = file.suffix in (".jsonl", ".ndjson", ".json") or numbered[0][1].lstrip().startswith("{")
    prompts = [
        _from_json(file, number, line) if as_json else Prompt(id=f"line-{number}", text=line)
        for number, line in numbered
    ]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ParityError(
                f"prompts from {file}", f"id {prompt.id!r} twice", "give each prompt its own id"
            )
        seen.add(prompt.id)
    return prompts


def _from_json(file: Path, number: int, line: str) -> Prompt:
    """The prompt in one line of JSON. Raises ParityError for anything else."""
    where = f"prompts from {file}, line {number}"
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ParityError(where, f"no JSON ({error})", "write one JSON object a line") from error
    given = [key for key in ("prompt", "messages", "token_ids") if isinstance(data, dict) and key in data]
    if len(given) != 1:
        found = f"keys {', '.join(map(str, data))}" if isinstance(data, dict) else f"a {type(data).__name__}"
        raise ParityError(where, found, "give exactly one of prompt, messages, token_ids")
    for name, kind in (("completion", str), ("enable_thinking", bool)):
        if not isinstance(data.get(name), kind | None):
            raise ParityError(where, f"{name} = {data[name]!r}", f"give a {kind.__name__}, or leave it out")
    # The one key that holds the prompt, and its value in the form that the key demands.
    key, value = given[0], data[given[0]]
    base = Prompt(
        id=str(data.get("id", f"line-{number}")),
        completion=data.get("completion"),
        thinking=data.get("enable_thinking"),
    )
    if key == "prompt" and isinstance(value, str) and value:
        return replace(base, text=value)
    if (
        key == "messages"
        and isinstance(value, list)
        and value
        and all(isinstance(item, dict) for item in value)
    ):
        return replace(base, messages=tuple(value))
    if (
        key == "token_ids"
        and isinstance(value, list)
        and value
        and all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    ):
        return replace(base, token_ids=tuple(value))
    raise ParityError(
        where,
        f"{key} = {str(value)[:60]!r}",
        "prompt is a text, messages a list of objects, token_ids a list of whole numbers; none may be empty",
    )


def complete(prompt: Prompt, url: str, model: str, max_tokens: int, timeout: float = 600.0) -> Prompt:
    """The prompt with a server's completion at temperature 0: ids where the server gives them, else text.

    Args:
        prompt: chat messages go to `/v1/chat/completions`, a plain prompt or ids to `/v1/completions`.
        url: address of an OpenAI-compatible server, with or without /v1.
        model: the model's name there.
        max_tokens: how many tokens the server may add.
        timeout: seconds.

    Returns:
        The prompt with completion and notes. A content that begins with the prompt is cut, and the cut noted.

    Raises:
        ParityError: where the server cannot answer.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": False}
    if prompt.messages is not None:
        path, body["messages"] = "/v1/chat/completions", list(prompt.messages)
        if prompt.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": prompt.thinking}
    else:
        path, body["prompt"] = (
            "/v1/completions",
            prompt.text if prompt.text is not None else list(prompt.token_ids or ()),
        )
    answer, notes = post_request(address(url, path), body, timeout)
    # Servers differ in where the ids of the prompt are: beside the choices, or in each.
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        ids, prompt_ids = (
            choice.get("token_ids"),
            answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        )
        if not isinstance(text, str):
            raise TypeError("content is no text")
    except (KeyError, IndexError, TypeError) as error:
        raise ParityError(
            f"a completion from {url}",
            f"an answer without one ({error})",
            "give the address of an OpenAI-compatible server",
        ) from error
    # Some servers repeat the prompt before the completion; their ids are dropped with it.
    echoed = prompt.text if prompt.text is not None else _last_user(prompt)
    if echoed and text.startswith(echoed):
        text, notes = (
            text[len(echoed) :],
            [*notes, "the server's content began with the prompt, which was cut"],
        )
        ids = None
    return replace(
        prompt,
        completion=text,
        completion_ids=tuple(ids) if ids else None,
        prompt_ids=tuple(prompt_ids) if ids and prompt_ids else None,
        notes=(*prompt.notes, *notes),
    )


def _last_user(prompt: Prompt) -> str:
    contents = [message.get("content") for message in prompt.messages or () if message.get("role") == "user"]
    return contents[-1] if contents and isinstance(contents[-1], str) else ""
