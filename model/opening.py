"""From a training file to a trainer: target, states, data, ranks.

trainer = open_trainer(presets.preset("tiny"), out=Path("run"))
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from parity.errors import ParityError
from parity.model import chat, distributed
from parity.model.config import Training
from parity.model.data import Document, Rewrite, read_documents
from parity.model.states import Parts, open_target
from parity.model.trainer import Observer, Trainer

REGENERATED_TOGETHER = 128
"""Conversations that the target writes at once."""


def open_trainer(
    training: Training,
    *,
    out: Path | None = None,
    observers: Sequence[Observer] = (),
    tau: Callable[[Any], float] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Trainer:
    """Everything a training file names, opened: target, states, data, ranks, and the run in `out` if there is one.

    say: hears what takes long before the first step.
    """
    run = training.run
    ranks = distributed.join(run.device)
    if run.device == "cuda":
        training = training.changed({"run.device": distributed.local_device(run.device)})
    parts, source, tokenizer = open_target(training)
    if ranks.first:
        documents, validation = _read(training, parts, tokenizer, out, say)
    ranks.barrier()  # what the first rank had the target write, the others find in the cache
    if not ranks.first:
        documents, validation = _read(training, parts, tokenizer, out, lambda line: None)
    watching = list(observers)
    if run.save.tau_prompts and tau is None:
        from parity.model.monitor import tau_of

        if run.parallel == "fsdp2" and ranks.world > 1:
            asked = f"run.save.tau_prompts: {run.save.tau_prompts} with run.parallel: fsdp2"
            raise ParityError(asked, "no rank has the whole drafter", "write 0, and measure the checkpoint")
        tau = tau_of(training, parts, validation[: run.save.tau_prompts])
    if run.save.tensorboard and out is not None and ranks.first:
        from parity.model.monitor import TensorBoard

        watching.append(TensorBoard(out))
    return Trainer(
        training, parts, source, documents, validation, out=out, observers=watching, tau=tau, ranks=ranks
    )


def _read(
    training: Training, parts: Parts, tokenizer: Any, out: Path | None, say: Callable[[str], None]
) -> tuple[list[Document], list[Document]]:
    """Training and validation documents, written anew by the target where the run says so."""
    data, rewrite = training.run.data, None
    if data.regenerate:
        rewrite = regeneration(training, parts, tokenizer, say)
        if data.cache is None and out is not None:
            data = data.model_copy(update={"cache": str(out / "cache")})
    documents = read_documents(data, tokenizer, rewrite=rewrite)
    if not data.validation_documents:
        return documents, []
    return documents, read_documents(data, tokenizer, split="held_out", rewrite=rewrite)


def regeneration(
    training: Training, parts: Parts, tokenizer: Any, say: Callable[[str], None] = lambda line: None
) -> Rewrite:
    """The target as the writer of the assistant's turns. Raises ParityError where it is not in this process."""
    target, tokens = parts.target, training.run.data.regenerate
    if target is None:
        asked, do = f"run.data.regenerate: {tokens}", "write 0, or train on a model that transformers loads"
        raise ParityError(asked, "no target in this process", do)
    identity = [target.identity.config_sha256, target.identity.weights, target.dtype, tokens]

    def write(old: list[list[chat.Message]]) -> list[list[chat.Message]]:
        return chat.regenerate(
            target.model,
            tokenizer,
            old,
            max_new_tokens=tokens,
            batch=REGENERATED_TOGETHER,
            progress=lambda done: say(f"the target wrote {done:,} of {len(old):,} conversations"),
        )

    return Rewrite(key=hashlib.sha256(json.dumps(identity).encode()).hexdigest(), write=write)
