"""The experiments: the same tokens computed in ways that must not matter, and each part against its formula.

Each takes a lab and gives a finding, with the kinds of fault that its failure proves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.diagnosis.profile import SAMPLE_CHUNK
from parity.live.harness import (
    LAYERS,
    ErrorGap,
    ExperimentResult,
    ExperimentTrial,
    Harness,
    HarnessRows,
    at_words,
    make_experiment_result,
    trial_of_refusal,
)
from parity.reports.record import Finding, Value

PADS = (1, 3, 5, 64)
SPLITS = (1, 3, 63, 64, 65)
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 128, 129)
EXPERIMENT_BATCH = 4
DRAFTED = 4


def padding(lab: Harness) -> ExperimentResult:
    """Left padding by 1, 3, 5 and 64, alone and beside a longer row; another pad token; right padding."""
    ids, base = lab.ids, lab.alone(lab.ids)
    other = 1 if len(set(ids)) < 2 else next(token for token in ids if token != 0)
    trials = []
    for pads in PADS:
        trials.append(
            trial_of_refusal(
                "padding",
                f"{pads} pads on the left",
                lambda pads=pads: lab.gap(lab.feed(rows=(ids,), left=(pads,))[0], base),  # type: ignore[misc]
            )
        )
    short = ids[: len(ids) // 2]
    trials += [
        trial_of_refusal(
            "padding",
            "beside a longer row",
            lambda: lab.gap(lab.feed(rows=(ids, short))[1], lab.alone(short)),
        ),
        trial_of_refusal(
            "padding",
            f"5 pads of token {other}",
            lambda: lab.gap(lab.feed(rows=(ids,), left=(5,), pad_id=other)[0], base),
        ),
        trial_of_refusal(
            "padding", "5 pads on the right", lambda: lab.gap(lab.feed(rows=(ids,), right=5)[0], base)
        ),
    ]
    return make_experiment_result(
        "padding",
        trials,
        proves=("PAD",),
        fails=lambda t: f"pads reach real tokens, {at_words(t)}",
        passes="pads do not reach real tokens",
        step="pad on the right, or not at all; look at where the mask is applied in linear layers",
    )


def check_batch(lab: Harness) -> ExperimentResult:
    """Batch 1 against N, and three runs: what changes without a reason."""
    ids, base = lab.ids, lab.alone(lab.ids)
    turned = tuple(tuple([*ids[shift:], *ids[:shift]]) for shift in range(1, EXPERIMENT_BATCH))
    trials = [
        ExperimentTrial(experiment="batch", what=f"run {number}", gap=lab.gap(lab.feed(rows=(ids,))[0], base))
        for number in (2, 3)
    ]
    trials += [
        ExperimentTrial(
            experiment="batch",
            what=f"row {place} of {EXPERIMENT_BATCH}",
            gap=lab.gap(lab.feed(rows=rows)[place], base),
        )
        for place, rows in ((0, (ids, *turned)), (EXPERIMENT_BATCH - 1, (*turned, ids)))
    ]
    return make_experiment_result(
        "batch",
        trials,
        proves=("INVAR",),
        fails=lambda t: f"the run or the batch changes the result, {at_words(t)}",
        passes="neither the run nor the batch changes the result beyond rounding",
        step="measure this as the floor of the machine; above bfloat16's rounding look for unordered sums",
    )


def packing(lab: Harness) -> ExperimentResult:
    """Two documents packed against each alone; then only the first one changed, and the second must not move."""
    ids = lab.ids
    edge = len(ids) // 3
    first, second = ids[:edge], ids[edge:]
    changed = tuple(reversed(first))
    whole = lab.alone(second)

    def measure_shift(told: bool) -> ErrorGap:
        rows = lab.feed(rows=((*first, *second),), segments=(edge,), boundaries=told)[0]
        return lab.gap({tap: tensor[edge:] for tap, tensor in rows.items()}, whole)

    def measure_leak(told: bool) -> ErrorGap:
        rows = [
            lab.feed(rows=((*start, *second),), segments=(edge,), boundaries=told)[0]
            for start in (first, changed)
        ]
        cut = [{tap: tensor[edge:] for tap, tensor in row.items()} for row in rows]
        return lab.gap(cut[0], cut[1])

    trials = [
        trial_of_refusal("packing", "boundaries told, against alone", lambda: measure_shift(True)),
        trial_of_refusal("packing", "boundaries told, first document changed", lambda: measure_leak(True)),
        trial_of_refusal("packing", "positions only, against alone", lambda: measure_shift(False)),
        trial_of_refusal("packing", "positions only, first document changed", lambda: measure_leak(False)),
    ]
    told = [trial for trial in trials[:2] if trial.gap is not None]
    # Without the boundaries linear layers cannot know them: that this leaks warns those who pack so.
    only_positions = all(trial.gap is not None and trial.gap.within for trial in told)
    return make_experiment_result(
        "packing",
        trials,
        proves=("PACK",),
        fails=lambda t: (
            f"the first document reaches the second ({t.gap.part if t.gap else ''}), {at_words(t)}"
        ),
        passes="documents in one row do not see each other",
        step="give cu_seq_lens_q and seq_idx beside the positions, or do not pack this model",
        outcome="warn" if only_positions else "fail",
    )


def check_split_prefill(lab: Harness) -> ExperimentResult:
    """Whole against split, the cache kept in between; and after another request."""
    ids, base = lab.ids, lab.alone(lab.ids)
    trials = [
        trial_of_refusal(
            "split",
            f"split at {at}",
            lambda at=at: lab.gap(lab.feed(rows=(ids,), splits=(at,))[0], base),  # type: ignore[misc]
        )
        for at in SPLITS
        if at < len(ids)
    ]
    return make_experiment_result(
        "split",
        trials,
        proves=("STATE",),
        fails=lambda t: f"{t.gap.part if t.gap else ''} does not survive the cache, {at_words(t)}",
        passes="a split with a cache gives what one pass gives",
        step="look at what the cache returns to that layer: window and state are two tensors",
    )


def check_state_leak(lab: Harness) -> ExperimentResult:
    """The request again after another one: nothing of that may be left."""
    ids, base = lab.ids, lab.alone(lab.ids)
    lab.feed(rows=(tuple(reversed(ids)),))
    after = lab.feed(rows=(ids,))[0]
    lab.feed(rows=(tuple(reversed(ids)),), splits=(len(ids) // 2,))
    cached = lab.feed(rows=(ids,), splits=(len(ids) // 2,))[0]
    trials = [
        ExperimentTrial(experiment="leftover", what="after another request", gap=lab.gap(after, base)),
        ExperimentTrial(
            experiment="leftover", what="after another request with a cache", gap=lab.gap(cached, base)
        ),
    ]
    return make_experiment_result(
        "leftover",
        trials,
        proves=("STATE",),
        fails=lambda t: f"something of the request before is left, {at_words(t)}",
        passes="a request after another one is computed as if alone",
        step="clear the cache, and what modules keep between calls, at the end of a request",
    )


def crop(lab: Harness) -> ExperimentResult:
    """Drafted tokens computed with a cache, taken back, and the request continued."""
    from parity.model.target.forward import new_cache

    ids, base = lab.ids, lab.alone(lab.ids)
    drafted = tuple(reversed(ids[:DRAFTED]))
    trials = [
        trial_of_refusal(
            "crop",
            f"{DRAFTED} drafted tokens taken back at {at}",
            lambda at=at: lab.gap(  # type: ignore[misc]
                lab.feed(rows=(ids,), splits=(at,), drafted=drafted)[0], base
            ),
        )
        for at in (SAMPLE_CHUNK - 1, SAMPLE_CHUNK, len(ids) // 2)
        if at < len(ids)
    ]
    cache = new_cache(lab.target)[1]
    honest = getattr(cache, "is_croppable", True) is False
    return make_experiment_result(
        "crop",
        trials,
        proves=("STATE",),
        fails=lambda t: (
            f"{t.gap.part if t.gap else ''} is not the one before the draft, {at_words(t)}"
            + (" (this cache says itself that it cannot be cropped)" if honest else "")
        ),
        passes="what was drafted and taken back leaves no trace",
        step="keep a copy of window and state before each draft, and put it back; do not crop this cache",
        outcome="warn" if honest else "fail",
    )


def lengths(lab: Harness) -> ExperimentResult:
    """Prefixes around the chunk's edges against the same tokens of the whole: a causal model cannot tell them apart."""
    ids, base = lab.ids, lab.alone(lab.ids)
    trials = []
    for length in LENGTHS:
        if length < len(ids):
            rows = lab.feed(rows=(ids[:length],))[0]
            trials.append(
                ExperimentTrial(
                    experiment="lengths", what=f"{length} tokens", gap=lab.gap(rows, base, 0, length)
                )
            )
    return make_experiment_result(
        "lengths",
        trials,
        proves=("TAIL",),
        fails=lambda t: f"a request's length changes its earlier tokens, {at_words(t)}",
        passes="the first tokens of a request do not depend on its length",
        step="the smallest length that fails is the limit to state; look at the last partial chunk",
    )


