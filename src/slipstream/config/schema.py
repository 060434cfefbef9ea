"""Every configuration key of Slipstream, its type, its range, its default and its meaning.

One class per section; a section means the same in every workflow that has it. The descriptions here are what
`slipstream rl --help` and the documentation show. Imports nothing heavy: validation answers at once.
"""

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from slipstream.config.algorithm import AlgorithmConfig, CriticConfig
from slipstream.config.base import OptionalPathText, PathText, Section
from slipstream.config.data import DataConfig
from slipstream.config.distillation import TeacherConfig
from slipstream.config.evaluation import FIRST_SET, best_metrics, require_best_metric, require_set_names
from slipstream.config.lora import LoraConfig

GIBIBYTE = 1 << 30

StepAggregation = Literal["min", "last", "product", "mean"]
"""How the probabilities of the steps of an answer become one number."""


class ModelConfig(Section):
    """Which language model, and how its weights are held."""

    path: PathText = Field(
        description="Hugging Face hub name or local folder of a causal language model with tokenizer."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of the weights. auto: bfloat16 where the hardware has it natively, else float32."
    )
    activation_checkpointing: bool = Field(False, description="Recompute layer activations in the backward pass.")
    router_loss_coefficient: float | None = Field(
        None,
        ge=0,
        description="Weight of the loss that balances the experts; null for what the model's own configuration says.",
    )
    lora: LoraConfig | None = Field(None, description="Train an adapter alone; null for all weights.")


