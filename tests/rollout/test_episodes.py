"""Token-in, token-out: what was sampled is what is trained on, whatever its text looks like."""

from dataclasses import replace
from typing import Any

import numpy as np

from slipstream.data.trajectory import Prompt, PromptOccurrence, Sample, Trajectory
from slipstream.data.turn import Turn
from slipstream.rollout.episodes import single_turn_trajectory


def occurrence(tokens: list[int]) -> PromptOccurrence:
    prompt = Prompt(
        row=3, tokens=np.array(tokens, np.int64), text="the prompt", label="7", fields={"prompt": "p", "level": 2}
    )
    return PromptOccurrence(group_id="0-3", prompt=prompt)


def sample(tokens: list[int], *, finish_reason: Any = "stop", version: int = 5) -> Sample:
    return Sample(
        tokens=np.array(tokens, np.int64),
        log_probs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions=np.full(len(tokens), version, np.int64),
        finish_reason=finish_reason,
        seconds=0.5,
    )


def episode(tokenizer: Any, prompt: list[int], response: list[int], **options: Any) -> Trajectory:
    return single_turn_trajectory(occurrence(prompt), sample(response, **options), sample_index=1, tokenizer=tokenizer)


def test_an_episode_is_the_prompt_and_then_the_response(tiny_tokenizer: Any) -> None:
    trajectory = episode(tiny_tokenizer, [11, 12, 13], [21, 22])
    assert trajectory.tokens.tolist() == [11, 12, 13, 21, 22]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True]
    assert trajectory.rollout_log_probs.tolist() == [0, 0, 0, -1, -2]
    assert trajectory.versions.tolist() == [-1, -1, -1, 5, 5]
    assert trajectory.trajectory_id == "0-3/1"
    assert (trajectory.label, trajectory.fields) == ("7", {"prompt": "p", "level": 2})
    assert trajectory.reward is None


def test_the_turns_are_the_messages_of_the_row_or_its_one_text_and_then_the_response(tiny_tokenizer: Any) -> None:
    seven = sample(tiny_tokenizer.encode("7"))
    of_text = occurrence([11])
    of_messages = replace(of_text, prompt=replace(of_text.prompt, messages=(Turn("system", "s"), Turn("user", "u"))))
    for given, turns in ((of_text, [("prompt", "the prompt")]), (of_messages, [("system", "s"), ("user", "u")])):
        trajectory = single_turn_trajectory(given, seven, sample_index=0, tokenizer=tiny_tokenizer)
        assert [(turn.role, turn.text) for turn in trajectory.turns] == [*turns, ("assistant", "7")]


def test_the_arrays_have_the_types_that_travel(tiny_tokenizer: Any) -> None:
    trajectory = episode(tiny_tokenizer, [11], [21])
    assert trajectory.tokens.dtype == np.int64
    assert trajectory.loss_mask.dtype == np.bool_
    assert trajectory.rollout_log_probs.dtype == np.float32
    assert trajectory.versions.dtype == np.int64


def test_the_end_token_is_part_of_the_response_and_not_of_its_text(tiny_tokenizer: Any) -> None:
    seven = tiny_tokenizer.encode("7")
    trajectory = episode(tiny_tokenizer, [11], [*seven, tiny_tokenizer.eos_token_id])
    assert trajectory.response_length == len(seven) + 1
    assert trajectory.loss_mask[-1]
    assert trajectory.response_text == "7"


def test_tokens_that_would_not_be_encoded_again_stay_as_they_were_sampled(tiny_tokenizer: Any) -> None:
    merged = tiny_tokenizer.encode("What is ")
    split = [token for letter in "What is " for token in tiny_tokenizer.encode(letter)]
    assert split != merged, "the text has two tokenizations"
    trajectory = episode(tiny_tokenizer, [11], split)
    assert trajectory.response_text == "What is "
    assert trajectory.tokens[1:].tolist() == split


def test_a_response_cut_inside_a_character_is_kept_whole_as_tokens(tiny_tokenizer: Any) -> None:
    emoji = tiny_tokenizer.encode("🙂")
    assert len(emoji) > 1
    trajectory = episode(tiny_tokenizer, [11], emoji[:-1], finish_reason="length")
    assert trajectory.tokens[1:].tolist() == emoji[:-1]
    assert trajectory.response_length == len(emoji) - 1
    assert trajectory.finish_reason == "length"
    assert "\N{REPLACEMENT CHARACTER}" in trajectory.response_text


def test_the_length_is_counted_in_tokens_even_where_the_text_is_empty(tiny_tokenizer: Any) -> None:
    trajectory = episode(tiny_tokenizer, [11, 12], [tiny_tokenizer.eos_token_id])
    assert trajectory.response_text == ""
    assert trajectory.response_length == 1


def test_pad_and_role_tokens_that_the_policy_chose_are_trained_on(tiny_tokenizer: Any) -> None:
    """A padding token in the middle of a response is a choice like any other: no mask is made from token ids."""
    trajectory = episode(tiny_tokenizer, [11], [tiny_tokenizer.pad_token_id, 40, tiny_tokenizer.pad_token_id])
    assert trajectory.loss_mask.tolist() == [False, True, True, True]
