"""pytest plug-in: compare two traces in a test, and a fixture that captures them.

    from parity.pytest_plugin import assert_parity

    def test_my_port(capture_parity):
        ours = capture_parity("path/to/model", [[1, 2, 3, 4]], backend="fla")
        assert_parity(ours, "golden/trace", policy="parity.yaml")

pytest finds it by its entry point once parity is installed. It costs a run that does not use it nothing: torch is
loaded by the first capture or comparison.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parity.errors import ParityError
from parity.files import write_atomically

if TYPE_CHECKING:
    from parity.policy import Policy
    from parity.reports.record import Report
    from parity.tracing.trace import Trace

Prompts = str | Path | Sequence[str | Sequence[int]]
Capture = Callable[..., "Trace"]
BAD_OUTCOMES = ("error", "fail")


def assert_parity(
    a: "str | Path | Trace",
    b: "str | Path | Trace",
    policy: "str | Path | Policy | Mapping[str, Any] | None" = None,
    *,
    golden: "str | Path | Trace | None" = None,
    floor: str | Path | None = None,
    taps: Sequence[str] | None = None,
    baseline: "str | Path | Report | None" = None,
) -> "Report":
    """Compare candidate `a` with reference `b`, and let the gate decide.

    Args:
        a: The candidate: a trace, or another tool's dump.
        b: The reference.
        policy: A file, its content, or a `Policy`: limits per tap, allowed skips, expected failures until they expire.
        golden: A float64 trace of the same prompts, which judges both.
        floor: A JSON file with measured benign differences, or a trace's folder to measure them from.
        taps: Names or globs of taps; all by default.
        baseline: An earlier report, of which nothing may have become worse.

    Returns:
        The gate's report, where it passes or warns.

    Raises:
        AssertionError: The gate does not pass (the findings in words), or nothing was compared.
        ParityError: Something cannot be read.
    """
    __tracebackhide__ = True
    from parity.commands.compare import compare_sides, report_sides
    from parity.errors import NothingComparable
    from parity.gating.gate import gate

    # Nothing compared is a failed test, never a pass.
    rules = _policy(policy)
    try:
        comparison, pair = compare_sides(a, b, golden=golden, floor=floor, policy=rules, taps=taps)
        report = report_sides(comparison, pair, "assert_parity")
        verdict = gate(report, policy=rules, baseline=baseline)
    except NothingComparable as error:
        raise AssertionError(f"nothing was compared\n{error}") from None
    if verdict.outcome not in ("pass", "warn"):
        raise AssertionError(_in_words(verdict))
    return verdict


def _policy(policy: "str | Path | Policy | Mapping[str, Any] | None") -> "Policy":
    """The policy as a model, from whatever way it was given."""
    from parity.policy import Policy, policy_from

    if isinstance(policy, (str, Path)):
        return Policy.load(Path(policy))
    if isinstance(policy, Mapping):
        return policy_from(policy, "policy given to assert_parity")
    return policy or Policy()


def _in_words(verdict: "Report") -> str:
    """The findings that stop the gate, the worst first, each with what to do."""
    bad = [finding for outcome in BAD_OUTCOMES for finding in verdict.findings if finding.outcome == outcome]
    if not bad:
        skipped = [f"{finding.name}: {finding.sentence}" for finding in verdict.findings]
        return "\n".join(["nothing was compared", *skipped])
    lines = [f"{len(bad)} of {len(verdict.findings)} findings do not pass"]
    for finding in bad:
        fault = f" (fault: {finding.fault})" if finding.fault else ""
        lines += [
            f"{finding.outcome.upper()} {finding.name}{fault}: {finding.sentence}",
            f"  next: {finding.next_step}",
        ]
        lines += [f"  {name} = {value}" for name, value in finding.evidence if "\n" not in str(value)]
    return "\n".join(lines)


@pytest.fixture(scope="session")
def capture_parity(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Captures one trace: `capture_parity(model, prompts, backend="torch", **options)` gives an opened `Trace`.

    `prompts` are texts, lists of token ids, or a prompt file; `options` are those of `parity.capture`. The same
    request is captured once a session. A test fails where the trace does not prove the backend that was asked for, or
    the worker dies; `pytest.skip` is not decided here, so that a machine without the backend cannot pass unnoticed.
    """
    made: dict[str, Trace] = {}
    folder: list[Path] = []

    def capture(model: str | Path, prompts: Prompts, *, backend: str = "torch", **options: Any) -> "Trace":
        __tracebackhide__ = True
        from parity.tracing.trace import Trace

        if not folder:
            folder.append(tmp_path_factory.mktemp("parity"))
        request = {"model": str(model), "prompts": _content(prompts), "backend": backend, **options}
        key = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()[:16]
        if key not in made:
            out = folder[0] / key
            _capture(out, str(model), _file(prompts, out.with_suffix(".jsonl")), backend, options)
            made[key] = Trace.open(out)
        return made[key]

    return capture


def _content(prompts: Prompts) -> str:
    """What the prompts are, to tell one request from another."""
    if not isinstance(prompts, (str, Path)):
        return json.dumps(prompts)
    path = Path(prompts)
    return f"{path.resolve()} {path.read_text(encoding='utf-8') if path.is_file() else ''}"


def _file(prompts: Prompts, file: Path) -> Path:
    """A prompt file: the one that was named, or one written from texts and token ids."""
    if isinstance(prompts, (str, Path)):
        return Path(prompts)
    if not prompts:
        raise ParityError("capture_parity", "no prompt", "give texts, lists of token ids, or a prompt file")
    lines = [
        {"id": f"r{n}", **({"prompt": each} if isinstance(each, str) else {"token_ids": list(each)})}
        for n, each in enumerate(prompts)
    ]
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines))
    return file


def _capture(out: Path, model: str, prompts: Path, backend: str, options: Mapping[str, Any]) -> None:
    """Capture, and fail the test where the trace is no evidence."""
    __tracebackhide__ = True
    from parity.capturing.client import WorkerCrash, capture_to

    try:
        result = capture_to(out, model=model, prompts=prompts, backend=backend, **options)
    except WorkerCrash as crash:
        pytest.fail(f"{crash}\n{crash.tail}", pytrace=False)
    if not result.valid:
        pytest.fail("\n".join(result.lines()), pytrace=False)
