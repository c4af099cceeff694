"""The target in the middle of a text: it is fed tokens, and can take back those that were refused.

    session = open_session(target, layers=(1, 4, 7), rollback="restore")
    logits, states = session.feed(ids)
    session.keep(2)                                # the text now ends after the second of them

After a rejection the target must forget the refused tokens. Keys and values can be cropped; the recurrent and
convolution states of a linear-attention layer cannot: they are copied before each block, put back, and the
accepted tokens are computed again. `rollback="crop"` crops only, as transformers' own `Cache.crop` and z-lab's
loop do (huggingface/transformers#49036): the planted fault `cache-crop`, for probes.

Shapes: n tokens fed at once, C conditioning layers, D width of the target, V its vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.target.load import Target

Rollback = Literal["restore", "crop"]
"""How a target forgets refused tokens: restore puts the states before them back, crop only shortens its cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EmbeddingAndHead:
    """The two ends of the target that a drafter shares, frozen."""

    embed: Tensor
    """[V, D] raw rows: a factor that the target's embedding module applies is left out, as z-lab does."""
    head: Tensor
    """[V, D]."""

    @classmethod
    def of(cls, target: Target) -> "EmbeddingAndHead":
        """Those of a loaded target. Raises ParityError where it has no head, or one with a bias."""
        if target.head is None or getattr(target.head, "bias", None) is not None:
            found = "no head" if target.head is None else "a head with a bias, which no DFlash reader applies"
            do = "load it with AutoModelForCausalLM"
            raise ParityError(f"the embedding and head of {target.spec.model}", found, do)
        embed, head = target.embed.weight, target.head.weight
        assert isinstance(embed, Tensor) and isinstance(head, Tensor)
        return cls(embed=embed.detach(), head=head.detach())


class DecodingSession(Protocol):
    """A target in the middle of a text. Every `feed` is followed by one `keep`."""

    def feed(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """Compute ids [n] after what is kept: logits [n, V] and conditioning states [n, C * D].

        last_only: logits of the last token alone, [1, V], where the model can.
        """

    def keep(self, count: int) -> None:
        """Keep the first `count` of the tokens fed last; the state is then as if no others had been fed."""


class TextModel(Protocol):
    """A target that is no model of transformers (the stand-in of `parity.model.training.states`)."""

    @property
    def ends(self) -> EmbeddingAndHead: ...

    def session(self, layers: Sequence[int], rollback: Rollback) -> DecodingSession: ...


def open_session(target: "Target | TextModel", layers: Sequence[int], rollback: Rollback) -> DecodingSession:
    """A new text of the target.

    Args:
        target: the model that verifies drafts.
        layers: conditioning layers, 0-based decoder layers, in the order in which their states are concatenated.
        rollback: how tokens are taken back; see `Rollback`.
    """
    if isinstance(target, Target):
        return TargetSession(target, layers, rollback)
    return target.session(layers, rollback)


def find_ends(target: "Target | TextModel") -> EmbeddingAndHead:
    """The target's embedding and head. Raises ParityError where it has no head, or one with a bias."""
    return EmbeddingAndHead.of(target) if isinstance(target, Target) else target.ends


class TargetSession:
    """A target with its cache, fed tokens; gives logits and conditioning states, and can take tokens back.

    States are taken by hooks on the decoder layers.
    """

    def __init__(self, target: Target, layers: Sequence[int], rollback: Rollback = "restore") -> None:
        from transformers import DynamicCache

        wrong = [layer for layer in layers if not 0 <= layer < len(target.layers)]
        if wrong or not layers:
            found = f"layers {list(layers)} of a target with layers 0 to {len(target.layers) - 1}"
            raise ParityError("conditioning states", found, "give 0-based decoder layers")
        self.target, self.layers = target, tuple(layers)
        self.cache: Any = DynamicCache(config=target.config)
        accepted = inspect.signature(type(target.model).forward).parameters
        self._options = {"cache" if "cache" in accepted else "past_key_values": self.cache}
        self._limits = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        recurrent = any(hasattr(layer, "recurrent_states") for layer in self.cache.layers)
        sliding = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)
        self._records = (not recurrent or rollback == "crop") and hasattr(
            self.cache, "activate_past_recording"
        )
        if self._records:  # windows and convolutions then keep what a later crop needs
            self.cache.activate_past_recording()
        self._restores = not self._records and (recurrent or sliding)
        self._fed = torch.empty(0, dtype=torch.long)
        self._before: list[dict[str, Any]] = []

    def feed(self, ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """As `DecodingSession.feed`."""
        self._fed = ids
        if self._restores:
            self._before = [_snapshot(layer) for layer in self.cache.layers]
        return self._forward(ids, self._limits if last_only else {})

    def keep(self, count: int) -> None:
        """As `DecodingSession.keep`."""
        refused = len(self._fed) - count
        if self._records or (refused and not self._restores):
            self.cache.crop(-refused)
        elif refused:
            for layer, before in zip(self.cache.layers, self._before, strict=True):
                vars(layer).update(before)
            if count:
                self._forward(self._fed[:count], self._limits)
        self._before = []

    @torch.no_grad()
    def _forward(self, ids: Tensor, limits: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        seen: dict[int, Tensor] = {}
        with ExitStack() as stack:
            for layer in set(self.layers):
                hook = _keep_output(seen, layer)
                stack.callback(self.target.layers[layer].register_forward_hook(hook).remove)
            out = self.target.model(input_ids=ids[None], use_cache=True, **self._options, **limits)
        return out.logits[0], torch.cat([seen[layer] for layer in self.layers], dim=-1)


def _keep_output(seen: dict[int, Tensor], layer: int) -> Any:
    def hook(_: nn.Module, args: Any, out: Any) -> None:
        seen[layer] = (out[0] if isinstance(out, tuple) else out)[0].detach()

    return hook


def _snapshot(layer: Any) -> dict[str, Any]:
    """A cache layer's attributes. Recurrent and convolution states are overwritten in place, so they are copied;
    keys and values are replaced by longer tensors, so a reference is enough."""
    copied = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            value = {key: x.clone() if isinstance(x, Tensor) else x for key, x in value.items()}
        copied[name] = value
    return copied
