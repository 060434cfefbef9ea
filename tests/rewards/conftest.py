"""What the reward tests share: trajectories with a given response, and pools that are closed whatever happens."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.rewards.pool import RewardPool


def make_trajectory(response: str, *, label: Any = "2", index: int = 0, fields: dict | None = None) -> Trajectory:
    """A trajectory of two prompt tokens and two response tokens."""
    return Trajectory(
        group_id="0-0",
        sample_index=index,
        tokens=np.arange(4),
        loss_mask=np.array([False, False, True, True]),
        rollout_log_probs=np.zeros(4, dtype=np.float32),
        versions=np.array([-1, -1, 0, 0]),
        finish_reason="stop",
        prompt_text="1 + 1 =",
        response_text=response,
        label=label,
        fields=fields or {},
    )


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def with_pool(tmp_path: Path) -> Callable[..., Any]:
    """Run a coroutine function on a pool whose reward function is the source text given, in `reward.py:reward`."""

    def run(source: str, use: Callable[[RewardPool], Awaitable[Any]], **config: Any) -> Any:
        (tmp_path / "reward.py").write_text(source)
        settings = {"function": "reward.py:reward", "on_failure": "drop_group", "timeout_s": 20.0} | config

        async def main() -> Any:
            pool = RewardPool(RewardConfig(**settings), working_directory=str(tmp_path))
            try:
                return await use(pool)
            finally:
                await pool.close()

        return asyncio.run(asyncio.wait_for(main(), 60))

    return run


@pytest.fixture
def score(with_pool: Callable[..., Any]) -> Callable[..., Any]:
    """Score some responses with the reward function whose source is given; returns the results."""

    def run(source: str, *responses: str, **config: Any) -> Any:
        trajectories = [make_trajectory(response, index=i) for i, response in enumerate(responses)]
        return with_pool(source, lambda pool: pool.score(trajectories), **config)

    return run
