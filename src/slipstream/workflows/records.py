"""Everything a run writes down, behind one object: files of the run directory, trackers and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipstream.config.schema import TrackingConfig
from slipstream.data.trajectory import Trajectory
from slipstream.observe.checkpoints import CheckpointStore
from slipstream.observe.console import RunConsole
from slipstream.observe.evaluations import Evaluation, EvaluationWriter, read_evaluations
from slipstream.observe.ledger import Ledger
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.report import write_report
from slipstream.observe.rollouts import write_rollouts
from slipstream.observe.run_directory import RunDirectory
from slipstream.observe.timeline import Timeline
from slipstream.observe.trackers import Trackers


class RunRecords:
    """Opened with the run directory, closed with the run; a resumed run goes on in the same files."""

    def __init__(
        self, directory: RunDirectory, tracking: TrackingConfig, *, title: str, total_steps: int, keep: int
    ) -> None:
        self.directory = directory
        self.tracking = tracking
        self.title = title
        self.total_steps = total_steps
        self.keep = keep
        self.console = RunConsole()
        self._stack = ExitStack()
        self._resumed_after: int | None = None

    def __enter__(self) -> RunRecords:
        directory = self.directory
        self.timeline = Timeline(directory.timeline_path)
        self.metrics = MetricsWriter(directory.metrics_path)
        self.evaluations = EvaluationWriter(directory.evaluations_path)
        self.ledger = Ledger(directory.ledger_path)
        self.checkpoints = CheckpointStore(directory.checkpoints_folder, self.keep)
        for writer in (self.timeline, self.metrics, self.evaluations, self.ledger):
            self._stack.callback(writer.close)
        self.trackers: Trackers | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Start the live display and the trackers of a new run, which writes over nothing."""
        self.restore(step=0, ledger_state={"offset": 0})

    def restore(self, *, step: int, ledger_state: dict[str, Any]) -> None:
        """Forget what was recorded after `step`, and go on from there."""
        for writer in (self.metrics, self.evaluations):
            # An evaluation at step 0 belongs to the start, which a run without checkpoint repeats.
            writer.truncate_after(step if step else -1)
        self.ledger.restore(ledger_state)
        self.trackers = Trackers(self.tracking, self.directory.path, name=self.directory.path.name, resumed_after=step)
        self._stack.callback(self.trackers.close)
        self._stack.enter_context(self.console.progress(self.title, self.total_steps, completed=step))

    def write_step(
        self, step: int, policy_version: int, *, metrics: Mapping[str, Any], trajectories: Sequence[Trajectory] = ()
    ) -> None:
        """Record a finished step everywhere."""
        line = self.metrics.write(step, policy_version, metrics=metrics)
        shown = trajectories[: self.tracking.samples_per_step]
        if shown:
            write_rollouts(self.directory.rollouts_folder, step, trajectories=shown)
        self._track(step, line)
        self.console.step(step, self.total_steps, metrics=line)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation everywhere."""
        self.evaluations.write(evaluation)
        self._track(
            evaluation.step,
            {
                "evaluation/sampled_accuracy": evaluation.sampled_accuracy,
                "evaluation/greedy_accuracy": evaluation.greedy_accuracy,
                "evaluation/response_length": evaluation.mean_length,
                "evaluation/truncated_share": evaluation.truncated_share,
            },
        )
        self.console.line(
            f"held-out accuracy after step {evaluation.step}: sampled {evaluation.sampled_accuracy:.1%}, "
            f"greedy {evaluation.greedy_accuracy:.1%}"
        )

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Make the records durable, then have `write` fill the checkpoint of `step`."""
        self.metrics.sync()
        with self.timeline.span("controller", "checkpoint"):
            self.checkpoints.write(step, write)

    def accuracy_summary(self) -> dict[str, float]:
        """Accuracies of the first and the last evaluation; empty if there was none."""
        evaluations = read_evaluations(self.directory.evaluations_path)
        if not evaluations:
            return {}
        before, after = evaluations[0], evaluations[-1]
        return {
            "accuracy_before": before.sampled_accuracy,
            "accuracy_after": after.sampled_accuracy,
            "greedy_accuracy_before": before.greedy_accuracy,
            "greedy_accuracy_after": after.greedy_accuracy,
        }

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Close the files, write summary and report, show the result; returns the summary."""
        self._stack.close()
        self.directory.write_summary(summary)
        report = write_report(self.directory.path)
        evaluations = read_evaluations(self.directory.evaluations_path)
        if len(evaluations) > 1:
            self.console.accuracy_table(evaluations[0], evaluations[-1])
            self.console.samples_table(evaluations[0], evaluations[-1])
        self.console.line(f"report: {report}")
        return summary

    def _track(self, step: int, values: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(step, values)
