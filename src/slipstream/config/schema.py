"""Every configuration key of Slipstream, its type, its range, its default and its meaning.

One class per section; a section means the same in every workflow that has it. The descriptions here are what
`slipstream rl --help` and the documentation show. Imports nothing heavy: validation answers at once.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.config.base import Section
from slipstream.config.evaluation import FIRST_SET, best_metrics, require_best_metric, require_set_names
from slipstream.config.presets import PresetName, did_you_mean, with_preset

GIBIBYTE = 1 << 30


class ModelConfig(Section):
    """Which language model, and how its weights are held."""

    path: str = Field(description="Hugging Face hub name or local folder of a causal language model with tokenizer.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of the weights. auto: bfloat16 where the hardware has it natively, else float32."
    )
    activation_checkpointing: bool = Field(False, description="Recompute layer activations in the backward pass.")


class DataConfig(Section):
    """Where rows come from and which of their columns mean what."""

    source: str = Field(
        description="Hub dataset name, local file or folder (jsonl, json, csv, parquet), or 'reasoning_gym:TASK'."
    )
    split: str = Field("train", description="Split of a hub dataset or folder.")
    subset: str | None = Field(None, description="Configuration name of a hub dataset, such as 'main' of gsm8k.")
    prompt_key: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    label_key: str | None = Field("label", description="Column with the reference answer; null if rows have none.")
    response_key: str | None = Field(None, description="Column with the response to imitate (sft only).")
    chosen_key: str | None = Field(None, description="Column with the better answer (reward-model only: 'chosen').")
    rejected_key: str | None = Field(None, description="Column with the worse one (reward-model only: 'rejected').")
    system_prompt: str | None = Field(None, description="System message put before every prompt.")
    prompt_template: str = Field("{prompt}", description="Text around the prompt; '{prompt}' is replaced by it.")
    apply_chat_template: bool = Field(True, description="Render prompts with the tokenizer's chat template.")
    max_prompt_tokens: int = Field(512, ge=1, description="Longer prompts are dropped and counted, never cut.")
    rows: int | None = Field(None, ge=1, description="Use at most this many rows; size of a reasoning_gym task.")
    shuffle: bool = Field(True, description="Draw rows in a seeded random order, a new one each epoch.")
    task_seed: int = Field(0, ge=0, description="Seed of a reasoning_gym task's rows.")
    task_options: dict[str, Any] = Field(default_factory=dict, description="Options of a reasoning_gym task.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template must contain '{prompt}'")
        if self.source.startswith("reasoning_gym:") and self.rows is None:
            raise ValueError("a reasoning_gym source needs rows, the number of questions to generate")
        if self.task_options and not self.source.startswith("reasoning_gym:"):
            raise ValueError("task_options only apply to a source 'reasoning_gym:TASK'")
        return self


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["vllm", "transformers"] = Field("vllm", description="What generates: vllm, or plain transformers.")
    engines: int = Field(1, ge=1, description="Number of rollout engines, each a Ray actor.")
    groups_per_step: int = Field(16, ge=1, description="Prompts per rollout batch.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses per prompt: the size of a group.")
    max_response_tokens: int = Field(256, ge=1, description="A response is cut here and marked 'length'.")
    temperature: float = Field(1.0, gt=0, le=10, description="Divides the logits in sampling and in all log-probs.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 for training: a cut distribution has other log-probs.")
    top_k: int = Field(0, ge=0, description="0 is off. Must be 0 for training: a cut distribution has other log-probs.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    max_staleness: int = Field(0, ge=0, le=0, description="Publishes between sampling and training; 0 is synchronous.")
    max_concurrent_sequences: int = Field(256, ge=1, description="Sequences an engine decodes at the same time.")
    kv_cache_bytes: int = Field(GIBIBYTE, ge=1 << 24, description="Memory for the key-value cache of an engine on CPU.")
    gpu_memory_share: float = Field(0.5, gt=0, lt=1, description="Share of a GPU's memory that an engine may take.")
    threads: int | None = Field(None, ge=1, description="CPU threads per engine; null lets the placement choose.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string: it would end every response before it begins")
        return self


class RewardConfig(Section):
    """What scores a response, and within which limits it runs."""

    function: str | None = Field(
        None,
        description="Import path 'module:function' (or 'path/to/file.py:function'), or a built-in rule by name; "
        "null where a model scores alone, or Python code passes the function itself.",
    )
    model: str | None = Field(None, description="Folder or hub name of a reward model that scores; null for none.")
    normalize_model_scores: bool = Field(False, description="Scale scores by the mean and deviation stored in model.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments passed to the function.")
    workers: int = Field(1, ge=1, description="Child processes that run the function.")
    timeout_s: float = Field(10.0, gt=0, description="A call that takes longer is killed and counts as failed.")
    memory_bytes: int = Field(4 * GIBIBYTE, ge=1 << 28, description="Address space of a child process.")
    on_failure: Literal["retry", "drop_group", "stop"] = Field(
        "retry", description="After a failed call: try again and then drop the group, drop the group, or stop the run."
    )
    retries: int = Field(1, ge=1, description="Further attempts under on_failure: retry.")


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


ADVANTAGES = ("group", "leave_one_out", "greedy_baseline", "returns", "gae")
POLICY_LOSSES = ("clip", "sequence_clip", "cispo", "policy_gradient")


class AlgorithmConfig(Section):
    """The method: a preset, and each of its pieces. What is given goes before what the preset sets."""

    preset: PresetName = Field("grpo", description="Sets the pieces below; `--dry-run` shows what it set.")
    advantage: str = Field(
        "group",
        description="group (GRPO), leave_one_out (RLOO), greedy_baseline (ReMax), returns (REINFORCE), gae (PPO, with "
        "a critic), or your own as 'module:function'.",
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


class CriticConfig(Section):
    """The critic, which exists where algorithm.advantage is gae. What is not here is as in training."""

    path: str | None = Field(
        None, description="Model to start from, such as a trained reward model; null: the policy's, with a new head."
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of the critic's AdamW.")
    value_clip: float | None = Field(
        0.2, gt=0, description="A value may move this far from the old one before its loss is clipped; null: any."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps at the start in which only the critic learns.")


class TrainingConfig(Section):
    """How weights are updated, in every workflow."""

    ranks: int = Field(1, ge=1, description="Learner processes (data parallel).")
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="ZeRO stage: what DeepSpeed partitions over the ranks.")
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2, description="Of AdamW.")
    epsilon: float = Field(1e-8, gt=0, description="Of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW, on matrices only.")
    gradient_clip: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps over which the learning rate rises; step k of W has (k + 1) / W of it."
    )
    final_learning_rate_share: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, of the peak.")
    tokens_per_micro_batch: int = Field(4096, ge=1, description="Packed tokens per forward and backward pass.")
    logits_chunk_tokens: int = Field(1024, ge=1, description="Rows of [tokens, vocabulary] that exist at one time.")
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; null lets the placement choose.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), found {self.betas}")
        return self


def require_trainable(model: ModelConfig, training: TrainingConfig) -> None:
    """Raises ValueError for a combination that DeepSpeed cannot train."""
    if model.dtype == "bfloat16" and training.zero_stage == 0:
        raise ValueError(
            "training.zero_stage 0 cannot train bfloat16 weights: set training.zero_stage to 1, 2 or 3, or model.dtype "
            "to float32"
        )


class EvaluationConfig(Section):
    """Held-out prompts, answered by the policy with sampling and greedily."""

    data: DataConfig | None = Field(None, description="Held-out prompts; null for no evaluation.")
    other_data: dict[str, DataConfig] = Field(
        default_factory=dict, description="Further held-out sets by name, each reported on its own."
    )
    every_steps: int = Field(0, ge=0, description="Evaluate every so many steps; 0 only before and after training.")
    samples_per_prompt: int = Field(
        1, ge=1, description="Sampled answers per prompt (the greedy one comes on top); pass@k for k up to as many."
    )
    success_reward: float = Field(1.0, description="An answer with at least this reward counts as right.")
    exclude_from_training: bool = Field(True, description="Drop training prompts that are also evaluation prompts.")

    @property
    def sets(self) -> dict[str, DataConfig]:
        """All held-out sets by name, the first one first; empty for no evaluation."""
        return {} if self.data is None else {FIRST_SET: self.data, **self.other_data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_set_names(self.other_data)
        if self.other_data and self.data is None:
            raise ValueError("other_data needs evaluation.data, the first held-out set")
        return self


class CheckpointConfig(Section):
    """When the run is saved, so that `slipstream resume` can go on."""

    every_steps: int = Field(0, ge=0, description="Save every so many steps; 0 only at the end.")
    keep: int = Field(2, ge=1, description="Older checkpoints are removed once this many newer ones are complete.")
    best_metric: str | None = Field(
        None,
        description="Keep the policy with the highest value of this metric of the evaluations (rl only): "
        "sampled_accuracy, greedy_accuracy, mean_reward or pass@K, of another set SET/METRIC; null for none.",
    )


class WeightsConfig(Section):
    """How new weights reach the rollout engines."""

    channel: Literal["auto", "shared_memory", "gloo"] = Field(
        "auto", description="Path of the weights. auto: shared memory on one machine, gloo across machines."
    )
    bucket_bytes: int = Field(256 << 20, ge=1 << 20, description="Weights move in pieces of at most this size.")
    verify: bool = Field(True, description="Compare checksums and the log-probs of a probe after every publish.")


class TrackingConfig(Section):
    """Where metrics go besides the run directory."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files into the run directory.")
    wandb_project: str | None = Field(None, description="Weights & Biases project; the key comes from WANDB_API_KEY.")
    samples_per_step: int = Field(4, ge=0, description="Trajectories per step written, readable, under rollouts/.")


