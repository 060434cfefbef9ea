"""Estimators of the KL divergence of the policy from the reference, token by token.

Used as a term of the loss and as a metric by `objective.py`, and as a penalty in the reward. Source: J. Schulman,
"Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. Exact KL over the whole vocabulary is not here:
it would need every logit.
"""

from typing import Literal

from torch import Tensor

from slipstream.algorithms.log_ratio import bounded_exp

KLEstimator = Literal["k1", "k2", "k3", "unbiased"]


def kl_estimate(
    log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator, *, old_log_probs: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) from sampled tokens. Shapes [N] -> [N].

    With r = reference / policy, per token that the policy sampled:

    - k1 = -log r: unbiased, but of either sign; its gradient has expectation 0, so in a loss it adds only noise;
    - k2 = (log r)^2 / 2: biased, never negative; its expected gradient is that of the KL;
    - k3 = r - 1 - log r: unbiased and never negative; this is equation 4 of DeepSeekMath (arXiv 2402.03300). In a loss
      its expected gradient is that of KL(reference || policy), the other direction;
    - unbiased = policy / old * k3, for tokens that the old policy sampled: equation 7 of DeepSeek-V3.2
      (arXiv 2512.02556). The ratio takes part in the gradient, so that value and gradient are unbiased however far the
      policy has moved from the old one. It needs `old_log_probs`.

    Values and gradients are finite for any finite log-probs: beyond a log-ratio of 20, ratios grow linearly
    (see `bounded_exp`). Raises ValueError for another estimator, and for `unbiased` without `old_log_probs`.
    """
    log_r = reference_log_probs - log_probs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return 0.5 * log_r.square()
        case "k3":
            return _k3(log_r)
        case "unbiased":
            if old_log_probs is None:
                raise ValueError("KL estimator 'unbiased' needs old_log_probs")
            return _unbiased(log_probs, log_r.detach(), old_log_probs)
    raise ValueError(f"KL estimator must be k1, k2, k3 or unbiased, found {estimator!r}")


def _k3(log_r: Tensor) -> Tensor:
    return bounded_exp(log_r) - 1.0 - log_r


def _unbiased(log_probs: Tensor, log_r: Tensor, old_log_probs: Tensor) -> Tensor:
    """The derivative of ratio * (r - 1 - log r) by log policy is ratio * -log r, since ratio * r is constant.

    It is written out: the product of two bounded exponentials would differentiate to something else beyond the bound,
    which can point away from the reference.
    """
    ratio = bounded_exp(log_probs.detach() - old_log_probs)
    return ratio * _k3(log_r) - ratio * log_r * (log_probs - log_probs.detach())
