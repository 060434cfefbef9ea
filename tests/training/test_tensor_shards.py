"""Weights in pieces: where they were cut is seen by their shapes. Putting them together: test_layouts.py."""

import pytest
import torch

from slipstream.training.tensor_shards import Cut, find_cut, is_piece


@pytest.mark.parametrize(
    ("shape", "pieces", "cut"),
    [
        ((6, 4), [(3, 4), (3, 4)], Cut(0, (3, 3))),
        ((6, 4), [(6, 3), (6, 1)], Cut(1, (3, 1))),
        ((3,), [(2,), (1,)], Cut(0, (2, 1))),
        # The first rank may have all of it: the others then have none.
        ((2, 4), [(2, 4), (0, 4)], Cut(0, (2, 0))),
        ((6, 4), [(6, 4), (6, 4)], None),
    ],
)
def test_a_cut_is_where_some_rank_has_less(
    shape: tuple[int, ...], pieces: list[tuple[int, ...]], cut: Cut | None
) -> None:
    assert find_cut(shape, pieces) == cut


def test_a_weight_that_deepspeed_left_whole_is_no_piece() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert not is_piece(weight)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_piece(weight)
