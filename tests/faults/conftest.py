"""The benches of injected trace faults, made once: two targets, their healthy traces."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.tracing.trace import Trace
from tests.faults.traces.bench import Bench, embedded_bench, wide_bench

BENCHES = {"embedded": embedded_bench, "wide": wide_bench}


@pytest.fixture(scope="session")
def benches(
    change_operator: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Bench]:
    """The embedded target and a wider random hybrid."""
    return {name: build(tmp_path_factory.mktemp(name), change_operator) for name, build in BENCHES.items()}


@pytest.fixture(scope="session")
def healthy_traces(benches: dict[str, Bench]) -> dict[str, Trace]:
    """Each bench's requests, computed as they should be."""
    return {name: bench.plain() for name, bench in benches.items()}


@pytest.fixture
def forget(healthy_traces: dict[str, Trace]) -> Iterator[Callable[[Trace], Trace]]:
    """Marks a trace to be removed when the test ends: hundreds of them would fill a disk."""
    marked: list[Path] = []

    def mark(trace: Trace) -> Trace:
        marked.append(trace.path)
        return trace

    yield mark
    kept = {trace.path for trace in healthy_traces.values()}
    for path in set(marked) - kept:
        shutil.rmtree(path, ignore_errors=True)
