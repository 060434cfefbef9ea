"""What a process reward model minimizes: how unlikely it finds the label of each step of an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as functional
from torch import Tensor

from slipstream.algorithms.objective import ObjectiveOutput, required_field

TRUE_FROM = 0.5
"""A label, and the probability of a step, counts as true from here on."""


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each step from its score, a logit, and its label, from 0 to 1. Both [N]; [N], float32.

    -(y log s(x) + (1 - y) log(1 - s(x))) with s the logistic function: process supervision as the classification of
    each step, read after its last token ("Let's Verify Step by Step", arXiv 2305.20050, section 2.6; arXiv 2211.14275).
    A label between 0 and 1 is the probability that the step is right: Math-Shepherd's soft estimation (arXiv
    2312.08935).
    """
    return functional.binary_cross_entropy_with_logits(scores.float(), labels.float(), reduction="none")


@dataclass(frozen=True)
class StepObjective:
    """The loss of a process reward model. The loss tokens are those that end a step with a label.

    Outputs read: `scores`, logits. Fields read: `step_label`, from 0 to 1.

    Metrics: `accuracy`, the share of steps whose probability and label lie on the same side of 0.5 (0.5 itself is
    true); `true_share`, the share of steps whose label is true: the accuracy of a model that finds every step right.
    """

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError if the labels are missing."""
        scores, labels = outputs["scores"], required_field(fields, "step_label")
        is_true = labels >= TRUE_FROM
        is_right = (scores.detach().sigmoid() >= TRUE_FROM) == is_true
        return ObjectiveOutput(
            step_loss(scores, labels), {"accuracy": is_right.to(scores.dtype), "true_share": is_true.to(scores.dtype)}
        )
