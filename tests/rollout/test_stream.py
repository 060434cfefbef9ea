"""The stream of scored groups: order, replacement, limits, staleness, greedy baselines. Engines are stand-ins."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from slipstream.cluster import calls as calls_module
from slipstream.errors import EngineError, RewardError
from slipstream.rollout.stream import RolloutStream

Worlds = Callable[..., Any]
SAMPLES = 2


def ids(groups: Sequence[Any]) -> list[str]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize("seed", range(5))
def test_groups_come_in_the_order_in_which_they_were_issued(
    make_world: Worlds, arrivals: random.Random, seed: int
) -> None:
    arrivals.seed(seed)
    rollouts = make_world(seed=seed).rollouts(groups_per_step=6)
    assert ids(rollouts.take(6)) == [f"0-{position}" for position in range(6)]
    rollouts.publish()
    assert ids(rollouts.take(6)) == ["0-6", "0-7", "0-8", "0-9", "1-0", "1-1"]


def test_a_group_is_generated_whole_by_one_engine_in_turn(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world(engines=3)
    groups = world.rollouts(groups_per_step=4).take(4)
    assert [[request.group_id for request in engine.requests] for engine in world.engines] == [
        ["0-0", "0-3"], ["0-1"], ["0-2"],
    ]  # fmt: skip
    assert all(request.samples == SAMPLES for engine in world.engines for request in engine.requests)
    assert all(len(group.trajectories) == SAMPLES for group in groups)


def test_the_seed_of_a_group_does_not_depend_on_its_engine(make_world: Worlds, arrivals: random.Random) -> None:
    seeds = []
    for engines in (1, 3):
        world = make_world(engines=engines)
        world.rollouts().take(4)
        seeds.append({request.group_id: request.seed for engine in world.engines for request in engine.requests})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 4


@pytest.mark.parametrize(("share", "calls"), [(0.0, 8), (0.9, 4)])
def test_rewards_and_their_parts_arrive_with_their_trajectories(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch, share: float, calls: int
) -> None:
    """Responses that end by themselves are scored by themselves; those of a group that end together, together."""
    world = make_world(engines=4)
    monkeypatch.setattr(world.chance, "random", lambda: share)
    for group in world.rollouts().take(4):
        assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * SAMPLES
        assert all(trajectory.reward_parts == {"part": 1.0} for trajectory in group.trajectories)
        assert {trajectory.group_id for trajectory in group.trajectories} == {group.group_id}
    assert world.spans.count(("reward engine", "score")) == calls
    assert {lane for lane, name in world.spans if name == "generate"} == {engine.name for engine in world.engines}


def test_a_synchronous_step_leaves_nothing_in_flight(make_world: Worlds, arrivals: random.Random) -> None:
    rollouts = make_world().rollouts()
    rollouts.take(4)
    assert rollouts.stream.is_empty
    assert rollouts.state()["issued"] == rollouts.last_take.issued == 4


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_stays_within_its_bound(make_world: Worlds, arrivals: random.Random, bound: int) -> None:
    world = make_world()
    rollouts = world.rollouts(max_staleness=bound)
    world.reward.failing = lambda group_id: group_id.endswith("3")
    worst = 0
    for _ in range(12):
        for group in rollouts.take(4):
            oldest = min(int(t.versions[t.loss_mask].min()) for t in group.trajectories)
            worst = max(worst, rollouts.version - oldest)
        rollouts.publish()
    assert worst == bound, "never more than the bound, and the bound is used"


def test_a_failed_group_is_replaced_and_its_reason_is_in_the_ledger(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-2"
    rollouts = world.rollouts()
    assert ids(rollouts.take(4)) == ["0-0", "0-1", "0-3", "0-4"]
    balance = world.ledger.balance()
    assert balance.issued == 5
    assert balance.failed == {"raised: ValueError: no": 1}
    for group_id in ("0-0", "0-1", "0-3", "0-4"):
        world.ledger.trained(group_id, 1)
    rollouts.check_ledger()


def test_failed_responses_are_counted_by_kind_and_the_kind_is_in_the_ledger(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id in ("0-1", "0-2")
    rollouts = world.rollouts()
    rollouts.take(4)
    assert rollouts.last_failures == {"raised": 2}
    lines = [json.loads(line) for line in world.ledger_path.read_text().splitlines()]
    failed = sorted((line for line in lines if line["event"] == "failed"), key=lambda line: line["group"])
    assert failed == [
        {"event": "failed", "group": group_id, "kind": "raised", "why": "raised: ValueError: no"}
        for group_id in ("0-1", "0-2")
    ]
    rollouts.publish()
    rollouts.take(4)
    assert rollouts.last_failures == {}, "counted anew in each step"


def test_what_was_read_from_a_response_stays_with_it(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.answer_of = lambda trajectory: str(trajectory.sample_index) if trajectory.sample_index else None
    groups = world.rollouts().take(4)
    assert [[trajectory.answer for trajectory in group.trajectories] for group in groups] == [[None, "1"]] * 4
    assert all(group.reads_answers for group in groups)


def test_a_group_in_which_one_answer_could_not_be_scored_is_not_trained_on(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id in ("0-0", "0-1")
    groups = world.rollouts().take(4)
    assert all(trajectory.reward is not None for group in groups for trajectory in group.trajectories)


def test_under_the_policy_stop_the_first_failure_ends_the_run(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-1"
    with pytest.raises(RewardError, match=r"0-1/1: raised: ValueError: no .*reward\.on_failure"):
        world.rollouts(on_failure="stop").take(4)


def test_more_failures_than_a_step_has_groups_end_the_run(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: True
    with pytest.raises(RewardError, match=r"failed for 5 groups within one step.*no"):
        world.rollouts().take(4)
    assert world.ledger.balance().failed == {"raised: ValueError: no": 5}


def test_failures_are_counted_anew_in_each_step(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: int(group_id.split("-")[1]) % 2 == 0
    rollouts = world.rollouts()
    for _ in range(5):
        assert len(rollouts.take(4)) == 4
        rollouts.publish()


def test_silence_past_the_deadline_names_whom_was_waited_for(
    make_world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: ([], references))
    expected = (
        r"within 3 s from rollout engine 0: generate \(0-0, 0-2, 0-4, 0-6, 0-8 and 2 more\); .*raise "
        r"cluster.call_timeout_s\nwho waits for whom: the run's loop for rollout engine 0: .*, rollout engine 1: "
        r"generate \(0-1, .*\nlast log lines of rollout engine 0:\na line of rollout engine 0"
    )
    with pytest.raises(EngineError, match=expected):
        make_world().rollouts(groups_per_step=14).take(14)


def test_a_restored_stream_goes_on_where_the_state_was_taken(make_world: Worlds, arrivals: random.Random) -> None:
    def step(rollouts: RolloutStream, world: Any) -> list[Any]:
        taken = rollouts.take(5)
        rollouts.publish()
        return [(group.group_id, group.prompt.row, world.version) for group in taken]

    undisturbed_world, world = make_world(engines=2), make_world(engines=2)
    undisturbed, interrupted = undisturbed_world.rollouts(groups_per_step=5), world.rollouts(groups_per_step=5)
    expected = [step(undisturbed, undisturbed_world) for _ in range(4)]
    assert [step(interrupted, world) for _ in range(2)] == expected[:2]
    state = interrupted.state()

    later_world = make_world(engines=2)
    resumed = later_world.rollouts(groups_per_step=5)
    assert resumed.restore(state) == []
    resumed.synchronize()
    assert later_world.version == 2
    assert [step(resumed, later_world) for _ in range(2)] == expected[2:]
    by_engine = [[request.group_id for request in engine.requests] for engine in undisturbed_world.engines]
    for engine, whole in zip(later_world.engines, by_engine, strict=True):
        mine = [request.group_id for request in engine.requests]
        assert whole[-len(mine) :] == mine, "each group goes to the engine it would have gone to"


def test_without_the_flag_a_group_has_no_baseline(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    assert all(group.baseline is None for group in world.rollouts().take(4))
    assert {kind for engine in world.engines for kind, _ in engine.calls} == {"sampled"}


@pytest.mark.parametrize("engines", [1, 3])
def test_the_greedy_baseline_is_scored_and_is_none_of_the_samples(
    make_world: Worlds, arrivals: random.Random, engines: int
) -> None:
    world = make_world(engines=engines)
    world.reward.reward_of = lambda trajectory: 10.0 * trajectory.sample_index
    groups = world.rollouts(greedy_baseline=True).take(4)
    assert ids(groups) == ["0-0", "0-1", "0-2", "0-3"]
    for group in groups:
        assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1]
        assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 10.0]
        assert group.baseline.trajectory_id == f"{group.group_id}/baseline"
        assert (group.baseline.reward, group.baseline.reward_parts) == (-10.0, {"part": 1.0})
        assert group.baseline.tokens.tolist() == [*group.prompt.tokens, 40, 42], "the greedy answer"
        assert all(t.tokens.tolist() == [*group.prompt.tokens, 40, 41] for t in group.trajectories)


def test_an_engine_gives_its_baselines_first_and_has_one_call_at_a_time(
    make_world: Worlds, arrivals: random.Random
) -> None:
    world = make_world()
    rollouts = world.rollouts(greedy_baseline=True)
    for _ in range(3):
        rollouts.take(4)
        rollouts.publish()
    for engine in world.engines:
        assert [kind for kind, _ in engine.calls] == ["greedy", "sampled"] * 3
        for (_, greedy), (_, sampled) in zip(engine.calls[::2], engine.calls[1::2], strict=True):
            assert [request.group_id for request in greedy] == [request.group_id for request in sampled]
            assert {request.samples for request in greedy} == {1}
        assert engine.most_calls_at_a_time == 1


def test_a_group_whose_baseline_could_not_be_scored_has_failed(make_world: Worlds, arrivals: random.Random) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-1"
    rollouts = world.rollouts(greedy_baseline=True)
    groups = rollouts.take(4)
    assert ids(groups) == ["0-0", "0-2", "0-3", "0-4"]
    assert all(group.baseline.reward == 1.0 for group in groups)
    assert world.ledger.balance().failed == {"raised: ValueError: no": 1}
    assert rollouts.last_take.failed == 1

    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-1"
    with pytest.raises(RewardError, match="0-1/baseline: raised: ValueError: no"):
        world.rollouts(greedy_baseline=True, on_failure="stop").take(4)


def test_looking_for_arrivals_costs_as_much_for_each_response_however_many_engines_there_are(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs what it looks at. All that has arrived is taken from one, so its cost is shared by as many."""
    import ray

    def looked_at(engines: int) -> float:
        lengths: list[int] = []

        def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
            lengths.append(len(references))
            return references[:num_returns], []

        monkeypatch.setattr(ray, "wait", wait)
        world = make_world(engines=engines)
        monkeypatch.setattr(world.chance, "random", lambda: 1.0)  # an engine never has two at a time
        rollouts = world.rollouts(groups_per_step=engines)
        responses = [t for group in rollouts.take(engines) for t in group.trajectories]
        return sum(lengths) / len(responses)

    assert looked_at(64) == looked_at(4)


