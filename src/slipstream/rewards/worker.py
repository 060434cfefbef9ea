"""What runs in a child process of the reward pool: user code, one call after another, within limits.

Started by `child.py` as a fresh interpreter, so that it shares no thread, lock or memory with the actor that started
it. Takes one `WorkerSetup`, resolves the function, answers that it is ready, then answers one `ScoredText` at a time.
The time limit is the parent's business: it kills this process. What is left here is what only the process itself can
do: its memory limit, dying with its parent, and catching what the function raises.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.data.failure import FailureKind
from slipstream.errors import SlipstreamError
from slipstream.rewards.conventions import adapt, check_options
from slipstream.rewards.function import (
    RewardFunction,
    Score,
    ScoredText,
    UnusableRewardError,
    check_reward_value,
    resolve_reward,
)

FRAME_HEADER = struct.Struct("!Q")
"""Every message is preceded by its length in bytes. Requests are pickles of a number and a message; answers are JSON,
with that number as `call`."""

LONGEST_FAILURE = 500
"""Characters kept of what a function raised."""


@dataclass(frozen=True)
class WorkerSetup:
    """The first message to a child. `function` is a spec for `resolve_reward`, or a callable written by cloudpickle."""

    function: str | bytes
    options: dict[str, Any]
    timeout_s: float
    memory_bytes: int


def main(channel_descriptor: int, parent_pid: int) -> None:
    """Serve calls over a connected socket until the parent closes it."""
    die_with_parent(parent_pid)
    with socket.socket(fileno=channel_descriptor) as channel, asyncio.Runner() as runner:
        process = os.getpid()
        setup: WorkerSetup
        call, setup = pickle.loads(_receive(channel))
        _limit_memory(setup.memory_bytes)
        try:
            function = _load(setup)
        except SlipstreamError as error:
            _answer(channel, call, {"error": str(error), "kind": type(error).__name__})
            return
        except BaseException as error:  # a pickle that can't be read, or a module that calls sys.exit
            _answer(channel, call, {"error": f"loading the reward function {describe(error)}", "kind": "RewardError"})
            return
        _leave_if_copy(process)
        _answer(channel, call, {"ready": True})
        while request := _receive(channel):
            call, text = pickle.loads(request)
            answer = _call(function, text, setup, runner)
            _leave_if_copy(process)
            _answer(channel, call, answer)


def _leave_if_copy(process: int) -> None:
    """End a process that the reward function forked and that came back from it, or both would answer."""
    if os.getpid() != process:
        os._exit(0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even while it hangs in C code."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent was gone before the line above


def describe(error: BaseException) -> str:
    """Return 'raised: Type: message (file, line)' for people; never raises itself, whatever the exception does."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"raised: {text if len(text) <= LONGEST_FAILURE else text[:LONGEST_FAILURE] + '...'}{where}"


def _load(setup: WorkerSetup) -> RewardFunction:
    spec = setup.function
    function = resolve_reward(pickle.loads(spec) if isinstance(spec, bytes) else spec)
    check_options(function, setup.options)
    return adapt(function)


def _call(function: RewardFunction, text: ScoredText, setup: WorkerSetup, runner: asyncio.Runner) -> dict[str, Any]:
    """Score one text. Whatever the function does short of ending the process becomes a reward or a failure."""
    started = time.perf_counter()
    score: Score | None = None
    reads_answers = False
    failure: dict[str, str] | None = None
    try:
        value = function(text, **setup.options)
        if inspect.isawaitable(value):
            value = runner.run(_await_within(value, setup.timeout_s))
        reads_answers = isinstance(value, Score)
        score = check_reward_value(value)
    except UnusableRewardError as error:
        failure = _failure(FailureKind.RETURNED, str(error))
    except _TimeLimitError:
        failure = _failure(FailureKind.TIMED_OUT, f"timed out after {setup.timeout_s:g} s")
    except MemoryError:
        limit = f"{setup.memory_bytes / 2**20:.0f} MiB (reward.memory_bytes)"
        failure = _failure(FailureKind.RAISED, f"raised: MemoryError at the limit of {limit}")
    except BaseException as error:  # sys.exit() in a reward function must not end the worker
        failure = _failure(FailureKind.RAISED, describe(error))
    outcome = {"reward": None} if score is None else asdict(score) | {"reads_answers": reads_answers}
    return outcome | {"failure": failure, "seconds": time.perf_counter() - started}


def _failure(kind: FailureKind, message: str) -> dict[str, str]:
    """A `RewardFailure` in JSON."""
    return {"kind": kind, "message": message}


class _TimeLimitError(Exception):
    """A coroutine ran into the time limit of its call; a TimeoutError it raises itself is something else."""


async def _await_within(value: Awaitable[Any], timeout_s: float) -> Any:
    """Await with a time limit: a coroutine can be cancelled, so its process with all it has loaded may live on."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if limit.expired():
            raise _TimeLimitError from error
        raise


def _limit_memory(memory_bytes: int) -> None:
    """Bound the address space of this process and of those it starts; allocations beyond raise MemoryError."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _receive(channel: socket.socket) -> bytes:
    """Read one message; empty when the parent has closed the channel."""
    header = _receive_exactly(channel, FRAME_HEADER.size)
    return _receive_exactly(channel, FRAME_HEADER.unpack(header)[0]) if header else b""


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = channel.recv(min(size - len(received), 1 << 20))
        if not piece:
            return b""
        received += piece
    return bytes(received)


def _answer(channel: socket.socket, call: int, answer: dict[str, Any]) -> None:
    payload = json.dumps({"call": call} | answer).encode(
        "ascii"
    )  # json escapes whatever is not ASCII, lone surrogates as well
    # What the function printed is buffered, and would be lost if this process is killed before it fills the buffer.
    with contextlib.suppress(OSError, ValueError):  # the function may have closed standard output
        sys.stdout.flush()
    channel.sendall(FRAME_HEADER.pack(len(payload)) + payload)
