"""Sums over micro-batches and ranks: means are over loss tokens, not over micro-batches or ranks."""

import pickle
from dataclasses import replace

import pytest
import torch

from slipstream.algorithms.objective import DerivedMetric, ObjectiveOutput
from slipstream.training.batch import make_micro_batch
from slipstream.training.totals import StepTotals, nonfinite_examples


def count(totals: StepTotals, batch, value: float) -> None:
    values = torch.full((batch.loss_tokens,), value)
    output = ObjectiveOutput(values, {"kl": values, "gap_max": values})
    totals.add(batch, torch.tensor(value), {"entropy": values}, output)


def test_metrics_are_means_over_the_tokens_of_all_ranks_and_maxima(make_examples):
    here, there = StepTotals(), StepTotals()
    small, large = make_micro_batch(make_examples((3,)), "cpu"), make_micro_batch(make_examples((7, 4)), "cpu")
    count(here, small, -3.0)
    count(here, large, 1.0)
    count(there, large, 2.0)
    total = StepTotals()
    total.merge([here, there])
    metrics = total.metrics()
    assert metrics["tokens"] == 1 + 7 + 7
    assert metrics["kl"] == metrics["entropy"] == pytest.approx((-3 + 7 * 1 + 7 * 2) / 15)
    assert metrics["gap_max"] == 2
    assert metrics["loss"] == pytest.approx(-3 + 1 + 2), "the weights have divided the loss already"


def variance(value: float, square: float) -> float:
    return square - value**2


def test_a_derived_metric_is_computed_from_means_over_the_tokens_of_all_ranks(make_examples):
    here, there = StepTotals(), StepTotals()
    parts = [(here, (3,), -3.0), (here, (7, 4), 1.0), (there, (7, 4), 2.0)]
    for totals, lengths, value in parts:
        batch = make_micro_batch(make_examples(lengths), "cpu")
        values = torch.full((batch.loss_tokens,), value)
        derived = {"variance": DerivedMetric(variance, {"value": values, "square": values.square()})}
        totals.add(batch, torch.tensor(0.0), {}, ObjectiveOutput(values, derived=derived))
    total = StepTotals()
    total.merge(pickle.loads(pickle.dumps(part)) for part in (here, there, StepTotals()))
    expected = torch.tensor([-3.0] + [1.0] * 7 + [2.0] * 7).var(correction=0).item()
    assert total.metrics() == {"loss": 0.0, "tokens": 15.0, "variance": pytest.approx(expected)}


def test_a_maximum_of_negative_values_is_negative(make_examples):
    totals = StepTotals()
    count(totals, make_micro_batch(make_examples((3,)), "cpu"), -3.0)
    assert totals.metrics()["gap_max"] == -3


def test_no_tokens_are_no_division_by_zero():
    assert StepTotals().metrics() == {"loss": 0.0, "tokens": 0.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["log_probs", "loss", "field"])
def test_each_example_with_a_non_finite_value_is_found_once(place, value, make_examples):
    batch = make_micro_batch(make_examples((4, 5, 6)), "cpu")
    parts = {name: torch.zeros(batch.loss_tokens) for name in ("log_probs", "loss", "field")}
    assert nonfinite_examples(batch, parts["log_probs"], parts["loss"]) == []
    parts[place][[2, 3, 8]] = value
    batch = replace(batch, fields={"field": parts["field"]})
    assert nonfinite_examples(batch, parts["log_probs"], parts["loss"]) == ["e1", "e2"]
