"""Where the schedule of the learning rate ends: at the last optimizer step that is really taken."""

from typing import Any

import pytest

from slipstream.algorithms.schedule import learning_rate_factor
from slipstream.config.loader import validate_config
from slipstream.config.schema import RLConfig, SFTConfig
from slipstream.workflows.engines import _optimizer_steps

DATA = {"source": "rows.jsonl"}


def rl(**settings: Any) -> RLConfig:
    values = {"steps": 4, "output_dir": "run", "model": {"path": "m"}, "data": DATA, "reward": {"function": "f:f"}}
    return validate_config(RLConfig, values | {"rollout": {"groups_per_step": 6, "samples_per_prompt": 2}} | settings)


def last_share(config: RLConfig, taken: int) -> float:
    """The factor of the last of the optimizer steps that a run takes."""
    total = _optimizer_steps(config, waits_for_critic=True)
    return learning_rate_factor(taken - 1, schedule="cosine", warmup_steps=2, total_steps=total, final_share=0.1)


@pytest.mark.parametrize(("per_batch", "epochs"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_every_update_of_every_batch_counts(per_batch: int, epochs: int) -> None:
    config = rl(optimizer_steps_per_batch=per_batch, epochs_per_batch=epochs)
    taken = 4 * per_batch * epochs
    assert _optimizer_steps(config, waits_for_critic=True) == taken
    assert last_share(config, taken) == 0.1 < last_share(config, taken - 1)


def test_the_policy_waits_for_the_critic_and_the_critic_for_nobody() -> None:
    config = rl(algorithm={"preset": "ppo"}, critic={"warmup_steps": 1}, epochs_per_batch=2)
    assert _optimizer_steps(config, waits_for_critic=True) == 6
    assert _optimizer_steps(config, waits_for_critic=False) == 8
    assert last_share(config, 6) == 0.1


def test_supervised_training_counts_its_steps_whatever_the_rows_and_the_batch() -> None:
    """23 updates of 128 from a thousand rows, three times over, are 23 steps: epochs do not round."""
    data = DATA | {"response_key": "response"}
    values = {"steps": 23, "batch_size": 128, "output_dir": "run", "model": {"path": "m"}, "data": data}
    assert _optimizer_steps(validate_config(SFTConfig, values), waits_for_critic=True) == 23
