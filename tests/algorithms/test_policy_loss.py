"""The clipped policy loss: every branch of the clip by hand, its gradient, and a reference written from the paper."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.policy_loss import clipped_policy_loss


def loss_and_gradient(
    ratio: float, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> tuple[float, float, bool]:
    """Loss, its derivative by the log-prob, and the clip flag of one token with the given ratio."""
    log_probs = torch.tensor([math.log(ratio) - 2.0], dtype=torch.float64, requires_grad=True)
    old_log_probs = torch.tensor([-2.0], dtype=torch.float64)
    loss, is_clipped = clipped_policy_loss(
        log_probs,
        old_log_probs,
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    loss.sum().backward()
    return loss.item(), log_probs.grad.item(), bool(is_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),  # inside: -ratio * A, and the derivative of the ratio is the ratio
        (0.9, -1.0, 0.9, 0.9, False),
        (1.5, 2.0, -2.56, 0.0, True),  # good and already more likely than 1 + clip_high: nothing more to gain
        (0.5, -1.0, 0.8, 0.0, True),  # bad and already less likely than 1 - clip_low
        (0.5, 2.0, -1.0, -1.0, False),  # good but less likely: pulled back with its own ratio
        (1.5, -1.0, 1.5, 1.5, False),  # bad but more likely: pushed back with its own ratio
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_each_side_of_the_clip_by_hand(ratio, advantage, loss, gradient, is_clipped):
    assert loss_and_gradient(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


def test_the_two_bounds_are_separate():
    assert loss_and_gradient(1.25, 1.0, clip_low=0.2, clip_high=0.28)[2] is False
    assert loss_and_gradient(1.25, 1.0, clip_low=0.28, clip_high=0.2)[2] is True
    assert loss_and_gradient(0.75, -1.0, clip_low=0.28, clip_high=0.2)[2] is False
    assert loss_and_gradient(0.75, -1.0, clip_low=0.2, clip_high=0.28)[2] is True


@given(st.floats(0.05, 20.0), st.floats(-5, 5))
def test_agrees_with_equation_7_of_the_ppo_paper(ratio, advantage):
    clipped_ratio = min(max(ratio, 1 - 0.2), 1 + 0.28)
    expected = -min(ratio * advantage, clipped_ratio * advantage)
    assert loss_and_gradient(ratio, advantage)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e3, 1e3])
def test_extreme_log_ratios_give_finite_values_and_gradients(log_ratio, advantage):
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = clipped_policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(log_probs.grad).all()


def test_no_gradient_reaches_old_log_probs_or_advantages():
    log_probs, old_log_probs, advantages = (torch.tensor([value], requires_grad=True) for value in (-1.0, -1.1, 0.5))
    loss, _ = clipped_policy_loss(log_probs, old_log_probs, advantages, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert old_log_probs.grad is None
    assert advantages.grad is None


def test_a_nan_stays_visible_and_touches_no_other_token():
    log_probs = torch.tensor([math.nan, -1.0])
    loss, _ = clipped_policy_loss(log_probs, torch.tensor([-1.0, -1.0]), torch.ones(2), clip_low=0.2, clip_high=0.2)
    assert math.isnan(loss[0])
    assert loss[1].item() == -1.0
