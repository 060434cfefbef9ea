"""Which processes a run has and what each gets, for machines of all sizes."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster.placement import ACTOR_CPU_SHARE, Placement, nearest_layout, plan_placement
from slipstream.config.algorithm import AlgorithmConfig
from slipstream.config.data import DataConfig
from slipstream.config.schema import (
    EvaluateConfig,
    EvaluationConfig,
    ModelConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    SFTConfig,
    TrainingConfig,
)
from slipstream.errors import ConfigError

MODEL = ModelConfig(path="m")
DATA = DataConfig(source="d.jsonl", response_key="response")


def rl(
    *,
    ranks: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    engines: int = 1,
    width: int = 1,
    workers: int = 1,
    algorithm: str = "grpo",
    reward: dict | None = None,
    **threads: int,
) -> RLConfig:
    return RLConfig(
        steps=1,
        output_dir="o",
        model=MODEL,
        data=DATA,
        reward=RewardConfig(**(reward or {"function": "math"}), workers=workers),
        rollout=RolloutConfig(engines=engines, tensor_parallel=width, threads=threads.get("rollout")),
        algorithm=AlgorithmConfig(preset=algorithm),  # type: ignore[arg-type]
        training=TrainingConfig(
            data_parallel=ranks // (sequence * tensor),
            sequence_parallel=sequence,
            tensor_parallel=tensor,
            threads=threads.get("training"),
        ),
    )


def evaluation(*, engines: int, width: int = 1, reward_model: str | None = None) -> EvaluateConfig:
    rollout = RolloutConfig(engines=engines, tensor_parallel=width)
    reward = RewardConfig(function="math", model=reward_model)
    return EvaluateConfig(
        output_dir="o", model=MODEL, reward=reward, rollout=rollout, evaluation=EvaluationConfig(data=DATA)
    )


def test_every_process_of_a_run_is_named() -> None:
    placement = plan_placement(rl(ranks=2, engines=2, workers=2), cpus=4, gpus=0)
    assert [actor.name for actor in placement.actors] == [
        "controller",
        "learner rank 0",
        "learner rank 1",
        "rollout engine 0",
        "rollout engine 1",
        "reward worker 0",
        "reward worker 1",
    ]


def test_a_service_that_scores_needs_no_reward_worker() -> None:
    placement = plan_placement(rl(workers=2, reward={"urls": ["http://127.0.0.1:1"]}), cpus=4, gpus=0)
    assert placement.of_role("reward") == ()


def test_a_critic_has_as_many_ranks_as_the_learner_and_their_threads() -> None:
    placement = plan_placement(rl(ranks=2, engines=2, algorithm="ppo"), cpus=8, gpus=0)
    assert [actor.name for actor in placement.of_role("critic")] == ["critic rank 0", "critic rank 1"]
    assert [actor.threads for actor in placement.of_role("critic")] == [4, 4]
    assert placement.of_role("critic") == tuple(
        replace(actor, name=actor.name.replace("learner", "critic"), role="critic")
        for actor in placement.of_role("learner")
    )
    assert not plan_placement(rl(), cpus=8, gpus=0).of_role("critic")


def test_engines_that_take_turns_each_use_all_cores() -> None:
    placement = plan_placement(rl(), cpus=2, gpus=0)
    assert placement.alternating
    assert [actor.threads for actor in placement.of_role("learner") + placement.of_role("rollout")] == [2, 2]


def test_ranks_and_engines_divide_the_cores_among_themselves() -> None:
    placement = plan_placement(rl(ranks=2, engines=4), cpus=8, gpus=0)
    assert [actor.threads for actor in placement.of_role("learner")] == [4, 4]
    assert [actor.threads for actor in placement.of_role("rollout")] == [2, 2, 2, 2]


def test_the_workers_of_engines_divide_the_cores_like_engines_of_one() -> None:
    placement = plan_placement(rl(engines=2, width=2), cpus=8, gpus=0)
    assert [actor.name for actor in placement.of_role("rollout")] == ["rollout engine 0", "rollout engine 1"]
    assert [actor.threads for actor in placement.of_role("rollout")] == [2, 2]
    assert placement.of_role("learner")[0].threads == 8
    alone = plan_placement(evaluation(engines=1, width=4), cpus=8, gpus=0)
    assert alone.of_role("rollout")[0].threads == 2


def test_configured_threads_are_taken_as_they_are() -> None:
    placement = plan_placement(rl(training=3, rollout=5), cpus=2, gpus=0)
    assert placement.of_role("learner")[0].threads == 3
    assert placement.of_role("rollout")[0].threads == 5


def test_sft_has_learners_only_and_evaluation_has_none() -> None:
    sft = SFTConfig(steps=1, output_dir="o", model=MODEL, data=DATA, training=TrainingConfig(data_parallel=2))
    assert {actor.role for actor in plan_placement(sft, cpus=2, gpus=0).actors} == {"controller", "learner"}
    answering = plan_placement(evaluation(engines=2), cpus=4, gpus=0)
    assert {actor.role for actor in answering.actors} == {"controller", "rollout", "reward"}
    assert [actor.threads for actor in answering.of_role("rollout")] == [2, 2]


@given(
    ranks=st.integers(1, 16),
    engines=st.integers(1, 16),
    workers=st.integers(1, 8),
    cpus=st.integers(1, 128),
)
def test_what_is_asked_of_ray_always_fits_one_core_and_every_process_can_compute(
    ranks: int, engines: int, workers: int, cpus: int
) -> None:
    config = rl(ranks=ranks, engines=engines, workers=workers, algorithm="ppo")
    placement = plan_placement(config, cpus=cpus, gpus=0)
    assert sum(actor.cpus for actor in placement.actors) <= 1
    assert all(1 <= actor.threads <= cpus for actor in placement.actors)
    assert all(actor.gpus == 0 for actor in placement.actors)
    assert all(actor.cpus in (0.0, ACTOR_CPU_SHARE) for actor in placement.actors)


def test_on_enough_gpus_everybody_has_one() -> None:
    placement = plan_placement(rl(ranks=2, engines=2), cpus=8, gpus=4)
    assert [actor.gpus for actor in placement.actors if actor.role in ("learner", "rollout")] == [1, 1, 1, 1]


def test_on_fewer_gpus_a_rank_and_an_engine_share_one_and_two_ranks_never_do() -> None:
    placement = plan_placement(rl(ranks=2, engines=2), cpus=8, gpus=2)
    learner, rollout = placement.of_role("learner")[0].gpus, placement.of_role("rollout")[0].gpus
    assert learner + rollout <= 1
    assert 2 * learner > 1


def test_a_reward_model_has_an_actor_with_the_threads_of_an_engine_and_no_workers_without_a_function() -> None:
    alone = plan_placement(rl(engines=2, reward={"model": "m"}), cpus=8, gpus=0)
    assert [actor.name for actor in alone.of_role("reward_model")] == ["reward engine"]
    assert alone.of_role("reward_model")[0].threads == alone.of_role("rollout")[0].threads == 4
    assert not alone.of_role("reward")
    both = plan_placement(rl(workers=2, reward={"model": "m", "function": "math"}), cpus=8, gpus=0)
    assert len(both.of_role("reward_model")) == 1 and len(both.of_role("reward")) == 2
    assert not plan_placement(rl(), cpus=8, gpus=0).of_role("reward_model")


@pytest.mark.parametrize(("gpus", "shares"), [(3, (1.0, 1.0)), (2, (0.95, 0.05))])
def test_a_reward_model_has_a_gpu_of_its_own_only_where_one_is_left(gpus: int, shares: tuple[float, float]) -> None:
    for placement in (
        plan_placement(rl(reward={"model": "m"}), cpus=8, gpus=gpus),
        plan_placement(evaluation(engines=2, reward_model="m"), cpus=8, gpus=gpus),
    ):
        assert (placement.of_role("rollout")[0].gpus, placement.of_role("reward_model")[0].gpus) == shares


@pytest.mark.parametrize(("gpus", "shares"), [(4, (1.0, 2.0, 1.0)), (3, (0.95, 2.0, 0.05))])
def test_an_engine_of_two_workers_has_two_whole_gpus(gpus: int, shares: tuple[float, ...]) -> None:
    placement = plan_placement(rl(width=2, reward={"model": "m"}), cpus=8, gpus=gpus)
    roles = ("learner", "rollout", "reward_model")
    assert tuple(placement.of_role(role)[0].gpus for role in roles) == shares  # type: ignore[arg-type]


def test_an_engine_of_several_workers_shares_no_gpu_and_is_refused_with_the_nearest_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(rl(ranks=2, engines=2, width=2), cpus=8, gpus=4)
    assert str(caught.value) == (
        "training.data_parallel (2) x training.sequence_parallel (1) x training.tensor_parallel (1) and "
        "rollout.engines (2) x rollout.tensor_parallel (2) need 6 GPUs, this machine has 4; the nearest that fits is "
        "training.data_parallel 2, training.sequence_parallel 1, training.tensor_parallel 1, rollout.engines 1, "
        "rollout.tensor_parallel 2"
    )
    with pytest.raises(ConfigError, match=r"need 3 GPUs, .* nearest that fits is rollout\.engines 1, .*parallel 1$"):
        plan_placement(evaluation(engines=1, width=2, reward_model="m"), cpus=8, gpus=2)


def test_more_gpus_wanted_than_there_are_is_an_error_that_names_the_keys_and_the_nearest_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(rl(ranks=4, engines=1), cpus=8, gpus=2)
    assert str(caught.value) == (
        "training.data_parallel (4) x training.sequence_parallel (1) x training.tensor_parallel (1) and "
        "rollout.engines (1) need 4 GPUs, this machine has 2; the nearest that fits is training.data_parallel 2, "
        "training.sequence_parallel 1, training.tensor_parallel 1, rollout.engines 1"
    )
    with pytest.raises(
        ConfigError, match=r"^rollout\.engines \(4\) need 4 GPUs, this machine has 2; the nearest that fi"
    ):
        plan_placement(evaluation(engines=4), cpus=8, gpus=2)


def test_the_nearest_layout_keeps_the_number_of_ranks_first_and_then_their_share_of_a_sequence() -> None:
    assert nearest_layout((4, 2, 1), range(1, 9)) == (4, 2, 1)
    assert nearest_layout((4, 2, 1), range(1, 7)) == (3, 2, 1)
    assert nearest_layout((1, 8, 1), range(1, 7)) == (1, 6, 1)
    assert nearest_layout((2, 4, 1), range(1, 6)) == (1, 5, 1)
    assert nearest_layout((2, 1, 1), {1, 3}) == (1, 1, 1)


def test_the_nearest_layout_keeps_the_ranks_that_share_weights_where_it_can_and_never_has_more_of_them() -> None:
    assert nearest_layout((2, 2, 2), range(1, 8)) == (3, 1, 2)
    assert nearest_layout((1, 1, 4), range(1, 4)) == (1, 1, 3)
    assert nearest_layout((2, 1, 2), range(1, 4)) == (1, 1, 2)
    assert nearest_layout((2, 1, 2), {1, 3}) == (3, 1, 1)
    assert nearest_layout((1, 1, 2), {4}) == (2, 1, 2)


def place(placement: Placement, gpus: int, data: st.DataObject) -> dict[str, int]:
    """The GPU of each actor, placed in their order like Ray does: on any GPU with room, whichever `data` draws.

    Of an actor with several GPUs, which are whole ones, the last.
    """
    free = [100] * gpus
    found = {}
    for actor in (actor for actor in placement.actors if actor.gpus):
        pieces = [100] * round(actor.gpus) if actor.gpus > 1 else [round(actor.gpus * 100)]
        for share in pieces:
            places = [gpu for gpu in range(gpus) if free[gpu] >= share]
            assert places, f"no room for {actor.name}"
            found[actor.name] = data.draw(st.sampled_from(places), label=actor.name)
            free[found[actor.name]] -= share
    return found


@given(
    ranks=st.integers(1, 8),
    engines=st.integers(1, 8),
    width=st.integers(1, 3),
    gpus=st.integers(1, 24),
    algorithm=st.sampled_from(["grpo", "ppo"]),
    reward=st.sampled_from([{"function": "math"}, {"model": "m"}]),
    data=st.data(),
)
def test_wherever_ray_puts_them_all_fit_and_no_two_ranks_of_a_learner_share_a_gpu(
    ranks: int, engines: int, width: int, gpus: int, algorithm: str, reward: dict, data: st.DataObject
) -> None:
    config = rl(ranks=ranks, engines=engines, width=width, algorithm=algorithm, reward=reward)
    try:
        placement = plan_placement(config, cpus=8, gpus=gpus)
    except ConfigError:
        return
    places = place(placement, gpus, data)
    for kind in ("learner", "critic"):
        on_gpu = Counter(gpu for name, gpu in places.items() if name.startswith(kind))
        assert set(on_gpu.values()) <= {1}


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus", "shares"),
    [
        (2, 2, 6, (1.0, 1.0, 1.0)),
        (2, 4, 4, (0.51, 0.51, 0.44)),
        (1, 1, 2, (0.51, 0.51, 0.44)),
        (2, 2, 2, (0.51, 0.25, 0.19)),
        (1, 1, 1, (0.51, 0.25, 0.19)),
    ],
)
def test_with_a_critic_two_or_three_share_a_gpu_where_there_are_too_few(
    ranks: int, engines: int, gpus: int, shares: tuple[float, ...]
) -> None:
    placement = plan_placement(rl(ranks=ranks, engines=engines, algorithm="ppo"), cpus=8, gpus=gpus)
    assert tuple(placement.of_role(role)[0].gpus for role in ("learner", "critic", "rollout")) == shares  # type: ignore[arg-type]


def test_ranks_for_which_a_critic_has_no_safe_place_are_refused_with_the_nearest_that_have() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(rl(ranks=2, engines=1, algorithm="ppo"), cpus=8, gpus=3)
    assert str(caught.value) == (
        "training.data_parallel (2) x training.sequence_parallel (1) x training.tensor_parallel (1) and "
        "rollout.engines (1), with a critic, need 4 GPUs, this machine has 3; the nearest that fits is "
        "training.data_parallel 1, "
        "training.sequence_parallel 1, training.tensor_parallel 1, rollout.engines 1"
    )


@given(
    data=st.integers(1, 6),
    sequence=st.integers(1, 4),
    tensor=st.integers(1, 3),
    engines=st.integers(1, 8),
    width=st.integers(1, 3),
    gpus=st.integers(1, 12),
    algorithm=st.sampled_from(["grpo", "ppo"]),
    max_staleness=st.sampled_from([0, 2]),
)
def test_what_is_called_the_nearest_does_fit(
    data: int, sequence: int, tensor: int, engines: int, width: int, gpus: int, algorithm: str, max_staleness: int
) -> None:
    def config(data: int, sequence: int, tensor: int, engines: int, width: int = 1) -> RLConfig:
        ranks = data * sequence * tensor
        made = rl(ranks=ranks, sequence=sequence, tensor=tensor, engines=engines, width=width, algorithm=algorithm)
        return made.model_copy(update={"rollout": made.rollout.model_copy(update={"max_staleness": max_staleness})})

    try:
        plan_placement(config(data, sequence, tensor, engines, width), cpus=8, gpus=gpus)
    except ConfigError as error:
        named = re.findall(r"(?:parallel|engines) (\d+)", str(error).partition("the nearest that fits is")[2])
        if not named:
            learners = 2 if algorithm == "ppo" else 1
            assert max_staleness and f"needs at least {learners + 1}" in str(error) and gpus <= learners
            return
        plan_placement(config(*map(int, named)), cpus=8, gpus=gpus)
