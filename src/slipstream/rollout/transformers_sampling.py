"""What steers `model.generate` of `transformers`: which token a response gets, and when it ends.

Used by `transformers_engine.py`. A response keeps its own tokens, log-probs, policy versions and random numbers, so a
batch may be broken off between two tokens and begun again from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.data.trajectory import FinishReason, IntArray
from slipstream.rollout.messages import SamplingParameters


@dataclass
class Response:
    """One response in the making; `finish_reason` is None until it has ended. `limit` is in tokens."""

    group_id: str
    sample_index: int
    prompt: IntArray
    seed: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def room(self) -> int:
        """Tokens it may still get."""
        return self.limit - len(self.tokens)


class TokenChooser(LogitsProcessor):
    """Chooses the next token of each response and writes it down; `generate` is left with one candidate.

    By Gumbel-max: argmax of log p + g, with g standard Gumbel noise, is a draw from p. The noise of a response comes
    from its own generator.
    """

    def __init__(self, responses: Sequence[Response], sampling: SamplingParameters, version: Callable[[], int]) -> None:
        """`version` tells the policy version whose weights compute now."""
        self._responses = responses
        self._version = version
        self._temperature = sampling.temperature
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
            for row, response in zip(noise, self._responses, strict=True):
                row.exponential_(generator=response.generator)
            preference = log_probs - noise.log().to(log_probs.device)
        chosen = preference.argmax(-1, keepdim=True)
        chosen_log_probs = log_probs.gather(1, chosen)[:, 0].tolist()
        version = self._version()
        for response, token, log_prob in zip(self._responses, chosen[:, 0].tolist(), chosen_log_probs, strict=True):
            if response.finish_reason is None:
                response.tokens.append(token)
                response.log_probs.append(log_prob)
                response.versions.append(version)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class ResponseEnds(StoppingCriteria):
    """Ends a response at an end token, a stop string or its own limit of tokens, and says so at once.

    The stop criterion of `transformers` also looks at the prompt and could end a response before it begins.
    `after_token` is called after each token of the batch; it returns True to break the batch off there.
    """

    def __init__(
        self,
        responses: Sequence[Response],
        *,
        end_tokens: Sequence[int],
        stop: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
        on_end: Callable[[Response], None],
        after_token: Callable[[], bool],
    ) -> None:
        self._responses = responses
        self._end_tokens = frozenset(end_tokens)
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._after_token = after_token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for response in self._responses:
            if response.finish_reason is None:
                response.finish_reason = self._reason(response)
                if response.finish_reason is not None:
                    self._on_end(response)
        if self._after_token():
            return torch.ones(len(self._responses), dtype=torch.bool, device=input_ids.device)
        done = [response.finish_reason is not None for response in self._responses]
        return torch.tensor(done, device=input_ids.device)

    def _reason(self, response: Response) -> FinishReason | None:
        if response.tokens[-1] in self._end_tokens:
            return "stop"
        if self._stop and self._tokenizer is not None:
            text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            if any(string in text for string in self._stop):
                return "stop"
        return None if response.room > 0 else "length"
