"""Calls on remote engines: what a caller is told when they fail, and that it is told at once."""

import os
import socket
import time
from typing import Any

import pytest

from slipstream.cluster.calls import LOG_TAIL_LINES, RemoteEngine, fetch, gather, has_next, next_reference
from slipstream.cluster.session import await_engines
from slipstream.errors import EngineError, RewardError

pytestmark = pytest.mark.slow

SOON_S = 5.0
FOREVER_S = 120.0


@pytest.fixture(scope="module")
def engines(session: Any, actor_class: type) -> list[RemoteEngine]:
    pair = [session.start_engine(f"rollout engine {index}", actor_class, cpus=0.01) for index in range(2)]
    await_engines(pair, deadline_s=FOREVER_S)
    return pair


def test_results_come_in_the_order_of_the_calls(engines: list[RemoteEngine]) -> None:
    slow, quick = engines
    assert gather([slow.submit("sleep", 0.5), quick.submit("echo", 7)], deadline_s=FOREVER_S) == [0.5, 7]


def test_no_calls_give_no_results() -> None:
    assert gather([], deadline_s=1) == []


def test_an_exception_is_raised_at_once_and_names_the_engine_and_the_call(engines: list[RemoteEngine]) -> None:
    slow, quick = engines
    start = time.monotonic()
    calls = [slow.submit("sleep", 15), quick.submit("fail", "no such layer")]
    with pytest.raises(EngineError, match="rollout engine 1: fail raised ValueError: no such layer"):
        gather(calls, deadline_s=FOREVER_S)
    assert time.monotonic() - start < SOON_S, "it did not wait for the other call"
    gather(calls[:1], deadline_s=FOREVER_S)


def test_our_own_errors_come_through_as_they_are(engines: list[RemoteEngine]) -> None:
    with pytest.raises(RewardError) as caught:
        gather([engines[0].submit("fail_in_our_words", "the grader is down")], deadline_s=FOREVER_S)
    assert str(caught.value) == "the grader is down"


def test_a_call_past_its_deadline_names_everyone_it_waits_for(engines: list[RemoteEngine]) -> None:
    calls = [engine.submit("sleep", 3) for engine in engines]
    with pytest.raises(EngineError, match="within 1 s from rollout engine 0: sleep, rollout engine 1: sleep"):
        gather(calls, deadline_s=1)
    gather(calls, deadline_s=FOREVER_S)


def test_a_stream_yields_and_then_raises_as_a_call_does(engines: list[RemoteEngine]) -> None:
    call = engines[0].stream("count", 3)
    assert [fetch(call, next(call.reference)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(EngineError, match="rollout engine 0: count raised ValueError: out of numbers"):
        fetch(call, next(call.reference))


def test_a_stream_says_whether_more_is_there_without_waiting_for_it(engines: list[RemoteEngine]) -> None:
    engine = engines[0]
    busy, call = engine.submit("sleep", 1), engine.stream("count", 2)
    assert not has_next(call), "nothing has come"
    gather([busy, engine.submit("echo", 0)], deadline_s=FOREVER_S)
    taken = []
    while has_next(call):
        reference = next_reference(call)
        taken.append(reference)
    assert [fetch(call, reference) for reference in taken[:2]] == [0, 1]
    assert len(taken) == 3, "the error it ended with is the last thing that is there"
    assert not has_next(call)


def test_the_log_tail_is_the_end_of_what_this_engine_wrote(engines: list[RemoteEngine]) -> None:
    first, second = engines
    first.handle.write.remote("\n".join(f"line {number}" for number in range(100)))
    gather([second.submit("write", "from the other one")], deadline_s=FOREVER_S)
    gather([first.submit("echo", 0)], deadline_s=FOREVER_S)
    lines = first.log_tail().splitlines()
    assert len(lines) <= LOG_TAIL_LINES
    assert lines[-1] == "line 99"
    assert "from the other one" not in lines


def test_an_engine_without_log_folder_has_no_log_tail() -> None:
    assert RemoteEngine("rollout engine 0", handle=None).log_tail() == ""


def test_the_error_of_a_failed_call_shows_what_the_engine_wrote(engines: list[RemoteEngine]) -> None:
    gather([engines[0].submit("write", "a hint in the log")], deadline_s=FOREVER_S)
    with pytest.raises(EngineError, match="a hint in the log"):
        gather([engines[0].submit("fail", "x")], deadline_s=FOREVER_S)


@pytest.mark.parametrize("others", [0, 1])
def test_a_dead_engine_is_named_with_process_node_cause_and_last_words(
    session: Any, actor_class: type, engines: list[RemoteEngine], others: int
) -> None:
    engine = session.start_engine("learner rank 3", actor_class, cpus=0.01)
    await_engines([engine], deadline_s=FOREVER_S)
    start = time.monotonic()
    waiting = [engines[0].submit("sleep", 12)] * others
    with pytest.raises(EngineError) as caught:
        gather([*waiting, engine.submit("die", "out of memory, says the device", 42)], deadline_s=FOREVER_S)
    assert time.monotonic() - start < SOON_S + 5
    message = str(caught.value)
    first_line = message.splitlines()[0]
    assert first_line.startswith("learner rank 3 died during die")
    assert f"process {engine.pid}" in first_line and engine.pid != os.getpid()
    assert socket.gethostname() in first_line
    assert "exit" in first_line.lower()
    assert "last log lines of learner rank 3:" in message
    assert "out of memory, says the device" in message
    session.engines.remove(engine)


def test_a_call_on_an_engine_that_died_before_says_so(session: Any, actor_class: type) -> None:
    engine = session.start_engine("rollout engine 9", actor_class, cpus=0.01)
    await_engines([engine], deadline_s=FOREVER_S)
    with pytest.raises(EngineError):
        gather([engine.submit("die", "bye", 1)], deadline_s=FOREVER_S)
    with pytest.raises(EngineError, match="rollout engine 9 died"):
        gather([engine.submit("echo", 1)], deadline_s=FOREVER_S)
    session.engines.remove(engine)
