"""What the learner minimizes: small, picklable objects that turn log-probs into a loss per token.

The learner calls an objective on each micro-batch with what it computed at the loss tokens and the fields that came
with them, and minimizes `(loss * fields["weight"]).sum()`. Only loss tokens are ever seen here (N of them, all
sequences of the micro-batch end to end), so there is no mask to forget. Weights come from `aggregation.py`,
advantages from `advantages.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from slipstream.algorithms.kl import KLEstimator, kl_estimate
from slipstream.algorithms.log_ratio import bounded_exp
from slipstream.algorithms.policy_loss import clipped_policy_loss


@dataclass(frozen=True)
class ObjectiveOutput:
    """The loss of each loss token, shape [N], and metrics of the same shape without gradient.

    Metrics are averaged over all loss tokens of the optimizer step; those whose name ends in `_max` are maximized.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """The face of every objective. All tensors have shape [N]; see `ObjectiveOutput` for the result."""

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """`sequence_index` says which sequence of the micro-batch each token belongs to."""
        ...


@dataclass(frozen=True)
class PolicyObjective:
    """GRPO (DeepSeekMath, arXiv 2402.03300, equation 3): the clipped policy loss plus a KL term to the reference.

    Fields read: `advantages`; `old_log_probs` if there, else the current log-probs detached (right when there is one
    optimizer step per rollout batch and no staleness: the ratio is then 1 and the gradient that of REINFORCE);
    `reference_log_probs` if `kl_coefficient` is not 0; `rollout_log_probs`, for metrics only.

    Metrics: `ratio` (policy / old), `clip_share`, `kl` (where there is a reference), and how far the rollout engine's
    log-probs are from the trainer's for the same weights: `mismatch_k3`, the k3 estimate of KL(rollout || trainer),
    `mismatch_abs` and `mismatch_abs_max`, the mean and largest absolute log-ratio.
    """

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError if a field that is needed is missing."""
        old_log_probs = fields.get("old_log_probs", log_probs.detach())
        loss, is_clipped = clipped_policy_loss(
            log_probs,
            old_log_probs,
            _required(fields, "advantages"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        metrics = {"ratio": bounded_exp(log_probs - old_log_probs), "clip_share": is_clipped.to(log_probs.dtype)}
        if self.kl_coefficient:
            kl = kl_estimate(log_probs, _required(fields, "reference_log_probs"), self.kl_estimator)
            loss = loss + self.kl_coefficient * kl
            metrics["kl"] = kl
        if "rollout_log_probs" in fields:
            metrics |= _mismatch(fields["rollout_log_probs"], old_log_probs)
        return ObjectiveOutput(loss, {name: values.detach() for name, values in metrics.items()})


@dataclass(frozen=True)
class SupervisedObjective:
    """Cross-entropy: the negative log-prob of each token to imitate. Reads no fields."""

    def __call__(
        self, log_probs: Tensor, entropy: Tensor, fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Return the loss of each token; the learner's weights make it a mean."""
        return ObjectiveOutput(-log_probs)


def _mismatch(rollout_log_probs: Tensor, trainer_log_probs: Tensor) -> dict[str, Tensor]:
    """Metrics of the distance between what was sampled from and what the trainer computes. Shapes [N]."""
    distance = (trainer_log_probs - rollout_log_probs).abs()
    return {
        "mismatch_k3": kl_estimate(rollout_log_probs, trainer_log_probs, "k3"),
        "mismatch_abs": distance,
        "mismatch_abs_max": distance,
    }


def _required(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise ValueError(f"the objective needs the token field {name!r}, found {', '.join(sorted(fields)) or 'none'}")
    return fields[name]
