"""Weights by the names and in the pieces of a model folder."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.errors import WeightSyncError
from slipstream.models import stored_weights as module
from slipstream.models.stored_weights import model_tensors, stored_weights


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}


def test_experts_are_stored_one_by_one_and_are_views_of_what_the_model_holds(families, tmp_path):
    folder = families.save_model("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors, stored = model_tensors(model), stored_weights(model, shapes(model))
    pieces = {name: weight.view(tensors[weight.source].detach()) for name, weight in stored.items()}
    on_disk = load_file(folder / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in on_disk and pieces.keys() == on_disk.keys()
    assert all(torch.equal(pieces[name], on_disk[name]) for name in on_disk)
    pieces["model.layers.1.mlp.experts.3.up_proj.weight"].fill_(7)
    assert (tensors["model.layers.1.mlp.experts.gate_up_proj"][3, 32:] == 7).all()


def test_a_tied_weight_is_there_once_and_a_buffer_that_is_stored_as_well(families, tmp_path):
    tied = AutoModelForCausalLM.from_pretrained(families.save_model("qwen3", tmp_path / "tied"))
    assert "lm_head.weight" not in stored_weights(tied, shapes(tied))
    biased = AutoModelForCausalLM.from_pretrained(families.save_model("deepseek_v3", tmp_path / "biased"))
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in stored_weights(biased, shapes(biased))


@pytest.mark.parametrize(
    "convert",
    [
        lambda model, tensors: {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()},
        lambda model, tensors: {"all": next(iter(tensors.values())), **(tensors if len(tensors) > 1 else {})},
    ],
    ids=["no view", "of several weights"],
)
def test_a_form_that_is_no_part_of_one_weight_is_refused(convert, families, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(families.save_model("qwen2", tmp_path))
    monkeypatch.setattr(module, "revert_weight_conversion", convert)
    with pytest.raises(WeightSyncError, match=r"Qwen2ForCausalLM stores .* cannot be published"):
        stored_weights(model, shapes(model))
