"""Experiments on a live model: the same tokens computed in ways that must not matter, and parts against formulas.

Two dumps say what differs; a model says why. Each experiment can prove certain kinds of fault, and where
a diagnosis had to name two kinds, the one whose experiment fails here is it.

    report = live("path/to/model")                       # findings live.padding, live.packing, live.split, ...
    report = live(model, diagnosis=diagnosis, ids=ids)   # and live.decision
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from parity.diagnosis.records import MEANING, Diagnosis
from parity.errors import ParityError
from parity.live.experiments import EXPERIMENTS
from parity.live.harness import LAYERS, Experiment, ExperimentResult, ExperimentTrial, Harness
from parity.model.target.backends import device_map, isolate, missing, parse_backend
from parity.model.target.load import Target, load_target
from parity.model.target.spec import TargetSpec
from parity.model.target.taps import select_taps
from parity.reports.record import (
    Finding,
    Outcome,
    Report,
    Suspicion,
    Table,
    Value,
    Verdict,
    declare_columns,
)
from parity.tracing.trace import RequestEntry, layer_of

TOKENS = 150
"""Tokens of the request where none is given: beyond two chunks of the delta rule."""


def experiments_for(kinds: Sequence[str]) -> tuple[str, ...]:
    """The experiments that can prove one of these kinds."""
    return tuple(name for name, row in EXPERIMENTS.items() if set(row.proves) & set(kinds))


def run_live(
    model: str | Path | Target,
    *,
    ids: Sequence[int] | None = None,
    diagnosis: Diagnosis | None = None,
    only: Sequence[str] | None = None,
    dtype: str = "float32",
    backend: str = "torch",
    loader: str = "AutoModelForCausalLM",
    command: str = "",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run the experiments on a model and report them; with a `diagnosis` of two kinds, decide between them.

    Computes in this process, where another backend may have been chosen already; the call proof then fails the report.

    Args:
        model: A name, a folder, or a loaded target.
        ids: The tokens to compute; about 150 seeded random ones where none are given.
        diagnosis: Of two dumps, which may have left two kinds of fault open.
        only: Names of experiments; all by default.
        dtype: The dtype to load the model in.
        backend: The backend to compute on.
        loader: The class of transformers that loads the model.
        command: The command to state in the report.
        progress: Called with experiments done, experiments in all, and the name of the next.

    Raises:
        ParityError: A model that cannot be loaded, too few tokens, or an unknown experiment.
    """
    began = time.perf_counter()
    chosen = _select_experiments(only)
    lab = _prepare_harness(model, ids, dtype, backend, loader)
    results: list[ExperimentResult] = []
    for number, experiment in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen), experiment.name)
        results.append(experiment.run(lab))
    # What decides between two kinds comes first, then a backend that did not run, then each experiment.
    findings = [result.finding for result in results]
    if lab.problems:
        findings.insert(0, _report_wrong_backend(lab))
    decision = _decide(diagnosis, results, chosen)
    if decision is not None:
        findings.insert(0, decision)
    return Report(
        kind="compare",
        title=f"live experiments on {lab.target.spec.model}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        subject=(
            ("target", lab.target.spec.model),
            ("dtype", lab.target.dtype),
            ("backend", lab.backend.name),
            ("tokens", len(lab.ids)),
            ("taps", len(lab.taps)),
        ),
        findings=tuple(findings),
        suspicions=_answer_suspicions(results, chosen),
        tables=(_table_of_trials([trial for result in results for trial in result.trials]),),
        seconds=time.perf_counter() - began,
    )


def _select_experiments(only: Sequence[str] | None) -> list[Experiment]:
    names = list(EXPERIMENTS) if only is None else list(only)
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise ParityError(
            f"experiment {unknown[0]!r}", "no such experiment", f"use one of {', '.join(EXPERIMENTS)}"
        )
    return [EXPERIMENTS[name] for name in names]


def prepare(backend: str = "torch") -> None:
    """Choose the backend of this process, where nothing has chosen yet (transformers not imported).

    Raises ParityError for a backend that cannot run on this machine.
    """
    choice = parse_backend(backend)
    why = missing(choice)
    if why:
        raise ParityError(f"backend {backend}", why, "choose another --backend")
    if "transformers" not in sys.modules:
        isolate(choice)


def add_experiments(report: Report, experiments: Report) -> Report:
    """A comparison's report with the experiments' findings, suspicions and tables added to it."""
    return replace(
        report,
        findings=(*report.findings, *experiments.findings),
        suspicions=(*report.suspicions, *experiments.suspicions),
        tables=(*report.tables, *experiments.tables),
        subject=(*report.subject, *((f"live {key}", value) for key, value in experiments.subject)),
        seconds=report.seconds + experiments.seconds,
    )


def tokens_of(requests: Sequence[RequestEntry], worst: str | None) -> tuple[int, ...]:
    """Token ids of the request to experiment on: the one where the difference begins, else the longest."""
    chosen = next((entry for entry in requests if entry.id == worst), None)
    chosen = chosen or max(requests, key=lambda entry: len(entry.token_ids))
    return tuple(chosen.token_ids)


