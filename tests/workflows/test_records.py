"""What a run writes down of evaluations, and that its best policy survives pruning, kills and resumes."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.config.schema import TrackingConfig
from slipstream.errors import TrainingError
from slipstream.observe.checkpoints import CheckpointStore
from slipstream.observe.evaluations import Evaluation
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows import records as records_module
from slipstream.workflows.records import RunRecords

METRIC = "math/pass@2"
# What the evaluation after each step gives; the start gives 0.3.
VALUES = {1: 0.2, 2: 0.4, 3: 0.4, 4: 0.6, 5: 0.1, 6: 0.5}


def evaluations(step: int, value: float) -> list[Evaluation]:
    """Of two sets; `value` is the metric that chooses."""
    first: dict[str, Any] = {
        "step": step,
        "policy_version": step + 1,
        "dataset": "held-out",
        "prompts": 4,
        "samples_per_prompt": 2,
        "sampled_accuracy": 0.9 - step / 10,
        "greedy_accuracy": 0.5,
        "pass_at_k": {"pass@1": 0.9 - step / 10, "pass@2": 0.95},
        "mean_reward": 0.5,
        "mean_length": 3.0,
        "max_length": 8,
        "truncated_share": 0.25,
        "greedy_mean_length": 2.0,
        "greedy_max_length": 4,
        "greedy_truncated_share": 0.0,
        "unscored": 0,
    }
    second = first | {"dataset": "math", "prompts": 2, "pass_at_k": {"pass@1": value / 2, "pass@2": value}}
    return [Evaluation(**first), Evaluation(**second)]


class Killed(BaseException):
    """Stands for kill -9."""


class Run:
    """The part of a training run that keeps records: `go` from the start or the newest checkpoint to the last step.

    The weights of a step are its number. `kill` is called with the name of each thing about to be done.
    """

    def __init__(self, folder: Path, *, every_steps: int = 3, keep: int = 1, metric: str | None = METRIC) -> None:
        self.folder = folder
        self.every_steps, self.keep, self.metric = every_steps, keep, metric
        self.step = 0
        self.kill: Callable[[str], None] = lambda moment: None

    def go(self) -> dict[str, Any]:
        with ExitStack() as stack:
            exists = (self.folder / "config.yaml").exists()
            opened = (
                RunDirectory.resume(self.folder) if exists else RunDirectory.create(self.folder, "steps: 6\n", "rl")
            )
            directory = stack.enter_context(opened)
            checkpoint = CheckpointStore(directory.checkpoints_folder, self.keep).latest()
            self.records = stack.enter_context(
                RunRecords(
                    directory,
                    TrackingConfig(tensorboard=False),
                    title="rl",
                    total_steps=len(VALUES),
                    keep=self.keep,
                    best_metric=self.metric,
                )
            )
            self._start_or_restore(checkpoint)
            while self.step < len(VALUES):
                self._take_step()
            self.kill("finish")
            return self.records.finish(self.records.accuracy_summary())

    def _start_or_restore(self, checkpoint: Path | None) -> None:
        if checkpoint is None:
            self.records.begin()
            best = self.records.write_evaluations(evaluations(0, 0.3))
        else:
            self.step = json.loads((checkpoint / "state.json").read_text())["step"]
            self.records.restore(step=self.step, ledger_state={"offset": 0})
            best = self.records.best_at(self.step)
        self._keep(best)

    def _take_step(self) -> None:
        self.step += 1
        self.records.write_step(self.step, self.step, metrics={"reward/mean": 0.5})
        self.kill(f"evaluate {self.step}")
        best = self.records.write_evaluations(evaluations(self.step, VALUES[self.step]))
        self.kill(f"save {self.step}")
        if best is not None or self.step % self.every_steps == 0:
            self.records.save_checkpoint(self.step, self._write_checkpoint)
        self.kill(f"keep {self.step}")
        self._keep(best)

    def _keep(self, best: Any) -> None:
        if best is not None:
            self.records.keep_best(best, self._export)

    def _write_checkpoint(self, folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps({"step": self.step}))

    def _export(self, folder: Path) -> None:
        (folder / "weights").write_text(str(self.step))
        self.kill(f"export {self.step}")

    # ------------------------------------------------------------ what is left

    @property
    def best(self) -> dict[str, Any]:
        return json.loads((self.folder / "best.json").read_text())  # type: ignore[no-any-return]

    @property
    def exported(self) -> str:
        return (self.folder / "export-best" / "weights").read_text()

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").iterdir())

    @property
    def left(self) -> dict[str, Any]:
        """Everything that another run can be compared by."""
        return {
            "evaluations": (self.folder / "evaluations.jsonl").read_text(),
            "best": self.best,
            "exported": self.exported,
            "checkpoints": self.checkpoints,
            "summary": json.loads((self.folder / "summary.json").read_text()),
        }


def kill_at(moment: str) -> Callable[[str], None]:
    def kill(now: str) -> None:
        if now == moment:
            raise Killed

    return kill


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing it takes most of the time, and it has tests of its own."""
    monkeypatch.setattr(records_module, "write_report", lambda folder: folder / "report.html")


@pytest.fixture
def undisturbed(tmp_path: Path) -> Run:
    run = Run(tmp_path / "undisturbed")
    run.go()
    return run


# ---------------------------------------------------------------- evaluations


class TrackersStandIn:
    logged: list[tuple[int, dict[str, Any]]]

    def __init__(self, *_: Any, **__: Any) -> None:
        type(self).logged = []

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.logged.append((step, values))

    def close(self) -> None:
        pass


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TrackersStandIn]]:
    monkeypatch.setattr(records_module, "Trackers", TrackersStandIn)
    yield TrackersStandIn


