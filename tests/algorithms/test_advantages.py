"""Advantages: of groups and of tokens, by hand and against slow references from the papers; whatever a batch holds."""

import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.advantages import (
    ESTIMATORS,
    ScoredBatch,
    estimate_advantages,
    group_advantages,
    leave_one_out_advantages,
    value_targets,
    whiten,
)
from slipstream.config.algorithm import ADVANTAGES
from slipstream.errors import TrainingError

REWARD = st.floats(-100, 100, width=32)
GROUPED_REWARDS = st.lists(st.tuples(st.sampled_from("abc"), REWARD), min_size=1, max_size=20)
NUMBER = st.floats(-10, 10, width=32)
TOKEN = st.tuples(NUMBER, NUMBER)
SHARE = st.sampled_from([0.0, 0.5, 0.9, 1.0])
TRAJECTORIES = st.lists(st.tuples(st.sampled_from("abc"), st.lists(TOKEN, max_size=9)), min_size=1, max_size=8)


def advantages(rewards: list[float], group_ids: str | list[str], *, normalize_by_std: bool = True) -> list[float]:
    return group_advantages(torch.tensor(rewards), list(group_ids), normalize_by_std=normalize_by_std).tolist()


def leave_one_out(rewards: list[float], group_ids: str | list[str]) -> list[float]:
    return leave_one_out_advantages(torch.tensor(rewards), list(group_ids)).tolist()


def reference_advantages(rewards: list[float], group_ids: list[str]) -> list[float]:
    """(r - mean) / std of each group, one trajectory at a time, in plain Python."""
    result = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = [r for r, g in zip(rewards, group_ids, strict=True) if g == group_id]
        is_constant = max(group) - min(group) <= 1e-6 * max(1.0, max(abs(r) for r in group))
        result.append(0.0 if is_constant else (reward - statistics.fmean(group)) / statistics.stdev(group))
    return result


def reference_leave_one_out(rewards: list[float], group_ids: list[str]) -> list[float]:
    """Reward minus the mean of the others, one trajectory at a time; exact but for groups of one."""
    result = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and group_ids[j] == group_ids[i]]
        result.append(reward - statistics.fmean(others) if others else 0.0)
    return result


def test_one_right_answer_of_four_by_hand():
    # Mean 1/4; squared deviations 9/16 + 3 * 1/16 = 3/4; divided by n - 1 = 3 that is 1/4; std 1/2.
    assert advantages([1.0, 0.0, 0.0, 0.0], "aaaa") == [1.5, -0.5, -0.5, -0.5]


