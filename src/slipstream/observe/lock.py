"""One process at a time in a run directory.

A kernel file lock (flock): it vanishes with its process, `kill -9` included, so there are no stale locks to remove.
A forked child would share the lock and keep it alive after its parent's death; therefore every child closes its copy.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from slipstream.errors import RunDirectoryError
from slipstream.observe.files import storage_errors

LOCK_NAME = ".lock"
# A reader that asks whether a run goes on holds the lock for an instant; wait that out.
ATTEMPTS = 5
ATTEMPT_PAUSE_S = 0.05

_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock:
    """Holds the lock of `folder` from construction to `release`.

    Raises RunDirectoryError, naming the process, if another one has it.
    """

    def __init__(self, folder: Path) -> None:
        self._owner = os.getpid()
        path = folder / LOCK_NAME
        with storage_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if attempt == ATTEMPTS - 1:
                    process = _read_process(descriptor)
                    os.close(descriptor)
                    raise RunDirectoryError(
                        f"{folder} is in use by process {process}: wait for it to end, stop it, or choose another "
                        "output_dir"
                    ) from error
                time.sleep(ATTEMPT_PAUSE_S)
        self._descriptor: int | None = descriptor
        _held.add(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{self._owner}\n".encode(), 0)

    def release(self) -> None:
        """Let the next process in. Releasing twice, or in a forked child, is harmless."""
        if self._descriptor is not None and os.getpid() == self._owner:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of `folder`."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _read_process(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "(unknown)"
