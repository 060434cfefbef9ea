"""The benchmark of optimizer steps, on sequences and models small enough for a test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "parallel.py"


@pytest.mark.slow
def test_each_way_is_measured_in_processes_of_its_own(tmp_path: Path) -> None:
    small = ["--hidden_size", "64", "--layers", "1", "--steps", "1", "--threads", "1"]
    comparisons = ["--comparisons", "ring", "deepspeed", "--lengths", "63", "--stages", "1"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), *comparisons, *small],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.splitlines()[-1])["results"]
    assert {name: {case: list(ways) for case, ways in cases.items()} for name, cases in results.items()} == {
        "ring": {"63": ["1 rank", "2 ranks"]},
        "deepspeed": {"one rank": ["plain loop", "learner, stage 1"]},
    }
    for way in (result for cases in results.values() for ways in cases.values() for result in ways.values()):
        assert way["seconds"] > 0 and way["tokens_per_second"] > 0
        assert 0 < way["memory_before"] < way["memory_peak"]
