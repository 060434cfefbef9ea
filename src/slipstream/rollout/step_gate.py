"""Holds a batch that is generated in a thread between two of its tokens, while weights are swapped or probed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.errors import WeightSyncError


class StepGate:
    """One thread generates, inside `running`, and calls `pause` between tokens; others may `hold` it there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_running = False
        self._is_held = False
        self._failure: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """For the thread: around everything that uses the weights. Waits while the gate is held."""
        self._go_on()
        try:
            yield
        finally:
            self._stop()

    def pause(self) -> None:
        """For the thread, between two tokens: wait while the gate is held.

        Raises WeightSyncError if it was let go because new weights came in part only.
        """
        if self._is_held:
            self._stop()
            self._go_on()

    def hold(self) -> None:
        """Return once the thread waits between two tokens, or nothing runs. Holding twice is holding once."""
        with self._changed:
            self._is_held, self._failure = True, None
            self._changed.wait_for(lambda: not self._is_running)

    def let_go(self, failure: str | None = None) -> None:
        """Let the thread go on; with a failure it ends with that as its error."""
        with self._changed:
            self._is_held, self._failure = False, failure
            self._changed.notify_all()

    def _go_on(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            if self._failure is not None:
                raise WeightSyncError(self._failure)
            self._is_running = True

    def _stop(self) -> None:
        with self._changed:
            self._is_running = False
            self._changed.notify_all()
