"""Is an operator itself different, or only what it was fed?

Method: every call to the delta rule and to the convolution was recorded once on torch, with its inputs;
the other backend was fed the same layer inputs, and its calls carry the same digests. Both outputs are
compared with fp64 recurrences of those inputs, which share no code with either. Cost: the recurrences.
Faults: `operator`.
"""

from collections.abc import Mapping

import numpy as np

from parity.comparison.error import token_errors
from parity.comparison.tolerance import eps_of
from parity.kernel.sums import pair_stats
from parity.model.target.backends import OperatorCall
from parity.model.target.operator_replay import load_calls
from parity.probes.base import Evidence, ProbeAnswer, evidence_of, skip_answer
from parity.reports.record import Finding, Table, Value, declare_columns

# Relative L2 of one operator's output against fp64, in eps of its dtype. Measured on the embedded target,
# torch and fla-interpreted: at most 6 eps in float32 and .9 in bfloat16 (fla rounds more of what is in
# between). A wrong tap or a dropped state is 1e6 eps in float32 and 60 in bfloat16.
LIMIT = {"float32": 32.0, "bfloat16": 4.0}


class OperatorsProbe:
    """Compares each recorded call of both backends with the fp64 recurrence."""

    name = "operators"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """A finding for each operator, dtype and backend; a table of all layers."""
        if not evidence.linear:
            return skip_answer(
                "operators", "no linear-attention layer in this model", "nothing; there is no such operator"
            )
        # In each dtype torch's own calls, then the other backend's on the same inputs.
        findings: list[Finding] = []
        rows: list[tuple[Value, ...]] = []
        for dtype in ("fp32", "bf16"):
            if f"torch.{dtype}" not in evidence.operators or f"golden.{dtype}" not in evidence.operators:
                why = evidence.absent.get(f"torch.{dtype}", "no calls were recorded")
                findings += skip_answer(
                    f"operators.{dtype}", why, "capture with operator calls recorded"
                ).findings
                continue
            golden = _by_place(evidence, f"golden.{dtype}")
            for name in ("torch", "other"):
                source = f"torch.{dtype}" if name == "torch" else f"other.{dtype}.local"
                if source not in evidence.operators:
                    why = evidence.absent.get(source, "no calls were recorded")
                    step = "run where that backend is available"
                    findings += skip_answer(f"operators.{dtype}.{evidence.other}", why, step).findings
                    continue
                errors, foreign = _errors(_by_place(evidence, source), golden)
                backend = "torch" if name == "torch" else evidence.other
                findings.append(self._finding(dtype, backend, errors, foreign))
                rows += [
                    (dtype, layer, operator, backend, error, limit)
                    for (layer, operator), (error, limit) in errors.items()
                ]
        return ProbeAnswer(findings=tuple(findings), tables=(self._table(rows),))

    def _finding(
        self, dtype: str, backend: str, errors: Mapping[tuple[int, str], tuple[float, float]], foreign: int
    ) -> Finding:
        """One backend in one dtype. errors: (layer, operator) -> (error, limit). foreign: calls with other inputs."""
        name = f"operators.{dtype}.{backend}"
        if not errors:
            return Finding(
                name=name,
                outcome="skipped",
                sentence=f"not compared: none of {foreign} calls had inputs that were recorded on torch",
                next_step="capture both with the same prompts",
            )
        # The call that is nearest to its limit, or beyond it; a call with other inputs is a fault by itself.
        worst = max(errors, key=lambda place: errors[place][0] / errors[place][1])
        error, limit = errors[worst]
        shown = evidence_of(
            calls=len(errors),
            worst_layer=worst[0],
            operator=worst[1],
            error=error,
            limit=limit,
            calls_with_other_inputs=foreign,
        )
        if not error <= limit or foreign:
            return Finding(
                name=name,
                outcome="fail",
                fault="operator",
                evidence=shown,
                tables=("operators",),
                sentence=f"{backend} in {dtype}: {worst[1]} of layer {worst[0]} is {error:.2e} from the fp64 "
                f"recurrence on the same inputs, limit {limit:.1e}"
                + (f"; {foreign} calls had other inputs" if foreign else ""),
                next_step="the operator itself is at fault on this machine: try another version of its package",
            )
        return Finding(
            name=name,
            outcome="pass",
            evidence=shown,
            tables=("operators",),
            sentence=f"{backend} in {dtype}: all {len(errors)} operator calls agree with fp64 recurrences on the "
            f"same inputs; the worst is {worst[1]} of layer {worst[0]}, {error:.1e} of at most {limit:.1e}",
        )

    def _table(self, rows: list[tuple[Value, ...]]) -> Table:
        return Table(
            name="operators",
            title="Each operator against an fp64 recurrence, same inputs",
            detail=True,
            rows=tuple(rows),
            columns=declare_columns(
                "dtype | layer:int | operator | backend | error:float rel L2 | limit:float"
            ),
        )


def _by_place(evidence: Evidence, name: str) -> dict[tuple[int, str, str], OperatorCall]:
    """Calls by layer, operator and digest of the inputs."""
    return {(call.layer, call.operator, call.digest()): call for call in load_calls(evidence.operators[name])}


def _errors(
    calls: Mapping[tuple[int, str, str], OperatorCall], golden: Mapping[tuple[int, str, str], OperatorCall]
) -> tuple[dict[tuple[int, str], tuple[float, float]], int]:
    """(worst error and its limit by layer and operator, how many calls had inputs that golden does not know)."""
    errors: dict[tuple[int, str], tuple[float, float]] = {}
    foreign = 0
    for place, call in calls.items():
        if place not in golden:
            foreign += 1
            continue
        a, b = (c.output.reshape(-1, c.output.shape[-1]) for c in (call, golden[place]))
        stats = pair_stats(a, b, full=False)
        error = stats.flat()[1] if np.isfinite(token_errors(stats, strict=True)).all() else float("inf")
        dtype = str(call.output.dtype).removeprefix("torch.")
        limit = LIMIT.get(dtype, 32.0) * eps_of(dtype)
        errors[place[:2]] = max(errors.get(place[:2], (0.0, limit)), (error, limit))
    return errors, foreign
