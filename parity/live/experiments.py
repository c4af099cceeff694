"""The experiments: the same tokens computed in ways that must not matter, and each part against its formula.

Each is a row of EXPERIMENTS: its name, the kinds of fault that its failure proves, what a user may suspect, its
trials and its words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Never

import numpy as np
from torch import Tensor

from parity.comparison.error import tensor_errors
from parity.diagnosis.profile import SAMPLE_CHUNK
from parity.live.formulas import (
    attention_calls,
    attention_scale,
    causal_attention,
    off_products,
    operator_formulas,
    products,
    rotary_reference,
    rotary_tables,
)
from parity.live.harness import (
    LAYERS,
    ErrorGap,
    Experiment,
    ExperimentResult,
    ExperimentTrial,
    Harness,
    HarnessRows,
    PlannedTrial,
    TrialExperiment,
)
from parity.model.target.backends import OperatorCall
from parity.model.target.forward import forward, new_cache
from parity.model.target.input_layouts import InputLayout, run_layout
from parity.reports.record import Value

PADS = (1, 3, 5, 64)
SPLITS = (1, 3, 63, 64, 65)
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 128, 129)
EXPERIMENT_BATCH = 4
DRAFTED = 4


def _padding(lab: Harness) -> Iterator[PlannedTrial]:
    """Left padding by 1, 3, 5 and 64, alone and beside a longer row; another pad token; right padding."""
    ids = lab.ids
    for pads in PADS:
        yield f"{pads} pads on the left", partial(lab.measure, left=(pads,))
    short = ids[: len(ids) // 2]
    yield "beside a longer row", partial(lab.measure, rows=(ids, short), row=1, alone=short)
    other = 1 if len(set(ids)) < 2 else next(token for token in ids if token != 0)
    yield f"5 pads of token {other}", partial(lab.measure, left=(5,), pad_id=other)
    yield "5 pads on the right", partial(lab.measure, right=5)


def _batch(lab: Harness) -> Iterator[PlannedTrial]:
    """Batch 1 against N, and three runs: what changes without a reason."""
    for number in (2, 3):
        yield f"run {number}", lab.measure
    ids = lab.ids
    turned = tuple((*ids[shift:], *ids[:shift]) for shift in range(1, EXPERIMENT_BATCH))
    for place, rows in ((0, (ids, *turned)), (EXPERIMENT_BATCH - 1, (*turned, ids))):
        yield f"row {place} of {EXPERIMENT_BATCH}", partial(lab.measure, rows=rows, row=place)


def _packing(lab: Harness) -> Iterator[PlannedTrial]:
    """Two documents packed against each alone; then only the first one changed, and the second must not move."""
    edge = len(lab.ids) // 3
    first, second = lab.ids[:edge], lab.ids[edge:]
    changed = tuple(reversed(first))

    def measure_leak(told: bool) -> ErrorGap:
        rows = [
            lab.feed(rows=((*start, *second),), segments=(edge,), boundaries=told)[0]
            for start in (first, changed)
        ]
        a, b = ({tap: tensor[edge:] for tap, tensor in row.items()} for row in rows)
        return lab.gap(a, b)

    for told, name in ((True, "boundaries told"), (False, "positions only")):
        packed = partial(lab.measure, segments=(edge,), boundaries=told, skip=edge, alone=second)
        yield f"{name}, against alone", packed
        yield f"{name}, first document changed", partial(measure_leak, told)


def _only_positions(lab: Harness, trials: Sequence[ExperimentTrial]) -> str | None:
    """Without the boundaries linear layers cannot know them: that this leaks warns those who pack so."""
    told = [trial for trial in trials[:2] if trial.gap is not None]
    return "" if all(trial.gap is not None and trial.gap.within for trial in told) else None


def _split_prefill(lab: Harness) -> Iterator[PlannedTrial]:
    """Whole against split, the cache kept in between."""
    for at in SPLITS:
        if at < len(lab.ids):
            yield f"split at {at}", partial(lab.measure, splits=(at,))


def _leftover(lab: Harness) -> Iterator[PlannedTrial]:
    """The request again after another one: nothing of that may be left."""

    def measure_after(splits: tuple[int, ...]) -> ErrorGap:
        lab.feed(rows=(tuple(reversed(lab.ids)),), splits=splits)
        return lab.measure(splits=splits)

    lab.alone(lab.ids)  # before the first other request
    yield "after another request", partial(measure_after, ())
    yield "after another request with a cache", partial(measure_after, (len(lab.ids) // 2,))


def _crop(lab: Harness) -> Iterator[PlannedTrial]:
    """Drafted tokens computed with a cache, taken back, and the request continued."""
    drafted = tuple(reversed(lab.ids[:DRAFTED]))
    for at in (SAMPLE_CHUNK - 1, SAMPLE_CHUNK, len(lab.ids) // 2):
        if at < len(lab.ids):
            what = f"{DRAFTED} drafted tokens taken back at {at}"
            yield what, partial(lab.measure, splits=(at,), drafted=drafted)


def _cannot_be_cropped(lab: Harness, trials: Sequence[ExperimentTrial]) -> str | None:
    """A cache that declares it cannot be cropped is a known limit."""
    honest = getattr(new_cache(lab.target)[1], "is_croppable", True) is False
    return " (this cache says itself that it cannot be cropped)" if honest else None


def _lengths(lab: Harness) -> Iterator[PlannedTrial]:
    """Prefixes around the chunk's edges against the same tokens of the whole: a causal model cannot tell them apart."""
    for length in LENGTHS:
        if length < len(lab.ids):
            yield f"{length} tokens", partial(lab.measure, rows=(lab.ids[:length],), stop=length)


