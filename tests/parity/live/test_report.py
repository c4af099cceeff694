"""Experiments on a live model: healthy, each proves nothing; with a fault in the model's path, its own fails."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.cli import main as cli
from parity.diagnosis.records import Diagnosis
from parity.errors import ParityError
from parity.live.experiments import EXPERIMENTS
from parity.live.formulas import causal_attention, rotary_reference
from parity.live.report import add_experiments, experiments_for, run_live, tokens_of
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec
from parity.reports.record import Finding, Report
from tests.faults.traces import plants
from tests.faults.traces.bench import patched
from tests.parity.conftest import unwrapped

IDS = tuple((7 * i + i * i) % 61 + 1 for i in range(150))
KNOWN = {"live.packing": "pack", "live.crop": "state"}
"""What transformers 5.24 is known for: told of no boundary, linear layers leak; a cropped cache keeps its state."""


@pytest.fixture(scope="module")
def target(hybrid: Path) -> Target:
    """Three linear layers and a full one, hidden 32."""
    return load_target(TargetSpec(model=str(hybrid), dtype="float32"))


@pytest.fixture(scope="module")
def healthy(target: Target) -> Report:
    """All experiments on it."""
    return run_live(target, ids=IDS)


def found(report: Report, name: str) -> Finding:
    """The finding of that experiment."""
    return next(finding for finding in report.findings if finding.name == f"live.{name}")


def test_healthy_model(healthy: Report) -> None:
    assert [f.name for f in healthy.findings] == [f"live.{name}" for name in EXPERIMENTS]
    for finding in healthy.findings:
        assert finding.outcome == ("warn" if finding.name in KNOWN else "pass"), finding.sentence
        assert finding.fault == KNOWN.get(finding.name)
    trials = healthy.table("live.trials")
    assert {row[0] for row in trials.rows} >= {
        "padding",
        "batch",
        "split",
        "lengths",
        "attention",
        "positions",
    }
    told = [row for row in trials.rows if row[0] == "packing" and str(row[1]).startswith("boundaries")]
    assert {row[6] for row in told} == {"skipped"} and "causal_conv1d" in str(told[0][7]), "a refusal is said"


class Stack:
    """What `trace_plants` wants of a bench: the model it changes."""

    def __init__(self, target: Target, operator: Callable[..., Any]) -> None:
        self._target, self.operator = target, operator

    def target(self) -> Target:
        return self._target


def noisy_batches(_: Any) -> Any:
    """Products whose rounding depends on the number of rows."""

    def change(body: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = body(x, weight, bias)
        return out * (1 + 1e-3 * (x.shape[0] - 1)) if x.ndim == 3 else out

    return patched(torch.nn.functional, "linear", change)


def keeps_positions(bench: Any) -> Any:
    """Every forward after the first adds five to the positions, as stale offsets do."""
    calls = []

    def change(body: Any, module: Any, x: Tensor, positions: Tensor) -> Any:
        calls.append(1)
        late = positions.clone()
        late[..., 20:] += 5 * (len(calls) > 1)
        return body(module, x, late)

    return patched(type(bench.target().model.model.rotary_emb), "forward", change)


def short_requests_suffer(bench: Any) -> Any:
    """The last partial chunk is not written."""
    return plants.delta(plants.last_chunk_zero)(bench)


FAULTS: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    # experiment: fault, its name, words of the sentence
    "padding": (plants.unmasked, "fail", "pad", "pads reach real tokens, from token 0 on"),
    "batch": (noisy_batches, "fail", "invar", "the batch changes the result"),
    "split": (plants.forgotten_window, "fail", "state", "the convolution's window (3 rows) does not survive"),
    "lengths": (short_requests_suffer, "fail", "tail", "a request's length changes its earlier tokens"),
    "attention": (plants.masked(lambda m: m.triu(-31)), "fail", "attn", "attention sees other keys"),
    "positions": (plants.rotary(lambda f: f**1.1), "fail", "pos", "the positions are others than declared"),
    "operators": (
        plants.delta(plants.no_l2norm),
        "fail",
        "numeric",
        "queries and keys not normalised explains it",
    ),
    "projections": (
        plants.quantised_activations,
        "fail",
        "quant",
        "inputs in int8, one scale a token explains it",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_experiment_speaks_on_its_fault(
    name: str, target: Target, change_operator: Callable[..., Any]
) -> None:
    plant, outcome, fault, words = FAULTS[name]
    with ExitStack() as stack:
        stack.enter_context(plant(Stack(target, change_operator)))
        finding = found(run_live(target, ids=IDS, only=[name]), name)
    assert (finding.outcome, finding.fault) == (outcome, fault), finding.sentence
    assert words in finding.sentence and finding.next_step


def test_positions_of_a_second_forward(target: Target, change_operator: Callable[..., Any]) -> None:
    with keeps_positions(Stack(target, change_operator)):
        finding = found(run_live(target, ids=IDS, only=["positions"]), "positions")
    assert (finding.outcome, finding.fault) == ("fail", "pos")


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (plants.delta(plants.garbled), "no policy explains it"),
        (plants.delta(plants.epsilon(1e-3)), "l2 epsilon 1e-3 explains it"),
        (plants.delta(plants.rounded_state), "state in bfloat16 between chunks explains it"),
        (plants.delta(plants.rounded_gate), "gate in bfloat16 explains it"),
        (plants.conv(plants.shifted_conv), "the convolution of layer 0"),
    ],
)
def test_operator_oracle_tells_policies_apart(
    plant: Callable[[Any], Any], words: str, target: Target, change_operator: Callable[..., Any]
) -> None:
    with plant(Stack(target, change_operator)):
        finding = found(run_live(target, ids=IDS, only=["operators"]), "operators")
    assert finding.outcome == "fail" and words in finding.sentence, finding.sentence


def pair(*kinds: str) -> Diagnosis:
    """A diagnosis that two dumps left open."""
    return Diagnosis(kinds=kinds, sentence="s", next_step="n", evidence=(), asked=(), live="l")


def test_decision(target: Target, change_operator: Callable[..., Any]) -> None:
    kinds = ("POS", "ATTN")
    only = experiments_for(kinds)
    assert set(only) == {"attention", "positions"}
    undecided = run_live(target, ids=IDS, only=only, diagnosis=pair(*kinds)).findings[0]
    assert (undecided.name, undecided.outcome) == ("live.decision", "warn")
    assert "the fault is the other side's" in undecided.sentence
    with plants.scaled(Stack(target, change_operator)):  # type: ignore[arg-type]
        decided = run_live(target, ids=IDS, only=only, diagnosis=pair(*kinds)).findings[0]
    assert (decided.outcome, decided.fault) == ("fail", "attn")
    assert not any(
        f.name == "live.decision"
        for f in run_live(target, ids=IDS, only=only, diagnosis=pair("POS")).findings
    )


def test_another_backend_ran_is_no_pass(target: Target) -> None:
    """Asked for golden in a process that computes with torch."""
    report = run_live(target, ids=IDS, only=["batch"], backend="golden")
    first = report.findings[0]
    assert (first.name, first.outcome, first.fault) == ("live.proof", "fail", "dispatch")


def test_messages(target: Target) -> None:
    with pytest.raises(ParityError, match="no such experiment"):
        run_live(target, ids=IDS, only=["wishing"])
    with pytest.raises(ParityError, match="3 tokens"):
        run_live(target, ids=IDS[:3])
    with pytest.raises(ParityError):
        run_live("/nowhere/at/all", ids=IDS)


def test_dense_model_skips_what_it_lacks(models: dict[str, Path]) -> None:
    report = run_live(
        str(models["llama"]), ids=IDS[:80], only=["operators", "attention", "positions", "split"]
    )
    assert found(report, "operators").outcome == "skipped"
    assert {found(report, name).outcome for name in ("attention", "positions", "split")} == {"pass"}


def test_formulas_by_hand(target: Target) -> None:
    """Attention of two tokens and the rotary table of one position, worked out here."""
    q, k, v = (torch.tensor(x).reshape(1, 1, 2, 1) for x in ([1.0, 2.0], [1.0, 3.0], [10.0, 20.0]))
    out = causal_attention(q, k, v, 0.5).flatten()
    weight = torch.softmax(torch.tensor([1.0, 3.0], dtype=torch.float64), 0)  # .5 * 2 * [1, 3]
    torch.testing.assert_close(
        out, torch.stack([torch.tensor(10.0).double(), 10 * weight[0] + 20 * weight[1]])
    )
    reference = rotary_reference(target, 3)
    assert not isinstance(reference, str)
    theta = float(target.config.rope_parameters["rope_theta"])
    width = reference[0].shape[1]
    assert float(reference[0][2, 1]) == pytest.approx(
        float(torch.cos(torch.tensor(2 * theta ** (-2 / width), dtype=torch.float64)))
    )


def test_tokens_come_from_the_request_where_it_begins() -> None:
    class Request:
        def __init__(self, name: str, ids: tuple[int, ...]) -> None:
            self.id, self.token_ids = name, ids

    requests = [Request("a", (1, 2)), Request("b", (3, 4, 5))]
    assert tokens_of(requests, "a") == (1, 2)  # type: ignore[arg-type]
    assert tokens_of(requests, None) == (3, 4, 5)  # type: ignore[arg-type]


def test_joined_keeps_both(healthy: Report) -> None:
    both = add_experiments(healthy, healthy)
    assert len(both.findings) == 2 * len(healthy.findings) and both.title == healthy.title


def test_command(hybrid: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without A and B: the experiments alone. Their names are in every form."""
    code = cli.run(["compare", "--live", str(hybrid), "--out", str(tmp_path / "r")])
    out = capfd.readouterr().out
    assert code == 0 and "live.padding" in out and "live.crop  fault: state" in out
    assert "live.trials" in (tmp_path / "r" / "report.json").read_text()
    assert cli.run(["compare"]) == 2
    assert "name A and B, or a model with --live" in unwrapped(capfd.readouterr().err)
