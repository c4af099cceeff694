"""Did the backend that was asked for compute? Question zero: without it no other number means anything.

Bug it finds: kernels that were never called (transformers falls back silently where a package is missing or cannot be
imported), or fla where torch was asked for. Test: exact, by the functions that each call reached.
Cost: none beyond the captures. Faults: `dispatch`.
"""

from parity.probes.base import Evidence, ProbeAnswer, evidence_of
from parity.reports.record import Finding, Table, Value, declare_columns


class DispatchProbe:
    """Reads the call proofs of every trace, and reports workers that crashed."""

    name = "dispatch"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """One finding for the proofs, one for each crash, one for the interpreter's self-test."""
        findings = [self._proofs(evidence), *self._crashes(evidence), *self._self_test(evidence)]
        return ProbeAnswer(findings=tuple(findings), tables=(self._table(evidence),))

    def _proofs(self, evidence: Evidence) -> Finding:
        """One finding: no capture ran another backend, and the other backend ran at all."""
        if not evidence.linear:
            return Finding(
                name="dispatch",
                outcome="skipped",
                sentence="not asked: no linear-attention layer in this model, "
                "so there is no kernel to choose",
                next_step="nothing; this target runs on one backend",
            )
        # A capture that did not run what was asked for makes every other number of it worthless.
        wrong = {
            name: trace.manifest.backend.problems
            for name, trace in evidence.traces.items()
            if not trace.manifest.backend.valid
        }
        if wrong:
            name, problems = next(iter(wrong.items()))
            return Finding(
                name="dispatch",
                outcome="fail",
                fault="dispatch",
                tables=("dispatch",),
                sentence=f"{len(wrong)} captures did not run what was asked for; {name}: {problems[0]}",
                evidence=tuple((name, "; ".join(problems[:4])) for name, problems in wrong.items()),
                next_step="run `parity env` to see which backends run here; no other number of these "
                "captures counts",
            )
        # Torch alone proves nothing about the other backend.
        if not any(name.startswith("other.") for name in evidence.traces):
            return Finding(
                name="dispatch",
                outcome="skipped",
                sentence=f"{evidence.other} was never asked: {evidence.absent.get('other.fp32', 'no capture of it')}",
                next_step="run where that backend is available; `parity env` lists what runs here",
            )
        ran = sorted(
            {
                call.implementation
                for trace in evidence.traces.values()
                for call in trace.manifest.backend.calls
            }
        )
        return Finding(
            name="dispatch",
            outcome="pass",
            tables=("dispatch",),
            sentence=f"every call on all {len(evidence.linear)} linear layers reached what was asked for, in "
            f"{len(evidence.traces)} captures: {', '.join(ran)}",
            evidence=evidence_of(linear_layers=len(evidence.linear), captures=len(evidence.traces)),
        )

    def _crashes(self, evidence: Evidence) -> list[Finding]:
        return [
            Finding(
                name=f"dispatch.crash.{worker}",
                outcome="fail",
                fault="crash",
                sentence=f"the {worker} worker {happened}",
                evidence=(("standard error", tail),),
                next_step="read the last lines of its standard error, and try `parity capture` with that backend alone",
            )
            for worker, (happened, tail) in evidence.crashes.items()
        ]

    def _self_test(self, evidence: Evidence) -> list[Finding]:
        if not evidence.self_tests:
            return []
        return [
            Finding(
                name="dispatch.interpreter",
                outcome="pass",
                sentence="the interpreter passed its self-test against an fp64 recurrence: "
                + ", ".join(
                    f"{dtype} {error:.1e} of at most {limit:.1e}"
                    for dtype, (error, limit) in evidence.self_tests.items()
                ),
                evidence=tuple((dtype, error) for dtype, (error, _) in evidence.self_tests.items()),
            )
        ]

    def _table(self, evidence: Evidence) -> Table:
        rows: list[tuple[Value, ...]] = []
        for name, trace in evidence.traces.items():
            for call in trace.manifest.backend.calls:
                rows.append((name, call.layer, call.operator, call.implementation, call.callee, call.calls))
        return Table(
            name="dispatch",
            title="Who computed each operator",
            detail=True,
            rows=tuple(rows),
            columns=declare_columns(
                "capture | layer:int | operator | implementation | callee function reached | calls:int"
            ),
        )
