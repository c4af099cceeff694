"""What does the trainer actually send?

Every tensor of one step on the shared row, and the captured slices of the trainer's own capture: shape, dtype, device,
stride, finite, mean, standard deviation, range. Exact: no value that is not finite, no captured row of a token that
is zero, constant or another token's; fc as wide as its declared slices; labels within the head's rows; states in
the declared precision, by their values too: float32 whose every value lies on the grid of bfloat16 was rounded before.

Bugs it finds: all-zero or stale states of hybrid targets (speculators#613, vllm#46301), states stored in a narrower
dtype, a slice too many (speculators#705). Cost: one step (shared), and one on the captured states. Faults: the `shapes`
rows of `parity.probes.deviations`.

Shapes: S tokens of the row, T of them no padding, N captured slices, D width.
"""

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING
from parity.probes.adapters.base import AdapterStep, NotExposed
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.subject import ExaminedAdapter, list_fc_taps
from parity.reports.record import Table, Value, declare_columns

GRIDS = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
"""Narrower dtypes, narrowest first."""
STEP_TENSORS = ("loss", "hidden", "head", "anchors", "fc_input", "labels", "teacher")


class ShapesProbe:
    """Looks at every tensor."""

    name = "shapes"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation, with the table of tensors."""
        shown, why_not = subject.step_output, ""
        tensors = {f"step.{name}": each for name, each in _tensors(shown).items()}
        faults = _step_faults(subject, shown)
        # The trainer's own capture, and a step on it where nothing is wrong so far.
        try:
            states = subject.captured_states
        except NotExposed as missing:
            states, why_not = None, f"; the adapter does not show {missing.args[0]}"
        if states is not None:
            slices = {f"captured.{tap}": states[:, n] for n, tap in enumerate(subject.adapter.slices)}
            tensors |= slices
            bad = _captured_faults(subject, states)
            faults += bad or ([] if faults else _on_captured(subject, states))
        sentence = f"{len(tensors)} tensors, {_features(subject, shown)} features enter fc"
        if states is not None:
            sentence += f", states {str(states.dtype).removeprefix('torch.')} as captured"
        sentence += ", all finite" if all(_finite(each) for each in tensors.values()) else ", not all finite"
        facts: dict[str, Value] = {
            "shapes.fc_features": shown.fc_input.shape[1],
            "shapes.vocabulary": len(shown.head),
            "shapes.hidden_dtype": str(shown.hidden.dtype).removeprefix("torch."),
            "shapes.states_dtype": None if states is None else str(states.dtype).removeprefix("torch."),
        }
        return make_probe_answer(self.name, sentence + why_not, faults, facts=facts, tables=[_table(tensors)])


def _features(subject: ExaminedAdapter, shown: AdapterStep) -> str:
    """Width of fc's input as slices times D, where it is."""
    width = subject.adapter.width
    features = shown.fc_input.shape[1]
    return f"{features // width} x {width}" if features % width == 0 else str(features)


def _finite(tensor: Tensor) -> bool:
    """Whether every value is finite."""
    return bool(tensor.detach().isfinite().all())


def _step_faults(subject: ExaminedAdapter, shown: AdapterStep) -> list[FoundDeviation]:
    """Values that are not finite, fc's width and precision, and labels beyond the head."""
    faults = _not_finite(shown, "synthetic states")
    want, have = len(list_fc_taps(subject.recipe)) * subject.adapter.width, shown.fc_input.shape[1]
    if have != want:
        words = (
            f"{have} features, declared {len(list_fc_taps(subject.recipe))} slices of {subject.adapter.width}"
        )
        faults.append(FoundDeviation("fc-width", words, {"features": have, "declared": want}))
    enters, states = shown.fc_input.detach(), subject.shown_states.detach()
    grid, own = _grid(enters) or enters.dtype, _grid(states) or states.dtype
    if _finite(enters) and _bits(grid) < _bits(own):
        words = f"{enters.numel()} values of fc's input have the precision of {_name(grid)}, the states {_name(own)}'s"
        faults.append(FoundDeviation("fc-rounded", words, {"values": shown.fc_input.numel()}))
    if shown.labels is not None and int(shown.labels.max()) >= len(shown.head):
        words = f"label {int(shown.labels.max())}, the head has {len(shown.head)} rows"
        faults.append(FoundDeviation("labels-range", words, {"label": int(shown.labels.max())}))
    return faults


def _not_finite(shown: AdapterStep, what: str) -> list[FoundDeviation]:
    """Tensors of a step that hold other things than numbers. what: which states it was made from."""
    found = {name: int((~each.detach().isfinite()).sum()) for name, each in _tensors(shown).items()}
    counts = {name: count for name, count in found.items() if count}
    if not counts:
        return []
    words = f"on {what}: " + ", ".join(f"{count} values of {name}" for name, count in counts.items())
    return [FoundDeviation("step-not-finite", words, counts)]


