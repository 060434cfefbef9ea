"""Sums and means over sequences: any order, any size, in float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.sequences import sequence_means, sequence_sums


def test_each_token_gets_the_sum_and_the_mean_of_its_sequence():
    values, index = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 2, 2, 0])
    assert sequence_sums(values, index).tolist() == [6.0, 8.0, 8.0, 6.0]
    assert sequence_means(values, index).tolist() == [3.0, 4.0, 4.0, 3.0]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3, width=32)), max_size=30))
def test_agrees_with_a_loop(tokens):
    index = torch.tensor([sequence for sequence, _ in tokens], dtype=torch.int64)
    values = torch.tensor([value for _, value in tokens], dtype=torch.float64)
    expected = [values[index == sequence].sum().item() for sequence in index.tolist()]
    torch.testing.assert_close(sequence_sums(values, index), torch.tensor(expected, dtype=torch.float64))


def test_a_long_sequence_keeps_its_digits_in_float32():
    values = torch.full((100_000,), 0.1)
    assert sequence_means(values, torch.zeros(100_000, dtype=torch.int64))[0] == values[0]


def test_no_gradient_flows_and_no_tokens_are_no_error():
    values = torch.ones(2, requires_grad=True)
    assert not sequence_means(values, torch.tensor([0, 0])).requires_grad
    assert sequence_means(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []
