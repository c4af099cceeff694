"""Does the model compute in float32 what a true fp64 pass computes?

Bug it finds: a fallback whose semantics are wrong, which two backends may share. Test: relative L2 of
every layer against a golden pass whose operators are independent recurrences, judged by the rounding
floor of float32. Cost: one fp64 forward. Faults: `semantics`.
"""

from parity.comparison.error import tensor_errors
from parity.comparison.tolerance import FLOOR_MARGIN, default_floor, rms
from parity.probes.base import Evidence, ProbeAnswer, evidence_of, skip_answer
from parity.reports.record import Finding


class GoldenProbe:
    """Compares torch's float32 states with fp64."""

    name = "golden"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """One finding: the worst tap, in multiples of the rounding floor; with a rolled copy as control."""
        why = evidence.why_not("torch.fp32", "golden")
        if why:
            return skip_answer(
                "golden", why, "capture with --backend golden, or on a machine with more memory"
            )
        # A golden pass that is not fp64 has no power to judge.
        gold, run = evidence.traces["golden"], evidence.traces["torch.fp32"]
        if not gold.manifest.backend.valid:
            return ProbeAnswer(
                findings=(
                    Finding(
                        name="golden",
                        outcome="error",
                        sentence="the golden pass is not fp64: " + gold.manifest.backend.problems[0],
                        next_step="report it with `parity env`",
                    ),
                )
            )
        # Each tap in multiples of its limit; the same tap rolled by one token has to be outside, or the limit is idle.
        times, controls = {}, []
        for tap in run.taps:
            limit = FLOOR_MARGIN["semantic"].rms * default_floor("float32", run.depth(tap)).rms
            pairs = [(run.tensor(r.id, tap), gold.tensor(r.id, tap)) for r in run.requests]
            errors = [tensor_errors(a, b, strict=True) for a, b in pairs]
            times[tap] = max(rms(error) for error in errors) / limit
            controls.append(
                max(rms(tensor_errors(a, b.roll(1, 0), strict=True)) for a, b in pairs) / limit > 1
            )
        return ProbeAnswer(findings=(self._finding(times, controls),))

    def _finding(self, times: dict[str, float], controls: list[bool]) -> Finding:
        """One finding. times: tap -> multiples of its limit. controls: whether each rolled tap was refused."""
        worst = max(times, key=lambda tap: times[tap])
        shown = evidence_of(
            taps=len(times), nearest_tap=worst, of_its_limit=times[worst], controls_refused=sum(controls)
        )
        # First whether the gate could have refused anything, then whether it did.
        if not all(controls):
            return Finding(
                name="golden",
                outcome="error",
                evidence=shown,
                next_step="capture more than one token",
                sentence=f"no power: {controls.count(False)} taps rolled by one token passed the gate",
            )
        if not times[worst] <= 1:
            first = next(tap for tap, value in times.items() if not value <= 1)
            return Finding(
                name="golden",
                outcome="fail",
                fault="semantics",
                evidence=shown,
                sentence=f"torch in float32 leaves the fp64 pass at {first}, by {times[first]:.3g} times the limit",
                next_step="compare that layer's operators with the fp64 recurrence: finding `operators`",
            )
        return Finding(
            name="golden",
            outcome="pass",
            evidence=shown,
            sentence=f"torch in float32 agrees with a true fp64 pass at all {len(times)} taps; the nearest, {worst}, "
            f"is at {times[worst]:.2g} of its limit",
        )
