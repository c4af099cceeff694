"""Completions from a real OpenAI-compatible server: `transformers serve --device cpu` on the embedded target."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.capturing.client import capture_to
from parity.model.tiny.embedded import find_embedded_target
from parity.tracing.trace import Trace

QUESTIONS = ("sort 4 2 9", "add 25+38")
# Without a GPU an importable fla is chosen all the same, and crashes; the server is started without it.
HIDE = "import sys\nsys.modules['fla'] = sys.modules['causal_conv1d'] = None\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server; its output is shown where it does not come up."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "sitecustomize.py").write_text(HIDE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).parent / "transformers")
    command = [program, "serve", "--device", "cpu", "--host", "127.0.0.1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def greedy(question: str, new_tokens: int) -> str:
    """The target's own answer, in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = find_embedded_target("hybrid")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_traces_cover_what_is_served(server: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    model = str(find_embedded_target("hybrid"))
    result = capture_to(
        tmp_path / "t",
        model=model,
        prompts=prompts,
        dtype="float32",
        taps=["layer.0.out"],
        complete_with=server,
        new_tokens=40,
    )
    assert result.valid and any("tokenised again" in note for note in result.notes)
    for question, request in zip(QUESTIONS, Trace.open(tmp_path / "t").requests, strict=True):
        assert (
            request.origin == "retokenised" and request.rows == len(request.token_ids) > request.prompt_tokens
        )
        assert "".join(request.token_texts[request.prompt_tokens :]) == greedy(question, 40)
