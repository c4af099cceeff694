"""`parity check`: starts the workers, gathers the evidence, asks the probes, answers the suspicions.

    report = check()                              # the embedded target and the built-in trainer
    report = check(recipe="recipe.yaml")          # the recipe's target, and the built-in trainer by that recipe
    report = check(recipe="recipe.yaml", adapter="mine.py:Mine")
    report = check(model="path/to/model", prompts=Path("prompts.jsonl"))

Two workers run at a time: torch (with golden) and the backend held against it; the trainer is asked in this
process meanwhile. A worker that dies, or a job that fails, leaves its traces absent with the reason; the
probes that need them say skipped.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from parity.capturing.client import Worker, WorkerCrash, capture_with, tokenize
from parity.capturing.prompts import Prompt, read_prompts
from parity.environment import environment
from parity.errors import ParityError
from parity.model.target import backends
from parity.probes import ask
from parity.probes.base import CAPTURE_DTYPES, Evidence, ProbeAnswer
from parity.probes.table import TABLE
from parity.reports.record import Finding, Report, Suspicion, Value, Verdict
from parity.tracing.trace import Trace

if TYPE_CHECKING:
    from parity.model.recipe.config import Recipe, TargetPart, TrainingFile

FLOOR_BATCH = 4
"""Rows of the batch whose noise is measured."""
BLOCK = 8
"""Tokens a verify block holds in the serving check."""
GENERIC_PROMPTS = (
    "The speed of light in a vacuum is a constant, and it follows that two observers who move apart",
    "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 3]))",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long is the ride?\nAnswer:",
)
"""For a user's model without prompts of their own: prose, code and a question."""


def check(
    *,
    recipe: "str | Path | TrainingFile | Recipe | None" = None,
    adapter: str | None = None,
    only: Sequence[str] = (),
    model: str | None = None,
    prompts: Path | None = None,
    backend: str | None = None,
    loader: str | None = None,
    revision: str | None = None,
    device_map: str | None = None,
    max_tokens: int = 160,
    traces: Path | None = None,
    threads: int = 1,
    hide: Sequence[str] = (),
) -> Report:
    """Everything before training, as a report.

    `recipe` is a training file or a preset's name; its target is checked, and the trainer that `adapter` names (the
    built-in one by default) is asked what it really does. `model` checks a target alone. Neither: the embedded
    target and the preset `tiny`. `only` names the probes to ask; all by default. `traces` is a folder that keeps the
    captured traces (replaced if it is an earlier run's); None keeps none. `hide` names modules that the other
    backend's worker must not find. Raises ParityError for what the user can put right.
    """
    began = time.monotonic()
    ask.check_names(only, [entry.name for entry in TABLE])
    declared = _load_declared(recipe, adapter, model)
    asked = [entry for entry in TABLE if not only or entry.name in only]
    target = _named_target(declared, adapter)
    nothing = target is None and model is None
    examined = (
        None
        if nothing or not any(entry.asks == "traces" for entry in asked)
        else (
            _choose_check_target(
                model, target, prompts, backend, loader, revision, device_map, max_tokens, threads, hide
            )
        )
    )
    if traces is not None:
        _refuse_foreign(traces)  # now, not after a minute of work
    evidence, answers, trainer = None, list[tuple[str, ProbeAnswer]](), None
    names = [entry.name for entry in asked if entry.asks == "trainer"]
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory(prefix="parity-") as scratch:
        folder, question = Path(scratch), None
        with _progress(examined) as step:
            if declared is not None and names:
                import torch

                torch.set_num_threads(threads)
                opened = ask.open_adapter(adapter or "builtin", declared)
                question = pool.submit(
                    ask.ask_trainer, declared, opened, only=names, say=lambda name: step("trainer", name)
                )
            if examined is not None:
                evidence = _CapturePlan(examined, folder, step).evidence()
                traced = [entry for entry in asked if entry.asks == "traces"]
                answers = [(entry.name, _run_probe(entry, evidence)) for entry in traced]
            if question is not None:
                trainer = question.result()
                answers += trainer.answers
        report = _report(examined, evidence, answers, trainer, _recipe(declared), began)
        if traces is not None and evidence is not None:
            _keep(folder, traces)
    return report


