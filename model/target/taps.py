"""The taps of a target: which places a capture can record, what each holds, and the hooks that record them.

`output_hidden_states` is not relied on, since what it means changed between versions of transformers: each state is
taken by a hook on the module that makes it. Operators inside a linear layer are module functions, which hooks do not
see: their outputs come from `parity.model.target.backends.CallRecorder`.

Legend: a tap is [tokens, width] for one request, `layer.3.out` the output of decoder layer 3 (counted from 0).
"""

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parity.errors import ParityError
from parity.model.target.load import Target
from parity.reports.words import shorten_list
from parity.tracing.trace import NormState, TapInfo

STATES = "states"
"""Stands for the residual stream: what enters layer 0, every layer's output, before and after the final norm."""
OPERATOR_TAPS = (".conv.out", ".gdn.out")


class TapMeaning(NamedTuple):
    """What a tap holds."""

    meaning: str
    layer: int | None
    norm: NormState
    hf_index: int | None
    """Its index in the hidden states that transformers returns; None where it is not among them."""


def tap_infos(target: Target) -> dict[str, TapMeaning]:
    """Name -> meaning of every tap that this target has, in the order computed."""
    last = len(target.layers)
    taps = {"embed.out": TapMeaning("what enters decoder layer 0", None, "none", 0)}
    for index in range(last):
        if index in target.linear:
            conv = "output of the short convolution, activation included"
            taps[f"layer.{index}.conv.out"] = TapMeaning(conv, index, "none", None)
            delta = "output of the gated delta rule, before its gated norm"
            taps[f"layer.{index}.gdn.out"] = TapMeaning(delta, index, "none", None)
        out = f"output of decoder layer {index}, residual included, before any final norm"
        # The last layer's output is not among transformers' hidden states: theirs is taken behind the norm.
        taps[f"layer.{index}.out"] = TapMeaning(out, index, "none", index + 1 if index + 1 < last else None)
    taps["final.prenorm"] = TapMeaning("what enters the final norm", None, "pre", None)
    after = "what the final norm returns; transformers' last hidden state"
    taps["final.postnorm"] = TapMeaning(after, None, "post", last)
    if target.head is not None:
        logits = "the model's own logits, scaling and soft cap included"
        taps["logits"] = TapMeaning(logits, None, "post", None)
    return taps


def select_taps(target: Target, wanted: Sequence[str] | None) -> list[str]:
    """The taps to record.

    Args:
        wanted: names, patterns such as `layer.*.out`, or `states`; None is all but the logits.

    Returns:
        Names in the order computed.

    Raises:
        ParityError: for a pattern that no tap of this target matches.
    """
    known = list(tap_infos(target))
    if wanted is None:
        return [name for name in known if name != "logits"]
    # A pattern that matches nothing is an error: a trace without that tap would be compared as if it were whole.
    chosen: set[str] = set()
    for pattern in wanted:
        if pattern == STATES:
            chosen.update(name for name in known if name != "logits" and not name.endswith(OPERATOR_TAPS))
            continue
        found = fnmatch.filter(known, pattern)
        if not found:
            raise ParityError(
                f"tap {pattern!r}",
                f"{target.spec.model} has layers 0 to {len(target.layers) - 1}"
                f" and taps such as {shorten_list(known)}",
                "name a tap of those, or a pattern such as layer.*.out",
            )
        chosen.update(found)
    return [name for name in known if name in chosen]


def describe_taps(target: Target, taps: Mapping[str, Tensor]) -> tuple[TapInfo, ...]:
    """Manifest entries of recorded taps ([tokens, width] each): dtype, width, layer, norm state and meaning."""
    infos = tap_infos(target)
    return tuple(
        TapInfo(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            width=int(tensor.shape[-1]),
            **infos[name]._asdict(),
        )
        for name, tensor in taps.items()
    )


class TapRecorder:
    """Hooks on the modules that make the states. Use as a context manager.

    Each state is cloned at once: a later in-place operation must not change what was recorded.
    """

    def __init__(self, target: Target, names: Sequence[str], *, rows: int | None = 1) -> None:
        """Prepare to record.

        Args:
            names: of the taps, as `select_taps` returns them.
            rows: how many of the batch's rows are kept; None keeps all.
        """
        self.target, self.rows, self.recording = target, rows, True
        self.parts: dict[str, list[Tensor]] = {name: [] for name in names}
        self.sizes: list[int] = []
        """How many tokens each step computed."""
        self._stack = ExitStack()

    def __enter__(self) -> "TapRecorder":
        target = self.target
        with ExitStack() as stack:

            def record_input(module: nn.Module, name: str) -> None:
                def keep(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                    self._keep(name, args[0] if args else kwargs["hidden_states"])

                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)

            def record_output(module: nn.Module, name: str) -> None:
                def keep(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> None:
                    self._keep(name, out[0] if isinstance(out, tuple) else out)

                stack.callback(module.register_forward_hook(keep).remove)

            record_input(target.layers[0], "embed.out")
            for index, layer in enumerate(target.layers):
                record_output(layer, f"layer.{index}.out")
            record_input(target.norm, "final.prenorm")
            record_output(target.norm, "final.postnorm")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _keep(self, name: str, value: Tensor) -> None:
        """Keep the first rows of a [rows, tokens, width] state on the CPU, in memory of their own."""
        if name in self.parts and self.recording:
            kept = value[: self.rows].detach()
            self.parts[name].append(torch.empty(kept.shape, dtype=kept.dtype).copy_(kept))

    def operator(self, layer: int, operator: str, output: Tensor) -> None:
        """Record `conv.out` ([rows, channels, tokens]) or `gdn.out` ([rows, tokens, heads, width])."""
        if operator == "conv":
            self._keep(f"layer.{layer}.conv.out", output.transpose(1, 2))
        else:
            self._keep(f"layer.{layer}.gdn.out", output.flatten(2))

    def run(self, **inputs: object) -> None:
        """Run the model once on these inputs, and record its logits where they are wanted."""
        output = self.target.model(**inputs)
        if "logits" in self.parts:
            self._keep("logits", output.logits)

    def result(self) -> dict[str, Tensor]:
        """[rows, tokens, width] of each tap, steps joined.

        A convolution with a cache returns earlier tokens too; the new ones count.
        """
        joined = {}
        for name, parts in self.parts.items():
            if parts:
                new = [part[:, -size:] for part, size in zip(parts, self.sizes, strict=True)]
                joined[name] = new[0] if len(new) == 1 else torch.cat(new, 1)  # one step needs no copy
        return joined
