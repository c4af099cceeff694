"""fla's own Triton kernels on a machine without a GPU: everything the interpreter needs, in one file.

Triton runs kernels on CPU as numpy when `TRITON_INTERPRET=1` is set before it is imported. Four things
stand between that and fla's gated delta rule, and `install` mends each of them:

1. fla's kernels are autotuned; the tuner asks for a GPU driver to time its configurations. It is given
   one configuration, the first, so that there is nothing to time.
2. `chunk_delta_h` calls a method of its loop variable, which is a Python int in the interpreter. The
   `range` of that module yields Triton scalars instead.
3. bfloat16 is stored as raw 16-bit patterns, and dot and elementwise arithmetic compute with the
   patterns (triton#11584, and the same in `binary_op`). Operands are widened to float32 first, and
   elementwise results rounded back. Dot products accumulate in float32, as on a GPU.
4. float32 -> bfloat16 truncates, where a GPU rounds to nearest even; the interpreter's own
   round-to-nearest breaks ties upwards and loses the carry into the exponent. Both are replaced.

`self_test` compares the result with an fp64 recurrence. Its numbers must hold before anything computed
here is believed; a version outside the table is refused.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

from parity.errors import ParityError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Method = Callable[..., object]
"""A method of Triton's interpreter, which has no types."""

TESTED_TRITON = ("3.7", "3.8", "3.9")
TESTED_FLA = ("0.6",)
# Relative L2 against the fp64 recurrence on the self-test's input. Measured with torch 2.13.0, triton
# 3.9.0, fla 0.6.0: fp32 2.0e-7, bf16 4.8e-3. The limits leave a factor of three. What they guard against
# is far above: raw bit patterns 1e9, a wrong chunk 1. Truncated casts are 2x and are tested by their bits.
SELF_TEST_LIMIT = {"float32": 6e-7, "bfloat16": 1.5e-2}

_installed = False
_launched = [0]


def prepare_environment() -> None:
    """Set what must be set before triton is imported. Raises ParityError where it already was."""
    triton = sys.modules.get("triton")
    if triton is not None and os.environ.get("TRITON_INTERPRET") != "1":
        raise ParityError(
            "backend fla-interpreted",
            "triton already imported without TRITON_INTERPRET=1",
            "capture in a worker process (parity.capture does), or set the variable first",
        )
    os.environ["TRITON_INTERPRET"] = "1"


def versions() -> dict[str, str]:
    """Versions of triton and fla on this machine. Raises ParityError where one is missing."""
    found = {}
    for name in ("triton", "flash-linear-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ParityError(
                "backend fla-interpreted", f"no package {name}", f"pip install {name}"
            ) from error
    return found


def install() -> None:
    """Make fla's kernels run on CPU in this process. Idempotent. Raises ParityError on untested versions."""
    global _installed
    if _installed:
        return
    found = versions()
    tested = {"triton": TESTED_TRITON, "flash-linear-attention": TESTED_FLA}
    for name, version in found.items():
        if not any(version == known or version.startswith(known + ".") for known in tested[name]):
            raise ParityError(
                "backend fla-interpreted",
                f"{name} {version}, tested are {', '.join(tested[name])}",
                f"install a tested {name}, or use --backend torch",
            )
    prepare_environment()
    _first_configuration_only()
    _exact_bfloat16()
    _count_launches()
    _scalar_range()
    _installed = True


def _first_configuration_only() -> None:
    """Autotuners built from now on know one configuration: with nothing to choose, nothing is timed."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(
        self: object,
        fn: object,
        arg_names: object,
        configs: Iterable[object],
        *args: object,
        **kwargs: object,
    ) -> None:
        original(self, fn, arg_names, list(configs)[:1], *args, **kwargs)

    Autotuner.__init__ = init


def launches() -> int:
    """How many kernels were interpreted in this process so far."""
    return _launched[0]


def _count_launches() -> None:
    """Count each kernel that is interpreted: a call that launches none did not run fla's kernels."""
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__

    def call(self: object, *args: object, **kwargs: object) -> object:
        _launched[0] += 1
        return original(self, *args, **kwargs)

    GridExecutor.__call__ = call


def _scalar_range() -> None:
    """Let the loops of `chunk_delta_h` yield Triton scalars, as a compiled kernel's would be."""
    import triton.language as tl

    module = importlib.import_module("fla.ops.common.chunk_delta_h")

    def scalars(*bounds: object) -> Iterator[object]:
        for index in range(*(_plain(bound) for bound in bounds)):
            yield tl.full((), index, tl.int32)

    vars(module)["range"] = scalars


def _plain(value: Any) -> int:
    """The Python number inside a Triton scalar or constexpr."""
    value = getattr(value, "value", value)
    handle = getattr(value, "handle", None)
    return int(handle.data.item() if handle is not None else value)


