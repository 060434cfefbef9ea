"""From scored groups to weighted examples: by id, over the whole optimizer step, in the order of the groups."""

from typing import Any

import numpy as np
import pytest

from slipstream.config.loader import validate_config
from slipstream.config.schema import RLConfig
from slipstream.data.trajectory import Group, Prompt, TrainingExample, Trajectory
from slipstream.errors import TrainingError
from slipstream.workflows.algorithm import Algorithm
from slipstream.workflows.batch import (
    Headstart,
    TrainingBatch,
    forward_passes,
    policy_example,
    prepare,
    with_token_mean_weights,
)

PROMPT_LENGTH = 3


def trajectory(group_id: str, index: int, *, reward: float, length: int, **changes: Any) -> Trajectory:
    total = PROMPT_LENGTH + length
    values: dict[str, Any] = {
        "group_id": group_id,
        "sample_index": index,
        "tokens": np.arange(total, dtype=np.int64),
        "loss_mask": np.arange(total) >= PROMPT_LENGTH,
        "rollout_log_probs": np.where(np.arange(total) >= PROMPT_LENGTH, -0.5, 0.0).astype(np.float32),
        "versions": np.zeros(total, np.int64),
        "finish_reason": "stop",
        "prompt_text": "p",
        "response_text": "r",
        "label": None,
        "fields": {},
        "reward": reward,
    }
    return Trajectory(**values | changes)


