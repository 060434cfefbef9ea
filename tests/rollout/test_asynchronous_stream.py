"""The stream of an asynchronous run: what arrives is taken while the loop is elsewhere. Engines are stand-ins."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from slipstream.cluster.calls import Lookout
from slipstream.data.trajectory import Group
from slipstream.errors import EngineError, RewardError, TrainingError
from slipstream.observe.ledger import LedgerError

Worlds = Callable[..., Any]
WAIT_S = 10.0


def ids(groups: Any) -> list[str]:
    return [group.group_id for group in groups]


def test_groups_become_ready_while_nobody_asks_for_them(
    make_world: Worlds, arrivals: random.Random, until: Callable[..., None]
) -> None:
    rollouts = make_world().rollouts(max_staleness=2)
    rollouts.take(4)
    until(lambda: len(rollouts._ready) == 8)
    rollouts.publish()
    until(lambda: len(rollouts._ready) == 12)
    assert rollouts.admission.issued == 16, "a publish makes room for one more batch, which is issued at once"


@pytest.mark.parametrize("bound", [1, 2])
def test_every_prompt_is_handed_out_once_in_the_order_of_issue(
    make_world: Worlds, arrivals: random.Random, bound: int
) -> None:
    rollouts = make_world().rollouts(max_staleness=bound)
    taken: list[str] = []
    for _ in range(5):
        taken += ids(rollouts.take(4))
        rollouts.publish()
    assert taken == [f"{number // 10}-{number % 10}" for number in range(20)]


def test_no_more_is_issued_than_the_run_trains_on(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    rollouts = world.rollouts(max_staleness=3)
    rollouts.admission.steps = 2
    for step in (1, 2):
        for group in rollouts.take(4):
            world.ledger.trained(group.group_id, step)
        rollouts.publish()
    assert world.ledger.balance().issued == world.ledger.balance().trained == 8
    rollouts.check_ledger()


def test_short_answers_are_trained_on_no_sooner_and_no_more_often(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever finishes first, each step trains on what was issued for it: lengths of both are the same, step by step.

    Here short answers always arrive first, where a stream without order would train on them alone.
    """
    world = make_world(engines=1)
    lengths = {f"{number // 10}-{number % 10}": 1 + (7 * number) % 30 for number in range(50)}
    by_arrival: list[str] = []

    def rewards_first(_: Lookout, references: list[Any], timeout_s: float) -> list[Any]:
        return [min(references, key=lambda reference: hasattr(reference, "values"))]

    for engine in world.engines:
        engine.length_of = lengths.__getitem__
    monkeypatch.setattr(Lookout, "wait", rewards_first)
    rollouts = world.rollouts(max_staleness=2)
    sort_in = rollouts._sort_in
    monkeypatch.setattr(rollouts, "_sort_in", lambda group: (by_arrival.append(group.group_id), sort_in(group)))
    trained: list[list[int]] = []
    for _ in range(8):
        trained.append([t.response_length for group in rollouts.take(4) for t in group.trajectories])
        rollouts.publish()
    assert trained == [
        [lengths[group] for group in list(lengths)[k : k + 4] for _ in range(2)] for k in range(0, 32, 4)
    ]
    first_to_arrive = [lengths[group_id] for group_id in by_arrival[:12]]
    assert first_to_arrive == sorted(first_to_arrive), "the short ones did arrive first"
    assert np.mean(trained) == pytest.approx(np.mean(list(lengths.values())[:32]))


