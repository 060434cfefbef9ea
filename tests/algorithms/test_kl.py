"""KL estimators: by hand, against the exact divergence of small distributions, and at the ends of the float range."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.kl import kl_estimate
from slipstream.algorithms.log_ratio import LARGEST_EXPONENT, bounded_exp

ESTIMATORS = ["k1", "k2", "k3", "unbiased"]

POLICY_LOGITS = torch.tensor([0.3, -0.1, 0.5], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def estimate_on_policy(log_probs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    return kl_estimate(log_probs, reference, estimator, old_log_probs=log_probs.detach())


def expected_gradients(estimator: str, old_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the policy's logits, gradients of the estimate where the old policy samples, and of both exact divergences."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    log_probs, old = logits.log_softmax(0), old_logits.log_softmax(0)
    estimate = (old.exp() * kl_estimate(log_probs, REFERENCE.log(), estimator, old_log_probs=old)).sum()
    divergence = (log_probs.exp() * (log_probs - REFERENCE.log())).sum()
    other_direction = (REFERENCE * (REFERENCE.log() - log_probs)).sum()
    (gradient,), (exact,), (other,) = (
        torch.autograd.grad(value, logits, retain_graph=True) for value in (estimate, divergence, other_direction)
    )
    return gradient, exact, other


def test_values_by_hand_where_the_reference_is_twice_as_likely():
    log_probs, reference = torch.tensor([math.log(0.2)]), torch.tensor([math.log(0.4)])
    assert kl_estimate(log_probs, reference, "k1").item() == pytest.approx(-math.log(2))
    assert kl_estimate(log_probs, reference, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_estimate(log_probs, reference, "k3").item() == pytest.approx(2 - 1 - math.log(2))
    old = torch.tensor([math.log(0.05)])  # the policy is four times as likely as it was
    unbiased = kl_estimate(log_probs, reference, "unbiased", old_log_probs=old)
    assert unbiased.item() == pytest.approx(4 * (2 - 1 - math.log(2)))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_average_to_the_exact_divergence(estimator):
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    expectation = (policy * kl_estimate(policy.log(), reference.log(), estimator)).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-12)


def test_the_expected_gradient_of_k2_is_that_of_the_divergence():
    gradient, exact, _ = expected_gradients("k2", POLICY_LOGITS)
    torch.testing.assert_close(gradient, exact)


def test_the_expected_gradient_of_k1_is_zero_and_that_of_k3_belongs_to_the_other_direction():
    gradient, _, _ = expected_gradients("k1", POLICY_LOGITS)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))
    gradient, exact, other = expected_gradients("k3", POLICY_LOGITS)
    torch.testing.assert_close(gradient, other)
    assert (gradient - exact).abs().max() > 0.01


OLD_LOGITS = [[0.3, -0.1, 0.5], [2.0, -1.0, 0.0], [-3.0, 3.0, 0.5]]


@pytest.mark.parametrize("old_logits", OLD_LOGITS)
def test_the_unbiased_estimator_has_the_exact_value_and_gradient_whatever_policy_sampled(old_logits):
    old = torch.tensor(old_logits, dtype=torch.float64)
    gradient, exact, _ = expected_gradients("unbiased", old)
    torch.testing.assert_close(gradient, exact)
    policy, old = POLICY_LOGITS.log_softmax(0), old.log_softmax(0)
    value = (old.exp() * kl_estimate(policy, REFERENCE.log(), "unbiased", old_log_probs=old)).sum()
    torch.testing.assert_close(value, (policy.exp() * (policy - REFERENCE.log())).sum())


@pytest.mark.parametrize("old_logits", OLD_LOGITS[1:])
def test_off_policy_no_other_estimator_has_the_exact_gradient(old_logits):
    for estimator in ("k1", "k2", "k3"):
        gradient, exact, _ = expected_gradients(estimator, torch.tensor(old_logits, dtype=torch.float64))
        assert (gradient - exact).abs().max() > 0.05


def test_the_unbiased_estimator_differentiates_as_the_product_it_is():
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference, old = log_probs.detach() + torch.tensor([0.7, -1.2, 0.0]), log_probs.detach() - 0.4
    found = kl_estimate(log_probs, reference, "unbiased", old_log_probs=old)
    r = (reference - log_probs).exp()
    product = (log_probs - old).exp() * (r - 1 - r.log())
    torch.testing.assert_close(found, product)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), log_probs), torch.autograd.grad(product.sum(), log_probs)
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_no_divergence(estimator):
    log_probs = torch.tensor([-0.1, -3.0, -12.0])
    assert estimate_on_policy(log_probs, log_probs.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


@given(st.floats(-1e3, 0), st.floats(-1e3, 0))
def test_all_but_k1_are_never_negative(log_prob, reference):
    for estimator in ("k2", "k3", "unbiased"):
        assert estimate_on_policy(torch.tensor([log_prob]), torch.tensor([reference]), estimator).item() >= -1e-4


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [-1e3, -100.0, 100.0, 1e3])
@pytest.mark.parametrize("drift", [-1e3, 0.0, 1e3])
def test_extreme_log_ratios_give_finite_values_and_gradients(estimator, log_ratio, drift):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    fixed = log_probs.detach()
    estimate = kl_estimate(log_probs, fixed + log_ratio, estimator, old_log_probs=fixed - drift)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
@pytest.mark.parametrize("log_ratio", [-1e3, -1.0, 1.0, 19.0, 21.0, 1e3])
@pytest.mark.parametrize("drift", [-5.0, 0.0, 25.0])
def test_descending_the_estimate_moves_the_policy_towards_the_reference(estimator, log_ratio, drift):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    fixed = log_probs.detach()
    kl_estimate(log_probs, fixed + log_ratio, estimator, old_log_probs=fixed - drift).sum().backward()
    assert math.copysign(1.0, -log_probs.grad.item()) == math.copysign(1.0, log_ratio)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3 or unbiased, found 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match="'unbiased' needs old_log_probs"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "unbiased")


def test_the_bounded_exponential_is_exact_up_to_the_bound_and_a_tangent_beyond():
    x = torch.tensor([-1e3, 0.0, 3.0, LARGEST_EXPONENT, LARGEST_EXPONENT + 2], dtype=torch.float64)
    edge = math.exp(LARGEST_EXPONENT)
    assert bounded_exp(x).tolist() == pytest.approx([0.0, 1.0, math.exp(3), edge, 3 * edge])
