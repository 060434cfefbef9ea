"""What every training run has, whatever it trains: a step count, a learner, records, checkpoints, an end.

A run is entered to start everything and left to stop everything, whatever happened in between.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.reward_model import SupervisedConfig
from slipstream.config.schema import RLConfig
from slipstream.errors import TrainingError
from slipstream.observe.files import replace_folder
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.training.group import LearnerGroup
from slipstream.workflows.records import RunRecords

SKIPPED_STEPS_BEFORE_STOP = 3
CONTROLLER_STATE = "controller.json"

logger = get_logger("run")


class TrainingRun:
    """A training run in progress. `step` counts finished steps.

    A workflow adds `_set_up`, which starts what it needs; `_state` and `_restore_state`, what a checkpoint holds
    besides the learner and what is kept here; and `begin`, for a run that starts from the beginning.
    """

    config: RLConfig | SupervisedConfig
    learner: LearnerGroup
    records: RunRecords

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.step = 0
        self._skipped_in_a_row = 0
        self._elapsed_before_s = 0.0
        self._started = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(terminate_as_interrupt())
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        """Returns the names of the sources of training data whose rows are not what they were."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start from the model as it is."""
        self.records.begin()

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped; forget what was recorded after it."""
        state = json.loads((checkpoint / CONTROLLER_STATE).read_text(encoding="utf-8"))
        self.step, self._elapsed_before_s = state["step"], state["elapsed_s"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.records.restore(step=self.step, ledger_state=state["ledger"])
        for name in self._restore_state(state):
            key = f"data.mix.{name}.source" if name else "data.source"
            logger.warning(
                f"{key}: {self.config.data.parts[name].source!r} is not the dataset that the checkpoint was made with, "
                "or is rendered differently: starting from its beginning"
            )
        for name, group in self._learners().items():
            change = group.load(checkpoint / name)
            if change is not None:
                logger.warning(
                    f"the checkpoint of the {name} was converted: {change}; results agree with those of the layout "
                    "before but for rounding, and ranks that are new have random states from the seed"
                )
        logger.info("resumed", step=self.step, checkpoint=str(checkpoint))

    def save_if_due(self, *, needed: bool = False) -> None:
        """Write a checkpoint of the step that has just been recorded, if one is due or `needed` all the same."""
        if needed or self.is_due(self.config.checkpoint.every_steps):
            self.records.save_checkpoint(self.step, self._write_checkpoint)

    def is_due(self, every_steps: int) -> bool:
        """Whether something that happens every so many steps, and at the last one, happens at this one."""
        return self.step == self.config.steps or (every_steps > 0 and self.step % every_steps == 0)

    def check_finite(self, *updates: dict[str, Any]) -> None:
        """Warn of optimizer steps that were skipped; the third step in a row that has some raises TrainingError.

        `updates`: the metrics of each learner's update of this step.
        """
        if not any(update["skipped"] for update in updates):
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        culprits = (
            ", ".join([example for update in updates for example in update["nonfinite_examples"]][:3])
            or "none: only the gradients overflowed"
        )
        logger.warning("step skipped: not finite", step=self.step, examples=culprits)
        if self._skipped_in_a_row >= SKIPPED_STEPS_BEFORE_STOP:
            raise TrainingError(
                f"loss or gradients were not finite in {SKIPPED_STEPS_BEFORE_STOP} steps in a row (last: step "
                f"{self.step}, examples {culprits}); lower training.learning_rate, or look at these examples"
            )

    def _learners(self) -> dict[str, LearnerGroup]:
        """All that learn, by the name of their folder in a checkpoint."""
        return {"learner": self.learner}

    def _open_records(self) -> RunRecords:
        config = self.config
        records = RunRecords(
            self.directory,
            config.tracking,
            title=self.directory.workflow,
            total_steps=config.steps,
            keep=config.checkpoint.keep,
            best_metric=config.checkpoint.best_metric,
        )
        return self._stack.enter_context(records)

    def _open_session(self) -> ClusterSession:
        log_folder = self.directory.path / "logs"
        return self._stack.enter_context(ClusterSession(self.config.cluster, log_folder=log_folder))

    def _finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """Export the model, write summary and report; returns the summary."""
        with self.records.console.phase("exporting the model"):
            replace_folder(self.directory.export_folder, self._export)
        summary = {
            "workflow": self.directory.workflow,
            **results,
            "seconds": round(self._elapsed_s(), 1),
            "steps": self.step,
            "run_dir": str(self.directory.path),
        }
        return self.records.finish(summary)

    def _export(self, folder: Path) -> None:
        self.learner.export(folder)

    def _write_checkpoint(self, folder: Path) -> None:
        for name, group in self._learners().items():
            group.save(folder / name)
        (folder / CONTROLLER_STATE).write_text(json.dumps(self._controller_state()), encoding="utf-8")

    def _controller_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the learners."""
        return self._state() | {
            "step": self.step,
            "elapsed_s": self._elapsed_s(),
            "skipped_in_a_row": self._skipped_in_a_row,
            "ledger": self.records.ledger.state(),
        }

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.monotonic() - self._started


def start_or_restore(run: TrainingRun, checkpoint: Path | None) -> None:
    """Bring a run that has been entered to where its loop begins."""
    if checkpoint is None:
        run.begin()
    else:
        run.restore(checkpoint)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The learner's metrics that belong into `metrics.jsonl`: no lists, and no seconds, which are not repeatable."""
    return {name: value for name, value in metrics.items() if not isinstance(value, list) and name != "seconds"}
