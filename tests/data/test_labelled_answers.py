"""Answers with a label: rendered as supervised fine-tuning renders them, each beside the answer to another prompt."""

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.labelled_answers import (
    _OtherAnswers,
    build_labelled_answers,
    labelled_example,
    mismatched_example,
)
from slipstream.errors import DataError


def config(source: str, **changes) -> DataConfig:
    return DataConfig(source=source, **({"response_key": "completion"} | changes))


def row(prompt="who?", completion="me", label=True, **others) -> dict:
    return {"prompt": prompt, "completion": completion, "label": label, **others}


@pytest.mark.parametrize("tokenizer", ["qwen_like", "llama_like", "arithmetic_tokenizer"])
def test_a_sequence_is_that_of_supervised_fine_tuning(tokenizer, rows_file, request):
    tokenizer = request.getfixturevalue(tokenizer)
    path = rows_file(row(), row("what?", "it", False))
    compared, report = build_labelled_answers(config(path), tokenizer, 64)
    imitated, _ = build_sft_examples(config(path), tokenizer, 64)
    assert report.kept == 2
    for each, expected in zip(compared, imitated, strict=True):
        example = labelled_example(each.answer)
        np.testing.assert_array_equal(example.tokens, expected.tokens)
        np.testing.assert_array_equal(example.loss_mask, expected.loss_mask)
        assert example.example_id == expected.example_id
    assert [set(labelled_example(each.answer).token_fields["is_desirable"]) for each in compared] == [{1.0}, {0.0}]


def test_an_answer_is_compared_with_the_next_one_to_another_prompt(arithmetic_tokenizer, rows_file):
    rows = [row("a?", "1"), row("a?", "2", False), row("b?", "3"), row("c?", "4")]
    compared, _ = build_labelled_answers(config(rows_file(*rows)), arithmetic_tokenizer, 64)
    found = [mismatched_example(each) for each in compared]
    answers = [arithmetic_tokenizer.decode(each.tokens[each.loss_mask], skip_special_tokens=True) for each in found]
    assert [answer.strip() for answer in answers] == ["3", "3", "4", "1"]
    for each, example in zip(compared, found, strict=True):
        prompt = each.answer.tokens[: each.answer.start]
        np.testing.assert_array_equal(example.tokens[~example.loss_mask], prompt)
    assert [each.example_id for each in found] == ["0/mismatched", "1/mismatched", "2/mismatched", "3/mismatched"]


def test_conversations_end_with_the_answer(arithmetic_tokenizer, rows_file):
    def messages(*texts: str) -> list[dict]:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    whole = [{"messages": messages("a?", "1", "and?", "2"), "label": True}, {"messages": messages("b?"), "label": True}]
    whole.append({"messages": messages("c?", "3"), "label": False})
    keys = {"prompt_key": "messages", "response_key": "messages"}
    compared, report = build_labelled_answers(config(rows_file(*whole), **keys), arithmetic_tokenizer, 64)
    split = [{"prompt": messages("a?", "1", "and?"), "completion": "2"}, {"prompt": "c?", "completion": "3"}]
    expected, _ = build_sft_examples(config(rows_file(*split)), arithmetic_tokenizer, 64)
    assert report.dropped == {"no answer of the assistant at the end": [1]}
    for each, example in zip(compared, expected, strict=True):
        np.testing.assert_array_equal(each.answer.tokens, example.tokens)
        np.testing.assert_array_equal(labelled_example(each.answer).loss_mask, example.loss_mask)


def test_what_cannot_be_used_is_left_out_and_named(arithmetic_tokenizer, rows_file):
    rows = [
        row(),
        row(completion=" "),
        row(prompt=""),
        row(label=None),
        row(completion="9" * 40),
        row(prompt="9" * 30),
        row(prompt="held out"),
        row("what?"),
    ]
    data = config(rows_file(*rows), max_prompt_tokens=20)
    compared, report = build_labelled_answers(data, arithmetic_tokenizer, 40, exclude={"held out"})
    assert [each.answer.row for each in compared] == [0, 7]
    assert report.dropped == {
        "no response": [1],
        "empty prompt": [2],
        "no label": [3],
        "prompt and response longer than max_tokens (40)": [4],
        "prompt longer than data.max_prompt_tokens (20)": [5],
        "also an evaluation prompt": [6],
    }


def test_an_answer_with_whose_prompt_no_other_fits_is_left_out(arithmetic_tokenizer, rows_file):
    rows = [row("9" * 20, "1"), row("a?", "2" * 15), row("b?", "3" * 15)]
    compared, report = build_labelled_answers(config(rows_file(*rows)), arithmetic_tokenizer, 32)
    assert [each.answer.row for each in compared] == [1, 2]
    assert report.dropped == {"no answer to another prompt fits within max_tokens": [0]}


def test_a_label_is_true_or_false_also_as_the_text_of_a_csv_file(arithmetic_tokenizer, rows_file):
    labels = [True, "True", " false ", False]
    rows = [row(f"{number}?", label=label) for number, label in enumerate(labels)]
    compared, _ = build_labelled_answers(config(rows_file(*rows)), arithmetic_tokenizer, 64)
    assert [each.answer.is_desirable for each in compared] == [True, True, False, False]
    for wrong in (1, "good", 0.5):
        with pytest.raises(DataError, match=r"row 0: expected true or false in 'label', found "):
            build_labelled_answers(config(rows_file(row(label=wrong))), arithmetic_tokenizer, 64)


def test_what_is_missing_is_named(arithmetic_tokenizer, rows_file):
    path = rows_file({"prompt": "a?", "completion": "1"})
    with pytest.raises(
        DataError, match=r"data\.label_key: no column .* Looked for label \(columns found: completion, prompt\)"
    ):
        build_labelled_answers(config(path), arithmetic_tokenizer, 64)
    with pytest.raises(DataError, match="have the same prompt; kto compares each answer"):
        build_labelled_answers(config(rows_file(row(), row(completion="you"))), arithmetic_tokenizer, 64)
    with pytest.raises(DataError, match="is left to use: 0 of 1 rows kept; dropped: 1 no response"):
        build_labelled_answers(config(rows_file(row(completion=""))), arithmetic_tokenizer, 64)


def test_thousands_of_answers_to_one_prompt_are_compared_at_once(arithmetic_tokenizer, rows_file, monkeypatch):
    """Not each with each: the number of comparisons grows with the number of rows."""
    rows = [row("a?", str(number)) for number in range(300)] + [row("b?", "1")]
    compared, _ = build_labelled_answers(config(rows_file(*rows)), arithmetic_tokenizer, 64)
    assert len(compared) == 301
    others = _OtherAnswers([each.answer for each in compared])
    reads = 0

    class Counted(list):
        def __getitem__(self, place):
            nonlocal reads
            reads += 1
            return super().__getitem__(place)

    others._prompts = Counted(others._prompts)
    assert all(others.after(place, 64) is not None for place in range(301))
    assert reads <= 301 * 8
