"""Readable rollouts."""

import json
from pathlib import Path

import numpy as np
import pytest

from slipstream.data.trajectory import Trajectory
from slipstream.observe.rollouts import write_rollouts


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
        answer="four",
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
        "answer": "four",
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
