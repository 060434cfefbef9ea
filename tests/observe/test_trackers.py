import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.config.schema import TrackingConfig
from slipstream.errors import ConfigError, TrainingError
from slipstream.observe.trackers import Trackers


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_is_on_by_default_and_readable_before_the_run_ends(tmp_path: Path) -> None:
    trackers = Trackers(TrackingConfig(), tmp_path, name="run")
    for step in (1, 2):
        trackers.log(step, {"step": step, "policy_version": step, "reward/mean": np.float32(step / 2), "x": None})
    assert scalars(tmp_path / "tensorboard", "reward/mean") == [(1, 0.5), (2, 1.0)]
    trackers.close()
    trackers.close()


def test_a_resumed_run_supersedes_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = Trackers(TrackingConfig(), tmp_path, name="run")
    for step in range(1, 6):
        first.log(step, {"x": 1.0})
    first.close()
    second = Trackers(TrackingConfig(), tmp_path, name="run", resumed_after=3)
    second.log(4, {"x": 2.0})
    second.close()
    assert scalars(tmp_path / "tensorboard", "x") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_a_full_disk_is_noticed(tiny_disk: Path) -> None:
    trackers = Trackers(TrackingConfig(), tiny_disk, name="run")
    (tiny_disk / "ballast").write_bytes(bytes((1 << 20) - 8192))
    with pytest.raises(TrainingError, match=r"no space left on the disk while writing .*tfevents"):
        for step in range(1000):
            trackers.log(step, {f"metric {index}": 1.0 for index in range(50)})


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    trackers = Trackers(TrackingConfig(tensorboard=False), tmp_path, name="run")
    trackers.log(1, {"x": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeRun]]:
    """Stands for the package, which is not installed with Slipstream; collects the runs it starts."""
    runs: list[FakeRun] = []
    module = types.ModuleType("wandb")
    module.init = lambda **options: runs.append(FakeRun(**options)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield runs


WANDB = TrackingConfig(tensorboard=False, wandb_project="maths")


def test_wandb_gets_the_numbers_and_a_resumed_run_keeps_its_identity(
    tmp_path: Path, wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    for step in (1, 2):
        trackers = Trackers(WANDB, tmp_path, name="demo")
        trackers.log(step, {"step": step, "reward/mean": 0.5, "x": None})
        trackers.close()
    first, second = wandb_runs
    assert first.logged == [(1, {"reward/mean": 0.5})] and first.finished
    assert (first.options["project"], first.options["name"]) == ("maths", "demo")
    assert first.options["id"] == second.options["id"]
    assert not any("key" in path.read_text() for path in tmp_path.iterdir())


def test_wandb_without_a_key_is_an_error_unless_it_is_offline(
    tmp_path: Path, wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="WANDB_API_KEY is not set"):
        Trackers(WANDB, tmp_path, name="demo")
    assert wandb_runs == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    Trackers(WANDB, tmp_path, name="demo").close()
    assert len(wandb_runs) == 1


def test_wandb_that_is_not_installed_is_an_error_that_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        Trackers(WANDB, tmp_path, name="demo")


def test_observing_imports_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys\n"
        "from slipstream.observe import checkpoints, console, evaluations, ledger, logs, metrics, report\n"
        "from slipstream.observe import rollouts, run_directory, timeline, trackers\n"
        "print([name for name in ('torch', 'matplotlib', 'tensorboard', 'rich', 'jinja2') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
