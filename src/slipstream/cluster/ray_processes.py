"""Ray's own two processes of the session that was started here: without them nothing that is waited for comes.

Ray notices the loss of its control store after a minute, and then ends the processes that belong to it without a word.
So every wait looks here. A cluster that was joined is watched by those who run it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from slipstream.errors import EngineLostError

if TYPE_CHECKING:
    import psutil

NAMES = ("gcs_server", "raylet")


class RayProcesses:
    """Those of a session. There is one session at a time in a process, as Ray has it."""

    def __init__(self) -> None:
        self._found: list[tuple[str, psutil.Process]] = []

    def find(self) -> None:
        """Note Ray's processes among our children, and have `require_ray` look after them."""
        import psutil

        # Those of an earlier attempt to start Ray, or of a session before this one, may still be there as zombies.
        living = [child for child in psutil.Process(os.getpid()).children() if _is_alive(child)]
        self._found = [(name, child) for child in living if (name := child.name()) in NAMES]
        _sessions.append(self)

    def forget(self) -> None:
        """The session is over. Safe to repeat."""
        if self in _sessions:
            _sessions.remove(self)
        self._found = []

    @property
    def dead(self) -> list[str]:
        """Those that are no more, as 'raylet (process 12)'."""
        return [f"{name} (process {process.pid})" for name, process in self._found if not _is_alive(process)]

    @property
    def are_alive(self) -> bool:
        """Whether Ray can answer."""
        return not self.dead


_sessions: list[RayProcesses] = []


def require_ray() -> None:
    """Raise EngineLostError if a process of Ray's has died that this session started."""
    dead = [name for session in _sessions for name in session.dead]
    if dead:
        raise EngineLostError(f"Ray has died: {', '.join(dead)} is no more, and no engine can be reached without it")


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