class ClusterConfig(Section):
    """Ray, and how long to wait for what runs in it."""

    address: str | None = Field(None, description="Address of a running Ray cluster, or null to start one here.")
    start_timeout_s: float = Field(600.0, gt=0, description="Longest wait for an engine to start.")
    call_timeout_s: float = Field(1800.0, gt=0, description="Longest wait for one answer of an engine.")


class RLConfig(Section):
    """`slipstream rl`: reinforcement learning of a policy from a reward."""

    seed: int = Field(0, ge=0, description="Seed of everything random: data order, sampling, initialisation.")
    steps: int = Field(ge=1, description="Rollout batches to generate and train on.")
    optimizer_steps_per_batch: int = Field(1, ge=1, description="Optimizer steps each rollout batch is divided into.")
    epochs_per_batch: int = Field(1, ge=1, description="Passes over each rollout batch.")
    output_dir: str = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def has_critic(self) -> bool:
        """Whether the advantage needs values, and so a critic."""
        return self.algorithm.advantage == "gae"

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_trainable(self.model, self.training)
        if self.checkpoint.best_metric is not None:
            if self.evaluation.data is None:
                raise ValueError("checkpoint.best_metric needs evaluation.data, held-out prompts to measure it on")
            known = best_metrics(self.evaluation.other_data, self.evaluation.samples_per_prompt)
            require_best_metric(self.checkpoint.best_metric, known)
        if self.rollout.groups_per_step % self.optimizer_steps_per_batch:
            raise ValueError(
                f"rollout.groups_per_step ({self.rollout.groups_per_step}) must be divisible by "
                f"optimizer_steps_per_batch ({self.optimizer_steps_per_batch})"
            )
        if self.rollout.top_p != 1.0 or self.rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p and rollout.top_k must be 1.0 and 0 for training: the log-probs of a truncated "
                "distribution are not those the loss is computed with"
            )
        if self.rollout.samples_per_prompt == 1 and self.algorithm.advantage in ("group", "leave_one_out"):
            raise ValueError(
                f"rollout.samples_per_prompt must be at least 2 for algorithm.advantage {self.algorithm.advantage!r}: "
                "a group of one has no baseline and every advantage would be 0"
            )
        if self.rollout.samples_per_prompt == 1 and self.algorithm.dynamic_sampling:
            raise ValueError(
                "rollout.samples_per_prompt must be at least 2 for algorithm.dynamic_sampling: a group of one never "
                "has rewards that differ"
            )
        if self.rollout.engines > self.rollout.groups_per_step:
            raise ValueError(
                f"rollout.engines ({self.rollout.engines}) exceeds rollout.groups_per_step "
                f"({self.rollout.groups_per_step}): a group stays on one engine, the others would idle"
            )
        return self


