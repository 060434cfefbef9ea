"""The reward engine: a function or a service, a reward model, or a sum of both, behind one face inside a Ray actor.

A plain class, which the cluster code wraps. All methods are coroutines, so that responses are scored as they end, while
others are still being generated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, TypeVar

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.rewards.child import RewardResult
from slipstream.rewards.model import RewardModel, RewardModelSpec
from slipstream.rewards.pool import RewardPool

Answer = TypeVar("Answer")


class Scorer(Protocol):
    """What scores by text: the pool of child processes, or a service over HTTP."""

    async def start(self) -> None:
        """Make sure that it can score; raises RewardError or ConfigError if not."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """One result per trajectory, in their order."""

    async def close(self) -> None:
        """Leave nothing behind. Safe to repeat."""


class RewardEngine:
    """Scores trajectories for the controller. See `RewardPool` and `RewardService` for limits and errors raised."""

    def __init__(
        self,
        config: RewardConfig,
        function: bytes | None = None,
        working_directory: str | None = None,
        model: RewardModelSpec | None = None,
    ) -> None:
        """`function` is a callable from `pickle_function`; None takes `config.function`. Paths in the latter are
        relative to `working_directory`, which should be the one the user started the run in. Without any of them, and
        without a service in `config`, answers have no reward."""
        self._model = None if model is None else RewardModel(model)
        self._scorer: Scorer | None = None
        self._part = "function"
        if config.urls:
            from slipstream.rewards.remote import RewardService  # HTTP is loaded where it is used

            self._scorer = RewardService(config)
            self._part = "service"
        elif function is not None or config.function is not None:
            self._scorer = RewardPool(config, function, working_directory=working_directory)
        # One thread: the model is for one caller at a time, and the event loop goes on meanwhile.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")

    async def start(self) -> None:
        """Load the model, start the child processes or look for the service; called before the first step.

        Raises ModelError for a model that cannot score, RewardError or ConfigError for a function or a service.
        """
        if self._scorer is not None:
            await self._scorer.start()
        if self._model is not None:
            await self._in_thread(self._model.load)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return one result per trajectory, in their order.

        The controller calls it for each response that has ended. A model's score is then computed in a forward pass of
        the response's own: it depends on nothing but the tokens, to the last bit, whatever ended before or beside it.
        """
        scorers: list[Awaitable[list[RewardResult]]] = []
        if self._model is not None:
            scorers.append(self._in_thread(self._model.score, trajectories))
        if self._scorer is not None:
            scorers.append(self._scorer.score(trajectories))
        results = await asyncio.gather(*scorers)
        if not results:
            return [RewardResult(None) for _ in trajectories]
        if len(results) == 1:
            return results[0]
        return [add_results(*pair, part=self._part) for pair in zip(*results, strict=True)]

    async def shutdown(self) -> None:
        """Leave no process behind. Safe to repeat."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._scorer is not None:
            await self._scorer.close()

    async def _in_thread(self, function: Callable[..., Answer], *arguments: object) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def add_results(by_model: RewardResult, by_other: RewardResult, *, part: str = "function") -> RewardResult:
    """The sum of both, with the parts of the model and `part` as its parts, and those of the other as `part/NAME`.

    If one of them failed there is no reward.
    """
    seconds = by_model.seconds + by_other.seconds
    if by_model.reward is None or by_other.reward is None:
        return RewardResult(None, failure=by_other.failure or by_model.failure, seconds=seconds)
    parts = {**by_model.parts, "model": by_model.reward, part: by_other.reward}
    parts |= {f"{part}/{name}": value for name, value in by_other.parts.items()}
    return replace(by_other, reward=by_model.reward + by_other.reward, parts=parts, seconds=seconds)
