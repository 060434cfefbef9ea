"""Token-mean weights: one weight for all tokens of a step, whatever the step is cut into."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.aggregation import token_mean_weights


def gradient_of_step(token_losses: list[torch.Tensor], micro_batches: list[list[int]]) -> torch.Tensor:
    """Gradient by a shared parameter, accumulated over micro-batches of whole sequences."""
    weights = token_mean_weights([len(losses) for losses in token_losses])
    parameter = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for members in micro_batches:
        loss = sum((parameter * token_losses[i] * weights[i]).sum() for i in members)
        loss.backward()
    return parameter.grad


def test_every_token_of_the_step_weighs_the_same():
    assert token_mean_weights([1, 9]) == [0.1, 0.1]


def test_the_gradient_does_not_depend_on_the_micro_batches_for_one_short_and_one_long_sequence():
    losses = [torch.tensor([1.0], dtype=torch.float64), torch.full((9,), 0.5, dtype=torch.float64)]
    together, apart = gradient_of_step(losses, [[0, 1]]), gradient_of_step(losses, [[0], [1]])
    assert together.item() == pytest.approx((1.0 + 9 * 0.5) / 10)
    assert apart.item() == pytest.approx(together.item(), abs=1e-12)


def test_the_scale_does_not_depend_on_how_many_sequences_a_step_takes():
    losses = [torch.full((5,), 2.0, dtype=torch.float64)] * 4
    assert gradient_of_step(losses, [[0], [1], [2], [3]]).item() == pytest.approx(2.0)
    assert gradient_of_step(losses[:2], [[0], [1]]).item() == pytest.approx(2.0)


def test_filtered_sequences_leave_numerator_and_denominator():
    with_filtered = token_mean_weights([0, 0, 4, 0])
    assert with_filtered[2] == token_mean_weights([4])[0] == 0.25


def test_a_step_of_nothing_but_filtered_sequences_has_loss_zero():
    assert token_mean_weights([0, 0, 0]) == [0.0, 0.0, 0.0]
    assert token_mean_weights([]) == []


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="must not be negative, found -1"):
        token_mean_weights([3, -1])


@given(st.lists(st.lists(st.floats(-10, 10), max_size=6), min_size=1, max_size=8), st.randoms())
def test_any_cut_of_the_step_sums_to_the_mean_over_its_tokens(token_losses, random):
    weights = token_mean_weights([len(losses) for losses in token_losses])
    order = list(range(len(token_losses)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    micro_batches = [order[:cut], order[cut:]]
    total = sum(sum(weights[i] * loss for i in members for loss in token_losses[i]) for members in micro_batches)
    tokens = [loss for losses in token_losses for loss in losses]
    assert total == pytest.approx(sum(tokens) / len(tokens) if tokens else 0.0, rel=1e-9, abs=1e-9)
