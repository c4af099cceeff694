"""Data: masks of what the assistant wrote, readers, packing, the cache, and an order that can resume."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parity.errors import ParityError
from parity.model.recipe.config import DataPart
from parity.model.target import chat
from parity.model.tiny import corpus, embedded
from parity.model.training import data
from parity.model.training.anchors import PADDING
from parity.model.training.data import (
    BatchStream,
    Document,
    StreamPosition,
    TurnRewriter,
    make_batch,
    pack_documents,
    read_documents,
    records_of,
)

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The plain template of many models: no generation marks, no think block."""
LAST_ONLY = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '<think>' + '</think>' }}{%- endif %}"
    "{{- m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>' + '</think>' }}{%- endif %}{%- endif %}"
)
"""As Qwen3's: only the last answer keeps its think block, so no prefix of the chat renders as a prefix."""
TWO_TURNS = [
    {"role": "user", "content": "add 1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "sort 21"},
    {"role": "assistant", "content": "12"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return embedded.tokenizer()


def supervised(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of each supervised stretch."""
    stretches = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in pairs]) for on, pairs in stretches if on]


@pytest.mark.parametrize("thinking", ["keep", "drop"])
def test_the_prefix_method_finds_what_the_template_marks(tokenizer: Any, thinking: chat.Thinking) -> None:
    for seed in range(40):
        messages = corpus.conversation(seed)
        marked = chat.tokenise(tokenizer, messages, thinking, "generation")
        assert chat.tokenise(tokenizer, messages, thinking, "prefix") == marked
        assert any(marked[1])


def test_both_turns_are_supervised_with_their_end_and_nothing_else(tokenizer: Any) -> None:
    ids, mask = chat.tokenise(tokenizer, TWO_TURNS)
    assert supervised(tokenizer, ids, mask) == ["3<|im_end|>", "12<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, LAST_ONLY])
def test_templates_without_marks(template: str) -> None:
    own = embedded.tokenizer()
    own.chat_template = template
    ids, mask = chat.tokenise(own, TWO_TURNS)
    assert supervised(own, ids, mask) == ["3<|im_end|>", "12<|im_end|>"]


def test_thoughts_are_kept_or_dropped(tokenizer: Any) -> None:
    answer = {"role": "assistant", "reasoning_content": "1+2", "content": "3"}
    ids, mask = chat.tokenise(tokenizer, [TWO_TURNS[0], answer], "keep")
    assert supervised(tokenizer, ids, mask) == ["1+2</think>3<|im_end|>"]
    inline = {"role": "assistant", "content": "<think>1+2</think>3"}
    for message in (answer, inline):
        ids, mask = chat.tokenise(tokenizer, [TWO_TURNS[0], message], "drop")
        assert supervised(tokenizer, ids, mask) == ["3<|im_end|>"]


def test_a_history_that_is_rendered_differently_is_refused() -> None:
    own = embedded.tokenizer()
    own.chat_template = "{%- for m in messages %}{{- m.content + (messages | length | string) }}{%- endfor %}"
    with pytest.raises(ParityError, match="its history is rendered differently"):
        chat.tokenise(own, TWO_TURNS)


# --- readers ------------------------------------------------------------------------------------------

RECORDS: list[dict[str, Any]] = [
    {"messages": TWO_TURNS[:2]},
    {"conversations": [{"from": "human", "value": "add 1+2"}, {"from": "gpt", "value": "3"}]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]},
    {"text": "abc"},
]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def part(source: Any, path: Path | None, **more: Any) -> DataPart:
    return DataPart(
        source=source, path=str(path) if path else None, length=64, validation_documents=0, **more
    )


def write_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    keys = {key for record in RECORDS for key in record}
    records = [{key: record.get(key) for key in keys} for record in RECORDS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_hf(path: Path) -> Path:
    from datasets import Dataset

    Dataset.from_list(
        [{key: record.get(key) for key in ("messages", "text")} for record in RECORDS]
    ).save_to_disk(str(path))
    return path


def test_every_form_of_record_in_every_source(tmp_path: Path, tokenizer: Any) -> None:
    expected = chat.tokenise(tokenizer, TWO_TURNS[:2])
    for source, path in (
        ("jsonl", write_jsonl(tmp_path / "a.jsonl", RECORDS)),
        ("parquet", write_parquet(tmp_path / "a.parquet")),
    ):
        made = read_documents(part(source, path), tokenizer)
        assert [each.sample_id for each in made] == [0, 1, 2, 3]
        for each in made[:2]:
            assert (each.tokens.tolist(), each.mask.tolist()) == expected
        assert made[2].mask.tolist() == [False, True, True, False]
        assert made[3].mask.all() and len(made[3]) == 3


def test_datasets_folder(tmp_path: Path, tokenizer: Any) -> None:
    path = write_hf(tmp_path / "set")
    records = [record for record in records_of("hf", str(path)) if record["messages"] or record["text"]]
    assert len(records) == 2
    with pytest.raises(ParityError, match="a datasets folder"):
        list(records_of("hf", str(tmp_path)))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"a": 1}, "record 0 of .*found: keys a\ndo this: give messages, conversations, text, or input_ids"),
    ({"input_ids": [1, 2]}, "found: no loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "found: 2 input_ids, 1 in loss_mask"),
    (
        {"messages": [{"content": "x"}]},
        "record 0 of .*: a conversation as tokens; found: the chat template refuses",
    ),
    ({"messages": [{"role": "user", "content": "x"}]}, "no document with two supervised tokens in a row"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_records_that_cannot_be_used(
    record: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(ParityError, match=message):
        read_documents(part("jsonl", path), tokenizer)


def test_a_broken_line_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n{"text"\n')
    with pytest.raises(ParityError, match="a.jsonl, line 2; found: no JSON"):
        read_documents(part("jsonl", path), tokenizer)
    with pytest.raises(ParityError, match="no such file or folder"):
        read_documents(part("jsonl", tmp_path / "none"), tokenizer)


def test_validation_is_the_end_of_the_data_and_never_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "abcdefghij"[: n + 2]} for n in range(8)])
    settings = part("jsonl", path).model_copy(update={"validation_documents": 3})
    train, held = (read_documents(settings, tokenizer, split=split) for split in ("train", "held_out"))
    assert [d.sample_id for d in train] == [0, 1, 2, 3, 4]
    assert [d.sample_id for d in held] == [5, 6, 7]


# --- cache --------------------------------------------------------------------------------------------


def same(a: list[Document], b: list[Document]) -> bool:
    return all(
        x.sample_id == y.sample_id and np.array_equal(x.tokens, y.tokens) and np.array_equal(x.mask, y.mask)
        for x, y in zip(a, b, strict=True)
    )


def test_the_cache_gives_the_same_documents_and_knows_what_it_depends_on(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    settings = part("jsonl", path, cache=str(tmp_path / "cache"))
    first = read_documents(settings, tokenizer)
    with monkeypatch.context() as patched:
        patched.setattr(data, "_documents", lambda *a: pytest.fail("tokenised again"))
        assert same(read_documents(settings, tokenizer), first)
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) == 1
    files[0].write_bytes(files[0].read_bytes()[:-3])  # damaged: made again
    assert same(read_documents(settings, tokenizer), first)
    write_jsonl(path, RECORDS[:3])
    assert len(read_documents(settings, tokenizer)) == 3
    other = embedded.tokenizer()
    other.chat_template = CHATML
    read_documents(settings, other)
    read_documents(settings.model_copy(update={"thinking": "drop"}), tokenizer)
    assert len(list((tmp_path / "cache").iterdir())) == 4


# --- packing and order --------------------------------------------------------------------------------


def document(number: int, size: int) -> Document:
    return Document(
        sample_id=number, tokens=np.arange(size) + 10 * number, mask=np.ones(size, dtype=np.bool_)
    )


def test_packing_loses_nothing_and_overfills_nothing() -> None:
    sizes = [int(n) for n in np.random.default_rng(0).integers(5, 60, 300)]
    rows = pack_documents(sizes, 100)
    assert sorted(n for row in rows for n in row) == list(range(300))
    fill = [sum(sizes[n] for n in row) for row in rows]
    assert max(fill) <= 100 and sum(fill) / (100 * len(rows)) > 0.85
    with pytest.raises(ParityError, match="document 0 of 101 tokens; found: rows of 100"):
        pack_documents([101], 100)


def test_a_row_restarts_positions_and_counts_documents() -> None:
    batch = make_batch([document(7, 3), document(9, 2)], epoch=4, pad_to=7)
    assert batch.tokens.tolist() == [70, 71, 72, 90, 91, 0, 0]
    assert batch.document.tolist() == [0, 0, 0, 1, 1, PADDING, PADDING]
    assert batch.position.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.loss_mask.tolist() == [True] * 5 + [False] * 2
    assert list(batch.spans()) == [(7, slice(0, 3)), (9, slice(3, 5))]
    assert not batch.without_supervision().loss_mask.any()


def test_the_feed_goes_on_where_it_stood() -> None:
    documents = [document(n, 10 + n % 7) for n in range(30)]

    def feed(position: StreamPosition | None = None) -> BatchStream:
        return BatchStream(documents, length=40, rows=3, seed=1, position=position)

    def ids(rows: list[list[Document]]) -> list[list[int]]:
        return [[each.sample_id for each in row] for row in rows]

    whole = feed()
    steps = whole.steps(2)
    expected = [(whole.position, ids(next(whole))) for _ in range(steps)]
    for position, rows in expected:
        assert ids(next(feed(position))) == rows
    by_epoch = [
        sorted(n for p, rows in expected if p.epoch == e for row in rows for n in row) for e in (0, 1)
    ]
    assert by_epoch == [list(range(30)), list(range(30))]
    assert expected[0][1] != expected[steps // 2][1]
    assert whole.position == StreamPosition(epoch=2, row=0)


def test_rewritten_turns_are_tokenised_and_cached(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:2]}])
    settings = part("jsonl", path, cache=str(tmp_path / "cache"))
    calls: list[int] = []

    def write(old: list[list[chat.ChatMessage]]) -> list[list[chat.ChatMessage]]:
        calls.append(len(old))
        return [
            [m | ({"content": "new"} if m["role"] == "assistant" else {}) for m in chat_] for chat_ in old
        ]

    for key, expected in (("a", [2]), ("a", [2]), ("b", [2, 2])):
        made = read_documents(settings, tokenizer, rewrite=TurnRewriter(key=key, write=write))
        assert calls == expected
        assert supervised(tokenizer, made[0].tokens.tolist(), made[0].mask.tolist()) == ["new<|im_end|>"] * 2
    assert not np.array_equal(read_documents(settings, tokenizer)[0].tokens, made[0].tokens)
    tokens = write_jsonl(tmp_path / "b.jsonl", RECORDS[2:3])
    with pytest.raises(
        ParityError, match="run.data.regenerate on .*record 0; found: keys input_ids, loss_mask"
    ):
        read_documents(part("jsonl", tokens), tokenizer, rewrite=TurnRewriter(key="a", write=write))


def test_responses_are_the_targets_own_greedy_text(tokenizer: Any) -> None:
    from parity.model.target.load import load_target
    from parity.model.target.spec import TargetSpec

    target = load_target(TargetSpec(model=str(embedded.find_embedded_target("dense")), dtype="float32"))
    asked = [corpus.prompts(4)[n] + [{"role": "assistant", "content": "?"}] for n in range(4)]
    made = chat.regenerate_locally(target.model, tokenizer, asked, max_new_tokens=24, batch=3)
    for chat_, old in zip(made, asked, strict=True):
        assert chat_[-2] == old[-2] and [m["role"] for m in chat_] == [m["role"] for m in old]
        history = chat_[:-1]
        ids = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_dict=True, return_tensors="pt", enable_thinking=False
        )["input_ids"]
        with torch.inference_mode():
            alone = target.model.generate(  # type: ignore[operator]
                input_ids=ids, do_sample=False, max_new_tokens=24
            )
        text = tokenizer.decode(alone[0, ids.shape[1] :].tolist()).split("<|im_end|>")[0]
        assert chat_[-1]["content"] == text
