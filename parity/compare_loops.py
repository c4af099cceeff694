"""The loops of `compare_kernel` that numba compiles. As plain Python they are never called.

Arrays come as integer views whose numba type names the format: uint8 e4m3fn, int8 e5m2, int16 fp16,
uint16 bf16, uint32 fp32, uint64 fp64. Narrow formats are summed in float32 lanes over runs of _LANE_RUN
elements (exact to about 1e-7) and then in float64; wide ones in float64. numba is imported at first use.
"""

from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

_LANE_RUN, _FLUSH_ROWS = 1024, 8
_DOT, _SUM_ABS, _MAX, _ROBUST, _BAD = 0, 4, 7, 8, 12
"""Where parts of `compare_kernel.FIELDS` begin: four products, three sums, the maximum, ..."""


def _widen(code: Any, like: Any) -> Any:
    """The code's value in the type of `like` (float32 or float64)."""


def _distance(u: Any, v: Any) -> Any:
    """ULP distance of two codes of one format; NaN is far from everything."""


def _order(size: Any) -> Any:
    """A non-negative float as an integer of the same order; NaN comes last."""


def _unorder(code: Any) -> Any:
    """The float that `_order` came from."""


def _loop_run(x: Any, y: Any, low: Any, high: Any, out: Any) -> Any:
    """Add a run of elements to a row's robust sums; where lanes are not exact, say False and add nothing."""
    zero = low - low
    dot, aa, bb, dd, size, sum_a, sum_b = zero, zero, zero, zero, zero, zero, zero
    top, top_a, top_b = _order(zero), _order(zero), _order(zero)
    for c in range(x.size):
        p, q = _widen(x[c], zero), _widen(y[c], zero)
        d = p - q
        dot += p * q
        aa += p * p
        bb += q * q
        dd += d * d
        size += abs(d)
        sum_a += p
        sum_b += q
        top, top_a, top_b = max(top, _order(abs(d))), max(top_a, _order(abs(p))), max(top_b, _order(abs(q)))
    for largest in (_unorder(top), _unorder(top_a), _unorder(top_b)):
        if not (largest == zero or (largest >= low and largest <= high)):
            return False
    for i, value in enumerate((size, sum_a, sum_b)):
        out[_SUM_ABS + i] += value
    for i, value in enumerate((dot, aa, bb, dd)):
        out[_ROBUST + i] += value
    out[_MAX] = max(out[_MAX], np.float64(_unorder(top)))
    return True


def _loop_exact(x: Any, y: Any, first: Any, out: Any) -> None:
    """Add elements to a row's sums in float64, leaving out and counting what is not finite."""
    for c in range(x.size):
        p, q = _widen(x[c], np.float64(0)), _widen(y[c], np.float64(0))
        bad_a, bad_b = not np.isfinite(p), not np.isfinite(q)
        if bad_a or bad_b:
            out[_BAD] += bad_a
            out[_BAD + 1] += bad_b
            out[_BAD + 2] += bad_a and bad_b
            continue
        d = p - q
        for i, value in enumerate((p * q, p * p, q * q, d * d)):
            out[first + i] += value
        for i, value in enumerate((abs(d), p, q)):
            out[_SUM_ABS + i] += value
        out[_MAX] = max(out[_MAX], abs(d))


def _loop_rows(a: Any, b: Any, outliers: Any, low: Any, high: Any, sums: Any, plain: Any) -> None:
    """Each row: the channels between the outliers, then the outliers; the plain sums are both together.

    `plain` [rows] says where the lanes were exact enough for the whole row.
    """
    nothing = np.zeros(sums.shape[1])
    for r in range(a.shape[0]):
        x, y, out, begin = a[r], b[r], sums[r], 0
        for k in range(outliers.size + 1):
            end = outliers[k] if k < outliers.size else x.size
            for at in range(begin, end, _LANE_RUN):
                stop = min(end, at + _LANE_RUN)
                if not _loop_run(x[at:stop], y[at:stop], low, high, out):
                    _loop_exact(x[at:stop], y[at:stop], _ROBUST, out)
                    plain[r] = False
            begin = end + 1
        for k in range(outliers.size):
            at = outliers[k]
            if not _loop_run(x[at : at + 1], y[at : at + 1], low, high, nothing):
                plain[r] = False
            _loop_exact(x[at : at + 1], y[at : at + 1], _DOT, out)
        for i in range(4):
            out[_DOT + i] += out[_ROBUST + i]


