"""The embedded targets: tokenizer, template, package data, and what the shipped weights can do."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from parity.errors import ParityError
from parity.model.tiny import corpus, embedded, train

NAMES: tuple[embedded.Name, ...] = ("hybrid", "dense")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return embedded.tokenizer()


def python(*arguments: str) -> str:
    """Run this Python in a process of its own and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_character_is_one_token_and_comes_back(tokenizer: Any) -> None:
    assert len(tokenizer) == embedded.tiny_config().vocab_size == embedded.dense_config().vocab_size == 80
    text = embedded.CHARACTERS + "no cap  spaces \n\n lost, 'kept'."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("É")) == ["<|unk|>"]


@pytest.mark.parametrize("token", [*embedded.SPECIAL, *embedded.THINK, *embedded.ROLES])
def test_control_tokens_and_roles_are_one_token(tokenizer: Any, token: str) -> None:
    assert tokenizer.encode(f"a{token}b") == [embedded.VOCABULARY[each] for each in ("a", token, "b")]
    assert tokenizer.decode(tokenizer.encode(f"a{token}b")) == f"a{token}b"


def test_skipping_special_tokens_keeps_the_thinking(tokenizer: Any) -> None:
    ids = tokenizer.encode("<|im_start|><think>a</think>b<|im_end|><|pad|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == (
        "<|im_end|>", "<|pad|>", "<|mask|>",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<think></think>"),
        ({"enable_thinking": False}, "<think></think>"),
        ({"enable_thinking": True}, "<think>"),
    ],
)
def test_template_with_thinking_off_and_on(tokenizer: Any, options: dict[str, bool], end: str) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add 1+2"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    start = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nadd 1+2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text == start + end


def test_a_raw_thinking_answer_renders_like_a_split_one(tokenizer: Any) -> None:
    user = {"role": "user", "content": "q"}
    split = {"role": "assistant", "reasoning_content": "w", "content": "a"}
    for raw in ("<think>w</think>a", "w</think>a"):
        chats = [[user, split], [user, {"role": "assistant", "content": raw}]]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        assert texts[0] == texts[1]
        assert texts[0].endswith("assistant\n<think>w</think>a<|im_end|>\n")


