from collections.abc import Callable
from typing import Any

import pytest

from slipstream.config.data import DataConfig
from slipstream.data.answers import evaluation_identities
from slipstream.data.columns import Layout
from slipstream.data.prompts import build_prompts, prompt_identity
from slipstream.errors import ConfigError, DataError, ModelError

RowsFile = Callable[..., str]


def configured(source: str, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"source": source, **keys})


def count(tokens: Any, token: int) -> int:
    return int((tokens == token).sum())


def test_a_prompt_is_the_chat_template_applied_once_and_tokenized_once(rows_file: RowsFile, qwen_like: Any) -> None:
    prompts, report = build_prompts(configured(rows_file({"prompt": "2+2?", "label": "4", "level": 3})), qwen_like)
    (prompt,) = prompts
    assert prompt.text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen_like.decode(prompt.tokens) == prompt.text
    assert (prompt.row, prompt.label, prompt.fields["level"]) == (0, "4", 3)
    assert str(report) == "1 of 1 rows kept; columns: prompt 'prompt', label 'label'"


def test_there_is_exactly_one_bos_where_the_template_writes_one(rows_file: RowsFile, llama_like: Any) -> None:
    prompts, _ = build_prompts(configured(rows_file({"prompt": "2+2?", "label": "4"})), llama_like)
    assert llama_like("x")["input_ids"][0] == llama_like.bos_token_id, "this tokenizer adds BOS by itself"
    assert count(prompts[0].tokens, llama_like.bos_token_id) == 1
    assert prompts[0].tokens[0] == llama_like.bos_token_id


def test_there_is_exactly_one_bos_without_a_template(rows_file: RowsFile, base_model_like: Any) -> None:
    source = rows_file({"prompt": "2+2=", "label": "4"}, {"prompt": "<|begin|>2+2=", "label": "4"})
    prompts, _ = build_prompts(configured(source, apply_chat_template=False), base_model_like)
    assert [count(prompt.tokens, base_model_like.bos_token_id) for prompt in prompts] == [1, 1]
    assert [prompt.text for prompt in prompts] == ["<|begin|>2+2=", "<|begin|>2+2="]
    assert [base_model_like.decode(prompt.tokens) for prompt in prompts] == ["<|begin|>2+2=", "<|begin|>2+2="]


def test_a_tokenizer_without_bos_works_with_and_without_template(rows_file: RowsFile, qwen_like: Any) -> None:
    source = rows_file({"prompt": "2+2=", "label": "4"})
    (plain,), _ = build_prompts(configured(source, apply_chat_template=False), qwen_like)
    assert qwen_like.decode(plain.tokens) == plain.text == "2+2="


def test_without_a_chat_template_the_error_says_what_to_do(rows_file: RowsFile, base_model_like: Any) -> None:
    with pytest.raises(ModelError, match=r"no chat template; use an instruct model, or set data\.apply_chat_template"):
        build_prompts(configured(rows_file({"prompt": "2+2=", "label": "4"})), base_model_like)


def test_template_and_system_prompt_go_around_text_and_messages(rows_file: RowsFile, qwen_like: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "{2}+2?"},
    ]
    source = rows_file({"prompt": "{x}", "label": 1}, {"prompt": messages, "label": 1})
    config = configured(source, prompt_template="Q: {prompt} A:", system_prompt="Be brief.")
    prompts, _ = build_prompts(config, qwen_like)
    text, chat = (prompt.text for prompt in prompts)
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert text == start + "Q: {x} A:<|im_end|>\n<|im_start|>assistant\n"
    assert chat.startswith(start + "hi<|im_end|>")
    assert chat.endswith("<|im_start|>user\nQ: {2}+2? A:<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[0].messages == ()
    assert [(turn.role, turn.text) for turn in prompts[1].messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "Q: {2}+2? A:"),
    ]


