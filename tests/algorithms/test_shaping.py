"""Reward shaping: each stage by hand, their order, what they report, and rewards on the scale of the run so far."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.shaping import RunningMoments, Shaping, shape_rewards, soft_overlong_punishment
from slipstream.errors import RewardError, TrainingError

REWARD = st.floats(-100, 100)
BATCHES = st.lists(st.lists(REWARD, max_size=6), min_size=1, max_size=6)


@dataclass
class Answer:
    """What shaping reads of a trajectory."""

    reward: float | None = 0.0
    response_length: int = 10
    finish_reason: str = "stop"
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    trajectory_id: str = "0-0/0"


def shape(
    answers: list[Answer], moments: RunningMoments | None = None, *, update_moments: bool = True, **shaping: Any
) -> tuple[list[float], dict[str, float]]:
    rewards, changes = shape_rewards(
        answers,
        Shaping(**shaping),
        max_response_tokens=100,
        moments=moments or RunningMoments(),
        update_moments=update_moments,
    )
    return rewards.tolist(), changes


def test_without_a_stage_rewards_stay_as_they_are():
    assert shape([Answer(0.1), Answer(-3.0)]) == ([0.1, -3.0], {})
    assert shape([], length_penalty=1.0) == ([], {"length_penalty": 0.0})


def test_weights_make_the_reward_from_exactly_these_parts():
    parts = {"right": 1.0, "format": 0.5, "style": 7.0}
    rewards, changes = shape([Answer(8.5, reward_parts=parts)], weights={"right": 2.0, "format": -1.0})
    assert rewards == [1.5]
    assert changes == {"weights": 1.5 - 8.5}


def test_a_part_that_a_trajectory_lacks_is_an_error_that_names_both():
    answers = [
        Answer(1.0, reward_parts={"right": 1.0}, trajectory_id="0-7/0"),
        Answer(1.0, reward_parts={"format": 1.0, "style": 0.0}, trajectory_id="0-7/1"),
        Answer(1.0, trajectory_id="0-7/2"),
    ]
    with pytest.raises(RewardError, match=r"trajectory 0-7/1 has no part 'right' to weigh; found format, style"):
        shape(answers, weights={"right": 1.0})
    with pytest.raises(RewardError, match=r"trajectory 0-7/2 has no part 'right' to weigh; found no parts"):
        shape(answers[2:], weights={"right": 1.0})


def test_the_length_penalty_is_in_proportion_to_the_longest_response_allowed():
    rewards, changes = shape([Answer(1.0, 100), Answer(1.0, 25), Answer(1.0, 0)], length_penalty=0.4)
    assert rewards == pytest.approx([0.6, 0.9, 1.0])
    assert changes == {"length_penalty": pytest.approx(-0.5 / 3)}


def test_the_truncation_penalty_falls_on_responses_that_were_cut():
    answers = [Answer(1.0, finish_reason=reason) for reason in ("stop", "length", "environment", "aborted")]
    assert shape(answers, truncation_penalty=2.0) == ([1.0, -1.0, 1.0, 1.0], {"truncation_penalty": -0.5})


def test_the_soft_overlong_punishment_rises_over_the_buffer():
    lengths = torch.tensor([0, 80, 85, 90, 100, 120])
    punishment = soft_overlong_punishment(lengths, max_response_tokens=100, buffer_share=0.2)
    assert punishment.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    rewards, changes = shape([Answer(1.0, 90), Answer(1.0, 10)], overlong_buffer_share=0.2, overlong_penalty=3.0)
    assert rewards == pytest.approx([1.0 - 1.5, 1.0])
    assert changes == {"overlong_penalty": pytest.approx(-0.75)}


@given(st.integers(0, 200), st.integers(1, 200), st.floats(0.01, 0.99))
def test_the_soft_overlong_punishment_agrees_with_the_paper(length, longest, share):
    buffer = share * longest
    if length <= longest - buffer:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer) - length) / buffer
    else:
        expected = -1.0
    found = soft_overlong_punishment(torch.tensor([length]), max_response_tokens=longest, buffer_share=share)
    assert found.item() == pytest.approx(expected, abs=1e-9)


def test_a_users_function_gets_rewards_and_trajectories():
    def favour_short(rewards: Tensor, answers: list[Answer]) -> Tensor:
        rewards -= torch.tensor([answer.response_length for answer in answers]) / 10
        return rewards

    rewards, changes = shape([Answer(1.0, 10), Answer(1.0, 30)], function=favour_short)
    assert rewards == pytest.approx([0.0, -2.0])
    assert changes == {"function": pytest.approx(-2.0)}, "measured from what the function was given"


def test_a_users_function_that_returns_something_else_is_told_so():
    with pytest.raises(TrainingError, match=r"the shaping function .* shape \[2\], found shape \[\]"):
        shape([Answer(), Answer()], function=lambda rewards, _: rewards.mean())


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_trajectory_without_a_finite_reward_is_refused(reward):
    with pytest.raises(ValueError, match=f"trajectory 0-3/1 must have a finite reward to be shaped, found {reward}"):
        shape([Answer(1.0), Answer(reward, trajectory_id="0-3/1")])


def test_clipping_comes_last():
    assert shape([Answer(5.0), Answer(-5.0), Answer(0.5)], clip=(-1.0, 2.0))[0] == [2.0, -1.0, 0.5]
    assert shape([Answer(5.0, 100)], clip=(-1.0, 2.0), length_penalty=1.0)[0] == [2.0]


def test_the_function_sees_weighted_rewards_and_penalties_come_after_it():
    answers = [Answer(9.0, 100, "length", {"right": 1.0})]
    rewards, changes = shape(
        answers,
        weights={"right": 2.0},
        function=lambda rewards, _: rewards * 10,
        length_penalty=1.0,
        truncation_penalty=2.0,
        overlong_buffer_share=0.5,
        overlong_penalty=4.0,
    )
    assert rewards == [2.0 * 10 - 1.0 - 2.0 - 4.0]
    assert list(changes) == ["weights", "function", "length_penalty", "truncation_penalty", "overlong_penalty"]


@given(st.lists(st.tuples(REWARD, st.integers(0, 100)), min_size=1, max_size=8))
def test_what_the_stages_changed_adds_up(answers):
    given = [Answer(reward, length, "length" if length == 100 else "stop") for reward, length in answers]
    rewards, changes = shape(
        given,
        length_penalty=0.3,
        truncation_penalty=1.0,
        overlong_buffer_share=0.2,
        normalize=True,
        clip=(-2.0, 2.0),
    )
    raw = statistics.fmean(reward for reward, _ in answers)
    assert statistics.fmean(rewards) - raw == pytest.approx(sum(changes.values()), abs=1e-9)


def test_normalization_counts_the_batch_in_and_uses_the_run_so_far():
    moments = RunningMoments()
    assert shape([Answer(1.0), Answer(3.0)], moments, normalize=True)[0] == pytest.approx([-1.0, 1.0])
    # Now 1, 3, 5, 7: mean 4, deviation sqrt(5).
    expected = [1 / math.sqrt(5), 3 / math.sqrt(5)]
    assert shape([Answer(5.0), Answer(7.0)], moments, normalize=True)[0] == pytest.approx(expected)


def test_rewards_that_are_only_compared_with_are_not_counted():
    moments = RunningMoments()
    shape([Answer(1.0), Answer(3.0)], moments, normalize=True)
    before = moments.state()
    assert shape([Answer(4.0)], moments, update_moments=False, normalize=True)[0] == pytest.approx([2.0])
    assert moments.state() == before


def test_rewards_that_are_not_normalized_are_not_counted():
    moments = RunningMoments()
    shape([Answer(1.0)], moments)
    assert moments.count == 0


def test_a_run_whose_rewards_were_all_the_same_gives_zero():
    moments = RunningMoments()
    for _ in range(5):
        assert shape([Answer(0.1)] * 7, moments, normalize=True)[0] == [0.0] * 7


@given(BATCHES)
def test_moments_merged_batch_by_batch_are_those_of_all_rewards(batches):
    moments = RunningMoments()
    for rewards in batches:
        moments.update(torch.tensor(rewards, dtype=torch.float64))
    together = [reward for rewards in batches for reward in rewards]
    assert moments.count == len(together)
    assert moments.mean == pytest.approx(statistics.fmean(together) if together else 0.0, abs=1e-9)
    assert moments.std == pytest.approx(statistics.pstdev(together) if together else 0.0, abs=1e-6)


def test_moments_stay_exact_far_from_zero():
    moments = RunningMoments()
    for offset in range(100):
        moments.update(torch.tensor([1e8 + offset % 2], dtype=torch.float64))
    assert moments.std == pytest.approx(0.5, rel=1e-6)


@given(BATCHES, st.lists(REWARD, min_size=1, max_size=4))
def test_restored_moments_go_on_as_if_the_run_had_not_stopped(batches, last):
    straight = RunningMoments()
    for rewards in batches:
        straight.update(torch.tensor(rewards, dtype=torch.float64))
    resumed = RunningMoments()
    resumed.restore(json.loads(json.dumps(straight.state())))
    for moments in (straight, resumed):
        moments.update(torch.tensor(last, dtype=torch.float64))
    assert resumed.state() == straight.state()