def _loop_channels(a: Any, b: Any, zero: Any, plain: Any, channels: Any) -> None:
    """Add each row's squares dd, aa, bb to [3, channels]: in lanes over _FLUSH_ROWS rows, then in float64."""
    lanes = np.full((3, _LANE_RUN), zero)
    for first in range(0, a.shape[0], _FLUSH_ROWS):
        last = min(a.shape[0], first + _FLUSH_ROWS)
        for at in range(0, a.shape[1], _LANE_RUN):
            stop = min(a.shape[1], at + _LANE_RUN)
            lanes[:] = zero
            for r in range(first, last):
                # A row first, then its run: numba then knows that elements are adjacent.
                if plain[r]:
                    _loop_lanes(a[r][at:stop], b[r][at:stop], lanes[0], lanes[1], lanes[2])
                else:
                    _loop_finite(a[r][at:stop], b[r][at:stop], channels[:, at:stop])
            for k in range(3):
                _loop_flush(lanes[k], channels[k][at:stop])


def _loop_lanes(x: Any, y: Any, dd: Any, aa: Any, bb: Any) -> None:
    """Add one run's squares to three lanes."""
    zero = dd[0] - dd[0]
    for c in range(x.size):
        p, q = _widen(x[c], zero), _widen(y[c], zero)
        d = p - q
        dd[c] += d * d
        aa[c] += p * p
        bb[c] += q * q


def _loop_flush(lanes: Any, total: Any) -> None:
    """Add lanes to float64 sums."""
    for c in range(total.size):
        total[c] += np.float64(lanes[c])


def _loop_finite(x: Any, y: Any, total: Any) -> None:
    """Add one run's squares to [3, run] in float64, leaving out what is not finite on either side."""
    for c in range(x.size):
        p, q = _widen(x[c], np.float64(0)), _widen(y[c], np.float64(0))
        if np.isfinite(p) and np.isfinite(q):
            for k, value in enumerate((p - q, p, q)):
                total[k, c] += value * value


def _loop_ulp(a: Any, b: Any, counts: Any) -> None:
    """Add ULP-distance counts to [6], each element in the first bin that holds it."""
    for r in range(a.shape[0]):
        x, y = a[r], b[r]
        n0, n1, n4, n16, n64 = np.int32(0), np.int32(0), np.int32(0), np.int32(0), np.int32(0)
        for c in range(x.size):
            d = _distance(x[c], y[c])
            n0 = np.int32(n0 + np.int32(d <= 0))
            n1 = np.int32(n1 + np.int32(d <= 1))
            n4 = np.int32(n4 + np.int32(d <= 4))
            n16 = np.int32(n16 + np.int32(d <= 16))
            n64 = np.int32(n64 + np.int32(d <= 64))
        last = np.int32(0)
        for i, count in enumerate((n0, n1, n4, n16, n64)):
            counts[i] += count - last
            last = count
        counts[5] += x.size - last


@lru_cache(maxsize=1)
def compiled() -> tuple[Any, Any, Any]:
    """The three loops, compiled at first call per pair of dtypes and cached on disk where possible."""
    numba, ext = import_module("numba"), import_module("numba.extending")
    _teach_values(numba, ext)
    _teach_distance(numba, ext)
    # Sums may be reordered into lanes; NaN and infinity keep their meaning.
    loose = {"reassoc", "contract", "nsz"}
    ext.register_jitable(fastmath=loose)(_loop_run)
    for strict in (_loop_exact, _loop_lanes, _loop_flush, _loop_finite):
        ext.register_jitable(strict)

    def jit(loop: Any) -> Any:
        try:
            return numba.njit(loop, cache=True, nogil=True, boundscheck=False)
        except RuntimeError:  # neither the package's folder nor the user's cache can be written
            return numba.njit(loop, nogil=True, boundscheck=False)

    return jit(_loop_rows), jit(_loop_channels), jit(_loop_ulp)


