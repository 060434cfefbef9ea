"""KL estimators: by hand, against the exact divergence of small distributions, and at the ends of the float range."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.kl import kl_estimate
from slipstream.algorithms.log_ratio import LARGEST_EXPONENT, bounded_exp

ESTIMATORS = ["k1", "k2", "k3"]


def test_values_by_hand_where_the_reference_is_twice_as_likely():
    log_probs, reference = torch.tensor([math.log(0.2)]), torch.tensor([math.log(0.4)])
    assert kl_estimate(log_probs, reference, "k1").item() == pytest.approx(-math.log(2))
    assert kl_estimate(log_probs, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(log_probs, reference, "k3").item() == pytest.approx(2 - 1 - math.log(2))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_average_to_the_exact_divergence(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    expectation = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-12)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence():
    logits = torch.tensor([0.3, -0.1, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    estimate = (log_probs.exp().detach() * kl_estimate(log_probs, reference, "k2")).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (estimated_gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(estimated_gradient, exact_gradient)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_divergence(estimator):
    log_probs = torch.tensor([-0.1, -3.0, -12.0])
    assert kl_estimate(log_probs, log_probs.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


@given(st.floats(-1e3, 0), st.floats(-1e3, 0))
def test_k2_and_k3_are_never_negative(log_prob, reference):
    for estimator in ("k2", "k3"):
        assert kl_estimate(torch.tensor([log_prob]), torch.tensor([reference]), estimator).item() >= -1e-4


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e3, -100.0, 100.0, 1e3])
def test_extreme_log_ratios_give_finite_values_and_gradients(estimator, log_ratio):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(log_probs, log_probs.detach() + log_ratio, estimator)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("log_ratio", [-1e3, -1.0, 1.0, 19.0, 21.0, 1e3])
def test_descending_the_estimate_moves_the_policy_towards_the_reference(estimator, log_ratio):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    kl_estimate(log_probs, log_probs.detach() + log_ratio, estimator).sum().backward()
    assert math.copysign(1.0, -log_probs.grad.item()) == math.copysign(1.0, log_ratio)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2 or k3, found 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_the_bounded_exponential_is_exact_up_to_the_bound_and_a_tangent_beyond():
    x = torch.tensor([-1e3, 0.0, 3.0, LARGEST_EXPONENT, LARGEST_EXPONENT + 2], dtype=torch.float64)
    edge = math.exp(LARGEST_EXPONENT)
    assert bounded_exp(x).tolist() == pytest.approx([0.0, 1.0, math.exp(3), edge, 3 * edge])
