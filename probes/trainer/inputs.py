"""Which captured layers move the draft, and which move the labels?

Three looks, none of which believes a configuration:
1. Influence. Each captured slice in turn is rolled along the row; drafts that change, and labels (read from the
   gradient at the head's input, `parity.probes.instruments.loss.labels`) that change, are that slice's
   influence. Exact: what is not connected does not change by one bit. The drafts' gradient is reported beside it.
2. Place. Rolling a slice moves exactly its own columns of fc's input: which, and in which order; the values there are
   the slice's. The gradient at fc's input is the one at the slices, so that what is exposed is what is used.
3. Identity. What the trainer's own capture delivers is compared with every layer of the target itself: each slice has
   to be the layer it is called. Tolerance: relative L2 of 1e-4 in float32 (another order of sums), eight units in the
   last place (.06) in bfloat16, where neighbouring layers differ by more; else the nearest layer is named.

Bugs it finds: fc fed the slice that defines the labels (speculators#705; docs/case-study.md), layer ids one
off (vllm#40727, TorchSpec#87, ModelOpt's vLLM dump), slices in another order, labels from a conditioning slice,
dead slices, norms left out or applied at capture, rows one token late. Cost: one step a slice and two more, one
forward pass of the target and one of the capture. Faults: the `inputs` rows of `parity.probes.deviations`.

Shapes: S tokens of the row, N captured slices, D width, F = features that enter fc, n slots that get a gradient.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parity.model.training.anchors import PADDING
from parity.probes.adapters.base import AdapterStep, NotExposed, TargetReference
from parity.probes.answers import FoundDeviation, make_probe_answer
from parity.probes.base import ProbeAnswer
from parity.probes.instruments.loss.designed_row import DesignedBatch
from parity.probes.instruments.loss.head_gradient import HeadGradients
from parity.probes.instruments.loss.labels import ENOUGH, LabelEstimate, is_same_label, take_label_step
from parity.probes.subject import ExaminedAdapter, list_fc_taps
from parity.reports.record import Chart, Table, Value, declare_columns
from parity.reports.words import shorten_list

ROLL = 7
"""Tokens by which a slice is rolled: prime, so that no period of the row is met."""
TOLD = 3
"""Slices named in a sentence; the table has all."""
SAME_SLICE = 1e-4
"""Relative L2 up to which a captured slice is a layer, in float32."""
ULPS = 8
"""The same in units in the last place, for narrower dtypes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SliceInfluence:
    """What one captured slice does."""

    tap: str
    drafts: float
    """Relative change of the hidden states that enter the head."""
    gradient: float | None
    """Norm of the gradient of a projection of the drafts, of all slices' together; None where there is none."""
    columns: tuple[int, ...]
    """Which blocks of D columns of fc's input move."""
    labels: float | None
    """Share of labels that change; None where labels cannot be read."""
    copied: bool
    """Whether the columns hold the slice's own values (noise apart)."""


class InputsProbe:
    """Rolls one slice at a time."""

    name = "inputs"

    def run(self, subject: ExaminedAdapter) -> ProbeAnswer:
        """One finding a deviation, with the influence matrix and the match of layers."""
        influences, how, width = _influences(subject)
        identity = _identify(subject)
        wanted = list_fc_taps(subject.recipe)
        faults = [
            *_layer_faults(subject, influences, wanted, width),
            *_label_faults(subject, influences, wanted),
            *(identity.faults if isinstance(identity, CaptureIdentity) else []),
        ]
        facts: dict[str, Value] = {
            "inputs.drafts": ", ".join(each.tap for each in influences if each.drafts > 0),
            "inputs.order": ", ".join(_order(influences)),
            "inputs.labels": ", ".join(each.tap for each in influences if each.labels),
            "inputs.capture": identity.worst if isinstance(identity, CaptureIdentity) else None,
        }
        tables = [_matrix(influences), *([identity.table] if isinstance(identity, CaptureIdentity) else [])]
        sentence = f"{_words(influences)}{how}; {_capture_words(identity)}"
        return make_probe_answer(self.name, sentence, faults, facts=facts, tables=tables)


