"""Faults of inference in the built-in trainer: its drafting, its cache, its draft-verify loop."""

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from parity.model.dflash.config import RopeConfig
from parity.model.dflash.drafter import ContextCache, Drafter, Rope
from parity.model.dflash.mask import VisibilityRule
from parity.model.drafting import decode
from parity.model.tiny import embedded
from parity.probes.adapters.builtin import Builtin
from tests.faults.wiring import InjectedFault, builtin

Change = Callable[[Builtin], None]


def _drafting(change: Callable[..., tuple[Tensor, Tensor]]) -> Change:
    """Another block at inference: `change(embeddings [A, B, D], position [A])`."""

    def inject(adapter: Builtin) -> None:
        drafter: Any = adapter.trainer.drafter
        right = drafter.draft

        def draft(cache: ContextCache, embeddings: Tensor, position: Tensor, document: Tensor) -> Tensor:
            embeddings, position = change(embeddings, position)
            made: Tensor = right(cache, embeddings, position, document)
            return made

        drafter.draft = draft

    return inject


def _caching(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Change:
    """Other states in the cache: `change(states [n, C * D], position [n], document [n])`."""

    def inject(adapter: Builtin) -> None:
        drafter: Any = adapter.trainer.drafter
        right = drafter.extend

        def extend(cache: ContextCache, states: Tensor, position: Tensor, document: Tensor) -> None:
            right(cache, *change(states, position, document))

        drafter.extend = extend

    return inject


def _differing(**attributes: Callable[[Drafter], Any]) -> Change:
    """Other attributes of the drafter while it drafts and while it fills its cache."""

    def inject(adapter: Builtin) -> None:
        drafter: Any = adapter.trainer.drafter

        @contextmanager
        def inference() -> Any:
            before = {name: getattr(drafter, name) for name in attributes}
            for name, make in attributes.items():
                setattr(drafter, name, make(drafter))
            try:
                yield
            finally:
                for name, value in before.items():
                    setattr(drafter, name, value)

        for method in ("draft", "extend"):
            right = getattr(drafter, method)

            def changed(*args: Any, right: Any = right, **options: Any) -> Any:
                with inference():
                    return right(*args, **options)

            setattr(drafter, method, changed)

    return inject


def _rules(change: Callable[[int, VisibilityRule], VisibilityRule]) -> Change:
    def layers(drafter: Drafter) -> Any:
        made = tuple(change(index, rule) for index, rule in enumerate(drafter.config.layers))
        return replace(drafter.config, layers=made)

    return _differing(config=layers)


def _rope(rope: RopeConfig) -> Change:
    return _differing(rope=lambda drafter: Rope(rope, drafter.config.head_dim))


def _scaled(embeddings: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return embeddings * math.sqrt(embeddings.shape[-1]), position


def _filled_with(token: int) -> Change:
    def inject(adapter: Builtin) -> None:
        def change(embeddings: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            made = embeddings.clone()
            made[:, 1:] = adapter.trainer.parts.embed[token].to(made)
            return made, position

        _drafting(change)(adapter)

    return inject


def _reversed_slices(states: Tensor, position: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return states.unflatten(1, (3, -1)).flip(1).flatten(1), position, document


def _shifted_slices(states: Tensor, position: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return states.unflatten(1, (3, -1)).roll(1, 1).flatten(1), position, document


def _short_table(states: Tensor, position: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions end at 300, as a table of angles does."""
    return states, position.clamp(max=300), document


def _tied_in_training(adapter: Builtin) -> None:
    """The step's head is the embedding, inference has the target's own."""
    adapter.trainer.wiring.head = adapter.trainer.parts.embed.detach().clone()


def _head_off(adapter: Builtin) -> None:
    adapter.trainer.wiring.head = adapter.trainer.parts.head.detach().roll(1, 0)


def _head_scaled(adapter: Builtin) -> None:
    adapter.trainer.wiring.head = adapter.trainer.parts.head.detach() * 0.5


def _capped(adapter: Builtin) -> None:
    """Inference caps its hidden states, training does not."""
    drafter: Any = adapter.trainer.drafter
    right = drafter.draft
    drafter.draft = lambda *args, **options: 3 * torch.tanh(right(*args, **options) / 3)


@cache
def hybrid_folder() -> Path:
    """A small random hybrid target with the embedded one's tokenizer, saved once a process."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    folder = Path(tempfile.mkdtemp(prefix="parity-hybrid-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(7)
    config = Qwen3_5TextConfig(
        vocab_size=len(embedded.VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, 1)
    model.save_pretrained(folder)
    embedded.tokenizer().save_pretrained(folder)
    return folder


def hybrid() -> dict[str, Any]:
    """Changes that put the unit preset on it; its rope turns all of a head, as every reader does."""
    return {
        "recipe.target.model": str(hybrid_folder()),
        "recipe.conditioning.layers": [0, 1, 2],
        "run.drafter.partial_rotary_factor": 1.0,
    }


def _crops(adapter: Builtin) -> None:
    """Caches are cropped after a rejection, as transformers' own `crop` does."""
    adapter.decoding = replace(adapter.decoding, rollback="crop")


class AcceptsOneMore(Builtin):
    """The loop takes one draft more than the target agreed with."""

    def generate(self, prompt: Sequence[int], new_tokens: int) -> tuple[Sequence[int], Sequence[int]]:
        right = decode.accept_greedy

        def changed(drafts: Tensor, logits: Tensor) -> tuple[int, int]:
            matched, bonus = right(drafts, logits)
            return min(matched + 1, len(drafts)), bonus

        with patch.object(decode, "accept_greedy", changed):
            return super().generate(prompt, new_tokens)


def _accepts_more(adapter: Builtin) -> None:
    adapter.__class__ = AcceptsOneMore


ALL_SLIDE = {"recipe.attention": {"layers": ["sliding", "sliding"], "window": 6}}
BF16 = {"run.precision.autocast": "bfloat16", "recipe.target.dtype": "bfloat16"}
NONE: dict[str, Any] = {}


def _fault(
    name: str, deviation: str, then: Change, changes: dict[str, Any] | Callable[[], Any] = NONE
) -> InjectedFault:
    def build() -> Builtin:
        return builtin(changes() if callable(changes) else changes, then=then)

    return InjectedFault(name=name, trainer="builtin", deviation=deviation, probe="decode", build=build)


FAULTS = (
    _fault("drafted one position too high", "decode-positions", _drafting(lambda e, p: (e, p + 1))),
    _fault("drafted one position too low", "decode-positions", _drafting(lambda e, p: (e, p - 1))),
    _fault("rope base 1e6 at inference", "decode-rope", _rope(RopeConfig(rope_theta=1e6))),
    _fault(
        "half of each head turns at inference", "decode-rope", _rope(RopeConfig(partial_rotary_factor=0.5))
    ),
    _fault(
        "drafted one position too high, bfloat16",
        "decode-positions",
        _drafting(lambda e, p: (e, p + 1)),
        BF16,
    ),
    _fault(
        "last state cropped, bfloat16",
        "decode-context",
        _caching(lambda s, p, d: (s[:-1], p[:-1], d[:-1])),
        BF16,
    ),
    _fault("last state cropped", "decode-context", _caching(lambda s, p, d: (s[:-1], p[:-1], d[:-1]))),
    _fault("last three states cropped", "decode-context", _caching(lambda s, p, d: (s[:-3], p[:-3], d[:-3]))),
    _fault("first state not cached", "decode-context", _caching(lambda s, p, d: (s[1:], p[1:], d[1:]))),
    _fault(
        "causal at inference",
        "decode-within",
        _rules(lambda index, rule: replace(rule, causal=True)),
    ),
    _fault(
        "one layer causal at inference",
        "decode-within",
        _rules(lambda index, rule: replace(rule, causal=index == 0)),
    ),
    _fault(
        "no window at inference",
        "decode-window",
        _rules(lambda index, rule: replace(rule, window=None)),
        ALL_SLIDE,
    ),
    _fault(
        "window of 7 for 6 at inference",
        "decode-window",
        _rules(lambda index, rule: replace(rule, window=7)),
        ALL_SLIDE,
    ),
    _fault("slices in reverse at inference", "decode-slices", _caching(_reversed_slices)),
    _fault("slices rolled at inference", "decode-slices", _caching(_shifted_slices)),
    _fault("embeddings times sqrt(D) at inference", "decode-embedding", _drafting(_scaled)),
    _fault("token 0 fills the slots at inference", "decode-mask-token", _filled_with(0)),
    _fault("trained with a tied head, served with the target's", "decode-head", _tied_in_training),
    _fault("head's rows one off", "decode-head", _head_off),
    _fault("logits doubled at inference", "decode-head", _head_scaled),
    _fault("angles end at position 300", "decode-long", _caching(_short_table)),
    _fault("hidden states capped at inference", "decode-not-recognised", _capped),
    _fault("recurrent states cropped", "recurrent-state", _crops, hybrid),
    _fault("one draft too many accepted", "verification", _accepts_more),
)
