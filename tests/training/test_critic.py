"""A learner rank in the role of the critic: what it computes, and that the policy's invariants are its own too."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.algorithms.value_loss import ValueObjective
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ModelError, TrainingError

STAGES = (0, 1, 2, 3)
VALUE = ValueObjective(value_clip=None)
CLIPPED = ValueObjective(value_clip=0.2)


@pytest.fixture
def critic(learner, reward_model_folder):
    """critic(folder, training=..., **changes of the spec): a started critic of one rank, by default with a head."""

    def make(folder=reward_model_folder, **changes):
        return learner(folder, role="critic", model_key="critic.path", **changes)

    return make


def plain_values(model, tokens: np.ndarray) -> torch.Tensor:
    """Values before tokens[1:] of one sequence alone, in plain PyTorch: [L - 1]."""
    hidden = model.model(input_ids=torch.as_tensor(tokens[:-1]).unsqueeze(0), use_cache=False).last_hidden_state[0]
    return (hidden @ model.score.weight.T).squeeze(-1)


def load_plainly(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def plain_training(folder, steps: Sequence[Sequence[TrainingExample]], training: TrainingConfig) -> dict:
    """Steps of half the squared error, one example at a time: what the critic must agree with."""
    model = load_plainly(folder)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=tuple(training.betas), eps=training.epsilon)
    for examples in steps:
        optimizer.zero_grad()
        for example in examples:
            mask = torch.as_tensor(example.loss_mask[1:])
            error = plain_values(model, example.tokens) - torch.as_tensor(example.token_fields["returns"][1:])
            weight = torch.as_tensor(example.token_fields["weight"][1:])
            (0.5 * error.square() * weight)[mask].sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_updated_weights_equal_those_of_a_plain_computation(
    stage, critic, reward_model_folder, make_value_examples, helpers
):
    rank = critic(training={"zero_stage": stage, "weight_decay": 0.1, "gradient_clip": 0.5})
    steps = [make_value_examples(seed=seed) for seed in range(3)]
    for examples in steps:
        rank.update([examples[:2], examples[2:]], VALUE)
    expected = plain_training(reward_model_folder, steps, rank._spec.training)
    assert helpers.relative_difference(helpers.weights(rank), expected) <= 1e-5


CUTS = {
    "one by one": lambda e: [[x] for x in e],
    "reversed": lambda e: [list(reversed(e))],
    "with zero-weight micro-batches": lambda e: [[], [e[3], e[0]], [], [e[4], e[1], e[2]], []],
}


# With an epsilon far above every gradient a first step of AdamW moves the weights by learning_rate / epsilon times the
# gradient: here by the gradient itself. Elsewhere it would magnify the rounding of gradients near zero.
STEP_IS_GRADIENT = {"learning_rate": 1e3, "epsilon": 1e3}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(stage, cut, critic, make_value_examples, helpers):
    examples, gradients, metrics = make_value_examples(), [], []
    for micro_batches in ([examples], cut(examples)):
        rank = critic(training={"zero_stage": stage, **STEP_IS_GRADIENT})
        before = helpers.weights(rank)
        metrics.append(rank.update(micro_batches, CLIPPED))
        gradients.append({name: before[name] - after for name, after in helpers.weights(rank).items()})
    whole, parts = gradients
    assert max(gradient.abs().max() for gradient in whole.values()) > 1
    assert helpers.relative_difference(parts, whole) <= 1e-5
    assert {"loss", "value_error", "explained_variance", "tokens", "gradient_norm"} <= metrics[0].keys()
    assert "entropy" not in metrics[0]
    for name in metrics[0].keys() - {"seconds"}:
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4, abs=1e-6), name


def test_activation_checkpointing_changes_nothing(critic, make_value_examples, helpers):
    plain, frugal = critic(), critic(activation_checkpointing=True)
    assert frugal._engine.module.model.is_gradient_checkpointing
    for rank in (plain, frugal):
        rank.update([make_value_examples()], VALUE)
    assert helpers.relative_difference(helpers.weights(frugal), helpers.weights(plain)) <= 1e-6


@pytest.mark.parametrize("name", ["weight", "returns", "old_values"])
def test_a_nan_in_a_masked_slot_changes_nothing_bit_for_bit(name, critic, make_value_examples, helpers):
    examples = make_value_examples()
    clean, poisoned = critic(), critic()
    clean.update([examples], CLIPPED)
    poisoned.update([[helpers.poison(example, 1, name) for example in examples]], CLIPPED)
    assert helpers.identical(helpers.weights(poisoned), helpers.weights(clean))


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_at_a_loss_token_skips_the_step_and_names_the_example(stage, critic, make_value_examples, helpers):
    examples = make_value_examples()
    rank = critic(training={"zero_stage": stage})
    before = helpers.weights(rank)
    metrics = rank.update([examples[:2], [helpers.poison(examples[2], 4, "returns")], examples[3:]], VALUE)
    assert metrics["skipped"] == 1 and metrics["nonfinite_examples"] == ["e2"]
    assert helpers.identical(helpers.weights(rank), before)


@pytest.mark.parametrize("stage", STAGES)
def test_values_come_by_example_as_of_each_sequence_alone(stage, critic, reward_model_folder, make_value_examples):
    rank, model = critic(training={"zero_stage": stage}), load_plainly(reward_model_folder)
    examples = make_value_examples()
    found = rank.values([examples[:2], [], examples[2:]])
    assert found.keys() == {example.example_id for example in examples}
    for example in examples:
        expected = plain_values(model, example.tokens).detach().numpy()[example.loss_mask[1:]]
        np.testing.assert_allclose(found[example.example_id], expected, atol=1e-4)


def test_asking_for_values_leaves_weights_and_later_steps_alone(critic, make_value_examples, helpers):
    asked, left_alone = critic(), critic()
    for rank in (asked, left_alone):
        rank.update([make_value_examples()], VALUE)
        if rank is asked:
            rank.values([make_value_examples()])
        rank.update([make_value_examples(seed=1)], VALUE)
    assert helpers.identical(helpers.weights(asked), helpers.weights(left_alone))


def test_a_critic_from_a_language_model_begins_with_zeros_and_learns(critic, model_folder, make_value_examples):
    rank, examples = critic(model_folder), make_value_examples()
    assert not any(values.any() for values in rank.values([examples]).values())
    losses = [rank.update([examples], VALUE)["loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(0.5 * np.mean([r**2 for e in examples for r in returns(e)]), rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]


def returns(example: TrainingExample) -> np.ndarray:
    return example.token_fields["returns"][example.loss_mask]


def test_a_policy_has_no_values_and_a_critic_no_log_probs(critic, learner, model_folder, make_value_examples):
    with pytest.raises(TrainingError, match="a policy has no values; this learner computes log_probs"):
        learner(model_folder).values([make_value_examples()])
    for call in (lambda: critic().log_probs([make_value_examples()], "policy"), lambda: critic().probe(np.arange(4))):
        with pytest.raises(TrainingError, match="a critic has no log_probs; this learner computes values"):
            call()


def test_what_is_wrong_with_its_model_names_the_key_of_the_critic(critic):
    with pytest.raises(ModelError, match=r"^critic\.path: no folder"):
        critic("./nowhere")


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(stage, critic, model_folder, make_value_examples, tmp_path):
    settings = {"zero_stage": stage, "schedule": "cosine", "warmup_steps": 1}
    steps = [make_value_examples(seed=seed) for seed in range(4)]
    straight, resumed = (critic(model_folder, training=settings) for _ in range(2))
    for examples in steps[:2]:
        straight.update([examples[:2], examples[2:]], CLIPPED)
    straight.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    for examples in steps[2:]:
        before, after = (rank.update([examples[:2], examples[2:]], CLIPPED) for rank in (straight, resumed))
        assert {**after, "seconds": 0} == {**before, "seconds": 0}
    for example_id, values in straight.values([steps[0]]).items():
        np.testing.assert_array_equal(resumed.values([steps[0]])[example_id], values)


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_is_a_reward_model_for_transformers_and_a_critic_here(
    stage, critic, model_folder, make_value_examples, helpers, tmp_path
):
    rank, examples, folder = critic(model_folder, training={"zero_stage": stage}), make_value_examples(), tmp_path / "x"
    rank.update([examples], VALUE)
    rank.export(str(folder))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert helpers.identical(dict(model.named_parameters()), helpers.weights(rank))
    assert model.config.num_labels == 1 and model.config.architectures == ["LlamaForSequenceClassification"]
    score = model(torch.as_tensor(examples[1].tokens[:-1]).unsqueeze(0)).logits.item()
    values, again = rank.values([examples]), critic(folder).values([examples])
    assert values["e1"][-1] == pytest.approx(score, abs=1e-5) and score != 0
    for example_id in values:
        np.testing.assert_array_equal(again[example_id], values[example_id])
