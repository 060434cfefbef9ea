"""Waiting for many calls: what is ready is taken together, and looking leaves time for other work."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cluster import calls as calls_module
from slipstream.cluster.calls import Lookout, gather, wait_for_some
from slipstream.errors import EngineError


class Looks:
    """Stands for `ray.wait`: `ready` are the references that are; remembers how many each look was at."""

    def __init__(self) -> None:
        self.ready: list[Any] = []
        self.lengths: list[int] = []
        self.computes_s = 0.0

    def __call__(self, references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.lengths.append(len(references))
        end = time.thread_time() + self.computes_s
        while time.thread_time() < end:
            pass
        ready = [reference for reference in references if reference in self.ready][:num_returns]
        return ready, [reference for reference in references if reference not in ready]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    import ray

    double = Looks()
    monkeypatch.setattr(ray, "wait", double)
    monkeypatch.setattr(calls_module, "fetch", lambda call, reference: f"result of {reference}")
    return double


def call(reference: str) -> Any:
    return SimpleNamespace(reference=reference, description=reference, engine=SimpleNamespace(name="", log_tail=str))


def test_all_that_is_ready_is_taken_in_its_order(looks: Looks) -> None:
    looks.ready = ["c", "a"]
    assert wait_for_some(["a", "b", "c"], 1.0) == ["a", "c"]
    assert looks.lengths == [3]


def test_where_nothing_is_ready_the_first_is_waited_for_and_the_deadline_gives_none(looks: Looks) -> None:
    assert wait_for_some(["a", "b"], 0.1) == []
    assert looks.lengths == [2, 2], "a look, and a wait"


def test_the_results_of_a_thousand_calls_are_gathered_with_one_look(looks: Looks) -> None:
    names = [str(number) for number in range(1000)]
    looks.ready = names[::-1]
    assert gather([call(name) for name in names], deadline_s=5) == [f"result of {name}" for name in names]
    assert looks.lengths == [1000]


def test_who_has_not_answered_is_named_alone(looks: Looks) -> None:
    looks.ready = ["a"]
    with pytest.raises(EngineError, match=r"no answer within 0 s from b, c\n"):
        gather([call(name) for name in "abc"], deadline_s=0)


def test_looking_takes_a_tenth_of_the_time_at_most(looks: Looks) -> None:
    looks.ready, looks.computes_s = ["a"], 0.005
    lookout = Lookout()
    began, computed = time.monotonic(), time.thread_time()
    for _ in range(6):
        assert lookout.wait(["a"], 1.0) == ["a"]
    # The last look has no rest behind it yet.
    assert time.monotonic() - began >= 10 * 5 * 0.005
    assert time.thread_time() - computed < 0.5 * (time.monotonic() - began)


def test_a_look_is_recent_for_a_moment_whatever_it_found(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    lookout = Lookout()
    assert not lookout.is_recent, "there was none"
    for timeout_s in (0.0, 0.2):  # also one that was long in waiting
        lookout.wait(["a"], timeout_s)
        assert lookout.is_recent
    monkeypatch.setattr(calls_module, "LOOK_LASTS_S", 0.0)
    assert not lookout.is_recent
