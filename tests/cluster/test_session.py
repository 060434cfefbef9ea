"""A session starts Ray or joins it, tells its engines what they need, and removes what it and dead ones left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.cluster import remains
from slipstream.cluster.calls import gather
from slipstream.cluster.session import ClusterSession, await_engines, terminate_as_interrupt
from slipstream.cluster.watchdog import Watchdog
from slipstream.config.schema import ClusterConfig
from slipstream.errors import EngineError

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def sleeper(**environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(SLEEPER, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# ---------------------------------------------------------------- cleaning up, without Ray


def test_processes_of_a_run_are_found_by_its_id_and_others_are_left_alone() -> None:
    mine, other = sleeper(SLIPSTREAM_RUN_ID="1-aa"), sleeper(SLIPSTREAM_RUN_ID="1-aab")
    try:
        assert remains.kill_processes_of_run("1-aa") == [mine.pid]
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_a_process_that_lost_its_environment_is_found_by_its_log_file(tmp_path: Path) -> None:
    """Ray's processes write their title over their environment."""
    folder = Path(f"/tmp/{remains.TEMPORARY_PREFIX}2-bb")
    folder.mkdir()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["sleep", "600"], stdout=log)
    try:
        assert process.pid in remains.kill_processes_of_run("2-bb")
        process.wait(5)
    finally:
        process.kill()
        (folder / "log").unlink()
        folder.rmdir()


def test_remains_of_dead_controllers_are_removed_and_those_of_living_ones_stay() -> None:
    dead, alive = f"{dead_pid()}-cc", f"{os.getpid()}-cc"
    folders = [Path(f"/tmp/{remains.TEMPORARY_PREFIX}{run_id}") for run_id in (dead, alive)]
    segments = [Path(f"/dev/shm/{remains.SHARED_MEMORY_PREFIX}{run_id}-weights") for run_id in (dead, alive)]
    for folder in folders:
        (folder / "session_1").mkdir(parents=True)
    for segment in segments:
        segment.write_bytes(b"weights")
    try:
        remains.remove_remains_of_dead_runs()
        assert [path.exists() for path in (*folders, *segments)] == [False, True, False, True]
    finally:
        (folders[1] / "session_1").rmdir()
        folders[1].rmdir()
        segments[1].unlink()


def test_only_segments_that_nobody_has_mapped_are_removed() -> None:
    import mmap

    used, unused = Path("/dev/shm/psm_slipstream_used"), Path("/dev/shm/psm_slipstream_unused")
    for path in (used, unused):
        path.write_bytes(bytes(4096))
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        remains.remove_unused_posix_segments({used, unused})
        assert used.exists() and not unused.exists()
    used.unlink()


def test_what_vllm_leaves_is_found_by_its_names_message_queues_and_memory_of_collectives() -> None:
    left = [Path("/dev/shm") / name for name in ("psm_slipstream_left", "vllm_dist_slipstream_left-tp:0-cpushm_0")]
    for path in left:
        path.touch()
    try:
        assert set(left) <= remains.posix_segments()
    finally:
        for path in left:
            path.unlink()


def test_a_semaphore_in_use_is_known_though_it_is_mapped_under_another_name() -> None:
    semaphore = multiprocessing.get_context("spawn").Lock()
    path = Path("/dev/shm") / f"sem.{semaphore._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    assert path in remains.posix_segments_of([os.getpid()])
    unused = path.with_name("sem.mp-slipstream")
    unused.touch()
    remains.remove_unused_posix_segments({path, unused})
    assert path.exists() and not unused.exists()


# ---------------------------------------------------------------- the watchdog


