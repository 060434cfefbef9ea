"""The rollout engine on vLLM's asynchronous API.

An `AsyncLLM` in this process (the Ray actor) and vLLM's EngineCore, which holds the model, in a child of it; with
`tensor_parallel` the model is divided among workers, which are children of the EngineCore (`vllm_executor.py`).
Requests go out as token ids and come back as token ids with the log-prob of each sampled token; weights never pass
through this process (`vllm_worker.py` takes them in each worker).

New weights come between two tokens: the EngineCore is paused, and tells how many tokens each sequence has by then, so
that every token is stamped with the version that chose it. The prefix cache is kept apart by update: a prompt never
takes keys and values of a sequence that began under other weights.
"""

import asyncio
import math
import os
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slipstream.cluster.remains import COLLECTIVES_PREFIX, posix_segments_of
from slipstream.cluster.session import LOOPBACK, LOOPBACK_INTERFACE
from slipstream.data.tokenizer import end_token_ids, load_tokenizer
from slipstream.data.trajectory import FloatArray, IntArray, Sample
from slipstream.errors import EngineError, EngineLostError, SlipstreamError, WeightSyncError
from slipstream.rollout.engine import UpdateGate, check_requests, check_tokens, response_limit, taken
from slipstream.rollout.messages import (
    EngineStatistics,
    GroupRequest,
    ResponseResult,
    RolloutEngineSpec,
    SamplingParameters,
)
from slipstream.weights.plan import WeightPlan, receiver_indices, receiver_name

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

Answer = TypeVar("Answer")

# Longest wait for one answer of the EngineCore that is not generation: pausing, loading a bucket, closing.
CORE_TIMEOUT_S = 600.0
# How often a waiting call looks whether the EngineCore is still alive.
CORE_CHECK_S = 1.0
# How long the EngineCore may take to leave before it is killed.
CPU_SHUTDOWN_GRACE_S = 2.0
# Tokens of one forward pass on CPU. Larger is no faster; it bounds the memory of activations.
CPU_TOKENS_PER_PASS = 4096
# vLLM's default block on CPU has 128 tokens: prompts shorter than that would never be shared within a group.
CPU_BLOCK_TOKENS = 32


