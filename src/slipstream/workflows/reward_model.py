"""Training a reward model: the learner on pairs of answers or on labelled steps, without generation.

The same learner, packing and invariants as everywhere else. From pairs of a better and a worse answer comes a model
that scores answers, exported as a Hugging Face sequence-classification model with one label; from answers whose steps
have labels comes a process reward model, a token-classification model with one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.session import ClusterSession
from slipstream.config.reward_model import RewardModelConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.observe.run_directory import RunDirectory
from slipstream.observe.scores import write_scores
from slipstream.training.group import LearnerGroup
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.engines import start_reward_model_learner
from slipstream.workflows.learned_rows import LearnedRows, load_learned_rows
from slipstream.workflows.supervised_run import SupervisedRun, resume_supervised, train_supervised
from slipstream.workflows.supervision import supervision_of

if TYPE_CHECKING:
    from slipstream.algorithms.objective import Objective

MEASURED_ITEMS = 1000
"""Training pairs or answers whose scores are measured at the end where none are held out."""


def train_reward_model(config: RewardModelConfig) -> dict[str, Any]:
    """Train a reward model as `config` says; returns the summary that is also written to `summary.json`."""
    return train_supervised(config, "reward-model", load=load_reward_model_data, kind=RewardModelRun)


def resume_reward_model(config: RewardModelConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return resume_supervised(config, directory, checkpoint, load=load_reward_model_data, kind=RewardModelRun)


class RewardModelRun(SupervisedRun[Any]):
    """The training of a reward model in progress. A row is a pair, or an answer."""

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, data: LearnedRows[Any], *, directory: RunDirectory) -> None:
        super().__init__(config, data, directory=directory)
        self._supervision = supervision_of(config)

    def _objective(self) -> Objective:
        return self._supervision.objective()

    def _start_learner(self, session: ClusterSession) -> LearnerGroup:
        return start_reward_model_learner(session, self.config)

    def _examples(self, rows: Sequence[Any]) -> list[TrainingExample]:
        """All pairs, or all steps of answers, weigh the same."""
        return with_token_mean_weights(self._supervision.examples(rows))

    def _counted(self, metrics: dict[str, Any]) -> dict[str, float]:
        return self._supervision.counted(super()._counted(metrics))

    def _results(self) -> dict[str, Any]:
        """Measure once more, and write the scores."""
        held_out = self.data.held_out
        measured_items = held_out or self.data.training.items[:MEASURED_ITEMS]
        with self.records.console.phase("measuring the scores"):
            measured = self._measure(measured_items)
            scores = self.learner.scores(self._supervision.examples(measured_items))
        write_scores(self.directory.scores_path, self._supervision.scored(measured_items, scores))
        self._measured = self._supervision.results(measured)
        return self._measured | ({"accuracy": measured["accuracy"]} if held_out else {})

    def _export(self, folder: Path) -> None:
        super()._export(folder)
        self._supervision.complete_export(folder, self.data.training.items, self._measured)


def load_reward_model_data(config: RewardModelConfig) -> LearnedRows[Any]:
    """Load and tokenize all rows; those that are held out are dropped from training. Says what was dropped and why.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    supervision = supervision_of(config)
    return load_learned_rows(config, supervision.layout, supervision.build, noun=supervision.items_name)
