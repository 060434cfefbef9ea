"""From scored groups to what the learner trains on: advantages, weights, and the log-probs the loss compares with.

The second step of the loop. Rewards are shaped, turned into one advantage for each policy token and weighted; forward
passes are asked for where the algorithm needs them: reference log-probs for a KL term, old log-probs where the policy
moves while it trains on the batch or the KL is part of the reward, values where there is a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.algorithms.filters import has_signal, is_truncated
from slipstream.data.trajectory import FloatArray, Group, TrainingExample, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.algorithms.advantages import ScoredBatch
    from slipstream.training.group import LearnerGroup
    from slipstream.workflows.algorithm import Algorithm


@dataclass(frozen=True)
class TrainingBatch:
    """A rollout batch, ready to train on: one list of examples for each optimizer step, and metrics of the whole.

    `parts` is how many optimizer steps one pass over the batch has; further passes repeat them. `filtered` says why
    nothing is learned from a group, by its id. `measured_kl` is the mean KL of a policy token where it was computed
    before the update.
    """

    optimizer_steps: list[list[TrainingExample]]
    metrics: dict[str, float]
    parts: int = 1
    filtered: dict[str, str] = field(default_factory=dict)
    measured_kl: float | None = None


def prepare(
    groups: Sequence[Group], algorithm: Algorithm, learner: LearnerGroup, critic: LearnerGroup | None = None
) -> TrainingBatch:
    """Turn groups into weighted examples with advantages.

    Groups are divided evenly, in their order, into `optimizer_steps_per_batch` optimizer steps, which are repeated
    `epochs_per_batch` times.
    """
    import torch

    from slipstream.algorithms.advantages import value_targets

    config = algorithm.config
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards, shaping_changes = algorithm.shape_rewards(trajectories)
    tokens = _PolicyTokens([_example(trajectory) for trajectory in trajectories])
    if algorithm.needs_reference:
        tokens.add("reference_log_probs", learner.log_probs("reference", tokens.examples))
    if algorithm.needs_old_log_probs:
        tokens.add("old_log_probs", learner.log_probs("policy", tokens.examples))
    if critic is not None:
        tokens.add("old_values", critic.values(tokens.examples))

    token_rewards, kl = _token_rewards(tokens, rewards, algorithm)
    scored = _scored_batch(groups, tokens, token_rewards, algorithm)
    raw = algorithm.advantages(scored)
    if scored.values is not None:
        tokens.add_flat("returns", value_targets(raw, scored.values))
    is_trained = np.array([_is_trained(trajectory, config.algorithm.overlong_filtering) for trajectory in trajectories])
    trained_tokens = torch.from_numpy(np.repeat(is_trained, tokens.lengths))
    advantages = _whitened(raw, trained_tokens) if config.algorithm.whiten_advantages else raw
    tokens.add_flat("advantages", advantages)

    examples = [
        example if kept else replace(example, loss_mask=np.zeros_like(example.loss_mask))
        for example, kept in zip(tokens.examples, is_trained, strict=True)
    ]
    parts = [
        with_token_weights(_learned_from(part), algorithm)
        for part in _divide(groups, examples, parts=config.optimizer_steps_per_batch)
    ]
    metrics = _metrics(groups, trajectories, advantages[trained_tokens])
    if shaping_changes:
        metrics |= {f"shaping/{name}": change for name, change in shaping_changes.items()}
        metrics["reward/shaped_mean"] = float(rewards.mean())
    if kl is not None:
        metrics["kl/in_reward"] = float(kl.mean())
    return TrainingBatch(
        optimizer_steps=parts * config.epochs_per_batch,
        metrics=metrics,
        parts=len(parts),
        filtered=_filtered(groups, is_trained),
        measured_kl=None if kl is None else float(kl.mean()),
    )


class _PolicyTokens:
    """The policy tokens of a batch, seen end to end [N] and as fields of their examples."""

    def __init__(self, examples: list[TrainingExample]) -> None:
        self.examples = examples
        self.lengths = [int(example.loss_mask.sum()) for example in examples]

    def add(self, name: str, values: dict[str, FloatArray]) -> None:
        """Add a field from one value for each policy token, by example id."""
        self._add([values[example.example_id] for example in self.examples], name)

    def add_flat(self, name: str, values: Tensor) -> None:
        """Add a field from values [N]."""
        self._add(np.split(values.float().numpy(), np.cumsum(self.lengths)[:-1]), name)

    def flat(self, name: str) -> Tensor:
        """A field as values [N]."""
        import torch

        return torch.from_numpy(
            np.concatenate([example.token_fields[name][example.loss_mask] for example in self.examples])
        )

    def _add(self, values: Sequence[FloatArray], name: str) -> None:
        extended = []
        for example, own in zip(self.examples, values, strict=True):
            # Nothing reads a field outside of the loss mask.
            whole = np.full(len(example.tokens), np.nan, dtype=np.float32)
            whole[example.loss_mask] = own
            extended.append(replace(example, token_fields={**example.token_fields, name: whole}))
        self.examples = extended


def _example(trajectory: Trajectory) -> TrainingExample:
    return TrainingExample(
        example_id=trajectory.trajectory_id,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        token_fields={"rollout_log_probs": trajectory.rollout_log_probs},
    )


def _token_rewards(tokens: _PolicyTokens, rewards: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
    """The reward of each policy token, [N], and the KL of each where it is part of that.

    The trajectory's reward sits on its last policy token, whatever the environment wrote after it.
    """
    import torch

    token_rewards = torch.zeros(sum(tokens.lengths), dtype=torch.float64)
    kl = None
    if algorithm.needs_reference and algorithm.settings.kl_placement == "reward":
        kl = algorithm.kl_penalty(tokens.flat("old_log_probs"), tokens.flat("reference_log_probs"))
        token_rewards -= algorithm.kl_coefficient * kl.double()
    lengths = torch.tensor(tokens.lengths)
    last = torch.cumsum(lengths, dim=0) - 1
    has_tokens = lengths > 0
    token_rewards[last[has_tokens]] += rewards.double()[has_tokens]
    return token_rewards, kl


def _scored_batch(
    groups: Sequence[Group], tokens: _PolicyTokens, token_rewards: Tensor, algorithm: Algorithm
) -> ScoredBatch:
    from slipstream.algorithms.advantages import ScoredBatch

    has_values = "old_values" in tokens.examples[0].token_fields
    return ScoredBatch(
        token_rewards=token_rewards,
        lengths=tuple(tokens.lengths),
        group_ids=tuple(group.group_id for group in groups for _ in group.trajectories),
        values=tokens.flat("old_values") if has_values else None,
        baselines=_baselines(groups, algorithm) if algorithm.needs_greedy_baseline else None,
    )


def _baselines(groups: Sequence[Group], algorithm: Algorithm) -> Tensor:
    """The reward of the greedy answer to each trajectory's prompt, [B], shaped as the trajectory's own is."""
    import torch

    answers = [group.baseline for group in groups if group.baseline is not None]
    rewards = algorithm.shape_baselines(answers)
    return rewards.repeat_interleave(torch.tensor([len(group.trajectories) for group in groups]))


def _whitened(advantages: Tensor, trained: Tensor) -> Tensor:
    """Whiten over the tokens that are trained on, [N] bool; the others are never read."""
    from slipstream.algorithms.advantages import whiten

    result = advantages.clone()
    result[trained] = whiten(advantages[trained])
    return result


def _is_trained(trajectory: Trajectory, overlong_filtering: bool) -> bool:
    return not (overlong_filtering and is_truncated(trajectory.finish_reason))


def _filtered(groups: Sequence[Group], is_trained: Any) -> dict[str, str]:
    """Groups of which every response was filtered, with the reason."""
    filtered = {}
    remaining = iter(is_trained)
    for group in groups:
        if not any([next(remaining) for _ in group.trajectories]):
            filtered[group.group_id] = "overlong: every response was cut at the limit"
    return filtered


def _learned_from(examples: list[TrainingExample]) -> list[TrainingExample]:
    """Without the examples that have no loss token; one stays if all are such, since a step needs an example."""
    return [example for example in examples if example.loss_mask.any()] or examples[:1]


def with_token_weights(examples: Sequence[TrainingExample], algorithm: Algorithm) -> list[TrainingExample]:
    """Weights of one optimizer step: the denominator is counted over all its sequences, on all ranks."""
    return with_weights(examples, algorithm.token_weights(_loss_token_counts(examples)))


def with_token_mean_weights(examples: Sequence[TrainingExample]) -> list[TrainingExample]:
    """Every loss token of the optimizer step weighs the same: what supervised training uses."""
    from slipstream.algorithms.aggregation import aggregation_weights

    counts = _loss_token_counts(examples)
    return with_weights(examples, aggregation_weights(counts, aggregation="token_mean"))


def with_weights(examples: Sequence[TrainingExample], weights: Sequence[float]) -> list[TrainingExample]:
    """Examples with the weight that each of their tokens has."""
    return [
        replace(
            example,
            token_fields={**example.token_fields, "weight": np.full(len(example.tokens), weight, dtype=np.float32)},
        )
        for example, weight in zip(examples, weights, strict=True)
    ]


def _loss_token_counts(examples: Sequence[TrainingExample]) -> list[int]:
    return [int(example.loss_mask.sum()) for example in examples]


def _divide(groups: Sequence[Group], examples: Sequence[TrainingExample], *, parts: int) -> list[list[TrainingExample]]:
    size = len(groups) // parts
    divided: list[list[TrainingExample]] = []
    remaining = iter(examples)
    for start in range(0, len(groups), size):
        count = sum(len(group.trajectories) for group in groups[start : start + size])
        divided.append([next(remaining) for _ in range(count)])
    return divided


def _metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory], advantages: Tensor) -> dict[str, float]:
    """`advantages` [N] are those of the tokens trained on."""
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    lengths = np.array([trajectory.response_length for trajectory in trajectories])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/groups_without_signal": np.mean([not has_signal(_rewards(group)) for group in groups]),
        "advantage/mean": advantages.mean() if len(advantages) else 0.0,
        "advantage/std": advantages.std(correction=0) if len(advantages) else 0.0,
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated_share": np.mean([is_truncated(t.finish_reason) for t in trajectories]),
    }
    for name in sorted({name for trajectory in trajectories for name in trajectory.reward_parts}):
        values = [t.reward_parts[name] for t in trajectories if name in t.reward_parts]
        metrics[f"reward_part/{name}"] = np.mean(values)
    return {name: float(value) for name, value in metrics.items()}


def _rewards(group: Group) -> list[float]:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return [reward for reward in rewards if reward is not None]
