"""Chunked log-probs and entropies: the same numbers as the whole matrix, without the matrix."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION
from slipstream.models.log_probs import logits_transform, token_log_probs, verify_head

HIDDEN, VOCABULARY = 8, 50


def identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def make_inputs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, VOCABULARY, (count,), generator=generator)


def compute(hidden, weight, targets, *, temperature=1.0, chunk_tokens=1000, transform=identity, **options):
    return token_log_probs(
        hidden, weight, targets, transform=transform, temperature=temperature, chunk_tokens=chunk_tokens, **options
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([0.3, 0.6, 1.0, 2.5]))
def test_chunks_of_any_size_give_the_log_softmax_of_tempered_logits_and_its_gradients(count, chunk, temperature):
    hidden, weight, targets = make_inputs(count, seed=count)
    coefficients = torch.linspace(-1, 1, count)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.t() / temperature)
    expected = distribution.log_prob(targets)
    expected_gradients = torch.autograd.grad((expected * coefficients).sum(), (hidden, weight))
    found, entropy = compute(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk)
    gradients = torch.autograd.grad((found * coefficients).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_the_temperature_is_that_of_the_sampled_distribution():
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [0.0]])
    found, _ = compute(hidden, weight, torch.tensor([0]), temperature=0.5)
    assert found.item() == pytest.approx(torch.log_softmax(torch.tensor([2.0, 0.0]), 0)[0].item())


def test_the_entropy_of_a_uniform_distribution_is_the_log_of_its_size_and_has_no_gradient_unless_asked():
    hidden, weight, targets = make_inputs(3)
    _, entropy = compute(hidden * 0, weight, targets)
    torch.testing.assert_close(entropy, torch.full((3,), VOCABULARY).log())
    assert not entropy.requires_grad


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([0.3, 1.0, 2.5]))
def test_asked_for_the_entropy_has_the_gradient_of_plain_autograd_in_chunks_of_any_size(count, chunk, temperature):
    hidden, weight, targets = make_inputs(count, seed=count)
    coefficients = torch.linspace(-1, 1, count)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.t() / temperature)
    loss = ((distribution.log_prob(targets) + 0.5 * distribution.entropy()) * coefficients).sum()
    expected = torch.autograd.grad(loss, (hidden, weight))
    log_probs, entropy = compute(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk, entropy_gradient=True
    )
    found = torch.autograd.grad(((log_probs + 0.5 * entropy) * coefficients).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(compute(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk)[1], entropy)


@pytest.mark.parametrize("lowest", [-1e4, -torch.inf])
def test_a_logit_of_no_probability_spoils_neither_the_entropy_nor_its_gradient(lowest):
    hidden, weight, targets = make_inputs(2)

    def without_last(logits):
        return torch.cat([logits[:, :-1], torch.full_like(logits[:, -1:], lowest)], dim=-1)

    targets = targets.clamp_max(VOCABULARY - 2)
    log_probs, entropy = compute(hidden, weight, targets, transform=without_last, entropy_gradient=True)
    assert torch.isfinite(log_probs).all()
    expected = torch.distributions.Categorical(logits=hidden @ weight[:-1].t()).entropy()
    torch.testing.assert_close(entropy, expected)
    gradient, expected_gradient = (torch.autograd.grad(100 * part.sum(), hidden)[0] for part in (entropy, expected))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-3)


def test_no_tokens_give_empty_results_that_are_still_in_the_graph():
    hidden, weight, targets = make_inputs(0)
    log_probs, entropy = compute(hidden, weight, targets)
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_whole_matrix_never_exists_forward_or_backward(entropy_gradient, largest_tensor):
    hidden, weight, targets = make_inputs(120)
    with largest_tensor() as largest:
        log_probs, entropy = compute(hidden, weight, targets, chunk_tokens=10, entropy_gradient=entropy_gradient)
        (log_probs + entropy).sum().backward()
    assert largest.elements <= max(10 * VOCABULARY, hidden.numel(), weight.numel())
    with largest_tensor() as whole:
        compute(hidden, weight, targets)
    assert whole.elements == 120 * VOCABULARY, "the measurement sees a matrix where there is one"


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_are_recomputed_rather_than_kept(entropy_gradient):
    hidden, weight, targets = make_inputs(120)
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel() if tensor.shape[-1:] == (VOCABULARY,) and tensor.dim() == 2 else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        compute(hidden, weight, targets, chunk_tokens=10, entropy_gradient=entropy_gradient)
    assert kept == 0


def test_half_precision_logits_are_normalised_in_float32():
    hidden, weight, targets = make_inputs(20)
    low = hidden.detach().bfloat16(), weight.detach().bfloat16()
    found, _ = compute(*low, targets)
    logits = torch.nn.functional.linear(*low).float()
    expected = torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "granite", "cohere"])
def test_the_head_of_known_families_is_verified(family, make_model):
    verify_head(make_model(family, PACKED_ATTENTION))


@pytest.mark.parametrize(
    ("family", "key"),
    [("gemma3_text", "final_logit_softcapping"), ("granite", "logits_scaling"), ("cohere", "logit_scale")],
)
def test_what_a_family_does_to_its_logits_is_taken_from_its_configuration(family, key, make_model):
    config = make_model(family, PACKED_ATTENTION).config
    logits = torch.linspace(-5, 5, 7)
    transformed = logits_transform(config)(logits)
    assert not torch.allclose(transformed, logits)
    only_this = SimpleNamespace(**{key: getattr(config, key)})
    assert torch.equal(logits_transform(only_this)(logits), transformed)
    assert torch.equal(logits_transform(SimpleNamespace(**{key: None}))(logits), logits)


def test_an_unknown_transform_of_the_logits_is_refused(make_model):
    model = make_model("llama", PACKED_ATTENTION)
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    with pytest.raises(ModelError, match="LlamaForCausalLM transforms its hidden states or logits"):
        verify_head(model)
