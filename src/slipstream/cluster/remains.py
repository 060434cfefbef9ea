"""What a run leaves on a machine, and its removal: processes, Ray's folder, shared memory.

Everything of a run carries its run id: files in their name, processes in their environment (`SLIPSTREAM_RUN_ID`) or in
the name of a log file they write, for Ray's own processes overwrite their environment when they set their title. The
run id begins with the controller's process id. Used by the session at its end, by the watchdog when the controller
was killed, and by the next run if the watchdog was killed too. The watchdog is to be small: what is more than the
standard library is loaded where it is used.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RUN_ID_VARIABLE = "SLIPSTREAM_RUN_ID"
TEMPORARY_PREFIX = "slipstream-ray-"
SHARED_MEMORY_PREFIX = "slipstream-"
# How the names of the memory begin through which vLLM's workers reduce and gather on CPU.
COLLECTIVES_PREFIX = "vllm_dist_"
POSIX_PREFIXES = ("psm_", "sem.mp-", COLLECTIVES_PREFIX)
LEFTOVER_GRACE_S = 3.0


def kill_processes_of_run(run_id: str) -> list[int]:
    """Kill what still carries the run's id, except ourselves. Returns the process ids that had to be killed."""
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    remaining = _processes_of(run_id)
    while remaining and time.monotonic() < deadline:
        time.sleep(0.1)
        remaining = _processes_of(run_id)
    for pid in remaining:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return remaining


def kill_process_tree(pid: int, started: float) -> None:
    """Kill a process of this machine that started at that time, if it still is there, and everything it started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() != started:
            return  # Another one, which was given the same id.
        # Stopped first: what is listed is then all there is.
        process.suspend()
        for member in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                member.kill()


def remove_segments(run_id: str) -> None:
    """Remove the run's shared memory."""
    for path in Path("/dev/shm").glob(f"{SHARED_MEMORY_PREFIX}{run_id}*"):
        path.unlink(missing_ok=True)


def remove_remains_of_dead_runs() -> None:
    """Remove Ray folders and shared memory of controllers that were killed before they could."""
    for path in Path("/tmp").glob(f"{TEMPORARY_PREFIX}*"):
        if _owner_is_dead(path.name.removeprefix(TEMPORARY_PREFIX)):
            shutil.rmtree(path, ignore_errors=True)
    for path in Path("/dev/shm").glob(f"{SHARED_MEMORY_PREFIX}*"):
        if _owner_is_dead(path.name.removeprefix(SHARED_MEMORY_PREFIX)):
            path.unlink(missing_ok=True)


def posix_segments() -> set[Path]:
    """What this user has in /dev/shm under the names of Python's multiprocessing and of vLLM's collectives.

    These are message queues and semaphores, which vLLM leaves behind when it is killed, and where it is killed while it
    starts, the memory of collectives.
    """
    found = set()
    for path in (path for prefix in POSIX_PREFIXES for path in Path("/dev/shm").glob(f"{prefix}*")):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def posix_segments_of(processes: Iterable[int]) -> list[Path]:
    """Those of them that the processes have by now. Segments of ours are none: the learner makes and removes those."""
    mapped = _mapped_shared_memory(processes)
    return sorted(path for path in posix_segments() if _inode(path) in mapped)


def remove_unused_posix_segments(candidates: set[Path]) -> None:
    """Remove those of the segments that no process has mapped."""
    if not candidates:
        return
    mapped = _mapped_shared_memory(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    for path in candidates:
        if _inode(path) not in mapped:
            path.unlink(missing_ok=True)


def _owner_is_dead(name: str) -> bool:
    pid = name.split("-")[0]
    return pid.isdigit() and not Path(f"/proc/{pid}").exists()


def _processes_of(run_id: str) -> list[int]:
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    folder = f"/{TEMPORARY_PREFIX}{run_id}"
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        # Processes of others, and those that end while we look, cannot be read.
        with suppress(OSError):
            carries_id = marker in (path / "environ").read_bytes().split(b"\0")
            if (carries_id or _has_open_file(path, folder)) and _is_alive(path):
                found.append(int(path.name))
    return found


def _has_open_file(process_folder: Path, folder: str) -> bool:
    return any(folder in os.readlink(descriptor) for descriptor in (process_folder / "fd").iterdir())


def _is_alive(process_folder: Path) -> bool:
    """False for a zombie, which only waits for its parent to read its exit code."""
    state = (process_folder / "stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def _mapped_shared_memory(processes: Iterable[int]) -> set[int]:
    """Inodes of the files in /dev/shm that any of the processes has mapped.

    A semaphore is mapped under a passing name before it gets its own, so the inode is what identifies the file.
    """
    mapped = set()
    for process in processes:
        # Processes of others, and those that end while we look, cannot be read.
        with suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                # address, permissions, offset, device, inode, path
                columns = line.split(maxsplit=5)
                if columns[-1].startswith("/dev/shm/"):
                    mapped.add(int(columns[4]))
    return mapped


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
