# examples/own_algorithm/pieces.py
"""Pieces of an algorithm of one's own; docs/algorithms.md shows how a recipe names them."""

from collections.abc import Sequence

import torch

from slipstream.algorithms.advantages import ScoredBatch
from slipstream.algorithms.policy_loss import PolicyLossInput
from slipstream.data.trajectory import Trajectory


def best_of_group(batch: ScoredBatch) -> torch.Tensor:
    """1 for the best answers to a prompt, 0 for the others: one number for each policy token, [N]."""
    rewarded = list(zip(batch.group_ids, batch.totals.tolist(), strict=True))
    best: dict[str, float] = {}
    for group_id, total in rewarded:
        best[group_id] = max(total, best.get(group_id, total))
    is_best = [total == best[group_id] for group_id, total in rewarded]
    return batch.per_token(torch.tensor(is_best, dtype=torch.float64))


def squared_ratio_loss(inputs: PolicyLossInput) -> torch.Tensor:
    """The policy gradient with a soft bound instead of a clip: one loss for each policy token, [N]."""
    log_ratio = inputs.log_probs - inputs.old_log_probs
    return -inputs.advantages * inputs.log_probs + 0.5 * log_ratio.square()


def no_credit_for_long_answers(rewards: torch.Tensor, trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Rewards [B] and their trajectories in, rewards [B] out."""
    is_long = torch.tensor([trajectory.response_length > 6 for trajectory in trajectories])
    return torch.where(is_long, torch.zeros_like(rewards), rewards)
