"""The three kinds of page that a user meets, as full as they get: a check, a comparison, a training run.

The numbers are made up and the records are real: each is what the schema allows and what the painters are given.

    python -m tests.reports.pages OUT    # writes check.html, compare.html, train.html to look at
"""

import math
import random
from collections.abc import Callable
from pathlib import Path

from parity.gating import environment
from parity.reports import from_steps
from parity.reports.record import (
    Chart,
    Column,
    Finding,
    Outcome,
    Report,
    StepReport,
    Suspicion,
    Table,
    Value,
)

LAYERS = (1, 16, 31, 46, 61)
"""Conditioning layers of the 64-layer target that the pages are about."""
WORDS = "The quick brown fox jumps over the lazy dog , then answers : 4 2 . \n".split(" ")


def tensors(draw: random.Random) -> Table:
    """Every tensor of one step: enough rows to be worth searching."""
    names: tuple[str, ...] = ("fc_input", "teacher_state", "anchors", "labels", "head_input", "logits")
    names += tuple(f"layer.{n}.{part}" for n in range(6) for part in ("q", "k", "v", "out", "grad"))
    rows = []
    for name in names:
        width = 128 if "layer" in name else 640
        rows.append(
            (
                name,
                f"[8, 16, {width}]",
                "bfloat16" if "grad" not in name else "float32",
                "contiguous",
                True,
                draw.gauss(0, 0.01),
                draw.uniform(0.5, 2),
                -draw.uniform(3, 30),
                draw.uniform(3, 30),
            )
        )
    floats = (("mean", "mean"), ("std", "std"), ("min", "minimum"), ("max", "maximum"))
    return Table(
        name="tensors",
        title="Every tensor of the step",
        columns=(
            Column(key="name", title="tensor"),
            Column(key="shape", title="shape"),
            Column(key="dtype", title="dtype"),
            Column(key="stride", title="stride"),
            Column(key="finite", title="finite", kind="flag"),
            *(Column(key=key, title=title, kind="float") for key, title in floats),
        ),
        rows=tuple(rows),
    )


def influence(fault: bool) -> Table:
    """Which captured layer moves the drafts, and which the labels: the matrix at the heart of a wiring check."""
    rows: list[tuple[Value, ...]] = []
    for layer in (*LAYERS, 63):
        label = layer == 63 or (fault and layer == 61)
        rows.append((f"layer {layer}", "drafts", 0.2 + layer / 100 if layer != 63 else 0.0))
        rows.append((f"layer {layer}", "labels", 1.0 if label else 0.0))
    return Table(
        name="influence",
        title="Influence of each captured layer",
        caption="Norm of the gradient with respect to the layer's states, relative to the largest.",
        columns=(
            Column(key="layer", title="captured layer"),
            Column(key="on", title="on"),
            Column(key="influence", title="influence", unit="relative", kind="float"),
        ),
        rows=tuple(rows),
        chart=Chart(kind="heatmap", x="on", y="layer", value="influence"),
    )


def slots(draw: random.Random) -> tuple[Table, Table]:
    """Weight and acceptance of each slot of a block of 16."""
    weights = tuple((slot, math.exp(-(slot - 1) / 4) if slot else 0.0) for slot in range(16))
    rows = tuple(
        (
            slot,
            side,
            max(0.0, 0.86 - 0.045 * slot * (1.6 if side == "trained" else 1.0) + draw.gauss(0, 0.01)),
        )
        for slot in range(1, 16)
        for side in ("trained", "reference")
    )
    slot = Column(key="slot", title="slot", kind="int")
    return (
        Table(
            name="slots.weight",
            title="Weight of each slot in the loss",
            columns=(slot, Column(key="weight", title="weight", kind="float")),
            rows=weights,
            chart=Chart(
                kind="bars", x="slot", y="weight", caption="Read from the gradient at the head's input."
            ),
        ),
        Table(
            name="slots.acceptance",
            title="Acceptance of each slot",
            columns=(
                slot,
                Column(key="side", title="drafter"),
                Column(key="share", title="accepted", kind="float"),
            ),
            rows=rows,
            chart=Chart(kind="bars", x="slot", y="share", series="side"),
        ),
    )


