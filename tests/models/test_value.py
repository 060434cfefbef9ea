"""The value module: one number per loss token, that of the state before it, in the graph even where there are none."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION, packed_sequences
from slipstream.models.loading import load_value_model
from slipstream.models.value import ValueModule, verify_value_head

LENGTHS = [4, 4, 9]
TOKENS = torch.arange(1, 18)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
# Tokens 2 and 3 of the first sequence, token 1 of the second, the last three of the third.
PREDICTORS = torch.tensor([1, 2, 4, 13, 14, 15])
NONE = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def critic(make_model, tmp_path):
    """critic(family, dtype=..., checkpointing=...): a critic from a language model, whose new head got numbers."""

    def make(family: str, dtype: str = "float32", *, checkpointing: bool = False) -> ValueModule:
        make_model(family).save_pretrained(tmp_path / family)
        model = load_value_model(
            str(tmp_path / family), dtype=dtype, key="critic.path", activation_checkpointing=checkpointing
        )
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(5))
        return ValueModule(model)

    return make


def run(critic, *, tokens=TOKENS, lengths=LENGTHS, predictors=PREDICTORS):
    positions = torch.cat([torch.arange(length) for length in lengths])
    with packed_sequences(lengths):
        return critic(tokens, positions, predictors)["values"]


# Of Granite and Cohere Transformers has no sequence-classification model.
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "granite", "cohere"])
def test_values_are_those_of_each_sequence_alone_before_the_token_is_chosen(family, critic, make_model):
    module = critic(family)
    decoder, head = make_model(family, "eager").get_decoder(), module.model.score.weight
    expected = []
    for start, sequence in zip((0, 4, 8), TOKENS.split(LENGTHS), strict=True):
        for predictor in (int(p) - start for p in PREDICTORS if start <= p < start + len(sequence)):
            before = sequence[: predictor + 1].unsqueeze(0)
            expected.append((decoder(before, use_cache=False).last_hidden_state[0, -1] @ head.T).squeeze())
    torch.testing.assert_close(run(module), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_a_value_does_not_depend_on_what_is_packed_beside_it(critic):
    module = critic("llama")
    found = {}
    for before, after, first_token in ((0, 0, 0), (3, 5, 20), (3, 5, 40), (9, 1, 20)):
        row = torch.cat([torch.arange(before) + first_token, TOKENS[4:8], torch.arange(after) + first_token])
        predictors = torch.tensor([0, 1, 2]) + before
        found[before, after, first_token] = run(module, tokens=row, lengths=[before, 4, after], predictors=predictors)
    alone = found[0, 0, 0]
    assert torch.equal(found[3, 5, 20], found[3, 5, 40]), "bit for bit where only the neighbours' tokens differ"
    for values in found.values():
        assert (values - alone).abs().max() <= 1e-5 * alone.abs().max()


def test_without_loss_tokens_every_parameter_still_gets_a_gradient_of_zero(critic):
    module = critic("llama")
    values = run(module, predictors=NONE)
    assert values.shape == (0,)
    values.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_its_parameters_are_those_of_the_model_under_one_prefix(critic):
    module = critic("llama")
    names = [name.removeprefix("model.") for name, _ in module.named_parameters()]
    assert names == [name for name, _ in module.model.named_parameters()]
    assert "score.weight" in names and "lm_head.weight" not in names


def test_activation_checkpointing_gives_the_same_gradients(critic):
    gradients = []
    for checkpointing in (False, True):
        module = critic("llama", checkpointing=checkpointing).train()
        with packed_sequences(LENGTHS):
            module(TOKENS, POSITIONS, PREDICTORS)["values"].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


def test_values_of_bfloat16_weights_are_not_rounded_to_bfloat16(critic):
    values = run(critic("llama", "bfloat16"))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_a_family_that_does_something_else_to_its_score_is_refused(critic):
    model = critic("llama").model
    verify_value_head(model)
    model.score.register_forward_hook(lambda _module, _arguments, score: 2 * score)
    with pytest.raises(ModelError, match="LlamaForSequenceClassification computes its score in a way"):
        verify_value_head(model)


def test_the_probe_reads_the_last_token_even_where_padding_is_a_common_token(critic):
    model = critic("llama", "float32").model
    assert model.config._attn_implementation == PACKED_ATTENTION
    for padding in (None, 1, 8):
        model.config.pad_token_id = padding
        verify_value_head(model)
