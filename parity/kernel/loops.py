"""The compiled loops of `parity.kernel.sums`: vectors of a fixed number of lanes, so that every machine adds alike.

A compiler that may reorder sums takes as many lanes as the machine is wide, and the last bits follow the
machine. Here the loops are written in LLVM's own vectors: an element's lane depends on its channel alone,
lanes are joined in a fixed tree, products are added by fused multiply-adds asked for by name. LLVM splits the
vectors for narrower machines and no bit changes. It is also twice as fast as what the vectoriser made.

Arrays come as integer views whose numba type names the format: uint8 e4m3fn, int8 e5m2, int16 fp16, uint16
bf16, uint32 fp32, uint64 fp64. Two formats below 4 bytes are summed in float32 lanes, flushed to float64
before _RUN elements (32 additions a lane: 9.5e-7 at worst, 1e-8 in practice); all others in float64.
Imported by the first comparison that is large enough to need it: numba takes .8 s. One file, because numba's
cache on disk knows compiled code by the file of its loop.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

numba: Any = import_module("numba")
_ext: Any = import_module("numba.extending")
_cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")
_types = numba.types
# numba and llvmlite have no type stubs: these names say what each untyped object is.
_Builder = Any
"""llvmlite's IRBuilder, which writes instructions."""
_Value = Any
"""A value of LLVM's: what an instruction gives; or, in a signature, the numba type of an argument."""
_Type = Any
"""A type of LLVM's: a vector, a float, an integer."""
_Lowering = Any
"""numba's target context, and the signature that it lowers."""
_Codes = NDArray[np.unsignedinteger]
"""[rows, channels] integer view of a tensor, whose numba type names the format."""
_Mask = NDArray[np.uint16]
"""[channels] all ones where a channel counts, 0 where it is left out."""
_Counts = NDArray[np.int64]
_Sums = NDArray[np.float64]

_BLOCK, _RUN, _FLUSH_ROWS = 32, 512, 8
"""Elements of one step of a loop; of one run in float32 lanes; rows that share the channels' lanes."""
_ULP_STEPS = 16384
"""Steps after which 16-bit counters are emptied: fewer than 32,768."""
_DOT, _SUM_ABS, _MAX, _ROBUST, _BAD = 0, 4, 7, 8, 12
"""Where parts of `parity.kernel.sums.FIELDS` begin: four products, three sums, the maximum, ..."""
_ULP_EDGES = (0, 1, 4, 16, 64)
_TOP = {
    _types.uint8: 0x7E,
    _types.int8: 0x7C,
    _types.int16: 0x7C00,
    _types.uint16: 0x7F80,
    _types.uint32: 0x7F800000,
    _types.uint64: 0x7FF0000000000000,
}
"""Largest magnitude code that is not NaN (e4m3fn has no infinity)."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()


def _vector(element: _Type, lanes: int) -> _Value:
    return ir.VectorType(element, lanes)


def _splat(kind: _Type, value: float) -> _Value:
    return ir.Constant(kind, [value] * kind.count)


def _intrinsic(b: _Builder, name: str, result: _Type, *values: _Value) -> _Value:
    """Call one of LLVM's own functions over values of one vector type."""
    kind = values[0].type
    letters = {_F32: "f32", _F64: "f64"}.get(kind.element) or f"i{kind.element.width}"
    types = ir.FunctionType(result, [value.type for value in values])
    function = _cgutils.get_or_insert_function(b.module, types, f"llvm.{name}.v{kind.count}{letters}")
    return b.call(function, values)


def _load(b: _Builder, base: _Value, byte: _Value, kind: _Type) -> _Value:
    """A vector from any byte address."""
    loaded = b.load(b.gep(base, [byte], source_etype=_I8), typ=kind)
    loaded.align = 1
    return loaded


_SMALL = {
    _types.uint8: (8, 20, 120, 0x7F),
    _types.int8: (8, 21, 112, 0x7C),
    _types.int16: (16, 13, 112, 0x7C00),
}
"""Bits, shift into float32's fields, difference of the exponents' biases, first code of infinity or NaN."""


def _value(b: _Builder, code: _Value, v: _Value, real: _Type) -> _Value:
    """Codes of a format as floats, exactly."""
    n = v.type.count
    single, word = _vector(_F32, n), _vector(_I32, n)
    if code in _SMALL:
        found = _small_value(b, b.zext(v, word), *_SMALL[code])
    elif code == _types.uint16:
        found = b.bitcast(b.shl(b.zext(v, word), _splat(word, 16)), single)
    else:
        found = b.bitcast(v, single if code == _types.uint32 else _vector(_F64, n))
    return found if found.type.element == real else b.fpext(found, _vector(real, n))


