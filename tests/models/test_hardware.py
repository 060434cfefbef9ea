"""What is concluded from what a machine has."""

import subprocess
import sys

import pytest

from slipstream.errors import ConfigError
from slipstream.models import hardware
from slipstream.models.hardware import Hardware, attention_kernel, detect_hardware, resolve_dtype


def on_cpu_with(flags: str, tmp_path, monkeypatch) -> Hardware:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nflags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(hardware, "CPU_INFORMATION", file)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return detect_hardware()


@pytest.mark.parametrize(
    ("flags", "native", "dtype"),
    [("avx2", False, "float32"), ("avx512f avx512_bf16", True, "bfloat16"), ("amx_bf16", True, "bfloat16")],
)
def test_a_cpu_computes_in_bfloat16_only_where_it_has_it(flags, native, dtype, tmp_path, monkeypatch):
    found = on_cpu_with(flags, tmp_path, monkeypatch)
    assert (found.device, found.collective_backend, found.gpus) == ("cpu", "gloo", 0)
    assert (found.native_bfloat16, found.dtype) == (native, dtype)
    assert found.cpus >= 1 and found.weight_channel == "shared_memory"
    assert resolve_dtype("auto", found) == dtype


def test_a_machine_that_does_not_say_has_no_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_INFORMATION", tmp_path / "missing")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert detect_hardware().dtype == "float32"


def test_a_gpu_is_used_where_there_is_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    found = detect_hardware()
    assert (found.device, found.collective_backend, found.dtype, found.gpus) == ("cuda", "nccl", "bfloat16", 2)


def test_a_type_that_was_asked_for_is_kept():
    machine = Hardware("cpu", "float32", "gloo", "shared_memory", False, 2, 0)
    assert resolve_dtype("bfloat16", machine) == "bfloat16"
    assert resolve_dtype("float32", machine) == "float32"
    with pytest.raises(ConfigError, match="'float16'"):
        resolve_dtype("float16", machine)


def test_the_gpu_kernel_is_for_16_bit_types_on_a_gpu():
    assert attention_kernel("cuda", "bfloat16") == "varlen"
    assert attention_kernel("cuda", "float32") == "sdpa"
    assert attention_kernel("cpu", "bfloat16") == "sdpa"


def test_importing_it_does_not_import_torch():
    program = "import sys, slipstream.models.hardware; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
