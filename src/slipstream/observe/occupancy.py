"""Who is busy, and for how long: whether an engine has something to do at a time, seen from the controller."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Lane:
    """`calls` under way now, since `began`; `seconds` of the times before in which there was one."""

    calls: int = 0
    began: float = 0.0
    seconds: float = 0.0


class Occupancy:
    """Counts the seconds in which each engine has at least one call under way. To be used from any thread."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        """A call to the engine `name` is under way from now on."""
        with self._lock:
            lane = self._lanes.setdefault(name, _Lane())
            if lane.calls == 0:
                lane.began = time.monotonic()
            lane.calls += 1

    def end(self, name: str) -> None:
        """One of the calls to it has ended."""
        with self._lock:
            lane = self._lanes[name]
            lane.calls -= 1
            if lane.calls == 0:
                lane.seconds += time.monotonic() - lane.began

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """The engine is busy while the block runs."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def seconds(self, name: str) -> float:
        """Seconds in which the engine was busy, up to now; 0 for one that never was."""
        with self._lock:
            lane = self._lanes.get(name, _Lane())
            return lane.seconds + (time.monotonic() - lane.began if lane.calls else 0.0)


class IdleShares:
    """The share of the time in which each of some engines had nothing to do, from one reading to the next."""

    def __init__(self, occupancy: Occupancy, names: list[str]) -> None:
        self._occupancy = occupancy
        self._names = names
        self._last = self._now()

    def read(self) -> dict[str, float]:
        """The share of each since the last reading, between 0 and 1, by name."""
        (start, before), (now, after) = self._last, self._now()
        self._last = now, after
        elapsed = now - start
        shares = {name: 1 - (after[name] - before[name]) / elapsed if elapsed > 0 else 0.0 for name in self._names}
        # The clock is read once for each engine, a moment apart.
        return {name: min(max(share, 0.0), 1.0) for name, share in shares.items()}

    def _now(self) -> tuple[float, dict[str, float]]:
        return time.monotonic(), {name: self._occupancy.seconds(name) for name in self._names}
