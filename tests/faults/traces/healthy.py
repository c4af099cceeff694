"""Pairs that differ in nothing that matters: another run, batch, kernel, step or shift. None may raise anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.model.target.input_layouts import InputLayout
from parity.tracing.trace import Trace
from tests.faults.traces.bench import Bench, Rows
from tests.faults.traces.plants import Pair, captured, conv_pieces, feeds, pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Healthy:
    """One pair and how it is made."""

    name: str
    make: Callable[[Bench, Trace], Pair]


def fed(**options: Any) -> Callable[[Bench, Trace], Pair]:
    """Each request alone, fed in another way."""
    return lambda bench, healthy: (captured(bench, feeds(bench, **options)), healthy)


def together(bench: Bench, healthy: Trace) -> Pair:
    """All requests in one batch, padded on the left, with the mask that belongs to it."""
    return captured(bench, [InputLayout(rows=tuple(e.token_ids for e in bench.requests))]), healthy


def beside_itself(bench: Bench, healthy: Trace) -> Pair:
    """Each request in a batch of three."""
    rows: list[Rows] = []
    proofs = []
    for entry in bench.requests:
        ids = entry.token_ids
        batch = (ids, (*ids[1:], *ids[:1]), (*ids[2:], *ids[:2]))
        made, proven = bench.rows(bench.target(), [InputLayout(rows=batch)])
        rows.append(made[0])
        proofs += proven
    return bench.write(bench.target(), bench.requests, rows, proofs), healthy


def shifted(bench: Bench, healthy: Trace) -> Pair:
    """All positions seven further."""
    given = [
        InputLayout(rows=(e.token_ids,), positions=tuple(range(7, 7 + len(e.token_ids))))
        for e in bench.requests
    ]
    return captured(bench, given), healthy


def token_by_token(bench: Bench, healthy: Trace) -> Pair:
    """The first 24 tokens, decoded with a cache."""
    short = [
        e.model_copy(
            update={"token_ids": e.token_ids[:24], "token_texts": e.token_texts[:24], "prompt_tokens": 24}
        )
        for e in bench.requests
    ]
    given = [InputLayout(rows=(e.token_ids,), splits=tuple(range(1, 24))) for e in short]
    return captured(bench, given, requests=short, mode="decode"), bench.plain(requests=short)


def in_blocks(bench: Bench, healthy: Trace) -> Pair:
    """Sixteen tokens at a time with a cache."""
    given = [
        InputLayout(rows=(e.token_ids,), splits=tuple(range(16, len(e.token_ids), 16)))
        for e in bench.requests
    ]
    return captured(bench, given, mode="blocks:16"), healthy


def eager(dtype: str) -> Callable[[Bench, Trace], Pair]:
    """Eager against sdpa attention."""

    def make(bench: Bench, _: Trace) -> Pair:
        target = bench.target(dtype)
        now = target.model.config._attn_implementation
        traces = []
        for name in ("eager", "sdpa"):
            target.model.set_attn_implementation(name)
            traces.append(captured(bench, target=target))
        target.model.set_attn_implementation(now)
        return traces[0], traces[1]

    return make


def low(given: Callable[[Bench], Sequence[InputLayout]]) -> Callable[[Bench, Trace], Pair]:
    """bfloat16 against bfloat16, fed in another way."""

    def make(bench: Bench, _: Trace) -> Pair:
        target = bench.target("bfloat16")
        return captured(bench, given(bench), target=target), captured(bench, target=target)

    return make


def low_batch(bench: Bench) -> list[InputLayout]:
    """All requests in one batch."""
    return [InputLayout(rows=tuple(e.token_ids for e in bench.requests))]


def changed(name: str, change: Callable[..., Any]) -> Callable[[Bench, Trace], Pair]:
    """The same function by another kernel."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        with bench.operator(name, change):
            return captured(bench), healthy

    return make


def recurrent(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Token by token instead of chunk by chunk, in float32."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    wrapper: Any = modeling.torch_recurrent_gated_delta_rule  # a recorder may stand in its place
    function = getattr(wrapper, "function", wrapper).__wrapped__
    options = {key: value for key, value in options.items() if key in function.__code__.co_varnames}
    return function(q, k, v, **(options | {"initial_state": None}))


def rounding(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Rounded differently in the last bits."""
    out, state = body(q, k, v.double().mul(3).div(3).to(v.dtype), **options)
    return (out.double() * (1 + 6e-8)).to(out.dtype), state


def split_convolution(body: Any, x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
    """The convolution as a sum of shifted products."""
    taps, options = weight.shape[-1], dict(options)
    padded = torch.nn.functional.pad(x, (taps - 1, 0))
    out = sum(
        (weight[:, j, None] * padded[..., j : j + x.shape[-1]] for j in range(taps)), torch.zeros_like(x)
    )
    return torch.nn.functional.silu(out)


def isolated(bench: Bench, _: Trace) -> Pair:
    """Documents in one row, with both operators told where they end."""
    rows: list[Rows] = []
    proofs = []
    for entry in bench.packed:
        edges = bench.starts[entry.id]
        with (
            bench.operator(
                "torch_chunk_gated_delta_rule",
                lambda body, *a, edges=edges, **o: pieces(body, edges, *a, **o),
            ),
            bench.operator(
                "causal_conv1d_fn", lambda body, *a, edges=edges, **o: conv_pieces(body, edges, *a, **o)
            ),
        ):
            made, proven = bench.rows(bench.target(), [InputLayout(rows=(entry.token_ids,), segments=edges)])
        rows += made
        proofs += proven
    return bench.write(bench.target(), bench.packed, rows, proofs), bench.apart()


def other_order(bench: Bench, healthy: Trace) -> Pair:
    """The same requests one after the other in another order."""
    order = [bench.requests[i] for i in (2, 0, 1)]
    return captured(bench, [InputLayout(rows=(e.token_ids,)) for e in order], requests=order), healthy


HEALTHY: tuple[Healthy, ...] = (
    Healthy(name="rerun", make=fed()),
    Healthy(name="other order of requests", make=other_order),
    Healthy(name="batch of three", make=beside_itself),
    Healthy(name="masked batch of unequal rows", make=together),
    Healthy(name="5 masked pads on the left", make=fed(left=(5,))),
    Healthy(name="64 masked pads on the left", make=fed(left=(64,))),
    Healthy(name="5 pads on the right", make=fed(right=5)),
    Healthy(name="positions 7 further", make=shifted),
    Healthy(name="split at 71", make=fed(splits=(71,))),
    Healthy(name="split at 64", make=fed(splits=(64,))),
    Healthy(name="decoded token by token", make=token_by_token),
    Healthy(name="in blocks of 16", make=in_blocks),
    Healthy(name="eager against sdpa", make=eager("float32")),
    Healthy(name="chunk by chunk against recurrent", make=changed("torch_chunk_gated_delta_rule", recurrent)),
    Healthy(name="last bits of the delta rule", make=changed("torch_chunk_gated_delta_rule", rounding)),
    Healthy(name="convolution as shifted products", make=changed("causal_conv1d_fn", split_convolution)),
    Healthy(name="packed, boundaries kept", make=isolated),
    Healthy(name="bfloat16, rerun", make=low(lambda bench: feeds(bench))),
    Healthy(name="bfloat16, another batch", make=low(low_batch)),
    Healthy(name="bfloat16, eager against sdpa", make=eager("bfloat16")),
    Healthy(name="bfloat16, split at 71", make=low(lambda bench: feeds(bench, splits=(71,)))),
)

assert len({each.name for each in HEALTHY}) == len(HEALTHY)
