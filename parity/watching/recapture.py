"""Are the states that a step was given still the target's? The first tokens of one sample, captured again on torch.

Where the run's own target computes on torch, it is asked again at once, past whatever the source keeps. Where another
backend computes (`fla`, `fast`, `fla-interpreted`, ...), a worker process with torch alone does it beside the run, and
the result goes into the next report. States that are read from files have no target here.

Judged per token by the relative L2 that rounding explains at the tap's depth in the coarsest dtype
(`parity.comparison.tolerance.rules_for`: k * 1.03**depth * eps), times `REGROUPED` in float32, since the
document that was
captured was longer, and its sums were grouped otherwise. What is beyond is compared with every layer of the target,
so that a capture that is off by a layer or by a token is named as that.
"""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.capturing.client import Worker, capture_with
from parity.comparison.error import cosine_gaps, tensor_errors
from parity.comparison.tolerance import Limit, coarsest, rms, rules_for
from parity.live.harness import REGROUPED
from parity.model.target.forward import forward
from parity.model.training.states import OnlineStates, SyntheticStates, taps_of, target_spec
from parity.model.training.step import StepOutput
from parity.model.training.trainer import Trainer
from parity.probes.deviations import deviation
from parity.reports.record import Finding, Value
from parity.tracing.trace import Trace, layer_of, tap_depth
from parity.watching.ranks import is_first

