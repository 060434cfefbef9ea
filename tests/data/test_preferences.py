"""Pairs of answers: rendered as supervised fine-tuning renders them, and honest about what is left out."""

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.preferences import answer_examples, build_preference_pairs, pair_examples
from slipstream.data.prompts import build_prompts
from slipstream.errors import DataError


def config(source: str, **changes) -> DataConfig:
    return DataConfig(source=source, **({"chosen_key": "chosen", "rejected_key": "rejected"} | changes))


def row(prompt="who?", chosen="me", rejected="you", **others) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **others}


@pytest.mark.parametrize("tokenizer", ["qwen_like", "llama_like", "arithmetic_tokenizer"])
@pytest.mark.parametrize("prompt", ["who?", [{"role": "user", "content": "who?"}]], ids=["text", "messages"])
def test_a_sequence_is_that_of_supervised_fine_tuning_and_goes_on_from_the_prompt_of_a_rollout(
    tokenizer, prompt, rows_file, request
):
    tokenizer = request.getfixturevalue(tokenizer)
    path = rows_file(row(prompt))
    [pair], _ = build_preference_pairs(config(path), tokenizer, 64)
    [asked], _ = build_prompts(DataConfig(source=path, label_key=None), tokenizer)
    for column, tokens in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        [imitated], _ = build_sft_examples(DataConfig(source=path, response_key=column), tokenizer, 64)
        np.testing.assert_array_equal(tokens, imitated.tokens)
        np.testing.assert_array_equal(tokens[: len(asked.tokens)], asked.tokens)
        assert int(tokens[-1]) in tokenizer.all_special_ids or int(tokens[-1]) in tokenizer.added_tokens_decoder


def test_without_chat_template_an_answer_ends_with_the_end_token(base_model_like, rows_file):
    data = config(rows_file(row()), apply_chat_template=False, prompt_template="Q: {prompt} A: ")
    [pair], _ = build_preference_pairs(data, base_model_like, 64)
    assert base_model_like.decode(pair.chosen) == "<|begin|>Q: who? A: me<|finish|>"
    assert pair.rejected[-1] == base_model_like.eos_token_id


def test_what_cannot_be_used_is_left_out_and_named(arithmetic_tokenizer, rows_file):
    rows = [
        row(),
        row(chosen="you"),
        row(chosen=""),
        row(rejected=None),
        row(prompt=" "),
        row(rejected="9" * 40),
        row(prompt="9" * 30),
        row(prompt="held out"),
    ]
    data = config(rows_file(*rows), max_prompt_tokens=20)
    pairs, report = build_preference_pairs(data, arithmetic_tokenizer, 40, exclude={"held out"})
    assert [pair.pair_id for pair in pairs] == ["0"]
    assert report.dropped == {
        "both answers are the same": [1],
        "no response in 'chosen'": [2],
        "no response in 'rejected'": [3],
        "empty prompt": [4],
        "an answer with its prompt longer than max_tokens (40)": [5],
        "prompt longer than data.max_prompt_tokens (20)": [6],
        "also an evaluation prompt": [7],
    }
    assert report.kept == 1


def test_a_pair_becomes_two_examples_the_better_one_first_scored_at_their_last_token(arithmetic_tokenizer, rows_file):
    pairs, _ = build_preference_pairs(config(rows_file(row(), row("what?"))), arithmetic_tokenizer, 64)
    examples = pair_examples(pairs)
    assert [example.example_id for example in examples] == ["0/chosen", "0/rejected", "1/chosen", "1/rejected"]
    assert [example.token_fields["is_chosen"][-1] for example in examples] == [1, 0, 1, 0]
    for example in examples:
        assert np.flatnonzero(example.loss_mask).tolist() == [len(example.tokens) - 1]
    np.testing.assert_array_equal(examples[1].tokens, pairs[0].rejected)


def test_for_a_policy_the_loss_covers_both_answers_whole(arithmetic_tokenizer, rows_file):
    path = rows_file(row("who?", chosen="me", rejected="you"))
    [pair], _ = build_preference_pairs(config(path), arithmetic_tokenizer, 64)
    examples = answer_examples(pair)
    assert [example.example_id for example in examples] == ["0/chosen", "0/rejected"]
    for example, column in zip(examples, ("chosen", "rejected"), strict=True):
        [imitated], _ = build_sft_examples(DataConfig(source=path, response_key=column), arithmetic_tokenizer, 64)
        np.testing.assert_array_equal(example.tokens, imitated.tokens)
        np.testing.assert_array_equal(example.loss_mask, imitated.loss_mask)
        assert set(example.token_fields["is_chosen"]) == {float(column == "chosen")}


def test_answers_that_the_template_makes_equal_are_left_out(llama_like, rows_file):
    path = rows_file(row(chosen="me", rejected=" me "), row())
    pairs, report = build_preference_pairs(config(path), llama_like, 64)
    assert [pair.pair_id for pair in pairs] == ["1"] and report.counts == {"both answers are the same": 1}


def test_columns_have_the_names_that_are_configured_and_a_missing_one_is_an_error(arithmetic_tokenizer, rows_file):
    path = rows_file({"question": "who?", "good": "me", "bad": "you"})
    keys = {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"}
    assert len(build_preference_pairs(config(path, **keys), arithmetic_tokenizer, 64)[0]) == 1
    with pytest.raises(DataError, match=r"data\.rejected_key: no column 'bda' in .*; did you mean 'bad'\?"):
        build_preference_pairs(config(path, **keys | {"rejected_key": "bda"}), arithmetic_tokenizer, 64)


def test_an_answer_that_is_not_text_is_an_error(arithmetic_tokenizer, rows_file):
    path = rows_file(row(chosen=[{"role": "assistant", "content": "me"}]))
    message = "row 0: expected text, or a list of chat messages, in both 'chosen' and 'rejected', found list and str"
    with pytest.raises(DataError, match=message):
        build_preference_pairs(config(path), arithmetic_tokenizer, 64)


def test_nothing_left_is_an_error_that_says_why(arithmetic_tokenizer, rows_file):
    with pytest.raises(DataError, match="is left to use: 0 of 1 rows kept; dropped: 1 both answers are the same"):
        build_preference_pairs(config(rows_file(row(chosen="you"))), arithmetic_tokenizer, 64)
