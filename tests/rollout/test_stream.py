"""The stream of scored groups: order, replacement, limits, staleness. Engines are stand-ins that finish as told."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.cluster.calls import PendingCall
from slipstream.data.cursor import PromptCursor
from slipstream.data.trajectory import Prompt, Sample
from slipstream.errors import EngineError, RewardError
from slipstream.observe.ledger import Ledger
from slipstream.rewards.child import RewardResult
from slipstream.rollout import stream as stream_module
from slipstream.rollout.admission import Admission
from slipstream.rollout.messages import GroupRequest, GroupResult, SamplingParameters
from slipstream.rollout.stream import Generators, GroupStream, RolloutStream

SAMPLING = SamplingParameters(temperature=1.0, max_response_tokens=4)
SAMPLES = 2


class Reference:
    """Stands for an object reference: holds its value already."""

    def __init__(self, value: Any) -> None:
        self.value = value


class StreamReference:
    """Stands for the reference of a call that yields; groups finish in random order."""

    def __init__(self, values: Sequence[Any], chance: random.Random) -> None:
        self.values = list(values)
        chance.shuffle(self.values)

    def __next__(self) -> Reference:
        if not self.values:
            raise StopIteration
        return Reference(self.values.pop())


class RolloutStandIn:
    """Answers every request at once, with samples that carry the version it has now."""

    def __init__(self, index: int, world: "World") -> None:
        self.name = f"rollout engine {index}"
        self.world = world
        self.requests: list[GroupRequest] = []

    def stream(self, method: str, requests: list[GroupRequest], sampling: SamplingParameters) -> PendingCall:
        assert (method, sampling) == ("generate", SAMPLING)
        self.requests += requests
        results = [GroupResult(request.group_id, self._samples(request), seconds=0.1) for request in requests]
        return PendingCall(self, method, StreamReference(results, self.world.chance))  # type: ignore[arg-type]

    def _samples(self, request: GroupRequest) -> list[Sample]:
        versions = np.full(2, self.world.version, np.int64)
        arrays = (np.array([40, 41]), np.zeros(2, np.float32), versions)
        return [Sample(*arrays, finish_reason="stop", seconds=0.1) for _ in range(request.samples)]


class RewardStandIn:
    """Gives every trajectory of a group that is not listed under `failing` the reward 1."""

    name = "reward engine"

    def __init__(self) -> None:
        self.failing: Callable[[str], bool] = lambda group_id: False

    def submit(self, method: str, trajectories: list[Any]) -> PendingCall:
        assert method == "score"
        failure = "raised: ValueError: no" if self.failing(trajectories[0].group_id) else None
        results = [RewardResult(1.0, {"part": 1.0}, None, 0.01) for _ in trajectories]
        if failure is not None:
            results[-1] = RewardResult(None, {}, failure, 0.01)
        return PendingCall(self, method, Reference(results))  # type: ignore[arg-type]


class World:
    """Engines, ledger and loop of a small run."""

    def __init__(self, folder: Path, tokenizer: Any, *, engines: int, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.version = 0
        self.engines = [RolloutStandIn(index, self) for index in range(engines)]
        self.reward = RewardStandIn()
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.spans: list[tuple[str, str]] = []
        timeline: Any = type("Timeline", (), {"add": lambda _, lane, name, **times: self.spans.append((lane, name))})()
        self.generators = Generators(
            engines=self.engines,  # type: ignore[arg-type]
            reward_engine=self.reward,  # type: ignore[arg-type]
            tokenizer=tokenizer,
            timeline=timeline,
            seed=7,
            call_timeout_s=3.0,
        )

    def rollouts(self, *, groups_per_step: int = 4, max_staleness: int = 0, on_failure: str = "retry") -> RolloutStream:
        prompts = [
            Prompt(row=row, tokens=np.array([row + 1]), text=f"prompt {row}", label=None, fields={})
            for row in range(10)
        ]
        return RolloutStream(
            GroupStream(self.generators, SAMPLING, samples_per_prompt=SAMPLES, purpose="training"),
            PromptCursor(prompts, seed=0, shuffle=True),
            publisher=self,  # type: ignore[arg-type]
            ledger=self.ledger,
            admission=Admission(groups_per_step, max_staleness),
            on_failure=on_failure,
        )

    def publish(self, version: int) -> None:
        self.version = version


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[random.Random]:
    """Whatever is waited for is there; which of several comes first is random."""
    import ray

    chance = random.Random(0)

    def wait(references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [chance.choice(references)], []

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(stream_module, "fetch", lambda call, reference: reference.value)
    yield chance


@pytest.fixture
def make_world(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., World]:
    def make(*, engines: int = 2, seed: int = 0) -> World:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return World(folder, tiny_tokenizer, engines=engines, seed=seed)

    return make


def ids(groups: Sequence[Any]) -> list[str]:
    return [group.group_id for group in groups]


@pytest.mark.parametrize("seed", range(5))
def test_groups_come_in_the_order_in_which_they_were_issued(
    make_world: Callable[..., World], arrivals: random.Random, seed: int
) -> None:
    arrivals.seed(seed)
    rollouts = make_world(seed=seed).rollouts(groups_per_step=6)
    assert ids(rollouts.take(6)) == [f"0-{position}" for position in range(6)]
    rollouts.publish()
    assert ids(rollouts.take(6)) == ["0-6", "0-7", "0-8", "0-9", "1-0", "1-1"]


def test_a_group_is_generated_whole_by_one_engine_in_turn(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    world = make_world(engines=3)
    groups = world.rollouts(groups_per_step=4).take(4)
    assert [[request.group_id for request in engine.requests] for engine in world.engines] == [
        ["0-0", "0-3"], ["0-1"], ["0-2"],
    ]  # fmt: skip
    assert all(request.samples == SAMPLES for engine in world.engines for request in engine.requests)
    assert all(len(group.trajectories) == SAMPLES for group in groups)


def test_the_seed_of_a_group_does_not_depend_on_its_engine(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    seeds = []
    for engines in (1, 3):
        world = make_world(engines=engines)
        world.rollouts().take(4)
        seeds.append({request.group_id: request.seed for engine in world.engines for request in engine.requests})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 4


def test_rewards_and_their_parts_arrive_with_their_trajectories(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    world = make_world()
    for group in world.rollouts().take(4):
        assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * SAMPLES
        assert all(trajectory.reward_parts == {"part": 1.0} for trajectory in group.trajectories)
        assert {trajectory.group_id for trajectory in group.trajectories} == {group.group_id}
    assert world.spans.count(("reward engine", "score")) == 4
    assert {lane for lane, name in world.spans if name == "generate"} == {"rollout engine 0", "rollout engine 1"}


def test_a_synchronous_step_leaves_nothing_in_flight(make_world: Callable[..., World], arrivals: random.Random) -> None:
    rollouts = make_world().rollouts()
    rollouts.take(4)
    assert rollouts.stream.is_empty
    assert rollouts.state()["issued"] == 4


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_stays_within_its_bound(
    make_world: Callable[..., World], arrivals: random.Random, bound: int
) -> None:
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
    make_world: Callable[..., World], arrivals: random.Random
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


def test_a_group_in_which_one_answer_could_not_be_scored_is_not_trained_on(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id in ("0-0", "0-1")
    groups = world.rollouts().take(4)
    assert all(trajectory.reward is not None for group in groups for trajectory in group.trajectories)


def test_under_the_policy_stop_the_first_failure_ends_the_run(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: group_id == "0-1"
    with pytest.raises(RewardError, match=r"0-1/1: raised: ValueError: no .*reward\.on_failure"):
        world.rollouts(on_failure="stop").take(4)


def test_more_failures_than_a_step_has_groups_end_the_run(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: True
    with pytest.raises(RewardError, match=r"failed for 5 groups within one step.*no"):
        world.rollouts().take(4)
    assert world.ledger.balance().failed == {"raised: ValueError: no": 5}


def test_failures_are_counted_anew_in_each_step(make_world: Callable[..., World], arrivals: random.Random) -> None:
    world = make_world()
    world.reward.failing = lambda group_id: int(group_id.split("-")[1]) % 2 == 0
    rollouts = world.rollouts()
    for _ in range(5):
        assert len(rollouts.take(4)) == 4
        rollouts.publish()


def test_silence_past_the_deadline_names_whom_was_waited_for(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: ([], references))
    with pytest.raises(EngineError, match="within 3 s from rollout engine 0: generate, rollout engine 1: generate"):
        make_world().rollouts().take(4)


def test_a_restored_stream_goes_on_where_the_state_was_taken(
    make_world: Callable[..., World], arrivals: random.Random
) -> None:
    def step(rollouts: RolloutStream, world: World) -> list[Any]:
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
    assert resumed.restore(state) is None
    resumed.synchronize()
    assert later_world.version == 2
    assert [step(resumed, later_world) for _ in range(2)] == expected[2:]
    by_engine = [[request.group_id for request in engine.requests] for engine in undisturbed_world.engines]
    for engine, whole in zip(later_world.engines, by_engine, strict=True):
        mine = [request.group_id for request in engine.requests]
        assert whole[-len(mine) :] == mine, "each group goes to the engine it would have gone to"