def _tensors(shown: AdapterStep) -> dict[str, Tensor]:
    """What a step exposes, by name."""
    found = {name: getattr(shown, name) for name in STEP_TENSORS}
    return {name: each for name, each in found.items() if each is not None}


def _on_captured(subject: ExaminedAdapter, states: Tensor) -> list[FoundDeviation]:
    """A step on the states as they are captured, which may be larger than synthetic ones."""
    batch = subject.batch
    states = states.detach().clone().requires_grad_(True)
    return _not_finite(subject.step(batch, states, anchors=subject.anchors(batch)), "captured states")


def _captured_faults(subject: ExaminedAdapter, states: Tensor) -> list[FoundDeviation]:
    """What is wrong with the captured slices [S, N, D] by their values alone."""
    real = subject.batch.document != PADDING
    rows = states.detach()[real].cpu()
    # Rows that cannot be states: each kind without those that a worse one has.
    zero = (rows == 0).all(-1)
    constant = (rows == rows[..., :1]).all(-1) & ~zero
    kinds = {
        "states-not-finite": ~rows.isfinite().all(-1),
        "states-zero": zero,
        "states-constant": constant,
        "states-repeated": _repeats_earlier(rows) & ~zero & ~constant,
    }
    faults = []
    for name, found in kinds.items():
        if found.any():
            words = f"{int(found.sum())} of {found.numel()} rows, the first {_where(subject, found, real)}"
            faults.append(FoundDeviation(name, words, {"rows": int(found.sum())}))
    return faults or _precision_faults(subject.recipe.target.dtype, rows)


def _precision_faults(wanted: str, rows: Tensor) -> list[FoundDeviation]:
    """Captured rows [T, N, D] that are another dtype than `wanted`, or hold values of a narrower one."""
    if wanted == "auto":
        return []
    own, declared, count = rows.dtype, getattr(torch, wanted), len(rows)
    coarse = next((g for n in range(rows.shape[1]) if (g := _grid(rows[:, n])) is not None), None)
    narrower = _bits(own) < _bits(declared)
    if narrower or (coarse is not None and _bits(coarse) < _bits(declared)):
        have = _name(own if narrower or coarse is None else coarse)
        words = f"{count * rows.shape[1]} rows with the precision of {have}, declared {wanted}"
    elif _bits(own) == _bits(declared) and own != declared:
        have = _name(own)
        words = f"states of {count} tokens are {have}, declared {wanted}"
    else:
        return []
    return [FoundDeviation("states-dtype", words, {"dtype": have})]


def _where(subject: ExaminedAdapter, found: Tensor, real: Tensor) -> str:
    """Token and tap of the first row."""
    token, number = (int(each) for each in found.nonzero()[0])
    return f"at token {int(real.nonzero()[token])} of {subject.adapter.slices[number]}"


def _repeats_earlier(rows: Tensor) -> Tensor:
    """bool [T, N]: the row is an earlier token's of the same slice, bit for bit."""
    found = torch.zeros(rows.shape[:2], dtype=torch.bool)
    for number in range(rows.shape[1]):
        seen: set[bytes] = set()
        for token, row in enumerate(rows[:, number].float().numpy()):
            key = row.tobytes()
            found[token, number] = key in seen
            seen.add(key)
    return found


def _grid(values: Tensor) -> torch.dtype | None:
    """The narrowest dtype that every value is exact in, None where it is the values' own."""
    if not values.is_floating_point():
        return None
    for dtype in GRIDS:
        if dtype.itemsize < values.dtype.itemsize and torch.equal(values.to(dtype).to(values.dtype), values):
            return dtype
    return None


def _bits(dtype: torch.dtype) -> int:
    """Significant bits, by which bfloat16 is narrower than float16."""
    return -int(torch.tensor(torch.finfo(dtype).eps).log2())


def _name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def _table(tensors: dict[str, Tensor]) -> Table:
    """Shape, dtype, place and range of each tensor, over its finite values."""
    rows: list[tuple[Value, ...]] = []
    for name, tensor in tensors.items():
        values = tensor.detach()  # statistics in 32 bits at least, of what is finite
        numbers = values if values.dtype in (torch.float32, torch.float64) else values.double()
        finite = numbers if _finite(numbers) else numbers[numbers.isfinite()]
        some = finite if finite.numel() else numbers.new_full((1,), float("nan"))
        rows.append(
            (
                name,
                " x ".join(map(str, values.shape)) or "scalar",
                _name(values.dtype),
                str(values.device),
                " ".join(map(str, values.stride())),
                float(some.mean()),
                float(some.std(correction=0)),
                float(some.min()),
                float(some.max()),
                numbers.numel() - finite.numel(),
            )
        )
    return Table(
        name="shapes.tensors",
        title="Every tensor of one step",
        columns=declare_columns(
            "tensor | shape | dtype | device | stride | mean:float | std:float | min:float | max:float | "
            "bad:int not finite"
        ),
        rows=tuple(rows),
        detail=True,
    )
