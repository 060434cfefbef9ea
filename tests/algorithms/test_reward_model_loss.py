"""The loss of a reward model: values worked out by hand, a slow reference, and what may not matter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.reward_model_loss import RewardModelObjective, bradley_terry_loss, standard_deviation

SCORES = st.floats(-30, 30, width=32)


def slow_loss(chosen: float, rejected: float, margin: float, label_smoothing: float) -> float:
    """The formula as it stands in the papers, in double precision."""

    def negative_log_sigmoid(x: float) -> float:
        return -math.log(1 / (1 + math.exp(-x)))

    kept = negative_log_sigmoid(chosen - rejected - margin)
    return (1 - label_smoothing) * kept + label_smoothing * negative_log_sigmoid(rejected - chosen - margin)


@pytest.mark.parametrize(
    ("chosen", "rejected", "settings", "loss"),
    [
        (0.0, 0.0, {}, math.log(2)),
        (2.0, 1.0, {}, math.log(1 + math.exp(-1))),
        (1.0, 2.0, {}, math.log(1 + math.exp(1))),
        (2.0, 1.0, {"margin": 1.0}, math.log(2)),
        (0.0, 0.0, {"label_smoothing": 0.3}, math.log(2)),
        (math.log(3), 0.0, {"label_smoothing": 0.25}, 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
    ],
)
def test_losses_worked_out_by_hand(chosen: float, rejected: float, settings: dict, loss: float) -> None:
    found = bradley_terry_loss(torch.tensor([chosen]), torch.tensor([rejected]), **settings)
    assert found.item() == pytest.approx(loss, rel=1e-6)


@given(chosen=SCORES, rejected=SCORES, margin=st.floats(0, 3), label_smoothing=st.floats(0, 0.49))
def test_the_loss_is_that_of_the_papers(chosen: float, rejected: float, margin: float, label_smoothing: float) -> None:
    found = bradley_terry_loss(
        torch.tensor([chosen]), torch.tensor([rejected]), margin=margin, label_smoothing=label_smoothing
    )
    assert found.item() == pytest.approx(slow_loss(chosen, rejected, margin, label_smoothing), rel=1e-5, abs=1e-6)


def test_scores_far_apart_give_neither_infinities_nor_a_gradient_that_is_lost() -> None:
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(2))
    loss.sum().backward()
    assert loss.tolist() == [0.0, 1e4]
    assert chosen.grad is not None and chosen.grad.tolist() == [0.0, -1.0]


def test_the_loss_of_bfloat16_scores_is_computed_in_float32() -> None:
    chosen, rejected = torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([0.25], dtype=torch.bfloat16)
    assert torch.equal(bradley_terry_loss(chosen, rejected), bradley_terry_loss(chosen.float(), rejected.float()))


@given(shift=st.floats(-5, 5, width=32))
def test_only_the_difference_of_the_scores_counts(shift: float) -> None:
    chosen, rejected = torch.tensor([0.5, -1.0]), torch.tensor([0.0, 2.0])
    torch.testing.assert_close(
        bradley_terry_loss(chosen + shift, rejected + shift), bradley_terry_loss(chosen, rejected), rtol=1e-5, atol=1e-6
    )


def learn(scores: list[float], is_chosen: list[float], **settings: float):
    objective = RewardModelObjective(**settings)
    fields = {"is_chosen": torch.tensor(is_chosen)}
    return objective({"scores": torch.tensor(scores)}, fields, torch.arange(len(scores)))


def test_both_answers_of_a_pair_get_the_loss_and_the_metrics_of_the_pair() -> None:
    output = learn([2.0, 1.0, 0.0, 3.0, 1.0, 1.0], [1, 0, 1, 0, 1, 0], margin=0.5)
    pairs = bradley_terry_loss(torch.tensor([2.0, 0.0, 1.0]), torch.tensor([1.0, 3.0, 1.0]), margin=0.5)
    assert torch.equal(output.loss, pairs.repeat_interleave(2))
    assert output.metrics["accuracy"].tolist() == [1, 1, 0, 0, 0.5, 0.5]
    assert output.metrics["score_margin"].tolist() == [1, 1, -3, -3, 0, 0]
    assert output.metrics["chosen_score"].mean() == 1.0 and output.metrics["rejected_score"].mean() == pytest.approx(
        5 / 3
    )
    assert output.metrics["score_mean"].mean().item() == pytest.approx(8 / 6)
    moments = {name: values.mean().item() for name, values in output.derived["score_std"].moments.items()}
    expected = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0]).std(correction=0).item()
    assert output.derived["score_std"].compute(**moments) == pytest.approx(expected, rel=1e-6)


def test_scores_that_are_all_the_same_have_no_deviation_and_no_noise() -> None:
    assert standard_deviation(0.1, 0.1 * 0.1) == 0.0
    assert standard_deviation(0.1, 0.1 * 0.1 * (1 - 1e-16)) == 0.0


@pytest.mark.parametrize("is_chosen", [[0, 1, 1, 0], [1, 0, 1], [1, 1, 0, 0]])
def test_what_is_not_pairs_with_the_better_answer_first_is_refused(is_chosen: list[float]) -> None:
    with pytest.raises(ValueError, match="learns from pairs, the better answer first"):
        learn([0.0] * len(is_chosen), is_chosen)
