"""The configuration of `slipstream preference`: a workflow of its own on the sections of `schema.py`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import PathText, Section
from slipstream.config.data import DataConfig
from slipstream.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ModelConfig,
    TrackingConfig,
    TrainingConfig,
    require_supervised,
)

LOSSES_OF_KEYS = {
    "label_smoothing": ("dpo",),
    "target_margin": ("simpo",),
    "sft_coefficient": ("dpo", "ipo", "simpo"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": ("dpo", "ipo", "kto"),
}
"""Keys that only some losses look at."""


class PreferenceConfig(Section):
    """`slipstream preference`: a policy trained on better and worse answers, without a reward and without sampling."""

    seed: int = Field(0, ge=0, description="Seed of everything random.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Pairs (kto: answers) per optimizer step, over all ranks.")
    max_tokens: int = Field(1024, ge=2, description="Pairs (kto: answers) with a longer sequence are dropped, counted.")
    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = Field(
        "dpo", description="What is minimized; kto learns from single answers with a label, the others from pairs."
    )
    beta: float = Field(
        0.1, gt=0, description="Scale of the implicit reward; ipo: its tau; orpo: weight of the odds ratio."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="How likely it is that a pair is the wrong way round (dpo: conservative DPO)."
    )
    target_margin: float = Field(0.0, ge=0, description="By how much the better answer is to win (simpo: gamma).")
    sft_coefficient: float = Field(
        0.0, ge=0, description="Weight of -log-prob per token of the better answer, added (dpo, ipo, simpo)."
    )
    desirable_weight: float = Field(1.0, gt=0, description="Weight of answers whose label is true (kto).")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of answers whose label is false (kto).")
    reference: Literal["step", "cached"] = Field(
        "step",
        description="Log-probs of the reference: in each step, from a second model in memory, or all of them once "
        "before the first step, from the policy as it is then (dpo, ipo, kto).",
    )
    output_dir: PathText = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    evaluation_data: DataConfig | None = Field(None, description="Held-out rows whose loss and accuracy are reported.")
    evaluate_every_steps: int = Field(0, ge=0, description="Evaluate every so many steps; 0 only at the end.")
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def is_paired(self) -> bool:
        """Whether a row has two answers, which are learned from together."""
        return self.loss != "kto"

    @property
    def answers_per_row(self) -> int:
        """So many sequences a row of the data has."""
        return 2 if self.is_paired else 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.loss in LOSSES_OF_KEYS["reference"]

    @property
    def loads_reference(self) -> bool:
        """Whether each rank holds a second model."""
        return self.needs_reference and self.reference == "step"

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_supervised(self.batch_size, model=self.model, training=self.training, checkpoint=self.checkpoint)
        for key, losses in LOSSES_OF_KEYS.items():
            found = getattr(self, key)
            if found != type(self).model_fields[key].default and self.loss not in losses:
                raise ValueError(f"{key} ({found}) means nothing to loss {self.loss!r}, only to {', '.join(losses)}")
        for name, data in (("data", self.data), ("evaluation_data", self.evaluation_data)):
            if not self.is_paired and data is not None and None in {part.label_key for part in data.parts.values()}:
                raise ValueError(f"{name}.label_key must name the column that says whether an answer is a good one")
        return self
