"""Which groups have a signal, and which responses were cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.advantages import group_advantages
from slipstream.algorithms.filters import has_signal, is_truncated


def test_rewards_that_differ_have_a_signal_and_equal_ones_have_none():
    assert has_signal([1.0, 0.0, 0.0, 0.0])
    assert not has_signal([1.0] * 4)
    assert not has_signal([0.1] * 8)


def test_a_group_of_one_or_none_has_no_signal():
    assert not has_signal([5.0])
    assert not has_signal([])


def test_float_noise_is_no_signal_and_a_small_real_difference_is_one():
    assert not has_signal([sum([0.1] * 3), 0.3])
    assert not has_signal([1e6, 1e6 + 0.25])
    assert has_signal([0.0, 1e-4])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="must be finite"):
        has_signal([0.0, bad])


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=10))
def test_a_group_has_a_signal_exactly_where_it_has_advantages(rewards):
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64), ["a"] * len(rewards), normalize_by_std=True
    )
    assert has_signal(rewards) == bool(advantages.any())


def test_only_the_limit_of_tokens_truncates():
    assert is_truncated("length")
    assert not any(map(is_truncated, ("stop", "environment", "aborted")))