def test_trackers_get_every_metric_of_every_set_under_its_name(tmp_path: Path, tracked: type[TrackersStandIn]) -> None:
    Run(tmp_path / "run").go()
    values = {name: value for step, logged in tracked.logged for name, value in logged.items() if step == 2}
    assert values["evaluation/sampled_accuracy"] == pytest.approx(0.7)
    assert (values["evaluation/pass@2"], values["evaluation/math/pass@2"]) == (0.95, 0.4)
    for name in ("greedy_accuracy", "mean_reward", "mean_length", "max_length", "truncated_share", "unscored"):
        assert {f"evaluation/{name}", f"evaluation/math/{name}"} <= values.keys()


def test_the_summary_has_the_first_set_and_the_best(undisturbed: Run) -> None:
    assert undisturbed.left["summary"] == {
        "accuracy_before": 0.9,
        "accuracy_after": pytest.approx(0.3),
        "greedy_accuracy_before": 0.5,
        "greedy_accuracy_after": 0.5,
        "best_step": 4,
        "best_value": 0.6,
    }


def test_without_a_metric_nothing_is_kept_but_what_is_due(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", metric=None)
    assert "best_step" not in run.go()
    assert run.checkpoints == [6]
    assert not (run.folder / "best.json").exists() and not (run.folder / "export-best").exists()


def test_every_set_has_a_line_on_the_console_and_rows_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(tmp_path / "run").go()
    shown = capsys.readouterr().out
    assert "held-out accuracy after step 2: sampled 70.0%, greedy 50.0%, pass@2 95.0%" in shown
    assert "math accuracy after step 2: sampled 70.0%, greedy 50.0%, pass@2 40.0%" in shown
    assert "Held-out accuracy (4 prompts)" in shown and "sampled (math, 2 prompts)" in shown
    assert "best so far: math/pass@2 0.6" in shown


# ---------------------------------------------------------------- the best policy


def test_the_best_policy_is_kept_with_its_checkpoint_whatever_is_pruned(undisturbed: Run) -> None:
    assert undisturbed.best == {
        "step": 4,
        "policy_version": 5,
        "metric": METRIC,
        "value": 0.6,
        "checkpoint": "checkpoints/step-000004",
    }
    assert (undisturbed.folder / undisturbed.best["checkpoint"] / "state.json").exists()
    assert undisturbed.exported == "4"
    assert undisturbed.checkpoints == [4, 6], "the best and the newest; 2 was the best before 4"


MOMENTS = [f"{what} {step}" for step in VALUES for what in ("evaluate", "save", "keep")] + [
    "export 0", "export 2", "export 4", "finish",
]  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_and_resumed_keeps_the_same(moment: str, tmp_path: Path, undisturbed: Run) -> None:
    run = Run(tmp_path / "run")
    run.kill = kill_at(moment)
    with pytest.raises(Killed):
        run.go()
    resumed = Run(tmp_path / "run")
    resumed.go()
    assert resumed.left == undisturbed.left


def test_a_run_killed_between_the_parts_of_keeping_keeps_the_same(
    tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export of step 4 is in place already, and best.json still names step 2."""
    from slipstream.observe import best

    write = best.write_json_atomically

    def write_or_die(path: Path, record: dict[str, Any]) -> None:
        if record["step"] == 4:
            raise Killed
        write(path, record)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(best, "write_json_atomically", write_or_die)
        Run(tmp_path / "run").go()
    interrupted = Run(tmp_path / "run")
    assert (interrupted.best["step"], interrupted.exported) == (2, "4")
    assert {2, 4} <= set(interrupted.checkpoints), "neither is pruned before the other is kept"
    interrupted.go()
    assert interrupted.left == undisturbed.left


def test_a_run_that_passes_over_a_damaged_best_checkpoint_finds_the_same_best_again(
    tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path / "run", keep=2)
    run.kill = kill_at("evaluate 5")
    with pytest.raises(Killed):
        run.go()
    assert run.best["step"] == 4
    (run.folder / "checkpoints/step-000004/state.json").write_text("")
    resumed = Run(tmp_path / "run", keep=2)
    resumed.go()
    assert (resumed.best, resumed.exported) == (undisturbed.best, undisturbed.exported)
    assert CheckpointStore(resumed.folder / "checkpoints", 2).latest() == resumed.folder / "checkpoints/step-000006"


def test_a_run_without_checkpoints_starts_again_without_the_best_of_before(tmp_path: Path, undisturbed: Run) -> None:
    run = Run(tmp_path / "run")
    run.kill = kill_at("evaluate 5")
    with pytest.raises(Killed):
        run.go()
    shutil.rmtree(run.folder / "checkpoints")
    resumed = Run(tmp_path / "run")
    resumed.go()
    assert resumed.left == undisturbed.left


def test_a_disk_that_is_full_when_the_best_is_exported_leaves_the_best_before(tmp_path: Path, undisturbed: Run) -> None:
    def fail(now: str) -> None:
        if now == "export 4":
            raise TrainingError("cannot write the exported model: No space left on device")

    run = Run(tmp_path / "run")
    run.kill = fail
    with pytest.raises(TrainingError, match="No space left"):
        run.go()
    assert (run.best["step"], run.exported) == (2, "2")
    assert {2, 4} <= set(run.checkpoints)
    resumed = Run(tmp_path / "run")
    resumed.go()
    assert resumed.left == undisturbed.left