def start_controller(run_id: str, folder: Path) -> subprocess.Popen[str]:
    """A process with a watchdog, that waits."""
    code = (
        "import sys, time; from pathlib import Path; from slipstream.cluster.watchdog import Watchdog\n"
        f"watchdog = Watchdog({run_id!r}, Path({str(folder)!r}))\n"
        "print(watchdog._process.pid, flush=True); time.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_the_watchdog_cleans_up_after_a_controller_that_was_killed(tmp_path: Path) -> None:
    run_id = f"{dead_pid()}-dd"
    segment = Path(f"/dev/shm/{remains.SHARED_MEMORY_PREFIX}{run_id}-weights")
    segment.write_bytes(b"weights")
    folder = tmp_path / "session"
    folder.mkdir()
    engine = sleeper(SLIPSTREAM_RUN_ID=run_id)
    controller = start_controller(run_id, folder)
    assert controller.stdout is not None
    watchdog = psutil.Process(int(controller.stdout.readline()))
    controller.kill()
    controller.wait()
    assert engine.wait(10) == -signal.SIGKILL
    psutil.wait_procs([watchdog], timeout=5)
    assert not segment.exists() and not folder.exists()


def test_a_dismissed_watchdog_does_nothing(tmp_path: Path) -> None:
    engine = sleeper(SLIPSTREAM_RUN_ID="3-ee")
    try:
        watchdog = Watchdog("3-ee", tmp_path)
        watchdog.dismiss()
        assert watchdog._process.returncode == 0
        assert engine.poll() is None and tmp_path.exists()
    finally:
        engine.kill()
        engine.wait()


def test_the_watchdog_does_not_hear_control_c(tmp_path: Path) -> None:
    watchdog = Watchdog("4-ff", tmp_path)
    assert os.getpgid(watchdog._process.pid) != os.getpgid(0)
    watchdog.dismiss()


def test_a_polite_end_takes_the_way_of_control_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminate_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


# ---------------------------------------------------------------- with Ray


@pytest.mark.slow
def test_engines_are_told_the_run_and_their_environment(session: Any, actor_class: type) -> None:
    engine = session.start_engine("rollout engine 0", actor_class, cpus=0.01, environment={"COLOUR": "blue"})
    engine.start_arguments = (1, 2)
    assert await_engines([engine], deadline_s=120) == [{"arguments": (1, 2)}]
    names = (remains.RUN_ID_VARIABLE, "COLOUR")
    calls = [engine.submit("environment", name) for name in names]
    assert gather(calls, deadline_s=60) == [session.run_id, "blue"]
    assert engine.pid is not None and psutil.pid_exists(engine.pid)
    assert engine.node


@pytest.mark.slow
def test_engines_are_not_slowed_down(session: Any, actor_class: type) -> None:
    engine = session.start_engine("rollout engine 1", actor_class, cpus=0.01)
    await_engines([engine], deadline_s=120)
    assert psutil.Process(engine.pid).nice() == psutil.Process().nice()


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_is_named(session: Any) -> None:
    class Unmakeable:
        def __init__(self) -> None:
            raise ValueError("the model is gone")

        def start(self) -> None: ...

        def shutdown(self) -> None: ...

    engine = session.start_engine("learner rank 0", Unmakeable, cpus=0.01)
    with pytest.raises(EngineError, match=r"(?s)learner rank 0.*the model is gone"):
        await_engines([engine], deadline_s=120)
    session.engines.remove(engine)


@pytest.mark.slow
def test_the_end_of_a_session_keeps_the_logs_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from slipstream.cluster.session import ClusterSession, await_engines
from slipstream.config.schema import ClusterConfig

class Actor:
    def start(self):
        print("good morning", file=sys.stderr, flush=True)
    def shutdown(self):
        pass

with ClusterSession(ClusterConfig(), log_folder=Path({str(tmp_path / "logs")!r})) as session:
    await_engines([session.start_engine("engine", Actor, cpus=0.01)], deadline_s=120)
    print(session.run_id, flush=True)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    run_id = finished.stdout.split()[-1]
    assert "good morning" in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert not Path(f"/tmp/{remains.TEMPORARY_PREFIX}{run_id}").exists()
    assert remains.kill_processes_of_run(run_id) == []


def test_a_cluster_that_cannot_be_joined_is_named(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from slipstream.cluster.session import ClusterSession
from slipstream.config.schema import ClusterConfig
from slipstream.config.schema import ClusterConfig
from slipstream.errors import EngineError

try:
    ClusterSession(ClusterConfig(address="127.0.0.1:9"), log_folder=Path({str(tmp_path)!r})).__enter__()
except EngineError as error:
    print(error)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert "join the Ray cluster at 127.0.0.1:9" in finished.stdout


def test_whatever_keeps_ray_from_starting_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises exceptions of no class of its own."""

    def give_up(**_: Any) -> None:
        raise Exception("something is amiss")

    monkeypatch.setattr("ray.init", give_up)
    monkeypatch.setattr("os.environ", dict(os.environ))
    with pytest.raises(EngineError, match="could not start Ray here: something is amiss"):
        ClusterSession(ClusterConfig(), log_folder=tmp_path).__enter__()


def test_ray_is_started_once_more_where_a_busy_machine_was_too_slow_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    attempts: list[str] = []

    def init(**options: Any) -> None:
        attempts.append(options["address"])
        if len(attempts) < 3:
            raise Exception("The current node timed out during startup. This could happen because ...")

    session = ClusterSession(ClusterConfig(), log_folder=tmp_path)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    session._initialize_ray({"address": "local"})
    assert attempts == ["local"] * 3
    session.config = ClusterConfig(start_timeout_s=1e-9)
    attempts.clear()
    with pytest.raises(Exception, match="timed out during startup"):
        session._initialize_ray({"address": "local"})
