"""Training a reward model: the learner on pairs of a better and a worse answer, without generation.

The same learner, packing and invariants as everywhere else; a pair is never divided. What is exported is a Hugging Face
sequence-classification model with one label, with the mean and the standard deviation of its scores beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.loader import dump_config
from slipstream.config.reward_model import SCORE_MOMENTS, RewardModelConfig
from slipstream.data.cursor import RowCursor
from slipstream.data.preferences import PreferencePair, build_preference_pairs, pair_examples
from slipstream.data.prompts import evaluation_identities
from slipstream.data.tokenizer import load_tokenizer
from slipstream.observe.files import write_json_atomically
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.workflows.batch import with_token_mean_weights
from slipstream.workflows.checks import check_config
from slipstream.workflows.engines import start_reward_model_learner
from slipstream.workflows.training_run import TrainingRun, numbers, start_or_restore

WORKFLOW = "reward-model"
MEASURED_PAIRS = 1000
"""Training pairs whose scores are measured at the end where no pairs are held out."""

logger = get_logger(WORKFLOW)


def train_reward_model(config: RewardModelConfig) -> dict[str, Any]:
    """Train a reward model as `config` says; returns the summary that is also written to `summary.json`."""
    check_config(config)
    # Before there is a run directory: data that cannot be used leaves nothing behind.
    data = load_preference_data(config)
    with RunDirectory.create(config.output_dir, dump_config(config), WORKFLOW) as directory:
        return _train(config, data, directory=directory, checkpoint=None)


def resume_reward_model(config: RewardModelConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return _train(config, load_preference_data(config), directory=directory, checkpoint=checkpoint)


def _train(
    config: RewardModelConfig, data: PreferenceData, *, directory: RunDirectory, checkpoint: Path | None
) -> dict[str, Any]:
    with RewardModelRun(config, data, directory=directory) as run:
        start_or_restore(run, checkpoint)
        while run.step < config.steps:
            run.train_step()
        return run.finish()


class RewardModelRun(TrainingRun):
    """The training of a reward model in progress."""

    config: RewardModelConfig

    def __init__(self, config: RewardModelConfig, data: PreferenceData, *, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.config = config
        self._data = data
        self.cursor = RowCursor(data.training, seed=config.seed, shuffle=config.data.shuffle)

    def _set_up(self) -> None:
        # Only here: it imports torch, and bad input is to be refused at once.
        from slipstream.algorithms.reward_model_loss import RewardModelObjective

        self.objective = RewardModelObjective(margin=self.config.margin, label_smoothing=self.config.label_smoothing)
        self.records = self._open_records(WORKFLOW)
        session = self._open_session()
        with self.records.console.phase("starting the learner"):
            self.learner = start_reward_model_learner(session, self.config)

    def _state(self) -> dict[str, Any]:
        return {"cursor": self.cursor.state()}

    def _restore_state(self, state: dict[str, Any]) -> str | None:
        return self.cursor.restore(state["cursor"])

    def train_step(self) -> None:
        """One optimizer step, and what is due after it."""
        start = time.monotonic()
        pairs = [draw.item for draw in self.cursor.take(self.config.batch_size)]
        with self.records.timeline.span("controller", "train", step=self.step + 1):
            metrics = self.learner.update([_weighted(pairs)], self.objective)
        self.step += 1
        seconds = time.monotonic() - start
        line = _of_pairs(metrics) | {
            "time/step": seconds,
            "throughput/tokens_per_s": sum(len(pair.tokens) for pair in pairs) / seconds,
        }
        if self._data.held_out and self.is_due(self.config.evaluate_every_steps):
            line |= {f"evaluation/{name}": value for name, value in self._measure(self._data.held_out).items()}
        self.records.write_step(self.step, self.step, metrics=line)
        self.check_finite(metrics)
        self.save_if_due()

    def finish(self) -> dict[str, Any]:
        """Measure once more, export the model, write summary and report."""
        held_out = self._data.held_out
        with self.records.console.phase("measuring the scores"):
            measured = self._measure(held_out or self._data.training[:MEASURED_PAIRS])
        self._moments = {"mean": measured["score_mean"], "std": measured["score_std"]}
        results = {"export": str(self.directory.export_folder), SCORE_MOMENTS: self._moments}
        return self._finish(WORKFLOW, results | ({"accuracy": measured["accuracy"]} if held_out else {}))

    def _measure(self, pairs: Sequence[PreferencePair]) -> dict[str, float]:
        """Loss, accuracy and scores over pairs, without learning from them."""
        return _of_pairs(self.learner.loss(_weighted(pairs), self.objective))

    def _export(self, folder: Path) -> None:
        super()._export(folder)
        tokenizer = load_tokenizer(self.config.model.path)
        ends = {int(tokens[-1]) for pair in self._data.training for tokens in (pair.chosen, pair.rejected)}
        complete_model_config(folder, self._moments, padding_token=tokenizer.pad_token_id, end_tokens=ends)


def complete_model_config(
    folder: Path, moments: dict[str, float], *, padding_token: int | None, end_tokens: set[int]
) -> None:
    """Write into the config.json of an exported reward model what only its training knows.

    The moments of its scores, and the padding token. Transformers scores a padded sequence at its last token that is no
    padding; where answers end with that very token it would read another place, so there is no padding token then, and
    Transformers takes sequences one by one.
    """
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings |= {SCORE_MOMENTS: moments, "pad_token_id": None if padding_token in end_tokens else padding_token}
    write_json_atomically(file, settings)


@dataclass(frozen=True)
class PreferenceData:
    """Pairs to train on, and pairs that are held out (perhaps none)."""

    training: list[PreferencePair]
    held_out: list[PreferencePair]


def load_preference_data(config: RewardModelConfig) -> PreferenceData:
    """Load and tokenize all pairs; rows that are held out are dropped from training. Says what was dropped and why.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """
    tokenizer = load_tokenizer(config.model.path)
    held_out: list[PreferencePair] = []
    excluded: frozenset[str] = frozenset()
    if config.evaluation_data is not None:
        held_out, report = build_preference_pairs(config.evaluation_data, tokenizer, config.max_tokens)
        excluded = evaluation_identities(config.evaluation_data)
        logger.info(f"held-out pairs: {report}")
    training, report = build_preference_pairs(config.data, tokenizer, config.max_tokens, exclude=excluded)
    logger.info(f"training pairs: {report}")
    return PreferenceData(training, held_out)


def _weighted(pairs: Sequence[PreferencePair]) -> Any:
    """The examples of pairs that all weigh the same in one optimizer step."""
    return with_token_mean_weights(pair_examples(pairs))


def _of_pairs(metrics: dict[str, Any]) -> dict[str, float]:
    """The learner's metrics, counted in pairs: each has two loss tokens."""
    found = numbers(metrics)
    return {"pairs": found.pop("tokens") / 2, **found}
