"""Supervised fine-tuning: the learner on responses from data, without generation.

The same learner, packing and invariants as in RL; only the objective and the source of the examples differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cluster.session import ClusterSession
from slipstream.config.data import DataConfig
from slipstream.config.schema import SFTConfig
from slipstream.data.columns import Layout
from slipstream.data.conversation import build_sft_examples
from slipstream.data.prompts import DropReport
from slipstream.data.tokenizer import require_same_tokens
from slipstream.data.trajectory import TrainingExample
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.training.group import LearnerGroup
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.engines import start_sft_learner
from slipstream.workflows.learned_rows import LearnedRows, load_learned_rows
from slipstream.workflows.supervised_run import SupervisedRun, resume_supervised, train_supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.algorithms.objective import Objective

MEASURED = ("loss", "divergence", "cross_entropy")
"""What is recorded of held-out rows; the last two where there is a teacher."""

logger = get_logger("sft")


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a model as `config` says; returns the summary that is also written to `summary.json`."""
    return train_supervised(config, "sft", load=load_sft_data, kind=SFTRun)


def resume_sft(config: SFTConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return resume_supervised(config, directory, checkpoint, load=load_sft_data, kind=SFTRun)


class SFTRun(SupervisedRun[TrainingExample]):
    """Supervised fine-tuning in progress."""

    config: SFTConfig

    def __init__(self, config: SFTConfig, data: LearnedRows[TrainingExample], *, directory: RunDirectory) -> None:
        super().__init__(config, data, directory=directory)
        self._is_good_enough = False

    def _objective(self) -> Objective:
        return make_objective(self.config)

    def _start_learner(self, session: ClusterSession) -> LearnerGroup:
        return start_sft_learner(session, self.config)

    def _examples(self, rows: Sequence[TrainingExample]) -> list[TrainingExample]:
        return with_token_mean_weights(rows)

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"is_good_enough": self._is_good_enough}

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        self._is_good_enough = state["is_good_enough"]
        return super()._restore_state(state)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or the held-out loss is as low as it was to become."""
        return super().is_done or self._is_good_enough

    def _measure(self, rows: Sequence[TrainingExample]) -> dict[str, float]:
        measured = super()._measure(rows)
        target = self.config.stop_at_loss
        self._is_good_enough = target is not None and measured["loss"] <= target
        return {name: measured[name] for name in MEASURED if name in measured}

    def finish(self) -> dict[str, Any]:
        """Say why it ended early, if it did; export the model, write summary and report."""
        if self.step < self.config.steps:
            logger.info(f"stop_at_loss {self.config.stop_at_loss} is reached after {self.step} steps")
        return super().finish()


def make_objective(config: SFTConfig) -> Objective:
    """What the learner is to minimize: cross-entropy, or with a teacher the divergence from it."""
    # Only here: it imports torch, and bad input is to be refused at once.
    from slipstream.algorithms.objective import DistillationObjective, SupervisedObjective

    if config.teacher is None:
        return SupervisedObjective()
    return DistillationObjective(coefficient=config.teacher.coefficient, temperature=config.teacher.temperature)


def load_sft_data(config: SFTConfig) -> LearnedRows[TrainingExample]:
    """Load and tokenize all rows; rows that are held out are dropped from training. Says what was dropped and why.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    if config.teacher is not None:
        require_same_tokens(config.teacher.path, config.model.path, key="teacher.path", exactly=True)

    def build(
        data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[TrainingExample], DropReport]:
        return build_sft_examples(
            data,
            tokenizer,
            config.max_tokens,
            exclude=exclude,
            only_last_turn=config.loss_turns == "last",
            id_prefix=id_prefix,
        )

    return load_learned_rows(config, Layout.RESPONSES, build, noun="rows")