# --- influence --------------------------------------------------------------------------------------------


def _influences(subject: ExaminedAdapter) -> tuple[list[SliceInfluence], str, int]:
    """One for each captured slice, in words what could not be examined, and how many features enter fc."""
    step = take_label_step(subject)
    crafted, shown, before = step.crafted, step.shown, step.reading
    gradients, same = _gradients(shown, step.states, subject.adapter.width)
    readable = before is not None and float(before.has_label.double().mean()) >= ENOUGH
    made = []
    # One slice at a time is rolled along the row, padding apart, and the step runs again.
    for number, tap in enumerate(subject.adapter.slices):
        other = crafted.states.clone()
        real = crafted.batch.document != PADDING
        other[real, number] = other[real, number].roll(ROLL, 0)
        moved = subject.step(crafted.batch, other.requires_grad_(True), anchors=crafted.anchors)
        made.append(
            SliceInfluence(
                tap=tap,
                drafts=_change(moved.hidden, shown.hidden),
                gradient=None if gradients is None else gradients[number],
                columns=_moved_columns(shown, moved, subject.adapter.width),
                labels=_moved_labels(crafted, moved, before) if readable and before else None,
                copied=_is_copied(shown, step.states, number, subject),
            )
        )
    how = "" if same is not False else "; the gradient at fc's input is not the slices' own"
    if not readable:
        how += "; labels cannot be read from the gradient, so what moves them is not told"
    return made, how, shown.fc_input.shape[1]


def _gradients(shown: AdapterStep, states: Tensor, width: int) -> tuple[list[float] | None, bool | None]:
    """Where the gradient of the drafts arrives.

    Args:
        shown: a step with its graph.
        states: [S, N, D] the leaf that it was made from.
        width: D.

    Returns:
        Each slice's share of the gradient's norm, None where states are not in the graph; and whether fc's input has
        a gradient of the same norm, None where it has none.
    """
    # One backward pass of a random projection of the drafts, to the states and to fc's input.
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(shown.hidden.shape, generator=generator).to(shown.hidden)
    found = (
        torch.autograd.grad(
            (shown.hidden * direction).sum(), [states, shown.fc_input], allow_unused=True, retain_graph=True
        )
        if shown.fc_input.requires_grad
        else (None, None)
    )
    at_states, at_input = found
    if at_states is None:
        return None, None
    # The two are compared by their norms, since noise may lie between them.
    norms = at_states.double().flatten(0, 0).square().sum((0, 2)).sqrt()
    total = float(norms.square().sum().sqrt())
    same = None
    if at_input is not None and at_input.shape[1] % width == 0:
        blocks = at_input.double().square().sum(0).reshape(-1, width).sum(1).sqrt()
        size = float(blocks.square().sum().sqrt())
        same = abs(size - total) <= 1e-3 * max(size, total)
    return [float(each) / total if total else 0.0 for each in norms], same


def _change(now: Tensor, before: Tensor) -> float:
    """Relative L2; 0 only where nothing moves at all."""
    size = float(before.detach().double().norm())
    return float((now.detach().double() - before.detach().double()).norm()) / size if size else 0.0


def _moved_columns(shown: AdapterStep, moved: AdapterStep, width: int) -> tuple[int, ...]:
    """Blocks of D columns of fc's input that differ."""
    if shown.fc_input.shape[1] % width:
        return ()
    differ = (shown.fc_input.detach() != moved.fc_input.detach()).any(0).reshape(-1, width).any(1)
    return tuple(differ.nonzero().squeeze(-1).tolist())


def _is_copied(shown: AdapterStep, states: Tensor, number: int, subject: ExaminedAdapter) -> bool:
    """Whether some block of fc's input holds the slice, up to the declared noise and the input's dtype."""
    width, noise = subject.adapter.width, subject.recipe.noise.std
    if shown.fc_input.shape[1] % width:
        return False
    blocks = shown.fc_input.detach().double().reshape(len(states), -1, width)
    own = states.detach()[:, number].to(shown.fc_input.dtype).double()
    left = (blocks - own[:, None]).square().mean((0, 2)).sqrt()
    return bool((left <= 3 * noise + 1e-6).any())


