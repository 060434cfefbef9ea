"""Importance weights between the policy that sampled and the policy whose log-probs the trainer computes.

The rollout engine computes with other kernels, another type, or older weights than the trainer, so tokens come from
another distribution than the old log-probs say. The weight old / rollout makes expectations right again. Used by
`objective.py`, which multiplies the loss of each token with it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slipstream.algorithms.log_ratio import bounded_exp
from slipstream.algorithms.sequences import sequence_sums


@dataclass(frozen=True)
class Correction:
    """How to weigh tokens.

    mode: `truncate` clamps weights to [low, high]; `mask` gives weight 0 to what lies outside, and leaves what lies
    inside as it is. level: one weight per token, or one per sequence, the product over its tokens.
    """

    mode: Literal["truncate", "mask"]
    level: Literal["token", "sequence"]
    low: float
    high: float


def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, *, sequence_index: Tensor, correction: Correction
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token, detached, and whether it lay outside of the bounds: [N], and [N] boolean.

    old / rollout, of each token or multiplied over the tokens of a sequence, in which case all of them get it.
    Truncation bounds the variance of importance sampling at the price of a bias (Ionides, "Truncated Importance
    Sampling", 2008); the bounds also say which tokens or sequences count as too far off to be learned from. A weight
    that is NaN stays NaN. Finite for any finite log-probs.
    """
    log_ratio = old_log_probs.detach() - rollout_log_probs
    if correction.level == "sequence":
        log_ratio = sequence_sums(log_ratio, sequence_index)
    weights = bounded_exp(log_ratio)
    is_cut = (weights < correction.low) | (weights > correction.high)
    if correction.mode == "mask":
        return torch.where(is_cut, torch.zeros_like(weights), weights), is_cut
    return weights.clamp(correction.low, correction.high), is_cut


def weighted_loss(loss: Tensor, weights: Tensor) -> Tensor:
    """Multiply the loss of each token with its weight; where that is 0, select 0. Shapes [N], [N] -> [N].

    A token without weight then contributes nothing, neither value nor gradient, however large its loss is.
    """
    return torch.where(weights == 0, torch.zeros_like(loss), weights * loss)


def effective_sample_share(weight: float, weight_square: float) -> float:
    """Return (sum of w)^2 / (n * sum of w^2), from the means of w and of w^2: 1 if all weights are alike, else less.

    The effective sample size of importance sampling (Kong, 1992) as a share of n. 0 where all weights are 0.
    """
    return weight * weight / weight_square if weight_square else 0.0
