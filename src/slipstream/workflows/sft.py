"""Supervised fine-tuning: the learner on responses from data, without generation.

The same learner, packing and invariants as in RL; only the objective and the source of the examples differ.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from slipstream.cluster.session import ClusterSession, terminate_as_interrupt
from slipstream.config.loader import dump_config
from slipstream.config.schema import SFTConfig
from slipstream.data.conversation import build_sft_examples
from slipstream.data.cursor import RowCursor
from slipstream.data.prompts import evaluation_identities
from slipstream.data.tokenizer import load_tokenizer
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import TrainingError
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.training.group import LearnerGroup
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_sft_learner
from slipstream.workflows.records import RunRecords
from slipstream.workflows.rl_run import CONTROLLER_STATE, SKIPPED_STEPS_BEFORE_STOP, is_due

logger = get_logger("sft")


def train_sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tune a model as `config` says; returns the summary that is also written to `summary.json`."""
    check_config(config)
    with RunDirectory.create(config.output_dir, dump_config(config), "sft") as directory:
        return resume_sft(config, directory, None)


def resume_sft(config: SFTConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    with SFTRun(config, directory) as run:
        if checkpoint is None:
            run.records.begin()
        else:
            run.restore(checkpoint)
        while run.step < config.steps:
            run.train_step()
        return run.finish()


class SFTRun:
    """A supervised run in progress: entered to start the learner, left to stop it."""

    learner: LearnerGroup

    def __init__(self, config: SFTConfig, directory: RunDirectory) -> None:
        self.config = config
        self.directory = directory
        self.step = 0
        self._elapsed_before_s = 0.0
        self._skipped_in_a_row = 0
        self._started = time.monotonic()
        self._stack = ExitStack()

    def __enter__(self) -> SFTRun:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _set_up(self) -> None:
        # Only here: it imports torch, and bad input is to be refused at once.
        from slipstream.algorithms.objective import SupervisedObjective

        config, enter = self.config, self._stack.enter_context
        enter(terminate_as_interrupt())
        examples, self.held_out = _load_examples(config)
        self.objective = SupervisedObjective()
        self.cursor = RowCursor(examples, seed=config.seed, shuffle=config.data.shuffle)
        self.records = enter(
            RunRecords(
                self.directory, config.tracking, title="sft", total_steps=config.steps, keep=config.checkpoint.keep
            )
        )
        session = enter(ClusterSession(config.cluster, log_folder=self.directory.path / "logs"))
        with self.records.console.phase("starting the learner"):
            self.learner = start_sft_learner(session, config)

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        state = json.loads((checkpoint / CONTROLLER_STATE).read_text(encoding="utf-8"))
        self.step, self._elapsed_before_s = state["step"], state["elapsed_s"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.records.restore(step=self.step, ledger_state=state["ledger"])
        warning = self.cursor.restore(state["cursor"])
        if warning:
            logger.warning(warning)
        self.learner.load(checkpoint / "learner")
        logger.info("resumed", step=self.step, checkpoint=str(checkpoint))

    def train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        start = time.monotonic()
        rows = self.cursor.take(self.config.batch_size)
        examples = with_token_mean_weights([row.item for row in rows])
        with self.records.timeline.span("controller", "train", step=self.step + 1):
            metrics = self.learner.update([examples], self.objective)
        self.step += 1
        self._check_finite(metrics)
        seconds = time.monotonic() - start
        line = {name: value for name, value in metrics.items() if name not in ("nonfinite_examples", "seconds")}
        line |= {
            "time/step": seconds,
            "throughput/tokens_per_s": sum(len(example.tokens) for example in examples) / seconds,
        }
        if self.held_out and is_due(self.step, self.config.evaluate_every_steps, last=self.config.steps):
            held_out = self.learner.loss(with_token_mean_weights(self.held_out), self.objective)
            line["evaluation/loss"] = held_out["loss"]
        self.records.write_step(self.step, self.step, metrics=line)
        if is_due(self.step, self.config.checkpoint.every_steps, last=self.config.steps):
            self._save()

    def finish(self) -> dict[str, Any]:
        """Export the model, write summary and report."""
        with self.records.console.phase("exporting the model"):
            self.learner.export(self.directory.export_folder)
        return self.records.finish(
            {
                "workflow": "sft",
                "seconds": round(self._elapsed_s(), 1),
                "steps": self.step,
                "run_dir": str(self.directory.path),
                "export": str(self.directory.export_folder),
            }
        )

    def _save(self) -> None:
        def write(folder: Path) -> None:
            self.learner.save(folder / "learner")
            state = {
                "step": self.step,
                "skipped_in_a_row": self._skipped_in_a_row,
                "elapsed_s": self._elapsed_s(),
                "cursor": self.cursor.state(),
                "ledger": self.records.ledger.state(),
            }
            (folder / CONTROLLER_STATE).write_text(json.dumps(state), encoding="utf-8")

        self.records.save_checkpoint(self.step, write)

    def _check_finite(self, metrics: dict[str, Any]) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["skipped"] else 0
        if metrics["skipped"]:
            culprits = ", ".join(metrics["nonfinite_examples"][:3])
            logger.warning("step skipped: the loss is not finite", step=self.step, examples=culprits)
            if self._skipped_in_a_row >= SKIPPED_STEPS_BEFORE_STOP:
                raise TrainingError(
                    f"the loss was not finite in {SKIPPED_STEPS_BEFORE_STOP} steps in a row (last: step {self.step}, "
                    f"examples {culprits}); lower training.learning_rate, or look at these rows"
                )

    def _elapsed_s(self) -> float:
        return self._elapsed_before_s + time.monotonic() - self._started


def _load_examples(config: SFTConfig) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """Training and held-out examples; rows that are held out are dropped from training."""
    tokenizer = load_tokenizer(config.model.path)
    held_out: list[TrainingExample] = []
    excluded: frozenset[str] = frozenset()
    if config.evaluation_data is not None:
        held_out, report = build_sft_examples(config.evaluation_data, tokenizer, config.max_tokens)
        excluded = evaluation_identities(config.evaluation_data)
        logger.info(f"held-out rows: {report}")
    examples, report = build_sft_examples(config.data, tokenizer, config.max_tokens, exclude=excluded)
    logger.info(f"training rows: {report}")
    return examples, held_out
