"""Child processes that score responses with the configured reward function.

Stands between the rollout engines and the controller: trajectories go in as they finish, rewards or typed failures
come out, in the order they went in. One call is one round trip to one child, a fraction of a millisecond, so that a
call that raises, hangs, crashes or eats memory costs its own trajectory and no other. What a failure means for the
group and the run is decided by the controller; here a failed call is only repeated, if so configured.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import cloudpickle

from slipstream.config.schema import RewardConfig
from slipstream.data.trajectory import Trajectory
from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.child import RewardChild, RewardResult
from slipstream.rewards.function import RewardFunction, ScoredText
from slipstream.rewards.worker import WorkerSetup


def pickle_function(function: RewardFunction) -> bytes:
    """Return a callable as bytes that a child can read, closures and lambdas as well.

    Raises RewardError if the callable holds something that cannot leave its process, such as an open file.
    """
    try:
        pickled: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever the __reduce__ of an object it holds raises
        raise RewardError(
            f"the reward function {function!r} cannot be sent to another process: {error}; give it by import path"
        ) from error
    return pickled


class RewardPool:
    """`config.workers` child processes behind one method, `score`. To be used from one event loop."""

    def __init__(
        self, config: RewardConfig, function: bytes | None = None, *, working_directory: str | None = None
    ) -> None:
        """Start nothing yet.

        `function` is a callable from `pickle_function` and goes before `config.function`, which names one.
        `working_directory` is where relative paths and local modules are looked for; by default the current one.
        Raises ConfigError if there is neither a callable nor a name.
        """
        source = function or config.function
        if source is None:
            raise ConfigError("reward.function must name what scores a response, found null")
        setup = WorkerSetup(
            function=source,
            options=config.options,
            timeout_s=config.timeout_s,
            memory_bytes=config.memory_bytes,
        )
        directory = os.getcwd() if working_directory is None else working_directory
        self._attempts = 1 + (config.retries if config.on_failure == "retry" else 0)
        self._children = [RewardChild(setup, directory) for _ in range(config.workers)]
        self._free: asyncio.LifoQueue[RewardChild] = asyncio.LifoQueue()
        for child in self._children:
            self._free.put_nowait(child)
        self._closed = False

    @property
    def process_ids(self) -> list[int]:
        """The children that run now."""
        return [child.pid for child in self._children if child.pid is not None]

    async def start(self) -> None:
        """Start all children and have them import the function, calling it not once.

        To be called before the first `score`; without it they start when they are needed. Raises ConfigError if the
        function does not exist or its options do not fit, and RewardError, with the module's own error, if it cannot
        be imported.
        """
        self._check_open()
        outcomes = await asyncio.gather(*(child.ensure_running() for child in self._children), return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                await self.close()
                raise outcome

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardResult]:
        """Return one result per trajectory, in their order. Several calls may run at the same time.

        Raises RewardError if the pool is closed, or if a killed child cannot be started again.
        """
        return await self.score_texts([scored_text(trajectory) for trajectory in trajectories])

    async def score_texts(self, texts: Sequence[ScoredText]) -> list[RewardResult]:
        """The same for responses without a trajectory behind them. Raises as `score` does."""
        self._check_open()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(text)) for text in texts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Kill all children and wait until they are gone. Calls in progress raise RewardError. Safe to repeat."""
        self._closed = True
        await asyncio.gather(*(child.kill() for child in self._children))

    async def _score(self, text: ScoredText) -> RewardResult:
        """One trajectory's result, after as many attempts as are configured."""
        seconds = 0.0
        for _ in range(self._attempts):
            child = await self._free.get()
            try:
                self._check_open()
                result = await child.call(text)
            finally:
                self._free.put_nowait(child)
            self._check_open()  # a call that ended because of close() has not failed
            seconds += result.seconds
            if result.failure is None:
                break
        return replace(result, seconds=seconds)

    def _check_open(self) -> None:
        if self._closed:
            raise RewardError("the reward pool is closed; it cannot score any more")


def scored_text(trajectory: Trajectory) -> ScoredText:
    """Return what a reward function is shown of a trajectory."""
    return ScoredText(
        prompt=trajectory.prompt_text,
        response=trajectory.response_text,
        label=trajectory.label,
        fields=trajectory.fields,
        finish_reason=trajectory.finish_reason,
        response_length=trajectory.response_length,
        turns=trajectory.turns,
        response_tokens=tuple(trajectory.tokens[trajectory.loss_mask].tolist()),
    )
