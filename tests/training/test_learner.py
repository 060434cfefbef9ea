"""One learner rank, in this process: what an optimizer step computes, skips and reports."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.algorithms.objective import PolicyObjective, SupervisedObjective
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ConfigError, TrainingError, WeightSyncError
from slipstream.training.learner import LearnerRank
from slipstream.weights.plan import ChannelAddress
from slipstream.weights.shared_memory import SharedMemoryReceiver

STAGES = (0, 1, 2, 3)
POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)


def plain_log_probs(model, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Log-probs of tokens[1:] of one sequence alone, by the model's own forward pass: [L - 1]."""
    row = torch.as_tensor(tokens).unsqueeze(0)
    logits = model(input_ids=row, use_cache=False).logits[0, :-1] / temperature
    return torch.log_softmax(logits.float(), -1).gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1)


def plain_entropy(model, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Entropy of the distribution that each of tokens[1:] is drawn from: [L - 1]."""
    logits = model(input_ids=torch.as_tensor(tokens).unsqueeze(0), use_cache=False).logits[0, :-1] / temperature
    return torch.distributions.Categorical(logits=logits.float()).entropy()


def plain_training(
    folder, steps: Sequence[Sequence[TrainingExample]], training: TrainingConfig, *, entropy_coefficient: float = 0.0
) -> dict:
    """Policy-gradient steps on policy in plain PyTorch, one example at a time: what the learner must agree with."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=tuple(training.betas), eps=training.epsilon)
    for examples in steps:
        optimizer.zero_grad()
        for example in examples:
            log_probs = plain_log_probs(model, example.tokens, temperature=0.6)
            mask = torch.as_tensor(example.loss_mask[1:])
            weight = torch.as_tensor(example.token_fields["weight"][1:])
            advantages = torch.as_tensor(example.token_fields["advantages"][1:])
            ratio = torch.exp(log_probs - log_probs.detach())
            bonus = entropy_coefficient * plain_entropy(model, example.tokens, temperature=0.6)
            ((-ratio * advantages - bonus) * weight)[mask].sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_updated_weights_equal_those_of_a_plain_computation(stage, learner, model_folder, make_examples, helpers):
    settings = {"zero_stage": stage, "weight_decay": 0.1, "gradient_clip": 0.5, "logits_chunk_tokens": 4}
    rank = learner(model_folder, training=settings)
    steps = [make_examples(seed=seed) for seed in range(3)]
    for examples in steps:
        rank.update([examples[:2], examples[2:]], POLICY)
    expected = plain_training(model_folder, steps, rank._spec.training)
    assert helpers.relative_difference(helpers.weights(rank), expected) <= 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_an_entropy_bonus_reaches_the_weights_through_chunks(stage, learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, training={"zero_stage": stage, "logits_chunk_tokens": 4})
    examples = make_examples()
    rank.update([examples[:2], examples[2:]], replace(POLICY, entropy_coefficient=0.5))
    expected = plain_training(model_folder, [examples], rank._spec.training, entropy_coefficient=0.5)
    assert helpers.relative_difference(helpers.weights(rank), expected) <= 1e-5
    without = plain_training(model_folder, [examples], rank._spec.training)
    assert helpers.relative_difference(without, expected) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_an_untied_head_is_trained_as_well(stage, learner, untied_model_folder, make_examples, helpers):
    rank = learner(untied_model_folder, training={"zero_stage": stage})
    examples = make_examples()
    rank.update([examples], POLICY)
    expected = plain_training(untied_model_folder, [examples], rank._spec.training)
    assert "lm_head.weight" in expected
    assert helpers.relative_difference(helpers.weights(rank), expected) <= 1e-5


CUTS = {
    "one by one": lambda e: [[x] for x in e],
    "reversed": lambda e: [list(reversed(e))],
    "shuffled in two": lambda e: [[e[3], e[0]], [e[4], e[1], e[2]]],
    "with zero-weight micro-batches": lambda e: [[], e[:3], [], e[3:], []],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", STAGES)
def test_the_update_does_not_depend_on_how_the_step_is_cut(stage, cut, learner, model_folder, make_examples, helpers):
    examples = make_examples()
    whole = learner(model_folder, training={"zero_stage": stage})
    metrics = whole.update([examples], POLICY)
    parts = learner(model_folder, training={"zero_stage": stage, "logits_chunk_tokens": 3})
    part_metrics = parts.update(cut(examples), POLICY)
    assert helpers.relative_difference(helpers.weights(parts), helpers.weights(whole)) <= 1e-5
    for name in metrics.keys() - {"seconds"}:
        assert part_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_may_be_accumulated_before_its_last_examples_are_there(
    stage, learner, model_folder, make_examples, helpers
):
    whole, parts = (learner(model_folder, training={"zero_stage": stage}) for _ in range(2))
    for seed in range(2):
        examples = make_examples(seed=seed)
        at_once = whole.update([[example] for example in examples], POLICY)
        parts.accumulate([examples[:1]], POLICY)
        parts.log_probs([examples], "policy")
        parts.accumulate([[example] for example in examples[1:3]], POLICY)
        in_parts = parts.update([[example] for example in examples[3:]], POLICY)
        assert in_parts["tokens"] == at_once["tokens"]
        for name in ("loss", "gradient_norm", "entropy", "ratio", "learning_rate"):
            assert in_parts[name] == pytest.approx(at_once[name], rel=1e-6), name
    assert helpers.relative_difference(helpers.weights(parts), helpers.weights(whole)) <= 1e-5


def test_a_nan_that_was_accumulated_skips_the_step_and_is_named(learner, model_folder, make_examples, helpers):
    rank = learner(model_folder)
    before = helpers.weights(rank)
    examples = make_examples()
    examples[1].token_fields["advantages"][-1] = np.nan
    rank.accumulate([examples[:2]], POLICY)
    metrics = rank.update([examples[2:]], POLICY)
    assert (metrics["skipped"], metrics["nonfinite_examples"]) == (1.0, ["e1"])
    assert helpers.identical(helpers.weights(rank), before)
    assert not rank.update([make_examples()], POLICY)["skipped"], "nothing of it is left"


@pytest.mark.parametrize("stage", STAGES)
def test_activation_checkpointing_changes_nothing(stage, learner, model_folder, make_examples, helpers):
    examples = make_examples()
    plain = learner(model_folder, training={"zero_stage": stage})
    frugal = learner(model_folder, training={"zero_stage": stage}, activation_checkpointing=True)
    assert frugal._engine.module.model.is_gradient_checkpointing
    for rank in (plain, frugal):
        rank.update([examples[:2], examples[2:]], POLICY)
    assert helpers.relative_difference(helpers.weights(frugal), helpers.weights(plain)) <= 1e-6


def test_a_step_of_zero_weight_micro_batches_alone_leaves_the_weights(learner, model_folder, helpers):
    rank = learner(model_folder)
    before = helpers.weights(rank)
    metrics = rank.update([[], []], POLICY)
    assert metrics["tokens"] == 0 and metrics["loss"] == 0 and metrics["skipped"] == 0
    assert helpers.identical(helpers.weights(rank), before)


@pytest.mark.parametrize("name", ["weight", "advantages"])
def test_a_nan_in_a_masked_slot_changes_nothing_bit_for_bit(name, learner, model_folder, make_examples, helpers):
    examples = make_examples()
    clean, poisoned = learner(model_folder), learner(model_folder)
    clean_metrics = clean.update([examples], POLICY)
    metrics = poisoned.update([[helpers.poison(example, 1, name) for example in examples]], POLICY)
    assert helpers.identical(helpers.weights(poisoned), helpers.weights(clean))
    del clean_metrics["seconds"], metrics["seconds"]
    assert metrics == clean_metrics


@pytest.mark.parametrize("name", ["weight", "advantages", "old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_at_a_loss_token_skips_the_step_and_names_the_example(
    stage, name, learner, model_folder, make_examples, helpers
):
    examples = [
        replace(example, token_fields={name: np.zeros(len(example.tokens), np.float32), **example.token_fields})
        for example in make_examples()
    ]
    rank = learner(model_folder, training={"zero_stage": stage})
    rank.update([examples], POLICY)
    before = helpers.weights(rank)
    metrics = rank.update([examples[:2], [helpers.poison(examples[2], 4, name)], examples[3:]], POLICY)
    assert metrics["skipped"] == 1 and metrics["nonfinite_examples"] == ["e2"]
    assert np.isnan(metrics["gradient_norm"])
    assert helpers.identical(helpers.weights(rank), before)


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_leaves_no_trace_in_the_optimizer(stage, learner, model_folder, make_examples, helpers):
    examples = make_examples()
    straight, interrupted = (learner(model_folder, training={"zero_stage": stage}) for _ in range(2))
    straight.update([examples], POLICY)
    straight.update([examples[:3], examples[3:]], POLICY)
    interrupted.update([examples], POLICY)
    interrupted.update([examples[:2], [helpers.poison(examples[2], 4, "advantages")], examples[3:]], POLICY)
    metrics = interrupted.update([examples[:3], examples[3:]], POLICY)
    assert metrics["skipped"] == 0 and "nonfinite_examples" not in metrics
    assert helpers.identical(helpers.weights(interrupted), helpers.weights(straight))


def test_an_infinite_gradient_of_a_finite_loss_skips_the_step(learner, model_folder, make_examples, helpers):
    huge = [
        replace(e, token_fields={**e.token_fields, "advantages": np.full(len(e.tokens), 3e38, np.float32)})
        for e in make_examples()
    ]
    for stage in STAGES:
        rank = learner(model_folder, training={"zero_stage": stage})
        before = helpers.weights(rank)
        metrics = rank.update([huge], POLICY)
        assert metrics["skipped"] == 1, stage
        assert helpers.identical(helpers.weights(rank), before)


@pytest.mark.parametrize("stage", STAGES)
def test_the_reported_gradient_norm_is_the_one_before_clipping(stage, learner, model_folder, make_examples):
    clipped = learner(model_folder, training={"zero_stage": stage, "gradient_clip": 0.01})
    free = learner(model_folder, training={"zero_stage": stage, "gradient_clip": 1e6})
    norms = [rank.update([make_examples()], POLICY)["gradient_norm"] for rank in (clipped, free)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0.1


def test_the_first_ratio_is_one_at_the_sampling_temperature(learner, model_folder, make_examples):
    rank = learner(model_folder, temperature=0.6)
    examples = make_examples()
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    sampled = []
    for example in examples:
        old = np.zeros(len(example.tokens), np.float32)
        old[1:] = plain_log_probs(model, example.tokens, 0.6).detach().numpy()
        sampled.append(replace(example, token_fields={**example.token_fields, "old_log_probs": old}))
    metrics = rank.update([sampled], POLICY)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4) and metrics["clip_share"] == 0


def test_log_probs_come_by_example_and_leave_weights_and_later_steps_alone(
    learner, model_folder, make_examples, helpers
):
    examples = make_examples()
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    for stage in STAGES:
        rank, other = (learner(model_folder, training={"zero_stage": stage}) for _ in range(2))
        found = rank.log_probs([examples[:2], [], examples[2:]], "policy")
        assert found.keys() == {example.example_id for example in examples}
        for example in examples:
            expected = plain_log_probs(model, example.tokens, 0.6).detach().numpy()[example.loss_mask[1:]]
            np.testing.assert_allclose(found[example.example_id], expected, atol=1e-4)
        for one in (rank, other):
            one.update([examples[:2], examples[2:]], POLICY)
            one.log_probs([examples], "policy")
            one.update([examples], POLICY)
        assert helpers.identical(helpers.weights(rank), helpers.weights(other))


def test_the_reference_keeps_the_first_weights_while_the_policy_moves(learner, model_folder, make_examples):
    rank = learner(model_folder, load_reference=True)
    examples = make_examples()
    before = rank.log_probs([examples], "reference")
    for example_id, values in rank.log_probs([examples], "policy").items():
        np.testing.assert_array_equal(values, before[example_id])
    rank.update([examples], POLICY)
    after, policy = rank.log_probs([examples], "reference"), rank.log_probs([examples], "policy")
    for example_id, values in before.items():
        np.testing.assert_array_equal(after[example_id], values)
    assert any(np.abs(policy[example_id] - before[example_id]).max() > 1e-3 for example_id in before)


def test_no_reference_is_loaded_unless_asked_for(learner, model_folder, make_examples):
    with pytest.raises(TrainingError, match="no reference model"):
        learner(model_folder).log_probs([make_examples()], "reference")


def test_the_probe_is_at_temperature_one(learner, model_folder):
    tokens = np.array([4, 9, 11, 3, 3])
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    expected = plain_log_probs(model, tokens, 1.0).detach().numpy()
    for stage in (0, 3):
        rank = learner(model_folder, temperature=0.6, training={"zero_stage": stage})
        np.testing.assert_allclose(rank.probe(tokens), expected, atol=1e-5)


def test_a_loss_without_update_is_the_one_an_update_reports(learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, temperature=1.0)
    examples = make_examples()
    before = helpers.weights(rank)
    held_out = rank.loss([examples[:2], examples[2:]], SupervisedObjective())
    assert helpers.identical(helpers.weights(rank), before)
    updated = rank.update([examples], SupervisedObjective())
    for name in ("loss", "entropy", "tokens"):
        assert held_out[name] == pytest.approx(updated[name], rel=1e-5)


def test_repeated_updates_lower_a_supervised_loss(learner, model_folder, make_examples):
    rank = learner(model_folder, temperature=1.0)
    examples = make_examples()
    losses = [rank.update([examples], SupervisedObjective())["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5


def test_the_learning_rate_follows_the_schedule(learner, model_folder, make_examples):
    settings = {"schedule": "linear", "warmup_steps": 2, "learning_rate": 1e-3}
    rank = learner(model_folder, training=settings, total_optimizer_steps=4)
    rates = [rank.update([make_examples()], POLICY)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([5e-4, 1e-3, 5e-4, 0.0])


@pytest.mark.parametrize("stage", STAGES)
def test_all_weights_arrive_once_through_shared_memory(stage, learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, training={"zero_stage": stage})
    plan = rank.weight_plan(1 << 15, ChannelAddress("shared_memory", f"test-{stage}"))
    assert len(plan.buckets) > 2 and len(plan.tensor_names) == len(set(plan.tensor_names))
    assert "lm_head.weight" not in plan.tensor_names, "a tied weight travels under one name"
    rank.update([make_examples()], POLICY)
    receiver, arrived = None, {}
    for index, bucket in enumerate(plan.buckets):
        checksums = rank.fill_bucket(index)
        receiver = receiver or SharedMemoryReceiver(plan)
        arrived |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
        assert checksums.keys() == {spec.name for spec in bucket.tensors}
    assert helpers.identical(arrived, helpers.weights(rank))


def test_filling_a_bucket_without_a_plan_is_refused(learner, model_folder):
    with pytest.raises(WeightSyncError, match="before weight_plan"):
        learner(model_folder).fill_bucket(0)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_bfloat16_weights_train_with_a_float32_copy(stage, learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, dtype="bfloat16", temperature=1.0, training={"zero_stage": stage})
    losses = [rank.update([make_examples()], SupervisedObjective())["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]
    before = helpers.weights(rank)
    assert all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    metrics = rank.update(
        [[helpers.poison(example, 2, "weight") for example in make_examples()]], SupervisedObjective()
    )
    assert metrics["skipped"] == 1
    assert helpers.identical(helpers.weights(rank), before)


def test_stage_0_refuses_bfloat16(learner, model_folder):
    with pytest.raises(ConfigError, match=r"training\.zero_stage"):
        learner(model_folder, dtype="bfloat16", training={"zero_stage": 0})


def test_a_rank_that_was_never_started_can_be_shut_down(model_folder, helpers):
    LearnerRank(helpers.make_spec(model_folder)).shutdown()


def test_an_example_without_weights_is_named(learner, model_folder):
    example = TrainingExample("lonely", np.arange(4), np.arange(4) > 1)
    with pytest.raises(TrainingError, match="lonely"):
        learner(model_folder).update([[example]], SupervisedObjective())
