"""A model that is read while it answers: what it says, when it stops, what is refused."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.errors import ModelError
from slipstream.models.chat_model import ChatModel

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tiny_policy: Path) -> ChatModel:
    """In float32, so that its answers can be compared with those of a plain computation."""
    model = ChatModel(str(tiny_policy))
    model._model.float()
    return model


def plainly(folder: Path, count: int) -> list[int]:
    """The greedy answer, token by token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_the_pieces_of_a_greedy_answer_are_what_the_model_says(
    model: ChatModel, tiny_policy: Path, tiny_tokenizer: Any
) -> None:
    said = "".join(model.answer(PROMPT, temperature=0.0, max_tokens=12))
    assert said == tiny_tokenizer.decode(plainly(tiny_policy, 12), skip_special_tokens=True)
    assert model.was_cut


def test_an_answer_ends_with_its_end_token(model: ChatModel, tiny_policy: Path) -> None:
    third = plainly(tiny_policy, 3)[-1]
    assert third not in plainly(tiny_policy, 2)
    tokens, model._end_tokens = model._end_tokens, [third]
    try:
        list(model.answer(PROMPT, temperature=0.0, max_tokens=12))
        assert not model.was_cut
        list(model.answer(PROMPT, temperature=0.0, max_tokens=2))
        assert model.was_cut
    finally:
        model._end_tokens = tokens


def test_the_seed_decides_the_answer(model: ChatModel) -> None:
    def sampled(seed: int) -> str:
        torch.manual_seed(seed)
        return "".join(model.answer(PROMPT, temperature=1.0, max_tokens=12))

    assert sampled(1) == sampled(1) != sampled(2)


def test_closing_an_answer_stops_the_model(model: ChatModel) -> None:
    pieces = model.answer(PROMPT, temperature=1.0, max_tokens=50)
    next(pieces)
    pieces.close()
    assert [thread for thread in threading.enumerate() if thread.name == "answer"] == []
    assert not model.was_cut


def test_a_model_that_fails_says_so_and_answers_again(model: ChatModel) -> None:
    with pytest.raises(ModelError, match="the model failed: IndexError"):
        list(model.answer([10_000], temperature=0.0, max_tokens=2))
    assert len(list(model.answer(PROMPT, temperature=0.0, max_tokens=2))) > 0


def test_it_knows_its_context(model: ChatModel) -> None:
    assert model.context_tokens == 64


def test_weights_take_the_place_of_its_own(tiny_policy: Path) -> None:
    original = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32)
    others = {name: torch.full_like(weight, 0.0625) for name, weight in original.state_dict().items()}
    changed = ChatModel(str(tiny_policy), weights=others)
    assert all(bool((weight == 0.0625).all()) for weight in changed._model.state_dict().values())
    with pytest.raises(ModelError, match="cannot load a language model"):
        ChatModel(str(tiny_policy), weights={"foreign": torch.zeros(1)})


def test_a_reward_model_is_refused_by_name(tiny_reward_model: Path) -> None:
    with pytest.raises(ModelError, match=r"LlamaForSequenceClassification.*slipstream serve-reward --model"):
        ChatModel(str(tiny_reward_model))


def test_a_folder_without_tokenizer_or_weights_is_named(tmp_path: Path, tiny_policy: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_policy / "config.json").read_text())
    with pytest.raises(ModelError, match=r"^no tokenizer in"):
        ChatModel(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text((tiny_policy / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text((tiny_policy / "tokenizer_config.json").read_text())
    with pytest.raises(ModelError, match="cannot load a language model"):
        ChatModel(str(tmp_path))
