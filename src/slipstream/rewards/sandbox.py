"""Runs a Python program that somebody untrusted wrote, a model above all, where it can do no harm.

The program is the only thing that runs: nothing of it is looked at, imported or evaluated here. A fresh process
(`isolation.py`) shuts it in before it starts. What that means on this machine is found out by trying, once a process,
and said by `describe_isolation`.
"""

import contextlib
import json
import logging
import marshal
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from slipstream.errors import RewardError
from slipstream.rewards.isolation import become_reaper, descendants, kill_descendants
from slipstream.rewards.leftovers import remove_folder
from slipstream.rewards.system_calls import system_call_filter

_logger = logging.getLogger(__name__)

Ending = Literal["finished", "time limit", "memory limit", "output limit"]

LIMITS: dict[str, Ending] = {"time": "time limit", "memory": "memory limit"}
"""The limits that `isolation.py` watches, by the names that it reports."""

END_S = 0.5
"""How long what a program that has ended wrote may take to arrive."""

GRACE_S = 10.0
"""How long setting up and cleaning up may take on a busy machine, on top of the program's own time."""

FLAGS = ("-s", "-P", "-B", "-X", "utf8")
"""No user site-packages, no modules from the working directory, no bytecode files, UTF-8 everywhere."""

ISOLATION = Path(__file__).with_name("isolation.py")

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # or a program that prints a set would be right today and wrong tomorrow
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of address space
    "OMP_NUM_THREADS": "1",
}
"""The environment of a program, HOME and TMPDIR apart. Nothing of ours is in it."""

