"""Which hypothesis of a drafter agrees with what a trainer computes: the declared one, or the one that is named.

    lens = VisibleStep.of(looks, reading)     # or a sentence: why nothing can be compared
    match = lens.match()                      # HypothesisFit: distances, the limit, and the differences found

`parity.probes.instruments.drafter.reference` computes what hidden states should be. In a fresh drafter attention adds
so little that rounding hides what it attends to, so each layer's output projection is first scaled until it adds about
as much as the residual (and put back). Where the whole does not agree, every layer but one is switched off in turn
(its output projection set to zero): what is left shows that layer's window exactly, slot by slot, by gradient, and its
direction by comparison.

The limit is a few times the rounding error of the same arithmetic in the trainer's precision, measured beside it.
The method as a whole: `probes/instruments/drafter/README.md`.

Shapes: S tokens of a row, A anchors, n of them that are computed twice, B slots, P slots that are probed one by one,
D width, V the vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from parity.probes.adapters.base import NotExposed
from parity.probes.instruments.drafter.receptive_field import ProbeBatch, detect_product_dtype
from parity.probes.instruments.drafter.reference import (
    DrafterHypothesis,
    DrafterWeights,
    LayerView,
    compute_hidden_states,
    estimate_hidden_limit,
    measure_hidden_distance,
    override_parameters,
)
from parity.probes.subject import ExaminedAdapter

THETAS = (1e4, 1e6, 1e7, 5e6, 5e5, 1e5, 1e3)
"""Rope bases in use: Llama 2, Qwen3, Qwen3.6, Qwen3-Coder, Llama 3, and neighbours."""
LAYER_PARTS = (1.0, 0.5, 0.25)
"""Shares of a head that turn: most, the embedded target, Qwen3-Next and later."""
EPSILONS = (1e-6, 1e-5, 1e-8)
"""What norms add."""
COMPARED = 4
"""Blocks of a row that are computed twice: enough to see every rule, few enough for a large drafter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HypothesisChange:
    """One way in which a hypothesis departs from the declared one."""

    name: str
    """A row of `parity.probes.deviations`."""
    words: str
    """What was found instead of what is declared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HypothesisFit:
    """How the computed hidden states compare with the declared hypothesis, and with others."""

    precision: str
    """Dtype of the trainer's products."""
    limit: float
    """Distance that rounding may make."""
    declared: float
    """Distance from the declared hypothesis."""
    reading: DrafterHypothesis | None
    """The hypothesis that agrees, the declared one first; None where none does."""
    differences: tuple[HypothesisChange, ...] = ()
    nearest: tuple[str, float] = ("", 0.0)
    """Where none agrees: the nearest tried, and its distance."""
    blind: tuple[str, ...] = ()
    """Hypotheses that give the same within the limit, so that they cannot be named from the declared one."""

    @property
    def agrees(self) -> bool:
        """Whether the declared hypothesis does."""
        return self.declared <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComputedBlocks:
    """Blocks of one row, as computed."""

    look: ProbeBatch
    rows: Tensor
    """Which of the look's anchors, [n]."""


