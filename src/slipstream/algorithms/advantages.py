"""Advantages of trajectories relative to the other answers to the same prompt.

Stands between scoring and the learner: rewards of a whole rollout batch go in, one advantage per trajectory comes out
and is spread over its loss tokens by the caller. Failed trajectories are left out by the caller; nothing here invents
a reward. Baselines from a critic are not here.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

CONSTANT_TOLERANCE = 1e-6
"""A group whose rewards differ by at most this, relative to max(1, largest magnitude), counts as constant."""


def group_advantages(rewards: Tensor, group_ids: Sequence[str], *, normalize_by_std: bool) -> Tensor:
    """Return reward minus the mean of the group, divided by the group's standard deviation if asked. Shape [B].

    DeepSeekMath (arXiv 2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r). Without the division it is the
    estimator of Dr. GRPO (arXiv 2503.20783), which does not favour prompts of low variance.

    `rewards` has shape [B]; `group_ids[i]` names the group of trajectory i. Groups are found by id alone, in any order
    and of any size. The paper does not say which standard deviation it means; this is the one with n - 1 in the
    denominator, as in the common implementations, so that learning rates carry over. No epsilon is added to it,
    because the cases it would guard against have a value of their own:

    - a group of one has no baseline: 0;
    - a constant group (see `CONSTANT_TOLERANCE`) says nothing about which answer is better: exactly 0, not float noise
      divided by float noise;
    - a group that lost a member is compared among those left.

    Raises ValueError for a reward that is not finite, naming its position and group, and for lengths that differ.
    """
    if rewards.ndim != 1 or len(rewards) != len(group_ids):
        raise ValueError(
            f"expected one reward per group id, found shape {list(rewards.shape)} and {len(group_ids)} ids"
        )
    _refuse_non_finite(rewards, group_ids)
    positions: defaultdict[str, list[int]] = defaultdict(list)
    for position, group_id in enumerate(group_ids):
        positions[group_id].append(position)

    exact = rewards.detach().double()
    advantages = torch.zeros_like(exact)
    for members in positions.values():
        group = exact[members]
        if _is_constant(group):
            continue
        centred = group - group.mean()
        advantages[members] = centred / group.std(correction=1) if normalize_by_std else centred
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _is_constant(group: Tensor) -> bool:
    """Whether all rewards of a group, shape [n], are the same up to float noise. True for a group of one."""
    scale = max(1.0, float(group.abs().max()))
    return float(group.max() - group.min()) <= CONSTANT_TOLERANCE * scale


def _refuse_non_finite(rewards: Tensor, group_ids: Sequence[str]) -> None:
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        named = ", ".join(f"{i} (group {group_ids[i]}: {float(rewards[i])})" for i in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"rewards must be finite, found at position {named}{more}; leave trajectories without a reward out"
        )