def test_lengths_trained_on_are_those_issued_where_scoring_takes_longer_for_longer_answers(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward takes as long as the answer it reads. Trained in the order of arrival, the first batches were short."""
    world = make_world(engines=1)
    lengths = {f"{number // 10}-{number % 10}": 1 + (11 * number) % 37 for number in range(32)}
    world.engines[0].length_of = lengths.__getitem__
    now, due, submit = [0], {}, world.reward.submit

    def submit_slowly(method: str, trajectories: Any) -> Any:
        call = submit(method, trajectories)
        due[call.reference] = now[0] + sum(trajectory.response_length for trajectory in trajectories)
        return call

    def wait_for_the_next(_: Lookout, references: list[Any], timeout_s: float) -> list[Any]:
        """Answers come at once; of the rewards the one that is due first, and time passes until then."""
        arrived = min(references, key=lambda reference: due.get(reference, 0))
        now[0] = max(now[0], due.get(arrived, 0))
        return [arrived]

    monkeypatch.setattr(world.reward, "submit", submit_slowly)
    monkeypatch.setattr(Lookout, "wait", wait_for_the_next)
    rollouts = world.rollouts(max_staleness=3)
    rollouts.admission.steps = 8
    by_arrival: list[int] = []
    sort_in = rollouts._sort_in
    monkeypatch.setattr(
        rollouts, "_sort_in", lambda group: (by_arrival.append(lengths[group.group_id]), sort_in(group))
    )
    trained: list[list[int]] = []
    scored_sum, ready = 0.0, 0.0
    for _ in range(8):
        groups = rollouts.take(4)
        trained.append(sorted(group.trajectories[0].response_length for group in groups))
        queues = rollouts.last_queues
        arrived = 4 + queues["queue/groups_ready"] - ready
        ready = queues["queue/groups_ready"]
        scored_sum += arrived * queues["response_length/scored_mean"] if arrived else 0.0
        rollouts.publish()
    issued = list(lengths.values())
    assert trained == [sorted(issued[start : start + 4]) for start in range(0, 32, 4)], "step by step"
    assert ready == 0 and scored_sum == pytest.approx(sum(issued)), "what was scored is what was trained on"
    assert np.mean(by_arrival[:8]) < 0.8 * np.mean(issued[:16]), "short answers did arrive first"


def test_a_failed_group_is_replaced_at_once(
    make_world: Worlds, arrivals: random.Random, until: Callable[..., None]
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-1"
    rollouts = world.rollouts(max_staleness=1)
    assert ids(rollouts.take(4)) == ["0-0", "0-2", "0-3", "0-4"]
    assert (rollouts.last_take.failed, rollouts.last_failures) == (1, {"raised": 1})
    until(lambda: len(rollouts._ready) == 4)
    assert rollouts.admission.issued == 9


def test_what_fails_while_nobody_asks_is_told_by_the_next_take_and_publish(
    make_world: Worlds, arrivals: random.Random, until: Callable[..., None]
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-6"
    rollouts = world.rollouts(max_staleness=1, on_failure="stop")
    with suppress(RewardError):  # It may fail as soon as that.
        rollouts.take(4)
    until(lambda: rollouts._pump_failure is not None)
    for call in (rollouts.publish, lambda: rollouts.take(4)):
        with pytest.raises(RewardError, match=r"0-6/1: raised: ValueError: no .*reward\.on_failure"):
            call()


def test_silence_past_the_deadline_names_whom_was_waited_for(
    make_world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    monkeypatch.setattr(Lookout, "wait", lambda _, references, timeout_s: time.sleep(timeout_s) or [])
    object.__setattr__(world.generators, "call_timeout_s", 0.3)
    began = time.monotonic()
    with pytest.raises(
        EngineError, match=r"nothing arrived within 0 s from rollout engine 0: generate \(0-0, .*raise cluster.call"
    ):
        world.rollouts(max_staleness=1).take(4)
    assert time.monotonic() - began < WAIT_S


def test_dynamic_sampling_that_finds_no_signal_ends_and_does_not_wait_for_ever(
    make_world: Worlds, arrivals: random.Random
) -> None:
    rollouts = make_world().rollouts(max_staleness=1, limit=3)
    with pytest.raises(TrainingError, match="dynamic sampling issued 16 groups for one step"):
        rollouts.take(4)


def test_closing_ends_the_pump_and_may_be_repeated(make_world: Worlds, arrivals: random.Random) -> None:
    rollouts = make_world().rollouts(max_staleness=1)
    rollouts.take(4)
    for _ in range(2):
        rollouts.close()
    assert rollouts._pump is not None and not rollouts._pump.is_alive()


def test_what_was_in_flight_is_issued_again_and_nothing_twice(
    make_world: Worlds, arrivals: random.Random, until: Callable[..., None]
) -> None:
    world = make_world()
    rollouts = world.rollouts(max_staleness=2)
    for group in rollouts.take(4):
        world.ledger.trained(group.group_id, 1)
    rollouts.publish()
    with rollouts.unchanging():
        state, ledger = rollouts.state(), world.ledger.state()
    assert state["open"] == [f"{number // 10}-{number % 10}" for number in range(4, 16)]
    rollouts.take(4)
    rollouts.close()

    later = make_world()
    later.ledger_path.write_text(world.ledger_path.read_text())
    later.ledger.restore(ledger)
    resumed = later.rollouts(max_staleness=2)
    assert resumed.restore(state) == []
    resumed.synchronize()
    for step in (2, 3, 4):
        for group in resumed.take(4):
            later.ledger.trained(group.group_id, step)
            assert group.trajectories[0].versions.tolist()[-1] >= 1, "sampled anew, by the restored weights"
        resumed.publish()
    until(lambda: not resumed.stream.groups_generating)
    resumed.check_ledger()
    asked = [request.group_id for engine in later.engines for request in engine.requests]
    assert len(asked) == len(set(asked)) and set(state["open"]) <= set(asked)


def test_what_was_in_flight_is_filtered_where_the_data_has_changed(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    rollouts = world.rollouts(max_staleness=1)
    for group in rollouts.take(4):
        world.ledger.trained(group.group_id, 1)
    state = rollouts.state()
    rollouts.close()

    later = make_world()
    for group_id in state["open"]:
        later.ledger.issued(group_id)
    resumed = later.rollouts(max_staleness=1)
    state["cursor"][""]["fingerprint"] = "that of another file"
    assert resumed.restore(state) == [""]
    assert later.ledger.balance().filtered == {"the data is not what it was when the prompt was issued": 4}
    assert ids(resumed.take(4)) == ["1-0", "1-1", "1-2", "1-3"]


def test_a_lost_group_is_noticed(make_world: Worlds, arrivals: random.Random) -> None:
    rollouts = make_world().rollouts(max_staleness=1)
    rollouts.take(4)
    with pytest.raises(LedgerError, match="4 groups are pending but not in flight"):
        rollouts.check_ledger()


def test_groups_that_have_come_are_shown_once_while_others_are_waited_for(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = make_world().rollouts(max_staleness=2)
    shown: list[str] = []
    is_shown = threading.Event()

    def look(groups: list[Group]) -> None:
        shown.extend(ids(groups))
        is_shown.set()

    wait = Lookout.wait

    def wait_until_shown(lookout: Lookout, references: list[Any], timeout_s: float) -> list[Any]:
        if any(name in rollouts._ready for name in list(rollouts._open)[:4]):
            assert is_shown.wait(WAIT_S)
        return wait(lookout, references, timeout_s)

    monkeypatch.setattr(Lookout, "wait", wait_until_shown)
    groups = ids(rollouts.take(4, meanwhile=look))
    assert 1 <= len(shown) == len(set(shown))
    assert set(shown) < set(groups), "none that is trained on later; when the last has come there is no meanwhile"


def test_a_synchronous_run_shows_none_since_what_comes_first_depends_on_time(
    make_world: Worlds, arrivals: random.Random
) -> None:
    shown: list[Group] = []
    make_world().rollouts(max_staleness=0).take(4, meanwhile=shown.extend)
    assert not shown
