"""A run that is started again by itself where a fault ended it: `--max-restarts`.

The run is a child process, and this process does nothing but wait for it. What was wrong in the input, or the user's
own Ctrl-C, ends it for good; a fault (an engine that is lost for good, Ray's death, the run's own process killed) has
it go on from its last checkpoint, or from the beginning where there is none yet. What the child writes to standard
output and standard error is what the command writes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slipstream.observe.files import to_json
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.resume import conclude

FAULT = 75
"""How a child says that a fault ended it: EX_TEMPFAIL of sysexits.h, 'try again later'."""

FAILED = 1
# How long a killed run's watchdog may take to clean up before the next attempt begins all the same.
CLEANUP_S = 15.0
LOOK_S = 0.2
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Attempts:
    """A command of this program that is run up to `max_restarts` times more than once.

    `arguments` are those of the command; `run_dir` is where its run is, and `can_resume` whether it may go on there.
    """

    def __init__(
        self, arguments: Sequence[str], *, run_dir: Path, can_resume: bool, as_json: bool, max_restarts: int
    ) -> None:
        self._arguments = list(arguments)
        self._run_dir = run_dir
        self._can_resume = can_resume
        self._as_json = as_json
        self._max_restarts = max_restarts
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self) -> int:
        """Run the command to its end; the exit code that it would have had, of the last attempt."""
        with self._forwarding_signals():
            for restarts in range(self._max_restarts + 1):
                code = self._attempt()
                if self._is_stopped or (code >= 0 and code != FAULT):
                    return _exit_code(code)
                if self._has_finished():
                    # Killed in its very last moments.
                    summary = conclude(RunDirectory.open(self._run_dir))
                    if self._as_json:
                        print(to_json(summary), flush=True)
                    return 0
                self._tell(code, restarts)
        return _exit_code(code)

    def _tell(self, code: int, restarts: int) -> None:
        cause = "a fault ended it" if code == FAULT else f"it was killed by {signal.Signals(-code).name}"
        if restarts < self._max_restarts:
            next_step = f"is started again ({restarts + 1} of at most {self._max_restarts} times, --max-restarts)"
        else:
            next_step = f"is not started again, after {restarts} times (--max-restarts)"
        print(f"the run in {self._run_dir} {next_step}: {cause}", file=sys.stderr, flush=True)

    def _attempt(self) -> int:
        """One child process; its exit code, which is the negative number of the signal where one ended it."""
        command = [sys.executable, "-m", "slipstream.attempts", str(os.getpid()), *self._next_arguments()]
        # In a group of its own: Ctrl-C goes to this process, and from here to the child, once.
        self._child = subprocess.Popen(command, process_group=0)
        if self._is_stopped:
            self._child.send_signal(signal.SIGTERM)
        code = self._child.wait()
        if code < 0:
            _await_cleanup(self._child.pid)
        return code

    def _next_arguments(self) -> list[str]:
        if self._can_resume and (self._run_dir / "config.yaml").exists() and self._child is not None:
            return ["resume", str(self._run_dir), *["--json"] * self._as_json]
        return self._arguments

    def _has_finished(self) -> bool:
        return (self._run_dir / "config.yaml").exists() and RunDirectory.open(self._run_dir).finished

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        def forward(number: int, _frame: FrameType | None) -> None:
            self._is_stopped = True
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _exit_code(code: int) -> int:
    """What a command returns whose process ended with that code; a shell adds 128 to the number of a signal."""
    if code == FAULT:
        return FAILED
    return 128 - code if code < 0 else code


def _await_cleanup(pid: int) -> None:
    """Wait until the watchdog of a run that was killed has removed what is left of it (cluster/remains.py)."""
    deadline = time.monotonic() + CLEANUP_S
    while list(Path("/tmp").glob(f"slipstream-ray-{pid}-*")) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def attempt(parent: int, arguments: Sequence[str]) -> int:
    """In the child: the command; its exit code is FAULT where it may succeed when it is run again.

    A parent that is killed takes the run along, by the polite way out.
    """
    from slipstream.cli import main

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # It was gone before the line above.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main(arguments, fault_code=FAULT)


if __name__ == "__main__":
    # What is left are the arguments of the command, as the run notes them down.
    sys.exit(attempt(int(sys.argv.pop(1)), sys.argv[1:]))
