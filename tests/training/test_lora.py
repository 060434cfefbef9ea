"""A learner that trains an adapter alone: what plain peft computes, a model that stays put, and merged weights out."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from slipstream.algorithms.objective import PolicyObjective, SupervisedObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.config.lora import LoraConfig
from slipstream.errors import ConfigError, RunDirectoryError, TrainingError
from slipstream.models.lora import ADAPTER_MARK
from slipstream.training.checkpoint_weights import read_weights
from slipstream.weights.plan import ChannelAddress
from slipstream.weights.shared_memory import SharedMemoryReceiver
from slipstream.workflows.merge_lora import merge_lora

STAGES = (0, 1, 2, 3)
LORA = LoraConfig(rank=4, alpha=8)
SUPERVISED = SupervisedObjective()


def parameters_of(rank):
    """All of them, whole, by the names that peft gives them."""
    parameters = dict(rank._engine.module.model.named_parameters())
    with rank._weights.gathered(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def adapter(rank):
    return {name: parameter for name, parameter in parameters_of(rank).items() if ADAPTER_MARK in name}


def plain_log_probs(model, tokens, temperature=1.0):
    row = torch.as_tensor(np.asarray(tokens))
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, row[1:, None])[:, 0]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_moves_the_adapter_as_plain_peft_does_and_nothing_else(
    stage, learner, model_folder, make_examples, helpers
):
    # An epsilon that large makes a step of AdamW nearly one along the gradient; a small one enlarges rounding.
    settings = {"zero_stage": stage, "epsilon": 1.0, "learning_rate": 0.02}
    rank = learner(model_folder, training=settings, temperature=1.0, lora=LORA)
    base = load(model_folder)
    plain = get_peft_model(base, PeftLoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    parameters = {name.removeprefix("base_model.model."): p for name, p in plain.named_parameters() if p.requires_grad}
    assert parameters.keys() == adapter(rank).keys()
    for name, start in adapter(rank).items():
        parameters[name].data.copy_(start)
    training = rank._spec.training
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=training.learning_rate, betas=tuple(training.betas), eps=training.epsilon,
        weight_decay=0.0,
    )  # fmt: skip
    for seed in range(3):
        examples = make_examples(seed=seed)
        rank.update([examples[:2], examples[2:]], SUPERVISED)
        optimizer.zero_grad()
        for example in examples:
            weight = torch.as_tensor(example.token_fields["weight"][1:])[example.loss_mask[1:]]
            (-plain_log_probs(plain, example.tokens)[example.loss_mask[1:]] * weight).sum().backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in parameters.items()}
    assert helpers.relative_difference(adapter(rank), expected) <= 1e-5
    frozen = {name: parameter for name, parameter in parameters_of(rank).items() if ADAPTER_MARK not in name}
    on_disk = dict(load(model_folder).named_parameters())
    for name, parameter in frozen.items():
        assert torch.equal(parameter, on_disk[name.replace(".base_layer", "")]), name
    learned = sum(parameter.numel() for group in rank._engine.optimizer.param_groups for parameter in group["params"])
    assert stage > 0 or learned == sum(parameter.numel() for parameter in expected.values())


@pytest.mark.parametrize("stage", (1, 3))
def test_what_travels_to_engines_is_the_merged_model(stage, learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, training={"zero_stage": stage}, lora=LORA)
    rank.update([make_examples()], SUPERVISED)
    plan = rank.weight_plan(1 << 15, ChannelAddress("shared_memory", "test-lora"))
    receiver, arrived = None, {}
    for index, bucket in enumerate(plan.buckets):
        rank.fill_bucket(index)
        receiver = receiver or SharedMemoryReceiver(plan)
        arrived |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
    model = load(model_folder)
    assert arrived.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(arrived, strict=False)
    tokens = np.array([4, 9, 11, 3, 3, 17])
    expected = rank.probe(tokens)
    np.testing.assert_allclose(plain_log_probs(model, tokens).detach().numpy(), expected, atol=1e-5)
    before = plain_log_probs(load(model_folder), tokens).detach().numpy()
    assert np.abs(before - expected).max() > 1e-2


@pytest.mark.parametrize("stage", (1, 3))
def test_the_reference_is_the_model_without_its_adapter(stage, learner, model_folder, make_examples):
    rank = learner(model_folder, training={"zero_stage": stage}, lora=LORA, load_reference=True)
    examples = make_examples()
    assert rank._reference is None, "no second model in memory"
    before = rank.log_probs([examples], "reference")
    policy = rank.log_probs([examples], "policy")
    for example_id, values in before.items():
        np.testing.assert_array_equal(policy[example_id], values)
    with_reference = [
        type(e)(e.example_id, e.tokens, e.loss_mask, {**e.token_fields, "reference_log_probs": spread(e, before)})
        for e in examples
    ]
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
    steps = [rank.update([with_reference], objective) for _ in range(2)]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[1]["kl"] > 1e-5
    after = rank.log_probs([examples], "reference")
    moved = rank.log_probs([examples], "policy")
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert any(np.abs(moved[name] - before[name]).max() > 1e-3 for name in before)
    with pytest.raises(TrainingError, match="no reference model"):
        learner(model_folder, lora=LORA).log_probs([examples], "reference")


def spread(example, log_probs):
    values = np.zeros(len(example.tokens), np.float32)
    values[example.loss_mask] = log_probs[example.example_id]
    return values


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(
    stage, learner, model_folder, make_examples, helpers, tmp_path
):
    straight, resumed = (learner(model_folder, training={"zero_stage": stage}, lora=LORA) for _ in range(2))
    for seed in (0, 1):
        straight.update([make_examples(seed=seed)], SUPERVISED)
    straight.save(str(tmp_path))
    straight.update([make_examples(seed=2)], SUPERVISED)
    resumed.load(str(tmp_path))
    resumed.update([make_examples(seed=2)], SUPERVISED)
    assert helpers.identical(adapter(resumed), adapter(straight))
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    file = torch.load(tmp_path / "engine" / name, weights_only=False)
    # At stage 3 the weights are beside the optimizer's states.
    state = [name for group in file["param_shapes"] for name in group] if stage == 3 else file["module"]
    assert state and all(ADAPTER_MARK in name for name in state)
    assert not file.get("frozen_param_fragments")
    with pytest.raises(RunDirectoryError, match="holds an adapter and no model"):
        read_weights(tmp_path)
    # The rank changes the shapes; alpha changes nothing but what the adapter is worth.
    for other in (LORA.model_copy(update={"rank": 2}), LORA.model_copy(update={"alpha": 5})):
        with pytest.raises(RunDirectoryError, match=r"was written with LoRA adapter .* this run has LoRA adapter"):
            learner(model_folder, training={"zero_stage": stage}, lora=other).load(str(tmp_path))


@pytest.mark.parametrize(("written", "read"), [(1, 3), (3, 2)])
def test_an_adapter_goes_on_at_another_stage(written, read, learner, model_folder, make_examples, helpers, tmp_path):
    straight = learner(model_folder, training={"zero_stage": written}, lora=LORA)
    straight.update([make_examples()], SUPERVISED)
    straight.save(str(tmp_path / "step" / "learner"))
    resumed = learner(model_folder, training={"zero_stage": read}, lora=LORA)
    assert resumed.load(str(tmp_path / "step" / "learner")) == f"ZeRO stage {written} to {read}"
    assert helpers.identical(adapter(resumed), adapter(straight))
    for seed in (1, 2):
        for rank in (straight, resumed):
            rank.update([make_examples(seed=seed)], SUPERVISED)
    assert helpers.relative_difference(adapter(resumed), adapter(straight)) <= 1e-5


@pytest.mark.parametrize("stage", (1, 3))
def test_an_export_is_the_merged_model_with_the_adapter_beside_it(
    stage, learner, model_folder, tiny_tokenizer, make_examples, tmp_path
):
    rank = learner(model_folder, training={"zero_stage": stage}, lora=LORA)
    rank.update([make_examples()], SUPERVISED)
    rank.export(str(tmp_path / "export"))
    tokens = np.array([4, 9, 11, 3, 3, 17])
    expected = rank.probe(tokens)
    found = plain_log_probs(load(tmp_path / "export"), tokens).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    both = PeftModel.from_pretrained(load(model_folder), tmp_path / "export" / "adapter")
    np.testing.assert_allclose(plain_log_probs(both, tokens).detach().numpy(), expected, atol=1e-5)
    merge_lora(tmp_path / "export" / "adapter", tmp_path / "merged")
    merged, exported = (dict(load(tmp_path / name).named_parameters()) for name in ("merged", "export"))
    for name, weight in merged.items():
        torch.testing.assert_close(weight, exported[name], rtol=1e-6, atol=1e-6)
    settings = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())
    assert Path(settings["base_model_name_or_path"]) == model_folder and settings["r"] == 4


@pytest.mark.parametrize("stage", (1, 3))
def test_the_head_of_a_reward_model_is_trained_beside_its_adapter_and_saved_with_it(
    stage, learner, reward_model_folder, make_examples, tmp_path
):
    rank = learner(reward_model_folder, training={"zero_stage": stage}, role="reward_model", lora=LORA)
    pairs = [
        type(e)(
            e.example_id,
            e.tokens,
            np.arange(len(e.tokens)) == len(e.tokens) - 1,
            {"weight": np.ones(len(e.tokens), np.float32), "is_chosen": np.full(len(e.tokens), 1.0 - i, np.float32)},
        )
        for i, e in enumerate(make_examples((6, 7)))
    ]
    head = parameters_of(rank)["score.weight"]
    metrics = [rank.update([pairs], RewardModelObjective()) for _ in range(5)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert not torch.equal(parameters_of(rank)["score.weight"], head)
    rank.export(str(tmp_path / "export"))
    merge_lora(tmp_path / "export" / "adapter", tmp_path / "merged")
    merged, exported = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).state_dict()
        for name in ("merged", "export")
    )
    for name, weight in merged.items():
        torch.testing.assert_close(weight, exported[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("modules", "words"), [(["nonesuch"], "nonesuch"), (["lm_head"], "head of the language model")]
)
def test_modules_that_there_are_not_and_the_head_are_refused_by_name(modules, words, learner, untied_model_folder):
    with pytest.raises(ConfigError, match=rf"model\.lora\.target_modules: .*{words}"):
        learner(untied_model_folder, lora=LoraConfig(target_modules=modules))


def test_only_the_modules_named_get_an_adapter(learner, model_folder):
    rank = learner(model_folder, lora=LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]))
    assert {name.split(".")[4] for name in adapter(rank)} == {"q_proj", "v_proj"}
    assert len(adapter(rank)) == 2 * 2 * 2


def test_repeated_updates_lower_a_supervised_loss_with_activation_checkpointing_too(
    learner, model_folder, make_examples
):
    rank = learner(model_folder, lora=LORA, temperature=1.0, activation_checkpointing=True)
    losses = [rank.update([make_examples()], SUPERVISED)["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.3
