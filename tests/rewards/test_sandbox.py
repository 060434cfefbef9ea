"""Programs that try to get out of the sandbox, to stay, or to take the machine down, and what becomes of them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.errors import RewardError
from slipstream.rewards import sandbox
from slipstream.rewards.sandbox import (
    Isolation,
    SandboxLimits,
    SandboxResult,
    describe_isolation,
    detect_isolation,
    require_isolation,
    run_program,
)

ROOT = Path(__file__).resolve().parents[2]

needs_namespaces = pytest.mark.skipif(not detect_isolation().namespaces, reason="needs user namespaces")
pytestmark = needs_namespaces

# Does each statement in turn and prints what became of it: the name of the exception, or what it evaluates to.
ATTEMPTS = """
import ctypes, json, os, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
outcomes = []
for attempt in json.loads(sys.stdin.read()):
    try:
        outcomes.append(repr(eval(attempt)))
    except BaseException as error:
        outcomes.append(type(error).__name__)
print(json.dumps(outcomes))
"""


def run(program: str, *, stdin: str = "", **limits: Any) -> SandboxResult:
    return run_program(textwrap.dedent(program), stdin=stdin, limits=SandboxLimits(**limits))


def outcomes(*attempts: str) -> list[str]:
    result = run(ATTEMPTS, stdin=json.dumps(attempts))
    assert result.exit_code == 0, result
    found: list[str] = json.loads(result.output)
    return found


def processes_in(namespace: str) -> list[int]:
    """The processes of the machine that are in a process namespace."""
    found = []
    for process in psutil.pids():
        try:
            if os.readlink(f"/proc/{process}/ns/pid") == namespace:
                found.append(process)
        except OSError:
            continue  # it ended, or is not ours
    return found


# ---------------------------------------------------------------------- what a program gets


def test_a_program_reads_its_input_and_its_output_and_exit_code_come_back() -> None:
    result = run(
        "import sys; print(input()[::-1]); print('é', file=sys.stderr); sys.exit(3)", stdin="stressed\nnot read"
    )
    assert (result.ending, result.exit_code) == ("finished", 3)
    assert (result.output, result.errors) == ("desserts\n", "é\n")


def test_the_input_can_be_read_in_every_way_that_programs_use() -> None:
    for how in ("sys.stdin.read()", "open(0).read()", "open('/dev/stdin').read()", "sys.stdin.buffer.read().decode()"):
        assert run(f"import sys; print({how}, end='')", stdin="1 2\n3\n").output == "1 2\n3\n", how


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [
        ("raise ValueError", 1),
        ("not python", 1),
        ("\ud800", 1),
        ("", 0),
        ("import os; os._exit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("exit()", 0),
    ],
)
def test_however_a_program_ends_it_is_a_result(program: str, exit_code: int) -> None:
    result = run_program(program)
    assert (result.ending, result.exit_code) == ("finished", exit_code)


def test_ordinary_programs_run_threads_processes_and_temporary_files() -> None:
    result = run(
        """
        import asyncio, multiprocessing, subprocess, sys, tempfile, threading
        print(multiprocessing.get_context("fork").Pool(2).map(abs, [-1, -2]))
        thread = threading.Thread(target=print, args=("thread",))
        thread.start(); thread.join()
        async def main(): await asyncio.sleep(0); return "async"
        print(asyncio.run(main()))
        with tempfile.TemporaryFile() as file: print(file.write(b"1234"))
        print(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout, end="")
        """
    )
    assert result.output.splitlines() == ["[1, 2]", "thread", "async", "4", "42"], result.errors


def test_the_same_program_says_the_same_every_time() -> None:
    assert len({run("print(set('abcdefgh'), hash('x'))").output for _ in range(3)}) == 1


def test_a_program_may_have_modules_beside_it_which_it_cannot_change() -> None:
    program = """
    import os, sys
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import package.helper
    print(package.helper.answer)
    open(package.helper.__file__, "w")
    """
    result = run_program(textwrap.dedent(program), modules={"package/helper.py": "answer = 42"})
    assert result.output == "42\n" and ("PermissionError" in result.errors or "Read-only" in result.errors)


def test_the_report_is_what_is_written_to_descriptor_3() -> None:
    assert run("import os; os.write(3, b'done')").report == "done"


def test_the_report_has_a_bound_of_its_own() -> None:
    assert len(run("import os; os.write(3, b'1' * 50_000)", output_bytes=100).report) == 50_000
    cut = run("import os; os.write(3, b'1' * 50_000)", report_bytes=100)
    assert (cut.ending, len(cut.report)) == ("output limit", 100)


# ---------------------------------------------------------------------- too much


def test_a_fork_bomb_is_bounded_and_ends_with_its_time() -> None:
    bomb = run(
        """
        import os
        print(os.readlink("/proc/self/ns/pid"), flush=True)
        while True:
            try: os.fork()
            except OSError: pass
        """,
        timeout_s=1.0,
        processes=16,
    )
    assert bomb.ending == "time limit"
    assert processes_in(bomb.output.split()[0]) == []
    assert bomb.seconds < 10


def test_the_number_of_processes_and_threads_is_limited() -> None:
    result = run(
        """
        import os, threading, time
        count = 0
        try:
            while count < 500:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                count += 1
        except RuntimeError:
            os.write(1, b"%d" % count)
            os._exit(0)
        """,
        processes=16,
    )
    assert 8 <= int(result.output) <= 20


def test_a_memory_bomb_raises_or_is_stopped() -> None:
    result = run("x = []\nwhile True: x.append(b'1' * 2**20)", memory_bytes=1 << 28)
    assert result.exit_code == 1 and "MemoryError" in result.errors


def test_memory_of_many_processes_is_counted_together() -> None:
    result = run(
        """
        import os, time
        for _ in range(3): os.fork()
        hoard = [os.urandom(1) * 2**26]
        time.sleep(60)
        """,
        memory_bytes=1 << 28,
        processes=32,
        timeout_s=20,
    )
    assert result.ending == "memory limit"


def test_memory_outside_of_address_spaces_is_refused() -> None:
    assert outcomes("os.memfd_create('x')", "call('shmget', 0, 2**30, 0o1600)") == ["PermissionError"] * 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_the_program_stopped(stream: str) -> None:
    result = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", output_bytes=100_000, timeout_s=20)
    assert result.ending == "output limit" and result.exit_code is None
    assert len(result.output) + len(result.errors) == 100_000
    assert result.seconds < 10


def test_a_huge_file_and_a_full_disk_are_errors_of_the_program() -> None:
    result = run(
        """
        import errno
        for names in (["one"], map(str, range(100))):
            try:
                for name in names:
                    with open(name, "wb") as file:
                        for _ in range(12 if name != "one" else 100): file.write(bytes(2**20)); file.flush()
            except OSError as error: print(errno.errorcode[error.errno])
        """,
        disk_bytes=1 << 24,
    )
    assert result.output.split() in (["EFBIG", "ENOSPC"], ["ENOSPC", "ENOSPC"])


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(1e6)",
        "while True: pass",
        "import signal, time\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True: time.sleep(1)",
        "import os, time; os.close(1); os.close(2); os.close(3); time.sleep(1e6)",
        "import sys; sys.set_int_max_str_digits(0); str(7 ** 50_000_000)",
        "import os; os.kill(os.getpid(), 19)",
    ],
)
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    result = run_program(program, limits=SandboxLimits(timeout_s=0.5))
    assert result.ending == "time limit" and result.exit_code is None
    assert 0.5 <= result.seconds < 8


# ---------------------------------------------------------------------- staying behind


def test_a_daemon_dies_with_its_program() -> None:
    result = run(
        """
        import os, sys, time
        print(os.readlink("/proc/self/ns/pid"), flush=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        """
    )
    assert (result.ending, result.exit_code) == ("finished", 0)
    assert result.seconds < 10
    assert processes_in(result.output.split()[0]) == []


def test_a_program_dies_with_the_process_that_wanted_it() -> None:
    call = "from slipstream.rewards.sandbox import *; run_program('import time; time.sleep(60)', "
    caller = subprocess.Popen(
        [sys.executable, "-c", call + "limits=SandboxLimits(timeout_s=60))"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    try:
        deadline = time.monotonic() + 30
        started: list[psutil.Process] = []
        while not any("/job/program.py" in " ".join(process.cmdline()) for process in started):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            started = [process for process in psutil.Process(caller.pid).children(recursive=True) if alive(process)]
    finally:
        caller.kill()
        caller.wait()
    _, left = psutil.wait_procs(started, timeout=10)
    assert left == []


def alive(process: psutil.Process) -> bool:
    try:
        process.cmdline()
    except psutil.Error:
        return False
    return True


def test_nothing_is_left_on_the_disk() -> None:
    mark = f"left-behind-{os.getpid()}"
    result = run(
        f"""
        import os
        for folder in (".", "/tmp", "/dev/shm", os.environ["HOME"], os.environ["TMPDIR"]):
            open(os.path.join(folder, {mark!r}), "w").write("x")
        os.mkdir("closed"); open("closed/file", "w"); os.chmod("closed", 0)
        """
    )
    assert result.exit_code == 0, result.errors
    assert [folder for folder in ("/tmp", "/dev/shm", ".") if (Path(folder) / mark).exists()] == []


# ---------------------------------------------------------------------- looking outside


@pytest.fixture
def secret_in_home() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", dir=Path.home(), prefix=".secret-") as file:
        file.write("the secret of the house")
        file.flush()
        yield file.name


def test_home_repository_and_temporary_files_are_not_there(secret_in_home: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("another secret")
    paths = [secret_in_home, str(ROOT / "pyproject.toml"), str(tmp_path / "secret"), "/etc/passwd", "/etc/hostname"]
    assert outcomes(*(f"open({path!r}).read()" for path in paths)) == ["FileNotFoundError"] * len(paths)


def test_links_and_dots_lead_nowhere_else(secret_in_home: str) -> None:
    assert outcomes(
        f"os.symlink({secret_in_home!r}, 'link')",
        "open('link').read()",
        f"open('../../../../../..' + {secret_in_home!r}).read()",
        f"open('/proc/1/root' + {secret_in_home!r}).read()",
        f"open('/proc/self/cwd/../../..' + {secret_in_home!r}).read()",
        f"os.link({secret_in_home!r}, 'hard')",
        "call('chroot', b'.')",
    ) == ["None", *["FileNotFoundError"] * 2, "PermissionError", *["FileNotFoundError"] * 2, "PermissionError"]


def test_the_environment_of_nobody_else_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_JUDGE_API_KEY", "key-of-the-house")
    result = run(
        """
        import glob, os
        print(dict(os.environ))
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/mem") + glob.glob("/proc/*/fd"):
            try: print(path, open(path, "rb").read() if "mem" not in path and "fd" not in path else os.listdir(path))
            except OSError as error: print(path, type(error).__name__)
        """
    )
    assert "/proc/1/environ PermissionError" in result.output
    assert "/proc/1/fd PermissionError" in result.output
    assert "key-of-the-house" not in result.output + result.errors
    assert "SLIPSTREAM" not in result.output


def test_only_its_own_processes_are_there() -> None:
    shown = outcomes("sorted(int(name) for name in os.listdir('/proc') if name.isdigit())", "os.getpid()")
    assert shown == ["[1, 2]", "2"]


def test_no_socket_and_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempts = [
            f"socket.create_connection(('127.0.0.1', {port}), 5)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK)",
            f"call('socket', {socket.AF_INET}, 1, 0)",
        ]
        assert outcomes(*attempts) == ["PermissionError"] * len(attempts)
        assert outcomes("socket.getaddrinfo('example.org', 80)") == ["gaierror"]
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_without_the_filter_there_is_still_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "system_call_filter", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempts = [
            f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)",
            "socket.create_connection(('192.0.2.1', 9), 5)",
        ]
        assert outcomes(*attempts) == ["OSError", "OSError"]


# ---------------------------------------------------------------------- reaching outside


def test_signals_reach_nobody_outside() -> None:
    assert outcomes(
        f"os.kill({os.getpid()}, signal.SIGKILL)",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "os.kill(1, signal.SIGTERM)",
        "os.kill(-1, signal.SIGKILL)",
        "'still here'",
    ) in (
        ["ProcessLookupError", "PermissionError", "PermissionError", "ProcessLookupError", "'still here'"],  # as root
        ["ProcessLookupError", "None", "None", "ProcessLookupError", "'still here'"],  # process 1 does not hear it
    )


def test_nothing_can_be_written_outside_its_folder() -> None:
    paths = ["/new", "/job/program.py", "/usr/lib/new", "/etc/new", "/dev/new", sys.base_prefix + "/lib/new"]
    found = outcomes(*(f"open({path!r}, 'w')" for path in paths), "open('/proc/sys/kernel/hostname', 'w')")
    assert set(found) <= {"OSError", "PermissionError"}


def test_the_limits_of_other_processes_stay() -> None:
    found = outcomes(
        "__import__('resource').prlimit(os.getppid(), 7, (9, 9))",
        "__import__('resource').prlimit(0, 7, (9, 9)) and __import__('resource').getrlimit(7)",
    )
    assert found == ["PermissionError", "(9, 9)"]


def test_no_way_to_more_rights() -> None:
    assert (
        outcomes(
            "call('ptrace', 16, os.getppid(), 0, 0)",
            "call('unshare', 0x10000000)",
            "call('setns', 0, 0)",
            "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
            "call('mount', None, b'/', None, 32, None)",
            "call('umount2', b'/tmp', 2)",
            "call('syscall', 56, 0x10000000, 0, 0, 0, 0)" if os.uname().machine == "x86_64" else "call('setns', 0, 0)",
            "os.setuid(0)",
            "os.setgroups([0])",
            "os.chown('/tmp', 0, 0)",
            "os.mknod('disk', 0o60600, 0xfe00)",
            "os.nice(-5)",
        )
        == ["PermissionError"] * 12
    )
    assert outcomes("[line for line in open('/proc/self/status') if line.startswith('CapEff')][0].split()[1]") == [
        repr("0" * 16)
    ]


def test_a_python_that_is_installed_where_programs_have_something_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(sys.base_prefix)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.TemporaryDirectory(prefix="python-", dir="/tmp") as folder:
        (Path(folder) / "bin").mkdir()
        shutil.copy(os.path.realpath(base / "bin" / name), Path(folder) / "bin" / name)
        packages = shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*", "*.a", "__pycache__")
        shutil.copytree(base / "lib" / name, Path(folder) / "lib" / name, ignore=packages)
        for library in (base / "lib").glob("libpython*"):
            shutil.copy(library, Path(folder) / "lib" / library.name)
        os.chmod(folder, 0o755)
        monkeypatch.setattr(sys, "base_prefix", folder)
        result = run("import json, sys; print(sys.prefix)")
    assert (result.exit_code, result.output) == (0, f"/moved{folder}\n"), result.errors


# ---------------------------------------------------------------------- which isolation, and the weaker one


def test_the_isolation_is_stated() -> None:
    assert describe_isolation().startswith("namespaces (no network, no files of this machine), limits, ")


def test_weaker_isolation_is_refused_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    weaker = Isolation(namespaces=False, call_filter=True, problem="unshare is not permitted")
    monkeypatch.setattr(sandbox, "detect_isolation", lambda: weaker)
    with pytest.raises(RewardError, match=r"unshare is not permitted.*allow_weaker_isolation: true"):
        run_program("print(1)")
    assert require_isolation(allow_weaker_isolation=True) == weaker
    assert describe_isolation().startswith("weaker (files of this machine can be read)")


def test_a_machine_where_nothing_works_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROBE", "import sys; sys.exit('no good')")
    detect_isolation.cache_clear()
    try:
        with pytest.raises(RewardError, match="none is run"):
            run_program("print(1)", allow_weaker_isolation=True)
        assert describe_isolation().startswith("none, programs are refused")
    finally:
        detect_isolation.cache_clear()
