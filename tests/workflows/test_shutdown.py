"""However a run ends, nothing of it stays: no process, no Ray session, no shared memory."""

import subprocess
import sys
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
    process = bench.start("rl", "run", bench.rl_settings(steps=500, rollout__engine=kind))
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
def ray_cluster() -> Iterator[str]:
    """A Ray cluster of somebody else's: `ray start --head`, and its address."""
    folder = "/tmp/ray-of-a-test"
    ray = [str(Path(sys.executable).with_name("ray"))]
    start = [*ray, "start", "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}", "--num-cpus=2"]
    subprocess.run(start, check=True, capture_output=True, timeout=120)
    address = (Path(folder) / "ray_current_cluster").read_text().strip()
    yield address
    for process in psutil.process_iter():
        try:
            if folder in " ".join(process.cmdline()):
                process.kill()
        except psutil.Error:
            continue