def _attention(lab: Harness) -> Iterator[PlannedTrial]:
    """Eager against sdpa, and every sdpa call against causal softmax attention in fp64."""
    target = lab.target
    now = getattr(target.model.config, "_attn_implementation", "eager")
    taken: list[HarnessRows] = []
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    refusal = ""
    # The request by either implementation, with what was handed to torch's attention.
    try:
        for name in ("eager", "sdpa"):
            target.model.set_attn_implementation(name)
            with attention_calls() as calls:
                taken.append(lab.feed()[0])
    except (ValueError, ImportError, AttributeError) as error:
        refusal = str(error)
    finally:
        target.model.set_attn_implementation(now)
    yield "eager against sdpa", partial(_refuse, refusal) if refusal else partial(lab.gap, *taken)
    # Each call from its own inputs: what other keys or another scale do shows in one layer alone.
    full = [i for i, kind in enumerate(target.layer_types) if kind == "full_attention"]
    for layer, (q, k, v, out) in zip(full, calls, strict=False):
        scale = attention_scale(target, q.shape[-1])
        if scale is None or q.shape[-2] != k.shape[-2]:
            continue
        right, mine = (x[0].transpose(0, 1) for x in (causal_attention(q, k, v, scale), out))
        tap = f"layer.{layer}.out"
        yield (
            f"layer {layer} against causal softmax in fp64",
            partial(
                ErrorGap.from_errors,
                tensor_errors(mine, right, strict=True, floored=True),
                lab.limit(tap, out),
                tap=tap,
                layer_type="full_attention",
            ),
        )


def _positions(lab: Harness) -> Iterator[PlannedTrial]:
    """A uniform shift must not matter, and the rotary table must be the declared one."""
    tokens = len(lab.ids)
    yield "all positions 7 further", partial(lab.measure, positions=tuple(range(7, 7 + tokens)))
    reference = rotary_reference(lab.target, tokens)
    with rotary_tables(lab.target) as seen:
        lab.feed()
        lab.feed()
    for number, tables in enumerate(seen):
        what = f"rotary table of forward {number + 1}"
        if isinstance(reference, str):
            yield what, partial(_refuse, reference)
        elif tables[0].shape != reference[0].shape:
            yield what, partial(_refuse, f"a table of {list(tables[0].shape)}")
        else:
            both = zip(tables, reference, strict=True)
            errors = np.maximum(*((x.double().cpu() - y).abs().numpy().max(1) for x, y in both))
            # An angle is a product of float32 numbers: half a unit in its last place, at the largest position.
            limit = 4 * tokens * 2.0**-24 + 2 * 2.0 ** -(24 if tables[0].dtype.itemsize == 4 else 8)
            yield what, partial(ErrorGap.from_errors, errors, limit, tap="cos and sin")