def check_attention(lab: Harness) -> ExperimentResult:
    """Eager against sdpa, and every sdpa call against causal softmax attention in fp64."""
    from parity.live.formulas import attention_calls, attention_scale, causal_attention, formula_errors

    target, ids = lab.target, lab.ids
    now = getattr(target.model.config, "_attn_implementation", "eager")
    taken: dict[str, HarnessRows] = {}
    calls: list[Any] = []
    trials: list[ExperimentTrial] = []
    try:
        for name in ("eager", "sdpa"):
            target.model.set_attn_implementation(name)
            with attention_calls() as seen:
                taken[name] = lab.feed(rows=(ids,))[0]
            calls = seen
    except (ValueError, ImportError, AttributeError) as error:
        trials.append(
            ExperimentTrial(
                experiment="attention",
                what="eager against sdpa",
                gap=None,
                because=str(error).splitlines()[0],
            )
        )
    finally:
        target.model.set_attn_implementation(now)
    if len(taken) == 2:
        trials.append(
            ExperimentTrial(
                experiment="attention", what="eager against sdpa", gap=lab.gap(taken["eager"], taken["sdpa"])
            )
        )
    full = [i for i, kind in enumerate(target.layer_types) if kind == "full_attention"]
    for layer, (q, k, v, out) in zip(full, calls, strict=False):
        scale = attention_scale(target, q.shape[-1])
        if scale is None or q.shape[-2] != k.shape[-2]:
            continue
        right = causal_attention(q, k, v, scale)[0].transpose(0, 1).flatten(1)
        mine = out[0].transpose(0, 1).flatten(1)
        errors, tap = formula_errors(mine, right).cpu().numpy(), f"layer.{layer}.out"
        limit = lab.limit(tap, out)
        outside = np.flatnonzero(errors > limit)
        trials.append(
            ExperimentTrial(
                experiment="attention",
                what=f"layer {layer} against causal softmax in fp64",
                gap=ErrorGap(
                    within=not outside.size,
                    tap=tap,
                    layer_type="full_attention",
                    onset=int(outside[0] if outside.size else errors.argmax()),
                    rows=int(outside.size),
                    error=float(errors.max()),
                    limit=limit,
                ),
            )
        )
    return make_experiment_result(
        "attention",
        trials,
        proves=("ATTN",),
        fails=lambda t: f"attention sees other keys, or scales them otherwise, {at_words(t)}",
        passes="attention is causal softmax of the declared scale, by eager and by sdpa",
        step="look at the mask, at is_causal and at the scale that reach attention",
    )


