"""What is done to the rewards of a batch before advantages are computed from them.

Stands between the reward function and `advantages.py`. The stages run in one fixed order, and the mean of what each of
them changed is returned, so that a curve of rewards can be taken apart. The KL to the reference is not a stage: it is a
reward of single tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.algorithms.filters import CONSTANT_TOLERANCE, is_truncated
from slipstream.algorithms.user_function import checked_numbers
from slipstream.errors import RewardError

ShapingFunction = Callable[[Tensor, Sequence[Any]], Tensor]
"""A user's own shaping: rewards [B] and their trajectories in, rewards [B] out."""


class RewardedTrajectory(Protocol):
    """What shaping reads of a trajectory. `response_length` counts policy tokens."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def reward_parts(self) -> Mapping[str, float]: ...
    @property
    def response_length(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True)
class Shaping:
    """Which stages run, and how, in their order. What is not given is off.

    The reward becomes the sum of named parts by `weights`, then what `function` makes of it. Penalties are subtracted:
    `length_penalty` times length / longest response, `truncation_penalty` from responses that were cut, and
    `overlong_penalty` times `soft_overlong_punishment`, whose buffer is the last `overlong_buffer_share` of the longest
    response. `normalize` divides by the spread of the run so far; `clip` is the lowest and the highest reward.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    function: ShapingFunction | None = None
    length_penalty: float = 0.0
    truncation_penalty: float = 0.0
    overlong_buffer_share: float = 0.0
    overlong_penalty: float = 1.0
    normalize: bool = False
    clip: tuple[float, float] | None = None


@dataclass
class RunningMoments:
    """Count, mean and spread of all rewards of a run so far. `squares` is the sum of squared deviations."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Standard deviation of exactly what was counted; 0 before anything was."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def update(self, values: Tensor) -> None:
        """Count a batch [B] in, as Chan, Golub and LeVeque (1979), equation 2.1, merge two samples.

        No large sums of squares are ever subtracted, so the spread stays exact far from 0.
        """
        exact = values.detach().double()
        added = len(exact)
        if not added:
            return
        mean = float(exact.mean())
        distance, total = mean - self.mean, self.count + added
        self.squares += float((exact - mean).square().sum()) + distance**2 * self.count * added / total
        self.mean += distance * added / total
        self.count = total

    def normalize(self, values: Tensor) -> Tensor:
        """Subtract the mean and divide by the standard deviation. [B] -> [B], float64; 0 while all were the same."""
        exact = values.detach().double()
        if self.std <= CONSTANT_TOLERANCE * max(1.0, abs(self.mean)):
            return torch.zeros_like(exact)
        return (exact - self.mean) / self.std

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; plain JSON."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])


def shape_rewards(
    trajectories: Sequence[RewardedTrajectory],
    shaping: Shaping,
    *,
    max_response_tokens: int,
    moments: RunningMoments,
    update_moments: bool = True,
) -> tuple[Tensor, dict[str, float]]:
    """Return the shaped rewards, [B], float64, and the mean of what each stage that ran added to them, by its name.

    These means add up to the mean shaped reward minus the mean reward; those of penalties are negative.

    Where rewards are normalized, those of this batch are counted into `moments` first. `update_moments` False leaves
    them out: for rewards that are only compared with others, such as those of greedy answers.

    Raises ValueError for a trajectory without a finite reward, RewardError for one without a part that has a weight, by
    its id, and TrainingError for a function that does not return B finite numbers.
    """
    rewards = _rewards(trajectories)
    lengths = torch.tensor([trajectory.response_length for trajectory in trajectories], dtype=torch.float64)
    changes: dict[str, float] = {}

    def become(name: str, shaped: Tensor) -> None:
        nonlocal rewards
        changes[name] = float((shaped - rewards).mean()) if len(rewards) else 0.0
        rewards = shaped

    if shaping.weights:
        become("weights", _weighted_sums(trajectories, shaping.weights))
    if shaping.function is not None:
        # A copy, so that a function may change what it was given.
        shaped = shaping.function(rewards.clone(), trajectories)
        become("function", checked_numbers(shaped, shaping.function, kind="shaping", size=len(rewards)))
    if shaping.length_penalty:
        become("length_penalty", rewards - shaping.length_penalty * lengths / max_response_tokens)
    if shaping.truncation_penalty:
        truncated = torch.tensor([is_truncated(t.finish_reason) for t in trajectories], dtype=torch.float64)
        become("truncation_penalty", rewards - shaping.truncation_penalty * truncated)
    if shaping.overlong_buffer_share:
        punishment = soft_overlong_punishment(
            lengths, max_response_tokens=max_response_tokens, buffer_share=shaping.overlong_buffer_share
        )
        become("overlong_penalty", rewards + shaping.overlong_penalty * punishment)
    if shaping.normalize:
        if update_moments:
            moments.update(rewards)
        become("normalize", moments.normalize(rewards))
    if shaping.clip is not None:
        become("clip", rewards.clamp(*shaping.clip))
    return rewards, changes


def soft_overlong_punishment(lengths: Tensor, *, max_response_tokens: int, buffer_share: float) -> Tensor:
    """Return what lengths [B] near the limit add to the reward, between -1 and 0. [B], float64.

    DAPO (arXiv 2503.14476), equation 13: 0 up to the start of the buffer, from there a straight line to -1 at
    `max_response_tokens`. The buffer is the last `buffer_share` of `max_response_tokens`.
    """
    buffer = buffer_share * max_response_tokens
    start = max_response_tokens - buffer
    return ((start - lengths.double()) / buffer).clamp(-1.0, 0.0)


def _rewards(trajectories: Sequence[RewardedTrajectory]) -> Tensor:
    for trajectory in trajectories:
        if trajectory.reward is None or not math.isfinite(trajectory.reward):
            raise ValueError(
                f"trajectory {trajectory.trajectory_id} must have a finite reward to be shaped, found "
                f"{trajectory.reward}; leave trajectories without a reward out"
            )
    return torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)


def _weighted_sums(trajectories: Sequence[RewardedTrajectory], weights: Mapping[str, float]) -> Tensor:
    sums = []
    for trajectory in trajectories:
        parts = trajectory.reward_parts
        missing = [name for name in weights if name not in parts]
        if missing:
            names = ", ".join(map(repr, missing))
            raise RewardError(
                f"algorithm.shaping.weights: the reward of trajectory {trajectory.trajectory_id} has no part {names} "
                f"to weigh; found {', '.join(sorted(parts)) or 'no parts'}"
            )
        sums.append(math.fsum(weight * parts[name] for name, weight in weights.items()))
    return torch.tensor(sums, dtype=torch.float64)