def test_contradictions_are_errors(rows_file: RowsFile, qwen_like: Any) -> None:
    system_row = {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "label": 1}
    with pytest.raises(DataError, match="row 0 has a system message of its own"):
        build_prompts(configured(rows_file(system_row), system_prompt="z"), qwen_like)
    with pytest.raises(ConfigError, match=r"data\.system_prompt needs data\.apply_chat_template"):
        build_prompts(configured(rows_file(system_row), system_prompt="z", apply_chat_template=False), qwen_like)
    with pytest.raises(DataError, match="row 0: 'prompt' holds chat messages"):
        build_prompts(configured(rows_file(system_row), apply_chat_template=False), qwen_like)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "row 1: expected text or a list of chat messages in 'prompt', found int"),
        (
            [{"from": "human", "value": "x"}],
            r"row 1: message 0 of 'prompt' needs 'role' and 'content' as text, found from .str",
        ),
        ([{"role": "user", "content": None}], "row 1: message 0 of 'prompt' needs"),
        (["x"], "row 1: message 0 of 'prompt' needs 'role' and 'content' as text, found str"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "row 1: .* end with the assistant's",
        ),
    ],
)
def test_a_prompt_that_is_none_is_an_error_with_its_row(
    rows_file: RowsFile, qwen_like: Any, prompt: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_prompts(configured(rows_file({"prompt": "a", "label": 1}, {"prompt": prompt, "label": 1})), qwen_like)


def test_what_the_chat_template_refuses_is_an_error_with_its_row(
    rows_file: RowsFile, arithmetic_tokenizer: Any
) -> None:
    with pytest.raises(
        DataError, match=r"row 0: .*chat template refuses the messages: .*user and assistant, not system"
    ):
        build_prompts(configured(rows_file({"prompt": "a", "label": 1}), system_prompt="b"), arithmetic_tokenizer)


def test_rows_left_out_are_counted_by_reason_and_keep_their_numbers(rows_file: RowsFile, qwen_like: Any) -> None:
    source = rows_file(
        {"prompt": "", "label": 1},
        {"prompt": " \n", "label": 1},
        {"prompt": None, "label": 1},
        {"prompt": [], "label": 1},
        {"label": 1},
        {"prompt": "x" * 100, "label": 1},
        {"prompt": "what is  held out?", "label": 1},
        {"prompt": "a", "label": None},
        {"prompt": "a", "label": " "},
        {"prompt": "a"},
        {"prompt": "a", "label": 0},
        {"prompt": "a", "label": False},
    )
    config = configured(source, max_prompt_tokens=60)
    prompts, report = build_prompts(config, qwen_like, exclude=frozenset({"what is held out?"}))
    assert [(prompt.row, prompt.label) for prompt in prompts] == [(10, 0), (11, False)]
    assert report.dropped == {
        "empty prompt": [0, 1, 2, 3, 4],
        "prompt longer than data.max_prompt_tokens (60)": [5],
        "also an evaluation prompt": [6],
        "no label": [7, 8, 9],
    }
    assert (report.kept, report.total) == (2, 12)
    assert "5 empty prompt (rows 0, 1, 2, 3, 4); 1 prompt longer" in str(report)


def test_a_prompt_of_exactly_the_limit_is_kept_whole(rows_file: RowsFile, qwen_like: Any) -> None:
    source = rows_file({"prompt": "abc", "label": 1})
    length = len(build_prompts(configured(source), qwen_like)[0][0].tokens)
    assert len(build_prompts(configured(source, max_prompt_tokens=length), qwen_like)[0][0].tokens) == length
    with pytest.raises(
        DataError, match=r"no row of .* is left to use: 0 of 1 rows kept; dropped: 1 prompt longer than"
    ):
        build_prompts(configured(source, max_prompt_tokens=length - 1), qwen_like)


def test_labels_are_not_looked_at_where_there_are_none(rows_file: RowsFile, qwen_like: Any) -> None:
    prompts, _ = build_prompts(configured(rows_file({"prompt": "a", "label": None}), label_key=None), qwen_like)
    assert prompts[0].label is None


def test_a_question_is_the_same_whatever_its_spacing_column_and_shape(rows_file: RowsFile, qwen_like: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "cafe\u0301  2+2?\n"}]
    held_out = evaluation_identities(
        configured(rows_file({"chat": messages}), prompt_key="chat", label_key=None), Layout.PROMPTS
    )
    assert held_out == {prompt_identity({"q": " café 2+2?"}, "q")}
    config = configured(rows_file({"prompt": "café 2+2?", "label": 1}, {"prompt": "2+3?", "label": 1}))
    prompts, report = build_prompts(config, qwen_like, exclude=held_out)
    assert [prompt.row for prompt in prompts] == [1]
    assert report.counts == {"also an evaluation prompt": 1}


def test_half_a_character_is_named_and_not_handed_to_the_tokenizer(tmp_path: Any, qwen_like: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "bad \\ud800 x", "label": "4"}\n')
    with pytest.raises(DataError, match=r"row 0: 'prompt' holds half a character .* at position 4"):
        build_prompts(configured(str(path)), qwen_like)
