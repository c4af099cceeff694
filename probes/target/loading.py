"""Does it matter how the target is loaded?

Bugs it finds: text weights that one loader leaves random (a class whose parameter names do not match the checkpoint's),
other states through a wrapper, A_log and dt_bias rounded by a plain bfloat16 load while serving engines keep them in
float32. Test: bit equality of every state in float32; the rounding is measured. Cost: three or four forwards.
Faults: `loader`.
"""

from parity.probes.base import Evidence, ProbeAnswer, compare_pair, evidence_of
from parity.reports.record import Finding

LOADER_CAPTURES = {
    "loading.AutoModel": "AutoModel",
    "loading.wrapper": "a vision-language wrapper of the same text weights",
    "loading.wrapped-text": "the text model read out of that wrapper",
}


class LoadingProbe:
    """Compares each further way of loading with the declared one, and measures what plain loading rounds."""

    name = "loading"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """A finding for each way of loading, one for the weights, one for the rounding."""
        findings = [
            self._weights(evidence),
            *(self._loader(evidence, name) for name in LOADER_CAPTURES),
            *self._rounded_findings(evidence),
        ]
        return ProbeAnswer(findings=tuple(findings))

    def _weights(self, evidence: Evidence) -> Finding:
        unchecked = str(evidence.target["unchecked"])
        if not evidence.target["parameters"]:
            return Finding(
                name="loading.weights", outcome="skipped", sentence=unchecked, next_step="see the crash above"
            )
        if unchecked:
            return Finding(
                name="loading.weights",
                outcome="warn",
                next_step="none needed where this is expected",
                sentence=f"loaded without missing parameters; not all were compared with the file: {unchecked}",
            )
        return Finding(
            name="loading.weights",
            outcome="pass",
            evidence=evidence_of(parameters=evidence.target["parameters"]),
            sentence="no parameter was missing, and a sample of each equals the checkpoint's",
        )

    def _loader(self, evidence: Evidence, name: str) -> Finding:
        """One further way of loading, compared with the declared one at all taps that both have."""
        why = evidence.why_not(name, "torch.fp32")
        if why:
            return Finding(
                name=name,
                outcome="skipped",
                sentence=f"not compared: {evidence.absent.get(name, why)}",
                next_step="nothing, unless your trainer loads the target this way",
            )
        taps = [tap for tap in evidence.traces[name].taps if tap in evidence.traces["torch.fp32"].taps]
        comparison = compare_pair(evidence, name, name, "torch.fp32", taps=taps).comparison
        differing = [tap.tap for tap in comparison.taps if tap.error_max > 0]
        loader = evidence.traces["torch.fp32"].manifest.loader
        # Equal bits everywhere; equal where finite, which is no pass; or other states.
        if not differing and comparison.outcome == "pass":
            return Finding(
                name=name,
                outcome="pass",
                evidence=evidence_of(taps=len(taps), tokens=comparison.tokens),
                sentence=f"{LOADER_CAPTURES[name]} gives the same states as {loader}, bit for bit, at all "
                f"{len(taps)} taps",
            )
        if not differing and any(any(tap.nonfinite) for tap in comparison.taps):
            return Finding(
                name=name,
                outcome="skipped",
                sentence="equal where finite; the states are not finite everywhere",
                next_step="see the finding `finite` first",
            )
        first = differing[0] if differing else "the structure"
        return Finding(
            name=name,
            outcome="fail" if comparison.outcome != "pass" else "warn",
            fault="loader",
            sentence=f"{LOADER_CAPTURES[name]} gives other states than {loader}, first at {first}",
            evidence=evidence_of(
                taps_that_differ=len(differing),
                largest_relative_error=max(tap.error_max for tap in comparison.taps),
            ),
            next_step=f"load the target with {loader} everywhere, or find out which parameters differ",
        )

    def _rounded_findings(self, evidence: Evidence) -> list[Finding]:
        kept = evidence.target["kept_float32"]
        why = evidence.why_not("loading.rounded", "torch.fp32")
        if not kept or why:
            return []
        comparison = compare_pair(evidence, "loading.rounded", "loading.rounded", "torch.fp32").comparison
        last = comparison.taps[-1]
        return [
            Finding(
                name="loading.rounded",
                outcome="pass",
                evidence=evidence_of(
                    parameters=len(kept),
                    error_at_the_end=last.relative_l2,
                    lowest_cosine=min(t.cosine_min for t in comparison.taps),
                ),
                sentence=f"{len(kept)} parameters are stored in float32 (such as {kept[0]}) and were kept so, as "
                f"engines do; a plain from_pretrained(dtype=bfloat16) rounds them, which moves {last.tap} by "
                f"{last.relative_l2:.1e}",
            )
        ]
