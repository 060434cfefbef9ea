"""Calls on remote engines: every one has a name, a deadline, and an error that says whom it waited for.

A `RemoteEngine` is a Ray actor with a role. `PendingCall` is one call in flight. `gather` waits for several and
raises as soon as one fails, since in a collective the others would otherwise wait for ever; `outcomes` waits for each
of them. This is the only module that turns Ray's exceptions into ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from slipstream.cluster.ray_processes import require_ray
from slipstream.cluster.waits import describe_waits, waiting
from slipstream.errors import EngineError, EngineLostError, SlipstreamError

LOG_TAIL_LINES = 15
# How long a call that failed waits for news of the others: where one rank of a collective has died, the error of
# another one may come first.
CULPRIT_GRACE_S = 2.0
# How often a long wait looks whether Ray is still alive.
RAY_LOOK_S = 1.0
NAMED_ENGINES = 6
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# A look at what is waited for is followed by a rest of so many times as long.
LOOK_REST = 10.0
# How long after a look more may be taken from the streams that it found, before the next look at everything.
LOOK_LASTS_S = 0.05
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes into an engine's log for its own use."""


class EngineState(Enum):
    """How far an engine is: STARTING; LOADED, where it still needs the weights in force; READY to be asked."""

    STARTING = "starting"
    LOADED = "loaded"
    READY = "ready"


@dataclass(frozen=True)
class EngineRecipe:
    """All that is needed to start an engine, and to start it anew."""

    engine_class: type
    arguments: tuple[Any, ...]
    cpus: float
    gpus: float
    environment: dict[str, str]


@dataclass(frozen=True)
class ProcessIdentity:
    """Which process an engine is. `started`, by the clock of its machine, tells it from a later one with its id."""

    pid: int
    started: float
    host: str
    node_id: str


@dataclass(eq=False)
class RemoteEngine:
    """A Ray actor with a name people know: 'learner rank 1', 'rollout engine 0', 'reward engine'.

    An engine that is started anew stays the same object: `incarnation` counts, from 0, which actor it is by now.
    `takes_weights`: a new one must be given the weights in force before it is asked for anything. `last_heard`: the
    moment (monotonic) at which it last delivered something.
    """

    name: str
    handle: Any
    log_folder: Path | None = None
    start_arguments: tuple[Any, ...] = ()
    pid: int | None = None
    node: str | None = None
    node_id: str | None = None
    process_started: float = 0.0
    address: str | None = None
    recipe: EngineRecipe | None = None
    takes_weights: bool = False
    state: EngineState = EngineState.READY
    incarnation: int = 0
    last_heard: float = 0.0

    def submit(self, method: str, *arguments: Any, **keywords: Any) -> PendingCall:
        """Start a call and return at once."""
        # Read first: a call to an actor that is replaced meanwhile counts as one to the older one.
        incarnation = self.incarnation
        reference = getattr(self.handle, method).remote(*arguments, **keywords)
        return PendingCall(self, method, reference, incarnation)

    def stream(self, method: str, *arguments: Any) -> PendingCall:
        """Start a call on a method that yields; its reference is an iterator of object references."""
        incarnation = self.incarnation
        remote_method = getattr(self.handle, method).options(num_returns="streaming")
        return PendingCall(self, method, remote_method.remote(*arguments), incarnation)

    def identified(self, identity: ProcessIdentity) -> None:
        """Note which process the engine is."""
        self.pid, self.process_started = identity.pid, identity.started
        self.node, self.node_id = identity.host, identity.node_id

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
    """One call in flight to the actor that the engine was at that time."""

    engine: RemoteEngine
    method: str
    reference: Any
    incarnation: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def description(self) -> str:
        """For error messages: 'learner rank 0: update'."""
        return f"{self.engine.name}: {self.method}"

    @property
    def is_lost(self) -> bool:
        """Whether the actor that was called has been given up, so that no answer counts any more."""
        return self.incarnation != self.engine.incarnation


def gather(calls: Sequence[PendingCall], *, deadline_s: float) -> list[Any]:
    """The results of `calls`, in their order.

    Raises the first error any of them meets, without waiting for the rest: a `SlipstreamError` raised inside an
    engine as it is; an `EngineLostError` where an engine has died, or none has answered after `deadline_s`; everything
    else as an `EngineError` naming the engine. What an engine raises because another one died is put down to that one.
    """
    results: dict[Any, Any] = {}
    open_calls = {call.reference: call for call in calls}
    deadline = time.monotonic() + deadline_s
    with waiting(describe(calls), deadline_s=deadline_s):
        while open_calls:
            ready = _ready(open_calls, deadline)
            if not ready:
                raise no_answer(list(open_calls.values()), deadline_s)
            for reference in ready:
                call = open_calls.pop(reference)
                try:
                    results[reference] = fetch(call, reference)
                except EngineLostError:
                    raise
                except EngineError as error:
                    raise _culprit(error, open_calls) from error
    return [results[call.reference] for call in calls]


def outcomes(calls: Sequence[PendingCall], *, deadline_s: float) -> list[Any]:
    """What became of each of `calls`, in their order: its result, or the `SlipstreamError` that it ended with.

    Waits for all of them; one that has not answered after `deadline_s` ends with an `EngineLostError`.
    """
    found: dict[Any, Any] = {}
    open_calls = {call.reference: call for call in calls}
    deadline = time.monotonic() + deadline_s
    with waiting(describe(calls), deadline_s=deadline_s):
        while open_calls and (ready := _ready(open_calls, deadline)):
            for reference in ready:
                call = open_calls.pop(reference)
                try:
                    found[reference] = fetch(call, reference)
                    call.engine.last_heard = time.monotonic()
                except SlipstreamError as error:
                    found[reference] = error
    found |= {call.reference: no_answer([call], deadline_s) for call in open_calls.values()}
    return [found[call.reference] for call in calls]