def _moved_labels(crafted: DesignedBatch, moved: AdapterStep, before: LabelEstimate) -> float:
    """Share of the slots read before whose gradient the same label no longer explains."""
    at = HeadGradients.of(moved)
    if len(at) != len(before.label):
        return 1.0
    return float((~is_same_label(crafted, at, before))[before.has_label].double().mean())


def _order(influences: list[SliceInfluence]) -> list[str]:
    """The slice that each block of fc's columns holds."""
    at: dict[int, str] = {}
    for each in influences:
        for column in each.columns:
            at[column] = f"{at[column]}+{each.tap}" if column in at else each.tap
    return [at[column] for column in sorted(at)]


def _layer_faults(
    subject: ExaminedAdapter, influences: list[SliceInfluence], wanted: tuple[str, ...], shown_width: int
) -> list[FoundDeviation]:
    """Which slices enter, in which order, and whether each does something: the first group that has a fault.

    Args:
        subject: the adapter that is examined.
        influences: of every captured slice.
        wanted: taps that the recipe feeds to fc, in order.
        shown_width: F.
    """
    by_tap = {each.tap: each for each in influences}
    feeding = [each.tap for each in influences if each.columns or each.drafts > 0]
    extra, missing = (
        [tap for tap in feeding if tap not in wanted],
        [tap for tap in wanted if tap not in feeding],
    )
    numbers = {f"{each.tap} moves drafts by": each.drafts for each in influences}
    faults = []
    # Columns of fc that nothing moves: a slice that is cut off, not one that is exchanged for another.
    blocks = shown_width // subject.adapter.width
    still = blocks - len({column for each in influences for column in each.columns})
    if missing and not extra and still == len(missing):
        words = f"{', '.join(missing)} do not reach fc: {still} of {blocks} blocks of its columns stand still"
        return [FoundDeviation("fc-dead", words, numbers)]
    # Other slices than declared: then their order and their values have no meaning.
    if extra or missing:
        teacher_only = extra and not missing and len(extra) == 1
        words = f"{', '.join(feeding) or 'no slice'} feed fc, declared {', '.join(wanted)}"
        if teacher_only:
            size = by_tap[extra[0]].drafts
            words = f"{extra[0]} moves the drafts by {size:.2g}, beside {len(wanted)} declared slices"
        faults.append(FoundDeviation("fc-teacher" if teacher_only else "fc-layers", words, numbers))
        return faults
    # The declared slices: in their order, each of them with an effect, each with its own values.
    order = _order(influences)
    if order and order != list(wanted):
        words = f"fc's columns hold {', '.join(order)}, declared {', '.join(wanted)}"
        faults.append(FoundDeviation("fc-order", words, {"blocks of columns": len(order)}))
    dead = [tap for tap in wanted if by_tap[tap].drafts == 0]
    if dead:
        words = f"{', '.join(dead)} enter fc and move the drafts by 0"
        faults.append(FoundDeviation("fc-dead", words, numbers))
    altered = [tap for tap in wanted if by_tap[tap].columns and not by_tap[tap].copied]
    if altered and not dead:
        words = f"{', '.join(altered)}: {len(altered)} of {len(wanted)} slices are not what enters fc"
        faults.append(FoundDeviation("fc-altered", words, {"slices": len(altered)}))
    return faults


