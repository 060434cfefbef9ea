"""What evaluations are called: the same in records, trackers and configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config.evaluation import best_metrics, pass_at_sizes, qualified, require_best_metric, require_set_names


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (4, [1, 2, 4]), (50, [1, 2, 4, 8, 16, 32])]
)
def test_pass_at_k_is_reported_for_powers_of_two_up_to_the_samples(samples: int, sizes: list[int]) -> None:
    assert pass_at_sizes(samples) == sizes


@given(st.integers(1, 10_000))
def test_no_size_exceeds_the_samples_and_doubling_the_last_would(samples: int) -> None:
    sizes = pass_at_sizes(samples)
    assert sizes[0] == 1 and sizes[-1] <= samples < 2 * sizes[-1]


def test_the_first_set_needs_no_name_and_the_others_have_theirs() -> None:
    assert qualified("held-out", "pass@2") == "pass@2"
    assert qualified("math", "pass@2") == "math/pass@2"
    assert best_metrics(["math"], 2) == [
        "sampled_accuracy", "greedy_accuracy", "mean_reward", "pass@1", "pass@2",
        "math/sampled_accuracy", "math/greedy_accuracy", "math/mean_reward", "math/pass@1", "math/pass@2",
    ]  # fmt: skip


def test_an_unknown_metric_is_refused_with_the_ones_there_are() -> None:
    known = best_metrics([], 2)
    require_best_metric("pass@2", known)
    with pytest.raises(ValueError, match=r"one of sampled_accuracy, .*, pass@2 .*found 'pass@4'"):
        require_best_metric("pass@4", known)


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "pass@4", "a\n", "held-out"])
def test_a_name_that_would_blur_keys_or_metrics_is_refused(name: str) -> None:
    require_set_names(["gsm8k-test", "AIME_2024"])
    with pytest.raises(ValueError, match="other_data must"):
        require_set_names(["fine", name])
