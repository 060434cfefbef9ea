"""Presets learn: the benchmark in a small version, one seed, through real Ray, vLLM and DeepSpeed.

One preset for each thing that a run must do besides pure arithmetic; the others differ from these in functions that
tests/algorithms holds, and the benchmark without arguments runs them all.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A critic; greedy answers as baselines; fresh prompts in place of groups without signal; the ratio of a sequence.
PRESETS = ["ppo", "remax", "dapo", "gspo"]
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "learning.py"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_presets_get_past_the_threshold(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            *("--presets", *PRESETS, "ppo_reward_model"),
            *("--seeds", "0"),
            *("--output_dir", str(tmp_path / "learning")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert run.stdout, run.stderr[-3000:]
    line: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    results = {result["preset"]: result for result in line["results"]}
    with_reward_model = results.pop("ppo_reward_model")
    assert set(results) == set(PRESETS)
    assert {name: each["reward_before"] for name, each in results.items() if each["reward_before"] > 0.7} == {}
    assert {name: each["reward_after"] for name, each in results.items() if each["reward_after"] < 0.8} == {}
    assert with_reward_model["reward_after"] >= with_reward_model["reward_before"] + 0.5
    assert with_reward_model["kl"] <= 1.25 * 0.5, "steered to its target"
    assert line["learned"] is True and run.returncode == 0
