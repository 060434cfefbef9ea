"""A reward model at work: the tokens of trajectories in, one score each out.

Part of the reward engine, in whose process it computes. A trajectory's tokens are scored as they were sampled, packed
end to end; no text is tokenized. They are read at the last of them, and by a process reward model at the last token of
each step (`data/step_ends.py`). torch is imported where it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.reward_model import SCORE_MOMENTS, STEP_SEPARATOR
from slipstream.config.schema import StepAggregation
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.data.packing import plan_micro_batches
from slipstream.data.step_ends import StepEnds
from slipstream.data.tokenizer import load_tokenizer, require_same_tokens
from slipstream.data.trajectory import IntArray, Trajectory
from slipstream.errors import ConfigError, ModelError
from slipstream.rewards.child import RewardResult
from slipstream.rewards.steps import aggregate_steps, step_probabilities

if TYPE_CHECKING:
    import torch

    from slipstream.models.value import ValueModule

KEY = "reward.model"
TOKENS_PER_BATCH = 8192
"""Packed tokens of one forward pass; a longer trajectory has one of its own."""


@dataclass(frozen=True)
class RewardModelSpec:
    """What scores, made by the controller from the configuration.

    `path` is that of the reward model, `policy_path` of the model whose tokens it is going to read. `dtype` is
    "float32" or "bfloat16". `normalize`: subtract the mean and divide by the deviation stored with the model.
    `step_aggregation`: the model is a process reward model, and this is how its steps become a reward.
    """

    path: str
    policy_path: str
    dtype: str
    threads: int
    normalize: bool
    step_aggregation: StepAggregation | None = None


class RewardModel:
    """To be used from one thread: the layout of a packed row is a variable of the process."""

    def __init__(self, spec: RewardModelSpec) -> None:
        self.spec = spec
        self._module: ValueModule | None = None

    def load(self) -> None:
        """Load the model onto this process's device.

        Raises ModelError for what is no reward model, or one of the other kind, one that reads other tokens than the
        policy writes, one without moments to normalize by, and one of steps that does not say what divides them.
        """
        import torch

        from slipstream.models.hardware import detect_hardware
        from slipstream.models.loading import load_process_reward_model, load_value_model
        from slipstream.models.value import ValueModule

        spec = self.spec
        torch.set_num_threads(spec.threads)
        require_same_tokens(spec.path, spec.policy_path, key=KEY)
        load = load_value_model if spec.step_aggregation is None else load_process_reward_model
        model = load(spec.path, dtype=spec.dtype, key=KEY, needs_head=True)
        self._mean, self._std = score_moments(getattr(model.config, SCORE_MOMENTS, None), spec)
        if spec.step_aggregation is not None:
            self._step_ends = step_ends_of(spec.path, getattr(model.config, STEP_SEPARATOR, None))
        self._device = detect_hardware().device
        self._module = ValueModule(model).requires_grad_(False).eval().to(self._device)

    def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """One result for each trajectory, in their order. A score that is no finite number is a failure."""
        started = time.perf_counter()
        if self.spec.step_aggregation is None:
            results = [_result(score) for score in self.scores([trajectory.tokens for trajectory in trajectories])]
        else:
            results = [
                _result_of_steps(scores, self.spec.step_aggregation) for scores in self.step_scores(trajectories)
            ]
        seconds = (time.perf_counter() - started) / max(len(trajectories), 1)
        return [replace(result, seconds=seconds) for result in results]

    def scores(self, sequences: Sequence[IntArray]) -> list[float]:
        """The score at the last token of each sequence, normalized if so configured."""
        read = self._read(sequences, [np.array([len(tokens) - 1]) for tokens in sequences])
        return [(score - self._mean) / self._std for [score] in read]

    def step_scores(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """The score of each step of each trajectory: what a process reward model gives, a logit."""
        places = [self._step_ends.find(trajectory.tokens, trajectory.loss_mask) for trajectory in trajectories]
        return self._read([trajectory.tokens for trajectory in trajectories], places)

    def _read(self, sequences: Sequence[IntArray], places: Sequence[IntArray]) -> list[list[float]]:
        """What the model gives at `places`, ascending, of each sequence. A sequence without any is not looked at."""
        read: list[list[float]] = [[] for _ in sequences]
        chosen = [index for index, wanted in enumerate(places) if len(wanted)]
        lengths = [len(sequences[index]) for index in chosen]
        [batches] = plan_micro_batches(lengths, tokens_per_micro_batch=TOKENS_PER_BATCH, ranks=1)
        for batch in batches:
            indices = [chosen[number] for number in batch]
            wanted = [places[index] for index in indices]
            values = self._forward([sequences[index] for index in indices], wanted).tolist()
            for index, own in zip(indices, wanted, strict=True):
                read[index], values = values[: len(own)], values[len(own) :]
        return read

    def _forward(self, sequences: Sequence[IntArray], places: Sequence[IntArray]) -> torch.Tensor:
        import torch

        from slipstream.models.attention import packed_sequences

        if self._module is None:
            raise RuntimeError("the reward model is used before it is loaded")
        lengths = [len(tokens) for tokens in sequences]
        starts = np.cumsum([0, *lengths[:-1]])
        rows = (
            np.concatenate(sequences),
            np.concatenate([np.arange(length) for length in lengths]),
            np.concatenate([start + own for start, own in zip(starts, places, strict=True)]),
        )
        tokens, positions, readers = (torch.from_numpy(row.astype(np.int64)).to(self._device) for row in rows)
        with torch.no_grad(), packed_sequences(lengths):
            values: torch.Tensor = self._module(tokens, positions, readers)["values"]
        return values.double().cpu()


def step_ends_of(path: str, separator: Any) -> StepEnds:
    """What finds the steps for the process reward model at `path`, which stores the `separator` between them.

    Raises ModelError where it stores none that can be used.
    """
    if not isinstance(separator, str) or not separator:
        raise ModelError(
            f"{KEY}: {path!r} does not say what stands between steps (found {STEP_SEPARATOR} {separator!r} in its "
            "config.json, expected a text): train it with `slipstream reward-model`, or write the text it was trained "
            "with there"
        )
    try:
        return StepEnds(load_tokenizer(path), separator)
    except ConfigError as error:
        raise ModelError(f"{KEY}: {path!r}: {error}") from None


def score_moments(stored: Any, spec: RewardModelSpec) -> tuple[float, float]:
    """Mean and deviation that scores are normalized by: 0 and 1 where they are not.

    Raises ModelError if they are to be and none that can be used are `stored` with the model.
    """
    if not spec.normalize:
        return 0.0, 1.0
    moments = stored if isinstance(stored, dict) else {}
    mean, std = moments.get("mean"), moments.get("std")
    if not isinstance(mean, int | float) or not isinstance(std, int | float) or not 0 < std < math.inf:
        raise ModelError(
            f"reward.normalize_model_scores: {spec.path!r} has no usable {SCORE_MOMENTS} in its config.json (found "
            f"{stored!r}, expected a mean and a std above 0): train it with `slipstream reward-model`, or set it false"
        )
    return float(mean), float(std)


def _result(score: float) -> RewardResult:
    return RewardResult(score, {"model": score}) if math.isfinite(score) else _not_finite(score)


def _result_of_steps(scores: Sequence[float], how: StepAggregation) -> RewardResult:
    """With the number of steps and the lowest of their probabilities among the parts of the reward."""
    for score in scores:
        if not math.isfinite(score):
            return _not_finite(score)
    probabilities = step_probabilities(scores)
    reward = aggregate_steps(probabilities, how)
    lowest = aggregate_steps(probabilities, "min")
    return RewardResult(reward, {"model": reward, "model/steps": float(len(scores)), "model/lowest_step": lowest})


def _not_finite(score: float) -> RewardResult:
    message = f"returned {score} by the reward model, expected a finite number"
    return RewardResult(None, failure=RewardFailure(FailureKind.RETURNED, message))
