"""The interpreter shim: rounding by the bits, the self-test in a worker, and its refusals."""

import numpy as np
import pytest
import torch

from parity.capturing.client import Worker
from parity.errors import ParityError
from parity.model.target import interpreter


def test_rounding_is_to_nearest_even() -> None:
    """Against torch's own cast, on random bits, ties, carries, infinities, NaN and subnormals."""
    generator = np.random.default_rng(0)
    bits = np.concatenate(
        [
            generator.integers(0, 2**32, 20000, dtype=np.uint32),
            (generator.integers(0, 2**16, 5000, dtype=np.uint32) << 16) | 0x8000,  # exact ties
            np.array(
                [
                    0x3F7FFFFF,
                    0x7F7FFFFF,
                    0x7F800000,
                    0xFF800000,
                    0x7FC00000,
                    0x00000001,
                    0x80000000,
                    0x007FFFFF,
                ],
                dtype=np.uint32,
            ),
        ]
    )
    values = bits.view(np.float32)
    got = interpreter.widen_bfloat16(interpreter.round_to_bfloat16(values))
    want = torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()
    assert np.array_equal(got, want, equal_nan=True)


def test_truncation_would_be_seen() -> None:
    """The cast that is replaced truncates: the test above can fail."""
    values = np.array([1.0 + 3 * 2**-9], dtype=np.float32)
    truncated = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert not np.array_equal(
        interpreter.widen_bfloat16(truncated),
        interpreter.widen_bfloat16(interpreter.round_to_bfloat16(values)),
    )


def test_self_test_holds_in_a_worker() -> None:
    """fla's chunk kernel, interpreted, agrees with the fp64 recurrence in both dtypes."""
    with Worker("fla-interpreted") as worker:
        for dtype in ("float32", "bfloat16"):
            result = worker.call("self_test", dtype=dtype)
            assert 0 < result["error"] < result["limit"], dtype


def test_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interpreter, "versions", lambda: {"triton": "9.9.0", "flash-linear-attention": "0.6.0"}
    )
    with pytest.raises(ParityError, match="triton 9.9.0, tested are 3.7, 3.8, 3.9"):
        interpreter.install()


def test_version_prefix_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.70 is not 3.7."""
    monkeypatch.setattr(
        interpreter, "versions", lambda: {"triton": "3.70.0", "flash-linear-attention": "0.6.0"}
    )
    with pytest.raises(ParityError, match=r"triton 3\.70\.0"):
        interpreter.install()