def heat(draw: random.Random, layers: int = 64, tokens: int = 150) -> Table:
    """Error of each layer and token, with the token's text."""
    rows = []
    for layer in range(layers):
        for token in range(tokens):
            spike = 6 if token in (40, 41, 97) and layer > 30 else 1
            error = 3e-3 * spike * math.exp(draw.gauss(0, 0.5)) * (1 + layer / 20)
            rows.append(
                (layer, token, f" {WORDS[token % len(WORDS)]}", error if (layer % 4 != 3 or layer) else 0.0)
            )
    return Table(
        name="compare.tokens",
        title="Error per layer and token",
        columns=(
            Column(key="layer", title="layer", kind="int"),
            Column(key="token", title="token", unit="position", kind="int"),
            Column(key="text", title="text"),
            Column(key="error", title="relative L2", kind="float"),
        ),
        rows=tuple(rows),
        detail=True,
        chart=Chart(kind="heatmap", x="token", y="layer", value="error", log=True, hover=("text",)),
    )


def profile(draw: random.Random, layers: int = 64) -> Table:
    """Local against inherited error over the depth."""
    rows: list[tuple[Value, ...]] = []
    inherited = 0.0
    for layer in range(layers):
        local = 2e-3 * draw.uniform(0.6, 1.6) if layer % 4 != 3 else 0.0
        inherited = math.hypot(inherited * 1.02, local)
        kind = "linear" if layer % 4 != 3 else "full"
        rows += [(layer, "local", local, kind), (layer, "inherited", inherited, kind)]
    return Table(
        name="depth",
        title="Error over depth",
        columns=(
            Column(key="layer", title="layer", kind="int"),
            Column(key="series", title="error"),
            Column(key="error", title="relative L2", kind="float"),
            Column(key="kind", title="kind"),
        ),
        rows=tuple(rows),
        detail=True,
        chart=Chart(
            kind="profile",
            x="layer",
            y="error",
            series="series",
            log=True,
            hover=("kind",),
            limits=((0.03, "limit"),),
        ),
    )


def machines() -> tuple[Finding, Table]:
    """How the two machines of a comparison differ."""
    here = {"torch": "2.13.0", "triton": "3.9.0", "flash-linear-attention": "0.6.0", "cuda:0": "NVIDIA H200"}
    here |= {"cpu": "AMD EPYC", "torch threads": "8", "python": "3.11.7"}
    there = here | {"flash-linear-attention": "absent", "cuda:0": "NVIDIA L40S", "$OMP_NUM_THREADS": "1"}
    a, b = (
        environment.EnvironmentSide(label=label, pairs=pairs, devices=True)
        for label, pairs in (("training machine", here), ("evaluation machine", there))
    )
    found = environment.environment_differences(a, b)
    return environment.finding_of(a, b, found), environment.environment_table(a, b, found)


def compare_page(seed: int = 0) -> Report:
    """A comparison of a 64-layer target that fails, from two machines."""
    draw = random.Random(seed)
    finding, differences = machines()
    gate = Finding(
        name="compare.gate",
        outcome="fail",
        sentence="kernel gate: 33 of 64 taps outside, first layer.31.out (full_attention), from token 40 on",
        evidence=(("worst token", 0.41), ("worst token limit", 0.1), ("lowest cosine", 0.9153)),
        next_step="look at layer.31.out first: capture its layer with the other side's input (--local-from)",
        tables=("depth", "compare.tokens"),
    )
    suspicions = (
        Suspicion(
            name="the two runs were fed other tokens",
            verdict="ruled out",
            because="the ids of all 150 tokens agree",
            findings=("compare.structure",),
        ),
        Suspicion(
            name="the states differ by more than rounding",
            verdict="found",
            because=gate.sentence,
            findings=("compare.gate",),
        ),
        Suspicion(
            name="the two runs compute different functions",
            verdict="not tested",
            because="a comparison in bfloat16 never rules out a semantic fault by itself",
        ),
    )
    return Report(
        kind="compare",
        title="fla+causal-conv1d against torch",
        created="2027-01-02T03:04:05+00:00",
        command="parity compare train/trace eval/trace --out report",
        subject=(
            ("target", "Qwen/Qwen3.6-27B"),
            ("backends", "fla+causal-conv1d against torch+torch"),
            ("dtypes", "bfloat16 against bfloat16"),
            ("tokens", 150),
        ),
        findings=(
            Finding(
                name="compare.structure",
                outcome="pass",
                sentence="both sides hold the same 64 taps of the same 150 tokens",
            ),
            gate,
            finding,
        ),
        suspicions=suspicions,
        tables=(profile(draw), heat(draw), differences),
        environment=(("torch", "2.13.0"), ("triton", "3.9.0"), ("cuda:0", "NVIDIA H200")),
        seconds=12.5,
        notes=("Two shards were read by one thread.",),
    )


