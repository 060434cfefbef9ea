"""Which processes a run has and what each gets, for machines of all sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cluster.placement import ACTOR_CPU_SHARE, plan_placement
from slipstream.config.schema import (
    DataConfig,
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


def rl(*, ranks: int = 1, engines: int = 1, workers: int = 1, **threads: int) -> RLConfig:
    return RLConfig(
        steps=1,
        output_dir="o",
        model=MODEL,
        data=DATA,
        reward=RewardConfig(function="number", workers=workers),
        rollout=RolloutConfig(engines=engines, threads=threads.get("rollout")),
        training=TrainingConfig(ranks=ranks, threads=threads.get("training")),
    )


def evaluation(*, engines: int) -> EvaluateConfig:
    rollout = RolloutConfig(engines=engines)
    reward = RewardConfig(function="number")
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


def test_engines_that_take_turns_each_use_all_cores() -> None:
    placement = plan_placement(rl(), cpus=2, gpus=0)
    assert placement.alternating
    assert [actor.threads for actor in placement.of_role("learner") + placement.of_role("rollout")] == [2, 2]


def test_ranks_and_engines_divide_the_cores_among_themselves() -> None:
    placement = plan_placement(rl(ranks=2, engines=4), cpus=8, gpus=0)
    assert [actor.threads for actor in placement.of_role("learner")] == [4, 4]
    assert [actor.threads for actor in placement.of_role("rollout")] == [2, 2, 2, 2]


def test_configured_threads_are_taken_as_they_are() -> None:
    placement = plan_placement(rl(training=3, rollout=5), cpus=2, gpus=0)
    assert placement.of_role("learner")[0].threads == 3
    assert placement.of_role("rollout")[0].threads == 5


def test_sft_has_learners_only_and_evaluation_has_none() -> None:
    sft = SFTConfig(steps=1, output_dir="o", model=MODEL, data=DATA, training=TrainingConfig(ranks=2))
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
    placement = plan_placement(rl(ranks=ranks, engines=engines, workers=workers), cpus=cpus, gpus=0)
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
    assert learner + rollout == 1
    assert 2 * learner > 1


def test_more_gpus_wanted_than_there_are_is_an_error_that_names_the_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(rl(ranks=4, engines=1), cpus=8, gpus=2)
    assert str(caught.value) == (
        "training.ranks (4) and rollout.engines (1) need 4 GPUs, this machine has 2; lower them to what fits"
    )
    with pytest.raises(ConfigError, match=r"^rollout\.engines \(4\) need 4 GPUs, this machine has 2; lower it"):
        plan_placement(evaluation(engines=4), cpus=8, gpus=2)
