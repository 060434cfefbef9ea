from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from slipstream.config.data import DataConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.packing import pack
from slipstream.data.prompts import build_prompts
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ConfigError, DataError, ModelError

RowsFile = Callable[..., str]
LIMIT = 1000


def configured(source: str, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"source": source, "response_key": "response", **keys})


def whole(source: str, **keys: object) -> DataConfig:
    return configured(source, prompt_key="messages", response_key="messages", **keys)


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]}


def learned(tokenizer: Any, example: TrainingExample) -> str:
    return str(tokenizer.decode(example.tokens[example.loss_mask]))


def test_only_the_response_and_the_end_of_the_turn_are_learned(rows_file: RowsFile, llama_like: Any) -> None:
    source = rows_file({"prompt": "2+2?", "response": "It is 4."})
    (example,), report = build_sft_examples(configured(source), llama_like, LIMIT)
    assert learned(llama_like, example) == "It is 4.<|eot|>"
    prompt = build_prompts(configured(source, label_key=None), llama_like)[0][0]
    assert example.tokens[~example.loss_mask].tolist() == prompt.tokens.tolist(), "the prompt is the rollout's, one BOS"
    assert str(report) == "1 of 1 rows kept; columns: prompt 'prompt', response 'response'"


def test_without_a_chat_template_the_response_follows_the_prompt_and_ends_with_eos(
    rows_file: RowsFile, base_model_like: Any
) -> None:
    source = rows_file({"prompt": "2+2=", "response": "4"}, {"prompt": "2+2=", "response": "4<|finish|>"})
    examples, _ = build_sft_examples(configured(source, apply_chat_template=False), base_model_like, LIMIT)
    assert [base_model_like.decode(example.tokens) for example in examples] == ["<|begin|>2+2=4<|finish|>"] * 2
    assert [learned(base_model_like, example) for example in examples] == ["4<|finish|>"] * 2
    with pytest.raises(ModelError, match="no chat template"):
        build_sft_examples(configured(source), base_model_like, LIMIT)


def test_a_template_that_drops_earlier_thinking_leaves_exactly_the_final_assistant_texts(
    rows_file: RowsFile, qwen_like: Any
) -> None:
    row = chat("hi", "<think>\nsecret\n</think>\n\nhello", "2+2?", "<think>\nadd\n</think>\n\n4", "and?", "ok")
    (example,), _ = build_sft_examples(whole(rows_file(row)), qwen_like, LIMIT)
    assert learned(qwen_like, example) == "hello<|im_end|>4<|im_end|><think>\n\n</think>\n\nok<|im_end|>"
    assert "secret" not in qwen_like.decode(example.tokens)
    first = qwen_like.decode(example.tokens[: example.loss_mask.argmax()])
    assert first == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_all_assistant_turns_of_a_conversation_are_learned(rows_file: RowsFile, llama_like: Any) -> None:
    (example,), _ = build_sft_examples(whole(rows_file(chat("a", " b ", "c", "d"))), llama_like, LIMIT)
    assert learned(llama_like, example) == "b<|eot|>d<|eot|>"


def test_templates_that_mark_their_assistant_texts_are_believed(rows_file: RowsFile, arithmetic_tokenizer: Any) -> None:
    row = chat("What is 1 + 1 =", "2", "What is 1 + 2 =", "3")
    (example,), _ = build_sft_examples(whole(rows_file(row)), arithmetic_tokenizer, LIMIT)
    assert learned(arithmetic_tokenizer, example) == "2<|end|>3<|end|>"


def test_a_response_after_a_chat_as_prompt_is_learned_alone(rows_file: RowsFile, llama_like: Any) -> None:
    row = {"prompt": chat("a", "b", "c")["messages"], "response": "d"}
    (example,), _ = build_sft_examples(configured(rows_file(row)), llama_like, LIMIT)
    assert learned(llama_like, example) == "d<|eot|>"


def test_what_comes_after_the_last_assistant_turn_is_ignored(rows_file: RowsFile, qwen_like: Any) -> None:
    row = chat("a", "<think>\nt\n</think>\n\nb", "c")
    (example,), _ = build_sft_examples(whole(rows_file(row)), qwen_like, LIMIT)
    assert learned(qwen_like, example) == "<think>\nt\n</think>\n\nb<|im_end|>"
    assert example.loss_mask[-1]


def test_the_system_prompt_is_context(rows_file: RowsFile, llama_like: Any) -> None:
    config = whole(rows_file(chat("a", "b")), system_prompt="Be brief.")
    (example,), _ = build_sft_examples(config, llama_like, LIMIT)
    assert "Be brief." in llama_like.decode(example.tokens)
    assert learned(llama_like, example) == "b<|eot|>"


