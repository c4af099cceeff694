"""Reports to paint: a small one with every outcome, and one the size of `parity check`."""

import math
import random
from collections.abc import Callable

import pytest

from parity.reports.record import Chart, Column, Finding, Report, Suspicion, Table, Value
from tests.reports import pages

HOSTILE = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>"
    "|`*_[a](http://b)\x1b[31m\u202e\x00\n@@data@@"
)
"""What a hostile model name, prompt or stderr could hold."""


@pytest.fixture
def hostile() -> str:
    return HOSTILE


@pytest.fixture
def small() -> Report:
    """One finding of every outcome, a table, a detail table, three suspicions."""
    layers = Table(
        name="layers.fp32",
        title="Error per layer, fp32",
        caption="torch against fla-interpreted, 160 tokens.",
        columns=(
            Column(key="layer", title="layer", kind="int"),
            Column(key="kind", title="kind"),
            Column(key="l2", title="local error", unit="relative L2", kind="float"),
            Column(key="cosine", title="minimum cosine", kind="float"),
        ),
        rows=(
            (0, "linear", 2.31e-7, 0.99984),
            (1, "linear", 1.9e-7, 1.0),
            (2, "full", 0.0, 1.0),
            (3, "linear", math.nan, 1 - 2.2e-16),
        ),
        chart=Chart(kind="profile", x="layer", y="l2", log=True),
    )
    tokens = Table(
        name="tokens.fp32",
        title="Error per token",
        columns=(Column(key="t", title="token"),),
        rows=(("a",),),
        detail=True,
    )
    return Report(
        kind="check",
        title="parity check: tiny target",
        created="2026-01-02T03:04:05Z",
        command="parity check --out report",
        subject=(("model", "embedded tiny hybrid"), ("layers", 12), ("dtype", "float32, bfloat16")),
        findings=(
            Finding(
                name="loading",
                outcome="pass",
                sentence="AutoModel and AutoModelForCausalLM load the same weights.",
                evidence=(("parameters compared", 148), ("largest difference", 0.0)),
            ),
            Finding(
                name="dispatch",
                outcome="fail",
                sentence="fla-interpreted was asked for, but layer 3 ran torch's fallback in 6 of 6 calls.",
                evidence=(("layers asked for", 9), ("layers proven", 8), ("callee", "transformers.models.x")),
                fault="wrong-backend",
                next_step="Install flash-linear-attention, or ask for --backend torch.",
                tables=("layers.fp32",),
            ),
            Finding(
                name="floor",
                outcome="warn",
                sentence="The noise floor is one run only.",
                next_step="Run again with --reruns 3.",
            ),
            Finding(
                name="backends.cuda",
                outcome="skipped",
                sentence="No CUDA device, so fla's own kernels did not run.",
                next_step="Run this on the evaluation machine.",
            ),
            Finding(
                name="golden",
                outcome="error",
                sentence="The worker broke.",
                evidence=(("exit status", -11), ("stderr", "Traceback:\n  line 1\nSegmentation fault")),
                next_step="Report this with the lines above.",
            ),
        ),
        suspicions=(
            Suspicion(name="the kernels differ", verdict="found", because="Layer 3 ran the wrong kernel."),
            Suspicion(
                name="the loader loads something else",
                verdict="ruled out",
                because="148 of 148 parameters are equal in AutoModel and AutoModelForCausalLM.",
                findings=("loading",),
            ),
            Suspicion(
                name="the machine differs", verdict="not tested", because="No second machine's manifest."
            ),
        ),
        tables=(layers, tokens),
        environment=(("torch", "2.13.0+cpu"), ("TRITON_INTERPRET", "1"), ("cuda", None)),
        seconds=41.2,
        notes=("The fp64 pass covered 4 of 12 layers.",),
    )


@pytest.fixture
def big() -> Report:
    """What `parity check` gives on the embedded target: profiles, a heat map, findings, suspicions."""
    return check_report()


LINEAR = [layer % 4 != 3 for layer in range(12)]


