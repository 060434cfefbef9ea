"""Calls on remote engines: every one has a name, a deadline, and an error that says whom it waited for.

A `RemoteEngine` is a Ray actor with a role. `PendingCall` is one call in flight. `gather` waits for several and
raises as soon as one fails, since in a collective the others would otherwise wait for ever. This is the only module
that turns Ray's exceptions into ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import EngineError, SlipstreamError

LOG_TAIL_LINES = 15
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into an engine's log for its own use."""


@dataclass
class RemoteEngine:
    """A Ray actor with a name people know: 'learner rank 1', 'rollout engine 0', 'reward engine'."""

    name: str
    handle: Any
    log_folder: Path | None = None
    start_arguments: tuple[Any, ...] = ()
    pid: int | None = None
    node: str | None = None
    address: str | None = None

    def submit(self, method: str, *arguments: Any, **keywords: Any) -> PendingCall:
        """Start a call and return at once."""
        return PendingCall(self, method, getattr(self.handle, method).remote(*arguments, **keywords))

    def stream(self, method: str, *arguments: Any) -> PendingCall:
        """Start a call on a method that yields; its reference is an iterator of object references."""
        remote_method = getattr(self.handle, method).options(num_returns="streaming")
        return PendingCall(self, method, remote_method.remote(*arguments))

    def log_tail(self) -> str:
        """The last lines this engine's process wrote, or an empty string."""
        if self.log_folder is None or self.pid is None:
            return ""
        lines: list[str] = []
        # Standard output first, so that the end is what was written to standard error.
        for path in sorted(self.log_folder.glob(f"worker-*-{self.pid}.*"), reverse=True):
            written = path.read_text(errors="replace").splitlines()
            lines += [line for line in written if line.strip() and not line.startswith(RAY_MARKS)]
        return "\n".join(lines[-LOG_TAIL_LINES:])


@dataclass(frozen=True, eq=False)
class PendingCall:
    """One call in flight."""

    engine: RemoteEngine
    method: str
    reference: Any
    started: float = field(default_factory=time.monotonic)

    @property
    def description(self) -> str:
        """For error messages: 'learner rank 0: update'."""
        return f"{self.engine.name}: {self.method}"


def gather(calls: Sequence[PendingCall], *, deadline_s: float) -> list[Any]:
    """The results of `calls`, in their order.

    Raises the first error any of them meets, without waiting for the rest: a `SlipstreamError` raised inside an
    engine as it is, everything else as an `EngineError` naming the engine; or an `EngineError` after `deadline_s`.
    """
    import ray

    results: dict[Any, Any] = {}
    waiting = {call.reference: call for call in calls}
    deadline = time.monotonic() + deadline_s
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(call.description for call in waiting.values())
            raise EngineError(f"no answer within {deadline_s:.0f} s from {names}{log_text(waiting.values())}")
        call = waiting.pop(ready[0])
        results[call.reference] = fetch(call, ready[0])
    return [results[call.reference] for call in calls]


def fetch(call: PendingCall, reference: Any) -> Any:
    """The value of a finished reference of `call`, or our error for what went wrong in it."""
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlipstreamError):
            raise cause from None
        raise EngineError(f"{call.description} raised {type(cause).__name__}: {cause}{log_text([call])}") from error
    except RayActorError as error:
        raise EngineError(
            f"{call.engine.name} died during {call.method} (process {call.engine.pid} on node {call.engine.node}): "
            f"{_cause_of_death(str(error))}{log_text([call])}"
        ) from error
    except RayError as error:
        raise EngineError(f"{call.description} failed: {_cause_of_death(str(error))}{log_text([call])}") from error


def _cause_of_death(text: str) -> str:
    """What Ray says of a death in one line; its text repeats ids and advice over many."""
    lines = [line.strip() for line in ANSI_COLOUR.sub("", text).splitlines() if line.strip()]
    if not lines:
        return "no cause given"
    if "creation task" in lines[0]:
        # A traceback follows; its last line is the exception that the constructor raised.
        return lines[-1]
    return next((line for line in lines if "exit type" in line), lines[0])


def log_text(calls: Iterable[PendingCall]) -> str:
    """The end of an error message: the last log lines of the engines of `calls`, each engine once."""
    tails = {engine.name: engine.log_tail() for engine in {call.engine.name: call.engine for call in calls}.values()}
    return "".join(f"\nlast log lines of {name}:\n{tail}" for name, tail in tails.items() if tail)
