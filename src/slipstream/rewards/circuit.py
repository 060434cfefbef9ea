"""A circuit breaker: an address that failed several times in a row is left out for a while, then tried once.

The pattern is M. Nygard's (Release It!, 2007): closed (used), open (left out), half-open (one call finds out).
"""

import time
from collections.abc import Callable

FAILURES_TO_OPEN = 5
"""Failures in a row after which an address is left out."""

OPEN_S = 10.0
"""Seconds for which it is left out, before one call probes it. A probe that fails begins another such time."""


class Circuit:
    """The state of one address. To be used from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds. `is_probing` is True while one call finds out whether the address is there again."""
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self.is_probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are left out at this moment."""
        return self._failures >= FAILURES_TO_OPEN and self._clock() < self._open_until

    def admit(self) -> bool:
        """Whether a call may be made now; the caller must then report its `success`, `failure` or `release`."""
        if self.is_open or self.is_probing:
            return False
        self.is_probing = self._failures >= FAILURES_TO_OPEN
        return True

    def success(self) -> None:
        """The address has answered: it is used again."""
        self._failures = 0
        self.is_probing = False

    def failure(self) -> None:
        """The address did not answer, or could not do its work."""
        self._failures += 1
        self.is_probing = False
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until = self._clock() + OPEN_S

    def release(self) -> None:
        """The call was given up from this side, which says nothing about the address."""
        self.is_probing = False