def _load_declared(
    recipe: "str | Path | TrainingFile | Recipe | None", adapter: str | None, model: str | None
) -> "TrainingFile | Recipe | None":
    """The declared wiring: a file, a preset, `tiny` where nothing was named, None for a target alone."""
    from parity.model.recipe.config import load_declared
    from parity.model.recipe.presets import PRESETS, preset

    if recipe is None:
        if adapter is not None:
            do = "name the training file that this trainer is declared to follow, or a preset"
            raise ParityError(f"--adapter {adapter} without a recipe", "nothing to hold it against", do)
        return None if model is not None else preset("tiny")
    if not isinstance(recipe, str | Path):
        return recipe
    known = str(recipe) in PRESETS and not Path(recipe).exists()
    return preset(str(recipe)) if known else load_declared(recipe)


def _recipe(declared: "TrainingFile | Recipe | None") -> "Recipe | None":
    from parity.model.recipe.config import TrainingFile

    return declared.recipe if isinstance(declared, TrainingFile) else declared


def _named_target(declared: "TrainingFile | Recipe | None", adapter: str | None) -> "TargetPart | None":
    """The recipe's target where it is a model that can be captured; a user's own adapter may name anything."""
    recipe = _recipe(declared)
    if recipe is None or recipe.target.model.startswith("synthetic:"):
        return None
    own = adapter is not None and adapter not in ask.SHIPPED
    return None if own and recipe.target.model.endswith(".py") else recipe.target


def _choose_check_target(
    model: str | None,
    target: "TargetPart | None",
    prompts: Path | None,
    backend: str | None,
    loader: str | None,
    revision: str | None,
    device_map: str | None,
    max_tokens: int,
    threads: int,
    hide: Sequence[str],
) -> "CheckTarget":
    """The target to capture: the one named, else the recipe's, else the embedded one."""
    from parity.model.tiny.embedded import resolve

    model = None if model is None else resolve(model)
    if target is not None and target.model != "embedded:hybrid":
        model = model or resolve(target.model)
        loader, revision = loader or target.loader, revision or target.revision
        if backend is None and target.backend not in ("torch", "golden"):
            backend = target.backend
    other = backends.parse_backend(
        backend or ("fla" if backends.missing(backends.parse_backend("fla")) is None else "fla-interpreted")
    )
    why = backends.missing(other)
    if backend is not None and (why or other.name in ("torch", "golden")):
        raise ParityError(
            f"torch against {other.name}",
            why or "every check holds torch against golden already",
            "name another backend that runs here, or none: `parity env` lists them",
        )
    return CheckTarget(
        model=model,
        loader=loader or "AutoModelForCausalLM",
        revision=revision,
        # Both sides on one device: the kernels are to differ, not the machine.
        device_map=device_map or (backends.device_map(other) if why is None else None),
        max_tokens=max_tokens,
        threads=threads,
        hide=tuple(hide),
        prompts=_prompts(model, prompts),
        other=other.name,
    )


UNREAD: dict[str, Any] = {
    "layer_types": [],
    "kept_float32": [],
    "unchecked": "the target could not be read",
    "parameters": 0,
    "class": "unknown",
}
"""What is known of a target whose worker died before it could say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTarget:
    """What is examined."""

    model: str | None
    prompts: tuple[Prompt, ...]
    loader: str
    revision: str | None
    device_map: str | None
    max_tokens: int
    threads: int
    other: str
    hide: tuple[str, ...]

    @property
    def path(self) -> str:
        """Name or path of the model; the embedded one, checked, where none was named."""
        if self.model is not None:
            return self.model
        from parity.model.tiny.embedded import find_embedded_target

        return str(find_embedded_target("hybrid"))

    def spec(self, dtype: str, **changes: Any) -> dict[str, Any]:
        """The `TargetSpec` fields."""
        return {
            "model": self.path,
            "revision": self.revision,
            "dtype": dtype,
            "loader": self.loader,
            "device_map": self.device_map,
        } | changes


def _prompts(model: str | None, file: Path | None) -> tuple[Prompt, ...]:
    """The user's prompts, or built-in ones: one row of the embedded corpus, or generic text."""
    if file is not None:
        return tuple(read_prompts(file))
    if model is not None:
        return tuple(Prompt(id=f"built-in-{i}", text=text) for i, text in enumerate(GENERIC_PROMPTS))
    from parity.model.tiny.corpus import conversation

    return (
        Prompt(
            id="conversation", messages=tuple(dict(message) for message in conversation(1, "held_out", 170))
        ),
    )


