"""Does serving compute what training computed?

Training states come from one prefill; serving computes the same tokens one at a time with a cache, or
in blocks while verifying drafts. Bugs it finds: caches that lose or keep state (a hybrid's recurrent state,
which cropping a cache does not take back in transformers 5.24). Test: semantic gate in float32 between the ways
of computing, on one backend. Cost: one decode of the request. Faults: `serving-mode`, and kinds of difference.
"""

from parity.probes.base import Evidence, ProbeAnswer, compare_pair
from parity.reports.record import Finding, Table


class ServingProbe:
    """Compares decode and block verification with prefill."""

    name = "serving"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """A finding for each way of computing."""
        findings: list[Finding] = []
        tables: list[Table] = []
        for mode, words in (
            ("decode", "token by token with a cache"),
            ("blocks", "in blocks with a cache, as verification does"),
        ):
            name, trace = f"serving.{mode}", f"torch.fp32.{mode}"
            why = evidence.why_not(trace, "torch.fp32")
            if why:
                findings.append(
                    Finding(
                        name=name,
                        outcome="skipped",
                        sentence=f"not compared: {why}",
                        next_step="capture with --as decode and compare",
                    )
                )
                continue
            pair = compare_pair(evidence, name, trace, "torch.fp32", floor=evidence.floor("fp32"))
            findings += [
                self._finding(name, words, pair.findings),
                *(f for f in pair.findings if f.name.endswith((".controls", ".diagnosis"))),
            ]
            kept = (".layers", ".worst", ".kinds", ".repaired")
            tables += [table for table in pair.tables if table.name.endswith(kept)]
        return ProbeAnswer(findings=tuple(findings), tables=tuple(tables))

    def _finding(self, name: str, words: str, findings: tuple[Finding, ...]) -> Finding:
        told = [f for f in findings if not f.name.endswith(".diagnosis")]  # which is a finding of its own
        bad = next((f for f in told if f.outcome in ("fail", "error")), None)
        gate = next(f for f in findings if f.name.endswith(".gate"))
        if bad is not None:
            return Finding(
                name=name,
                outcome=bad.outcome,
                fault="serving-mode",
                evidence=bad.evidence,
                tables=(f"{name}.layers",),
                sentence=f"computed {words}, the states leave those of a prefill: {bad.sentence}",
                next_step="a drafter trained on prefill states is served others: find the first layer in the table",
            )
        return Finding(
            name=name,
            outcome=gate.outcome,
            evidence=gate.evidence,
            tables=(f"{name}.layers",),
            next_step=gate.next_step,
            sentence=f"computed {words}, every state agrees with prefill: {gate.sentence}",
        )
