"""A vision-language model around a text model's weights, built on the spot.

The same text weights are reached through three loaders (the text class, the base class, the wrapper);
this makes the third, so that `parity check` can show whether they give the same states.
"""

import json
import shutil
from pathlib import Path

from parity.errors import ParityError


def build_vision_wrapper(text_model: Path, out: Path) -> None:
    """Write a `Qwen3_5ForConditionalGeneration` with a two-layer vision tower and the text model's weights.

    The vision weights are seeded noise; text-only requests never reach them.

    Args:
        text_model: folder of the text model.
        out: folder to write; must not exist.

    Raises:
        ParityError: for a text model of another family.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = AutoConfig.from_pretrained(text_model)
    if text.model_type != "qwen3_5_text":
        raise ParityError(
            f"a vision-language wrapper of {text_model}",
            f"model type {text.model_type}",
            "this check knows qwen3_5_text",
        )
    config = Qwen3_5Config(
        text_config=text.to_dict(),
        tie_word_embeddings=text.tie_word_embeddings,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": text.hidden_size,
        },
    )
    # Vision weights as they are drawn, the text model's under the names that the wrapper gives them.
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(config)
    vision = {
        name: value.to(torch.bfloat16) for name, value in model.state_dict().items() if ".visual." in name
    }
    weights = {_inside(name): value for name, value in load_file(text_model / "model.safetensors").items()}
    out.mkdir(parents=True)
    save_file(
        {name: value.contiguous() for name, value in (vision | weights).items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    (out / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (text_model / file).is_file():
            shutil.copy(text_model / file, out / file)


def _inside(name: str) -> str:
    """Where a text model's weight lies in the wrapper: `model.X` becomes `model.language_model.X`."""
    return "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name
