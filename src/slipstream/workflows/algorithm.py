"""The algorithm of an RL run: the pieces that the configuration names, and what they remember from step to step.

Puts the pure functions of `algorithms/` together for the loop: rewards are shaped here, the KL coefficient is steered
here, and the objectives of policy and critic are made here. Forward passes and messages are `batch.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.config.algorithm import ADVANTAGES, POLICY_LOSSES
from slipstream.config.schema import RLConfig
from slipstream.data.trajectory import Trajectory
from slipstream.import_path import ImportedFunction
from slipstream.rollout.dynamic_sampling import DynamicSampling

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.algorithms.advantages import ScoredBatch
    from slipstream.algorithms.objective import PolicyObjective
    from slipstream.algorithms.value_loss import ValueObjective

# Estimators that look at nothing but the group itself.
GROUP_ADVANTAGES = ("group", "leave_one_out", "greedy_baseline", "returns", "teacher")


class Algorithm:
    """What the configuration says to do with scored trajectories. `state` is part of a checkpoint."""

    def __init__(self, config: RLConfig) -> None:
        # Only here: they import torch, and bad input is to be refused at once.
        from slipstream.algorithms.kl_control import make_kl_control
        from slipstream.algorithms.shaping import RunningMoments

        self.config = config
        self.settings = config.algorithm
        settings = config.algorithm
        self._kl_control = make_kl_control(
            settings.kl_control,
            coefficient=settings.kl_coefficient,
            target=settings.kl_target,
            horizon=settings.kl_horizon,
            final_coefficient=settings.kl_final_coefficient,
            total_steps=config.steps,
        )
        self._reward_moments = RunningMoments()
        self._advantage = _named_or_imported("algorithm.advantage", settings.advantage, ADVANTAGES)
        self._policy_loss = _named_or_imported("algorithm.policy_loss", settings.policy_loss, POLICY_LOSSES)
        self._shaping = None
        if settings.shaping.function is not None:
            self._shaping = ImportedFunction("algorithm.shaping.function", settings.shaping.function, os.getcwd())

    @property
    def kl_coefficient(self) -> float:
        """The coefficient of the next step."""
        return self._kl_control.coefficient

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term, and so a reference."""
        return self.settings.kl_coefficient > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher gives its log-probs of the sampled tokens."""
        return self.settings.teacher is not None

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the trainer must compute log-probs before the update.

        Else the first and only optimizer step has them anyway: they are the new ones, detached.
        """
        several_steps = self.config.optimizer_steps_per_batch * self.config.epochs_per_batch > 1
        return several_steps or self.needs_teacher or (self.needs_reference and self.settings.kl_placement == "reward")

    @property
    def learns_by_group(self) -> bool:
        """Whether what is learned from a group does not depend on the others of its batch.

        Then the weights of its tokens are known before the others have come, and its gradient may be computed. A
        function of the user's is shown whole batches, and a mean over tokens needs their number.
        """
        settings = self.settings
        return (
            self.config.optimizer_steps_per_batch * self.config.epochs_per_batch == 1
            and settings.advantage in GROUP_ADVANTAGES
            and settings.aggregation != "token_mean"
            and not settings.whiten_advantages
            and not settings.overlong_filtering
            and not settings.shaping.normalize
            and settings.shaping.function is None
        )

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt is answered greedily as well."""
        return self.settings.advantage == "greedy_baseline"

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """How groups without signal are replaced; None where they are kept."""
        return DynamicSampling(self.settings.dynamic_sampling_limit) if self.settings.dynamic_sampling else None

    @property
    def objective(self) -> PolicyObjective:
        """What the policy minimizes in the next step."""
        from slipstream.algorithms.correction import Correction
        from slipstream.algorithms.objective import PolicyObjective

        settings = self.settings
        mode = self.config.correction_mode
        return PolicyObjective(
            policy_loss=self._policy_loss,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            entropy_coefficient=settings.entropy_coefficient,
            kl_coefficient=self.kl_coefficient if settings.kl_placement == "loss" else 0.0,
            kl_estimator=settings.kl_estimator,
            correction=None
            if mode == "none"
            else Correction(
                mode=mode,
                level=settings.correction_level,
                low=settings.correction_low,
                high=settings.correction_high,
            ),
        )

    @property
    def value_objective(self) -> ValueObjective:
        """What the critic minimizes."""
        from slipstream.algorithms.value_loss import ValueObjective

        return ValueObjective(value_clip=self.config.critic.value_clip)

    def shape_rewards(self, trajectories: Sequence[Trajectory]) -> tuple[Tensor, dict[str, float]]:
        """The rewards that advantages are computed from, [B], and what each stage of shaping added on average."""
        return self._shape(trajectories, update_moments=True)

    def shape_baselines(self, answers: Sequence[Trajectory]) -> Tensor:
        """The rewards of greedy answers, shaped as the others are, [B]; the running moments do not count them."""
        return self._shape(answers, update_moments=False)[0]

    def _shape(self, trajectories: Sequence[Trajectory], *, update_moments: bool) -> tuple[Tensor, dict[str, float]]:
        from slipstream.algorithms.shaping import Shaping, shape_rewards

        shaping = self.settings.shaping
        return shape_rewards(
            trajectories,
            Shaping(
                weights=shaping.weights,
                function=self._shaping,
                length_penalty=shaping.length_penalty,
                truncation_penalty=shaping.truncation_penalty,
                overlong_buffer_share=shaping.overlong_buffer_share,
                overlong_penalty=shaping.overlong_penalty,
                normalize=shaping.normalize,
                clip=None if shaping.clip is None else (shaping.clip[0], shaping.clip[1]),
            ),
            max_response_tokens=self.config.rollout.max_response_tokens,
            moments=self._reward_moments,
            update_moments=update_moments,
        )

    def kl_penalty(self, log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        """The KL to the reference of each policy token, [N], before any coefficient."""
        from slipstream.algorithms.kl import kl_estimate

        return kl_estimate(log_probs, reference_log_probs, self.settings.kl_estimator)

    def advantages(self, batch: ScoredBatch) -> Tensor:
        """The advantage of each policy token, [N], not yet whitened."""
        from slipstream.algorithms.advantages import estimate_advantages

        return estimate_advantages(
            batch,
            estimator=self._advantage,
            normalize_by_std=self.settings.normalize_by_std,
            discount=self.settings.discount,
            gae_lambda=self.settings.gae_lambda,
        )

    def token_weights(self, loss_token_counts: Sequence[int], *, step_sequences: int | None = None) -> list[float]:
        """The weight of each token of the sequences of one optimizer step, or of some of its `step_sequences`."""
        from slipstream.algorithms.aggregation import aggregation_weights

        return aggregation_weights(
            loss_token_counts,
            aggregation=self.settings.aggregation,
            constant_length=self.settings.aggregation_length or self.config.rollout.max_response_tokens,
            step_sequences=step_sequences,
        )

    def after_step(self, step: int, *, measured_kl: float | None, trajectories: int) -> None:
        """Steer the KL coefficient by what the step that has just ended measured (None: nothing)."""
        if self.needs_reference and measured_kl is not None:
            self._kl_control.update(measured_kl, trajectories=trajectories, step=step)

    def refreshes_reference(self, step: int) -> bool:
        """Whether the policy after `step` becomes the reference."""
        every = self.settings.reference_refresh_steps
        return every > 0 and step % every == 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"kl_control": self._kl_control.state(), "reward_moments": self._reward_moments.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._kl_control.restore(state["kl_control"])
        self._reward_moments.restore(state["reward_moments"])


def _named_or_imported(key: str, value: str, names: Sequence[str]) -> str | Callable[..., Any]:
    """The name of a piece of ours, or the user's function."""
    return value if value in names else ImportedFunction(key, value, os.getcwd())
