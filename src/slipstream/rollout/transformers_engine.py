"""The rollout engine on plain `transformers` generate: the comparison and the fallback.

Rows of several groups are generated together, padded on the left. Sampling is the Gumbel-max trick inside a logits
processor: every row draws its noise from a generator of its own, so that sample i of a group depends on its seed and
not on its neighbours, and the log-prob of what is chosen is at hand. What it leaves out: prefix sharing, joining
sequences to a batch that is under way (a batch lasts as long as its longest response), and several devices.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.logging import disable_progress_bar

from slipstream.data.tokenizer import end_token_ids, load_tokenizer
from slipstream.data.trajectory import FinishReason, FloatArray, IntArray, Sample
from slipstream.errors import EngineError, SlipstreamError, WeightSyncError
from slipstream.rollout.engine import UpdateGate, check_requests, check_tokens, missing_buckets, response_limit
from slipstream.rollout.messages import (
    EngineStatistics,
    GroupRequest,
    GroupResult,
    RolloutEngineSpec,
    SamplingParameters,
)
from slipstream.weights.channel import WeightReceiver, open_receiver
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import WeightPlan


@dataclass(frozen=True)
class _Row:
    """One response to be generated."""

    group_id: str
    sample_index: int
    prompt: IntArray
    seed: int
    limit: int


class TransformersEngine:
    """A `RolloutEngine` on `model.generate`. Work is done in a thread: the event loop goes on answering."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self._spec = spec
        self._model: PreTrainedModel | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._end_tokens: tuple[int, ...] = ()
        # Also keeps two calls from running the model at a time.
        self._gate = UpdateGate()
        self._version = 0
        self._plan: WeightPlan | None = None
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
    ) -> AsyncIterator[GroupResult]:
        """See `RolloutEngine.generate`."""
        vocabulary_size = self._running().config.get_text_config().vocab_size
        check_requests(requests, sampling, self._spec, vocabulary_size=vocabulary_size)
        began = time.monotonic()
        rows = [
            _Row(
                group_id=request.group_id,
                sample_index=index,
                prompt=request.prompt_tokens,
                seed=request.seed + index,
                limit=response_limit(request, sampling, self._spec),
            )
            for request in requests
            for index in range(request.samples)
        ]
        open_groups = {request.group_id: request.samples for request in requests}
        samples: dict[str, list[Sample]] = {request.group_id: [] for request in requests}
        for start in range(0, len(rows), self._spec.max_concurrent_sequences):
            batch = rows[start : start + self._spec.max_concurrent_sequences]
            batch_began = time.monotonic()
            async with self._gate.generating():
                finished = await self._in_thread("generating", self._generate_batch, batch, sampling, began)
            self._busy_seconds += time.monotonic() - batch_began
            for row, sample in zip(batch, finished, strict=True):
                samples[row.group_id].append(sample)
                self._generated_tokens += len(sample.tokens)
                if len(samples[row.group_id]) == open_groups[row.group_id]:
                    yield GroupResult(row.group_id, samples.pop(row.group_id), time.monotonic() - began)

    async def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. A batch under way is finished first."""
        self._running()
        await self._gate.begin_update()
        self._loaded = set()

    async def load_bucket(self, plan: WeightPlan, index: int) -> dict[str, int]:
        """See `RolloutEngine.load_bucket`."""
        try:
            checksums: dict[str, int] = await self._in_thread("loading weights", self._load_bucket, plan, index)
        except SlipstreamError as error:
            failure = f"{self._name}: bucket {index} of the weight plan could not be loaded: {error}"
            self._gate.end_update(failure)
            raise WeightSyncError(failure) from error
        return checksums

    async def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        missing = missing_buckets(self._plan, self._loaded)
        if missing:
            failure = (
                f"{self._name}: buckets {missing} of the weight plan were not loaded before finish_update; part of the "
                f"weights is still that of version {self._version}"
            )
            self._gate.end_update(failure)
            raise WeightSyncError(failure)
        self._version = version
        self._gate.end_update()

    async def probe(self, tokens: IntArray) -> FloatArray:
        """See `RolloutEngine.probe`."""
        vocabulary_size = self._running().config.get_text_config().vocab_size
        check_tokens(tokens, self._spec, where=f"{self._name}, probe", vocabulary_size=vocabulary_size)
        async with self._gate.generating():
            return await self._in_thread("the probe", self._probe, tokens)

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
        self._model = self._receiver = self._plan = None

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

    @torch.no_grad()
    def _generate_batch(self, rows: Sequence[_Row], sampling: SamplingParameters, began: float) -> list[Sample]:
        model: Any = self._running()
        device = model.device
        width = max(len(row.prompt) for row in rows)
        pad = self._end_tokens[0]
        tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
        mask = torch.zeros((len(rows), width), dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, width - len(row.prompt) :] = torch.from_numpy(row.prompt)
            mask[index, width - len(row.prompt) :] = 1
        chooser = _TokenChooser(rows, sampling)
        ends = _ResponseEnds(rows, width, sampling.stop, self._tokenizer)
        output = model.generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(row.limit for row in rows),
                eos_token_id=list(self._end_tokens),
                pad_token_id=pad,
            ),
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        responses = output[:, width:].cpu().numpy()
        log_probs = torch.stack(chooser.log_probs, dim=1).cpu().numpy()
        seconds = time.monotonic() - began
        return [
            self._sample(responses[index], log_probs[index], ends.lengths[index], seconds) for index in range(len(rows))
        ]

    def _sample(self, tokens: IntArray, log_probs: FloatArray, end: tuple[int, FinishReason], seconds: float) -> Sample:
        """Cut a row of a batch where its response ended: at the first end token, or where the criteria said."""
        length, reason = end
        at_end = np.flatnonzero(np.isin(tokens[:length], self._end_tokens))
        if len(at_end):
            length, reason = int(at_end[0]) + 1, "stop"
        return Sample(
            tokens=tokens[:length].astype(np.int64),
            log_probs=log_probs[:length].astype(np.float32),
            versions=np.full(length, self._version, dtype=np.int64),
            finish_reason=reason,
            seconds=seconds,
        )

    @torch.no_grad()
    def _probe(self, tokens: IntArray) -> FloatArray:
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
        weights = dict(self._running().state_dict(keep_vars=True))
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


class _TokenChooser(LogitsProcessor):
    """Chooses the next token of each row and keeps its log-prob; `generate` is left with one candidate.

    By Gumbel-max: argmax of log p + g, with g standard Gumbel noise, is a draw from p. The noise of a row comes from
    its own generator. `log_probs` has one tensor [rows] per step.
    """

    def __init__(self, rows: Sequence[_Row], sampling: SamplingParameters) -> None:
        self.log_probs: list[torch.Tensor] = []
        self._temperature = sampling.temperature
        self._generators = [torch.Generator().manual_seed(row.seed) for row in rows]
        self._truncations: list[LogitsProcessor] = []
        if sampling.temperature > 0 and sampling.top_k > 0:
            self._truncations.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._truncations.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores.float()
        if self._temperature > 0:
            logits = logits / self._temperature
        for truncation in self._truncations:
            logits = truncation(input_ids, logits)
        log_probs = logits.log_softmax(-1)
        preference = log_probs
        if self._temperature > 0:
            # Exponential noise e gives Gumbel noise -log e.
            noise = torch.empty(log_probs.shape)
            for row, generator in zip(noise, self._generators, strict=True):
                row.exponential_(generator=generator)
            preference = log_probs - noise.log().to(log_probs.device)
        chosen = preference.argmax(-1, keepdim=True)
        self.log_probs.append(log_probs.gather(1, chosen)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _ResponseEnds(StoppingCriteria):
    """Ends a row at its own limit of tokens or at a stop string in its response, and remembers which it was.

    The stop criterion of `transformers` also looks at the prompt and could end a response before it begins.
    `lengths` has (tokens, reason) for each row; end tokens are `generate`'s own business.
    """

    def __init__(
        self,
        rows: Sequence[_Row],
        prompt_width: int,
        stop: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self.lengths: list[tuple[int, FinishReason]] = [(row.limit, "length") for row in rows]
        self._prompt_width = prompt_width
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._done = torch.zeros(len(rows), dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        length = input_ids.shape[1] - self._prompt_width
        for index, (limit, _reason) in enumerate(self.lengths):
            if self._done[index]:
                continue
            if self._stop and self._tokenizer is not None:
                text = self._tokenizer.decode(input_ids[index, self._prompt_width :], skip_special_tokens=True)
                if any(string in text for string in self._stop):
                    self.lengths[index] = (length, "stop")
                    self._done[index] = True
            if length >= limit:
                self._done[index] = True
        return self._done.to(input_ids.device)


def _memory_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
