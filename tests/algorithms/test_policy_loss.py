"""Policy losses: every branch by hand, references written from the papers, and the ends of the float range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.policy_loss import (
    PolicyLossInput,
    cispo_loss,
    clip_loss,
    policy_gradient_loss,
    sequence_clip_loss,
)

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES = {
    "clip": lambda inputs: clip_loss(inputs, **BOUNDS),
    "dual_clip": lambda inputs: clip_loss(inputs, **BOUNDS, dual_clip=3.0),
    "sequence_clip": lambda inputs: sequence_clip_loss(inputs, **BOUNDS),
    "cispo": lambda inputs: cispo_loss(inputs, **BOUNDS),
    "policy_gradient": policy_gradient_loss,
}
every_loss = pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_inputs(ratios: list[float], advantages: list[float], sequences: list[int] | None = None) -> PolicyLossInput:
    """Tokens with the given ratios, whose old log-prob is -2."""
    log_probs = (tensor(*ratios).log() - 2.0).requires_grad_()
    index = torch.tensor(sequences or range(len(ratios)), dtype=torch.int64)
    return PolicyLossInput(log_probs, torch.full_like(log_probs, -2.0).detach(), tensor(*advantages), index)


def result(loss_of, ratios: list[float], advantages: list[float], sequences: list[int] | None = None):
    """Losses, their derivatives by the log-probs, and clip flags."""
    inputs = make_inputs(ratios, advantages, sequences)
    loss, is_clipped = loss_of(inputs)
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.log_probs)
    return loss.tolist(), gradient.tolist(), is_clipped.tolist()


def loss_and_gradient(ratio: float, advantage: float, **options: float) -> tuple[float, float, bool]:
    """The same for `clip_loss` of one token."""
    (loss,), (gradient,), (flag,) = result(lambda inputs: clip_loss(inputs, **(BOUNDS | options)), [ratio], [advantage])
    return loss, gradient, flag


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


@settings(deadline=None)
@given(st.floats(0.05, 20.0), st.floats(-5, 5))
def test_agrees_with_equation_7_of_the_ppo_paper(ratio, advantage):
    clipped_ratio = min(max(ratio, 1 - 0.2), 1 + 0.28)
    expected = -min(ratio * advantage, clipped_ratio * advantage)
    assert loss_and_gradient(ratio, advantage)[0] == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (10.0, -2.0, 6.0, 0.0, True),  # bad and ten times as likely: 20 without the bound, 3 * 2 with it
        (2.9, -2.0, 5.8, 5.8, False),  # not yet at the bound
        (0.5, -2.0, 1.6, 0.0, True),  # the other clip of a bad token is as it was
        (10.0, 2.0, -2.56, 0.0, True),  # a good token has nothing to do with the bound
        (2.9, 2.0, -2.56, 0.0, True),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens_alone(ratio, advantage, loss, gradient, is_clipped):
    found = loss_and_gradient(ratio, advantage, dual_clip=3.0)
    assert found == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


@settings(deadline=None)
@given(st.floats(0.05, 20.0), st.floats(-5, 5), st.floats(1.5, 10))
def test_agrees_with_equation_5_of_the_dual_clip_paper(ratio, advantage, dual_clip):
    clipped_ratio = min(max(ratio, 1 - 0.2), 1 + 0.28)
    objective = min(ratio * advantage, clipped_ratio * advantage)
    expected = -(max(objective, dual_clip * advantage) if advantage < 0 else objective)
    found = loss_and_gradient(ratio, advantage, dual_clip=dual_clip)[0]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_sequence_ratio_is_the_geometric_mean_by_hand():
    # Ratios 2 and 1/2 cancel: 1. Ratios 4 and 1: 2, beyond 1.28. The sequences are interleaved.
    losses, gradient, is_clipped = result(
        LOSSES["sequence_clip"], [2.0, 4.0, 0.5, 1.0], [1.0, 3.0, 1.0, 3.0], sequences=[0, 1, 0, 1]
    )
    assert losses == pytest.approx([-1.0, -3.84, -1.0, -3.84])
    assert gradient == pytest.approx([-1.0, 0.0, -1.0, 0.0])
    assert is_clipped == [False, True, False, True]


def test_with_sequence_means_the_sequence_clip_is_equation_5_of_the_gspo_paper():
    """Its value and gradient are those of a plain computation over whole sequences, through the sequence ratio."""
    generator = torch.Generator().manual_seed(0)
    counts, advantages = [3, 1, 5, 2], [1.0, -0.7, 0.4, -2.0]
    index = torch.arange(4).repeat_interleave(torch.tensor(counts))
    old_log_probs = -torch.rand(11, dtype=torch.float64, generator=generator)
    log_probs = (old_log_probs + 0.4 * torch.randn(11, dtype=torch.float64, generator=generator)).requires_grad_()

    objective = 0.0
    ratios = []
    for sequence, advantage in enumerate(advantages):
        ratio = (log_probs - old_log_probs)[index == sequence].mean().exp()
        objective = objective + torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) / 4
        ratios.append(ratio.item())
    (expected_gradient,) = torch.autograd.grad(-objective, log_probs)

    loss, is_clipped = LOSSES["sequence_clip"](
        PolicyLossInput(log_probs, old_log_probs, tensor(*advantages)[index], index)
    )
    step_loss = (loss / (4 * torch.tensor(counts)[index])).sum()
    (gradient,) = torch.autograd.grad(step_loss, log_probs)
    assert step_loss.item() == pytest.approx(-objective.item())
    torch.testing.assert_close(gradient, expected_gradient)
    assert bool(is_clipped.any()) and not bool(is_clipped.all()), f"both branches are met by {ratios}"


def test_under_the_sequence_clip_each_token_is_moved_by_its_own_advantage():
    _, gradient, _ = result(LOSSES["sequence_clip"], [1.0, 1.0], [1.0, -3.0], sequences=[0, 0])
    assert gradient == pytest.approx([-1.0, 3.0])


def test_cispo_by_hand_keeps_the_gradient_of_clipped_tokens():
    ratios = [1.1, 4.0, 0.5, 4.0]
    losses, gradient, is_clipped = result(LOSSES["cispo"], ratios, [1.0, 1.0, 2.0, -1.0])
    weights = [1.1, 1.28, 0.8, 1.28]
    log_probs = [math.log(ratio) - 2 for ratio in ratios]
    signed = [-weight * a for weight, a in zip(weights, [1.0, 1.0, 2.0, -1.0], strict=True)]
    assert losses == pytest.approx([s * log_prob for s, log_prob in zip(signed, log_probs, strict=True)])
    assert gradient == pytest.approx(signed)
    assert is_clipped == [False, True, True, True]


def test_the_policy_gradient_does_not_look_at_the_ratio():
    losses, gradient, is_clipped = result(LOSSES["policy_gradient"], [1.0, 5.0], [2.0, -1.0])
    assert losses == pytest.approx([4.0, math.log(5) - 2])
    assert gradient == [-2.0, 1.0]
    assert is_clipped == [False, False]


@every_loss
def test_at_ratio_one_every_gradient_is_that_of_reinforce(loss_of):
    advantages = [1.5, -0.5, 0.0, 0.7, -3.0]
    _, gradient, is_clipped = result(loss_of, [1.0] * 5, advantages, sequences=[0, 0, 1, 1, 1])
    assert gradient == pytest.approx([-advantage for advantage in advantages])
    assert not any(is_clipped)


@every_loss
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-1e3, 1e3])
def test_extreme_log_ratios_give_finite_values_and_gradients(loss_of, log_ratio, advantage):
    log_probs = torch.tensor([log_ratio, 0.0], requires_grad=True)
    inputs = PolicyLossInput(log_probs, torch.zeros(2), torch.full((2,), advantage), torch.tensor([0, 1]))
    loss, _ = loss_of(inputs)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(log_probs.grad).all()


@every_loss
def test_a_nan_stays_visible_and_touches_no_other_sequence(loss_of):
    log_probs = torch.tensor([math.nan, -1.0, -1.0], requires_grad=True)
    inputs = PolicyLossInput(log_probs, torch.full((3,), -1.0), torch.ones(3), torch.tensor([0, 1, 1]))
    loss, _ = loss_of(inputs)
    loss[1:].sum().backward()
    assert math.isnan(loss[0].item())
    assert loss[1:].tolist() in ([-1.0, -1.0], [1.0, 1.0])
    assert log_probs.grad[1:].tolist() == [-1.0, -1.0]
