"""Advantages: how much better each policy token did than was to be expected.

Stands between scoring and the learner: the rewards of a whole rollout batch go in, one advantage per policy token
comes out. Environment tokens are stepped over by construction, since they never get here. Failed trajectories are left
out by the caller; nothing here invents a reward. Computed in float64, returned as float32.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.filters import has_signal
from slipstream.algorithms.user_function import checked_numbers

ESTIMATORS = ("group", "leave_one_out", "greedy_baseline", "returns", "gae", "teacher")


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    """The policy tokens of B trajectories end to end, N in all, with what they were rewarded with.

    `token_rewards` [N]: the reward of each token; that of a trajectory sits on its last policy token, penalties of
    single tokens anywhere. `lengths` [B]: policy tokens of each trajectory, 0 allowed. `group_ids` [B]: trajectories
    of one prompt occurrence share one; in any order, groups of any size. `values` [N]: what the critic expected before
    each token. `baselines` [B]: the reward of the greedy answer to the same prompt. `teacher_log_ratios` [N]: log-prob
    of each token under the teacher minus that under the policy that sampled it.

    Raises ValueError for shapes that do not belong together and for numbers that are not finite.
    """

    token_rewards: Tensor
    lengths: tuple[int, ...]
    group_ids: tuple[str, ...]
    values: Tensor | None = None
    baselines: Tensor | None = None
    teacher_log_ratios: Tensor | None = None

    def __post_init__(self) -> None:
        tokens, trajectories = sum(self.lengths), len(self.lengths)
        if len(self.group_ids) != trajectories or min(self.lengths, default=0) < 0:
            raise ValueError(
                f"expected one group id and a length of at least 0 per trajectory, found {len(self.group_ids)} ids "
                f"and the lengths {self.lengths}"
            )
        for name, numbers, size in (
            ("token_rewards", self.token_rewards, tokens),
            ("values", self.values, tokens),
            ("baselines", self.baselines, trajectories),
            ("teacher_log_ratios", self.teacher_log_ratios, tokens),
        ):
            if numbers is None:
                continue
            if numbers.shape != (size,):
                raise ValueError(f"{name} must have shape [{size}], found {list(numbers.shape)}")
            bad = (~torch.isfinite(numbers)).nonzero().flatten()
            if len(bad):
                first = int(bad[0])
                trajectory = first if name == "baselines" else int(self.trajectory_index[first])
                raise ValueError(
                    f"{name} must be finite, found {float(numbers[first])} in trajectory {trajectory} "
                    f"(group {self.group_ids[trajectory]}); leave trajectories without a reward out"
                )

    @property
    def trajectory_index(self) -> Tensor:
        """Which trajectory each token belongs to, [N]."""
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths)), np.array(self.lengths, dtype=np.int64)))

    @property
    def totals(self) -> Tensor:
        """The sum of the token rewards of each trajectory, [B], float64. 0 where there are no tokens."""
        totals = torch.zeros(len(self.lengths), dtype=torch.float64)
        return totals.index_add_(0, self.trajectory_index, self.token_rewards.detach().double())

    def per_token(self, per_trajectory: Tensor) -> Tensor:
        """Give every token what its trajectory has. Shape [B] -> [N]."""
        return per_trajectory[self.trajectory_index]


def estimate_advantages(
    batch: ScoredBatch,
    *,
    estimator: str | Callable[[ScoredBatch], Tensor],
    normalize_by_std: bool,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Return the advantage of each policy token, [N], float32.

    `estimator` is one of `ESTIMATORS` or a function of the same face. `normalize_by_std` matters to `group`, `discount`
    to `returns` and `gae`, `gae_lambda` to `gae`.

    - `group` and `leave_one_out` compare the totals of the trajectories of a group (see `group_advantages`,
      `leave_one_out_advantages`); every token of a trajectory has the same advantage. A trajectory without policy
      tokens is no answer of the policy: the others are compared without it.
    - `greedy_baseline`, ReMax (arXiv 2310.10505), algorithm 1: what is still to come from the token on, minus the
      reward of the greedy answer.
    - `returns`, REINFORCE as in REINFORCE++ (arXiv 2501.03262): the discounted sum of what is still to come. One step
      of discount per policy token, however much the environment said in between.
    - `gae` (arXiv 1506.02438), equation 16: the sum over l of (discount * lambda)^l times the surprise
      r + discount * V(next) - V. Behind the last policy token the value is 0.
    - `teacher`, on-policy distillation: log teacher - log policy of each token, alone. Its mean under the policy is
      minus KL(policy || teacher): the single-step part of the gradient of MiniLLM (arXiv 2306.08543, section 2.2). What
      later tokens bring is left out, as with a discount of 0 (Thinking Machines, "On-Policy Distillation",
      https://thinkingmachines.ai/blog/on-policy-distillation), which leaves out most of the noise too.

    Raises ValueError for another name, for values, baselines or a teacher that are needed and missing, and for a
    function that does not return N finite numbers.
    """
    if callable(estimator):
        return checked_numbers(estimator(batch), estimator, kind="advantage", size=sum(batch.lengths)).float()
    match estimator:
        case "group":
            advantages = _within_groups(
                batch, lambda totals, ids: group_advantages(totals, ids, normalize_by_std=normalize_by_std)
            )
        case "leave_one_out":
            advantages = _within_groups(batch, leave_one_out_advantages)
        case "greedy_baseline":
            if batch.baselines is None:
                raise ValueError("the greedy baseline needs the reward of the greedy answer to each prompt, found none")
            to_come = _discounted_sums(batch.token_rewards, batch.lengths, factor=1.0)
            advantages = to_come - batch.per_token(batch.baselines.detach().double())
        case "returns":
            advantages = _discounted_sums(batch.token_rewards, batch.lengths, factor=discount)
        case "gae":
            advantages = _gae(batch, discount=discount, gae_lambda=gae_lambda)
        case "teacher":
            if batch.teacher_log_ratios is None:
                raise ValueError("advantage 'teacher' needs the teacher's log-prob of each policy token, found none")
            advantages = batch.teacher_log_ratios.detach()
        case _:
            raise ValueError(f"the advantage must be {', '.join(ESTIMATORS)} or a function, found {estimator!r}")
    return advantages.float()


