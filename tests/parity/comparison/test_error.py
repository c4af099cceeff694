"""The relative error of a token: one table of rows for the rules, and the definitions that differ on purpose."""

import math

import numpy as np
import pytest
import torch

from parity.comparison.error import (
    USUAL_ROW,
    cosine_gaps,
    logit_errors,
    median_error,
    tensor_errors,
    token_errors,
    trace_error,
)
from parity.kernel.sums import pair_stats
from tests.parity.conftest import WriteTrace

NAN, INF = math.nan, math.inf
ROWS = {
    # row of a, row of b: error, strict, floored (the usual row of b has a norm of about 5)
    "equal": ([3.0, 4.0], [3.0, 4.0], 0.0, 0.0, 0.0),
    "differs": ([3.0, 9.0], [3.0, 4.0], 1.0, 1.0, 1.0),
    "zero on both sides": ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0.0),
    "zero in a": ([0.0, 0.0], [3.0, 4.0], 1.0, 1.0, 1.0),
    "zero in b": ([1e-6, 0.0], [0.0, 0.0], INF, INF, None),
    "nan in a": ([NAN, 4.0], [3.0, 4.0], INF, INF, INF),
    "nan in b": ([3.0, 4.0], [NAN, 4.0], INF, INF, INF),
    "nan in both": ([NAN, 9.0], [NAN, 4.0], 1.25, INF, 1.25),
    "infinity in both": ([INF, 4.0], [INF, 4.0], 0.0, INF, 0.0),
    "infinities of two signs": ([INF, 4.0], [-INF, 4.0], INF, INF, INF),
    "nan beside infinity": ([NAN, 4.0], [INF, 4.0], INF, INF, INF),
    "nan in other channels": ([NAN, 4.0], [3.0, NAN], INF, INF, INF),
}


@pytest.mark.parametrize("name", ROWS)
def test_rules(name: str) -> None:
    a, b = (torch.tensor([ROWS[name][side]], dtype=torch.float32) for side in (0, 1))
    assert tensor_errors(a, b).tolist() == [ROWS[name][2]]
    assert tensor_errors(a, b, strict=True).tolist() == [ROWS[name][3]]


@pytest.mark.parametrize("name", ROWS)
def test_a_floored_row_is_measured_by_the_usual_one(name: str) -> None:
    a, b = (torch.tensor([ROWS[name][side], [3.0, 4.0]], dtype=torch.float64) for side in (0, 1))
    usual = math.sqrt((ROWS[name][1][0] ** 2 + ROWS[name][1][1] ** 2 + 25) / 2)
    expected = ROWS[name][4] if ROWS[name][4] is not None else 1e-6 / (USUAL_ROW * usual)
    assert tensor_errors(a, b, floored=True).tolist() == [pytest.approx(expected), 0.0]


def test_robust_is_the_larger_of_two_and_says_what_an_outlier_channel_hides() -> None:
    a, b = torch.tensor([[1000.0, 2.0], [2000.0, 1.0]]), torch.tensor([[1000.0, 1.0], [1000.0, 1.0]])
    stats = pair_stats(a, b, outliers=(0,), full=False)
    assert token_errors(stats)[0] < 0.002
    assert token_errors(stats, robust=True).tolist() == [1.0, pytest.approx(1.0)]


def test_tensors_of_other_dtypes_and_more_axes() -> None:
    b = torch.arange(1.0, 13.0).reshape(2, 2, 3)
    a = b.clone().to(torch.bfloat16)
    a[1] *= 2
    assert tensor_errors(a, b).tolist() == [0.0, 1.0]
    assert tensor_errors(b[:0], b[:0], floored=True).size == 0


def test_cosine_gaps() -> None:
    a, b = torch.tensor([[1.0, 0], [1, 0], [0, 0]]), torch.tensor([[2.0, 0], [0, 1], [0, 1]])
    assert cosine_gaps(a, b).tolist() == [0.0, 1.0, 1.0]


def test_median_error_is_infinite_only_where_half_the_tokens_are() -> None:
    b = torch.ones(5, 4)
    a = b * torch.tensor([1.0, 1.5, 2.0, 1.5, 1.5])[:, None]
    assert median_error(a, b) == 0.5
    a[0] = NAN
    assert median_error(a, b) == 0.5
    a[1:3] = NAN
    assert median_error(a, b) == INF


def test_logit_errors_ignore_a_constant_and_name_the_worst_slot() -> None:
    wanted = torch.tensor([[[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]])
    spread = math.sqrt(2)
    found = wanted + torch.tensor([[[0.0, 0.0, 0.0], [0.3, 0.0, 0.0]]])
    assert logit_errors(found, wanted).tolist() == [pytest.approx(0.3 / spread)]
    assert logit_errors(found, wanted + 100)[0] == pytest.approx(
        math.sqrt(2 * 100**2 + 99.7**2) / spread, rel=1e-2
    )
    assert logit_errors(found * NAN, wanted).tolist() == [INF]


def test_trace_error_takes_all_tokens_as_one_vector(write_trace: WriteTrace) -> None:
    b = {"r0": {"layer.0.out": torch.ones(2, 4)}, "r1": {"layer.0.out": 3 * torch.ones(1, 4)}}
    a = {"r0": {"layer.0.out": torch.ones(2, 4)}, "r1": {"layer.0.out": 4 * torch.ones(1, 4)}}
    bad = {"r0": {"layer.0.out": torch.ones(2, 4)}, "r1": {"layer.0.out": torch.full((1, 4), NAN)}}
    one, two, worst = write_trace("a", a), write_trace("b", b), write_trace("c", bad)
    assert trace_error(one, two, "layer.0.out") == pytest.approx(math.sqrt(4 / (8 + 36)))
    assert trace_error(two, two, "layer.0.out") == 0
    assert np.isinf(trace_error(worst, worst, "layer.0.out")), "strict"
