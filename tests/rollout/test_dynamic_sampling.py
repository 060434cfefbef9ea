"""Groups without signal are replaced, within a limit, by an account that balances, and so that a run can repeat."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.data.trajectory import Trajectory
from slipstream.errors import TrainingError
from slipstream.rollout.dynamic_sampling import TakeCounts, exhausted, no_signal
from slipstream.rollout.stream import RolloutStream

Worlds = Callable[..., Any]
Reward = Callable[[Trajectory], float]


def position(group_id: str) -> int:
    epoch, place = group_id.split("-")
    return 10 * int(epoch) + int(place)


def signal_in(has_signal: Callable[[int], bool], constant: float = 0.0) -> Reward:
    """Answers to the groups at these positions differ in reward; all others have the constant one."""
    return lambda trajectory: float(trajectory.sample_index) if has_signal(position(trajectory.group_id)) else constant


def ids(groups: list[Any]) -> list[str]:
    return [group.group_id for group in groups]


def finish_step(rollouts: RolloutStream, groups: list[Any]) -> None:
    rollouts.publish()
    for group in groups:
        rollouts.ledger.trained(group.group_id, rollouts.version)
    rollouts.check_ledger()


@pytest.mark.parametrize("seed", range(5))
def test_the_batch_is_full_of_groups_with_signal_in_the_order_of_issue(
    make_world: Worlds, arrivals: random.Random, seed: int
) -> None:
    arrivals.seed(seed)
    world = make_world(seed=seed)
    world.reward.reward_of = signal_in(lambda position: position % 3 == 1)
    rollouts = world.rollouts(limit=10)
    assert ids(rollouts.take(4)) == ["0-1", "0-4", "0-7", "1-0"]
    assert rollouts.stream.is_empty


def test_replaced_groups_are_in_the_ledger_with_their_reason_and_it_balances(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    rollouts = world.rollouts(limit=10)
    world.reward.reward_of = signal_in(lambda position: position not in (0, 2))
    finish_step(rollouts, rollouts.take(4))
    world.reward.reward_of = signal_in(lambda position: position != 7, constant=1.0)
    finish_step(rollouts, rollouts.take(4))
    balance = world.ledger.balance()
    assert balance.filtered == {"no signal: all rewards are 0": 2, "no signal: all rewards are 1": 1}
    assert (balance.issued, balance.trained, balance.pending) == (11, 8, 0)


def test_without_it_constant_groups_are_taken_as_they_are(make_world: Worlds, arrivals: random.Random) -> None:
    rollouts = make_world().rollouts()
    assert ids(rollouts.take(4)) == ["0-0", "0-1", "0-2", "0-3"]
    assert rollouts.last_take == TakeCounts(issued=4)


def test_rewards_that_differ_by_float_noise_only_are_no_signal(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.reward_of = lambda t: (0.3, 0.1 + 0.2)[t.sample_index] if t.group_id == "0-1" else t.sample_index
    assert ids(world.rollouts(limit=2).take(4)) == ["0-0", "0-2", "0-3", "0-4"]
    assert world.ledger.balance().filtered == {"no signal: all rewards are 0.3": 1}


def test_the_last_take_says_what_was_issued_and_dropped(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.reward_of = signal_in(lambda position: position >= 3, constant=0.5)
    world.reward.failing = lambda group_id: group_id == "0-5"
    rollouts = world.rollouts(limit=10)
    rollouts.take(4)
    counts = rollouts.last_take
    assert (counts.issued, counts.failed, counts.filtered, counts.filtered_reward_mean) == (8, 1, 3, 0.5)
    rollouts.publish()
    rollouts.take(4)
    assert rollouts.last_take == TakeCounts(issued=4)
    assert rollouts.last_take.filtered_reward_mean is None


@pytest.mark.parametrize("always", [0, 1])
@pytest.mark.parametrize("bound", [0, 2])
def test_a_reward_that_never_differs_stops_at_the_limit(
    make_world: Worlds, arrivals: random.Random, always: int, bound: int
) -> None:
    world = make_world()
    world.reward.reward_of = lambda trajectory: float(always)
    rollouts = world.rollouts(limit=5, max_staleness=bound)
    issued = 4 * (5 + bound)
    expected = (
        rf"issued {issued} groups .*dynamic_sampling_limit 5 .*0 of them had signal, 4 are needed; "
        rf"{issued} were constant \({issued} all {always}\)\. The data has no more signal .*easier .*harder .*"
        r"rollout\.samples_per_prompt .*algorithm\.dynamic_sampling to false"
    )
    with pytest.raises(TrainingError, match=expected):
        rollouts.take(4)
    assert world.ledger.balance().filtered == {no_signal(always): issued}
    rollouts.check_ledger()


def test_the_limit_is_of_each_step_and_a_batch_that_is_full_in_time_is_no_error(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.reward_of = signal_in(lambda position: position % 2 == 1)
    rollouts = world.rollouts(limit=2)
    for _ in range(3):
        assert len(rollouts.take(4)) == 4
        assert rollouts.last_take.issued == 8
        rollouts.publish()


def test_groups_with_signal_are_counted_when_the_limit_is_met(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.reward_of = signal_in(lambda position: position in (2, 5), constant=-0.0)
    world.reward.failing = lambda group_id: group_id == "0-4"
    rollouts = world.rollouts(limit=2)
    with pytest.raises(TrainingError, match=r"8 groups .* 2 of them .* 5 were constant \(5 all 0\); the reward failed"):
        rollouts.take(4)
    rollouts.check_ledger()


def test_the_error_groups_constant_rewards_by_value() -> None:
    def text(rewards: list[float]) -> str:
        return str(exhausted(TakeCounts(filtered_rewards=rewards), with_signal=7, needed=8, limit=10))

    assert "80 groups" in text([1.0] * 12 + [0.0] * 61)
    assert "73 were constant (61 all 0, 12 all 1)" in text([1.0] * 12 + [0.0] * 61)
    assert "(1 all -1, 2 all 0.9, 7 at 3 rewards between them)" in text(
        [0.1] * 3 + [0.9] * 2 + [0.2] * 2 + [-1.0] + [0.5] * 2
    )
    assert "0 were constant (none)" in text([])


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_stays_within_its_bound_and_nothing_is_lost(
    make_world: Worlds, arrivals: random.Random, bound: int
) -> None:
    world = make_world()
    world.reward.reward_of = signal_in(lambda position: position % 5 in (0, 3))
    world.reward.failing = lambda group_id: group_id.endswith("9")
    rollouts = world.rollouts(max_staleness=bound, limit=10)
    worst = 0
    for _ in range(12):
        groups = rollouts.take(4)
        for group in groups:
            assert position(group.group_id) % 5 in (0, 3)
            worst = max(worst, *(rollouts.version - int(t.versions[t.loss_mask].min()) for t in group.trajectories))
        finish_step(rollouts, groups)
    assert worst == bound, "never more than the bound, and the bound is used"


def eventful(world: Any) -> RolloutStream:
    """A run in which groups lack signal, fail, and have baselines."""
    world.reward.reward_of = signal_in(lambda position: position % 3 == 0)
    world.reward.failing = lambda group_id: group_id.endswith("6")
    stream: RolloutStream = world.rollouts(groups_per_step=3, limit=10, greedy_baseline=True)
    return stream


def step(rollouts: RolloutStream) -> list[tuple[str, int, int]]:
    groups = rollouts.take(3)
    finish_step(rollouts, groups)
    return [(g.group_id, g.prompt.row, int(g.trajectories[0].versions[-1])) for g in groups]


def asked(world: Any) -> list[list[tuple[str, list[str]]]]:
    """Of each engine the calls in their order: what kind, and which groups."""
    return [[(kind, [r.group_id for r in requests]) for kind, requests in engine.calls] for engine in world.engines]


@pytest.mark.parametrize("seed", range(1, 8))
def test_neither_what_is_taken_nor_what_engines_are_asked_depends_on_who_answers_first(
    make_world: Worlds, arrivals: random.Random, seed: int
) -> None:
    taken, calls = [], []
    for arrival_seed in (0, seed):
        arrivals.seed(arrival_seed)
        world = make_world(seed=arrival_seed)
        rollouts = eventful(world)
        taken.append([step(rollouts) for _ in range(4)])
        calls.append(asked(world))
        assert all(engine.most_calls_at_a_time == 1 for engine in world.engines)
    assert taken[0] == taken[1]
    assert calls[0] == calls[1]


def test_a_restored_stream_goes_on_as_if_it_had_not_stopped(make_world: Worlds, arrivals: random.Random) -> None:
    whole_world, world, later_world = make_world(), make_world(), make_world()
    whole, interrupted, resumed = eventful(whole_world), eventful(world), eventful(later_world)
    expected = [step(whole) for _ in range(5)]
    assert [step(interrupted) for _ in range(2)] == expected[:2]
    before, state = asked(world), interrupted.state()

    assert resumed.restore(state) == []
    resumed.synchronize()
    assert [step(resumed) for _ in range(3)] == expected[2:]
    after = asked(later_world)
    assert [first + last for first, last in zip(before, after, strict=True)] == asked(whole_world)
    assert resumed.state() == whole.state()
    later = later_world.ledger.balance()
    assert later.issued == later.accounted == whole_world.ledger.balance().issued - world.ledger.balance().issued
