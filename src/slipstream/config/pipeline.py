"""The configuration of `slipstream pipeline`: the stages from a policy with random weights to a trained one."""

from typing import Any, Self

from pydantic import Field, model_validator

from slipstream.config.base import PathText, Section
from slipstream.config.generate import GenerateConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import RLConfig, ScratchPolicyConfig, SFTConfig

PIPELINE_STAGES: dict[str, type[Section]] = {
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "rl": RLConfig,
    "preference": PreferenceConfig,
    "comparison": GenerateConfig,
}
"""The stages of a pipeline in their order; the keys of each stand below its name, but for `PIPELINE_OWNED_KEYS`."""

STAGE_VERBS = {
    "sft": "sft",
    "reward_model": "reward-model",
    "rl": "rl",
    "preference": "preference",
    "comparison": "generate",
}
"""What `slipstream VERB` a stage is."""

COMPARED_STAGES = ("sft", "rl", "preference")
"""Stages whose policies are compared, each with that of the first."""

PIPELINE_OWNED_KEYS = ("seed", "output_dir", "model.path")
"""Keys of a stage that the pipeline fills in, because one stage's output is the next one's input."""

WITHOUT = "without seed, output_dir and model.path"


class PipelineConfig(Section):
    """`slipstream pipeline`: make a policy, teach it by SFT, improve it by RL, by preferences, or both.

    Each stage is a run of its own. RL and preference training both start from what SFT made; a reward model does too,
    and RL then has it as its reward (`reward.model`) and as the start of its critic (`critic.path`).
    """

    seed: int = Field(0, ge=0, description="Seed of all stages.")
    output_dir: PathText = Field(
        min_length=1, description="Directory of the pipeline; each stage is a run directory inside it."
    )
    policy: ScratchPolicyConfig = ScratchPolicyConfig()
    sft: dict[str, Any] = Field(description=f"The SFT stage, {WITHOUT}.")
    reward_model: dict[str, Any] | None = Field(
        None, description=f"A reward model for the RL stage, {WITHOUT}; null for none."
    )
    rl: dict[str, Any] | None = Field(None, description=f"The RL stage, {WITHOUT}; null for none.")
    preference: dict[str, Any] | None = Field(
        None, description=f"The stage of preference training, {WITHOUT}; null for none."
    )
    comparison: dict[str, Any] | None = Field(
        None,
        description="Prompts that the policies of all stages answer, and the reward by which the answers are compared "
        f"with those of SFT, {WITHOUT}; null for none.",
    )

    @property
    def stage_names(self) -> list[str]:
        """The stages that there are, in their order."""
        return [name for name in PIPELINE_STAGES if getattr(self, name) is not None]

    @property
    def compared(self) -> list[str]:
        """The stages whose policies are compared, that of SFT first; none without a comparison."""
        return [] if self.comparison is None else [name for name in COMPARED_STAGES if name in self.stage_names]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rl is None and self.preference is None:
            raise ValueError("a pipeline has a stage rl or preference, or both, after sft; found neither")
        if self.reward_model is not None and self.rl is None:
            raise ValueError("reward_model is there for a stage rl, which is missing")
        return self
