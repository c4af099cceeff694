"""Token ids of prompts, by the model's own tokenizer and chat template, with where each id came from."""

from collections.abc import Sequence

from parity.errors import ParityError
from parity.model.target.chat import ChatTokenizer
from parity.model.target.spec import Prompt, source
from parity.tracing.trace import RequestEntry, TokenOrigin


def entries(
    model: str, revision: str | None, prompts: Sequence[Prompt], max_tokens: int | None
) -> list[RequestEntry]:
    """One entry a prompt: its token ids, their origin, and each token's text.

    Args:
        model: name or path of the model, with its `revision` on the hub.
        max_tokens: keep this many tokens of each prompt; None keeps all.

    Raises:
        ParityError: for a prompt that is empty, longer than the model allows, holds ids outside its vocabulary, or
            needs a tokenizer or chat template that the model lacks.
    """
    limit, vocabulary = _limits(model, revision)
    tokenizer = _tokenizer(model, revision)
    result = []
    for prompt in prompts:
        ids, prompt_tokens, origin = _ids(tokenizer, model, prompt)
        ids = ids[:max_tokens] if max_tokens else ids
        if not ids:
            raise ParityError(f"request {prompt.id!r}", "no tokens", "give a prompt that is not empty")
        if limit is not None and len(ids) > limit:
            raise ParityError(
                f"request {prompt.id!r} of {len(ids)} tokens",
                f"{model} allows {limit}",
                "shorten the prompt",
            )
        # Ids of another tokenizer would index past the embedding.
        outside = [token for token in ids if token >= vocabulary]
        if outside:
            raise ParityError(
                f"request {prompt.id!r}",
                f"token id {outside[0]}, the vocabulary has {vocabulary}",
                "use this model's tokenizer",
            )
        texts = (
            tuple(tokenizer.decode([token]) for token in ids)
            if tokenizer
            else tuple(str(token) for token in ids)
        )
        result.append(
            RequestEntry(
                id=prompt.id,
                token_ids=tuple(ids),
                origin=origin,
                token_texts=texts,
                prompt_tokens=min(prompt_tokens, len(ids)),
                notes=tuple(prompt.notes),
            )
        )
    return result


def _limits(model: str, revision: str | None) -> tuple[int | None, int]:
    """(longest input, size of the vocabulary)."""
    from transformers import AutoConfig

    name, options = source(model)
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, **options).get_text_config()
    except (OSError, ValueError) as error:
        raise ParityError(
            f"model {model}", str(error).strip().splitlines()[0], "check the name or path"
        ) from error
    return getattr(config, "max_position_embeddings", None), int(config.vocab_size)


def _tokenizer(model: str, revision: str | None) -> ChatTokenizer | None:
    """The tokenizer, or None where the model has none (then prompts must be given as ids)."""
    from transformers import AutoTokenizer

    name, options = source(model)
    try:
        tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(name, revision=revision, **options)
    except (OSError, ValueError, KeyError):
        return None
    # A folder without tokenizer files gives an empty one of the model's family, which maps any text to nothing.
    return tokenizer if tokenizer.vocab_size > 1 else None


def _ids(tokenizer: ChatTokenizer | None, model: str, prompt: Prompt) -> tuple[list[int], int, TokenOrigin]:
    """(ids, how many of them are the prompt, origin)."""
    origin: TokenOrigin
    if prompt.token_ids is not None:
        start, origin = list(prompt.token_ids), "given"
    else:
        if tokenizer is None:
            raise ParityError(
                f"request {prompt.id!r} as text", f"{model} has no tokenizer", "give token_ids instead"
            )
        start, origin = _prompt_ids(tokenizer, model, prompt), "tokenizer"
    if prompt.completion_ids is not None:
        start = list(prompt.prompt_ids) if prompt.prompt_ids is not None else start
        return [*start, *prompt.completion_ids], len(start), "server"
    if prompt.completion:
        if tokenizer is None:
            raise ParityError(
                f"request {prompt.id!r} with a completion",
                f"{model} has no tokenizer",
                "give token_ids with the completion included",
            )
        more = tokenizer(prompt.completion, add_special_tokens=False)["input_ids"]
        return [*start, *more], len(start), "retokenised"
    return start, len(start), origin


def _prompt_ids(tokenizer: ChatTokenizer, model: str, prompt: Prompt) -> list[int]:
    if prompt.messages is None:
        return list(tokenizer(prompt.text)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ParityError(
            f"request {prompt.id!r} as chat messages",
            f"{model} has no chat template",
            "give a plain prompt instead",
        )
    options = {} if prompt.thinking is None else {"enable_thinking": prompt.thinking}
    # The last turn decides: a conversation that ends with the assistant is whole, any other is a question.
    asks = prompt.messages[-1].get("role") != "assistant"
    encoded = tokenizer.apply_chat_template(
        list(prompt.messages), add_generation_prompt=asks, tokenize=True, return_dict=True, **options
    )
    return list(encoded["input_ids"])
