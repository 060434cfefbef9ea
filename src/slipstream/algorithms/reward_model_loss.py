"""What a reward model minimizes: how unlikely it finds the preference between the two answers of each pair."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor

from slipstream.algorithms.objective import DerivedMetric, ObjectiveOutput, required_field

RELATIVE_NOISE = 1e-12
"""A variance below this share of the mean square is float64 noise."""


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, label_smoothing: float = 0.0
) -> Tensor:
    """Return the loss of each pair from the scores of its answers. All [P], float32.

    -log sigmoid(chosen - rejected - margin): InstructGPT (arXiv 2203.02155), equation 1, with the margin of Llama 2
    (arXiv 2307.09288), equation 2. `label_smoothing` is the probability that a pair is the wrong way round; the loss is
    then its expectation over both ways, each with the margin.
    """
    difference = chosen.float() - rejected.float()
    # -log sigmoid(x) = softplus(-x), which neither overflows nor loses what is small.
    loss = functional.softplus(margin - difference)
    if not label_smoothing:
        return loss
    return (1 - label_smoothing) * loss + label_smoothing * functional.softplus(margin + difference)


@dataclass(frozen=True)
class RewardModelObjective:
    """The loss of a reward model. A step is given whole pairs, the better answer first, each with one loss token.

    Both answers of a pair get the pair's loss and metrics, so that a mean over loss tokens is one over pairs.

    Outputs read: `scores`. Fields read: `is_chosen`, 1 for the better answer of a pair and 0 for the worse one.

    Metrics: `accuracy`, the share of pairs whose better answer has the higher score (a tie is half); `score_margin`, by
    how much; `chosen_score` and `rejected_score`; mean and standard deviation of all scores, `score_mean` and
    `score_std`.
    """

    margin: float = 0.0
    label_smoothing: float = 0.0

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError where the answers are not pairs in their order."""
        scores = outputs["scores"]
        _require_pairs(required_field(fields, "is_chosen"))
        chosen, rejected = scores.view(-1, 2).unbind(dim=1)
        loss = bradley_terry_loss(chosen, rejected, margin=self.margin, label_smoothing=self.label_smoothing)
        difference = (chosen - rejected).detach()
        of_pairs = {
            "accuracy": (torch.sign(difference) + 1) / 2,
            "score_margin": difference,
            "chosen_score": chosen.detach(),
            "rejected_score": rejected.detach(),
        }
        metrics = {name: values.repeat_interleave(2) for name, values in of_pairs.items()}
        exact = scores.detach().double()
        moments = {"score": exact, "score_square": exact.square()}
        return ObjectiveOutput(
            loss.repeat_interleave(2),
            metrics | {"score_mean": exact},
            {"score_std": DerivedMetric(standard_deviation, moments)},
        )


def standard_deviation(score: float, score_square: float) -> float:
    """From the means of the scores and of their squares; 0 where all are the same."""
    variance = score_square - score * score
    return 0.0 if variance <= RELATIVE_NOISE * score_square else math.sqrt(variance)


def _require_pairs(is_chosen: Tensor) -> None:
    expected = torch.tensor([1.0, 0.0], device=is_chosen.device).repeat(len(is_chosen) // 2)
    if len(is_chosen) % 2 or not torch.equal(is_chosen, expected):
        raise ValueError(
            f"a reward model learns from pairs, the better answer first, found is_chosen {is_chosen.tolist()}"
        )