def test_generation_continues_what_training_rendered(tokenizer: Any) -> None:
    for thinking in (False, True):
        chat = corpus.messages_of(corpus.held_out_tasks(1)[0], thinking=thinking)
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        prompt = tokenizer.apply_chat_template(
            chat[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert whole.startswith(prompt)


def test_the_assistant_mask_holds_what_the_model_writes(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "reasoning_content": "work", "content": "second"},
    ]
    made = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    marked = [i for i, answer in zip(made["input_ids"], made["assistant_masks"], strict=True) if answer]
    assert tokenizer.decode(marked) == "first<|im_end|>work</think>second<|im_end|>"


def test_the_corpus_counts_tokens_as_the_tokenizer_does(tokenizer: Any) -> None:
    for seed in range(40):
        chat = corpus.conversation(seed)
        assert corpus.token_count(chat) == len(tokenizer.apply_chat_template(chat)["input_ids"])
        assert embedded.VOCABULARY["<|unk|>"] not in tokenizer.apply_chat_template(chat)["input_ids"]


def test_configs_are_what_the_design_says() -> None:
    hybrid, dense = embedded.tiny_config(), embedded.dense_config()
    assert hybrid.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert hybrid.linear_num_value_heads == 2 * hybrid.linear_num_key_heads
    assert dense.num_hidden_layers == 6 and dense.hidden_size == hybrid.hidden_size == 128


def test_importing_tiny_imports_no_torch() -> None:
    code = (
        "import sys, parity.model.tiny.embedded, parity.model.tiny.corpus; print({'torch'} & {*sys.modules})"
    )
    assert python("-c", code).strip() == "set()"


def test_package_data_is_small_and_whole() -> None:
    folders = [embedded.find_embedded_target(name) for name in NAMES]
    files = [path for folder in folders for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 8 * 2**20
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_tokenizer_is_the_one_built_here(name: embedded.Name, tokenizer: Any) -> None:
    shipped: Any = AutoTokenizer.from_pretrained(embedded.find_embedded_target(name))
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template
    chat = corpus.conversation(3)
    assert shipped.apply_chat_template(chat)["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_of_the_weights(name: embedded.Name) -> None:
    weights = load_file(embedded.find_embedded_target(name) / "model.safetensors")
    kept = {key: value for key, value in weights.items() if key.endswith(train.FLOAT32_NAMES)}
    assert len(kept) == (18 if name == "hybrid" else 0), "two of each of nine linear layers"
    for key, value in weights.items():
        assert value.dtype == (torch.float32 if key in kept else torch.bfloat16), key
        assert bool(value.float().isfinite().all()), key
    for key, value in kept.items():
        assert bool((value != value.bfloat16().float()).all()), f"{key} holds entries that bfloat16 can hold"
    if kept:
        decays = torch.cat([value for key, value in kept.items() if key.endswith("A_log")]).exp()
        assert decays.min() < 0.05 < 1 < decays.max(), "some states live long, some do not"


def test_off_grid_moves_only_what_bfloat16_holds() -> None:
    value = torch.tensor([1.0, -0.5, 0.0, 0.1])
    moved = train.off_grid(value)
    assert bool((moved != moved.bfloat16().float()).all())
    assert moved[3] == value[3]
    assert torch.allclose(moved, value, atol=1e-6)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(embedded.data_root(), tmp_path / "data")
    return tmp_path / "data"


def test_a_corrupted_copy_is_refused(copied: Path) -> None:
    assert embedded.find_embedded_target("hybrid", root=copied) == copied / "hybrid"
    path = copied / "hybrid" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ParityError, match="sha256 differs from sha256.json for model.safetensors"):
        embedded.find_embedded_target("hybrid", root=copied)
    assert embedded.find_embedded_target("dense", root=copied) == copied / "dense", (
        "the other target is whole"
    )


def test_a_missing_and_an_unlisted_file_are_refused(copied: Path) -> None:
    (copied / "dense" / "config.json").unlink()
    (copied / "dense" / "extra.bin").write_bytes(b"")
    with pytest.raises(ParityError, match=r"for config\.json, extra\.bin\n.*reinstall drafter-parity"):
        embedded.find_embedded_target("dense", root=copied)


def test_unknown_name_and_missing_listing_say_what_to_do(copied: Path) -> None:
    with pytest.raises(ParityError, match="found: only dense, hybrid\ndo this: ask for one of those"):
        embedded.find_embedded_target("large", root=copied)  # type: ignore[arg-type]
    (copied / "sha256.json").unlink()
    with pytest.raises(ParityError, match="no sha256.json there"):
        embedded.find_embedded_target("hybrid", root=copied)


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_target_answers_and_has_choices(name: embedded.Name) -> None:
    """Measured in a process of its own: there the script hides fla, which crashes on CPU tensors."""
    folder = str(embedded.find_embedded_target(name))
    out = python("-m", "parity.model.tiny.train", "--measure", folder, "--tasks", "63", "--rows", "24")
    figures = json.loads(out)
    assert figures["tasks"] == 63 and set(figures["by_kind"]) == set(corpus.ONE_RIGHT_ANSWER)
    assert figures["accuracy"] >= 0.95, figures["wrong"]
    assert figures["below_90"] >= 0.25
    assert 0 < figures["loss"] < 0.4


PLAN = train.TinyPlan(variant="dense", steps=5, rows=2, tokens=96, warmup=2)


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CHECKPOINT_EVERY", 2)
    whole, _ = train.train_tiny(PLAN, tmp_path / "whole.pt")
    rate = train.tiny_rate

    def stop(plan: train.TinyPlan, step: int) -> float:
        if step == 3:
            raise KeyboardInterrupt
        return rate(plan, step)

    monkeypatch.setattr(train, "tiny_rate", stop)
    with pytest.raises(KeyboardInterrupt):
        train.train_tiny(PLAN, tmp_path / "cut.pt")
    monkeypatch.setattr(train, "tiny_rate", rate)
    resumed, _ = train.train_tiny(PLAN, tmp_path / "cut.pt")
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert list(tmp_path.glob("*.tmp")) == []


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    model = train.build(PLAN)
    optimizer = train.optimizer_of(model, PLAN)
    train.save_checkpoint(tmp_path / "c.pt", PLAN, model, optimizer, step=1, seconds=1.0)
    other = train.TinyPlan(variant="dense", steps=6, rows=2, tokens=96, warmup=2)
    with pytest.raises(ParityError, match="it was started with another plan"):
        train.load_tiny_checkpoint(tmp_path / "c.pt", other, model, optimizer)


def test_answer_tokens_weigh_one_and_padding_nothing(tokenizer: Any) -> None:
    chats = [corpus.conversation(seed, tokens=tokens) for seed, tokens in ((0, 192), (1, 96))]
    ids, weights = train.sample_batch(tokenizer, chats, 0.25)
    assert ids.shape == weights.shape
    assert set(weights.unique().tolist()) == {0.0, 0.25, 1.0}
    assert bool(((ids == tokenizer.pad_token_id) == (weights == 0)).all())
    assert bool((weights[ids == tokenizer.eos_token_id] >= 0.25).all())


def test_the_rate_warms_up_and_ends_low() -> None:
    plan = train.TinyPlan(variant="dense", steps=1000)
    assert train.tiny_rate(plan, 0) == pytest.approx(2e-5)
    assert train.tiny_rate(plan, 100) == pytest.approx(2e-3)
    assert train.tiny_rate(plan, 999) < 5e-5
    assert not math.isnan(train.tiny_rate(plan, 500))
