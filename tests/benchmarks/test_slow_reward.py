"""The reward that takes its time: how long, and that all runs of a comparison wait for the same times."""

import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def slow_reward(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("slow_reward")


@pytest.mark.parametrize("limit_s", [8.0, None])
def test_median_and_99th_percentile_are_those_it_states_with_and_without_limit(slow_reward: Any, limit_s: Any) -> None:
    times = [slow_reward.latency("prompt", number, seed=0, limit_s=limit_s) for number in range(40_000)]
    assert np.median(times) == pytest.approx(0.2, rel=0.03)
    assert np.quantile(times, 0.99) == pytest.approx(4.0, rel=0.06)
    assert (max(times) <= 8.0) == (limit_s is not None)
    assert np.mean(np.array(times) >= 8.0) == pytest.approx(0.0021, abs=0.0008)


def test_a_wait_follows_from_seed_prompt_and_number(slow_reward: Any) -> None:
    def waits(**changes: Any) -> list[float]:
        return [slow_reward.latency("prompt", number, **{"seed": 0, **changes}) for number in range(5)]

    assert waits() == waits() and len(set(waits())) == 5
    assert waits() != waits(seed=1)
    assert waits(scale=0.5) == [wait / 2 for wait in waits()]


def test_askers_in_several_processes_are_counted_once_each(slow_reward: Any, tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        numbers = list(pool.map(slow_reward.count, ["one prompt"] * 200, [tmp_path] * 200))
    assert sorted(numbers) == list(range(200))
    assert slow_reward.count("another prompt", tmp_path) == 0


def test_it_pays_for_the_right_digit_after_the_wait(slow_reward: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    for number, (response, reward) in enumerate((("7", 1.0), ("3", 0.0), ("7 is the larger one", 1.0))):
        text = SimpleNamespace(prompt="Which is larger, 3 or 7?", response=response, label="7")
        assert slow_reward.slow_match(text, str(tmp_path), seed=0, scale=0.1, limit_s=8.0) == reward
        began += slow_reward.latency(text.prompt, number, seed=0, scale=0.1)
        assert time.monotonic() >= began
