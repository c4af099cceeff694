"""`golden`: the model's own forward in true fp64, and the two linear-attention operators as plain recurrences.

`model.double()` is not enough: norms, rotary embedding, softmax and the delta rule's fallback cast to
float32 inside. `promote_to_float64()` is a TorchFunctionMode under which `.float()`, `.to(float32)` and every
float16, bfloat16 or float32 dtype argument become float64. That nothing slipped through is proven, not
hoped for: `Float64Promotion.lower` counts the floating tensors of lower precision that were made.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

LOW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {torch.Tensor.float: 0, torch.Tensor.half: 0, torch.Tensor.bfloat16: 0}


@dataclass
class Float64Promotion:
    """What happened during one promoted forward."""

    promoted: int = 0
    """How many dtype arguments or casts were turned into float64."""
    lower: list[str] = field(default_factory=list)
    """Operators that made a floating tensor of lower precision. Must be empty for a golden result."""
    watching: bool = True
    """False while weights are being widened: they are stored in lower precision, and that is no fault."""


class _Promote(TorchFunctionMode):
    """Turns requests for a lower floating dtype into float64."""

    def __init__(self, record: Float64Promotion) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _CASTS:
            self.record.promoted += 1
            return args[0].double()
        return func(
            *(self._raise(arg) for arg in args),
            **{key: self._raise(value) for key, value in (kwargs or {}).items()},
        )

    def _raise(self, value: object) -> object:
        if isinstance(value, torch.dtype) and value in LOW:
            self.record.promoted += 1
            return torch.float64
        return value


class _LowerDtypeCounter(TorchDispatchMode):
    """Counts floating tensors below float64 that any operator makes while the promotion is on."""

    def __init__(self, record: Float64Promotion) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if self.record.watching and isinstance(value, Tensor) and value.dtype in LOW:
                self.record.lower.append(str(func))
        return result


@contextmanager
def promote_to_float64(record: Float64Promotion) -> Iterator[Float64Promotion]:
    """Run a model of float64 weights in true fp64; yields the record to check afterwards."""
    with _Promote(record), _LowerDtypeCounter(record):
        yield record


@contextmanager
def hold_layers_in_float64(
    model: nn.Module, parts: Sequence[nn.Module], promotion: Float64Promotion
) -> Iterator[None]:
    """Hold the weights of one part of a model at a time in float64, while that part runs.

    A golden pass of a large model then needs the memory of one decoder layer more, not eight bytes for each weight.

    Args:
        parts: decoder layers, norm, embedding and head; what is in none of them is in float64 throughout.
        promotion: the record of the promoted forward, which does not count the widening itself.
    """
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(_widened_while_running(part, promotion))
        others = {id(tensor) for part in parts for tensor in [*part.parameters(), *part.buffers()]}
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in others and tensor.is_floating_point():
                stack.callback(setattr, tensor, "data", tensor.data)
                tensor.data = tensor.data.double()
        yield


@contextmanager
def _widened_while_running(part: nn.Module, promotion: Float64Promotion) -> Iterator[None]:
    """Hooks that widen the weights of one part before its forward and restore them behind it."""
    kept: list[tuple[Tensor, Tensor]] = []

    def widen(module: nn.Module, *_: object) -> None:
        promotion.watching = False
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                kept.append((tensor, tensor.data))
                tensor.data = tensor.data.double()
        promotion.watching = True

    def restore(*_: object) -> None:
        promotion.watching = False
        while kept:
            tensor, data = kept.pop()
            tensor.data = data
        promotion.watching = True

    hooks = part.register_forward_pre_hook(widen), part.register_forward_hook(restore, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    eps: float = 1e-6,
    normalise: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule as a recurrence over tokens, in float64.

    Gated DeltaNet, arXiv 2412.06464, equation 10: S <- exp(g) S; S <- S + k beta (v - k S)^T;
    o = q S / sqrt(key width). Key heads are repeated to the value heads.

    Args:
        q, k: [rows, tokens, key heads, key width].
        v: [rows, tokens, heads, width].
        g: [rows, tokens, heads] log decay.
        beta: [rows, tokens, heads].
        initial_state: [rows, heads, key width, width]; None is zero.
        eps, normalise: q and k are normalised as x / sqrt(sum x^2 + eps), fla's convention.

    Returns:
        ([rows, tokens, heads, width], final state).
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if normalise:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    # Heads side by side, then one token after the other.
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, dim=2) for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    rows, tokens, heads, width = v.shape
    state = v.new_zeros(rows, heads, k.shape[-1], width) if initial_state is None else initial_state.double()
    outputs = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        correction = v[:, t] - torch.einsum("rhk,rhkv->rhv", k[:, t], state)
        state = state + torch.einsum("rhk,rhv->rhkv", k[:, t] * beta[:, t, :, None], correction)
        outputs.append(torch.einsum("rhk,rhkv->rhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Depthwise causal convolution over tokens, in float64, as a sum of shifted products.

    out[t] = sum_j weight[j] x[t - taps + 1 + j], then the bias, then the activation.

    Args:
        x: [rows, channels, tokens].
        weight: [channels, taps].
        bias: [channels].
        activation: `silu` or `swish`, which are the same; None for none. Raises ValueError for another.
    """
    x, weight = x.double(), weight.double()
    taps, tokens = weight.shape[-1], x.shape[-1]
    padded = torch.nn.functional.pad(x, (taps - 1, 0))
    out = sum((weight[:, j, None] * padded[..., j : j + tokens] for j in range(taps)), torch.zeros_like(x))
    if bias is not None:
        out = out + bias.double()[:, None]
    if activation in ("silu", "swish"):
        return out * torch.sigmoid(out)
    if activation is not None:
        raise ValueError(f"no fp64 form of activation {activation!r}")
    return out


def delta_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule` with the signature under which modeling files call the operator."""
    out, state = delta_rule(query, key, value, g, beta, initial_state, normalise=use_qk_l2norm_in_kernel)
    return out, state if output_final_state else None


def conv_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: object
) -> Tensor:
    """`causal_conv` with the signature under which modeling files call the operator."""
    return causal_conv(x, weight, bias, activation)


def conv_update(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Tokens [rows, channels, tokens] after `state` [rows, channels, taps - 1 or taps], updated in place."""
    joined = torch.cat([state.double(), x.double()], dim=-1)
    state.copy_(joined[..., -state.shape[-1] :])
    return causal_conv(joined, weight, bias, activation)[..., -x.shape[-1] :]