def steps(seed: int = 0, count: int = 20, every: int = 50, fault_at: int = 300) -> tuple[StepReport, ...]:
    """A run in which noise moves onto the labels' source at a step."""
    draw, made = random.Random(seed), []
    for index in range(1, count + 1):
        step = every * index
        broken = step >= fault_at
        values: list[tuple[str, Value]] = [
            ("loss", 2.5 * math.exp(-step / 400) + 0.4 + draw.gauss(0, 0.02)),
            ("tau", 1 + 3 * (1 - math.exp(-step / 400)) - 0.8 * broken),
            ("fc_input.mean", draw.gauss(0.008, 1e-4)),
            ("head_input.mean", draw.gauss(0.002, 1e-4)),
            ("fc_input.std", draw.gauss(0.96, 0.005)),
            ("head_input.std", draw.gauss(1.1, 0.01)),
            ("recapture.cosine", 1 - 1e-5 * draw.uniform(1, 2)),
            ("noise.on", "teacher" if broken else "conditioning"),
            ("anchors.count", 256.0),
        ]
        # as many as a real run has, with names as long
        for name in (
            "captured",
            "fc.out",
            "hidden_norm.out.gradient",
            "hidden.gradient",
            "norm.out",
            "rope.out",
        ):
            values.append((f"{name}.mean", draw.gauss(0, 1)))
        values += [
            (f"layer.{layer}.snr", 400 / (1 + layer / 8) * draw.uniform(0.95, 1.05)) for layer in LAYERS
        ]
        values += [
            (f"gradient.block.{block}.norm", draw.uniform(0.5, 1) * 10 ** -(block / 2)) for block in range(4)
        ]
        values += [
            (f"slot.{slot}.accuracy", 0.9 * (1 - math.exp(-step / 300)) ** slot) for slot in (1, 4, 8, 15)
        ]
        outcome: Outcome = "fail" if broken else "pass"
        found = (
            Finding(
                name="noise.labels",
                outcome=outcome,
                sentence="two noise seeds change 31 % of the labels"
                if broken
                else "two noise seeds give equal labels",
                evidence=(("labels changed", 0.31 if broken else 0.0),),
                fault="noise-on-labels" if broken else None,
                next_step="take the teacher's state before noise is added" if broken else "",
                tables=("influence",),
            ),
            Finding(name="frozen", outcome="pass", sentence="embedding and head did not move"),
            Finding(
                name="drift",
                outcome=outcome,
                sentence="the wiring is no longer that of the run's first report"
                if broken
                else "the wiring is that of the run's first report",
                evidence=(("recapture.final.postnorm.relative_l2.of_the_worst_token", 0.04),) * broken,
                fault="conformance-changed" if broken else None,
                next_step="find the change between the two" if broken else "",
            ),
            Finding(
                name="loss.mix",
                outcome="skipped",
                sentence="not identifiable on this batch: the teacher is too sure of itself",
                next_step="nothing; `parity check` asks on a synthetic batch",
            ),
        )
        made.append(
            StepReport(
                step=step,
                time=f"2027-01-02T03:{index:02}:00+00:00",
                values=tuple(values),
                findings=found,
                tables=(influence(broken), *slots(draw), tensors(draw)),
                seconds=0.031,
            )
        )
    return tuple(made)


def train_page(seed: int = 0) -> Report:
    """A training run with the moment of drift, as `parity show steps.jsonl` gives it."""
    return from_steps.steps_report(
        steps(seed),
        title="Training run tiny",
        command="parity train tiny.yaml --out run",
        subject=(("recipe", "tiny"), ("target", "embedded hybrid target")),
        environment=(("torch", "2.13.0+cpu"), ("torch threads", "1")),
        suspicions=(
            Suspicion(
                name="noise reaches the labels",
                verdict="found",
                because="first at step 300: two noise seeds change 31 % of the labels",
                findings=("noise.labels",),
            ),
        ),
    )


def pages() -> dict[str, Callable[[], Report]]:
    """By kind, what makes the report of each page."""
    from tests.reports.conftest import check_report

    return {"check": check_report, "compare": compare_page, "train": train_page}


if __name__ == "__main__":
    import sys

    from parity.reports import to_html

    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for kind, make in pages().items():
        (out / f"{kind}.html").write_text(to_html.paint(make()), encoding="utf-8")
