"""What this machine would run: versions, devices, and the variables that can change numbers.

Read without importing torch unless it is imported already, so that it costs nothing to ask.
"""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "flash-linear-attention",
    "fla-core",
    "triton",
    "causal-conv1d",
    "kernels",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
)
PREFIXES = (
    "FLA_",
    "TRITON_",
    "TORCH_",
    "CUBLAS_",
    "PYTORCH_",
    "NVIDIA_TF32",
    "OMP_",
    "MKL_",
    "USE_HUB_KERNELS",
    "CUDA_",
    "ATEN_CPU_CAPABILITY",
    "DNNL_",
    "ONEDNN_",
)
"""Variables that can change numbers or kernels. No prefix here may catch a secret: reports are shown around."""


def environment() -> dict[str, str]:
    """Versions, devices and variables, by name. `absent` stands for a package that is not installed."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
    }
    found |= {name: package_version(name) for name in PACKAGES}
    found |= _devices()
    found |= {f"${name}": value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    return found


def package_version(name: str) -> str:
    """The installed version of a distribution, or `absent`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def cpu_name() -> str:
    """The processor's name as the kernel gives it; the machine type where it gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _devices() -> dict[str, str]:
    """What torch would compute with, where it is imported and can say: devices, precision, order of sums."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {
        "torch threads": str(torch.get_num_threads()),
        "cuda": str(torch.version.cuda),
        "cpu capability": str(torch.backends.cpu.get_cpu_capability()),
        "matmul precision": str(torch.get_float32_matmul_precision()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = torch.cuda.get_device_name(index)
        found["cudnn"] = str(torch.backends.cudnn.version())
        matmul = torch.backends.cuda.matmul
        found["tf32"] = f"matmul {matmul.allow_tf32}, cudnn {torch.backends.cudnn.allow_tf32}"
        found["16-bit sums"] = (
            f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, "
            f"fp16 {matmul.allow_fp16_reduced_precision_reduction}"
        )
    return found