def check_positions(lab: Harness) -> ExperimentResult:
    """A uniform shift must not matter, and the rotary table must be the declared one."""
    from parity.live.formulas import rotary_reference, rotary_tables

    ids, base = lab.ids, lab.alone(lab.ids)
    shifted = tuple(range(7, 7 + len(ids)))
    trials = [
        trial_of_refusal(
            "positions",
            "all positions 7 further",
            lambda: lab.gap(lab.feed(rows=(ids,), positions=shifted)[0], base),
        )
    ]
    reference = rotary_reference(lab.target, len(ids))
    with rotary_tables(lab.target) as seen:
        lab.feed(rows=(ids,))
        lab.feed(rows=(ids,))
    for number, (cos, sin) in enumerate(seen):
        what = f"rotary table of forward {number + 1}"
        if isinstance(reference, str) or cos.shape != reference[0].shape:
            because = reference if isinstance(reference, str) else f"a table of {list(cos.shape)}"
            trials.append(ExperimentTrial(experiment="positions", what=what, gap=None, because=because))
            continue
        gap = np.maximum(
            *(
                np.abs((x.double().cpu() - y).numpy()).max(1)
                for x, y in zip((cos, sin), reference, strict=True)
            )
        )
        # An angle is a product of float32 numbers: half a unit in its last place, at the largest position.
        limit = 4 * len(ids) * 2.0**-24 + 2 * 2.0 ** -(24 if cos.dtype.itemsize == 4 else 8)
        outside = np.flatnonzero(gap > limit)
        trials.append(
            ExperimentTrial(
                experiment="positions",
                what=what,
                gap=ErrorGap(
                    within=not outside.size,
                    tap="cos and sin",
                    layer_type="",
                    onset=int(outside[0] if outside.size else gap.argmax()),
                    rows=int(outside.size),
                    error=float(gap.max()),
                    limit=limit,
                ),
            )
        )
    return make_experiment_result(
        "positions",
        trials,
        proves=("POS",),
        fails=lambda t: f"the positions are others than declared, {at_words(t)}",
        passes="positions are the declared ones, and a uniform shift changes nothing",
        step="compare position_ids, rope_theta and the rotary width; look for offsets kept between forwards",
    )


