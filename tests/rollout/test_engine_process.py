"""vLLM's EngineCore is a process of its own: it lives no longer than its engine, and its death is an error."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slipstream.rollout.messages import GroupRequest, SamplingParameters

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "engine_process.py"


class EngineProcess:
    """The program beside this file, started at once, read when it is needed."""

    def __init__(self, model: Path) -> None:
        self.shared_memory_before = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(model), "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        """The next line of JSON; vLLM may print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise AssertionError("the program ended")

    def again(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.fixture
def program(tied_model: Path) -> Iterator[EngineProcess]:
    started = EngineProcess(tied_model)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive(processes)


@pytest.mark.timeout(120)
def test_kill_9_of_the_engine_takes_its_engine_core_along(program: EngineProcess, engines: Any, collect: Any) -> None:
    answer = program.read()
    processes = children(program.process.pid)
    assert set(answer["facts"]["core_processes"]) <= {process.pid for process in processes}
    program.process.kill()
    assert wait_until_gone(processes, 20) == []
    # It also was a second start of the engine of this session, on the same weights: all bits must agree.
    requests = [GroupRequest(f"0-{index}", np.arange(10, 30) + index, 4, 100 * index) for index in range(24)]
    for group_id, result in collect(engines("vllm", True), requests, SamplingParameters(1.0, 12)).items():
        for index, sample in enumerate(result.samples):
            tokens, log_probs = answer["samples"][f"{group_id}/{index}"]
            assert sample.tokens.tolist() == tokens
            assert sample.log_probs.tolist() == log_probs


@pytest.mark.timeout(120)
def test_a_dead_engine_core_is_an_error_within_seconds_and_shutdown_leaves_nothing(program: EngineProcess) -> None:
    [core] = program.read()["facts"]["core_processes"]
    os.kill(core, signal.SIGKILL)
    began = time.monotonic()
    program.again()
    assert "rollout engine 1 (vllm) failed" in program.read()["error"]
    assert time.monotonic() - began < 10
    program.again()
    assert "rollout engine 1 (vllm) failed" in program.read()["error"]
    processes = children(program.process.pid)
    program.end_input()
    assert program.process.wait(timeout=30) == 0
    assert wait_until_gone(processes, 20) == []


@pytest.mark.timeout(120)
def test_a_clean_shutdown_leaves_no_process_and_no_shared_memory(program: EngineProcess) -> None:
    made = program.read()["facts"]["shared_memory"]
    assert made and all(Path(path).exists() for path in made)
    processes = children(program.process.pid)
    program.end_input()
    assert program.process.wait(timeout=30) == 0
    assert wait_until_gone(processes, 5) == []
    assert not any(Path(path).exists() for path in made)
    left = set(os.listdir("/dev/shm")) - program.shared_memory_before
    assert not {name for name in left if name.startswith(("psm_", "torch_"))}
