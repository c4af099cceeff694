"""Independent formulas that a running model's parts are compared with: each part from its own inputs.

What a part received is what the formula receives, so that the answer is about that part alone. All in
float64, from the papers' and the configuration's definitions, never from the code under test.

Shapes: R rows of a batch, S tokens, H heads, W width of a head, D channels.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity.comparison.error import tensor_errors
from parity.model.target import golden
from parity.model.target.backends import OperatorCall
from parity.model.target.load import Target

Rounding = Callable[[Tensor], Tensor]
"""Rounds a tensor as some precision does; gives float64."""
EXPLAINS = 0.2
"""A policy explains a difference where it leaves less than this share of it."""


@dataclass(frozen=True, slots=True)
class FormulaError:
    """How far one part is from its formula."""

    part: str
    layer: int
    error: float
    """Relative L2 of the worst token."""
    onset: int
    """First token beyond the limit, or -1."""
    explained_by: str = ""
    """The policy or precision under which the formula gives what the part gave; empty where none does."""
    kind: str = ""
    """The kind of fault that it is then, where the explanation says one."""


def _compare_with_formula(
    part: str, layer: int, mine: Tensor, right: Tensor, limit: float
) -> FormulaError | None:
    """The difference of [S, ...] `mine` from the formula's `right`; None within the limit."""
    errors = tensor_errors(mine, right, strict=True, floored=True)
    worst = float(errors.max(initial=0.0))
    return FormulaError(part, layer, worst, int((errors > limit).argmax())) if not worst <= limit else None


def _explain(mine: Tensor, right: Tensor, variants: Mapping[str, Callable[[], Tensor]]) -> str:
    """The variant of the formula that leaves the least of the difference, where that is little; or empty."""
    whole = float((mine.double() - right).norm())
    rest = {name: float((mine.double() - make().to(mine.device)).norm()) for name, make in variants.items()}
    best = min(rest, key=lambda name: rest[name])
    return best if whole and rest[best] < EXPLAINS * whole else ""


