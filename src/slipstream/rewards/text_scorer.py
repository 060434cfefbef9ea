"""What a reward service scores texts with: a function in child processes, a reward model in batches, or both.

The server's counterpart of `engine.py`, which scores trajectories for a run. A service is sent texts, so here they are
tokenized for the model: prompt and response apart, as the policy wrote them, and after a finished response the token
that ends one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.schema import RewardConfig
from slipstream.data.failure import FailureKind, RewardFailure
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectory import Trajectory
from slipstream.rewards.child import RewardResult
from slipstream.rewards.engine import add_results
from slipstream.rewards.function import ScoredText
from slipstream.rewards.model import RewardModel, RewardModelSpec
from slipstream.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_BATCH = 64
"""Texts that the model scores at a time; so many wait while the batch before them is computed."""


class TextScorer:
    """Scores one text a call; any number of calls may run at a time. To be used from one event loop."""

    def __init__(self, config: RewardConfig, model: RewardModelSpec | None, *, on_batch: Callable[[int], None]) -> None:
        """Start nothing yet. `on_batch` is told the size of each batch of the model.

        Every text is tried once: who asked tries again. Paths in `config` are relative to the working directory.
        """
        self._pool = None
        if config.function is not None:
            self._pool = RewardPool(config.model_copy(update={"on_failure": "drop_group"}))
        self._batches = None if model is None else ModelBatches(model, on_batch=on_batch)

    async def start(self) -> None:
        """Load the model and start the child processes. Raises what `RewardPool.start` and `RewardModel.load` raise."""
        if self._batches is not None:
            await self._batches.start()
        if self._pool is not None:
            await self._pool.start()

    async def score(self, text: ScoredText) -> RewardResult:
        """The result of one text: that of the function or the model, or the sum of both."""
        scorings: list[Awaitable[RewardResult]] = []
        if self._batches is not None:
            scorings.append(self._batches.score(text))
        if self._pool is not None:
            scorings.append(self._by_function(self._pool, text))
        results = await asyncio.gather(*scorings)
        return results[0] if len(results) == 1 else add_results(*results)

    async def close(self) -> None:
        """Leave no process behind. Safe to repeat."""
        if self._batches is not None:
            await self._batches.close()
        if self._pool is not None:
            await self._pool.close()

    @staticmethod
    async def _by_function(pool: RewardPool, text: ScoredText) -> RewardResult:
        [result] = await pool.score_texts([text])
        return result


class ModelBatches:
    """A reward model that scores what has come while it computed: under load in batches, else at once."""

    def __init__(self, spec: RewardModelSpec, *, on_batch: Callable[[int], None]) -> None:
        self._spec = spec
        self._model = RewardModel(spec)
        self._on_batch = on_batch
        self._waiting: asyncio.Queue[tuple[Trajectory, asyncio.Future[RewardResult]]] = asyncio.Queue()
        # One thread: the model is for one caller at a time, and the event loop goes on meanwhile.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and its tokenizer. Raises ModelError as `RewardModel.load` does."""
        loop = asyncio.get_running_loop()
        self._tokenizer, self._limit = await loop.run_in_executor(self._thread, self._load)
        self._worker = asyncio.create_task(self._work())

    async def score(self, text: ScoredText) -> RewardResult:
        """The model's result for one text. Raises whatever the model's forward pass raises."""
        trajectory = self._tokenized(text)
        length = len(trajectory.tokens)
        if not length or (self._limit is not None and length > self._limit):
            message = f"raised: prompt and response have {length} tokens, expected 1 to {self._limit or 'any number'}"
            return RewardResult(None, failure=RewardFailure(FailureKind.RAISED, message))
        future: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((trajectory, future))
        return await future

    async def close(self) -> None:
        """Stop; what is being computed is not waited for. Safe to repeat."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> tuple[PreTrainedTokenizerBase, int | None]:
        from transformers import AutoConfig

        self._model.load()
        config = AutoConfig.from_pretrained(self._spec.path).get_text_config()
        return load_tokenizer(self._spec.path), getattr(config, "max_position_embeddings", None)

    def _tokenized(self, text: ScoredText) -> Trajectory:
        """The text as the trajectory that it came from, as far as its tokens go."""
        prompt = self._tokenizer(text.prompt, add_special_tokens=False)["input_ids"]
        response = self._tokenizer(text.response, add_special_tokens=False)["input_ids"]
        if text.finish_reason == "stop":
            response = [*response, self._tokenizer.eos_token_id]
        length = len(prompt) + len(response)
        return Trajectory(
            group_id="",
            sample_index=0,
            tokens=np.asarray([*prompt, *response], dtype=np.int64),
            loss_mask=np.arange(length) >= len(prompt),
            rollout_log_probs=np.zeros(length, dtype=np.float32),
            versions=np.zeros(length, dtype=np.int64),
            finish_reason="stop" if text.finish_reason == "stop" else "length",
            prompt_text=text.prompt,
            response_text=text.response,
            label=text.label,
            fields=text.fields,
        )

    async def _work(self) -> None:
        """Score batch after batch; a caller who has gone is left out."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < LARGEST_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(trajectory, future) for trajectory, future in batch if not future.done()]
            if not batch:
                continue
            self._on_batch(len(batch))
            try:
                results = await loop.run_in_executor(self._thread, self._model.score, [each for each, _ in batch])
            except Exception as error:  # whatever the forward pass raises is for those who asked, not for this loop
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