def _profile(name: str, title: str, size: float, draw: random.Random) -> Table:
    rows: list[tuple[Value, ...]] = []
    inherited = 0.0
    for layer, linear in enumerate(LINEAR):
        local = size * draw.uniform(0.6, 1.6) if linear else 0.0
        inherited = math.hypot(inherited * 1.02, local)
        for series, error in (("local", local), ("inherited", inherited)):
            gap = error * error / 2
            rows.append(
                (
                    layer,
                    "linear" if linear else "full",
                    series,
                    error,
                    1 - gap,
                    1 - 9 * gap,
                    error * 0.7,
                    error * 31,
                )
            )
    return Table(
        name=name,
        title=title,
        caption="fla-interpreted against torch. Local: both given torch's input of the layer.",
        columns=(
            Column(key="layer", title="layer", kind="int"),
            Column(key="kind", title="kind"),
            Column(key="series", title="error"),
            Column(key="l2", title="relative L2", kind="float"),
            Column(key="cosine", title="mean cosine", kind="float"),
            Column(key="cosine_min", title="minimum cosine", unit="over tokens", kind="float"),
            Column(key="mean_abs", title="mean absolute difference", kind="float"),
            Column(key="max_abs", title="maximum absolute difference", kind="float"),
        ),
        rows=tuple(rows),
        chart=Chart(
            kind="profile",
            x="layer",
            y="l2",
            series="series",
            log=True,
            hover=("kind", "cosine_min"),
            limits=((2e-6, "limit"),) if size < 1e-5 else (),
        ),
    )


def _tokens(draw: random.Random) -> Table:
    text = (
        "Sort the words : pear apple fig . Answer : apple fig pear \n Add 17 and 25 . Answer : 42 \n".split(
            " "
        )
    )
    rows: list[tuple[Value, ...]] = []
    for layer, linear in enumerate(LINEAR):
        for position in range(160):
            error = (
                3e-3 * math.exp(draw.gauss(0, 0.7)) * (1 + 4 * (position in (40, 41, 97))) if linear else 0.0
            )
            rows.append((layer, position, " " + text[position % len(text)], error, 1 - error * error / 2))
    return Table(
        name="tokens.bf16",
        title="Local error per layer and token, bf16",
        caption="Relative L2 of the layer's output, fla-interpreted against torch.",
        columns=(
            Column(key="layer", title="layer", kind="int"),
            Column(key="position", title="position", kind="int"),
            Column(key="token", title="token"),
            Column(key="l2", title="relative L2", kind="float"),
            Column(key="cosine", title="cosine", kind="float"),
        ),
        rows=tuple(rows),
        chart=Chart(kind="heatmap", x="position", y="layer", value="l2", log=True, hover=("token", "cosine")),
        detail=True,
    )


def _calls() -> Table:
    return Table(
        name="calls",
        title="Calls that reached each implementation",
        columns=(
            Column(key="operator", title="operator"),
            Column(key="implementation", title="implementation"),
            Column(key="calls", title="calls", kind="int"),
            Column(key="ok", title="as asked", kind="flag"),
        ),
        rows=(
            ("delta", "fla.ops.gated_delta_rule.chunk_gated_delta_rule", 36, True),
            ("delta", "transformers.models.qwen3_5.torch_chunk_gated_delta_rule", 36, True),
            ("conv", "torch.nn.functional.conv1d", 72, True),
        ),
        chart=Chart(kind="bars", x="implementation", y="calls", series="operator"),
    )


def _finding(name: str, sentence: str, **evidence: Value) -> Finding:
    pairs = tuple((key.replace("_", " "), value) for key, value in evidence.items())
    return Finding(name=name, outcome="pass", sentence=sentence, evidence=pairs)


def _findings() -> tuple[Finding, ...]:
    return (
        _finding(
            "environment",
            "Every package that can change numbers is a tested version.",
            torch="2.13.0+cpu",
            transformers="5.24.0",
            fla="0.6.0",
            triton="3.7.1",
        ),
        Finding(
            name="dispatch",
            outcome="pass",
            tables=("calls",),
            sentence="fla-interpreted is proven on every linear layer: each call reached fla's kernels.",
            evidence=(("linear layers", 9), ("proven", 9), ("calls", 36), ("calls elsewhere", 0)),
        ),
        _finding(
            "interpreter",
            "The interpreted kernels agree with an fp64 recurrence.",
            fp32_error=2.4e-7,
            bf16_error=0.0031,
            limit_fp32=2e-6,
        ),
        _finding(
            "loading",
            "AutoModel, AutoModelForCausalLM and the vision wrapper load the same weights.",
            parameters=148,
            largest_difference=0.0,
        ),
        Finding(
            name="floor",
            outcome="warn",
            sentence="A batch of four changes bf16 states more than a rerun does.",
            evidence=(("rerun", 0.0), ("batch of 4", 0.0021), ("ratio to the benign error", 1.31)),
            next_step="Capture both sides with the same batch size before comparing bf16 traces.",
        ),
        Finding(
            name="backends.fp32",
            outcome="pass",
            tables=("layers.fp32",),
            sentence="In fp32 the backends agree at every layer.",
            evidence=(("largest relative L2", 2.46e-7), ("limit", 2e-6), ("layer", 10)),
        ),
        Finding(
            name="backends.bf16",
            outcome="pass",
            tables=("layers.bf16", "tokens.bf16"),
            sentence="In bf16 linear layers differ by rounding; full-attention layers are equal.",
            evidence=(
                ("lowest minimum cosine", 0.99887),
                ("worst layer", 7),
                ("worst token", " fig"),
                ("local error of full attention", 0.0),
            ),
        ),
        _finding(
            "golden.fp32",
            "Both backends are as close to fp64 as fp32 allows.",
            torch=4.9e-7,
            fla=5.2e-7,
            promotions=56,
        ),
        _finding(
            "control",
            "The gate fails a copy rolled by one token and one with shuffled channels.",
            rolled=1.31,
            shuffled=1.41,
            limit=2e-6,
        ),
        _finding(
            "prefill-decode", "Token by token with a cache gives the states of one prefill.", largest=3.1e-7
        ),
        Finding(
            name="backends.cuda",
            outcome="skipped",
            sentence="No CUDA device: fla's own kernels did not run.",
            next_step="Run `parity check` on the machine that evaluates, then `parity env --diff` both.",
        ),
        Finding(
            name="wiring",
            outcome="skipped",
            sentence="No recipe and no adapter were given.",
            next_step="Give a recipe: parity check my.yaml --adapter my.py:Trainer.",
        ),
    )