def with_template(tokenizer: Any, template: str) -> Any:
    from copy import deepcopy

    changed = deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_template_without_an_end_of_turn_gets_eos_and_takes_single_turns_only(
    rows_file: RowsFile, llama_like: Any
) -> None:
    plain = with_template(
        llama_like,
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
    )
    examples, report = build_sft_examples(whole(rows_file(chat("a", "b"), chat("a", "b", "c", "d"))), plain, LIMIT)
    assert [learned(plain, example) for example in examples] == [" b<|finish|>"]
    assert report.dropped == {"assistant text not separable in the rendered conversation": [1]}


def test_rows_whose_assistant_text_cannot_be_told_apart_are_refused_and_counted(
    rows_file: RowsFile, llama_like: Any
) -> None:
    rewriting = with_template(
        llama_like,
        "{{ bos_token }}{{ messages | length }}{% for message in messages %}"
        "{{ '<|start|>' + message.role + '<|head|>' + message.content + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|head|>' }}{% endif %}",
    )
    with pytest.raises(DataError, match="1 assistant text not separable in the rendered conversation"):
        build_sft_examples(whole(rows_file(chat("a", "b"))), rewriting, LIMIT)
    # The end of a turn inside a text, and a text that grows together with the line before it.
    rows = rows_file(chat("a", "b<|eot|>c"), chat("a", "b"), chat("a", "b", "c", "<|start|>d"))
    _, report = build_sft_examples(whole(rows), llama_like, LIMIT)
    assert report.dropped == {"assistant text not separable in the rendered conversation": [0, 2]}


def test_a_template_that_ends_only_the_last_turn_takes_single_turns_only(rows_file: RowsFile, llama_like: Any) -> None:
    ending_last = with_template(
        llama_like,
        "{% for message in messages %}{{ '<|start|>' + message.role + '<|head|>' + message.content }}"
        "{% if loop.last and message.role == 'assistant' %}{{ '<|eot|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|head|>' }}{% endif %}",
    )
    rows = rows_file(chat("a", "b"), chat("a", "b", "c", "d"))
    examples, report = build_sft_examples(whole(rows), ending_last, LIMIT)
    assert [learned(ending_last, example) for example in examples] == ["b<|eot|>"]
    assert report.dropped == {"assistant text not separable in the rendered conversation": [1]}


def test_a_row_whose_prompt_has_other_tokens_alone_is_refused(rows_file: RowsFile, line_merging: Any) -> None:
    assert len(line_merging("\n\n", add_special_tokens=False)["input_ids"]) == 1
    assert len(line_merging("\n\nb", add_special_tokens=False)["input_ids"]) == 3
    with pytest.raises(DataError, match="1 assistant text not separable"):
        build_sft_examples(whole(rows_file(chat("a", "b"))), line_merging, LIMIT)


def test_rows_left_out_are_counted_by_reason_and_lengths_never_cut(rows_file: RowsFile, llama_like: Any) -> None:
    rows = [
        {"prompt": "", "response": "x"},
        {"prompt": "a", "response": None},
        {"prompt": "a", "response": "  "},
        {"prompt": "a", "response": "y" * 200},
        {"prompt": "z" * 200, "response": "x"},
        {"prompt": "held  out", "response": "x"},
        {"prompt": "a", "response": "x"},
    ]
    config = configured(rows_file(*rows), max_prompt_tokens=150)
    examples, report = build_sft_examples(config, llama_like, 100, exclude={"held out"})
    assert [example.example_id for example in examples] == ["6"]
    assert report.dropped == {
        "empty prompt": [0],
        "no response": [1, 2],
        "prompt and response longer than max_tokens (100)": [3],
        "prompt longer than data.max_prompt_tokens (150)": [4],
        "also an evaluation prompt": [5],
    }


def test_a_row_of_exactly_the_limit_is_kept(rows_file: RowsFile, llama_like: Any) -> None:
    config = configured(rows_file({"prompt": "a", "response": "x"}))
    length = len(build_sft_examples(config, llama_like, LIMIT)[0][0].tokens)
    assert len(build_sft_examples(config, llama_like, length)[0]) == 1
    with pytest.raises(
        DataError, match=r"no row of .* is left to use: 0 of 1 rows kept; dropped: 1 prompt and response"
    ):
        build_sft_examples(config, llama_like, length - 1)


