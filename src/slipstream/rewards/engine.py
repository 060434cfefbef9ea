"""The reward engine: the face of the reward pool inside its Ray actor.

A plain class, which the cluster code wraps. All methods are coroutines, so that the groups of a rollout batch are
scored as they arrive, while others are still being generated.
"""

from collections.abc import Sequence

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.rewards.child import RewardResult
from slipstream.rewards.pool import RewardPool


class RewardEngine:
    """Scores trajectories for the controller. See `RewardPool` for limits, failures and errors raised."""

    def __init__(
        self, config: RewardConfig, function: bytes | None = None, working_directory: str | None = None
    ) -> None:
        """`function` is a callable from `pickle_function`; None takes `config.function`. Paths in the latter are
        relative to `working_directory`, which should be the one the user started the run in."""
        self._pool = RewardPool(config, function, working_directory=working_directory)

    async def start(self) -> None:
        """Start the child processes and resolve the function in them; the controller calls it before the first step."""
        await self._pool.start()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return one result per trajectory, in their order; the controller calls it once per finished group."""
        return await self._pool.score(trajectories)

    async def shutdown(self) -> None:
        """Leave no process behind. Safe to repeat."""
        await self._pool.close()
