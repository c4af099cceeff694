"""The planted faults: one function each, in the code path, operators, inputs, weights or capture of a model.

None touches the numbers that a diagnosis reads. Each is given a bench and returns (faulty, reference).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parity.model.target import input_layouts
from parity.model.target.input_layouts import InputLayout
from parity.model.target.load import Target
from parity.model.target.taps import TapRecorder
from parity.tracing.trace import BackendProof, RequestEntry, Trace
from tests.faults.traces.bench import Bench, Rows, patched

Pair = tuple[Trace, Trace]
Make = Callable[[Bench, Trace], Pair]
"""(bench, healthy trace of its requests) to (faulty, reference)."""


def modeling() -> Any:
    """transformers' modeling file of both targets."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    return modeling_qwen3_5


def feeds(bench: Bench, **options: Any) -> list[InputLayout]:
    """Each request alone."""
    return [InputLayout(rows=(entry.token_ids,), **options) for entry in bench.requests]


def captured(
    bench: Bench,
    given: Sequence[InputLayout] | None = None,
    *,
    target: Target | None = None,
    requests: Sequence[RequestEntry] | None = None,
    mode: str = "prefill",
) -> Trace:
    """A trace of these feedings."""
    target = target or bench.target()
    rows, proofs = bench.rows(target, given or feeds(bench))
    return bench.write(target, requests or bench.requests, rows, proofs, mode)


def under(*plants: Callable[[Bench], Any]) -> Make:
    """The requests, captured while something is changed."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        with contextlib.ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant(bench))
            return captured(bench), healthy

    return make


def delta(change: Callable[..., Any]) -> Callable[[Bench], Any]:
    """The chunked delta rule, changed: change(body, q, k, v, g=..., beta=..., ...)."""
    return lambda bench: bench.operator("torch_chunk_gated_delta_rule", change)


def conv(change: Callable[..., Any]) -> Callable[[Bench], Any]:
    """The convolution, changed: change(body, x, weight, bias, activation=...)."""
    return lambda bench: bench.operator("causal_conv1d_fn", change)


def reweighted(change: Callable[[Target], None]) -> Make:
    """The requests, computed with other weights."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        target = bench.target(fresh=True)
        change(target)
        return captured(bench, target=target), healthy

    return make


# --- PAD -------------------------------------------------------------------------------------------------


def unmasked(_: Bench) -> Any:
    """The padding multiply of the linear layers is skipped."""
    return patched(modeling(), "apply_mask_to_padding_states", lambda body, states, mask: states)


def padded(left: Sequence[int], pad_id: int = 0) -> Make:
    """Each request alone with pads on its left that the linear layers are not told about."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        with unmasked(bench):
            given = [
                InputLayout(rows=(entry.token_ids,), left=(count,), pad_id=pad_id)
                for entry, count in zip(bench.requests, left, strict=True)
            ]
            return captured(bench, given), healthy

    return make


def padded_batch(bench: Bench, healthy: Trace) -> Pair:
    """One batch of unequal rows: the longest has no pad and is exact."""
    with unmasked(bench):
        rows = tuple(entry.token_ids for entry in bench.requests)
        return captured(bench, [InputLayout(rows=rows)]), healthy


# --- PACK ------------------------------------------------------------------------------------------------


def pieces(body: Callable[..., Any], edges: Sequence[int], q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Any:
    """The delta rule with its state reset at each edge."""
    g, beta = o.pop("g"), o.pop("beta")
    parts = [
        body(q[:, i:j], k[:, i:j], v[:, i:j], g=g[:, i:j], beta=beta[:, i:j], **o)[0]
        for i, j in itertools.pairwise([0, *edges, q.shape[1]])
        if j > i
    ]
    return torch.cat(parts, 1), None


def conv_pieces(body: Callable[..., Any], edges: Sequence[int], x: Tensor, *args: Any, **o: Any) -> Tensor:
    """The convolution with its window cut at each edge."""
    parts = [body(x[:, :, i:j], *args, **o) for i, j in itertools.pairwise([0, *edges, x.shape[2]]) if j > i]
    return torch.cat(parts, 2)


def packed(*, state: bool, window: bool) -> Make:
    """Documents in one row, positions reset; the delta rule (`state`) or the convolution (`window`) leaks."""

    def make(bench: Bench, _: Trace) -> Pair:
        target = bench.target()
        rows: list[Rows] = []
        proofs: list[BackendProof] = []
        for entry in bench.packed:
            edges = bench.starts[entry.id]
            with contextlib.ExitStack() as stack:
                if not state:
                    stack.enter_context(
                        bench.operator(
                            "torch_chunk_gated_delta_rule",
                            lambda body, *a, edges=edges, **o: pieces(body, edges, *a, **o),
                        )
                    )
                if not window:
                    stack.enter_context(
                        bench.operator(
                            "causal_conv1d_fn",
                            lambda body, *a, edges=edges, **o: conv_pieces(body, edges, *a, **o),
                        )
                    )
                made, proven = bench.rows(target, [InputLayout(rows=(entry.token_ids,), segments=edges)])
            rows += made
            proofs += proven
        return bench.write(target, bench.packed, rows, proofs), bench.apart()

    return make


# --- STATE -----------------------------------------------------------------------------------------------


def split(at: int, *plants: Callable[[Bench], Any], mode: str = "prefill") -> Make:
    """Each request in two pieces with a cache, while something of the cache is lost."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        with contextlib.ExitStack() as stack:
            for plant in plants:
                stack.enter_context(plant(bench))
            return captured(bench, feeds(bench, splits=(at,)), mode=mode), healthy

    return make