def _l2(x: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _low(dtype: torch.dtype) -> Rounding:
    return lambda x: x.to(dtype).double()


def _delta(
    call: OperatorCall,
    *,
    eps: float | None = None,
    normalise: bool = True,
    **changed: Rounding,
) -> Tensor:
    """The recurrence on a call's inputs, some of them changed; [S, H, W] of the first row."""
    given = dict(call.inputs)
    names = {"q": "query", "k": "key", "v": "value"}
    parts = {short: given[long] for short, long in names.items()} | {"g": given["g"], "beta": given["beta"]}
    for key, function in changed.items():
        parts[key] = function(parts[key])
    norm = bool(call.options.get("use_qk_l2norm_in_kernel", False))
    if norm and normalise and eps is not None:
        parts["q"], parts["k"], norm = _l2(parts["q"], eps), _l2(parts["k"], eps), False
    q, k, v, g, beta = (parts[key] for key in ("q", "k", "v", "g", "beta"))
    out, _ = golden.delta_rule(
        q, k, v, g, beta, initial_state=given.get("initial_state"), normalise=norm and normalise
    )
    return out[0]


def _rounded_state(call: OperatorCall, dtype: torch.dtype, chunk: int = 64) -> Tensor:
    """The recurrence with its state rounded between chunks."""
    given, state, parts = call.inputs, call.inputs.get("initial_state"), []
    for start in range(0, given["query"].shape[1], chunk):
        names = ("query", "key", "value", "g", "beta")
        q, k, v, g, beta = (given[key][:, start : start + chunk] for key in names)
        out, state = golden.delta_rule(
            q, k, v, g, beta, initial_state=state, normalise=bool(call.options.get("use_qk_l2norm_in_kernel"))
        )
        state = state.to(dtype).double()
        parts.append(out)
    return torch.cat(parts, 1)[0]


POLICIES: dict[str, Callable[[OperatorCall], Tensor]] = {
    "queries and keys not normalised": lambda call: _delta(call, normalise=False),
    "l2 epsilon of the mean instead of the sum": lambda call: _delta(
        call, eps=1e-6 * call.inputs["key"].shape[-1]
    ),
    "l2 epsilon 1e-5": lambda call: _delta(call, eps=1e-5),
    "l2 epsilon 1e-3": lambda call: _delta(call, eps=1e-3),
    "l2 without epsilon": lambda call: _delta(call, eps=0.0),
    "gate in bfloat16": lambda call: _delta(call, g=_low(torch.bfloat16)),
    "beta in bfloat16": lambda call: _delta(call, beta=_low(torch.bfloat16)),
    "inputs in bfloat16": lambda call: _delta(
        call, q=_low(torch.bfloat16), k=_low(torch.bfloat16), v=_low(torch.bfloat16)
    ),
    "state in bfloat16 between chunks": lambda call: _rounded_state(call, torch.bfloat16),
    "state in float16 between chunks": lambda call: _rounded_state(call, torch.float16),
}
"""Numeric policies seen in public reports (facts about backends, kind NUMERIC), as formulas."""


def operator_formulas(
    calls: Sequence[OperatorCall], limit: Callable[[OperatorCall], float]
) -> list[FormulaError]:
    """Each recorded operator call against its recurrence; those beyond `limit`, with the policy that explains them."""
    found = []
    for call in calls:
        if call.operator == "conv":
            if call.function != "causal_conv1d_fn":
                continue  # one token at a time: the cache experiments answer for it
            inputs = call.inputs
            right = golden.causal_conv(
                inputs["x"], inputs["weight"], inputs.get("bias"), call.options.get("activation")
            )[0].T
            mine = call.output[0].T
        else:
            right, mine = _delta(call, eps=1e-6), call.output[0]
        name = "the convolution" if call.operator == "conv" else "the delta rule"
        off = _compare_with_formula(name, call.layer, mine.cpu(), right.cpu(), limit(call))
        if off is not None and call.operator != "conv":
            policies = {name: partial(policy, call) for name, policy in POLICIES.items()}
            off = replace(off, explained_by=_explain(mine, right, policies))
        found += [off] if off is not None else []
    return found


# --- projections -----------------------------------------------------------------------------------------


def _cut(bits: int) -> Rounding:
    """Rounded to so many bits of significand."""

    def round_significand(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.double())
        return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)

    return round_significand


def _int8(x: Tensor) -> Tensor:
    """int8 with one scale a token."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / scale).round() * scale


def _float8(x: Tensor) -> Tensor:
    """float8 e4m3 with one scale a token."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def _same(x: Tensor) -> Tensor:
    return x.double()


PRODUCTS: dict[str, tuple[str, Rounding, Rounding]] = {
    "inputs in int8, one scale a token": ("QUANT", _int8, _same),
    "inputs in float8, one scale a token": ("QUANT", _float8, _same),
    "inputs and weights in TF32": ("NUMERIC", _cut(10), _cut(10)),
    "inputs and weights in bfloat16": ("NUMERIC", _cut(7), _cut(7)),
    "inputs in bfloat16": ("NUMERIC", _cut(7), _same),
}
"""Precisions of a matrix product: kind, how the inputs and how the weights are rounded."""


@dataclass(frozen=True, slots=True)
class ProjectionCall:
    """One call of a linear module."""

    name: str
    layer: int
    module: nn.Linear
    input: Tensor
    """[R, S, D of the input]"""
    output: Tensor
    """[R, S, D of the output]"""

    def product(self, inputs: Rounding, weights: Rounding) -> Tensor:
        """[R, S, D] weight times input plus bias in float64, each side rounded by a function."""
        bias = 0 if self.module.bias is None else self.module.bias.double()
        return inputs(self.input) @ weights(self.module.weight).T + bias