class RolloutConfig(Section):
    """How responses are generated."""

    engine: Literal["vllm", "transformers"] = Field("vllm", description="What generates: vllm, or plain transformers.")
    engines: int = Field(1, ge=1, description="Number of rollout engines, each a Ray actor.")
    tensor_parallel: int = Field(1, ge=1, description="Workers that share an engine's weights (vllm), a GPU for each.")
    groups_per_step: int = Field(16, ge=1, description="Prompts per rollout batch.")
    samples_per_prompt: int = Field(8, ge=1, description="Responses per prompt: the size of a group.")
    max_response_tokens: int = Field(256, ge=1, description="A response is cut here and marked 'length'.")
    temperature: float = Field(1.0, gt=0, le=10, description="Divides the logits in sampling and in all log-probs.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 for training: a cut distribution has other log-probs.")
    top_k: int = Field(0, ge=0, description="0 is off. Must be 0 for training: a cut distribution has other log-probs.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    max_staleness: int = Field(
        0, ge=0, description="Publishes between sampling and training, at most; 0 is synchronous (rl only)."
    )
    recompute_cache_on_update: bool = Field(
        False,
        description="Compute the keys and values of responses under way anew after a publish, where "
        "rollout.max_staleness > 0 (rl only); false goes on with those of the older weights.",
    )
    max_concurrent_sequences: int = Field(256, ge=1, description="Sequences an engine decodes at the same time.")
    kv_cache_bytes: int = Field(GIBIBYTE, ge=1 << 24, description="Memory for the key-value cache of an engine on CPU.")
    gpu_memory_share: float = Field(0.5, gt=0, lt=1, description="Share of a GPU's memory that an engine may take.")
    threads: int | None = Field(None, ge=1, description="CPU threads per worker; null lets the placement choose.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "" in self.stop:
            raise ValueError("stop must not hold an empty string: it would end every response before it begins")
        if self.engine == "transformers" and self.tensor_parallel > 1:
            found = f"found {self.tensor_parallel}: set engine to vllm, or raise engines instead"
            raise ValueError(f"tensor_parallel must be 1 for engine transformers, which is one process, {found}")
        return self


class RewardConfig(Section):
    """What scores a response, and within which limits it runs."""

    function: str | None = Field(
        None,
        description="Import path 'module:function' (or 'path/to/file.py:function'), or a built-in rule by name; "
        "null where a model scores alone, or Python code passes the function itself.",
    )
    urls: list[str] = Field(
        default_factory=list,
        description="Addresses of one service that scores in place of a function, by turns where there are several.",
    )
    model: OptionalPathText = Field(
        None, description="Folder or hub name of a reward model that scores; null for none."
    )
    step_aggregation: StepAggregation | None = Field(
        None,
        description="How the steps' probabilities become a reward where model is a process reward model: the lowest, "
        "the last, their product or their mean; null where model scores whole answers.",
    )
    normalize_model_scores: bool = Field(False, description="Scale scores by the mean and deviation stored in model.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments passed to the function.")
    workers: int = Field(1, ge=1, description="Child processes that run the function; requests at a time to each url.")
    timeout_s: float = Field(10.0, gt=0, description="A call that takes longer is ended and counts as failed.")
    memory_bytes: int = Field(4 * GIBIBYTE, ge=1 << 28, description="Address space of a child process.")
    on_failure: Literal["retry", "drop_group", "stop"] = Field(
        "retry", description="After a failed call: try again and then drop the group, drop the group, or stop the run."
    )
    retries: int = Field(1, ge=1, description="Further attempts under on_failure: retry.")

    @property
    def compares(self) -> bool:
        """Whether responses are scored by something that may look at a reference answer."""
        return self.function is not None or bool(self.urls)

    @property
    def is_given(self) -> bool:
        """Whether anything is named that scores: a function, a service or a model."""
        return self.function is not None or self.model is not None or bool(self.urls)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.step_aggregation is not None and self.model is None:
            raise ValueError("step_aggregation needs model, a process reward model whose steps it is about")
        if self.step_aggregation is not None and self.normalize_model_scores:
            raise ValueError("normalize_model_scores has no place beside step_aggregation: steps have probabilities")
        if self.urls and self.function is not None:
            raise ValueError("there are both a function and urls: a response is scored by one of them")
        if self.urls and self.options:
            raise ValueError("options are passed to a function; a service at urls is configured where it runs")
        for url in self.urls:
            _require_address(url)
        return self


def _require_address(url: str) -> None:
    """Raise ValueError unless `url` is a web address without a name and a password in it: it is shown in messages."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError(f"urls must be addresses such as http://127.0.0.1:8000/score, found {url!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"urls must hold no name, password, query or fragment (found one at {parts.hostname}): a token for the "
            "service belongs in the environment variable SLIPSTREAM_REWARD_TOKEN"
        )


class TrainingConfig(Section):
    """How weights are updated, in every workflow."""

    data_parallel: int = Field(1, ge=1, description="Shares of a batch, each learned by ranks of its own.")
    sequence_parallel: int = Field(1, ge=1, description="Ranks that share the tokens of a row.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share the weights of each layer. There are data_parallel x sequence_parallel x "
        "tensor_parallel ranks.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(2, description="ZeRO stage: what DeepSpeed partitions over the ranks.")
    offload_optimizer: bool = Field(
        False, description="Keep optimizer states in host memory and update there; needs zero_stage 1, 2 or 3."
    )
    offload_parameters: bool = Field(
        False, description="Keep weights in host memory between uses; needs zero_stage 3 and offload_optimizer."
    )
    optimizer: Literal["adamw", "fused_adamw", "muon"] = Field(
        "adamw",
        description="adamw; fused_adamw, the same in one pass over memory; muon for the matrices of the blocks, with "
        "adamw for all else (zero_stage 0 only).",
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2, description="Of AdamW.")
    epsilon: float = Field(1e-8, gt=0, description="Of AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW, on matrices only.")
    gradient_clip: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    warmup_steps: int = Field(
        0, ge=0, description="Optimizer steps over which the learning rate rises; step k of W has (k + 1) / W of it."
    )
    final_learning_rate_share: float = Field(0.0, ge=0, le=1, description="Where linear and cosine end, of the peak.")
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Export an exponential moving average of the weights with this decay per optimizer step; null for "
        "the weights themselves.",
    )
    tokens_per_micro_batch: int = Field(
        4096, ge=1, description="Packed tokens per forward and backward pass, of all ranks that share them together."
    )
    share_prompts: bool = Field(
        True, description="Compute a prompt once for all its answers in a micro-batch, with the same gradients."
    )
    logits_chunk_tokens: int = Field(1024, ge=1, description="Rows of [tokens, vocabulary] that exist at one time.")
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; null lets the placement choose.")

    @property
    def ranks(self) -> int:
        """Learner processes."""
        return self.data_parallel * self.sequence_parallel * self.tensor_parallel

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), found {self.betas}")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError(
                "offload_optimizer needs zero_stage 1, 2 or 3, found 0: set one, or offload_optimizer false"
            )
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(
                f"offload_parameters needs zero_stage 3, which partitions weights, found {self.zero_stage}: set it to "
                "3, or offload_parameters to false"
            )
        if self.offload_parameters and not self.offload_optimizer:
            raise ValueError("offload_parameters needs offload_optimizer: what updates weights must be where they are")
        if self.tensor_parallel > 1 and (self.ema_decay is not None or self.optimizer == "muon"):
            key = "ema_decay" if self.ema_decay is not None else "optimizer muon"
            raise ValueError(
                f"{key} needs whole weights on every rank, which tensor_parallel ({self.tensor_parallel}) divides: set "
                "tensor_parallel to 1, and use sequence_parallel or zero_stage 3 for models or rows that are too large"
            )
        if self.optimizer == "muon" and self.zero_stage != 0:
            raise ValueError(
                f"optimizer muon needs zero_stage 0, found {self.zero_stage}: it updates a matrix as a whole, and "
                "other stages give an optimizer pieces; set zero_stage to 0, or optimizer to adamw"
            )
        return self


def require_trainable(model: ModelConfig, training: TrainingConfig) -> None:
    """Raises ValueError for a combination that DeepSpeed cannot train."""
    if model.dtype == "bfloat16" and training.zero_stage == 0:
        raise ValueError(
            "training.zero_stage 0 cannot train bfloat16 weights: set training.zero_stage to 1, 2 or 3, or model.dtype "
            "to float32"
        )
    if model.lora is not None and training.optimizer == "muon":
        raise ValueError(
            "training.optimizer muon has no place beside model.lora: it makes the update of a whole weight orthogonal, "
            "and an adapter has only factors of it; set training.optimizer to adamw, or remove model.lora"
        )
    if model.lora is not None and training.tensor_parallel > 1:
        raise ValueError(
            f"training.tensor_parallel ({training.tensor_parallel}) cannot train an adapter, whose matrices it would "
            "leave whole: set it to 1, with training.data_parallel or training.sequence_parallel for more ranks, or "
            "remove model.lora"
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
    call_timeout_s: float = Field(
        1800.0, gt=0, description="Longest wait for one answer of an engine; one that is silent longer counts as hung."
    )
    max_engine_restarts: int = Field(
        3,
        ge=0,
        description="How often each rollout engine, and the reward engine, is started anew after it died or hung; 0 "
        "ends the run instead.",
    )


class RLConfig(Section):
    """`slipstream rl`: reinforcement learning of a policy from a reward."""

    seed: int = Field(0, ge=0, description="Seed of everything random: data order, sampling, initialisation.")
    steps: int = Field(ge=1, description="Rollout batches to generate and train on.")
    optimizer_steps_per_batch: int = Field(1, ge=1, description="Optimizer steps each rollout batch is divided into.")
    epochs_per_batch: int = Field(1, ge=1, description="Passes over each rollout batch.")
    output_dir: PathText = Field(min_length=1, description="Run directory.")
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

    @property
    def correction_mode(self) -> Literal["none", "truncate", "mask"]:
        """What algorithm.correction means here: auto corrects where samples may be stale."""
        if self.algorithm.correction != "auto":
            return self.algorithm.correction
        return "truncate" if self.rollout.max_staleness else "none"

    @property
    def needs_reward(self) -> bool:
        """Whether answers must be scored: to learn from their rewards, or to evaluate."""
        return self.algorithm.advantage != "teacher" or self.evaluation.data is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_trainable(self.model, self.training)
        if self.model.lora is not None and self.algorithm.reference_refresh_steps:
            raise ValueError(
                "algorithm.reference_refresh_steps has no place beside model.lora: the reference is the model without "
                "its adapter; set it to 0, or remove model.lora"
            )
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
        if self.rollout.max_staleness and self.correction_mode == "none":
            raise ValueError(
                f"algorithm.correction must be truncate, mask or auto for rollout.max_staleness "
                f"{self.rollout.max_staleness}, found none: stale tokens come from older weights than their old "
                "log-probs, and without importance weights the gradient is that of another objective"
            )
        if self.rollout.samples_per_prompt == 1 and self.algorithm.dynamic_sampling:
            raise ValueError(
                "rollout.samples_per_prompt must be at least 2 for algorithm.dynamic_sampling: a group of one never "
                "has rewards that differ"
            )
        if self.has_critic and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps ({self.critic.warmup_steps}) must be less than steps ({self.steps}): the policy "
                "would never be trained"
            )
        if self.rollout.engines > self.rollout.groups_per_step:
            raise ValueError(
                f"rollout.engines ({self.rollout.engines}) exceeds rollout.groups_per_step "
                f"({self.rollout.groups_per_step}): a group stays on one engine, the others would idle"
            )
        return self


def require_supervised(
    batch_size: int, *, model: ModelConfig, training: TrainingConfig, checkpoint: CheckpointConfig
) -> None:
    """Raises ValueError for what no workflow can do that learns from answers in the data and generates none.

    Where some ranks would have nothing to learn from, says which layout is nearest.
    """
    require_trainable(model, training)
    if checkpoint.best_metric is not None:
        raise ValueError("checkpoint.best_metric belongs to rl: this workflow answers no prompts; remove it")
    if batch_size < training.data_parallel:
        nearest = batch_size * training.sequence_parallel * training.tensor_parallel
        raise ValueError(
            f"batch_size ({batch_size}) must be at least training.data_parallel ({training.data_parallel}); with it "
            f"the nearest layout is training.data_parallel {batch_size}, which is {nearest} ranks"
        )


class SFTConfig(Section):
    """`slipstream sft`: supervised fine-tuning on responses."""

    seed: int = Field(0, ge=0, description="Seed of everything random.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    batch_size: int = Field(32, ge=1, description="Sequences per optimizer step, over all ranks.")
    max_tokens: int = Field(1024, ge=2, description="Longer sequences (prompt and response) are dropped and counted.")
    loss_turns: Literal["all", "last"] = Field(
        "all", description="Which of the assistant's turns in a conversation are learned; the others are context."
    )
    output_dir: PathText = Field(min_length=1, description="Run directory.")
    model: ModelConfig
    data: DataConfig
    evaluation_data: DataConfig | None = Field(None, description="Held-out rows whose loss is reported.")
    evaluate_every_steps: int = Field(0, ge=0, description="Held-out loss every so many steps; 0 only at the end.")
    teacher: TeacherConfig | None = Field(None, description="Model to distil; null learns from the data alone.")
    stop_at_loss: float | None = Field(
        None, gt=0, description="End before all steps are done once the held-out loss is at most this."
    )
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_supervised(self.batch_size, model=self.model, training=self.training, checkpoint=self.checkpoint)
        if self.stop_at_loss is not None and (self.evaluation_data is None or not self.evaluate_every_steps):
            raise ValueError("stop_at_loss needs evaluation_data and evaluate_every_steps, which say when to look")
        return self


class EvaluateConfig(Section):
    """`slipstream evaluate`: accuracy of a model on held-out prompts, sampled and greedy."""

    seed: int = Field(0, ge=0, description="Seed of sampling.")
    output_dir: PathText = Field(min_length=1, description="Run directory.")
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
