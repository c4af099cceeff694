"""A comparison in words: tables, findings, suspicions. Nothing is measured here.

    tables, findings = tables_and_findings(comparison, name="compare")

Findings `NAME.structure`, `.proof`, `.identity`, `.gate` and `.controls` each answer one question; tables
`NAME.layers`, `.profile`, `.tokens`, `.worst` and `.unpaired` hold the detail. `parity.diagnosis.report` adds the
name of the fault, and makes the whole a report.
"""

from parity.comparison.records import Comparison, TapResult, TokenPlace
from parity.reports.record import (
    Chart,
    Finding,
    Outcome,
    Suspicion,
    Table,
    Value,
    Verdict,
    collect_rows,
    declare_columns,
)
from parity.reports.words import count_words, shorten_list

"""Names spelled out in a sentence; the table has the rest."""
COARSE_DTYPE_NOTE = (
    "a comparison in {} never rules out a semantic fault by itself: one smaller than rounding hides in it"
)


def tables_and_findings(
    comparison: Comparison, *, name: str = "compare"
) -> tuple[tuple[Table, ...], tuple[Finding, ...]]:
    """The comparison's tables and findings, named `name` and a suffix. Structure comes before numbers."""
    tables = [
        _layers(comparison, name),
        _profile(comparison, name),
        _heat(comparison, name),
        _worst(comparison, name),
    ]
    if comparison.unpaired:
        tables.append(_unpaired_table(comparison, name))
    findings: tuple[Finding, ...] = (
        _structure(comparison, name),
        _proof(comparison, name),
        _identity(comparison, name),
        _gate(comparison, name),
        _controls(comparison, name),
    )
    if comparison.source_problems:
        findings = (_sources(comparison, name), *findings)
    return tuple(tables), findings


def comparison_suspicions(comparison: Comparison, *, name: str = "compare") -> tuple[Suspicion, ...]:
    """What a user may suspect of two runs, and what this comparison says to it."""
    gate, rests = _gate(comparison, name), (f"{name}.gate", f"{name}.controls")
    answers: dict[Outcome, Verdict] = {"pass": "ruled out", "fail": "found"}
    numeric: Verdict = answers.get(gate.outcome, "not tested")
    blind = comparison.gate == "kernel" and numeric == "ruled out"
    parted = [item for item in comparison.unpaired if item.kind == "tokens"]
    return (
        Suspicion(
            name="the two runs were fed other tokens",
            verdict="found" if parted else "ruled out",
            because=f"{parted[0].name}: {parted[0].detail}"
            if parted
            else f"the ids of all {count_words(comparison.tokens, 'token')} agree",
            findings=(f"{name}.structure",),
        ),
        Suspicion(
            name="the states differ by more than rounding",
            verdict=numeric,
            because=gate.sentence,
            findings=rests,
        ),
        Suspicion(
            name="the two runs compute different functions",
            verdict="not tested" if blind else numeric,
            because=COARSE_DTYPE_NOTE.format(_coarse(comparison)) if blind else gate.sentence,
            findings=rests,
        ),
    )


def gate_outcome(comparison: Comparison) -> Outcome:
    """What the taps say together. One that fails outweighs one without power: it was seen in spite of it."""
    outcomes = {tap.outcome for tap in comparison.taps}
    for outcome in ("fail", "error", "pass"):
        if outcome in outcomes:
            return outcome
    return "skipped"


def _coarse(comparison: Comparison) -> str:
    """The dtypes of the two sides in a few words."""
    return " or ".join(sorted(set(comparison.dtypes)))


def times_limit(tap: TapResult) -> float:
    """How far a tap is towards its limit (1 is at it)."""
    judged = tap.judgement
    return max(
        judged.rms / judged.limit.rms if judged.limit.rms else 0.0,
        judged.worst / judged.limit.token if judged.limit.token else 0.0,
    )


def _at(place: TokenPlace) -> str:
    """A token in words."""
    return f"token {place.token} ({place.text!r}) of request {place.request}"


