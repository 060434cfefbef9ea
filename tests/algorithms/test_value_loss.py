"""The critic's loss: each side of its clip by hand, against the formula, and the explained variance."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.value_loss import ValueObjective, clipped_value_loss, explained_variance


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(value: float, *, old: float, target: float, clip: float = 0.2) -> tuple[float, float, bool]:
    values = tensor(value).requires_grad_()
    loss, is_clipped = clipped_value_loss(values, tensor(target), old_values=tensor(old), value_clip=clip)
    loss.sum().backward()
    return loss.item(), values.grad.item(), bool(is_clipped)


def call(objective: ValueObjective, values: Tensor, **fields: Tensor):
    return objective({"values": values}, fields, torch.zeros(len(values), dtype=torch.int64))


def derived(output, name: str = "explained_variance") -> float:
    metric = output.derived[name]
    return metric.compute(**{moment: values.mean().item() for moment, values in metric.moments.items()})


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "is_clipped"),
    [
        (0.1, 0.5 * 0.9**2, -0.9, False),  # within 0.2 of the old value 0, on its way to the return 1
        (0.5, 0.5 * 0.8**2, 0.0, True),  # moved towards the return by more than 0.2: it waits
        (-0.5, 0.5 * 1.5**2, -1.5, False),  # moved away from it: pulled back with full force
        (3.0, 0.5 * 2.0**2, 2.0, False),  # so far beyond the return that the old value was nearer
        (1.1, 0.5 * 0.8**2, 0.0, True),  # beyond the return but nearer than the clip
    ],
)
def test_each_side_of_the_clip_by_hand(value, loss, gradient, is_clipped):
    found = loss_and_gradient(value, old=0.0, target=1.0)
    assert found == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 2))
def test_agrees_with_the_formula(value, old, target, clip):
    clipped = min(max(value, old - clip), old + clip)
    expected = 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
    assert loss_and_gradient(value, old=old, target=target, clip=clip)[0] == pytest.approx(expected)


def test_a_nan_stays_visible_and_touches_no_other_token():
    loss, _ = clipped_value_loss(tensor(math.nan, 1.0), tensor(0, 0), old_values=tensor(1, 1), value_clip=0.2)
    assert math.isnan(loss[0].item())
    assert loss[1].item() == 0.5


def test_without_a_clip_the_loss_is_the_squared_error_and_needs_no_old_values():
    output = call(ValueObjective(value_clip=None), tensor(0.5, -1.0), returns=tensor(1.0, 1.0))
    assert output.loss.tolist() == [0.125, 2.0]
    assert set(output.metrics) == {"value_error"}
    assert output.metrics["value_error"].tolist() == [0.5, 2.0]


def test_the_objective_reports_error_and_clipping():
    values = tensor(0.1, 0.5).requires_grad_()
    output = call(ValueObjective(value_clip=0.2), values, returns=tensor(1.0, 1.0), old_values=tensor(0.0, 0.0))
    assert output.loss.tolist() == pytest.approx([0.405, 0.32])
    assert output.metrics["value_error"].tolist() == pytest.approx([0.9, 0.5])
    assert output.metrics["value_clip_share"].tolist() == [0.0, 1.0]
    moments = output.derived["explained_variance"].moments
    assert all(not part.requires_grad for part in [*output.metrics.values(), *moments.values()])


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="'old_values', found returns"):
        call(ValueObjective(value_clip=0.2), tensor(0.0), returns=tensor(1.0))
    with pytest.raises(ValueError, match="'returns', found none"):
        call(ValueObjective(value_clip=None), tensor(0.0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 2.0, 3.0, 6.0), 1.0),
        ((2.0, 3.0, 4.0, 7.0), 1.0),  # off by a constant, which is not the variance's business
        ((3.0, 3.0, 3.0, 3.0), 0.0),
        ((-1.0, -2.0, -3.0, -6.0), -3.0),  # errors twice the returns: four times their variance
    ],
)
def test_explained_variance_by_hand(values, expected):
    output = call(ValueObjective(value_clip=None), tensor(*values), returns=tensor(1.0, 2.0, 3.0, 6.0))
    assert derived(output) == pytest.approx(expected)


@pytest.mark.parametrize("constant", [0.0, 1 / 3, 100.1])
def test_returns_that_are_all_the_same_have_nothing_to_explain_and_are_no_division_by_noise(constant):
    values, returns = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.full((50,), constant)
    assert derived(call(ValueObjective(value_clip=None), values, returns=returns)) == 0.0


def test_the_explained_variance_is_that_of_all_tokens_and_not_a_mean_over_parts():
    assert explained_variance(returns=2.0, returns_square=5.0, error=0.0, error_square=0.25) == pytest.approx(0.75)


def test_the_objective_crosses_processes():
    assert pickle.loads(pickle.dumps(ValueObjective(0.2))) == ValueObjective(0.2)
    assert not ValueObjective(0.2).needs_entropy_gradient
