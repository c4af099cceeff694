"""Conversations as token ids with the mask of what the assistant wrote, and responses made anew by the target.

    tokens, mask = tokenise(tokenizer, messages)

The mask takes in what the model itself writes when it is served: its text and the token that ends its turn,
but neither the header nor what the template puts in front of the answer (Qwen's empty think block). Templates
with `{% generation %}` say so themselves. For others the turn begins where the conversation stops agreeing
with the generation prompt of its own history, and ends at the end-of-turn token.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from parity.errors import ParityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ChatMessage = dict[str, Any]
Thinking = Literal["keep", "drop"]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)


Call = Callable[..., Any]


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer. Its own types do not say which of several forms a call returns."""

    eos_token_id: Any
    pad_token_id: Any
    chat_template: Any
    padding_side: str

    @property
    def vocab_size(self) -> int: ...
    @property
    def __call__(self) -> Call: ...
    @property
    def decode(self) -> Call: ...
    @property
    def batch_decode(self) -> Call: ...
    @property
    def apply_chat_template(self) -> Call: ...
    @property
    def save_pretrained(self) -> Call: ...


def tokenise(
    tokenizer: ChatTokenizer,
    messages: Sequence[ChatMessage],
    thinking: Thinking = "keep",
    method: str = "auto",
) -> tuple[list[int], list[bool]]:
    """Token ids of one conversation, and the mask of what the assistant wrote.

    Args:
        messages: turns with `role`, `content` and, for thoughts kept apart, `reasoning_content`.
        thinking: keep or drop the assistant's thoughts.
        method: how the mask is found: `generation` by the template's marks, `prefix` by comparing with the
            generation prompt, `auto` by the marks where there are any.

    Raises:
        ParityError: where the template cannot render it, or where a turn cannot be found again.
    """
    if not getattr(tokenizer, "chat_template", None):
        do = "give `text` or `input_ids`, or a tokenizer with a chat template"
        raise ParityError("a conversation as tokens", "a tokenizer without chat template", do)
    messages = [_plain(message, thinking) for message in messages]
    if method == "auto":
        method = "generation" if GENERATION.search(tokenizer.chat_template) else "prefix"
    return _by_generation(tokenizer, messages) if method == "generation" else _by_prefix(tokenizer, messages)


def _plain(message: ChatMessage, thinking: Thinking) -> ChatMessage:
    """The message, without thoughts where they are dropped."""
    if thinking == "keep" or message.get("role") != "assistant":
        return dict(message)
    kept = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    return kept | {"content": THOUGHTS.sub("", str(kept.get("content") or ""))}


def _render(tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # templates raise what they like: jinja's errors, KeyError, TypeError
        found = f"the chat template refuses it ({error})"
        raise ParityError("a conversation as tokens", found, "correct roles and contents") from error


def _by_generation(tokenizer: ChatTokenizer, messages: list[ChatMessage]) -> tuple[list[int], list[bool]]:
    made = _render(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
    return list(made["input_ids"]), [bool(flag) for flag in made["assistant_masks"]]


def _by_prefix(tokenizer: ChatTokenizer, messages: list[ChatMessage]) -> tuple[list[int], list[bool]]:
    whole = _render(tokenizer, messages, tokenize=False)
    made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(made["input_ids"]), made["offset_mapping"]
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        start = _start(tokenizer, messages[:turn], whole)
        first = next((n for n, (low, _) in enumerate(offsets) if low >= start), len(ids))
        ends = [n for n in range(first, len(ids)) if ids[n] == tokenizer.eos_token_id]
        if not ends and turn + 1 < len(messages):
            do = "use a template with {% generation %} marks, or a tokenizer whose eos ends a turn"
            raise ParityError(f"the end of turn {turn}", "no end-of-turn token behind it", do)
        last = ends[0] + 1 if ends else len(ids)
        mask[first:last] = [True] * (last - first)
    return ids, mask


def _start(tokenizer: ChatTokenizer, history: list[ChatMessage], whole: str) -> int:
    """Characters of `whole` before what the assistant wrote itself after `history`.

    Thinking on and off give different prompts; the one that reaches farthest is what a server would send.
    """
    said = _render(tokenizer, history, tokenize=False) if history else ""
    shared = 0
    for thinking in (False, True):
        prompt = _render(
            tokenizer, history, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        shared = max(shared, _common(prompt, whole))
    if shared < _common(said, whole) or shared <= len(said.rstrip()) - 1:
        do = "use a template with {% generation %} marks"
        raise ParityError("the start of an assistant's turn", "its history is rendered differently", do)
    return shared


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    return next((n for n in range(length) if a[n] != b[n]), length)


@torch.inference_mode()
def regenerate_locally(
    model: "PreTrainedModel",
    tokenizer: ChatTokenizer,
    conversations: Sequence[Sequence[ChatMessage]],
    *,
    max_new_tokens: int = 512,
    batch: int = 8,
    thinking: bool | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[ChatMessage]]:
    """Every assistant turn written anew by the target, greedily, after the history written anew before it.

    Args:
        model: the target's language model.
        max_new_tokens: a turn without its end-of-turn token by then is cut there.
        batch: conversations in one call of the model, padded on the left.
        thinking: on or off; None thinks where the old answer did.
        progress: called with how many conversations are done.

    Returns:
        New conversations; a thinking answer keeps its thoughts in its content, as the template reads them.
    """
    made = [list[ChatMessage]() for _ in conversations]
    for start in range(0, len(conversations), batch):
        group = range(start, min(start + batch, len(conversations)))
        # Turn by turn, since each answer is part of the next question; those that think apart from the others.
        for turn in range(max(len(conversations[n]) for n in group)):
            present = [n for n in group if turn < len(conversations[n])]
            asked = [n for n in present if conversations[n][turn]["role"] == "assistant"]
            for n in present:
                if n not in asked:
                    made[n].append(dict(conversations[n][turn]))
            for think in (False, True):
                own = [
                    n
                    for n in asked
                    if (has_thoughts(conversations[n][turn]) if thinking is None else thinking) == think
                ]
                histories = [made[n] for n in own]
                answers = _answers(model, tokenizer, histories, max_new_tokens, think) if own else []
                for n, text in zip(own, answers, strict=True):
                    made[n].append({"role": "assistant", "content": text})
        progress(group.stop)
    return made


def has_thoughts(message: ChatMessage) -> bool:
    """Whether an assistant's turn holds thoughts."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return bool(thoughts) or bool(THOUGHTS.match(str(message.get("content") or "")))


def _answers(
    model: "PreTrainedModel",
    tokenizer: ChatTokenizer,
    histories: list[list[ChatMessage]],
    max_new_tokens: int,
    thinking: bool,
) -> list[str]:
    """Greedy continuations of several chats as text, without the end-of-turn token."""
    options = {"add_generation_prompt": True, "enable_thinking": thinking, "padding": True}
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        given = tokenizer.apply_chat_template(histories, return_dict=True, return_tensors="pt", **options)
    finally:
        tokenizer.padding_side = side
    given = {name: value.to(model.device) for name, value in given.items()}
    # transformers' type of a model leaves `generate` out, which a language model has.
    out = model.generate(  # type: ignore[operator]
        **given, do_sample=False, max_new_tokens=max_new_tokens
    )
    texts = []
    for ids in out[:, given["input_ids"].shape[1] :].tolist():
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        texts.append(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
    return texts
