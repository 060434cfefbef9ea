"""Preference training: the learner on better and worse answers from data, without a reward and without generation.

The same learner, packing and invariants as everywhere else; a pair is never divided. What the loss compares with is
fixed before the step, over all ranks: the log-probs of the reference, and for KTO the reference point, the divergence
of the policy on mismatched answers. How a step is cut can therefore not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.cluster.session import ClusterSession
from slipstream.config.data import DataConfig
from slipstream.config.preference import PreferenceConfig
from slipstream.data.columns import Layout
from slipstream.data.labelled_answers import build_labelled_answers, labelled_example, mismatched_example
from slipstream.data.mixture import Mixture
from slipstream.data.preferences import answer_examples, build_preference_pairs
from slipstream.data.prompts import DropReport
from slipstream.data.trajectory import FloatArray, IntArray, TrainingExample
from slipstream.observe.logs import get_logger
from slipstream.observe.run_directory import RunDirectory
from slipstream.training.group import LearnerGroup
from slipstream.workflows.batch import with_weights
from slipstream.workflows.engines import start_preference_learner
from slipstream.workflows.learned_rows import LearnedRows, load_learned_rows
from slipstream.workflows.supervised_run import SupervisedRun, resume_supervised, train_supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.algorithms.objective import Objective

logger = get_logger("preference")


def train_preference(config: PreferenceConfig) -> dict[str, Any]:
    """Train a policy as `config` says; returns the summary that is also written to `summary.json`."""
    return train_supervised(config, "preference", load=load_answers, kind=PreferenceRun)


def resume_preference(config: PreferenceConfig, directory: RunDirectory, checkpoint: Path | None) -> dict[str, Any]:
    """Go on with an interrupted run from `checkpoint`; from the beginning if there is none."""
    return resume_supervised(config, directory, checkpoint, load=load_answers, kind=PreferenceRun)


class PreferenceRun(SupervisedRun["AnswerRow"]):
    """Preference training in progress."""

    config: PreferenceConfig

    def _set_up(self) -> None:
        super()._set_up()
        if self.config.needs_reference and not self.config.loads_reference:
            # The policy is still the model on disk here, in a resumed run too: that is the reference.
            with self.records.console.phase("computing the log-probs of the reference"):
                training = self.data.training
                parts = {name: self._with_cached_reference(part) for name, part in training.parts.items()}
                held_out = self._with_cached_reference(self.data.held_out)
            self._use(LearnedRows(Mixture(parts, training.weights), held_out))

    def _with_cached_reference(self, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
        """Batch by batch: one call has a deadline, which the whole of the data might not meet."""
        size = self.config.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [row for batch in batches for row in with_reference(batch, self.learner, role="policy")]

    def _objective(self) -> Objective:
        return make_objective(self.config)

    def _start_learner(self, session: ClusterSession) -> LearnerGroup:
        return start_preference_learner(session, self.config)

    def _examples(self, rows: Sequence[AnswerRow]) -> list[TrainingExample]:
        if self.config.loads_reference:
            rows = with_reference(rows, self.learner, role="reference")
        if not self.config.is_paired:
            rows = with_reference_point(rows, self.learner)
        return with_row_mean_weights(rows)

    def _results(self) -> dict[str, Any]:
        """Measure the held-out rows once more."""
        results: dict[str, Any] = {"loss": self.config.loss}
        if self.data.held_out:
            with self.records.console.phase("measuring the held-out rows"):
                measured = self._measure(self.data.held_out)
            results |= {name: measured[name] for name in ("accuracy", "reward_margin")}
        return results


def make_objective(config: PreferenceConfig) -> Objective:
    """What the learner is to minimize."""
    # Only here: it imports torch, and bad input is to be refused at once.
    from slipstream.algorithms.preference_loss import PairObjective, UnpairedObjective

    if config.loss == "kto":
        return UnpairedObjective(
            beta=config.beta,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
    return PairObjective(
        loss=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        target_margin=config.target_margin,
        sft_coefficient=config.sft_coefficient,
    )


@dataclass(frozen=True)
class AnswerRow:
    """The examples that a row of the data is learned from: those of a pair, or one.

    `mismatched` is what KTO measures the divergence on: the prompt with the answer to another one.
    """

    examples: tuple[TrainingExample, ...]
    mismatched: TrainingExample | None = None

    @property
    def tokens(self) -> IntArray:
        """What tells the row from others: all its sequences, one after the other."""
        return np.concatenate([example.tokens for example in self.all_examples])

    @property
    def all_examples(self) -> tuple[TrainingExample, ...]:
        """Those to learn from and the one to measure on."""
        return self.examples if self.mismatched is None else (*self.examples, self.mismatched)


def load_answers(config: PreferenceConfig) -> LearnedRows[AnswerRow]:
    """Load and tokenize all rows; rows that are held out are dropped from training. Says what was dropped and why.

    Raises DataError, ModelError or ConfigError: call it before a run directory is made.
    """

    def build_pairs(
        data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[AnswerRow], DropReport]:
        pairs, report = build_preference_pairs(data, tokenizer, config.max_tokens, exclude=exclude, id_prefix=id_prefix)
        return [AnswerRow(tuple(answer_examples(pair))) for pair in pairs], report

    def build_single(
        data: DataConfig, tokenizer: PreTrainedTokenizerBase, exclude: frozenset[str], id_prefix: str
    ) -> tuple[list[AnswerRow], DropReport]:
        compared, report = build_labelled_answers(
            data, tokenizer, config.max_tokens, exclude=exclude, id_prefix=id_prefix
        )
        desirable = sum(each.answer.is_desirable for each in compared)
        logger.info(f"{desirable} answers are desirable, {len(compared) - desirable} undesirable")
        return [AnswerRow((labelled_example(each.answer),), mismatched_example(each)) for each in compared], report

    if config.is_paired:
        return load_learned_rows(config, Layout.PAIRS, build_pairs, noun="pairs")
    return load_learned_rows(config, Layout.LABELLED_ANSWERS, build_single, noun="answers")


def with_reference(rows: Sequence[AnswerRow], learner: LearnerGroup, *, role: str) -> list[AnswerRow]:
    """Rows whose examples have the field `reference_log_probs`, as the learner's `role` computes them now."""
    found = learner.log_probs(role, [example for row in rows for example in row.examples])
    if rows and rows[0].mismatched is not None:
        found |= learner.log_probs(role, _mismatched(rows))

    def completed(example: TrainingExample) -> TrainingExample:
        return _with_field(example, "reference_log_probs", found[example.example_id])

    return [
        AnswerRow(
            tuple(completed(example) for example in row.examples),
            None if row.mismatched is None else completed(row.mismatched),
        )
        for row in rows
    ]


