"""A reward model at work: the tokens of trajectories in, one score each out.

Part of the reward engine, in whose process it computes. A trajectory's tokens are scored as they were sampled, packed
end to end, read at the last of them; no text is made and none is tokenized. torch is imported where it is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.config.reward_model import SCORE_MOMENTS
from slipstream.data.packing import plan_micro_batches
from slipstream.data.tokenizer import require_same_tokens
from slipstream.data.trajectory import IntArray, Trajectory
from slipstream.errors import ModelError
from slipstream.rewards.child import RewardResult

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
    """

    path: str
    policy_path: str
    dtype: str
    threads: int
    normalize: bool


class RewardModel:
    """To be used from one thread: the layout of a packed row is a variable of the process."""

    def __init__(self, spec: RewardModelSpec) -> None:
        self.spec = spec
        self._module: ValueModule | None = None

    def load(self) -> None:
        """Load the model onto this process's device.

        Raises ModelError for what is no reward model, one that reads other tokens than the policy writes, and one
        without moments to normalize by.
        """
        import torch

        from slipstream.models.hardware import detect_hardware
        from slipstream.models.loading import load_value_model
        from slipstream.models.value import ValueModule

        spec = self.spec
        torch.set_num_threads(spec.threads)
        require_same_tokens(spec.path, spec.policy_path, key=KEY)
        model = load_value_model(spec.path, dtype=spec.dtype, key=KEY, needs_head=True)
        self._mean, self._std = score_moments(getattr(model.config, SCORE_MOMENTS, None), spec)
        self._device = detect_hardware().device
        self._module = ValueModule(model).requires_grad_(False).eval().to(self._device)

    def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """One result for each trajectory, in their order. A score that is no finite number is a failure."""
        started = time.perf_counter()
        scores = self.scores([trajectory.tokens for trajectory in trajectories])
        seconds = (time.perf_counter() - started) / max(len(trajectories), 1)
        return [_result(score, seconds) for score in scores]

    def scores(self, sequences: Sequence[IntArray]) -> list[float]:
        """The score at the last token of each sequence, normalized if so configured."""
        lengths = [len(tokens) for tokens in sequences]
        [batches] = plan_micro_batches(lengths, tokens_per_micro_batch=TOKENS_PER_BATCH, ranks=1)
        scores = [math.nan] * len(sequences)
        for batch in batches:
            for index, score in zip(batch, self._forward([sequences[index] for index in batch]).tolist(), strict=True):
                scores[index] = (score - self._mean) / self._std
        return scores

    def _forward(self, sequences: Sequence[IntArray]) -> torch.Tensor:
        import torch

        from slipstream.models.attention import packed_sequences

        if self._module is None:
            raise RuntimeError("the reward model is used before it is loaded")
        lengths = [len(tokens) for tokens in sequences]
        rows = (
            np.concatenate(sequences),
            np.concatenate([np.arange(length) for length in lengths]),
            np.cumsum(lengths) - 1,
        )
        tokens, positions, ends = (torch.from_numpy(row.astype(np.int64)).to(self._device) for row in rows)
        with torch.no_grad(), packed_sequences(lengths):
            values: torch.Tensor = self._module(tokens, positions, ends)["values"]
        return values.double().cpu()


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


def _result(score: float, seconds: float) -> RewardResult:
    if not math.isfinite(score):
        failure = f"returned {score} by the reward model, expected a finite number"
        return RewardResult(None, failure=failure, seconds=seconds)
    return RewardResult(score, {"model": score}, seconds=seconds)