class _CapturePlan:
    """Runs the captures of both workers and keeps what came of them."""

    def __init__(self, subject: CheckTarget, folder: Path, step: Callable[[str, str], None]) -> None:
        self.subject, self.folder, self.step = subject, folder, step
        self.traces: dict[str, Trace] = {}
        self.absent: dict[str, str] = {}
        self.crashes: dict[str, tuple[str, str]] = {}
        self.operators: dict[str, Path] = {}
        self.self_tests: dict[str, tuple[float, float]] = {}
        self.target: dict[str, Any] = dict(UNREAD)
        self.requests: list[dict[str, Any]] = []
        self._known, self._plain = threading.Event(), {dtype: threading.Event() for dtype in CAPTURE_DTYPES}

    def evidence(self) -> Evidence:
        """Gather with two workers at a time. Raises ParityError where the target itself cannot be examined."""
        with ThreadPoolExecutor(2) as pool:
            # The reference is needed first, since its trouble (a wrong path, say) is the user's to put right.
            reference, other = (
                pool.submit(self._run_worker, self._torch),
                pool.submit(self._run_worker, self._other),
            )
            try:
                reference.result()
                other.result()
            finally:
                self._open_gates()
        return Evidence(
            other=self.subject.other,
            traces=self._in_order(),
            absent=self.absent,
            crashes=self.crashes,
            operators=self.operators,
            self_tests=self.self_tests,
            target=self.target,
        )

    def _in_order(self) -> dict[str, Trace]:
        """Traces in the order a reader expects, not in that of two racing workers."""
        return {name: self.traces[name] for name in sorted(self.traces)}

    def _run_worker(self, part: Callable[[], None]) -> None:
        try:
            part()
        finally:
            if part == self._torch:
                self._open_gates()

    def _open_gates(self) -> None:
        for event in (self._known, *self._plain.values()):
            event.set()

    def _torch(self) -> None:
        """Everything that torch computes: references first, then floors, golden, loaders and serving modes."""
        subject = self.subject
        with Worker("torch", threads=subject.threads) as worker:
            self.step("torch", "reading the target")
            if not self._try("the target", worker, lambda: self._read_target(worker), required=True):
                return
            self._known.set()
            for dtype in ("bf16", "fp32"):
                self._capture(worker, f"torch.{dtype}", dtype, record=True, required=True)
                self._plain[dtype].set()
                self._capture(worker, f"torch.{dtype}.rerun", dtype)
                self._capture(worker, f"torch.{dtype}.batch", dtype, rows=FLOOR_BATCH)
            self._capture(worker, "torch.fp32.decode", "fp32", mode="decode")
            self._capture(worker, "torch.fp32.blocks", "fp32", mode=f"blocks:{BLOCK}")
            self._capture(worker, "golden", "fp32", golden=True)
            for dtype in CAPTURE_DTYPES:
                self._golden_operators(worker, dtype)
            self._loaders(worker)

    def _read_target(self, worker: Worker) -> None:
        """Token ids of the prompts, and the structure of the target."""
        subject = self.subject
        self.requests = tokenize(
            worker, subject.path, subject.prompts, revision=subject.revision, max_tokens=subject.max_tokens
        )
        self.target |= worker.call("describe", spec=subject.spec("bfloat16"))

    def _golden_operators(self, worker: Worker, dtype: str) -> None:
        if f"torch.{dtype}" in self.operators:
            name, out = f"golden.{dtype}", self.folder / f"golden.{dtype}.operators.safetensors"
            if self._try(
                name,
                worker,
                lambda: worker.call(
                    "replay", calls=str(self.operators[f"torch.{dtype}"]), out=str(out), golden=True
                ),
            ):
                self.operators[name] = out

    def _loaders(self, worker: Worker) -> None:
        """The target through other loaders; with A_log and dt_bias rounded; and inside a wrapper."""
        if self.target["kept_float32"]:
            self._capture(worker, "loading.rounded", "fp32", spec={"round_float32": True})
        if self.subject.loader == "AutoModel":
            self.absent["loading.AutoModel"] = (
                "AutoModel is the loader that everything else was captured with"
            )
        else:
            self._capture(worker, "loading.AutoModel", "fp32", spec={"loader": "AutoModel"})
        if self.subject.model is not None:
            for name in ("loading.wrapper", "loading.wrapped-text"):
                self.absent[name] = "only the embedded target is wrapped on the spot"
            return
        wrapped = self.folder / "wrapped"
        if self._try(
            "loading.wrapper", worker, lambda: worker.call("wrap", model=self.subject.path, out=str(wrapped))
        ):
            self._capture(
                worker,
                "loading.wrapper",
                "fp32",
                spec={"model": str(wrapped), "loader": "AutoModelForImageTextToText"},
            )
            self._capture(worker, "loading.wrapped-text", "fp32", spec={"model": str(wrapped)})

    def _other(self) -> None:
        """The backend held against torch: whole passes, then layers fed torch's input."""
        name = self.subject.other
        names = [f"other.{dtype}{kind}" for kind in ("", ".local") for dtype in CAPTURE_DTYPES]
        try:
            worker = Worker(name, threads=self.subject.threads, hide=self.subject.hide)
        except ParityError as error:
            self.absent |= dict.fromkeys(names, error.found)
            return
        with worker:
            if name == "fla-interpreted":
                for dtype in CAPTURE_DTYPES.values():
                    self._self_test(worker, dtype)
            self._known.wait()
            if "linear_attention" not in self.target["layer_types"]:
                why = (
                    "the target could not be read"
                    if self.target == UNREAD
                    else "no linear-attention layer in this model"
                )
                self.absent |= dict.fromkeys(names, why)
                return
            for dtype in ("bf16", "fp32"):
                self._capture(worker, f"other.{dtype}", dtype)
                self._plain[dtype].wait()
                self._capture(worker, f"other.{dtype}.local", dtype, record=True, local_from=f"torch.{dtype}")

    def _self_test(self, worker: Worker, dtype: str) -> None:
        def run() -> None:
            result = worker.call("self_test", dtype=dtype)
            self.self_tests[dtype] = (result["error"], result["limit"])

        self.step("other", f"self-test in {dtype}")
        self._try(f"self-test.{dtype}", worker, run)

    def _capture(
        self,
        worker: Worker,
        name: str,
        dtype: str,
        *,
        record: bool = False,
        required: bool = False,
        spec: dict[str, Any] | None = None,
        local_from: str | None = None,
        **options: Any,
    ) -> None:
        """One trace by name; where it fails, `absent` says why. `required` lets a user's error through."""
        if local_from is not None:
            if local_from not in self.traces:
                self.absent[name] = f"{local_from} was not captured"
                return
            options["local_from"] = str(self.traces[local_from].path)
        out, calls = self.folder / name, self.folder / f"{name}.operators.safetensors"
        self.step("torch" if worker.backend == "torch" else "other", name)

        def run() -> None:
            capture_with(
                worker,
                self.subject.spec(CAPTURE_DTYPES[dtype], **(spec or {})),
                self.requests,
                out,
                operators=str(calls) if record else None,
                **options,
            )
            self.traces[name] = Trace.open(out)
            if record:
                self.operators[name] = calls

        self._try(name, worker, run, required=required)

    def _try(self, name: str, worker: Worker, run: Callable[[], Any], *, required: bool = False) -> bool:
        """Whether `run` came through; where not, the reason is kept, and a crash becomes a finding."""
        if worker.backend in self.crashes:
            self.absent[name] = f"the {worker.backend} worker {self.crashes[worker.backend][0]}"
            return False
        try:
            run()
        except ParityError as error:
            if required:  # without it there is nothing to check: the user's to put right
                raise
            self.absent[name] = error.found
            return False
        except WorkerCrash as crash:
            self.absent[name] = str(crash)
            self.crashes[worker.backend if crash.dead else f"{worker.backend}.{name}"] = (
                f"{crash.found}, at {name}",
                crash.tail,
            )
            return False
        return True


