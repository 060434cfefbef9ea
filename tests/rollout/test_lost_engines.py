"""The stream of groups when engines are lost: what is asked anew, of whom, and when it is given up. Stand-ins."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.cluster import restarts as restarts_module
from slipstream.cluster.calls import EngineState
from slipstream.errors import EngineLostError
from slipstream.rollout.messages import SamplingParameters

SAMPLING = SamplingParameters(temperature=1.0, max_response_tokens=4)
Worlds = Callable[..., Any]
WAIT_S = 10.0


def ids(groups: Any) -> list[str]:
    return [group.group_id for group in groups]


def asked(engine: Any) -> list[str]:
    return [request.group_id for request in engine.requests]


def issue(rollouts: Any) -> None:
    """Send out what a first `take` would."""
    with rollouts.unchanging():
        rollouts._issue()


def receive(stream: Any, events: int) -> None:
    """Take so many events, whatever they are."""
    for _ in range(events):
        stream.next_group()


def drain(stream: Any) -> list[Any]:
    groups = []
    while not stream.is_empty:
        group = stream.next_group()
        if group is not None:
            groups.append(group)
    return groups


@pytest.mark.parametrize("events", [0, 3, 9])
@pytest.mark.parametrize("seed", range(4))
def test_a_lost_engine_is_asked_again_for_the_same_call_and_every_group_comes_once(
    make_world: Worlds, arrivals: random.Random, events: int, seed: int
) -> None:
    arrivals.seed(seed)
    world = make_world(limit=1)
    rollouts = world.rollouts(groups_per_step=6)
    issue(rollouts)
    receive(rollouts.stream, events)
    world.engines[0].die()
    groups = {group.group_id: group for group in drain(rollouts.stream)}
    assert world.restarted in ([], ["rollout engine 0"]), "it may have had nothing under way any more"
    calls = [[request.group_id for request in requests] for _, requests in world.engines[0].calls]
    assert calls in ([["0-0", "0-2", "0-4"]], [["0-0", "0-2", "0-4"]] * 2)
    assert len({request.seed for request in world.engines[0].requests}) == 3, "with the same seeds"
    assert asked(world.engines[1]) == ["0-1", "0-3", "0-5"]
    for group in groups.values():
        assert [t.sample_index for t in group.trajectories] == [0, 1]
        assert all(t.reward == 1.0 for t in group.trajectories)


@pytest.mark.parametrize("seed", range(4))
def test_in_an_asynchronous_run_another_engine_takes_over_whole_groups(
    make_world: Worlds, arrivals: random.Random, seed: int
) -> None:
    arrivals.seed(seed)
    world = make_world(limit=1)
    rollouts = world.rollouts(groups_per_step=6)
    rollouts.stream.repeats_calls = False
    hold_start(world, world.engines[0])
    issue(rollouts)
    receive(rollouts.stream, 5)
    first = {group_id for group_id in asked(world.engines[0]) if rollouts.stream._is_missing(group_id)}
    world.engines[0].die()
    drain(rollouts.stream)
    assert Counter(asked(world.engines[1])) == Counter(["0-1", "0-3", "0-5", *first])
    assert world.engines[0].state is EngineState.STARTING, "nobody waited for it"


def test_what_no_engine_can_be_asked_for_waits_for_the_first_that_is_there_again(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world(engines=1, limit=1)
    rollouts = world.rollouts()
    rollouts.stream.repeats_calls = False
    release = hold_start(world, world.engines[0])
    issue(rollouts)
    world.engines[0].die()
    rollouts.stream.next_group()
    assert rollouts.stream.references() == [] and not rollouts.stream.is_empty
    assert rollouts.stream.awaited() == "rollout engine 0: start"
    release()
    assert sorted(ids(drain(rollouts.stream))) == ["0-0", "0-1", "0-2", "0-3"]


def test_an_engine_that_takes_weights_is_asked_for_nothing_before_it_has_them(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world(engines=1, limit=1)
    [engine] = world.engines
    engine.takes_weights = True
    rollouts = world.rollouts()
    issue(rollouts)
    engine.die()
    rollouts.stream.receive(rollouts.stream.references()[0])
    for _ in range(3):
        rollouts.stream.supervise()
    assert engine.state is EngineState.LOADED and len(engine.calls) == 1
    brought = bring_weights_when_asked(world)
    assert sorted(ids(drain(rollouts.stream))) == ["0-0", "0-1", "0-2", "0-3"]
    assert brought == [threading.main_thread().name] and len(engine.calls) == 2


def test_an_asynchronous_run_brings_weights_while_it_waits_for_groups_and_not_while_it_trains(
    make_world: Worlds, arrivals: random.Random, until: Callable[..., None]
) -> None:
    world = make_world(engines=1, limit=1)
    [engine] = world.engines
    engine.takes_weights = True
    brought = bring_weights_when_asked(world)
    rollouts = world.rollouts(max_staleness=1)
    rollouts.take(4)
    until(lambda: len(rollouts._ready) == 4 and rollouts.stream.is_empty)
    engine.die_next = True
    rollouts.publish()  # issues the next batch, whose call is lost
    until(lambda: engine.state is EngineState.LOADED)
    time.sleep(0.3)
    assert brought == [], "the loop trains"
    assert ids(rollouts.take(4)) == ["0-4", "0-5", "0-6", "0-7"], "which were there"
    assert ids(rollouts.take(4)) == ["0-8", "0-9", "1-0", "1-1"]
    assert brought == [threading.main_thread().name]


def test_rewards_of_an_attempt_that_was_lost_are_not_for_the_next_one(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(engines=1, limit=1)
    monkeypatch.setattr(world.chance, "random", lambda: 0.0)  # one ends after the other
    world.reward.reward_of = lambda trajectory: float(len(world.restarted))
    rollouts = world.rollouts(groups_per_step=1)
    issue(rollouts)
    stream = rollouts.stream
    stream.receive(stream.references()[0])  # a response, which is now being scored
    world.engines[0].die()
    generating = next(iter(stream._generating))
    stream.receive(generating)
    [group] = drain(stream)
    assert [t.reward for t in group.trajectories] == [1.0, 1.0], "both scored after the loss"


@pytest.mark.parametrize("losses", [1, 3])
def test_what_a_lost_reward_engine_had_is_scored_by_the_next(
    make_world: Worlds, arrivals: random.Random, losses: int
) -> None:
    world = make_world(limit=2)
    world.reward.losses = losses
    rollouts = world.rollouts()
    assert ids(rollouts.take(4)) == ["0-0", "0-1", "0-2", "0-3"]
    assert 1 <= world.restarted.count("reward engine") <= 2
    assert len(asked(world.engines[0])) + len(asked(world.engines[1])) == 4, "no answer was generated twice"
    assert world.ledger.balance().issued == 4


def test_a_take_goes_on_over_a_loss_and_the_ledger_sees_one_issue(make_world: Worlds, arrivals: random.Random) -> None:
    for bound in (0, 2):
        world = make_world(limit=3)
        rollouts = world.rollouts(max_staleness=bound)
        taken: list[str] = []
        for step in range(1, 5):
            groups = rollouts.take(4)
            taken += ids(groups)
            for group in groups:
                world.ledger.trained(group.group_id, step)
            world.engines[step % 2].die()
            rollouts.publish()
        assert taken == [f"{number // 10}-{number % 10}" for number in range(16)]
        rollouts.close()
        rollouts.check_ledger()


def test_an_engine_that_is_lost_too_often_ends_the_run_in_every_thread(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world(engines=1, limit=2)
    rollouts = world.rollouts()
    issue(rollouts)
    with pytest.raises(EngineLostError, match=r"engine 0 is lost again after .* 2 times, .*max_engine_restarts"):
        while True:
            world.engines[0].die()
            rollouts.stream.next_group()
    with pytest.raises(EngineLostError, match="is lost again"):
        world.generators.restarts.advance()


def test_a_limit_of_zero_makes_the_first_loss_the_error(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world(engines=1)
    rollouts = world.rollouts()
    issue(rollouts)
    world.engines[0].die()
    with pytest.raises(EngineLostError, match=r"^it died during generate$"):
        rollouts.take(4)
    assert world.restarted == []


def test_a_start_that_fails_or_takes_too_long_is_followed_by_another(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(engines=1, limit=3)
    engine, restarts = world.engines[0], world.generators.restarts
    world.starts[engine.name].value = EngineLostError("it died during start")
    call = engine.stream("generate", [], SAMPLING)
    restarts.report(call, EngineLostError("it died"))
    restarts.advance()
    assert world.restarted == [engine.name] * 2
    hold_start(world, engine)
    monkeypatch.setattr(restarts, "_start_timeout_s", 0.0)
    restarts.advance()
    assert len(world.restarted) == 3
    assert restarts.take_count() == 3 and restarts.take_count() == 0


def test_an_engine_is_not_there_before_its_process_is_known(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls may be answered in either order. Without its process id a new engine that hangs could not be killed."""
    world = make_world(engines=1, limit=3)
    engine, restarts = world.engines[0], world.generators.restarts
    arrived = {"start"}
    monkeypatch.setattr(restarts_module, "_has_arrived", lambda call: call.method in arrived)
    restarts.report(engine.stream("generate", [], SAMPLING), EngineLostError("it died"))
    restarts.advance()
    assert engine.state is EngineState.STARTING
    arrived.add("process start")
    restarts.advance()
    assert engine.state is EngineState.READY and engine.pid == 2


