"""The learning rate factor: warm-up, the shape of each schedule, and the smallest runs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.schedule import learning_rate_factor


def factors(schedule: str, *, warmup: int, total: int, final_share: float = 0.0) -> list[float]:
    return [
        learning_rate_factor(step, schedule=schedule, warmup_steps=warmup, total_steps=total, final_share=final_share)
        for step in range(total)
    ]


def test_warm_up_starts_above_zero_and_reaches_the_peak_on_its_last_step():
    assert factors("constant", warmup=4, total=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_by_hand():
    assert factors("linear", warmup=2, total=6) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert factors("linear", warmup=0, total=3, final_share=0.1) == pytest.approx([1.0, 0.55, 0.1])


def test_cosine_by_hand():
    half = math.sqrt(0.5) / 2
    assert factors("cosine", warmup=0, total=5) == pytest.approx([1.0, 0.5 + half, 0.5, 0.5 - half, 0.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_that_is_all_warm_up_ends_at_the_peak(schedule):
    assert factors(schedule, warmup=3, total=3) == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_run_of_one_step_takes_it_at_the_peak(schedule, warmup):
    assert factors(schedule, warmup=warmup, total=1) == [1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@given(total=st.integers(2, 500), final_share=st.floats(0, 1), data=st.data())
def test_the_last_step_has_exactly_the_final_share(schedule, total, final_share, data):
    warmup = data.draw(st.integers(0, total - 1))
    all_factors = factors(schedule, warmup=warmup, total=total, final_share=final_share)
    assert all_factors[-1] == final_share
    falling = all_factors[max(warmup - 1, 0) :]
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)


def test_steps_after_the_last_keep_the_final_share():
    arguments = {"schedule": "cosine", "warmup_steps": 1, "total_steps": 4, "final_share": 0.2}
    assert learning_rate_factor(100, **arguments) == 0.2


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="must not be negative, found -1"):
        learning_rate_factor(-1, schedule="constant", warmup_steps=0, total_steps=1, final_share=0.0)
    with pytest.raises(ValueError, match="constant, linear or cosine, found 'wave'"):
        learning_rate_factor(1, schedule="wave", warmup_steps=0, total_steps=9, final_share=0.0)