def _small_value(b: _Builder, w: _Type, bits: int, shift: int, bias: int, special: int) -> _Value:
    """fp16 and fp8 codes in 32-bit lanes as float32, by integers: not every machine reads fp16, and a process may
    have told its own to take subnormals for 0."""
    word, single = w.type, _vector(_F32, w.type.count)
    size = b.and_(w, _splat(word, (1 << (bits - 1)) - 1))
    moved = b.shl(size, _splat(word, shift))
    one = _splat(word, (bias + 1) << 23)  # the smallest normal number, for the steps below it
    small = b.fsub(b.bitcast(b.add(moved, one), single), b.bitcast(one, single))
    normal = b.bitcast(b.add(moved, _splat(word, bias << 23)), single)
    value = b.select(b.icmp_unsigned("<", moved, _splat(word, 1 << 23)), small, normal)
    beyond = b.bitcast(b.or_(moved, _splat(word, 0x7F800000)), single)
    value = b.select(b.icmp_unsigned(">=", size, _splat(word, special)), beyond, value)
    sign = b.shl(b.and_(w, _splat(word, 1 << (bits - 1))), _splat(word, 32 - bits))
    return b.bitcast(b.or_(b.bitcast(value, word), sign), single)


def _real(x: _Value, y: _Value) -> _Value:
    """What two formats are summed in."""
    return _F32 if max(x.bitwidth, y.bitwidth) < 32 else _F64


