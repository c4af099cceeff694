"""The embedded targets: a hybrid and a dense model of two million parameters, their tokenizer and template.

    find_embedded_target("hybrid")   # folder for from_pretrained, sha256 checked

Only the standard library is imported at the top; torch and transformers come in where they are used.
The weights are made by `python -m parity.model.tiny.train`.
"""

import hashlib
import json
import string
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parity.errors import ParityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

Name = Literal["hybrid", "dense"]

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|unk|>")
"""Control tokens, ids 0 to 4 in this order."""
THINK = ("<think>", "</think>")
"""Single tokens too, but text: decoding with skip_special_tokens keeps them, as Qwen's tokenizers do."""
ROLES = ("user", "assistant", "system")
CHARACTERS = "\n " + string.ascii_lowercase + string.digits + string.punctuation
"""Printable ASCII without capitals; anything else becomes <|unk|>."""
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *THINK, *ROLES, *CHARACTERS))}

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set reasoning = message.reasoning_content if message.reasoning_content else '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if reasoning %}
{{- '<think>' }}{% generation %}{{- reasoning + '</think>' + content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- '<think></think>' }}{% generation %}{{- content + '<|im_end|>' }}{% endgeneration %}
{%- endif %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>' }}
{%- if not enable_thinking %}{{- '</think>' }}{% endif %}
{%- endif %}
"""
"""ChatML with Qwen's empty think block for plain answers; thinking is off unless `enable_thinking` is true.

Earlier turns keep their thinking, because the training rows do. The generation marks take in what the
model itself writes: the work, </think>, the answer and <|im_end|>, but not the opening of the block.
"""

_SHARED: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": VOCABULARY["<|pad|>"],
    "bos_token_id": None,
    "eos_token_id": VOCABULARY["<|im_end|>"],
}


def tiny_config() -> "Qwen3_5TextConfig":
    """Describe the hybrid target: 12 layers, every fourth one full attention, the others gated delta rule.

    Twice as many value heads as key heads, as the large models have, so that head grouping is exercised.
    """
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        **_SHARED,
        num_hidden_layers=12,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        # The default quarter would leave 8 of 32 channels to tell positions apart.
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )


def dense_config() -> "Qwen3Config":
    """Describe the dense target, for readers that know no linear attention: six layers of the same width."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **_SHARED, num_hidden_layers=6, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}
    )


def tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer from nothing: one token a character, eos <|im_end|>, with the chat template set."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in (*THINK, *ROLES)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token="<|unk|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=_SHARED["max_position_embeddings"],
        padding_side="left",
    )
    made.chat_template = TEMPLATE
    return made


def data_root() -> Path:
    """Return the folder that holds the embedded models and sha256.json."""
    # joinpath, then str: the files of a package without __init__.py are a MultiplexedPath, not a path.
    return Path(str(resources.files("parity.model").joinpath("embedded")))


def resolve(model: str) -> str:
    """The name or folder that transformers loads: `embedded:NAME` is the folder of an embedded target.

    Raises ParityError where no embedded target is called that.
    """
    kind, colon, name = model.partition(":")
    return str(find_embedded_target(name)) if colon and kind == "embedded" else model  # type: ignore[arg-type]


def find_embedded_target(name: Name = "hybrid", *, root: Path | None = None) -> Path:
    """Return the folder of an embedded target after checking the sha256 of each of its files.

    `root` replaces the package's own data folder. Raises ParityError for an unknown name and for a file
    that is missing, changed or not listed.
    """
    root = data_root() if root is None else root
    asked = f"the embedded target {name!r} in {root}"
    listing = root / "sha256.json"
    if not listing.is_file():
        raise ParityError(asked, "no sha256.json there", "reinstall drafter-parity: its data is incomplete")
    expected: dict[str, dict[str, str]] = json.loads(listing.read_text())
    if name not in expected:
        raise ParityError(asked, f"only {', '.join(sorted(expected))}", "ask for one of those")
    folder = root / name
    wanted, found = expected[name], file_hashes(folder)
    wrong = sorted(file for file in wanted.keys() | found.keys() if wanted.get(file) != found.get(file))
    if wrong:
        raise ParityError(
            asked,
            f"sha256 differs from sha256.json for {', '.join(wrong)}",
            "reinstall drafter-parity, or run python -m parity.model.tiny.train to make new files and hashes",
        )
    return folder


def file_hashes(folder: Path) -> dict[str, str]:
    """Return file name -> sha256 for the plain files of `folder`; empty when there is no such folder."""
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
