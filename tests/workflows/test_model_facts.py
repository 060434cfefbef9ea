"""What is read off a model's folder agrees with the model itself."""

import json
from pathlib import Path

import pytest

from slipstream.config.schema import ScratchPolicyConfig
from slipstream.errors import ModelError
from slipstream.workflows.model_facts import (
    count_parameters,
    has_chat_template,
    local_folder,
    looks_like_path,
    read_model_facts,
    scratch_model_facts,
)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_facts_of_a_saved_model_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=110, max_position_embeddings=77, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    facts = read_model_facts(tmp_path)
    assert facts.is_exact
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (facts.layers, facts.hidden_size, facts.key_value_width, facts.max_tokens) == (2, 64, 32, 77)
    # Without weights the shapes give the same number.
    (tmp_path / "model.safetensors").unlink()
    estimated = read_model_facts(tmp_path)
    assert not estimated.is_exact
    assert estimated.parameters == facts.parameters


def test_other_names_for_the_same_sizes_are_understood(tmp_path: Path) -> None:
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    facts = read_model_facts(tmp_path)
    assert (facts.hidden_size, facts.layers, facts.intermediate_size, facts.max_tokens) == (48, 3, 192, 64)


def test_the_text_part_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    inner = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "vision_config": {"hidden_size": 9}}))
    assert read_model_facts(tmp_path).hidden_size == 48


def test_facts_of_a_policy_to_be_made_come_from_its_configuration() -> None:
    facts = scratch_model_facts(ScratchPolicyConfig(hidden_size=64, layers=1, heads=2, intermediate_size=96))
    attention, feed_forward, norms, embeddings = 4 * 64 * 64, 3 * 64 * 96, 3 * 64, 384 * 64
    assert facts.parameters == attention + feed_forward + norms + embeddings


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model\.safetensors is no safetensors file \(a header of \d+ bytes\)"):
        count_parameters(file)


@pytest.mark.parametrize("content", ['{"chat_template": null}', "{}"])
def test_a_tokenizer_without_chat_template_is_recognised(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert not has_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "path"), [("a/b", False), ("gpt2", False), ("./a", True), ("/a", True), ("a/b/c", True), ("~/a", True)]
)
def test_paths_and_hub_names_are_told_apart(name: str, path: bool) -> None:
    assert looks_like_path(name) is path


def test_a_hub_model_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert local_folder("some/model") is None
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("abc")
    assert local_folder("some/model") == snapshot
