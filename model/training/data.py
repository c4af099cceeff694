"""Training data: documents from files or the corpus, packed into rows, handed out in an order that can resume.

    documents = read_documents(run.data, tokenizer)          # tokenised, cached
    feed = BatchStream(documents, length=1536, rows=4, seed=0)
    for rows in feed: batch = make_batch(rows, epoch=feed.position.epoch)

A record is a JSON object, a parquet row or a row of a `datasets` folder with one of `messages` (chat, OpenAI's
names, or ShareGPT's `conversations`), `text` (every token is trained on), or `input_ids` with `loss_mask` (what
speculators' prepared folders hold). A document's sample id is its record's number, so that anchors and offline
states belong to the record, not to a row or a rank.

Shapes: S tokens of a packed row.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parity.errors import ParityError
from parity.files import write_atomically
from parity.model.recipe.config import DataPart
from parity.model.target import chat
from parity.model.tiny import corpus
from parity.model.training.anchors import PADDING, random_words
from parity.tracing.trace import Trace

CACHE_VERSION = "1"
"""Part of every cache key; a change of tokenisation below changes it."""
SHUFFLE = 2**63
"""Stands in for a sample id where the order of documents is drawn: no record has this number."""
OPEN_ROWS = 8
"""Rows kept open while packing: more fill better, fewer keep documents nearer to their drawn order."""
SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Document:
    """One tokenised sample."""

    sample_id: int
    """Its record's number in the source."""
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    """Which tokens are trained on."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One packed row, possibly joined from several: all a step needs beside the states. Tensors are [S]."""

    tokens: Tensor
    loss_mask: Tensor
    document: Tensor
    """0, 1, ... in the order of the row; PADDING where there is none."""
    position: Tensor
    """Restarts at 0 in every document."""
    sample_ids: tuple[int, ...]
    """Sample of each document."""
    epoch: int

    def to(self, device: str | torch.device) -> "Batch":
        """The same on another device."""
        moved = (self.tokens, self.loss_mask, self.document, self.position)
        tokens, loss_mask, document, position = (tensor.to(device) for tensor in moved)
        return replace(self, tokens=tokens, loss_mask=loss_mask, document=document, position=position)

    def without_supervision(self) -> "Batch":
        """The same with nothing to train on."""
        return replace(self, loss_mask=torch.zeros_like(self.loss_mask))

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(sample id, its tokens) of each document, in the order of the row."""
        counts = torch.bincount(self.document[self.document != PADDING], minlength=len(self.sample_ids))
        start = 0
        for sample, count in zip(self.sample_ids, counts.tolist(), strict=True):
            yield sample, slice(start, start + count)
            start += count


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRewriter:
    """Who writes the assistant's turns anew before they are tokenised
    (`parity.model.target.chat.regenerate_locally`)."""

    key: str
    """Hash of whatever the new turns depend on."""
    write: Callable[[list[list[chat.ChatMessage]]], list[list[chat.ChatMessage]]]


def make_batch(documents: Sequence[Document], *, epoch: int, pad_to: int = 0) -> Batch:
    """Documents one after the other, padded at the end up to `pad_to` tokens where they are fewer."""
    sizes = [len(document) for document in documents]
    padding = max(0, pad_to - sum(sizes))
    tokens = np.concatenate([*(each.tokens for each in documents), np.zeros(padding, dtype=np.int64)])
    mask = np.concatenate([*(each.mask for each in documents), np.zeros(padding, dtype=np.bool_)])
    owner = [np.full(size, number) for number, size in enumerate(sizes)]
    place = [np.arange(size) for size in (*sizes, padding)]
    return Batch(
        tokens=torch.from_numpy(tokens),
        loss_mask=torch.from_numpy(mask),
        document=torch.from_numpy(np.concatenate([*owner, np.full(padding, PADDING)]).astype(np.int64)),
        position=torch.from_numpy(np.concatenate(place).astype(np.int64)),
        sample_ids=tuple(each.sample_id for each in documents),
        epoch=epoch,
    )


# --- reading ------------------------------------------------------------------------------------------


def read_documents(
    data: DataPart, tokenizer: Any, *, split: corpus.Split = "train", rewrite: TurnRewriter | None = None
) -> list[Document]:
    """All documents of a split, tokenised, or out of the cache. Raises ParityError for unusable input."""
    path = data.path if split == "train" or data.validation is None else data.validation
    longest = data.document_length or data.length
    key = _cache_key(data, tokenizer, split, path, longest, rewrite) if data.cache else ""
    cached = _read_cache(Path(data.cache or "") / f"{key}.safetensors") if data.cache else None
    if cached is None:
        cached = list(_documents(data, tokenizer, split, path, longest, rewrite))
        if data.cache:
            _write_cache(Path(data.cache) / f"{key}.safetensors", cached)
    if path is not None and data.validation is None:
        cut = len(cached) - min(data.validation_documents, len(cached) // 2)
        cached = cached[:cut] if split == "train" else cached[cut:]
    if not cached and split == "train":
        found = "no document with two supervised tokens in a row"
        raise ParityError(f"training data from {path or data.source}", found, "check roles and loss masks")
    return cached


def _documents(
    data: DataPart,
    tokenizer: Any,
    split: corpus.Split,
    path: str | None,
    longest: int,
    rewrite: TurnRewriter | None,
) -> Iterator[Document]:
    """Documents in the order of the source, cut to `longest`; those that no anchor fits are left out."""
    wanted = data.documents if split == "train" or path is not None else data.validation_documents
    records = islice(records_of(data.source, path, split=split, longest=longest), wanted)
    if rewrite is not None:
        where = f"run.data.regenerate on {path or data.source}"
        old = [_messages(record, f"{where}, record {number}") for number, record in enumerate(records)]
        records = islice(({"messages": messages} for messages in rewrite.write(old)), None)
    for number, record in enumerate(records):
        tokens, mask = _tokens(record, tokenizer, data.thinking, f"record {number} of {path or data.source}")
        if any(a and b for a, b in zip(mask[:longest], mask[1:longest], strict=False)):
            yield Document(
                sample_id=number,
                tokens=np.asarray(tokens[:longest], dtype=np.int64),
                mask=np.asarray(mask[:longest], dtype=np.bool_),
            )


def records_of(
    source: str, path: str | None, *, split: corpus.Split = "train", longest: int = 192
) -> Iterator[Mapping[str, Any]]:
    """Records of a source: corpus, jsonl, parquet, hf (a folder of `datasets`), trace."""
    if source == "corpus":
        seeds: Iterable[int] = range(2**62)
        return ({"messages": corpus.conversation(seed, split, longest)} for seed in seeds)
    readers = {"jsonl": _jsonl, "parquet": _parquet, "hf": _hf, "trace": _trace}
    place = Path(path or "")
    if not place.exists():
        raise ParityError(f"training data from {place}", "no such file or folder", "correct run.data.path")
    return readers[source](place)


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ParityError(f"{path}, line {number}", f"no JSON ({error})", "correct it") from error
                if not isinstance(record, dict):
                    found = f"a {type(record).__name__}"
                    raise ParityError(f"{path}, line {number}", found, "write one object a line")
                yield record


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    files = sorted(path.glob("**/*.parquet")) if path.is_dir() else [path]
    for file in files:
        try:
            for part in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=256):
                yield from part.to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ParityError(f"parquet data in {file}", str(error), "give a parquet file") from error


def _hf(path: Path) -> Iterator[Mapping[str, Any]]:
    from datasets import Dataset, load_from_disk

    try:
        found = load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ParityError(f"a datasets folder {path}", str(error), "give what save_to_disk wrote") from error
    if not isinstance(found, Dataset):
        do = f"name one of {', '.join(str(path / name) for name in found)}"
        raise ParityError(f"a datasets folder {path}", f"{len(found)} splits", do)
    yield from found


def _trace(path: Path) -> Iterator[Mapping[str, Any]]:
    """Requests of one of our traces; what follows the prompt is trained on."""
    for entry in Trace.open(path).requests:
        mask = [index >= entry.prompt_tokens for index in range(len(entry.token_ids))]
        yield {"input_ids": list(entry.token_ids), "loss_mask": mask}


def _tokens(
    record: Mapping[str, Any], tokenizer: Any, thinking: chat.Thinking, where: str
) -> tuple[list[int], list[bool]]:
    """Token ids and mask of one record, whichever of the known forms it has."""
    if record.get("input_ids") is not None:
        ids = [int(token) for token in record["input_ids"]]
        mask = record.get("loss_mask")
        if mask is None or len(mask) != len(ids):
            found = "no loss_mask" if mask is None else f"{len(ids)} input_ids, {len(mask)} in loss_mask"
            raise ParityError(where, found, "give loss_mask as long as input_ids")
        return ids, [bool(flag) for flag in mask]
    if isinstance(record.get("text"), str):
        ids = list(tokenizer(record["text"])["input_ids"])
        return ids, [True] * len(ids)
    present = _messages(record, where)
    try:
        return chat.tokenise(tokenizer, present, thinking)
    except ParityError as error:
        raise ParityError(f"{where}: {error.asked}", error.found, error.do) from error


def _messages(record: Mapping[str, Any], where: str) -> list[chat.ChatMessage]:
    """The conversation of a record, OpenAI's names or ShareGPT's."""
    messages = record.get("messages")
    if messages is None and record.get("conversations") is not None:
        messages = [
            {"role": SHAREGPT.get(turn.get("from"), turn.get("from")), "content": turn.get("value")}
            for turn in record["conversations"]
        ]
    if not isinstance(messages, list | tuple) or not all(isinstance(m, Mapping) for m in messages):
        found = f"keys {', '.join(map(str, record)) or 'none'}"
        raise ParityError(where, found, "give messages, conversations, text, or input_ids and loss_mask")
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


# --- cache --------------------------------------------------------------------------------------------


def _cache_key(
    data: DataPart,
    tokenizer: Any,
    split: corpus.Split,
    path: str | None,
    longest: int,
    rewrite: TurnRewriter | None,
) -> str:
    """Hash of everything the tokens depend on: contents of the source, tokenizer, template, settings."""
    digest = hashlib.sha256()
    wanted = [data.documents, data.validation_documents if path is None else None]
    settings = [CACHE_VERSION, data.source, split if path is None else "", *wanted, longest, data.thinking]
    digest.update(json.dumps([*settings, rewrite.key if rewrite else None]).encode())
    digest.update(json.dumps(tokenizer_state(tokenizer)).encode())
    if path is None:
        digest.update(Path(corpus.__file__).read_bytes())
    else:
        pattern = {"hf": "*", "trace": "manifest.json"}.get(data.source, "**/*")  # not the states beside them
        for file in sorted(p for p in (Path(path), *Path(path).glob(pattern)) if p.is_file()):
            digest.update(str(file.relative_to(path)).encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def tokenizer_state(tokenizer: Any) -> list[str]:
    """What a tokenizer's ids depend on: its tables and its template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for changing in ("padding", "truncation"):  # set by the last call, not by the tokenizer
        parts.pop(changing, None) if backend is not None else None
    tables = json.dumps(parts, sort_keys=True)
    return [tables, str(getattr(tokenizer, "chat_template", "")), str(tokenizer.eos_token_id)]


