"""The table of probes compared with everything that relies on it: what an entry forgets fails here.

Whoever adds a probe runs this file and reads its failures: a missing entry, a fault that no entry or no table names, a
capture that no plan makes, a method that no adapter has, a suspicion that is not there.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import parity.probes
from parity.commands.plan import CAPTURE_STEPS, FLOORS, OPERATORS, plan_steps
from parity.gating.baseline import WIRING
from parity.model.recipe.presets import preset
from parity.probes.adapters.base import Adapter
from parity.probes.adapters.builtin import Builtin
from parity.probes.deviations import DEVIATIONS
from parity.probes.query import query_adapter
from parity.probes.table import TABLE, ProbeEntry, find_entry, list_suspicions

PROMISED = (
    "the kernels that were asked for never ran",
    "the kernels compute another function",
    "the bf16 kernels differ by more than rounding",
    "an operator is wrong by itself",
    "torch's fallback itself is wrong",
    "it matters how the target is loaded",
    "weights are random or were not loaded",
    "the states are not finite",
    "decoding or verifying gives other states than prefill",
    "runs or batch sizes change the states",
    "fc is fed other layers than declared",
    "noise reaches the labels, or drafting",
    "the loss is not the declared one",
    "slots are trained on the wrong tokens",
    "a block sees what serving will not have",
    "the teacher's logits are not the target's own",
    "drafting computes something else than training",
    "something frozen trains, or something else does not",
    "an interrupted run is another run",
    "the exported checkpoint means something else to its reader",
    "part of the data is never trained on",
    "a step's tensors are not what they seem",
    "the server sends other tokens than training saw",
)
"""Suspicions that reports have named since the first version, in their order. People refer to them: none may go."""
FOLDER = Path(next(iter(parity.probes.__path__)))
TRACED = [entry for entry in TABLE if entry.asks == "traces"]
TRAINER = [entry for entry in TABLE if entry.asks == "trainer"]


def name_of(entry: ProbeEntry) -> str:
    return entry.name


def source(entry: ProbeEntry) -> ast.Module:
    folder = "target" if entry.asks == "traces" else "trainer"
    return ast.parse((FOLDER / folder / f"{entry.name}.py").read_text())


def texts(tree: ast.Module, *, keys: bool = True) -> set[str]:
    """Every string of a module; with or without those that are keys of dictionaries."""
    left = set() if keys else {k for node in ast.walk(tree) if isinstance(node, ast.Dict) for k in node.keys}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left
    }


def named_faults(tree: ast.Module) -> Iterator[str]:
    """Literal faults of findings, `fault="..."`, and names of `FoundDeviation`."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            key = "name" if ast.unparse(call.func) == "FoundDeviation" else "fault"
            for keyword in call.keywords:
                if keyword.arg == key and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def test_table_lists_every_probe() -> None:
    """One file, one entry, one class, one name."""
    for folder, asks in (("target", "traces"), ("trainer", "trainer")):
        files = {file.stem for file in (FOLDER / folder).glob("*.py")} - {"__init__"}
        assert {entry.name for entry in TABLE if entry.asks == asks} == files
    assert [entry.load().name for entry in TABLE] == [entry.name for entry in TABLE]


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_every_probe_answers_a_suspicion(entry: ProbeEntry) -> None:
    assert entry.suspicions and all(rule.name for rule in entry.suspicions)
    assert entry.guards and entry.needs_text and entry.needs and entry.faults


def test_a_suspicion_is_in_the_table_once() -> None:
    names = [rule.name for _, rule in list_suspicions()]
    assert len(set(names)) == len(names)
    assert [name for name in names if name in PROMISED] == list(PROMISED)


@pytest.mark.parametrize("entry", TRACED, ids=name_of)
def test_needs_of_a_trace_probe_are_captures(entry: ProbeEntry) -> None:
    captures = {step.name for step in CAPTURE_STEPS if step.does == "capture"}
    replays = {step.name for step in CAPTURE_STEPS if step.does == "replay"}
    recorded = {f"{name}{OPERATORS}" for name in captures | replays}
    assert set(entry.needs) <= captures | recorded | FLOORS.keys()
    assert plan_steps([entry])


@pytest.mark.parametrize("entry", TRAINER, ids=name_of)
def test_needs_of_a_wiring_probe_are_methods_of_an_adapter(entry: ProbeEntry) -> None:
    assert all(callable(getattr(Adapter, need, None)) and not need.startswith("_") for need in entry.needs)


@pytest.mark.parametrize("entry", TRAINER, ids=name_of)
def test_a_wiring_probe_calls_what_its_entry_names(
    entry: ProbeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method of the built-in trainer's adapter that a probe calls is among its needs, and all of those are."""
    called: set[str] = set()

    def record(method: str) -> Callable[..., Any]:
        own = getattr(Builtin, method)

        def call(self: Builtin, *args: Any, **options: Any) -> Any:
            called.add(method)
            return own(self, *args, **options)

        return call

    adapter = Builtin.open(preset("unit"))
    for method in [name for name, value in vars(Adapter).items() if callable(value) and name[0] != "_"]:
        monkeypatch.setattr(Builtin, method, record(method))
    ((_, answer),) = query_adapter(adapter, [entry.name], copies=False)
    assert answer.findings[0].outcome == "pass"
    # Reading the trainer's state before and after takes these two, whatever the probe needs.
    assert called | {"parameters", "optimizer"} == {*entry.needs, "parameters", "optimizer"}


@pytest.mark.parametrize("entry", TABLE, ids=name_of)
def test_a_fault_that_a_probe_names_is_in_its_entry(entry: ProbeEntry) -> None:
    """Both ways: literal names of the probe's file are in the entry, and the entry's names are in the source."""
    tree = source(entry)
    assert set(named_faults(tree)) - {"None"} <= set(entry.faults)
    if entry.asks == "trainer":
        assert texts(tree, keys=False) & DEVIATIONS.keys() <= set(entry.faults)
    files = [ast.parse(file.read_text()) for file in (FOLDER / "instruments").rglob("*.py")]
    written = texts(tree).union(*(texts(file) for file in files))
    built = {f"{prefix}{name}" for prefix in ("loss-", "teacher-") for name in written}
    assert set(entry.faults) <= written | built


def test_every_deviation_belongs_to_one_probe() -> None:
    """A row that no probe gives is dead; a name without a row has no sentence, and no next step."""
    given = [fault for entry in TRAINER for fault in entry.faults]
    assert len(set(given)) == len(given) and set(given) == DEVIATIONS.keys()


def test_a_gate_compares_what_every_wiring_probe_states() -> None:
    """A probe whose findings hold facts states wiring, and a gate compares it."""
    assert {entry.name for entry in TRAINER} | {"recipe", "conformance"} == WIRING
    assert not any(entry.states_wiring for entry in TRACED)


def test_find_entry_knows_no_other_name() -> None:
    assert find_entry("noise").states_wiring
    with pytest.raises(KeyError):
        find_entry("nois")
