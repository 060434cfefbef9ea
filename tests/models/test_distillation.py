"""A student beside its teacher: the numbers of both whole matrices, without either, and gradients for one of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.models.attention import PACKED_ATTENTION, packed_sequences
from slipstream.models.distillation import TeacherStates, compared_with_teacher
from slipstream.models.log_probs import token_log_probs
from slipstream.models.policy import PolicyModule

HIDDEN, TEACHER_HIDDEN, VOCABULARY = 8, 12, 50
DIRECTIONS = ["forward", "reverse"]


def identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def make_inputs(count: int, *, divergence: str = "forward", temperature: float = 1.0, teacher_rows: int = VOCABULARY):
    """Hidden states, head and targets of a student, and a teacher of another width."""
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, HIDDEN, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, requires_grad=True)
    targets = torch.randint(0, min(VOCABULARY, teacher_rows), (count,), generator=generator)
    states = torch.randn(count, TEACHER_HIDDEN, generator=generator)
    head = torch.randn(teacher_rows, TEACHER_HIDDEN, generator=generator) / 2
    return hidden, weight, targets, TeacherStates(states, head, None, identity, divergence, temperature)


def compute(hidden, weight, targets, teacher, *, chunk_tokens=1000, transform=identity, **options):
    options = {"temperature": 1.0, "chunk_tokens": chunk_tokens, "transform": transform} | options
    return compared_with_teacher(hidden, weight, targets, teacher, **options)


def plain_divergence(student_logits, teacher_logits, divergence, temperature):
    """By PyTorch's own distributions, in float64."""
    student, teacher = (
        torch.distributions.Categorical(logits=logits.double() / temperature)
        for logits in (student_logits, teacher_logits)
    )
    pair = (teacher, student) if divergence == "forward" else (student, teacher)
    return torch.distributions.kl_divergence(*pair)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(DIRECTIONS))
def test_chunks_of_any_size_give_the_divergence_of_the_whole_matrices_and_its_gradients(
    count, chunk, temperature, divergence
):
    hidden, weight, targets, teacher = make_inputs(count, divergence=divergence, temperature=temperature)
    coefficients = torch.linspace(-1, 1, count)
    expected = plain_divergence(hidden @ weight.t(), teacher.hidden @ teacher.weight.t(), divergence, temperature)
    expected_gradients = torch.autograd.grad((expected * coefficients).sum(), (hidden, weight))
    *_, found = compute(hidden, weight, targets, teacher, chunk_tokens=chunk)
    gradients = torch.autograd.grad((found * coefficients).sum(), (hidden, weight))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


def test_log_probs_and_entropy_are_those_without_a_teacher_at_their_own_temperature():
    hidden, weight, targets, teacher = make_inputs(20, temperature=4.0)
    options = {"transform": identity, "temperature": 0.6, "chunk_tokens": 7}
    log_probs, entropy, _ = compute(hidden, weight, targets, teacher, **options)
    expected = token_log_probs(hidden, weight, targets, **options)
    assert torch.equal(log_probs, expected[0]) and torch.equal(entropy, expected[1])


@pytest.mark.parametrize("teacher_rows", [VOCABULARY - 6, VOCABULARY + 6])
@pytest.mark.parametrize("divergence", DIRECTIONS)
def test_rows_that_only_one_of_them_has_are_left_out(divergence, teacher_rows):
    hidden, weight, targets, teacher = make_inputs(9, divergence=divergence, teacher_rows=teacher_rows)
    common = min(VOCABULARY, teacher_rows)
    expected = plain_divergence(
        (hidden @ weight.t())[:, :common], (teacher.hidden @ teacher.weight.t())[:, :common], divergence, 1.0
    )
    log_probs, _, found = compute(hidden, weight, targets, teacher)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    whole = torch.log_softmax(hidden @ weight.t(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_probs, whole, rtol=1e-4, atol=1e-4)


def test_the_teacher_gets_no_gradient_and_its_own_transform_and_bias():
    hidden, weight, targets, teacher = make_inputs(9)
    bias = torch.linspace(-2, 2, VOCABULARY)
    states, head = teacher.hidden.requires_grad_(), teacher.weight.requires_grad_()
    teacher = TeacherStates(states, head, bias, lambda logits: 3 * torch.tanh(logits / 3), "forward", 1.0)
    *_, found = compute(hidden, weight, targets, teacher, chunk_tokens=4)
    found.sum().backward()
    assert states.grad is None and head.grad is None and weight.grad is not None
    logits = 3 * torch.tanh((states @ head.t() + bias) / 3)
    expected = plain_divergence(hidden @ weight.t(), logits, "forward", 1.0)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_no_tokens_give_empty_results_that_are_still_in_the_graph():
    hidden, weight, targets, teacher = make_inputs(0)
    results = compute(hidden, weight, targets, teacher)
    assert all(result.shape == (0,) for result in results)
    sum(result.sum() for result in results).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("divergence", DIRECTIONS)
def test_neither_whole_matrix_ever_exists_forward_or_backward(divergence, largest_tensor):
    hidden, weight, targets, teacher = make_inputs(120, divergence=divergence)
    with largest_tensor() as largest:
        log_probs, _, found = compute(hidden, weight, targets, teacher, chunk_tokens=10)
        (found - log_probs).sum().backward()
    assert largest.elements <= max(10 * VOCABULARY, teacher.hidden.numel(), weight.numel())
    with largest_tensor() as whole:
        compute(hidden, weight, targets, teacher)
    assert whole.elements == 120 * VOCABULARY, "the measurement sees a matrix where there is one"


@pytest.mark.parametrize("divergence", DIRECTIONS)
def test_chunks_are_recomputed_rather_than_kept(divergence):
    hidden, weight, targets, teacher = make_inputs(120, divergence=divergence)
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel() if tensor.shape[-1:] == (VOCABULARY,) and tensor.dim() == 2 else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        compute(hidden, weight, targets, teacher, chunk_tokens=10)
    assert kept == 0


@pytest.mark.parametrize("family", ["gemma3_text", "cohere", "llama"])
def test_a_model_teaches_what_it_would_say_itself(family, make_model):
    """The teacher's logits in the comparison are those of its own forward pass, whatever its family does to them."""
    model = make_model(family, PACKED_ATTENTION).eval()
    teacher = PolicyModule(model, chunk_tokens=3)
    tokens, positions = torch.arange(1, 8), torch.arange(7)
    with packed_sequences([7]), torch.no_grad():
        own = model(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), attention_mask=None).logits[0]
        predictors = torch.tensor([2, 3, 5])
        states = teacher.as_teacher(tokens, positions, predictors, divergence="forward", temperature=1.0)
        torch.testing.assert_close(states.logits(states.hidden, own.shape[-1]), own[predictors].float())
        outputs = teacher(tokens, positions, predictors, tokens[predictors + 1], 1.0, teacher=states)
    torch.testing.assert_close(outputs["divergence"], torch.zeros(3), atol=1e-5, rtol=0)
