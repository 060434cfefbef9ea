"""Everything a run writes down, behind one object: files of the run directory, trackers and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipstream.config.schema import TrackingConfig
from slipstream.data.trajectory import Trajectory
from slipstream.observe.best import Best, BestPolicy
from slipstream.observe.checkpoints import CheckpointStore
from slipstream.observe.console import RunConsole
from slipstream.observe.evaluations import Evaluation, EvaluationWriter, by_dataset, read_evaluations
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
        self,
        directory: RunDirectory,
        tracking: TrackingConfig,
        *,
        title: str,
        total_steps: int,
        keep: int,
        best_metric: str | None = None,
    ) -> None:
        self.directory = directory
        self.tracking = tracking
        self.title = title
        self.total_steps = total_steps
        self.keep = keep
        self.best_metric = best_metric
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
        self.best_policy = BestPolicy(directory, self.best_metric)
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
        # An evaluation at step 0 belongs to the start, which a run without checkpoint repeats.
        repeated_after = step if step else -1
        for writer in (self.metrics, self.evaluations):
            writer.truncate_after(repeated_after)
        self.best_policy.forget_after(repeated_after)
        self._protect_best()
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

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> Best | None:
        """Record the evaluation of a step, on all held-out sets, everywhere.

        Returns what makes its policy the best so far, for `keep_best` once there is a checkpoint of it; None if others
        were as good, or no metric was chosen to judge by.
        """
        for evaluation in evaluations:
            self.evaluations.write(evaluation)
            self._track(evaluation.step, {f"evaluation/{name}": value for name, value in evaluation.metrics.items()})
            self.console.evaluation(evaluation)
        return self._improved(evaluations)

    def best_at(self, step: int) -> Best | None:
        """What `write_evaluations` returned at `step`, if the run was killed before it could keep that policy."""
        recorded = read_evaluations(self.directory.evaluations_path)
        return self._improved([evaluation for evaluation in recorded if evaluation.step == step])

    def keep_best(self, best: Best, export: Callable[[Path], None]) -> None:
        """Have `export` write the policy of the current step, which is the best so far and has a checkpoint.

        The checkpoint stays until a better policy is kept. If anything fails, the previous best stays.
        """
        with self.timeline.span("controller", "keep best"):
            self.best_policy.keep(best, export)
        self._protect_best()
        self.checkpoints.prune(best.step)
        self.console.line(f"best so far: {best.metric} {best.value:.4g}, kept in {self.directory.best_export_folder}")

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Make the records durable, then have `write` fill the checkpoint of `step`."""
        self.metrics.sync()
        self.evaluations.sync()
        with self.timeline.span("controller", "checkpoint"):
            self.checkpoints.write(step, write)

    def accuracy_summary(self) -> dict[str, Any]:
        """Accuracies on the first set before and after training, and the best policy; empty if nothing was evaluated.

        `best_step` and `best_value` are there where a metric was chosen to judge by.
        """
        first_set = next(iter(by_dataset(read_evaluations(self.directory.evaluations_path)).values()), [])
        if not first_set:
            return {}
        before, after = first_set[0], first_set[-1]
        best = self.best_policy.best
        return {
            "accuracy_before": before.sampled_accuracy,
            "accuracy_after": after.sampled_accuracy,
            "greedy_accuracy_before": before.greedy_accuracy,
            "greedy_accuracy_after": after.greedy_accuracy,
        } | ({} if best is None else {"best_step": best.step, "best_value": best.value})

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Close the files, write summary and report, show the result; returns the summary."""
        self._stack.close()
        self.directory.write_summary(summary)
        report = write_report(self.directory.path)
        sets = by_dataset(read_evaluations(self.directory.evaluations_path))
        compared = [(evaluations[0], evaluations[-1]) for evaluations in sets.values() if len(evaluations) > 1]
        if compared:
            self.console.accuracy_table(compared)
            self.console.samples_table(*compared[0])
        self.console.line(f"report: {report}")
        return summary

    def _improved(self, evaluations: Sequence[Evaluation]) -> Best | None:
        if not evaluations:
            return None
        metrics = {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()}
        return self.best_policy.improved(evaluations[0].step, evaluations[0].policy_version, metrics=metrics)

    def _protect_best(self) -> None:
        best = self.best_policy.best
        self.checkpoints.protected_step = None if best is None else best.step

    def _track(self, step: int, values: Mapping[str, Any]) -> None:
        if self.trackers is not None:
            self.trackers.log(step, values)
