"""What every training run does with steps that are not finite, and when something is due."""

from typing import Any

import pytest

from slipstream.config.schema import SFTConfig
from slipstream.errors import TrainingError
from slipstream.workflows.training_run import TrainingRun, numbers


def run_of(steps: int) -> TrainingRun:
    run = TrainingRun(directory=None)  # type: ignore[arg-type]  # neither method looks at it
    run.config = SFTConfig.model_validate(
        {"steps": steps, "output_dir": "o", "model": {"path": "m"}, "data": {"source": "d", "response_key": "r"}}
    )
    return run


def skipped(*examples: str) -> dict[str, Any]:
    return {"skipped": 1.0, "nonfinite_examples": list(examples)}


def test_the_third_step_in_a_row_that_is_not_finite_stops_the_run_and_names_examples() -> None:
    run = run_of(9)
    for _ in range(2):
        run.check_finite(skipped("0-1/3"))
    with pytest.raises(TrainingError, match=r"not finite in 3 steps in a row .*0-1/3"):
        run.check_finite(skipped("0-1/3"))


def test_a_finite_step_in_between_starts_the_count_anew() -> None:
    run = run_of(9)
    for _ in range(3):
        run.check_finite(skipped("a"))
        run.check_finite(skipped("b"))
        run.check_finite({"skipped": 0.0})


def test_what_happens_every_so_many_steps_happens_at_the_last_one_too() -> None:
    run = run_of(7)
    due = {}
    for every in (0, 3):
        due[every] = []
        for run.step in range(1, 8):
            if run.is_due(every):
                due[every].append(run.step)
    assert due == {0: [7], 3: [3, 6, 7]}


def test_lists_and_measured_seconds_are_no_metrics() -> None:
    assert numbers({"loss": 1.0, "seconds": 2.0, "nonfinite_examples": ["a"]}) == {"loss": 1.0}
