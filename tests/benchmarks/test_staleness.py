"""The benchmark of staleness and its correction in a small version."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_bounds_are_compared_with_and_without_correction(run_benchmark: Callable[..., Any], tmp_path: Path) -> None:
    code, line = run_benchmark("staleness", "--staleness", "0", "2", "--seeds", "0", "--steps", "5")
    assert code == 0
    synchronous, corrected, uncorrected = line["summary"]
    assert [row["max_staleness"] for row in line["summary"]] == [0, 2, 2]
    assert [row["is_corrected"] for row in line["summary"]] == [True, True, False]
    assert synchronous["staleness_mean"] == 0 and synchronous["kl_max"] < 1e-8
    for row in (corrected, uncorrected):
        assert 0 < row["staleness_mean"] <= 2 and row["kl_max"] > synchronous["kl_max"]
    assert 0 < corrected["effective_share"] < 1 and uncorrected["effective_share"] is None
    pictures = {path.name for path in (tmp_path / "staleness").glob("*.svg")}
    assert pictures == {
        f"{name}-by-{axis}.svg" for name in ("corrected", "uncorrected") for axis in ("samples", "seconds")
    }