def with_reference_point(rows: Sequence[AnswerRow], learner: LearnerGroup) -> list[AnswerRow]:
    """Rows whose examples have the field `reference_point`: z_0 of KTO (arXiv 2402.01306), one number for the step.

    max(0, mean over the rows of log policy(y' | x) - log reference(y' | x)), with y' an answer to another prompt: an
    estimate of the KL divergence of the policy from the reference.
    """
    mismatched = _mismatched(rows)
    log_probs = learner.log_probs("policy", mismatched)
    log_ratios = [
        np.sum(
            log_probs[example.example_id].astype(np.float64)
            - example.token_fields["reference_log_probs"][example.loss_mask]
        )
        for example in mismatched
    ]
    # Not max(): it would turn a NaN into 0.
    reference_point = np.maximum(np.float32(0), np.float32(np.mean(log_ratios)))
    return [
        replace(row, examples=tuple(_with_field(each, "reference_point", reference_point) for each in row.examples))
        for row in rows
    ]


def with_row_mean_weights(rows: Sequence[AnswerRow]) -> list[TrainingExample]:
    """The examples of an optimizer step, weighted so that every row counts the same, whatever its length.

    The loss of a row stands at each of its loss tokens, so each weighs 1 / (rows * loss tokens of the row).
    """
    from slipstream.algorithms.aggregation import aggregation_weights

    counts = [sum(int(example.loss_mask.sum()) for example in row.examples) for row in rows]
    weights = aggregation_weights(counts, aggregation="sequence_mean_token_mean")
    return [
        example
        for row, weight in zip(rows, weights, strict=True)
        for example in with_weights(row.examples, [weight] * len(row.examples))
    ]


def _mismatched(rows: Sequence[AnswerRow]) -> list[TrainingExample]:
    return [row.mismatched for row in rows if row.mismatched is not None]


def _with_field(example: TrainingExample, name: str, values: FloatArray | np.float32) -> TrainingExample:
    """The example with a further field: a value for each loss token, or one for all."""
    # Nothing reads a field outside of the loss mask.
    whole = np.full(len(example.tokens), np.nan, dtype=np.float32)
    whole[example.loss_mask] = values
    return replace(example, token_fields={**example.token_fields, name: whole})
