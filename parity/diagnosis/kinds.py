"""What a failing comparison is: sixteen kinds of fault, asked in one order, each by its own test.

    diagnosis = diagnose(compare_traces(a, b), a, b)
    diagnosis.name, diagnosis.sentence, diagnosis.repairs      # "STATE", "exact before token 71, ...", ()

The order is that of facts about public bugs: what makes a comparison void or its rows misplaced comes
first, because every later signature can be imitated by it. Not recognised is an answer too, with the profile.
"""

from collections.abc import Callable
from dataclasses import dataclass

from parity.comparison.records import Comparison
from parity.diagnosis.attention import diagnose_attention, diagnose_positions
from parity.diagnosis.capture import alias, dispatch, layer_ids, norm
from parity.diagnosis.numeric import compile_, invar, numeric, quant
from parity.diagnosis.onset import diagnose_packing, onsets, pad, state
from parity.diagnosis.profile import FailingComparison, half_of_error
from parity.diagnosis.records import MEANING, Diagnosis, KindResult, KindTrial, KindVerdict
from parity.diagnosis.rows import rows
from parity.diagnosis.tail import tail
from parity.diagnosis.weights import diagnose_load
from parity.errors import ParityError
from parity.reports.record import Value
from parity.tracing.trace import Trace


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind of fault and its test."""

    name: str
    test: Callable[[FailingComparison], KindVerdict]


FAULT_KINDS: tuple[FaultKind, ...] = (
    FaultKind("DISPATCH", dispatch),
    FaultKind("ROWS", rows),
    FaultKind("LOAD", diagnose_load),
    FaultKind("LAYERIDX", layer_ids),
    FaultKind("NORM", norm),
    FaultKind("ALIAS", alias),
    FaultKind("PAD", pad),
    FaultKind("PACK", diagnose_packing),
    FaultKind("POS", diagnose_positions),
    FaultKind("STATE", state),
    FaultKind("TAIL", tail),
    FaultKind("ATTN", diagnose_attention),
    FaultKind("COMPILE", compile_),
    FaultKind("QUANT", quant),
    FaultKind("NUMERIC", numeric),
    FaultKind("INVAR", invar),
)
"""In the order in which they are asked; the first to give an answer names the fault."""


def diagnose(comparison: Comparison, a: Trace, b: Trace) -> Diagnosis | None:
    """Name the fault of a failing comparison of `a` (candidate) and `b`. None where nothing fails.

    A comparison that passes is diagnosed only for two backends that agree to the last bit, which is none.
    Reads bounded samples of the traces. Raises ParityError where a trace is damaged.
    """
    case = FailingComparison.of(comparison, a, b)
    if comparison.outcome != "fail" and isinstance(dispatch(case), str):
        return None
    # Each kind in its order, until one is named: later ones rely on earlier ones being excluded.
    asked: list[KindTrial] = []
    named: KindResult | None = None
    for kind in FAULT_KINDS:
        if named is not None:
            known = kind.name in named.kinds
            asked.append(KindTrial(kind=kind.name, answer="possible" if known else "not asked", because=""))
            continue
        verdict = kind.test(case)
        if isinstance(verdict, str):
            asked.append(KindTrial(kind=kind.name, answer="no", because=verdict))
            continue
        named = verdict
        asked.append(
            KindTrial(
                kind=kind.name,
                answer="named" if len(named.kinds) == 1 else "possible",
                because=named.sentence,
            )
        )
    if named is None:
        return _not_recognised(case, tuple(asked))
    return Diagnosis(
        kinds=named.kinds,
        sentence=named.sentence,
        next_step=named.next_step,
        evidence=(*named.evidence, *_extent(case)),
        asked=tuple(asked),
        repairs=named.repairs,
        live=named.live,
    )


def _extent(case: FailingComparison) -> tuple[tuple[str, Value], ...]:
    """Which layers and channels have their part, in numbers."""
    first = case.first
    if first is None:
        return ()
    layers = [s for s in case.layers if s in case.failing]
    return (
        ("layer outputs that fail", len(layers)),
        ("of", len(case.layers)),
        ("channels with half of the error at the first tap", half_of_error(first.result)),
        ("of channels", first.result.width),
    )


def _not_recognised(case: FailingComparison, asked: tuple[KindTrial, ...]) -> Diagnosis:
    """The profile, where no kind is recognised."""
    found = onsets(case)
    first = case.first
    # No tensor differs: it is the structure that fails.
    if first is None:
        unpaired = case.comparison.unpaired
        said = (
            f"{unpaired[0].kind} {unpaired[0].name}: {unpaired[0].detail}"
            if unpaired
            else "no tap fails by its numbers"
        )
        return Diagnosis(
            kinds=(),
            sentence=f"no tensor that both sides hold differs; what fails is the structure ({said})",
            next_step="capture both sides with the same prompts, taps and dtype",
            evidence=(("without partner", len(unpaired)),),
            asked=asked,
        )
    # Else what is known of the first difference.
    values: tuple[tuple[str, Value], ...] = (
        found.evidence()
        if not isinstance(found, str)
        else (
            ("first tap", first.tap),
            ("rms", first.result.error_rms),
            ("worst token", first.result.error_max),
        )
    )
    return Diagnosis(
        kinds=(),
        sentence=f"not recognised: {first.tap} ({first.result.layer_type or first.kind}) is the first to differ, by "
        f"{first.result.error_rms:.2g} rms, {first.share:.0%} of its tokens from token {first.onset} on",
        next_step="capture that layer with the other side's input (--local-from) and with conv.out and gdn.out, and "
        "compare again",
        evidence=(*values, *_extent(case)),
        asked=asked,
    )


def diagnose_or_why(comparison: Comparison, a: Trace, b: Trace) -> Diagnosis | None:
    """`diagnose`, where a trace that cannot be read again costs the name and not the comparison."""
    try:
        return diagnose(comparison, a, b)
    except ParityError as error:
        return Diagnosis(
            kinds=(),
            sentence=f"not diagnosed: {error.found}",
            next_step=error.do,
            evidence=(),
            asked=(),
        )


assert [kind.name for kind in FAULT_KINDS if kind.name not in MEANING] == []