def list_global_changes(reading: DrafterHypothesis) -> list[tuple[HypothesisChange, DrafterHypothesis]]:
    """Hypotheses that differ from one in a single thing that all layers share, in the order in which they are tried.

    Args:
        reading: that one.
    """
    rope = reading.rope
    changes: list[tuple[str, str, dict[str, object]]] = [  # name, words, fields of the hypothesis
        ("block-positions", "the block's positions are 1 too low", {"shift": -1}),
        ("block-positions", "the block's positions are 1 too high", {"shift": 1}),
        ("block-positions", "all slots stand at the anchor's position", {"stride": 0}),
    ]
    for theta in THETAS:
        if theta != rope.rope_theta:
            words = f"rope base {theta:g} instead of {rope.rope_theta:g}"
            changes.append(("rope-base", words, {"rope": replace(rope, rope_theta=theta)}))
    for part in LAYER_PARTS:
        if part != rope.partial_rotary_factor:
            words = f"{part:g} of each head turns instead of {rope.partial_rotary_factor:g}"
            changes.append(("rope-part", words, {"rope": replace(rope, partial_rotary_factor=part)}))
    for part in LAYER_PARTS[1:]:
        words = f"the first {part:g} of a whole head's frequencies turn"
        other = replace(rope, rope_type="proportional", partial_rotary_factor=part, factor=1.0)
        changes.append(("rope-part", words, {"rope": other}))
    changes += [
        ("context-edge", "the context takes in the anchor's own state", {"until": 1}),
        ("context-edge", "the context ends one token early", {"until": -1}),
        ("context-edge", "the first token's state is left out", {"drop_first": 1}),
        ("context-norm", "the norm behind fc is not applied", {"context_norm": False}),
    ]
    for eps in EPSILONS:
        if eps != reading.eps:
            changes.append(("norm-epsilon", f"norms add {eps:g} instead of {reading.eps:g}", {"eps": eps}))
    return [
        (HypothesisChange(name=name, words=words), replace(reading, **fields))  # type: ignore[arg-type]
        for name, words, fields in changes
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScaledHidden:
    """The step's hidden states while some output projections were scaled."""

    values: Mapping[str, Tensor]
    """What was put into the parameters."""
    found: tuple[Tensor, ...]
    """[n, B, D] of each case."""


class VisibleStep:
    """A trainer's step and its reference, with attention made visible."""

    def __init__(
        self,
        looks: Sequence[ProbeBatch],
        weights: DrafterWeights,
        table: Tensor,
        declared: DrafterHypothesis,
        blocks: int = COMPARED,
    ) -> None:
        """Run the step once as it is and once with attention scaled up.

        Args:
            looks: rows with their anchors.
            weights: the drafter's parameters.
            table: [V, D] the embedding's rows.
            declared: the hypothesis of recipe and configuration.
            blocks: of each row that are computed twice, at most.
        """
        self.weights, self.table, self.declared = weights, table, declared
        self.parameters = looks[0].subject.parameters
        self.cases = [ComputedBlocks(look=look, rows=_spread(len(look.anchors), blocks)) for look in looks]
        self.plain = [look.step_output for look in looks]  # made now, before any parameter is scaled
        self.precision = detect_product_dtype(looks[0], self.parameters)
        self.whole = self._scale_hidden(None)
        self.live = any(
            not torch.equal(found, case.look.step_output.hidden.detach()[case.rows])
            for found, case in zip(self.whole.found, self.cases, strict=True)
        )
        """Whether the parameters exposed are those that the step uses: scaling them moved it."""
        if not self.live:
            self.whole = ScaledHidden(values={}, found=self.whole.found)
        self._single: dict[int, ScaledHidden] = {}

    @classmethod
    def of(
        cls, looks: Sequence[ProbeBatch], reading: DrafterHypothesis, blocks: int = COMPARED
    ) -> "VisibleStep | str":
        """The step and its reference, or the reason why nothing can be compared.

        Args:
            looks: rows with their anchors.
            reading: the declared hypothesis.
            blocks: of each row that are computed twice, at most.
        """
        subject = looks[0].subject
        weights = DrafterWeights.of(subject.parameters)
        if weights is None:
            return "the parameters have no z-lab names, so the layers were not compared with a reference"
        if weights.layers != len(reading.layers):
            return f"{weights.layers} layers, {len(reading.layers)} declared: not compared with a reference"
        if looks[0].step_output.fc_input.shape[1] != weights.values["fc.weight"].shape[1]:
            return "fc's input is not as wide as fc's weight: not compared with a reference"
        try:
            table = find_embedding(subject)
        except NotExposed:
            return (
                "neither embed_tokens.weight nor a reference: the layers were not compared with a reference"
            )
        return cls(looks, weights, table, reading, blocks)

    # --- one comparison -------------------------------------------------------------------------------

    def _scale_hidden(self, only: int | None) -> ScaledHidden:
        """A step in which each layer's attention adds about as much as the residual, or only one layer's anything."""
        # How much each layer's attention adds, by the reference; then the trainer's step with projections scaled by it.
        mixing: list[float] = []
        self._hidden_under(self.cases[0], self.declared, {}, torch.float32, mixing)
        values: dict[str, Tensor] = {}
        for layer, size in enumerate(mixing):
            name = f"layers.{layer}.self_attn.o_proj.weight"
            weight = self.parameters[name].data
            weight = weight / size if size > 0 else draw_projection(weight)
            values[name] = weight if only in (None, layer) else torch.zeros_like(weight)
        with override_parameters(self.parameters, values):
            found = tuple(case.look.step().hidden.detach()[case.rows] for case in self.cases)
        return ScaledHidden(values=values, found=found)

    def alone(self, layer: int) -> ScaledHidden:
        """The step with every layer's attention switched off but one's."""
        if layer not in self._single:
            self._single[layer] = self._scale_hidden(layer)
        return self._single[layer]

    def _hidden_under(
        self,
        case: ComputedBlocks,
        reading: DrafterHypothesis,
        values: Mapping[str, Tensor],
        dtype: torch.dtype,
        mixing: list[float] | None = None,
    ) -> Tensor:
        """[n, B, D] under a hypothesis, with these parameters in place of the drafter's."""
        row = replace(case.look.row, anchors=case.look.anchors[case.rows])
        weights = replace(self.weights, values={**self.weights.values, **values})
        fc_input = case.look.step_output.fc_input
        return compute_hidden_states(weights, reading, row, fc_input, self.table, dtype=dtype, mixing=mixing)

    def compute_hidden(
        self, look: ProbeBatch, reading: DrafterHypothesis, values: Mapping[str, Tensor], table: Tensor
    ) -> Tensor:
        """What enters the head in all of a row's blocks under a hypothesis.

        Args:
            look: the row.
            reading: the hypothesis.
            values: put in place of some of the drafter's parameters.
            table: [V, D] the embedding's rows.

        Returns:
            [A, B, D] in float32.
        """
        weights = replace(self.weights, values={**self.weights.values, **values})
        return compute_hidden_states(
            weights, reading, look.row, look.step_output.fc_input, table, dtype=torch.float32
        )

    def apart(
        self, taken: ScaledHidden, reading: DrafterHypothesis, dtype: torch.dtype = torch.float64
    ) -> float:
        """Largest distance of a step's hidden states from a hypothesis, over the cases."""
        pairs = zip(self.cases, taken.found, strict=True)
        return max(
            measure_hidden_distance(each, self._hidden_under(case, reading, taken.values, dtype))
            for case, each in pairs
        )

    def limit(self) -> float:
        """Distance that rounding may make in the first case under the declared hypothesis."""
        case = self.cases[0]
        row = replace(case.look.row, anchors=case.look.anchors[case.rows])
        weights = replace(self.weights, values={**self.weights.values, **self.whole.values})
        return estimate_hidden_limit(
            weights, self.declared, row, case.look.step_output.fc_input, self.table, self.precision
        )

    # --- search ---------------------------------------------------------------------------------------

    def match(self, *, rope_known: bool = True) -> HypothesisFit:
        """The declared hypothesis, or what agrees instead.

        Args:
            rope_known: whether rope and epsilon are declared at all; where not, those that fit best are taken.
        """
        limit, apart = self.limit(), self.apart(self.whole, self.declared)
        if not rope_known and apart > limit:
            self.declared = min(
                _ropes(self.declared), key=lambda each: self.apart(self.whole, each, torch.float32)
            )
            apart = self.apart(self.whole, self.declared)
        base = HypothesisFit(
            precision=str(self.precision).removeprefix("torch."),
            limit=limit,
            declared=apart,
            reading=self.declared,
        )
        return replace(base, blind=self._blind(limit)) if apart <= limit else self._search(base)

    def _blind(self, limit: float) -> tuple[str, ...]:
        """What would look the same: a direction, a position."""
        case, single = self.cases[0], torch.float32
        wanted = self._hidden_under(case, self.declared, self.whole.values, single)
        others = [("the block's positions", replace(self.declared, shift=1))]
        for layer, view in enumerate(self.declared.layers):
            other = self.declared.with_layer(layer, replace(view, causal=not view.causal))
            others.append((f"the direction within the block in layer {layer}", other))
        made = (
            (words, self._hidden_under(case, other, self.whole.values, single)) for words, other in others
        )
        return tuple(words for words, each in made if measure_hidden_distance(each, wanted) <= limit)

    def windows(self) -> tuple[LayerView, ...]:
        """Each layer's window as its slots show it, the direction as declared."""
        look = self.cases[-1].look
        anchor = int(look.batch.position[look.anchors].argmax())
        views = []
        for layer, view in enumerate(self.declared.layers):
            with override_parameters(self.parameters, self.alone(layer).values):
                seen = look.slots(anchor, look.step())
            views.append(_window(seen, look, anchor, view))
        return tuple(views)

    def _search(self, base: HypothesisFit) -> HypothesisFit:
        """Windows as measured, each layer's direction by comparison, with at most one thing else."""
        measured = replace(self.declared, layers=self.windows()) if self.live else self.declared
        # The first that is within the limit; else the nearest is quoted.
        best: tuple[float, tuple[HypothesisChange, ...]] = (math.inf, ())
        tried: list[tuple[HypothesisChange | None, DrafterHypothesis]] = [
            (None, measured),
            *list_global_changes(measured),
        ]
        for change, reading in tried:
            reading = self._fit_directions(reading)
            apart = self.apart(self.whole, reading, torch.float32 if base.limit > 1e-5 else torch.float64)
            differences = (*([change] if change else []), *list_layer_changes(self.declared, reading))
            if apart <= base.limit:
                return replace(base, reading=reading, differences=differences)
            if apart < best[0]:
                best = (apart, differences)
        words = "; ".join(each.words for each in best[1]) or "the declared one"
        return replace(base, reading=None, nearest=(words, best[0]))

    def _fit_directions(self, reading: DrafterHypothesis) -> DrafterHypothesis:
        """The hypothesis with each layer's direction as it fits better, by at least a factor of two."""
        for layer, view in enumerate(reading.layers):
            other = reading.with_layer(layer, replace(view, causal=not view.causal))
            taken = self.alone(layer) if self.live else self.whole
            one, two = (self.apart(taken, each, torch.float32) for each in (reading, other))
            reading = other if two < one / 2 else reading
        return reading


def draw_projection(weight: Tensor) -> Tensor:
    """Random values for a projection that is zero, as some trainers start theirs."""
    made = torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))
    scaled: Tensor = made.to(weight) * weight.shape[1] ** -0.5
    return scaled


