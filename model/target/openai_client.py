"""Asking an OpenAI-compatible server, as vLLM, SGLang and `transformers serve` offer.

answer, notes = ask("http://host:8000/v1/chat/completions", {"model": ..., "messages": [...]})
conversations = regenerate("http://host:8000", "name", conversations, max_new_tokens=512)
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parity.errors import ParityError

ApiMessage = dict[str, Any]

TOGETHER = 32
"""Requests under way at once: enough for a server to fill its batches."""
TOKEN_ID_FIELDS = {"return_token_ids": True}
"""What vLLM and SGLang take, and others refuse."""


def address(url: str, path: str) -> str:
    """`path` at a server that was named with or without /v1."""
    return url.rstrip("/").removesuffix("/v1") + path


def post_request(
    url: str, body: dict[str, Any], timeout: float = 600.0, *, ids: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """POST; the answer, and notes. ids: ask for token ids first, and without where that is refused.

    Raises ParityError where the server cannot be reached, refuses, or answers something else than JSON.
    """
    refused: list[str] = []
    for extra in (TOKEN_ID_FIELDS, {}) if ids else ({},):
        data = json.dumps(body | extra).encode()
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=timeout) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:200]
            if extra and error.code in (400, 422):
                refused = ["the server refused return_token_ids; its text is tokenised again"]
                continue
            do = "check the model's name and the server's log"
            raise ParityError(f"a completion from {url}", f"HTTP {error.code}: {detail}", do) from error
        except (OSError, ValueError) as error:
            do = "start the server, check address and port"
            raise ParityError(f"a completion from {url}", f"no answer ({error})", do) from error
        if not isinstance(answer, dict):
            found = f"a {type(answer).__name__}"
            raise ParityError(f"a completion from {url}", found, "give an OpenAI-compatible server")
        return answer, refused
    raise AssertionError("the loop returns or raises")


def regenerate_by_server(
    url: str,
    model: str,
    conversations: Sequence[Sequence[ApiMessage]],
    *,
    max_new_tokens: int = 512,
    progress: Callable[[int], None] = lambda done: None,
    timeout: float = 600.0,
) -> list[list[ApiMessage]]:
    """Every assistant turn written anew by the server, at temperature 0, after the history written anew before it.

    As `parity.model.target.chat.regenerate_locally` does in this process: a turn thinks where the old one did.
    progress: called with
    how many conversations are done. Raises ParityError as `post_request` does; no conversation is returned then.
    """
    from parity.model.target.chat import has_thoughts  # here, since whoever only asks need not wait for torch

    def rewrite(old: Sequence[ApiMessage]) -> list[ApiMessage]:
        made: list[ApiMessage] = []
        for turn in old:
            answered = turn["role"] == "assistant"
            made.append(
                _answer(url, model, made, max_new_tokens, has_thoughts(turn), timeout)
                if answered
                else dict(turn)
            )
        return made

    pool, results = ThreadPoolExecutor(TOGETHER), []
    try:
        for done, made in enumerate(pool.map(rewrite, conversations), 1):
            results.append(made)
            progress(done)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def _answer(
    url: str, model: str, history: list[ApiMessage], max_new_tokens: int, thinking: bool, timeout: float
) -> ApiMessage:
    body = {
        "model": model,
        "messages": history,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    answer, _ = post_request(address(url, "/v1/chat/completions"), body, timeout, ids=False)
    try:
        message = answer["choices"][0]["message"]
        text, thoughts = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        found, do = f"an answer without one ({error!r})", "give the address of an OpenAI-compatible server"
        raise ParityError(f"a completion from {url}", found, do) from error
    if not isinstance(text or "", str) or not isinstance(thoughts or "", str):
        found, do = "a content that is no text", "give the address of an OpenAI-compatible server"
        raise ParityError(f"a completion from {url}", found, do)
    made: ApiMessage = {"role": "assistant", "content": text or ""}
    return made | ({"reasoning_content": thoughts} if thoughts else {})