def test_only_the_engine_that_is_silent_is_started_anew(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one answers now and then: it is slow, and left alone."""
    import ray

    world = make_world(limit=1)
    object.__setattr__(world.generators, "call_timeout_s", 0.5)
    rollouts = world.rollouts(groups_per_step=2)
    issue(rollouts)
    silent = {next(iter(rollouts.stream._generating))}

    def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(min(timeout, 0.1))
        return [r for r in references if r not in silent][:1], []

    monkeypatch.setattr(ray, "wait", wait)
    began = time.monotonic()
    while not world.restarted:
        world.engines[1].last_heard = time.monotonic()
        rollouts.stream.supervise()
        assert time.monotonic() - began < WAIT_S
    assert world.restarted == ["rollout engine 0"]
    assert 0.5 <= time.monotonic() - began < 3


def bring_weights_when_asked(world: Any) -> list[str]:
    """In the place of a publisher; returns the threads in which weights were brought."""
    brought: list[str] = []

    def bring() -> bool:
        loaded = [engine for engine in world.engines if engine.state is EngineState.LOADED]
        for engine in loaded:
            brought.append(threading.current_thread().name)
            world.generators.restarts.holds_weights(engine, engine.incarnation)
        return bool(loaded)

    world.generators.restarts.bring_weights = bring
    return brought


def hold_start(world: Any, engine: Any) -> Callable[[], None]:
    """The next start of the engine does not end before what is returned is called."""
    import ray

    held, wait = world.starts[engine.name], ray.wait
    is_held = True

    def wait_for_others(references: list[Any], **options: Any) -> Any:
        others = [r for r in references if not (is_held and r is held)]
        return wait(others, **options) if others else ([], references)

    def release() -> None:
        nonlocal is_held
        is_held = False

    ray.wait = wait_for_others
    return release
