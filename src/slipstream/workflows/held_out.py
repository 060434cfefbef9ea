"""Held-out prompts: kept out of training, answered by the policy with sampling and greedily.

There may be several sets of them, each reported on its own; all are answered together, so that the engines are kept
busy. What the answers are worth is counted here; where the numbers go is `records.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.algorithms.evaluation import average_at_k, pass_at_k
from slipstream.config.data import DataConfig
from slipstream.config.evaluation import FIRST_SET, pass_at_name, pass_at_sizes
from slipstream.config.schema import EvaluateConfig, EvaluationConfig, RLConfig
from slipstream.data.answers import evaluation_identities
from slipstream.data.columns import Layout
from slipstream.data.mixture import Mixture
from slipstream.data.prompts import DropReport, build_prompts
from slipstream.data.tokenizer import load_tokenizer, require_same_tokens
from slipstream.data.trajectory import Group, Prompt, PromptOccurrence, Trajectory
from slipstream.errors import RewardError, WeightSyncError
from slipstream.observe.evaluations import Evaluation, EvaluationSample
from slipstream.observe.logs import get_logger
from slipstream.rollout.group_stream import Generators, GroupStream
from slipstream.rollout.messages import SamplingParameters
from slipstream.workflows.checks import evaluation_key
from slipstream.workflows.learned_rows import load_mixture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_SAMPLES = 8

logger = get_logger("data")


@dataclass(frozen=True)
class RLData:
    """What an RL run draws from: prompts to train on, held-out prompts by set (perhaps none), and the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    training: Mixture[Prompt]
    held_out: dict[str, list[Prompt]]