def _suspicions() -> tuple[Suspicion, ...]:
    rows = (
        (
            "the kernels differ",
            "ruled out",
            "fp32 agrees to 2.5e-7 at every layer against a limit of 2e-6; bf16 differs by rounding only.",
            ("backends.fp32", "backends.bf16"),
        ),
        (
            "the wrong backend ran",
            "ruled out",
            "Every call of 9 linear layers reached the backend that was asked for.",
            ("dispatch",),
        ),
        (
            "the loader loads something else",
            "ruled out",
            "148 of 148 parameters equal across three loaders.",
            ("loading",),
        ),
        (
            "the interpreter itself is wrong",
            "ruled out",
            "Its kernels agree with an fp64 recurrence.",
            ("interpreter",),
        ),
        (
            "decode computes something else than prefill",
            "ruled out",
            "Largest relative L2 3.1e-7.",
            ("prefill-decode",),
        ),
        (
            "batching changes the states",
            "found",
            "A batch of four moves bf16 states by 2.1e-3, 1.31 times the benign error.",
            ("floor",),
        ),
        ("the CUDA kernels differ", "not tested", "No CUDA device here.", ("backends.cuda",)),
        ("noise reaches the labels", "not tested", "No adapter was given.", ("wiring",)),
        ("fc is fed the wrong layers", "not tested", "No adapter was given.", ("wiring",)),
    )
    return tuple(Suspicion(name=n, verdict=v, because=b, findings=f) for n, v, b, f in rows)  # type: ignore[arg-type]


def check_report(seed: int = 0) -> Report:
    draw = random.Random(seed)
    return Report(
        kind="check",
        title="Check of the embedded hybrid target",
        created="2026-01-02T03:04:05Z",
        command="parity check --out parity-report",
        subject=(
            ("model", "embedded tiny hybrid, 12 layers, 9 linear"),
            ("revision", "sha256 4be1c0f2"),
            ("backends", "torch, fla-interpreted, golden"),
            ("dtypes", "float32, bfloat16"),
            ("tokens", 160),
        ),
        findings=_findings(),
        suspicions=_suspicions(),
        tables=(
            _profile("layers.fp32", "Error over depth, fp32", 1.8e-7, draw),
            _profile("layers.bf16", "Error over depth, bf16", 2.8e-3, draw),
            _calls(),
            _tokens(draw),
        ),
        environment=(
            ("python", "3.11.7"),
            ("torch", "2.13.0+cpu"),
            ("transformers", "5.24.0"),
            ("fla", "0.6.0"),
            ("triton", "3.7.1"),
            ("causal-conv1d", None),
            ("cpu", "AMD EPYC 9B14"),
            ("cuda", None),
            ("threads", 1),
            ("TRITON_INTERPRET", "1"),
            ("FLA_USE_TMA", None),
            ("torch.backends.cuda.matmul.allow_tf32", False),
        ),
        seconds=41.2,
        notes=("Interpreted calls: 36, in one worker. Worker start 3.5 s, interpretation 28.1 s.",),
    )


@pytest.fixture
def report_of() -> Callable[..., Report]:
    """Makes a report of a few parts, the rest being empty."""

    def make(**parts: object) -> Report:
        fields: dict[str, object] = {
            "kind": "check",
            "title": "t",
            "created": "c",
            "command": "k",
            "subject": (),
            "findings": (),
        }
        return Report(**(fields | parts))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def page_reports() -> dict[str, Report]:
    """The three kinds of report that a page is made of, as full as they get."""
    return {"check": check_report(), "compare": pages.compare_page(), "train": pages.train_page()}