def _label_faults(
    subject: ExaminedAdapter, influences: list[SliceInfluence], wanted: tuple[str, ...]
) -> list[FoundDeviation]:
    """Which slices move labels."""
    if any(each.labels is None for each in influences):
        return []
    moving = {each.tap: each.labels or 0.0 for each in influences if each.labels}
    from_conditioning = {tap: share for tap, share in moving.items() if tap in wanted}
    numbers = {f"{each.tap} moves labels": each.labels for each in influences}
    if from_conditioning:
        words = ", ".join(
            f"{tap} moves {share:.0%} of the labels" for tap, share in from_conditioning.items()
        )
        return [FoundDeviation("labels-from-conditioning", words, numbers)]
    others = [each.tap for each in influences if each.tap not in wanted]
    if subject.recipe.needs_teacher and not moving:
        words = f"none of {len(influences)} slices moves a label ({', '.join(others) or 'no teacher slice captured'})"
        return [FoundDeviation("labels-without-teacher", words, numbers)]
    if not subject.recipe.needs_teacher and moving:
        words = ", ".join(f"{tap} moves {share:.0%} of the labels" for tap, share in moving.items())
        return [FoundDeviation("labels-undeclared-teacher", words, numbers)]
    return []


def _words(influences: list[SliceInfluence]) -> str:
    """What moves the drafts, and what the labels."""
    drafts = [each.tap for each in influences if each.drafts > 0]
    text = f"{', '.join(drafts) or 'no slice'} move the drafts"
    if all(each.labels is None for each in influences):
        return text
    labels = [f"{each.tap} ({each.labels:.0%})" for each in influences if each.labels]
    return f"{text}, {', '.join(labels) or 'no slice'} the labels"


def _matrix(influences: list[SliceInfluence]) -> Table:
    """Long form: one row for each slice and side, so that it can be drawn."""
    rows: list[tuple[Value, ...]] = []
    for each in influences:
        columns = ", ".join(map(str, each.columns)) or None
        rows.append((each.tap, "drafts", each.drafts, each.gradient, columns))
        rows.append((each.tap, "labels", each.labels, None, None))
    return Table(
        name="inputs.influence",
        title="What every captured slice moves",
        columns=declare_columns(
            "slice | side moves | influence:float (relative change, share of labels) | "
            "gradient:float share of gradient | columns fc's columns (blocks of D)"
        ),
        rows=tuple(rows),
        caption=f"Each slice is rolled by {ROLL} tokens.",
        chart=Chart(kind="heatmap", x="side", y="slice", value="influence"),
    )


# --- identity ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class CaptureIdentity:
    """How the trainer's own capture compares with the target itself."""

    worst: float
    """Largest relative L2 of a slice from the layer it is called."""
    faults: list[FoundDeviation]
    table: Table


def _identify(subject: ExaminedAdapter) -> CaptureIdentity | str:
    """Every slice against every layer, or why they were not compared."""
    try:
        captured, reference = subject.captured_states, subject.target_reference
    except NotExposed as missing:
        return f"the adapter does not show {missing.args[0]}"
    # Narrow dtypes round: the limit is theirs where it is wider than float32's.
    real = subject.batch.document != PADDING
    limit = max(SAME_SLICE, ULPS * torch.finfo(captured.dtype).eps)
    rows: list[tuple[Value, ...]] = []
    matches = []
    for number, tap in enumerate(subject.adapter.slices):
        match = _match(captured[:, number], tap, reference, real, subject.batch.document)
        matches.append(match)
        rows.append((number, tap, match.own, match.nearest, match.error, match.shift))
    table = Table(
        name="inputs.capture",
        title="Which layer of the target every captured slice is",
        columns=declare_columns(
            "slice:int | tap called | own:float from that layer (relative L2) | nearest | "
            "error:float from the nearest (relative L2) | shift:int rows late"
        ),
        rows=tuple(rows),
        caption=f"Limit {limit:.2g}.",
        detail=True,
    )
    worst = max(match.own for match in matches)
    return CaptureIdentity(worst=worst, faults=_identity_faults(subject, matches, limit), table=table)


@dataclass(frozen=True, kw_only=True)
class SliceMatchToLayer:
    """One captured slice's place in the target."""

    tap: str
    own: float
    nearest: str
    error: float
    shift: int = 0
    """Rows by which the slice is late."""


