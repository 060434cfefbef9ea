"""Policy-gradient losses, token by token.

Used by `objective.py`, which adds the KL term, the entropy bonus and the off-policy correction. Averaging over tokens
is `aggregation.py`'s, advantages are `advantages.py`'s. A loss of your own has the face of `PolicyLossFunction`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.algorithms.log_ratio import bounded_exp
from slipstream.algorithms.sequences import sequence_means

POLICY_LOSSES = ("clip", "sequence_clip", "cispo", "policy_gradient")


@dataclass(frozen=True)
class PolicyLossInput:
    """What a policy loss is made from: N policy tokens, the sequences of a micro-batch end to end. All shapes [N].

    log_probs: of the policy that learns, the only one with a gradient. old_log_probs: of the same weights before the
    update. advantages: float. sequence_index: int64, which sequence of the micro-batch a token belongs to; a sequence
    is never split over micro-batches.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    sequence_index: Tensor


PolicyLossFunction = Callable[[PolicyLossInput], Tensor]
"""A user's loss: the loss of each token, shape [N], to be minimized, with a gradient into `log_probs`."""


def clip_loss(
    inputs: PolicyLossInput, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether it is constant for being clipped: [N], and [N] boolean.

    PPO (arXiv 1707.06347), equation 7, with its sign turned so that it is minimized:
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio = policy / old. Separate bounds are
    "clip-higher" of DAPO (arXiv 2503.14476), equation 8.

    The minimum is the clipped branch exactly where a good token (A > 0) has become too likely or a bad one (A < 0) too
    unlikely; there the loss is constant and has no gradient. Elsewhere the ratio counts as it is, so a bad token that
    became likely is pushed back with full force, which is unbounded. `dual_clip` bounds it (arXiv 1912.09729,
    equation 5, max(min(...), dual_clip * A) for A < 0): the loss of such a token is at most -dual_clip * A, and
    constant from ratio = dual_clip on.

    Values and gradients are finite for any finite log-probs (see `bounded_exp`).
    """
    ratio = bounded_exp(inputs.log_probs - inputs.old_log_probs)
    loss, is_clipped = _clipped(ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return loss, is_clipped
    is_bounded = (inputs.advantages < 0) & (ratio > dual_clip)
    return torch.where(is_bounded, -dual_clip * inputs.advantages, loss), is_clipped | is_bounded


def sequence_clip_loss(inputs: PolicyLossInput, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """As `clip_loss`, with one ratio for all tokens of a sequence: the geometric mean of theirs.

    GSPO (arXiv 2507.18071): s = exp(mean over the sequence's tokens of log(policy / old)), equation 7. The loss here is
    that of each token (the paper's GSPO-token, section 4.3): its ratio has the value s, and a gradient into its own
    log-prob alone. Where the advantage is one number per sequence, the sum over the sequence's tokens divided by their
    number (aggregation sequence_mean_token_mean) has the value and the gradient of the paper's equation 5; and
    advantages that differ within a sequence each move their own token.
    """
    log_ratio = inputs.log_probs.detach() - inputs.old_log_probs
    sequence_ratio = bounded_exp(sequence_means(log_ratio, inputs.sequence_index))
    own_factor = 1.0 + (inputs.log_probs - inputs.log_probs.detach())  # 1, with the derivative of policy / policy
    return _clipped(sequence_ratio * own_factor, inputs.advantages, clip_low=clip_low, clip_high=clip_high)


def cispo_loss(inputs: PolicyLossInput, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether its weight was clipped: [N], and [N] boolean.

    CISPO (arXiv 2506.13585), equations 4 and 5: -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log
    policy. The ratio is a weight of REINFORCE, so a clipped token keeps its gradient.
    """
    ratio = bounded_exp(inputs.log_probs.detach() - inputs.old_log_probs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.log_probs, weight != ratio


def policy_gradient_loss(inputs: PolicyLossInput) -> tuple[Tensor, Tensor]:
    """Return -A * log policy and nowhere true: [N], and [N] boolean.

    REINFORCE (Williams, 1992), as in RLOO (arXiv 2402.14740): it takes the tokens for samples of the current policy,
    old log-probs play no part.
    """
    return -inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.advantages, dtype=torch.bool)


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio) * A), and where it is the clipped branch. Shapes [N]."""
    too_likely = (advantages > 0) & (ratio > 1.0 + clip_high)
    too_unlikely = (advantages < 0) & (ratio < 1.0 - clip_low)
    is_clipped = too_likely | too_unlikely
    clipped_ratio = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.where(is_clipped, clipped_ratio, ratio) * advantages, is_clipped
