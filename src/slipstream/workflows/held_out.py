"""Held-out prompts: kept out of training, answered by the policy with sampling and greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slipstream.cluster.calls import gather
from slipstream.config.schema import EvaluateConfig, RLConfig
from slipstream.data.prompts import build_prompts, evaluation_identities
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectory import Group, Prompt, PromptOccurrence, Trajectory
from slipstream.errors import RewardError
from slipstream.observe.evaluations import Evaluation, EvaluationSample
from slipstream.observe.logs import get_logger
from slipstream.rollout.messages import SamplingParameters
from slipstream.rollout.stream import Generators, GroupStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_SAMPLES = 8

logger = get_logger("data")


@dataclass(frozen=True)
class RLData:
    """What an RL run draws from: prompts to train on, prompts that are held out (perhaps none), and the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    training: list[Prompt]
    held_out: list[Prompt]


def load_rl_data(config: RLConfig) -> RLData:
    """Load and render all prompts; says what was dropped and why.

    Training prompts that are held-out prompts too are dropped, unless the configuration wants them.
    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    tokenizer = load_tokenizer(config.model.path)
    held_out: list[Prompt] = []
    excluded: frozenset[str] = frozenset()
    if config.evaluation.data is not None:
        held_out, report = build_prompts(config.evaluation.data, tokenizer)
        logger.info(f"held-out prompts: {report}")
        if config.evaluation.exclude_from_training:
            excluded = evaluation_identities(config.evaluation.data)
    training, report = build_prompts(config.data, tokenizer, exclude=excluded)
    logger.info(f"training prompts: {report}")
    return RLData(tokenizer, training, held_out)


class HeldOutPrompts:
    """Evaluates whatever the rollout engines hold. The same prompts and the same seeds each time."""

    def __init__(self, prompts: Sequence[Prompt], generators: Generators, config: RLConfig | EvaluateConfig) -> None:
        self.occurrences = [PromptOccurrence(group_id=f"evaluation-{prompt.row}", prompt=prompt) for prompt in prompts]
        self.generators = generators
        self.config = config

    def evaluate(self, step: int, policy_version: int) -> Evaluation:
        """Answer every prompt, sampled and greedily, and score the answers. One policy version throughout."""
        sampled = self._answer(self.config.rollout.temperature, self.config.evaluation.samples_per_prompt)
        greedy = self._answer(0.0, 1)
        # What the evaluation left in the prefix caches must not change the batches that training draws next.
        gather(
            [engine.submit("reset_prefix_cache") for engine in self.generators.engines],
            deadline_s=self.generators.call_timeout_s,
        )
        trajectories = [trajectory for group in sampled for trajectory in group.trajectories]
        return Evaluation(
            step=step,
            policy_version=policy_version,
            sampled_accuracy=self._accuracy(trajectories),
            greedy_accuracy=self._accuracy([trajectory for group in greedy for trajectory in group.trajectories]),
            prompts=len(self.occurrences),
            mean_length=float(np.mean([trajectory.response_length for trajectory in trajectories])),
            truncated_share=float(np.mean([trajectory.finish_reason == "length" for trajectory in trajectories])),
            samples=[_shown(group.trajectories[0], group.prompt) for group in sampled[:SHOWN_SAMPLES]],
        )

    def _answer(self, temperature: float, samples: int) -> list[Group]:
        rollout = self.config.rollout
        sampling = SamplingParameters(
            temperature=temperature,
            max_response_tokens=rollout.max_response_tokens,
            stop=tuple(rollout.stop),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        stream = GroupStream(self.generators, sampling, samples_per_prompt=samples, purpose="evaluation")
        stream.submit(self.occurrences)
        groups: dict[str, Group] = {}
        while not stream.is_empty:
            group = stream.next_group()
            if group is not None:
                groups[group.group_id] = group
        return [groups[occurrence.group_id] for occurrence in self.occurrences]

    def _accuracy(self, trajectories: Sequence[Trajectory]) -> float:
        """Share of answers that are right, over exactly those whose reward could be computed.

        Raises RewardError if none could.
        """
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
        missing = len(trajectories) - len(rewards)
        if not rewards:
            raise RewardError(f"the reward failed for all {missing} held-out answers: look at reward.function")
        if missing:
            logger.warning(f"the reward failed for {missing} of {len(trajectories)} held-out answers: left out")
        return float(np.mean([reward >= self.config.evaluation.success_reward for reward in rewards]))


def _shown(trajectory: Trajectory, prompt: Prompt) -> EvaluationSample:
    return EvaluationSample(
        prompt=prompt.text, label=prompt.label, response=trajectory.response_text, reward=trajectory.reward
    )
