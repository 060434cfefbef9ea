"""Admission bounds staleness before any work is done."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.trajectory import Group
from slipstream.rollout.admission import Admission, staleness_metrics


def test_a_synchronous_run_issues_one_batch_per_version() -> None:
    admission = Admission(groups_per_step=4, max_staleness=0)
    assert admission.open_places(0) == 4
    admission.issued = 4
    assert admission.open_places(0) == 0
    assert admission.open_places(1) == 4


def test_a_dropped_group_makes_room_for_another() -> None:
    admission = Admission(groups_per_step=4, max_staleness=0, issued=4)
    admission.dropped = 1
    assert admission.open_places(0) == 1


def test_there_are_never_less_than_no_places() -> None:
    assert Admission(groups_per_step=2, max_staleness=0, issued=9).open_places(0) == 0


def train_in_order(admission: Admission, choices: list[tuple[int, list[int]]]) -> list[int]:
    """Simulate a run; returns the staleness of every group trained on.

    Each choice issues at most so many groups, and says which of those that wait then fail or are filtered. Whenever a
    batch is there, it is trained and published.
    """
    version, waiting, staleness = 0, [], []
    for wanted, dropped in choices:
        count = min(wanted, admission.open_places(version))
        waiting += [version] * count
        admission.issued += count
        for place in dropped[: len(waiting)]:
            waiting.pop(place % len(waiting))
            admission.dropped += 1
        if len(waiting) >= admission.groups_per_step:
            batch, waiting = waiting[: admission.groups_per_step], waiting[admission.groups_per_step :]
            staleness += [version - sampled for sampled in batch]
            version += 1
    return staleness


@given(
    groups=st.integers(1, 5),
    bound=st.integers(0, 3),
    choices=st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 9), max_size=3)), max_size=60),
)
def test_staleness_never_exceeds_its_bound(groups: int, bound: int, choices: list[tuple[int, list[int]]]) -> None:
    assert all(age <= bound for age in train_in_order(Admission(groups, bound), choices))


def test_the_bound_is_used_to_the_full() -> None:
    assert max(train_in_order(Admission(2, 3), [(100, [])] * 20)) == 3


@given(groups=st.integers(1, 5), bound=st.integers(0, 3), version=st.integers(0, 9))
def test_a_run_never_starves(groups: int, bound: int, version: int) -> None:
    """With everything up to now trained, there is always a whole batch to issue."""
    assert Admission(groups, bound, issued=groups * version).open_places(version) >= groups


def test_no_more_is_issued_than_the_steps_of_the_run_train_on() -> None:
    admission = Admission(groups_per_step=4, max_staleness=3, steps=2)
    assert admission.open_places(0) == 8
    admission.issued, admission.dropped = 9, 2
    assert admission.open_places(1) == 1, "what was dropped is still replaced"


def test_staleness_is_counted_by_token() -> None:
    def group(*versions: int) -> Group:
        trajectory = SimpleNamespace(
            versions=np.array([-1, *versions]), loss_mask=np.array([False] + [True] * len(versions))
        )
        return SimpleNamespace(trajectories=[trajectory])  # type: ignore[return-value]

    metrics = staleness_metrics([group(3, 4, 5), group(5)], version=5, max_staleness=3)
    assert metrics == {
        "staleness/mean": 0.75,
        "staleness/max": 2.0,
        "staleness/share/0": 0.5,
        "staleness/share/1": 0.25,
        "staleness/share/2": 0.25,
        "staleness/share/3": 0.0,
    }
