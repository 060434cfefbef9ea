"""What DeepSpeed is told."""

import pytest
from transformers import LlamaConfig

from slipstream.config.schema import TrainingConfig
from slipstream.errors import ConfigError
from slipstream.training.deepspeed_config import deepspeed_config, tensor_parallel_config


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_and_clipping_come_from_the_configuration(stage):
    config = deepspeed_config(TrainingConfig(zero_stage=stage, gradient_clip=0.7), dtype="float32", device="cpu")
    assert config["zero_optimization"]["stage"] == stage and config["gradient_clipping"] == 0.7
    assert "bf16" not in config


def test_there_is_no_scheduler_or_optimizer_of_deepspeeds_own():
    assert not {"scheduler", "optimizer"} & deepspeed_config(TrainingConfig(), dtype="float32", device="cpu").keys()


def test_bfloat16_adds_gradients_up_in_float32():
    config = deepspeed_config(TrainingConfig(zero_stage=2), dtype="bfloat16", device="cpu")
    assert config["bf16"] == {"enabled": True} and config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_bfloat16_at_stage_0_is_refused_with_the_ways_out():
    with pytest.raises(ConfigError, match=r"training\.zero_stage: 0 .*use 1, 2 or 3, or model\.dtype float32"):
        deepspeed_config(TrainingConfig(zero_stage=0), dtype="bfloat16", device="cpu")


def test_communication_overlaps_computation_on_gpus_only():
    for device, overlaps in (("cpu", False), ("cuda", True)):
        config = deepspeed_config(TrainingConfig(), dtype="float32", device=device)
        assert config["zero_optimization"]["overlap_comm"] is overlaps


def test_heads_and_embeddings_stay_whole_where_ranks_share_weights() -> None:
    config = LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    training = TrainingConfig(tensor_parallel=2)
    section = tensor_parallel_config(config, training, path="m", key="model.path")["tensor_parallel"]
    assert section["autotp_size"] == 2 and section["vocab_parallel_lm_head"] is False
    patterns = [pattern for rule in section["partition_config"]["layer_specs"] for pattern in rule["patterns"]]
    assert len(patterns) == 7 and not any("embed" in pattern or "head" in pattern for pattern in patterns)
    with pytest.raises(
        ConfigError, match=r"model\.path 'm' has \(3\).*nearest that works is training\.tensor_parallel 3"
    ):
        tensor_parallel_config(config, TrainingConfig(tensor_parallel=4), path="m", key="model.path")
