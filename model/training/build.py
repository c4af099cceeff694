"""From a training file to a trainer: target, states, data, ranks.

trainer = open_trainer(preset("tiny"), out=Path("run"))
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parity.errors import ParityError
from parity.files import write_atomically
from parity.model.drafting.proposer import DrafterModule
from parity.model.recipe.config import TrainingFile
from parity.model.target import chat, openai_client
from parity.model.training import distributed
from parity.model.training.data import Document, TurnRewriter, read_documents
from parity.model.training.states import SharedModules, open_target
from parity.model.training.trainer import Observer, Trainer

REGENERATED_TOGETHER = 128
"""Conversations that the target writes at once."""


def open_trainer(
    training: TrainingFile,
    *,
    out: Path | None = None,
    observers: Sequence[Observer] = (),
    tau: Callable[[DrafterModule], float] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Trainer:
    """Everything a training file names, opened: target, states, data, ranks, and the run in `out` if there is one.

    say: hears what takes long before the first step.
    """
    run = training.run
    ranks = distributed.join(run.device)
    if run.device == "cuda":
        training = training.with_values({"run.device": distributed.local_device(run.device)})
    parts, source, tokenizer = open_target(training)
    if ranks.first:
        documents, validation = _read(training, parts, tokenizer, out, say)
    ranks.barrier()  # what the first rank had the target write, the others find in the cache
    if not ranks.first:
        documents, validation = _read(training, parts, tokenizer, out, lambda line: None)
    watching = list(observers)
    if run.save.tau_prompts and tau is None:
        from parity.model.training.monitor import tau_of

        if run.parallel == "fsdp2" and ranks.world > 1:
            asked = f"run.save.tau_prompts: {run.save.tau_prompts} with run.parallel: fsdp2"
            raise ParityError(asked, "no rank has the whole drafter", "write 0, and measure the checkpoint")
        tau = tau_of(training, parts, validation[: run.save.tau_prompts])
    if run.save.tensorboard and out is not None and ranks.first:
        from parity.model.training.monitor import TrainingTensorBoard

        watching.append(TrainingTensorBoard(out))
    return Trainer(
        training, parts, source, documents, validation, out=out, observers=watching, tau=tau, ranks=ranks
    )


def _read(
    training: TrainingFile, parts: SharedModules, tokenizer: Any, out: Path | None, say: Callable[[str], None]
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, written anew by the target where the run says so."""
    data, rewrite = training.run.data, None
    if data.server and not data.regenerate:
        do = "write regenerate: the most tokens of a turn, or take server out"
        raise ParityError(f"run.data.server: {data.server}", "run.data.regenerate: 0", do)
    if data.regenerate:
        if data.cache is None and out is not None:
            data = data.model_copy(update={"cache": str(out / "cache")})
        rewrite = regeneration(training, parts, tokenizer, say, Path(data.cache) if data.cache else None)
    documents = read_documents(data, tokenizer, rewrite=rewrite)
    if not data.validation_documents:
        return documents, []
    return documents, read_documents(data, tokenizer, split="held_out", rewrite=rewrite)


Conversation = list[chat.ChatMessage]


def regeneration(
    training: TrainingFile,
    parts: SharedModules,
    tokenizer: Any,
    say: Callable[[str], None] = lambda line: None,
    cache: Path | None = None,
) -> TurnRewriter:
    """Who writes the assistant's turns: the target in this process, or a server that runs it.

    cache: folder for what is written, so that an interrupted run goes on there. Raises ParityError where the target is
    neither here nor at a server.
    """
    data, target = training.run.data, parts.target
    most = data.regenerate
    if data.server:
        url, name, who = data.server, data.server_model or training.recipe.target.model, "the server"
        key = _hash(["server", url, name, most])

        def write(old: Sequence[Conversation]) -> list[Conversation]:
            return openai_client.regenerate_by_server(url, name, old, max_new_tokens=most)
    elif target is not None:
        here, who = target, "the target"
        key = _hash([here.identity.config_sha256, here.identity.weights, here.dtype, most])

        def write(old: Sequence[Conversation]) -> list[Conversation]:
            together = REGENERATED_TOGETHER
            return chat.regenerate_locally(here.model, tokenizer, old, max_new_tokens=most, batch=together)
    else:
        asked, found = f"run.data.regenerate: {most}", "no target in this process"
        do = "write 0, name a server, or train on a model that transformers loads"
        raise ParityError(asked, found, do)
    file = cache / f"turns-{key[:32]}.jsonl" if cache else None

    def rewrite_with_cache(old: list[Conversation]) -> list[Conversation]:
        return _with_cached_turns(
            file, old, write, lambda done: say(f"{who} wrote {done:,} of {len(old):,} conversations")
        )

    return TurnRewriter(key=key, write=rewrite_with_cache)


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, default=str).encode()).hexdigest()


def _with_cached_turns(
    file: Path | None,
    old: list[Conversation],
    write: Callable[[Sequence[Conversation]], list[Conversation]],
    progress: Callable[[int], None],
) -> list[Conversation]:
    """What `write` makes of all conversations; what is in the file is not written again.

    A line of the file is [hash of the old conversation, the new one]; a last line that was cut off does not count.
    """
    known = _read_turns(file) if file and file.is_file() else {}
    keys = [_hash(conversation) for conversation in old]
    missing = [number for number, key in enumerate(keys) if key not in known]
    for start in range(0, len(missing), REGENERATED_TOGETHER):
        part = missing[start : start + REGENERATED_TOGETHER]
        made = {keys[n]: new for n, new in zip(part, write([old[n] for n in part]), strict=True)}
        known |= made
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(line) + "\n" for line in made.items())
                stream.flush()
                os.fsync(stream.fileno())
        progress(len(old) - len(missing) + start + len(part))
    return [known[key] for key in keys]


def _read_turns(file: Path) -> dict[str, Conversation]:
    known = {}
    text = file.read_text(encoding="utf-8", errors="replace")
    if not text.endswith("\n"):  # killed while writing: the next line must not continue this one
        text = text[: text.rfind("\n") + 1]
        write_atomically(file, text, durable=True)
    for line in text.splitlines():
        with suppress(ValueError):
            key, new = json.loads(line)
            known[key] = new
    return known