def round_to_bfloat16(values: "ArrayLike") -> "NDArray[np.uint16]":
    """float32 array -> uint16 bit patterns of bfloat16, to nearest, ties to even (IEEE 754). NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    bias = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    with np.errstate(over="ignore"):  # only a NaN's pattern can wrap, and NaNs are set below
        rounded = ((bits + bias) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def widen_bfloat16(patterns: "ArrayLike") -> "NDArray[np.float32]":
    """uint16 bit patterns of bfloat16 -> the same values as float32; exact."""
    import numpy as np

    wide = np.asarray(patterns).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


class _TritonType(Protocol):
    """A type of Triton's language."""

    scalar: object


class _Handle(Protocol):
    """A tensor of the interpreter: a numpy array and its Triton type."""

    data: "NDArray[np.generic]"
    dtype: _TritonType


def _exact_bfloat16() -> None:
    """Replace the interpreter's casts, arithmetic and dot where bfloat16 takes part."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle: Callable[..., _Handle] = interpreter.TensorHandle

    def is_bfloat16(operand: _Handle) -> bool:
        # A comparison's result keeps its operands' Triton type but holds booleans.
        return bool(operand.dtype.scalar == tl.bfloat16) and operand.data.dtype == np.uint16

    def wide(operand: _Handle) -> _Handle:
        return handle(widen_bfloat16(operand.data), tl.float32) if is_bfloat16(operand) else operand

    def narrow(result: _Handle) -> _Handle:
        if result.data.dtype == np.bool_:
            return handle(result.data, tl.bfloat16)
        return handle(round_to_bfloat16(result.data), tl.bfloat16)

    # Arithmetic: operands in float32, the result rounded back.
    def widen_operands(original: Method, operands: int) -> Method:
        def method(self: object, *args: _Handle) -> object:
            tensors, rest = args[:operands], args[operands:]
            if not any(is_bfloat16(tensor) for tensor in tensors):
                return original(self, *args)
            return narrow(cast(_Handle, original(self, *(wide(tensor) for tensor in tensors), *rest)))

        return method

    # Casts from and to float32; every other cast is left as it is.
    def cast_exactly(original: Method) -> Method:
        def method(self: object, src: _Handle, dst_type: _TritonType, *rest: object) -> object:
            source, target = src.dtype.scalar, dst_type.scalar
            if source == tl.float32 and target == tl.bfloat16:
                return handle(round_to_bfloat16(src.data), target)
            if is_bfloat16(src) and target == tl.float32:
                return handle(widen_bfloat16(src.data), target)
            return original(self, src, dst_type, *rest)

        return method

    # Dot products accumulate in float32, as on a GPU.
    def dot(original: Method) -> Method:
        def method(self: object, a: _Handle, b: _Handle, d: object, *rest: object) -> object:
            return original(self, wide(a), wide(b), d, *rest)

        return method

    operands = {
        "binary_op": 2,
        "unary_op": 1,
        "create_fma": 3,
        "create_rsqrt": 1,
        "create_erf": 1,
        "create_clampf": 3,
    }
    for name, count in operands.items():
        setattr(builder, name, widen_operands(getattr(builder, name), count))
    builder.cast_impl = cast_exactly(builder.cast_impl)
    builder.create_fp_to_fp = cast_exactly(builder.create_fp_to_fp)
    builder.create_dot = dot(builder.create_dot)


def self_test(dtype: str, tokens: int = 70) -> float:
    """Relative L2 of fla's chunk kernel under the interpreter against an fp64 recurrence.

    Args:
        dtype: of the inputs, a key of `SELF_TEST_LIMIT`.
        tokens: of the one row; more than 64 make two chunks, so that the state between them counts.

    Raises:
        ParityError: where the error exceeds `SELF_TEST_LIMIT[dtype]`: then no number of this backend is to be
            believed.
    """
    import torch

    from parity.model.target.golden import delta_rule

    install()
    chunk = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, 2, *shape, generator=generator).to(getattr(torch, dtype))

    # Seeded inputs, two heads of width 16; the decay is slow, so that the state matters.
    q, k, v = draw(16), draw(16), draw(16)
    g, beta = -0.02 * draw().float().abs(), draw().sigmoid()
    got, _ = chunk(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    want, _ = delta_rule(q, k, v, g=g, beta=beta)
    error = float((got.double() - want).norm() / want.norm())
    if not error <= SELF_TEST_LIMIT[dtype]:
        raise ParityError(
            f"backend fla-interpreted in {dtype}",
            f"a self-test error of {error:.2e} against fp64, limit {SELF_TEST_LIMIT[dtype]:.1e}",
            "report it with `parity env`; use --backend torch meanwhile",
        )
    return error
