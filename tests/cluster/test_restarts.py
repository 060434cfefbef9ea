"""Engines that are started anew, with real processes: the next one is there, nothing of the last one is."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from slipstream.cluster.calls import EngineState, RemoteEngine, gather, outcomes
from slipstream.cluster.restarts import EngineRestarts
from slipstream.cluster.session import await_engines
from slipstream.errors import EngineError, EngineLostError

pytestmark = pytest.mark.slow

FOREVER_S = 120.0
SOON_S = 15.0


@pytest.fixture
def engine(session: Any, actor_class: type) -> RemoteEngine:
    started = session.start_engine("rollout engine 0", actor_class, cpus=0.01)
    await_engines([started], deadline_s=FOREVER_S)
    return started


class Spans:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def add(self, lane: str, name: str, **_: float) -> None:
        self.seen.append((lane, name))


@pytest.mark.parametrize("is_hung", [False, True])
def test_an_engine_that_died_or_hangs_is_started_anew_in_its_place(
    session: Any, engine: RemoteEngine, is_hung: bool, until: Callable[..., None]
) -> None:
    spans: Any = Spans()
    restarts = EngineRestarts(session, limit=1, start_timeout_s=FOREVER_S, timeline=spans)
    old, handle = engine.pid, engine.handle
    assert old is not None
    os.kill(old, signal.SIGSTOP if is_hung else signal.SIGKILL)
    call = engine.submit("echo", 1)
    [loss] = outcomes([call], deadline_s=3 if is_hung else SOON_S)
    assert isinstance(loss, EngineLostError)
    assert ("no answer within 3 s from rollout engine 0: echo" if is_hung else "rollout engine 0 died") in str(loss)
    began = time.monotonic()
    restarts.report(call, loss)
    restarts.report(call, loss)
    assert time.monotonic() - began < SOON_S, "it does not wait for the start"
    assert call.is_lost and engine.state is EngineState.STARTING
    until(lambda: not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE, SOON_S)

    def is_ready() -> bool:
        restarts.advance()
        return engine.state is EngineState.READY

    until(is_ready, FOREVER_S)
    assert engine.pid not in (None, old) and engine.handle is not handle and engine.incarnation == 1
    assert gather([engine.submit("echo", 2)], deadline_s=FOREVER_S) == [2]
    assert spans.seen == [("rollout engine 0", "restart")]
    with pytest.raises(EngineLostError, match="lost again after it was started anew 1 times"):
        restarts.report(engine.submit("echo", 3), EngineLostError("it died"))


def test_an_error_is_put_down_to_the_engine_that_died_whoever_complains_first(
    session: Any, actor_class: type, engine: RemoteEngine
) -> None:
    dying = session.start_engine("learner rank 1", actor_class, cpus=0.01)
    await_engines([dying], deadline_s=FOREVER_S)
    with pytest.raises(EngineLostError, match=r"^learner rank 1 died during die"):
        gather([engine.submit("fail", "connection closed by peer"), dying.submit("die", "", 1)], deadline_s=FOREVER_S)


def test_an_error_names_those_that_have_not_answered(session: Any, actor_class: type, engine: RemoteEngine) -> None:
    slow = session.start_engine("learner rank 1", actor_class, cpus=0.01)
    await_engines([slow], deadline_s=FOREVER_S)
    with pytest.raises(EngineError, match="raised ValueError: timed out; no answer yet from learner rank 1: sleep"):
        gather([engine.submit("fail", "timed out"), slow.submit("sleep", 20)], deadline_s=FOREVER_S)


def test_the_death_of_ray_ends_every_wait_at_once_and_with_its_name(session: Any, engine: RemoteEngine) -> None:
    """The last test: nothing can be done with the session after it but to close it, which must not take long."""
    waiting = engine.submit("sleep", 60)
    [store] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
    store.kill()
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=rf"Ray has died: gcs_server \(process {store.pid}\) is no more"):
        gather([waiting], deadline_s=FOREVER_S)
    session.close()
    assert time.monotonic() - began < 2 * SOON_S
