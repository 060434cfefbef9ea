"""The register of waits: who waits for whom, since when, and when that is worth a line."""

import threading
import time
from collections.abc import Callable

import pytest

from slipstream.cluster import waits
from slipstream.cluster.waits import WaitWatch, announce_long_waits, current_waits, describe_waits, waiting

WAIT_S = 10.0


def test_a_wait_is_listed_while_it_lasts_with_waiter_whom_and_deadline() -> None:
    assert describe_waits() == ""
    with waiting("learner rank 0: update", deadline_s=60):
        assert describe_waits() == ("\nwho waits for whom: the run's loop for learner rank 0: update (0 s of 60 s)")
    assert describe_waits() == ""


def test_waits_of_all_threads_are_listed_the_oldest_first(until: Callable[..., None]) -> None:
    end = threading.Event()

    def wait() -> None:
        with waiting("rollout engine 0: generate (0-0)", deadline_s=5):
            end.wait(WAIT_S)

    with waiting("the rollout pump: groups 0-0", deadline_s=None):
        pump = threading.Thread(target=wait, name="rollout pump")
        pump.start()
        until(lambda: len(current_waits()) == 2)
        assert describe_waits() == (
            "\nwho waits for whom: the run's loop for the rollout pump: groups 0-0 (0 s); "
            "the rollout pump for rollout engine 0: generate (0-0) (0 s of 5 s)"
        )
        end.set()
        pump.join(WAIT_S)
    assert current_waits() == []


def test_a_wait_that_ends_with_an_error_is_listed_no_more() -> None:
    with pytest.raises(KeyError), waiting("reward engine: score", deadline_s=1):
        raise KeyError
    assert current_waits() == []


def test_a_long_wait_is_announced_once_and_anew_after_something_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting("rollout engine 0: generate (0-1)", deadline_s=0.2) as wait:
        announce_long_waits()
        assert capsys.readouterr().err == ""
        time.sleep(0.15)
        announce_long_waits()
        announce_long_waits()
        told = capsys.readouterr().err
        assert told.count("a long wait: the run's loop for rollout engine 0: generate (0-1)") == 1
        wait.renew("rollout engine 0: generate (0-2)")
        announce_long_waits()
        assert capsys.readouterr().err == ""
        time.sleep(0.15)
        announce_long_waits()
        assert "generate (0-2)" in capsys.readouterr().err


def test_a_wait_without_deadline_is_announced_after_a_time_and_one_for_nobody_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "ANNOUNCED_AFTER_S", 0.0)
    with waiting("", deadline_s=None), waiting("the rollout pump: groups 0-0", deadline_s=None):
        time.sleep(0.01)
        announce_long_waits()
    told = capsys.readouterr().err
    assert told.count("a long wait") == told.count("the rollout pump: groups 0-0") == 1


def test_the_watch_looks_by_itself_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], until: Callable[..., None]
) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 0.01)
    watch = WaitWatch()
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "learner rank 0: save" in told

    with waiting("learner rank 0: save", deadline_s=0.01):
        until(is_told)
    watch.close()
    watch.close()
    until(lambda: not watch._thread.is_alive())
