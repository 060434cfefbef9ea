"""The clipped policy-gradient loss, token by token.

Used by `objective.py`. Averaging over tokens, the KL term and advantages are elsewhere.
"""

import torch
from torch import Tensor

from slipstream.algorithms.log_ratio import bounded_exp


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether its ratio was clipped. Shapes [N] each; the second is boolean.

    PPO (arXiv 1707.06347), equation 7, with its sign turned so that it is minimized:
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio = policy / old. Separate bounds are
    "clip-higher" of DAPO (arXiv 2503.14476), equation 8.

    The minimum is the clipped branch exactly where a good token (A > 0) has become too likely or a bad one (A < 0) too
    unlikely; there the loss is constant and has no gradient. Elsewhere the ratio counts as it is, so a bad token that
    became likely is pushed back with full force. The gradient flows into `log_probs` alone.
    Values and gradients are finite for any finite log-probs (see `bounded_exp`).
    """
    advantages = advantages.detach()
    ratio = bounded_exp(log_probs - old_log_probs.detach())
    too_likely = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_unlikely = (advantages < 0) & (ratio < 1.0 - clip_low)
    is_clipped = too_likely | too_unlikely
    clipped_ratio = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.where(is_clipped, clipped_ratio, ratio) * advantages, is_clipped