FINAL_TAPS = ("final.prenorm", "final.postnorm")
WAIT = 600.0
"""Seconds that the end of a run waits for a worker that is still at it: loading a large target takes minutes."""
RECAPTURE_NAME = "recapture"
States = Mapping[str, Tensor]
"""Tap -> [T, D]."""
RecaptureAnswer = tuple[list[tuple[str, Value]], list[Finding]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleStates:
    """What a step was given of one sample."""

    step: int
    sample: int
    tokens: list[int]
    states: States


class StateRecapture:
    """Compares states with the target's own, at every probed step."""

    def __init__(self, trainer: Trainer, tokens: int) -> None:
        """tokens: of the sample, at most; 0 captures nothing."""
        self.trainer, self.tokens = trainer, tokens
        self.layers = trainer.parts.layers
        self.source: Any = trainer.source
        self._worker: _RecaptureThread | None = None

    def ask(self, step: int, output: StepOutput) -> RecaptureAnswer:
        """Numbers and findings of this step, or those of an earlier one that a worker has done meanwhile."""
        given = self._sample_states(step, output)
        if given is None:
            return [], []
        if isinstance(self.source, SyntheticStates):
            return self._compare_states(given, self.source.target(torch.tensor(given.tokens)))
        if not isinstance(self.source, OnlineStates):
            return [], [_skip_finding("states are read from files, and the target is not in this process")]
        if self.source.backend.name == "torch":
            return self._compare_states(given, self._again(given.tokens, list(given.states)), self._all)
        if not is_first():
            return [], []  # one worker holds the target a second time, not one a rank
        if self._worker is None:
            self._worker = _RecaptureThread(
                self.trainer, [f"layer.{layer}.out" for layer in range(self.layers)]
            )
        done = self._worker.done()
        self._worker.start(given)
        return self._merge_answers(done)

    def close(self) -> RecaptureAnswer:
        """What a worker still had to tell; ends it."""
        if self._worker is None:
            return [], []
        done = self._worker.done(wait=WAIT)
        self._worker.close()
        self._worker = None
        return self._merge_answers(done)

    def _merge_answers(self, done: "tuple[SampleStates, States | str] | None") -> RecaptureAnswer:
        if done is None:
            return [], []
        given, made = done
        if isinstance(made, str):
            return [], [_skip_finding(f"the torch worker failed on step {given.step}: {made}")]
        numbers, findings = self._compare_states(given, made)
        return [(f"{RECAPTURE_NAME}.step", given.step), *numbers], findings

    def _sample_states(self, step: int, output: StepOutput) -> SampleStates | None:
        first = next(iter(output.batch.spans()), None)
        if not self.tokens or first is None:
            return None
        sample, span = first
        span = slice(span.start, min(span.stop, span.start + self.tokens))
        states = {
            name: output.captured.states[span, index].detach().cpu()
            for index, name in enumerate(output.captured.taps)
        }
        return SampleStates(
            step=step, sample=sample, tokens=output.batch.tokens[span].tolist(), states=states
        )

    def _again(self, tokens: Sequence[int], taps: Sequence[str]) -> States:
        source = self.source
        made = forward(
            source.target,
            tokens,
            backend=source.backend,
            taps=list(dict.fromkeys(taps)),
            problems=source.problems,
        )
        return {name: tensor.cpu() for name, tensor in made.taps.items()}

    def _all(self, tokens: Sequence[int]) -> States:
        return self._again(tokens, [*(f"layer.{layer}.out" for layer in range(self.layers)), *FINAL_TAPS])

    def _compare_states(self, given: SampleStates, made: States, more: Any = None) -> RecaptureAnswer:
        """more: captures every layer of these tokens, where `made` has the recipe's alone."""
        numbers: list[tuple[str, Value]] = []
        outside: list[str] = []
        # Each slice by itself: what it is off by, and whether rounding explains that.
        worst = (0.0, "", 0.0, Limit(0.0, 0.0))
        for name, own in given.states.items():
            error, gap = tensor_errors(own, made[name].cpu()), cosine_gaps(own, made[name].cpu())
            size, limit = rms(error), self.limit(name, own, made[name])
            numbers.append((f"{RECAPTURE_NAME}.{name}.relative_l2", size))
            numbers.append((f"{RECAPTURE_NAME}.{name}.cosine", float(1 - gap.max(initial=0.0))))
            if size > limit.rms or float(error.max(initial=0.0)) > limit.token:
                outside.append(name)
            if size / limit.rms >= worst[0]:
                worst = (size / limit.rms, name, size, limit)
        # In words, by the slice nearest to its limit or furthest beyond.
        dtype = coarsest(*(str(each.dtype).removeprefix("torch.") for each in given.states.values()))
        said = (
            f"relative L2 {worst[2]:.2g} at {worst[1]}, limit {worst[3].rms:.2g} (rounding in {dtype} at that depth); "
            f"{len(given.tokens)} tokens of sample {given.sample}"
        )
        if not outside:
            sentence = f"the step's states are those of a second capture on torch: {said}"
            return numbers, [
                Finding(name=RECAPTURE_NAME, outcome="pass", sentence=sentence, evidence=tuple(numbers))
            ]
        # What is off is named by what it is instead.
        named = _name_fault(self, given, made if more is None else more(given.tokens), outside)
        row = deviation(named[0])
        finding = Finding(
            name=RECAPTURE_NAME,
            outcome="fail",
            fault=row.name,
            sentence=f"{row.sentence}: {named[1]}; {len(outside)} of {len(given.states)} slices differ, {said}",
            evidence=(*numbers, ("outside", ", ".join(outside))),
            next_step=row.do,
        )
        return numbers, [finding]

    def limit(self, tap: str, a: Tensor, b: Tensor) -> Limit:
        """Of the root mean square over tokens, and of the worst token."""
        dtype = coarsest(*(str(each.dtype).removeprefix("torch.") for each in (a, b)))
        rules = rules_for(tap, dtype, tap_depth(tap, self.layers))
        times = REGROUPED if rules.gate == "semantic" else 1.0
        return Limit(rules.limit.rms * times, rules.limit.token * times)


def _name_fault(
    self: StateRecapture, given: SampleStates, made: States, outside: Sequence[str]
) -> tuple[str, str]:
    """The fault's name, and what was seen: the tap that each slice outside really is, or a roll by one token."""
    really: dict[str, str] = {}
    for name in outside:
        own = given.states[name]
        near = min(made, key=lambda tap: rms(tensor_errors(own, made[tap])))
        if rms(tensor_errors(own, made[near])) <= self.limit(near, own, made[near]).rms:
            really[name] = near
    rolled = all(
        min(
            rms(tensor_errors(given.states[n][1:], made[n][:-1])),
            rms(tensor_errors(given.states[n][:-1], made[n][1:])),
        )
        <= self.limit(n, given.states[n], made[n]).rms
        for n in outside
        if n in made
    )
    if really and len(really) == len(outside):
        words = ", ".join(f"{name} is {tap}" for name, tap in really.items())
        places = [(layer_of(tap), layer_of(name)) for name, tap in really.items()]
        by = {None if None in (tap, name) else tap - name for tap, name in places}  # type: ignore[operator]
        return ("layer-shift" if by in ({1}, {-1}) else "layer-wrong"), words
    if rolled and len(given.tokens) > 1:
        return "capture-rows", f"{outside[0]} equals its own row one token beside"
    return "capture-differs", f"{outside[0]} is no layer of the target"


def _skip_finding(why: str) -> Finding:
    return Finding(
        name=RECAPTURE_NAME,
        outcome="skipped",
        sentence=f"states were not captured again: {why}",
        next_step="parity compare holds two captures of the same tokens against each other",
    )


class _RecaptureThread:
    """One worker on torch, asked by a thread so that no step waits for it."""

    def __init__(self, trainer: Trainer, layers: Sequence[str]) -> None:
        recipe = trainer.training.recipe
        self.spec = asdict(target_spec(recipe, trainer.training.run.device))
        self.taps = list(dict.fromkeys([*taps_of(recipe), *layers]))
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._result: tuple[SampleStates, States | str] | None = None

    def start(self, given: SampleStates) -> None:
        """Begin with these tokens, unless it is still at others."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(given,), daemon=True)
            self._thread.start()

    def done(self, wait: float = 0.0) -> tuple[SampleStates, States | str] | None:
        """The result of what was begun, once; None while there is none."""
        if self._thread is not None:
            self._thread.join(wait)
            if self._thread.is_alive():
                return None
            self._thread = None
        result, self._result = self._result, None
        return result

    def _run(self, given: SampleStates) -> None:
        try:
            self._result = given, self._recapture_states(given.tokens)
        except (
            Exception
        ) as error:  # of a worker that died, or of a target that it cannot load: told, not raised
            self._result = given, str(error).splitlines()[0]

    def _recapture_states(self, tokens: list[int]) -> States:
        if self._worker is None:
            self._worker = Worker("torch")
        request = {
            "id": "sample",
            "token_ids": tokens,
            "origin": "given",
            "prompt_tokens": 0,
            "token_texts": [str(token) for token in tokens],
        }
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "trace"
            capture_with(self._worker, self.spec, [request], out, taps=self.taps)
            trace = Trace.open(out)
            return {tap: trace.tensor("sample", tap).clone() for tap in self.taps}

    def close(self) -> None:
        """End the worker, in the middle of what it does."""
        if self._worker is not None:
            self._worker.close()
