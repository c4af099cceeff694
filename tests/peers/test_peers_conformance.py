"""speculators 0.9.0 and SpecForge 0.2.0, unchanged: what the probes alone find out about them.

Expected values were measured by hand and by other means (docs/evidence.md): gamma, denominators, slot 0,
label source, the lower bound of sliding windows, labels that cross documents.
"""

from typing import Any

import pytest

from parity.model.recipe.config import preset
from parity.probes.ask import WiringAnswers, ask_trainer

SPECULATORS: dict[str, Any] = {
    "recipe.teacher.norm": "pre",
    "recipe.loss.reduction": "mask_mean",
    "recipe.block.partial": False,
}
SPECFORGE: dict[str, Any] = {"recipe.labels": "data", "recipe.teacher": None}
SLIDING: dict[str, Any] = {
    "recipe.attention": {"layers": ["sliding", "full"], "window": 6},
    "recipe.block.within": "sliding_causal",
}
ONLY = ("noise", "context", "loss", "labels", "inputs")


def asked(peer: Any, trainer: str, changes: dict[str, Any]) -> WiringAnswers:
    peer(trainer)  # skips where it is not installed; CI fails instead
    return ask_trainer(preset("unit").with_values(changes), trainer, only=ONLY)


def facts(made: WiringAnswers) -> dict[str, Any]:
    return {name: value for part in made.conformance.statements for name, value in part.facts}


def faults(made: WiringAnswers) -> set[str]:
    found = [finding for _, answer in made.answers for finding in answer.findings]
    assert not [f.sentence for f in found if f.outcome == "error"]
    return {str(finding.fault) for finding in found if finding.outcome == "fail"}


def test_speculators(peer: Any) -> None:
    """P9: gamma 4, slot 0 out, divided by the mask; labels are the teacher's argmax; P10: they cross documents."""
    made = asked(peer, "speculators", SPECULATORS)
    said = facts(made)
    assert said["loss.gamma"] == pytest.approx(4, rel=1e-5) and said["loss.weights"] == "exp"
    assert said["loss.reduction"] == "mask_mean" and said["loss.slot0"] == 0
    assert said["loss.labels"] == "teacher" and said["noise.std"] == 0
    assert faults(made) == {"label-documents"}
    assert made.conformance.trainer == "speculators 0.9.0"
    assert "gamma 4.00" in made.conformance.paragraph


def test_speculators_as_it_would_have_to_declare_itself(peer: Any) -> None:
    changes = SPECULATORS | SLIDING | {"recipe.block.documents": "prompt_masked"}
    changes |= {"recipe.attention": SLIDING["recipe.attention"] | {"window_from": "anchor"}}
    assert faults(asked(peer, "speculators", changes)) == set()


def test_the_lower_bound_of_its_windows(peer: Any) -> None:
    """P14: it is the anchor's for every slot, where z-lab, SpecForge and vLLM count from each query."""
    changes = SPECULATORS | SLIDING | {"recipe.block.documents": "prompt_masked"}
    made = asked(peer, "speculators", changes)
    assert faults(made) == {"window-from"}


def test_specforge(peer: Any) -> None:
    """P9: gamma 4, weighted mean; P1, P2: exact zeros; labels are the data's tokens."""
    made = asked(peer, "specforge", SPECFORGE)
    said = facts(made)
    assert said["loss.gamma"] == pytest.approx(4, rel=1e-5) and said["loss.reduction"] == "weighted_mean"
    assert said["loss.labels"] == "data" and said["loss.slot0"] == 0 and said["noise.std"] == 0
    assert faults(made) == set()


def test_specforge_counts_windows_from_the_query(peer: Any) -> None:
    assert faults(asked(peer, "specforge", SPECFORGE | SLIDING)) == set()


def test_specforge_without_gamma_is_uniform(peer: Any) -> None:
    changes = {"recipe.loss.weights": {"kind": "uniform", "gamma": None}}
    made = asked(peer, "specforge", SPECFORGE | changes)
    assert facts(made)["loss.weights"] == "uniform" and faults(made) == set()


def test_specforge_dpace_divides_by_the_samples(peer: Any) -> None:
    """P9: its D-PACE sums to more than 1: numerator over the batch, three rows here."""
    weights = {"kind": "dpace", "gamma": None, "alpha": 0.5}
    changes = {"recipe.loss.weights": weights, "recipe.loss.reduction": "batch_mean"}
    made = asked(peer, "specforge", SPECFORGE | changes)
    said = facts(made)
    assert said["loss.weights"] == "dpace" and said["loss.alpha"] == pytest.approx(0.5, abs=1e-3)
    assert said["loss.reduction"] == "batch_mean" and faults(made) == set()
