"""From scored groups to what the learner trains on: advantages, weights, and the log-probs the loss compares with.

The second step of the loop. Rewards are shaped, turned into one advantage for each policy token and weighted; forward
passes are asked for where the algorithm needs them: reference log-probs for a KL term, old log-probs where the policy
moves while it trains on the batch or what a token is worth depends on them, a teacher's where there is one, values
where there is a critic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.algorithms.filters import has_signal, is_truncated
from slipstream.data.trajectory import FloatArray, Group, TrainingExample, Trajectory
from slipstream.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.algorithms.advantages import ScoredBatch
    from slipstream.training.group import LearnerGroup
    from slipstream.workflows.algorithm import Algorithm

# One value for each loss token of the examples, by example id.
ForwardPass = Callable[[Sequence[TrainingExample]], dict[str, FloatArray]]


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


@dataclass
class Headstart:
    """What was done for some groups of a batch before the others had come.

    `values` are those of forward passes, by field and example id; `learned` are the ids of the examples whose gradient
    is already part of the step.
    """

    values: dict[str, dict[str, FloatArray]] = field(default_factory=dict)
    learned: set[str] = field(default_factory=set)

    def compute(
        self,
        passes: Mapping[str, ForwardPass],
        examples: Sequence[TrainingExample],
    ) -> None:
        """Make the forward passes, by the field they give, for those of the examples that are not there already."""
        for name, compute in passes.items():
            known = self.values.setdefault(name, {})
            missing = [example for example in examples if example.example_id not in known]
            if missing:
                known |= compute(missing)


def prepare(
    groups: Sequence[Group],
    algorithm: Algorithm,
    learner: LearnerGroup,
    critic: LearnerGroup | None = None,
    *,
    headstart: Headstart | None = None,
    step_sequences: int | None = None,
) -> TrainingBatch:
    """Turn groups into weighted examples with advantages.

    Groups are divided evenly, in their order, into `optimizer_steps_per_batch` optimizer steps, which are repeated
    `epochs_per_batch` times. What a `headstart` has is not computed again, nor learned from again.
    `step_sequences` is the number of trajectories of the whole step, where `groups` are only some of it.
    """
    import torch

    from slipstream.algorithms.advantages import value_targets

    config = algorithm.config
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    is_scored = config.needs_reward or all(trajectory.reward is not None for trajectory in trajectories)
    rewards, shaping_changes = algorithm.shape_rewards(trajectories) if is_scored else (None, {})
    tokens = _PolicyTokens([policy_example(trajectory) for trajectory in trajectories])
    headstart = headstart or Headstart()
    headstart.compute(forward_passes(algorithm, learner, critic), tokens.examples)
    for name, values in headstart.values.items():
        tokens.add(name, values)
    if headstart.learned and not all(tokens.lengths):
        raise TrainingError(
            "a response without a token cannot be among those whose step is learned from group by group"
        )

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
    weighted = [
        with_token_weights(_learned_from(part), algorithm, step_sequences=step_sequences)
        for part in _divide(groups, examples, parts=config.optimizer_steps_per_batch)
    ]
    parts = [[example for example in part if example.example_id not in headstart.learned] for part in weighted]
    metrics = _metrics(trajectories, advantages[trained_tokens])
    if rewards is not None:
        metrics |= _reward_metrics(groups, trajectories)
    if rewards is not None and shaping_changes:
        metrics |= {f"shaping/{name}": change for name, change in shaping_changes.items()}
        metrics["reward/shaped_mean"] = float(rewards.mean())
    if scored.teacher_log_ratios is not None:
        metrics["teacher/reverse_kl"] = -float(scored.teacher_log_ratios.mean())
    if kl is not None:
        metrics["kl/in_reward"] = float(kl.mean())
    return TrainingBatch(
        optimizer_steps=parts * config.epochs_per_batch,
        metrics=metrics,
        parts=len(parts),
        filtered=_filtered(groups, is_trained),
        measured_kl=None if kl is None else float(kl.mean()),
    )


def forward_passes(algorithm: Algorithm, learner: LearnerGroup, critic: LearnerGroup | None) -> dict[str, ForwardPass]:
    """What the algorithm compares with at the loss tokens: how it is computed, by the name of the field."""
    passes: dict[str, ForwardPass] = {}
    if algorithm.needs_reference:
        passes["reference_log_probs"] = partial(learner.log_probs, "reference")
    if algorithm.needs_teacher:
        passes["teacher_log_probs"] = partial(learner.log_probs, "teacher")
    if algorithm.needs_old_log_probs:
        passes["old_log_probs"] = partial(learner.log_probs, "policy")
    if critic is not None:
        passes["old_values"] = critic.values
    return passes


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


def policy_example(trajectory: Trajectory) -> TrainingExample:
    """A trajectory as the learner sees it, with nothing but its rollout log-probs beside the tokens."""
    return TrainingExample(
        example_id=trajectory.trajectory_id,
        tokens=trajectory.tokens,
        loss_mask=trajectory.loss_mask,
        token_fields={"rollout_log_probs": trajectory.rollout_log_probs},
    )


def _token_rewards(tokens: _PolicyTokens, rewards: Tensor | None, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
    """The reward of each policy token, [N], and the KL of each where it is part of that.

    The trajectory's reward, where there is one, sits on its last policy token, whatever the environment wrote after it.
    """
    import torch

    token_rewards = torch.zeros(sum(tokens.lengths), dtype=torch.float64)
    kl = None
    if algorithm.needs_reference and algorithm.settings.kl_placement == "reward":
        kl = algorithm.kl_penalty(tokens.flat("old_log_probs"), tokens.flat("reference_log_probs"))
        token_rewards -= algorithm.kl_coefficient * kl.double()
    if rewards is None:
        return token_rewards, kl
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
    teacher_log_ratios = None
    if algorithm.needs_teacher:
        teacher_log_ratios = tokens.flat("teacher_log_probs") - tokens.flat("old_log_probs")
    return ScoredBatch(
        token_rewards=token_rewards,
        lengths=tuple(tokens.lengths),
        group_ids=tuple(group.group_id for group in groups for _ in group.trajectories),
        values=tokens.flat("old_values") if has_values else None,
        baselines=_baselines(groups, algorithm) if algorithm.needs_greedy_baseline else None,
        teacher_log_ratios=teacher_log_ratios,
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


def with_token_weights(
    examples: Sequence[TrainingExample], algorithm: Algorithm, *, step_sequences: int | None = None
) -> list[TrainingExample]:
    """Weights of one optimizer step: the denominator is counted over all its sequences, on all ranks.

    `step_sequences`: their number, where some of them only are given.
    """
    weights = algorithm.token_weights(_loss_token_counts(examples), step_sequences=step_sequences)
    return with_weights(examples, weights)


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


def _metrics(trajectories: Sequence[Trajectory], advantages: Tensor) -> dict[str, float]:
    """`advantages` [N] are those of the tokens trained on."""
    lengths = np.array([trajectory.response_length for trajectory in trajectories])
    metrics = {
        "advantage/mean": advantages.mean() if len(advantages) else 0.0,
        "advantage/std": advantages.std(correction=0) if len(advantages) else 0.0,
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated_share": np.mean([is_truncated(t.finish_reason) for t in trajectories]),
    }
    return {name: float(value) for name, value in metrics.items()}


def _reward_metrics(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of the rewards as they were given."""
    rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/groups_without_signal": np.mean([not has_signal(_rewards(group)) for group in groups]),
    }
    for name in sorted({name for trajectory in trajectories for name in trajectory.reward_parts}):
        values = [t.reward_parts[name] for t in trajectories if name in t.reward_parts]
        metrics[f"reward_part/{name}"] = np.mean(values)
    return {name: float(value) for name, value in metrics.items()}


def _rewards(group: Group) -> list[float]:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return [reward for reward in rewards if reward is not None]
