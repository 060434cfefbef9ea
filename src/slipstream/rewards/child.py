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

from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.errors import ConfigError, EngineLostError, RewardError
from slipstream.rewards.function import ScoredText
from slipstream.rewards.worker import FRAME_HEADER, WorkerSetup

START_TIMEOUT_S = 120.0
"""Longest wait for a child to start and to import the module of the reward function."""

LONGEST_ANSWER_BYTES = 1 << 28
"""More than any answer has. A length beyond it is none, but something else that was written to the channel."""

KILL_GRACE_S = 0.5
"""Added to the time limit of a call before the process is killed: for the way there and back, and for a coroutine,
which is cancelled at the limit itself, to clean up."""

EXIT_TIMEOUT_S = 30.0
"""Longest wait for a killed process to be gone."""


@dataclass(frozen=True)
class RewardResult:
    """The score of one response. Either `reward` is a finite number, or `failure` says why there is none.

    Both are None where nothing scores. `parts` are the named parts of the reward and `answer` what was read from the
    response, if the function gave them. `reads_answers` tells a response without an answer from a reward that knows
    none. `seconds` is how long the call took, with all its attempts.
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    failure: RewardFailure | None = None
    seconds: float = 0.0
    answer: str | None = None
    reads_answers: bool = False


class _StrayAnswerError(Exception):
    """What came from the child is not the answer to what it was asked."""


class RewardChild:
    """One child process, replaced when it has died or been killed. Not for concurrent calls."""

    def __init__(self, setup: WorkerSetup, working_directory: str) -> None:
        self._setup = setup
        self._working_directory = working_directory
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = 0
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
                return _result(await self._exchange(text))
        except TimeoutError:
            await self.kill()
            failure = RewardFailure(FailureKind.TIMED_OUT, f"timed out after {self._setup.timeout_s:g} s")
        except _StrayAnswerError as error:
            await self.kill()
            failure = RewardFailure(FailureKind.KILLED, f"killed: {error}")
        except (ConnectionError, asyncio.IncompleteReadError):
            failure = RewardFailure(FailureKind.KILLED, f"killed: {_describe_exit(await self.kill())}")
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
            exit_code = await self.kill()
            how = _describe_exit(exit_code)
            # What somebody killed may be imported by the next one; what ended by itself will do so again.
            error_class = EngineLostError if exit_code == -signal.SIGKILL else RewardError
            raise error_class(f"the reward process ended while it imported the reward function: {how}") from error
        except _StrayAnswerError as error:
            raise RewardError(f"while the reward function was imported, {error}") from error
        if "error" in answer:
            raise (ConfigError if answer["kind"] == "ConfigError" else RewardError)(answer["error"])

    def _environment(self) -> dict[str, str]:
        """The parent's environment and module path, one thread per numeric library, the working directory first."""
        path = [self._working_directory, *(entry for entry in sys.path if entry)]
        return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)}

    async def _exchange(self, message: ScoredText | WorkerSetup) -> dict[str, Any]:
        """Send a message and wait for its answer, which repeats the number of the call.

        Raises ConnectionError or IncompleteReadError if the process ends, _StrayAnswerError if it says anything else.
        """
        if self._streams is None:
            raise ConnectionError("the process was killed")
        reader, writer = self._streams
        self._calls += 1
        payload = pickle.dumps((self._calls, message))
        writer.write(FRAME_HEADER.pack(len(payload)) + payload)
        await writer.drain()
        (size,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        answer = None
        if size <= LONGEST_ANSWER_BYTES:
            try:
                answer = json.loads(await reader.readexactly(size))
            except (ValueError, RecursionError):
                answer = None  # as if it were another's
        if not isinstance(answer, dict) or answer.pop("call", None) != self._calls:
            raise _StrayAnswerError("its process sent what is no answer to this call; does the reward function fork?")
        return answer


def _result(answer: dict[str, Any]) -> RewardResult:
    """The result in a child's answer, which is JSON."""
    failure = answer.pop("failure")
    return RewardResult(
        failure=None if failure is None else RewardFailure(FailureKind(failure["kind"]), failure["message"]), **answer
    )


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
