"""The configuration of `slipstream generate`: a workflow of its own on the sections of `schema.py`."""

from typing import Self

from pydantic import Field, model_validator

from slipstream.config.base import PathText, Section
from slipstream.config.data import DataConfig
from slipstream.config.schema import (
    ClusterConfig,
    EvaluateConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
)


class GenerateConfig(Section):
    """`slipstream generate`: answers to the prompts of a data set, scored if there is a reward, the best chosen."""

    seed: int = Field(0, ge=0, description="Seed of sampling.")
    minimum_reward: float | None = Field(
        None, description="Only an answer with at least this reward may be the best of its prompt; null for any."
    )
    output_dir: PathText = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollout.engines > self.rollout.groups_per_step:
            raise ValueError(
                f"rollout.engines ({self.rollout.engines}) exceeds rollout.groups_per_step "
                f"({self.rollout.groups_per_step}): a group stays on one engine, the others would idle"
            )
        return self


AnsweringConfig = EvaluateConfig | GenerateConfig
"""Workflows that generate answers and learn nothing from them."""
