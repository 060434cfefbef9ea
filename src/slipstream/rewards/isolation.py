"""Runs inside the process between us and an untrusted program: shuts the program in, starts it, watches it.

`sandbox.py` starts this file with a bare interpreter, `python -I -S isolation.py STATUS REPORT PARENT`, and writes the
job to its standard input. It imports nothing of ours and as little as possible, for every program waits for it. STATUS
is the descriptor that takes the line 'started' when the program starts, and one at the end: 'exit_code N' (negative by
a signal), 'limit NAME', or 'error TEXT', why the program was never started. REPORT is passed on as descriptor 3.

With namespaces the processes are: this one, in a mount, network, ... namespace of its own; `init`, process 1 of a new
process namespace, which builds the file system and watches; and the program. When one of them dies, those after it
die, for the kernel kills a process namespace with its process 1. Without namespaces this one watches the program.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import resource
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

PROGRAM_USER = 1000
"""Number of the program's user and group inside the namespace."""

NOBODY = 65534
"""The user and group whom a program started by root runs as, seen from outside. Root is exempt from the limit on the
number of processes, and owns files that a program must not touch."""

REPORT_DESCRIPTOR = 3
FIRST_OWN_DESCRIPTOR = 10
OPEN_FILES = 256
WATCH_INTERVAL_S = 0.05
LONGEST_KILLING_S = 5.0
LITTLE_MEMORY_BYTES = 1 << 27

# Everything of the machine that a program sees, read-only, where it exists; Python's own folders come on top.
VISIBLE_PATHS = ("/lib", "/lib32", "/lib64", "/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/bin")
VISIBLE_FILES = ("/etc/ld.so.cache",)
VISIBLE_DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}

# Where the new file system is put together. The folder exists everywhere, and nothing that is shown lies below it.
NEW_ROOT = "/sys"

# What the program has there hides a Python that is installed below one of them: it is shown below MOVED.
TAKEN = ("/tmp/", "/proc/", "/dev/", "/job/", "/sys/")
MOVED = "/moved"

# Numbers of sched.h, sys/mount.h, sys/prctl.h and linux/seccomp.h.
NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
READ_ONLY, NO_SET_USER_ID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 32, 4096, 16384, 1 << 18
# A mount from outside has flags that may not be dropped: (as statvfs gives it, as mount takes it).
KEPT_FLAGS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (2048, 2048), (4096, 1 << 21))
DETACH = 2
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_FILTER = 1, 4, 22
SET_SUBREAPER, SET_NO_NEW_PRIVILEGES = 36, 38
FILTER_MODE = 2
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class SetUpError(Exception):
    """The program cannot be shut in; the message says what was refused."""


def main() -> None:
    """Read the job, run the program, write how it ended."""
    given_status, given_report, parent = (int(argument) for argument in sys.argv[1:])
    # Out of the way of the numbers that the program will have, and closed when it starts.
    status = fcntl.fcntl(given_status, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR)
    report = fcntl.fcntl(given_report, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR)
    os.close(given_status)
    os.close(given_report)
    job: dict[str, Any] = marshal.loads(sys.stdin.buffer.read())  # the same interpreter wrote it
    sys.stdin.close()  # what it holds is not for the program
    os.umask(0o022)
    try:
        if job["namespaces"]:
            _run_in_namespaces(job, status, report, parent)
        else:
            _run_with_limits(job, status, report, parent)
    except (OSError, SetUpError) as error:
        _write(status, f"error {error}")


# ---------------------------------------------------------------------- with namespaces


def _run_in_namespaces(job: dict[str, Any], status: int, report: int, parent: int) -> None:
    """Enter new namespaces, start `init` in them, wait for it."""
    # Kernels before 5.14 count a user's processes over all namespaces.
    others = 0 if _kernel_version() >= (5, 14) else _tasks_of(os.geteuid() or NOBODY)
    _enter_namespaces()
    init = os.fork()
    if init == 0:
        _act_as_init(job, status, report, job["processes"] + others + 2)
    os.close(status)  # so that its reader sees the end when `init` ends
    os.close(report)
    _die_with_parent(signal.SIGKILL, parent)
    os.waitpid(init, 0)


