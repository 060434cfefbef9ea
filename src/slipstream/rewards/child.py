"""The parent's side of one child process that runs a reward function.

`RewardChild` starts the process when it is needed, makes one call at a time, and kills the process, with everything
that it started, when a call runs past its limit. The pool of them is in `pool.py`, what runs inside is in `worker.py`.

The process is a fresh interpreter that inherits nothing but a socket. Neither fork (the actor has threads) nor
multiprocessing's spawn (it runs the main module again) would do.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.function import ScoredText
from slipstream.rewards.worker import FRAME_HEADER, WorkerSetup

START_TIMEOUT_S = 120.0
"""Longest wait for a child to start and to import the module of the reward function."""

KILL_GRACE_S = 0.5
"""Added to the time limit of a call before the process is killed: for the way there and back, and for a coroutine,
which is cancelled at the limit itself, to clean up."""

EXIT_TIMEOUT_S = 30.0
"""Longest wait for a killed process to be gone."""


@dataclass(frozen=True)
class RewardResult:
    """The score of one response. Either `reward` is a finite number, or `failure` says why there is none.

    `parts` are the named parts of the reward if the function gave any. `failure` begins with its kind: 'raised: ',
    'timed out after ', 'killed: ' or 'returned '. `seconds` is how long the call took, with all its attempts.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    seconds: float = 0.0


class RewardChild:
    """One child process, replaced when it has died or been killed. Not for concurrent calls."""

    def __init__(self, setup: WorkerSetup, working_directory: str) -> None:
        self._setup = setup
        self._working_directory = working_directory
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None where no process runs."""
        return None if self._process is None else self._process.pid

    async def ensure_running(self) -> None:
        """Start the process if there is none.

        Raises ConfigError if the function does not exist or its options do not fit, RewardError if its module cannot
        be imported or does not answer in time.
        """
        if self._process is not None and _has_ended(self._process):
            await self.kill()  # it died between two calls, of something left behind by an earlier one
        if self._process is None:
            try:
                await self._start()
            except BaseException:
                await self.kill()
                raise

    async def call(self, text: ScoredText) -> RewardResult:
        """Score one text within the time limit. Raises only what `ensure_running` raises."""
        await self.ensure_running()
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._setup.timeout_s + KILL_GRACE_S):
                return RewardResult(**await self._exchange(text))
        except TimeoutError:
            await self.kill()
            failure = f"timed out after {self._setup.timeout_s:g} s"
        except (ConnectionError, asyncio.IncompleteReadError):
            failure = f"killed: {_describe_exit(await self.kill())}"
        except BaseException:
            await self.kill()  # or its answer would be taken for that of the next call
            raise
        return RewardResult(None, failure=failure, seconds=time.perf_counter() - started)

    async def kill(self) -> int | None:
        """Kill the process and what it started, wait until it is gone, return its exit code. Safe to repeat."""
        process, self._process = self._process, None
        if process is None:
            return None
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        try:
            # The process leads a group of its own. It has not been waited for, so its id cannot be another's by now.
            os.killpg(process.pid, signal.SIGKILL)
            return await asyncio.to_thread(process.wait, EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise RewardError(
                f"the reward process {process.pid} is still there {EXIT_TIMEOUT_S:g} s after it was killed"
            ) from error

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "import sys; from slipstream.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to standard error: standard output is the run's own
                cwd=self._working_directory,
                env=self._environment(),
                start_new_session=True,
            )
        self._streams = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._exchange(self._setup)
        except TimeoutError as error:
            raise RewardError(
                f"the reward process did not import the reward function within {START_TIMEOUT_S:g} s"
            ) from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            how = _describe_exit(await self.kill())
            raise RewardError(f"the reward process ended while it imported the reward function: {how}") from error
        if "error" in answer:
            raise (ConfigError if answer["kind"] == "ConfigError" else RewardError)(answer["error"])

    def _environment(self) -> dict[str, str]:
        """The parent's environment and module path, one thread per numeric library, the working directory first."""
        path = [self._working_directory, *(entry for entry in sys.path if entry)]
        return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}

    async def _exchange(self, message: ScoredText | WorkerSetup) -> dict[str, Any]:
        """Send a message and wait for its answer. Raises ConnectionError or IncompleteReadError if the process ends."""
        if self._streams is None:
            raise ConnectionError("the process was killed")
        reader, writer = self._streams
        payload = pickle.dumps(message)
        writer.write(FRAME_HEADER.pack(len(payload)) + payload)
        await writer.drain()
        (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        answer: dict[str, Any] = json.loads(await reader.readexactly(size))
        return answer


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, without taking its exit code, which keeps its id reserved."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None:
        return "the reward pool was closed"
    if exit_code >= 0:
        return f"the process ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ", perhaps for lack of memory" if name in ("SIGKILL", "SIGABRT", "SIGSEGV") else ""
    return f"the process ended by {name}{hint}"
