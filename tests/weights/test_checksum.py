"""The checksum sees every byte and its place."""

import pytest
import torch

from slipstream.weights.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_a_copy_has_the_same_checksum_and_an_exchange_of_two_values_another(dtype):
    tensor = torch.arange(12).reshape(3, 4).remainder(2 if dtype == torch.bool else 100).to(dtype)
    exchanged = tensor.clone().reshape(-1)
    exchanged[[4, 7]] = exchanged[[7, 4]]
    assert tensor_checksum(tensor.clone()) == tensor_checksum(tensor)
    assert tensor_checksum(exchanged) != tensor_checksum(tensor)


def test_one_bit_makes_a_difference():
    zeros = torch.zeros(1000)
    negative = zeros.clone()
    negative[999] = -0.0
    assert torch.equal(zeros, negative) and tensor_checksum(zeros) != tensor_checksum(negative)


def test_it_is_the_values_in_row_major_order_that_count_not_strides():
    tensor = torch.randn(5, 7)
    assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.t()) != tensor_checksum(tensor)


def test_scalars_and_empty_tensors_have_one_too():
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor(2.0))
    assert tensor_checksum(torch.empty(0, 3)) == tensor_checksum(torch.empty(0))


def test_it_is_the_published_hash():
    """XXH3-64 with seed 0 of no input, from the reference implementation's test vectors."""
    assert tensor_checksum(torch.empty(0)) == 0x2D06800538D394C2