def _enter_namespaces() -> None:
    """Move this process into namespaces of its own, in which it may mount. Its children get new process ids.

    Who may map which users is decided outside the new namespace, hence by a helper that stays there: root maps itself
    and nobody, anyone else just himself.
    """
    reading, writing = os.pipe()
    process = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(writing)
        os._exit(0 if os.read(reading, 1) and _attempt(_map_users, process) else 1)
    os.close(reading)
    _call("unshare", NEW_NAMESPACES)
    os.write(writing, b"1")
    os.close(writing)
    if os.waitpid(helper, 0)[1] != 0:
        raise SetUpError("the users of the new namespace could not be mapped")


def _map_users(process: int) -> None:
    """Write the user and group map of a process that has just entered a user namespace."""
    if os.geteuid() == 0:
        lines = f"0 0 1\n{PROGRAM_USER} {NOBODY} 1\n"
        if _attempt(_write_file, f"/proc/{process}/uid_map", lines):
            _write_file(f"/proc/{process}/gid_map", lines)
            return  # otherwise this is the root of a container that has no such user, and is mapped like anyone else
    _write_file(f"/proc/{process}/setgroups", "deny")
    _write_file(f"/proc/{process}/uid_map", f"{PROGRAM_USER} {os.geteuid()} 1\n")
    _write_file(f"/proc/{process}/gid_map", f"{PROGRAM_USER} {os.getegid()} 1\n")