def _structure(c: Comparison, name: str) -> Finding:
    """Do both sides hold the same tensors of the same tokens?"""
    evidence: tuple[tuple[str, Value], ...] = (
        ("requests", c.requests),
        ("taps", len(c.taps)),
        ("tokens", c.tokens),
        ("without partner", len(c.unpaired)),
    )
    if not c.unpaired:
        return Finding(
            name=f"{name}.structure",
            outcome="pass",
            evidence=evidence,
            sentence=f"both sides hold the same {count_words(len(c.taps), 'tap')} of the same "
            f"{count_words(c.tokens, 'token')}",
        )
    first = c.unpaired[0]
    side = "both sides" if first.side == "both" else f"side {first.side}"
    return Finding(
        name=f"{name}.structure",
        outcome="fail",
        evidence=evidence,
        tables=(f"{name}.unpaired",),
        sentence=f"without an equal partner: {count_words(len(c.unpaired), 'item')}, first "
        f"{first.kind} {first.name} ({side}): {first.detail}",
        next_step="capture both sides with the same prompts, taps and dtype, or choose --taps",
    )


def _sources(c: Comparison, name: str) -> Finding:
    """What a dump's slices were taken for and are not."""
    more = len(c.source_problems) - 1
    return Finding(
        name=f"{name}.sources",
        outcome="fail",
        sentence=c.source_problems[0] + (f"; and {count_words(more, 'more problem')}" if more else ""),
        evidence=tuple((f"problem {i}", text) for i, text in enumerate(c.source_problems)),
        next_step="correct what the mapping or the dump's tool says of its slices; `parity compare` shows each",
    )


def _proof(c: Comparison, name: str) -> Finding:
    """Did each side run the backend it names?"""
    evidence: tuple[tuple[str, Value], ...] = (("a", c.backends[0]), ("b", c.backends[1]))
    if c.proof_problems:
        return Finding(
            name=f"{name}.proof",
            outcome="fail",
            fault="dispatch",
            evidence=evidence,
            sentence=f"a trace is no evidence for its backend: {c.proof_problems[0]}",
            next_step="repair the environment that `parity env` shows and capture that side again",
        )
    linear = any(tap.layer_type == "linear_attention" for tap in c.taps)
    if linear and c.backends[0] != c.backends[1] and all(tap.error_max == 0 for tap in c.taps):
        return Finding(
            name=f"{name}.proof",
            outcome="warn",
            evidence=evidence,
            sentence=f"{' and '.join(c.backends)} agree to the last bit, as no two kernels do",
            next_step="see whether one of the traces was captured with the other's backend",
        )
    return Finding(
        name=f"{name}.proof",
        outcome="pass",
        evidence=evidence,
        sentence=f"both traces prove what they name: {c.backends[0]} and {c.backends[1]}",
    )


def _identity(c: Comparison, name: str) -> Finding:
    """Are the two targets the same?"""
    if not c.identity:
        return Finding(
            name=f"{name}.identity",
            outcome="pass",
            sentence="both sides have the same configuration and the same weights",
        )
    return Finding(
        name=f"{name}.identity",
        outcome="warn",
        sentence="the two targets differ: " + "; ".join(c.identity),
        evidence=tuple((f"difference {i}", text) for i, text in enumerate(c.identity)),
        next_step="load both sides from one checkpoint, unless the difference is meant",
    )


def _gate(c: Comparison, name: str) -> Finding:
    """Is the difference within what rounding explains? By which floor, and how far from it?"""
    outcome = gate_outcome(c)
    failing = [tap for tap in c.taps if tap.outcome == "fail"]
    nearest = max([tap for tap in c.taps if tap.outcome == "pass"] or c.taps, key=times_limit)
    nearest = max(failing, key=times_limit) if failing else nearest
    judged = nearest.judgement
    evidence: tuple[tuple[str, Value], ...] = (
        ("gate", c.gate),
        ("nearest tap", nearest.tap),
        ("judged by", judged.judged_by),
        ("rms", judged.rms),
        ("rms limit", judged.limit.rms),
        ("worst token", judged.worst),
        ("worst token limit", judged.limit.token),
        ("times the floor", judged.times_floor),
        ("taps outside", len(failing)),
        ("lowest cosine", min(tap.cosine_min for tap in c.taps)),
    )
    words = {"pass": _within, "fail": _outside, "error": _powerless}.get(outcome, _word_without_control)
    sentence, step = words(c, nearest)
    return Finding(
        name=f"{name}.gate",
        outcome=outcome,
        sentence=sentence,
        evidence=evidence,
        next_step=step,
        tables=tuple(f"{name}.{table}" for table in ("layers", "profile", "tokens", "worst")),
    )


