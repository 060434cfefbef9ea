"""Sampled trajectories that a person can read: `rollouts/step-000001.jsonl`, one line a trajectory.

For looking at, not for training: tokens and log-probs are left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.data.trajectory import Trajectory
from slipstream.observe.files import to_json, write_text_atomically


def write_rollouts(folder: Path, step: int, *, trajectories: Sequence[Trajectory]) -> Path:
    """Write `trajectories` as the readable file of `step` (replacing it, on resume) and return its path.

    Raises TrainingError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.jsonl"
    write_text_atomically(path, "".join(to_json(_readable(trajectory)) + "\n" for trajectory in trajectories))
    return path


def _readable(trajectory: Trajectory) -> dict[str, Any]:
    versions = trajectory.versions[trajectory.loss_mask]
    return {
        "trajectory": trajectory.trajectory_id,
        "prompt": trajectory.prompt_text,
        "response": trajectory.response_text,
        "label": trajectory.label,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason,
        "response_length": trajectory.response_length,
        "policy_versions": [int(versions.min()), int(versions.max())] if versions.size else None,
        "seconds": trajectory.seconds,
    }
