"""The face of a rollout engine: what generates responses and receives new weights.

`VLLMEngine` and `TransformersEngine` have it. Each is a plain class that the cluster code wraps as a Ray actor; the
controller calls it. One engine holds one copy of the policy. This module leaves out where requests come from, how
many may be under way (admission), and what is done with the answers.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from slipstream.data.trajectory import FloatArray, IntArray
from slipstream.errors import EngineError, WeightSyncError
from slipstream.rollout.messages import (
    EngineStatistics,
    GroupRequest,
    ResponseResult,
    RolloutEngineSpec,
    SamplingParameters,
)
from slipstream.weights.plan import WeightPlan

Item = TypeVar("Item")


class RolloutEngine(Protocol):
    """Generates groups of responses with the policy of a known version.

    The caller holds the deadline of each call (`cluster.start_timeout_s` for `start`, `cluster.call_timeout_s` for
    the others). Every method raises EngineError, at once, if the engine behind it has died or refuses the call; after
    a dead engine every later call raises too.
    """

    async def start(self) -> dict[str, Any]:
        """Load the model. Called once, first. Returns facts for the log: seconds, pid, end_token_ids and others.

        Raises EngineError if the model cannot be loaded or the engine does not come up.
        """
        ...

    def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> AsyncIterator[list[ResponseResult]]:
        """Answer all requests; yields responses when they have ended. Called by the rollout loop.

        Those that end together come together, since each message between processes takes longer than a short answer.

        All requests of one call are admitted before the first token is decoded and the engine starts from an empty
        prefix cache, so on one kind of machine tokens and log-probs are, bit for bit, a function of requests, sampling
        parameters and weights: the order in which they are yielded is not part of that promise. A second call while
        one is under way is allowed and shares the engine with it; its composition of batches then depends on time.

        Token ids are those the engine sampled, never text that was tokenized again. A response ends with "stop" at any
        end token of the tokenizer or of the model's generation_config (the token is part of the response and has a
        log-prob), or at a stop string (whose tokens are kept); with "length" after `max_response_tokens`, or where
        prompt and response reach `max_sequence_tokens`. Raises EngineError, before anything is generated, for a prompt
        that is empty, has an unknown token id or leaves no room for a response, and for several greedy samples.
        """
        ...

    async def begin_update(self) -> None:
        """Stop generating between two tokens and keep what is under way. Called by the publish, on every engine.

        What is under way goes on under the new weights; `versions` says of each token which version chose it. Its keys
        and values are those of the old weights up to here, unless the engine was started to compute them anew
        (`recompute_cache_on_update`); no other sequence ever uses them. Calls of `generate` and `probe` from here on
        wait for `finish_update`. After an update that failed they raise WeightSyncError until another one, begun anew,
        has succeeded; what was under way raises it too.
        """
        ...

    async def load_bucket(self, plan: WeightPlan, index: int) -> list[dict[str, int]]:
        """Take bucket `index` of the plan from its channel; returns the checksum of each tensor as it arrived.

        One mapping for each worker of the engine, by rank: every worker takes whole tensors, whatever part it keeps.
        Called once for each bucket, between `begin_update` and `finish_update`: with shared memory after the learner
        has filled the bucket, with gloo while it does. Raises WeightSyncError if a tensor does not fit the model.
        """
        ...

    async def finish_update(self, version: int) -> None:
        """Put the new weights in force as policy `version` and generate again, without anything cached before.

        Raises WeightSyncError if a bucket of the plan has not been loaded.
        """
        ...

    async def probe(self, tokens: IntArray) -> FloatArray:
        """Log-probs [L - 1] at temperature 1 of tokens[1:], each given all before it, of a sequence of L tokens.

        Called after a publish: the trainer computes the same numbers from its own weights.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the keys and values of finished sequences."""
        ...

    async def statistics(self) -> EngineStatistics:
        """Counters since start. Called by the controller once a step."""
        ...

    async def shutdown(self) -> None:
        """Stop, and leave no process and no shared memory behind. Safe to call twice and before `start`."""
        ...


def check_requests(
    requests: Sequence[GroupRequest], sampling: SamplingParameters, spec: RolloutEngineSpec, *, vocabulary_size: int
) -> None:
    """Raise EngineError for a request that no engine could answer, before any of them is admitted."""
    seen: set[str] = set()
    for request in requests:
        where = f"rollout engine {spec.engine_index}, group {request.group_id}"
        if request.group_id in seen:
            raise EngineError(f"{where}: two requests of one call have this group id; ids must be unique")
        seen.add(request.group_id)
        check_tokens(request.prompt_tokens, spec, where=where, vocabulary_size=vocabulary_size)
        if request.samples < 1:
            raise EngineError(f"{where}: {request.samples} samples asked for, expected at least 1")
        if sampling.temperature == 0 and request.samples > 1:
            raise EngineError(
                f"{where}: {request.samples} samples at temperature 0 would all be the same response; ask for 1"
            )


def check_tokens(tokens: IntArray, spec: RolloutEngineSpec, *, where: str, vocabulary_size: int) -> None:
    """Raise EngineError unless `tokens` is a sequence that the model can continue by at least one token."""
    limit = spec.max_sequence_tokens
    if not 1 <= len(tokens) < limit:
        raise EngineError(
            f"{where}: the prompt has {len(tokens)} tokens; expected 1 to {limit - 1}, as prompt and response together "
            f"have at most {limit} tokens here; lower data.max_prompt_tokens or use a model with a longer context"
        )
    if np.min(tokens) < 0 or np.max(tokens) >= vocabulary_size:
        raise EngineError(
            f"{where}: the prompt has token ids from {np.min(tokens)} to {np.max(tokens)}, but the model's vocabulary "
            f"has {vocabulary_size} entries; the tokenizer does not belong to this model"
        )


def response_limit(request: GroupRequest, sampling: SamplingParameters, spec: RolloutEngineSpec) -> int:
    """Longest response to this request: what was asked for, or what the context leaves room for."""
    return min(sampling.max_response_tokens, spec.max_sequence_tokens - len(request.prompt_tokens))


def missing_buckets(plan: WeightPlan | None, loaded: set[int]) -> list[int]:
    """Indices of the plan's buckets that have not been loaded."""
    return [index for index in range(len(plan.buckets) if plan else 0) if index not in loaded]


async def taken(queue: asyncio.Queue[Item]) -> list[Item]:
    """Wait for something in a queue; returns all that is in it by then."""
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items


class UpdateGate:
    """Keeps generation and weight update apart, and generation away from weights that are only half new."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._is_updating = False
        self._failure: str | None = None

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Wait until no update is under way, and let none begin inside. Raises WeightSyncError if the last failed."""
        async with self._lock:
            if self._failure is not None:
                raise WeightSyncError(self._failure)
            yield

    async def begin_update(self) -> None:
        """Wait for those inside `generating`, then shut the gate. Called again before the end, it starts anew."""
        if not self._is_updating:
            await self._lock.acquire()
        self._is_updating, self._failure = True, None

    def end_update(self, failure: str | None = None) -> None:
        """Open the gate; with a failure, everything that wants through gets that as its error."""
        self._failure = failure
        if self._is_updating:
            self._is_updating = False
            self._lock.release()
