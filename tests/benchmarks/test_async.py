"""The benchmark of asynchronous training in a small version: real engines, little latency, few steps."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--repeats", "1", "--steps", "5", "--engine", "transformers")
LITTLE_LATENCY = ("--latency_scale", "0.2", "--reward_workers", "48")


def test_a_run_of_each_bound_is_measured_and_compared(run_benchmark: Callable[..., Any]) -> None:
    arguments = ("--workloads", "latency", "--staleness", "0", "1")
    code, line = run_benchmark("async", *arguments, *SMALL, *LITTLE_LATENCY)
    assert line["limit_s"] == 8
    medians = line["medians"]["latency"]
    results = {result["max_staleness"]: result for result in line["results"]}
    assert set(results) == {0, 1} and set(medians) == {"0", "1"}
    assert results[0]["staleness_mean"] == 0 < results[1]["staleness_mean"] <= 1
    assert results[0]["effective_share"] is None and 0 < results[1]["effective_share"] <= 1
    assert all(result["step_seconds"] > 0 for result in results.values())
    assert medians["0"]["step_speedup"] == 1 and medians["1"]["step_speedup"] > 0
    assert code == (0 if line["reached"] else 1)
