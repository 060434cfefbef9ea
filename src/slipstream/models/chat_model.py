"""A language model that answers one prompt at a time and is read while it does.

Plain `generate` of Transformers in a thread, so that it starts in seconds and an answer can be stopped. What the model
sees and what is kept of a conversation is `workflows/chat.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.utils.logging import disable_progress_bar

from slipstream.data.tokenizer import end_token_ids, load_tokenizer
from slipstream.errors import ModelError
from slipstream.models.hardware import detect_hardware
from slipstream.models.loading import from_folder_or_hub


class ChatModel:
    """A causal language model with its tokenizer. `was_cut`: the last answer ended at its limit of tokens."""

    def __init__(self, path: str, *, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load a Hugging Face folder or hub name, with `weights` by name in place of its own where they are given.

        Raises ModelError for what is no causal language model or cannot be loaded.
        """
        disable_progress_bar()
        self.tokenizer = _load_tokenizer(path)
        hardware = detect_hardware()
        try:
            with from_folder_or_hub(path):
                config = AutoConfig.from_pretrained(path)
                _require_language_model(path, config)
                model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, hardware.dtype))
            if weights is not None:
                model.load_state_dict(weights)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"cannot load a language model from {path!r}: {reason}") from error
        # An answer follows from what is asked for here alone, not from a generation_config.json.
        model.generation_config = GenerationConfig()
        model.requires_grad_(False)
        self._model = nn.Module.to(model, hardware.device).eval()
        self._end_tokens = list(end_token_ids(path, self.tokenizer))
        self.was_cut = False

    @property
    def context_tokens(self) -> int | None:
        """Tokens of the longest sequence, prompt and answer; None where the model does not say."""
        limit: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return limit

    def answer(self, prompt: Sequence[int], *, temperature: float, max_tokens: int) -> Generator[str]:
        """Pieces of the answer to a prompt of token ids, as they are decoded; special tokens are left out.

        Temperature 0 is greedy. To close the generator stops the model. Raises
        ModelError if the model fails.
        """
        streamer = TextIteratorStreamer(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        stop = _Stop()
        failures: list[Exception] = []

        def work() -> None:
            try:
                self._generate(prompt, streamer, stop, temperature=temperature, max_tokens=max_tokens)
            except Exception as error:  # of whatever kind: it is raised again below, in the caller's thread
                failures.append(error)
            finally:
                streamer.end()

        thread = threading.Thread(target=work, name="answer", daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:
            stop.set()
            thread.join()
        if failures:
            raise ModelError(f"the model failed: {type(failures[0]).__name__}: {failures[0]}") from failures[0]

    def _generate(
        self,
        prompt: Sequence[int],
        streamer: TextIteratorStreamer,
        stop: _Stop,
        *,
        temperature: float,
        max_tokens: int,
    ) -> None:
        tokens = torch.tensor([list(prompt)], device=self._model.device)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        output = self._model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=GenerationConfig(
                max_new_tokens=max_tokens,
                eos_token_id=self._end_tokens,
                pad_token_id=self._end_tokens[0],
                **sampling,
            ),
            stopping_criteria=StoppingCriteriaList([stop]),
            streamer=streamer,
        )
        ended = int(output[0, -1]) in self._end_tokens
        self.was_cut = not ended and output.shape[1] - tokens.shape[1] >= max_tokens


class _Stop(StoppingCriteria):
    """Ends the answer after the token that is being computed, once `set` has been called."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(path)
    except ModelError as error:
        # It names the configuration key that paths stand in elsewhere.
        raise ModelError(str(error).removeprefix("model.path: ")) from None


def _require_language_model(path: str, config: Any) -> None:
    kinds = [name for name in config.architectures or () if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    if kinds:
        raise ModelError(
            f"{path!r} is a {kinds[0]}, no language model: it gives no answers; a reward model is served by "
            "`slipstream serve-reward --model`"
        )
