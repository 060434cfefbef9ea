"""Training a reward model: the learner on pairs of answers or on labelled steps, without generation.

The same learner, packing and invariants as everywhere else. From pairs of a better and a worse answer comes a model
that scores answers, exported as a Hugging Face sequence-classification model with one label; from answers whose steps
have labels comes a process reward model, a token-classification model with one label.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.config.loader import dump_config
from slipstream.config.reward_model import RewardModelConfig
from slipstream.data.mixture import MixtureCursor
from slipstream.observe.run_directory import RunDirectory
from slipstream.observe.scores import write_scores
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_reward_model_learner
from slipstream.workflows.learned_rows import LearnedRows, load_learned_rows
from slipstream.workflows.supervision import supervision_of
from slipstream.workflows.training_run import TrainingRun, numbers, start_or_restore

WORKFLOW = "reward-model"
MEASURED_ITEMS = 1000
"""Training pairs or answers whose scores are measured at the end where none are held out."""


def train_reward_model(config: RewardModelConfig) -> dict[str, Any]:
    """Train a reward model as `config` says; returns the summary that is also written to `summary.json`."""
    check_config(config)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    data = load_reward_model_data(config)
    with RunDirectory.create(config.output_dir, dump_config(config), WORKFLOW) as directory:
        return _train(config, data, directory=directory, checkpoint=None)


def resume_reward_model(config: RewardModelConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return _train(config, load_reward_model_data(config), directory=directory, checkpoint=checkpoint)


def _train(
    config: RewardModelConfig, data: LearnedRows[Any], *, directory: RunDirectory, checkpoint: Path | None
) -> dict[str, Any]:
    with RewardModelRun(config, data, directory=directory) as run:
        start_or_restore(run, checkpoint)
        while run.step < config.steps:
            run.train_step()
        return run.finish()


class RewardModelRun(TrainingRun):
    """The training of a reward model in progress."""

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, data: LearnedRows[Any], *, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.config = config
        self._data = data
        self._supervision = supervision_of(config)
        self.cursor = MixtureCursor(data.training, seed=config.seed, shuffle=config.data.shuffle)

    def _set_up(self) -> None:
        self.objective = self._supervision.objective()
        self.records = self._open_records(WORKFLOW)
        session = self._open_session()
        with self.records.console.phase("starting the learner"):
            self.learner = start_reward_model_learner(session, self.config)

    def _state(self) -> dict[str, Any]:
        return {"cursor": self.cursor.state()}

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        return self.cursor.restore(state["cursor"])

    def train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        start = time.monotonic()
        items = [draw.item for draw in self.cursor.take(self.config.batch_size)]
        with self.records.timeline.span("controller", "train", step=self.step + 1):
            metrics = self.learner.update([self._weighted(items)], self.objective)
        self.step += 1
        seconds = time.monotonic() - start
        line = self._supervision.counted(numbers(metrics)) | {
            "time/step": seconds,
            "throughput/tokens_per_s": sum(len(item.tokens) for item in items) / seconds,
        }
        if self._data.held_out and self.is_due(self.config.evaluate_every_steps):
            line |= {f"evaluation/{name}": value for name, value in self._measure(self._data.held_out).items()}
        self.records.write_step(self.step, self.step, metrics=line)
        self.check_finite(metrics)
        self.save_if_due()

    def finish(self) -> dict[str, Any]:
        """Measure once more, write the scores, export the model, write summary and report."""
        held_out = self._data.held_out
        measured_items = held_out or self._data.training.items[:MEASURED_ITEMS]
        with self.records.console.phase("measuring the scores"):
            measured = self._measure(measured_items)
            scores = self.learner.scores(self._supervision.examples(measured_items))
        write_scores(self.directory.scores_path, self._supervision.scored(measured_items, scores))
        self._results = self._supervision.results(measured)
        results = {"export": str(self.directory.export_folder), **self._results}
        return self._finish(WORKFLOW, results | ({"accuracy": measured["accuracy"]} if held_out else {}))

    def _measure(self, items: Sequence[Any]) -> dict[str, float]:
        """Loss, accuracy and more over pairs or answers, without learning from them."""
        return self._supervision.counted(numbers(self.learner.loss(self._weighted(items), self.objective)))

    def _weighted(self, items: Sequence[Any]) -> Any:
        """Examples of one optimizer step in which all pairs, or all steps of answers, weigh the same."""
        return with_token_mean_weights(self._supervision.examples(items))

    def _export(self, folder: Path) -> None:
        super()._export(folder)
        self._supervision.complete_export(folder, self._data.training.items, self._results)


def load_reward_model_data(config: RewardModelConfig) -> LearnedRows[Any]:
    """Load and tokenize all rows; those that are held out are dropped from training. Says what was dropped and why.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    supervision = supervision_of(config)
    return load_learned_rows(config, supervision.layout, supervision.build, noun=supervision.items_name)
