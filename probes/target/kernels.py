"""Do two backends compute the same function, and which layer adds the difference?

Method, in both dtypes: states of whole passes (inherited error), and of layers each fed torch's input
(local error). fp32 is judged by the semantic gate against a floor measured here and a golden pass;
bf16 by its ratio to torch's own distance from golden, which never rules out a small fault. A layer of
full attention runs the same code on both sides, so its local difference must be exactly 0; a linear
layer whose local difference is exactly 0 did not run another kernel. Cost: four passes of the other
backend. Faults: `dispatch`, `full-attention-differs`, and kinds of difference.
"""

from collections.abc import Mapping

from parity.comparison.error import trace_error
from parity.comparison.traces import Comparison
from parity.probes.base import (
    CAPTURE_DTYPES,
    Evidence,
    ProbeAnswer,
    compare_pair,
    evidence_of,
    skip_answer,
)
from parity.reports.record import Chart, Finding, Table, Value, declare_columns


class KernelsProbe:
    """Torch against the other backend."""

    name = "kernels"

    def run(self, evidence: Evidence) -> ProbeAnswer:
        """Findings of the gates in both dtypes, of the local errors, and the per-layer tables."""
        if not evidence.linear:
            why = "no linear-attention layer in this model: every backend runs the same code"
            step = "nothing; name a model with linear-attention layers to compare kernels"
            names = ("kernels.fp32", "kernels.bf16")
            return ProbeAnswer(
                findings=tuple(f for name in names for f in skip_answer(name, why, step).findings)
            )
        answers = [self._compare_dtype(evidence, dtype) for dtype in ("fp32", "bf16")]
        return ProbeAnswer(
            findings=tuple(finding for answer in answers for finding in answer.findings),
            tables=tuple(table for answer in answers for table in answer.tables),
        )

    def _compare_dtype(self, evidence: Evidence, dtype: str) -> ProbeAnswer:
        """Whole passes and passes layer by layer in one dtype, a key of `CAPTURE_DTYPES`."""
        name = f"kernels.{dtype}"
        why = evidence.why_not(f"other.{dtype}", f"torch.{dtype}")
        if why:
            return skip_answer(
                name, why, "run where that backend is available; `parity env` lists what runs here"
            )
        # Whole passes: inherited error, judged by the floor and, for equal weights, by golden.
        floor = evidence.floor(dtype)
        golden = "golden" if _same_weights(evidence, "golden", f"torch.{dtype}") else None
        whole = compare_pair(evidence, name, f"other.{dtype}", f"torch.{dtype}", golden=golden, floor=floor)
        findings, tables = [f for f in whole.findings if _worth_telling(f)], list(whole.tables)
        # Layer by layer on torch's input: local error.
        local = None
        why = evidence.why_not(f"other.{dtype}.local")
        if why:
            findings += skip_answer(f"{name}.local", why, "capture with --local-from").findings
        else:
            local = compare_pair(evidence, f"{name}.local", f"other.{dtype}.local", f"torch.{dtype}")
            findings += [
                self._local(evidence, dtype, local.comparison),
                *(f for f in local.findings if _worth_telling(f)),
            ]
        summary = layer_table(evidence, dtype, whole.comparison, local.comparison if local else None, golden)
        return ProbeAnswer(findings=tuple(findings), tables=(summary, depth_table(dtype, summary), *tables))

    def _local(self, evidence: Evidence, dtype: str, local: Comparison) -> Finding:
        """Full attention must differ locally by 0, and linear attention must not."""
        by_layer = {
            tap.layer: tap
            for tap in local.taps
            if tap.tap == f"layer.{tap.layer}.out" and not any(tap.nonfinite)  # those say nothing of kernels
        }
        full = {i: tap.relative_l2 for i, tap in by_layer.items() if i not in evidence.linear}
        linear = {i: tap.relative_l2 for i, tap in by_layer.items() if i in evidence.linear}
        name = f"kernels.{dtype}.layers"
        shown = evidence_of(
            smallest_linear=min(linear.values(), default=0.0),
            largest_linear=max(linear.values(), default=0.0),
            largest_full=max(full.values(), default=0.0),
        )
        # The same code on the same input: any difference has another cause than the kernels.
        moved = [i for i, size in full.items() if size != 0]
        if moved:
            return Finding(
                name=name,
                outcome="fail",
                fault="full-attention-differs",
                evidence=shown,
                tables=(f"layers.{dtype}",),
                sentence=f"full-attention layers {moved} differ locally, though both sides run the same code "
                "on the same input",
                next_step="look for another difference between the two processes: attention implementation, "
                "threads, device",
            )
        if not linear:
            return skip_answer(
                name, "no linear layer has finite states", "see the finding `finite`"
            ).findings[0]
        # Another kernel rounds differently: no difference at all means that it did not run.
        same = [i for i, size in linear.items() if size == 0]
        if same:
            return Finding(
                name=name,
                outcome="fail",
                fault="dispatch",
                evidence=shown,
                tables=(f"layers.{dtype}",),
                sentence=f"linear layers {same} agree to the last bit, as no two kernels do",
                next_step="see the dispatch table: the same kernel may have run on both sides",
            )
        return Finding(
            name=name,
            outcome="pass",
            evidence=shown,
            tables=(f"layers.{dtype}",),
            sentence=f"fed the same input, each linear layer adds {min(linear.values()):.1e} to "
            f"{max(linear.values()):.1e} and "
            f"{'each full-attention layer exactly 0' if full else 'there is no full-attention layer'}",
        )


