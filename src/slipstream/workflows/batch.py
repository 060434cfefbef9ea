"""From scored groups to what the learner trains on: advantages, weights, and the log-probs the loss compares with.

The second step of the loop. Pure arithmetic, but for the forward passes it asks of the learner: reference log-probs
where there is a KL term, old log-probs where the policy moves while it trains on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.data.trajectory import FloatArray, Group, TrainingExample, Trajectory

if TYPE_CHECKING:
    from slipstream.config.schema import RLConfig
    from slipstream.training.group import LearnerGroup


@dataclass(frozen=True)
class TrainingBatch:
    """A rollout batch, ready to train on: one list of examples for each optimizer step, and metrics of the whole."""

    optimizer_steps: list[list[TrainingExample]]
    metrics: dict[str, float]


def prepare(groups: Sequence[Group], config: RLConfig, learner: LearnerGroup) -> TrainingBatch:
    """Turn groups into weighted examples with advantages.

    Groups are divided evenly, in their order, into `optimizer_steps_per_batch` optimizer steps.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = _advantages(trajectories, normalize_by_std=config.algorithm.normalize_by_std)
    examples = [_example(trajectory, advantage) for trajectory, advantage in zip(trajectories, advantages, strict=True)]
    if config.algorithm.kl_coefficient:
        examples = _with_field(examples, "reference_log_probs", learner.log_probs("reference", examples))
    if config.optimizer_steps_per_batch > 1:
        # After the first optimizer step the policy is no longer the one that the ratio is measured against.
        examples = _with_field(examples, "old_log_probs", learner.log_probs("policy", examples))
    return TrainingBatch(
        optimizer_steps=[
            with_token_mean_weights(part) for part in _divide(groups, examples, parts=config.optimizer_steps_per_batch)
        ],
        metrics=_metrics(groups, trajectories, advantages),
    )


def _advantages(trajectories: Sequence[Trajectory], *, normalize_by_std: bool) -> FloatArray:
    import torch

    from slipstream.algorithms.advantages import group_advantages

    rewards = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    group_ids = [trajectory.group_id for trajectory in trajectories]
    return group_advantages(rewards, group_ids, normalize_by_std=normalize_by_std).float().numpy()


def _example(trajectory: Trajectory, advantage: float) -> TrainingExample:
    return TrainingExample(
        example_id=trajectory.trajectory_id,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        token_fields={
            "advantages": np.full(len(trajectory.tokens), advantage, dtype=np.float32),
            "rollout_log_probs": trajectory.rollout_log_probs,
        },
    )


def _with_field(examples: Sequence[TrainingExample], name: str, values: dict[str, FloatArray]) -> list[TrainingExample]:
    """Add a field from values at the loss tokens, by example id; nothing reads it elsewhere."""
    extended = []
    for example in examples:
        whole = np.full(len(example.tokens), np.nan, dtype=np.float32)
        whole[example.loss_mask] = values[example.example_id]
        extended.append(replace(example, token_fields={**example.token_fields, name: whole}))
    return extended


def with_token_mean_weights(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Token-mean over the optimizer step: the denominator is counted over all its sequences, on all ranks."""
    from slipstream.algorithms.aggregation import token_mean_weights

    weights = token_mean_weights([int(example.loss_mask.sum()) for example in examples])
    return [
        replace(
            example,
            token_fields={**example.token_fields, "weight": np.full(len(example.tokens), weight, dtype=np.float32)},
        )
        for example, weight in zip(examples, weights, strict=True)
    ]


def _divide(groups: Sequence[Group], examples: Sequence[TrainingExample], *, parts: int) -> list[list[TrainingExample]]:
    size = len(groups) // parts
    divided: list[list[TrainingExample]] = []
    remaining = iter(examples)
    for start in range(0, len(groups), size):
        count = sum(len(group.trajectories) for group in groups[start : start + size])
        divided.append([next(remaining) for _ in range(count)])
    return divided


def _metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory], advantages: FloatArray) -> dict[str, Any]:
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    lengths = np.array([trajectory.response_length for trajectory in trajectories])
    per_group = np.split(advantages, np.cumsum([len(group.trajectories) for group in groups])[:-1])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/groups_without_signal": np.mean([not part.any() for part in per_group]),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated_share": np.mean([t.finish_reason == "length" for t in trajectories]),
    }
    for name in sorted({name for trajectory in trajectories for name in trajectory.reward_parts}):
        values = [t.reward_parts[name] for t in trajectories if name in t.reward_parts]
        metrics[f"reward_part/{name}"] = np.mean(values)
    return {name: float(value) for name, value in metrics.items()}
