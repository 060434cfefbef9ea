"""Who waits for whom: every wait for another process is entered here while it lasts.

A wait that is longer than a share of its deadline is announced once, so that a run that seems to stand still says what
it is standing for; and the error for a deadline that passed lists all waits of that moment, since the one whose
deadline came first is not always the one that holds up the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slipstream.observe.logs import get_logger

# A wait is announced after this share of its deadline, or after so long where it has none of its own.
ANNOUNCED_SHARE = 0.5
ANNOUNCED_AFTER_S = 300.0
LOOK_S = 1.0

logger = get_logger("waits")


@dataclass(eq=False)
class Wait:
    """A thread of this process, by its name, waits for `whom`. Without a deadline, another wait bounds this one."""

    whom: str
    deadline_s: float | None
    waiter: str = field(default_factory=lambda: _waiter())
    started: float = field(default_factory=time.monotonic)
    is_announced: bool = False

    def renew(self, whom: str) -> None:
        """Something came: from now on it is a wait for `whom`."""
        self.whom, self.started, self.is_announced = whom, time.monotonic(), False

    def __str__(self) -> str:
        bound = "" if self.deadline_s is None else f" of {self.deadline_s:.0f} s"
        return f"{self.waiter} for {self.whom or 'nobody'} ({time.monotonic() - self.started:.0f} s{bound})"


_waits: list[Wait] = []
_lock = threading.Lock()


@contextmanager
def waiting(whom: str, *, deadline_s: float | None) -> Iterator[Wait]:
    """This thread waits for `whom`, such as 'learner rank 0: update', while the block runs."""
    wait = Wait(whom, deadline_s)
    with _lock:
        _waits.append(wait)
    try:
        yield wait
    finally:
        with _lock:
            _waits.remove(wait)


def current_waits() -> list[Wait]:
    """All waits of this moment, the oldest first."""
    with _lock:
        return sorted(_waits, key=lambda wait: wait.started)


def describe_waits() -> str:
    """The end of an error message: who waits for whom now."""
    waits = [str(wait) for wait in current_waits() if wait.whom]
    return f"\nwho waits for whom: {'; '.join(waits)}" if waits else ""


def announce_long_waits() -> None:
    """Say once of each wait that is long that it is."""
    for wait in current_waits():
        limit = ANNOUNCED_AFTER_S if wait.deadline_s is None else ANNOUNCED_SHARE * wait.deadline_s
        if wait.whom and not wait.is_announced and time.monotonic() - wait.started > limit:
            wait.is_announced = True
            logger.warning(f"a long wait: {wait}")


class WaitWatch:
    """Announces long waits from a thread of its own, from its start to `close`."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="wait watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Safe to repeat."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            announce_long_waits()


def _waiter() -> str:
    thread = threading.current_thread()
    return "the run's loop" if thread is threading.main_thread() else f"the {thread.name}"
