"""From the scores of the steps of an answer to one reward.

A process reward model gives a logit for each step. An answer is worth what its worst step is ("min", the usual choice
in reinforcement learning), its last one, the probability that all of them are right ("product", arXiv 2305.20050,
section 2.6) or their mean.
"""

import math
from collections.abc import Sequence

from slipstream.config.schema import StepAggregation

WITHOUT_STEPS = 0.0
"""What an answer without any step is worth: as much as one whose steps are certainly wrong."""


def aggregate_steps(probabilities: Sequence[float], how: StepAggregation) -> float:
    """One number from 0 to 1 out of the probabilities that the steps of an answer are right, in their order."""
    if not probabilities:
        return WITHOUT_STEPS
    match how:
        case "min":
            return min(probabilities)
        case "last":
            return probabilities[-1]
        case "product":
            return math.prod(probabilities)
        case "mean":
            return math.fsum(probabilities) / len(probabilities)


def step_probabilities(scores: Sequence[float]) -> list[float]:
    """The logistic function of each score, in the form that does not overflow; NaN of NaN."""
    return [0.5 * (1.0 + math.tanh(0.5 * score)) for score in scores]