def value_targets(advantages: Tensor, values: Tensor) -> Tensor:
    """What the critic should have said: GAE plus the values it came from, before whitening. Shapes [N], float32.

    With `gae_lambda` 1 these are the discounted returns; with 0 the reward plus the discounted next value.
    """
    return (advantages.double() + values.detach().double()).float()


def whiten(values: Tensor) -> Tensor:
    """Give all policy tokens of a batch mean 0 and standard deviation 1 (of exactly these tokens). [N] -> [N], float32.

    Call it once with the tokens of all ranks: the statistics of parts are others. A constant batch (see
    `filters.has_signal`) and a single token become exactly 0.
    """
    exact = values.detach().double()
    if not len(exact) or not has_signal([float(exact.min()), float(exact.max())]):
        return torch.zeros_like(exact, dtype=torch.float32)
    return ((exact - exact.mean()) / exact.std(correction=0)).float()


def group_advantages(rewards: Tensor, group_ids: Sequence[str], *, normalize_by_std: bool) -> Tensor:
    """Return reward minus the mean of the group, divided by the group's standard deviation if asked. Shape [B].

    DeepSeekMath (arXiv 2402.03300), section 4.1.2: A_i = (r_i - mean(r)) / std(r). Without the division it is the
    estimator of Dr. GRPO (arXiv 2503.20783), which does not favour prompts of low variance.

    `rewards` has shape [B]; `group_ids[i]` names the group of trajectory i. Groups are found by id alone, in any order
    and of any size. The paper does not say which standard deviation it means; this is the one with n - 1 in the
    denominator, as in the common implementations, so that learning rates carry over. No epsilon is added to it,
    because the cases it would guard against have a value of their own:

    - a group of one has no baseline: 0;
    - a constant group (see `filters.has_signal`) says nothing about which answer is better: exactly 0, not float noise
      divided by float noise;
    - a group that lost a member is compared among those left.

    Raises ValueError for a reward that is not finite, naming its position and group, and for lengths that differ.
    """

    def compare(group: Tensor) -> Tensor:
        centred = group - group.mean()
        return centred / group.std(correction=1) if normalize_by_std else centred

    return _compared(rewards, group_ids, compare)


