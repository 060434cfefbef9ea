import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.tokenizer import ASSISTANT, END, PAD, USER, end_token_ids, load_tokenizer, train_tokenizer
from slipstream.errors import ModelError

SENTENCE = "State the final answer to the following arithmetic problem: "
QUESTIONS = [f"{SENTENCE}{a} + {b} =" for a in range(10, 40) for b in range(10, 40)]


@pytest.fixture(scope="module")
def trained() -> Any:
    return train_tokenizer(QUESTIONS, 384)


def test_the_fixed_sentence_of_a_task_is_one_token_and_digits_stay_apart(trained: Any) -> None:
    assert [trained.decode([token]) for token in trained(f"{SENTENCE}123 + 45 =")["input_ids"]] == [
        *(SENTENCE, "1", "2", "3", " + ", "4", "5", " ="),
    ]
    assert len(trained) <= 384


def test_digits_never_merge_in_any_context(trained: Any) -> None:
    merged = [token for token in trained.get_vocab() if any(mark in token for mark in "0123456789") and len(token) > 1]
    assert merged == []


@given(text=st.text() | st.text("0123456789+-*/= \n<|end|>é😀\u0301"))
def test_any_text_comes_back_as_it_was(trained: Any, text: str) -> None:
    assert trained.decode(trained(text, add_special_tokens=False)["input_ids"]) == text


def test_the_same_texts_give_the_same_tokenizer(trained: Any) -> None:
    again = train_tokenizer(iter(QUESTIONS), 384)
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_special_tokens_come_first_and_the_template_writes_them(trained: Any) -> None:
    assert trained.convert_tokens_to_ids([PAD, USER, ASSISTANT, END]) == [0, 1, 2, 3]
    assert (trained.pad_token_id, trained.eos_token_id, trained.bos_token_id) == (0, 3, None)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert trained.apply_chat_template(messages, tokenize=False) == "<|user|>1+1<|assistant|>2<|end|>"
    prompt = trained.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>1+1<|assistant|>"


def test_a_saved_tokenizer_is_loaded_again_with_its_template(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded(QUESTIONS[7])["input_ids"] == trained(QUESTIONS[7])["input_ids"]
    assert loaded.chat_template == trained.chat_template
    assert loaded.decode(loaded(" 1 , 2")["input_ids"]) == " 1 , 2"


def test_a_model_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.path: no tokenizer in .*found: config\.json"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_cannot_end_a_response_is_refused(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    with pytest.raises(ModelError, match="has no EOS token"):
        load_tokenizer(str(tmp_path))


def test_a_broken_tokenizer_file_is_a_clear_error(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"model\.path: cannot load a tokenizer from"):
        load_tokenizer(str(tmp_path))


def test_a_missing_folder_and_an_unreachable_hub_are_reported_at_once(unreachable_hub: None, trained: Any) -> None:
    with pytest.raises(ModelError, match=r"model\.path: no folder '\./models/policy'"):
        load_tokenizer("./models/policy")
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"'nobody/nothing' is no folder here, and the Hugging Face hub cannot be"):
        load_tokenizer("nobody/nothing")
    assert end_token_ids("nobody/nothing", trained) == (3,)
    assert time.monotonic() - start < 15, "nothing is retried"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (3,)),
        ({"config.json": {"eos_token_id": 7}}, (3, 7)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [9, 3]}}, (3, 9)),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {}}, (3,)),
        ({"generation_config.json": {"eos_token_id": 0}}, (3, 0)),
    ],
)
def test_every_token_that_ends_a_response_is_known(
    trained: Any, tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_token_ids(str(tmp_path), trained) == expected
