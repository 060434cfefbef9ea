"""From scored groups to weighted examples: by id, over the whole optimizer step, in the order of the groups."""

from typing import Any

import numpy as np
import pytest

from slipstream.config.loader import validate_config
from slipstream.config.schema import RLConfig
from slipstream.data.trajectory import Group, Prompt, TrainingExample, Trajectory
from slipstream.workflows.batch import TrainingBatch, prepare, with_token_mean_weights

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

    def log_probs(self, role: str, examples: list[TrainingExample]) -> dict[str, Any]:
        self.asked.append(role)
        return {
            example.example_id: np.full(int(example.loss_mask.sum()), -float(number), np.float32)
            for number, example in enumerate(examples)
        }


def prepared(groups: list[Group], learner: Any = None, **algorithm: Any) -> TrainingBatch:
    steps = algorithm.pop("optimizer_steps_per_batch", 1)
    settings = {
        "steps": 1,
        "output_dir": "out",
        "optimizer_steps_per_batch": steps,
        "model": {"path": "m"},
        "data": {"source": "d.jsonl"},
        "rollout": {"groups_per_step": len(groups) if len(groups) % steps == 0 else steps},
        "algorithm": algorithm,
    }
    return prepare(groups, validate_config(RLConfig, settings), learner or Learner())


def advantage(batch: TrainingBatch, example_id: str) -> float:
    for step in batch.optimizer_steps:
        for example in step:
            if example.example_id == example_id:
                values = example.token_fields["advantages"][example.loss_mask]
                assert len(set(values.tolist())) == 1, "one advantage for all tokens of a response"
                return float(values[0])
    raise KeyError(example_id)


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
