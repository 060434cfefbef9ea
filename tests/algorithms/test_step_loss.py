"""The loss of a process reward model: values worked out by hand, what may not matter, what counts as right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.step_loss import StepObjective, step_loss


@pytest.mark.parametrize(
    ("score", "label", "loss"),
    [
        (0.0, 1.0, math.log(2)),
        (0.0, 0.0, math.log(2)),
        (0.0, 0.3, math.log(2)),
        (math.log(3), 1.0, math.log(4 / 3)),
        (math.log(3), 0.0, math.log(4)),
        (math.log(3), 0.25, 0.25 * math.log(4 / 3) + 0.75 * math.log(4)),
    ],
)
def test_losses_worked_out_by_hand(score: float, label: float, loss: float) -> None:
    assert step_loss(torch.tensor([score]), torch.tensor([label])).item() == pytest.approx(loss, rel=1e-6)


@given(score=st.floats(-30, 30, width=32), label=st.floats(0, 1, width=32))
def test_the_gradient_is_the_probability_less_the_label(score: float, label: float) -> None:
    scores = torch.tensor([score], requires_grad=True)
    step_loss(scores, torch.tensor([label])).sum().backward()
    assert scores.grad is not None
    assert scores.grad.item() == pytest.approx(1 / (1 + math.exp(-score)) - label, abs=1e-6)


def test_extreme_scores_give_neither_infinities_nor_a_gradient_that_is_lost() -> None:
    scores = torch.tensor([1e4, 1e4], requires_grad=True)
    loss = step_loss(scores, torch.tensor([1.0, 0.0]))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 1e4]
    assert scores.grad is not None and scores.grad.tolist() == [0.0, 1.0]


def test_the_loss_of_bfloat16_scores_is_computed_in_float32() -> None:
    scores, labels = torch.tensor([1.5, -0.25], dtype=torch.bfloat16), torch.tensor([0.9, 0.1])
    assert torch.equal(step_loss(scores, labels), step_loss(scores.float(), labels))


def test_a_step_is_right_where_probability_and_label_lie_on_the_same_side() -> None:
    scores, labels = torch.tensor([2.0, -1.0, 0.0, 0.0, -3.0, 1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.4])
    output = StepObjective()({"scores": scores}, {"step_label": labels}, torch.arange(6))
    assert output.metrics["accuracy"].tolist() == [1, 1, 1, 0, 0, 0]
    assert output.metrics["true_share"].tolist() == [1, 0, 1, 0, 1, 0]
    assert torch.equal(output.loss, step_loss(scores, labels))


def test_steps_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="needs the token field 'step_label'"):
        StepObjective()({"scores": torch.zeros(1)}, {}, torch.zeros(1))
