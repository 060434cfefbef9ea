"""How evenly the routers of a model with experts spread the tokens, as a loss and as a metric."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slipstream.errors import ConfigError
from slipstream.models.attention import packed_sequences
from slipstream.models.loading import load_policy
from slipstream.models.policy import PolicyModule
from slipstream.models.router import balance, router_loss_coefficient

LENGTHS = [4, 9, 1, 6]
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def logits(layers=2, experts=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(sum(LENGTHS), experts, generator=generator, requires_grad=True) for _ in range(layers)]


def test_of_one_layer_and_each_sequence_it_is_the_loss_of_transformers_with_its_gradient():
    [ours], [theirs] = logits(layers=1), logits(layers=1)
    loss, _ = balance([ours], POSITIONS, 2)
    expected = torch.stack([load_balancing_loss_func((rows,), 4, 2) for rows in theirs.split(LENGTHS)])
    (loss * torch.arange(1.0, 5)).sum().backward()
    (expected * torch.arange(1.0, 5)).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_layers_are_averaged():
    layers = logits(layers=3)
    expected = torch.stack([balance([layer], POSITIONS, 2)[0] for layer in layers]).mean(0)
    torch.testing.assert_close(balance(layers, POSITIONS, 2)[0], expected)


def test_an_even_spread_has_the_number_of_choices_as_loss_and_load_1_and_all_on_one_expert_the_most():
    even = torch.eye(4).repeat(2, 1) * 20
    loss, load = balance([even], torch.arange(8), 1)
    assert loss.item() == pytest.approx(1, abs=1e-4) and load.item() == 1
    loss, load = balance([torch.eye(4)[[0] * 8] * 20], torch.arange(8), 1)
    assert loss.item() == pytest.approx(4, abs=1e-4) and load.item() == 4


@pytest.fixture(scope="module")
def folder(families, tmp_path_factory):
    return families.save_model("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_policy_answers_with_the_loss_of_each_tokens_sequence(coefficient, checkpointing, folder):
    model = load_policy(str(folder), dtype="float32", activation_checkpointing=checkpointing)
    module = PolicyModule(model, chunk_tokens=8, router_loss_coefficient=coefficient)
    tokens = torch.arange(sum(LENGTHS)) % 50 + 3
    predictors = torch.tensor([0, 5, 6, 15])
    with packed_sequences(LENGTHS):
        outputs = module(tokens, POSITIONS, predictors, tokens[predictors + 1], 1.0)
        outputs["log_probs"].sum().backward(retain_graph=True)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = []
    for row in (tokens[:4], tokens[4:13], tokens[14:]):
        routed = plain(row[None], output_router_logits=True).router_logits
        expected.append(torch.stack([load_balancing_loss_func((layer,), 4, 2) for layer in routed]).mean())
    torch.testing.assert_close(
        outputs["router_loss"], torch.stack([expected[i] for i in (0, 1, 1, 2)]), rtol=1e-4, atol=1e-4
    )
    assert outputs["router_loss"].requires_grad == (coefficient > 0)
    assert not outputs["router_largest_load"].requires_grad and (outputs["router_largest_load"] >= 1).all()


def test_the_weight_is_the_models_own_where_it_asks_for_the_loss(folder, families, tmp_path):
    model = load_policy(str(folder), dtype="float32")
    assert router_loss_coefficient(model, None) == model.config.router_aux_loss_coef > 0
    assert router_loss_coefficient(model, 0.25) == 0.25 and router_loss_coefficient(model, 0.0) == 0
    model.config.output_router_logits = False
    assert router_loss_coefficient(model, None) == 0
    dense = load_policy(str(families.save_model("qwen2", tmp_path)), dtype="float32")
    assert router_loss_coefficient(dense, None) == router_loss_coefficient(dense, 0.0) == 0
    with pytest.raises(ConfigError, match=r"model\.router_loss_coefficient: found 0\.1, .* has no experts"):
        router_loss_coefficient(dense, 0.1)