def rescale_zero_projections(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values for output projections that are zero: nothing could be seen through them."""
    names = [name for name in parameters if name.endswith("self_attn.o_proj.weight")]
    return {
        name: draw_projection(parameters[name].data) for name in names if not bool(parameters[name].any())
    }


def _ropes(reading: DrafterHypothesis) -> list[DrafterHypothesis]:
    """The hypothesis with every base, share and epsilon in use."""
    return [
        replace(reading, eps=eps, rope=replace(reading.rope, rope_theta=theta, partial_rotary_factor=part))
        for theta, part, eps in product(THETAS, LAYER_PARTS, EPSILONS)
    ]


def _spread(count: int, most: int) -> Tensor:
    """Up to `most` of `count` numbers, first and last among them."""
    chosen: Tensor = torch.linspace(0, count - 1, min(count, most)).round().long().unique()
    return chosen


def find_embedding(subject: ExaminedAdapter) -> Tensor:
    """The embedding's rows: the trainer's own, else the target's.

    Args:
        subject: the adapter that is examined.

    Returns:
        [V, D].

    Raises:
        NotExposed: neither is exposed.
    """
    if "embed_tokens.weight" in subject.parameters:
        return subject.parameters["embed_tokens.weight"]
    return subject.reference(subject.batch).embed


def _window(seen: Tensor, look: ProbeBatch, anchor: int, view: LayerView) -> LayerView:
    """The window of one layer, from what its probed slots see before the anchor in its document.

    Args:
        seen: bool [P, S].
        look: the row.
        anchor: number of the block.
        view: as declared.
    """
    # How far back each slot sees, in tokens before the anchor.
    position, document = look.batch.position, look.batch.document
    own = document == document[look.anchors[anchor]]
    stands = int(position[look.anchors[anchor]])
    lows = []
    for row in seen:
        at = position[row & own & (position < stands)]
        lows.append(stands - int(at.min()) if len(at) else 0)
    # All of the context, a window from the anchor (alike for all slots), or one from each query (a staircase).
    back, slots = torch.tensor(lows), torch.tensor(look.probed_slots)
    if bool((back == stands).all()):
        return replace(view, window=view.window if _hides(view, stands, look.subject.block) else None)
    if bool((back == back[0]).all()):
        return replace(view, window=int(back[0]), window_from="anchor")
    window = int(back[0]) + 1
    if bool((back == (window - 1 - slots).clamp(min=0)).all()):
        return replace(view, window=window, window_from="query")
    return view


def _hides(view: LayerView, stands: int, block: int) -> bool:
    """Whether a window reaches so far that no slot shows its edge."""
    return view.window is not None and view.window >= stands + block


def list_layer_changes(declared: DrafterHypothesis, found: DrafterHypothesis) -> list[HypothesisChange]:
    """What layers do otherwise than declared; layers that do the same are named together.

    Args:
        declared: the declared hypothesis.
        found: another one with as many layers.
    """
    named: dict[tuple[str, str], list[int]] = {}
    for layer, (a, b) in enumerate(zip(declared.layers, found.layers, strict=True)):
        if a.causal != b.causal:
            key = ("within-block", f"{'causal' if b.causal else 'bidirectional'} within the block")
            named.setdefault(key, []).append(layer)
        if (a.window, a.window_from if a.window else "") != (b.window, b.window_from if b.window else ""):
            named.setdefault(describe_window(a, b), []).append(layer)
    return [
        HypothesisChange(
            name=name, words=f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}: {words}"
        )
        for (name, words), layers in named.items()
    ]


def describe_window(declared: LayerView, found: LayerView) -> tuple[str, str]:
    """(name, words) of a window that is another than declared.

    Args:
        declared: of the layer.
        found: in its place.
    """
    wanted = (
        "all of the context"
        if declared.window is None
        else f"{declared.window} tokens from the {declared.window_from}"
    )
    if found.window is None:
        return "window-ignored", f"sees all of the context instead of {wanted}"
    got = f"{found.window} tokens from the {found.window_from}"
    if declared.window is None:
        return "window-undeclared", f"sees {got} instead of {wanted}"
    if declared.window == found.window:
        return "window-from", f"a window of {got} instead of {wanted}"
    return "window-size", f"a window of {got} instead of {wanted}"