PROBE = """
import json, os, socket, time
facts = {"network": True, "processes": 0}
try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation; a datagram socket sends nothing by this
except OSError:
    facts["network"] = False
try:
    while facts["processes"] < 100:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        facts["processes"] += 1
except OSError:
    pass
print(json.dumps(facts))
"""
PROBE_PROCESSES = 8


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use before it is stopped.

    `timeout_s` is wall-clock time. `memory_bytes` bounds the address space of each of its processes, and what all of
    them together have in memory. `disk_bytes` bounds its folder (with namespaces) and each file. `processes` counts
    threads too. `output_bytes` bounds standard output and standard error, each, and `report_bytes` the report.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 1 << 26
    processes: int = 32
    output_bytes: int = 1 << 20
    report_bytes: int = 1 << 20


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended and what it wrote, cut at the limit. Bytes that are not UTF-8 are replaced.

    `exit_code` is negative by a signal, and None unless `ending` is 'finished'. `report` is what was written to file
    descriptor 3. `seconds` includes starting and cleaning up.
    """

    ending: Ending
    exit_code: int | None
    output: str
    errors: str
    report: str
    seconds: float


@dataclass(frozen=True)
class Isolation:
    """What keeps a program in on this machine. `problem` says why there are no namespaces, None where there are."""

    namespaces: bool
    call_filter: bool
    problem: str | None = None


def run_program(
    program: str,
    *,
    stdin: str = "",
    modules: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    allow_weaker_isolation: bool = False,
) -> SandboxResult:
    """Run the text of a Python program and return how it ended. Must not be called while another thread forks.

    The working directory is empty and writable, and gone afterwards, as is everything that the program started.
    `modules` are texts of further files beside the program's own, by relative path.
    Raises RewardError if the program cannot be shut in: where there are no namespaces unless `allow_weaker_isolation`,
    and where even weaker isolation does not work. Whatever the program does is a result and raises nothing.
    """
    isolation = require_isolation(allow_weaker_isolation=allow_weaker_isolation)
    return _run({**(modules or {}), "program.py": program}, stdin, limits or SandboxLimits(), isolation)


def require_isolation(*, allow_weaker_isolation: bool) -> Isolation:
    """Return what is in force here; raises RewardError if it is less than asked for."""
    isolation = detect_isolation()
    if not isolation.namespaces and not allow_weaker_isolation:
        raise RewardError(
            f"programs cannot be kept from files and the network here: {isolation.problem}. Allow unprivileged user "
            "namespaces (in Docker: --security-opt seccomp=unconfined, on Ubuntu: sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0), or accept weaker isolation with the reward option "
            "allow_weaker_isolation: true"
        )
    return isolation


def describe_isolation() -> str:
    """One sentence for people: what keeps a program in on this machine. Tries it, in under a second."""
    try:
        isolation = detect_isolation()
    except RewardError as error:
        return f"none, programs are refused: {error}"
    calls = "system call filter" if isolation.call_filter else f"no system call filter for {os.uname().machine}"
    if isolation.namespaces:
        return f"namespaces (no network, no files of this machine), limits, {calls}"
    return f"weaker (files of this machine can be read): limits, {calls}; no namespaces: {isolation.problem}"


@cache
def detect_isolation() -> Isolation:
    """Find out what works here by running a small program. Raises RewardError if nothing does."""
    call_filter = system_call_filter() is not None
    full = Isolation(namespaces=True, call_filter=call_filter)
    problem = _problem_with(full)
    if problem is None:
        return full
    weaker = Isolation(namespaces=False, call_filter=call_filter, problem=problem)
    weaker_problem = _problem_with(weaker)
    if weaker_problem is not None:
        raise RewardError(
            f"programs cannot be shut in on this machine, so none is run. With namespaces: {problem}. Without: "
            f"{weaker_problem}. Run as a user other than root who may create user namespaces, or install Python where "
            "every user can read it"
        )
    return weaker


def _problem_with(isolation: Isolation) -> str | None:
    """What does not hold with an isolation, None where all does."""
    try:
        result = _run({"program.py": PROBE}, "", SandboxLimits(processes=PROBE_PROCESSES), isolation)
    except RewardError as error:
        return str(error)
    if result.exit_code != 0:
        return (
            f"a test program ended with {result.ending}, exit code {result.exit_code}: {result.errors[-200:].strip()}"
        )
    facts = json.loads(result.output)
    if facts["network"]:
        return "the network could be reached"
    if not 1 <= facts["processes"] <= 2 * PROBE_PROCESSES:
        return f"a test program limited to {PROBE_PROCESSES} processes could start {facts['processes']}"
    return None


def _python() -> tuple[str, list[str], list[str]]:
    """The interpreter that this one's environment was made from, the folders it needs, and those of its packages.

    A program finds the latter empty, or its reward would depend on what happens to be installed.
    """
    base = os.path.realpath(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [path for path in (f"{base}/bin", f"{base}/lib", f"{base}/lib64") if os.path.isdir(path)]
    packages = [f"{base}/lib/{name}/site-packages", f"{base}/lib/python3/dist-packages"]
    return os.path.realpath(f"{base}/bin/{name}"), folders, packages


def _run(files: dict[str, str], stdin: str, limits: SandboxLimits, isolation: Isolation) -> SandboxResult:
    if isolation.namespaces:
        return _run_in(None, files, stdin, limits, isolation)
    folder = tempfile.mkdtemp(prefix="slipstream-program-")
    before = set(descendants())
    become_reaper(True)  # a program may kill the process that watches it
    try:
        return _run_in(folder, files, stdin, limits, isolation)
    finally:
        kill_descendants(lambda: [process for process in descendants() if process not in before])
        become_reaper(False)
        try:
            remove_folder(folder)
        except OSError as error:
            _logger.warning("the folder %s of a program could not be removed: %s", folder, error)


def _run_in(
    folder: str | None, files: dict[str, str], stdin: str, limits: SandboxLimits, isolation: Isolation
) -> SandboxResult:
    python, folders, packages = _python()
    job = {
        **asdict(limits),
        "namespaces": isolation.namespaces,
        "filter": (system_call_filter() or b"").hex(),
        "files": files,
        "stdin": stdin,
        "python": python,
        "python_folders": folders,
        "empty_folders": packages,
        "flags": list(FLAGS),
        "environment": ENVIRONMENT,
        "folder": folder,
    }
    started = time.perf_counter()
    channels = _Channels(limits)
    descriptors = [channels.writers["status"], channels.writers["report"]]
    try:
        process = subprocess.Popen(
            [python, "-I", "-S", str(ISOLATION), *(str(number) for number in (*descriptors, os.getpid()))],
            stdin=channels.message(marshal.dumps(job)),
            stdout=channels.writers["output"],
            stderr=channels.writers["errors"],
            pass_fds=descriptors,
            env={"PATH": ENVIRONMENT["PATH"], "LANG": ENVIRONMENT["LANG"]},
            start_new_session=True,
        )
        channels.close_writers()
        stopped: Ending | None = None
        try:
            stopped = channels.collect(limits.timeout_s + GRACE_S, process.pid)
        finally:
            _end(process, kill=stopped is not None or sys.exc_info()[0] is not None)
        channels.collect(END_S)
    finally:
        channels.close()
    return _result(channels.received, stopped, limits, time.perf_counter() - started)


class _Channels:
    """The pipes between us and the process that runs a program, and what has come out of them."""

    NAMES = ("output", "errors", "report", "status")

    def __init__(self, limits: SandboxLimits) -> None:
        self._bounds = dict.fromkeys(self.NAMES, limits.output_bytes) | {"report": limits.report_bytes}
        pipes = {name: os.pipe() for name in self.NAMES}
        self.writers = {name: pipe[1] for name, pipe in pipes.items()}
        self._readers = {name: pipe[0] for name, pipe in pipes.items()}
        self._message: int | None = None
        self.received = {name: bytearray() for name in self.NAMES}

    def message(self, content: bytes) -> int:
        """A file that holds what the process reads first; it is in no folder."""
        self._message = os.memfd_create("job", os.MFD_CLOEXEC)
        with open(self._message, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(self._message, 0, os.SEEK_SET)
        return self._message

    def collect(self, timeout_s: float, process: int | None = None) -> Ending | None:
        """Read until every pipe has been closed at its other end; otherwise returns the limit that was passed.

        Where `process` has ended, what can be read is read, and whoever still holds a pipe is not waited for.
        """
        deadline = time.monotonic() + timeout_s
        has_ended = False
        ending = None if process is None else os.pidfd_open(process)
        with selectors.DefaultSelector() as selector, _closing(ending):
            for name, reader in self._readers.items():
                selector.register(reader, selectors.EVENT_READ, name)
            if ending is not None:
                selector.register(ending, selectors.EVENT_READ, None)
            while any(key.data is not None for key in selector.get_map().values()):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    return None if has_ended else "time limit"
                for key, _ in ready:
                    if key.data is None:
                        selector.unregister(key.fd)
                        has_ended = True
                        deadline = min(deadline, time.monotonic() + END_S)
                        continue
                    piece = os.read(key.fd, 1 << 16)
                    if not piece:
                        selector.unregister(key.fd)
                    self.received[key.data] += piece
                    if len(self.received[key.data]) > self._bounds[key.data]:
                        return "output limit"
        return None

    def close_writers(self) -> None:
        """Close the ends that the process has by now, so that its end closes the pipes."""
        while self.writers:
            os.close(self.writers.popitem()[1])

    def close(self) -> None:
        """Close everything. Safe to repeat."""
        self.close_writers()
        while self._readers:
            os.close(self._readers.popitem()[1])
        if self._message is not None:
            os.close(self._message)
            self._message = None


@contextlib.contextmanager
def _closing(descriptor: int | None) -> Iterator[None]:
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _end(process: "subprocess.Popen[bytes]", *, kill: bool) -> None:
    """Have the process gone, by itself if it has done its work; what it shut in goes with it."""
    if kill:
        process.terminate()  # without namespaces it then cleans up
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _result(
    received: dict[str, bytearray], stopped: Ending | None, limits: SandboxLimits, seconds: float
) -> SandboxResult:
    """Put together how it ended. Raises RewardError if the program was never started."""
    output, errors, report = (
        bytes(received[name][:bound]).decode("utf-8", "replace")
        for name, bound in (
            ("output", limits.output_bytes),
            ("errors", limits.output_bytes),
            ("report", limits.report_bytes),
        )
    )
    lines = received["status"].decode("utf-8", "replace").splitlines()
    if not lines and stopped is None:
        raise RewardError(
            f"the process that runs programs ended without a word: {errors[-500:].strip() or 'no reason'}"
        )
    last = lines[-1] if lines else ""
    kind, _, value = next((line for line in lines if line.startswith("error ")), last).partition(" ")
    if kind == "error":
        raise RewardError(f"a program could not be shut in: {value}")
    if stopped == "output limit" or (stopped is not None and kind in ("", "started")):
        return SandboxResult(stopped, None, output, errors, report, seconds)
    if kind == "limit":
        return SandboxResult(LIMITS.get(value, "time limit"), None, output, errors, report, seconds)
    # A program can only have done it itself if the process that watched it has ended before it told how.
    exit_code = int(value) if kind == "exit_code" else -signal.SIGKILL
    return SandboxResult("finished", exit_code, output, errors, report, seconds)
