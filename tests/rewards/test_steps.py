"""From the scores of steps to one reward."""

import math
from typing import get_args

import pytest

from slipstream.config.schema import StepAggregation
from slipstream.rewards.steps import aggregate_steps, step_probabilities


@pytest.mark.parametrize(("how", "expected"), [("min", 0.2), ("last", 0.5), ("product", 0.08), ("mean", 0.5)])
def test_aggregations_worked_out_by_hand(how: StepAggregation, expected: float) -> None:
    assert aggregate_steps([0.8, 0.2, 0.5], how) == pytest.approx(expected)


@pytest.mark.parametrize("how", get_args(StepAggregation))
def test_one_step_is_its_own_probability_and_none_is_worth_nothing(how: StepAggregation) -> None:
    assert aggregate_steps([0.3], how) == pytest.approx(0.3)
    assert aggregate_steps([], how) == 0.0


def test_probabilities_of_scores_do_not_overflow() -> None:
    assert step_probabilities([0.0, math.log(3), -math.log(3), 1e4, -1e4]) == pytest.approx([0.5, 0.75, 0.25, 1.0, 0.0])
    assert math.isnan(step_probabilities([math.nan])[0])
