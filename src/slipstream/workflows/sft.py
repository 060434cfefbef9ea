"""Supervised fine-tuning: the learner on responses from data, without generation.

The same learner, packing and invariants as in RL; only the objective and the source of the examples differ.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.data import DataConfig
from slipstream.config.loader import dump_config
from slipstream.config.schema import SFTConfig
from slipstream.data.columns import Layout
from slipstream.data.conversation import build_sft_examples
from slipstream.data.mixture import MixtureCursor
from slipstream.data.prompts import DropReport
from slipstream.data.tokenizer import require_same_tokens
from slipstream.data.trajectory import TrainingExample
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_sft_learner
from slipstream.workflows.learned_rows import LearnedRows, load_learned_rows
from slipstream.workflows.training_run import TrainingRun, numbers, start_or_restore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.algorithms.objective import Objective

logger = get_logger("sft")


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a model as `config` says; returns the summary that is also written to `summary.json`."""
    check_config(config)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    data = load_sft_data(config)
    with RunDirectory.create(config.output_dir, dump_config(config), "sft") as directory:
        return _train(config, data, directory=directory, checkpoint=None)


def resume_sft(config: SFTConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return _train(config, load_sft_data(config), directory=directory, checkpoint=checkpoint)


def _train(
    config: SFTConfig, data: LearnedRows[TrainingExample], *, directory: RunDirectory, checkpoint: Path | None
) -> dict[str, Any]:
    with SFTRun(config, data, directory=directory) as run:
        start_or_restore(run, checkpoint)
        while not run.is_done:
            run.train_step()
        return run.finish()


class SFTRun(TrainingRun):
    """A supervised run in progress."""

    config: SFTConfig

    def __init__(self, config: SFTConfig, data: LearnedRows[TrainingExample], *, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.config = config
        self.held_out = data.held_out
        self.cursor = MixtureCursor(data.training, seed=config.seed, shuffle=config.data.shuffle)
        self._is_good_enough = False

    def _set_up(self) -> None:
        self.objective = make_objective(self.config)
        self.records = self._open_records("sft")
        session = self._open_session()
        with self.records.console.phase("starting the learner"):
            self.learner = start_sft_learner(session, self.config)

    def _state(self) -> dict[str, Any]:
        return {"cursor": self.cursor.state(), "is_good_enough": self._is_good_enough}

    def _restore_state(self, state: dict[str, Any]) -> list[str]:
        self._is_good_enough = state["is_good_enough"]
        return self.cursor.restore(state["cursor"])

    @property
    def is_done(self) -> bool:
        """Whether all steps are done, or the held-out loss is as low as it was to become."""
        return self.step >= self.config.steps or self._is_good_enough

    def train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        start = time.monotonic()
        rows = self.cursor.take(self.config.batch_size)
        examples = with_token_mean_weights([row.item for row in rows])
        with self.records.timeline.span("controller", "train", step=self.step + 1):
            metrics = self.learner.update([examples], self.objective)
        self.step += 1
        seconds = time.monotonic() - start
        line = numbers(metrics) | {
            "time/step": seconds,
            "throughput/tokens_per_s": sum(len(example.tokens) for example in examples) / seconds,
        }
        if self.held_out and self.is_due(self.config.evaluate_every_steps):
            held_out = self.learner.loss(with_token_mean_weights(self.held_out), self.objective)
            measured = ("loss", "divergence", "cross_entropy")
            line |= {f"evaluation/{name}": held_out[name] for name in measured if name in held_out}
            target = self.config.stop_at_loss
            self._is_good_enough = target is not None and held_out["loss"] <= target
        self.records.write_step(self.step, self.step, metrics=line)
        self.check_finite(metrics)
        self.save_if_due(needed=self._is_good_enough)
        if self._is_good_enough and self.step < self.config.steps:
            logger.info(f"stop_at_loss {self.config.stop_at_loss} is reached after {self.step} steps")

    def finish(self) -> dict[str, Any]:
        """Export the model, write summary and report."""
        return self._finish("sft", {"export": str(self.directory.export_folder)})


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
