from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from slipstream.config.schema import ScratchPolicyConfig
from slipstream.data.tokenizer import end_token_ids, train_tokenizer
from slipstream.errors import ModelError
from slipstream.models.scratch import create_policy

CONFIG = ScratchPolicyConfig(hidden_size=64, layers=2, heads=2, intermediate_size=96, max_tokens=48)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([f"{a} + {a} =" for a in range(50)], 300)


def test_a_created_policy_loads_and_generates(tokenizer: Any, tmp_path: Path) -> None:
    create_policy(CONFIG, tokenizer, seed=0, folder=tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert model.dtype == torch.float32
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (len(tokenizer), 48)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    messages = [{"role": "user", "content": "1 + 1 ="}]
    inputs = loaded.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > inputs["input_ids"].shape[1]


def test_its_folder_says_how_a_response_ends(tokenizer: Any, tmp_path: Path) -> None:
    create_policy(CONFIG, tokenizer, seed=0, folder=tmp_path / "policy")
    generation = GenerationConfig.from_pretrained(tmp_path / "policy")
    assert (generation.eos_token_id, generation.pad_token_id, generation.bos_token_id) == (3, 0, None)
    assert end_token_ids(str(tmp_path / "policy"), tokenizer) == (3,)


def test_weights_come_from_the_seed_alone(tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        create_policy(CONFIG, tokenizer, seed=seed, folder=tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random state is left alone"
    first, again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_folder_with_something_in_it_is_left_alone(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        create_policy(CONFIG, tokenizer, seed=0, folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
