"""The benchmark of shared prompts, on a group small enough for a test."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "shared_prompts.py"


def test_it_computes_prompts_once_and_the_same_gradients(tmp_path: Path) -> None:
    arguments = ["--shapes", "4:32:8", "--hidden_size", "64", "--layers", "1", "--repeats", "1", "--threads", "1"]
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])["shapes"]["4:32:8"]
    answers = 4 + 7 + 9 + 12
    computed = {way: result[way]["computed_tokens"] for way in ("shared", "plain", "padded")}
    assert computed == {"shared": 32 + answers, "plain": 4 * 32 + answers, "padded": 4 * (32 + 12)}
    assert all(result[way]["seconds"] > 0 and result[way]["tokens_per_second"] > 0 for way in computed)
    assert 0 < result["gradient_difference"] < 1e-5