def _teach_values(numba: Any, ext: Any) -> None:
    """Tell numba how each format is read, and how floats and integers reinterpret."""
    types, u32 = numba.types, np.uint32

    def cast(source: Any, target: Any) -> Any:
        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return ext.intrinsic(lambda _, value: (target(source), code))

    f32, f64 = cast(types.uint32, types.float32), cast(types.uint64, types.float64)
    i32, i64 = cast(types.float32, types.int32), cast(types.float64, types.int64)

    def value_of(code: Any) -> Any:
        if code in _narrow_floats(types):
            return _narrow_reader(f32, *_narrow_floats(types)[code])
        return {
            types.uint16: lambda code: f32(u32(u32(code) << u32(16))),
            types.uint32: lambda code: f32(code),
            types.uint64: lambda code: f64(code),
        }[code]

    def widen(code: Any, like: Any) -> Any:
        read, real = numba.njit(value_of(code)), np.float32 if like == types.float32 else np.float64
        return lambda code, like: real(read(code))

    # Lambdas: numba compares the argument annotations of an overload with those of its body.
    ext.overload(_widen)(lambda code, like: widen(code, like))
    ext.overload(_order)(
        lambda size: (lambda size: i32(size)) if size == types.float32 else (lambda size: i64(size))
    )
    ext.overload(_unorder)(
        lambda code: (
            (lambda code: f32(u32(code))) if code == types.int32 else (lambda code: f64(np.uint64(code)))
        )
    )


def _narrow_floats(types: Any) -> dict[Any, tuple[int, int, float, int]]:
    """Bits, shift into float32's fields, what the exponent is short by, first code of infinity or NaN."""
    return {
        types.uint8: (8, 20, 2.0**120, 0x7F),
        types.int8: (8, 21, 2.0**112, 0x7C),
        types.int16: (16, 13, 2.0**112, 0x7C00),
    }


def _narrow_reader(f32: Any, bits: int, shift: int, exponent: float, special: int) -> Any:
    """Reader of one narrow format: subnormals come out right, because the product is exact."""
    u32 = np.uint32
    mask, scale, sign = u32((1 << (bits - 1)) - 1), np.float32(exponent), u32(1 << (bits - 1))

    def read(code):  # type: ignore[no-untyped-def]
        moved = u32((u32(code) & mask) << u32(shift))
        value = f32(moved) * scale
        if (u32(code) & mask) >= special:
            value = f32(u32(moved | u32(0x7F800000)))
        return -value if u32(code) & sign else value

    return read


def _teach_distance(numba: Any, ext: Any) -> None:
    """Tell numba the ULP distance of two codes of one format."""
    types, u32, far = numba.types, np.uint32, 1 << 30
    infinity = {
        types.uint8: 0x7E,
        types.int8: 0x7C,
        types.int16: 0x7C00,
        types.uint16: 0x7F80,
        types.uint32: 0x7F800000,
        types.uint64: 0x7FF0000000000000,
    }

    def distance(u: Any, v: Any) -> Any:
        mask, sign, top = (1 << (u.bitwidth - 1)) - 1, 1 << (u.bitwidth - 1), infinity[u]
        word: Any = np.int32 if u.bitwidth < 32 else np.int64
        mask64, top64 = np.uint64(mask), np.uint64(top)

        def apart(u, v):  # type: ignore[no-untyped-def]
            p, q = word(u32(u) & mask), word(u32(v) & mask)
            d = word(abs(word(p - q)))
            if (u32(u) ^ u32(v)) & sign:
                d = word(p + q)
            return word(far) if p > top or q > top else d

        def apart64(u, v):  # type: ignore[no-untyped-def]
            p, q = u & mask64, v & mask64
            d = p + q if (u ^ v) >> np.uint64(63) else max(p, q) - min(p, q)
            return np.uint64(far) if p > top64 or q > top64 else d

        return apart64 if u.bitwidth == 64 else apart

    ext.overload(_distance)(lambda u, v: distance(u, v))
