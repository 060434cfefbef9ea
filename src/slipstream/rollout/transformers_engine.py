"""The rollout engine on plain `transformers` generate: the comparison and the fallback.

Responses of several groups are generated together, padded on the left (`transformers_sampling.py` chooses tokens and
ends responses). New weights come between two tokens: the batch that is under way waits there, and goes on with the
keys and values it has, or is begun again from the tokens it has. What it leaves out: prefix sharing, joining sequences
to a batch that is under way (a batch lasts as long as its longest response), and several devices.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils.logging import disable_progress_bar

from slipstream.data.tokenizer import end_token_ids, load_tokenizer
from slipstream.data.trajectory import FloatArray, IntArray, Sample
from slipstream.errors import EngineError, SlipstreamError, WeightSyncError
from slipstream.models.stored_weights import StoredWeight, model_tensors, stored_weights
from slipstream.rollout.engine import UpdateGate, check_requests, check_tokens, missing_buckets, response_limit, taken
from slipstream.rollout.messages import (
    EngineStatistics,
    GroupRequest,
    ResponseResult,
    RolloutEngineSpec,
    SamplingParameters,
)
from slipstream.rollout.step_gate import StepGate
from slipstream.rollout.transformers_sampling import Response, ResponseEnds, TokenChooser
from slipstream.weights.channel import WeightReceiver, open_receiver
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import WeightPlan


class TransformersEngine:
    """A `RolloutEngine` on `model.generate`. Work is done in a thread: the event loop goes on answering."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self._spec = spec
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._end_tokens: tuple[int, ...] = ()
        self._gate = UpdateGate()
        self._steps = StepGate()
        # One batch at a time.
        self._batches = asyncio.Lock()
        self._version = 0
        self._is_updating = False
        self._plan: WeightPlan | None = None
        self._stored: dict[str, StoredWeight] | None = None
        self._receiver: WeightReceiver | None = None
        self._loaded: set[int] = set()
        self._generated_tokens = 0
        self._busy_seconds = 0.0

    async def start(self) -> dict[str, Any]:
        """See `RolloutEngine.start`."""
        began = time.monotonic()
        if self._spec.device == "cpu":
            torch.set_num_threads(self._spec.threads)
        self._tokenizer = load_tokenizer(self._spec.model_path)
        self._end_tokens = end_token_ids(self._spec.model_path, self._tokenizer)
        self._model = await asyncio.to_thread(self._load_model)
        return {
            "engine": "transformers",
            "seconds": time.monotonic() - began,
            "pid": os.getpid(),
            "end_token_ids": list(self._end_tokens),
            "vocabulary_size": self._model.config.get_text_config().vocab_size,
            "memory_bytes": _memory_bytes(),
        }

    async def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingParameters
    ) -> AsyncIterator[list[ResponseResult]]:
        """See `RolloutEngine.generate`."""
        vocabulary_size = self._running().config.get_text_config().vocab_size
        check_requests(requests, sampling, self._spec, vocabulary_size=vocabulary_size)
        began = time.monotonic()
        responses = [
            Response(
                group_id=request.group_id,
                sample_index=index,
                prompt=request.prompt_tokens,
                seed=request.seed + index,
                limit=response_limit(request, sampling, self._spec),
            )
            for request in requests
            for index in range(request.samples)
        ]
        for start in range(0, len(responses), self._spec.max_concurrent_sequences):
            batch = responses[start : start + self._spec.max_concurrent_sequences]
            async with self._batches, aclosing(self._batch(batch, sampling)) as finished:
                async for together in finished:
                    self._generated_tokens += sum(len(ended.tokens) for ended in together)
                    seconds = time.monotonic() - began
                    yield [
                        ResponseResult(ended.group_id, ended.sample_index, _sample(ended, seconds))
                        for ended in together
                    ]

    async def _batch(self, batch: list[Response], sampling: SamplingParameters) -> AsyncGenerator[list[Response]]:
        """Generate a batch in a thread; yields responses when they have ended, and stops if its caller leaves."""
        async with self._gate.generating():
            pass  # An update that is under way ends first, and one that failed raises here.
        began = time.monotonic()
        loop, left = asyncio.get_running_loop(), threading.Event()
        ended: asyncio.Queue[Response | None] = asyncio.Queue()

        def hand_over(response: Response) -> None:
            loop.call_soon_threadsafe(ended.put_nowait, response)

        work = asyncio.ensure_future(
            self._in_thread("generating", self._generate_batch, batch, sampling, hand_over, left)
        )
        work.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                arrived = await taken(ended)
                is_over = arrived[-1] is None
                if together := [response for response in arrived if response is not None]:
                    yield together
        finally:
            left.set()
            await asyncio.wait([work])
            self._busy_seconds += time.monotonic() - began
        work.result()

    async def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`."""
        self._running()
        await self._gate.begin_update()
        self._is_updating = True
        await asyncio.to_thread(self._steps.hold)
        self._loaded = set()

    async def load_bucket(self, plan: WeightPlan, index: int) -> list[dict[str, int]]:
        """See `RolloutEngine.load_bucket`."""
        try:
            checksums: dict[str, int] = await self._in_thread("loading weights", self._load_bucket, plan, index)
        except SlipstreamError as error:
            failure = f"{self._name}: bucket {index} of the weight plan could not be loaded: {error}"
            self._end_update(failure)
            raise WeightSyncError(failure) from error
        return [checksums]

    async def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        missing = missing_buckets(self._plan, self._loaded)
        if missing:
            failure = (
                f"{self._name}: buckets {missing} of the weight plan were not loaded before finish_update; part of the "
                f"weights is still that of version {self._version}"
            )
            self._end_update(failure)
            raise WeightSyncError(failure)
        self._version = version
        self._end_update()

    def _end_update(self, failure: str | None = None) -> None:
        self._is_updating = False
        self._steps.let_go(failure)
        self._gate.end_update(failure)

    async def probe(self, tokens: IntArray) -> FloatArray:
        """See `RolloutEngine.probe`."""
        vocabulary_size = self._running().config.get_text_config().vocab_size
        check_tokens(tokens, self._spec, where=f"{self._name}, probe", vocabulary_size=vocabulary_size)
        async with self._gate.generating():
            try:
                return await self._in_thread("the probe", self._probe, tokens)
            finally:
                self._steps.let_go()

    async def reset_prefix_cache(self) -> None:
        """Nothing to do: no keys or values outlive a batch."""
        self._running()

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
        if self._receiver is not None:
            self._receiver.close()
        self._model = self._receiver = self._plan = self._stored = None

    def _load_model(self) -> PreTrainedModel:
        disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self._spec.model_path, dtype=getattr(torch, self._spec.dtype), attn_implementation="sdpa"
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(
                f"{self._name} did not start on model {self._spec.model_path!r}: {_first_line(error)}"
            ) from error
        # Generation follows the request alone. A generation_config.json may ask for a temperature, top-p or a
        # repetition penalty of its own, which `generate` would mix into whatever the request leaves at its default.
        model.generation_config = GenerationConfig()
        model.requires_grad_(False)
        return nn.Module.to(model, self._spec.device).eval()

    def _generate_batch(
        self,
        batch: Sequence[Response],
        sampling: SamplingParameters,
        hand_over: Callable[[Response], None],
        left: threading.Event,
    ) -> None:
        """To the end of every response; broken off where new weights come and the cache is to be computed anew."""

        def breaks_off() -> bool:
            if self._is_updating and self._spec.recompute_cache_on_update:
                return True
            self._steps.pause()
            return left.is_set()

        while (open_responses := [r for r in batch if r.finish_reason is None]) and not left.is_set():
            ends = ResponseEnds(
                open_responses,
                end_tokens=self._end_tokens,
                stop=sampling.stop,
                tokenizer=self._tokenizer,
                on_end=hand_over,
                after_token=breaks_off,
            )
            with self._steps.running():
                self._go_on(open_responses, TokenChooser(open_responses, sampling, lambda: self._version), ends)

    @torch.no_grad()
    def _go_on(self, responses: Sequence[Response], chooser: TokenChooser, ends: ResponseEnds) -> None:
        """Generate from the tokens that each response has, until `ends` says so."""
        model: Any = self._running()
        rows = [np.concatenate([response.prompt, np.asarray(response.tokens, np.int64)]) for response in responses]
        width = max(map(len, rows))
        pad = self._end_tokens[0]
        tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, width - len(row) :] = torch.from_numpy(row)
            mask[index, width - len(row) :] = 1
        model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(response.room for response in responses),
                eos_token_id=list(self._end_tokens),
                pad_token_id=pad,
            ),
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )

    @torch.no_grad()
    def _probe(self, tokens: IntArray) -> FloatArray:
        self._steps.hold()
        model = self._running()
        row = torch.from_numpy(np.asarray(tokens, dtype=np.int64)).to(model.device)
        log_probs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
        return log_probs.gather(1, row[1:, None])[:, 0].cpu().numpy()

    @torch.no_grad()
    def _load_bucket(self, plan: WeightPlan, index: int) -> dict[str, int]:
        if plan != self._plan or self._receiver is None:
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = open_receiver(plan, self._spec.engine_index)
            self._plan = plan
        # A tied weight has one name in the plan and one storage here.
        weights = self._stored_weights()
        checksums = {}
        for name, tensor in self._receiver.receive(plan.buckets[index]):
            if name not in weights or weights[name].shape != tensor.shape:
                found = f"shape {tuple(weights[name].shape)}" if name in weights else "no weight of that name"
                raise WeightSyncError(
                    f"{self._name}: weight {name!r} of shape {tuple(tensor.shape)} does not fit, the model has {found}"
                )
            checksums[name] = tensor_checksum(tensor)
            weights[name].copy_(tensor)
            if weights[name].dtype == tensor.dtype and tensor_checksum(weights[name]) != checksums[name]:
                raise WeightSyncError(f"{self._name}: weight {name!r} changed while it was copied into the model")
        self._loaded.add(index)
        return checksums

    def _stored_weights(self) -> dict[str, torch.Tensor]:
        """Views of the model's weights, by the names and in the pieces of a model folder."""
        model = self._running()
        tensors = model_tensors(model)
        if self._stored is None:
            self._stored = stored_weights(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return {name: weight.view(tensors[weight.source].detach()) for name, weight in self._stored.items()}

    @property
    def _name(self) -> str:
        return f"rollout engine {self._spec.engine_index} (transformers)"

    def _running(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError(f"{self._name} is not running: start() has not been called, or shutdown() has")
        return self._model

    async def _in_thread(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.to_thread(function, *arguments)
        except SlipstreamError:
            raise
        except Exception as error:
            raise EngineError(f"{self._name} failed ({what}): {_first_line(error)}") from error


def _sample(response: Response, seconds: float) -> Sample:
    assert response.finish_reason is not None
    return Sample(
        tokens=np.asarray(response.tokens, dtype=np.int64),
        log_probs=np.asarray(response.log_probs, dtype=np.float32),
        versions=np.asarray(response.versions, dtype=np.int64),
        finish_reason=response.finish_reason,
        seconds=seconds,
    )


def _memory_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
