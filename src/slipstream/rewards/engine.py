"""The reward engine: a function in child processes, a reward model, or both, behind one face inside a Ray actor.

A plain class, which the cluster code wraps. All methods are coroutines, so that the groups of a rollout batch are
scored as they arrive, while others are still being generated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.rewards.child import RewardResult
from slipstream.rewards.model import RewardModel, RewardModelSpec
from slipstream.rewards.pool import RewardPool

Answer = TypeVar("Answer")


class RewardEngine:
    """Scores trajectories for the controller. See `RewardPool` for limits, failures and errors raised."""

    def __init__(
        self,
        config: RewardConfig,
        function: bytes | None = None,
        working_directory: str | None = None,
        model: RewardModelSpec | None = None,
    ) -> None:
        """`function` is a callable from `pickle_function`; None takes `config.function`. Paths in the latter are
        relative to `working_directory`, which should be the one the user started the run in. With `model` there need
        not be a function."""
        self._model = None if model is None else RewardModel(model)
        self._pool: RewardPool | None = None
        if self._model is None or function is not None or config.function is not None:
            self._pool = RewardPool(config, function, working_directory=working_directory)
        # One thread: the model is for one caller at a time, and the event loop goes on meanwhile.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")

    async def start(self) -> None:
        """Load the model, start the child processes and resolve the function in them; called before the first step.

        Raises ModelError for a model that cannot score.
        """
        if self._pool is not None:
            await self._pool.start()
        if self._model is not None:
            await self._in_thread(self._model.load)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return one result per trajectory, in their order; the controller calls it once per finished group."""
        scorers: list[Awaitable[list[RewardResult]]] = []
        if self._model is not None:
            scorers.append(self._in_thread(self._model.score, trajectories))
        if self._pool is not None:
            scorers.append(self._pool.score(trajectories))
        results = await asyncio.gather(*scorers)
        return [add_results(*pair) for pair in zip(*results, strict=True)] if len(results) == 2 else results[0]

    async def shutdown(self) -> None:
        """Leave no process behind. Safe to repeat."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await self._pool.close()

    async def _in_thread(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def add_results(by_model: RewardResult, by_function: RewardResult) -> RewardResult:
    """The sum of both, with `model` and `function` as its parts, and those of the function as `function/NAME`.

    If one of them failed there is no reward.
    """
    seconds = by_model.seconds + by_function.seconds
    failure = by_function.failure or by_model.failure
    if by_model.reward is None or by_function.reward is None:
        return RewardResult(None, failure=failure, seconds=seconds)
    parts = {"model": by_model.reward, "function": by_function.reward}
    parts |= {f"function/{name}": value for name, value in by_function.parts.items()}
    return RewardResult(by_model.reward + by_function.reward, parts, seconds=seconds)