class SFTConfig(Section):
    """`slipstream sft`: supervised fine-tuning on responses."""

    seed: int = Field(0, ge=0, description="Seed of everything random.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per optimizer step, over all ranks.")
    max_tokens: int = Field(1024, ge=2, description="Longer sequences (prompt and response) are dropped and counted.")
    output_dir: str = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    evaluation_data: DataConfig | None = Field(None, description="Held-out rows whose loss is reported.")
    evaluate_every_steps: int = Field(0, ge=0, description="Held-out loss every so many steps; 0 only at the end.")
    stop_at_loss: float | None = Field(
        None, gt=0, description="End before all steps are done once the held-out loss is at most this."
    )
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_trainable(self.model, self.training)
        if self.checkpoint.best_metric is not None:
            raise ValueError("checkpoint.best_metric belongs to rl: sft measures no accuracy; remove it")
        if self.data.response_key is None:
            raise ValueError("data.response_key must name the column with the response to imitate")
        if self.stop_at_loss is not None and (self.evaluation_data is None or not self.evaluate_every_steps):
            raise ValueError("stop_at_loss needs evaluation_data and evaluate_every_steps, which say when to look")
        if self.batch_size < self.training.ranks:
            raise ValueError(f"batch_size ({self.batch_size}) must be at least training.ranks ({self.training.ranks})")
        return self


