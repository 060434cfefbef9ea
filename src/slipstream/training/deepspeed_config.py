"""The DeepSpeed configuration of a learner: a pure function of the training configuration."""

from typing import Any

from slipstream.config.schema import TrainingConfig
from slipstream.errors import ConfigError
from slipstream.models.tensor_plan import require_heads, tensor_plan

# Elements per collective. DeepSpeed's default of 500 million allocates gigabytes of buffers whatever the model.
BUCKET_ELEMENTS = 1 << 24


def deepspeed_config(training: TrainingConfig, *, dtype: str, device: str) -> dict[str, Any]:
    """What `deepspeed.initialize` is given.

    Micro-batches, the learning rate and the denominator of the loss are the learner's own business: DeepSpeed is told
    of one micro-batch of one sample and has no scheduler. Raises ConfigError for a combination it cannot train.
    """
    if training.zero_stage == 0 and dtype == "bfloat16":
        raise ConfigError(
            "training.zero_stage: 0 cannot train bfloat16 weights, because DeepSpeed keeps no float32 copy of them; "
            "use 1, 2 or 3, or model.dtype float32"
        )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.gradient_clip,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": training.zero_stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            # Communication beside computation needs streams, which a CPU does not have.
            "overlap_comm": device == "cuda",
        },
    }
    host_memory = {"device": "cpu", "pin_memory": device == "cuda"}
    if training.offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = host_memory
        # Else DeepSpeed insists on its own AdamW for CPUs, which is compiled at the first start; see optimizer.py.
        config["zero_force_ds_cpu_optimizer"] = False
    if training.offload_parameters:
        config["zero_optimization"]["offload_param"] = host_memory
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
        # Gradients of micro-batches are added up in float32: in bfloat16 small ones would be lost.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def tensor_parallel_config(model_config: Any, training: TrainingConfig, *, path: str, key: str) -> dict[str, Any]:
    """What `deepspeed.initialize` is given in addition to divide a model among tensor-parallel ranks.

    `model_config` is Transformers'; `path` and its configuration key are for messages. Raises ModelError for a family
    that cannot be divided and ConfigError where it has too few heads.
    """
    section = model_config.get_text_config()
    heads = getattr(section, "num_key_value_heads", None) or section.num_attention_heads
    layers = tensor_plan(model_config, path, key)
    require_heads(heads, training.tensor_parallel, model=f"{key} {path!r}")
    return {
        "tensor_parallel": {
            "autotp_size": training.tensor_parallel,
            # Left to DeepSpeed, the logits of a tied head would be in pieces too.
            "vocab_parallel_lm_head": False,
            "partition_config": {"use_default_specs": False, "layer_specs": layers},
        }
    }
