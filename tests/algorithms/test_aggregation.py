"""Weights of tokens: what a step's loss is by each aggregation, whatever the step is cut into."""

from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.aggregation import aggregation_weights

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"]
LENGTH = 20


def weights(counts: list[int], aggregation: str = "token_mean") -> list[float]:
    return aggregation_weights(counts, aggregation=aggregation, constant_length=LENGTH)


def step_loss(token_losses: list[list[float]], aggregation: str, sequences: list[int] | None = None) -> float:
    """The part of a step's loss that some of its sequences add, by default all."""
    weight = weights([len(losses) for losses in token_losses], aggregation)
    chosen = range(len(token_losses)) if sequences is None else sequences
    return sum(weight[i] * loss for i in chosen for loss in token_losses[i])


def reference_loss(token_losses: list[list[float]], aggregation: str) -> float:
    """From the papers, sequence by sequence; those without a token are not there."""
    sequences = [losses for losses in token_losses if losses]
    if not sequences:
        return 0.0
    match aggregation:
        case "token_mean":
            return fmean([loss for losses in sequences for loss in losses])
        case "sequence_mean_token_mean":
            return fmean([fmean(losses) for losses in sequences])
        case "sequence_mean_token_sum":
            return fmean([sum(losses) for losses in sequences])
        case "constant_length":
            return fmean([sum(losses) / LENGTH for losses in sequences])
    raise AssertionError(aggregation)


def gradient_of_step(token_losses: list[torch.Tensor], micro_batches: list[list[int]]) -> torch.Tensor:
    """Gradient by a shared parameter, accumulated over micro-batches of whole sequences."""
    weight = weights([len(losses) for losses in token_losses])
    parameter = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for members in micro_batches:
        loss = sum((parameter * token_losses[i] * weight[i]).sum() for i in members)
        loss.backward()
    return parameter.grad


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 10, 1 / 10]),
        ("sequence_mean_token_mean", [1 / 2, 1 / 18]),
        ("sequence_mean_token_sum", [1 / 2, 1 / 2]),
        ("constant_length", [1 / 40, 1 / 40]),
    ],
)
def test_one_short_and_one_long_sequence_by_hand(aggregation, expected):
    assert weights([1, 9], aggregation) == pytest.approx(expected)


def test_the_gradient_does_not_depend_on_the_micro_batches_for_one_short_and_one_long_sequence():
    losses = [torch.tensor([1.0], dtype=torch.float64), torch.full((9,), 0.5, dtype=torch.float64)]
    together, apart = gradient_of_step(losses, [[0, 1]]), gradient_of_step(losses, [[0], [1]])
    assert together.item() == pytest.approx((1.0 + 9 * 0.5) / 10)
    assert apart.item() == pytest.approx(together.item(), abs=1e-12)


def test_the_scale_does_not_depend_on_how_many_sequences_a_step_takes():
    losses = [torch.full((5,), 2.0, dtype=torch.float64)] * 4
    assert gradient_of_step(losses, [[0], [1], [2], [3]]).item() == pytest.approx(2.0)
    assert gradient_of_step(losses[:2], [[0], [1]]).item() == pytest.approx(2.0)


def test_a_constant_length_weighs_a_token_the_same_in_steps_of_short_and_of_long_sequences():
    assert weights([1, 2], "constant_length") == weights([19, 20], "constant_length")
    assert weights([1, 2], "token_mean") != weights([19, 20], "token_mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_filtered_sequences_leave_numerator_and_denominator(aggregation):
    with_filtered = weights([0, 0, 4, 0], aggregation)
    assert with_filtered[2] == weights([4], aggregation)[0]
    assert step_loss([[], [], [1.0, 2.0], []], aggregation) == step_loss([[1.0, 2.0]], aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_of_nothing_but_filtered_sequences_has_loss_zero(aggregation):
    assert weights([0, 0, 0], aggregation) == [0.0, 0.0, 0.0]
    assert weights([], aggregation) == []


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
def test_some_sequences_weigh_what_they_weigh_in_the_whole_step(aggregation):
    counts = [3, 1, 8, 5]
    some = aggregation_weights(counts[1:3], aggregation=aggregation, constant_length=LENGTH, step_sequences=4)
    assert some == weights(counts, aggregation)[1:3]


def test_a_mean_over_tokens_cannot_be_known_from_some_sequences():
    with pytest.raises(ValueError, match="token_mean need the tokens of the whole step"):
        aggregation_weights([3], aggregation="token_mean", step_sequences=2)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="must not be negative, found -1"):
        weights([3, -1])


@pytest.mark.parametrize("length", [None, 0])
def test_a_constant_length_must_be_given_where_it_is_needed(length):
    with pytest.raises(ValueError, match=f"needs a divisor of at least 1, found {length}"):
        aggregation_weights([3], aggregation="constant_length", constant_length=length)
    assert aggregation_weights([2], aggregation="token_mean") == [0.5]


def test_another_aggregation_is_refused():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        weights([3], "mean")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(token_losses=st.lists(st.lists(st.floats(-10, 10), max_size=6), min_size=1, max_size=8), random=st.randoms())
def test_any_cut_of_the_step_sums_to_the_loss_of_the_whole(aggregation, token_losses, random):
    order = list(range(len(token_losses)))
    random.shuffle(order)
    cut = random.randint(0, len(order))
    total = sum(step_loss(token_losses, aggregation, part) for part in (order[:cut], order[cut:]))
    assert total == pytest.approx(reference_loss(token_losses, aggregation), rel=1e-9, abs=1e-9)
