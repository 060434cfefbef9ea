"""The policy module: log-probs of loss tokens of a packed row, in the graph even where there are none."""

import pytest
import torch

from slipstream.models.attention import PACKED_ATTENTION, packed_sequences
from slipstream.models.policy import PolicyModule

LENGTHS = [4, 4, 9]
TOKENS = torch.arange(1, 18)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
# Tokens 2 and 3 of the first sequence, token 1 of the second, the last three of the third.
PREDICTORS = torch.tensor([1, 2, 4, 13, 14, 15])


def run(policy, *, predictors=PREDICTORS, temperature=1.0):
    with packed_sequences(LENGTHS):
        outputs = policy(TOKENS, POSITIONS, predictors, TOKENS[predictors + 1], temperature)
    return outputs["log_probs"], outputs["entropy"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite", "cohere"])
def test_log_probs_are_those_of_each_sequence_alone(family, make_model):
    policy = PolicyModule(make_model(family, PACKED_ATTENTION), chunk_tokens=4)
    plain = make_model(family, "eager")
    expected = []
    for start, sequence in zip((0, 4, 8), TOKENS.split(LENGTHS), strict=True):
        logits = plain(sequence.unsqueeze(0), use_cache=False).logits[0] / 0.7
        chosen = [int(p) - start for p in PREDICTORS if start <= p < start + len(sequence)]
        log_probs = torch.log_softmax(logits, -1)
        expected += [log_probs[place, sequence[place + 1]] for place in chosen]
    found, entropy = run(policy, temperature=0.7)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert entropy.shape == found.shape and bool((entropy > 0).all())


@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 5, 6])
def test_the_chunk_size_changes_neither_log_probs_nor_gradients(chunk_tokens, make_model):
    results = []
    for size in (chunk_tokens, 100):
        model = make_model("llama", PACKED_ATTENTION)
        log_probs, _ = run(PolicyModule(model, chunk_tokens=size))
        log_probs.sum().backward()
        results.append([log_probs.detach(), *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_loss_tokens_every_parameter_still_gets_a_gradient_of_zero(make_model):
    policy = PolicyModule(make_model("llama", PACKED_ATTENTION), chunk_tokens=4)
    log_probs, entropy = run(policy, predictors=torch.zeros(0, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("tied", [True, False])
def test_its_parameters_are_those_of_the_model_under_one_prefix(tied, make_model):
    model = make_model("llama", PACKED_ATTENTION, tie_word_embeddings=tied)
    names = [name.removeprefix("model.") for name, _ in PolicyModule(model, chunk_tokens=4).named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_activation_checkpointing_gives_the_same_gradients(make_model):
    gradients = []
    for checkpointing in (False, True):
        model = make_model("llama", PACKED_ATTENTION).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = PolicyModule(model, chunk_tokens=4)
        with packed_sequences(LENGTHS):
            outputs = policy(TOKENS, POSITIONS, PREDICTORS, TOKENS[PREDICTORS + 1], 1.0)
            outputs["log_probs"].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)
