"""The pytest plug-in, run inside pytest: what passes, what fails, and what a person reads then."""

import json
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.errors import ParityError
from parity.pytest_plugin import assert_parity
from parity.tracing.trace import Trace

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
WriteTrace = Callable[..., Trace]


def states(noise: float = 0.0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Three layers of [20, 32] float32, off by `noise` relative."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(3):
        clean = torch.randn(20, 32, generator=generator)
        found[f"layer.{layer}.out"] = clean * (1 + noise * torch.randn(20, 32, generator=generator))
    return found


def test_equal_traces_give_the_gates_report(write_trace: WriteTrace) -> None:
    a, b = write_trace("a", {"r": states()}), write_trace("b", {"r": states()})
    for left, right in ((a, b), (a.path, str(b.path))):
        assert assert_parity(left, right).outcome == "pass"


def test_a_difference_is_told_in_words(write_trace: WriteTrace) -> None:
    a, b = write_trace("a", {"r": states(0.01)}), write_trace("b", {"r": states()})
    with pytest.raises(AssertionError) as error:
        assert_parity(a, b)
    said = str(error.value).splitlines()
    assert said[0] == "1 of 5 findings do not pass"
    assert said[1].startswith("FAIL compare.gate: semantic gate: 3 of 3 taps outside, first layer.0.out")
    assert said[2].startswith("  next: ") and "  taps outside = 3" in said


@pytest.mark.parametrize(
    ("policy", "passes"),
    [
        ({"taps": {"*": {"min_cosine": 0.99}}}, True),
        ({"taps": {"*": {"min_cosine": 0.999999}}}, False),
        ({"taps": {"*": {"min_cosine": 0.99}, "logits": {"min_cosine": 0.9}}}, False),  # judged nothing
        ({"gate": {"expected": [{"finding": "*.gate", "because": "b", "until": "2999-01-01"}]}}, True),
        ({"gate": {"expected": [{"finding": "*.gate", "because": "b", "until": "2020-01-01"}]}}, False),
    ],
)
def test_policies(write_trace: WriteTrace, tmp_path: Path, policy: dict[str, Any], passes: bool) -> None:
    a, b = write_trace("a", {"r": states(0.01)}), write_trace("b", {"r": states()})
    (tmp_path / "p.json").write_text(json.dumps(policy))
    for given in (policy, tmp_path / "p.json"):
        if passes:
            assert_parity(a, b, given)
        else:
            with pytest.raises(AssertionError, match="findings do not pass"):
                assert_parity(a, b, given)


def test_a_wrong_policy_names_the_nearest_key(write_trace: WriteTrace) -> None:
    a = write_trace("a", {"r": states()})
    with pytest.raises(ParityError, match=r"(?s)taps.\*.min_cos.*write 'min_cosine'"):
        assert_parity(a, a, {"taps": {"*": {"min_cos": 1}}})


def test_nothing_compared_fails(write_trace: WriteTrace) -> None:
    a = write_trace("a", {"r": states()}, tokens={"r": range(20)})
    b = write_trace("b", {"r": states()}, tokens={"r": range(20, 40)})
    with pytest.raises(AssertionError, match="nothing was compared"):
        assert_parity(a, b)
    one = {"layer.0.out": torch.ones(1, 8)}  # no control changes it: the gate has no power
    with pytest.raises(AssertionError, match="nothing was compared"):
        assert_parity(write_trace("c", {"r": one}), write_trace("d", {"r": one}))


def plugin() -> tuple[str, ...]:
    """How to load the plug-in inside pytest: by name where this environment was installed before it existed."""
    installed = [point.value for point in entry_points(group="pytest11")]
    return () if "parity.pytest_plugin" in installed else ("-p", "parity.pytest_plugin")


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """pytester, whose processes find the package of this tree also where it is not installed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return pytester


def test_the_entry_point_is_declared() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert points == {"parity.pytest_plugin": "parity.pytest_plugin"}


@pytest.mark.slow  # three workers, each importing transformers anew
def test_the_fixture_captures_once_and_the_assertion_reads_well(inner: pytest.Pytester, hybrid: Path) -> None:
    inner.makepyfile(
        f"""
        from parity.pytest_plugin import assert_parity
        MODEL, PROMPTS = {str(hybrid)!r}, [[1, 2, 3, 4, 5, 6], [9, 8, 7]]
        seen = []

        def test_same(capture_parity):
            a = capture_parity(MODEL, PROMPTS, dtype="float32")
            seen.append(a)
            assert a.requests[0].token_ids == (1, 2, 3, 4, 5, 6)
            assert assert_parity(a, a.path).outcome == "pass"

        def test_captured_once(capture_parity):
            assert capture_parity(MODEL, PROMPTS, dtype="float32") is seen[0]

        def test_other_dtype_is_no_parity(capture_parity):
            assert_parity(capture_parity(MODEL, PROMPTS, dtype="bfloat16"), seen[0])

        def test_no_evidence(capture_parity):
            capture_parity(MODEL, PROMPTS, backend="fla-interpreted", dtype="float32", hide=("fla",))

        def test_no_prompt(capture_parity):
            capture_parity(MODEL, [])
        """
    )
    result = inner.runpytest_subprocess(*plugin(), "-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "*AssertionError: 2 of * findings do not pass*",
            "*FAIL compare.structure: *",
            "dispatch FAILED, this trace is no evidence:",
            "*do this: give texts, lists of token ids, or a prompt file*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py:*: in capture*")  # our own frames are no help


def test_a_run_that_does_not_use_it_loads_nothing(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        "import sys\ndef test_x(): assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()"
    )
    inner.runpytest_subprocess(*plugin(), "-q").assert_outcomes(passed=1)
