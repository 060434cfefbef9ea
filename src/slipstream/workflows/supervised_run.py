"""Training on rows from data, without generation: rows are drawn, learned from, and those held out are measured.

Supervised fine-tuning, reward models and preference training differ in what a row is, what is minimized and what they
report at the end; that is in their own files, and all else is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from slipstream.cluster.session import ClusterSession
from slipstream.config.loader import dump_config
from slipstream.config.reward_model import SupervisedConfig
from slipstream.data.cursor import Tokenized
from slipstream.data.mixture import MixtureCursor
from slipstream.data.trajectory import TrainingExample
from slipstream.observe.run_directory import RunDirectory
from slipstream.training.group import LearnerGroup
from slipstream.workflows.checks import check_config
from slipstream.workflows.learned_rows import LearnedRows
from slipstream.workflows.training_run import TrainingRun, numbers, start_or_restore

if TYPE_CHECKING:
    from slipstream.algorithms.objective import Objective

Item = TypeVar("Item", bound=Tokenized)


class SupervisedRun(TrainingRun, Generic[Item]):
    """Training on rows from data in progress.

    A workflow says what the learner minimizes (`_objective`), which one it is (`_start_learner`) and what it needs of
    rows (`_examples`); and where that is more than the usual, what is recorded of a step (`_counted`) and of held-out
    rows (`_measure`), and what the summary says (`_results`).
    """

    config: SupervisedConfig

    def __init__(self, config: SupervisedConfig, data: LearnedRows[Item], *, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.config = config
        self._use(data)

    def _use(self, data: LearnedRows[Item]) -> None:
        """Learn from these rows, from their beginning."""
        self.data = data
        self.cursor = MixtureCursor(data.training, seed=self.config.seed, shuffle=self.config.data.shuffle)

    def _set_up(self) -> None:
        self.objective = self._objective()
        self.records = self._open_records()
        session = self._open_session()
        with self.records.console.phase("starting the learner"):
            self.learner = self._start_learner(session)

    def _objective(self) -> Objective:
        """What the learner minimizes. Imports torch."""
        raise NotImplementedError

    def _start_learner(self, session: ClusterSession) -> LearnerGroup:
        """The learner, ready."""
        raise NotImplementedError

    def _examples(self, rows: Sequence[Item]) -> list[TrainingExample]:
        """The examples of one optimizer step, with all that its loss needs."""
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        return {"cursor": self.cursor.state()}

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        return self.cursor.restore(state["cursor"])

    @property
    def is_done(self) -> bool:
        """Whether there is no further step to make."""
        return self.step >= self.config.steps

    def train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        start = time.monotonic()
        rows = [draw.item for draw in self.cursor.take(self.config.batch_size)]
        with self.records.timeline.span("controller", "train", step=self.step + 1):
            examples = self._examples(rows)
            metrics = self.learner.update([examples], self.objective)
        self.step += 1
        seconds = time.monotonic() - start
        line = self._counted(metrics) | {
            "time/step": seconds,
            "throughput/tokens_per_s": sum(len(example.tokens) for example in examples) / seconds,
        }
        if self.data.held_out and self.is_due(self.config.evaluate_every_steps):
            line |= {f"evaluation/{name}": value for name, value in self._measure(self.data.held_out).items()}
        self.records.write_step(self.step, self.step, metrics=line)
        self.check_finite(metrics)
        self.save_if_due(needed=self.is_done)

    def _counted(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What is recorded of the learner's metrics."""
        return numbers(metrics)

    def _measure(self, rows: Sequence[Item]) -> dict[str, float]:
        """Loss and metrics over rows, without learning from them."""
        return self._counted(self.learner.loss(self._examples(rows), self.objective))

    def finish(self) -> dict[str, Any]:
        """Measure what the summary says, export the model, write summary and report."""
        return self._finish({"export": str(self.directory.export_folder)} | self._results())

    def _results(self) -> dict[str, Any]:
        """What the summary says besides where the export is."""
        return {}


Config = TypeVar("Config", bound=SupervisedConfig)


def train_supervised(
    config: Config, workflow: str, *, load: Callable[[Config], LearnedRows[Any]], kind: type[SupervisedRun[Any]]
) -> dict[str, Any]:
    """Train on the rows that `load` gives, as a run of this `kind`; returns the summary."""
    check_config(config)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    data = load(config)
    with RunDirectory.create(config.output_dir, dump_config(config), workflow) as directory:
        return _train(kind(config, data, directory=directory), checkpoint=None)


def resume_supervised(
    config: Config,
    directory: RunDirectory,
    checkpoint: Path | None,
    *,
    load: Callable[[Config], LearnedRows[Any]],
    kind: type[SupervisedRun[Any]],
) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return _train(kind(config, load(config), directory=directory), checkpoint=checkpoint)


def _train(run: SupervisedRun[Any], *, checkpoint: Path | None) -> dict[str, Any]:
    with run:
        start_or_restore(run, checkpoint)
        while not run.is_done:
            run.train_step()
        return run.finish()