def _same_weights(evidence: Evidence, golden: str, base: str) -> bool:
    """Whether there is a valid golden of the very values: a float32 checkpoint loaded in bfloat16 has others."""
    if golden not in evidence.traces or not evidence.traces[golden].manifest.backend.valid:
        return False
    weights = (evidence.traces[name].manifest.target.weights for name in (golden, base))
    return next(weights) == next(weights)


def _worth_telling(finding: Finding) -> bool:
    """The gates always; that both sides hold the same taps of the same target only where they do not."""
    return finding.outcome != "pass" or finding.name.endswith((".gate", ".controls"))


def layer_table(
    evidence: Evidence, dtype: str, whole: Comparison, local: Comparison | None, golden: str | None
) -> Table:
    """Return the table a reader looks at first, one row a decoder layer.

    Args:
        evidence: what was captured.
        dtype: a key of `CAPTURE_DTYPES`.
        whole: the comparison of whole passes.
        local: the comparison of passes layer by layer, where there is one.
        golden: name of the fp64 trace, where it judges.
    """
    own: Mapping[str, float] = {tap.tap: tap.relative_l2 for tap in local.taps} if local else {}
    taps = {tap.tap: tap for tap in whole.taps}
    # Distances to golden are measured here: the comparison itself is of the two backends.
    rows: list[tuple[Value, ...]] = []
    for index, kind in enumerate(evidence.target["layer_types"]):
        tap = f"layer.{index}.out"
        if tap not in taps:
            continue
        to_golden = [
            trace_error(evidence.traces[f"{side}.{dtype}"], evidence.traces[golden], tap) if golden else None
            for side in ("torch", "other")
        ]
        rows.append(
            (
                index,
                str(kind).removesuffix("_attention"),
                own.get(tap),
                taps[tap].relative_l2,
                *to_golden,
                taps[tap].cosine_min,
            )
        )
    return Table(
        name=f"layers.{dtype}",
        title=f"{evidence.other} against torch, {CAPTURE_DTYPES[dtype]}, per layer",
        columns=declare_columns(
            "layer:int | type | local:float | inherited:float | torch_golden:float torch-fp64 | "
            "other_golden:float other-fp64 | cosine_min:float min cos"
        ),
        rows=tuple(rows),
        caption="Relative L2 of each layer's output. local: each layer is fed torch's input. inherited: whole passes. "
        f"torch-fp64, other-fp64: distance of torch and of {evidence.other} from a true fp64 pass. min cos: lowest "
        "cosine over tokens, whole passes.",
    )


def depth_table(dtype: str, summary: Table) -> Table:
    """Return the same numbers in long form, for the profile over depth. summary: a table of `layer_table`."""
    # Series -> its column in the summary.
    keys = {"local": 2, "inherited": 3, "torch to fp64": 4, "other to fp64": 5}
    rows = tuple(
        (row[0], series, row[at])
        for series, at in keys.items()
        for row in summary.rows
        if row[at] is not None
    )
    return Table(
        name=f"depth.{dtype}",
        title=f"Error over depth, {CAPTURE_DTYPES[dtype]}",
        detail=True,
        rows=rows,
        columns=declare_columns("layer:int | series error | error:float relative L2"),
        chart=Chart(
            kind="profile",
            x="layer",
            y="error",
            series="series",
            log=True,
            caption="Local error blames a layer only for what it adds; inherited error is what reaches the drafter.",
        ),
    )
