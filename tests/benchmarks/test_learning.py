"""Every preset learns: the benchmark with one seed, through real Ray, vLLM and DeepSpeed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.presets import PRESETS

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "learning.py"


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_every_preset_gets_past_the_threshold(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            *("--seeds", "0", "--steps", "15"),
            *("--output_dir", str(tmp_path / "learning")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2400,
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