def describe(calls: Sequence[PendingCall]) -> str:
    """Whom and what a wait is for: 'learner rank 0: update, learner rank 1: update'."""
    more = len(calls) - NAMED_ENGINES
    return ", ".join(call.description for call in calls[:NAMED_ENGINES]) + (f" and {more} more" if more > 0 else "")


def no_answer(calls: Sequence[PendingCall], deadline_s: float) -> EngineLostError:
    """The error for a deadline that passed."""
    names = ", ".join(call.description for call in calls)
    return EngineLostError(f"no answer within {deadline_s:.0f} s from {names}{describe_waits()}{log_text(calls)}")


def _ready(open_calls: dict[Any, PendingCall], deadline: float) -> list[Any]:
    """All references that are ready once one is; empty at the deadline. Raises EngineLostError if Ray has died."""
    while (remaining := deadline - time.monotonic()) > 0:
        ready = wait_for_some(list(open_calls), min(remaining, RAY_LOOK_S))
        if ready:
            return ready
    return wait_for_some(list(open_calls), 0.0)


def wait_for_some(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """All of the references that are ready, in their order; where none is, the first that will be. Empty if too late.

    Looking costs time in proportion to the references that are waited for. Who takes all that are ready pays it once
    for many, however many engines there are; who takes them one by one pays it for each.
    Raises EngineLostError if Ray itself has died: nothing would ever be ready.
    """
    import ray

    require_ray()
    references = list(references)
    if not references:
        time.sleep(timeout_s)
        return []
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
    if not ready and timeout_s > 0:
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout_s)
    return list(ready)


class Lookout:
    """Waits again and again for any of many calls, at a cost that does not grow with their number.

    With a thousand calls in flight something arrives all the time, and each look takes milliseconds of computation. So
    each is followed by a rest in proportion to what it cost, in which more arrives: a thousandth of a second for a few
    calls, some hundredths for a thousand. Looking then takes a tenth of the time at most, whatever arrives.
    """

    def __init__(self) -> None:
        self._rests_until = 0.0
        self._looked = -LOOK_LASTS_S

    @property
    def is_recent(self) -> bool:
        """Whether what the last look found may still be drained: not for ever, as whoever waits has other duties."""
        return time.monotonic() - self._looked < LOOK_LASTS_S

    def wait(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """See `wait_for_some`."""
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        computed = time.thread_time()
        ready = wait_for_some(references, timeout_s)
        self._looked = time.monotonic()
        self._rests_until = self._looked + LOOK_REST * (time.thread_time() - computed)
        return ready


def _culprit(error: EngineError, open_calls: dict[Any, PendingCall]) -> EngineError:
    """The error to report where one call failed: that of an engine that died, if one of the others did."""
    remaining = dict(open_calls)
    deadline = time.monotonic() + CULPRIT_GRACE_S
    while remaining and (ready := _ready(remaining, deadline)):
        for reference in ready:
            try:
                fetch(remaining.pop(reference), reference)
            except EngineLostError as loss:
                return loss
            except SlipstreamError:
                continue  # One more that failed in consequence, or for the same reason.
    if not remaining:
        return error
    text, _, log = str(error).partition("\nlast log lines")
    unanswered = f"; no answer yet from {describe(list(remaining.values()))}"
    return type(error)(text + unanswered + (f"\nlast log lines{log}" if log else ""))


def fetch(call: PendingCall, reference: Any) -> Any:
    """The value of a finished reference of `call`, or our error for what went wrong in it."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reference)
    except RayError as error:
        raise _translated(call, error) from error


def next_reference(call: PendingCall) -> Any | None:
    """The reference of the next thing that a call of `stream` yielded, or None at its end."""
    from ray.exceptions import RayError

    try:
        return next(call.reference)
    except StopIteration:
        return None
    except RayError as error:
        raise _translated(call, error) from error


def has_next(call: PendingCall) -> bool:
    """Whether a call of `stream` has yielded something more that is there already. False at its end."""
    from ray.exceptions import RayError

    try:
        return bool(call.reference.next_ready())
    except RayError:
        return True  # `next_reference` says what went wrong.


def _translated(call: PendingCall, error: Exception) -> SlipstreamError:
    """Our error for one of Ray's. Raises EngineLostError if Ray itself has died: it then says all kinds of things."""
    from ray.exceptions import RayActorError, RayTaskError

    require_ray()
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, EngineLostError):
            return EngineLostError(f"{cause}{log_text([call])}")
        if isinstance(cause, SlipstreamError):
            return cause
        return EngineError(f"{call.description} raised {type(cause).__name__}: {cause}{log_text([call])}")
    if isinstance(error, RayActorError):
        return EngineLostError(
            f"{call.engine.name} died during {call.method} (process {call.engine.pid} on node {call.engine.node}): "
            f"{_cause_of_death(str(error))}{log_text([call])}"
        )
    return EngineError(f"{call.description} failed: {_cause_of_death(str(error))}{log_text([call])}")


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
