"""What the learner minimizes: small, picklable objects that turn what a model computed into a loss per token.

The learner calls an objective on each micro-batch with what it computed at the loss tokens and the fields that came
with them, and minimizes `(loss * fields["weight"]).sum()`. Only loss tokens are ever seen here (N of them, all
sequences of the micro-batch end to end), so there is no mask to forget. Weights come from `aggregation.py`,
advantages from `advantages.py`; the critic's objective is in `value_loss.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from slipstream.algorithms.correction import Correction, effective_sample_share, importance_weights, weighted_loss
from slipstream.algorithms.kl import KLEstimator, kl_estimate
from slipstream.algorithms.log_ratio import bounded_exp
from slipstream.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLossFunction,
    PolicyLossInput,
    cispo_loss,
    clip_loss,
    policy_gradient_loss,
    sequence_clip_loss,
)
from slipstream.errors import TrainingError


@dataclass(frozen=True)
class DerivedMetric:
    """A metric that is no mean over tokens but a function of means over tokens, such as a variance.

    The `moments`, [N] each and without gradient, are averaged over all loss tokens of the optimizer step;
    `compute(**averages)` is the metric. It crosses processes, so it is a function of a module.
    """

    compute: Callable[..., float]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class ObjectiveOutput:
    """The loss of each loss token, shape [N], and metrics of the same shape without gradient.

    Metrics are averaged over all loss tokens of the optimizer step; those whose name ends in `_max` are maximized.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    derived: dict[str, DerivedMetric] = field(default_factory=dict)


