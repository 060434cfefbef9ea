"""pass@k and avg@k: by hand, against counting every choice of k answers, and as probabilities."""

from itertools import combinations, pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.evaluation import average_at_k, pass_at_k

OUTCOMES = st.integers(1, 7).flatmap(
    lambda size: st.lists(st.lists(st.booleans(), min_size=size, max_size=size), min_size=1, max_size=4)
)


def counted_pass_at_k(answers: list[bool], k: int) -> float:
    """The share of all choices of k answers that hold a right one."""
    return fmean(any(choice) for choice in combinations(answers, k))


def test_values_by_hand():
    # Of the 6 pairs of 4 answers, one right, 3 hold the right one.
    assert pass_at_k([[True, False, False, False]], 2) == pytest.approx(0.5)
    # Of the 6 pairs, two right, only one holds none.
    assert pass_at_k([[True, False, True, False]], 2) == pytest.approx(5 / 6)
    assert pass_at_k([[True, False], [False, False]], 1) == pytest.approx(0.25)


def test_fewer_wrong_answers_than_k_leave_no_choice_without_a_right_one():
    assert pass_at_k([[True, True, False]], 2) == 1.0


def test_no_right_answer_never_passes():
    assert pass_at_k([[False] * 5], 5) == 0.0


@given(OUTCOMES, st.data())
def test_agrees_with_counting_every_choice(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes[0])))
    assert pass_at_k(outcomes, k) == pytest.approx(fmean(counted_pass_at_k(answers, k) for answers in outcomes))


@given(OUTCOMES)
def test_more_tries_never_pass_less_and_one_try_passes_as_often_as_the_average(outcomes):
    by_k = [pass_at_k(outcomes, k) for k in range(1, len(outcomes[0]) + 1)]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(by_k))
    assert by_k[0] == pytest.approx(average_at_k(outcomes))
    assert by_k[-1] == pytest.approx(fmean(any(answers) for answers in outcomes))


def test_many_answers_stay_exact():
    # Half of 10,000 answers right: C(10000, 5000) has 3000 digits.
    assert pass_at_k([[True, False] * 5000], 1) == pytest.approx(0.5, rel=1e-9)
    assert pass_at_k([[True] + [False] * 9999], 5000) == pytest.approx(0.5, rel=1e-9)


def test_prompts_count_the_same_and_answers_count_the_same():
    uneven = [[True], [False, False, False]]
    assert pass_at_k(uneven, 1) == 0.5
    assert average_at_k(uneven) == 0.25


@pytest.mark.parametrize(
    ("outcomes", "k", "message"),
    [
        ([[True], [True, False]], 2, "pass@2 needs at least 2 answers per prompt, found 1 for prompt 0"),
        ([[True]], 0, "k must be at least 1, found 0"),
        ([], 1, "at least one prompt"),
    ],
)
def test_what_cannot_be_estimated_is_refused(outcomes, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(outcomes, k)


def test_the_average_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one answer"):
        average_at_k([[], []])
