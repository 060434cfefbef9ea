"""A small process beside the controller that cleans up when the controller is killed outright.

Ray's processes notice the death of their driver by themselves, but some take a minute, and nobody removes files. The
watchdog holds the reading end of a pipe whose other end only the controller has: the kernel closes that end whatever
the controller dies of. Joined clusters have processes on other machines, which Ray ends.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from slipstream.cluster.remains import RUN_ID_VARIABLE, kill_processes_of_run, remove_segments

FAREWELL = b"done"


class Watchdog:
    """Started with the session; told at its end that everything has been cleaned up."""

    def __init__(self, run_id: str, temporary_folder: Path | None) -> None:
        code = "import sys; from slipstream.cluster.watchdog import watch; watch(*sys.argv[1:])"
        # Without the run's id: the watchdog is not to be found among what it kills. In a session of its own: Ctrl-C
        # goes to the controller and not to it.
        environment = {name: value for name, value in os.environ.items() if name != RUN_ID_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, run_id, str(temporary_folder or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Let it end without doing anything."""
        # A watchdog that was killed itself cannot be told.
        try:
            self._process.communicate(FAREWELL, timeout=5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def watch(run_id: str, temporary_folder: str) -> None:
    """Wait for the controller's farewell or its death; after its death remove what the run has here."""
    if sys.stdin.buffer.read() == FAREWELL:
        return
    kill_processes_of_run(run_id)
    remove_segments(run_id)
    if temporary_folder:
        shutil.rmtree(temporary_folder, ignore_errors=True)
