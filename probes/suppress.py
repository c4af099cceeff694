"""Findings that another finding makes worthless: what a probe reads where its own ground is already known to be wrong.

    answers = suppress_dependent(subject, answers)

A probe answers one question and supposes the rest to be as declared. Where another probe found that it is not, some
of what it reports is a consequence and no second fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from parity.probes.base import ProbeAnswer
from parity.reports.record import Finding

if TYPE_CHECKING:
    from parity.probes.subject import ExaminedAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class SuppressionRule:
    """Findings that mean nothing where another is there, since its fault alone brings them about."""

    cause: str
    """Fault of one probe."""
    faults: tuple[str, ...]
    """Faults of other probes that are then not judged."""
    why: str
    holds: Callable[["ExaminedAdapter"], bool] = lambda subject: True
    """Whether it is so for this trainer, where the cause alone does not decide."""


def _states_are_detached(subject: "ExaminedAdapter") -> bool:
    """Whether nothing of the states reaches the drafted hidden states by gradient."""
    hidden = subject.step_output.hidden
    (moved,) = torch.autograd.grad(hidden.sum(), subject.shown_states, retain_graph=True, allow_unused=True)
    return moved is None or not bool(moved.any())


CLOUDED = (
    SuppressionRule(
        cause="noise-on-teacher",
        faults=("teacher-head", "label-unrecognised"),
        why="labels and teacher logits are made from states with noise, and differ from the target's own by that alone",
    ),
    SuppressionRule(
        cause="trained-without-gradient",
        faults=("window-undeclared",),
        why="no gradient reaches the conditioning states, so none says what a layer sees of them",
        holds=_states_are_detached,
    ),
    SuppressionRule(
        cause="noise-behind-fc",
        faults=("drafter-not-recognised",),
        why="the drafter's states hold noise, and are no declared drafter's by that alone",
    ),
    SuppressionRule(
        cause="loss-head",
        faults=("label-unknown", "label-unrecognised", "teacher-head"),
        why="labels and the teacher are read through the target's head, and the draft's logits are made by another",
    ),
    *(
        SuppressionRule(
            cause=cause,
            faults=("label-unrecognised",),
            why="labels are read from the gradient of the declared loss, and this is another loss",
        )
        for cause in ("loss-unrecognised", "loss-temperature")
    ),
)
"""A row has to be seen, in the matrix of planted faults or in a user's trainer: the cause alone, and the faults
reported. A name that says more (another layer, another offset) is no row's: it cannot come from the cause."""


def suppress_dependent(
    subject: "ExaminedAdapter", answers: Sequence[tuple[str, ProbeAnswer]]
) -> list[tuple[str, ProbeAnswer]]:
    """Return the answers, with every finding that a row of `CLOUDED` explains skipped, with the reason.

    Args:
        subject: the trainer that the findings are about.
        answers: every probe's, by its name.
    """
    found = {f.fault for _, answer in answers for f in answer.findings if f.outcome == "fail"}
    rows = {
        fault: row
        for row in CLOUDED
        if row.cause in found and found & set(row.faults) and row.holds(subject)
        for fault in row.faults
    }

    def judge(finding: Finding) -> Finding:
        row = rows.get(finding.fault or "")
        if row is None or finding.outcome != "fail":
            return finding
        return replace(
            finding,
            outcome="skipped",
            fault=None,
            sentence=f"not judged, since {row.cause} was found: {row.why}. What was seen: {finding.sentence}",
            next_step=f"put {row.cause} right, and check again",
        )

    return [(name, replace(a, findings=tuple(map(judge, a.findings)))) for name, a in answers]
