"""What this machine has, and what follows from it: the one module that knows CPU from GPU.

Device, type of the weights, collective backend, weight channel and attention kernel are all decided here; everything
else takes them as values. torch is imported inside the functions, so that dry runs and the doctor answer at once.
The GPU answers follow the documentation of the libraries and have not been run.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
AttentionKernel = Literal["sdpa", "varlen"]

CPU_INFORMATION = Path("/proc/cpuinfo")
# Processor flags that mean bfloat16 products are computed by the hardware. Without them a bfloat16 product is
# emulated, many times slower than float32.
NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class Hardware:
    """The machine as the rest of Slipstream sees it. `cpus` are those this process may use."""

    device: Device
    dtype: Dtype
    collective_backend: Literal["gloo", "nccl"]
    weight_channel: Literal["shared_memory", "gloo"]
    native_bfloat16: bool
    cpus: int
    gpus: int


def detect_hardware() -> Hardware:
    """Look at this machine. Imports torch (a second) to count GPUs."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    native_bfloat16 = torch.cuda.is_bf16_supported() if gpus else cpu_has_native_bfloat16()
    return Hardware(
        device="cuda" if gpus else "cpu",
        dtype="bfloat16" if native_bfloat16 else "float32",
        collective_backend="nccl" if gpus else "gloo",
        weight_channel="shared_memory",
        native_bfloat16=native_bfloat16,
        cpus=len(os.sched_getaffinity(0)),
        gpus=gpus,
    )


def resolve_dtype(dtype: str, hardware: Hardware) -> Dtype:
    """The type of the weights: "auto" becomes what the hardware computes natively. Raises ConfigError for others."""
    if dtype == "auto":
        return hardware.dtype
    if dtype == "float32":
        return "float32"
    if dtype == "bfloat16":
        return "bfloat16"
    raise ConfigError(f"model.dtype: found {dtype!r}, expected 'auto', 'float32' or 'bfloat16'")


def attention_kernel(device: str, dtype: str) -> AttentionKernel:
    """Which kernel computes packed attention for tensors of this kind.

    "varlen" is torch's variable-length FlashAttention: CUDA and 16-bit types only. "sdpa" runs anywhere.
    """
    return "varlen" if device == "cuda" and dtype in ("bfloat16", "float16") else "sdpa"


def cpu_has_native_bfloat16() -> bool:
    if not CPU_INFORMATION.exists():
        return False
    for line in CPU_INFORMATION.read_text().splitlines():
        if line.startswith("flags"):
            return not NATIVE_BFLOAT16_FLAGS.isdisjoint(line.split())
    return False
