"""What CI services are shown of a gate, compared with texts that were read and agreed to.

UPDATE_GOLDEN=1 python -m pytest tests/reports/test_golden.py    # then read the difference
"""

import os
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from parity.gating.gate import gate
from parity.policy import Policy
from parity.reports import to_annotations, to_markdown
from parity.reports.record import Column, Finding, Report, Suspicion, Table

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def merged() -> Report:
    """Reports of a branch in which gamma was changed, a kernel got worse, and a probe no longer runs."""

    def report(gamma: float, rms: float, *more: Finding) -> Report:
        columns = tuple(
            Column(key=key, title=key, kind="text" if key == "tap" else "float")
            for key in ("tap", "cosine_mean", "cosine_min", "error_rms", "error_max", "times_floor")
        )
        rows = ((f"layer.{n}.out", 0.99999, 0.9997, rms, 3 * rms, 1.5) for n in (3, 7))
        return Report(
            kind="check",
            title="tiny: torch against fla-interpreted",
            created="2027-01-14T12:00:00+00:00",
            command="parity check --out parity-report",
            subject=(("target", "tiny"), ("tokens", 160)),
            findings=(
                Finding(
                    name="loss",
                    outcome="pass",
                    sentence=f"hard CE on teacher argmax, weights exp with gamma {gamma:.2f}",
                    evidence=(("gamma", gamma), ("labels", "teacher argmax")),
                ),
                *more,
            ),
            suspicions=(Suspicion(name="the kernels differ", verdict="ruled out", because="fp32 agrees"),),
            tables=(Table(name="kernels.bf16.layers", title="Per tap", columns=columns, rows=tuple(rows)),),
            environment=(("torch", "2.13.0"), ("triton", "3.9.0" if gamma == 4 else "3.8.0")),
        )

    then = report(4.0, 1e-3, Finding(name="dispatch", outcome="pass", sentence="36 of 36 calls reached fla"))
    loading = Finding(
        name="loading.wrapper",
        outcome="fail",
        sentence="12 of 148 parameters stay random: 100 % of `lm_head` | <b>",
        evidence=(("parameters", 148), ("stderr", "line 1\nline 2: ::error::")),
        fault="random-weights",
        next_step="load with AutoModelForCausalLM",
    )
    golden = Finding(name="golden", outcome="skipped", sentence="no time", next_step="run with --golden")
    now = report(5.0, 4e-3, loading, golden)
    policy = Policy.model_validate(
        {
            "taps": {"layer.*.out": {"min_cosine": 0.9999}, "logits": {"mean_cosine": 0.999}},
            "gate": {
                "skips": ["golden"],
                "expected": [
                    {"finding": "loading.*", "because": "issue 7: fixed upstream", "until": "2027-01-31"},
                    {"finding": "loss", "because": "issue 8", "until": "2027-01-31"},
                ],
            },
        }
    )
    return gate(
        now, policy=policy, baseline=then, today=date(2027, 1, 15), command="parity gate parity-report"
    )


PAINTERS = {"gate.md": to_markdown.paint, "gate.annotations.txt": to_annotations.paint}


@pytest.mark.parametrize("name", PAINTERS)
def test_golden_text(name: str) -> None:
    painted = PAINTERS[name](replace(merged(), created="2027-01-15T00:00:00+00:00"))
    if "UPDATE_GOLDEN" in os.environ:
        (GOLDEN / name).write_text(painted, encoding="utf-8")
    assert painted == (GOLDEN / name).read_text(encoding="utf-8")
