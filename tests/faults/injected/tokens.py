"""Faults of tokenizer and template, in the data of the built-in trainer or at its server."""

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parity.model.tiny import embedded
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import InjectedFault, builtin

Change = Callable[[Builtin], None]
EMPTY = "{{- '<think></think>' }}{% generation %}{{- content + '<|im_end|>' }}{% endgeneration %}"
"""A plain answer in the embedded template."""
DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nbe helpful.<|im_end|>\\n' }}{%- endif %}"
)


def _template(old: str, new: str, *, server: bool = False) -> Change:
    """The data's template, or the server's, with one piece replaced."""

    def inject(adapter: Builtin) -> None:
        tokenizer = embedded.tokenizer()
        assert tokenizer.chat_template is not None and old in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
        if server:
            adapter.served = tokenizer
        else:
            adapter.tokenizer = tokenizer

    return inject


def _before(text: str, *, both: str = "") -> Change:
    """Text in front of every conversation in the data's template; `both` at the server too."""

    def inject(adapter: Builtin) -> None:
        adapter.tokenizer, adapter.served = embedded.tokenizer(), embedded.tokenizer()
        adapter.tokenizer.chat_template = text + embedded.TEMPLATE
        adapter.served.chat_template = both + embedded.TEMPLATE

    return inject


def _cut(adapter: Builtin) -> None:
    """A tokenizer that does not know its control tokens."""
    backend = Tokenizer(models.WordLevel(embedded.VOCABULARY, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<|unk|>")
    made.chat_template = embedded.TEMPLATE
    adapter.tokenizer = made


def _normalised(adapter: Builtin) -> None:
    """Unicode is brought into another form before it is cut."""
    made: Any = embedded.tokenizer()
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    adapter.tokenizer = made


def _fault(name: str, deviation: str, then: Change) -> InjectedFault:
    return InjectedFault(
        name=name,
        trainer="builtin",
        deviation=deviation,
        probe="tokens",
        build=lambda: builtin(then=then),
    )


FIRST = "{{- '<|pad|>' }}"
THINK_TRAINED = "{% generation %}{{- '<think></think>' + content + '<|im_end|>' }}{% endgeneration %}"
END_NOT_TRAINED = (
    "{{- '<think></think>' }}{% generation %}{{- content }}{% endgeneration %}{{- '<|im_end|>' }}"
)
FAULTS = (
    _fault("a first token in training only", "tokens-bos", _before(FIRST)),
    _fault("the first token twice in training", "tokens-bos", _before(FIRST + FIRST, both=FIRST)),
    _fault("control tokens cut into characters", "tokens-cut", _cut),
    _fault(
        "no think block in training",
        "tokens-thinking",
        _template(EMPTY, EMPTY.replace("<think></think>", "")),
    ),
    _fault(
        "the server thinks unless it is told not to",
        "tokens-thinking",
        _template("{%- if not enable_thinking %}", "{%- if enable_thinking is false %}", server=True),
    ),
    _fault("a default system message in training", "tokens-template", _before(DEFAULT_SYSTEM)),
    _fault(
        "no newline between turns",
        "tokens-template",
        _template("{{- '\\n' }}\n{%- endfor %}", "{%- endfor %}"),
    ),
    _fault(
        "spaces stripped in training",
        "tokens-text",
        _template("{{- message.content + '<|im_end|>' }}", "{{- message.content | trim + '<|im_end|>' }}"),
    ),
    _fault("unicode normalised in training", "tokens-text", _normalised),
    _fault(
        "the think block is trained on",
        "tokens-mask",
        _template(EMPTY, THINK_TRAINED),
    ),
    _fault(
        "the user's text is trained on",
        "tokens-mask",
        _template(
            "{{- message.content + '<|im_end|>' }}",
            "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}",
        ),
    ),
    _fault(
        "the newline behind the turn is trained on",
        "tokens-mask",
        _template(
            "{{- content + '<|im_end|>' }}{% endgeneration %}\n{%- endif %}\n{%- else %}",
            "{{- content + '<|im_end|>\\n' }}{% endgeneration %}\n{%- endif %}\n{%- else %}",
        ),
    ),
    _fault(
        "the end of the turn is not trained on",
        "tokens-end",
        _template(EMPTY, END_NOT_TRAINED),
    ),
)
