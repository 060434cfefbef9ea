"""The divergence from a teacher: values worked out by hand, a slow reference in float64, and its extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.divergence import kl_divergence
from slipstream.algorithms.objective import DistillationObjective

# Probabilities of three tokens, and the sums that the definition makes of them.
TEACHER, STUDENT = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
BY_HAND = 0.25 * math.log(2)  # 0.5 log 2 + 0.25 log 1 + 0.25 log (1 / 2), the same in both directions


def logits(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log() + 3.7  # a constant changes nothing


def slow_kl(first: list[float], second: list[float]) -> float:
    """The definition, term by term."""
    return math.fsum(p * (math.log(p) - math.log(q)) for p, q in zip(first, second, strict=True) if p)


def softmax(values: list[float], temperature: float) -> list[float]:
    exact = [math.exp(value / temperature) for value in values]
    return [value / math.fsum(exact) for value in exact]


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_value_worked_out_by_hand(divergence):
    found = kl_divergence(logits(STUDENT), logits(TEACHER), divergence=divergence, temperature=1.0)
    assert found.tolist() == pytest.approx([BY_HAND], abs=1e-7)


def test_the_two_directions_are_those_they_are_called():
    student, teacher = [0.9, 0.05, 0.05], TEACHER
    pair = logits(student), logits(teacher)
    forward = kl_divergence(*pair, divergence="forward", temperature=1.0).item()
    reverse = kl_divergence(*pair, divergence="reverse", temperature=1.0).item()
    assert forward == pytest.approx(slow_kl(teacher, student), abs=1e-6)
    assert reverse == pytest.approx(slow_kl(student, teacher), abs=1e-6)
    assert abs(forward - reverse) > 0.1


values = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


@given(values, st.integers(0, 1000), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(["forward", "reverse"]))
def test_any_logits_at_any_temperature_give_the_slow_reference(student, seed, temperature, divergence):
    teacher = (8 * torch.rand(len(student), generator=torch.Generator().manual_seed(seed)) - 4).tolist()
    found = kl_divergence(
        torch.tensor([student]), torch.tensor([teacher]), divergence=divergence, temperature=temperature
    )
    ours, theirs = softmax(student, temperature), softmax(teacher, temperature)
    expected = slow_kl(theirs, ours) if divergence == "forward" else slow_kl(ours, theirs)
    assert found.item() == pytest.approx(expected, rel=1e-4, abs=2e-6)


def test_the_gradient_of_the_forward_divergence_is_student_minus_teacher():
    """As of any cross-entropy: the derivative by the logits is softmax(student) - p_teacher, over the temperature."""
    for temperature in (1.0, 3.0):
        student = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
        teacher = torch.tensor([[1.0, 0.5, -0.5]])
        kl_divergence(student, teacher, divergence="forward", temperature=temperature).sum().backward()
        difference = torch.softmax(student.detach() / temperature, -1) - torch.softmax(teacher / temperature, -1)
        torch.testing.assert_close(student.grad, difference / temperature)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_token_without_any_probability_gives_finite_values_and_gradients(divergence):
    none = torch.tensor([[0.0, 1.0, -torch.inf]])
    for student, teacher in ((none, none), (none, logits(TEACHER)), (logits(STUDENT), none)):
        student = student.clone().requires_grad_()
        found = kl_divergence(student, teacher, divergence=divergence, temperature=1.0)
        found.sum().backward()
        assert torch.isfinite(found).all() and torch.isfinite(student.grad[:, :2]).all()
        assert not torch.isnan(student.grad).any()
    same = kl_divergence(none, none, divergence=divergence, temperature=1.0)
    assert same.item() == pytest.approx(0, abs=1e-7)


def test_what_is_no_divergence_is_refused():
    with pytest.raises(ValueError, match="forward or reverse, found 'sideways'"):
        kl_divergence(logits(STUDENT), logits(TEACHER), divergence="sideways", temperature=1.0)
    with pytest.raises(ValueError, match=r"one shape, found \[1, 3\] and \[1, 2\]"):
        kl_divergence(logits(STUDENT), logits([0.5, 0.5]), divergence="forward", temperature=1.0)


# ---------------------------------------------------------------- the objective


def objective(divergence: float, log_prob: float, **settings: float) -> float:
    outputs = {"log_probs": torch.tensor([log_prob]), "divergence": torch.tensor([divergence])}
    output = DistillationObjective(**settings)(outputs, {}, torch.zeros(1, dtype=torch.int64))
    assert output.metrics["cross_entropy"].item() == pytest.approx(-log_prob)
    return output.loss.item()


def test_the_loss_weighs_divergence_against_cross_entropy():
    assert objective(0.5, -2.0, coefficient=0.25) == pytest.approx(0.25 * 0.5 + 0.75 * 2.0)
    assert objective(0.5, -2.0) == pytest.approx(0.5), "distillation alone"


def test_the_square_of_the_temperature_keeps_the_gradient_as_large():
    """Hinton et al., section 2: for a high temperature the product tends to half the squared distance of the logits."""
    student, teacher = torch.tensor([[0.3, -1.0, 0.7]]), torch.tensor([[1.0, 0.5, -1.5]])
    losses = []
    for temperature in (20.0, 80.0):
        found = kl_divergence(student, teacher, divergence="forward", temperature=temperature).item()
        losses.append(objective(found, -1.0, temperature=temperature))
    assert losses[0] == pytest.approx(((student - teacher) ** 2).sum().item() / 2 / 3, rel=0.05)
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
