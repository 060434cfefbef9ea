"""Prompts that lie in the answers are split off: what is learned is the same however a pair was written down."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.data import DataConfig
from slipstream.data.answers import _split_place, evaluation_identities
from slipstream.data.columns import Layout
from slipstream.data.preferences import build_preference_pairs
from slipstream.errors import DataError

RowsFile = Callable[..., str]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


EXPLICIT = {"prompt": "who?", "chosen": "me", "rejected": "you"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("who?")], "chosen": "me", "rejected": "you"},
        {"prompt": [user("who?")], "chosen": [assistant("me")], "rejected": [assistant("you")]},
        {"prompt": "who?", "chosen": [assistant("me")], "rejected": [assistant("you")]},
        {"prompt": "who?", "chosen": assistant("me"), "rejected": assistant("you")},
        {"chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("you")]},
        {"prompt": "who?", "chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("you")]},
        {"messages": [user("who?")], "chosen": "me", "rejected": "you"},
    ],
)
def test_a_pair_is_the_same_however_it_lies_in_its_row(
    qwen_like: Any, rows_file: RowsFile, row: dict[str, Any]
) -> None:
    [expected], _ = build_preference_pairs(DataConfig(source=rows_file(EXPLICIT)), qwen_like, 64)
    [pair], _ = build_preference_pairs(DataConfig(source=rows_file(row)), qwen_like, 64)
    for name in ("chosen", "rejected", "chosen_mask", "rejected_mask"):
        np.testing.assert_array_equal(getattr(pair, name), getattr(expected, name))


def test_of_several_turns_after_the_prompt_the_assistants_are_the_answer(llama_like: Any, rows_file: RowsFile) -> None:
    chosen = [assistant("me"), user("sure?"), assistant("yes")]
    row = {"prompt": [user("hi"), assistant("ho"), user("who?")], "chosen": chosen, "rejected": [assistant("you")]}
    [pair], _ = build_preference_pairs(DataConfig(source=rows_file(row)), llama_like, 128)
    assert llama_like.decode(pair.chosen[pair.chosen_mask]) == "me<|eot|>yes<|eot|>"
    assert llama_like.decode(pair.rejected[pair.rejected_mask]) == "you<|eot|>"


def test_earlier_turns_that_both_conversations_have_are_the_prompt(llama_like: Any, rows_file: RowsFile) -> None:
    start = [user("hi"), assistant("ho"), user("who?")]
    row = {"chosen": [*start, assistant("me")], "rejected": [*start, assistant("you")]}
    [pair], _ = build_preference_pairs(DataConfig(source=rows_file(row)), llama_like, 128)
    assert llama_like.decode(pair.chosen[pair.chosen_mask]) == "me<|eot|>"


def test_texts_with_prompt_and_answer_in_one_are_learned_as_they_lie(base_model_like: Any, rows_file: RowsFile) -> None:
    """No chat template goes around them, even with a tokenizer that has none."""
    row = {"chosen": "\n\nHuman: who?\n\nAssistant: me", "rejected": "\n\nHuman: who?\n\nAssistant: you there"}
    [pair], _ = build_preference_pairs(DataConfig(source=rows_file(row)), base_model_like, 128)
    prompt = "\n\nHuman: who?\n\nAssistant:"
    assert base_model_like.decode(pair.chosen[~pair.chosen_mask], skip_special_tokens=True) == prompt
    assert base_model_like.decode(pair.chosen[pair.chosen_mask], skip_special_tokens=True) == " me"
    assert base_model_like.decode(pair.rejected[pair.rejected_mask], skip_special_tokens=True) == " you there"
    assert pair.chosen[-1] == pair.rejected[-1] == base_model_like.eos_token_id


@given(st.text("ab \n", max_size=8), st.text("ab \n", max_size=8), st.text("ab \n", max_size=8))
def test_texts_are_divided_where_they_are_still_the_same(prompt: str, first: str, second: str) -> None:
    chosen, rejected = prompt + first, prompt + second
    place = _split_place(chosen, rejected)
    assert chosen[:place] == rejected[:place]
    assert place == 0 or (chosen[place].isspace() and not chosen[place - 1].isspace())
    assert (chosen[place:].strip() and rejected[place:].strip()) or place == 0


def test_what_is_no_pair_is_counted_with_its_reason(llama_like: Any, rows_file: RowsFile) -> None:
    rows = [
        {"chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("you")]},
        {"chosen": [user("who?"), assistant("me")], "rejected": [user("what?"), assistant("you")]},
        {"chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("me")]},
        {"chosen": [user("who?"), assistant("me")], "rejected": []},
        {"chosen": [user("who?"), user("me")], "rejected": [user("who?"), assistant("me")]},
    ]
    pairs, report = build_preference_pairs(DataConfig(source=rows_file(*rows)), llama_like, 128)
    assert [pair.pair_id for pair in pairs] == ["0"]
    assert report.dropped == {
        "the two conversations differ before the assistant's answer": [1, 4],
        "both answers are the same": [2],
        "empty prompt": [3],
    }


def test_a_held_out_prompt_is_known_however_it_lies_in_its_row(llama_like: Any, rows_file: RowsFile) -> None:
    whole = {"chosen": [user("who?"), assistant("me")], "rejected": [user("who?"), assistant("you")]}
    identities = evaluation_identities(DataConfig(source=rows_file(whole)), Layout.PAIRS)
    other = {"prompt": "what?", "chosen": "a", "rejected": "b"}
    _, report = build_preference_pairs(
        DataConfig(source=rows_file(EXPLICIT, other)), llama_like, 64, exclude=identities
    )
    assert report.dropped == {"also an evaluation prompt": [0]}


def test_messages_that_are_none_are_named_by_row(llama_like: Any, rows_file: RowsFile) -> None:
    path = rows_file({"chosen": [{"from": "gpt", "value": "me"}], "rejected": [assistant("you")]})
    with pytest.raises(
        DataError,
        match=r"row 0: message 0 of 'chosen' needs 'role' and 'content' as text, found from .str., value .str.",
    ):
        build_preference_pairs(DataConfig(source=path), llama_like, 64)


def test_a_prompt_column_that_is_switched_off_is_not_read(base_model_like: Any, rows_file: RowsFile) -> None:
    row = {"prompt": "Q: a", "chosen": "Q: a A: yes", "rejected": "Q: a A: no"}
    [pair], _ = build_preference_pairs(DataConfig(source=rows_file(row), prompt_key=None), base_model_like, 64)
    assert base_model_like.decode(pair.chosen, skip_special_tokens=True) == "Q: a A: yes"
    assert base_model_like.decode(pair.rejected[pair.rejected_mask], skip_special_tokens=True) == " no"


@pytest.mark.parametrize("prompt", ["", None, " "])
def test_a_pair_with_an_empty_prompt_among_others_is_left_out(
    llama_like: Any, rows_file: RowsFile, prompt: str | None
) -> None:
    row = {"prompt": prompt, "chosen": "The answer is 4", "rejected": "The answer is 5"}
    pairs, report = build_preference_pairs(DataConfig(source=rows_file(EXPLICIT, row)), llama_like, 64)
    assert [pair.pair_id for pair in pairs] == ["0"] and report.dropped == {"empty prompt": [1]}


def test_a_message_that_no_tokenizer_takes_is_named_by_row(llama_like: Any, rows_file: RowsFile) -> None:
    whole = [[user("who?"), assistant(answer)] for answer in ("\ud800", "you")]
    path = rows_file({"chosen": whole[0], "rejected": whole[1]})
    with pytest.raises(DataError, match="row 0: 'chosen' holds half a character"):
        build_preference_pairs(DataConfig(source=path), llama_like, 64)