def vllm_environment(spec: RolloutEngineSpec) -> dict[str, str]:
    """Environment variables that must be set before vLLM is imported: for the actor's `runtime_env`."""
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(spec.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if spec.tensor_parallel > 1:
        # The workers of an engine are on one machine, and need no network to find each other.
        environment |= {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "VLLM_HOST_IP": LOOPBACK}
    if spec.device == "cpu":
        environment |= {
            # Of each worker.
            "OMP_NUM_THREADS": str(spec.threads),
            # By default every engine would pin itself to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # With 0 and the executor "uni", model and scheduler share one process instead of two.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM compiles one small function of its sampler even in eager mode: 40 s when nothing is cached, for
            # nothing.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


class VLLMEngine:
    """A `RolloutEngine` on vLLM. Construct it in the process whose environment is `vllm_environment(spec)`."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self._spec = spec
        self._engine: AsyncLLM | None = None
        self._gate = UpdateGate()
        self._calls = 0
        self._under_way = 0
        self._version = 0
        self._updates = 0
        # Of each response under way, by vLLM's id of its request: (tokens it had, version that went on from there).
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._token_counts: dict[str, int] = {}
        self._plan: WeightPlan | None = None
        self._shared_memory: list[Path] = []
        self._end_tokens: tuple[int, ...] = ()
        self._vocabulary_size = 0
        self._generated_tokens = 0
        self._busy_seconds = 0.0

    async def start(self) -> dict[str, Any]:
        """Import vLLM, start the EngineCore and load the model. See `RolloutEngine.start`."""
        began = time.monotonic()
        tokenizer = load_tokenizer(self._spec.model_path)
        self._end_tokens = end_token_ids(self._spec.model_path, tokenizer)
        try:
            # Not in a thread: the kernel kills the EngineCore when the thread that started it ends.
            self._engine = _start_engine(self._spec)
        except SlipstreamError:
            raise
        except Exception as error:
            raise EngineError(
                f"{self._name} did not start on model {self._spec.model_path!r}: {_first_line(error)}; the lines above "
                f"are vLLM's own log"
            ) from error
        self._vocabulary_size = self._engine.model_config.get_vocab_size()
        workers, parents = zip(*await self._worker_call("slipstream_die_with_parent"), strict=True)
        core_processes = sorted({*workers, *parents} - {os.getpid()})
        self._shared_memory = posix_segments_of([os.getpid(), *core_processes])
        for path in self._shared_memory:
            if path.name.startswith(COLLECTIVES_PREFIX):
                # All workers have it mapped by now; a name that is gone cannot be left behind by one that is killed.
                path.unlink()
        return {
            "engine": "vllm",
            "seconds": time.monotonic() - began,
            "pid": os.getpid(),
            "core_processes": core_processes,
            "workers": list(workers),
            "shared_memory": [str(path) for path in self._shared_memory],
            "end_token_ids": list(self._end_tokens),
            "vocabulary_size": self._vocabulary_size,
            "memory_bytes": _memory_bytes(),
        }

    async def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> AsyncIterator[list[ResponseResult]]:
        """See `RolloutEngine.generate`."""
        self._running()
        check_requests(requests, sampling, self._spec, vocabulary_size=self._vocabulary_size)
        began = time.monotonic()
        tasks: list[asyncio.Task[ResponseResult]] = []
        try:
            tasks = await self._admit(requests, sampling)
            self._under_way += len(tasks)
            ended: asyncio.Queue[asyncio.Task[ResponseResult]] = asyncio.Queue()
            for task in tasks:
                task.add_done_callback(ended.put_nowait)
            left = len(tasks)
            while left:
                together = await taken(ended)
                left -= len(together)
                yield [task.result() for task in together]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._under_way -= len(tasks)
            self._busy_seconds += time.monotonic() - began

    async def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`."""
        engine = self._running()
        await self._gate.begin_update()
        # Clearing the cache sends what is under way back to be computed anew.
        clears = self._spec.recompute_cache_on_update or not self._spans
        await self._answer(engine.pause_generation(mode="keep", clear_cache=clears), "pausing")
        self._token_counts, *others = await self._worker_call("slipstream_begin_update")
        for rank, counts in enumerate(others, start=1):
            if counts != self._token_counts:
                raise EngineError(
                    f"{self._name}: workers 0 and {rank} differ in how many tokens the sequences under way have, "
                    f"{self._token_counts} and {counts}: they are not of the same step"
                )

    async def load_bucket(self, plan: WeightPlan, index: int) -> list[dict[str, int]]:
        """See `RolloutEngine.load_bucket`."""
        try:
            if plan != self._plan:
                [first, *_] = receiver_indices([self._spec.engine_index], self._spec.tensor_parallel)
                await self._worker_call("slipstream_open_channel", pickle.dumps(plan), first)
                self._plan = plan
            return [dict(checksums) for checksums in await self._worker_call("slipstream_load_bucket", index)]
        except SlipstreamError as error:
            failure = f"{self._name}: bucket {index} of the weight plan could not be loaded: {error}"
            self._gate.end_update(failure)
            raise WeightSyncError(failure) from error

    async def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        engine = self._running()
        missing = sorted({index for left in await self._worker_call("slipstream_finish_update") for index in left})
        if missing:
            failure = (
                f"{self._name}: buckets {missing} of the weight plan were not loaded before finish_update; part of the "
                f"weights is still that of version {self._version}"
            )
            self._gate.end_update(failure)
            raise WeightSyncError(failure)
        if self._spec.recompute_cache_on_update or not self._spans:
            await self.reset_prefix_cache()
        self._version = version
        self._updates += 1
        for identifier, spans in self._spans.items():
            # One that is unknown there has not been begun.
            spans.append((self._token_counts.get(identifier, 0), version))
        await self._answer(engine.resume_generation(), "resuming")
        self._gate.end_update()

    async def probe(self, tokens: IntArray) -> FloatArray:
        """See `RolloutEngine.probe`. Requests with prompt log-probs do not read the prefix cache."""
        from vllm import SamplingParams

        self._running()
        check_tokens(tokens, self._spec, where=f"{self._name}, probe", vocabulary_size=self._vocabulary_size)
        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
        self._calls += 1
        async with self._gate.generating():
            asked = self._output(tokens, parameters, f"probe-{self._calls}", asyncio.Event())
            output, _ = await self._answer(asked, "the probe")
        log_probs = [
            position[int(token)].logprob for token, position in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        ]
        return np.asarray(log_probs, dtype=np.float32)

    async def reset_prefix_cache(self) -> None:
        """See `RolloutEngine.reset_prefix_cache`. It cannot be cleared while sequences are under way, and need not be.

        What is kept then is of the same weights; it only changes how prompts are cut into passes.
        """
        if self._spans:
            return
        if not await self._answer(self._running().reset_prefix_cache(), "clearing the prefix cache"):
            raise EngineError(f"{self._name}: vLLM could not clear its prefix cache, as sequences are still using it")

    async def statistics(self) -> EngineStatistics:
        """See `RolloutEngine.statistics`."""
        return EngineStatistics(
            policy_version=self._version,
            generated_tokens=self._generated_tokens,
            busy_seconds=self._busy_seconds,
            memory_bytes=_memory_bytes(),
        )

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            # The EngineCore has nothing to save; taking Python apart takes it longer than is worth waiting for on CPU.
            # Elsewhere its workers have shared memory to release, and get vLLM's own grace.
            grace_s = CPU_SHUTDOWN_GRACE_S if self._spec.device == "cpu" else None
            await asyncio.to_thread(engine.shutdown, grace_s)
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        self._shared_memory = []

    async def _admit(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> list[asyncio.Task[ResponseResult]]:
        """Hand all requests to a paused engine, then let it go: the first step sees every one of them."""
        engine = self._running()
        async with self._gate.generating():
            # What is in the prefix cache changes how a prompt is cut into passes, and so the last bits of log-probs.
            await self._answer(
                engine.pause_generation(mode="keep", clear_cache=self._under_way == 0), "pausing to admit requests"
            )
            self._calls += 1
            asked = [(request, index) for request in requests for index in range(request.samples)]
            admitted = [asyncio.Event() for _ in asked]
            tasks = [
                asyncio.ensure_future(self._response(request, index, sampling, event))
                for (request, index), event in zip(asked, admitted, strict=True)
            ]
            try:
                await self._answer(asyncio.gather(*(event.wait() for event in admitted)), "admitting requests")
            finally:
                await self._answer(engine.resume_generation(), "resuming")
        return tasks

    async def _response(
        self, request: GroupRequest, index: int, sampling: SamplingParameters, admitted: asyncio.Event
    ) -> ResponseResult:
        """Put one response to the engine and wait for its end."""
        began = time.monotonic()
        identifier = f"{self._calls}-{request.group_id}-{index}"
        try:
            # How long generation may take is for the caller to say.
            output, spans = await self._answer(
                self._output(request.prompt_tokens, self._parameters(request, index, sampling), identifier, admitted),
                f"generating response {index} of group {request.group_id}",
                timeout_s=math.inf,
            )
        finally:
            admitted.set()
        sample = self._sample(output.outputs[0], spans, time.monotonic() - began)
        self._generated_tokens += len(sample.tokens)
        return ResponseResult(request.group_id, index, sample)

    def _parameters(self, request: GroupRequest, index: int, sampling: SamplingParameters) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            seed=request.seed + index,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=response_limit(request, sampling, self._spec),
            stop_token_ids=list(self._end_tokens),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            # Text is only made where a stop string must be found in it.
            detokenize=bool(sampling.stop),
            # The sampled token's log-prob and no others, in one flat list.
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _sample(self, completion: Any, spans: Sequence[tuple[int, int]], seconds: float) -> Sample:
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(
                f"{self._name}: vLLM ended a response with {completion.finish_reason!r}, expected 'stop' or 'length'"
            )
        tokens = np.asarray(completion.token_ids, dtype=np.int64)
        versions = np.empty(len(tokens), dtype=np.int64)
        for start, version in spans:
            versions[start:] = version
        return Sample(
            tokens=tokens,
            log_probs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
            versions=versions,
            finish_reason=completion.finish_reason,
            seconds=seconds,
        )

    async def _output(
        self, tokens: IntArray, parameters: "SamplingParams", identifier: str, admitted: asyncio.Event
    ) -> tuple[Any, list[tuple[int, int]]]:
        """Put a prompt to the engine, say when it has been admitted, and wait for the one output that is final.

        Returns it with the versions of its tokens: each from the token at that place on.
        """
        from vllm.inputs import TokensPrompt

        engine = self._running()
        # Prompts share what is cached of them with those of the same salt only.
        prompt = TokensPrompt(prompt_token_ids=tokens.tolist(), cache_salt=f"update {self._updates}")
        queue = await engine.add_request(identifier, prompt, parameters)
        spans = self._spans[queue.request_id] = [(0, self._version)]
        try:
            admitted.set()
            output = queue.get_nowait() or await queue.get()
            while not output.finished:
                output = queue.get_nowait() or await queue.get()
            return output, spans
        except asyncio.CancelledError:
            await engine.abort(queue.request_id, internal=True)
            raise
        finally:
            del self._spans[queue.request_id]
            queue.close()

    @property
    def _name(self) -> str:
        return f"rollout engine {self._spec.engine_index} (vllm)"

    def _running(self) -> "AsyncLLM":
        if self._engine is None:
            raise EngineError(f"{self._name} is not running: start() has not been called, or shutdown() has")
        return self._engine

    async def _worker_call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the worker extension; returns what it returned in each worker, by rank.

        Raises EngineError naming the first worker that failed.
        """
        answers = await self._answer(self._running().collective_rpc(method, args=arguments), method)
        for rank, answer in enumerate(answers):
            if "failure" in answer:
                worker = receiver_name(self._name, rank, len(answers))
                raise EngineError(f"{worker} failed ({method}): {answer['failure']}")
        return [answer["value"] for answer in answers]

    async def _answer(self, waiting: Awaitable[Answer], what: str, *, timeout_s: float = CORE_TIMEOUT_S) -> Answer:
        """Wait for the EngineCore, with a deadline and an error that says what it was about.

        A call sent to a process that has just been killed would never be answered: so look whether it is alive.
        """
        engine = self._running()
        task = asyncio.ensure_future(waiting)
        deadline = time.monotonic() + timeout_s
        try:
            while not (await asyncio.wait({task}, timeout=CORE_CHECK_S))[0]:
                if engine.errored:
                    raise EngineLostError(self._death(what))
                if time.monotonic() > deadline:
                    raise EngineLostError(
                        f"{self._name}: vLLM's EngineCore did not answer within {timeout_s:.0f} s ({what})"
                    )
        finally:
            task.cancel()
        try:
            return task.result()
        except SlipstreamError:
            raise
        except Exception as error:
            if engine.errored:
                raise EngineLostError(self._death(what)) from error
            raise EngineError(f"{self._name} failed ({what}): {_first_line(error)}") from error

    def _death(self, what: str) -> str:
        process = "process" if self._spec.tensor_parallel == 1 else "process, or a worker of it,"
        return f"{self._name} failed ({what}): vLLM's EngineCore {process} has died"


def _start_engine(spec: RolloutEngineSpec) -> "AsyncLLM":
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_sequence_tokens,
        "max_num_seqs": spec.max_concurrent_sequences,
        "enable_prefix_caching": True,
        # Log-probs of the distribution that is sampled: vLLM's default leaves the temperature out.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "slipstream.rollout.vllm_worker.WeightUpdateExtension",
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if spec.device == "cpu":
        settings |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_TOKENS,
            # What vLLM asks for is the cache of one worker, which has its share of the heads.
            "kv_cache_memory_bytes": spec.kv_cache_bytes // spec.tensor_parallel,
            "distributed_executor_backend": "uni",
            # A prompt is never cut over two passes: with seeds of their own, sequences that are not at their end after
            # a pass have their random state set back, which the CPU's generator cannot, and the EngineCore dies.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_TOKENS_PER_PASS, spec.max_sequence_tokens, spec.max_concurrent_sequences),
        }
    else:
        settings["gpu_memory_utilization"] = spec.gpu_memory_share
    if spec.tensor_parallel > 1:
        settings |= {
            "tensor_parallel_size": spec.tensor_parallel,
            "distributed_executor_backend": "slipstream.rollout.vllm_executor.BoundExecutor",
        }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(settings | spec.options)))


def _memory_bytes() -> int:
    """Resident memory of this process and its descendants: the EngineCore and its workers."""
    import psutil

    process = psutil.Process()
    total = int(process.memory_info().rss)
    for child in process.children(recursive=True):
        try:
            total += int(child.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return total


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