class EvaluateConfig(Section):
    """`slipstream evaluate`: accuracy of a model on held-out prompts, sampled and greedy."""

    seed: int = Field(0, ge=0, description="Seed of sampling.")
    output_dir: str = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.evaluation.data is None:
            raise ValueError("evaluation.data must say where the held-out prompts come from")
        return self


class ScratchPolicyConfig(Section):
    """A small Llama-type policy with random weights and a tokenizer made from the task's own text."""

    hidden_size: int = Field(128, ge=32, description="Width of the residual stream.")
    layers: int = Field(3, ge=1, description="Transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads; hidden_size / heads must be 32, 64, 80, 96, 112 or 128.")
    intermediate_size: int = Field(384, ge=32, description="Width of the feed-forward layer.")
    vocabulary_size: int = Field(384, ge=300, description="Byte-level tokenizer: 256 bytes, special tokens, merges.")
    max_tokens: int = Field(128, ge=16, description="Longest sequence the model takes.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        width, rest = divmod(self.hidden_size, self.heads)
        if rest or width not in (32, 64, 80, 96, 112, 128):
            raise ValueError(
                f"hidden_size / heads must be one of 32, 64, 80, 96, 112, 128 (what vLLM's CPU attention takes), "
                f"found {self.hidden_size} / {self.heads}"
            )
        return self


class PipelineConfig(Section):
    """`slipstream pipeline`: make a policy, teach it by SFT, improve it by RL; each stage feeds the next."""

    seed: int = Field(0, ge=0, description="Seed of all stages.")
    output_dir: str = Field(
        min_length=1, description="Directory of the pipeline; each stage is a run directory inside it."
    )
    policy: ScratchPolicyConfig = ScratchPolicyConfig()
    sft: dict[str, Any] = Field(description="Configuration of the SFT stage, without seed, output_dir and model.path.")
    rl: dict[str, Any] = Field(description="Configuration of the RL stage, without seed, output_dir and model.path.")