@contextmanager
def products(target: Target, most: int) -> Iterator[list[ProjectionCall]]:
    """Record input and output of every projection of the first `most` layers, as the modules saw them."""
    seen: list[ProjectionCall] = []
    with ExitStack() as stack:
        for index, layer in list(enumerate(target.layers))[:most]:
            for name, module in layer.named_modules():
                if isinstance(module, nn.Linear):

                    def note(
                        m: nn.Module,
                        args: tuple[Tensor, ...],
                        out: Tensor,
                        name: str = name,
                        layer: int = index,
                    ) -> None:
                        assert isinstance(m, nn.Linear)
                        x, y = args[0].detach().clone(), out.detach().clone()
                        seen.append(ProjectionCall(name, layer, m, x, y))

                    stack.callback(module.register_forward_hook(note).remove)
        yield seen


def off_products(seen: Sequence[ProjectionCall], limit: float) -> list[FormulaError]:
    """Projections whose output is not their weight times their input, with the precision that explains it."""
    found = []
    for call in seen:
        right = call.product(_same, _same)
        off = _compare_with_formula(call.name, call.layer, call.output[0], right[0], limit)
        if off is not None:
            rounded = {what: partial(call.product, x, w) for what, (_, x, w) in PRODUCTS.items()}
            why = _explain(call.output, right, rounded)
            found.append(replace(off, explained_by=why, kind=PRODUCTS[why][0] if why else ""))
    return found


# --- attention -------------------------------------------------------------------------------------------


def rotary_reference(target: Target, tokens: int) -> tuple[Tensor, Tensor] | str:
    """(cos, sin) [tokens, rotary width] of positions 0, 1, ...: theta**(-2i / width), arXiv 2104.09864; or why not."""
    config = target.config
    given = getattr(config, "rope_parameters", None) or {}
    kind = given.get("rope_type", "default")
    theta = given.get("rope_theta", getattr(config, "rope_theta", None))
    if kind != "default" or theta is None or any(isinstance(value, dict) for value in given.values()):
        return f"the rotary embedding is of type {kind!r}, for which no formula is held here"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(width * given.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)))
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * float(theta) ** -powers
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


@contextmanager
def rotary_tables(target: Target) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record what the model's rotary module returns: (cos, sin) of the first row of the batch."""
    seen: list[tuple[Tensor, Tensor]] = []
    modules = [m for name, m in target.model.named_modules() if name.split(".")[-1] == "rotary_emb"]

    def note(_: nn.Module, args: tuple[object, ...], out: object) -> None:
        if isinstance(out, tuple) and len(out) == 2:
            seen.append(
                (out[0].reshape(-1, *out[0].shape[-2:])[0], out[1].reshape(-1, *out[1].shape[-2:])[0])
            )

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(note).remove)
        yield seen


@contextmanager
def attention_calls() -> Iterator[list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Record (q, k, v, output) of every scaled_dot_product_attention call, [rows, heads, tokens, width] each."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    where: Any = torch.nn.functional
    original = where.scaled_dot_product_attention

    def record_attention_call(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = original(q, k, v, *args, **kwargs)
        seen.append((q.detach(), k.detach(), v.detach(), out.detach()))
        return out

    where.scaled_dot_product_attention = record_attention_call
    try:
        yield seen
    finally:
        where.scaled_dot_product_attention = original


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v over earlier keys, in float64; key heads repeated to the query heads."""
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    tokens = q.shape[-2]
    late = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(late, -math.inf), -1) @ v


def attention_scale(target: Target, width: int) -> float | None:
    """The declared scale: one over the root of the head width, or of what the configuration names instead. None
    where the scores are changed further (a soft cap)."""
    if getattr(target.config, "attn_logit_softcapping", None):
        return None
    declared: float = float(getattr(target.config, "query_pre_attn_scalar", None) or width)
    return 1 / math.sqrt(declared)
