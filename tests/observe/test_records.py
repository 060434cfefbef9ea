"""Evaluations and readable rollouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.data.trajectory import Trajectory
from slipstream.observe.evaluations import (
    Evaluation,
    EvaluationSample,
    EvaluationWriter,
    pair_samples,
    read_evaluations,
)
from slipstream.observe.rollouts import write_rollouts


def make_evaluation(step: int, prompts: list[str]) -> Evaluation:
    samples = [EvaluationSample(prompt, None, f"answer {step}", None) for prompt in prompts]
    return Evaluation(step, step, 0.1 + step, 0.2, 100, 5.5, 0.0, samples)


def test_evaluations_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    writer = EvaluationWriter(path)
    written = [make_evaluation(step, ["a", "b"]) for step in (0, 5, 10)]
    for evaluation in written:
        writer.write(evaluation)
    assert read_evaluations(path) == written
    writer.truncate_after(5)
    assert read_evaluations(path) == written[:2]
    writer.close()
    assert read_evaluations(tmp_path / "none.jsonl") == []


def test_a_line_of_an_evaluation_has_the_documented_names(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    EvaluationWriter(path).write(make_evaluation(1, ["a"]))
    assert json.loads(path.read_text()) == {
        "step": 1,
        "policy_version": 1,
        "sampled_accuracy": 1.1,
        "greedy_accuracy": 0.2,
        "prompts": 100,
        "mean_length": 5.5,
        "truncated_share": 0.0,
        "samples": [{"prompt": "a", "label": None, "response": "answer 1", "reward": None}],
    }


def test_samples_are_paired_by_their_prompt_not_by_their_position() -> None:
    pairs = pair_samples(make_evaluation(0, ["a", "b", "c"]), make_evaluation(9, ["c", "x", "a"]))
    assert [(before.prompt, after.prompt) for before, after in pairs] == [("c", "c"), ("a", "a")]
    assert pairs[0][0].response == "answer 0" and pairs[0][1].response == "answer 9"


def make_trajectory(*, mask: list[bool], reward: float | None) -> Trajectory:
    length = len(mask)
    return Trajectory(
        group_id="0-7",
        sample_index=2,
        tokens=np.arange(length),
        loss_mask=np.array(mask),
        rollout_log_probs=np.zeros(length, np.float32),
        versions=np.array([3 + i if m else -1 for i, m in enumerate(mask)]),
        finish_reason="stop",
        prompt_text="2 + 2?\n",
        response_text="4 \u2713",
        label=np.int64(4),
        fields={},
        reward=reward,
        reward_parts={"correct": 1.0},
        seconds=0.5,
    )


def test_a_rollout_file_is_readable_and_has_no_arrays(tmp_path: Path) -> None:
    trajectories = [make_trajectory(mask=[False, True, True], reward=1.0), make_trajectory(mask=[False], reward=None)]
    path = write_rollouts(tmp_path / "rollouts", 12, trajectories=trajectories)
    assert path.name == "step-000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "trajectory": "0-7/2",
        "prompt": "2 + 2?\n",
        "response": "4 \u2713",
        "label": "4",
        "reward": 1.0,
        "reward_parts": {"correct": 1.0},
        "finish_reason": "stop",
        "response_length": 2,
        "policy_versions": [4, 5],
        "seconds": 0.5,
    }
    assert (second["policy_versions"], second["reward"], second["response_length"]) == (None, None, 0)
    assert "\u2713" in path.read_text(), "text is written as it is, not as escapes"


def test_a_rollout_file_is_replaced_when_its_step_runs_again(tmp_path: Path) -> None:
    for count in (3, 1):
        path = write_rollouts(tmp_path, 1, trajectories=[make_trajectory(mask=[True], reward=0.0)] * count)
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_never_reaches_the_file(tmp_path: Path, reward: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_rollouts(tmp_path, 1, trajectories=[make_trajectory(mask=[True], reward=reward)])
    assert list(tmp_path.iterdir()) == []
