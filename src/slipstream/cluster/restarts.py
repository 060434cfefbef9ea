"""Starts engines anew that died or do not answer, each up to a limit, while everything else goes on.

Whoever calls an engine reports its loss here; the first report of it starts a new actor in the place of the old one,
and `advance`, which every loop that waits calls now and then, takes note of starts that have come to their end.
Nothing here waits. What the engine had under way is for its callers to ask anew. An engine that takes weights is not
asked for anything before it has those in force; bringing them is left to the one loop that may call the learner.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.cluster.calls import EngineState, PendingCall, RemoteEngine, fetch, no_answer, outcomes, wait_for_some
from slipstream.cluster.ray_processes import require_ray
from slipstream.errors import EngineLostError, SlipstreamError
from slipstream.observe.logs import get_logger

if TYPE_CHECKING:
    from slipstream.observe.timeline import Timeline

# How often a loop that waits looks after the engines.
LOOK_S = 0.2

logger = get_logger("cluster")


class Restarter(Protocol):
    """What replaces an engine's actor: the cluster session."""

    def restart_engine(self, engine: RemoteEngine) -> PendingCall:
        """Kill what is left of the engine's process, make a new one in its place, and call its `identify`."""
        ...


@dataclass
class _Start:
    """A start under way: `identity` says which process it is, `call` that it is done."""

    engine: RemoteEngine
    identity: PendingCall
    call: PendingCall
    began: float


class EngineRestarts:
    """The engines of a run that may be replaced. To be used from any thread.

    `limit`: how often each of them is started anew; 0 makes every loss an error. `bring_weights` gives the weights in
    force to those that lack them and says whether there were any; where engines take weights, a publisher sets it.
    """

    def __init__(self, restarter: Restarter, *, limit: int, start_timeout_s: float, timeline: Timeline) -> None:
        self._restarter = restarter
        self._limit = limit
        self._start_timeout_s = start_timeout_s
        self._timeline = timeline
        self._starts: list[_Start] = []
        self._failure: EngineLostError | None = None
        self._count = 0
        self._lock = threading.RLock()
        self.bring_weights: Callable[[], bool] = lambda: False

    def report(self, call: PendingCall, loss: EngineLostError) -> None:
        """The engine of `call` is lost: start it anew. A loss that is known already changes nothing.

        Raises EngineLostError if it has been started anew as often as it may be, or Ray itself has died.
        """
        require_ray()
        with self._lock:
            self._raise_failure()
            if not call.is_lost:
                self._replace(call.engine, loss)

    def advance(self) -> None:
        """Take note of the starts that have come to their end.

        Raises EngineLostError if an engine is lost that may not be started anew, whoever reported it.
        """
        with self._lock:
            self._raise_failure()
            starts, self._starts = self._starts, []
            for start in starts:
                if not self._is_over(start):
                    self._starts.append(start)

    def holds_weights(self, engine: RemoteEngine, incarnation: int) -> None:
        """The engine has the weights in force, if it is still the same one."""
        with self._lock:
            if engine.incarnation == incarnation:
                engine.state = EngineState.READY

    def call_ready(self, engines: Sequence[RemoteEngine], method: str, *, deadline_s: float) -> None:
        """Call a method on those engines that are ready; a loss is reported and no error."""
        calls = [engine.submit(method) for engine in engines if engine.state is EngineState.READY]
        for call, outcome in zip(calls, outcomes(calls, deadline_s=deadline_s), strict=True):
            if isinstance(outcome, EngineLostError):
                self.report(call, outcome)
            elif isinstance(outcome, SlipstreamError):
                raise outcome

    def take_count(self) -> int:
        """How many engines were started anew since this was asked last."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    def starting(self) -> str:
        """Whom a wait is for, where engines are being started anew: their names."""
        with self._lock:
            return ", ".join(f"{start.engine.name}: start" for start in self._starts)

    def _replace(self, engine: RemoteEngine, loss: EngineLostError) -> None:
        engine.incarnation += 1
        engine.state = EngineState.STARTING
        if engine.incarnation > self._limit:
            self._failure = loss
            if self._limit:
                self._failure = EngineLostError(
                    f"{engine.name} is lost again after it was started anew {self._limit} times, as often as "
                    f"cluster.max_engine_restarts allows: {loss}"
                )
            raise self._failure
        self._count += 1
        # Its last log lines stay in the run's folder of logs.
        cause, *_ = str(loss).splitlines()
        logger.warning(
            f"{engine.name} is lost and started anew (time {engine.incarnation} of at most {self._limit}); what it had "
            f"under way is asked for again; the cause: {cause}"
        )
        identity = self._restarter.restart_engine(engine)
        start = engine.submit("start", *engine.start_arguments)
        self._starts.append(_Start(engine, identity, start, began=time.time()))

    def _is_over(self, start: _Start) -> bool:
        """Whether the start has ended, well or otherwise; one that failed is followed by another."""
        engine = start.engine
        if engine.pid is None and _has_arrived(start.identity):
            # A process that died at once is told of by `start` as well.
            self._attempt(start, lambda: engine.identified(fetch(start.identity, start.identity.reference)))
            if start.call.is_lost:
                return True
        # Only with both: answers of two calls arrive in either order, and an engine that is there has a process id.
        if engine.pid is not None and _has_arrived(start.call):
            if self._attempt(start, lambda: fetch(start.call, start.call.reference)):
                engine.state = EngineState.LOADED if engine.takes_weights else EngineState.READY
                engine.last_heard = time.monotonic()
                self._timeline.add(engine.name, "restart", start=start.began, end=time.time())
                logger.info(f"{engine.name} is there again", seconds=round(time.time() - start.began, 1))
            return True
        if time.time() - start.began > self._start_timeout_s:
            self._replace(engine, no_answer([start.call], self._start_timeout_s))
            return True
        return False

    def _attempt(self, start: _Start, step: Callable[[], Any]) -> bool:
        try:
            step()
        except SlipstreamError as error:
            self._replace(start.engine, EngineLostError(str(error)))
            return False
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _has_arrived(call: PendingCall) -> bool:
    return bool(wait_for_some([call.reference], 0.0))
