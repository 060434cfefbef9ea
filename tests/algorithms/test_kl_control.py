"""Control of the KL coefficient: by hand from the paper's equations, at its bounds, and over a resume."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.kl_control import KLControl, make_kl_control


def control(name: str, **changes: float) -> KLControl:
    settings = {
        "coefficient": 0.2,
        "target": 0.1,
        "horizon": 1000,
        "final_coefficient": 0.0,
        "total_steps": 5,
    }
    return make_kl_control(name, **settings | changes)


def after(kl_control: KLControl, measured_kl: float, *, trajectories: int = 100, step: int = 1) -> float:
    kl_control.update(measured_kl, trajectories=trajectories, step=step)
    return kl_control.coefficient


def test_a_fixed_coefficient_stays_whatever_is_measured():
    fixed = control("fixed")
    assert [after(fixed, kl) for kl in (0.0, 5.0, -1.0, math.nan)] == [0.2] * 4


def test_the_adaptive_coefficient_by_hand():
    # KL 10% above the target: error 0.1; 100 trajectories of a horizon of 1000: a tenth of it.
    assert after(control("adaptive"), 0.11) == pytest.approx(0.2 * 1.01)
    assert after(control("adaptive"), 0.09) == pytest.approx(0.2 * 0.99)
    assert after(control("adaptive"), 0.1) == pytest.approx(0.2)


def test_the_error_is_clipped_at_a_fifth_in_both_directions():
    assert after(control("adaptive"), 50.0) == pytest.approx(0.2 * 1.02)
    assert after(control("adaptive"), 0.0) == after(control("adaptive"), -3.0) == pytest.approx(0.2 * 0.98)


def test_a_batch_of_many_horizons_cannot_take_the_coefficient_to_zero():
    assert after(control("adaptive", horizon=10), 0.0, trajectories=100) == pytest.approx(0.1)
    assert after(control("adaptive", horizon=10), 1.0, trajectories=100) == pytest.approx(0.2 * 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_measures_nothing(bad):
    assert after(control("adaptive"), bad) == 0.2


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_adaptive_coefficient_stays_positive_and_moves_against_the_error(measured, horizon, trajectories):
    adaptive = control("adaptive", horizon=horizon)
    for kl in measured:
        before = adaptive.coefficient
        now = after(adaptive, kl, trajectories=trajectories)
        assert now > 0
        assert (now >= before) if kl >= 0.1 else (now <= before)


def test_adaptive_control_brings_a_kl_that_it_rules_to_the_target():
    adaptive = control("adaptive", coefficient=1.0)
    for step in range(1, 2000):
        after(adaptive, 0.01 / adaptive.coefficient, step=step)
    assert 0.01 / adaptive.coefficient == pytest.approx(0.1, rel=1e-3)


def test_the_linear_coefficient_is_a_straight_line_to_the_last_step():
    linear = control("linear", coefficient=0.4, final_coefficient=0.2, total_steps=5)
    line = [linear.coefficient, *(after(linear, 7.0, step=step) for step in range(1, 5))]
    assert line == pytest.approx([0.4, 0.35, 0.3, 0.25, 0.2])
    assert line[-1] == 0.2
    assert after(linear, 7.0, step=5) == 0.2


def test_a_linear_run_of_one_step_keeps_the_coefficient():
    assert after(control("linear", total_steps=1), 0.0, step=1) == 0.2


@pytest.mark.parametrize("name", ["fixed", "adaptive", "linear"])
def test_a_restored_control_goes_on_as_if_it_had_not_stopped(name):
    straight, stopped = control(name), control(name)
    for step, kl in enumerate((0.3, 0.05), start=1):
        after(straight, kl, step=step)
        after(stopped, kl, step=step)
    resumed = control(name)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert resumed.coefficient == straight.coefficient
    assert after(resumed, 0.12, step=3) == after(straight, 0.12, step=3)


def test_another_control_is_refused():
    with pytest.raises(ValueError, match="fixed, adaptive or linear, found 'cosine'"):
        control("cosine")
