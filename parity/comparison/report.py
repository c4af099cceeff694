"""A comparison in words: tables, findings, suspicions. Nothing is measured here.

    tables, findings = tables_and_findings(comparison, name="compare")

Findings `NAME.structure`, `.proof`, `.identity`, `.gate` and `.controls` each answer one question; tables
`NAME.layers`, `.profile`, `.tokens`, `.worst` and `.unpaired` hold the detail. `parity.diagnosis.report` adds the
name of the fault, and makes the whole a report.
"""

from collections.abc import Sequence

from parity.comparison.records import Comparison, TapResult, TokenPlace
from parity.reports.record import Chart, Column, Finding, Outcome, Suspicion, Table, Value, Verdict

LISTED_NAMES = 4
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
            else f"the ids of all {_count_noun(comparison.tokens, 'token')} agree",
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


def _shorten(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:LISTED_NAMES]) + (
        f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    )


def _at(place: TokenPlace) -> str:
    """A token in words."""
    return f"token {place.token} ({place.text!r}) of request {place.request}"


def _count_noun(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


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
            sentence=f"both sides hold the same {_count_noun(len(c.taps), 'tap')} of the same "
            f"{_count_noun(c.tokens, 'token')}",
        )
    first = c.unpaired[0]
    side = "both sides" if first.side == "both" else f"side {first.side}"
    return Finding(
        name=f"{name}.structure",
        outcome="fail",
        evidence=evidence,
        tables=(f"{name}.unpaired",),
        sentence=f"without an equal partner: {_count_noun(len(c.unpaired), 'item')}, first "
        f"{first.kind} {first.name} ({side}): {first.detail}",
        next_step="capture both sides with the same prompts, taps and dtype, or choose --taps",
    )


def _sources(c: Comparison, name: str) -> Finding:
    """What a dump's slices were taken for and are not."""
    more = len(c.source_problems) - 1
    return Finding(
        name=f"{name}.sources",
        outcome="fail",
        sentence=c.source_problems[0] + (f"; and {_count_noun(more, 'more problem')}" if more else ""),
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
    left_out = f"; not judged, because no broken copy changes it: {_shorten(skipped)}" if skipped else ""
    blind = f"; {COARSE_DTYPE_NOTE.format(_coarse(c))}" if c.gate == "kernel" else ""
    every = "" if skipped else "all "
    return (
        f"{c.gate} gate: {every}{_count_noun(passing, 'tap')} within the limits; the nearest, {nearest.tap}, "
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
        f"{c.gate} gate: {len(failing)} of {_count_noun(len(c.taps), 'tap')} outside, first {where}{token}: {why}",
        f"look at {first.tap} first: capture its layer with the other side's input "
        "(--local-from), and in float32 if this was 16 bits",
    )


def _powerless(c: Comparison, _: TapResult) -> tuple[str, str]:
    """Sentence and next step of a gate that passes what is broken."""
    taps = [tap.tap for tap in c.taps if tap.outcome == "error"]
    return (
        f"{c.gate} gate: no power at {_shorten(taps)}: a broken copy passed",
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
            sentence=f"broken copies of side b passed: no power at {_shorten(passed)}",
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
        f"; {len(left_out)} left out because they change nothing ({_shorten(left_out)})" if left_out else ""
    )
    return Finding(
        name=f"{name}.controls",
        outcome="pass",
        evidence=evidence,
        sentence=f"broken copies of b (tokens rolled, channels shuffled): {refused} refused{note}",
    )


def _number_columns(*names: tuple[str, str]) -> tuple[Column, ...]:
    """Columns of floats."""
    return tuple(Column(key=key, title=title, kind="float") for key, title in names)


def _layers(c: Comparison, name: str) -> Table:
    """One row a tap."""
    columns = (
        Column(key="tap", title="tap"),
        Column(key="layer_type", title="layer type"),
        *_number_columns(
            ("cosine_mean", "cos mean"),
            ("cosine_min", "cos min"),
            ("cosine_p01", "cos p01"),
            ("relative_l2", "rel L2"),
            ("robust_relative_l2", "robust rel L2"),
            ("error_rms", "token rms"),
            ("error_max", "worst token"),
            ("max_abs", "max abs"),
            ("mean_abs", "mean abs"),
            ("mean_a", "mean a"),
            ("mean_b", "mean b"),
            ("std_a", "std a"),
            ("std_b", "std b"),
        ),
        Column(key="nonfinite", title="non-finite", unit="elements", kind="int"),
        Column(key="zero_rows", title="zero rows", unit="on one side", kind="int"),
        Column(key="outliers", title="massive channels", kind="int"),
        Column(key="judged_by", title="judged by"),
        Column(key="times_floor", title="x floor", unit="times the floor", kind="float"),
        Column(key="times_limit", title="of limit", unit="1 is the limit", kind="float"),
        Column(key="outcome", title="outcome", kind="outcome"),
    )
    rows = tuple(
        (
            t.tap,
            t.layer_type or None,
            t.cosine_mean,
            t.cosine_min,
            t.cosine_p01,
            t.relative_l2,
            t.robust_relative_l2,
            t.error_rms,
            t.error_max,
            t.max_abs,
            t.mean_abs,
            *t.mean,
            *t.std,
            sum(t.nonfinite[:2]),
            t.zero_rows[2],
            len(t.outliers),
            t.judgement.judged_by,
            t.judgement.times_floor,
            times_limit(t),
            t.outcome,
        )
        for t in c.taps
    )
    again = [tap.tap for tap in c.taps if tap.recomputed]
    note = (
        f" Read twice, because a sample had shown other massive channels: {_shorten(again)}." if again else ""
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
    columns = (
        Column(key="tap", title="tap"),
        Column(key="what", title="what"),
        *_number_columns(("error", "relative L2")),
        Column(key="layer_type", title="layer type"),
        Column(key="outcome", title="outcome", kind="outcome"),
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
    columns = (
        Column(key="tap", title="tap"),
        Column(key="token", title="token", unit="position", kind="int"),
        *_number_columns(("error", "relative L2")),
        Column(key="text", title="its text"),
    )
    chart = Chart(
        kind="heatmap",
        x="token",
        y="tap",
        value="error",
        log=True,
        hover=("text",),
        caption=f"Worst of all requests; each column covers {_count_noun(step, 'token position')}.",
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
    columns = (
        Column(key="request", title="request"),
        Column(key="token", title="token", unit="position", kind="int"),
        Column(key="token_id", title="id", kind="int"),
        Column(key="text", title="text"),
        Column(key="tap", title="worst at"),
        *_number_columns(("error", "rel L2"), ("cosine", "cosine")),
        Column(key="times_limit", title="of limit", unit="1 is the limit", kind="float"),
    )
    return Table(
        name=f"{name}.worst",
        title="Worst tokens",
        columns=columns,
        rows=tuple(
            (p.request, p.token, p.token_id, p.text, p.tap, p.error, p.cosine, p.times_limit) for p in c.worst
        ),
    )


def _unpaired_table(c: Comparison, name: str) -> Table:
    """Everything without an equal partner."""
    return Table(
        name=f"{name}.unpaired",
        title="Without an equal partner",
        caption="Each of these counts as a failure.",
        columns=tuple(Column(key=key, title=key) for key in ("kind", "side", "name", "detail")),
        rows=tuple((item.kind, item.side, item.name, item.detail) for item in c.unpaired),
    )