def _within(c: Comparison, nearest: TapResult) -> tuple[str, str]:
    """Sentence and next step of a gate that passes."""
    passing = sum(tap.outcome == "pass" for tap in c.taps)
    skipped = [tap.tap for tap in c.taps if tap.outcome == "skipped"]
    left_out = f"; not judged, because no broken copy changes it: {shorten_list(skipped)}" if skipped else ""
    blind = f"; {COARSE_DTYPE_NOTE.format(_coarse(c))}" if c.gate == "kernel" else ""
    every = "" if skipped else "all "
    return (
        f"{c.gate} gate: {every}{count_words(passing, 'tap')} within the limits; the nearest, {nearest.tap}, "
        f"is at {times_limit(nearest):.2g} of its limit, judged by {nearest.judgement.judged_by}"
        f"{left_out}{blind}",
        "",
    )


def _outside(c: Comparison, _: TapResult) -> tuple[str, str]:
    """Sentence and next step of a gate that fails: where it begins, by how much, by which floor."""
    failing = [tap for tap in c.taps if tap.outcome == "fail"]
    first, place = failing[0], c.first_bad
    where = first.tap + (f" ({first.layer_type})" if first.layer_type else "")
    token = f", from {_at(place)} on" if place is not None and not first.faults else ""
    why = "; ".join(first.faults) or f"{first.judgement.because}, judged by {first.judgement.judged_by}"
    return (
        f"{c.gate} gate: {len(failing)} of {count_words(len(c.taps), 'tap')} outside, first {where}{token}: {why}",
        f"look at {first.tap} first: capture its layer with the other side's input "
        "(--local-from), and in float32 if this was 16 bits",
    )


def _powerless(c: Comparison, _: TapResult) -> tuple[str, str]:
    """Sentence and next step of a gate that passes what is broken."""
    taps = [tap.tap for tap in c.taps if tap.outcome == "error"]
    return (
        f"{c.gate} gate: no power at {shorten_list(taps)}: a broken copy passed",
        "tighten the policy or the floor until the broken copies fail",
    )


def _word_without_control(c: Comparison, _: TapResult) -> tuple[str, str]:
    """Sentence and next step where no control could be made."""
    return (
        "no tap could be judged: no negative control changes this data",
        "compare more than one token and channel",
    )


def _controls(c: Comparison, name: str) -> Finding:
    """Could the gate have failed at all?"""
    # A control that passes means no power; one that cannot be made is no answer.
    results = [(tap.tap, control) for tap in c.taps for control in tap.controls]
    passed = [f"{tap}, {control.name}" for tap, control in results if control.refused is False]
    left_out = [f"{tap}, {control.name}" for tap, control in results if control.refused is None]
    refused = sum(control.refused is True for _, control in results)
    evidence: tuple[tuple[str, Value], ...] = (
        ("refused", refused),
        ("passed", len(passed)),
        ("left out", len(left_out)),
    )
    # A gate that accepts a broken copy would accept anything: an error, whatever else passed.
    if passed:
        return Finding(
            name=f"{name}.controls",
            outcome="error",
            evidence=evidence,
            tables=(f"{name}.layers",),
            sentence=f"broken copies of side b passed: no power at {shorten_list(passed)}",
            next_step="tighten the policy or the floor for these taps",
        )
    if not refused:
        return Finding(
            name=f"{name}.controls",
            outcome="skipped",
            evidence=evidence,
            sentence=f"no broken copy could be made: {results[0][1].because}",
            next_step="compare more than one token and channel",
        )
    note = (
        f"; {len(left_out)} left out because they change nothing ({shorten_list(left_out)})"
        if left_out
        else ""
    )
    return Finding(
        name=f"{name}.controls",
        outcome="pass",
        evidence=evidence,
        sentence=f"broken copies of b (tokens rolled, channels shuffled): {refused} refused{note}",
    )