def load_rl_data(config: RLConfig) -> RLData:
    """Load and render all prompts; says what was dropped and why.

    Training prompts that are held-out prompts too, of whichever set, are dropped, unless the configuration wants them.
    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    if config.algorithm.teacher is not None:
        require_same_tokens(config.algorithm.teacher, config.model.path, key="algorithm.teacher", exactly=True)
    tokenizer = load_tokenizer(config.model.path)
    needs_label = config.reward.compares
    held_out = load_held_out(config.evaluation, tokenizer, needs_label=needs_label)
    excluded: frozenset[str] = frozenset()
    if config.evaluation.exclude_from_training:
        excluded = excluded.union(
            *(
                evaluation_identities(data, Layout.PROMPTS, needs_label=needs_label)
                for data in config.evaluation.sets.values()
            )
        )
    training = load_prompts(
        config.data, tokenizer, key="data", noun="training prompts", exclude=excluded, needs_label=needs_label
    )
    return RLData(tokenizer, training, held_out)


def load_held_out(
    evaluation: EvaluationConfig, tokenizer: PreTrainedTokenizerBase, *, needs_label: bool
) -> dict[str, list[Prompt]]:
    """The prompts of every held-out set by its name; says what was dropped and why. Raises as `load_rl_data` does."""
    return {
        name: load_prompts(
            data, tokenizer, key=evaluation_key(name), noun=f"{name} prompts", needs_label=needs_label
        ).items
        for name, data in evaluation.sets.items()
    }


def load_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    key: str,
    noun: str,
    exclude: frozenset[str] = frozenset(),
    needs_label: bool,
) -> Mixture[Prompt]:
    """The prompts of all sources of the section at `key`; says what was dropped and why."""

    def build(part: DataConfig, _: str) -> tuple[list[Prompt], DropReport]:
        return build_prompts(part, tokenizer, exclude=exclude, needs_label=needs_label)

    return load_mixture(data, build, key=key, noun=noun)


class HeldOutPrompts:
    """Evaluates whatever the rollout engines hold. The same prompts and the same seeds each time."""

    def __init__(
        self, sets: Mapping[str, Sequence[Prompt]], generators: Generators, config: RLConfig | EvaluateConfig
    ) -> None:
        """`sets`: the prompts of each held-out set by its name, the first set first."""
        self.sets = {
            name: [
                PromptOccurrence(group_id=_group_id(name, place), prompt=prompt) for place, prompt in enumerate(prompts)
            ]
            for name, prompts in sets.items()
        }
        self.generators = generators
        self.config = config

    def evaluate(self, step: int, policy_version: int) -> list[Evaluation]:
        """Answer every prompt, sampled and greedily, and score the answers; one result for each set, in their order.

        Raises RewardError if no answer to a set could be scored, WeightSyncError if an answer is not one of
        `policy_version`.
        """
        sampled = self._answer(self.config.rollout.temperature, self.config.evaluation.samples_per_prompt)
        greedy = self._answer(0.0, 1)
        # What the evaluation left in the prefix caches must not change the batches that training draws next.
        generators = self.generators
        generators.restarts.call_ready(generators.engines, "reset_prefix_cache", deadline_s=generators.call_timeout_s)
        for group in (*sampled.values(), *greedy.values()):
            _require_version(group, policy_version)
        return [
            summarize(
                name,
                sampled=[sampled[occurrence.group_id] for occurrence in occurrences],
                greedy=[greedy[occurrence.group_id] for occurrence in occurrences],
                success_reward=self.config.evaluation.success_reward,
                step=step,
                policy_version=policy_version,
            )
            for name, occurrences in self.sets.items()
        ]

    def _answer(self, temperature: float, samples: int) -> dict[str, Group]:
        """The scored answers to the prompts of all sets, by group id."""
        rollout = self.config.rollout
        sampling = SamplingParameters(
            temperature=temperature,
            max_response_tokens=rollout.max_response_tokens,
            stop=tuple(rollout.stop),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        stream = GroupStream(self.generators, sampling, samples_per_prompt=samples, purpose="evaluation")
        stream.submit([occurrence for occurrences in self.sets.values() for occurrence in occurrences])
        groups: dict[str, Group] = {}
        while not stream.is_empty:
            group = stream.next_group()
            if group is not None:
                groups[group.group_id] = group
        return groups


def summarize(
    dataset: str,
    *,
    sampled: Sequence[Group],
    greedy: Sequence[Group],
    success_reward: float,
    step: int,
    policy_version: int,
) -> Evaluation:
    """What the answers to a held-out set are worth: one group for each prompt, several answers sampled, one greedy.

    Accuracies and the mean reward are over exactly the answers whose reward could be computed; pass@k is over the
    prompts with at least k of them. Lengths and truncation are over all answers. Raises RewardError if no answer
    could be scored.
    """
    drawn = _Answers(sampled, success_reward, what=f"sampled answers to {dataset} prompts")
    likeliest = _Answers(greedy, success_reward, what=f"greedy answers to {dataset} prompts")
    return Evaluation(
        step=step,
        policy_version=policy_version,
        dataset=dataset,
        prompts=len(sampled),
        samples_per_prompt=len(sampled[0].trajectories),
        sampled_accuracy=average_at_k(drawn.outcomes),
        greedy_accuracy=average_at_k(likeliest.outcomes),
        pass_at_k=_pass_at_k(drawn.outcomes, len(sampled[0].trajectories)),
        mean_reward=float(np.mean(drawn.rewards)),
        mean_length=float(np.mean(drawn.lengths)),
        max_length=max(drawn.lengths),
        truncated_share=drawn.truncated_share,
        greedy_mean_length=float(np.mean(likeliest.lengths)),
        greedy_max_length=max(likeliest.lengths),
        greedy_truncated_share=likeliest.truncated_share,
        unscored=drawn.unscored + likeliest.unscored,
        samples=[_shown(group.trajectories[0], group.prompt) for group in sampled[:SHOWN_SAMPLES]],
    )


class _Answers:
    """All answers of one kind to a held-out set. `outcomes` and `rewards` leave out those that were not scored."""

    def __init__(self, groups: Sequence[Group], success_reward: float, *, what: str) -> None:
        answers = [trajectory for group in groups for trajectory in group.trajectories]
        rewards = [[answer.reward for answer in group.trajectories if answer.reward is not None] for group in groups]
        self.outcomes = [[reward >= success_reward for reward in of_prompt] for of_prompt in rewards]
        self.rewards = [reward for of_prompt in rewards for reward in of_prompt]
        self.lengths = [answer.response_length for answer in answers]
        self.truncated_share = float(np.mean([answer.finish_reason == "length" for answer in answers]))
        self.unscored = len(answers) - len(self.rewards)
        if not self.rewards:
            raise RewardError(f"the reward failed for all {len(answers)} {what}: look at reward.function")
        if self.unscored:
            logger.warning(f"the reward failed for {self.unscored} of {len(answers)} {what}: left out")


def _group_id(dataset: str, place: int) -> str:
    return f"evaluation-{place}" if dataset == FIRST_SET else f"evaluation-{dataset}-{place}"


def _require_version(group: Group, policy_version: int) -> None:
    for trajectory in group.trajectories:
        versions = set(trajectory.versions[trajectory.loss_mask].tolist())
        if versions - {policy_version}:
            raise WeightSyncError(
                f"answer {trajectory.trajectory_id} of the evaluation of policy version {policy_version} was given by "
                f"version {', '.join(map(str, sorted(versions)))}: a rollout engine does not hold what it should"
            )


def _pass_at_k(outcomes: Sequence[Sequence[bool]], samples_per_prompt: int) -> dict[str, float]:
    estimates = {}
    for k in pass_at_sizes(samples_per_prompt):
        enough = [answers for answers in outcomes if len(answers) >= k]
        if enough:
            estimates[pass_at_name(k)] = pass_at_k(enough, k)
    return estimates


def _shown(trajectory: Trajectory, prompt: Prompt) -> EvaluationSample:
    return EvaluationSample(
        prompt=prompt.text, label=prompt.label, response=trajectory.response_text, reward=trajectory.reward
    )
