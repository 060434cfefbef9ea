"""Estimators of the KL divergence of the policy from the reference, token by token.

Used as a term of the loss by `objective.py` and as a metric. Source: J. Schulman, "Approximating KL Divergence",
http://joschu.net/blog/kl-approx.html. Exact KL over the whole vocabulary is not here: it would need every logit.
"""

from typing import Literal

from torch import Tensor

from slipstream.algorithms.log_ratio import bounded_exp

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy sampled. Shapes [N], [N] -> [N].

    With r = reference / policy, per token:

    - k1 = -log r: unbiased, but of either sign; its gradient has expectation 0, so in a loss it adds only noise;
    - k2 = (log r)^2 / 2: biased, never negative; its expected gradient is that of the KL;
    - k3 = r - 1 - log r: unbiased and never negative; this is equation 4 of DeepSeekMath (arXiv 2402.03300).

    Values and gradients are finite for any finite log-probs: beyond a log-ratio of 20, r grows linearly
    (see `bounded_exp`). Raises ValueError for another estimator.
    """
    log_r = reference_log_probs - log_probs
    match estimator:
        case "k1":
            return -log_r
        case "k2":
            return 0.5 * log_r.square()
        case "k3":
            return bounded_exp(log_r) - 1.0 - log_r
    raise ValueError(f"KL estimator must be k1, k2 or k3, found {estimator!r}")
