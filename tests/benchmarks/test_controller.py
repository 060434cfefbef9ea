"""The benchmark of the controller in a small version: a few simulated engines, a few trajectories."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "controller.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_size_trains_on_as_many_and_its_books_balance(tmp_path: Path) -> None:
    arguments = ["--engines", "16", "32", "--trajectories", "256", "--tokens", "50", "--hosts", "1"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=850
    )
    assert run.returncode == 0, run.stderr[-3000:]
    line = json.loads(run.stdout.splitlines()[-1])
    assert [(result["engines"], result["steps"]) for result in line["results"]] == [(16, 4), (32, 2)]
    for result in line["results"]:
        assert (result["issued"], result["trained"], result["pending"]) == (64, 64, 0)
        assert result["trajectories"] == 256
        assert all(result[name] > 0 for name in ("trajectories_per_s", "cpu_ms", "busy", "memory_mb"))
        assert result["object_store_mb"] >= 0
    assert set(line["growth"]) == {"cpu_ms", "trajectories_per_s"}
