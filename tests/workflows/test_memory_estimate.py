"""The memory estimate follows from sizes: each part is checked against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest

from slipstream.cluster.placement import plan_placement
from slipstream.config.algorithm import AlgorithmConfig
from slipstream.config.data import DataConfig
from slipstream.config.lora import LoraConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.config.reward_model import RewardModelConfig
from slipstream.config.schema import ModelConfig, RewardConfig, RLConfig, RolloutConfig, TrainingConfig
from slipstream.rewards.model import TOKENS_PER_BATCH
from slipstream.workflows.memory_estimate import (
    activation_bytes,
    adapter_parameters,
    estimate_memory,
    learner_state_bytes,
    longest_sequence,
)
from slipstream.workflows.model_facts import ModelFacts

PARAMETERS = 1_000_000
FACTS = ModelFacts(
    parameters=PARAMETERS,
    is_exact=True,
    layers=4,
    hidden_size=64,
    intermediate_size=128,
    key_value_width=32,
    vocabulary_size=1000,
    max_tokens=2048,
)


def config(
    *, kl: float = 0.0, engine: str = "vllm", ranks: int = 1, advantage: str = "group", reward_model: str | None = None
) -> RLConfig:
    return RLConfig(
        steps=1,
        output_dir="o",
        model=ModelConfig(path="m"),
        data=DataConfig(source="d.jsonl", max_prompt_tokens=100),
        reward=RewardConfig(function="math", model=reward_model),
        rollout=RolloutConfig(engine=engine, max_response_tokens=28, max_concurrent_sequences=10),  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(kl_coefficient=kl, advantage=advantage),
        training=TrainingConfig(data_parallel=ranks, tokens_per_micro_batch=1000, logits_chunk_tokens=50),
    )


def parts(
    name: str, configuration: RLConfig | RewardModelConfig | PreferenceConfig, **others: ModelFacts
) -> dict[str, int]:
    placement = plan_placement(configuration, cpus=2, gpus=0)
    processes = estimate_memory(configuration, placement, FACTS, "float32", **others)
    return next(process.parts for process in processes if process.name == name)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    # Bytes per parameter on each of two ranks, float32: from stage 1 on 8 of moments and 4 of master copy are shared.
    [(0, 4, 4, 8), (1, 4, 4, 6), (2, 4, 2, 6), (3, 2, 2, 6)],
)
def test_zero_stages_divide_what_they_partition(stage: int, weights: int, gradients: int, optimizer: int) -> None:
    training = TrainingConfig(data_parallel=2, zero_stage=stage)  # type: ignore[arg-type]
    state = learner_state_bytes(FACTS, training, dtype="float32")
    assert state == {
        "weights": weights * PARAMETERS,
        "gradients": gradients * PARAMETERS,
        "optimizer": optimizer * PARAMETERS,
    }


def test_what_is_offloaded_is_shown_apart_and_has_gradients_in_float32_beside_it() -> None:
    training = TrainingConfig(data_parallel=2, zero_stage=3, offload_optimizer=True, offload_parameters=True)
    assert learner_state_bytes(FACTS, training, dtype="bfloat16") == {
        "weights in host memory": 1 * PARAMETERS,
        "gradients": 1 * PARAMETERS,
        "optimizer in host memory": 8 * PARAMETERS,
    }


def test_an_average_of_the_weights_is_in_float32_divided_over_the_ranks_and_none_of_the_critics() -> None:
    training = TrainingConfig(data_parallel=2, ema_decay=0.9)
    assert learner_state_bytes(FACTS, training, dtype="bfloat16")["average of the weights"] == 2 * PARAMETERS
    settings = config(advantage="gae").model_copy(update={"training": training})
    assert "average of the weights" in parts("learner rank 0", settings)
    assert "average of the weights" not in parts("critic rank 0", settings)


def test_muon_keeps_one_moment() -> None:
    training = TrainingConfig(zero_stage=0, optimizer="muon")
    assert learner_state_bytes(FACTS, training, dtype="float32")["optimizer"] == 4 * PARAMETERS


def test_bfloat16_halves_weights_and_gradients_and_always_has_a_master_copy() -> None:
    state = learner_state_bytes(FACTS, TrainingConfig(zero_stage=0), dtype="bfloat16")
    assert state == {"weights": 2 * PARAMETERS, "gradients": 2 * PARAMETERS, "optimizer": 12 * PARAMETERS}


def test_checkpointing_keeps_one_block_and_the_input_of_each() -> None:
    block = 8 * 64 + 2 * 32 + 4 * 128
    assert activation_bytes(FACTS, tokens=10, dtype="float32", checkpointing=False) == 10 * 4 * block * 4
    assert activation_bytes(FACTS, tokens=10, dtype="float32", checkpointing=True) == 10 * (4 * 64 + block) * 4


@pytest.mark.slow
def test_the_formula_of_the_activations_counts_what_autograd_saves_of_a_llama_block() -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel

    def saved_bytes(layers: int) -> int:
        settings = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=50, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        model = LlamaModel(settings)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.data_ptr() not in weights:
                kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(torch.zeros(1, 128, dtype=torch.long)).last_hidden_state.sum()
        assert output.requires_grad
        return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}.values())

    measured = (saved_bytes(6) - saved_bytes(2)) / 4 * FACTS.layers
    assert activation_bytes(FACTS, tokens=128, dtype="float32", checkpointing=False) == pytest.approx(
        measured, rel=0.05
    )


def test_a_reference_model_only_counts_where_the_loss_has_a_kl_term() -> None:
    assert "reference" not in parts("learner rank 0", config())
    assert parts("learner rank 0", config(kl=0.1))["reference"] == 4 * PARAMETERS


def test_a_critic_rank_takes_what_a_rank_takes_to_train_but_no_logits_reference_or_weights_in_transit() -> None:
    settings = config(kl=0.1, advantage="gae")
    learner, critic = parts("learner rank 0", settings), parts("critic rank 0", settings)
    assert critic == {name: learner[name] for name in ("base", "weights", "gradients", "optimizer", "activations")}


def test_a_critic_with_a_model_of_its_own_is_estimated_from_that() -> None:
    twice = replace(FACTS, parameters=2 * PARAMETERS)
    assert parts("critic rank 0", config(advantage="gae"), critic=twice)["weights"] == 8 * PARAMETERS
    assert parts("learner rank 0", config(advantage="gae"), critic=twice)["weights"] == 4 * PARAMETERS


def test_a_reward_model_that_scores_takes_its_weights_and_one_block_of_a_forward_pass() -> None:
    twice = replace(FACTS, parameters=2 * PARAMETERS)
    scoring = parts("reward engine", config(reward_model="m"), reward_model=twice)
    assert scoring["weights"] == 8 * PARAMETERS
    one_block = replace(FACTS, layers=1)
    expected = activation_bytes(one_block, tokens=TOKENS_PER_BATCH, dtype="float32", checkpointing=False)
    assert scoring["activations"] == expected
    assert "optimizer" not in scoring and parts("reward worker 0", config(reward_model="m"))


def test_training_a_reward_model_takes_no_logits_and_a_micro_batch_holds_a_whole_pair() -> None:
    settings = RewardModelConfig.model_validate(
        {"steps": 1, "output_dir": "o", "model": {"path": "m"}, "data": {"source": "d.jsonl"}, "max_tokens": 3000}
    )
    found = parts("learner rank 0", settings)
    assert found["activations"] == activation_bytes(FACTS, tokens=6000, dtype="float32", checkpointing=False)
    assert "logits" not in found


@pytest.mark.parametrize(
    ("settings", "holds_reference", "sequences"),
    [
        ({"loss": "dpo"}, True, 2),
        ({"loss": "dpo", "reference": "cached"}, False, 2),
        ({"loss": "simpo"}, False, 2),
        ({"loss": "kto"}, True, 1),
    ],
)
def test_preference_training_holds_a_whole_reference_unless_it_is_cached_or_there_is_none(
    settings: dict[str, str], holds_reference: bool, sequences: int
) -> None:
    base = {"steps": 1, "output_dir": "o", "model": {"path": "m"}, "data": {"source": "d.jsonl"}, "max_tokens": 5000}
    training = {"data_parallel": 2, "zero_stage": 3}
    found = parts("learner rank 0", PreferenceConfig.model_validate({**base, **settings, "training": training}))
    assert found.get("reference") == (4 * PARAMETERS if holds_reference else None)
    tokens = sequences * 5000
    assert found["activations"] == activation_bytes(FACTS, tokens=tokens, dtype="float32", checkpointing=False)
    assert "logits" in found and "weights in transit" not in found


def test_a_micro_batch_is_never_shorter_than_the_longest_sequence() -> None:
    assert longest_sequence(config()) == 128
    short = config().model_copy(update={"training": TrainingConfig(tokens_per_micro_batch=1)})
    expected = activation_bytes(FACTS, tokens=128, dtype="float32", checkpointing=False)
    assert parts("learner rank 0", short)["activations"] == expected


def test_ranks_that_share_a_row_keep_a_share_of_its_activations_each() -> None:
    shared = config().model_copy(update={"training": TrainingConfig(tokens_per_micro_batch=1000, sequence_parallel=3)})
    expected = activation_bytes(FACTS, tokens=334, dtype="float32", checkpointing=False)
    assert parts("learner rank 2", shared)["activations"] == expected


def test_ranks_that_share_weights_keep_a_share_of_the_layers_and_whole_embeddings_and_reference() -> None:
    training = TrainingConfig(tensor_parallel=2, zero_stage=0, tokens_per_micro_batch=1000, logits_chunk_tokens=50)
    divided = config(kl=0.1).model_copy(update={"training": training})
    found = parts("learner rank 1", divided)
    matrices = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert found["weights"] == found["gradients"] == 4 * (PARAMETERS - matrices // 2)
    assert found["reference"] == found["weights in transit"] == 4 * PARAMETERS
    assert found["activations"] == 1000 * 4 * 4 * (6 * 64 + (2 * 64 + 2 * 32 + 4 * 128) // 2)


def test_only_the_first_rank_holds_weights_on_their_way_to_the_engines() -> None:
    two = config(ranks=2)
    assert parts("learner rank 0", two)["weights in transit"] == 4 * PARAMETERS
    assert "weights in transit" not in parts("learner rank 1", two)


def test_a_vllm_engine_takes_its_configured_cache_and_transformers_what_its_sequences_need() -> None:
    assert parts("rollout engine 0", config())["key-value cache"] == config().rollout.kv_cache_bytes
    per_token = 2 * 4 * 32 * 4
    assert parts("rollout engine 0", config(engine="transformers"))["key-value cache"] == 10 * 128 * per_token


def test_each_worker_of_an_engine_has_its_share_of_weights_and_cache() -> None:
    shared = config()
    shared = shared.model_copy(update={"rollout": shared.rollout.model_copy(update={"tensor_parallel": 2})})
    whole = parts("rollout engine 0", config())
    for rank in (0, 1):
        worker = parts(f"rollout engine 0, worker {rank}", shared)
        assert worker["weights"] == math.ceil(whole["weights"] / 2)
        assert worker["key-value cache"] == whole["key-value cache"] // 2
    assert set(parts("rollout engine 0", shared)) == {"base"}


def test_the_logits_are_counted_in_chunks() -> None:
    assert parts("learner rank 0", config())["logits"] == 3 * 50 * 1000 * 4


def test_an_adapter_alone_has_gradients_and_states_and_its_reference_takes_nothing() -> None:
    full = config(kl=0.1, ranks=1)
    adapted = full.model_copy(update={"model": full.model.model_copy(update={"lora": LoraConfig(rank=8)})})
    learned = adapter_parameters(FACTS, 8)
    # Query and output 64 x 64, key and value 64 x 32, three matrices of 64 x 128, in each of 4 layers.
    assert learned == 4 * 8 * (2 * 128 + 2 * 96 + 3 * 192)
    parts = {
        name: next(process.parts for process in estimate_memory(one, plan_placement(one, 4, 0), FACTS, "float32")
                   if process.role == "learner")
        for name, one in (("full", full), ("adapted", adapted))
    }  # fmt: skip
    assert parts["adapted"]["weights"] == parts["full"]["weights"] == PARAMETERS * 4
    assert parts["adapted"]["gradients"] == learned * 4 and parts["adapted"]["optimizer"] == learned * 4 * 3
    assert "reference" in parts["full"] and "reference" not in parts["adapted"]