def test_responses_that_are_there_are_all_taken_after_one_look(
    make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine's call has hundreds of them: a look for each, and a rest after it, was most of a step."""
    import ray

    looks: list[int] = []

    def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        looks.append(len(references))
        return references[:num_returns], []

    world = make_world(engines=1)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(world.chance, "random", lambda: 0.0)  # whatever is asked for is there
    monkeypatch.setattr(calls_module, "LOOK_LASTS_S", 60.0)
    groups = world.rollouts(groups_per_step=50).take(50)
    assert sum(len(group.trajectories) for group in groups) == 100
    assert looks == [1, 101], "at the call, and at its end beside the hundred rewards"


def test_a_look_does_not_last(make_world: Worlds, arrivals: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that always have more must not keep the stream from noticing the one that hangs."""
    world = make_world(engines=1)
    rollouts = world.rollouts(groups_per_step=4)
    monkeypatch.setattr(world.chance, "random", lambda: 0.0)
    with rollouts.unchanging():
        rollouts._issue()
    stream = rollouts.stream
    for lasts_s, has_more in ((60.0, True), (0.0, False)):
        monkeypatch.setattr(calls_module, "LOOK_LASTS_S", lasts_s)
        stream.next_group()
        [generating] = stream._generating
        assert stream.has_more(generating) is has_more
