"""How much memory each process of a run will take, from the sizes of the model: an estimate made before starting.

Sums what is large and can be counted. Leaves out fragmentation and what grows with the data set; the bases were
measured on a CPU machine and are rounded up.
"""

import math
from dataclasses import dataclass, replace

from slipstream.cluster.placement import Placement, Role
from slipstream.config.generate import AnsweringConfig, GenerateConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig, SupervisedConfig
from slipstream.config.schema import RLConfig, SFTConfig, TrainingConfig
from slipstream.rewards.model import TOKENS_PER_BATCH
from slipstream.workflows.model_facts import ModelFacts

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30

# Memory of a process before it holds a model: the libraries it imports and what they allocate at start.
CONTROLLER_BASE_BYTES = 400 * MEBIBYTE
LEARNER_BASE_BYTES = 700 * MEBIBYTE
TRANSFORMERS_BASE_BYTES = 500 * MEBIBYTE
VLLM_BASE_BYTES = 2 * GIBIBYTE
# The same in parts, where an engine has several workers: the engine with its scheduler, and each worker.
VLLM_SCHEDULER_BASE_BYTES = 1280 * MEBIBYTE
VLLM_WORKER_BASE_BYTES = 720 * MEBIBYTE
REWARD_WORKER_BASE_BYTES = 150 * MEBIBYTE
RAY_BASE_BYTES = 300 * MEBIBYTE

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2}
FLOAT32_BYTES = 4
ADAM_MOMENTS = 2
WEIGHTS_IN_HOST_MEMORY = "weights in host memory"
OPTIMIZER_IN_HOST_MEMORY = "optimizer in host memory"
AVERAGE = "average of the weights"
# Matrices of [logits_chunk_tokens, vocabulary] in float32 that exist at once: logits, log-softmax, their gradient.
LOGITS_COPIES = 3


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process in bytes, by what it is for; `parts` is empty where it cannot be known yet."""

    name: str
    role: Role | None
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def estimate_memory(
    config: RLConfig | SupervisedConfig | AnsweringConfig,
    placement: Placement,
    model: ModelFacts,
    dtype: str,
    *,
    critic: ModelFacts | None = None,
    reward_model: ModelFacts | None = None,
    teacher: ModelFacts | None = None,
) -> list[ProcessMemory]:
    """Memory of each process of `placement`, and of Ray's own. `dtype` is float32 or bfloat16.

    `critic` None: the critic starts from the policy's model. It is counted with the vocabulary's matrix all the same.
    `reward_model` None: it is as large as the policy. `teacher` None: so is the teacher, where there is one.
    """
    processes = []
    for actor in placement.actors:
        parts: dict[str, int] = {}
        if actor.role == "controller":
            parts = {"base": CONTROLLER_BASE_BYTES}
        elif actor.role == "reward":
            parts = {"base": REWARD_WORKER_BASE_BYTES}
        elif actor.role == "rollout" and not isinstance(config, SupervisedConfig):
            if config.rollout.tensor_parallel > 1:
                processes += _worker_memory(actor.name, config, model, dtype, on_gpu=actor.gpus > 0)
                parts = {"base": VLLM_SCHEDULER_BASE_BYTES}
            else:
                parts = _rollout_parts(config, model, dtype, on_gpu=actor.gpus > 0)
        elif actor.role == "learner" and not isinstance(config, AnsweringConfig):
            is_first = actor.name.endswith(" 0")
            parts = _learner_parts(config, model, dtype, is_first=is_first, teacher=teacher or model)
        elif actor.role == "reward_model":
            parts = _scoring_parts(config, reward_model or model, dtype)
        elif actor.role == "critic" and isinstance(config, RLConfig):
            parts = _training_parts(config, critic or model, dtype, has_adapter=False)
            parts.pop(AVERAGE, None)  # a critic keeps none
        processes.append(ProcessMemory(actor.name, actor.role, parts))
    return [*processes, ProcessMemory("Ray", None, {"base": RAY_BASE_BYTES})]


def longest_sequence(config: RLConfig | SupervisedConfig | AnsweringConfig) -> int:
    """Tokens of the longest sequence the configuration allows: prompt and response."""
    if isinstance(config, SupervisedConfig):
        return config.max_tokens
    sources = [config.data] if isinstance(config, RLConfig | GenerateConfig) else list(config.evaluation.sets.values())
    return max(data.max_prompt_tokens for data in sources) + config.rollout.max_response_tokens


def sequences_per_row(config: RLConfig | SupervisedConfig) -> int:
    """So many sequences are learned from together: two where the data has pairs."""
    return config.answers_per_row if isinstance(config, PreferenceConfig | RewardModelConfig) else 1


def adapter_parameters(model: ModelFacts, rank: int) -> int:
    """Numbers in a LoRA adapter of all linear modules of a Llama block: rank * (rows + columns) of each."""
    hidden, keys, inner = model.hidden_size, model.key_value_width, model.intermediate_size
    return model.layers * rank * (2 * (hidden + hidden) + 2 * (hidden + keys) + 3 * (hidden + inner))


def rank_parameters(model: ModelFacts, tensor_parallel: int) -> int:
    """Numbers in the weights of one of the ranks that share them, before ZeRO partitions anything.

    The matrices of a Llama block are divided; embeddings, heads, norms and biases are not.
    """
    hidden, keys, inner = model.hidden_size, model.key_value_width, model.intermediate_size
    matrices = min(model.parameters, model.layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner))
    return model.parameters - matrices + math.ceil(matrices / tensor_parallel)


def learner_state_bytes(
    model: ModelFacts, training: TrainingConfig, *, dtype: str, learned: int | None = None
) -> dict[str, int]:
    """Weights, gradients and optimizer states of one rank under ZeRO (arXiv 1910.02054, section 5).

    A stage partitions over the ranks that average gradients: 1 the optimizer states, 2 the gradients too, 3 the weights
    too. From stage 1 on DeepSpeed keeps a float32 master copy of the weights, even of float32 weights; at stage 0 only
    of bfloat16 ones. Tensor-parallel ranks have a share of the layers and all of the embeddings. `learned` parameters
    have gradients and states; None for all. What is offloaded has a part of its own name; with the optimizer's states
    it holds the gradients in float32 that they are updated with.
    """
    parameters = rank_parameters(model, training.tensor_parallel)
    learned = parameters if learned is None else learned
    width = BYTES_OF_DTYPE[dtype]
    ranks = training.data_parallel * training.sequence_parallel
    master = learned * FLOAT32_BYTES if training.zero_stage >= 1 or dtype != "float32" else 0
    # Muon has one moment for the matrices of the blocks, which are nearly all.
    moments = 1 if training.optimizer == "muon" else ADAM_MOMENTS
    optimizer = learned * FLOAT32_BYTES * moments + master
    if training.offload_optimizer:
        optimizer += learned * FLOAT32_BYTES
    weights_name = WEIGHTS_IN_HOST_MEMORY if training.offload_parameters else "weights"
    optimizer_name = OPTIMIZER_IN_HOST_MEMORY if training.offload_optimizer else "optimizer"
    states = {
        weights_name: parameters * width // (ranks if training.zero_stage == 3 else 1),
        "gradients": learned * width // (ranks if training.zero_stage >= 2 else 1),
        optimizer_name: optimizer // (ranks if training.zero_stage >= 1 else 1),
    }
    if training.ema_decay is not None:
        states[AVERAGE] = learned * FLOAT32_BYTES // ranks
    return states


def activation_bytes(
    model: ModelFacts, *, tokens: int, dtype: str, checkpointing: bool, tensor_parallel: int = 1
) -> int:
    """What the backward pass of `tokens` packed tokens keeps.

    A Llama block keeps 8 H + 2 K + 4 I numbers per token (H hidden, K keys, I feed-forward; counted from the tensors
    that autograd saves, attention without its matrix). With checkpointing a block keeps its input, and one block at a
    time is recomputed in full. Tensor-parallel ranks have a share of 2 H + 2 K + 4 I of them each: queries, keys and
    values, what attention answers, and the inside of the feed-forward layer.
    """
    width = BYTES_OF_DTYPE[dtype]
    shared = 2 * model.hidden_size + 2 * model.key_value_width + 4 * model.intermediate_size
    block = 6 * model.hidden_size + math.ceil(shared / tensor_parallel)
    per_token = model.layers * model.hidden_size + block if checkpointing else model.layers * block
    return tokens * per_token * width


def _training_parts(
    config: RLConfig | SupervisedConfig, model: ModelFacts, dtype: str, *, has_adapter: bool
) -> dict[str, int]:
    """What a rank needs to train a model, whatever its head: its adapter alone, or all of it."""
    unit = longest_sequence(config) * sequences_per_row(config)
    tokens = math.ceil(max(config.training.tokens_per_micro_batch, unit) / config.training.sequence_parallel)
    learned = adapter_parameters(model, config.model.lora.rank) if has_adapter and config.model.lora else None
    states = learner_state_bytes(model, config.training, dtype=dtype, learned=learned)
    parts = {"base": LEARNER_BASE_BYTES, **states}
    parts["activations"] = activation_bytes(
        model,
        tokens=tokens,
        dtype=dtype,
        checkpointing=config.model.activation_checkpointing,
        tensor_parallel=config.training.tensor_parallel,
    )
    return parts


def _learner_parts(
    config: RLConfig | SupervisedConfig, model: ModelFacts, dtype: str, *, is_first: bool, teacher: ModelFacts
) -> dict[str, int]:
    has_adapter = config.model.lora is not None
    parts = _training_parts(config, model, dtype, has_adapter=has_adapter)
    if isinstance(config, RewardModelConfig):
        return parts
    chunk = config.training.logits_chunk_tokens
    parts["logits"] = chunk * model.vocabulary_size * FLOAT32_BYTES * LOGITS_COPIES
    if _has_teacher(config):
        parts["teacher"] = teacher.parameters * BYTES_OF_DTYPE[dtype]
        if isinstance(config, SFTConfig):
            # Its logits stand beside the policy's.
            parts["logits"] += chunk * teacher.vocabulary_size * FLOAT32_BYTES * LOGITS_COPIES
    if isinstance(config, PreferenceConfig) and config.loads_reference and not has_adapter:
        parts["reference"] = model.parameters * BYTES_OF_DTYPE[dtype]
    if isinstance(config, RLConfig):
        if config.algorithm.kl_coefficient > 0 and not has_adapter:
            parts["reference"] = model.parameters * BYTES_OF_DTYPE[dtype]
        if is_first or config.training.tensor_parallel > 1:
            # One bucket at a time is on its way to the rollout engines, and put together from pieces on all that have
            # some of it.
            parts["weights in transit"] = min(config.weights.bucket_bytes, model.parameters * BYTES_OF_DTYPE[dtype])
    return parts


def _has_teacher(config: RLConfig | SupervisedConfig) -> bool:
    if isinstance(config, RLConfig):
        return config.algorithm.teacher is not None
    return isinstance(config, SFTConfig) and config.teacher is not None


def _scoring_parts(
    config: RLConfig | SupervisedConfig | AnsweringConfig, model: ModelFacts, dtype: str
) -> dict[str, int]:
    """What a reward model needs to score. A forward pass keeps no more than one block at a time."""
    tokens = max(TOKENS_PER_BATCH, longest_sequence(config))
    one_block = replace(model, layers=1)
    return {
        "base": TRANSFORMERS_BASE_BYTES,
        "weights": model.parameters * BYTES_OF_DTYPE[dtype],
        "activations": activation_bytes(one_block, tokens=tokens, dtype=dtype, checkpointing=False),
    }


def _worker_memory(
    engine_name: str, config: RLConfig | AnsweringConfig, model: ModelFacts, dtype: str, *, on_gpu: bool
) -> list[ProcessMemory]:
    """Memory of each worker of a vLLM engine. vLLM divides embeddings and head as well; norms hardly count."""
    workers = config.rollout.tensor_parallel
    parts = _rollout_parts(config, model, dtype, on_gpu=on_gpu)
    divided = {name: math.ceil(size / workers) for name, size in parts.items() if name != "base"}
    parts = {"base": VLLM_WORKER_BASE_BYTES, **divided}
    return [ProcessMemory(f"{engine_name}, worker {rank}", None, parts) for rank in range(workers)]


def _rollout_parts(
    config: RLConfig | AnsweringConfig, model: ModelFacts, dtype: str, *, on_gpu: bool
) -> dict[str, int]:
    rollout = config.rollout
    weights = model.parameters * BYTES_OF_DTYPE[dtype]
    if rollout.engine == "vllm":
        # On a GPU the cache lies in the GPU's memory and takes what gpu_memory_share leaves.
        cache = 0 if on_gpu else rollout.kv_cache_bytes
        return {"base": VLLM_BASE_BYTES, "weights": weights, "key-value cache": cache}
    per_token = 2 * model.layers * model.key_value_width * BYTES_OF_DTYPE[dtype]
    cache = rollout.max_concurrent_sequences * longest_sequence(config) * per_token
    return {"base": TRANSFORMERS_BASE_BYTES, "weights": weights, "key-value cache": cache}
