"""`--max-restarts`: which ends of a run are followed by another attempt, and what the command says and returns."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream import attempts
from slipstream.attempts import FAULT, Attempts, attempt
from slipstream.errors import ConfigError, EngineError, EngineLostError, RewardError, SlipstreamError, TrainingError
from slipstream.observe.run_directory import RunDirectory

COMMAND = ["rl", "recipe.yaml", "--steps", "3"]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[str]], list[list[str]]]:
    """`children(programs)`: the attempts run these Python programs, in turn; returns the arguments of each attempt."""

    def replace(programs: Sequence[str]) -> list[list[str]]:
        waiting, asked = list(programs), []
        start = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Any:
            assert command[:4] == [sys.executable, "-m", "slipstream.attempts", str(os.getpid())]
            asked.append(command[4:])
            return start([sys.executable, "-c", f"import os, sys, time\n{waiting.pop(0)}"], **options)

        monkeypatch.setattr(attempts.subprocess, "Popen", popen)
        return asked

    return replace


def run(run_dir: Path, *, max_restarts: int = 2, can_resume: bool = True, as_json: bool = False) -> int:
    return Attempts(COMMAND, run_dir=run_dir, can_resume=can_resume, as_json=as_json, max_restarts=max_restarts).run()


KILL = "os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_an_end_that_is_no_fault_is_the_end(children: Any, tmp_path: Path, code: int) -> None:
    asked = children([f"sys.exit({code})"])
    assert run(tmp_path / "run") == code
    assert asked == [COMMAND]


def test_a_fault_is_followed_by_a_resume_and_a_kill_before_there_is_a_run_by_the_command_itself(
    children: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    make_run = f"os.mkdir({str(run_dir)!r}); open({str(run_dir / 'config.yaml')!r}, 'w').close()"
    asked = children([KILL, f"{make_run}; sys.exit({FAULT})", "print('{}')"])
    assert run(run_dir, as_json=True) == 0
    assert asked == [COMMAND, COMMAND, ["resume", str(run_dir), "--json"]]
    told = capfd.readouterr()
    assert told.out == "{}\n"
    assert [line.partition("started again ")[2] for line in told.err.splitlines()] == [
        "(1 of at most 2 times, --max-restarts): it was killed by SIGKILL",
        "(2 of at most 2 times, --max-restarts): a fault ended it",
    ]


def test_what_cannot_be_resumed_is_run_anew(children: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    asked = children([KILL, "pass"])
    assert run(tmp_path, can_resume=False) == 0
    assert asked == [COMMAND, COMMAND]


@pytest.mark.parametrize(("end", "code"), [(f"sys.exit({FAULT})", 1), (KILL, 128 + signal.SIGKILL)])
def test_after_the_last_attempt_the_exit_code_is_what_it_would_have_been(
    children: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    asked = children([end] * 3)
    assert run(tmp_path / "run") == code
    assert len(asked) == 3
    assert "is not started again, after 2 times" in capfd.readouterr().err.splitlines()[-1]


def test_a_run_that_is_killed_after_its_end_has_ended_well(
    children: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory.create(tmp_path, "seed: 1", "rl") as directory:
        directory.write_summary({"steps": 3})
    asked = children([KILL])
    assert run(tmp_path, as_json=True) == 0
    assert len(asked) == 1
    assert json.loads(capfd.readouterr().out) == {"steps": 3}
    assert "report.html" in {path.name for path in tmp_path.iterdir()}, "what the kill had left to do is done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_run_once_and_ends_it_for_good(children: Any, tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    program = (
        "import signal\nfor n in (2, 15): signal.signal(n, lambda n, f: sys.exit(100 + n))\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)"
    )
    asked = children([program])

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(number)
    assert run(tmp_path / "run") == 100 + number
    assert len(asked) == 1
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineLostError("rollout engine 0 died"), FAULT),
        (EngineError("a request that no engine can answer"), 1),
        (RewardError("the grader is down"), 1),
        (TrainingError("not finite"), 1),
        (ConfigError("steps: found 0"), 2),
    ],
)
def test_only_a_lost_engine_is_a_fault(monkeypatch: pytest.MonkeyPatch, error: SlipstreamError, code: int) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr("slipstream.cli._run", fail)
    monkeypatch.setattr(attempts.ctypes, "CDLL", lambda _: type("Library", (), {"prctl": lambda *_: 0})())
    before = signal.getsignal(signal.SIGINT)
    try:
        assert attempt(os.getppid(), COMMAND) == code
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_whose_parent_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts.ctypes, "CDLL", lambda _: type("Library", (), {"prctl": lambda *_: 0})())
    monkeypatch.setattr("slipstream.cli._run", lambda _: pytest.fail("it began"))
    assert attempt(os.getpid(), COMMAND) == 128 + signal.SIGTERM