def _run_probe(entry: Any, evidence: Evidence) -> ProbeAnswer:
    """One probe's answer; a probe that breaks is a finding `error`, and the others go on."""
    import traceback

    try:
        answer: ProbeAnswer = entry.load().run(evidence)
    except Exception:
        lines = traceback.format_exc().strip().splitlines()
        return ProbeAnswer(
            findings=(
                Finding(
                    name=entry.name,
                    outcome="error",
                    sentence=f"the probe itself broke: {lines[-1]}",
                    evidence=(("traceback", "\n".join(lines[-12:])),),
                    next_step="report it to parity with this report",
                ),
            )
        )
    return answer


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspicionRule:
    """A suspicion, the findings (by prefix) that answer it, and what to say where nothing was tested."""

    name: str
    findings: tuple[str, ...]
    asks: Literal["target", "trainer"] = "target"
    needs_all: bool = False
    """True where each of the findings is needed: one that was skipped leaves the question open."""


SUSPICIONS = (
    SuspicionRule(name="the kernels that were asked for never ran", findings=("dispatch",)),
    SuspicionRule(
        name="the kernels compute another function",
        findings=("kernels.fp32",),
        needs_all=True,
    ),
    SuspicionRule(
        name="the bf16 kernels differ by more than rounding",
        findings=("kernels.bf16",),
        needs_all=True,
    ),
    SuspicionRule(name="an operator is wrong by itself", findings=("operators",), needs_all=True),
    SuspicionRule(name="torch's fallback itself is wrong", findings=("golden",)),
    SuspicionRule(
        name="it matters how the target is loaded",
        findings=("loading.AutoModel", "loading.wrapper", "loading.wrapped-text"),
    ),
    SuspicionRule(name="weights are random or were not loaded", findings=("loading.weights",)),
    SuspicionRule(name="the states are not finite", findings=("finite",)),
    SuspicionRule(name="decoding or verifying gives other states than prefill", findings=("serving",)),
    SuspicionRule(name="runs or batch sizes change the states", findings=("floor",)),
    *(
        SuspicionRule(name=name, findings=(probe,), asks="trainer")
        for name, probe in (
            ("fc is fed other layers than declared", "inputs"),
            ("noise reaches the labels, or drafting", "noise"),
            ("the loss is not the declared one", "loss"),
            ("slots are trained on the wrong tokens", "labels"),
            ("a block sees what serving will not have", "context"),
            ("the teacher's logits are not the target's own", "teacher"),
            ("drafting computes something else than training", "decode"),
            ("something frozen trains, or something else does not", "frozen"),
            ("an interrupted run is another run", "resume"),
            ("the exported checkpoint means something else to its reader", "export"),
            ("part of the data is never trained on", "coverage"),
            ("a step's tensors are not what they seem", "shapes"),
            ("the server sends other tokens than training saw", "tokens"),
        )
    ),
)


