"""Loading a policy: deterministic in training mode, and clear words for what is missing."""

import json
import time

import pytest
import torch

from slipstream.data import hub
from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences
from slipstream.models.loading import load_policy


@pytest.fixture
def folder(make_model, tmp_path):
    make_model("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    return tmp_path


def test_a_loaded_policy_trains_in_the_type_asked_for(folder):
    model = load_policy(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.is_gradient_checkpointing
    assert load_policy(str(folder), dtype="float32", activation_checkpointing=True).is_gradient_checkpointing


def test_training_mode_is_deterministic_even_where_the_model_has_dropout(folder):
    model = load_policy(str(folder), dtype="float32")
    tokens = torch.arange(1, 9).unsqueeze(0)
    with packed_sequences([8]):
        first, second = (model(tokens, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_modules_are_switched_off_as_well(make_model, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), dtype="float32")
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts and all(module.p == 0 for module in dropouts)


def test_a_missing_folder_is_named():
    for path in ("/no/such/model", "./no-such-model"):
        with pytest.raises(ModelError, match=f"no folder '{path}'"):
            load_policy(path, dtype="float32")


def test_a_folder_without_configuration_or_weights_says_which(folder, tmp_path_factory):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_policy(str(tmp_path_factory.mktemp("empty")), dtype="float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load_policy(str(folder), dtype="float32")


def test_broken_configuration_and_truncated_weights_are_model_errors(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load"):
        load_policy(str(folder), dtype="float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        load_policy(str(folder), dtype="float32")


def test_weights_that_lack_a_tensor_are_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(str(folder), dtype="float32")


def test_an_unknown_family_is_a_model_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    with pytest.raises(ModelError, match="nonesuch"):
        load_policy(str(folder), dtype="float32")


def test_a_family_whose_attention_is_not_computed_is_refused_at_load(make_model, tmp_path):
    make_model("gemma2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="soft-capping"):
        load_policy(str(tmp_path), dtype="float32")


def test_a_hub_name_that_cannot_be_had_fails_at_once_and_points_to_a_local_folder(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_policy("nobody/no-such-model", dtype="float32")
    assert "'nobody/no-such-model'" in str(caught.value) and "local folder" in str(caught.value)
    assert time.monotonic() - started < 3