def _prepare_harness(
    model: str | Path | Target, ids: Sequence[int] | None, dtype: str, backend: str, loader: str
) -> Harness:
    """Load the model with the backend it is to run on."""
    prepare(backend)
    choice = parse_backend(backend)
    if isinstance(model, Target):
        target = model
    else:
        spec = TargetSpec(model=str(model), dtype=dtype, loader=loader, device_map=device_map(choice))
        with _hide_progress_bars():
            target = load_target(spec)
    given = _choose_tokens(target, ids)
    taps = [tap for tap in select_taps(target, None) if (layer := layer_of(tap)) is None or layer < LAYERS]
    return Harness(target=target, backend=choice, ids=given, taps=tuple(taps))


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Without transformers' progress bars: the report is what is to be read."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _choose_tokens(target: Target, ids: Sequence[int] | None) -> tuple[int, ...]:
    """The tokens of the experiments."""
    if ids is None:
        generator = np.random.default_rng(0)
        size = int(target.config.vocab_size)
        return tuple(generator.integers(min(16, size - 1), size, TOKENS).tolist())
    given = tuple(int(token) for token in ids)[: 2 * TOKENS]
    if len(given) < 8:
        raise ParityError(
            "live experiments on this request",
            f"{len(given)} tokens",
            "choose a request of more than 8 tokens, better of more than 130",
        )
    return given


def _report_wrong_backend(lab: Harness) -> Finding:
    """Another implementation ran than the requested one."""
    return Finding(
        name="live.proof",
        outcome="fail",
        fault="dispatch",
        sentence=f"the experiments did not run on {lab.backend.name}: {lab.problems[0]}",
        evidence=(("problems", len(lab.problems)), ("first", lab.problems[0])),
        next_step="start a fresh process for that backend, and repair what `parity env` shows",
    )


def _decide(
    diagnosis: Diagnosis | None, results: Sequence[ExperimentResult], chosen: Sequence[Experiment]
) -> Finding | None:
    """Between two kinds: the one whose experiment fails here."""
    if diagnosis is None or len(diagnosis.kinds) < 2:
        return None
    kinds = set(diagnosis.kinds)
    voices = [(row.name, r) for row, r in zip(chosen, results, strict=True) if kinds & set(r.proves)]
    # A warning is a known limit of a library, which every model of the family shows: it decides nothing.
    loud = [(name, r) for name, r in voices if r.finding.outcome == "fail"]
    known = [name for name, r in voices if r.finding.outcome == "warn"]
    found = [kind for kind in diagnosis.kinds if any(kind in r.proves for _, r in loud)]
    by = [name for name, _ in loud]
    candidates = experiments_for(diagnosis.kinds)
    evidence: tuple[tuple[str, Value], ...] = (
        ("kinds", diagnosis.name),
        ("experiments", ", ".join(candidates)),
        ("fail here", ", ".join(by) or "none"),
    )
    if len(found) == 1:
        kind = found[0]
        return Finding(
            name="live.decision",
            outcome="fail",
            fault=kind.lower(),
            sentence=f"{kind}, {MEANING[kind]}: of {diagnosis.name} it is this one that this model shows here "
            f"({', '.join(by)})",
            evidence=evidence,
            next_step=loud[0][1].finding.next_step,
        )
    # Both fail, or neither: what to do differs.
    why = (
        "both show here"
        if found
        else f"only what this library is known for shows here ({', '.join(known)})"
        if known
        else "neither shows on this model and machine: the fault is the other side's"
    )
    return Finding(
        name="live.decision",
        outcome="warn",
        fault=diagnosis.fault,
        sentence=f"{diagnosis.name} is not decided: {why}",
        evidence=evidence,
        next_step="run these experiments where the faulty side was computed"
        if not found
        else "repair what fails here and compare again",
    )


def _answer_suspicions(
    results: Sequence[ExperimentResult], chosen: Sequence[Experiment]
) -> tuple[Suspicion, ...]:
    """What a user may suspect, and what each experiment states about it."""
    verdicts: Mapping[Outcome, Verdict] = {"pass": "ruled out", "fail": "found", "warn": "found"}
    return tuple(
        Suspicion(
            name=row.suspicion,
            verdict=verdicts.get(result.finding.outcome, "not tested"),
            because=result.finding.sentence,
            findings=(result.finding.name,),
        )
        for row, result in zip(chosen, results, strict=True)
    )


def _table_of_trials(trials: Sequence[ExperimentTrial]) -> Table:
    """Every computation of every experiment."""
    rows: list[tuple[Value, ...]] = []
    for trial in trials:
        gap = trial.gap
        numbers: tuple[Value, ...] = (None, None, None, None, "skipped", trial.because)
        if gap is not None:
            numbers = (gap.tap, gap.onset, gap.error, gap.limit, "pass" if gap.within else "fail", "")
        rows.append((trial.experiment, trial.what, *numbers))
    columns = declare_columns(
        "experiment | trial | tap first tap outside, or nearest | token:int (position) | "
        "error:float worst token (relative L2) | limit:float | outcome:outcome | because"
    )
    return Table(
        name="live.trials",
        title="Trials",
        columns=columns,
        rows=tuple(rows),
        caption="Each against the request computed alone in one pass, by the floors of a comparison.",
    )
