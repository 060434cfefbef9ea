"""How long an engine has something to do, whatever is under way at the same time."""

import time

import pytest

from slipstream.observe.occupancy import IdleShares, Occupancy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number: what the clock says."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_calls_at_the_same_time_count_once(clock: list[float]) -> None:
    occupancy = Occupancy()
    for second, event in enumerate([occupancy.begin, occupancy.begin, occupancy.end, occupancy.end]):
        clock[0] = 100.0 + second
        event("engine")
    clock[0] = 110.0
    occupancy.begin("engine")
    clock[0] = 115.0
    assert occupancy.seconds("engine") == 3.0 + 5.0, "what is still under way counts up to now"
    assert occupancy.seconds("another") == 0.0


def test_a_block_is_busy_also_when_it_raises(clock: list[float]) -> None:
    occupancy = Occupancy()
    with pytest.raises(KeyError), occupancy.busy("learner"):
        clock[0] += 2.0
        raise KeyError
    clock[0] += 5.0
    assert occupancy.seconds("learner") == 2.0


def test_idle_shares_are_those_since_the_last_reading(clock: list[float]) -> None:
    occupancy = Occupancy()
    shares = IdleShares(occupancy, ["learner", "reward engine"])
    with occupancy.busy("learner"):
        clock[0] += 3.0
    clock[0] += 1.0
    assert shares.read() == {"learner": 0.25, "reward engine": 1.0}
    with occupancy.busy("reward engine"):
        clock[0] += 4.0
        assert shares.read() == {"learner": 1.0, "reward engine": 0.0}
    assert shares.read() == {"learner": 0.0, "reward engine": 0.0}, "no time has passed"
