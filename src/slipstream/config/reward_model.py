"""The configuration of `slipstream reward-model`: a workflow of its own on the sections of `schema.py`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import PathText, Section
from slipstream.config.data import DataConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    SFTConfig,
    TrackingConfig,
    TrainingConfig,
    require_supervised,
)

SCORE_MOMENTS = "score_moments"
"""Key of an exported reward model's config.json: mean and standard deviation of its scores of held-out answers."""

STEP_SEPARATOR = "step_separator"
"""Key of an exported process reward model's config.json: the text between steps, by which they are found."""

SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
"""Part of the name of an architecture that scores whole answers, and of one that scores steps."""

PAIR_KEYS = ("margin", "label_smoothing")
"""Keys that mean something only where pairs are learned from."""


class RewardModelConfig(Section):
    """`slipstream reward-model`: a model that scores answers, or the steps of answers."""

    seed: int = Field(0, ge=0, description="Seed of everything random.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    supervision: Literal["pairs", "steps"] = Field(
        "pairs",
        description="What is learned from: pairs of a better and a worse answer, or answers whose steps have labels (a "
        "process reward model).",
    )
    batch_size: int = Field(32, ge=1, description="Pairs (steps: answers) per optimizer step, over all ranks.")
    max_tokens: int = Field(
        1024, ge=2, description="Pairs (steps: answers) with a longer sequence are dropped and counted."
    )
    margin: float = Field(
        0.0, ge=0, description="The better answer's score is to exceed the other's by more than this (pairs)."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="How likely it is that a pair is the wrong way round (pairs)."
    )
    step_separator: str = Field(
        "\n\n", min_length=1, description="Text between the steps of an answer, where scores are read (steps)."
    )
    output_dir: PathText = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    evaluation_data: DataConfig | None = Field(None, description="Held-out rows whose accuracy is reported.")
    evaluate_every_steps: int = Field(0, ge=0, description="Evaluate every so many steps; 0 only at the end.")
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def answers_per_row(self) -> int:
        """So many sequences a row of the data has."""
        return 2 if self.supervision == "pairs" else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_supervised(self.batch_size, model=self.model, training=self.training, checkpoint=self.checkpoint)
        if self.training.ema_decay is not None:
            raise ValueError(
                "training.ema_decay has no place in reward-model: the export states how the scores of the weights that "
                "were measured are spread, and an average of weights has others; remove it"
            )
        meaningless = ("step_separator",) if self.supervision == "pairs" else PAIR_KEYS
        for key in meaningless:
            if (found := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({found!r}) means nothing to supervision {self.supervision!r}: remove it")
        return self


SupervisedConfig = SFTConfig | RewardModelConfig | PreferenceConfig
"""Workflows that learn from the answers in the data and generate none."""