def check_operators(lab: Harness) -> ExperimentResult:
    """The linear layers' operators, as they were called, against fp64 recurrences; then with one policy switched."""
    from parity.live.formulas import operator_formulas as against
    from parity.model.target.forward import forward

    if not lab.target.linear:
        return _nothing("operators", "no linear-attention layer")
    result = forward(lab.target, lab.ids, backend=lab.backend, taps=list(lab.taps), keep_calls=True)
    calls = [call for call in result.calls if call.layer < LAYERS]

    def limit(call: Any) -> float:
        return lab.limit(f"layer.0.{'conv' if call.operator == 'conv' else 'gdn'}.out", call.output)

    off = against(calls, limit)
    evidence: tuple[tuple[str, Value], ...] = (("calls", len(calls)), ("outside", len(off)))
    if not off:
        return ExperimentResult(
            finding=Finding(
                name="live.operators",
                outcome="pass",
                evidence=evidence,
                sentence=f"{len(calls)} calls to the convolution and the delta rule agree with fp64 recurrences",
            )
        )
    first = off[0]
    evidence += (
        ("first", f"{first.part}, layer {first.layer}"),
        ("token", first.onset),
        ("error", first.error),
        ("explained by", first.explained_by or "no policy known here"),
    )
    edge = first.onset >= SAMPLE_CHUNK and first.onset % SAMPLE_CHUNK == 0
    kind = "NUMERIC" if first.explained_by else "TAIL" if edge else "COMPILE"
    why = f", and {first.explained_by} explains it" if first.explained_by else ", and no policy explains it"
    return ExperimentResult(
        finding=Finding(
            name="live.operators",
            outcome="fail",
            fault=kind.lower(),
            evidence=evidence,
            sentence=f"{first.part} of layer {first.layer} is {first.error:.2g} from its fp64 recurrence on the same "
            f"inputs, from token {first.onset} on{why}",
            next_step="declare the policy on both sides"
            if first.explained_by
            else "try another version or backend of that kernel; keep its inputs (`parity check` records them)",
        ),
        proves=(kind,),
    )


def projections(lab: Harness) -> ExperimentResult:
    """Every projection's output against its own weight times its own input in fp64."""
    from parity.live.formulas import off_products, products
    from parity.model.target.input_layouts import InputLayout, run_layout

    with products(lab.target, LAYERS) as seen:
        run_layout(lab.target, InputLayout(rows=(lab.ids,)), backend=lab.backend, taps=["embed.out"])
    if not seen:
        return _nothing("projections", "no plain linear module in the layers")
    limit = max(lab.limit("layer.0.out", out) for _, _, _, _, out in seen)
    off = off_products(seen, limit)
    evidence: tuple[tuple[str, Value], ...] = (
        ("projections", len(seen)),
        ("outside", len(off)),
        ("limit", limit),
    )
    if not off:
        return ExperimentResult(
            finding=Finding(
                name="live.projections",
                outcome="pass",
                evidence=evidence,
                sentence=f"{len(seen)} projections give their weight times their input",
            )
        )
    first, kind = off[0]
    kinds = tuple(sorted({kind for _, kind in off if kind})) or ("QUANT", "NUMERIC")
    why = f"{first.explained_by} explains it" if first.explained_by else "no precision known here explains it"
    return ExperimentResult(
        finding=Finding(
            name="live.projections",
            outcome="fail",
            fault="-or-".join(kinds).lower(),
            evidence=(*evidence, ("first", f"layer {first.layer} {first.part}"), ("error", first.error)),
            sentence=f"{len(off)} of {len(seen)} projections differ from their weight times their input, first "
            f"{first.part} of layer {first.layer} by {first.error:.2g}: {why}",
            next_step="list the modules by dtype and scheme; dump from the precision that will be served",
        ),
        proves=kinds if len(kinds) == 1 else (),
    )


def _nothing(name: str, because: str) -> ExperimentResult:
    """An experiment that has nothing to look at."""
    return ExperimentResult(
        finding=Finding(
            name=f"live.{name}",
            outcome="skipped",
            sentence=f"not run: {because}",
            next_step="nothing to do, unless the model should have one",
        )
    )


EXPERIMENTS: dict[str, tuple[Callable[[Harness], ExperimentResult], tuple[str, ...]]] = {
    "padding": (padding, ("PAD",)),
    "batch": (check_batch, ("INVAR",)),
    "packing": (packing, ("PACK",)),
    "split": (check_split_prefill, ("STATE",)),
    "leftover": (check_state_leak, ("STATE",)),
    "crop": (crop, ("STATE",)),
    "lengths": (lengths, ("TAIL",)),
    "attention": (check_attention, ("ATTN",)),
    "positions": (check_positions, ("POS",)),
    "operators": (check_operators, ("COMPILE", "NUMERIC", "TAIL")),
    "projections": (projections, ("QUANT", "NUMERIC")),
}
"""Each experiment and the kinds it can prove."""