def leave_one_out_advantages(rewards: Tensor, group_ids: Sequence[str]) -> Tensor:
    """Return reward minus the mean of the other answers to the same prompt. Shape [B].

    RLOO (arXiv 2402.14740), section 3.2: A_i = r_i - (sum of r_j over j != i) / (n - 1). The baseline of an answer does
    not depend on it, so it adds no bias. Groups of one, constant groups, groups short of a member and errors are as in
    `group_advantages`.
    """

    def compare(group: Tensor) -> Tensor:
        # r - (sum - r) / (n - 1), written so that the large sums cancel first.
        return (group - group.mean()) * len(group) / (len(group) - 1)

    return _compared(rewards, group_ids, compare)


def _compared(rewards: Tensor, group_ids: Sequence[str], compare: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a comparison, [n] -> [n] in float64, to each group that has something to compare; 0 for the others."""
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
        if has_signal(group.tolist()):
            advantages[members] = compare(group)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _within_groups(batch: ScoredBatch, compare: Callable[[Tensor, Sequence[str]], Tensor]) -> Tensor:
    """Compare the totals of trajectories that have tokens and give each token the result. [N]"""
    answers = [position for position, length in enumerate(batch.lengths) if length]
    advantages = torch.zeros(len(batch.lengths), dtype=torch.float64)
    advantages[answers] = compare(batch.totals[answers], [batch.group_ids[position] for position in answers])
    return batch.per_token(advantages)


def _gae(batch: ScoredBatch, *, discount: float, gae_lambda: float) -> Tensor:
    if batch.values is None:
        raise ValueError("gae needs the critic's value of each policy token, found none")
    values = batch.values.detach().double()
    sizes = torch.tensor(batch.lengths, dtype=torch.int64)
    next_values = values.roll(-1)
    next_values[(sizes.cumsum(0) - 1)[sizes > 0]] = 0.0
    surprises = batch.token_rewards.detach().double() + discount * next_values - values
    return _discounted_sums(surprises, batch.lengths, factor=discount * gae_lambda)


def _discounted_sums(numbers: Tensor, lengths: Sequence[int], *, factor: float) -> Tensor:
    """Return sum over l of factor^l * numbers[t + l], to the end of the trajectory of t. Shape [N] -> [N], float64.

    Walks back from the last tokens of all trajectories at once, without padding: one small step for each position of
    the longest, for which NumPy has less overhead than torch.
    """
    sums = numbers.detach().double().numpy().copy()
    sizes = np.array(lengths, dtype=np.int64)
    longest_first = np.argsort(-sizes, kind="stable")
    last_tokens = (np.cumsum(sizes) - 1)[longest_first]
    longer_than = len(sizes) - np.searchsorted(np.sort(sizes), np.arange(sizes.max(initial=0)), side="right")
    for back in range(1, len(longer_than)):
        tokens = last_tokens[: longer_than[back]] - back
        sums[tokens] += factor * sums[tokens + 1]
    return torch.from_numpy(sums)


def _refuse_non_finite(rewards: Tensor, group_ids: Sequence[str]) -> None:
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        named = ", ".join(f"{i} (group {group_ids[i]}: {float(rewards[i])})" for i in bad[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(
            f"rewards must be finite, found at position {named}{more}; leave trajectories without a reward out"
        )
