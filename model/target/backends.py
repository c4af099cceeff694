"""Who computes the linear-attention operators: choosing a backend, and proving that it ran.

transformers picks the kernels when a modeling file is imported, and every way of picking fails
silently. So a backend is chosen per process (`isolate`, before transformers is imported), and proven
per call (`CallRecorder`): for each linear layer and operator, which function was reached, from which
module, how often. The same wrapper records what the operators return, because they are module
functions that forward hooks do not see.

    isolate(parse_backend("torch"))    # in a fresh process, first thing
    with CallRecorder(modules) as calls:
        model(ids)
    proof = prove(backend, calls.proofs(), linear_layers=[0, 1, 2])
"""

import contextlib
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from parity.errors import ParityError
from parity.tracing.trace import BackendProof, CallProof

if TYPE_CHECKING:
    from torch import Tensor, nn

Operator = Literal["delta", "conv"]
OperatorFunction = Callable[..., "Tensor | tuple[Tensor, Tensor | None]"]
"""An operator as a modeling file calls it; the delta rule returns its state too."""
DELTA = ("torch", "fla", "fla-interpreted", "golden")
CONV = ("torch", "causal-conv1d", "golden")
# The names under which the modeling files of transformers 5.15 and later call the two operators. The
# names say torch; what they hold is whatever the import resolved to.
FUNCTIONS: dict[str, Operator] = {
    "torch_chunk_gated_delta_rule": "delta",
    "torch_recurrent_gated_delta_rule": "delta",
    "causal_conv1d_fn": "conv",
    "causal_conv1d_update": "conv",
}
# Up to 5.14 each linear-attention module holds its functions as attributes of the instance.
ATTRIBUTES: dict[str, Operator] = {
    "chunk_gated_delta_rule": "delta",
    "recurrent_gated_delta_rule": "delta",
    "causal_conv1d_fn": "conv",
    "causal_conv1d_update": "conv",
}
SHORTHANDS = {
    "torch": ("torch", "torch"),
    "fla": ("fla", "torch"),
    "fla-interpreted": ("fla-interpreted", "torch"),
    "fast": ("fla", "causal-conv1d"),
    "golden": ("golden", "golden"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """The two independent choices."""

    delta: str
    """Who computes the gated delta rule: one of `DELTA`."""
    conv: str
    """Who computes the short convolution: one of `CONV`."""

    @property
    def name(self) -> str:
        """The shorthand where there is one, else `delta+conv`."""
        for name, pair in SHORTHANDS.items():
            if pair == (self.delta, self.conv):
                return name
        return f"{self.delta}+{self.conv}"

    @property
    def choices_by_operator(self) -> dict[str, str]:
        """The choices by operator, as a manifest holds them."""
        return {"delta": self.delta, "conv": self.conv}


def parse_backend(text: str) -> Backend:
    """`torch`, `fla`, `fla-interpreted`, `fast`, `golden`, or `DELTA+CONV`. Raises ParityError otherwise."""
    delta, _, conv = text.partition("+")
    if not conv and text in SHORTHANDS:
        delta, conv = SHORTHANDS[text]
    if delta not in DELTA or conv not in CONV or (delta == "golden") != (conv == "golden"):
        raise ParityError(
            f"backend {text!r}",
            "no such backend",
            f"use one of {', '.join(SHORTHANDS)}, or DELTA+CONV such as fla+causal-conv1d",
        )
    return Backend(delta=delta, conv=conv)


def missing(backend: Backend) -> str | None:
    """Why this backend cannot run on this machine, in words, or None where it can."""
    from parity.environment import package_version

    needs = {
        "fla": "flash-linear-attention",
        "fla-interpreted": "flash-linear-attention",
        "causal-conv1d": "causal-conv1d",
    }
    for choice in (backend.delta, backend.conv):
        if choice in needs and package_version(needs[choice]) == "absent":
            return f"{needs[choice]} is not installed"
    if backend.delta == "fla-interpreted" and package_version("triton") == "absent":
        return "triton is not installed"
    if (backend.delta == "fla" or backend.conv == "causal-conv1d") and not _cuda():
        return "no CUDA device"
    return None


def device_map(backend: Backend) -> str | None:
    """Where a target goes when the user does not say: kernels that need CUDA cannot take a CPU tensor."""
    return "cuda" if backend.delta == "fla" or backend.conv == "causal-conv1d" else None


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def isolate(backend: Backend, hide: Iterable[str] = ()) -> tuple[str, ...]:
    """Make this fresh process choose `backend`, before transformers is imported.

    Args:
        hide: modules that must not be found, beside those that the backend excludes.

    Returns:
        Problems in words: a backend that could not be set up is not an error here, for the call proof will show
        that something else ran.

    Raises:
        ParityError: where transformers was imported already.
    """
    if "transformers" in sys.modules:
        raise ParityError(
            f"backend {backend.name} in this process",
            "transformers imported already",
            "capture in a worker process; the kernels are chosen at import",
        )
    # A module that is None in sys.modules cannot be imported; what was loaded of it is dropped.
    hidden = set(hide)
    if backend.delta in ("torch", "golden"):
        hidden.add("fla")
    if backend.conv in ("torch", "golden"):
        hidden.add("causal_conv1d")
    for name in hidden:
        for loaded in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]
    # fla's kernels: true float32 on a GPU, Triton's interpreter without one.
    if backend.delta == "golden":
        return ()
    if backend.delta != "fla-interpreted":
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        return ()
    from parity.model.target import interpreter

    try:
        interpreter.install()
    except ImportError as error:
        return (f"fla's kernels could not be set up: {error}",)
    return ()


def implementation_of(function: object) -> tuple[str, str]:
    """(implementation, `module.qualname`) of a function, by the module that holds it.

    Implementations: `torch`, `fla`, `fla-interpreted`, `causal-conv1d`, `golden`, `hub:...`, `unknown:...`.
    """
    target = function
    if not hasattr(function, "__qualname__"):  # a hub kernel's Func module: its forward is the function
        forward = getattr(function, "forward", function)
        target = getattr(forward, "__func__", forward)
    module = str(getattr(target, "__module__", type(target).__module__))
    callee = f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    top = module.split(".")[0]
    if top == "fla":
        return ("fla-interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else "fla"), callee
    if top == "causal_conv1d":
        return "causal-conv1d", callee
    if top in ("transformers", "torch"):
        return "torch", callee
    if module == "parity.model.target.golden":
        return "golden", callee
    if top.startswith("kernels") or "kernels" in str(getattr(sys.modules.get(module), "__file__", "")).split(
        os.sep
    ):
        return f"hub:{top}", callee
    return f"unknown:{top}", callee


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCall:
    """One operator call as it ran, with what went in and came out (tensors by argument name)."""

    layer: int
    operator: Operator
    function: str
    inputs: "Mapping[str, Tensor]"
    options: Mapping[str, Any]
    output: "Tensor"

    def digest(self) -> str:
        """Hash of the inputs' bytes: two calls with equal digests compute the same."""
        import torch

        digest = hashlib.sha256(self.function.encode())
        for name, value in sorted(self.inputs.items()):
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class CallRecorder:
    """Counts, per linear layer and operator, the functions that were reached; optionally keeps the calls.

    Restores everything on exit. Global to all models of the same modeling file while it is on.
    """

    def __init__(
        self,
        modules: "Mapping[int, nn.Module]",
        *,
        golden: bool = False,
        keep: bool = False,
        on_output: "Callable[[int, Operator, Tensor], None] | None" = None,
    ) -> None:
        """Prepare a recorder; it counts between `__enter__` and `__exit__`.

        Args:
            modules: decoder layer's index -> its linear-attention module.
            golden: put the fp64 recurrences in place of the operators.
            keep: keep every call with its inputs, in `calls`.
            on_output: called with layer, operator and output of every call.
        """
        self.modules, self.golden, self.keep, self.on_output = modules, golden, keep, on_output
        self.counts: Counter[tuple[int, Operator, str, str]] = Counter()
        self.calls: list[OperatorCall] = []
        self.entered: Counter[int] = Counter()
        self._layer: list[int] = []
        self._reached: list[OperatorFunction] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "CallRecorder":
        with contextlib.ExitStack() as stack:
            for layer, module in self.modules.items():
                self._watch_layer(stack, layer, module)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def proofs(self) -> tuple[CallProof, ...]:
        """What ran, by layer and operator, in canonical order."""
        return tuple(
            CallProof(layer=layer, operator=operator, implementation=name, callee=callee, calls=count)
            for (layer, operator, name, callee), count in sorted(self.counts.items())
        )

    def _watch_layer(self, stack: contextlib.ExitStack, layer: int, module: "nn.Module") -> None:
        def enter(*_: object) -> None:
            self._layer.append(layer)
            self.entered[layer] += 1

        def leave(*_: object) -> None:
            self._layer.pop()

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        for space, names in (
            (vars(sys.modules[type(module).__module__]), FUNCTIONS),
            (vars(module), ATTRIBUTES),
        ):
            for name, operator in names.items():
                if callable(space.get(name)) and not isinstance(space[name], _Wrapper):
                    self._replace(stack, space, name, operator)

    def _replace(
        self, stack: contextlib.ExitStack, space: dict[str, Any], name: str, operator: Operator
    ) -> None:
        original = space[name]
        called = _golden_function(name) if self.golden else original
        if not self.golden:
            stack.enter_context(self._watched_cells(original))
        space[name] = _Wrapper(self, name, operator, called)
        stack.callback(space.__setitem__, name, original)

    @contextlib.contextmanager
    def _watched_cells(self, function: OperatorFunction) -> Iterator[None]:
        """Put a marker inside transformers' wrapper, at the very call of the implementation it chose."""
        code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        cells = dict(zip(code.co_freevars if code else (), closure, strict=True))
        watched = [
            cell for name in ("implementation", "torch_function") if (cell := cells.get(name)) is not None
        ]
        originals = [cell.cell_contents for cell in watched]
        for cell, original in zip(watched, originals, strict=True):
            cell.cell_contents = self._marking(original)
        try:
            yield
        finally:
            for cell, original in zip(watched, originals, strict=True):
                cell.cell_contents = original

    def _marking(self, function: OperatorFunction) -> OperatorFunction:
        def count_and_call(*args: object, **kwargs: object) -> "Tensor | tuple[Tensor, Tensor | None]":
            self._reached.append(function)
            return function(*args, **kwargs)

        return count_and_call

    def run(
        self,
        name: str,
        operator: Operator,
        function: OperatorFunction,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> "Tensor | tuple[Tensor, Tensor | None]":
        """Call the operator, and count whom the call reached.

        Args:
            name: under which the model calls it, one of `FUNCTIONS` or `ATTRIBUTES`.
            function: what the name holds, or the fp64 recurrence in its place.
            args, kwargs: of the call.
        """
        if not self._layer:  # another model of the same file, outside the watched layers
            return function(*args, **kwargs)
        before, launches = len(self._reached), _launches()
        inputs, options = _bind(name, args, kwargs) if self.keep else ({}, {})
        result = function(*args, **kwargs)
        # The marker inside transformers' wrapper reports the function that the wrapper chose; where there is no
        # wrapper, what was called is what ran.
        callees = self._reached[before:] or [function]
        del self._reached[before:]
        implementation, callee = implementation_of(callees[-1])
        if implementation == "fla-interpreted" and _launches() == launches:
            implementation = "unknown:fla without a kernel launch"
        layer = self._layer[-1]
        self.counts[layer, operator, implementation, callee] += 1
        output = result[0] if isinstance(result, tuple) else result
        if self.keep:
            self.calls.append(
                OperatorCall(
                    layer=layer,
                    operator=operator,
                    function=name,
                    inputs=inputs,
                    options=options,
                    output=output.detach().clone(),
                )
            )
        if self.on_output is not None:
            self.on_output(layer, operator, output)
        return result


class _Wrapper:
    """Replaces an operator while a recorder is on."""

    def __init__(
        self, recorder: CallRecorder, name: str, operator: Operator, function: OperatorFunction
    ) -> None:
        self.recorder, self.name, self.operator, self.function = recorder, name, operator, function

    def __call__(self, *args: object, **kwargs: object) -> "Tensor | tuple[Tensor, Tensor | None]":
        return self.recorder.run(self.name, self.operator, self.function, args, kwargs)


def _launches() -> int:
    """How many Triton kernels the interpreter ran so far in this process; 0 where it is not installed."""
    interpreter = sys.modules.get("parity.model.target.interpreter")
    return interpreter.launches() if interpreter is not None else 0


def _golden_function(name: str) -> OperatorFunction:
    from parity.model.target import golden

    functions: dict[str, OperatorFunction] = {
        "delta": golden.delta_operator,
        "causal_conv1d_fn": golden.conv_operator,
        "causal_conv1d_update": golden.conv_update,
    }
    return functions[name if name.startswith("causal") else "delta"]


PARAMETERS = {
    "delta": ("query", "key", "value", "g", "beta", "chunk_size", "initial_state"),
    "causal_conv1d_fn": ("x", "weight", "bias", "activation"),
    "causal_conv1d_update": ("x", "state", "weight", "bias", "activation"),
}
# The arguments that are no tensors and change the result; a model passes others along that do not.
OPTIONS = ("chunk_size", "use_qk_l2norm_in_kernel", "output_final_state", "activation")


def _bind(
    name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> "tuple[dict[str, Tensor], dict[str, object]]":
    """(tensors, everything else) of one call by argument name; tensors cloned, since states are updated in place."""
    import torch

    names = PARAMETERS[name if name.startswith("causal") else "delta"]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    tensors = {key: value.detach().clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    return tensors, {key: given[key] for key in OPTIONS if given.get(key) is not None}


def prove(
    backend: Backend, calls: tuple[CallProof, ...], linear_layers: Iterable[int], problems: Iterable[str] = ()
) -> BackendProof:
    """Judge what ran by what was requested.

    Every linear layer must have reached the requested implementation of both operators, and nothing else.

    Args:
        calls: what ran, by layer and operator.
        linear_layers: indices of the layers that had to run.
        problems: what went wrong while the backend was set up; each makes the proof invalid.
    """
    wrong = list(problems)
    for layer in linear_layers:
        for operator, wanted in backend.choices_by_operator.items():
            ran = {call.implementation for call in calls if (call.layer, call.operator) == (layer, operator)}
            if not ran:
                wrong.append(f"layer {layer} {operator}: no call was seen, asked for {wanted}")
            elif ran != {wanted}:
                wrong.append(f"layer {layer} {operator}: {', '.join(sorted(ran))} ran, asked for {wanted}")
    return BackendProof(
        requested=backend.choices_by_operator, calls=calls, valid=not wrong, problems=tuple(wrong)
    )
