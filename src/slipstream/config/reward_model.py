"""The configuration of `slipstream reward-model`: a workflow of its own on the sections of `schema.py`."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from slipstream.config.base import Section
from slipstream.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    ModelConfig,
    SFTConfig,
    TrackingConfig,
    TrainingConfig,
    require_trainable,
)

SCORE_MOMENTS = "score_moments"
"""Key of an exported reward model's config.json: mean and standard deviation of its scores of held-out answers."""


class RewardModelConfig(Section):
    """`slipstream reward-model`: a model that scores answers, trained on pairs of a better and a worse one."""

    seed: int = Field(0, ge=0, description="Seed of everything random.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Pairs per optimizer step, over all ranks.")
    max_tokens: int = Field(1024, ge=2, description="Pairs with a longer sequence are dropped and counted.")
    margin: float = Field(
        0.0, ge=0, description="The better answer's score is to exceed the other's by more than this."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="How likely it is that a pair is the wrong way round."
    )
    output_dir: str = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    evaluation_data: DataConfig | None = Field(None, description="Held-out pairs whose accuracy is reported.")
    evaluate_every_steps: int = Field(0, ge=0, description="Evaluate every so many steps; 0 only at the end.")
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="before")
    @classmethod
    def _name_columns(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        columns = {"chosen_key": "chosen", "rejected_key": "rejected"}
        sections = {name: values[name] for name in ("data", "evaluation_data") if isinstance(values.get(name), Mapping)}
        return {**values, **{name: {**columns, **section} for name, section in sections.items()}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_trainable(self.model, self.training)
        if self.checkpoint.best_metric is not None:
            raise ValueError("checkpoint.best_metric belongs to rl: a reward model answers no prompts; remove it")
        for name, data in (("data", self.data), ("evaluation_data", self.evaluation_data)):
            if data is not None and (data.chosen_key is None or data.rejected_key is None):
                raise ValueError(
                    f"{name}.chosen_key and {name}.rejected_key must name the columns with the two answers"
                )
        if self.batch_size < self.training.ranks:
            raise ValueError(f"batch_size ({self.batch_size}) must be at least training.ranks ({self.training.ranks})")
        return self


SupervisedConfig = SFTConfig | RewardModelConfig
"""Workflows that learn from the answers in the data and generate none."""