def _layers(c: Comparison, name: str) -> Table:
    """One row a tap."""
    columns = declare_columns(
        "tap | layer_type layer type | cosine_mean:float cos mean | cosine_min:float cos min | "
        "cosine_p01:float cos p01 | relative_l2:float rel L2 | "
        "robust_relative_l2:float robust rel L2 | error_rms:float token rms | "
        "error_max:float worst token | max_abs:float max abs | mean_abs:float mean abs | "
        "mean_a:float mean a | mean_b:float mean b | std_a:float std a | std_b:float std b | "
        "nonfinite:int non-finite (elements) | zero_rows:int zero rows (on one side) | "
        "outliers:int massive channels | judged_by judged by | "
        "times_floor:float x floor (times the floor) | "
        "times_limit:float of limit (1 is the limit) | outcome:outcome"
    )
    rows = collect_rows(
        columns,
        c.taps,
        layer_type=lambda t: t.layer_type or None,
        mean_a=lambda t: t.mean[0],
        mean_b=lambda t: t.mean[1],
        std_a=lambda t: t.std[0],
        std_b=lambda t: t.std[1],
        nonfinite=lambda t: sum(t.nonfinite[:2]),
        zero_rows=lambda t: t.zero_rows[2],
        outliers=lambda t: len(t.outliers),
        judged_by=lambda t: t.judgement.judged_by,
        times_floor=lambda t: t.judgement.times_floor,
        times_limit=times_limit,
    )
    again = [tap.tap for tap in c.taps if tap.recomputed]
    note = (
        f" Read twice, because a sample had shown other massive channels: {shorten_list(again)}."
        if again
        else ""
    )
    return Table(
        name=f"{name}.layers",
        title="Per tap, a against b",
        columns=columns,
        rows=rows,
        caption="Relative to b. Robust: without the massive channels. Token rms, worst token: the "
        "larger of plain and robust relative L2 of each token." + note,
    )


def _profile(c: Comparison, name: str) -> Table:
    """The error over the model's depth, with its floor, one row a point."""
    # In long form, as a chart wants it: one row a tap and line.
    rows: list[tuple[Value, ...]] = []
    for tap in c.taps:
        points = (
            ("worst token", tap.error_max),
            ("rms over tokens", tap.error_rms),
            ("floor, worst token", tap.floor_token),
            ("floor, rms", tap.floor_rms),
        )
        rows += [(tap.tap, what, value, tap.layer_type or None, tap.outcome) for what, value in points]
    columns = declare_columns(
        "tap | what | error:float relative L2 | layer_type layer type | outcome:outcome"
    )
    chart = Chart(
        kind="profile",
        x="tap",
        y="error",
        series="what",
        log=True,
        hover=("layer_type", "outcome"),
        caption="Relative L2 per tap in the order in which the model computes them.",
    )
    return Table(
        name=f"{name}.profile",
        title="Error over depth",
        rows=tuple(rows),
        detail=True,
        columns=columns,
        chart=chart,
    )


def _heat(c: Comparison, name: str) -> Table:
    """The error of each tap and token position, one row a cell."""
    # A heat map has one row a cell; columns may cover several tokens.
    texts = c.heat.texts or (("",) * len(c.heat.starts),) * len(c.heat.taps)
    rows = tuple(
        (tap, start, value, text)
        for tap, values, named in zip(c.heat.taps, c.heat.values, texts, strict=True)
        for start, value, text in zip(c.heat.starts, values, named, strict=True)
    )
    step = c.heat.starts[1] - c.heat.starts[0] if len(c.heat.starts) > 1 else 1
    columns = declare_columns("tap | token:int (position) | error:float relative L2 | text its text")
    chart = Chart(
        kind="heatmap",
        x="token",
        y="tap",
        value="error",
        log=True,
        hover=("text",),
        caption=f"Worst of all requests; each column covers {count_words(step, 'token position')}.",
    )
    return Table(
        name=f"{name}.tokens",
        title="Error per tap and token",
        rows=rows,
        detail=True,
        columns=columns,
        chart=chart,
    )


def _worst(c: Comparison, name: str) -> Table:
    """The tokens nearest to or furthest beyond their limit."""
    columns = declare_columns(
        "request | token:int (position) | token_id:int id | text | tap worst at | "
        "error:float rel L2 | cosine:float | times_limit:float of limit (1 is the limit)"
    )
    return Table(
        name=f"{name}.worst",
        title="Worst tokens",
        columns=columns,
        rows=collect_rows(columns, c.worst),
    )


def _unpaired_table(c: Comparison, name: str) -> Table:
    """Everything without an equal partner."""
    columns = declare_columns("kind | side | name | detail")
    return Table(
        name=f"{name}.unpaired",
        title="Without an equal partner",
        caption="Each of these counts as a failure.",
        columns=columns,
        rows=collect_rows(columns, c.unpaired),
    )
