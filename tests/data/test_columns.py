"""Columns are recognized as they lie: those of this project, of OpenRLHF, of TRL and of verl."""

from typing import Any

import pytest

from slipstream.config.data import DataConfig
from slipstream.data.columns import Layout, cell, name_columns
from slipstream.errors import DataError

USER = {"role": "user", "content": "who?"}
ASSISTANT = {"role": "assistant", "content": "me"}
CHAT = [USER, ASSISTANT]


def named(row: dict[str, Any], layout: Layout, *, needs_label: bool = True, **keys: Any) -> DataConfig:
    return name_columns([row], DataConfig(source="x.jsonl", **keys), layout, needs_label=needs_label).config


@pytest.mark.parametrize(
    ("row", "prompt", "label"),
    [
        ({"prompt": "who?", "label": "me"}, "prompt", "label"),
        ({"input": "who?", "label": "me"}, "input", "label"),
        ({"messages": [USER], "answer": "me"}, "messages", "answer"),
        ({"question": "who?", "answer": "me"}, "question", "answer"),
        (
            {"data_source": "x", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "me"}},
            "prompt",
            "reward_model.ground_truth",
        ),
    ],
)
def test_prompts_and_their_reference_answers(row: dict[str, Any], prompt: str, label: str) -> None:
    config = named(row, Layout.PROMPTS)
    assert (config.prompt_key, config.label_key) == (prompt, label)
    assert cell(row, config.label_key) == "me"


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "who?", "response": "me"}, "prompt", "response"),
        ({"input": "who?", "output": "me"}, "input", "output"),
        ({"prompt": "who?", "completion": "me"}, "prompt", "completion"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt", "completion"),
        ({"question": "who?", "answer": "me"}, "question", "answer"),
        ({"messages": CHAT}, "messages", "messages"),
        ({"prompt": "who?", "prompt_id": "1", "messages": CHAT}, "messages", "messages"),
        ({"messages": CHAT, "text": "who? me"}, "messages", "messages"),
        ({"prompt": CHAT}, "prompt", "prompt"),
        ({"text": "It was a dark and stormy night."}, None, "text"),
    ],
)
def test_responses_to_imitate(row: dict[str, Any], prompt: str | None, response: str) -> None:
    config = named(row, Layout.RESPONSES)
    assert (config.prompt_key, config.response_key) == (prompt, response)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "who?", "chosen": "me", "rejected": "you"}, "prompt"),
        ({"messages": [USER], "chosen": "me", "rejected": "you"}, "messages"),
        ({"chosen": CHAT, "rejected": CHAT}, None),
    ],
)
def test_pairs(row: dict[str, Any], prompt: str | None) -> None:
    config = named(row, Layout.PAIRS)
    assert (config.prompt_key, config.chosen_key, config.rejected_key) == (prompt, "chosen", "rejected")


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "who?", "completion": "me", "label": True}, "prompt", "completion"),
        ({"input": "who?", "output": "me", "label": True}, "input", "output"),
        ({"messages": CHAT, "label": True}, "messages", "messages"),
    ],
)
def test_labelled_answers(row: dict[str, Any], prompt: str, response: str) -> None:
    config = named(row, Layout.LABELLED_ANSWERS)
    assert (config.prompt_key, config.response_key, config.label_key) == (prompt, response, "label")


def test_what_is_configured_goes_before_what_is_recognized() -> None:
    row = {"prompt": "a", "problem": "b", "label": "c", "final": "d", "response": "e", "best": "f"}
    config = named(row, Layout.PROMPTS, prompt_key="problem", label_key="final")
    assert (config.prompt_key, config.label_key) == ("problem", "final")
    config = named(row, Layout.RESPONSES, response_key="best")
    assert (config.prompt_key, config.response_key) == ("prompt", "best")
    config = named(row, Layout.RESPONSES, response_key="prompt")
    assert (config.prompt_key, config.response_key) == ("prompt", "prompt")
    config = named(row, Layout.RESPONSES, prompt_key=None, response_key="best")
    assert (config.prompt_key, config.response_key) == (None, "best")


def test_a_reference_answer_is_asked_for_only_where_something_compares_with_it() -> None:
    row = {"prompt": "who?"}
    assert named(row, Layout.PROMPTS, label_key=None).label_key is None
    assert named(row, Layout.PROMPTS, needs_label=False).label_key is None
    with pytest.raises(
        DataError, match=r"data\.label_key: no column .* known to hold this. Looked for label, .* null if"
    ):
        named(row, Layout.PROMPTS)


@pytest.mark.parametrize(
    ("row", "layout", "keys", "message"),
    [
        ({"promt": "a", "label": 1}, Layout.PROMPTS, {}, r"is it 'promt'\? Looked for prompt, me"),
        (
            {"prompt": "a", "label": 1},
            Layout.PROMPTS,
            {"prompt_key": "promt"},
            r"'promt' in 'x\.jsonl'; did you mean 'pr",
        ),
        ({"prompt": "a"}, Layout.PROMPTS, {"label_key": "gold"}, r"data\.label_key: no column 'gold' .* or to null if"),
        (
            {"prompt": "a", "reply": "b"},
            Layout.RESPONSES,
            {},
            r"data\.response_key: .*columns found: prompt, reply\); set",
        ),
        ({"prompt": "a"}, Layout.RESPONSES, {"response_key": "answr"}, r"data\.response_key: no column 'answr' in"),
        ({"prompt": "a", "chosen": "b"}, Layout.PAIRS, {}, r"data\.rejected_key: .*Looked for rejected"),
        ({"prompt": "a", "completion": "b"}, Layout.LABELLED_ANSWERS, {}, r"data\.label_key: .*Looked for label"),
        (
            {"prompt": "a", "reward_model": {"gold": 1}},
            Layout.PROMPTS,
            {},
            r"data\.label_key: .*found: prompt, reward_model",
        ),
    ],
)
def test_a_missing_column_is_named_with_its_key_and_the_columns_found(
    row: dict[str, Any], layout: Layout, keys: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        named(row, layout, **keys)


def test_the_two_halves_of_a_prompt_are_not_taken_for_one() -> None:
    message = r"has a column 'instruction' \(columns found: input, instruction, output\): where the prompt is divided"
    with pytest.raises(DataError, match=message):
        named({"instruction": "Translate.", "input": "oui", "output": "yes"}, Layout.RESPONSES)


def test_a_column_whose_name_has_a_dot_goes_before_an_entry() -> None:
    row = {"a.b": 1, "a": {"b": 2, "c": {"d": 3}}}
    assert [cell(row, name) for name in ("a.b", "a.c.d", "a.x", "a.b.c", None)] == [1, 3, None, None, None]


def test_texts_in_nested_columns_are_texts() -> None:
    rows = [{"d": {"c": "Q: a A: yes", "r": "Q: a A: no"}}]
    config = DataConfig(source="x.jsonl", chosen_key="d.c", rejected_key="d.r")
    assert name_columns(rows, config, Layout.PAIRS).holds_texts