class Objective(Protocol):
    """The face of every objective."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss depends on the entropy, so that the policy must compute it with a gradient."""
        ...

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """All tensors have shape [N].

        `outputs` is what the model computed: `log_probs` and `entropy` of a policy, `values` of a critic. `fields` came
        with the tokens. `sequence_index` says which sequence of the micro-batch each token belongs to.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PolicyObjective:
    """The policy loss, plus a KL term to the reference, minus an entropy bonus, times an off-policy correction.

    `policy_loss` is one of ours by name, or a function (see `PolicyLossFunction`). The whole loss of a token is
    multiplied with its importance weight, since all of it is an estimate from a token that the rollout engine sampled.
    GRPO (DeepSeekMath, arXiv 2402.03300, equation 3) is `clip` with a KL term of estimator k3.

    Outputs read: `log_probs`; `entropy`, with its gradient, if `entropy_coefficient` is not 0. Fields read:
    `advantages`; `old_log_probs` if there, else the current log-probs detached (right when there is one optimizer step
    per rollout batch and no staleness: the ratio is then 1 and the gradient that of REINFORCE); `reference_log_probs`
    if `kl_coefficient` is not 0, else for the metric only; `rollout_log_probs` with a `correction`, else for metrics
    only.

    Metrics: `ratio` (policy / old); `clip_share`, unless the loss is a function; `kl`, where there is a reference; how
    far the rollout engine's log-probs are from the trainer's: `mismatch_k3`, the k3 estimate of KL(rollout || trainer),
    `mismatch_abs` and `mismatch_abs_max`, the mean and largest absolute log-ratio; and with a correction
    `correction_weight`, the share outside of its bounds `correction_cut_share`, and the effective sample size of the
    weights as a share of the tokens, `correction_effective_share`.
    """

    clip_low: float
    clip_high: float
    policy_loss: str | PolicyLossFunction = "clip"
    dual_clip: float | None = None
    entropy_coefficient: float = 0.0
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    correction: Correction | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a loss that there is not, and for a bound that the loss would not look at."""
        if isinstance(self.policy_loss, str) and self.policy_loss not in POLICY_LOSSES:
            raise ValueError(
                f"policy_loss must be {', '.join(POLICY_LOSSES)} or a function, found {self.policy_loss!r}"
            )
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise ValueError(f"dual_clip belongs to policy_loss 'clip', found policy_loss {self.policy_loss!r}")

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.entropy_coefficient != 0

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Raises ValueError if something needed is missing, TrainingError if a user's loss is none."""
        log_probs = outputs["log_probs"]
        old_log_probs = fields.get("old_log_probs", log_probs.detach())
        loss, metrics = self._policy_loss(
            PolicyLossInput(log_probs, old_log_probs, required_field(fields, "advantages"), sequence_index)
        )
        derived: dict[str, DerivedMetric] = {}
        if self.kl_coefficient or "reference_log_probs" in fields:
            reference_log_probs = required_field(fields, "reference_log_probs")
            metrics["kl"] = kl_estimate(log_probs, reference_log_probs, self.kl_estimator, old_log_probs=old_log_probs)
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * metrics["kl"]
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * _entropy(outputs)
        if "rollout_log_probs" in fields:
            metrics |= _mismatch(fields["rollout_log_probs"], old_log_probs)
        if self.correction is not None:
            weights, is_cut = importance_weights(
                old_log_probs,
                required_field(fields, "rollout_log_probs"),
                sequence_index=sequence_index,
                correction=self.correction,
            )
            loss = weighted_loss(loss, weights)
            metrics |= {"correction_weight": weights, "correction_cut_share": is_cut.to(weights.dtype)}
            moments = {"weight": weights, "weight_square": weights.double().square()}
            derived["correction_effective_share"] = DerivedMetric(effective_sample_share, moments)
        return ObjectiveOutput(loss, {name: values.detach() for name, values in metrics.items()}, derived)

    def _policy_loss(self, inputs: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, [N], and its metrics."""
        metrics = {"ratio": bounded_exp(inputs.log_probs.detach() - inputs.old_log_probs)}
        if not isinstance(self.policy_loss, str):
            return _checked_loss(self.policy_loss, inputs), metrics
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        match self.policy_loss:
            case "clip":
                loss, is_clipped = clip_loss(inputs, **bounds, dual_clip=self.dual_clip)
            case "sequence_clip":
                loss, is_clipped = sequence_clip_loss(inputs, **bounds)
            case "cispo":
                loss, is_clipped = cispo_loss(inputs, **bounds)
            case _:
                loss, is_clipped = policy_gradient_loss(inputs)
        return loss, metrics | {"clip_share": is_clipped.to(inputs.log_probs.dtype)}


@dataclass(frozen=True)
class SupervisedObjective:
    """Cross-entropy: the negative log-prob of each token to imitate. Reads no fields."""

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Return the loss of each token; the learner's weights make it a mean."""
        return ObjectiveOutput(-outputs["log_probs"])


@dataclass(frozen=True, kw_only=True)
class DistillationObjective:
    """Cross-entropy on the data, and the divergence from a teacher over the whole vocabulary.

    loss = coefficient * temperature^2 * divergence + (1 - coefficient) * cross-entropy. The gradient of the divergence
    shrinks with the square of the temperature; the factor takes that back, so that the two terms keep their proportion
    (Hinton et al., arXiv 1503.02531, section 2). A `coefficient` of 1 is distillation alone.

    Outputs read: `divergence` (algorithms/divergence.py), computed at that `temperature`, and `log_probs`. Reads no
    fields. Metric: `cross_entropy`, beside the model's own `divergence`, which has no factor.
    """

    coefficient: float = 1.0
    temperature: float = 1.0

    needs_entropy_gradient: ClassVar[bool] = False

    def __call__(
        self, outputs: Mapping[str, Tensor], fields: Mapping[str, Tensor], sequence_index: Tensor
    ) -> ObjectiveOutput:
        """Return the loss of each token; the learner's weights make it a mean."""
        cross_entropy = -outputs["log_probs"]
        # The cross-entropy takes part with a weight of 0 too: a loss depends on every output that has a gradient.
        loss = self.coefficient * self.temperature**2 * outputs["divergence"] + (1 - self.coefficient) * cross_entropy
        return ObjectiveOutput(loss, {"cross_entropy": cross_entropy.detach()})


def required_field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the field `name`, or raise ValueError saying which there are."""
    if name not in fields:
        raise ValueError(f"the objective needs the token field {name!r}, found {', '.join(sorted(fields)) or 'none'}")
    return fields[name]


def _checked_loss(function: PolicyLossFunction, inputs: PolicyLossInput) -> Tensor:
    """What a user's loss returns, or TrainingError if it is not one loss per token that can be minimized."""
    loss = function(inputs)
    name = getattr(function, "__qualname__", str(function))
    expected = f"the policy loss {name} must return a tensor of shape {list(inputs.log_probs.shape)}, one loss a token"
    if not isinstance(loss, Tensor):
        raise TrainingError(f"{expected}; it returned a {type(loss).__name__}")
    if loss.shape != inputs.log_probs.shape or not loss.is_floating_point():
        raise TrainingError(f"{expected}; it returned shape {list(loss.shape)} of {loss.dtype}")
    if inputs.log_probs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise TrainingError(f"the policy loss {name} returned a tensor without gradient: use log_probs undetached")
    return loss


def _entropy(outputs: Mapping[str, Tensor]) -> Tensor:
    """The entropy with its gradient; a detached one would make the bonus do nothing, unnoticed."""
    entropy = outputs["entropy"]
    if outputs["log_probs"].requires_grad and torch.is_grad_enabled() and not entropy.requires_grad:
        raise ValueError("an entropy bonus needs an entropy with a gradient, found a detached one")
    return entropy


def _mismatch(rollout_log_probs: Tensor, trainer_log_probs: Tensor) -> dict[str, Tensor]:
    """Metrics of the distance between what was sampled from and what the trainer computes. Shapes [N]."""
    distance = (trainer_log_probs - rollout_log_probs).abs()
    return {
        "mismatch_k3": kl_estimate(rollout_log_probs, trainer_log_probs, "k3"),
        "mismatch_abs": distance,
        "mismatch_abs_max": distance,
    }
