"""Loading a policy or a critic: deterministic in training mode, and clear words for what is missing."""

import json
import time
from copy import copy

import pytest
import torch
from transformers.models.mistral.modeling_mistral import MistralAttention

from slipstream.data import hub
from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences
from slipstream.models.loading import load_policy, load_process_reward_model, load_value_model
from slipstream.models.verification import require_divisible_rows


@pytest.fixture
def folder(make_model, tmp_path):
    make_model("llama", attention_dropout=0.5).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def reward_model(make_model, tmp_path):
    """reward_model(labels): a folder with a classifier made from a language model, and its head."""
    from transformers import AutoModelForSequenceClassification

    def make(labels: int = 1):
        make_model("llama").save_pretrained(tmp_path / "base")
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=labels)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(tmp_path / "reward")
        return tmp_path / "reward", model.score.weight.detach()

    return make


def load_critic(folder):
    return load_value_model(str(folder), dtype="float32", key="critic.path")


def rewrite(folder, change):
    """Change the weights in a folder: change(dictionary of tensors)."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(str(folder), dtype="float32")


def test_an_unknown_family_is_a_model_error(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    with pytest.raises(ModelError, match="nonesuch"):
        load_policy(str(folder), dtype="float32")


def test_a_family_that_packing_would_change_is_refused_at_load(families, tmp_path):
    families.save_model("bloom", tmp_path)
    with pytest.raises(ModelError, match=r"^model\.path: .*something else on a packed row.*What works is"):
        load_policy(str(tmp_path), dtype="float32")


def test_a_sliding_window_that_does_not_reach_the_attention_is_refused(make_model, tmp_path, monkeypatch):
    make_model("mistral", sliding_window=100).save_pretrained(tmp_path)
    monkeypatch.setattr(MistralAttention, "forward", without_window(MistralAttention.forward))
    with pytest.raises(ModelError, match=r"sliding window of 100 in 2 layers .* called with windows none in 0"):
        load_policy(str(tmp_path), dtype="float32")


def without_window(forward):
    def changed(self, *arguments, **options):
        config, self.config = self.config, copy(self.config)
        self.config.sliding_window = None
        try:
            return forward(self, *arguments, **options)
        finally:
            self.config = config

    return changed


def test_a_hub_name_that_cannot_be_had_fails_at_once_and_points_to_a_local_folder(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_policy("nobody/no-such-model", dtype="float32")
    assert "'nobody/no-such-model'" in str(caught.value) and "local folder" in str(caught.value)
    assert time.monotonic() - started < 3


def test_a_critic_from_a_language_model_gets_a_head_of_zeros_and_trains_without_randomness(folder):
    model = load_critic(folder)
    policy = load_policy(str(folder), dtype="float32")
    assert model.score.weight.shape == (1, 64) and not model.score.weight.any()
    assert model.training and model.config.attention_dropout == 0 and model.config.num_labels == 1
    for name, parameter in policy.get_decoder().named_parameters():
        assert torch.equal(model.get_decoder().get_parameter(name), parameter), name


def test_a_critic_from_a_reward_model_keeps_its_head(reward_model):
    folder, head = reward_model()
    assert torch.equal(load_critic(folder).score.weight, head)


def test_a_classifier_with_several_labels_is_no_critic(reward_model):
    folder, _ = reward_model(labels=3)
    with pytest.raises(ModelError, match=r"critic\.path: .* is a classifier with 3 labels; expected a reward model"):
        load_critic(folder)


def test_a_reward_model_that_lost_its_head_gets_no_new_one(reward_model):
    folder, _ = reward_model()
    rewrite(folder, lambda weights: weights.pop("score.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model, such as 'score\.weight'"):
        load_critic(folder)


@pytest.mark.parametrize("name", ["score.bias", "v_head.summary.weight"])
def test_a_head_of_another_form_is_named_and_not_replaced(name, folder):
    rewrite(folder, lambda weights: weights.update({name: torch.ones(1)}))
    with pytest.raises(ModelError, match=f"critic.path: .* no head of the form score.weight; found {name}"):
        load_critic(folder)


def test_a_model_that_reads_both_ways_is_no_critic(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"critic\.path"):
        load_critic(tmp_path)


def test_a_critic_that_packing_would_change_is_refused_at_load(families, tmp_path):
    families.save_model("bloom", tmp_path)
    with pytest.raises(ModelError, match=r"^critic\.path: .*something else on a packed row"):
        load_critic(tmp_path)


def test_what_is_wrong_with_the_folder_of_a_critic_names_its_key():
    with pytest.raises(ModelError, match=r"^critic\.path: no folder"):
        load_critic("./no-such-model")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_process_reward_model_from_a_language_model_finds_all_steps_alike(family, make_model, tmp_path):
    """On loading, its scores of all tokens of a probe are compared with those of Transformers."""
    make_model(family).save_pretrained(tmp_path)
    model = load_process_reward_model(str(tmp_path), dtype="float32", key="model.path")
    assert type(model).__name__.endswith("ForTokenClassification") and model.config.num_labels == 1
    assert not model.score.weight.any() and not model.score.bias.any() and model.training


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_family_without_a_class_for_steps_is_refused(family, make_model, tmp_path):
    make_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^model\.path: Transformers has no token-classification class for "):
        load_process_reward_model(str(tmp_path), dtype="float32", key="model.path")


def test_a_process_reward_model_keeps_its_head_and_is_no_critic(make_model, tmp_path):
    from transformers import AutoModelForTokenClassification

    make_model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=1)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(tmp_path / "steps")
    loaded = load_process_reward_model(str(tmp_path / "steps"), dtype="float32", key="model.path", needs_head=True)
    assert torch.equal(loaded.score.weight, model.score.weight) and torch.equal(loaded.score.bias, model.score.bias)
    with pytest.raises(ModelError, match=r"^critic\.path: .* is a process reward model, which scores steps"):
        load_critic(tmp_path / "steps")
    with pytest.raises(ModelError, match=r"^reward\.model: .* is LlamaForCausalLM, no process reward model"):
        load_process_reward_model(str(tmp_path / "base"), dtype="float32", key="reward.model", needs_head=True)
    rewrite(tmp_path / "steps", lambda weights: weights.pop("score.bias"))
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model, such as 'score\.bias'"):
        load_process_reward_model(str(tmp_path / "steps"), dtype="float32", key="model.path")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_position_embeddings_that_look_at_the_whole_row_cannot_be_divided(kind, make_model):
    divisible = make_model("llama")
    require_divisible_rows(divisible, "m", "model.path")
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(
        ModelError, match=rf"^model\.path: 'm' has position embeddings of the kind {kind}, .*parallel to 1"
    ):
        require_divisible_rows(make_model("llama", rope_parameters=parameters), "m", "model.path")
