"""The keys of an algorithm: its preset, the pieces that a preset sets, the shaping of rewards, and the critic."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import OptionalPathText, Section
from slipstream.config.presets import PresetName, did_you_mean, with_preset


class ShapingConfig(Section):
    """What is done to the reward of a trajectory before advantages are computed, in the order of the keys."""

    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weights of named reward parts: the reward becomes the weighted sum of exactly these; empty leaves "
        "it as the function returned it.",
    )
    function: str | None = Field(
        None, description="Your own shaping, as 'module:function' or 'path/to/file.py:function' (docs/algorithms.md)."
    )
    length_penalty: float = Field(
        0.0, description="Subtracted in proportion to length: this much at rollout.max_response_tokens."
    )
    truncation_penalty: float = Field(0.0, description="Subtracted from responses that were cut at the limit.")
    overlong_buffer_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): the last share of "
        "rollout.max_response_tokens, over which a penalty rises from 0; 0 is off.",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What the soft overlong punishment reaches at the limit.")
    normalize: bool = Field(
        False, description="Subtract the mean and divide by the standard deviation of all rewards of the run so far."
    )
    clip: list[float] | None = Field(
        None, min_length=2, max_length=2, description="Lowest and highest reward, [low, high]; null for none."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"clip must be [low, high] with low < high, found {self.clip}")
        return self


ADVANTAGES = ("group", "leave_one_out", "greedy_baseline", "returns", "gae", "teacher")
POLICY_LOSSES = ("clip", "sequence_clip", "cispo", "policy_gradient")


class AlgorithmConfig(Section):
    """The method: a preset, and each of its pieces. What is given goes before what the preset sets."""

    preset: PresetName = Field("grpo", description="Sets the pieces below; `--dry-run` shows what it set.")
    advantage: str = Field(
        "group",
        description="group (GRPO), leave_one_out (RLOO), greedy_baseline (ReMax), returns (REINFORCE), gae (PPO, with "
        "a critic), teacher (on-policy distillation), or your own as 'module:function'.",
    )
    teacher: OptionalPathText = Field(
        None,
        description="Hub name or local folder of the model that grades each token (advantage: teacher, or your own); "
        "its tokenizer must have the same tokens.",
    )
    normalize_by_std: bool = Field(
        True, description="Divide group advantages by the group's standard deviation (advantage: group)."
    )
    whiten_advantages: bool = Field(
        False, description="Give advantages mean 0 and standard deviation 1 over all policy tokens of the batch."
    )
    discount: float = Field(1.0, gt=0, le=1, description="Gamma, per policy token (advantage: returns, gae).")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of GAE (advantage: gae).")
    policy_loss: str = Field(
        "clip",
        description="clip (PPO), sequence_clip (GSPO), cispo, policy_gradient, or your own as 'module:function'.",
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="The ratio is clipped at 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped at 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound of the loss of a bad token that became likely, times its advantage; null: none."
    )
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"] = (
        Field("token_mean", description="How the losses of tokens become the loss of an optimizer step.")
    )
    aggregation_length: int | None = Field(
        None, ge=1, description="Divisor of constant_length; null: rollout.max_response_tokens."
    )
    entropy_coefficient: float = Field(0.0, description="Weight of the entropy bonus in the loss.")
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL to the reference; 0 loads no reference.")
    kl_placement: Literal["loss", "reward"] = Field(
        "loss", description="Where the KL goes: into the loss, or into the reward of each token."
    )
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3", description="Estimator of the KL to the reference; unbiased: k3 times the ratio, for the loss only."
    )
    kl_control: Literal["fixed", "adaptive", "linear"] = Field(
        "fixed", description="The coefficient over the run: fixed, steered to kl_target, or linear decay."
    )
    kl_target: float = Field(0.02, gt=0, description="KL per policy token that adaptive control steers to.")
    kl_horizon: int = Field(10_000, ge=1, description="Trajectories over which adaptive control reacts.")
    kl_final_coefficient: float = Field(0.0, ge=0, description="Where linear decay ends, at the last step.")
    reference_refresh_steps: int = Field(
        0, ge=0, description="The reference becomes the current policy every so many steps; 0 is never."
    )
    correction: Literal["auto", "none", "truncate", "mask"] = Field(
        "auto",
        description="Importance weights between rollout and training log-probs: truncate them to the bounds, or mask "
        "what lies outside; auto: truncate where rollout.max_staleness > 0.",
    )
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="One weight per token, or one per trajectory: the product over its tokens."
    )
    correction_low: float = Field(0.0, ge=0, le=1, description="Lower bound of an importance weight.")
    correction_high: float = Field(2.0, ge=1, description="Upper bound of an importance weight.")
    overlong_filtering: bool = Field(False, description="Leave responses that were cut at the limit out of the loss.")
    dynamic_sampling: bool = Field(
        False, description="Replace groups whose rewards are all the same by fresh prompts until the batch is full."
    )
    dynamic_sampling_limit: int = Field(
        10, ge=1, description="Stop with a message where a step has issued this many times its groups."
    )
    shaping: ShapingConfig = ShapingConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        return with_preset(values)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value, known in (
            ("advantage", self.advantage, ADVANTAGES),
            ("policy_loss", self.policy_loss, POLICY_LOSSES),
        ):
            if value not in known and ":" not in value:
                raise ValueError(
                    f"{name} must be {', '.join(known)} or 'module:function', found {value!r}"
                    + did_you_mean(value, known)
                )
        self._check_teacher()
        if self.kl_placement == "reward" and self.kl_estimator == "unbiased":
            raise ValueError(
                "kl_estimator 'unbiased' is a form of the loss: a reward has no gradient; use k1, k2 or k3"
            )
        if self.kl_control != "fixed" and not self.kl_coefficient:
            raise ValueError(f"kl_control {self.kl_control!r} needs kl_coefficient > 0, where the coefficient starts")
        if self.reference_refresh_steps and not self.kl_coefficient:
            raise ValueError("reference_refresh_steps needs kl_coefficient > 0: without it there is no reference")
        if self.dual_clip is not None and self.policy_loss != "clip":
            raise ValueError(f"dual_clip belongs to policy_loss 'clip', found policy_loss {self.policy_loss!r}")
        return self

    def _check_teacher(self) -> None:
        """Raises ValueError for a teacher that nobody asks or that is missing, and for keys of rewards beside one."""
        if self.teacher is not None and self.advantage in ADVANTAGES and self.advantage != "teacher":
            raise ValueError(
                f"teacher belongs to advantage 'teacher' (preset distillation) or one of your own, found advantage "
                f"{self.advantage!r}"
            )
        if self.advantage != "teacher":
            return
        if self.teacher is None:
            raise ValueError("advantage 'teacher' needs teacher, the path or hub name of the model that grades tokens")
        unread = {
            "shaping": self.shaping != ShapingConfig(),
            "dynamic_sampling": self.dynamic_sampling,
            "kl_placement reward": self.kl_coefficient > 0 and self.kl_placement == "reward",
        }
        for name, is_set in unread.items():
            if is_set:
                raise ValueError(f"{name} changes rewards, which advantage 'teacher' does not read; remove it")


class CriticConfig(Section):
    """The critic, which exists where algorithm.advantage is gae. What is not here is as in training."""

    path: OptionalPathText = Field(
        None, description="Model to start from, such as a trained reward model; null: the policy's, with a new head."
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of the critic's AdamW.")
    value_clip: float | None = Field(
        0.2, gt=0, description="A value may move this far from the old one before its loss is clipped; null: any."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps at the start in which only the critic learns.")