def _match(
    captured: Tensor, tap: str, reference: TargetReference, real: Tensor, document: Tensor
) -> SliceMatchToLayer:
    """The nearest state of the target, first row for row, then a row off within documents.

    Args:
        captured: [S, D] one slice as the trainer's capture delivers it.
        tap: what it is called.
        reference: the target's own states.
        real: bool [S] tokens that are no padding.
        document: [S].
    """
    slice_ = captured[real].double().cpu()
    states = {name: each[real].double().cpu() for name, each in reference.states.items()}

    def error(state: Tensor, shift: int) -> float:
        inside = torch.ones(len(slice_), dtype=torch.bool)
        if shift:
            own = document[real].cpu()
            inside = own == own.roll(shift)
            inside[:1] = inside[-1:] = False
        there = state.roll(shift, 0)[inside]
        return float((slice_[inside] - there).norm() / there.norm().clamp(min=1e-30))

    # In place, then one row early or late, which has to be four times as near.
    errors = {name: error(state, 0) for name, state in states.items()}
    own = errors.get(tap, float("inf"))
    nearest = tap if tap in errors and own <= min(errors.values()) else min(errors, key=errors.__getitem__)
    best = SliceMatchToLayer(tap=tap, own=own, nearest=nearest, error=errors[nearest])
    if best.error > SAME_SLICE:
        for shift in (1, -1):
            for name, state in states.items():
                left = error(state, shift)
                if left < best.error / 4:
                    best = replace(best, nearest=name, error=left, shift=shift)
    return best


def _identity_faults(
    subject: ExaminedAdapter, matches: list[SliceMatchToLayer], limit: float
) -> list[FoundDeviation]:
    """One fault for all wrong slices, named by what they have in common."""
    wrong = [match for match in matches if not match.own <= limit]
    if not wrong:
        return []
    numbers = {f"{match.tap} from {match.nearest}": match.error for match in wrong}
    words = shorten_list([_match_words(match) for match in wrong], TOLD, last=", and ")
    known = [match for match in wrong if match.error <= limit]
    name = "capture-differs"
    if len(known) == len(wrong):
        gaps = {_layer(match.nearest) - _layer(match.tap) for match in known if _layer(match.tap) >= 0}
        taps, nearest = {match.tap for match in known}, {match.nearest for match in known}
        if all(match.shift for match in known):
            name = "capture-rows"
        elif taps == nearest:
            name = "capture-order"
        elif all({match.tap, match.nearest} <= _FINAL | {_last(subject)} for match in known):
            name = "capture-norm"
        elif (
            len(gaps) == 1 and abs(next(iter(gaps))) == 1 and len(known) >= len(list_fc_taps(subject.recipe))
        ):
            name = "layer-shift"
        else:
            name = "layer-wrong"
    return [FoundDeviation(name, words, numbers)]


_FINAL = {"final.prenorm", "final.postnorm"}


def _last(subject: ExaminedAdapter) -> str:
    """The last decoder layer's output, which is the state before the final norm."""
    layers = [name for name in subject.target_reference.states if name.startswith("layer.")]
    return max(layers, key=_layer, default="")


def _layer(tap: str) -> int:
    """Number of a decoder layer, -1 for other taps."""
    parts = tap.split(".")
    return int(parts[1]) if parts[0] == "layer" else -1


def _match_words(match: SliceMatchToLayer) -> str:
    late = f" {match.shift:+d} token late" if match.shift else ""
    if match.nearest == match.tap and not match.shift:
        return f"what is called {match.tap} is off by {match.own:.2g}, and nearer to no other layer"
    sizes = f"(off by {match.error:.2g}; from its own {match.own:.2g})"
    return f"what is called {match.tap} is {match.nearest}{late} {sizes}"


def _capture_words(identity: CaptureIdentity | str) -> str:
    if isinstance(identity, str):
        return f"the capture is not held against the target: {identity}"
    if identity.faults:
        return "the capture is not what it is called"
    return f"every captured slice is the layer it is called (largest difference {identity.worst:.1g})"
