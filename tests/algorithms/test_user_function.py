"""What users' functions may return, and what they are told where they return something else."""

import math

import numpy as np
import pytest
import torch

from slipstream.algorithms.user_function import checked_numbers
from slipstream.errors import TrainingError


def own(_: object) -> None:
    """Stands for a user's function: only its name is read."""


def check(result: object) -> torch.Tensor:
    return checked_numbers(result, own, kind="advantage", size=2)


def test_finite_numbers_pass_in_float64_and_without_gradient():
    result = check(torch.tensor([1.0, 2.0], requires_grad=True))
    assert result.dtype == torch.float64
    assert not result.requires_grad
    assert check(torch.tensor([1, 2])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"the advantage function own must return a tensor of shape \[2\], found NoneType"),
        (np.zeros(2), "found ndarray"),
        (torch.zeros(3), r"must return a tensor of shape \[2\], found shape \[3\]"),
        (torch.zeros(2, 1), r"found shape \[2, 1\]"),
        (torch.tensor([0.0, math.nan]), "must return finite numbers, found nan at position 1"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(result, message):
    with pytest.raises(TrainingError, match=message):
        check(result)


def test_an_object_that_can_be_called_is_named_by_what_it_says_of_itself():
    class Imported:
        def __call__(self) -> None: ...

        def __str__(self) -> str:
            return "mine.py:shape"

    with pytest.raises(TrainingError, match=r"the shaping function mine\.py:shape must"):
        checked_numbers(None, Imported(), kind="shaping", size=1)
