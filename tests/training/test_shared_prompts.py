"""Learners that compute a prompt once for all its answers learn what they learn from each sequence with its own."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.algorithms.objective import PolicyObjective
from slipstream.algorithms.preference_loss import PairObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.data.packing import pack
from slipstream.data.trajectory import TrainingExample
from slipstream.training import group as group_module
from slipstream.training.group import LearnerGroup

POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)
# A first step of AdamW then moves the weights by a thousand times the gradient: their own rounding does not count.
STEP_IS_GRADIENT = {"learning_rate": 1e6, "epsilon": 1e3, "logits_chunk_tokens": 5}
# Of three prompts: a group that fits, one that a micro-batch of 24 tokens does not hold, and an answer alone.
GROUPS = ((4, (3, 5, 3)), (9, (8, 2, 7, 7, 1)), (1, (6,)))
TOKENS = 3 * 4 + 11 + 5 * 9 + 25 + 7


def make_batch() -> list[TrainingExample]:
    """Answers with an environment's tokens among them, a NaN in every masked slot, and numbers in the others."""
    generator = np.random.default_rng(0)
    names = ("advantages", "old_log_probs", "returns", "old_values")
    examples = []
    for number, (prompt_length, answers) in enumerate(GROUPS):
        prompt = generator.integers(1, 60, prompt_length)
        for member, length in enumerate(answers):
            tokens = np.concatenate([prompt, generator.integers(1, 60, length)])
            mask = (np.arange(len(tokens)) >= prompt_length) & (np.arange(len(tokens)) != prompt_length + 4)
            values = {name: np.where(mask, generator.normal(size=len(tokens)), np.nan) for name in names}
            values["weight"] = np.where(mask, 1 / 40, np.nan)
            fields = {name: array.astype(np.float32) for name, array in values.items()}
            examples.append(TrainingExample(f"{number}/{member}", tokens, mask, fields))
    # Members of a group lie apart, as nothing but their tokens says that they are one.
    return examples[::2] + examples[1::2]


def make_pairs() -> list[TrainingExample]:
    """Two pairs to one prompt, whose worse answers begin like the better ones, and one to another."""
    generator = np.random.default_rng(1)
    first, second = generator.integers(1, 60, 6), generator.integers(1, 60, 3)
    examples = []
    for row, (prompt, lengths) in enumerate(((first, (5, 3)), (first, (2, 4)), (second, (4, 4)))):
        start = generator.integers(1, 60, 1)
        for name, length in zip(("chosen", "rejected"), lengths, strict=True):
            tokens = np.concatenate([prompt, start, generator.integers(1, 60, length)])
            mask = np.arange(len(tokens)) >= len(prompt)
            fields = {
                "is_chosen": float(name == "chosen"),
                "weight": 1 / 6 / mask.sum(),
                "reference_log_probs": -3.0,
            }
            arrays = {field: np.full(len(tokens), value, np.float32) for field, value in fields.items()}
            examples.append(TrainingExample(f"{row}/{name}", tokens, mask, arrays))
    return examples


def scored_at_the_end(examples: list[TrainingExample]) -> list[TrainingExample]:
    return [replace(e, loss_mask=np.arange(len(e.tokens)) == len(e.tokens) - 1) for e in examples]


@pytest.fixture
def group(one_rank_group):
    """group(folder, shared, tokens=..., per_unit=..., **changes): one rank as the controller sees it."""

    def make(folder, shared: bool, *, tokens: int = 10_000, per_unit: int = 1, **changes) -> LearnerGroup:
        changes = {"training": STEP_IS_GRADIENT, "temperature": 0.6} | changes
        return one_rank_group(folder, tokens, per_unit, share_prompts=shared, **changes)

    return make


