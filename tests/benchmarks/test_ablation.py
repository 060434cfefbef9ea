"""The ablation of engine and asynchrony in a small version."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_all_four_combinations_are_measured(run_benchmark: Callable[..., Any], tmp_path: Path) -> None:
    code, line = run_benchmark("ablation", "--steps", "3", "--staleness", "1", "--reward_workers", "16")
    assert code == 0
    combinations = [(result["engine"], result["max_staleness"]) for result in line["results"]]
    assert combinations == [("transformers", 0), ("transformers", 1), ("vllm", 0), ("vllm", 1)]
    for result in line["results"]:
        assert sum(result["phases"].values()) == pytest.approx(result["step_seconds"], rel=0.3)
        assert result["ends"] == sorted(result["ends"]) and len(result["rewards"]) == 3
    picture = (tmp_path / "ablation" / "reward.svg").read_text()
    assert picture.startswith("<svg xmlns=") and "vllm, asynchronous" in picture