def test_without_the_division_only_the_mean_is_subtracted():
    assert advantages([1.0, 0.0, 0.0, 0.0], "aaaa", normalize_by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_leaving_one_out_compares_with_the_mean_of_the_others():
    # 1 - 0, and 0 - 1/3 three times.
    assert leave_one_out([1.0, 0.0, 0.0, 0.0], "aaaa") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert leave_one_out([3.0, 1.0], "aa") == [2.0, -2.0]


def test_groups_are_found_by_id_when_their_members_alternate():
    half = math.sqrt(0.5)
    assert advantages([1.0, 0.0, 0.0, 0.0], "abab") == pytest.approx([half, 0.0, -half, 0.0])
    assert leave_one_out([1.0, 0.0, 0.0, 0.0], "abab") == [1.0, 0.0, -1.0, 0.0]


def test_a_group_short_of_a_member_does_not_shift_the_groups_behind_it():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    whole = advantages(rewards, "aaaabbbbcccc")
    short = advantages(rewards[:1] + rewards[2:], "aaabbbbcccc")
    assert short[3:] == whole[4:]
    assert short[:3] == advantages([1.0, 0.0, 1.0], "aaa")


def test_a_group_of_one_has_no_baseline_and_gets_zero():
    assert advantages([5.0, 1.0, 0.0], "abb")[0] == 0.0
    assert advantages([5.0], "a", normalize_by_std=False) == [0.0]
    assert leave_one_out([5.0, 1.0, 0.0], "abb") == [0.0, 1.0, -1.0]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_a_constant_group_gets_exactly_zero(normalize_by_std):
    assert advantages([0.1] * 8, "a" * 8, normalize_by_std=normalize_by_std) == [0.0] * 8
    assert leave_one_out([0.1] * 8, "a" * 8) == [0.0] * 8


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


@given(GROUPED_REWARDS)
def test_leaving_one_out_agrees_with_the_slow_reference(grouped):
    group_ids, rewards = [g for g, _ in grouped], [r for _, r in grouped]
    expected = reference_leave_one_out(rewards, group_ids)
    assert leave_one_out(rewards, group_ids) == pytest.approx(expected, rel=1e-4, abs=3e-4)


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


def batch(*trajectories: list[float], ids: str | None = None, **changes: Tensor) -> ScoredBatch:
    """Trajectories given by the rewards of their tokens; each its own group if no ids are given."""
    rewards = torch.tensor([reward for trajectory in trajectories for reward in trajectory], dtype=torch.float32)
    group_ids = tuple(ids or map(str, range(len(trajectories))))
    return ScoredBatch(rewards, tuple(map(len, trajectories)), group_ids, **changes)


def random_batch(trajectories: list[tuple[str, list[tuple[float, float]]]]) -> ScoredBatch:
    values = torch.tensor([value for _, tokens in trajectories for _, value in tokens], dtype=torch.float32)
    rewards = [[reward for reward, _ in tokens] for _, tokens in trajectories]
    baselines = torch.arange(len(trajectories), dtype=torch.float32)
    ids = "".join(name for name, _ in trajectories)
    return batch(*rewards, ids=ids, values=values, baselines=baselines, teacher_log_ratios=values / 2)


def estimate(scored: ScoredBatch, estimator: object, *, discount: float = 1.0, gae_lambda: float = 1.0) -> Tensor:
    return estimate_advantages(
        scored, estimator=estimator, normalize_by_std=True, discount=discount, gae_lambda=gae_lambda
    )


def at_last_token(reward: float, tokens: int) -> list[float]:
    return [0.0] * (tokens - 1) + [reward]


def reference_returns(rewards: list[float], discount: float) -> list[float]:
    return [sum(discount**l * reward for l, reward in enumerate(rewards[t:])) for t in range(len(rewards))]  # noqa: E741


def reference_gae(rewards: list[float], values: list[float], discount: float, gae_lambda: float) -> list[float]:
    """The recursion of PPO's authors, one token at a time: A_t = delta_t + discount * lambda * A_(t+1)."""
    advantages: list[float] = []
    following_value = following_advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following_advantage = reward + discount * following_value - value + discount * gae_lambda * following_advantage
        following_value = value
        advantages.insert(0, following_advantage)
    return advantages


def test_the_configuration_knows_every_estimator():
    assert set(ESTIMATORS) == set(ADVANTAGES)


def test_every_token_has_the_advantage_of_its_trajectory_within_the_group():
    scored = batch(at_last_token(1, 2), at_last_token(0, 3), at_last_token(0, 1), at_last_token(0, 1), ids="aaaa")
    assert estimate(scored, "group").tolist() == [1.5] * 2 + [-0.5] * 5
    assert estimate(scored, "leave_one_out").tolist() == pytest.approx([1.0] * 2 + [-1 / 3] * 5)


def test_penalties_of_single_tokens_count_in_the_total_that_groups_compare():
    scored = batch([-0.5, 1.0], [0.0, -0.5, 0.0], ids="aa")
    assert scored.totals.tolist() == [0.5, -0.5]
    assert estimate(scored, "leave_one_out").tolist() == [1.0] * 2 + [-1.0] * 3


def test_groups_are_found_by_id_when_their_trajectories_alternate():
    scored = batch([1.0], [0.0], [0.0], [0.0], ids="abab")
    half = math.sqrt(0.5)
    assert estimate(scored, "group").tolist() == pytest.approx([half, 0.0, -half, 0.0])


def test_a_trajectory_less_in_one_group_changes_no_other():
    trajectories = [at_last_token(float(i % 3 == 0), 1 + i % 4) for i in range(12)]
    whole = estimate(batch(*trajectories, ids="aaaabbbbcccc"), "group").tolist()
    short = estimate(batch(*trajectories[:1], *trajectories[2:], ids="aaabbbbcccc"), "group").tolist()
    others = sum(map(len, trajectories[4:]))
    assert short[-others:] == whole[-others:]


@pytest.mark.parametrize("estimator", ["group", "leave_one_out"])
def test_eight_rewards_of_a_tenth_are_exactly_no_signal(estimator):
    assert estimate(batch(*[at_last_token(0.1, 3)] * 8, ids="a" * 8), estimator).tolist() == [0.0] * 24


def test_a_trajectory_without_policy_tokens_is_not_compared_with():
    scored = batch([1.0], [], [0.0], ids="aaa")
    assert estimate(scored, "leave_one_out").tolist() == [1.0, -1.0]


def test_one_step_of_discount_for_each_policy_token():
    # Two policy tokens, then three of the environment, which never get here: the reward sits on the second.
    assert estimate(batch([0.0, 1.0]), "returns", discount=0.9).tolist() == pytest.approx([0.9, 1.0])


def test_environment_tokens_in_between_cost_no_discount():
    loss_mask = [1, 1, 0, 0, 1, 1]
    scored = batch(at_last_token(1, sum(loss_mask)))
    assert estimate(scored, "returns").tolist() == [1.0] * 4
    assert estimate(scored, "returns", discount=0.5).tolist() == [0.125, 0.25, 0.5, 1.0]


def test_returns_hold_the_rewards_of_later_tokens_of_the_same_trajectory_only():
    assert estimate(batch([1.0, 2.0], [4.0, 8.0]), "returns").tolist() == [3.0, 2.0, 12.0, 8.0]


def test_the_greedy_answer_is_the_baseline_of_what_is_still_to_come():
    scored = batch([-0.25, 1.0], [0.0], baselines=torch.tensor([0.5, 0.5]))
    assert estimate(scored, "greedy_baseline").tolist() == [0.25, 0.5, -0.5]


def test_generalised_advantages_by_hand():
    # Surprises, discount 1/2: 0 + 1/2 * 2 - 1 = 0, then 1 + 0 - 2 = -1. With lambda 1/2 the first adds a quarter of it.
    scored = batch([0.0, 1.0], values=torch.tensor([1.0, 2.0]))
    assert estimate(scored, "gae", discount=0.5, gae_lambda=0.5).tolist() == [-0.25, -1.0]


def test_value_targets_with_lambda_one_are_returns_and_with_lambda_zero_one_step():
    values = torch.tensor([1.0, 2.0, -1.0])
    scored = batch([0.0, 1.0, 3.0], values=values)
    targets = value_targets(estimate(scored, "gae", discount=0.5, gae_lambda=1.0), values)
    assert targets.tolist() == estimate(scored, "returns", discount=0.5).tolist()
    targets = value_targets(estimate(scored, "gae", discount=0.5, gae_lambda=0.0), values)
    assert targets.tolist() == [0.0 + 0.5 * 2.0, 1.0 + 0.5 * -1.0, 3.0]


@given(TRAJECTORIES, SHARE, SHARE)
def test_returns_and_gae_agree_with_the_slow_references(trajectories, discount, gae_lambda):
    scored = random_batch(trajectories)
    columns = [([r for r, _ in tokens], [v for _, v in tokens]) for _, tokens in trajectories]
    returns = [number for rewards, _ in columns for number in reference_returns(rewards, discount)]
    gae = [number for rewards, values in columns for number in reference_gae(rewards, values, discount, gae_lambda)]
    assert estimate(scored, "returns", discount=discount).tolist() == pytest.approx(returns, rel=1e-5, abs=1e-5)
    found = estimate(scored, "gae", discount=discount, gae_lambda=gae_lambda).tolist()
    assert found == pytest.approx(gae, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(trajectories=TRAJECTORIES)
def test_any_batch_gives_one_finite_number_in_float32_for_each_token(estimator, trajectories):
    scored = random_batch(trajectories)
    advantages = estimate(scored, estimator, discount=0.9, gae_lambda=0.9)
    assert advantages.dtype == torch.float32
    assert advantages.shape == scored.token_rewards.shape
    assert torch.isfinite(advantages).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(trajectories=TRAJECTORIES, random=st.randoms())
def test_the_order_of_trajectories_does_not_matter(estimator, trajectories, random):
    order = list(range(len(trajectories)))
    random.shuffle(order)
    settings = {"discount": 0.9, "gae_lambda": 0.5}
    straight, shuffled = random_batch(trajectories), random_batch([trajectories[i] for i in order])
    baselines = torch.tensor(order, dtype=torch.float32)
    shuffled = replace(shuffled, baselines=baselines)
    parts = estimate(straight, estimator, **settings).split(list(straight.lengths))
    expected = torch.cat([parts[i] for i in order])
    torch.testing.assert_close(estimate(shuffled, estimator, **settings), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ["group", "leave_one_out"])
@given(trajectories=TRAJECTORIES)
def test_tokens_of_a_trajectory_share_the_advantage_of_its_total(estimator, trajectories):
    scored = random_batch([(name, tokens) for name, tokens in trajectories if tokens])
    if estimator == "group":
        each = group_advantages(scored.totals, scored.group_ids, normalize_by_std=True)
    else:
        each = leave_one_out_advantages(scored.totals, scored.group_ids)
    assert estimate(scored, estimator).tolist() == scored.per_token(each.float()).tolist()


def test_a_users_function_gets_the_batch_and_gives_the_advantages():
    scored = batch([1.0, 2.0], [3.0])
    assert estimate(scored, lambda given: given.token_rewards * 2).tolist() == [2.0, 4.0, 6.0]


def test_a_users_function_that_returns_one_number_per_trajectory_is_told_so():
    def mine(scored: ScoredBatch) -> Tensor:
        return scored.totals

    with pytest.raises(TrainingError, match=r"the advantage function .*mine must .* shape \[3\], found shape \[2\]"):
        estimate(batch([1.0, 2.0], [3.0]), mine)


NEEDS = {"gae": "critic's value", "greedy_baseline": "greedy answer", "teacher": "teacher's log-prob"}


@pytest.mark.parametrize(("estimator", "missing"), NEEDS.items())
def test_what_an_estimator_needs_must_be_there(estimator, missing):
    with pytest.raises(ValueError, match=f"{missing}.*found none"):
        estimate(batch([1.0]), estimator)


def test_another_estimator_is_refused():
    with pytest.raises(ValueError, match=r"group, leave_one_out, .* or a function, found 'grpo'"):
        estimate(batch([1.0]), "grpo")


def test_a_teacher_grades_each_token_alone_whatever_it_was_rewarded_with():
    log_ratios = torch.tensor([0.5, -2.0, 0.0])
    scored = batch([0.0, 1.0], [7.0], teacher_log_ratios=log_ratios)
    assert estimate(scored, "teacher").tolist() == log_ratios.tolist()
    assert estimate(scored, lambda scored: scored.teacher_log_ratios * 2).tolist() == (log_ratios * 2).tolist()


@pytest.mark.parametrize("name", ["token_rewards", "values", "baselines", "teacher_log_ratios"])
def test_numbers_that_are_not_finite_are_refused_by_trajectory_and_group(name):
    numbers = {"token_rewards": torch.zeros(4), "values": torch.zeros(4), "baselines": torch.zeros(3)}
    numbers["teacher_log_ratios"] = torch.zeros(4)
    numbers[name][2] = math.nan
    lengths = (2, 0, 2)  # token 2 belongs to trajectory 2, as baseline 2 does
    with pytest.raises(ValueError, match=rf"{name} must be finite, found nan in trajectory 2 \(group c\)"):
        ScoredBatch(lengths=lengths, group_ids=("a", "b", "c"), **numbers)


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"token_rewards must have shape \[3\], found \[2\]"):
        ScoredBatch(torch.zeros(2), (1, 2), ("a", "a"))
    with pytest.raises(ValueError, match=r"values must have shape \[1\], found \[2\]"):
        ScoredBatch(torch.zeros(1), (1,), ("a",), values=torch.zeros(2))
    with pytest.raises(ValueError, match="one group id and a length of at least 0 per trajectory, found 1 ids"):
        ScoredBatch(torch.zeros(2), (1, 1), ("a",))
    with pytest.raises(ValueError, match="a length of at least 0"):
        ScoredBatch(torch.zeros(0), (1, -1), ("a", "a"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_tokens_have_no_advantages(estimator):
    for nothing in (batch(), batch([], [], ids="aa")):
        baselines = torch.zeros(len(nothing.lengths))
        empty = torch.zeros(0)
        scored = ScoredBatch(
            nothing.token_rewards, nothing.lengths, nothing.group_ids, empty, baselines, teacher_log_ratios=empty
        )
        assert estimate(scored, estimator).tolist() == []


def test_whitening_gives_all_tokens_of_all_ranks_mean_zero_and_deviation_one():
    ranks = [torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([-3.0, 0.5])]
    white = whiten(torch.cat(ranks))
    assert white.double().mean().item() == pytest.approx(0.0, abs=1e-7)
    assert white.double().std(correction=0).item() == pytest.approx(1.0, abs=1e-7)
    # The same tokens on one rank or on two, in either order.
    torch.testing.assert_close(whiten(torch.cat(ranks[::-1])), torch.cat([white[5:], white[:5]]))


def test_whitening_weighs_a_long_trajectory_by_its_tokens():
    scored = batch(at_last_token(1, 9), at_last_token(0, 1))
    # Nine ones and a zero: mean 0.9, deviation 0.3.
    assert whiten(estimate(scored, "returns")).tolist() == pytest.approx([1 / 3] * 9 + [-3.0])


@pytest.mark.parametrize("values", [[0.1] * 7, [5.0], [], [1e6, 1e6 + 0.25]])
def test_whitening_what_does_not_vary_gives_exactly_zero(values):
    assert whiten(torch.tensor(values)).tolist() == [0.0] * len(values)


@given(st.lists(NUMBER, min_size=1, max_size=30), st.floats(0.5, 5), NUMBER)
def test_whitening_does_not_see_scale_and_shift(values, scale, shift):
    exact = torch.tensor(values, dtype=torch.float64)
    if float(exact.max() - exact.min()) > 1e-3:
        torch.testing.assert_close(whiten(exact * scale + shift), whiten(exact), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_quarter_of_a_million_tokens_take_well_under_a_second_of_one_core(estimator):
    trajectories, tokens = 512, 512
    numbers = torch.randn(trajectories * tokens, generator=torch.Generator().manual_seed(0))
    ids = tuple(str(i % 64) for i in range(trajectories))
    scored = ScoredBatch(numbers, (tokens,) * trajectories, ids, numbers, torch.zeros(trajectories), numbers)
    started = time.process_time()
    estimate(scored, estimator, discount=0.99, gae_lambda=0.95)
    assert time.process_time() - started < 0.5