def test_conversations_without_an_assistant_are_counted(rows_file: RowsFile, llama_like: Any) -> None:
    _, report = build_sft_examples(whole(rows_file(chat("a"), chat("a", " "), chat("a", "b"))), llama_like, LIMIT)
    assert report.dropped == {"no response": [0, 1]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"response_key": "prompt", "apply_chat_template": False}, "need data.apply_chat_template"),
        ({"response_key": "prompt", "prompt_template": "Q {prompt}"}, "prompt_template has no place"),
    ],
)
def test_keys_that_contradict_each_other_are_named(
    rows_file: RowsFile, llama_like: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sft_examples(configured(rows_file({"prompt": "a"}), **keys), llama_like, LIMIT)


def test_a_response_that_is_no_text_is_named_by_row(rows_file: RowsFile, llama_like: Any) -> None:
    with pytest.raises(DataError, match="row 0: expected text in 'response', found int"):
        build_sft_examples(configured(rows_file({"prompt": "a", "response": 4})), llama_like, LIMIT)


def test_packed_rows_learn_what_they_learn_apart(rows_file: RowsFile, qwen_like: Any) -> None:
    rows = rows_file(chat("a", "b"), chat("c", "d", "e", "f"), chat("gg", "hh"))
    examples, _ = build_sft_examples(whole(rows), qwen_like, LIMIT)
    packed = pack(examples)
    assert qwen_like.decode(packed.targets) == "".join(learned(qwen_like, example) for example in examples)


def test_of_a_conversation_the_last_turn_alone_can_be_learned(rows_file: RowsFile, llama_like: Any) -> None:
    config = whole(rows_file(chat("a", "b", "c", "d")))
    (example,), _ = build_sft_examples(config, llama_like, LIMIT, only_last_turn=True)
    (every,), _ = build_sft_examples(config, llama_like, LIMIT)
    assert learned(llama_like, example) == "d<|eot|>"
    np.testing.assert_array_equal(example.tokens, every.tokens)


def test_the_last_turn_can_be_learned_where_the_template_rewrites_earlier_ones(
    rows_file: RowsFile, qwen_like: Any
) -> None:
    """Qwen3's template drops the thinking of earlier turns: those are context as the model will see them later."""
    row = chat("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd")
    (example,), _ = build_sft_examples(whole(rows_file(row)), qwen_like, LIMIT, only_last_turn=True)
    assert "hm" not in qwen_like.decode(example.tokens)
    assert learned(qwen_like, example) == "<think>\nso\n</think>\n\nd<|im_end|>"


def test_a_completion_can_be_messages_of_which_the_assistants_are_learned(rows_file: RowsFile, llama_like: Any) -> None:
    prompt, completion = chat("a")["messages"], chat("x", "b", "c", "d")["messages"][1:]
    (example,), _ = build_sft_examples(
        DataConfig(source=rows_file({"prompt": prompt, "completion": completion})), llama_like, LIMIT
    )
    assert learned(llama_like, example) == "b<|eot|>d<|eot|>"
    (last,), _ = build_sft_examples(
        DataConfig(source=rows_file({"prompt": "a", "completion": completion})), llama_like, LIMIT, only_last_turn=True
    )
    assert learned(llama_like, last) == "d<|eot|>"


@pytest.mark.parametrize("max_tokens", [4, 5, 7, 1000])
def test_every_token_of_a_text_is_predicted_once_however_long_it_is(
    rows_file: RowsFile, base_model_like: Any, max_tokens: int
) -> None:
    text = "the answer is four, the question is what"
    examples, report = build_sft_examples(DataConfig(source=rows_file({"text": text})), base_model_like, max_tokens)
    assert report.kept == 1
    assert all(2 <= len(example.tokens) <= max_tokens for example in examples)
    whole_text = [*base_model_like(text)["input_ids"], base_model_like.eos_token_id]
    assert [*examples[0].tokens[:1], *(t for e in examples for t in e.tokens[e.loss_mask])] == whole_text
    for before, after in pairwise(examples):
        assert before.tokens[-1] == after.tokens[0]
    assert len({example.example_id for example in examples}) == len(examples)


def test_texts_that_hold_nothing_or_are_held_out_are_left_out(rows_file: RowsFile, base_model_like: Any) -> None:
    source = rows_file({"text": "it was"}, {"text": " "}, {"text": "a dark  night"}, {"text": None})
    examples, report = build_sft_examples(DataConfig(source=source), base_model_like, LIMIT, exclude={"a dark night"})
    assert [example.example_id for example in examples] == ["0"]
    assert report.dropped == {"empty prompt": [1, 3], "also an evaluation prompt": [2]}
    with pytest.raises(ConfigError, match=r"data\.system_prompt has no place around texts"):
        build_sft_examples(DataConfig(source=source, system_prompt="x"), base_model_like, LIMIT)


def test_half_a_character_in_a_conversation_is_named_by_row(rows_file: RowsFile, llama_like: Any) -> None:
    with pytest.raises(DataError, match="row 0: 'messages' holds half a character"):
        build_sft_examples(whole(rows_file(chat("\ud800", "b"))), llama_like, LIMIT)


def test_conversations_without_a_user_are_counted_as_such(rows_file: RowsFile, llama_like: Any) -> None:
    strange = {"messages": [{"role": "human", "content": "a"}, {"role": "assistant", "content": "b"}]}
    _, report = build_sft_examples(whole(rows_file(strange, chat("a", "b"))), llama_like, LIMIT)
    assert report.dropped == {"no message whose role is 'user'": [0]}
