"""Who was busy when: `timeline.json`, a Chrome trace with a lane per engine, to be opened in ui.perfetto.dev.

The file is a JSON array with one event a line. While the run goes on, and after a kill, the closing bracket is
missing, which the trace format allows. Times are microseconds since the first start of the run; a resumed run goes on
in the same file, with a gap where nothing ran. Format: "Trace Event Format" (Google), phases X, M and i.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import RunDirectoryError
from slipstream.observe.files import LineFile, to_json

ORIGIN_EVENT = "slipstream_origin"
CLOSED_EVENT = "closed"
# Spans remembered per row to notice overlaps; spans reach us roughly in the order of their ends.
REMEMBERED_SPANS = 256


@dataclass
class _Lane:
    """A lane is a process of the trace; its rows are threads. Each row remembers the (start, end) of its last spans."""

    process: int
    rows: list[deque[tuple[float, float]]] = field(default_factory=list)

    def place(self, start: float, end: float) -> int:
        """The first row where the span nests with the earlier ones, and a new row if there is none.

        Viewers show spans of one row rightly only if any two of them are apart or one inside the other.
        """
        for index, row in enumerate(self.rows):
            inside = 0
            while inside < len(row) and row[-1 - inside][0] >= start and row[-1 - inside][1] <= end:
                inside += 1
            if inside == len(row) or row[-1 - inside][1] <= start:
                for _ in range(inside):
                    row.pop()  # The new span stands for those that lie in it.
                row.append((start, end))
                return index
        self.rows.append(deque([(start, end)], maxlen=REMEMBERED_SPANS))
        return len(self.rows) - 1


class Timeline:
    """Appends spans to a trace file. Opening an existing file continues it."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)
        self._lanes: dict[str, _Lane] = {}
        self._closed = False
        # In an asynchronous run responses and rewards arrive in a thread of their own.
        self._lock = threading.Lock()
        events = read_timeline(path)
        origin = next((event for event in events if event["name"] == ORIGIN_EVENT), None)
        if origin is not None:
            self._origin = float(origin["args"]["unix_seconds"])
            self._reopen(events)
        else:
            self._origin = time.time()
            self._file.truncate(0)
            self._file.append("[")
            self._append({"ph": "M", "name": ORIGIN_EVENT, "pid": 0, "args": {"unix_seconds": self._origin}})

    def add(self, lane: str, name: str, *, start: float, end: float, arguments: dict[str, Any] | None = None) -> None:
        """Record that `lane` (an engine, such as "rollout 0") did `name` from `start` to `end`, in Unix seconds.

        Spans of one lane may nest. Those that overlap otherwise are drawn in further rows of the same lane.
        Raises ValueError if the span ends before it starts, TrainingError if the disk is full.
        """
        if end < start:
            raise ValueError(f"span {name!r} of lane {lane!r} ends {start - end} s before it starts")
        with self._lock:
            self._add(lane, name, start=start, end=end, arguments=arguments)

    def _add(self, lane: str, name: str, *, start: float, end: float, arguments: dict[str, Any] | None) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(process=len(self._lanes) + 1)
            self._name("process_name", lane, row=None, name=lane)
        known_rows = len(self._lanes[lane].rows)
        row = self._lanes[lane].place(start, end)
        if row == known_rows:
            self._name("thread_name", lane, row=row, name=lane if row == 0 else f"{lane} ({row + 1})")
        event: dict[str, Any] = {"ph": "X", "name": name, "pid": self._lanes[lane].process, "tid": row}
        event |= {"ts": self._microseconds(start), "dur": round((end - start) * 1e6, 3)}
        if arguments:
            event["args"] = arguments
        self._append(event)

    @contextlib.contextmanager
    def span(self, lane: str, name: str, **arguments: Any) -> Iterator[None]:
        """Record the time the block takes, also when it raises."""
        start, monotonic_start = time.time(), time.monotonic()
        try:
            yield
        finally:
            # The length comes from the monotonic clock: the wall clock may be set back meanwhile.
            self.add(lane, name, start=start, end=start + time.monotonic() - monotonic_start, arguments=arguments)

    def close(self) -> None:
        """End the array, so that the file is complete JSON. Closing twice is harmless."""
        if not self._closed:
            now = self._microseconds(time.time())
            self._file.append(to_json({"ph": "i", "s": "g", "name": CLOSED_EVENT, "pid": 0, "tid": 0, "ts": now}) + "]")
            self._file.close()
            self._closed = True

    def _reopen(self, events: list[dict[str, Any]]) -> None:
        """Turn the closing bracket back into a comma and learn the lanes that the file has."""
        if events[-1]["name"] == CLOSED_EVENT:
            self._file.truncate(self._file.offset - len("]\n"))
            self._file.append(",")
        for event in events:
            if event["name"] == "process_name":
                self._lanes[event["args"]["name"]] = _Lane(process=event["pid"])
        by_process = {lane.process: lane for lane in self._lanes.values()}
        for event in events:
            if event["name"] == "thread_name":
                by_process[event["pid"]].rows.append(deque(maxlen=REMEMBERED_SPANS))

    def _name(self, kind: str, lane: str, *, row: int | None, name: str) -> None:
        event: dict[str, Any] = {"ph": "M", "name": kind, "pid": self._lanes[lane].process, "args": {"name": name}}
        self._append(event if row is None else event | {"tid": row})

    def _append(self, event: dict[str, Any]) -> None:
        self._file.append(to_json(event) + ",")

    def _microseconds(self, unix_seconds: float) -> float:
        return round((unix_seconds - self._origin) * 1e6, 3)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, whether it was closed or its writer was killed; none if the file is empty.

    Raises RunDirectoryError if a line is not an event.
    """
    events = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        text = line.removesuffix("]").removesuffix(",")
        if text in ("", "["):
            continue
        try:
            events.append(json.loads(text))
        except ValueError as error:
            raise RunDirectoryError(f"{path}, line {number}: not a trace event ({error}); remove the file") from error
    return events
