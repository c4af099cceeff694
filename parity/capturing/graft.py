"""Graft: the model runs on from another run's state. Bisection to the layers that add error by themselves.

    with LayerRunner(target, parse_backend("torch")) as grafts:      # side A: a loaded target, in this process
        found = bisect(grafts, Trace.open("reference"))    # side B: a trace of the same prompts
    found.layers                                           # (17,): every layer that adds error by itself
    found.finding("graft")

A comparison finds where two runs begin to differ, not where else they differ: all that follows a fault inherits it.
Here side B's state is put in at layer i of side A, which runs on to layer j; if its state there leaves the floor,
a layer between adds error by itself. Halving finds the first such layer in log2(layers) steps that cost two
forward passes together, and reads side B's states at those layers only. Then side B's state is put in
behind it, and the rest of the model is run: what still differs at the end is another layer's.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from parity.comparison.error import token_errors
from parity.comparison.tolerance import Judgement, TapEvidence, coarsest, judge_tap, rules_for
from parity.errors import NothingComparable, ParityError
from parity.kernel.outlier_channels import channel_mean_square, pick_outliers
from parity.kernel.sums import pair_stats
from parity.model.target.backends import Backend, CallRecorder, prove
from parity.model.target.forward import replace_layer_input
from parity.model.target.load import Target
from parity.reports.record import Finding, Value
from parity.tracing.trace import BackendProof, RequestEntry, Trace

MOST_ROWS = 2048
"""Tokens that a bisection runs, at least one request: a fault of a layer is seen on every prompt long enough."""
MOST_FAULTS = 8
"""Layers that are named before a target is called different altogether."""


class _Reached(Exception):
    """The last layer that is needed has run."""


class LayerRunner:
    """Runs decoder layers `start` to `stop` of a target on given states. Use as a context manager."""

    def __init__(self, target: Target, backend: Backend) -> None:
        """`backend` is what this process computes with; the proof says whether it did."""
        if backend.delta == "golden":
            raise ParityError("graft into the golden run", "the judge itself", "graft into the other side")
        self.target, self.backend = target, backend
        self._calls = CallRecorder(target.linear)
        self._tuples: list[bool] = []
        self._ran: set[int] = set()

    def __enter__(self) -> "LayerRunner":
        self._tuples = self._returns_tuples()
        self._calls.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._calls.__exit__(*exception)

    @property
    def proof(self) -> BackendProof:
        """Who computed, of the layers that ran."""
        return prove(self.backend, self._calls.proofs(), [i for i in self.target.linear if i in self._ran])

    def run(self, token_ids: Sequence[int], state: Tensor, start: int, stop: int) -> Tensor:
        """Run layers `start` to `stop - 1` of one request. Positions and masks are those of the whole request.

        Args:
            token_ids: of the request.
            state: [tokens, width] what enters layer `start`.

        Returns:
            [tokens, width] the output of layer `stop - 1`, on CPU.
        """
        layers, reached = self.target.layers, list[Tensor]()
        if not 0 <= start < stop <= len(layers) or state.shape[0] != len(token_ids):
            raise ValueError(
                f"layers {start} to {stop} of {len(layers)}, {len(token_ids)} tokens, {state.shape}"
            )

        def take_out(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            reached.append((output[0] if isinstance(output, tuple) else output)[0].detach())
            raise _Reached

        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            # Layers before `start` return their input, `start` gets the state, and the run ends behind `stop - 1`.
            for index in range(start):
                stack.callback(layers[index].__dict__.pop, "forward", None)
                layers[index].__dict__["forward"] = _passing(self._tuples[index])
            stack.callback(replace_layer_input(layers[start], state).remove)
            stack.callback(layers[stop - 1].register_forward_hook(take_out).remove)
            try:
                self.target.model(
                    input_ids=torch.tensor([list(token_ids)], device=self.target.device), use_cache=False
                )
            except _Reached:
                pass
        self._ran.update(range(start, stop))
        return reached[0].cpu()

    def _returns_tuples(self) -> list[bool]:
        """Of each layer, whether its output is a tuple: a layer that is passed through has to return the same."""
        kinds: dict[int, bool] = {}
        with ExitStack() as stack, torch.inference_mode():
            for index, layer in enumerate(self.target.layers):
                hook = layer.register_forward_hook(
                    lambda _, __, out, index=index: kinds.update({index: isinstance(out, tuple)})
                )
                stack.callback(hook.remove)
            self.target.model(
                input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.target.device), use_cache=False
            )
        return [kinds[index] for index in range(len(self.target.layers))]


def _passing(as_tuple: bool) -> Callable[..., Tensor | tuple[Tensor]]:
    """A layer's forward that returns its input."""

    def forward(hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if as_tuple else hidden_states

    return forward


@dataclass(frozen=True, kw_only=True, slots=True)
class GraftStep:
    """Side B's state put in at layer `start`; side A's at layer `stop - 1` against side B's."""

    start: int
    stop: int
    judgement: Judgement

    @property
    def fails(self) -> bool:
        """Whether a layer from `start` to `stop - 1` adds error."""
        return self.judgement.outcome != "pass"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bisection:
    """Which layers of side A add error by themselves, with the steps that show it."""

    layers: tuple[int, ...]
    """In order; each fails by itself, fed side B's input."""
    spread: tuple[tuple[int, int], ...]
    """Ranges [first, last] that fail while their halves do not: error that no single layer adds."""
    unseen: tuple[tuple[int, int], ...]
    """Ranges [first, last] that fail, between two states of which side B holds none in between."""
    rest: tuple[GraftStep, ...]
    """The rest of the model with side B's state put in behind each layer or range that fails; the last one passes
    unless MOST_FAULTS were found."""
    steps: tuple[GraftStep, ...]
    requests: int
    tokens: int
    proof: BackendProof

    def finding(self, name: str) -> Finding:
        """The result as a finding."""
        evidence: tuple[tuple[str, Value], ...] = (
            ("steps", len(self.steps)),
            ("requests", self.requests),
            ("tokens", self.tokens),
            ("whole model", self.steps[0].judgement.rms),
            ("whole model's limit", self.steps[0].judgement.limit.rms),
            *((f"behind layer {step.start - 1}", step.judgement.rms) for step in self.rest),
        )
        # No evidence, or no fault.
        if not self.proof.valid:
            return Finding(
                name=name,
                outcome="fail",
                fault="dispatch",
                evidence=evidence,
                sentence=f"the graft ran on another backend than it names: {self.proof.problems[0]}",
                next_step="`parity env` shows which backends run here",
            )
        if not self.layers and not self.spread and not self.unseen:
            return Finding(
                name=name,
                outcome="pass",
                evidence=evidence,
                sentence="fed the other side's first state, the whole model stays within the floor",
            )
        # Layers by themselves, ranges together, ranges with no state in between; and whether that is all.
        named = ", ".join(str(layer) for layer in self.layers)
        parts = (
            [f"error is added by {'layers' if len(self.layers) > 1 else 'layer'} {named}"] if named else []
        )
        parts += [
            f"by layers {first} to {last} together, by none of them alone" for first, last in self.spread
        ]
        parts += [
            f"by one of layers {first} to {last}, whose states the reference lacks"
            for first, last in self.unseen
        ]
        healed = bool(self.rest) and not self.rest[-1].fails
        parts += (
            ["and by no other: the rest, fed the other side's state, stays within the floor"]
            if healed
            else []
        )
        return Finding(
            name=name,
            outcome="fail",
            evidence=evidence,
            sentence=", ".join(parts) if named else f"error is added {', '.join(parts)}",
            next_step=f"compare the operators of layer {self.layers[0]} on one input"
            if self.layers
            else "capture the reference with --taps states"
            if self.unseen
            else "capture both sides in float32 and compare again",
        )


def bisect(grafts: LayerRunner, reference: Trace, *, requests: Sequence[str] | None = None) -> Bisection:
    """Find the layers that add error by themselves.

    Args:
        grafts: side A.
        reference: states of side B.
        requests: ids of the requests to run, all by default; of these the first, up to MOST_ROWS tokens.

    Raises:
        ParityError: where the reference holds no state between two layers, or states of another target.
        NothingComparable: where there is no token.
    """
    search = _Search(grafts, reference, _chosen(reference, requests))
    ends = search.points
    found, rest = list[int](), list[GraftStep]()
    spread, unseen = list[tuple[int, int]](), list[tuple[int, int]]()
    place, whole = 0, search.step(ends[0], ends[-1])
    # Side B's state is put in behind each layer or range found, until the rest of the model passes.
    while whole.fails and len(rest) < MOST_FAULTS:
        first, last = search.first(place)
        if ends[last] - ends[first] == 1:
            found.append(ends[first])
        else:
            (unseen if last - first == 1 else spread).append((ends[first], ends[last] - 1))
        place = last
        if place == len(ends) - 1:
            break
        whole = search.step(ends[place], ends[-1])
        rest.append(whole)
    return Bisection(
        layers=tuple(found),
        spread=tuple(spread),
        unseen=tuple(unseen),
        rest=tuple(rest),
        steps=tuple(search.steps.values()),
        requests=len(search.entries),
        tokens=sum(entry.rows for entry in search.entries),
        proof=grafts.proof,
    )


def _chosen(reference: Trace, requests: Sequence[str] | None) -> list[RequestEntry]:
    """The requests to run. Raises NothingComparable where there is no token."""
    entries = [reference.request(name) for name in requests] if requests else list(reference.requests)
    chosen, rows = list[RequestEntry](), 0
    for entry in entries:
        if entry.rows and (not chosen or rows + entry.rows <= MOST_ROWS):
            chosen.append(entry)
            rows += entry.rows
    if not chosen:
        raise NothingComparable(f"tokens of {reference.path}", "none", "capture at least one prompt")
    return chosen


class _Search:
    """Steps of one bisection; each is run once."""

    def __init__(self, grafts: LayerRunner, reference: Trace, entries: list[RequestEntry]) -> None:
        self.grafts, self.reference, self.entries = grafts, reference, entries
        self.points = _points(grafts.target, reference)
        self.steps: dict[tuple[int, int], GraftStep] = {}

    def first(self, place: int) -> tuple[int, int]:
        """Of a failing range from point number `place` to the last: the first failing range, between two neighbouring
        points, or more where both halves of it pass."""
        low, high = place, len(self.points) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.step(self.points[low], self.points[middle]).fails:
                high = middle
            elif self.step(self.points[middle], self.points[high]).fails:
                low = middle
            else:
                break
        return low, high

    def step(self, start: int, stop: int) -> GraftStep:
        """Run layers `start` to `stop` from side B's state, and judge the state they end in."""
        if (start, stop) not in self.steps:
            errors, gaps = list[NDArray[np.floating]](), list[NDArray[np.floating]]()
            tap = _state_before(stop)
            info, dtypes = self.reference.tap(tap), (self.grafts.target.dtype, self.reference.manifest.dtype)
            for entry in self.entries:
                begin = self.reference.tensor(entry.id, _state_before(start))
                mine = self.grafts.run(entry.token_ids, begin, start, stop)
                theirs = self.reference.tensor(entry.id, tap)
                stats = pair_stats(
                    mine,
                    theirs,
                    full=False,
                    outliers=pick_outliers(channel_mean_square(theirs)),
                    implementation="torch",
                )
                errors.append(token_errors(stats, robust=True, strict=True))
                gaps.append(stats.cosine_gap())
            evidence = TapEvidence(error=np.concatenate(errors), cosine_gap=np.concatenate(gaps))
            rules = rules_for(tap, coarsest(info.dtype, *dtypes), stop - start)
            self.steps[start, stop] = GraftStep(start=start, stop=stop, judgement=judge_tap(evidence, rules))
        return self.steps[start, stop]


def _state_before(layer: int) -> str:
    """The tap that holds what enters a decoder layer (or, behind the last one, what it returns)."""
    return f"layer.{layer - 1}.out" if layer else "embed.out"


def _points(target: Target, reference: Trace) -> list[int]:
    """The layers whose input the reference holds, and behind the last one. Raises ParityError where these are fewer
    than two or of another target."""
    held = [layer for layer in range(len(target.layers) + 1) if _state_before(layer) in reference.taps]
    if reference.manifest.target.layers != len(target.layers):
        raise ParityError(
            f"states of {reference.path} put into {target.spec.model}",
            f"{reference.manifest.target.layers} layers against {len(target.layers)}",
            "capture the reference of the same model",
        )
    if len(held) < 2:
        raise ParityError(
            f"states between the layers in {reference.path}",
            f"taps {', '.join(reference.taps)}",
            "capture it with --taps states",
        )
    width = {reference.tap(_state_before(layer)).width for layer in held}
    if width != {int(target.config.hidden_size)}:
        raise ParityError(
            f"states of {reference.path} put into {target.spec.model}",
            f"widths {sorted(width)} against {target.config.hidden_size}",
            "capture the reference of the same model",
        )
    return held
