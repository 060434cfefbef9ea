"""What a critic minimizes: the squared distance of its values from the returns, clipped as PPO's policy loss is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slipstream.algorithms.objective import DerivedMetric, ObjectiveOutput, required_field

RELATIVE_NOISE = 1e-12
"""A variance below this share of the mean square is float64 noise."""


def clipped_value_loss(
    values: Tensor, returns: Tensor, *, old_values: Tensor, value_clip: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and whether it was clipped: [N], and [N] boolean. All arguments [N].

    0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2): the value loss of PPO's reference
    implementation (OpenAI baselines; "The 37 Implementation Details of Proximal Policy Optimization", detail 9). Where
    a value has moved towards the return by more than `value_clip`, the clipped branch is the larger one: the loss is
    constant and has no gradient. A value that moved away from the return is pulled back.
    """
    error = (values - returns).square()
    clipped_values = torch.clamp(values.detach(), old_values - value_clip, old_values + value_clip)
    clipped_error = (clipped_values - returns).square()
    is_clipped = clipped_error > error
    return 0.5 * torch.where(is_clipped, clipped_error, error), is_clipped


@dataclass(frozen=True)
class ValueObjective:
    """The loss of a critic. `value_clip` None: plain squared error.

    Outputs read: `values`. Fields read: `returns`; `old_values` if `value_clip` is given.

    Metrics: `value_error`, the mean absolute distance from the returns; `explained_variance`, 1 - Var(R - V) / Var(R);
    `value_clip_share` where there is a clip.
    """

    value_clip: float | None

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError if a field that is needed is missing."""
        values, returns = outputs["values"], required_field(fields, "returns")
        error = (returns - values).detach().double()
        metrics = {"value_error": error.abs()}
        if self.value_clip is None:
            loss = 0.5 * (values - returns).square()
        else:
            loss, is_clipped = clipped_value_loss(
                values, returns, old_values=required_field(fields, "old_values"), value_clip=self.value_clip
            )
            metrics["value_clip_share"] = is_clipped.to(values.dtype)
        moments = {
            "returns": returns.double(),
            "returns_square": returns.double().square(),
            "error": error,
            "error_square": error.square(),
        }
        return ObjectiveOutput(loss, metrics, {"explained_variance": DerivedMetric(explained_variance, moments)})


def explained_variance(returns: float, returns_square: float, error: float, error_square: float) -> float:
    """Return 1 - Var(R - V) / Var(R), from the means of R, R^2, R - V and (R - V)^2.

    1: the values are the returns, up to a constant. 0: they say no more than a constant would. Less: they are worse.
    Returns that are all the same have nothing to explain: 0.
    """
    variance = returns_square - returns * returns
    if variance <= RELATIVE_NOISE * returns_square:
        return 0.0
    return 1.0 - (error_square - error * error) / variance
