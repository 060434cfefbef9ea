"""Whether Ray is alive: its two processes are found among ours, and their death is told. Stand-ins for them."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slipstream.cluster.ray_processes import RayProcesses, require_ray
from slipstream.errors import EngineLostError


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], psutil.Process]]:
    """Starts a child of ours with the name that is given."""
    started = []

    def make(name: str) -> psutil.Process:
        program = tmp_path / name
        if not program.exists():
            shutil.copy("/bin/sleep", program)
        started.append(subprocess.Popen([str(program), "600"]))
        process = psutil.Process(started[-1].pid)
        while process.name() != name:
            time.sleep(0.01)
        return process

    yield make
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def ray_processes() -> Iterator[RayProcesses]:
    processes = RayProcesses()
    yield processes
    processes.forget()


def kill(process: psutil.Process) -> None:
    """Until its parent, this process, reads its exit code it stays as a zombie."""
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_nothing_is_required_before_a_session_and_after_it(
    ray_processes: RayProcesses, start: Callable[[str], psutil.Process]
) -> None:
    require_ray()
    raylet = start("raylet")
    ray_processes.find()
    require_ray()
    kill(raylet)
    with pytest.raises(EngineLostError, match=rf"Ray has died: raylet \(process {raylet.pid}\) is no more"):
        require_ray()
    assert not ray_processes.are_alive
    ray_processes.forget()
    ray_processes.forget()
    require_ray()


def test_what_is_left_of_an_earlier_attempt_and_other_children_do_not_count(
    ray_processes: RayProcesses, start: Callable[[str], psutil.Process]
) -> None:
    kill(start("gcs_server"))
    other, store = start("sleeper"), start("gcs_server")
    ray_processes.find()
    kill(other)
    assert ray_processes.dead == []
    kill(store)
    assert ray_processes.dead == [f"gcs_server (process {store.pid})"]