def assert_equal_steps(found, expected, helpers):
    """To rounding, which the large weights of the tiny model blow up."""
    assert found[0]["skipped"] == 0
    assert max(change.abs().max() for change in expected[1].values()) > 1e-2
    assert helpers.relative_difference(found[1], expected[1]) <= 3e-5
    for name in expected[0].keys() - {"seconds", "skipped_steps", "nonfinite_examples"}:
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tokens", [10_000, 24, 1])
def test_a_step_of_policy_training_equals_plain_packing(stage, tokens, group, model_folder, helpers):
    training = STEP_IS_GRADIENT | {"zero_stage": stage}
    shared = group(model_folder, True, tokens=tokens, training=training)
    plain = group(model_folder, False, training=training)
    found, expected = (helpers.step_of(one, make_batch(), POLICY) for one in (shared, plain))
    assert_equal_steps(found, expected, helpers)


def test_prompts_are_computed_once_in_each_micro_batch(group, model_folder, monkeypatch):
    rows = []
    original = group_module.plan_with_shared_prompts

    def watched(*arguments, **options):
        plan = original(*arguments, **options)
        rows.extend(len(pack(batch).tokens) for share in plan for batch in share)
        return plan

    monkeypatch.setattr(group_module, "plan_with_shared_prompts", watched)
    learner = group(model_folder, True)
    learner.log_probs("policy", make_batch())
    learner.tokens_per_micro_batch = 24
    learner.log_probs("policy", make_batch())
    assert rows[0] == TOKENS - 2 * 4 - 4 * 9
    assert sum(rows[1:]) == TOKENS - 2 * 4 - 3 * 9 and max(rows[1:]) <= 24


@pytest.mark.parametrize("tokens", [10_000, 24])
def test_log_probs_and_values_come_by_example(tokens, group, model_folder, reward_model_folder):
    critic = {"role": "critic", "model_key": "critic.path"}
    for folder, changes, compute in (
        (model_folder, {}, lambda one: one.log_probs("policy", make_batch())),
        (reward_model_folder, critic, lambda one: one.values(make_batch())),
    ):
        found = compute(group(folder, True, tokens=tokens, **changes))
        expected = compute(group(folder, False, **changes))
        assert found.keys() == expected.keys() == {example.example_id for example in make_batch()}
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=1e-4)


def test_a_step_of_the_critic_equals_plain_packing(group, reward_model_folder, helpers):
    critic = {"role": "critic", "model_key": "critic.path"}
    steps = (
        helpers.step_of(group(reward_model_folder, shared, **critic), make_batch(), ValueObjective(value_clip=0.2))
        for shared in (True, False)
    )
    assert_equal_steps(*steps, helpers)


@pytest.mark.parametrize("tokens", [10_000, 30])
def test_a_step_on_pairs_equals_plain_packing(tokens, group, model_folder, reward_model_folder, helpers):
    preference = (model_folder, {}, make_pairs(), PairObjective(loss="dpo", beta=0.3))
    scores = (reward_model_folder, {"role": "reward_model"}, scored_at_the_end(make_pairs()), RewardModelObjective())
    for folder, changes, examples, objective in (preference, scores):
        shared = group(folder, True, tokens=tokens, per_unit=2, **changes)
        plain = group(folder, False, per_unit=2, **changes)
        assert_equal_steps(*(helpers.step_of(one, examples, objective) for one in (shared, plain)), helpers)


def test_a_nan_is_told_apart_from_those_of_the_group_and_equal_steps_are_equal_bit_for_bit(
    group, model_folder, helpers
):
    first, second = group(model_folder, True), group(model_folder, True)
    examples = make_batch()
    bad = next(index for index, example in enumerate(examples) if example.example_id == "1/2")
    advantages = examples[bad].token_fields["advantages"].copy()
    advantages[-1] = np.nan
    poisoned = replace(examples[bad], token_fields={**examples[bad].token_fields, "advantages": advantages})
    skipped = first.update([[*examples[:bad], poisoned, *examples[bad + 1 :]]], POLICY)
    assert skipped["skipped"] == 1 and skipped["nonfinite_examples"] == ["1/2"]
    found, expected = (helpers.step_of(one, examples, POLICY) for one in (first, second))
    assert helpers.identical(found[1], expected[1])


def test_activation_checkpointing_changes_nothing(group, model_folder, helpers):
    plain, frugal = (group(model_folder, True, activation_checkpointing=on) for on in (False, True))
    found, expected = (helpers.step_of(one, make_batch(), POLICY) for one in (frugal, plain))
    assert_equal_steps(found, expected, helpers)