def summarise_suspicions(
    findings: Sequence[Finding], unasked: Mapping[str, str] | None = None
) -> tuple[Suspicion, ...]:
    """The table a check ends with: ruled out, found, or not tested because.

    unasked: `target`, `trainer` or a probe's name -> why nobody asked it, where nobody did.
    """
    return tuple(_judge_suspicion(question, findings, unasked or {}) for question in SUSPICIONS)


def _judge_suspicion(
    question: SuspicionRule, findings: Sequence[Finding], unasked: Mapping[str, str]
) -> Suspicion:
    """One row of the table, from the findings whose names begin as the question says."""
    mine = [f for f in findings if any(f"{f.name}.".startswith(f"{name}.") for name in question.findings)]
    failed = [f for f in mine if f.outcome == "fail"]
    unproven = [f for f in failed if f.fault == "dispatch"] if question.findings != ("dispatch",) else []
    unanswered = [f for f in mine if f.outcome in ("error", "skipped", "warn")]
    passed = [f for f in mine if f.outcome == "pass"]
    verdict: Verdict = "not tested"
    if unproven:
        because = f"the captures are no evidence: {unproven[0].sentence}"
    elif failed:
        verdict, because = "found", failed[0].sentence
    elif not passed or (unanswered and question.needs_all) or any(f.outcome == "error" for f in mine):
        nobody = unasked.get(question.findings[0]) or unasked.get(question.asks, "no probe asked")
        because = unanswered[0].sentence if unanswered else nobody
    else:
        verdict, because = "ruled out", passed[0].sentence
        if unanswered:
            because += f" ({len(unanswered)} of {len(mine)} checks gave no answer)"
    return Suspicion(
        name=question.name, verdict=verdict, because=because, findings=tuple(f.name for f in mine)
    )


