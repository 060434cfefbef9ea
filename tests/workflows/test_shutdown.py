"""However a run ends, nothing of it stays: no process, no Ray session, no shared memory."""

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GONE_WITHIN_S = 10.0


def shared_memory_of_the_dead() -> set[Path]:
    """Segments with vLLM's and Python's names that no process maps."""
    mapped = ""
    for process in psutil.process_iter():
        try:
            mapped += Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
        except OSError:
            continue
    return {path for path in Path("/dev/shm").glob("psm_*") if str(path) not in mapped}


def assert_nothing_is_left(process: Any) -> None:
    assert process.survivors(limit_s=GONE_WITHIN_S) == []
    assert process.remains() == []


def test_a_finished_run_leaves_nothing(finished_run: Any) -> None:
    _, process = finished_run
    assert len(process.seen) >= 6, "raylet, gcs, learner, rollout engine, reward engine and its child were seen"
    assert_nothing_is_left(process)


def test_a_finished_run_with_vllm_leaves_nothing(finished_vllm_run: Any) -> None:
    _, process = finished_vllm_run
    assert_nothing_is_left(process)


def test_control_c_while_the_engines_start_is_obeyed_at_once(bench: Any) -> None:
    process = bench.start("rl", "run", bench.rl_settings())
    bench.wait_until(process, lambda: process.find("ray::LearnerRank") is not None, "learner process")
    process.look()
    process.interrupt(group=False)
    assert process.finish(limit_s=20) == 130
    assert "Traceback" not in process.stderr
    assert_nothing_is_left(process)


@pytest.mark.parametrize("title, name", [("ray::LearnerRank", "learner rank 0"), ("EngineCore", "rollout engine 0")])
def test_a_killed_engine_ends_the_run_with_its_name(bench: Any, title: str, name: str) -> None:
    kind = "vllm" if title == "EngineCore" else "transformers"
    process = bench.start(
        "rl", "run", bench.rl_settings(steps=500, rollout__engine=kind, cluster__max_engine_restarts=0)
    )
    bench.wait_for_step(process, "run", 1)
    process.look()
    before = shared_memory_of_the_dead()
    process.find(title).kill()
    assert process.finish(limit_s=40) == 1
    assert name in process.stderr
    assert "Traceback (most recent call last)" not in process.stderr.split("last log lines")[0]
    assert_nothing_is_left(process)
    assert shared_memory_of_the_dead() - before == set()


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of somebody else's, as `ray start --head` makes it, with a token of its own; its address."""
    folder = Path(tempfile.mkdtemp(prefix="rc-"))
    (tmp_path / "token").write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    ray = str(Path(sys.executable).with_name("ray"))
    port = free_port()
    options = [f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}", "--num-cpus=2"]
    options += ["--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    subprocess.run([ray, "start", "--head", *options], check=True, capture_output=True, timeout=200)
    yield f"127.0.0.1:{port}"
    for process in processes_of(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def processes_of(folder: Path) -> list[psutil.Process]:
    """Ray's own processes of the cluster that works in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_cluster_that_was_joined_is_left_running(bench: Any, ray_cluster: str) -> None:
    process = bench.run("sft", "run", bench.sft_settings(steps=1, cluster__address=ray_cluster))
    assert process.remains() == []
    host, port = ray_cluster.split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    assert process.survivors(limit_s=GONE_WITHIN_S) == []
