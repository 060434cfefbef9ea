"""From an engine's samples to trajectories: the tokens as they were sampled, with masks and text beside them.

Single-turn episodes: the prompt, then the response. Text is decoded for reward functions and people; it is never
encoded again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.data.trajectory import PromptOccurrence, Sample, Trajectory
from slipstream.data.turn import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def single_turn_trajectory(
    occurrence: PromptOccurrence, sample: Sample, *, sample_index: int, tokenizer: PreTrainedTokenizerBase
) -> Trajectory:
    """The episode "prompt, response" of one sample. Its arrays have the length of both together."""
    prompt = occurrence.prompt
    prompt_length, response_length = len(prompt.tokens), len(sample.tokens)
    # Special tokens are left out: a reward function sees what a user would read.
    response = str(tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True))
    return Trajectory(
        group_id=occurrence.group_id,
        sample_index=sample_index,
        tokens=np.concatenate([prompt.tokens, sample.tokens]),
        loss_mask=np.arange(prompt_length + response_length) >= prompt_length,
        rollout_log_probs=np.concatenate([np.zeros(prompt_length, np.float32), sample.log_probs]),
        versions=np.concatenate([np.full(prompt_length, -1, np.int64), sample.versions]),
        finish_reason=sample.finish_reason,
        prompt_text=prompt.text,
        response_text=response,
        label=prompt.label,
        fields=prompt.fields,
        seconds=sample.seconds,
        turns=(*(prompt.messages or (Turn("prompt", prompt.text),)), Turn("assistant", response)),
    )