def _report(
    subject: "CheckTarget | None",
    evidence: Evidence | None,
    answers: Sequence[tuple[str, ProbeAnswer]],
    trainer: "ask.WiringAnswers | None",
    recipe: "Recipe | None",
    began: float,
) -> Report:
    findings = tuple(finding for _, answer in answers for finding in answer.findings)
    tables = tuple(table for _, answer in answers for table in answer.tables)
    machine, facts, title = environment(), list[tuple[str, Value]](), []
    if subject is not None and evidence is not None:
        machine |= (
            evidence.traces["torch.fp32"].manifest.environment if "torch.fp32" in evidence.traces else {}
        )
        facts += _target_facts(subject, evidence)
        name = "embedded target" if subject.model is None else subject.model
        title.append(f"{name}: torch against {subject.other}")
    if trainer is not None and recipe is not None:
        facts += [("trainer", trainer.adapter), ("recipe", recipe.hash), ("its target", recipe.target.model)]
        title.append(f"{trainer.adapter} against its recipe")
    return Report(
        kind="check",
        title="; ".join(title) or "nothing",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=" ".join(["parity", *sys.argv[1:]]),
        subject=tuple(facts),
        findings=findings,
        suspicions=summarise_suspicions(findings, _explain_untested(subject, trainer, recipe)),
        tables=tables,
        environment=tuple(sorted(machine.items())),
        seconds=round(time.monotonic() - began, 1),
        conformance=None if trainer is None else trainer.conformance,
    )


def _explain_untested(
    subject: "CheckTarget | None", trainer: "ask.WiringAnswers | None", recipe: "Recipe | None"
) -> dict[str, str]:
    """Why a whole side was not asked, or one probe of the trainer's."""
    why = dict(trainer.conformance.unanswered) if trainer is not None else {}
    if why.keys() == {"adapter"} and trainer is not None and not trainer.conformance.statements:
        why["trainer"] = "see the finding adapter"
    if subject is None:
        why["target"] = "not among the probes that were asked"
        if recipe is not None and _named_target(recipe, "") is None:
            why["target"] = f"the target {recipe.target.model} is no model that transformers loads"
    if trainer is None:
        why["trainer"] = "not among the probes that were asked"
        if recipe is None:
            why["trainer"] = "no trainer was asked: give a recipe, and --adapter for another trainer"
    return why


def _target_facts(subject: "CheckTarget", evidence: Evidence) -> list[tuple[str, Value]]:
    """What was captured of the target."""
    reference = evidence.traces.get("torch.fp32")
    requests = reference.requests if reference else ()
    calls = sum(
        call.calls
        for name, trace in evidence.traces.items()
        if name.startswith("other.")
        for call in trace.manifest.backend.calls
        if call.operator == "delta"
    )
    return [
        ("target", "embedded hybrid target" if subject.model is None else subject.model),
        ("class", evidence.target["class"]),
        ("parameters", evidence.target["parameters"]),
        ("layers", len(evidence.target["layer_types"])),
        ("linear layers", len(evidence.linear)),
        ("requests", len(requests)),
        ("tokens", sum(len(request.token_ids) for request in requests)),
        ("backends", f"torch against {subject.other}"),
        (f"delta-rule calls on {subject.other}", calls),
    ]


TRACES_MARK = "made-by-parity-check"


def _refuse_foreign(traces: Path) -> None:
    """Raise ParityError where the folder for the traces holds something that parity did not put there."""
    if traces.exists() and not (traces / TRACES_MARK).is_file():
        raise ParityError(f"traces in {traces}", "a folder that parity did not make", "choose another --out")


def _keep(folder: Path, traces: Path) -> None:
    """Put the traces where the user asked for them; an earlier run's are replaced, anything else is not."""
    _refuse_foreign(traces)
    if traces.exists():
        shutil.rmtree(traces)
    traces.parent.mkdir(parents=True, exist_ok=True)
    (folder / TRACES_MARK).touch()
    shutil.copytree(folder, traces, ignore=shutil.ignore_patterns("wrapped", "*.operators.safetensors"))


@contextmanager
def _progress(subject: "CheckTarget | None") -> Iterator[Callable[[str, str], None]]:
    """What each worker is doing, on standard error where that is a terminal; silent where it is not."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    names = (
        {"trainer": "trainer"}
        if subject is None
        else {"torch": "torch", "other": subject.other, "trainer": "trainer"}
    )
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        tasks = {name: bar.add_task(f"{shown}: starting") for name, shown in names.items()}
        yield lambda worker, doing: bar.update(tasks[worker], description=f"{names[worker]}: {doing}")