def _act_as_init(job: dict[str, Any], status: int, report: int, processes: int) -> NoReturn:
    """Be process 1: build the file system, start the program, watch it. When this ends, all in the namespace end."""
    try:
        _call("prctl", SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _call("prctl", SET_DUMPABLE, 0, 0, 0, 0)
        _call("sethostname", b"sandbox", 7)
        # Made before there is a file system that the program sees, and never named in it.
        stdin = _anonymous_file(job["stdin"])
        _build_file_system(job)
        start = {"script": "/job/program.py", "folder": "/tmp", "user": PROGRAM_USER, "processes": processes}
        start["python"] = place_of(job["python"])
        program = _fork_program(job | start, status, report, stdin)
        _write(status, _watch(program, job))
    except (OSError, SetUpError) as error:
        _write(status, f"error {error}")
    os._exit(0)


def _build_file_system(job: dict[str, Any]) -> None:
    """Replace everything that can be seen by: the system's libraries, Python, the job, an empty folder."""
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", NO_SET_USER_ID | NO_DEVICES, "size=16m,mode=755")
    shown: list[str] = []
    for path in sorted({*VISIBLE_PATHS, *job["python_folders"]}):
        if os.path.exists(path) and not any(path.startswith(other + "/") for other in shown):
            _show(path, place_of(path))
            shown.append(path)
    for path in map(place_of, job["empty_folders"]):
        if os.path.isdir(NEW_ROOT + path):
            _mount("tmpfs", NEW_ROOT + path, "tmpfs", NO_SET_USER_ID | NO_DEVICES, "size=4k,mode=755")
    for path in VISIBLE_FILES:
        if os.path.exists(path):
            _show(path, path)
    os.makedirs(f"{NEW_ROOT}/dev")
    for name in VISIBLE_DEVICES:
        _show(f"/dev/{name}", f"/dev/{name}")
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{NEW_ROOT}/dev/{name}")
    _write_files(f"{NEW_ROOT}/job", job["files"])
    for name in ("proc", "tmp"):
        os.mkdir(f"{NEW_ROOT}/{name}")
    _make_read_only()
    # The kernel refuses it inside some containers. A program gets on without it.
    _attempt(_mount, "proc", f"{NEW_ROOT}/proc", "proc", NO_SET_USER_ID | NO_DEVICES | NO_EXECUTION)
    work = f"size={job['disk_bytes']},nr_inodes=4096,mode=700,uid={PROGRAM_USER},gid={PROGRAM_USER}"
    _mount("tmpfs", f"{NEW_ROOT}/tmp", "tmpfs", NO_SET_USER_ID | NO_DEVICES, work)
    os.chdir(NEW_ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir("/")


def place_of(path: str) -> str:
    """Where a path is shown: where it is, unless something else has that place. Python finds its folders by itself."""
    return MOVED + path if path.startswith(TAKEN) else path


def _show(path: str, place: str) -> None:
    """Make a file or folder of the machine visible in the new root."""
    target = NEW_ROOT + place
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, BIND | RECURSIVE)


def _make_read_only() -> None:
    """Remount the new root read-only, and what is mounted in it, the mounts inside shown folders included."""
    children: dict[str, list[str]] = {}
    places: dict[str, str] = {}
    for line in _read("/proc/self/mountinfo", "").splitlines():
        mount, parent, _, _, place = line.split()[:5]
        children.setdefault(parent, []).append(mount)
        places[mount] = place.replace("\\040", " ")
    # What was mounted at or below NEW_ROOT before is still listed, but is hidden by the latest.
    found = [[mount for mount, place in places.items() if place == NEW_ROOT][-1]]
    for mount in found:
        found.extend(children.get(mount, []))
        present = os.statvfs(places[mount]).f_flag
        kept = sum(given for as_found, given in KEPT_FLAGS if present & as_found)
        _mount(None, places[mount], None, REMOUNT | BIND | READ_ONLY | NO_SET_USER_ID | kept)


# ---------------------------------------------------------------------- without


def _run_with_limits(job: dict[str, Any], status: int, report: int, parent: int) -> None:
    """Run the program in the job's folder, with limits and the filter only. `sandbox.py` removes the folder."""
    _call("prctl", SET_DUMPABLE, 0, 0, 0, 0)  # or a program of the same user could read this process's memory
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    _die_with_parent(signal.SIGTERM, parent)  # `_watch` receives it: what the program started is to be killed first
    _call("prctl", SET_SUBREAPER, 1, 0, 0, 0)
    folder = job["folder"]
    work = f"{folder}/work"
    os.mkdir(work, 0o700)
    os.chmod(folder, 0o711)
    _write_files(f"{folder}/job", job["files"])
    user = os.geteuid()
    if user == 0:
        user = NOBODY
        os.chown(work, NOBODY, NOBODY)
    processes = job["processes"] + _tasks_of(user) + 1
    start = {"script": f"{folder}/job/program.py", "folder": work, "user": user, "processes": processes}
    program = _fork_program(job | start, status, report, _anonymous_file(job["stdin"]))
    outcome = _watch(program, job)
    kill_descendants(descendants)
    _write(status, outcome)


def kill_descendants(find: Callable[[], list[int]]) -> None:
    """Kill the processes found, until none is left. Orphans must become children of this process."""
    deadline = time.monotonic() + LONGEST_KILLING_S
    while (processes := find()) and time.monotonic() < deadline:
        for process in processes:
            _attempt(os.kill, process, signal.SIGKILL)
            _attempt(os.waitpid, process, os.WNOHANG)
        time.sleep(0.001)


def become_reaper(is_one: bool) -> None:
    """Have the orphans among this process's descendants become its children, or no longer."""
    _call("prctl", SET_SUBREAPER, int(is_one), 0, 0, 0)


# ---------------------------------------------------------------------- the program


def _fork_program(job: dict[str, Any], status: int, report: int, stdin: int) -> int:
    """Start the program in a session of its own, without privileges and within its limits; return its process id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # `_watch` waits for it
    program = os.fork()
    if program:
        os.close(stdin)
        os.close(report)
        return program
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(report, REPORT_DESCRIPTOR)
        _limit(job)
        if os.geteuid() == 0:
            for descriptor in (1, 2):
                os.fchown(descriptor, job["user"], job["user"])  # or the program could not open /dev/stdout
            os.setgroups([])
            os.setresgid(job["user"], job["user"], job["user"])
            os.setresuid(job["user"], job["user"], job["user"])
        os.chdir(job["folder"])
        if not os.access(job["python"], os.X_OK):
            raise SetUpError(f"{job['python']} is in a folder that user {job['user']} may not enter")
        _drop_privileges(bytes.fromhex(job["filter"]))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        if not job["namespaces"]:
            _call("prctl", SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # it may kill the process that watches it
        _write(status, "started")
        os.execve(job["python"], [job["python"], *job["flags"], job["script"]], _environment(job))
    except (OSError, SetUpError) as error:
        _write(status, f"error {error}")
    os._exit(1)


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """All that the program's environment holds."""
    return {**job["environment"], "HOME": job["folder"], "TMPDIR": job["folder"]}


def _limit(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_CPU: int(job["timeout_s"]) + 2,
        resource.RLIMIT_FSIZE: job["disk_bytes"],
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def _drop_privileges(instructions: bytes) -> None:
    """Give up all capabilities and the way back to them, and have the kernel refuse calls by the filter, if any."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION, 0))
    _call("capset", header, ctypes.create_string_buffer(24))
    _call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if instructions:
        array = ctypes.create_string_buffer(instructions, len(instructions))
        program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(array))
        _call("prctl", SET_FILTER, FILTER_MODE, ctypes.create_string_buffer(program, len(program)), 0, 0)


def _watch(program: int, job: dict[str, Any]) -> str:
    """Wait until the program has ended or passed a limit, and return the status line."""
    deadline = time.monotonic() + job["timeout_s"]
    while True:
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, WATCH_INTERVAL_S)
        exit_code = _reap().get(program)
        if exit_code is not None:
            return f"exit_code {exit_code}"
        if received is not None and received.si_signo == signal.SIGTERM:
            return "limit stopped"
        if time.monotonic() > deadline:
            return "limit time"
        if _resident_bytes() > job["memory_bytes"]:
            return "limit memory"


def _reap() -> dict[int, int]:
    """The exit codes of all children that have ended."""
    ended: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are no children
            return ended
        if process == 0:
            return ended
        ended[process] = os.waitstatus_to_exitcode(status)


def _resident_bytes() -> int:
    """Memory of all descendants. What forked processes share is counted once, which takes longer to find out."""
    processes = descendants()
    rough = sum(int(_read(f"/proc/{process}/statm", "0 0").split()[1]) for process in processes)
    if rough * resource.getpagesize() < LITTLE_MEMORY_BYTES or len(processes) == 1:
        return rough * resource.getpagesize()
    total = 0
    for process in processes:
        for line in _read(f"/proc/{process}/smaps_rollup", "").splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def descendants() -> list[int]:
    """Process ids of the children of this process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        fields = _read(f"/proc/{name}/stat", "").rpartition(")")[2].split()
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found = children.get(os.getpid(), [])
    for process in found:
        found.extend(children.get(process, []))
    return found


# ---------------------------------------------------------------------- small things


def _tasks_of(user: int) -> int:
    """How many processes and threads a user has now, which count towards his limit."""
    total = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended meanwhile
            continue
    return total


def _kernel_version() -> tuple[int, ...]:
    return tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])


def _die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _call("prctl", SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
    if os.getppid() != parent:
        raise SetUpError("the process that wanted the program run has ended")


def _anonymous_file(text: str) -> int:
    """An open file that is in no folder and cannot be changed, at its beginning."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


def _write_file(path: str, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode(errors="replace"))


def _write_files(folder: str, files: dict[str, str]) -> None:
    """Write files that the program may read and not change, by their paths below a folder."""
    for path, text in files.items():
        target = f"{folder}/{path}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write_file(target, text)
        os.chmod(target, 0o444)


def _read(path: str, otherwise: str) -> str:
    """The text of a file of /proc, `otherwise` if its process has ended."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read() or otherwise
    except OSError:
        return otherwise


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, line.encode(errors="replace") + b"\n")


def _attempt(function: Callable[..., object], *arguments: object) -> bool:
    """Call a function that may be refused; whether it was done."""
    try:
        function(*arguments)
    except OSError:
        return False
    return True


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library that returns -1 on failure; raises OSError with its name."""
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        shown = ", ".join(str(argument) for argument in arguments[:2] if isinstance(argument, int | bytes))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


if __name__ == "__main__":
    main()