def group(group_id: str, rewards: list[float], lengths: list[int] | None = None, **changes: Any) -> Group:
    lengths = lengths or [2] * len(rewards)
    prompt = Prompt(row=0, tokens=np.zeros(PROMPT_LENGTH, np.int64), text="p", label=None, fields={})
    members = [
        trajectory(group_id, index, reward=reward, length=length, **changes)
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(group_id=group_id, prompt=prompt, trajectories=members)


class Learner:
    """Answers with log-probs that say which example and which role they are of; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.examples: list[list[str]] = []

    def log_probs(self, role: str, examples: list[TrainingExample]) -> dict[str, Any]:
        self.asked.append(role)
        self.examples.append([example.example_id for example in examples])
        return {
            example.example_id: np.full(int(example.loss_mask.sum()), -float(number), np.float32)
            for number, example in enumerate(examples)
        }

    def values(self, examples: list[TrainingExample]) -> dict[str, Any]:
        self.asked.append("values")
        return {example.example_id: np.full(int(example.loss_mask.sum()), 0.25, np.float32) for example in examples}


def made_algorithm(groups: int = 2, **algorithm: Any) -> Algorithm:
    steps = algorithm.pop("optimizer_steps_per_batch", 1)
    epochs = algorithm.pop("epochs_per_batch", 1)
    settings = {
        "steps": 1,
        "output_dir": "out",
        "optimizer_steps_per_batch": steps,
        "epochs_per_batch": epochs,
        "model": {"path": "m"},
        "data": {"source": "d.jsonl"},
        "rollout": {"groups_per_step": groups if groups % steps == 0 else steps},
        "algorithm": algorithm,
    }
    return Algorithm(validate_config(RLConfig, settings))


def prepared(groups: list[Group], learner: Any = None, critic: Any = None, **algorithm: Any) -> TrainingBatch:
    return prepare(groups, made_algorithm(len(groups), **algorithm), learner or Learner(), critic)


def advantages(batch: TrainingBatch, example_id: str) -> list[float]:
    """The advantage of each token of a response."""
    for step in batch.optimizer_steps:
        for example in step:
            if example.example_id == example_id:
                return example.token_fields["advantages"][example.loss_mask].tolist()
    raise KeyError(example_id)


def advantage(batch: TrainingBatch, example_id: str) -> float:
    (value,) = set(advantages(batch, example_id))
    return value


def test_advantages_are_the_distance_to_the_mean_of_the_own_group() -> None:
    batch = prepared([group("0-0", [1, 0]), group("0-1", [5, 5, 2])], normalize_by_std=False)
    assert advantage(batch, "0-0/0") == pytest.approx(0.5)
    assert advantage(batch, "0-0/1") == pytest.approx(-0.5)
    assert advantage(batch, "0-1/2") == pytest.approx(-2.0)


def test_two_occurrences_of_one_prompt_are_two_groups() -> None:
    batch = prepared([group("0-0", [1, 0]), group("1-0", [0, 0])], normalize_by_std=False)
    assert [advantage(batch, f"1-0/{index}") for index in (0, 1)] == [0.0, 0.0]
    assert advantage(batch, "0-0/0") == 0.5


def test_a_constant_group_has_advantages_of_exactly_zero() -> None:
    batch = prepared([group("0-0", [0.1] * 7), group("0-1", [0, 1])])
    assert [advantage(batch, f"0-0/{index}") for index in range(7)] == [0.0] * 7
    assert batch.metrics["reward/groups_without_signal"] == 0.5


@pytest.mark.parametrize("lengths", [[1, 9], [4, 4]])
def test_every_token_of_the_step_weighs_the_same(lengths: list[int]) -> None:
    batch = prepared([group("0-0", [1, 0], lengths), group("0-1", [0, 1], [3, 7])])
    (examples,) = batch.optimizer_steps
    weights = np.concatenate([example.token_fields["weight"][example.loss_mask] for example in examples])
    assert len(set(weights.tolist())) == 1
    assert weights.sum() == pytest.approx(1.0)


def test_the_weights_of_each_optimizer_step_add_up_to_one() -> None:
    groups = [group(f"0-{index}", [0, 1], [1 + index, 2]) for index in range(4)]
    batch = prepared(groups, optimizer_steps_per_batch=2)
    assert [
        sum(float(example.token_fields["weight"][example.loss_mask].sum()) for example in step)
        for step in batch.optimizer_steps
    ] == pytest.approx([1.0, 1.0])


def test_the_batch_is_divided_by_whole_groups_in_their_order() -> None:
    groups = [group("0-0", [0, 1]), group("0-1", [0, 1, 2]), group("0-2", [0, 1]), group("0-3", [1, 0])]
    batch = prepared(groups, optimizer_steps_per_batch=2)
    ids = [[example.example_id for example in step] for step in batch.optimizer_steps]
    assert ids == [["0-0/0", "0-0/1", "0-1/0", "0-1/1", "0-1/2"], ["0-2/0", "0-2/1", "0-3/0", "0-3/1"]]


def test_one_optimizer_step_without_kl_needs_no_forward_pass() -> None:
    learner = Learner()
    batch = prepared([group("0-0", [0, 1])], learner)
    assert learner.asked == []
    fields = batch.optimizer_steps[0][0].token_fields
    assert set(fields) == {"advantages", "rollout_log_probs", "weight"}


def test_a_kl_term_asks_the_reference_and_keeps_its_answers_with_their_examples() -> None:
    learner = Learner()
    batch = prepared([group("0-0", [0, 1], [2, 3]), group("0-1", [0, 1], [1, 4])], learner, kl_coefficient=0.1)
    assert learner.asked == ["reference"]
    for number, example in enumerate(batch.optimizer_steps[0]):
        values = example.token_fields["reference_log_probs"]
        assert values[example.loss_mask].tolist() == [-float(number)] * int(example.loss_mask.sum())
        assert np.isnan(values[~example.loss_mask]).all(), "nothing reads the reference at the prompt"


def test_several_optimizer_steps_measure_the_ratio_against_the_policy_before_the_first() -> None:
    learner = Learner()
    groups = [group("0-0", [0, 1]), group("0-1", [0, 1])]
    batch = prepared(groups, learner, optimizer_steps_per_batch=2)
    assert learner.asked == ["policy"], "asked once, before the first step"
    assert batch.optimizer_steps[1][1].token_fields["old_log_probs"][-1] == -3.0


def test_the_prompt_is_not_trained_on() -> None:
    for example in prepared([group("0-0", [0, 1])]).optimizer_steps[0]:
        assert not example.loss_mask[:PROMPT_LENGTH].any()
        assert example.loss_mask[PROMPT_LENGTH:].all()


def test_metrics_describe_the_batch() -> None:
    first = group("0-0", [1.0, 0.0], [2, 4], reward_parts={"format": 1.0})
    second = group("0-1", [0.5, 0.5], [6, 8], finish_reason="length", reward_parts={"format": 0.0, "extra": 3.0})
    assert prepared([first, second]).metrics == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": np.std([1.0, 0.0, 0.5, 0.5]),
            "reward/groups_without_signal": 0.5,
            "advantage/mean": pytest.approx(np.average([0.5**0.5, -(0.5**0.5), 0, 0], weights=[2, 4, 6, 8])),
            "advantage/std": pytest.approx(np.sqrt(0.5 * 6 / 20 - (0.5**0.5 * 2 / 20) ** 2)),
            "response_length/mean": 5.0,
            "response_length/max": 8.0,
            "response_length/truncated_share": 0.5,
            "reward_part/format": 0.5,
            "reward_part/extra": 3.0,
        }
    )


def test_weights_can_be_given_to_examples_of_any_origin() -> None:
    examples = [TrainingExample(str(size), np.arange(size), np.arange(size) >= 1) for size in (2, 5)]
    first, second = with_token_mean_weights(examples)
    assert first.token_fields["weight"][1] == second.token_fields["weight"][1] == np.float32(1 / 5)


# ---------------------------------------------------------------- rewards of tokens


def test_the_reward_sits_on_the_last_policy_token_whatever_the_environment_wrote_behind_it() -> None:
    answer = group("0-0", [1.0], [5])
    mask = answer.trajectories[0].loss_mask
    mask[PROMPT_LENGTH + 2 :] = False
    batch = prepared([answer], advantage="returns", discount=0.9)
    assert advantages(batch, "0-0/0") == pytest.approx([0.9, 1.0])


def test_a_return_steps_over_what_the_environment_wrote_in_between() -> None:
    answer = group("0-0", [1.0], [6])
    mask = answer.trajectories[0].loss_mask
    mask[PROMPT_LENGTH + 2 : PROMPT_LENGTH + 4] = False
    batch = prepared([answer], advantage="returns")
    assert advantages(batch, "0-0/0") == [1.0] * 4


def test_a_kl_in_the_reward_is_charged_to_each_token_with_the_coefficient() -> None:
    learner = Learner()
    learner.log_probs = lambda role, examples: {  # type: ignore[method-assign]
        example.example_id: np.full(int(example.loss_mask.sum()), {"policy": -1.0, "reference": -1.5}[role], np.float32)
        for example in examples
    }
    settings = {"kl_coefficient": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
    batch = prepared([group("0-0", [1.0], [3])], learner, advantage="returns", **settings)
    assert advantages(batch, "0-0/0") == pytest.approx([1 - 0.15, 1 - 0.1, 1 - 0.05])
    assert batch.measured_kl == batch.metrics["kl/in_reward"] == pytest.approx(0.5)
    assert prepared([group("0-0", [0, 1])], learner, kl_coefficient=0.1).measured_kl is None, "the learner measures it"


def test_a_critic_gives_values_and_gets_returns_that_whitening_does_not_touch() -> None:
    critic = Learner()
    batch = prepared([group("0-0", [1.0, 0.0], [2, 1])], None, critic, advantage="gae", whiten_advantages=True)
    assert critic.asked == ["values"]
    first, second = batch.optimizer_steps[0]
    assert first.token_fields["returns"][first.loss_mask].tolist() == pytest.approx([1.0, 1.0])
    assert second.token_fields["returns"][second.loss_mask].tolist() == pytest.approx([0.0])
    assert first.token_fields["old_values"][first.loss_mask].tolist() == [0.25, 0.25]
    assert (batch.metrics["advantage/mean"], batch.metrics["advantage/std"]) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_the_greedy_answer_is_the_baseline_and_is_never_trained_on() -> None:
    first, second = group("0-0", [1.0, 0.0]), group("0-1", [1.0, 1.0])
    for each, reward in ((first, 0.25), (second, 1.0)):
        each.baseline = trajectory(each.group_id, -1, reward=reward, length=2)
    batch = prepared([first, second], advantage="greedy_baseline")
    assert [advantage(batch, f"0-0/{index}") for index in (0, 1)] == [0.75, -0.25]
    assert [advantage(batch, f"0-1/{index}") for index in (0, 1)] == [0.0, 0.0]
    assert len(batch.optimizer_steps[0]) == 4


# ---------------------------------------------------------------- a teacher


def graded(role: str, examples: list[TrainingExample]) -> dict[str, Any]:
    """The teacher finds every token but the last likelier than the policy does."""
    found = {}
    for example in examples:
        found[example.example_id] = np.full(int(example.loss_mask.sum()), -1.0, np.float32)
        if role == "teacher":
            found[example.example_id] += np.array([0.5] * (len(found[example.example_id]) - 1) + [-2.0], np.float32)
    return found


def test_a_teacher_grades_each_token_by_its_log_ratio_to_the_policy_before_the_update() -> None:
    learner = Learner()
    learner.log_probs = graded  # type: ignore[assignment]
    answers = [group("0-0", [0.0, 1.0], [3, 2])]
    batch = prepared(answers, learner, preset="distillation", teacher="m")
    assert advantages(batch, "0-0/0") == pytest.approx([0.5, 0.5, -2.0])
    assert advantages(batch, "0-0/1") == pytest.approx([0.5, -2.0])
    assert batch.metrics["teacher/reverse_kl"] == pytest.approx(-(3 * 0.5 - 2 * 2.0) / 5)
    assert batch.metrics["reward/mean"] == 0.5, "a reward that is there is measured"
    assert batch.optimizer_steps[0][0].token_fields["old_log_probs"][-1] == -1.0


def test_answers_that_nothing_scored_are_learned_from_and_have_no_metrics_of_rewards() -> None:
    learner = Learner()
    learner.log_probs = graded  # type: ignore[assignment]
    answers = [group("0-0", [0.0, 0.0], [3, 2])]
    for answer in answers[0].trajectories:
        answer.reward = None
    batch = prepared(answers, learner, preset="distillation", teacher="m")
    assert advantages(batch, "0-0/1") == pytest.approx([0.5, -2.0])
    assert not [name for name in batch.metrics if name.startswith("reward")]
    with pytest.raises(ValueError, match="must have a finite reward"):
        prepared(answers)


# ---------------------------------------------------------------- shaping, filtering, passes


def test_shaped_rewards_make_the_advantages_and_the_raw_ones_stay_on_record() -> None:
    answers = group("0-0", [1.0, 0.0], reward_parts={"right": 0.5, "form": 0.25})
    answers.trajectories[1].reward_parts = {"right": 0.0, "form": 0.0}
    batch = prepared([answers], normalize_by_std=False, shaping={"weights": {"right": 2.0, "form": 4.0}})
    assert [advantage(batch, f"0-0/{index}") for index in (0, 1)] == [1.0, -1.0]
    assert (batch.metrics["reward/mean"], batch.metrics["reward/shaped_mean"]) == (0.5, 1.0)
    assert batch.metrics["shaping/weights"] == 0.5


def test_responses_cut_at_the_limit_leave_numerator_and_denominator() -> None:
    whole = group("0-0", [1.0, 0.0, 0.5, 0.0], [3, 6, 6, 6])
    for cut in whole.trajectories[1:]:
        cut.finish_reason = "length"
    (examples,) = prepared([whole], overlong_filtering=True).optimizer_steps
    assert [example.example_id for example in examples] == ["0-0/0"]
    assert examples[0].token_fields["weight"][examples[0].loss_mask].tolist() == pytest.approx([1 / 3] * 3)


def test_a_group_of_which_nothing_is_left_is_filtered_with_its_reason() -> None:
    cut, whole = group("0-0", [1.0, 0.0], finish_reason="length"), group("0-1", [1.0, 0.0])
    batch = prepared([cut, whole], overlong_filtering=True)
    assert batch.filtered == {"0-0": "overlong: every response was cut at the limit"}
    (examples,) = batch.optimizer_steps
    assert {example.example_id for example in examples} == {"0-1/0", "0-1/1"}


def test_a_step_of_nothing_but_filtered_responses_has_no_loss_token() -> None:
    (examples,) = prepared([group("0-0", [1.0, 0.0], finish_reason="length")], overlong_filtering=True).optimizer_steps
    assert [int(example.loss_mask.sum()) for example in examples] == [0]


def test_passes_repeat_the_optimizer_steps() -> None:
    groups = [group("0-0", [0, 1]), group("0-1", [1, 0])]
    batch = prepared(groups, optimizer_steps_per_batch=2, epochs_per_batch=3)
    ids = [[example.example_id for example in step] for step in batch.optimizer_steps]
    assert ids == [["0-0/0", "0-0/1"], ["0-1/0", "0-1/1"]] * 3
    assert batch.parts == 2


def test_what_was_computed_for_a_group_that_came_early_is_not_computed_again() -> None:
    algorithm, learner, headstart = made_algorithm(kl_coefficient=0.1), Learner(), Headstart()
    groups = [group("g0", [1.0, 0.0]), group("g1", [0.0, 1.0])]
    whole = prepare(groups, algorithm, Learner())
    passes = forward_passes(algorithm, learner, None)  # type: ignore[arg-type]
    headstart.compute(passes, [policy_example(trajectory) for trajectory in groups[0].trajectories])
    batch = prepare(groups, algorithm, learner, headstart=headstart)  # type: ignore[arg-type]
    assert learner.examples == [["g0/0", "g0/1"], ["g1/0", "g1/1"]]
    assert [example.example_id for example in batch.optimizer_steps[0]] == [
        example.example_id for example in whole.optimizer_steps[0]
    ]


def test_a_group_that_was_learned_from_early_has_the_weights_it_has_in_the_whole_step() -> None:
    algorithm = made_algorithm(preset="dr_grpo")
    assert algorithm.learns_by_group
    groups = [group("g0", [1.0, 0.0], lengths=[2, 5]), group("g1", [0.0, 1.0], lengths=[3, 1])]
    [whole] = prepare(groups, algorithm, Learner()).optimizer_steps  # type: ignore[arg-type]
    headstart = Headstart()
    [early] = prepare(groups[:1], algorithm, Learner(), step_sequences=4).optimizer_steps  # type: ignore[arg-type]
    headstart.learned.update(example.example_id for example in early)
    [rest] = prepare(groups, algorithm, Learner(), headstart=headstart).optimizer_steps  # type: ignore[arg-type]
    for found, expected in zip([*early, *rest], whole, strict=True):
        assert found.example_id == expected.example_id
        for name, values in expected.token_fields.items():
            np.testing.assert_array_equal(found.token_fields[name], values)


def test_a_response_without_a_token_is_refused_where_its_step_was_begun_without_it() -> None:
    groups = [group("g0", [1.0, 0.0]), group("g1", [0.0, 1.0], lengths=[0, 2])]
    with pytest.raises(TrainingError, match="a response without a token"):
        prepare(groups, made_algorithm(), Learner(), headstart=Headstart(learned={"g0/0", "g0/1"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"preset": "dr_grpo"}, True),
        ({"preset": "rloo"}, True),
        ({"preset": "gspo"}, True),
        ({"preset": "grpo"}, False),
        ({"preset": "ppo"}, False),
        ({"preset": "dr_grpo", "whiten_advantages": True}, False),
        ({"preset": "dr_grpo", "overlong_filtering": True}, False),
        ({"preset": "dr_grpo", "shaping": {"normalize": True}}, False),
        ({"preset": "dr_grpo", "shaping": {"function": "m:f"}}, False),
        ({"preset": "dr_grpo", "advantage": "m:f"}, False),
    ],
)
def test_groups_are_learned_from_one_by_one_only_where_nothing_depends_on_the_others(
    settings: dict[str, Any], expected: bool
) -> None:
    assert made_algorithm(**settings).learns_by_group is expected


def test_several_optimizer_steps_need_the_whole_batch() -> None:
    assert not made_algorithm(groups=2, optimizer_steps_per_batch=2, preset="dr_grpo").learns_by_group
