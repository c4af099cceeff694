"""One request through a target: every tap recorded, with proof of who computed it.

target = load_target(TargetSpec(model="Qwen/Qwen3-0.6B", dtype="bfloat16"))
taps = forward(target, [1, 2, 3], backend=parse_backend("torch")).taps     # {"layer.0.out": [3, width], ...}
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parity.errors import ParityError
from parity.model.target.backends import Backend, CallRecorder, OperatorCall, prove
from parity.model.target.golden import Float64Promotion, hold_layers_in_float64, promote_to_float64
from parity.model.target.load import Target
from parity.model.target.taps import TapRecorder, select_taps
from parity.tracing.trace import BackendProof

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardResult:
    """What one request's forward gave."""

    taps: dict[str, Tensor]
    """[tokens, width] for each tap, of the first row, on CPU, in the dtype computed."""
    proof: BackendProof
    calls: list[OperatorCall]


def forward(
    target: Target,
    token_ids: Sequence[int],
    *,
    backend: Backend,
    taps: Sequence[str] | None = None,
    mode: str = "prefill",
    local: Mapping[str, Tensor] | None = None,
    rows: int = 1,
    keep_calls: bool = False,
    problems: Iterable[str] = (),
) -> ForwardResult:
    """Run the target on one request and record its taps, with proof of who computed it.

    Args:
        token_ids: of the request, without padding.
        backend: what this process was set up to compute with; the proof says whether it did.
        taps: as `select_taps` reads them.
        mode: `prefill` (one pass), `decode` (token by token with a cache), `blocks:N` (N tokens at a time with
            a cache, as verification does).
        local: taps of another trace; each layer is then fed that trace's input, so that it answers for its own
            error alone. Only with `prefill`.
        rows: the request is computed in a batch of this many rows (the others hold the same tokens, rotated), to
            measure what the batch size alone changes.
        keep_calls: keep every operator call with its inputs.
        problems: what went wrong while the backend was set up, for the proof.

    Raises:
        ParityError: for taps and modes that do not exist, and for `local` with another mode than prefill.
    """
    names = select_taps(target, taps)
    if local is not None and mode != "prefill":
        raise ParityError(
            f"local error computed as {mode}",
            "a layer's input is one tensor of all tokens",
            "use --as prefill with it",
        )
    batch = [[*token_ids[shift:], *token_ids[:shift]] for shift in range(rows)]
    ids = torch.tensor(batch, device=target.device)
    recorder = TapRecorder(target, names)
    golden, promotion = backend.delta == "golden", Float64Promotion()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        # The order of hooks matters: weights are widened before a layer reads its input, and taps are
        # recorded innermost, behind everything that changes them.
        if golden:
            parts = [*target.layers, target.norm, target.embed]
            parts += [target.head] if target.head is not None and target.head is not target.embed else []
            stack.enter_context(hold_layers_in_float64(target.model, parts, promotion))
        if local is not None:
            stack.enter_context(_feed_inputs(target, local))
        calls = stack.enter_context(
            CallRecorder(target.linear, golden=golden, keep=keep_calls, on_output=recorder.operator)
        )
        stack.enter_context(recorder)
        if golden:
            stack.enter_context(promote_to_float64(promotion))
        _run_steps(target, ids, mode, recorder)
    wrong = [*problems]
    if low := promotion.lower:
        wrong.append(f"golden made {len(low)} floating tensors below float64, first in {low[0]}")
    proof = prove(backend, calls.proofs(), target.linear, wrong)
    return ForwardResult(
        taps={name: tap[0] for name, tap in recorder.result().items()}, proof=proof, calls=calls.calls
    )


def forward_steps(mode: str, tokens: int) -> list[int]:
    """How many tokens each forward of a mode takes. Raises ParityError for an unknown mode."""
    if mode == "prefill":
        return [tokens]
    if mode == "decode":
        return [1] * tokens
    size = mode.removeprefix("blocks:")
    if size == mode or not size.isdigit() or int(size) < 1:
        raise ParityError(f"--as {mode}", "no such way to compute", "use prefill, decode or blocks:N")
    return [min(int(size), tokens - start) for start in range(0, tokens, int(size))]


def new_cache(target: Target) -> "tuple[str, DynamicCache]":
    """(name of the argument of the model's forward, an empty cache)."""
    from transformers import DynamicCache

    # 5.24 renamed the argument; the old name still works there, with a warning for every call.
    parameters = inspect.signature(type(target.model).forward).parameters
    return ("cache" if "cache" in parameters else "past_key_values"), DynamicCache(config=target.config)


def _run_steps(target: Target, ids: Tensor, mode: str, recorder: TapRecorder) -> None:
    """Run [rows, tokens] ids in the steps of a mode."""
    recorder.sizes = forward_steps(mode, ids.shape[1])
    if mode == "prefill":
        recorder.run(input_ids=ids, use_cache=False)
        return
    name, cache = new_cache(target)
    start = 0
    for size in recorder.sizes:
        recorder.run(input_ids=ids[:, start : start + size], use_cache=True, **{name: cache})
        start += size


def replace_layer_input(layer: nn.Module, state: Tensor) -> RemovableHandle:
    """Hook that gives a decoder layer the [tokens, width] `state` as its input, in every row of the batch."""

    def replace(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = args[0] if args else kwargs["hidden_states"]
        fed = state.to(given.device, given.dtype)[None].expand_as(given).contiguous()
        return ((fed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": fed})

    return layer.register_forward_pre_hook(replace, with_kwargs=True)


def _feed_inputs(target: Target, local: Mapping[str, Tensor]) -> ExitStack:
    """Hooks that give each decoder layer another trace's input: that of the layer before it, or the embedding."""
    stack = ExitStack()
    for index, layer in enumerate(target.layers):
        name = "embed.out" if index == 0 else f"layer.{index - 1}.out"
        if name not in local:
            raise ParityError(
                "local error of every layer", f"no {name} in the other trace", "capture it with that tap"
            )
        stack.callback(replace_layer_input(layer, local[name]).remove)
    return stack
