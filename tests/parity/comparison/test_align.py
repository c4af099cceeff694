"""What is paired, what is listed as unpaired, and what cannot be compared at all."""

from collections.abc import Callable

import pytest
import torch

from parity.comparison.align import align
from parity.errors import ExitCode, NothingComparable, ParityError
from parity.tracing.trace import Trace

WriteTrace = Callable[..., Trace]


def taps(
    rows: int = 5,
    names: tuple[str, ...] = ("layer.0.out", "layer.1.out"),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    return {name: torch.ones(rows, width, dtype=dtype) for name in names}


def test_equal_traces_pair_completely(write_trace: WriteTrace) -> None:
    a, b = (write_trace(side, {"r0": taps(), "r1": taps(3)}) for side in "ab")
    found = align(a, b)
    assert [(pair.a.id, pair.b.id, pair.rows, pair.by) for pair in found.requests] == [
        ("r0", "r0", 5, "id"),
        ("r1", "r1", 3, "id"),
    ]
    assert [(tap.name, tap.layer, tap.layer_type, tap.width) for tap in found.taps] == [
        ("layer.0.out", 0, "linear_attention", 4),
        ("layer.1.out", 1, "linear_attention", 4),
    ]
    assert found.unpaired == () and found.notes == ()


def test_pairs_by_tokens_under_other_ids(write_trace: WriteTrace) -> None:
    a = write_trace("a", {"x": taps(3), "y": taps(3)}, tokens={"x": [1, 2, 3], "y": [4, 5, 6]})
    b = write_trace("b", {"x": taps(3), "z": taps(3)}, tokens={"x": [4, 5, 6], "z": [1, 2, 3]})
    found = align(a, b)
    assert [(pair.a.id, pair.b.id, pair.by) for pair in found.requests] == [
        ("x", "z", "token ids"),
        ("y", "x", "token ids"),
    ]
    assert found.notes == ("2 requests have other ids on the two sides and were paired by equal token ids",)


@pytest.mark.parametrize(
    "tokens_b, rows, detail",
    [
        ([1, 2, 9, 4], 2, "token 2 is 3 in a, 9 in b; 2 tokens before it agree"),
        ([1, 2, 3], 3, "4 tokens in a, 3 in b; the first 3 agree"),
    ],
)
def test_common_prefix_of_other_tokens(
    write_trace: WriteTrace, tokens_b: list[int], rows: int, detail: str
) -> None:
    a = write_trace("a", {"r": taps(4)}, tokens={"r": [1, 2, 3, 4]})
    b = write_trace("b", {"r": taps(len(tokens_b))}, tokens={"r": tokens_b})
    found = align(a, b)
    assert found.requests[0].rows == rows
    assert [(item.kind, item.name, item.detail) for item in found.unpaired] == [("tokens", "r", detail)]


def test_lists_everything_without_a_partner(write_trace: WriteTrace) -> None:
    left = taps(names=("layer.0.out", "layer.1.out", "logits")) | {"layer.2.out": torch.ones(5, 6)}
    right = taps(names=("layer.0.out", "final.prenorm")) | {
        "layer.1.out": torch.ones(5, 4, dtype=torch.bfloat16),
        "layer.2.out": torch.ones(5, 7),
    }
    a = write_trace("a", {"r0": left, "only": left}, tokens={"only": [7, 7, 7, 7, 7]})
    b = write_trace("b", {"r0": right, "other": right}, tokens={"other": [8, 8, 8, 8, 8]})
    found = align(a, b)
    assert {(item.kind, item.side, item.name) for item in found.unpaired} == {
        ("tap", "a", "logits"),
        ("tap", "b", "final.prenorm"),
        ("dtype", "both", "layer.1.out"),
        ("width", "both", "layer.2.out"),
        ("request", "a", "only"),
        ("request", "b", "other"),
    }
    assert [tap.name for tap in found.taps] == ["layer.0.out", "layer.1.out"]


def test_chosen_taps(write_trace: WriteTrace) -> None:
    a, b = (
        write_trace(side, {"r0": taps(names=("embed.out", "layer.0.out", "layer.1.out"))}) for side in "ab"
    )
    assert [tap.name for tap in align(a, b, ("layer.*.out",)).taps] == ["layer.0.out", "layer.1.out"]
    with pytest.raises(ParityError, match="asked: taps 'layer.9.out'; found: taps embed.out, layer.0.out"):
        align(a, b, ("layer.9.out",))


@pytest.mark.parametrize(
    "right, tokens, text",
    [
        ({"q": taps()}, {"q": [9, 9, 9, 9, 9]}, "requests common to"),
        ({"r0": taps()}, {"r0": [9, 9, 9, 9, 9]}, "other token ids from the first on in all 1 requests"),
        ({"r0": taps(names=("logits",))}, {}, "taps common to"),
    ],
)
def test_nothing_comparable(
    write_trace: WriteTrace,
    right: dict[str, dict[str, torch.Tensor]],
    tokens: dict[str, list[int]],
    text: str,
) -> None:
    a, b = write_trace("a", {"r0": taps()}), write_trace("b", right, tokens=tokens)
    with pytest.raises(NothingComparable, match=text) as caught:
        align(a, b)
    assert caught.value.exit_code == ExitCode.NOTHING_COMPARED and len(str(caught.value).splitlines()) == 2