def _refuse(because: str) -> Never:
    raise NotImplementedError(because)


@dataclass(frozen=True, kw_only=True)
class _OperatorExperiment(Experiment):
    """The linear layers' operators, as they were called, against fp64 recurrences; then with one policy switched."""

    def run(self, lab: Harness) -> ExperimentResult:
        """The first call that is off, and what explains it."""
        if not lab.target.linear:
            return self.report_nothing("no linear-attention layer")
        taken = forward(lab.target, lab.ids, backend=lab.backend, taps=list(lab.taps), keep_calls=True)
        calls = [call for call in taken.calls if call.layer < LAYERS]

        def limit(call: OperatorCall) -> float:
            return lab.limit(f"layer.0.{'conv' if call.operator == 'conv' else 'gdn'}.out", call.output)

        off = operator_formulas(calls, limit)
        evidence: tuple[tuple[str, Value], ...] = (("calls", len(calls)), ("outside", len(off)))
        if not off:
            sentence = f"{len(calls)} calls to the convolution and the delta rule agree with fp64 recurrences"
            return ExperimentResult(finding=self.report("pass", sentence, evidence=evidence))
        # A policy that explains it is numeric; at a chunk's edge it is the tail; else the kernel itself.
        first = off[0]
        edge = first.onset >= SAMPLE_CHUNK and first.onset % SAMPLE_CHUNK == 0
        kind = "NUMERIC" if first.explained_by else "TAIL" if edge else "COMPILE"
        why = f"and {first.explained_by} explains it" if first.explained_by else "and no policy explains it"
        finding = self.report(
            "fail",
            f"{first.part} of layer {first.layer} is {first.error:.2g} from its fp64 recurrence on the same "
            f"inputs, from token {first.onset} on, {why}",
            fault=kind.lower(),
            evidence=(
                *evidence,
                ("first", f"{first.part}, layer {first.layer}"),
                ("token", first.onset),
                ("error", first.error),
                ("explained by", first.explained_by or "no policy known here"),
            ),
            next_step="declare the policy on both sides"
            if first.explained_by
            else "try another version or backend of that kernel; keep its inputs (`parity check` records them)",
        )
        return ExperimentResult(finding=finding, proves=(kind,))


@dataclass(frozen=True, kw_only=True)
class _ProjectionExperiment(Experiment):
    """Every projection's output against its own weight times its own input in fp64."""

    def run(self, lab: Harness) -> ExperimentResult:
        """The first projection that is off, and the precision that explains it."""
        with products(lab.target, LAYERS) as seen:
            run_layout(lab.target, InputLayout(rows=(lab.ids,)), backend=lab.backend, taps=["embed.out"])
        if not seen:
            return self.report_nothing("no plain linear module in the layers")
        limit = max(lab.limit("layer.0.out", each.output) for each in seen)
        off = off_products(seen, limit)
        evidence: tuple[tuple[str, Value], ...] = (
            ("projections", len(seen)),
            ("outside", len(off)),
            ("limit", limit),
        )
        if not off:
            sentence = f"{len(seen)} projections give their weight times their input"
            return ExperimentResult(finding=self.report("pass", sentence, evidence=evidence))
        # Several kinds among those that are off: each is possible, and none is proven.
        first = off[0]
        kinds = tuple(sorted({each.kind for each in off if each.kind})) or self.proves
        why = (
            f"{first.explained_by} explains it"
            if first.explained_by
            else "no precision known here explains it"
        )
        finding = self.report(
            "fail",
            f"{len(off)} of {len(seen)} projections differ from their weight times their input, first "
            f"{first.part} of layer {first.layer} by {first.error:.2g}: {why}",
            fault="-or-".join(kinds).lower(),
            evidence=(*evidence, ("first", f"layer {first.layer} {first.part}"), ("error", first.error)),
            next_step="list the modules by dtype and scheme; dump from the precision that will be served",
        )
        return ExperimentResult(finding=finding, proves=kinds if len(kinds) == 1 else ())


