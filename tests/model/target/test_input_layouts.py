"""Ways to feed a request: what is padded, split, packed or cropped, and that the function does not change."""

from pathlib import Path

import pytest
import torch

from parity.errors import ParityError
from parity.model.target.backends import parse_backend
from parity.model.target.forward import forward
from parity.model.target.input_layouts import InputLayout, run_layout
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec

IDS = tuple((5 * i + i * i) % 60 + 1 for i in range(70))


@pytest.fixture(scope="module")
def target(hybrid: Path) -> Target:
    return load_target(TargetSpec(model=str(hybrid), dtype="float32"))


def test_rows_end_together_and_masks_say_what_is_real() -> None:
    feed = InputLayout(rows=((1, 2, 3), (4,)), left=(1, 0), right=1, pad_id=9)
    ids, mask = feed.batch(torch.device("cpu"))
    assert feed.pads == (1, 3)
    assert ids.tolist() == [[9, 1, 2, 3, 9], [9, 9, 9, 4, 9]]
    assert mask is not None and mask.tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 1, 0]]
    assert InputLayout(rows=((1, 2),)).batch(torch.device("cpu"))[1] is None


@pytest.mark.parametrize(
    "options",
    [
        {"rows": ((1, 2),), "splits": (3, 2)},
        {"rows": ((1, 2),), "drafted": (1,)},
        {"rows": ((1, 2), (3, 4)), "segments": (1,)},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParityError):
        InputLayout(**options)  # type: ignore[arg-type]


def test_alone_equals_a_capture_bit_by_bit(target: Target) -> None:
    fed = run_layout(target, InputLayout(rows=(IDS,)), backend=parse_backend("torch"))
    base = forward(target, IDS, backend=parse_backend("torch"))
    assert fed.proof.valid and fed.rows[0].keys() == base.taps.keys()
    assert all(torch.equal(fed.rows[0][tap], base.taps[tap]) for tap in base.taps)


@pytest.mark.parametrize(
    "feed",
    [
        InputLayout(rows=(IDS,), left=(5,)),
        InputLayout(rows=(IDS,), right=3),
        InputLayout(rows=(IDS[:20], IDS)),
        InputLayout(rows=(IDS,), splits=(1, 33)),
        InputLayout(rows=(IDS,), positions=tuple(range(9, 79))),
    ],
    ids=["left", "right", "batch", "split", "shift"],
)
def test_healthy_feedings_change_nothing(feed: InputLayout, target: Target) -> None:
    """A split returns earlier tokens from the convolution; a shift moves nothing but absolute positions."""
    row = run_layout(target, feed, backend=parse_backend("torch")).rows[-1]
    base = forward(target, IDS, backend=parse_backend("torch")).taps
    for tap, tensor in base.items():
        assert row[tap].shape == tensor.shape
        assert float((row[tap] - tensor).norm() / tensor.norm()) < 2e-5, tap


def test_packing_without_boundaries_leaks_only_past_the_edge(target: Target) -> None:
    """transformers 5.24 without kernels that know boundaries: positions alone isolate the full layers only."""
    row = run_layout(target, InputLayout(rows=(IDS,), segments=(30,)), backend=parse_backend("torch")).rows[0]
    alone = run_layout(target, InputLayout(rows=(IDS[30:],)), backend=parse_backend("torch")).rows[0]
    first = run_layout(target, InputLayout(rows=(IDS[:30],)), backend=parse_backend("torch")).rows[0]
    assert float((row["layer.3.out"][:30] - first["layer.3.out"]).abs().max()) < 1e-5
    assert float((row["layer.0.conv.out"][30:33] - alone["layer.0.conv.out"][:3]).abs().max()) > 1e-3
    assert float((row["layer.0.conv.out"][33:] - alone["layer.0.conv.out"][3:]).abs().max()) < 1e-5
    with pytest.raises(ValueError, match="packed sequences"):
        run_layout(
            target, InputLayout(rows=(IDS,), segments=(30,), boundaries=True), backend=parse_backend("torch")
        )


def test_drafted_tokens_are_not_recorded(target: Target) -> None:
    row = run_layout(
        target, InputLayout(rows=(IDS,), splits=(40,), drafted=(1, 2)), backend=parse_backend("torch")
    ).rows[0]
    assert {tensor.shape[0] for tensor in row.values()} == {70}
