"""The best policy: which one it is, what is kept of it, and what a crash leaves of that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.errors import TrainingError
from slipstream.observe.best import Best, BestPolicy, read_best
from slipstream.observe.run_directory import RunDirectory

METRIC = "greedy_accuracy"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run", "steps: 9\n", "rl")
    run.close()
    return run


def export(text: str) -> Callable[[Path], None]:
    """Stands for the learner: writes a model folder whose weights are `text`."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)

    return write


def keep(policy: BestPolicy, step: int, value: float) -> bool:
    """What a run does after the evaluation of a step; says whether it was the best."""
    best = policy.improved(step, step, metrics={METRIC: value})
    if best is not None:
        policy.keep(best, export(f"weights of step {step}"))
    return best is not None


def exported(directory: RunDirectory) -> str:
    return (directory.best_export_folder / "model.safetensors").read_text()


def test_a_policy_is_the_best_if_it_exceeds_all_before_it(directory: RunDirectory) -> None:
    policy = BestPolicy(directory, METRIC)
    assert [keep(policy, step, value) for step, value in ((0, 0.2), (5, 0.1), (10, 0.5), (15, 0.5), (20, 0.4))] == [
        True, False, True, False, False,
    ]  # fmt: skip
    assert exported(directory) == "weights of step 10"
    assert json.loads(directory.best_path.read_text()) == {
        "step": 10,
        "policy_version": 10,
        "metric": METRIC,
        "value": 0.5,
        "checkpoint": "checkpoints/step-000010",
    }


def test_the_policy_before_training_has_no_checkpoint_but_an_export(directory: RunDirectory) -> None:
    policy = BestPolicy(directory, METRIC)
    keep(policy, 0, 0.2)
    assert policy.best == Best(0, 0, METRIC, 0.2, checkpoint=None)
    assert exported(directory) == "weights of step 0"


def test_without_a_metric_nothing_is_kept(directory: RunDirectory) -> None:
    assert BestPolicy(directory, None).improved(5, 5, metrics={METRIC: 1.0}) is None
    assert read_best(directory.best_path) is None


def test_an_evaluation_without_the_metric_is_no_better(directory: RunDirectory) -> None:
    assert BestPolicy(directory, "pass@4").improved(5, 5, metrics={METRIC: 1.0}) is None


def test_a_resumed_run_knows_the_best_before_it_exactly(directory: RunDirectory) -> None:
    value = 0.1 + 0.2
    keep(BestPolicy(directory, METRIC), 5, value)
    policy = BestPolicy(directory, METRIC)
    policy.forget_after(5)
    assert policy.best is not None and policy.best.value == value
    assert policy.improved(10, 10, metrics={METRIC: value}) is None


@pytest.mark.parametrize("step", [4, -1])
def test_a_best_policy_of_steps_that_are_repeated_is_forgotten(directory: RunDirectory, step: int) -> None:
    keep(BestPolicy(directory, METRIC), 5, 0.9)
    policy = BestPolicy(directory, METRIC)
    policy.forget_after(step)
    assert policy.best is None
    assert not directory.best_path.exists() and not directory.best_export_folder.exists()
    assert keep(policy, 5, 0.9), "the repeated step is the best again"


def test_an_export_that_fails_leaves_the_best_before_it(directory: RunDirectory) -> None:
    policy = BestPolicy(directory, METRIC)
    keep(policy, 5, 0.5)

    def fail(folder: Path) -> None:
        export("half")(folder)
        raise TrainingError("cannot write the exported model: No space left on device")

    best = policy.improved(10, 10, metrics={METRIC: 0.6})
    assert best is not None
    with pytest.raises(TrainingError, match="No space left"):
        policy.keep(best, fail)
    assert policy.best == read_best(directory.best_path) == Best(5, 5, METRIC, 0.5, "checkpoints/step-000005")
    assert exported(directory) == "weights of step 5"
    assert not list(directory.path.glob(".export-best*"))


def test_a_full_disk_leaves_the_best_before_it(tiny_disk: Path) -> None:
    directory = RunDirectory.create(tiny_disk / "run", "steps: 9\n", "rl")
    policy = BestPolicy(directory, METRIC)
    keep(policy, 5, 0.5)
    best = policy.improved(10, 10, metrics={METRIC: 0.6})
    assert best is not None
    with pytest.raises(TrainingError, match=r"no space left on the disk while writing .*export-best"):
        policy.keep(best, export("x" * (2 << 20)))
    assert exported(directory) == "weights of step 5"
    assert keep(policy, 15, 0.7), "there is room again"
    directory.close()
