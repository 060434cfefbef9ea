"""The learner as one object: metrics of several optimizer steps become one, and each example goes to one rank."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from slipstream.data.trajectory import TrainingExample
from slipstream.training import group as group_module
from slipstream.training.group import LearnerGroup, merge_step_metrics


def step(**changes: Any) -> dict[str, Any]:
    metrics = {"loss": 1.0, "ratio_max": 1.0, "tokens": 10.0, "skipped": 0.0, "seconds": 2.0, "learning_rate": 0.1}
    return metrics | changes


def test_one_step_keeps_its_numbers() -> None:
    assert merge_step_metrics([step()]) == step(skipped_steps=[], nonfinite_examples=[])


def test_counts_are_summed_extremes_kept_the_last_rate_taken_and_the_rest_averaged() -> None:
    assert merge_step_metrics([step(), step(loss=3.0, ratio_max=5.0, learning_rate=0.2)]) == {
        "loss": 2.0, "ratio_max": 5.0, "tokens": 20.0, "skipped": 0.0, "seconds": 4.0, "learning_rate": 0.2,
        "skipped_steps": [], "nonfinite_examples": [],
    }  # fmt: skip


def test_skipped_steps_are_told_apart_with_their_culprits() -> None:
    skipped = step(skipped=1.0, nonfinite_examples=["0-1/2"])
    merged = merge_step_metrics([step(), skipped, skipped])
    assert merged["skipped"] == 2.0
    assert merged["skipped_steps"] == [1, 2]
    assert merged["nonfinite_examples"] == ["0-1/2", "0-1/2"]


class Rank:
    """Stands for a remote rank: answers with the example ids it was given."""

    def __init__(self) -> None:
        self.name = "rank"
        self.micro_batches: list[list[str]] = []

    def submit(self, method: str, *arguments: Any) -> dict[str, Any]:
        batches = arguments[0]
        self.micro_batches = [[example.example_id for example in batch] for batch in batches]
        if method in ("log_probs", "values"):
            return {example.example_id: np.zeros(1, np.float32) for batch in batches for example in batch}
        return step()


def examples(count: int) -> list[TrainingExample]:
    return [TrainingExample(str(n), np.arange(n % 5 + 2), np.arange(n % 5 + 2) >= 1) for n in range(count)]


@pytest.mark.parametrize("shared", ["rows", "weights"])
def test_ranks_that_share_rows_or_weights_get_the_same_examples_and_others_different_ones(
    monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    monkeypatch.setattr(group_module, "gather", lambda calls, deadline_s: list(calls))
    ranks = [Rank() for _ in range(4)]
    sizes = {"sequence_parallel": 2} if shared == "rows" else {"tensor_parallel": 2}
    learner = LearnerGroup(ranks, tokens_per_micro_batch=8, call_timeout_s=1.0, **sizes)  # type: ignore[arg-type]
    assert learner.values(examples(7)).keys() == {str(n) for n in range(7)}
    assert ranks[0].micro_batches == ranks[1].micro_batches and ranks[2].micro_batches == ranks[3].micro_batches
    given = Counter(name for rank in ranks[::2] for batch in rank.micro_batches for name in batch)
    assert given == Counter(str(n) for n in range(7))


@pytest.mark.parametrize("method", ["update", "log_probs", "values"])
def test_every_example_goes_to_one_rank_and_all_ranks_get_as_many_micro_batches(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(group_module, "gather", lambda calls, deadline_s: list(calls))
    ranks = [Rank(), Rank(), Rank()]
    learner = LearnerGroup(ranks, tokens_per_micro_batch=8, call_timeout_s=1.0)  # type: ignore[arg-type]
    objective: Any = None
    if method == "update":
        learner.update([examples(7)], objective)
    elif method == "log_probs":
        assert learner.log_probs("policy", examples(7)).keys() == {str(n) for n in range(7)}
    else:
        assert learner.values(examples(7)).keys() == {str(n) for n in range(7)}
    given = Counter(name for rank in ranks for batch in rank.micro_batches for name in batch)
    assert given == Counter(str(n) for n in range(7))
    assert len({len(rank.micro_batches) for rank in ranks}) == 1