def forgotten_state(bench: Bench) -> Any:
    """The recurrent state of the cache is not taken up."""
    return delta(lambda body, *a, **o: body(*a, **(o | {"initial_state": None})))(bench)


def forgotten_window(_: Bench) -> Any:
    """The convolution's window of the cache is not taken up."""
    from transformers.cache_utils import LinearAttentionLayer

    def change(body: Any, layer: Any, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = body(layer, states, *args, **kwargs)
        out = out.clone()
        out[..., : out.shape[-1] - states.shape[-1]] = 0
        return out

    return patched(LinearAttentionLayer, "update_conv_state", change)


def cropped(bench: Bench, healthy: Trace) -> Pair:
    """Drafted tokens are taken out of the cache again; transformers 5.24 rolls back the window, not the state."""
    given = [
        InputLayout(rows=(entry.token_ids,), splits=(70,), drafted=tuple(entry.token_ids[10:14]))
        for entry in bench.requests
    ]
    return captured(bench, given), healthy


def leaking_cache(bench: Bench, healthy: Trace) -> Pair:
    """A request begins with the recurrent state that the one before it left behind."""
    left: dict[int, Tensor] = {}
    calls = itertools.count()
    count = len(bench.target().linear)

    def change(body: Any, *args: Any, **options: Any) -> Any:
        layer = next(calls) % count
        out, state = body(*args, **(options | {"initial_state": left.get(layer), "output_final_state": True}))
        left[layer] = state
        return out, state

    order = [bench.requests[2], bench.requests[0], bench.requests[1]]
    with bench.operator("torch_chunk_gated_delta_rule", change):
        faulty = captured(bench, [InputLayout(rows=(e.token_ids,)) for e in order], requests=order)
    return faulty, healthy


# --- TAIL ------------------------------------------------------------------------------------------------


def last_chunk_zero(body: Any, q: Tensor, *args: Any, **options: Any) -> Any:
    """The last partial chunk is never written."""
    out, state = body(q, *args, **options)
    edge = q.shape[1] // 64 * 64
    return torch.cat([out[:, :edge], torch.zeros_like(out[:, edge:])], 1), state


def dropped_each_chunk(body: Any, q: Tensor, *args: Any, **options: Any) -> Any:
    """The state is lost at each chunk's edge."""
    return pieces(body, list(range(64, q.shape[1], 64)), q, *args, **options)


def beyond(limit: int) -> Callable[..., Any]:
    """Rows from an index on read from the wrong place, as where an offset overflows."""

    def change(body: Any, q: Tensor, *args: Any, **options: Any) -> Any:
        out, state = body(q, *args, **options)
        return torch.cat([out[:, :limit], out[:, : max(0, out.shape[1] - limit)]], 1), state

    return change


def edge_tokens(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The first token of every chunk is not written into the state."""
    beta = options.pop("beta").clone()
    beta[:, 64::64] = 0
    return body(q, k, v, beta=beta, **options)


# --- POS and ATTN ----------------------------------------------------------------------------------------


def restarted(at: int, *, offset: int = 0) -> Make:
    """Positions that begin anew at a token (without any boundary), or go on from `offset` further."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        def change(body: Any, self: Any, x: Tensor, positions: Tensor) -> Any:
            shifted = positions.clone()
            shifted[..., at:] += offset if offset else -at
            return body(self, x, shifted)

        rotary = type(bench.target().model.model.rotary_emb)
        with patched(rotary, "forward", change):
            return captured(bench), healthy

    return make


def rotary(change: Callable[[Tensor], Tensor]) -> Callable[[Bench], Any]:
    """Other frequencies of the rotary embedding."""

    @contextlib.contextmanager
    def plant(bench: Bench) -> Iterator[None]:
        module = bench.target().model.model.rotary_emb
        kept = module.inv_freq
        module.inv_freq = change(kept.clone())
        try:
            yield
        finally:
            module.inv_freq = kept

    return plant


def masked(change: Callable[[Tensor], Tensor]) -> Callable[[Bench], Any]:
    """Another attention mask: change(allowed [queries, keys]) gives what is allowed instead."""

    def plant(bench: Bench) -> Any:
        def instead(_: Any, **options: Any) -> Tensor:
            tokens = options["inputs_embeds"].shape[1]
            allowed = change(torch.ones(tokens, tokens, dtype=torch.bool).tril())
            return allowed[None, None]

        return patched(modeling(), "create_causal_mask", instead)

    return plant


@contextlib.contextmanager
def scaled(bench: Bench) -> Iterator[None]:
    """The softmax scale is that of another head width."""
    modules: list[Any] = [m for m in bench.target().model.modules() if hasattr(m, "scaling")]
    kept = [module.scaling for module in modules]
    for module in modules:
        module.scaling = module.scaling * 2**0.5
    try:
        yield
    finally:
        for module, scaling in zip(modules, kept, strict=True):
            module.scaling = scaling


def nothing_to_see(bench: Bench) -> Any:
    """Two queries that may see no key at all: softmax over nothing."""

    def instead(_: Any, **options: Any) -> Tensor:
        tokens = options["inputs_embeds"].shape[1]
        mask = torch.zeros(tokens, tokens).masked_fill(
            ~torch.ones(tokens, tokens, dtype=torch.bool).tril(), float("-inf")
        )
        mask[20:22] = float("-inf")
        return mask[None, None]

    return patched(modeling(), "create_causal_mask", instead)


# --- the capture: ROWS, LAYERIDX, NORM, ALIAS ------------------------------------------------------------


def recorded(change: Callable[[Any, Any, str, Tensor], None]) -> Callable[[Bench], Any]:
    """Another hook: change(original, recorder, tap, value)."""
    return lambda bench: patched(TapRecorder, "_keep", change)


def renamed(new: Callable[[int], int | None]) -> Callable[[Bench], Any]:
    """Layer outputs recorded under another layer's number, or not at all."""

    def change(body: Any, recorder: Any, name: str, value: Tensor) -> None:
        parts = name.split(".")
        if parts[0] == "layer" and parts[2] == "out":
            number = new(int(parts[1]))
            if number is not None:
                body(recorder, f"layer.{number}.out", value)
            return
        if name == "embed.out" and new(-1) is not None:
            body(recorder, f"layer.{new(-1)}.out", value)
        body(recorder, name, value)

    return recorded(change)


def reordered(change: Callable[[Rows], Rows]) -> Make:
    """Rows that the capture lays down in the wrong places: change(the taps of one request)."""

    def make(bench: Bench, healthy: Trace) -> Pair:
        def remove_padding(body: Any, taps: Any, feed: InputLayout) -> Any:
            return tuple(change(rows) for rows in body(taps, feed))

        with patched(input_layouts, "_remove_padding", remove_padding):
            return captured(bench), healthy

    return make


def every(function: Callable[[Tensor], Tensor]) -> Callable[[Rows], Rows]:
    """The same for each tap."""
    return lambda rows: {name: function(tensor) for name, tensor in rows.items()}


def unwritten(start: int, value: float) -> Callable[[Tensor], Tensor]:
    """Rows from `start` on that were never filled."""

    def change(tensor: Tensor) -> Tensor:
        out = tensor.clone()
        out[start : start + 32] = value
        return out

    return change


def repeated(tensor: Tensor) -> Tensor:
    """A block of 16 rows written twice, over the next one."""
    out = tensor.clone()
    out[48:64] = tensor[32:48]
    return out


def permuted(tensor: Tensor) -> Tensor:
    """Rows in another order, the same for every tap."""
    order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(3))
    return tensor[order]


def mixed_requests(bench: Bench, healthy: Trace) -> Pair:
    """The packed buffer of a batch is split with the lengths in another order."""
    target = bench.target()
    rows, proofs = bench.rows(target, feeds(bench))
    lengths = [len(entry.token_ids) for entry in bench.requests]
    wrong = [lengths[1], lengths[2], lengths[0]]
    starts = list(itertools.accumulate([0, *wrong[:-1]]))
    buffer = {name: torch.cat([part[name] for part in rows]) for name in rows[0]}
    buffer = {name: torch.cat([whole, whole]) for name, whole in buffer.items()}
    cut = [
        {name: whole[start : start + length] for name, whole in buffer.items()}
        for start, length in zip(starts, lengths, strict=True)
    ]
    return bench.write(target, bench.requests, cut, proofs), healthy


def prefix_missing(bench: Bench, healthy: Trace) -> Pair:
    """The second request hit a prefix cache: its first 32 rows were not computed and are not in the dump."""
    target = bench.target()
    rows, proofs = bench.rows(target, feeds(bench))
    requests = list(bench.requests)
    short = requests[1]
    requests[1] = short.model_copy(
        update={"token_ids": short.token_ids[32:], "token_texts": short.token_texts[32:]}
    )
    rows[1] = {name: tensor[32:] for name, tensor in rows[1].items()}
    return bench.write(target, requests, rows, proofs), healthy


def normed(names: Callable[[str], bool], at: str = "final") -> Callable[[Bench], Any]:
    """Layer outputs recorded behind the final norm."""

    def plant(bench: Bench) -> Any:
        norm = bench.target().norm

        def change(body: Any, recorder: Any, name: str, value: Tensor) -> None:
            body(recorder, name, norm.forward(value) if names(name) else value)

        return recorded(change)(bench)

    return plant


def prenormed(body: Any, recorder: Any, name: str, value: Tensor) -> None:
    """What enters the final norm is recorded as what it returns."""
    if name == "final.prenorm":
        body(recorder, "final.postnorm", value)
    if name != "final.postnorm":
        body(recorder, name, value)


def views(which: Callable[[int], bool]) -> Callable[[Bench], Any]:
    """States kept without a copy, in a model that adds to its residual stream in place."""

    @contextlib.contextmanager
    def plant(bench: Bench) -> Iterator[None]:
        def forward(body: Any, layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            entered = hidden_states
            out: Tensor = body(layer, hidden_states, *args, **kwargs)
            index = bench.target().layers
            number = next(i for i, module in enumerate(index) if module is layer)
            return entered.copy_(out) if number and which(number) else out

        def keep(body: Any, recorder: Any, name: str, value: Tensor) -> None:
            if name.startswith("layer.") and name.endswith(".out") and name.count(".") == 2:
                recorder.parts[name].append(value.detach())
            else:
                body(recorder, name, value)

        with patched(modeling().Qwen3_5DecoderLayer, "forward", forward), recorded(keep)(bench):
            yield

    return plant


def branch(which: str) -> Callable[[Bench], Any]:
    """A layer's branch recorded in the place of its output: `mlp`, or the whole layer without its input."""

    @contextlib.contextmanager
    def plant(bench: Bench) -> Iterator[None]:
        held: dict[str, Tensor] = {}
        target = bench.target()

        def keep(body: Any, recorder: Any, name: str, value: Tensor) -> None:
            parts = name.split(".")
            if parts[0] == "layer" and parts[2] == "out":
                body(recorder, name, held[parts[1]] if which == "mlp" else value - held[parts[1]])
            else:
                body(recorder, name, value)

        with contextlib.ExitStack() as stack:
            layers: list[Any] = list(target.layers)
            for index, layer in enumerate(layers):

                def note(_: Any, args: Any, out: Any, index: int = index) -> None:
                    held[str(index)] = out.clone()

                def enter(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
                    held[str(index)] = (args[0] if args else kwargs["hidden_states"]).clone()

                if which == "mlp":
                    stack.callback(layer.mlp.register_forward_hook(note).remove)
                else:
                    stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.enter_context(recorded(keep)(bench))
            yield

    return plant


# --- LOAD, QUANT -----------------------------------------------------------------------------------------


def random_like(parameter: Tensor, seed: int = 1) -> None:
    """Noise of the parameter's own size in its place."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(parameter.shape, generator=generator) * float(parameter.data.std().clamp(min=0.02))
    parameter.data = noise.to(parameter.dtype)


def random_embedding(target: Target) -> None:
    """The embedding was not in the checkpoint."""
    random_like(target.embed.get_parameter("weight"))


def random_final_norm(target: Target) -> None:
    """The final norm was not in the checkpoint."""
    weight = target.norm.get_parameter("weight")
    weight.data = 0.3 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))


def random_everything(target: Target) -> None:
    """No text weight was found under its name."""
    for number, parameter in enumerate(target.model.parameters()):
        if parameter.ndim > 1:
            random_like(parameter, number)


def other_mlp(target: Target) -> None:
    """One layer's projection is that of another layer."""
    name = "mlp.up_proj.weight"
    target.layers[2].get_parameter(name).data = target.layers[1].get_parameter(name).data.clone()


def swapped_layers(target: Target) -> None:
    """Two layers of one type are exchanged."""
    first, second = target.layers[4], target.layers[5]
    kept = {key: value.clone() for key, value in first.state_dict().items()}
    first.load_state_dict(second.state_dict())
    second.load_state_dict(kept)


def untied_head(target: Target) -> None:
    """The head was not tied to the embedding."""
    assert target.head is not None
    weight = torch.nn.Parameter(target.head.get_parameter("weight").detach().clone(), requires_grad=False)
    random_like(weight)
    target.head.register_parameter("weight", weight)


def quantised(
    bits: int, which: Callable[[str], bool] = lambda name: True, group: int = 0
) -> Callable[[Target], None]:
    """Projections rounded to integers with one scale a row (or a group of inputs)."""

    def change(target: Target) -> None:
        top = 2 ** (bits - 1) - 1
        for name, module in target.layers.named_modules():
            if isinstance(module, torch.nn.Linear) and which(name):
                weight = module.weight.data
                flat = weight.reshape(-1, group) if group else weight
                scale = flat.abs().amax(1, keepdim=True) / top
                module.weight.data = ((flat / scale).round() * scale).reshape(weight.shape)

    return change


def float8(target: Target) -> None:
    """Projections in float8 with one scale each."""
    for module in target.layers.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.data.abs().max() / 448
            module.weight.data = (module.weight.data / scale).to(torch.float8_e4m3fn).float() * scale


@contextlib.contextmanager
def quantised_activations(bench: Bench) -> Iterator[None]:
    """Every projection's input in int8, one scale a token."""

    def change(body: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        out: Tensor = body((x / scale).round() * scale, weight, bias)
        return out

    with patched(F, "linear", change):
        yield


def float8_states(bench: Bench) -> Any:
    """Captured states stored in float8 and widened again."""

    def change(body: Any, recorder: Any, name: str, value: Tensor) -> None:
        scale = value.abs().max() / 448
        stored = (value / scale).to(torch.float8_e4m3fn).to(value.dtype) * scale
        body(recorder, name, stored if name.startswith("layer.") and name.count(".") == 2 else value)

    return recorded(change)(bench)


# --- COMPILE, NUMERIC, INVAR -----------------------------------------------------------------------------


def no_l2norm(body: Any, *args: Any, **options: Any) -> Any:
    """Queries and keys are not normalised."""
    return body(*args, **(options | {"use_qk_l2norm_in_kernel": False}))


def garbled(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The heads of the values are read in another order."""
    return body(q, k, v.roll(1, dims=2), **options)


def bits_as_numbers(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """16-bit patterns of the values multiplied as integers (triton#11584)."""
    raw = v.bfloat16().view(torch.int16).to(v.dtype)
    return body(q, k, raw, **options)


def wrong_second_chunk(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The decay of a chunk is applied twice to what earlier chunks left."""
    out, state = body(q, k, v, **options)
    half = pieces(body, [64, 128], q, k, v, **options)[0]
    return half + (out - half) * 0.5, state


def epsilon(value: float) -> Callable[..., Any]:
    """Another epsilon in the l2 norm of queries and keys."""

    def change(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        def l2(x: Tensor) -> Tensor:
            return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + value)

        return body(l2(q), l2(k), v, **(options | {"use_qk_l2norm_in_kernel": False}))

    return change


def rounded_state(body: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The state is held in bfloat16 between chunks."""
    g, beta, state, parts = options.pop("g"), options.pop("beta"), None, []
    options |= {"output_final_state": True}
    options.pop("initial_state", None)
    for i in range(0, q.shape[1], 64):
        j = i + 64
        out, state = body(
            q[:, i:j], k[:, i:j], v[:, i:j], g=g[:, i:j], beta=beta[:, i:j], initial_state=state, **options
        )
        state = state.bfloat16().float()
        parts.append(out)
    return torch.cat(parts, 1), state


def rounded_gate(body: Any, *args: Any, **options: Any) -> Any:
    """The log decay in bfloat16."""
    return body(*args, **(options | {"g": options["g"].bfloat16().float()}))


def rounded_a_log(target: Target) -> None:
    """A_log held in bfloat16."""
    for module in target.linear.values():
        module.A_log.data = module.A_log.data.bfloat16().float()


def rounded_matmul(bits: int) -> Callable[[Bench], Any]:
    """Inputs of every matrix product cut to so many significand bits (TF32 has 10)."""

    def cut(x: Tensor) -> Tensor:
        drop = 23 - bits
        raw = x.contiguous().view(torch.int32)
        return (((raw + (1 << (drop - 1))) >> drop) << drop).view(torch.float32)

    def change(body: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = body(cut(x), cut(weight), bias)
        return out

    return lambda bench: patched(F, "linear", change)


@contextlib.contextmanager
def norm_epsilon(bench: Bench) -> Iterator[None]:
    """1e-5 in place of 1e-6 in every decoder norm."""
    modules: list[Any] = [m for m in bench.target().layers.modules() if type(m).__name__ == "Qwen3_5RMSNorm"]
    kept = [module.eps for module in modules]
    for module in modules:
        module.eps = 1e-5
    try:
        yield
    finally:
        for module, eps in zip(modules, kept, strict=True):
            module.eps = eps


def split_sums(bench: Bench) -> Any:
    """Products summed in 16-bit pieces in an order that changes from call to call."""
    calls = itertools.count()

    def change(body: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        count = 4
        generator = torch.Generator().manual_seed(next(calls))
        order = torch.randperm(x.shape[-1], generator=generator)
        total: Tensor | None = None
        for part in order.chunk(count):
            piece = body(x[..., part], weight[:, part]).bfloat16()
            total = piece if total is None else (total + piece).bfloat16()
        assert total is not None
        return total.to(x.dtype)

    return patched(F, "linear", change)


# --- DISPATCH --------------------------------------------------------------------------------------------


def another_ran(bench: Bench, healthy: Trace) -> Pair:
    """Asked for fla, served by torch."""
    from parity.model.target.backends import parse_backend
    from parity.model.target.input_layouts import run_layout

    target = bench.target()
    rows: list[Rows] = []
    proofs: list[BackendProof] = []
    for feed in feeds(bench):
        fed = run_layout(target, feed, backend=parse_backend("fla"), taps=["*"])
        rows += fed.rows
        proofs.append(fed.proof)
    return bench.write(target, bench.requests, rows, proofs), healthy


def mixed_layers(bench: Bench, healthy: Trace) -> Pair:
    """One call in three reaches another implementation."""
    calls = itertools.count()
    from parity.model.target import golden

    target = bench.target()
    from parity.model.target.backends import CallRecorder

    def run_(
        original: Any, recorder: Any, name: str, operator: str, function: Any, args: Any, kwargs: Any
    ) -> Any:
        if operator != "delta" or next(calls) % 3 != 1:
            return original(recorder, name, operator, function, args, kwargs)
        out, state = original(recorder, name, operator, golden.delta_operator, args, kwargs)
        return out.to(args[0].dtype), state

    with patched(CallRecorder, "run", run_):
        rows, proofs = bench.rows(target, feeds(bench))
    return bench.write(target, bench.requests, rows, proofs), healthy


def same_kernel(bench: Bench, healthy: Trace) -> Pair:
    """A wrapper that calls itself fla and computes with torch's own function."""

    from parity.model.target import backends

    def implementation(original: Any, function: Any) -> tuple[str, str]:
        found, callee = original(function)
        return ("fla", callee) if "delta" in callee else (found, callee)

    target = bench.target()
    rows: list[Rows] = []
    proofs: list[BackendProof] = []
    from parity.model.target.input_layouts import run_layout

    with patched(backends, "implementation_of", implementation):
        for feed in feeds(bench):
            fed = run_layout(target, feed, backend=backends.parse_backend("fla"), taps=["*"])
            rows += fed.rows
            proofs.append(fed.proof)
    return bench.write(target, bench.requests, rows, proofs), healthy


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planted fault and its right names."""

    name: str
    kinds: tuple[str, ...]
    """The kind; or, where two dumps cannot tell, the kinds that are possible."""
    make: Make
    states: bool = True
    """Whether it is also to be named from the residual stream alone, without the operators' taps."""


def shifted_conv(body: Any, x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Any:
    """The convolution's taps are one place off."""
    return body(x, weight.roll(1, -1), *args, **options)


FAULTS: tuple[Fault, ...] = (
    Fault(name="asked for fla, torch ran", kinds=("DISPATCH",), make=another_ran),
    Fault(name="one layer in three elsewhere", kinds=("DISPATCH",), make=mixed_layers),
    Fault(name="two names, one kernel", kinds=("DISPATCH",), make=same_kernel),
    Fault(name="rows permuted", kinds=("ROWS",), make=reordered(every(permuted))),
    Fault(name="rows one late", kinds=("ROWS",), make=reordered(every(lambda t: t.roll(1, 0)))),
    Fault(name="rows 32 early", kinds=("ROWS",), make=reordered(every(lambda t: t.roll(-32, 0)))),
    Fault(name="block never written", kinds=("ROWS",), make=reordered(every(unwritten(32, 0.0)))),
    Fault(name="block not a number", kinds=("ROWS",), make=reordered(every(unwritten(64, float("nan"))))),
    Fault(name="block written twice", kinds=("ROWS",), make=reordered(every(repeated))),
    Fault(name="requests mixed up", kinds=("ROWS",), make=mixed_requests),
    Fault(name="cached prefix not dumped", kinds=("ROWS",), make=prefix_missing),
    Fault(name="embedding random", kinds=("LOAD",), make=reweighted(random_embedding)),
    Fault(name="final norm random", kinds=("LOAD",), make=reweighted(random_final_norm)),
    Fault(name="all weights random", kinds=("LOAD",), make=reweighted(random_everything)),
    Fault(name="another layer's projection", kinds=("LOAD",), make=reweighted(other_mlp)),
    Fault(name="two layers exchanged", kinds=("LOAD",), make=reweighted(swapped_layers)),
    Fault(name="head not tied", kinds=("LOAD",), make=reweighted(untied_head)),
    Fault(name="layer ids one up", kinds=("LAYERIDX",), make=under(renamed(lambda i: i + 1))),
    Fault(
        name="layer ids one down",
        kinds=("LAYERIDX",),
        make=under(renamed(lambda i: i - 1 if i > 0 else None)),
    ),
    Fault(
        name="one layer not dumped",
        kinds=("LAYERIDX",),
        make=under(renamed(lambda i: None if i in (-1, 2) else i)),
    ),
    Fault(
        name="two ids exchanged",
        kinds=("LAYERIDX",),
        make=under(renamed(lambda i: None if i < 0 else {1: 2, 2: 1}.get(i, i))),
    ),
    Fault(
        name="last entry behind the norm", kinds=("NORM",), make=under(normed(lambda n: n == "final.prenorm"))
    ),
    Fault(
        name="every layer behind the norm", kinds=("NORM",), make=under(normed(lambda n: n.count(".") == 2))
    ),
    Fault(name="final entry before the norm", kinds=("NORM",), make=under(recorded(prenormed))),
    Fault(name="views overwritten", kinds=("ALIAS",), make=under(views(lambda i: True))),
    Fault(name="every other view overwritten", kinds=("ALIAS",), make=under(views(lambda i: i % 2 == 1))),
    Fault(name="branch without residual", kinds=("ALIAS",), make=under(branch("mlp"))),
    Fault(name="layer without its input", kinds=("ALIAS",), make=under(branch("layer"))),
    Fault(name="5 pads, batch 1", kinds=("PAD", "STATE"), make=padded((5, 5, 5))),
    Fault(name="1, 3 and 64 pads", kinds=("PAD", "STATE"), make=padded((1, 3, 64))),
    Fault(name="padded batch", kinds=("PAD",), make=padded_batch),
    Fault(name="pads of another token", kinds=("PAD",), make=padded((0, 9, 17), pad_id=11)),
    Fault(name="packed, both leak", kinds=("PACK",), make=packed(state=True, window=True)),
    Fault(name="packed, state leaks", kinds=("PACK",), make=packed(state=True, window=False)),
    Fault(name="packed, window leaks", kinds=("PACK",), make=packed(state=False, window=True)),
    Fault(name="split at 71, state lost", kinds=("STATE",), make=split(71, forgotten_state)),
    Fault(name="split at 71, window lost", kinds=("STATE",), make=split(71, forgotten_window)),
    Fault(
        name="blocks of 16, state lost", kinds=("STATE",), make=split(16, forgotten_state, mode="blocks:16")
    ),
    Fault(name="split at 64, state lost", kinds=("STATE", "TAIL"), make=split(64, forgotten_state)),
    Fault(name="drafts taken back", kinds=("STATE",), make=cropped),
    Fault(name="state of the request before", kinds=("STATE",), make=leaking_cache),
    Fault(name="last chunk not written", kinds=("TAIL",), make=under(delta(last_chunk_zero))),
    Fault(name="state lost at each edge", kinds=("TAIL",), make=under(delta(dropped_each_chunk))),
    Fault(name="rows from 128 on", kinds=("TAIL",), make=under(delta(beyond(128)))),
    Fault(name="edge tokens not stored", kinds=("TAIL",), make=under(delta(edge_tokens))),
    Fault(name="positions restart at 75", kinds=("POS", "ATTN"), make=restarted(75)),
    Fault(name="positions jump at 40", kinds=("POS", "ATTN"), make=restarted(40, offset=9)),
    Fault(name="rotary base", kinds=("POS", "ATTN"), make=under(rotary(lambda f: f**1.2))),
    Fault(name="mask not causal", kinds=("ATTN",), make=under(masked(lambda m: torch.ones_like(m)))),
    Fault(name="window of 32", kinds=("ATTN", "POS"), make=under(masked(lambda m: m.triu(-31)))),
    Fault(name="softmax scale", kinds=("ATTN", "POS"), make=under(scaled)),
    Fault(name="rows that see nothing", kinds=("ATTN",), make=under(nothing_to_see)),
    Fault(name="heads of v rolled", kinds=("COMPILE", "NUMERIC"), make=under(delta(garbled))),
    Fault(name="bits as numbers", kinds=("COMPILE",), make=under(delta(bits_as_numbers))),
    Fault(name="conv one tap off", kinds=("COMPILE", "NUMERIC"), make=under(conv(shifted_conv))),
    Fault(name="no l2 norm", kinds=("NUMERIC", "COMPILE"), make=under(delta(no_l2norm))),
    Fault(name="second chunk's decay", kinds=("TAIL",), make=under(delta(wrong_second_chunk))),
    Fault(name="int8 weights", kinds=("QUANT",), make=reweighted(quantised(8))),
    Fault(name="int4 weights in groups", kinds=("QUANT",), make=reweighted(quantised(4, group=32))),
    Fault(name="float8 weights", kinds=("QUANT",), make=reweighted(float8)),
    Fault(
        name="gates in int4",
        kinds=("QUANT",),
        make=reweighted(quantised(4, which=lambda name: name.endswith(("in_proj_a", "in_proj_b")))),
    ),
    Fault(name="int8 inputs", kinds=("QUANT", "NUMERIC"), make=under(quantised_activations)),
    Fault(name="states stored in float8", kinds=("QUANT",), make=under(float8_states)),
    Fault(name="A_log in bfloat16", kinds=("NUMERIC",), make=reweighted(rounded_a_log)),
    Fault(name="l2 epsilon 1e-3", kinds=("NUMERIC",), make=under(delta(epsilon(1e-3)))),
    Fault(name="l2 epsilon of a mean", kinds=("NUMERIC",), make=under(delta(epsilon(32e-6)))),
    Fault(name="state in bfloat16", kinds=("NUMERIC",), make=under(delta(rounded_state))),
    Fault(name="gate in bfloat16", kinds=("NUMERIC",), make=under(delta(rounded_gate))),
    Fault(name="TF32", kinds=("NUMERIC",), make=under(rounded_matmul(10))),
    Fault(name="norm epsilon", kinds=("NUMERIC",), make=under(norm_epsilon)),
    Fault(name="sums in changing order", kinds=("INVAR",), make=under(split_sums)),
)
