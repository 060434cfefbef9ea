"""Advantages: by hand, against a slow reference written from the paper, and the cases in which a group says nothing."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.advantages import group_advantages

REWARD = st.floats(-100, 100, width=32)
GROUPED_REWARDS = st.lists(st.tuples(st.sampled_from("abc"), REWARD), min_size=1, max_size=20)


def advantages(rewards: list[float], group_ids: str | list[str], *, normalize_by_std: bool = True) -> list[float]:
    return group_advantages(torch.tensor(rewards), list(group_ids), normalize_by_std=normalize_by_std).tolist()


def reference_advantages(rewards: list[float], group_ids: list[str]) -> list[float]:
    """(r - mean) / std of each group, one trajectory at a time, in plain Python."""
    result = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = [r for r, g in zip(rewards, group_ids, strict=True) if g == group_id]
        is_constant = max(group) - min(group) <= 1e-6 * max(1.0, max(abs(r) for r in group))
        result.append(0.0 if is_constant else (reward - statistics.fmean(group)) / statistics.stdev(group))
    return result


def test_one_right_answer_of_four_by_hand():
    # Mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4; divided by n - 1 = 3 that is 1/4; std 1/2.
    assert advantages([1.0, 0.0, 0.0, 0.0], "aaaa") == [1.5, -0.5, -0.5, -0.5]


def test_without_the_division_only_the_mean_is_subtracted():
    assert advantages([1.0, 0.0, 0.0, 0.0], "aaaa", normalize_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_groups_are_found_by_id_when_their_members_alternate():
    half = math.sqrt(0.5)
    assert advantages([1.0, 0.0, 0.0, 0.0], "abab") == pytest.approx([half, 0.0, -half, 0.0])


def test_a_group_short_of_a_member_does_not_shift_the_groups_behind_it():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    whole = advantages(rewards, "aaaabbbbcccc")
    short = advantages(rewards[:1] + rewards[2:], "aaabbbbcccc")
    assert short[3:] == whole[4:]
    assert short[:3] == advantages([1.0, 0.0, 1.0], "aaa")


def test_a_group_of_one_has_no_baseline_and_gets_zero():
    assert advantages([5.0, 1.0, 0.0], "abb")[0] == 0.0
    assert advantages([5.0], "a", normalize_by_std=False) == [0.0]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_constant_group_gets_exactly_zero(normalize_by_std):
    assert advantages([0.1] * 8, "a" * 8, normalize_by_std=normalize_by_std) == [0.0] * 8


def test_float_noise_does_not_make_a_group_vary():
    noisy = [sum([0.1] * 3), 0.3, 0.3, 0.30000001]
    assert advantages(noisy, "aaaa") == [0.0] * 4
    assert advantages([1e6, 1e6 + 0.25], "aa") == [0.0] * 2


def test_a_small_real_difference_counts():
    assert advantages([0.0, 1e-4], "aa") == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_position_and_group(bad):
    with pytest.raises(ValueError, match=r"position 2 \(group b: (nan|inf|-inf)\).*leave trajectories"):
        advantages([1.0, 0.0, bad, 1.0], "aabb")


def test_rewards_and_ids_must_be_as_many():
    with pytest.raises(ValueError, match=r"one reward per group id, found shape \[2\] and 3 ids"):
        advantages([1.0, 0.0], "aab")


def test_no_trajectories_have_no_advantages():
    assert advantages([], "") == []


def test_whole_number_rewards_give_float_advantages():
    result = group_advantages(torch.tensor([1, 0, 0, 0]), list("aaaa"), normalize_by_std=True)
    assert result.tolist() == [1.5, -0.5, -0.5, -0.5]


@given(GROUPED_REWARDS)
def test_agrees_with_the_slow_reference(grouped):
    group_ids, rewards = [g for g, _ in grouped], [r for _, r in grouped]
    assert advantages(rewards, group_ids) == pytest.approx(reference_advantages(rewards, group_ids), rel=1e-4, abs=1e-5)


@given(GROUPED_REWARDS, st.randoms())
def test_order_does_not_matter(grouped, random):
    order = list(range(len(grouped)))
    random.shuffle(order)
    straight = advantages([r for _, r in grouped], [g for g, _ in grouped])
    shuffled = advantages([grouped[i][1] for i in order], [grouped[i][0] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-5, abs=1e-6)


@given(GROUPED_REWARDS)
def test_a_group_has_mean_zero_and_unit_variance_or_is_zero(grouped):
    group_ids = [g for g, _ in grouped]
    result = advantages([r for _, r in grouped], group_ids)
    for name in set(group_ids):
        members = [a for a, g in zip(result, group_ids, strict=True) if g == name]
        assert all(math.isfinite(a) for a in members)
        if any(members):
            assert statistics.fmean(members) == pytest.approx(0.0, abs=1e-5)
            assert statistics.stdev(members) == pytest.approx(1.0, rel=1e-4)
