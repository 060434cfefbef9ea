"""Importance weights between rollout and trainer: by hand, on both levels, in both modes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.correction import Correction, effective_sample_share, importance_weights, weighted_loss

MODES, LEVELS = ("truncate", "mask"), ("token", "sequence")


def weigh(
    ratios: list[float], *, mode: str, level: str = "token", low: float = 0.5, high: float = 2.0, sequences=None
) -> tuple[list[float], list[bool]]:
    """Weights and flags of tokens that the trainer finds so many times as likely as the rollout engine did."""
    rollout = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    old = rollout + torch.tensor(ratios, dtype=torch.float64).log()
    weights, is_cut = importance_weights(
        old,
        rollout,
        sequence_index=torch.tensor(sequences or range(len(ratios)), dtype=torch.int64),
        correction=Correction(mode=mode, level=level, low=low, high=high),
    )
    return weights.tolist(), is_cut.tolist()


def test_truncation_clamps_and_masking_selects():
    ratios, is_cut = [0.1, 0.6, 1.0, 1.9, 7.0], [True, False, False, False, True]
    assert weigh(ratios, mode="truncate") == (pytest.approx([0.5, 0.6, 1.0, 1.9, 2.0]), is_cut)
    assert weigh(ratios, mode="mask") == (pytest.approx([0.0, 0.6, 1.0, 1.9, 0.0]), is_cut)


@pytest.mark.parametrize("mode", MODES)
def test_the_weight_of_a_sequence_is_the_product_over_its_tokens(mode):
    # 3 * 0.5 = 1.5 although 3 alone is outside; 1.5 * 1.5 = 2.25 is outside although its tokens are not.
    weights, is_cut = weigh([3.0, 1.5, 0.5, 1.5], mode=mode, level="sequence", sequences=[0, 1, 0, 1])
    outside = 2.0 if mode == "truncate" else 0.0
    assert weights == pytest.approx([1.5, outside, 1.5, outside])
    assert is_cut == [False, True, False, True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_have_weight_one(mode, level):
    weights, is_cut = weigh([1.0, 1.0, 1.0], mode=mode, level=level, sequences=[0, 0, 1])
    assert weights == [1.0, 1.0, 1.0]
    assert not any(is_cut)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.sampled_from(LEVELS))
def test_weights_lie_within_the_bounds_or_are_zero(ratios, level):
    sequences = [0] * len(ratios)
    truncated, _ = weigh(ratios, mode="truncate", level=level, sequences=sequences)
    assert all(0.5 <= weight <= 2.0 for weight in truncated)
    masked, is_cut = weigh(ratios, mode="mask", level=level, sequences=sequences)
    assert all((weight == 0.0) if cut else (0.5 <= weight <= 2.0) for weight, cut in zip(masked, is_cut, strict=True))


def test_without_bounds_the_weights_make_expectations_right():
    rollout = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    trainer = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    weights, _ = importance_weights(
        trainer.log(),
        rollout.log(),
        sequence_index=torch.arange(3),
        correction=Correction(mode="truncate", level="token", low=0.0, high=math.inf),
    )
    values = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    assert (rollout * weights * values).sum().item() == pytest.approx((trainer * values).sum().item())


def test_no_gradient_flows_through_a_weight():
    old = torch.tensor([-1.0], requires_grad=True)
    weights, _ = importance_weights(
        old,
        torch.tensor([-1.2]),
        sequence_index=torch.tensor([0]),
        correction=Correction(mode="truncate", level="token", low=0.0, high=2.0),
    )
    assert not weights.requires_grad


def test_a_token_without_weight_contributes_nothing_however_large_its_loss_is():
    loss = torch.tensor([math.inf, 2.0, 1e30], requires_grad=True)
    weighted = weighted_loss(loss, torch.tensor([0.0, 0.5, 0.0]))
    weighted.sum().backward()
    assert weighted.tolist() == [0.0, 1.0, 0.0]
    assert loss.grad.tolist() == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_extreme_distances_give_finite_weights_and_a_nan_stays_visible_in_its_sequence(mode, level):
    def weights_of(*log_ratios: float) -> Tensor:
        return importance_weights(
            torch.tensor(log_ratios),
            torch.zeros(len(log_ratios)),
            sequence_index=torch.tensor([0, 1, 1]),
            correction=Correction(mode=mode, level=level, low=0.0, high=math.inf),
        )[0]

    assert torch.isfinite(weights_of(1e3, -1e3, 0.0)).all()
    weights = weights_of(math.nan, 0.0, 0.0)
    assert math.isnan(weights[0].item())
    assert weights[1:].tolist() == [1.0, 1.0]


@settings(deadline=None)
@given(st.lists(st.floats(0, 5), min_size=1, max_size=20))
def test_the_effective_sample_share_agrees_with_its_definition(weights):
    count, total, squares = len(weights), sum(weights), sum(weight**2 for weight in weights)
    expected = total**2 / squares / count if squares else 0.0
    assert effective_sample_share(total / count, squares / count) == pytest.approx(expected)


def test_the_effective_sample_share_by_hand():
    assert effective_sample_share(1.0, 1.0) == 1.0  # all alike
    assert effective_sample_share(0.25, 0.25) == 0.25  # one of four tokens counts, the others not
    assert effective_sample_share(0.0, 0.0) == 0.0