class _Pair:
    """Reads both sides' elements, a block at a time, as vectors of one float type.

    Two bf16 sides are read as 32-bit words: even elements are a shift, odd ones a mask, and no lane moves.
    """

    def __init__(self, b: _Builder, x: _Value, y: _Value) -> None:
        self.b, self.codes, self.real = b, (x, y), _real(x, y)
        self.words = x == y == _types.uint16
        self.lanes = 16 if self.real == _F32 else 8
        self.kind = _vector(self.real, self.lanes)
        self.integer = _vector(_I32 if self.real == _F32 else _I64, self.lanes)

    def read(self, side: int, base: _Value, at: _Value) -> list[_Value]:
        """The elements at index `at` (an i64) and the 31 after it."""
        b, code = self.b, self.codes[side]
        size = code.bitwidth // 8
        byte = b.mul(at, _I64(size))
        if self.words:
            w = _load(b, base, byte, self.integer)
            low = b.shl(w, _splat(self.integer, 16))
            return [b.bitcast(v, self.kind) for v in (low, b.and_(w, _splat(self.integer, 0xFFFF0000)))]
        raw = _vector(ir.IntType(code.bitwidth), self.lanes)
        steps = range(0, _BLOCK * size, self.lanes * size)
        return [_value(b, code, _load(b, base, b.add(byte, _I64(step)), raw), self.real) for step in steps]

    def zero_masked_channels(self, vectors: Sequence[_Value], base: _Value, at: _Value) -> list[_Value]:
        """The vectors with the channels whose mask (16 bits each) is 0 set to 0."""
        b, byte = self.b, self.b.mul(at, _I64(2))
        if self.words:
            w = _load(b, base, byte, self.integer)
            masks = [b.shl(w, _splat(self.integer, 16)), w]
        else:
            raw = _vector(ir.IntType(16), self.lanes)
            steps = [b.add(byte, _I64(step)) for step in range(0, 2 * _BLOCK, 2 * self.lanes)]
            masks = [b.sext(_load(b, base, step, raw), self.integer) for step in steps]
        return [
            b.bitcast(b.and_(b.bitcast(v, self.integer), mask), self.kind)
            for v, mask in zip(vectors, masks, strict=True)
        ]

    def in_order(self, vectors: Sequence[_Value]) -> list[_Value]:
        """Vectors whose lanes are consecutive channels."""
        if not self.words:
            return list(vectors)
        n, b = self.lanes, self.b
        orders = ([lane // 2 + n * (lane % 2) + half for lane in range(n)] for half in (0, n // 2))
        return [b.shuffle_vector(*vectors, ir.Constant(_vector(_I32, n), order)) for order in orders]

    def size(self, v: _Value) -> _Value:
        """Its absolute values."""
        return _intrinsic(self.b, "fabs", v.type, v)


def _fma(b: _Builder, x: _Value, y: _Value, z: _Value) -> _Value:
    return _intrinsic(b, "fma", x.type, x, y, z)


def _larger(b: _Builder, x: _Value, y: _Value) -> _Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _join_lanes(b: _Builder, v: _Value, join: Callable[[_Value, _Value, _Value], _Value]) -> _Value:
    """A vector's lanes joined: the upper half to the lower, until one is left."""
    n = v.type.count
    while n > 1:
        n //= 2
        halves = [
            b.shuffle_vector(v, v, ir.Constant(_vector(_I32, n), list(range(start, start + n))))
            for start in (0, n)
        ]
        v = join(b, *halves)
    return b.extract_element(v, _I32(0))


def _pointer(context: _Lowering, b: _Builder, kind: _Type, value: _Value) -> _Value:
    """The address of an array's first element."""
    return b.bitcast(context.make_array(kind)(context, b, value).data, ir.PointerType())


def _row(context: _Lowering, b: _Builder, kind: _Type, value: _Value, row: _Value) -> _Value:
    """The address of a row of a contiguous [rows, width] array."""
    array = context.make_array(kind)(context, b, value)
    width = _cgutils.unpack_tuple(b, array.shape, 2)[1]
    byte = b.mul(b.mul(row, width), array.itemsize)
    return b.gep(b.bitcast(array.data, ir.PointerType()), [byte], source_etype=_I8)


def _at(b: _Builder, base: _Value, index: _Value, kind: _Type) -> _Value:
    """The address of a value, or vector, of 8-byte elements."""
    element = getattr(kind, "element", kind)
    return b.bitcast(b.gep(base, [index], source_etype=element), kind.as_pointer())


def _variables(b: _Builder, kind: _Type, count: int) -> list[_Value]:
    """Registers that start at zero (LLVM turns these into such)."""
    made = [_cgutils.alloca_once(b, kind) for _ in range(count)]
    for each in made:
        b.store(_splat(kind, 0.0), each)
    return made


def _row_lanes_code(
    _: _Value, x: _Value, y: _Value, row: _Value, mask: _Value, count: _Value, out: _Value
) -> _Value:
    """Add the first `count` elements (a multiple of _BLOCK) of a row to its robust sums in `out` [rows, fields]."""

    def code(context: _Lowering, b: _Builder, signature: _Lowering, arguments: _Value) -> _Value:
        px, py, po = (_row(context, b, signature.args[i], arguments[i], arguments[2]) for i in (0, 1, 5))
        pm, pair, count = (
            _pointer(context, b, signature.args[3], arguments[3]),
            _Pair(b, x.dtype, y.dtype),
            arguments[4],
        )
        # Runs that are short enough for float32 lanes; each channel goes to its own lane.
        totals, (top,) = _variables(b, _vector(_F64, pair.lanes), 7), _variables(b, pair.kind, 1)
        with _cgutils.for_range_slice(b, _I64(0), count, _I64(_RUN), _I64) as (start, _):
            left = b.sub(count, start)
            stop = b.add(start, b.select(b.icmp_signed("<", left, _I64(_RUN)), left, _I64(_RUN)))
            lanes = _variables(b, pair.kind, 7)
            with _cgutils.for_range_slice(b, start, stop, _I64(_BLOCK), _I64) as (at, _):
                sides = [
                    pair.zero_masked_channels(pair.read(side, base, at), pm, at)
                    for side, base in enumerate((px, py))
                ]
                for p, q in zip(*sides, strict=True):
                    d = b.fsub(p, q)
                    size = pair.size(d)
                    for lane, (u, v) in zip(lanes, ((p, q), (p, p), (q, q), (d, d)), strict=False):
                        b.store(_fma(b, u, v, b.load(lane)), lane)
                    for lane, v in zip(lanes[4:], (size, p, q), strict=True):
                        b.store(b.fadd(b.load(lane), v), lane)
                    b.store(_larger(b, size, b.load(top)), top)
            # At the end of a run the lanes are emptied into float64.
            for total, lane in zip(totals, lanes, strict=True):
                part = b.load(lane)
                part = part if pair.real == _F64 else b.fpext(part, _vector(_F64, pair.lanes))
                b.store(b.fadd(b.load(total), part), total)
        # Lanes are joined in a fixed tree, and added to the row's sums.
        for field, total in zip((*range(_ROBUST, _ROBUST + 4), *range(_SUM_ABS, _MAX)), totals, strict=True):
            place = _at(b, po, _I64(field), _F64)
            b.store(
                b.fadd(b.load(place, typ=_F64), _join_lanes(b, b.load(total), lambda b, u, v: b.fadd(u, v))),
                place,
            )
        largest = _join_lanes(b, b.load(top), _larger)
        b.store(largest if pair.real == _F64 else b.fpext(largest, _F64), _at(b, po, _I64(_MAX), _F64))
        return context.get_dummy_value()

    return _types.void(x, y, row, mask, count, out), code


def _channel_lanes_code(_: _Value, x: _Value, y: _Value, count: _Value, channels: _Value) -> _Value:
    """Add the squares of the first `count` channels of at most _FLUSH_ROWS rows to [3, width] dd, aa, bb."""

    def code(context: _Lowering, b: _Builder, signature: _Lowering, arguments: _Value) -> _Value:
        arrays = [context.make_array(signature.args[i])(context, b, arguments[i]) for i in (0, 1, 3)]
        px, py, pc = (b.bitcast(array.data, ir.PointerType()) for array in arrays)
        rows, width = _cgutils.unpack_tuple(b, arrays[0].shape, 2)
        pair, count = _Pair(b, x.dtype, y.dtype), arguments[2]
        wide = _vector(_F64, pair.lanes)
        with _cgutils.for_range_slice(b, _I64(0), count, _I64(_BLOCK), _I64) as (start, _):
            sums = [_variables(b, pair.kind, _BLOCK // pair.lanes) for _ in range(3)]
            with _cgutils.for_range_slice(b, _I64(0), rows, _I64(1), _I64) as (row, _):
                at = b.add(b.mul(row, width), start)
                for i, (p, q) in enumerate(zip(pair.read(0, px, at), pair.read(1, py, at), strict=True)):
                    for lanes, v in zip(sums, (b.fsub(p, q), p, q), strict=True):
                        b.store(_fma(b, v, v, b.load(lanes[i])), lanes[i])
            for k, lanes in enumerate(sums):
                parts = pair.in_order([b.load(lane) for lane in lanes])
                for i, part in enumerate(parts):
                    index = b.add(b.add(b.mul(width, _I64(k)), start), _I64(i * pair.lanes))
                    place = _at(b, pc, index, wide)
                    part = part if pair.real == _F64 else b.fpext(part, wide)
                    held = b.load(place, typ=wide)
                    held.align = 8
                    b.store(b.fadd(held, part), place).align = 8
        return context.get_dummy_value()

    return _types.void(x, y, count, channels), code


def _ulp_lanes_code(_: _Value, x: _Value, y: _Value, count: _Value, below: _Value) -> _Value:
    """Add to `below` how many of `count` elements (a multiple of _BLOCK) are at most 0, 1, 4, 16, 64 ULP apart."""

    def code(context: _Lowering, b: _Builder, signature: _Lowering, arguments: _Value) -> _Value:
        px, py, po = (_pointer(context, b, signature.args[i], arguments[i]) for i in (0, 1, 3))
        kind, count = x.dtype, arguments[2]
        word = max(16, kind.bitwidth)
        # Codes of 8 bits are counted in words of 16.
        lanes = {16: 32, 32: 16, 64: 8}[word]
        raw, wide = _vector(ir.IntType(kind.bitwidth), lanes), _vector(ir.IntType(word), lanes)
        size = kind.bitwidth // 8
        with _cgutils.for_range_slice(b, _I64(0), count, _I64(lanes * _ULP_STEPS), _I64) as (start, _):
            left, most = b.sub(count, start), _I64(lanes * _ULP_STEPS)
            stop = b.add(start, b.select(b.icmp_signed("<", left, most), left, most))
            # One counter an edge; a comparison that holds is -1, so it is subtracted.
            counters = [_cgutils.alloca_once(b, wide) for _ in _ULP_EDGES]
            for counter in counters:
                b.store(_splat(wide, 0), counter)
            with _cgutils.for_range_slice(b, start, stop, _I64(lanes), _I64) as (at, _):
                u, v = (_load(b, base, b.mul(at, _I64(size)), raw) for base in (px, py))
                distance, known = _distance(b, kind, wide, u, v)
                for edge, counter in zip(_ULP_EDGES, counters, strict=True):
                    near = b.and_(b.icmp_unsigned("<=", distance, _splat(wide, edge)), known)
                    b.store(b.sub(b.load(counter), b.sext(near, wide)), counter)
            # Emptied before 16 bits overflow.
            for i, counter in enumerate(counters):
                found = b.load(counter)
                found = found if word == 64 else b.zext(found, _vector(_I64, lanes))
                place = _at(b, po, _I64(i), _I64)
                b.store(
                    b.add(b.load(place, typ=_I64), _join_lanes(b, found, lambda b, u, v: b.add(u, v))), place
                )
        return context.get_dummy_value()

    return _types.void(x, y, count, below), code


def _distance(b: _Builder, kind: _Type, wide: _Type, u: _Value, v: _Value) -> tuple[_Value, _Value]:
    """ULP distance of two vectors of codes, and where it has a meaning (neither is NaN).

    Codes become signed integers in the order of their values; both zeros are 0. Subtraction saturates.
    """
    bits, word = kind.bitwidth, wide.element.width
    ordered, known = [], []
    for codes in (u, v):
        size = b.and_(codes, _splat(codes.type, (1 << (bits - 1)) - 1))
        known.append(b.icmp_unsigned("<=", size, _splat(codes.type, _TOP[kind])))
        sign = b.ashr(codes, _splat(codes.type, bits - 1))
        placed = b.sub(b.xor(size, sign), sign)
        ordered.append(placed if bits == word else b.sext(placed, wide))
    apart = _intrinsic(b, "ssub.sat", wide, *ordered)
    negative = b.icmp_signed("<", apart, _splat(wide, 0))
    return b.select(negative, b.sub(_splat(wide, 0), apart), apart), b.and_(*known)


def _read_code(_: _Value, code: _Value) -> _Value:
    """One code's value in float64."""

    def generate(context: _Lowering, b: _Builder, signature: _Lowering, arguments: _Value) -> _Value:
        one = _vector(ir.IntType(code.bitwidth), 1)
        v = b.insert_element(ir.Constant(one, ir.Undefined), arguments[0], _I32(0))
        return b.extract_element(_value(b, code, v, _F64), _I32(0))

    return _types.float64(code), generate


_row_lanes, _channel_lanes, _ulp_lanes, _read = (
    _ext.intrinsic(code) for code in (_row_lanes_code, _channel_lanes_code, _ulp_lanes_code, _read_code)
)


def _exact(a: _Codes, b: _Codes, r: int, begin: int, end: int, mask: _Mask, out: _Sums) -> bool:
    """Add channels `begin` to `end` of row `r` to its sums `out` [fields] in float64, one by one. What is not finite
    on either side is left out and counted, and then the answer is False."""
    finite = True
    for c in range(begin, end):
        if mask[c] == 0:
            continue
        p, q = _read(a[r, c]), _read(b[r, c])
        if not (np.isfinite(p) and np.isfinite(q)):
            finite = False
            out[_BAD] += not np.isfinite(p)
            out[_BAD + 1] += not np.isfinite(q)
            out[_BAD + 2] += p == q or (np.isnan(p) and np.isnan(q))
            continue
        d = p - q
        for i, value in enumerate((p * q, p * p, q * q, d * d)):
            out[_ROBUST + i] += value
        for i, value in enumerate((abs(d), p, q)):
            out[_SUM_ABS + i] += value
        out[_MAX] = max(out[_MAX], abs(d))
    return finite


def _lanes_hold(x: _Codes, r: int, count: int, mask: _Mask, square: float, low: float, high: float) -> bool:
    """Whether lanes neither overflowed nor lost anything of a row whose squares sum up to this: a sum within the
    bounds, or zeros only."""
    if low <= square <= high:
        return True
    if square != 0.0:
        return False
    for c in range(count):
        if mask[c] != 0 and _read(x[r, c]) != 0.0:
            return False
    return True


def _rows(
    a: _Codes,
    b: _Codes,
    mask: _Mask,
    left_out: NDArray[np.intp],
    low: float,
    high: float,
    sums: _Sums,
    plain: NDArray[np.bool_],
) -> None:
    """Each row's sums: robust ones in lanes, left-out channels (mask 0) one by one, both together as the plain.

    Rows that the lanes cannot hold are added one by one. `plain` [rows] says whether lanes are exact for the whole
    row, left-out channels included.
    """
    width = a.shape[1]
    whole = width // _BLOCK * _BLOCK
    every, extra = np.full(width, 0xFFFF, np.uint16), np.zeros(sums.shape[1])
    for r in range(a.shape[0]):
        _row_lanes(a, b, r, mask, whole, sums)
        # Lanes count where they can neither overflow nor lose anything; else one element after the other.
        out = sums[r]
        aa, bb = out[_ROBUST + 1], out[_ROBUST + 2]
        if _lanes_hold(a, r, whole, mask, aa, low, high) and _lanes_hold(b, r, whole, mask, bb, low, high):
            plain[r] = _exact(a, b, r, whole, width, mask, out)
        else:
            out[:] = 0.0
            _exact(a, b, r, 0, width, mask, out)
            plain[r] = False
        # Outlier channels one by one: they count in the plain sums only.
        if left_out.size:
            extra[:] = 0.0
            for c in left_out:
                if not _exact(a, b, r, c, c + 1, every, extra):
                    plain[r] = False
            if extra[_ROBUST + 1] > high or extra[_ROBUST + 2] > high:
                plain[r] = False
            for i in range(3):
                out[_SUM_ABS + i] += extra[_SUM_ABS + i]
                out[_BAD + i] += extra[_BAD + i]
            out[_MAX] = max(out[_MAX], extra[_MAX])
        for i in range(4):
            out[_DOT + i] = out[_ROBUST + i] + extra[_ROBUST + i]


def _channels(a: _Codes, b: _Codes, plain: NDArray[np.bool_], channels: _Sums) -> None:
    """Add each row's squares dd, aa, bb to [3, channels]: _FLUSH_ROWS rows in lanes, then float64.

    A group with a row that is not plain is added one by one, leaving out what is not finite on either side.
    """
    rows, width = a.shape
    for first in range(0, rows, _FLUSH_ROWS):
        last = min(rows, first + _FLUSH_ROWS)
        start = width // _BLOCK * _BLOCK if plain[first:last].all() else 0
        _channel_lanes(a[first:last], b[first:last], start, channels)
        for r in range(first, last):
            for c in range(start, width):
                p, q = _read(a[r, c]), _read(b[r, c])
                if np.isfinite(p) and np.isfinite(q):
                    channels[0, c] += (p - q) * (p - q)
                    channels[1, c] += p * p
                    channels[2, c] += q * q


def _ulp(a: _Codes, b: _Codes, counts: _Counts) -> None:
    """Add ULP-distance counts to [6], each element in the first bin that holds it; the end is filled with zeros."""
    x, y = a.reshape(-1), b.reshape(-1)
    whole = x.size // _BLOCK * _BLOCK
    below = np.zeros(5, np.int64)
    _ulp_lanes(x, y, whole, below)
    left = x.size - whole
    if left:
        ends = np.zeros((2, _BLOCK), x.dtype)
        ends[0, :left] = x[whole:]
        ends[1, :left] = y[whole:]
        _ulp_lanes(ends[0], ends[1], _BLOCK, below)
        below -= _BLOCK - left
    last = 0
    for i in range(5):
        counts[i] += below[i] - last
        last = below[i]
    counts[5] += x.size - last


def _blocks(
    a: _Codes,
    b: _Codes,
    mask: _Mask,
    low: float,
    high: float,
    block: int,
    piece: int,
    full: int,
    out: tuple[_Sums, _Sums, _Counts],
) -> None:
    """Whole blocks of rows: `out` is sums [rows, fields], channel sums [blocks, 3, width], ULP counts [6].

    Rows, channels and ULP counts take turns over pieces of rows that stay in the second-level cache.
    """
    sums, channels, counts = out
    plain, left_out = np.zeros(piece, np.bool_), np.flatnonzero(mask == 0)
    for first in range(0, a.shape[0], block):
        end = min(a.shape[0], first + block)
        for at in range(first, end, piece):
            to = min(end, at + piece)
            x, y = a[at:to], b[at:to]
            _rows(x, y, mask, left_out, low, high, sums[at:to], plain)
            if full > 0:
                _channels(x, y, plain, channels[first // block])
            if full > 1:
                _ulp(x, y, counts)


@lru_cache(maxsize=1)
def compile_loops() -> Callable[..., None]:
    """`_blocks`, compiled at first call per pair of dtypes and cached on disk where possible."""
    for inner in (_exact, _lanes_hold, _rows, _channels):
        _ext.register_jitable(inner)
    # Of formats that differ there are no ULP counts, and nothing to compile.
    _ext.register_jitable(_ulp)
    try:
        compiled: Callable[..., None] = numba.njit(_blocks, cache=True, nogil=True, boundscheck=False)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        compiled = numba.njit(_blocks, nogil=True, boundscheck=False)
    return compiled
