"""What only a GPU can show; skipped elsewhere. `make test ARGS="-m gpu"` on a machine that has one."""

from pathlib import Path

import pytest
import torch

from parity.capturing.client import capture_to
from parity.commands import check
from parity.environment import package_version
from parity.kernel.sums import pair_stats
from parity.model.dflash.config import DrafterConfig, layer_rules
from parity.model.dflash.drafter import AttentionKind, Drafter
from parity.model.dflash.mask import training_layout
from parity.model.target.backends import missing, parse_backend
from parity.tracing.trace import Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_check_against_fla_on_the_gpu(tmp_path: Path) -> None:
    """The check picks fla by itself, proves it on every linear layer, and fp32 agrees."""
    report = check.check(traces=tmp_path / "traces")
    outcomes = {finding.name: finding.outcome for finding in report.findings}
    assert outcomes["dispatch"] == outcomes["kernels.fp32.gate"] == outcomes["kernels.bf16.gate"] == "pass", (
        outcomes
    )
    proof = Trace.open(tmp_path / "traces/other.fp32").manifest.backend
    assert {call.implementation for call in proof.calls if call.operator == "delta"} == {"fla"}
    manifest = Trace.open(tmp_path / "traces/other.fp32").manifest
    assert manifest.environment["$TRITON_F32_DEFAULT"] == "ieee" and "False" in manifest.environment["tf32"]


def test_causal_conv1d_is_proven(tmp_path: Path) -> None:
    if missing(parse_backend("fast")) is not None:
        pytest.skip(f"causal-conv1d: {package_version('causal-conv1d')}")
    from parity.model.tiny.embedded import find_embedded_target

    (tmp_path / "p.jsonl").write_text('{"token_ids": [5, 6, 7, 8, 9, 10, 11, 12]}')
    result = capture_to(
        tmp_path / "t",
        model=str(find_embedded_target("hybrid")),
        prompts=tmp_path / "p.jsonl",
        backend="fast",
    )
    assert result.valid, result.problems


def test_statistics_of_cuda_tensors_equal_those_of_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 256, generator=generator).bfloat16() for _ in range(2))
    cpu, gpu = pair_stats(a, b), pair_stats(a.cuda(), b.cuda())
    assert torch.allclose(torch.from_numpy(cpu.relative_l2()), torch.from_numpy(gpu.relative_l2()), rtol=1e-6)


def gradients(attention: AttentionKind, device: str) -> list[torch.Tensor]:
    """The drafter's gradients on seeded blocks: one full and one sliding causal layer."""
    config = DrafterConfig(
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        conditioning=2,
        block_size=4,
        mask_token_id=1,
        layers=layer_rules(["full_attention", "sliding_attention"], 8),
    )
    generator = torch.Generator().manual_seed(1)
    drafter = Drafter(config)
    drafter.reset(generator)
    drafter.to(device)
    position, document = torch.arange(64, device=device), torch.zeros(64, dtype=torch.long, device=device)
    layout = training_layout(position, document, torch.tensor([3, 17, 40], device=device), 4)
    states, blocks = (
        torch.randn(*shape, generator=generator).to(device) for shape in ((64, 128), (3, 4, 64))
    )
    # A random direction: after the last norm the square of the output hardly depends on anything.
    direction = torch.randn(3, 4, 64, generator=generator).to(device)
    (drafter(states, blocks, layout, attention=attention) * direction).sum().backward()
    return [parameter.grad.cpu() for parameter in drafter.parameters() if parameter.grad is not None]


def test_flex_attention_trains_as_sdpa_does() -> None:
    """float32, forward and backward; the same seeds on CPU give the same gradients, too."""
    flex, sdpa, cpu = gradients("flex", "cuda"), gradients("sdpa", "cuda"), gradients("sdpa", "cpu")
    assert len(flex) == len(sdpa) == len(cpu) > 10
    for other in (sdpa, cpu):
        for a, b in zip(flex, other, strict=True):
            assert float((a - b).norm()) <= 1e-4 * float(b.norm())
