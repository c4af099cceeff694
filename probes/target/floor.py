"""How large is a difference that means nothing? Reruns and batch sizes, measured on this machine.

Method: the same backend again, and the same row in a batch of four. What they change is the floor by
which other pairs are judged. Cost: four forwards on torch. Faults: `not-reproducible`, `not-finite`.
"""

from collections.abc import Mapping

from parity.comparison.traces import Comparison
from parity.probes.base import Evidence, ProbeAnswer, compare_pair, evidence_of, skip_answer
from parity.reports.record import Finding, Table, Value, declare_columns


class FloorProbe:
    """Measures, and fails where a rerun is not the same run or a batch changes more than rounding explains."""

    name = "floor"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """One finding for finiteness and for each dtype, and the measured sizes as a table."""
        findings: list[Finding] = [self._finite(evidence)]
        rows: list[tuple[Value, ...]] = []
        for dtype in ("fp32", "bf16"):
            why = evidence.why_not(f"torch.{dtype}.rerun", f"torch.{dtype}.batch", f"torch.{dtype}")
            if why:
                findings += skip_answer(f"floor.{dtype}", why, "capture a rerun and a larger batch").findings
                continue
            pairs = {
                kind: compare_pair(
                    evidence, f"floor.{dtype}.{kind}", f"torch.{dtype}.{kind}", f"torch.{dtype}"
                )
                for kind in ("rerun", "batch")
            }
            findings.append(self._finding(dtype, {kind: pair.comparison for kind, pair in pairs.items()}))
            for kind, pair in pairs.items():
                rows += [(dtype, kind, tap.tap, tap.error_rms, tap.error_max) for tap in pair.comparison.taps]
        return ProbeAnswer(findings=tuple(findings), tables=(self._table(rows),))

    def _finite(self, evidence: Evidence) -> Finding:
        """Are torch's states finite at all? Where they are not, no other number says much."""
        names = [name for name in ("torch.fp32", "torch.bf16") if name in evidence.traces]
        if not names:
            return skip_answer("finite", evidence.why_not("torch.fp32") or "", "capture on torch").findings[0]
        for name in names:
            trace = evidence.traces[name]
            for tap in trace.taps:
                for request in trace.requests:
                    bad = ~trace.tensor(request.id, tap).isfinite().all(dim=1)
                    if bad.any():
                        token = int(bad.nonzero()[0])
                        return Finding(
                            name="finite",
                            outcome="fail",
                            fault="not-finite",
                            evidence=evidence_of(capture=name, tap=tap, request=request.id, token=token),
                            sentence=f"states are not finite from {tap} on, first at token {token} of {request.id}: "
                            f"{request.token_texts[token]!r}",
                            next_step="look at that layer's weights; differences reported beside this follow from it",
                        )
        return Finding(
            name="finite",
            outcome="pass",
            sentence=f"every state of {' and '.join(names)} is finite",
        )

    def _finding(self, dtype: str, comparisons: Mapping[str, Comparison]) -> Finding:
        """One dtype. comparisons: `rerun` and `batch`."""
        sizes = {kind: max(tap.error_max for tap in c.taps) for kind, c in comparisons.items()}
        bad = [kind for kind, c in comparisons.items() if c.outcome != "pass"]
        evidence = tuple((f"{kind}, worst token", size) for kind, size in sizes.items())
        if bad:
            return Finding(
                name=f"floor.{dtype}",
                outcome="fail",
                fault="not-reproducible",
                evidence=evidence,
                sentence=f"{' and '.join(bad)} on torch changes more than rounding explains in {dtype}",
                next_step="make the run reproducible first; `parity env` lists the variables that matter",
            )
        return Finding(
            name=f"floor.{dtype}",
            outcome="pass",
            evidence=evidence,
            tables=("floor",),
            sentence=f"{dtype} on torch: a rerun changes {sizes['rerun']:.1e} and a batch of four {sizes['batch']:.1e} "
            "at the worst token; other differences are judged by these, or by rounding where it is larger",
        )

    def _table(self, rows: list[tuple[Value, ...]]) -> Table:
        return Table(
            name="floor",
            title="What changes nothing: rerun and batch size",
            detail=True,
            rows=tuple(rows),
            columns=declare_columns(
                "dtype | kind changed | tap | rms:float token rms | worst:float worst token"
            ),
        )