_ROWS: tuple[Experiment, ...] = (
    TrialExperiment(
        name="padding",
        proves=("PAD",),
        suspicion="padding changes the states",
        plan=_padding,
        fails="pads reach real tokens, {at}",
        passes="pads do not reach real tokens",
        step="pad on the right, or not at all; look at where the mask is applied in linear layers",
    ),
    TrialExperiment(
        name="batch",
        proves=("INVAR",),
        suspicion="the batch or the run changes the states",
        plan=_batch,
        fails="the run or the batch changes the result, {at}",
        passes="neither the run nor the batch changes the result beyond rounding",
        step="measure this as the floor of the machine; above bfloat16's rounding look for unordered sums",
    ),
    TrialExperiment(
        name="packing",
        proves=("PACK",),
        suspicion="packed documents see each other",
        plan=_packing,
        fails="the first document reaches the second ({part}), {at}",
        passes="documents in one row do not see each other",
        step="give cu_seq_lens_q and seq_idx beside the positions, or do not pack this model",
        limitation=_only_positions,
    ),
    TrialExperiment(
        name="split",
        proves=("STATE",),
        suspicion="a cache loses or changes state",
        plan=_split_prefill,
        fails="{part} does not survive the cache, {at}",
        passes="a split with a cache gives what one pass gives",
        step="look at what the cache returns to that layer: window and state are two tensors",
    ),
    TrialExperiment(
        name="leftover",
        proves=("STATE",),
        suspicion="one request leaves something for the next",
        plan=_leftover,
        fails="something of the request before is left, {at}",
        passes="a request after another one is computed as if alone",
        step="clear the cache, and what modules keep between calls, at the end of a request",
    ),
    TrialExperiment(
        name="crop",
        proves=("STATE",),
        suspicion="rejected drafts stay in the cache",
        plan=_crop,
        fails="{part} is not the one before the draft, {at}",
        passes="what was drafted and taken back leaves no trace",
        step="keep a copy of window and state before each draft, and put it back; do not crop this cache",
        limitation=_cannot_be_cropped,
    ),
    TrialExperiment(
        name="lengths",
        proves=("TAIL",),
        suspicion="a chunk's edge or the length changes the states",
        plan=_lengths,
        fails="a request's length changes its earlier tokens, {at}",
        passes="the first tokens of a request do not depend on its length",
        step="the smallest length that fails is the limit to state; look at the last partial chunk",
    ),
    TrialExperiment(
        name="attention",
        proves=("ATTN",),
        suspicion="the attention mask or kernel is wrong",
        plan=_attention,
        fails="attention sees other keys, or scales them otherwise, {at}",
        passes="attention is causal softmax of the declared scale, by eager and by sdpa",
        step="look at the mask, at is_causal and at the scale that reach attention",
    ),
    TrialExperiment(
        name="positions",
        proves=("POS",),
        suspicion="the positions are wrong",
        plan=_positions,
        fails="the positions are others than declared, {at}",
        passes="positions are the declared ones, and a uniform shift changes nothing",
        step="compare position_ids, rope_theta and the rotary width; look for offsets kept between forwards",
    ),
    _OperatorExperiment(
        name="operators",
        proves=("COMPILE", "NUMERIC", "TAIL"),
        suspicion="a linear-attention kernel is wrong",
    ),
    _ProjectionExperiment(
        name="projections", proves=("QUANT", "NUMERIC"), suspicion="projections run in lower precision"
    ),
)
EXPERIMENTS = {row.name: row for row in _ROWS}
"""The experiments by name, in the order in which they run."""
