"""POS and ATTN: the linear layers are exact, and the first full-attention layer is not."""

import numpy as np

from parity.diagnosis.onset import FALLS, OnsetEvidence, onsets
from parity.diagnosis.profile import FailingComparison
from parity.diagnosis.records import KindResult, KindVerdict


def _attention(case: FailingComparison) -> OnsetEvidence | str:
    """The shared look where the difference begins at a full-attention layer of a hybrid or dense model."""
    found = onsets(case)
    if isinstance(found, str):
        return found
    if not found.series.full:
        return f"the difference begins at {found.series.tap}, not at a full-attention layer"
    return found


def diagnose_positions(case: FailingComparison) -> KindVerdict:
    """Other positions? Linear layers exact, the first full-attention layer wrong, its first token never."""
    found = _attention(case)
    if isinstance(found, str):
        return found
    if not np.isfinite(found.series.result.error_max):
        return "not finite, which positions do not make"
    if 0 in found.tokens:
        return "the first token is wrong, which sees only itself whatever its position"
    if _apart_rows(found):
        return "single rows are wrong between exact ones, and every later position is right"
    return KindResult(
        kinds=("POS", "ATTN"),
        sentence=f"linear layers are exact and {found.series.tap} (full attention) is wrong from token "
        f"{min(found.tokens)} on ({found.head:.2g}): the positions, or the mask or scale of attention",
        next_step="compare position_ids and the cosine table of both sides first, then the mask; a uniform shift "
        "is harmless",
        evidence=found.evidence(),
        live="attention: eager against sdpa, and positions shifted and restarted",
    )


def diagnose_attention(case: FailingComparison) -> KindVerdict:
    """Another mask? Rows that are not finite, or a first token that sees more than itself."""
    found = _attention(case)
    if isinstance(found, str):
        return found
    series = found.series
    # A row that may see no key is not finite.
    bad = sum(series.result.nonfinite[:2])
    if bad:
        rows = int(sum(np.isinf(row).sum() for row in series.errors))
        return KindResult(
            kinds=("ATTN",),
            sentence=f"{rows} rows of {series.tap} are not finite on one side, the layers before it are exact: queries "
            "that may see no key",
            next_step="look at the mask's rows of these tokens; where they are pads they may be ignored",
            evidence=(("rows", rows), ("first", min(found.tokens)), ("tap", series.tap)),
        )
    if _apart_rows(found):
        return KindResult(
            kinds=("ATTN",),
            sentence=f"single rows of {series.tap} are wrong (the first {min(found.tokens)}) between rows that are "
            "exact: queries that see other keys than their neighbours",
            next_step="look at the mask's rows of these tokens",
            evidence=found.evidence(),
        )
    # Not causal: the first token sees more than itself, the last one sees all anyway.
    if 0 not in found.tokens:
        return "the first token is exact"
    ends = [series.errors[r][-1] <= series.limit for r in found.wrong]
    if all(ends) and found.falls >= FALLS:
        return KindResult(
            kinds=("ATTN",),
            sentence=f"{series.tap} is wrong from the first token on ({found.head:.2g}) and exact at the last: tokens "
            "see later ones, the mask is not causal",
            next_step="look at is_causal and at the mask that reaches attention on that side",
            evidence=(
                *found.evidence(),
                ("error of the last token", float(series.errors[found.wrong[0]][-1])),
            ),
        )
    return "every token is wrong, the last too"


def _apart_rows(found: OnsetEvidence) -> bool:
    """Whether few rows are wrong and later ones are exact again."""
    series = found.series
    return all(
        series.wrong[r].sum() <= 0.2 * found.length(r) and not series.wrong[r][-found.length(r) // 4 :].any()
        for r in found.wrong
    ) and bool(found.wrong)