def _write_cache(file: Path, documents: Sequence[Document]) -> None:
    from safetensors.numpy import save

    none = np.zeros(0, dtype=np.int64)
    arrays = {
        "tokens": np.concatenate([none, *(each.tokens for each in documents)]),
        "mask": np.concatenate([none, *(each.mask for each in documents)]).astype(np.uint8),
        "lengths": np.array([len(each) for each in documents], dtype=np.int64),
        "sample_ids": np.array([each.sample_id for each in documents], dtype=np.int64),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, save(arrays), durable=True)


def _read_cache(file: Path) -> list[Document] | None:
    """Documents of a cache file; None where there is none or it is damaged, so that it is made again."""
    from safetensors.numpy import load_file

    try:
        arrays = load_file(file)
    except Exception:  # safetensors has its own exceptions for a file that is cut short
        return None
    starts = np.cumsum(arrays["lengths"]) - arrays["lengths"]
    return [
        Document(
            sample_id=int(number),
            tokens=arrays["tokens"][start : start + size],
            mask=arrays["mask"][start : start + size].astype(np.bool_),
        )
        for number, start, size in zip(arrays["sample_ids"], starts, arrays["lengths"], strict=True)
    ]


# --- packing and order --------------------------------------------------------------------------------


def pack_documents(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents, row by row: first fit among the last OPEN_ROWS rows.

    Raises ParityError for a document longer than a row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for number, size in enumerate(lengths):
        if size > length:
            raise ParityError(
                f"document {number} of {size} tokens", f"rows of {length}", "cut documents first"
            )
        low = max(0, len(rows) - OPEN_ROWS)
        row = next((r for r in range(low, len(rows)) if free[r] >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(length)
        rows[row].append(number)
        free[row] -= size
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPosition:
    """Where in the data a run stands."""

    epoch: int = 0
    row: int = 0
    """First row of the epoch that was not trained on yet."""


class BatchStream:
    """Groups of rows, one group an optimizer step, for ever; a function of (documents, seed, position) only."""

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        length: int,
        rows: int,
        seed: int,
        position: StreamPosition | None = None,
    ) -> None:
        self.documents, self.length, self.rows, self.seed = documents, length, rows, seed
        self.position = position or StreamPosition()
        self._packed: tuple[int, list[list[int]]] | None = None

    def epoch_rows(self, epoch: int) -> list[list[int]]:
        """The packed rows of an epoch: documents in an order drawn anew."""
        if self._packed is None or self._packed[0] != epoch:
            words = random_words(len(self.documents), seed=self.seed, epoch=epoch, sample_id=SHUFFLE)
            order = np.argsort(words, kind="stable")
            rows = pack_documents([len(self.documents[n]) for n in order], self.length)
            self._packed = (epoch, [[int(order[n]) for n in row] for row in rows])
        return self._packed[1]

    def steps(self, epochs: int) -> int:
        """Optimizer steps that whole epochs take."""
        return sum(-(-len(self.epoch_rows(epoch)) // self.rows) for epoch in range(epochs))

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> list[list[Document]]:
        """The rows of the next step; the last step of an epoch may hold fewer. Moves `position` on."""
        rows = self.epoch_rows(self.position.epoch)
        taken = rows[self.position.row : self.position.row + self.rows]
        after = self.position.row + len(taken)
        ended = after >= len(rows)
        self.position = StreamPosition(epoch=self.position.epoch + ended, row=0 if ended else after)
        return [[self.documents[number] for number in row] for row in taken]
