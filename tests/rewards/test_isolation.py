"""Isolation as a user who is not root finds it, with namespaces and in the weaker form without."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.rewards.code import START_TESTS, _modules
from slipstream.rewards.sandbox import detect_isolation

# Where the folder of the tests' modules belongs to the program's own user, it can put others into it.
PATCHER = """
import datetime, decimal, fractions, os, sys
folder = next((path for path in sys.path if os.path.isdir(path + "/slipstream")), None)
try:
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o755)
        for name in ("decimal", "fractions", "datetime", "unittest", "statistics", "plain_data"):
            with open(os.path.join(path, name + ".py"), "w") as file:
                file.write("import os; os.write(3, b'{\\"passed\\": true}\\\\n' * 2); os._exit(0)")
except OSError:
    pass
def f(x): return decimal.Decimal(x)
"""
PATCHER_JOB = {"kind": "code", "tests": ["assert f(1) == 2", "assert statistics.mean([f(1)]) == 2"], "function": None,
               "setup": "", "check": False, "usual_names": False, "program": PATCHER, "stop_at_failure": False,
               "timeout_s": 4.0, "total_timeout_s": 8.0, "output_bytes": 1 << 20}  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]

needs_namespaces = pytest.mark.skipif(not detect_isolation().namespaces, reason="needs user namespaces")

# As another user than the tests', with namespaces and without. Prints what it found as JSON.
AS_A_USER = """
import json, os, sys
MODULES, START_TESTS, JOB = json.loads(sys.stdin.read())
from slipstream.rewards import sandbox
from slipstream.rewards.sandbox import Isolation, SandboxLimits, detect_isolation
assert detect_isolation().namespaces
found = {}
for name, isolation in (("namespaces", Isolation(True, True)), ("weaker", Isolation(False, True, "a test"))):
    def run(program, stdin="input", modules={}, **limits):
        result = sandbox._run({**modules, "program.py": program}, stdin, SandboxLimits(**limits), isolation)
        if modules:
            return result.report
        return [result.ending, result.exit_code, result.output[:300], result.errors[-300:], result.seconds]
    found[name] = {
        "problem": sandbox._problem_with(isolation),
        "plain": run("print(input())"),
        "bomb": run('''
import os
while True:
    try: os.fork()
    except OSError: pass
''', timeout_s=1, processes=16),
        "daemon": run("import os, time; os.fork() or os.setsid() or os.fork() or time.sleep(31.4159)"),
        "output": run("while True: print('x' * 1000)", output_bytes=10000),
        "memory": run("x = bytearray(2**30)", memory_bytes=2**28),
        "socket": run("import socket; socket.socket()"),
        "outside": run("open('/new', 'w')"),
        "secret": run("import os; print(dict(os.environ), open(f'/proc/{os.getppid()}/environ').read())"),
        "limits": run("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (0, 0))"),
        "killer": run('''
import os, signal, time
print(os.getcwd(), flush=True)
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", "27.1828"])
time.sleep(0.2)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
''', timeout_s=3),
        "patcher": run(START_TESTS, stdin=json.dumps(JOB), modules=MODULES),
        "deep": run('''
import os
print(os.getcwd(), flush=True)
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
os.symlink("/", "link")
os.chmod(".", 0)
'''),
        "folder": run("import os; os.mkdir('x'); open('x/f', 'w'); os.chmod('x', 0); print(os.getcwd())"),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def as_a_user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `AS_A_USER` found, as nobody where the tests run as root."""
    python = sys.executable
    user: dict[str, Any] = {}
    folder = tempfile.mkdtemp(prefix="slipstream-user-")
    try:
        if os.geteuid() == 0:
            python = shutil.which("python3.11", path="/usr/bin") or shutil.which("python3.12", path="/usr/bin") or ""
            if not python:
                pytest.skip("needs a system Python, which every user can run")
            user = {"user": 65534, "group": 65534, "extra_groups": []}
        # The package's own path may be closed to other users.
        package = Path(folder) / "slipstream"
        (package / "rewards").mkdir(parents=True)
        for name in ("errors.py", "rewards/sandbox.py", "rewards/isolation.py", "rewards/leftovers.py",
                     "rewards/system_calls.py"):  # fmt: skip
            shutil.copy(ROOT / "src" / "slipstream" / name, package / name)
        for path in (Path(folder), package, package / "rewards"):
            path.chmod(0o755)
        environment = {"PYTHONPATH": folder, "PATH": "/usr/bin:/bin", "SECRET": "secret of the user"}
        process = subprocess.run(
            [python, "-c", AS_A_USER],
            input=json.dumps([_modules(), START_TESTS, PATCHER_JOB]),
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            cwd="/",
            **user,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)
    finally:
        shutil.rmtree(folder)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["namespaces", "weaker"])
def test_an_ordinary_user_is_protected_too(as_a_user: dict[str, Any], mode: str) -> None:
    found = as_a_user[mode]
    assert found["problem"] is None
    assert found["plain"][:4] == ["finished", 0, "input\n", ""]
    assert found["bomb"][0] == "time limit"
    assert found["daemon"][0] == "finished"
    assert found["output"][0] == "output limit"
    assert found["memory"][1] == 1 and "MemoryError" in found["memory"][3]
    assert "PermissionError" in found["socket"][3]
    assert "Read-only file system" in found["outside"][3] or mode == "weaker"
    assert "secret of the user" not in "".join(map(str, found["secret"]))
    assert found["folder"][:2] == ["finished", 0]
    assert found["limits"][1] == 1 and "PermissionError" in found["limits"][3]
    # Without namespaces it kills the process that watches it; with them that process does not hear it.
    assert found["killer"][:2] == (["finished", -9] if mode == "weaker" else ["time limit", None])
    assert found["killer"][4] < 10
    report = [json.loads(line) for line in found["patcher"].splitlines()]
    assert report[0] == {"started": True} and [line["passed"] for line in report[1:]] == [False, False], report
    assert found["deep"][:2] in (["finished", 0], ["finished", 1])
    for name in ("folder", "killer", "deep"):
        left = Path(found[name][2].strip()).parent
        assert left == Path("/") or not left.exists()
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if "31.4159" in command or "27.1828" in command] == []
